"""Masks of tensors, without modules: what to keep of a weight, as a pure function of its values.

A mask is a boolean tensor of the same shape and on the same device, true for what is kept. All functions here

- prune exactly `pruned_count(level, count)` of `count` elements (or blocks);
- prune the lowest first, and of equals the one with the lowest index in row-major order, so that a mask depends on nothing but the
  values;
- take NaN for the largest of all, so that it is pruned last;
- prune what `pruned` marks before everything else, for masks that are to grow.

    magnitude_mask(weight, 0.9)                   the smallest nine tenths go
    nm_mask(weight, 2, 4)                         two of every four along the last axis stay
    block_mask(weight, (16, 16), 0.9)             by blocks, by their mean square
    random_mask(weight, 0.5, 17)
    global_masks(weights, 0.8)                    one threshold over all of them

Elements are ordered by integer keys. The key of a magnitude is its bits as a float64, to which every float of fewer bits converts
exactly. What is pruned already has the lowest keys (`HELD` is added), so that it goes first, and comes back, the largest first,
only where fewer are to be pruned.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import SupportsFloat

import numpy as np
import torch

from holdfast.core.arrays import matrix_shape
from holdfast.core.value import Value
from holdfast.numeric import threshold
from holdfast.numeric.threshold import (
    SPLITMIX,
    SearchPass,
    Threshold,
    nan_key,
    run_search,
    search_threshold,
)

Norm = int | Callable[[torch.Tensor], torch.Tensor]
"""1 for absolute values, 2 for squares, or a function from a tensor to scores of its elements."""

CHUNK_ELEMENTS = 1 << 20
"""Elements at a time: 8 MiB of keys."""

HELD = -(1 << 63)
"""Added to the key of what is pruned already."""
NAN = nan_key("float64")

STEP, *FACTORS = (number - (1 << 64) for number in SPLITMIX)
"""Signed numbers, which torch multiplies modulo 2^64."""

SLACK = 1e-9
"""How far a level may be outside of its range, by rounding."""


def checked_level(level: SupportsFloat) -> float:
    """A sparsity level as a float from 0 to 1.

    >>> checked_level(0.5)
    0.5
    """
    if isinstance(level, str | bytes) or not hasattr(level, "__float__"):
        raise TypeError(f"a sparsity level is a number from 0 to 1, not a {type(level).__name__}")
    value = float(level)
    if not -SLACK <= value <= 1 + SLACK:  # NaN as well
        hint = f"; for {value:g} percent say {value / 100:g}" if 1 < value <= 100 else ""
        raise ValueError(
            f"a sparsity level is the part that is pruned, from 0 to 1; found {value:g}{hint}"
        )
    return min(max(value, 0.0), 1.0)


def pruned_count(level: SupportsFloat, count: int) -> int:
    """How many of `count` are pruned: rounded, and never all of them unless the level is 1.

    >>> pruned_count(0.5, 5), pruned_count(0.9, 4), pruned_count(1, 4)
    (2, 3, 4)
    """
    return threshold.pruned_count(checked_level(level), count)


def magnitude_mask(
    tensor: torch.Tensor, level: SupportsFloat, *, pruned: torch.Tensor | None = None
) -> torch.Tensor:
    """Keep the elements of the largest absolute values."""
    return global_masks([tensor], level, pruned=None if pruned is None else [pruned])[0]


def random_mask(
    tensor: torch.Tensor,
    level: SupportsFloat,
    generator: torch.Generator | int | None = None,
    *,
    pruned: torch.Tensor | None = None,
) -> torch.Tensor:
    """Keep a random part; the values do not matter, only how many there are.

    The generator is asked for one number, the seed of an order that is the same on every device; or that number is given. Under
    one seed, what a level prunes a higher level prunes too.
    """
    flat = _flat(tensor)
    keys = [Keys(flat, _marked(tensor, pruned), drawn_seed(generator))]
    return keep_above(keys, select(keys, pruned_count(level, flat.numel())))[0].view(tensor.shape)


def drawn_seed(generator: torch.Generator | int | None) -> int:
    """A seed from a generator; the number itself where one is given; from torch's global generator for None."""
    if generator is None or isinstance(generator, torch.Generator):
        device = "cpu" if generator is None else generator.device
        return int(torch.randint(0, 1 << 62, (), generator=generator, device=device))
    return operator.index(generator)


def global_threshold(tensors: Sequence[torch.Tensor], level: SupportsFloat) -> Threshold:
    """The magnitude below which the part `level` of all elements of all tensors is.

    Everything below `value` is pruned, and of the elements equal to it the first `ties`, tensor by tensor.
    """
    return _threshold([Keys(_flat(tensor)) for tensor in tensors], level)


