"""The tests for "the accelerator" on CUDA, where this PyTorch is built for it and there is no GPU.

See cudart_on_cpu.py. Here run those that are about what torchpin does with CUDA's own functions:
``make test-cuda`` runs all of them.
"""

from __future__ import annotations

import re
import subprocess
import sys

import cudart_on_cpu
import pytest
from common_pin import ACCELERATOR, BASE, HERE

WITHOUT_KERNELS = "not test_copies_to_the_host_arrive"
"""One test of the conformance suite copies every other number, which takes a kernel."""

pytestmark = [
    pytest.mark.skipif(ACCELERATOR == "cuda", reason="they run on CUDA already"),
    pytest.mark.skipif(bool(cudart_on_cpu.why_not()), reason=str(cudart_on_cpu.why_not())),
]


def passed(*arguments: str) -> int:
    """Runs pytest with these arguments on the stand-in for CUDA; how many tests passed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=HERE,
        env=cudart_on_cpu.environment(),
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    count = re.search(r"(\d+) passed", done.stdout)
    assert count is not None, done.stdout
    return int(count[1])


def test_conformance() -> None:
    suite = ["--pyargs", "torchpin.conformance", "--accelerator", "cuda"]
    adaptor = ["--adaptor", "conformance_adaptor"]
    assert passed(*suite, *adaptor, "-k", WITHOUT_KERNELS) > 70


@pytest.mark.parametrize(
    ("file", "least"), [("test_host_memory.py", 20), ("test_pin_target.py", 40)], ids=str
)
def test_pinned_memory(file: str, least: int) -> None:
    assert passed(file) >= least


@pytest.mark.skipif(BASE < (2, 8), reason="copies are reported to the host allocator from 2.8 on")
def test_in_place_mode() -> None:
    assert passed("test_transport_in_place.py") >= 10
