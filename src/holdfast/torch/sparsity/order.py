"""The order of pruning (`holdfast.numeric.threshold`) for tensors in memory, on any device.

- A magnitude's key is its bits as a float64, to which every float of fewer bits converts exactly.
- What is pruned already has the lowest keys of all (`HELD` is added), so that it goes first whatever its value, and comes back, the
  largest first, only where fewer are to be pruned. So keys have signs here.
- In ordinary memory numpy makes the random keys, in steps that stay in the cache: torch takes many times as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from holdfast.core.value import Value
from holdfast.numeric import threshold as numpy_keys
from holdfast.numeric.threshold import SPLITMIX, KeyBits, Threshold, answered, nan_key, search

CHUNK_ELEMENTS = 1 << 20
"""Elements at a time: 8 MiB of keys."""

HELD = -(1 << 63)
"""Added to the key of what is pruned already."""
NAN = nan_key("float64")

STEP, *FACTORS = (number - (1 << 64) for number in SPLITMIX)
"""As signed numbers: torch multiplies those modulo 2^64."""


def magnitude_keys(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float64).abs().view(torch.int64).clamp(max=NAN)


def score_keys(scores: torch.Tensor) -> torch.Tensor:
    """The order of any numbers, as keys that are not negative. Where there are negative ones, the last bit of a float64 is lost."""
    scores = scores.to(torch.float64) + 0.0
    if not bool((scores < 0).any()):
        return magnitude_keys(scores)
    bits = torch.where(scores.isnan(), NAN, scores.view(torch.int64))
    return (torch.where(bits < 0, bits ^ ~HELD, bits) >> 1) + (1 << 62)


def random_keys(start: int, stop: int, *, seed: int, device: torch.device) -> torch.Tensor:
    """The keys of elements `start` to `stop` of a random order.

    >>> random_keys(0, 2, seed=0, device=torch.device("cpu")).tolist()
    [8147104208329303767, 3980143261097177850]
    """
    if device.type == "cpu":
        return torch.from_numpy(numpy_keys.random_keys(start, stop, seed=seed).view(np.int64))
    return _splitmix(start, stop, seed=seed, device=device)


def _splitmix(start: int, stop: int, *, seed: int, device: torch.device) -> torch.Tensor:
    """`random_keys`, by torch."""
    seed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
    x = torch.arange(start + 1, stop + 1, dtype=torch.int64, device=device) * STEP + seed
    x = (x ^ _shifted(x, 30)) * FACTORS[0]
    x = (x ^ _shifted(x, 27)) * FACTORS[1]
    return _shifted(x ^ _shifted(x, 31), 1)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, with zeros from the left: torch repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


class Keys(Value, frozen=True, eq=False):
    """The keys of one tensor's elements, made when they are asked for, in chunks."""

    values: torch.Tensor
    """One dimension: numbers to be ordered by magnitude, or keys."""
    pruned: torch.Tensor | None = None
    """One dimension, true for what is pruned already."""
    seed: int | None = None
    """For a random order, whatever the values."""

    @property
    def count(self) -> int:
        return self.values.numel()

    def chunks(self) -> Iterator[torch.Tensor]:
        for start in range(0, self.count, CHUNK_ELEMENTS):
            stop = min(start + CHUNK_ELEMENTS, self.count)
            values = self.values[start:stop]
            if self.seed is not None:
                keys = random_keys(start, stop, seed=self.seed, device=values.device)
            else:
                keys = magnitude_keys(values) if values.is_floating_point() else values
            yield keys if self.pruned is None else torch.where(self.pruned[start:stop], keys + HELD, keys)


def select(sources: Sequence[Keys], count: int) -> Threshold:
    """The threshold below which exactly `count` of all the keys are."""
    if count <= 0:
        return Threshold(HELD, 0)
    total = sum(source.count for source in sources)
    if count > total:
        raise ValueError(f"{count} of {total} elements cannot be pruned")

    def answer(bits: KeyBits) -> np.ndarray:
        chunks = (keys for source in sources for keys in source.chunks())
        if bits.taken:
            left = torch.cat([_with_prefix(keys, bits).cpu() for keys in chunks])
            return left.numpy().view(np.uint64) ^ np.uint64(1 << 63)
        bins = torch.zeros(1 << (bits.known - bits.shift), dtype=torch.int64)
        base = _signed(bits.prefix << (bits.known - bits.shift), bits.shift)
        for keys in chunks:
            bins += torch.bincount((_with_prefix(keys, bits) >> bits.shift) - base, minlength=len(bins)).cpu()
        return bins.numpy()

    found = answered(search(count, total=total, width=64), answer)
    return Threshold(_signed(found.key, 0), found.ties)


def _with_prefix(keys: torch.Tensor, bits: KeyBits) -> torch.Tensor:
    return keys if bits.known == 64 else keys[(keys >> bits.known) == _signed(bits.prefix, bits.known)]


def _signed(prefix: int, known: int) -> int:
    """The leading bits of a signed key, from those of a key that begins at 0."""
    return prefix - (1 << (63 - known))


def keep_above(sources: Sequence[Keys], threshold: Threshold) -> list[torch.Tensor]:
    """For each source what stays, of one dimension."""
    ties = threshold.ties
    masks = []
    for source in sources:
        mask = torch.empty(source.count, dtype=torch.bool, device=source.values.device)
        start = 0
        for keys in source.chunks():
            part = mask[start : start + len(keys)]
            torch.ge(keys, threshold.key, out=part)
            if ties:
                go = (keys == threshold.key).nonzero().flatten()[:ties]
                part[go] = False
                ties -= len(go)
            start += len(keys)
        masks.append(mask)
    return masks
