"""Fine-tuning on cached latents in aspect-ratio buckets, with samples of a class of one's own.

    python finetune_buckets.py --device cuda --pin_memory

Images of one bucket have the same size, so a batch is made of one bucket only. Everything about an
image is in an ``ImageInfo``; the collate function stacks a bucket's samples into one ``Batch`` and
keeps the records beside it. The data is made up, the structure is that of a text-to-image trainer.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

BUCKETS = [(512, 512), (448, 576), (576, 448)]


@dataclasses.dataclass
class ImageInfo:
    """One image: what was cached for it, and where it came from."""

    path: str
    caption: str
    bucket: tuple[int, int]
    latents: torch.Tensor
    latents_flipped: torch.Tensor | None = None
    text_encoder_outputs: list[torch.Tensor] = dataclasses.field(default_factory=list)
    alpha_mask: np.ndarray | None = None
    original_size: tuple[int, int] = (0, 0)
    repeats: int = 1


@dataclasses.dataclass
class Batch:
    """The images of one bucket that are trained on together."""

    latents: torch.Tensor
    prompts: list[torch.Tensor]
    masks: torch.Tensor | None
    images: list[ImageInfo]


class CachedImages(Dataset):
    """Makes up what a real data set would read from its cache."""

    def __init__(self, length: int = 24) -> None:
        self.buckets = [BUCKETS[index % len(BUCKETS)] for index in range(length)]

    def __len__(self) -> int:
        return len(self.buckets)

    def __getitem__(self, index: int) -> ImageInfo:
        height, width = self.buckets[index]
        generator = torch.Generator().manual_seed(index)
        latents = torch.randn(4, height // 8, width // 8, generator=generator)
        return ImageInfo(
            path=f"images/{index:05}.png",
            caption=f"picture number {index}",
            bucket=(height, width),
            latents=latents,
            latents_flipped=latents.flip(-1) if index % 2 else None,
            text_encoder_outputs=[
                torch.randn(77, 64, generator=generator),
                torch.randn(64, generator=generator),
            ],
            alpha_mask=np.ones((height // 8, width // 8), np.float32) if index % 3 == 0 else None,
            original_size=(height + 3, width + 5),
        )


class OneBucketAtATime(Sampler):
    """Batches of indices whose images have the same size."""

    def __init__(self, data: CachedImages, batch_size: int, seed: int = 0) -> None:
        self.data = data
        self.batch_size = batch_size
        self.random = random.Random(seed)

    def _batches(self) -> list[list[int]]:
        by_bucket: dict[tuple[int, int], list[int]] = {}
        for index, bucket in enumerate(self.data.buckets):
            by_bucket.setdefault(bucket, []).append(index)
        return [
            indices[start : start + self.batch_size]
            for indices in by_bucket.values()
            for start in range(0, len(indices), self.batch_size)
        ]

    def __len__(self) -> int:
        return len(self._batches())

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._batches()
        self.random.shuffle(batches)
        return iter(batches)


def collate(images: list[ImageInfo]) -> Batch:
    """One bucket's images, stacked; the records travel along."""
    masks = [
        torch.ones(image.latents.shape[-2:])
        if image.alpha_mask is None
        else torch.from_numpy(image.alpha_mask)
        for image in images
    ]
    return Batch(
        latents=torch.stack([image.latents for image in images]),
        prompts=[
            torch.stack(part)
            for part in zip(*(i.text_encoder_outputs for i in images), strict=True)
        ],
        masks=torch.stack(masks),
        images=images,
    )


class Denoiser(torch.nn.Module):
    """Stands for a network of a few billion parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = torch.nn.Linear(64, 4)
        self.image = torch.nn.Linear(4, 4)

    def forward(self, noisy: torch.Tensor, prompts: list[torch.Tensor]) -> torch.Tensor:
        bias = self.prompt(prompts[0].mean(dim=1) + prompts[1])
        return self.image(noisy.flatten(2).transpose(1, 2)) + bias[:, None]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pin_memory", action="store_true", help="page-lock batches in the loader")
    arguments = parser.parse_args()
    torch.manual_seed(0)

    data = CachedImages()
    loader = DataLoader(
        data,
        batch_sampler=OneBucketAtATime(data, batch_size=4),
        collate_fn=collate,
        num_workers=arguments.workers,
        pin_memory=arguments.pin_memory,
    )
    model = Denoiser().to(arguments.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pinned = tensors = 0
    for epoch in range(arguments.epochs):
        total = 0.0
        for batch in loader:
            for tensor in (batch.latents, *batch.prompts, batch.images[0].latents):
                tensors += 1
                pinned += tensor.is_pinned()
            latents = batch.latents.to(arguments.device, non_blocking=True)
            prompts = [prompt.to(arguments.device, non_blocking=True) for prompt in batch.prompts]
            masks = batch.masks.to(arguments.device, non_blocking=True)
            found = model(latents, prompts)
            error = (found - latents.flatten(2).transpose(1, 2)) ** 2
            loss = (error * masks.flatten(1)[..., None]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / len(loader):.4f}")
    print(f"{pinned} of {tensors} tensors were pinned")


if __name__ == "__main__":
    main()
