/* Empty: a compiler option includes a public header before it. */
typedef int not_an_empty_file;
