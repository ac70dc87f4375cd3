"""The description of a call by shapes alone: lines, sizes, and what each refusal names."""

import ctypes

import pytest

from te_attention.jax import _call, _library

Q = "q=bfloat16[2,6,4,16]"
QKV = f"{Q} k=bfloat16[2,9,2,16] v=bfloat16[2,9,2,16] format=bshd"
T = "q=float32[12,4,16] k=float32[20,2,16] v=float32[20,2,16] format=thd"


def test_a_line_is_the_canonical_one() -> None:
    line = "dtype=bf16 outputs=lse heads_q=4 heads_kv=2 dim_qk=16 batch=2 seqlen_q=6 seqlen_kv=9"
    assert _call.describe(f"{QKV} lse=1").problem == line
    assert _call.describe(QKV).problem == line.replace(" outputs=lse", "")
    assert _call.describe(QKV).sizes == (0,) * 7


def test_a_broadcast_bias_has_no_strides() -> None:
    for shape in ("1,1,6,9", "2,1,6,9", "1,4,1,9", "2,4,6,1"):
        assert "stride" not in _call.describe(f"{QKV} bias=bfloat16[{shape}]").problem


def test_ragged_sizes_belong_to_the_run() -> None:
    needs = _call.describe(f"{T} cu_seqlens_q=int32[4] cu_seqlens_kv=int32[4] max_seqlen_q=7")
    assert needs.sizes == (3, 7, 20, 12, 20, 0, 0)
    assert "seqlen" not in needs.problem


REFUSALS = {
    "an unknown option": (f"{QKV} colour=1", 'option is "colour"; needs one of the table'),
    "no array": (Q, "key is not given; needs an array"),
    "not a shape": (f"{QKV} bias=bfloat16", 'bias is "bfloat16"; needs a dtype and a shape'),
    "not a number": (f"{QKV} softcap=much", 'softcap is "much"; needs a number'),
    "no word": (f"{QKV} much", 'word is "much"; needs name=value'),
    "dtype": (QKV.replace("bfloat16", "int32"), "query.dtype is int32; needs float16, bfloat16"),
    "other dtype": (QKV.replace("bfloat16", "float8_e3m4"), "query.dtype is of another kind"),
    "head dim": (QKV.replace("16]", "12]"), "head dim of query is 12; needs a multiple of 8"),
    "softcap": (f"{QKV} softcap=-1", "softcap is -1; needs 0 or more"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_the_argument_what_was_seen_and_what_is_needed(name: str) -> None:
    request, text = REFUSALS[name]
    with pytest.raises(ValueError) as error:
        _call.describe(request)
    assert str(error.value).startswith(text)


def test_the_options_of_python_are_those_of_the_table() -> None:
    read = _library.library().te_attention_jax_options
    read.restype = ctypes.c_char_p
    schema = read().decode().split(", ")
    names = {argument.split()[1].partition("=")[0] for argument in schema}
    own = {"page_table", "page_table_v", "k_descale", "v_descale", "max_ctas"}  # of PyTorch alone
    assert {*_call.Options._fields, *_call.TENSORS} - names == {
        *("o", "lse", "max", "dout", "dq", "dk", "dv", "dbias", "dsink", "dlse")
    }
    assert names - {*_call.Options._fields, *_call.TENSORS} == {*own, "training"}
