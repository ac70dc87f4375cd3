"""test_gpu.py reads what its tools say, and fails where they ran nothing or there is no GPU."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import test_gpu  # noqa: E402

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
FINDING = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at entry(Parameters)+0x10
=========
========= Invalid __global__ write of size 2 bytes
=========     at other(Parameters)+0x20
=========
========= ERROR SUMMARY: 2 errors
"""
HIDDEN = FINDING.replace("2 errors", "3 errors")
RACES = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 3 hazards displayed (3 errors)\n"


class Unexpected(unittest.TestCase):
    def test_a_clean_report_has_none(self):
        self.assertEqual(test_gpu.unexpected(CLEAN, []), [])
        races = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
        self.assertEqual(test_gpu.unexpected(races, []), [])

    def test_every_finding_counts(self):
        found = test_gpu.unexpected(FINDING, [])
        self.assertEqual([line.split()[2] for line in found], ["read", "write"])

    def test_the_allow_list_takes_out_what_it_matches(self):
        (left,) = test_gpu.unexpected(FINDING, [r"read of size 4 bytes\n.*at entry"])
        self.assertIn("write", left)

    def test_a_summary_that_counts_more_than_was_shown_is_one(self):
        self.assertEqual(len(test_gpu.unexpected(RACES, [])), 1)
        self.assertEqual(test_gpu.unexpected(HIDDEN, ["."]), ["ERROR SUMMARY: 3 errors"])

    def test_a_report_without_an_end_is_one(self):
        self.assertEqual(len(test_gpu.unexpected("========= COMPUTE-SANITIZER\n", [])), 1)


class Cudnn(unittest.TestCase):
    """An older cuDNN of the loader's was tested, and refused, where PyTorch has one of its own."""

    def preferred(self, scripts: dict[str, str], before: str) -> tuple[str, str]:
        """The text printed and the path set where the Pythons are these shell scripts."""
        with tempfile.TemporaryDirectory() as name:
            paths = [Path(name, script) for script in scripts]
            for path, text in zip(paths, scripts.values(), strict=True):
                path.write_text(f"#!/bin/sh\n{text}\n")
                path.chmod(0o755)
            with (
                mock.patch.object(test_gpu, "pythons", lambda: list(map(str, paths))),
                mock.patch.dict(os.environ, {"LD_LIBRARY_PATH": before}),
            ):
                return test_gpu.prefer_cudnn_of_torch(), os.environ["LD_LIBRARY_PATH"]

    def test_of_torch_comes_first(self):
        found = {"python": "echo /torch/lib/libcudnn.so.9"}
        self.assertEqual(self.preferred(found, "/opt/lib"), ("/torch/lib", "/torch/lib:/opt/lib"))
        self.assertEqual(self.preferred(found, ""), ("/torch/lib", "/torch/lib"))

    def test_of_the_loader_stays_where_torch_has_none(self):
        said = ("the loader's, if it has one", "/opt/lib")
        self.assertEqual(self.preferred({"no_torch": "exit 1", "no_cudnn": ""}, "/opt/lib"), said)
        self.assertEqual(self.preferred({}, "/opt/lib"), said)

    def test_a_python_without_pytest_is_asked(self):
        """GoogleTests of the engine cudnn need PyTorch's library, not pytest."""
        pythons = {
            "no_torch": "exit 1",
            "no_pytest": 'case "$*" in *pytest*) exit 1;; *) echo /torch/lib/libcudnn.so.9;; esac',
        }
        self.assertEqual(self.preferred(pythons, ""), ("/torch/lib", "/torch/lib"))

    def test_the_library_is_read_from_the_process(self):
        """The program that PyTorch's Python runs, with a module torch that loads nothing."""
        with tempfile.TemporaryDirectory() as name:
            library = Path(name, "libcudnn.so.9")
            library.write_bytes(bytes(4096))
            Path(name, "torch.py").write_text(
                "import mmap\n"
                "class backends:\n"
                "    class cudnn:\n"
                "        def version():\n"
                f"            with open({str(library)!r}, 'r+b') as file:\n"
                "                backends.cudnn.kept = mmap.mmap(file.fileno(), 0)\n"
            )
            with mock.patch.dict(os.environ, {"PYTHONPATH": name}):
                self.assertEqual(test_gpu.cudnn_of(sys.executable), name)


