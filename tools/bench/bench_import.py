"""How much longer ``import torch`` takes with torchpin.

Processes that import torch with torchpin and without it take turns. "Without" is what a process sees
in which torchpin is not installed: PyTorch looks for backends to load and finds none. The reference
accelerator is left out of both. The promise is 20 ms at most.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

PROMISED_MS = 20

# A module of that name is there already when PyTorch looks for a backend.
_ABSENT = """
import os, sys, types
for name in {names}:
    module = types.ModuleType(name)
    module._autoload = module.autoload = lambda: None
    sys.modules[name] = module
import torch
assert torch.utils.data.dataloader is not None
if {check}:
    import torchpin
    assert torchpin.is_enabled()
# The end of an interpreter that has loaded PyTorch takes hundreds of milliseconds, never the same.
sys.stdout.flush()
os._exit(0)
"""


def measure(with_torchpin: bool, check: bool = False) -> tuple[float, float]:
    """Elapsed and CPU seconds of a process that imports torch, and checks that torchpin is on."""
    names = ["torch_refdev"] if with_torchpin else ["torch_refdev", "torchpin._autoload"]
    code = _ABSENT.format(names=names, check=check)
    environ = {**os.environ, "TORCHPIN": "1" if with_torchpin else "0"}
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", code], env=environ)
    _, status, usage = os.wait4(process.pid, 0)
    elapsed = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"import torch failed with status {process.returncode}")
    return elapsed, usage.ru_utime + usage.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15, help="pairs of processes [%(default)s]")
    options = parser.parse_args()
    # Before anything is measured: files into the page cache, byte code written.
    measure(False)
    measure(True, check=True)
    rounds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number in range(options.rounds):
        for with_torchpin in (False, True) if number % 2 else (True, False):
            rounds[with_torchpin].append(measure(with_torchpin))

    import torch

    print(f"import torch, PyTorch {torch.__version__}, medians of {options.rounds} processes each")
    print(f"{'':10}{'without':>12}{'with':>12}{'difference':>14}{'ratio':>9}")
    for column, name in enumerate(("elapsed", "CPU")):
        stock, ours = (
            statistics.median(sample[column] for sample in rounds[which]) * 1000
            for which in (False, True)
        )
        print(f"{name:10}{stock:9.0f} ms{ours:9.0f} ms{ours - stock:+11.1f} ms{ours / stock:9.3f}")
    print(f"promised: at most {PROMISED_MS} ms more")
    return 0


if __name__ == "__main__":
    sys.exit(main())
