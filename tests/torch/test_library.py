"""Every operator has a schema, a kernel for both devices and a fake implementation."""

import subprocess

import pytest
import torch
from torch.overrides import TorchFunctionMode

from te_attention import _library as core
from te_attention.torch import functional
from te_attention.torch._arguments import Arguments, trimmed
from te_attention.torch._library import OPS
from te_attention.torch._options import MINIMAL, OPTIONS
from te_attention.torch._schemas import EAGER, SCHEMAS


@pytest.mark.parametrize("name", SCHEMAS)
def test_kernels_are_there(name: str) -> None:
    for key in ("CPU", "CUDA"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"te_attention::{name}", key)


@pytest.mark.parametrize("name", [n for n in SCHEMAS if n not in EAGER])
def test_fakes_are_there(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"te_attention::{name}", "Meta")


CU = torch.tensor([0, 8, 12], dtype=torch.int32)
THD, HALF = torch.randn(12, 2, 8), torch.randn(6, 2, 8)
RNG, POOL = torch.tensor([5, 7]), torch.zeros(4, 2, 1, 8)
SCORES, ONE = torch.randn(2, 3, 5, 7), torch.ones(1)
OTHERS = {
    "kv_cache_append": (
        *(THD[:3, :1], THD[:3, 1:], POOL, POOL.clone(), torch.tensor([[3, 1], [0, 2]]).int()),
        *(torch.tensor([0, 2, 3]).int(), torch.tensor([0, 3, 4]).int()),
    ),
    "thd_to_bshd": (THD, CU, None, 9),
    "bshd_to_thd": (torch.randn(2, 8, 2, 8), CU, None, 12),
    "cu_seqlens_from_lengths": (torch.tensor([3, 0, 5]).int(),),
    "cu_seqlens_from_mask": (torch.ones(3, 6, dtype=torch.bool),),
    "rng_fill": (RNG, 3, 4),
    "rng_fill_captured": (RNG, torch.tensor([3]), None, 2),
    "rng_advance": (RNG, 4),
    "dropout_mask": (RNG, 0.25, 2, 3, 5, 7),
    "merge": ([torch.randn(2, 9, 3, 8)] * 2, [torch.randn(2, 3, 9)] * 2),
    "merge_into": (
        *(torch.randn(2, 9, 3, 8), torch.randn(2, 3, 9)),
        *(torch.randn(2, 9, 3, 8), torch.randn(2, 3, 9)),
    ),
    "round_o": (
        *(torch.randn(2, 9, 3, 8).bfloat16(), torch.randn(2, 9, 3, 8), torch.randn(2, 3, 9)),
    ),
    "cp_read_half": (THD, CU, True),
    "cp_lse_correct": (torch.randn(3, 12), torch.randn(3, 6), CU, True),
    "cp_lse_read": (torch.randn(3, 12), CU, True, 6),
    "cp_out_correct": (THD, HALF, torch.randn(2, 12), torch.randn(2, 6), CU, True, True),
    "cp_grad_correct": (THD, torch.randn(12, 2, 8), CU, "add", "copy"),
    "cp_partition_indices": (CU, 12, 2, 1),
    "cp_to_rank_order": (torch.randn(12, 3), CU, 2),
    "cp_to_sequence_order": (torch.randn(12, 3), CU, 2),
    "cp_copy_valid": (torch.randn(12, 3), torch.zeros(12, 3), CU, torch.tensor([0, 5, 6]).int()),
    "scaled_softmax_forward": (SCORES, None, 0.5, "causal"),
    "scaled_softmax_backward": (SCORES, SCORES.softmax(-1), 0.5, "causal"),
    "flash_prepare_forward": (torch.randn(4, 2, 3, 24),),
    "flash_prepare_backward": tuple(torch.randn(3, 2, 4, 3, 8)),
    "fp8_quantize": (SCORES, ONE, ONE.clone(), "float8_e4m3fn"),
    "fp8_quantize_current": (SCORES, "float8_e5m2"),
    "fp8_quantize_joint": ([SCORES, THD], ONE, ONE.clone(), "float8_e4m3fn"),
    "fp8_quantize_joint_current": ([SCORES, THD], "float8_e5m2"),
    "fp8_scale": (ONE, "float8_e4m3fn"),
    "fp8_update_scales": (torch.ones(4, 2), torch.ones(2), None, "max", "float8_e4m3fn"),
    "fp8_dequantize": (SCORES.to(torch.float8_e4m3fn), ONE, "bfloat16"),
    "amax": (SCORES, ONE.clone()),
    "fill": (SCORES.clone(), 2.0),
    "fill_bytes": (SCORES.clone(), 2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_opcheck(name: str) -> None:
    checks = ["test_faketensor"]
    if name != "fp8_dequantize":  # this check computes with its inputs, which torch cannot in fp8
        checks.append("test_schema")
    torch.library.opcheck(getattr(OPS, name).default, OTHERS[name], test_utils=checks)


def test_every_operator_is_checked() -> None:
    attention = {"attention", "forward", "forward_minimal", "inference", "inference_plain"}
    attention |= {"explain"}
    attention |= {"backward", "backward_minimal", "backward_out", "backward_minimal_out"}
    attention |= {"fp8_forward", "fp8_forward_amax", "fp8_backward", "fp8_backward_out"}
    attention |= {"fp8_attention_forward", "fp8_attention_forward_minimal"}
    attention |= {"fp8_attention_backward", "fp8_attention_backward_minimal"}
    attention |= {"record_part_forward", "record_part_backward", "replay"}
    attention |= {"part_forward", "part_backward", "fp8_part_forward", "fp8_part_backward"}
    assert set(OTHERS) | attention == set(SCHEMAS)


def test_arguments_are_those_of_the_schema() -> None:
    schema = OPS.forward.default._schema.arguments
    assert tuple(a.name for a in schema) == Arguments._fields
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    assert defaults == Arguments._field_defaults


def test_the_minimal_signature_is_the_first_arguments() -> None:
    first = [(a.name, a.default_value) for a in OPS.forward.default._schema.arguments[:MINIMAL]]
    for few in (OPS.forward_minimal.default, OPS.inference.default):
        assert [(a.name, a.default_value) for a in few._schema.arguments] == first
    last = (
        OPS.fp8_attention_forward_minimal.default,
        OPS.fp8_attention_backward_minimal.default,
    )
    for few in (OPS.backward_minimal.default, OPS.backward_minimal_out.default, *last):
        assert [(a.name, a.default_value) for a in few._schema.arguments[-MINIMAL:]] == first


def test_trimming_leaves_what_differs_from_the_defaults() -> None:
    q = torch.zeros(1)
    assert len(trimmed(Arguments(q, q, q))) == 3
    assert trimmed(Arguments(q, q, q, mask="causal"))[3:] == ("bhsd", "causal")


class Never(TorchFunctionMode):
    """Fails where PyTorch is asked for anything."""

    def __torch_function__(self, func, types, args=(), kwargs=None) -> object:
        raise AssertionError(func)


@pytest.mark.parametrize("name", [o.name for o in OPTIONS if o.type == "Tensor?"])
def test_trimming_compares_no_tensors(name: str) -> None:
    required = {"offsets_q": "cu_seqlens_q", "offsets_kv": "cu_seqlens_kv"}
    required |= {"page_table_v": "page_table"}
    t = torch.zeros(1)
    arguments = Arguments(t, t, t, **dict.fromkeys({name, required.get(name, name)}, t))
    with Never():
        assert trimmed(arguments)[-1] is t


def test_what_attention_passes_is_trimmed() -> None:
    q = torch.zeros(1, 1, 1, 8)
    assert len(trimmed(functional.describe(q, q, q, softcap=0.0, dropout=0.0))) == 3
    assert len(trimmed(functional.describe(q, q, q, mask="causal"))) == 5


def test_the_library_needs_neither_python_nor_the_classes_of_torch() -> None:
    path = core.FOLDER / "libte_attention_torch.so"
    done = subprocess.run(
        ["nm", "-DC", "--undefined-only", path], capture_output=True, text=True, check=True
    )
    names = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines()]
    assert any("torch_library_impl" in name for name in names)
    assert not [n for n in names if n.startswith("Py") or "at::" in n or "c10::" in n]
