"""The examples of the backend guide: each is built and used as the guide says.

They are built by their own script against the torchpin that is installed, as a vendor would, and each
runs in a process that has no other accelerator.
"""

from __future__ import annotations

import functools
import pathlib
import sys
import tempfile

import torchpin
from common_pin import BASE, HERE, environment, run_process, run_script
from torch.testing._internal.common_utils import TestCase, run_tests

EXAMPLES = HERE.parent / "docs/source/examples"

PINNING = """
import sys, warnings
sys.path.insert(0, FOLDER)
import torch
from torch.utils.data import DataLoader, TensorDataset

LOAD

import torchpin
warnings.simplefilter("error")

tensor = torch.arange(1000.0)
assert not tensor.is_pinned()
pinned = tensor.pin_memory()
assert torch.equal(pinned, tensor) and pinned.is_pinned() and pinned[7:].is_pinned()
assert pinned.pin_memory() is pinned
assert torch.empty(10, pin_memory=True).is_pinned()

data = TensorDataset(torch.arange(64.0).reshape(16, 4))
for workers in WORKERS:
    batches = [b for (b,) in DataLoader(data, batch_size=4, pin_memory=True, num_workers=workers)]
    assert all(batch.is_pinned() for batch in batches), workers
    assert torch.equal(torch.cat(batches), data.tensors[0])
"""

NO_STATISTICS = """
assert torchpin.host_memory_stats() == {}, torchpin.host_memory_stats()
"""

STATISTICS = """
MIB = 1 << 20
del pinned, batches
torchpin.empty_host_cache()
assert torchpin.host_memory_stats()["active_bytes.current"] == 0, torchpin.host_memory_stats()
held = torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True)
stats = torchpin.host_memory_stats()
assert 3 * MIB <= stats["active_bytes.current"] <= 3 * MIB * 9 // 8, stats
torchpin.max_host_memory(stats["allocated_bytes.current"] + MIB)
try:
    torch.empty(2 * MIB, dtype=torch.uint8, pin_memory=True)
except RuntimeError as error:
    assert "cap" in str(error), error
else:
    raise AssertionError("pinned beyond the cap")
torchpin.max_host_memory(None)
del held
torchpin.empty_host_cache()
assert torchpin.host_memory_stats()["allocated_bytes.current"] == 0
"""

REFUSED = """
import resource
MIB = 1 << 20
limits = resource.getrlimit(resource.RLIMIT_MEMLOCK), resource.getrlimit(resource.RLIMIT_AS)
large = torch.ones(16 * MIB)
size = next(line for line in open("/proc/self/status") if line.startswith("VmSize:"))
resource.setrlimit(resource.RLIMIT_MEMLOCK, (48 << 10, limits[0][1]))
resource.setrlimit(resource.RLIMIT_AS, (int(size.split()[1]) * 1024 + 16 * MIB, limits[1][1]))
try:
    large.pin_memory()
except RuntimeError as error:
    message = str(error)
else:
    raise AssertionError("no error")
resource.setrlimit(resource.RLIMIT_AS, limits[1])
assert f"the driver refused to page-lock {64 * MIB} bytes" in message, message
assert f"Limit of this process on locked memory (ulimit -l): {48 << 10} bytes" in message, message
"""

IN_PLACE = """
with torchpin.register_host_memory(tensor):
    assert tensor.is_pinned() and tensor.pin_memory() is tensor
    with torchpin.register_host_memory(tensor):
        pass
    assert tensor.is_pinned()
assert not tensor.is_pinned()
"""

NOT_IN_PLACE = """
try:
    torchpin.register_host_memory(tensor)
except RuntimeError as error:
    assert "HostMemoryHooks" in str(error), error
else:
    raise AssertionError("page-locked without the functions for it")
"""

# In place needs a base that reports copies.
TRANSPORT = f"""
with torchpin.transport("in_place"):
    iterator = iter(DataLoader(data, batch_size=4, pin_memory=True, num_workers=1))
    for (batch,) in iterator:
        assert batch.is_pinned()
stats = torchpin.stats(iterator)
assert stats["batches"] == 4, stats
# A batch that finds enough slots locked, or whose worker is late to let go of it, is copied instead.
copied = sum(stats["copied_instead"].values())
assert copied < 4, stats
assert stats["in_place"] + copied == ({4 if BASE >= (2, 8) else 0}), stats
"""


def not_offered(*depths: int) -> str:
    """What the conformance suite finds before it begins."""
    return f"""
from torchpin.conformance import diagnosis
assert sorted(diagnosis._not_offered()) == {list(depths)}, diagnosis._not_offered()
"""


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="torchpin-examples-")


@functools.cache
def library(depth: int) -> str:
    target = str(pathlib.Path(_folder().name, f"backend_depth{depth}.so"))
    command = [sys.executable, str(EXAMPLES / "build.py"), str(depth), target]
    done = run_process(command, env=environment(accelerator=None), cwd=_folder().name)
    assert "warning" not in done.stderr, done.stderr
    return target


def run_example(
    folder: pathlib.Path, load: str, *parts: str, workers: tuple[int, ...] = (0, 2)
) -> None:
    source = "".join((PINNING, *parts)).replace("FOLDER", repr(str(folder)), 1)
    source = source.replace("LOAD", load, 1).replace("WORKERS", repr(workers), 1)
    run_script(source, accelerator=None)


class BackendExamplesTest(TestCase):
    def run_depth(self, depth: int, *parts: str) -> None:
        load = f"import backend\nbackend.load({library(depth)!r})"
        run_example(EXAMPLES, load, *parts)

    def test_depth_1(self) -> None:
        self.run_depth(1, NO_STATISTICS, NOT_IN_PLACE, REFUSED, not_offered(2, 3))

    def test_depth_2(self) -> None:
        self.run_depth(2, STATISTICS, NOT_IN_PLACE, not_offered(3))

    def test_depth_3(self) -> None:
        self.run_depth(3, STATISTICS, IN_PLACE, TRANSPORT, not_offered())

    def test_python_only(self) -> None:
        load = "import backend\nbackend.load()"
        # Before 2.10 there is no device guard for them, and so no pin thread.
        workers = (0, 2) if BASE >= (2, 10) else (0,)
        parts = (STATISTICS, IN_PLACE, not_offered())
        run_example(EXAMPLES / "backend_python", load, *parts, workers=workers)

    def test_headers_of_an_editable_install(self) -> None:
        """There the package is a folder of the checkout, and has no folder ``include``."""
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "torchpin").symlink_to(HERE.parent / "tools/overlay")
            script = (
                "import sys, torchpin; print(*torchpin.include_paths(), sep='\\n'); "
                "assert 'torch' not in sys.modules"
            )
            done = run_process(
                [sys.executable, "-c", script],
                env=environment(accelerator=None, PYTHONPATH=folder, TORCHPIN="0"),
                cwd=folder,
            )
        for paths in (done.stdout.split(), torchpin.include_paths()):
            for header in ("ATen/HostMemoryHooks.h", "ATen/core/CachingHostMemory.h", "c10/core"):
                found = [path for path in paths if pathlib.Path(path, header).exists()]
                self.assertTrue(found, msg=f"{header} in {paths}")


if __name__ == "__main__":
    run_tests()
