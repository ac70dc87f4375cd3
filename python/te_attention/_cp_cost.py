"""Predicted time of attention whose sequences are shared by several ranks: no tensors, no device.

A step takes the longer of its computation and of the transfer for the next step. Left out: clocks
under load, tails of short kernels, congestion of networks.
"""

from dataclasses import dataclass

LAUNCH = 8e-6  # seconds of one launch
MERGE = 4.3e12  # bytes a second at which partial results are merged
FORWARD, BACKWARD = 2, 5  # products of a (row, column) pair and head: each 2 * dim operations
FP32 = 4
CAUSAL_MERGED = 0.75  # rows of O that an average step of a causal ring writes
RING, ALL_GATHER, ALL_TO_ALL, HALO = "ring", "all_gather", "a2a", "halo"
GATHER_QUERIES = "gather_q"
HIERARCHICAL = "a2a+ring"


@dataclass(frozen=True)
class Topology:
    """Speed of the devices, measured or given: TFLOP/s of attention, GB/s a device and direction.

    `gbps_outer` counts between groups of `inner` ranks; None: as `gbps`.
    """

    tflops_forward: float = 600.0
    tflops_backward: float = 500.0
    gbps: float = 370.0
    gbps_outer: float | None = None
    memory_tbps: float = MERGE / 1e12

    @property
    def outer(self) -> float:
        """Bytes a second between groups."""
        return 1e9 * (self.gbps if self.gbps_outer is None else self.gbps_outer)


@dataclass(frozen=True)
class Shape:
    """A problem: global lengths; window bounds inclusive, None: none; bytes of an element."""

    world: int
    seqlen_q: int
    seqlen_kv: int
    heads_q: int
    heads_kv: int
    dim_qk: int
    dim_v: int
    batch: int = 1
    element: int = 2
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    zigzag: bool = True
    inner: int = 1

    @property
    def rows(self) -> float:
        """Local rows of keys."""
        return self.seqlen_kv / self.world

    @property
    def bounds(self) -> tuple[float, float]:
        """Columns before and after the diagonal that a row may attend to."""
        left, right = self.window
        left = self.seqlen_kv if left is None else min(left, self.seqlen_kv)
        right = self.seqlen_kv if right is None else min(right, self.seqlen_kv)
        return left, 0 if self.causal else right

    @property
    def pairs(self) -> float:
        """Visible pairs of the whole problem, for one head: exact for square ones."""
        left, right = self.bounds
        n, m = self.seqlen_q, self.seqlen_kv
        hidden = sum((m - x) * (m - x - 1) / 2 for x in (left, right))  # triangles
        return max(self.batch * (n * m - hidden * n / max(m, 1)), 0.0)


@dataclass(frozen=True)
class Prediction:
    """Seconds, and bytes that each rank receives, of one direction."""

    strategy: str
    seconds: float
    compute: float  # of the pairs alone, shared by all ranks
    received: float
    transfer: float  # seconds of the transfer of one step over those of its computation
    extra: float  # bytes of memory beyond the tensors themselves, at the peak

    @property
    def efficiency(self) -> float:
        """Of linear scaling."""
        return self.compute / self.seconds if self.seconds else 1.0


def _steps(n: int, compute: float, transfer: float, merge: float, balance: float) -> float:
    """n steps of equal work; the slowest member takes 1 / balance as long."""
    step = compute / n / balance
    return step + (n - 1) * (max(step, transfer) + merge) + n * LAUNCH


def _balance(s: Shape, members: int) -> float:
    """Of a causal mask: the last of contiguous shards computes almost twice the average."""
    causal = s.causal and s.window[0] is None and not s.zigzag
    return members / (2 * members - 1) if causal else 1.0


def predict(strategy: str, s: Shape, topology: Topology, backward: bool = False) -> Prediction:
    """One direction of a strategy. Balance, bytes and launches follow the schedule."""
    rate = topology.tflops_backward if backward else topology.tflops_forward
    dims = (s.dim_qk + s.dim_v) / 2
    products = BACKWARD if backward else FORWARD
    compute = products * 2 * s.pairs * s.heads_q * dims / (rate * 1e12) / s.world
    inner = s.world if strategy == ALL_TO_ALL else s.inner if strategy == HIERARCHICAL else 1
    members = s.world // inner
    row_kv = s.batch * s.heads_kv * (s.dim_qk + s.dim_v)
    row_o = s.batch * s.heads_q * s.dim_v
    kv = s.rows * row_kv * (s.element + (FP32 if backward else 0))  # dK and dV travel in fp32
    local_o = s.seqlen_q / s.world * row_o
    written = CAUSAL_MERGED if s.causal and s.zigzag else 1.0
    merge = written * 3 * FP32 * local_o / (topology.memory_tbps * 1e12)
    link = topology.outer if inner == 1 and s.inner > 1 else 1e9 * topology.gbps
    received = exchange = extra = 0.0
    if inner > 1:
        row_q = s.batch * s.heads_q * (s.dim_qk + s.dim_v)  # Q and O
        local = (s.seqlen_q / s.world * row_q + s.rows * row_kv) * s.element
        received = local * (2 if backward else 1) * (inner - 1) / inner
        exchange = received / (1e9 * topology.gbps)
        extra, link = local, topology.outer
    if strategy == GATHER_QUERIES:
        row_q = s.batch * s.heads_q * s.dim_qk
        there = s.element * (row_q + (row_o * 2 if backward else 0))  # dO and O, too
        back = FP32 * (row_q if backward else row_o)
        received = (s.world - 1) * s.seqlen_q / s.world * (there + back)
        extra = s.seqlen_q * (row_q * s.element + FP32 * row_o)
        transfer = received / link
        seconds = (
            transfer + compute + 2 * LAUNCH + 3 * back * s.seqlen_q / (topology.memory_tbps * 1e12)
        )
    elif strategy in (ALL_GATHER, HALO):
        left, right = s.bounds
        pieces = 2 if s.zigzag else 1
        rows = min(pieces * (left + right), s.seqlen_kv - s.rows)
        rows = rows if strategy == HALO else s.seqlen_kv - s.rows
        received = rows * row_kv * (s.element + (FP32 if backward else 0))
        extra = (rows + s.rows) * row_kv * (FP32 if backward else s.element)
        seconds = received / link + compute / _balance(s, s.world) + pieces * LAUNCH
        transfer = received / link
    else:
        transfer = kv / link if members > 1 else 0.0
        seconds = exchange + _steps(members, compute, transfer, merge, _balance(s, members))
        received += (members - 1) * kv
        extra += 2 * kv + (2 * FP32 * local_o if members > 1 else 0.0)
    step = compute / members if strategy not in (ALL_GATHER, HALO, GATHER_QUERIES) else compute
    return Prediction(strategy, seconds, compute, received, transfer / step if step else 0.0, extra)
