"""python -m te_attention, as users run it."""

import subprocess
import sys

import te_attention


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "te_attention", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_info_names_the_version_the_libraries_and_the_engines() -> None:
    done = run("info")
    assert done.returncode == 0, done.stderr
    assert f"te-attention {te_attention.__version__}" in done.stdout
    assert "libte_attention_torch.so" in done.stdout
    assert "reference" in done.stdout


def test_explain_prints_every_engine() -> None:
    done = run("explain", "dtype=fp64 batch=1 heads_q=1 heads_kv=1 dim_qk=8 seqlen_q=1 seqlen_kv=1")
    assert done.returncode == 0, done.stderr
    assert "cpu: accepts" in done.stdout


def test_info_says_what_is_usable_here() -> None:
    lines = run("info").stdout.splitlines()
    found = {line[:11].strip(): line[12:] for line in lines}
    assert {"device code", "on the CPU", "cpu", "threads"} <= set(found)
    assert "reference" in found["on the CPU"]


def test_explain_takes_fields_unquoted_and_lists_them() -> None:
    fields = ["dtype=fp64", "batch=1", "heads_q=1", "heads_kv=1", "dim_qk=8", "seqlen_q=1"]
    fields.append("seqlen_kv=1")
    assert run("explain", *fields).stdout == run("explain", " ".join(fields)).stdout
    text = run("explain", "--help").stdout
    for line in (
        "  dtype: one of default, fp16, bf16, fp32, fp64, e4m3, e5m2",
        "  outputs: one of lse, max, sum_exp, joined by +",
        "  q: 3 values separated by commas",
        "  scale: a number",
    ):
        assert line in text.splitlines()


def test_explain_knows_the_fields_that_the_problem_struct_got_later() -> None:
    text = run("explain", "--help").stdout
    for field in ("kv_dtype", "kv_scale", "batch_invariant"):
        assert f"\n  {field}: " in text
    fields = ["dtype=bf16", "batch=1", "heads_q=1", "heads_kv=1", "dim_qk=8", "seqlen_q=1"]
    done = run("explain", *fields, "seqlen_kv=1", "kv_dtype=e4m3", "batch_invariant=1")
    assert "cpu: accepts" in done.stdout, done.stderr


def test_an_invalid_problem_is_reported_and_fails() -> None:
    done = run("explain", "dtype=fp64 heads_q=3 heads_kv=2 dim_qk=8")
    assert done.returncode == 1
    assert "heads_q is 3; needs a multiple of heads_kv, which is 2" in done.stderr


def test_collect_env_names_what_matters() -> None:
    done = run("collect-env")
    assert done.returncode == 0, done.stderr
    for word in ("python ", "system ", "cpu ", "gpu ", "torch "):
        assert f"\n{word}" in done.stdout
