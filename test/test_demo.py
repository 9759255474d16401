"""The main job from end to end: a training loop as anybody would write it gets pinned batches."""

from __future__ import annotations

import pathlib
import re
import sys

from common_pin import ACCELERATOR, BASE, run_process
from torch.testing._internal.common_utils import TestCase, run_tests

DEMO = pathlib.Path(__file__).resolve().parent.parent / "tools" / "demo.py"


class TestDemo(TestCase):
    def test_trains_on_pinned_batches_where_stock_has_none(self) -> None:
        done = run_process([sys.executable, str(DEMO), "--accelerator", ACCELERATOR], timeout=250)
        self.assertIn(f"batches pinned for {ACCELERATOR}: 230 of 230", done.stdout)
        self.assertIn("All is well.", done.stdout)

        rows = {}
        for line in done.stdout.partition("with torchpin\n")[2].splitlines():
            columns = re.split(r"  +", line.strip())
            if len(columns) == 3:
                rows[columns[0]] = columns[1:]
        self.assertEqual(len(rows), 6, done.stdout)
        for way, (_, ours) in rows.items():
            self.assertEqual(ours, f"pinned for {ACCELERATOR}", way)
        # What the seed change was about, on the release it was written for.
        if ACCELERATOR != "cuda" and BASE < (2, 5):
            for way in ("DataLoader(pin_memory=True)", "Tensor.pin_memory()"):
                self.assertNotEqual(rows[way][0], f"pinned for {ACCELERATOR}", way)


if __name__ == "__main__":
    run_tests()
