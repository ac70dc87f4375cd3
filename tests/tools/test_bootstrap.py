"""The output and actions of tools/bootstrap, on machines simulated by fake programs."""

import os
import shutil
import subprocess
from pathlib import Path

from project import ProjectTest

BOOTSTRAP = Path(__file__).resolve().parents[2] / "tools" / "bootstrap"
ALL = "make g++ cmake ninja-build python3 libgtest-dev"


class Bootstrap(ProjectTest):
    def setUp(self):
        super().setUp()
        for tool in ("sh", "sort", "head", "sed", "cat", "mktemp", "rm", "env"):
            (self.root / tool).symlink_to(shutil.which(tool))

    def has(self, program, body="exit 0"):
        self.write(program, f"#!/bin/sh\n{body}\n")
        (self.root / program).chmod(0o755)

    def has_a_build(self, gcc="12.2.0", cmake="3.25.1"):
        self.has("g++", f'[ "$1" = -dumpfullversion ] && echo {gcc}; exit 0')
        self.has("cmake", f"echo cmake version {cmake}")
        for program in ("make", "ninja", "python3"):
            self.has(program)

    def run_bootstrap(self):
        environment = {k: v for k, v in os.environ.items() if k != "CXX"}
        environment["PATH"] = str(self.root)
        shell = str(self.root / "sh")
        return subprocess.run(
            [shell, BOOTSTRAP], env=environment, capture_output=True, text=True, check=False
        )

    def test_does_nothing_where_all_is_there(self):
        self.has_a_build()
        self.has("apt-get", "exit 1")
        done = self.run_bootstrap()
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))

    def test_tells_a_user_what_to_run(self):
        self.has("apt-get")
        self.has("id", "echo 1000")
        done = self.run_bootstrap()
        self.assertEqual(done.returncode, 1)
        command = f"sudo apt-get update && sudo apt-get install -y --no-install-recommends {ALL}"
        self.assertIn(command, done.stderr)

    def test_names_what_is_missing_without_apt(self):
        done = self.run_bootstrap()
        self.assertEqual(done.returncode, 1)
        self.assertIn(ALL, done.stderr)

    def test_installs_as_root_what_is_missing_and_no_more(self):
        self.has_a_build()
        (self.root / "ninja").unlink()
        self.has("id", "echo 0")
        self.has("apt-get", f'echo "$@" >>{self.root}/log')
        self.assertEqual(self.run_bootstrap().returncode, 0)
        expected = "update\ninstall -y --no-install-recommends ninja-build\n"
        self.assertEqual((self.root / "log").read_text(), expected)

    def test_shows_why_an_installation_failed(self):
        self.has("id", "echo 0")
        self.has("apt-get", "echo no network; exit 100")
        done = self.run_bootstrap()
        self.assertEqual(done.returncode, 1)
        self.assertIn("no network", done.stderr)

    def test_refuses_what_is_too_old(self):
        for versions, needed in (
            ({"gcc": "11.4.0"}, "g++ is 11.4.0; needs 12"),
            ({"cmake": "3.22.1"}, "cmake is 3.22.1; needs 3.24"),
        ):
            with self.subTest(needed=needed):
                self.has_a_build(**versions)
                done = self.run_bootstrap()
                self.assertEqual(done.returncode, 1)
                self.assertIn(needed, done.stderr)
