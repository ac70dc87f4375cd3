"""The C API of TE Attention through ctypes, on tensors of PyTorch: on the CPU or on one GPU."""

import ctypes
import re
from pathlib import Path

import torch

HEADER = Path(__file__).resolve().parents[1] / "include" / "te_attention.h"
NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
PROBLEM_BYTES = 4096  # room for a tea_problem of any version


def tensor_indices() -> dict[str, int]:
    """The enum tea_tensor, read from the header: names without the prefix."""
    body = HEADER.read_text().split("typedef enum tea_tensor")[1].split("} tea_tensor")[0]
    return {name: int(index) for name, index in re.findall(r"TEA_(\w+) = (\d+)", body)}


INDEX = tensor_indices()


class Run(ctypes.Structure):
    """struct tea_run."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("tensor_count", ctypes.c_uint32),
        ("tensors", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * 7),
        ("origin", ctypes.c_int64 * 4),
        ("origin_device", ctypes.c_void_p),
        ("status", ctypes.c_void_p),
    )


class Library:
    """libte_attention.so."""

    def __init__(self, path: Path) -> None:
        """Loads it."""
        self._lib = ctypes.CDLL(str(path))
        self._lib.tea_error.restype = ctypes.c_char_p
        self._lib.tea_plan_engine.restype = ctypes.c_char_p

    def require(self, function: str, *arguments: object) -> None:
        """Calls a function that returns a status; raises what tea_error() says."""
        if getattr(self._lib, function)(*arguments):
            raise RuntimeError(f"{function}: {self._lib.tea_error().decode()}")

    def engine_of(self, plan: ctypes.c_void_p) -> str:
        """The name of the engine behind a plan."""
        return self._lib.tea_plan_engine(plan).decode()


def strides(tensor: torch.Tensor, is_ragged: bool) -> str:
    """The strides of a [batch, head, row, dim] tensor as problem text: batch, row, head."""
    batch, head, row, _ = tensor.stride()
    return f"{0 if is_ragged else batch},{row},{head}"


class Attention:
    """One planned problem on fixed tensors of shape [batch, head, row, dim].

    With paged keys K and V are [page, head, slot, dim], and `max_kv` bounds the lengths. Ragged
    tensors are [1, head, token, dim], and `longest` bounds the lengths in CU_SEQLENS_Q and _KV.
    """

    def __init__(
        self,
        library: Library,
        options: str,
        tensors: dict[str, torch.Tensor],
        engine: str = "",
        max_kv: int = 0,
        longest: int = 0,
    ) -> None:
        """Plans. `tensors`: by name of tea_tensor, with Q, K, V and O. `options`: problem text."""
        self._library, self._kept = library, tensors
        q, k = tensors["Q"], tensors["K"]
        text = (
            f"dtype={NAMES[q.dtype]} heads_q={q.shape[1]} heads_kv={k.shape[1]} "
            f"dim_qk={q.shape[3]} {options}"
        )
        self._sizes = None
        if longest:
            text += " q_form=ragged kv_form=ragged"
            batch = len(tensors["CU_SEQLENS_Q"]) - 1
            self._sizes = (batch, longest, longest, q.shape[2], k.shape[2], 0, 0)
        elif max_kv:
            text += f" seqlen_q={q.shape[2]} kv_form=paged page_size={k.shape[2]}"
            self._sizes = (q.shape[0], 0, max_kv, 0, 0, k.shape[0], k.shape[0])
        else:
            text += f" batch={q.shape[0]} seqlen_q={q.shape[2]} seqlen_kv={k.shape[2]}"
        sides = ("Q", "K", "V", "O", "DOUT", "DQ", "DK", "DV")
        for name in sides:
            if name in tensors:
                text += f" {name.lower()}={strides(tensors[name], bool(longest))}"
        problem = ctypes.create_string_buffer(PROBLEM_BYTES)
        ctypes.c_uint32.from_buffer(problem).value = PROBLEM_BYTES  # struct_size
        library.require("tea_problem_parse", text.encode(), problem)
        self._plan = ctypes.c_void_p()
        device = q.get_device()  # -1: the CPU, for both
        library.require(
            "tea_plan_create", problem, device, engine.encode(), ctypes.byref(self._plan)
        )
        self.engine = library.engine_of(self._plan)
        self._run = self._make_run()

    def _make_run(self) -> Run:
        need = (ctypes.c_uint64(), ctypes.c_uint64())
        run = Run(struct_size=ctypes.sizeof(Run))
        if self._sizes:
            run.sizes = (ctypes.c_int64 * 7)(*self._sizes)
        sizes = ctypes.byref(run) if self._sizes else None
        self._library.require("tea_plan_workspace", self._plan, sizes, *map(ctypes.byref, need))
        self.workspace_bytes = tuple(n.value for n in need)  # forward, backward
        size = max(self.workspace_bytes)
        self._memory = torch.empty(size + 256, dtype=torch.uint8, device=self._kept["Q"].device)
        pointers = (ctypes.c_void_p * INDEX["TENSOR_COUNT"])()
        for name, tensor in self._kept.items():
            pointers[INDEX[name]] = tensor.data_ptr()
        self._pointers = pointers
        run.tensor_count, run.workspace_bytes = len(pointers), size
        run.tensors = ctypes.addressof(pointers)
        run.workspace = (self._memory.data_ptr() + 255) // 256 * 256
        if self._memory.is_cuda:
            run.stream = torch.cuda.current_stream(self._memory.device).cuda_stream
        return run

    def set_o(self, o: torch.Tensor) -> None:
        """Where forward() writes from now on: memory as that which was planned for."""
        self._pointers[INDEX["O"]] = o.data_ptr()

    def forward(self) -> None:
        """Writes O, and LSE where the problem asks for it."""
        self._library.require("tea_forward", self._plan, ctypes.byref(self._run))

    def backward(self) -> None:
        """Writes DQ, DK, DV, and DBIAS where it is given."""
        self._library.require("tea_backward", self._plan, ctypes.byref(self._run))
