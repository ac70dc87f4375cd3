"""The pages are true where a machine can tell: code, links, folders and length."""

import re
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tools"), str(ROOT / "python/te_attention")]
import environment  # noqa: E402
import report  # noqa: E402

import checks  # noqa: E402
import support  # noqa: E402

PAGES = [ROOT / "README.md", ROOT / "bench/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LIMITS = {"README.md": 150, "docs/performance.md": 120, "docs/kernels/*.md": 150}  # lines


def blocks(page, mark):
    """(what the comment says, text) of every fenced block after a comment that matches `mark`."""
    fenced = rf"<!-- ({mark}) -->\n```[a-z]*\n(.*?)```\n"
    return re.findall(fenced, page.read_text(), flags=re.DOTALL)


class Pages(unittest.TestCase):
    def test_code_is_taken_from_an_example(self):
        for page in PAGES:
            for name, code in blocks(page, r"examples/\S+"):
                with self.subTest(page=page.name, example=name):
                    self.assertIn(code, (ROOT / name).read_text())

    def test_all_code_of_the_readme_is(self):
        text = (ROOT / "README.md").read_text()
        fences = re.findall(r"^```(?:c|cpp|python)$", text, re.MULTILINE)
        self.assertGreater(len(fences), 0)
        self.assertEqual(len(fences), len(blocks(ROOT / "README.md", r"examples/\S+")))

    def test_links_lead_somewhere(self):
        for page in PAGES:
            prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
            for target in re.findall(r"\]\(([^)#:]+)[^):]*\)", prose):
                with self.subTest(page=page.name, link=target):
                    self.assertTrue((page.parent / target).exists())

    def test_the_tree_of_the_readme_exists(self):
        ((_, tree),) = blocks(ROOT / "README.md", "tree")
        named = {line.split()[0] for line in tree.splitlines()}
        self.assertEqual([name for name in named if not (ROOT / name).is_dir()], [])

    def test_the_tree_of_the_readme_is_complete(self):
        ((_, tree),) = blocks(ROOT / "README.md", "tree")
        named = {line.split()[0] for line in tree.splitlines()}
        tracked = {p.relative_to(ROOT) for p in checks.project_files(ROOT)}
        folders = {f"{p.parts[0]}/" for p in tracked if len(p.parts) > 1}
        folders |= {f"src/{p.parts[1]}/" for p in tracked if p.parts[0] == "src" and p.parts[2:]}
        self.assertEqual(folders - named - {".ci/", "src/"}, set())

    def test_pages_are_short(self):
        for pattern, limit in LIMITS.items():
            for page in ROOT.glob(pattern):
                with self.subTest(page=page.name):
                    self.assertLessEqual(len(page.read_text().splitlines()), limit)

    def test_anchors_exist(self):
        for page in PAGES:
            for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
                other = page.parent / target if target else page
                heads = re.findall(r"^#+ (.+)$", other.read_text(), re.MULTILINE)
                slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}
                with self.subTest(page=page.name, anchor=anchor):
                    self.assertIn(anchor, slugs)

    def test_the_oracle_can_be_checked_at_a_glance(self):
        files = [ROOT / "tests" / "kit" / name for name in ("oracle.h", "oracle.cpp")]
        self.assertLessEqual(sum(len(f.read_text().splitlines()) for f in files), 255)


class GeneratedPages(unittest.TestCase):
    def test_performance_is_what_the_records_say(self):
        self.assertEqual(report.PAGE.read_text(), report.page(), "run bench/report.py")

    def test_environment_lists_the_variables_that_are_read(self):
        page = (ROOT / "docs/environment.md").read_text()
        _, library, packages = re.split(r"^<!-- .* -->\n", page, flags=re.MULTILINE)
        source = (ROOT / "src/core/env.cpp").read_text()
        row = r'\{Setting::\w+, "(\w+)", (?:nullptr, nullptr|"(\w+)", "(\w+)"),\s*"([^"]*)"\}'
        rows = [
            f"| `{name}`{f', or `{alias}={value}`' if alias else ''} | {meaning} |"
            for name, alias, value, meaning in re.findall(row, source)
        ]
        self.assertEqual(len(rows), source.count("{Setting::"))
        self.assertEqual(re.findall(r"^\| `.*", library, re.MULTILINE), rows)
        rows = [
            f"| `{name}` | {default} | {meaning} |"
            for name, (default, meaning) in environment.VARIABLES.items()
        ]
        self.assertEqual(re.findall(r"^\| `.*", packages, re.MULTILINE), rows)

    def test_the_environment_is_read_in_one_place_of_each_language(self):
        read = re.compile(r"\bgetenv\(|\bos\.(environ|getenv)\b")
        readers = [
            path.relative_to(ROOT).as_posix()
            for folder in ("src", "python")
            for path in sorted((ROOT / folder).rglob("*"))
            if path.suffix in checks.CPP | {".py"} and read.search(path.read_text())
        ]
        self.assertEqual(readers, ["src/core/env.cpp", "python/te_attention/environment.py"])

    def test_support_has_every_problem_of_the_list(self):
        rows = re.findall(r"^\| (.+?) \|", support.PAGE.read_text(), re.MULTILINE)
        self.assertEqual(rows[1:], [name for name, _ in support.problems()])

    def test_support_numbers_every_reason(self):
        page = support.PAGE.read_text()
        used = {int(n) for n in re.findall(r"no \((\d+)\)", page)}
        listed = [int(n) for n in re.findall(r"^(\d+)\. ", page, re.MULTILINE)]
        self.assertEqual(listed, sorted(used))
