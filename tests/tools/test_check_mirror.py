"""When check_mirror.py finds a source without a test of its own."""

from project import ProjectTest

import check_mirror


class Mirror(ProjectTest):
    def setUp(self):
        super().setUp()
        self.write("src/core/plan.h", "int plan(int);  // make()\nextern const int kAll;\n")
        self.write("src/core/plan.cpp", "int plan(int x) { return x; }\nconst int kAll = 1;\n")

    def test_needs_a_test_file(self):
        self.assertIn("needs tests/core/test_plan.cpp", check_mirror.check(self.root)[0])

    def test_takes_a_test_that_calls_a_function_or_reads_a_variable(self):
        for use in ("plan(1);", "int x = kAll;"):
            self.write("tests/core/test_plan.cpp", use + "\n")
            self.assertEqual(check_mirror.check(self.root), [])

    def test_refuses_a_test_of_something_else(self):
        for use in ("make(1);", "// plan(1) in a comment", "planner(2);"):
            self.write("tests/core/test_plan.cpp", use + "\n")
            self.assertIn("uses none of its functions", check_mirror.check(self.root)[0])

    def test_a_source_without_header_offers_what_the_public_headers_declare(self):
        (self.root / "src/core/plan.h").unlink()
        self.write("include/te_attention.h", "int plan(int);\nint other(int);\n")
        self.write("tests/core/test_plan.cpp", "other(1);\n")
        self.assertIn("uses none of its functions", check_mirror.check(self.root)[0])
        self.write("tests/core/test_plan.cpp", "plan(1);\n")
        self.assertEqual(check_mirror.check(self.root), [])
