"""KV caches and format conversion, in each format and on both sides of a table of pages."""

import pytest
import torch

import transformer_engine_torch as tex

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FORMATS = [tex.NVTE_QKV_Format[f"NVTE_{name}"] for name in ("SBHD", "BSHD", "THD")]
LENGTHS = [3, 0, 5]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def sums(lengths: list[int], device: str) -> torch.Tensor:
    out = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return torch.tensor(out, dtype=torch.int32, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_conversion_both_ways(dtype: torch.dtype, device: str) -> None:
    thd = torch.randn(10, 2, 16, device=device).to(dtype)
    cu = sums([*LENGTHS, 0], device)  # for a batch of four at most
    bshd = tex.convert_thd_to_bshd(thd, cu, 3, 6)
    assert bshd.shape == (3, 6, 2, 16)
    for i, length in enumerate(LENGTHS):
        start = int(cu[i])
        assert torch.equal(bshd[i, :length], thd[start : start + length])
        assert not bshd[i, length:].any()
    back = tex.convert_bshd_to_thd(bshd, cu, cu[-1] + 2)  # a tensor counts, as there
    assert torch.equal(back[:8], thd[:8])
    assert not back[8:].any()
    assert back.shape == (10, 2, 16)


def test_conversion_of_too_large_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens has 4 entries; needs batch \+ 1, 5"):
        tex.convert_thd_to_bshd(torch.zeros(8, 1, 8), sums(LENGTHS, "cpu"), 4, 6)
    with pytest.raises(RuntimeError):
        tex.convert_thd_to_bshd(torch.zeros(8, 1, 8, dtype=torch.uint8), sums([8], "cpu"), 1, 8)


def new_tokens(form: tex.NVTE_QKV_Format, rows: list[torch.Tensor], length: int) -> torch.Tensor:
    """Tokens of each sequence in a format, with NaN behind them."""
    if form == tex.NVTE_QKV_Format.NVTE_THD:
        return torch.cat(rows)
    out = rows[0].new_full((len(rows), length, *rows[0].shape[1:]), torch.nan)
    for i, tokens in enumerate(rows):
        out[i, : len(tokens)] = tokens
    sbhd = form == tex.NVTE_QKV_Format.NVTE_SBHD
    return out.transpose(0, 1).contiguous() if sbhd else out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("pages", [1, 4])
def test_append(pages: int, form: tex.NVTE_QKV_Format, device: str) -> None:
    new, cached = [2, 1, 0], [5, 1, 3]
    page_size = 8 // pages
    table = torch.randperm(3 * pages, generator=torch.Generator().manual_seed(1)).int().to(device)
    table = table.view(3, pages)
    k_cache = torch.zeros(3 * pages, page_size, 2, 8, device=device)
    v_cache = torch.zeros(3 * pages, page_size, 2, 16, device=device)
    k, v = ([torch.randn(n, 2, d, device=device) for n in new] for d in (8, 16))
    sizes = (len(new), 1 if form == tex.NVTE_QKV_Format.NVTE_THD else max(new), 8, pages)
    tex.copy_to_kv_cache(
        *(new_tokens(form, k, max(new)), new_tokens(form, v, max(new)), k_cache, v_cache),
        *(table, sums(new, device), sums(cached, device), form, *sizes, False),
    )
    for cache, tokens in ((k_cache, k), (v_cache, v)):
        want = torch.zeros_like(cache)
        for i, rows in enumerate(tokens):
            for j, row in enumerate(rows):
                position = cached[i] - new[i] + j
                want[table[i, position // page_size], position % page_size] = row
        assert torch.equal(cache, want)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_move_before_new_tokens_come(device: str) -> None:
    k_cache = (
        torch.arange(4 * 6, dtype=torch.float32, device=device).view(4, 6, 1, 1).repeat(1, 1, 1, 8)
    )
    v_cache, before = -k_cache.clone(), k_cache.clone()
    rows = torch.tensor([1, 3, 0, 2], dtype=torch.int32, device=device)
    new = torch.full((2, 1, 1, 8), 100.0, device=device)
    cu_new, cu_cached = sums([1, 1, 0, 0], device), sums([3, 5, 0, 0], device)
    tex.copy_to_kv_cache(
        *(new, new, k_cache, v_cache, rows, cu_new, cu_cached, FORMATS[1], 2, 1, 6, 1, True)
    )
    for row, (source, cached) in enumerate([(1, 3), (3, 5)]):
        assert torch.equal(k_cache[row, : cached - 1], before[source, : cached - 1])
        assert torch.equal(v_cache[row, : cached - 1], -before[source, : cached - 1])
        assert (k_cache[row, cached - 1] == 100).all()


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        (7, tex.NVTE_QKV_Format.NVTE_THD_2BSHD, "qkv_format is .*THD_2BSHD.*; needs NVTE_SBHD"),
        (8, 3, r"b and max_ctx_len are 3 and 1; needs the sequences and tokens of new_k, \(2, 1\)"),
        (9, 2, "b and max_ctx_len are 2 and 2; needs"),
        (10, 7, "max_seq_len is 7; needs 6: 1 pages of 6 slots"),
        (5, torch.zeros(2, dtype=torch.int32), "cu_new_lens has 2 entries; needs"),
    ],
)
def test_what_append_refuses(place: int, value: object, text: str) -> None:
    cache, new, cu = torch.zeros(2, 6, 1, 8), torch.zeros(2, 1, 1, 8), sums([1, 1], "cpu")
    table = torch.zeros(2, dtype=torch.int32)
    arguments = [new, new, cache, cache.clone(), table, cu, cu, FORMATS[1], 2, 1, 6, 1, False]
    arguments[place] = value
    with pytest.raises(ValueError, match=text):
        tex.copy_to_kv_cache(*arguments)
