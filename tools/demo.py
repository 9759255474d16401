"""Trains a small network on real data with pinned batches, and tells what was pinned for whom.

The data are the handwritten digits that scikit-learn ships. The accelerator is CUDA where there is a
GPU, else the reference accelerator ``refdev``. The training loop is what anybody would write: nothing
in it knows of torchpin. Ends with status 1 if a batch was not pinned, the loss did not fall, or the
network learned too little.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.utils.data import TensorDataset

EPOCHS = 10
BATCH_SIZE = 64
ACCURACY_TO_REACH = 0.9


@dataclasses.dataclass
class Batch:
    """A batch of a program that likes names better than positions."""

    images: torch.Tensor
    labels: torch.Tensor


def find_accelerator() -> str:
    """``"cuda"`` if a GPU can be used, else ``"refdev"``.

    Another process looks: this one has to decide before it imports torch.
    """
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    environ = {**os.environ, "TORCHPIN": "0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    status = subprocess.run([sys.executable, "-c", code], env=environ).returncode
    return "cuda" if status == 0 else "refdev"


def load(accelerator: str) -> None:
    """Imports torch with this accelerator and no other."""
    if accelerator == "cuda":
        # A PrivateUse1 backend is the current accelerator also where CUDA is, and PyTorch loads
        # refdev by itself if it finds it: it must find an empty module.
        empty = types.ModuleType("torch_refdev")
        vars(empty)["_autoload"] = lambda: None
        sys.modules["torch_refdev"] = empty
        import torch
    else:
        import torch  # noqa: F401
        import torch_refdev  # noqa: F401  (PyTorch 2.3 and 2.4 load no backend by themselves)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Images (64 numbers from 0 to 1) and labels, to learn from and to check on."""
    import torch
    from sklearn.datasets import load_digits
    from torch.utils.data import TensorDataset

    data = load_digits()
    # They lie in the order of the people who wrote them.
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32).flatten(1)[order] / 16
    labels = torch.tensor(data.target)[order]
    return TensorDataset(images[360:], labels[360:]), TensorDataset(images[:360], labels[:360])


def train(accelerator: str) -> bool:
    """The training loop; returns whether all went as it should."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    torch.manual_seed(0)
    device = torch.device(accelerator)
    learn, check = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(learn, batch_size=BATCH_SIZE, num_workers=2, pin_memory=True)

    batches = pinned = 0
    losses = []
    for epoch in range(1, EPOCHS + 1):
        total = 0.0
        for images, labels in loader:
            batches += 1
            pinned += images.is_pinned() and labels.is_pinned()
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(labels)
        losses.append(total / len(learn))
        print(f"epoch {epoch:2}  loss {losses[-1]:.4f}", flush=True)

    correct = 0
    with torch.no_grad():
        for images, labels in DataLoader(check, batch_size=BATCH_SIZE, pin_memory=True):
            answers = model(images.to(device, non_blocking=True)).argmax(1).cpu()
            correct += int((answers == labels).sum())
    accuracy = correct / len(check)
    print(f"batches pinned for {accelerator}: {pinned} of {batches}")
    print(f"accuracy on {len(check)} digits not learned from: {accuracy:.1%}")
    return pinned == batches and losses[-1] < losses[0] / 2 and accuracy >= ACCURACY_TO_REACH


def _memory_of(tensor: torch.Tensor, accelerator: str) -> str:
    """Whose pinned memory a tensor is in. For refdev its driver says so, not PyTorch."""
    if accelerator == "refdev":
        import torch_refdev

        locked = torch_refdev.is_host_pinned(tensor.data_ptr())
        if locked != tensor.is_pinned():
            return f"page-locked: {locked}, is_pinned(): {tensor.is_pinned()}"
    else:
        locked = tensor.is_pinned()
    return f"pinned for {accelerator}" if locked else "ordinary memory"


def look(accelerator: str) -> dict[str, str]:
    """What each way to ask for pinned memory gives in this process."""
    import torch
    from torch.utils.data import DataLoader

    torch.ones(1).to(accelerator)  # as a program that uses the accelerator has done
    plain, (learn, _) = torch.ones(64, 64), digits()

    def from_storage() -> torch.Tensor:
        storage = plain.untyped_storage().pin_memory()
        return torch.empty(0).set_(storage)

    def from_loader(workers: int) -> torch.Tensor:
        loader = DataLoader(learn, BATCH_SIZE, num_workers=workers, pin_memory=True)
        images: torch.Tensor = next(iter(loader))[0]
        return images

    def from_dataclass() -> torch.Tensor:
        def collate(items: list[tuple[torch.Tensor, torch.Tensor]]) -> Batch:
            images, labels = zip(*items, strict=True)
            return Batch(torch.stack(images), torch.stack(labels))

        loader = DataLoader(learn, BATCH_SIZE, collate_fn=collate, pin_memory=True)
        batch: Batch = next(iter(loader))
        return batch.images

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "DataLoader(pin_memory=True)": lambda: from_loader(0),
        "the same with two workers": lambda: from_loader(2),
        "the same with a dataclass as batch": from_dataclass,
        "Tensor.pin_memory()": plain.pin_memory,
        "torch.empty(pin_memory=True)": lambda: torch.empty(8, pin_memory=True),
        "UntypedStorage.pin_memory()": from_storage,
    }
    found = {}
    for way, ask in ways.items():
        try:
            found[way] = _memory_of(ask(), accelerator)
        except Exception as error:
            text = str(error).strip().partition("\n")[0]
            found[way] = f"{type(error).__name__}: {text[:40]}"
    return found


def _look_elsewhere(accelerator: str, torchpin: str) -> dict[str, str]:
    """:func:`look` in a fresh process, with or without torchpin."""
    command = [sys.executable, "-W", "ignore", __file__, "--look", "--accelerator", accelerator]
    environ = {**os.environ, "TORCHPIN": torchpin}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument(
        "--accelerator", choices=["cuda", "refdev"], help="instead of the one that is found"
    )
    parser.add_argument("--look", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    accelerator = options.accelerator or find_accelerator()
    load(accelerator)
    if options.look:
        print(json.dumps(look(accelerator)))
        return 0

    import torch
    import torchpin

    state = "on" if torchpin.is_enabled() else "OFF"
    print(f"PyTorch {torch.__version__}, torchpin {torchpin.__version__} {state}", end=", ")
    print(f"accelerator {accelerator}", flush=True)
    good = train(accelerator)

    stock, ours = (_look_elsewhere(accelerator, torchpin) for torchpin in ("0", "1"))
    width = [max(map(len, column)) for column in (stock, [*stock.values(), "stock PyTorch"])]
    print(f"\n{'':{width[0]}}  {'stock PyTorch':{width[1]}}  with torchpin")
    for way, where in stock.items():
        print(f"{way:{width[0]}}  {where:{width[1]}}  {ours[way]}")
    print("\nAll is well." if good else "\nNot as it should be, see above.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