def global_masks(
    tensors: Sequence[torch.Tensor],
    level: SupportsFloat,
    *,
    pruned: Sequence[torch.Tensor | None] | None = None,
) -> list[torch.Tensor]:
    """Keep what is largest among all tensors together, of whatever dtypes: a mask for each."""
    marks = [None] * len(tensors) if pruned is None else pruned
    keys = [
        Keys(_flat(tensor), _marked(tensor, mark))
        for tensor, mark in zip(tensors, marks, strict=True)
    ]
    masks = keep_above(keys, _threshold(keys, level))
    return [mask.view(tensor.shape) for tensor, mask in zip(tensors, masks, strict=True)]


def nm_mask(
    tensor: torch.Tensor, n: int, m: int, *, dim: int = -1, pruned: torch.Tensor | None = None
) -> torch.Tensor:
    """Keep the `n` largest of every `m` neighbours along an axis, whose size `m` has to divide."""
    n, m = operator.index(n), operator.index(m)
    if not 0 <= n <= m or m < 1:
        raise ValueError(f"N:M keeps n of every m, with 0 <= n <= m and m >= 1; found {n}:{m}")
    flat = _flat(tensor)
    if tensor.dim() == 0 or not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"a tensor of {tensor.dim()} dimensions has no axis {dim}")
    if tensor.shape[dim] % m:
        raise ValueError(
            f"{n}:{m} needs an axis of a multiple of {m} elements; axis {dim} of {tuple(tensor.shape)} is none"
        )
    values = flat.view(tensor.shape).movedim(dim, -1)
    marks = _marked(tensor, pruned, tensor.shape)
    if marks is not None:
        marks = marks.movedim(dim, -1).reshape(-1, m)
    kept = _keep_in_rows(values.reshape(-1, m), marks, m - n)
    return kept.view(values.shape).movedim(-1, dim).contiguous()


