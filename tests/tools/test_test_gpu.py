"""test_gpu.py reads what compute-sanitizer says, and fails where there is no GPU."""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

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

    def test_a_report_without_an_end_is_one(self):
        self.assertEqual(len(test_gpu.unexpected("========= COMPUTE-SANITIZER\n", [])), 1)


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
