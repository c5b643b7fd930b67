"""The lowest of very many, exactly: which elements go when a part of them has to.

1. Every element has a key, a 64-bit integer in the order in which elements go. Of equal keys the lowest index goes first, and over
   several tensors the first tensor. So a result is the same on every device, and the same as a twin in numpy.
2. A magnitude's key is its bits as a float64, to which every float of fewer bits converts exactly, and whose bits are in the order
   of the numbers. -0.0 is 0.0. All NaN are equal and come last: what is broken is not hidden.
3. What is pruned already has the lowest keys of all (`HELD` is added), so that it goes first whatever its value, and comes back,
   the largest first, only where fewer are to be pruned.
4. Random keys are SplitMix64 of a seed and the index, without its lowest bit.
5. The key of the n-th lowest is found from histograms of 16 more bits at a time, in chunks, until few candidates are left to sort.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = ["HELD", "Keys", "Threshold", "keep_above", "magnitude_keys", "random_keys", "score_keys", "select"]

CHUNK = 1 << 20
"""Elements at a time: 8 MiB of keys."""
FEW = 1 << 20
"""As many keys as are sorted directly: 8 MiB."""
SHIFTS = (47, 31, 15, 0)
"""Bits below those that one histogram counts by; the first has 17 of them, for keys have signs."""

HELD = -(1 << 63)
"""Added to the key of what is pruned already."""
NAN = 0x7FF0_0000_0000_0001
"""One more than the bits of infinity."""

GOLDEN = 0x9E37_79B9_7F4A_7C15 - (1 << 64)
MIX_1 = 0xBF58_476D_1CE4_E5B9 - (1 << 64)
MIX_2 = 0x94D0_49BB_1331_11EB - (1 << 64)
"""SplitMix64's constants (Steele, Lea and Flood, 2014), as signed numbers: torch multiplies those modulo 2^64."""


def magnitude_keys(values: torch.Tensor) -> torch.Tensor:
    """The order of absolute values."""
    return values.to(torch.float64).abs().view(torch.int64).clamp(max=NAN)


def score_keys(scores: torch.Tensor) -> torch.Tensor:
    """The order of any numbers, as keys that are not negative. Where there are negative ones, the last bit of a float64 is lost."""
    scores = scores.to(torch.float64) + 0.0
    if not bool((scores < 0).any()):
        return magnitude_keys(scores)
    bits = torch.where(scores.isnan(), NAN, scores.view(torch.int64))
    return (torch.where(bits < 0, bits ^ ~HELD, bits) >> 1) + (1 << 62)


def random_keys(start: int, stop: int, seed: int, device: torch.device) -> torch.Tensor:
    """The keys of elements `start` to `stop` of a random order.

    >>> random_keys(0, 2, 0, torch.device("cpu")).tolist()
    [8147104208329303767, 3980143261097177850]
    """
    seed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
    x = torch.arange(start + 1, stop + 1, dtype=torch.int64, device=device) * GOLDEN + seed
    x = (x ^ _shifted(x, 30)) * MIX_1
    x = (x ^ _shifted(x, 27)) * MIX_2
    return _shifted(x ^ _shifted(x, 31), 1)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, with zeros from the left: torch repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
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
        for start in range(0, self.count, CHUNK):
            stop = min(start + CHUNK, self.count)
            values = self.values[start:stop]
            if self.seed is not None:
                keys = random_keys(start, stop, self.seed, values.device)
            else:
                keys = magnitude_keys(values) if values.is_floating_point() else values
            yield keys if self.pruned is None else torch.where(self.pruned[start:stop], keys + HELD, keys)


@dataclass(frozen=True, slots=True)
class Threshold:
    """What goes: every key below this one, and the first `ties` of those that are equal to it."""

    key: int
    ties: int

    @property
    def value(self) -> float:
        """The magnitude that the key stands for."""
        return float(struct.unpack("<d", struct.pack("<q", self.key))[0])


def select(sources: Sequence[Keys], count: int) -> Threshold:
    """The threshold below which exactly `count` of all the keys are."""
    if count <= 0:
        return Threshold(HELD, 0)
    total = sum(source.count for source in sources)
    if count > total:
        raise ValueError(f"{count} of {total} elements cannot be pruned")

    def chunks() -> Iterator[torch.Tensor]:
        for source in sources:
            yield from source.chunks()

    return _select(chunks, total, count)


def _select(chunks: Callable[[], Iterator[torch.Tensor]], total: int, count: int) -> Threshold:
    # The bits from `known` upwards are those of `prefix`; at first none are known, the sign included.
    prefix, known = 0, 63
    for shift in SHIFTS if total > FEW else ():
        first = known == 63
        base = -(1 << (63 - shift)) if first else prefix << (known - shift)
        bins = torch.zeros(1 << (64 - shift if first else known - shift), dtype=torch.int64)
        for keys in chunks():
            among = keys if first else keys[(keys >> known) == prefix]
            bins += torch.bincount((among >> shift) - base, minlength=len(bins)).cpu()
        ends = bins.cumsum(0)
        bucket = int(torch.searchsorted(ends, count))
        count -= int(ends[bucket] - bins[bucket])
        prefix, known = base + bucket, shift
        if shift == 0:
            return Threshold(prefix, count)
        if int(bins[bucket]) <= FEW:
            break
    candidates = [keys if known == 63 else keys[(keys >> known) == prefix] for keys in chunks()]
    ordered = torch.cat([keys.cpu() for keys in candidates]).sort().values
    key = int(ordered[count - 1])
    return Threshold(key, count - int((ordered < key).sum()))


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