class Gpus(unittest.TestCase):
    def test_rows_of_two_gpus_run_where_there_are_two(self):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            one, two = test_gpu.default_rows(1), test_gpu.default_rows(2)
        self.assertEqual(two, list(test_gpu.ROWS))
        self.assertEqual([row for row in two if row not in one], list(test_gpu.GPUS))
        for row in test_gpu.GPUS:
            self.assertRegex(printed.getvalue(), rf"{row} +not run: needs 2 GPUs")


def said(ran: int, skipped: int = 0) -> str:
    """The end of what GoogleTest prints."""
    return f"[  PASSED  ] {ran} tests.\n" + f"[  SKIPPED ] {skipped} test\n" * bool(skipped)


class Rows(unittest.TestCase):
    """Rows with programs of ours in the place of CUDA's and of the build's."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.suite = test_gpu.Suite(self.folder, self.folder / "log", 8, "row")
        path = f"{self.folder}:{os.environ['PATH']}"
        for patch in (
            mock.patch.dict(os.environ, {"PATH": path}),
            mock.patch.object(test_gpu, "ALLOWED", self.folder / "allowed.txt"),
        ):
            patch.start()
            self.addCleanup(patch.stop)
        self.allow("")

    def allow(self, patterns: str):
        (self.folder / "allowed.txt").write_text(patterns)

    def program(self, name: str, body: str):
        """A program in Python; its arguments are `args`."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{sys.executable}\nimport re, sys\nargs = sys.argv[1:]\n{body}\n")
        path.chmod(0o755)

    def gpu_tests(self, output: str, code: int = 0):
        self.program("tests/gpu/gpu_tests", f"print({output!r})\nsys.exit({code})")

    def fails(self, why: str, row, *arguments):
        with self.assertRaisesRegex(test_gpu.RowError, why):
            row(*arguments)

    # A tool that writes `report` and then becomes the program that it watches.
    def sanitizer(self, report: str):
        self.program(
            "compute-sanitizer",
            "at = args.index('--log-file')\n"
            f"open(args[at + 1], 'w').write({report!r})\n"
            "import os\nos.execv(args[at + 2], args[at + 2:])",
        )

    def test_a_clean_run_passes(self):
        self.sanitizer(CLEAN), self.gpu_tests(said(2))
        self.assertIn("2 tests", self.suite.sanitize("memcheck"))

    def test_racecheck_runs_a_part_of_the_matrix(self):
        self.sanitizer(CLEAN)
        self.program("tests/gpu/gpu_tests", f"print({said(1)!r} if 'Races' in args[0] else '')")
        self.assertIn("1 tests", self.suite.sanitize("racecheck"))
        self.fails("all tests did not run", self.suite.sanitize, "memcheck")

    def test_initcheck_leaves_a_kernel_out_of_the_matrix_and_watches_it_in_a_part(self):
        self.program(
            "compute-sanitizer",
            "at = args.index('--log-file')\n"
            "left_out = '--kernel-name-exclude' in args\n"
            f"open(args[at + 1], 'w').write({CLEAN!r} if left_out else {FINDING!r})\n"
            f"print({said(2)!r} if left_out else {said(1)!r})\n"
            "sys.exit(left_out != ('Sanitized' in args[-1]))",
        )
        self.gpu_tests("")
        self.fails("2 findings, first: Invalid __global__ read", self.suite.sanitize, "initcheck")
        self.allow("at entry\nat other\n")
        self.assertIn("3 tests", self.suite.sanitize("initcheck"))

    def test_findings_fail_and_allowed_ones_pass(self):
        self.sanitizer(FINDING), self.gpu_tests(said(2))
        self.fails("2 findings, first: Invalid __global__ read", self.suite.sanitize, "memcheck")
        self.allow("# both are known\nat entry\nat other\n")
        self.assertIn("2 tests", self.suite.sanitize("memcheck"))
        self.sanitizer(HIDDEN)
        self.fails("ERROR SUMMARY: 3", self.suite.sanitize, "memcheck")

    def test_a_sanitizer_without_tests_fails(self):
        self.sanitizer(CLEAN), self.gpu_tests(said(0))
        self.fails("all tests did not run", self.suite.sanitize, "memcheck")
        self.gpu_tests(said(2, skipped=1))
        self.fails("1 tests did not run", self.suite.sanitize, "memcheck")
        self.gpu_tests(said(2), code=1)
        self.fails("exit code 1", self.suite.sanitize, "memcheck")
        self.program("compute-sanitizer", "sys.exit('not supported')")
        self.fails("no summary", self.suite.sanitize, "memcheck")

    def profiler(self, seen: str):
        self.program("cuobjdump", "print(' Function _8portable_a:\\n Function _8portable_b:')")
        self.program(
            "ncu",
            "at = args.index('--log-file')\n"
            f"open(args[at + 1], 'w').write({seen!r})\n"
            "import os\nos.execv(args[at + 2], args[at + 2:])",
        )

    def test_coverage_names_kernels_that_never_ran(self):
        self.gpu_tests(said(2)), self.profiler('"_8portable_a"\n"_8portable_b"')
        self.assertEqual(self.suite.coverage(), "all 2 kernels ran")
        self.profiler('"_8portable_a"')
        self.fails("1 of 2 kernels never ran, first: .._8portable_b", self.suite.coverage)

    def test_coverage_without_tests_fails(self):
        self.gpu_tests(said(0)), self.profiler('"_8portable_a"\n"_8portable_b"')
        self.fails("all tests did not run", self.suite.coverage)

    def test_perturbed_compares_every_run_with_the_plain_build(self):
        self.program("tests/hopper/hopper_check_forward", "print('digest d64 ' + '1' * 16)")
        count = self.folder / "count"
        count.write_text("")
        for bad, said_ in ((0, "1 cases, the same bits"), (3, "perturbed run 3 differs.*d64")):
            self.program(
                "tests/hopper/hopper_check_forward_perturbed",
                f"runs = open({str(count)!r}, 'a'); runs.write('x'); runs.close()\n"
                f"last = len(open({str(count)!r}).read()) == {bad}\n"
                "print('digest d64 ' + '12'[last] * 16)",
            )
            count.write_text("")
            if bad:
                self.fails(said_, self.suite.perturbed, "forward")
            else:
                self.assertRegex(self.suite.perturbed("forward"), said_)
        self.program("tests/hopper/hopper_check_forward", "")
        self.fails("0 digests", self.suite.perturbed, "forward")

    # A te-attn whose engines are `engines`, and of whose cases `refused` are refused.
    def te_attn(self, engines: str, refused: int):
        self.program(
            "te-attn",
            f"print({engines!r} if args[0] == 'explain' else"
            f" '0 of %s cases failed, {refused} refused' % args[1])",
        )

    def test_a_fuzzer_that_ran_nothing_fails(self):
        self.te_attn("", refused=7)
        self.assertEqual(self.suite.fuzz(), "0 of 8 cases failed, 7 refused")
        self.te_attn("", refused=8)
        self.fails("no case ran", self.suite.fuzz)
        self.te_attn("", refused=0)
        self.fails("no engine of the GPU accepts", self.suite.fuzz_others)

    def test_a_draw_that_failed_is_in_the_summary(self):
        """Only the log had it, which was on a machine that was given back."""
        self.program(
            "te-attn",
            "print('seed 5 (te-attn check --replay 5)\\n  o[0]: 1, not 2\\n  reproduce: te-attn"
            ' check "dim_qk=8"\\n1 of 8 cases failed, 0 refused\')\nsys.exit(1)',
        )
        self.fails('code 1; seed 5 .*; reproduce: te-attn check "dim_qk=8"; /', self.suite.fuzz)

    def test_limits_grow_with_the_load(self):
        self.program("slow", "import time\ntime.sleep(1)\nprint('done')")
        self.fails("not ready after 0 s", self.suite.run, [self.folder / "slow"], 0.1)
        self.suite.patience = 600
        self.assertEqual(self.suite.run([self.folder / "slow"], 0.1), "done\n")

    def test_pytest_counts_what_passed(self):
        for path in (
            "src/torch/libte_attention_torch.so",
            "tests/python/libte_attention_kit_shim.so",
        ):
            self.program(path, "")
        ended = "sys.exit(print('..s [100%]\\n{} in 3.2s'))"
        with mock.patch.object(test_gpu, "torch_python", lambda: str(self.folder / "python")):
            self.program("python", ended.format("25 passed, 7 deselected"))
            self.assertEqual(self.suite.pytest("2/4"), "25 tests")
            self.assertIn("-p share --share 2/4", (self.folder / "log/row.txt").read_text())
            self.program("python", ended.format("7 deselected"))
            self.fails("all tests did not run", self.suite.pytest, "2/4")
            self.program("python", ended.format("25 passed, 2 skipped"))
            self.fails("2 tests did not run", self.suite.pytest, "2/4")

    def test_pytest_needs_the_operators(self):
        self.fails("libte_attention_torch.so was not built", self.suite.pytest, "1/4")

    def test_every_engine_by_name_runs_one_case_at_least(self):
        self.te_attn("one: accepts\nother: refuses\n", refused=0)
        few = test_gpu.Suite(self.folder, self.folder / "few", 1, "row")
        detail = "0 of 1 cases failed, 0 refused"
        self.assertEqual(few.fuzz_others(), f"one: {detail}; cpu: {detail}")
        parts = f"chosen: {detail}; one: {detail}; cpu: {detail}"
        self.assertEqual(few.fuzz_some("--parts"), parts)
        self.assertIn("fuzz 1 --parts --engine one", (self.folder / "few/row.txt").read_text())
        self.te_attn("one: accepts\n", refused=2)
        self.fails("no case ran", self.suite.fuzz_others)

    def gpus_seen(self, rows: list[str], gpus: list[str], jobs: int) -> dict[str, str]:
        """By the programs of rows, all of which have begun before one ends if `jobs` are as many.

        The row "two" needs two GPUs.
        """
        self.program("gpus", "import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'])")
        meet = threading.Barrier(min(jobs, len(rows)), timeout=30)

        def row(suite: test_gpu.Suite) -> str:
            if jobs == len(rows):
                meet.wait()
            return test_gpu.last(suite.run([self.folder / "gpus"], 30))

        suites = [test_gpu.Suite(self.folder, self.folder / "log", 8, name) for name in rows]
        with (
            mock.patch.object(test_gpu, "ROWS", dict.fromkeys(rows, row)),
            mock.patch.object(test_gpu, "GPUS", {"two": 2}),
        ):
            facts = list(test_gpu.outcomes(suites, gpus, jobs))
        return {fact["row"]: fact["detail"] for fact in facts}

    def test_rows_are_spread_over_the_gpus(self):
        seen = self.gpus_seen([*"abcd"], ["0", "3"], 4)
        self.assertEqual(sorted(seen.values()), ["0", "0", "3", "3"])

    def test_a_row_of_two_gpus_takes_a_place_on_each(self):
        seen = self.gpus_seen(["two", *"abc"], ["0", "3", "5"], 4)
        places = ",".join(seen.values()).split(",")
        self.assertEqual(sorted(places.count(gpu) for gpu in "035"), [1, 2, 2])
        seen = self.gpus_seen(["two", "a"], ["0", "3"], 1)
        self.assertEqual(seen["two"], "0,3")

    def test_rows_wait_for_a_free_place(self):
        self.assertEqual(self.gpus_seen([*"abc"], ["2"], 1), dict.fromkeys("abc", "2"))
        places = test_gpu.Places(["2"], 1)
        with places.on(1):
            late = threading.Thread(target=lambda: places.on(1).__enter__(), daemon=True)
            late.start()
            late.join(0.2)
            self.assertTrue(late.is_alive())
        late.join(30)
        self.assertFalse(late.is_alive())