def block_mask(
    tensor: torch.Tensor,
    block_shape: Sequence[int],
    level: SupportsFloat,
    *,
    zeros_per_block: int | None = None,
    norm: Norm = 2,
    pruned: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose the part `level` of the blocks with the lowest mean norm, and in each prune the `zeros_per_block` lowest elements.

    A tensor is seen as a matrix (`matrix_shape`). Where the block does not divide it, the blocks at the lower and right edge are
    smaller: their mean is over the elements that they have, and what they lack counts as pruned already, so that a 2:4 mask of six
    columns keeps two of the last two. `zeros_per_block` is the whole block unless given. With `pruned`, a block with as many marked
    elements as would be pruned in it is chosen first.

    The mean is summed in float64, element after element of the block in row-major order, and so is the same everywhere.
    """
    height, width, zeros = read_block(block_shape, zeros_per_block)
    size = height * width
    matrix = _flat(tensor).view(matrix_shape(tensor.shape))
    marks = _marked(tensor, pruned, matrix.shape)
    scores = _scored(matrix, norm)
    if not matrix.numel() or not zeros:
        return torch.ones(tensor.shape, dtype=torch.bool, device=tensor.device)

    sums, counts = _block_sums(scores, height, width, square=norm == 2)
    real_zeros = (zeros - size + counts).clamp(min=0)
    held = None
    if marks is not None:
        marked, _ = _block_sums(marks, height, width)
        held = ((marked >= real_zeros) & (real_zeros > 0)).flatten()
    keys = [Keys(score_keys((sums / counts).flatten()), held)]
    kept = keep_above(keys, select(keys, pruned_count(level, sums.numel())))[0].view(sums.shape)
    spread = kept.repeat_interleave(height, 0).repeat_interleave(width, 1)[
        : matrix.shape[0], : matrix.shape[1]
    ]
    if zeros < size:
        spread = spread | _keep_in_blocks(
            scores, marks, height=height, width=width, zeros=real_zeros
        )
    return spread.reshape(tensor.shape).contiguous()


def read_block(shape: Sequence[int], zeros: int | None) -> tuple[int, int, int]:
    """Return the height and width of a block, and how many of its elements go: all for None.

    >>> read_block((2, 4), None)
    (2, 4, 8)
    """
    try:
        sizes = tuple(map(operator.index, shape))
    except TypeError:
        sizes = ()
    if len(sizes) != 2 or min(sizes) < 1:
        raise ValueError(f"a block is given as rows and columns, both at least 1; found {shape!r}")
    height, width = sizes
    size = height * width
    count = size if zeros is None else operator.index(zeros)
    if not 0 <= count <= size:
        raise ValueError(
            f"a block of {height} x {width} loses at most the {size} elements that it has; found zeros_per_block={count}"
        )
    return height, width, count


def _scored(matrix: torch.Tensor, norm: Norm) -> torch.Tensor:
    """The scores that order the elements; for 1 and 2 their magnitudes."""
    if callable(norm):
        scores = norm(matrix)
        if not isinstance(scores, torch.Tensor) or scores.shape != matrix.shape:
            found = (
                tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
            )
            raise ValueError(
                f"a norm gives a score for each element, {tuple(matrix.shape)}; found {found}"
            )
        return scores.detach()
    if norm not in (1, 2):
        raise NotImplementedError(f"the norm is 1, 2 or a function; found {norm!r}")
    return matrix.abs() if matrix.dtype.itemsize > 1 else matrix.to(torch.float32).abs()


def _block_sums(
    matrix: torch.Tensor, height: int, width: int, *, square: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (-(-matrix.shape[0] // height), -(-matrix.shape[1] // width))
    sums = torch.zeros(shape, dtype=torch.float64, device=matrix.device)
    counts = torch.zeros(shape, dtype=torch.int64, device=matrix.device)
    for row in range(min(height, matrix.shape[0])):
        for column in range(min(width, matrix.shape[1])):
            part = matrix[row::height, column::width].to(torch.float64)
            rows, columns = part.shape
            sums[:rows, :columns] += part * part if square else part
            counts[:rows, :columns] += 1
    return sums, counts


def _keep_in_blocks(
    scores: torch.Tensor,
    marks: torch.Tensor | None,
    *,
    height: int,
    width: int,
    zeros: torch.Tensor,
) -> torch.Tensor:
    rows, columns = scores.shape
    full = (zeros.shape[0] * height, zeros.shape[1] * width)

    def by_blocks(matrix: torch.Tensor, fill: int) -> torch.Tensor:
        if full != (rows, columns):
            # Not `pad`, which takes the number by way of a float.
            padded = matrix.new_full(full, fill)
            padded[:rows, :columns] = matrix
            matrix = padded
        split = matrix.view(zeros.shape[0], height, zeros.shape[1], width)
        return split.permute(0, 2, 1, 3).reshape(-1, height * width)

    keys = score_keys(scores)
    # Padding comes last, and `zeros` leaves it out.
    kept = _keep_in_rows(
        by_blocks(keys, torch.iinfo(torch.int64).max),
        None if marks is None else by_blocks(marks, 0),
        zeros.flatten(),
    )
    back = kept.view(zeros.shape[0], zeros.shape[1], height, width).permute(0, 2, 1, 3)
    return back.reshape(full)[:rows, :columns]


def _keep_in_rows(
    values: torch.Tensor, marks: torch.Tensor | None, zeros: torch.Tensor | int
) -> torch.Tensor:
    """Keep all but the lowest `zeros` of each row; numbers are ordered by magnitude."""
    kept = torch.ones(values.shape, dtype=torch.bool, device=values.device)
    step = max(1, CHUNK_ELEMENTS // max(1, values.shape[1]))
    place = torch.arange(values.shape[1], device=values.device)
    for start in range(0, len(values), step):
        part = slice(start, start + step)
        keys = magnitude_keys(values[part]) if values.is_floating_point() else values[part]
        if marks is not None:
            keys = torch.where(marks[part], keys + HELD, keys)
        stays = place >= (zeros if isinstance(zeros, int) else zeros[part, None])
        kept[part].scatter_(1, keys.sort(dim=1, stable=True).indices, stays.expand(keys.shape))
    return kept


def _threshold(keys: Sequence[Keys], level: SupportsFloat) -> Threshold:
    return select(keys, pruned_count(level, sum(source.count for source in keys)))


def check_maskable(tensor: torch.Tensor, name: str) -> None:
    """Raise if the elements of a tensor cannot be ordered. `name` is what messages call it."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}: masks are for tensors")
    if tensor.is_quantized or not tensor.is_floating_point():
        kind = "quantised" if tensor.is_quantized else str(tensor.dtype)
        raise TypeError(f"{name} is {kind}: masks are for floating-point numbers")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} is {tensor.layout}: masks are for dense tensors")
    if type(tensor) is not torch.Tensor and not issubclass(type(tensor), torch.nn.Parameter):
        # torchao's quantised weights say that they are bfloat16; a DTensor has a part on each rank.
        hint = "; prepare before fully_shard" if is_cut(tensor) else ""
        raise TypeError(f"{name} is a {type(tensor).__name__}: masks are for plain tensors{hint}")
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device: it has no values yet")


