/* Nothing of its own: the compiler is told to include a public header before it. */
typedef int not_an_empty_file;
