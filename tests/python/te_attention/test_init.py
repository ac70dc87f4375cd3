"""The contents of the package before a front end is imported."""

import subprocess
import sys


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_front_ends_are_imported_when_they_are_asked_for() -> None:
    program = (
        "import sys, te_attention; print('torch' in sys.modules, 'torch' in dir(te_attention))"
    )
    assert run(program) == "False True\n"
    assert run("import te_attention; print(te_attention.torch.attention.__name__)") == "attention\n"


def test_other_names_are_refused() -> None:
    program = "import te_attention; print(hasattr(te_attention, 'tensorflow'))"
    assert run(program) == "False\n"


def test_help_shows_what_callers_may_pass() -> None:
    program = "import te_attention; help(te_attention.torch.attention)"
    text = run(program)
    assert "mask:" in text
    for hidden in ("_finish", "unknown"):
        assert hidden not in text.split("softmax(scale")[0]


def test_importing_the_front_end_imports_no_compiler() -> None:
    program = (
        "import sys, te_attention.torch as tea, torch; q = torch.zeros(1, 1, 8, 8); "
        "tea.attention(q, q, q, bias=torch.zeros(8, 8)); print('torch._dynamo' in sys.modules)"
    )
    assert run(program) == "False\n"  # it takes eight times as long as the front end
