"""`structure`: the tensors of a checkpoint as columns of the document. No bytes of tensors are read.

    names, dtypes, shapes, bytes      one entry a tensor, in the order of the checkpoint
    file, start, end                  where its bytes lie, where that is one range of one file
    tie                               which tensors share a storage
    layer, role, expert               its place in the matrix (`places`)
    strides                           of those that do not lie in C order

and the sentence at the top, the facts below it, and the findings of `scan`.

From the name of a tensor to its place in the matrix: the number of its layer, and its role, which is the rest of the name.

    model.layers.3.mlp.up_proj.weight             layer 3    model.layers.*.mlp.up_proj.weight
    model.layers.3.mlp.experts.17.up_proj.weight  layer 3    model.layers.*.mlp.experts.*.up_proj.weight    expert 17
    params.Dense_4.kernel                         layer 4    params.Dense_*.kernel
    lm_head.weight                                no layer   lm_head.weight

1. The first part of a name that is nothing but a number is the layer; behind a part that speaks of experts it is the expert, and
   the next number is the layer. Any other number stays in the role: the second block of a stage is not the second layer.
2. In a name without such a part, a part that ends in a number has it, if three names differ in it and in nothing else: `Dense_0`,
   `Dense_1`, `Dense_2` are a series, `ln_1` and `ln_2` are names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.chunk import Chunk, Storage, is_c_ordered
from holdfast.core.limits import Limits
from holdfast.core.protocols import Store
from holdfast.core.sharing import find_reached_ranges
from holdfast.core.tensor import LazyTensor
from holdfast.core.text import (
    clip,
    escape,
    format_count,
    format_iso_time,
    format_nbytes,
    format_percent,
    pluralize,
)
from holdfast.core.value import Value
from holdfast.extras.reports.document import Document, front_coded, labelled, short
from holdfast.numeric.dequantize import number_shape
from holdfast.stores.paths import disambiguate_path
from holdfast.verbs.scan import scan
from holdfast.verbs.survey import Survey, survey

NONE = -1

NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
ENDING = re.compile(r"(.*[^0-9])([0-9]{1,9})", re.ASCII | re.DOTALL)

FEWEST, PARTS = 3, 64
"""Names that make a series of parts that end in numbers, and parts of a name that are looked at. Real ones have a dozen."""


class MatrixCell(Value):
    layer: int
    role: str
    """The rest of the name, with a star for each number that was taken out."""
    expert: int = NONE


def places(names: Sequence[str]) -> list[MatrixCell]:
    """The place of each name among the others.

    >>> places(["h.0.attn.w", "h.1.attn.w"])
    [MatrixCell(layer=0, role='h.*.attn.w', expert=-1), MatrixCell(layer=1, role='h.*.attn.w', expert=-1)]
    >>> places(["h.2.experts.7.w1", "h.2.norm.1.w"])
    [MatrixCell(layer=2, role='h.*.experts.*.w1', expert=7), MatrixCell(layer=2, role='h.*.norm.1.w', expert=-1)]
    >>> [place.layer for place in places(["Dense_0.k", "Dense_1.k", "Dense_2.k", "ln_1.k", "ln_2.k"])]
    [0, 1, 2, -1, -1]
    """
    found = [_numbered(name) for name in names]
    series: dict[str, set[int]] = {}
    ends = [
        None if place is not None else _ending(name)
        for name, place in zip(names, found, strict=True)
    ]
    for end in ends:
        if end is not None:
            series.setdefault(end.role, set()).add(end.layer)
    return [
        place
        or (end if end is not None and len(series[end.role]) >= FEWEST else MatrixCell(NONE, name))
        for name, place, end in zip(names, found, ends, strict=True)
    ]


def _numbered(name: str) -> MatrixCell | None:
    parts = name.split(".", PARTS)
    layer = expert = NONE
    before = ""
    for at, part in enumerate(parts):
        if NUMBER.fullmatch(part):
            if "expert" in before.lower() and expert == NONE:
                expert, parts[at] = int(part), "*"
            elif layer == NONE:
                layer, parts[at] = int(part), "*"
        before = part
    return None if layer == expert == NONE else MatrixCell(layer, ".".join(parts), expert)


def _ending(name: str) -> MatrixCell | None:
    parts = name.split(".", PARTS)
    for at, part in enumerate(parts):
        if found := ENDING.fullmatch(part):
            parts[at] = f"{found[1]}*"
            return MatrixCell(int(found[2]), ".".join(parts))
    return None


FINDINGS, STRIDES = 50, 2000
"""Findings of a scan that are listed, and tensors whose strides are given; a model has a handful that are not dense."""


class Structure(Value):
    checkpoint: Checkpoint
    survey: Survey
    tensors: Mapping[str, LazyTensor]
    """The tensors that are shown, by name."""
    files: tuple[str, ...]
    """The files that hold bytes of them."""
    dead_nbytes: int
    """Bytes of storages that no tensor reaches."""

    @property
    def dtypes(self) -> list[tuple[str, int]]:
        """The dtypes with their numbers of elements, the most common first."""
        counts = [(dtype, count) for dtype, count in self.survey.elements.items() if count]
        return sorted(counts, key=lambda item: -item[1])

    @property
    def tied_count(self) -> int:
        """The number of names that share a storage with others."""
        return sum(len(alias.names) for alias in self.survey.aliases)


def look(checkpoint: Checkpoint, wanted: Callable[[str], bool] | None = None) -> Structure:
    """Look at every tensor once; `wanted` says which names are listed."""
    found = survey(checkpoint)
    tensors = {
        name: tensor for name, tensor in found.tensors.items() if wanted is None or wanted(name)
    }
    known_files = list_files(tensors.values())
    files = set()
    for tensor in tensors.values():
        for storage in tensor.storages:
            known = known_files[tensor.source.store]
            files |= {file_of(key, known) for key, _, _ in storage.ranges}
    return Structure(checkpoint, found, tensors, tuple(sorted(files)), dead(found))


def list_files(tensors: Iterable[LazyTensor]) -> dict[Store, set[str]]:
    """Return the files of the stores that tensors lie in."""
    stores = dict.fromkeys(tensor.source.store for tensor in tensors)
    return {store: set(store.list()) for store in stores}


def file_of(key: str, known: Container[str]) -> str:
    """The file behind a key: what is made when it is read (a member that is inflated) has one of its own, `FILE@BYTE`."""
    file = key.rpartition("@")[0]
    return file if key not in known and file in known else key


def dead(found: Survey) -> int:
    """Bytes of storages that no tensor reaches, as `compact` would drop them."""
    # Where the elements of a distributed checkpoint's item lie is known when it is read; there are no others in it.
    stored = [tensor for tensor in found.tensors.values() if not tensor.traits.meta]
    reached = find_reached_ranges(
        t for t in stored if all(type(c) is Chunk and type(c.storage) is Storage for c in t.chunks)
    )
    whole = sum(storage.nbytes for storage in reached)
    used = sum(span.stop - span.start for spans in reached.values() for span in spans)
    return max(whole - used, 0)


def columns(found: Structure) -> Document:
    names = [short(name) for name in found.tensors]
    seats = places(names)
    return {
        "count": len(names),
        "names": front_coded(names),
        **storage_columns(list(found.tensors.values()), found.files),
        "tie": _ties(found),
        "layer": [seat.layer for seat in seats],
        "role": labelled(seat.role for seat in seats),
        "expert": [seat.expert for seat in seats],
    }


def storage_columns(tensors: Sequence[LazyTensor], files: Sequence[str] = ()) -> Document:
    """Return how each tensor is stored: dtype, shape, size, strides and where in which file."""
    known = list_files(tensors)
    ranges = [_range(tensor, known[tensor.source.store]) for tensor in tensors]
    return {
        "dtype": labelled(tensor.traits.dtype_label(tensor.dtype) for tensor in tensors),
        "shape": labelled(number_shape(tensor.shape, tensor.traits.blocks) for tensor in tensors),
        "nbytes": [0 if tensor.traits.meta else tensor.nbytes for tensor in tensors],
        "file": labelled((file for file, _, _ in ranges), files),
        "start": [start for _, start, _ in ranges],
        "end": [end for _, _, end in ranges],
        "strides": _strides(tensors),
    }


def _range(tensor: LazyTensor, keys: set[str]) -> tuple[str, int | None, int | None]:
    """The file of a tensor, and its range of bytes where that is one; the first file where it lies in several."""
    ranges = [found for storage in tensor.storages for found in storage.ranges]
    if not ranges or tensor.traits.meta:
        return "", None, None
    key, start, _ = ranges[0]
    file = file_of(key, keys)
    if len(ranges) > 1 or len(tensor.chunks) > 1 or key != file:
        return file, None, None
    chunk = tensor.chunks[0]
    if type(chunk) is not Chunk:
        return file, start, ranges[0][2]
    low, high = chunk.byte_range(tensor.dtype)
    return file, start + low, start + high


def _ties(found: Structure) -> list[int]:
    """The number of the storage that a tensor shares with others that are listed; -1 for those that share none."""
    groups: dict[str, int] = {}
    number = 0
    for alias in found.survey.aliases:
        members = [name for name in alias.names if name in found.tensors and name not in groups]
        if len(members) > 1:
            groups.update(dict.fromkeys(members, number))
            number += 1
    return [groups.get(name, -1) for name in found.tensors]


def _strides(tensors: Sequence[LazyTensor]) -> Document:
    """Strides in elements, of tensors that lie in one piece and not in C order."""
    at: list[int] = []
    values: list[list[int]] = []
    for number, tensor in enumerate(tensors):
        if len(tensor.chunks) != 1 or type(tensor.chunks[0]) is not Chunk or len(at) == STRIDES:
            continue
        strides = tensor.chunks[0].strides
        if not is_c_ordered(tensor.shape, strides, tensor.dtype.bits):
            at.append(number)
            values.append([stride // tensor.dtype.bits for stride in strides])
    return {"at": at, "values": values}


def scanned(path: object, limits: Limits | None) -> Document:
    """The verdict and the findings of `scan` for a path; none for what has no path."""
    if not isinstance(path, str | os.PathLike):
        return {"verdict": "not scanned", "findings": []}
    report = scan(disambiguate_path(path if isinstance(path, str) else str(path)), limits=limits)
    findings = [
        finding for file in report.reports for finding in file.findings if not finding.allowed
    ]
    texts = [
        (finding.severity, f"{clip(finding.what)}: {clip(finding.reason)}")
        for finding in findings[:FINDINGS]
    ]
    shown: list[Document] = [{"severity": severity, "text": text} for severity, text in texts]
    shown += [
        {"severity": "error", "text": clip(file.error, 600)}
        for file in report.reports
        if file.error
    ]
    if len(findings) > FINDINGS:
        shown.append(
            {
                "severity": "note",
                "text": f"{len(findings) - FINDINGS:,} more findings: holdfast scan lists them",
            }
        )
    return {"verdict": report.verdict(), "findings": shown[: FINDINGS + 1]}


def facts(found: Structure, verdict: str) -> list[list[str]]:
    checkpoint, seen = found.checkpoint, found.survey
    elements, tied = sum(seen.elements.values()), found.tied_count
    dtypes = ", ".join(f"{dtype} {format_percent(n, elements)}" for dtype, n in found.dtypes[:6])
    foreign = list(dict.fromkeys(str(one.what) for one in checkpoint.foreign))
    more = f", … {len(foreign) - 5:,} more" if len(foreign) > 5 else ""
    return [
        ["format", checkpoint.format],
        ["tensors", f"{len(checkpoint):,}"],
        ["parameters", f"{elements:,}"],
        ["tensor bytes", format_nbytes(seen.nbytes)],
        ["file bytes", format_nbytes(checkpoint.stored_nbytes)],
        ["files", f"{len(found.files):,}"],
        ["dtypes", dtypes or "none"],
        [
            "tied",
            f"{tied:,} names over {pluralize(len(seen.aliases), 'storage')}" if tied else "none",
        ],
        ["dead bytes", format_nbytes(found.dead_nbytes) if found.dead_nbytes else "none"],
        [
            "foreign objects",
            (", ".join(escape(clip(name, 80)) for name in foreign[:5]) or "none") + more,
        ],
        ["scan", verdict],
    ]


def sentence(found: Structure, verdict: str) -> str:
    checkpoint, seen = found.checkpoint, found.survey
    elements, tied = sum(seen.elements.values()), found.tied_count
    dtypes = ""
    if found.dtypes:
        dtypes = f", {'all' if len(found.dtypes) == 1 else 'most of them'} {found.dtypes[0][0]}"
    parts = [
        f"{escape(clip(name_of(checkpoint), 120))} is a {checkpoint.format} checkpoint of "
        f"{pluralize(len(checkpoint), 'tensor')} with {format_count(elements)} elements in {format_nbytes(seen.nbytes)}{dtypes}"
    ]
    parts.append(f"{tied:,} names are tied" if tied else "nothing is tied")
    dead_text = f"{format_nbytes(found.dead_nbytes)} are used by no tensor"
    parts.append(dead_text if found.dead_nbytes else "no bytes are unused")
    foreign = {str(one.what) for one in checkpoint.foreign}
    if foreign:
        parts.append(f"{pluralize(len(foreign), 'foreign object')} not built")
    parts.append(f"scan: {verdict}" if verdict != "not scanned" else "not scanned")
    return "; ".join(parts) + "."


def name_of(checkpoint: Checkpoint) -> str:
    return checkpoint.path.rstrip("/").rpartition("/")[2] or checkpoint.path


def made_at(checkpoint: Checkpoint) -> str | None:
    """The time when the files of a checkpoint on this machine were last written, in UTC; None elsewhere."""
    times: list[float] = []
    place = checkpoint.source.store.identity()
    if isinstance(place, tuple) and place and place[0] == "file":
        root = str(place[1])
        for key in checkpoint.source.store.list():
            try:
                times.append(
                    os.stat(os.path.join(root, key) if os.path.isdir(root) else root).st_mtime
                )
            except OSError:
                continue
    return None if not times else format_iso_time(max(times))
