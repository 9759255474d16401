"""What the tests of pinned memory share: the accelerator they run on, and fresh processes.

Most tests are written for "the accelerator": CUDA where a GPU is present, else the reference
accelerator ``refdev``. Importing this module loads it, in the test process and in workers that
``spawn`` or ``forkserver`` start, and fails where torchpin is not switched on: a suite that ran on
stock PyTorch by accident would prove nothing.

What has to happen in a process of its own (import order, incomplete backends, warning filters) goes
through :func:`run_script`. An ``import torch`` takes seconds, so a script checks all it can at once.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
_ABSENT = pathlib.Path(tempfile.gettempdir()) / f"torchpin-tests-{os.getuid()}"


def _without_refdev() -> str:
    """A folder for the front of ``sys.path`` in which ``torch_refdev`` is an empty module.

    The autoloading of PyTorch finds that one and goes on, so that a process has no refdev although
    it is installed.
    """
    folder = _ABSENT / "without_refdev"
    folder.mkdir(parents=True, exist_ok=True)
    module = folder / "torch_refdev.py"
    text = "def _autoload():\n    pass\n"
    if not module.exists() or module.read_text() != text:
        # Written aside and renamed: another process may be reading it.
        draft = folder / f"draft-{os.getpid()}"
        draft.write_text(text)
        draft.replace(module)
    return str(folder)


def _gpu_is_present() -> bool:
    # Asked in another process, so that this one has not touched the driver when it forks workers.
    if not any(pathlib.Path("/dev").glob("nvidia[0-9]*")):
        return False
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TORCHPIN": "0"}
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.call([sys.executable, "-c", code], env=environment) == 0


def _load_accelerator() -> str:
    """Imports torch with exactly one accelerator; its name goes to child processes by environment."""
    name = os.environ.get("TORCHPIN_TEST_ACCELERATOR")
    if name is None:
        name = "cuda" if _gpu_is_present() else "refdev"
        os.environ["TORCHPIN_TEST_ACCELERATOR"] = name
    if name == "cuda":
        # PrivateUse1 wins over CUDA, so refdev must not be there.
        folder = _without_refdev()
        if folder not in sys.path:
            sys.path.insert(0, folder)
            path = os.environ.get("PYTHONPATH")
            os.environ["PYTHONPATH"] = os.pathsep.join([folder, path] if path else [folder])
        import torch
    else:
        import torch  # noqa: F401
        import torch_refdev  # noqa: F401
    return name


ACCELERATOR = _load_accelerator()
"""Type of the device that the tests run on: ``"cuda"`` or ``"refdev"``."""

import torch  # noqa: E402
import torchpin  # noqa: E402
from torch.utils.data import Dataset, IterableDataset  # noqa: E402

if not torchpin.is_enabled():
    from torchpin import _overlay

    raise RuntimeError(f"the tests need torchpin switched on: {_overlay.why_off()}")

BASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""Major and minor number of the installed PyTorch."""


def _driver() -> Any:
    if ACCELERATOR == "refdev":
        import torch_refdev

        return torch_refdev
    import cudart_on_cpu

    return cudart_on_cpu if cudart_on_cpu.is_preloaded() else None


DRIVER: Any = _driver()
"""What can hold copies back, refuse to page-lock and count: ``torch_refdev``, or the module
``cudart_on_cpu`` where that stands in for CUDA; None on a GPU."""


def accelerator_module() -> Any:
    """``torch.cuda`` or ``torch.refdev``."""
    return getattr(torch, ACCELERATOR)


def environment(
    accelerator: str | None = "refdev", broken: str = "", **changes: str | None
) -> dict[str, str]:
    """The environment of a fresh process.

    Args:
        accelerator: ``"refdev"``, ``"cuda"``, or None for a process that finds none. Up to 2.4 the
            process has to ``import torch_refdev`` itself.
        broken: what refdev shall lack, as ``TORCH_REFDEV_BREAK``.
        changes: variables to set, or with None to leave out.
    """
    result = dict(os.environ)
    for name in ("TORCHPIN", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_REFDEV_BREAK"):
        result.pop(name, None)
    # Blank, so that warnings go where the script sends them.
    result.pop("PYTHONWARNINGS", None)
    absent = _without_refdev()
    path = [part for part in result.get("PYTHONPATH", "").split(os.pathsep) if part]
    path = [part for part in path if part != absent]
    if accelerator != "refdev":
        path.insert(0, absent)
    path.append(str(HERE))
    result["PYTHONPATH"] = os.pathsep.join(path)
    if accelerator is None:
        result["CUDA_VISIBLE_DEVICES"] = ""
    else:
        result["TORCHPIN_TEST_ACCELERATOR"] = accelerator
    if broken:
        result["TORCH_REFDEV_BREAK"] = broken
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = value
    return result


def run_process(
    command: Sequence[str],
    env: dict[str, str] | None = None,
    status: int | None = 0,
    timeout: float = 120,
    cwd: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs ``command`` and checks its exit status (None: any); text on both outputs is kept."""
    done = subprocess.run(
        list(command), env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout
    )
    if status is not None and done.returncode != status:
        raise AssertionError(
            f"{' '.join(command)} ended with status {done.returncode}, not {status}\n"
            f"---- stdout\n{done.stdout}\n---- stderr\n{done.stderr}"
        )
    return done


def run_script(
    source: str,
    accelerator: str | None = "refdev",
    broken: str = "",
    flags: Sequence[str] = (),
    status: int | None = 0,
    timeout: float = 120,
    **changes: str | None,
) -> subprocess.CompletedProcess[str]:
    """Runs ``source`` as a program in a fresh Python, see :func:`environment`.

    The program is a file, so that workers can be spawned from it and warnings have a line.
    """
    with tempfile.TemporaryDirectory(prefix="torchpin-test-") as folder:
        script = pathlib.Path(folder, "script.py")
        script.write_text(textwrap.dedent(source).lstrip("\n"))
        return run_process(
            [sys.executable, *flags, str(script)],
            env=environment(accelerator, broken, **changes),
            status=status,
            timeout=timeout,
            cwd=folder,
        )


class Samples(Dataset):
    """``length`` samples ``(vector of the index, index)``."""

    def __init__(self, length: int = 8, width: int = 4) -> None:
        self.length = length
        self.width = width

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((self.width,), float(index)), index


class Stream(IterableDataset):
    """``length`` vectors, shared out between the workers."""

    def __init__(self, length: int = 8, width: int = 4) -> None:
        self.length = length
        self.width = width

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, self.length, step):
            yield torch.full((self.width,), float(index))
