"""TransformerEngine's 43 context-parallel cases in bf16 in processes over gloo.

TE_ATTENTION_CP_ROWS: the rows of a sequence; TransformerEngine's 4096 take minutes.
"""

import os
import pickle
import traceback
from pathlib import Path

import pytest
import torch.distributed as dist

from processes import join, start
from te_cp_cases import CASES, ROWS, Case, check

WORLD = 4
MINE = int(os.environ.get("TE_ATTENTION_CP_ROWS", "256"))


def work(rank: int, folder: str, port: int) -> None:
    join(rank, WORLD, port)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    strided = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    results: dict[str, str] = {}
    for i, case in enumerate(CASES):
        pair = rank // 2
        group: object = pairs[pair]
        if case.world == WORLD:
            group = [pairs[pair], strided[rank % 2]]
        elif i % 2 != pair:  # the pairs of ranks share the cases of two ranks
            continue
        try:
            results[str(case)] = check(case, rank % case.world, group, rows=MINE)
        except Exception:
            results[str(case)] = traceback.format_exc()
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("cases")
    start(work, WORLD, str(folder))
    return [pickle.loads(Path(folder, f"{r}.pickle").read_bytes()) for r in range(WORLD)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_compute_what_one_device_computes(results: list[dict], case: Case) -> None:
    found = [of_rank[str(case)] for of_rank in results if str(case) in of_rank]
    assert len(found) == case.world
    assert found == [""] * case.world, "\n".join(found)


def test_the_cases_are_those_of_transformer_engine() -> None:
    counts: dict[tuple, int] = {}
    for case in CASES:
        key = (case.backend, case.comm_type)
        counts[key] = counts.get(key, 0) + 1
    assert counts == {
        ("flash", "p2p"): 4, ("flash", "all_gather"): 3, ("flash", "a2a"): 6,
        ("flash", "a2a+p2p"): 2, ("fused", "p2p"): 8, ("fused", "all_gather"): 5,
        ("fused", "a2a"): 12, ("fused", "a2a+p2p"): 3,
    }  # fmt: skip
    assert ROWS == 4096