def is_cut(tensor: torch.Tensor) -> bool:
    """Return whether each rank has a part of a tensor, as with FSDP2.

    DTensor takes a second to import, and is imported wherever there is such a tensor.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor in one dimension. Raises if they cannot be ordered."""
    check_maskable(tensor, "the tensor")
    return tensor.detach().reshape(-1)


def _marked(
    tensor: torch.Tensor, pruned: torch.Tensor | None, shape: Sequence[int] = (-1,)
) -> torch.Tensor | None:
    """Return the marks of what is pruned already in another shape. Raises if they do not fit."""
    if pruned is None:
        return None
    expected = tensor.shape, torch.bool, tensor.device
    if (pruned.shape, pruned.dtype, pruned.device) != expected:
        raise ValueError(
            f"what is pruned already is marked by booleans {tuple(tensor.shape)} on {tensor.device}; "
            f"found {pruned.dtype} {tuple(pruned.shape)} on {pruned.device}"
        )
    return pruned.reshape(shape)


# The order of pruning (`holdfast.numeric.threshold`), for tensors on any device.


def magnitude_keys(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float64).abs().view(torch.int64).clamp(max=NAN)


def score_keys(scores: torch.Tensor) -> torch.Tensor:
    """Keys of any numbers, none of them negative. Where there are negative numbers, the last bit of a float64 is lost."""
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
        # numpy takes a small part of the time that torch takes.
        return torch.from_numpy(threshold.random_keys(start, stop, seed=seed).view(np.int64))
    seed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
    x = torch.arange(start + 1, stop + 1, dtype=torch.int64, device=device) * STEP + seed
    x = (x ^ _shifted(x, 30)) * FACTORS[0]
    x = (x ^ _shifted(x, 27)) * FACTORS[1]
    return _shifted(x ^ _shifted(x, 31), 1)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right, with zeros from the left: torch repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


class Keys(Value, eq=False):
    """The keys of one tensor's elements, made in chunks."""

    values: torch.Tensor
    """Numbers to be ordered by magnitude, or keys, in one dimension."""
    pruned: torch.Tensor | None = None
    seed: int | None = None
    """The seed of a random order, which ignores the values."""

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
            yield (
                keys
                if self.pruned is None
                else torch.where(self.pruned[start:stop], keys + HELD, keys)
            )


def select(sources: Sequence[Keys], count: int) -> Threshold:
    """The threshold below which exactly `count` of all the keys are."""
    if count <= 0:
        return Threshold(HELD, 0)
    total = sum(source.count for source in sources)
    if count > total:
        raise ValueError(f"{count} of {total} elements cannot be pruned")

    def run_pass(search_pass: SearchPass) -> np.ndarray:
        chunks = (keys for source in sources for keys in source.chunks())
        if search_pass.needs_keys:
            left = torch.cat([_with_prefix(keys, search_pass).cpu() for keys in chunks])
            return left.numpy().view(np.uint64) ^ np.uint64(1 << 63)
        bins = torch.zeros(search_pass.bin_count, dtype=torch.int64)
        base = _signed(search_pass.prefix * search_pass.bin_count, search_pass.bin_shift)
        for keys in chunks:
            bins += torch.bincount(
                (_with_prefix(keys, search_pass) >> search_pass.bin_shift) - base,
                minlength=len(bins),
            ).cpu()
        return bins.numpy()

    found = run_search(search_threshold(count, total=total, width=64), run_pass)
    return Threshold(_signed(found.key, 0), found.ties)


def _with_prefix(keys: torch.Tensor, search_pass: SearchPass) -> torch.Tensor:
    shift = search_pass.prefix_shift
    if shift == 64:
        return keys
    return keys[(keys >> shift) == _signed(search_pass.prefix, shift)]


def _signed(prefix: int, known: int) -> int:
    """The leading bits of a signed key, from those of a key that begins at 0."""
    return prefix - (1 << (63 - known))


def keep_above(sources: Sequence[Keys], found: Threshold) -> list[torch.Tensor]:
    """The mask of each source, in one dimension."""
    ties = found.ties
    masks = []
    for source in sources:
        mask = torch.empty(source.count, dtype=torch.bool, device=source.values.device)
        start = 0
        for keys in source.chunks():
            part = mask[start : start + len(keys)]
            torch.ge(keys, found.key, out=part)
            if ties:
                go = (keys == found.key).nonzero().flatten()[:ties]
                part[go] = False
                ties -= len(go)
            start += len(keys)
        masks.append(mask)
    return masks
