"""xformers' classes of masks, as options of attention()."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor


class AttentionBias:
    """A mask that memory_efficient_attention() takes without a tensor."""

    def options(self, q: Tensor) -> dict[str, object]:
        """The arguments of attention() for this mask."""
        raise NotImplementedError

    def materialize(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """The mask as a tensor [..., rows, columns] of 0 and -inf, to be read, not to be used."""
        rows, columns = shape[-2:]
        seen = self.visible(torch.arange(rows)[:, None], torch.arange(columns), rows, columns)
        mask = torch.zeros(rows, columns).masked_fill_(~seen, -torch.inf)
        return mask.to(device, dtype).expand(shape)

    def visible(self, row: Tensor, column: Tensor, rows: int, columns: int) -> Tensor:
        """Which of these rows attend to which of these columns."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Diagonal(AttentionBias):
    """Columns up to `right` after and `left` before a diagonal; None: no bound."""

    left: int | None = None
    right: int | None = 0
    bottom_right: bool = False

    def options(self, q: Tensor) -> dict[str, object]:  # noqa: ARG002
        word = "causal" if self.right == 0 else None
        if self.bottom_right:
            word = "causal_bottom_right" if self.right == 0 else "bottom_right"
        right = None if self.right == 0 else self.right
        return {"mask": word, "window": None if self.left is right is None else (self.left, right)}

    def visible(self, row: Tensor, column: Tensor, rows: int, columns: int) -> Tensor:
        ahead = column - row - (columns - rows if self.bottom_right else 0)
        seen = torch.ones_like(ahead, dtype=torch.bool)
        if self.right is not None:
            seen &= ahead <= self.right
        return seen if self.left is None else seen & (ahead >= -self.left)


class LowerTriangularMask(_Diagonal):
    """Causal: column <= row."""

    def __init__(self) -> None:
        """Takes nothing."""
        super().__init__()

    def add_bias(self, bias: Tensor) -> "LowerTriangularMaskWithTensorBias":
        """The same with a bias."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularFromBottomRightMask(_Diagonal):
    """Causal: the last query attends up to the last key."""

    def __init__(self) -> None:
        """Takes nothing."""
        super().__init__(bottom_right=True)

    def make_local_attention(self, window_size: int) -> "_Diagonal":
        """The same for the last `window_size` columns of each row."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


class LowerTriangularFromBottomRightLocalAttentionMask(_Diagonal):
    """The last `_window_size` columns up to the diagonal of the last query and the last key."""

    def __init__(self, _window_size: int) -> None:
        """_window_size: number of columns, the diagonal included."""
        if _window_size < 1:
            raise ValueError(f"_window_size is {_window_size}; needs 1 or more")
        super().__init__(left=_window_size - 1, bottom_right=True)


class LocalAttentionFromBottomRightMask(_Diagonal):
    """From window_left before to window_right after the diagonal of the last query and key."""

    def __init__(self, window_left: int, window_right: int) -> None:
        """Both bounds are inclusive."""
        if window_left < 0 or window_right < 0:
            raise ValueError(f"window is {window_left}, {window_right}; needs 0 or more")
        super().__init__(window_left, window_right, bottom_right=True)


class LowerTriangularMaskWithTensorBias(AttentionBias):
    """Causal, with a bias [batch, heads, rows, columns], which may have a gradient."""

    def __init__(self, bias: Tensor) -> None:
        """Keeps the bias."""
        self.bias = bias

    def options(self, q: Tensor) -> dict[str, object]:  # noqa: ARG002
        """The arguments of attention() for this mask."""
        return {"mask": "causal", "bias": self.bias}

    def materialize(self, shape, dtype=torch.float32, device="cpu") -> Tensor:
        """The mask and the bias as a tensor."""
        return LowerTriangularMask().materialize(shape, dtype, device) + self.bias.to(device, dtype)


@dataclass
class _SeqLenInfo:
    """Lengths of sequences that follow each other; `padding`: each begins at a multiple of it."""

    seqlens: list[int]
    padding: int | None = None
    _tensors: dict = field(default_factory=dict, repr=False)

    @property
    def seqstart_py(self) -> list[int]:
        """The first token of each sequence, and the end of the last."""
        if self.padding is not None:
            return [i * self.padding for i in range(len(self.seqlens) + 1)]
        return [0, *accumulate(self.seqlens)]

    @property
    def max_seqlen(self) -> int:
        """The longest length."""
        return max(self.seqlens, default=0)

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """cu_seqlens and the first tokens, int32 on the device, made once for each."""
        if device not in self._tensors:
            sums = torch.tensor([0, *accumulate(self.seqlens)], dtype=torch.int32, device=device)
            starts = torch.tensor(self.seqstart_py, dtype=torch.int32, device=device)
            self._tensors[device] = sums, starts
        return self._tensors[device]

    def intervals(self) -> list[tuple[int, int]]:
        """The first token of each sequence, and the token after its last."""
        return [(b, b + n) for b, n in zip(self.seqstart_py, self.seqlens, strict=False)]