class Summary(unittest.TestCase):
    def test_rows_run_side_by_side_and_one_failure_fails_all(self):
        """Each of two rows waits until the other has begun."""
        meet = threading.Barrier(2, timeout=30)

        def passes(_):
            meet.wait()
            return "fine"

        def fails(_):
            meet.wait()
            raise test_gpu.RowError("why")

        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            arguments = ["test_gpu.py", folder, "--log", str(log), "--jobs", "2"]
            with (
                mock.patch.object(test_gpu, "ROWS", {"good": passes, "bad": fails}),
                mock.patch.object(test_gpu, "gpu_names", lambda: ["a GPU"]),
                mock.patch.object(test_gpu, "prefer_cudnn_of_torch", lambda: "none"),
                mock.patch.object(sys, "argv", arguments),
                contextlib.redirect_stdout(io.StringIO()) as out,
                self.assertRaises(SystemExit) as ended,
            ):
                test_gpu.main()
            facts = [json.loads(line) for line in (log / "summary.jsonl").read_text().splitlines()]
        self.assertEqual(ended.exception.code, 1)
        self.assertIn("test-gpu: FAILED: bad", out.getvalue())
        self.assertEqual(
            {(f["row"], f["verdict"], f["detail"]) for f in facts},
            {("good", "ok", "fine"), ("bad", "FAILED", "why")},
        )


class WithoutGpu(unittest.TestCase):
    def test_it_fails_and_says_so(self):
        with tempfile.TemporaryDirectory() as empty:
            done = subprocess.run(
                [sys.executable, ROOT / "tools/test_gpu.py", empty],
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "PATH": empty},
            )
        self.assertEqual(done.returncode, 1)
        self.assertIn("FAILED: this machine has no GPU", done.stderr)


if __name__ == "__main__":
    unittest.main()
