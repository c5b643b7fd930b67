"""Data sets of noise, the same at each run."""

from __future__ import annotations

from collections.abc import Callable

import torch

Transform = Callable[[torch.Tensor], torch.Tensor] | None


class MNIST(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """512 images of 28 x 28 to train with, 128 to test."""

    def __init__(
        self, root: str, train: bool = True, transform: Transform = None, download: bool = False
    ) -> None:
        chance = torch.Generator().manual_seed(int(train))
        self.images = torch.rand(512 if train else 128, 1, 28, 28, generator=chance)
        self.labels = torch.randint(10, (len(self.images),), generator=chance)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index]
        return (self.transform(image) if self.transform else image), int(self.labels[index])