class BlockDiagonalMask(AttentionBias):
    """Each sequence attends to itself alone: tensors are [1, tokens of all sequences, ...]."""

    _diagonal = _Diagonal(right=None)

    def __init__(
        self,
        q_seqinfo: _SeqLenInfo,
        k_seqinfo: _SeqLenInfo,
        _batch_sizes: Sequence[int] | None = None,
        _diagonal: _Diagonal | None = None,
    ) -> None:
        """Lengths of queries and keys; from_seqlens() makes them."""
        if len(q_seqinfo.seqlens) != len(k_seqinfo.seqlens):
            raise ValueError(
                f"kv_seqlen has {len(k_seqinfo.seqlens)} lengths; needs {len(q_seqinfo.seqlens)}"
            )
        self.q_seqinfo, self.k_seqinfo, self._batch_sizes = q_seqinfo, k_seqinfo, _batch_sizes
        if _diagonal is not None:
            self._diagonal = _diagonal

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, **_: object
    ) -> "BlockDiagonalMask":
        """The mask of sequences of these lengths. `kv_seqlen`: as q_seqlen by default."""
        q = _SeqLenInfo(list(q_seqlen))
        return cls(q, q if kv_seqlen is None else _SeqLenInfo(list(kv_seqlen)))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple["BlockDiagonalMask", Tensor]:
        """The mask for tensors [b, s, ...], and their sequences in one tensor [1, tokens, ...]."""
        lengths = [t.shape[1] for t in tensors for _ in range(t.shape[0])]
        mask = cls.from_seqlens(lengths)
        mask._batch_sizes = [t.shape[0] for t in tensors]
        return mask, torch.cat([t.reshape(1, -1, *t.shape[2:]) for t in tensors], dim=1)

    @classmethod
    def from_tensor_lists_qkv(
        cls,
        tensors_q: Sequence[Tensor],
        tensors_k: Sequence[Tensor],
        tensors_v: Sequence[Tensor] | None = None,
    ) -> tuple["BlockDiagonalMask", Tensor, Tensor, Tensor | None]:
        """The same for queries, keys and values of other lengths."""
        mask_q, q = cls.from_tensor_list(tensors_q)
        mask_k, k = cls.from_tensor_list(tensors_k)
        v = None if tensors_v is None else cls.from_tensor_list(tensors_v)[1]
        mask = cls(mask_q.q_seqinfo, mask_k.q_seqinfo, mask_q._batch_sizes)
        return mask, q, k, v

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The parts [b, s, ...] of O [1, tokens, ...] that from_tensor_list() joined."""
        if tensor.shape[0] != 1:
            raise ValueError(f"tensor is of shape {list(tensor.shape)}; needs [1, tokens, ...]")
        parts = [tensor[:, begin:end] for begin, end in self.q_seqinfo.intervals()]
        if self._batch_sizes is None:
            return parts
        ends = [0, *accumulate(self._batch_sizes)]
        return [torch.cat(parts[a:b]) for a, b in pairwise(ends)]

    def options(self, q: Tensor) -> dict[str, object]:
        """The arguments of attention() for this mask."""
        cu_q, start_q = self.q_seqinfo.tensors(q.device)
        cu_kv, start_kv = self.k_seqinfo.tensors(q.device)
        gaps = self.k_seqinfo.padding is not None
        return self._diagonal.options(q) | {
            "cu_seqlens_q": cu_q,
            "cu_seqlens_kv": cu_kv,
            "max_seqlen_q": self.q_seqinfo.max_seqlen,
            "max_seqlen_kv": self.k_seqinfo.max_seqlen,
            "offsets_q": start_q if gaps else None,
            "offsets_kv": start_kv if gaps else None,
        }

    def materialize(self, shape, dtype=torch.float32, device="cpu") -> Tensor:
        """The mask as a tensor; -inf between sequences."""
        mask = torch.full(shape[-2:], -torch.inf)
        blocks = zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True)
        for rows, columns in blocks:
            size = (rows[1] - rows[0], columns[1] - columns[0])
            mask[slice(*rows), slice(*columns)] = self._diagonal.materialize(size)
        return mask.to(device, dtype).expand(shape)

    def _with(self, diagonal: _Diagonal, name: type["BlockDiagonalMask"]) -> "BlockDiagonalMask":
        return name(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, diagonal)

    def make_causal(self) -> "BlockDiagonalMask":
        """Causal in each sequence."""
        return self._with(_Diagonal(), BlockDiagonalCausalMask)

    def make_causal_from_bottomright(self) -> "BlockDiagonalMask":
        """Causal in each sequence, counted from its last query and key."""
        return self._with(_Diagonal(bottom_right=True), BlockDiagonalCausalFromBottomRightMask)

    def make_local_attention(self, window_size: int) -> "BlockDiagonalMask":
        """Causal, the last `window_size` columns of each row."""
        local = _Diagonal(left=window_size - 1, bottom_right=self._diagonal.bottom_right)
        return self._with(local, BlockDiagonalCausalLocalAttentionMask)

    def make_local_attention_from_bottomright(self, window_size: int) -> "BlockDiagonalMask":
        """The same, counted from the last query and key."""
        local = _Diagonal(left=window_size - 1, bottom_right=True)
        return self._with(local, BlockDiagonalCausalLocalAttentionFromBottomRightMask)


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Causal in each sequence: column <= row."""

    _diagonal = _Diagonal()


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Causal in each sequence: its last query attends up to its last key."""

    _diagonal = _Diagonal(bottom_right=True)


class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """Made by make_local_attention()."""


class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """Made by make_local_attention_from_bottomright()."""


class BlockDiagonalPaddedKeysMask(BlockDiagonalMask):
    """Keys [1, batch * kv_padding, ...]: those of each sequence begin at a multiple of it."""

    @classmethod
    def from_seqlens(  # its own signature, as in xformers
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int = 0,
        kv_seqlen: Sequence[int] = (),
        **_: object,
    ) -> "BlockDiagonalPaddedKeysMask":
        """The mask of these lengths; `kv_padding`: at least the largest of kv_seqlen."""
        if max(kv_seqlen, default=0) > kv_padding:
            raise ValueError(f"kv_padding is {kv_padding}; needs at least {max(kv_seqlen)}")
        return cls(_SeqLenInfo(list(q_seqlen)), _SeqLenInfo(list(kv_seqlen), kv_padding))


class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """The same, causal: the last query of each sequence attends up to its last key."""

    _diagonal = _Diagonal(bottom_right=True)
