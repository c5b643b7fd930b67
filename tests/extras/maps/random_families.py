"""Random families, and the slow oracle: an array with one axis for each name, out of which every layout's tensors are cut by
plain indexing, transposing and reshaping."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise, product

import numpy as np
from hypothesis import strategies as st

LAYOUTS = ("one", "two", "three")


@dataclass
class Cut:
    """A part: axes in its name, axes of each dimension, and what it has of the axis that is cut."""

    name: str
    numbers: list[str]
    dims: list[list[str]]
    spans: dict[str, tuple[int, int]]

    def text(self, spaces: bool) -> str:
        def one(axis: str) -> str:
            if axis not in self.spans:
                return axis
            low, high = self.spans[axis]
            if high == low + 1:
                return f"{axis}[{low}]"
            return f"{axis}[{low or ''}:{high} + 0]" if spaces else f"{axis}[{low}:{high}]"

        def dim(axes: list[str]) -> str:
            return (
                one(axes[0]) if len(axes) == 1 and not spaces else f"({' '.join(map(one, axes))})"
            )

        return f"{self.name} : {' '.join(map(dim, self.dims))}"


@dataclass
class Arr:
    id: str
    axes: list[str]
    low: dict[str, int]
    """Where places begin: not at 0 for an axis with a range."""
    values: np.ndarray
    parts: dict[str, list[Cut]]
    more: str = ""
    tied: str = ""
    copies: list[str] = field(default_factory=list)

    def tensors(self, layout: str) -> dict[str, np.ndarray]:
        """What a layout has of this array: the oracle."""
        made: dict[str, np.ndarray] = {}
        for part in self.parts[layout]:
            used = [axis for dim in part.dims for axis in dim]
            counts = [self.values.shape[self.axes.index(axis)] for axis in part.numbers]
            for places in product(*map(range, counts)):
                index: list[object] = []
                for axis in self.axes:
                    low = self.low.get(axis, 0)
                    if axis in part.numbers:
                        index.append(places[part.numbers.index(axis)])
                    elif axis in part.spans:
                        a, b = part.spans[axis]
                        index.append(slice(a - low, b - low))
                    elif axis in used:
                        index.append(slice(None))
                    else:
                        index.append(0)  # all along this axis the values are the same
                box = np.array(self.values[tuple(index)])
                left = [axis for axis in self.axes if axis in used]
                box = box.transpose([left.index(axis) for axis in used])
                sizes = dict(zip(used, box.shape, strict=True))
                shape = [int(np.prod([sizes[axis] for axis in dim])) for dim in part.dims]
                numbers = {
                    a: p + self.low.get(a, 0) for a, p in zip(part.numbers, places, strict=True)
                }
                made[part.name.format(**numbers)] = box.copy().reshape(shape)
        return made


@dataclass
class Model:
    toml: str
    given: dict[str, int]
    arrays: list[Arr]
    drops: dict[str, np.ndarray]
    """Tensors of the layout "one" that go nowhere."""

    def tensors(self, layout: str) -> dict[str, np.ndarray]:
        return {
            name: values for array in self.arrays for name, values in array.tensors(layout).items()
        }


@st.composite
def models(draw: st.DrawFn, dtype: str = "<i4", ties: bool = True, least: int = 1) -> Model:
    pool = {axis: draw(st.integers(least, 5)) for axis in "abcdef"[: draw(st.integers(1, 6))]}
    toml, given = ["[sizes]"], {}
    for axis, size in pool.items():
        how = draw(st.sampled_from(["number", "given", "expression"]))
        if how == "given":
            given[axis] = size
        else:
            toml.append(
                f'{axis} = ["unknown * 2", "{size if how == "number" else f"{size} * 6 / 3 - {size}"}"]'
            )
    drops = {}
    if draw(st.booleans()):
        drops = {"junk.3.x": np.zeros((2, 2), dtype), "junk.11.x": np.ones((), dtype)}
    toml.append('[layouts.one]\ndrop = ["junk.{a}.x"]\n[layouts.two]\n[layouts.three]')
    arrays: list[Arr] = []
    first = 1
    for number in range(draw(st.integers(1, 3))):
        axes = draw(st.lists(st.sampled_from([*pool]), unique=True, max_size=4))
        low, sizes = {}, {axis: pool[axis] for axis in axes}
        ranged = draw(st.sampled_from([None, *axes]))
        if ranged is not None and draw(st.booleans()):
            low[ranged] = draw(st.integers(0, max(pool[ranged] - 1, 0)))
            sizes[ranged] = pool[ranged] - low[ranged]
        lacking = {layout: set() for layout in LAYOUTS}
        if any(sizes.values()) and draw(st.booleans()):
            axis = draw(st.sampled_from([axis for axis in axes if sizes[axis]]))
            for layout in draw(st.sets(st.sampled_from(LAYOUTS), min_size=1, max_size=2)):
                lacking[layout].add(axis)
        same = set().union(*lacking.values())
        core = [1 if axis in same else sizes[axis] for axis in axes]
        values = np.arange(first, first + int(np.prod(core))).astype(dtype).reshape(core)
        first += values.size
        values = np.broadcast_to(values, [sizes[axis] for axis in axes]).copy()
        parts = {
            layout: draw(
                cuts(number, layout, [a for a in axes if a not in lacking[layout]], low, sizes)
            )
            for layout in LAYOUTS
        }
        more = "".join(f'\nrange = {{{axis} = "{start}:"}}' for axis, start in low.items())
        arrays.append(Arr(f"array{number}", axes, low, values, parts, more))
    if ties and draw(st.booleans()):
        twin = arrays[0]
        copies = draw(st.lists(st.sampled_from(LAYOUTS), unique=True))
        parts = {
            layout: [
                Cut(f"twin.{cut.name}", cut.numbers, cut.dims, cut.spans)
                for cut in twin.parts[layout]
            ]
            for layout in LAYOUTS
        }
        arrays.append(
            Arr(
                "twin",
                twin.axes,
                twin.low,
                twin.values,
                parts,
                twin.more,
                tied="array0",
                copies=copies,
            )
        )
    for array in arrays:
        toml.append(f'[[array]]\nid = "{array.id}"{array.more}')
        if array.tied:
            toml.append(f"tied = '{array.tied}'\ncopies = {array.copies!r}")
        for layout, own in array.parts.items():
            texts = [cut.text(draw(st.booleans())) for cut in own]
            toml.append(
                f"{layout} = {texts if len(texts) > 1 or draw(st.booleans()) else texts[0]!r}"
            )
    return Model("\n".join(toml), given, arrays, drops)


@st.composite
def cuts(
    draw: st.DrawFn,
    number: int,
    layout: str,
    axes: list[str],
    low: dict[str, int],
    sizes: dict[str, int],
) -> list[Cut]:
    """The parts of a layout: one, or several with ranges of an axis, each with its own order of axes."""
    wide = [axis for axis in axes if sizes[axis] > 1]
    cut = draw(st.sampled_from([None, *wide, *wide[-1:]]))
    if cut is None:
        return [draw(one_cut(number, layout, 0, axes, {}))]
    start = low.get(cut, 0)
    inner = draw(st.sets(st.integers(start + 1, start + sizes[cut] - 1), min_size=1, max_size=3))
    edges = [start, *sorted(inner), start + sizes[cut]]
    made = [
        draw(one_cut(number, layout, place, axes, {cut: span}))
        for place, span in enumerate(pairwise(edges))
    ]
    return draw(st.permutations(made))


@st.composite
def one_cut(
    draw: st.DrawFn,
    number: int,
    layout: str,
    place: int,
    axes: list[str],
    spans: dict[str, tuple[int, int]],
) -> Cut:
    # Half of all have their axes in one order, and a third all in one dimension: then they meet in long runs.
    order = draw(st.permutations(axes)) if draw(st.booleans()) else axes
    together = draw(st.sampled_from(["never", "always", "now and then"]))
    numbers = [axis for axis in order if axis not in spans and draw(st.integers(0, 3)) == 0]
    rest = [axis for axis in order if axis not in numbers]
    dims: list[list[str]] = []
    for axis in rest:
        if dims and (together == "always" or (together == "now and then" and draw(st.booleans()))):
            dims[-1].append(axis)
        else:
            dims.append([axis])
    name = f"{layout}.array{number}.part{place}" + "".join(
        f".{axis}x.{{{axis}}}" for axis in numbers
    )
    return Cut(name, numbers, dims, spans)
