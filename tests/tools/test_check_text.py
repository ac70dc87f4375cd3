"""Which texts check_text.py takes and which it refuses."""

from project import ProjectTest

import check_text

# Built at run time, so that this file itself passes the check.
SLASH = "/"
LATER = "TO" + "DO"


class Text(ProjectTest):
    def found(self, name, text):
        self.write(name, text)
        return check_text.check(self.root)

    def test_takes(self):
        for name, text in [
            ("a.cpp", "int a;\n"),
            ("a.cpp", f"// {LATER}(ann): when the driver reports it\n"),
            ("a.cpp", "//\n" * check_text.MAX_LINES),
            ("a.md", "word " * 30 + "end\n"),
            ("Makefile", "all:\n\techo\n"),
            ("a.md", f"docs{SLASH}work{SLASH}x, https:{SLASH * 2}x.org{SLASH}home{SLASH}y\n"),
        ]:
            with self.subTest(name=name, text=text[:40]):
                self.assertEqual(self.found(name, text), [])

    def test_takes_other_terms_in_files_that_are_not_checked_and_in_code(self):
        for name, text in [
            ("bench/results/a.jsonl", '{"note": "the neighbours"}\n'),
            ("docs/a.md", "`bend` is a name\n```\nnobody\n```\n"),
            ("src/hopper/a.h", "// The store warp takes turned tiles.\n"),
        ]:
            with self.subTest(name=name):
                self.assertEqual(self.found(name, text), [])

    def test_refuses_terms_with_the_standard_one(self):
        for name, text, problem in [
            ("src/hopper/a.h", "// The Porter\n", "store warp"),
            ("docs/a.md", "a row and its neighbour\n", "adjacent"),
            ("tests/cpu/test_a.cpp", "// Rows that see nothing.\n", "attends to no key"),
            ("tools/a.py", "# What it takes.\n", "a noun"),
            ("docs/a.md", "the third run showed\n", "date and commit"),
            ("src/gpu/a.h", "// the copy engine\n", "TMA"),
            ("a.py", "def refuse_beside_segments():\n    pass\n", "next to"),
            ("a.cpp", "TEST(Thd, NonsenseIsReported) {}\n", "invalid"),
        ]:
            with self.subTest(name=name):
                self.assertIn(problem, "".join(self.found(name, text)))

    def test_refuses(self):
        for name, text, problem in [
            ("a.md", f"in {SLASH}home{SLASH}ann\n", "path of one machine"),
            ("a.sh", f"cd {SLASH}tmp{SLASH}x\n", "path of one machine"),
            ("a.cpp", "\tint a;\n", "tab"),
            ("a.py", "a = 1 \n", "white space"),
            ("a.cpp", f"// {LATER}: later\n", "without a name and a reason"),
            ("a.cpp", "x" * 101 + "\n", "101 columns"),
            ("a.py", "#\n" * (check_text.MAX_LINES + 1), "601 lines"),
            ("a.h", "int a;", "newline"),
            ("a.py", "def f():\n" + "    f()\n" * check_text.MAX_FUNCTION_LINES, "121 lines"),
        ]:
            with self.subTest(name=name, text=text[:40]):
                problems = self.found(name, text)
                self.assertEqual(len(problems), 1, problems)
                self.assertIn(problem, problems[0])
                (self.root / name).unlink()
