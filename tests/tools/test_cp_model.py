"""Tests of tools/cp_model.py: what the formula predicts where the answer is known."""

import importlib.util
import math
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def load():
    """The tool as a module."""
    spec = importlib.util.spec_from_file_location("cp_model", ROOT / "tools" / "cp_model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["cp_model"] = module
    spec.loader.exec_module(module)
    return module


MODEL = load()
COST = MODEL.COST
FREE = COST.Topology(gbps=math.inf, memory_tbps=math.inf)


def shape(world: int = 8, seqlen: int = 1 << 17, **options):
    """A causal problem of 32 heads."""
    return COST.Shape(world, seqlen, seqlen, 32, 32, 128, 128, **({"causal": True} | options))


class CpModel(unittest.TestCase):
    def test_pairs_are_exact_for_square_problems(self) -> None:
        for n, left, right in ((64, None, 0), (64, 7, 0), (64, 7, 5), (64, None, None)):
            counted = sum(
                (left is None or j >= i - left) and (right is None or j <= i + right)
                for i in range(n)
                for j in range(n)
            )
            causal = right == 0
            one = COST.Shape(1, n, n, 1, 1, 8, 8, causal=causal, window=(left, right))
            self.assertEqual(one.pairs, counted)

    def test_without_transfers_and_merges_only_launches_are_lost(self) -> None:
        for strategy in ("ring", "all_gather", "a2a"):
            predicted = COST.predict(strategy, shape(), FREE)
            lost = predicted.seconds - predicted.compute
            self.assertAlmostEqual(lost / COST.LAUNCH, round(lost / COST.LAUNCH), places=3)

    def test_contiguous_shards_of_a_causal_mask_are_unbalanced(self) -> None:
        predicted = COST.predict("ring", shape(world=4, zigzag=False), FREE)
        self.assertAlmostEqual(predicted.efficiency, 4 / 7, places=2)

    def test_a_ring_receives_the_keys_of_all_others(self) -> None:
        predicted = COST.predict("ring", shape(world=4, seqlen=4096), COST.Topology())
        self.assertEqual(predicted.received, 3 * 1024 * 32 * 256 * 2)

    def test_a_halo_depends_on_the_window_and_not_on_the_ranks(self) -> None:
        received = {
            COST.predict(
                "halo", shape(n, window=(1023, None), zigzag=False), COST.Topology()
            ).received
            for n in (4, 8, 64)
        }
        self.assertEqual(len(received), 1)

    def test_slow_links_favour_exchanges_inside_a_node(self) -> None:
        slow = COST.Topology(gbps_outer=50.0)
        wide = COST.Shape(1024, 1 << 20, 1 << 20, 64, 8, 128, 128, causal=True, inner=8)
        flat, nested = (COST.predict(s, wide, slow).efficiency for s in ("ring", "a2a+ring"))
        self.assertLess(flat, 0.4)
        self.assertGreater(nested, 0.85)

    def test_the_table_has_a_row_for_each_case(self) -> None:
        rows = MODEL.table()
        self.assertGreater(len(rows), 20)
        for row in rows:
            self.assertEqual(len(row), len(MODEL.HEADER))


if __name__ == "__main__":
    unittest.main()
