"""Numbers for the elements of a source, and what a converter did with them.

The elements of all source tensors are numbered through the list of names, sorted, in C order. A tensor holds
`8 * number + 8192` instead of the number itself, for two reasons: a zero, a one or noise that a framework makes up is
told from the first elements, and a converter that adds one to a weight (norms of Gemma) is seen as one that adds.
Numbers stay below 2**20, so that float32 holds them.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

STEP = 8
FIRST = 8192
Shapes = dict[str, tuple[int, ...]]
Arrays = dict[str, np.ndarray]


def number(shapes: Mapping[str, Iterable[int]]) -> Arrays:
    """The tensors of the source, as arrays of numbers."""
    arrays: Arrays = {}
    start = 0
    for name in sorted(shapes):
        shape = tuple(shapes[name])
        size = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.arange(start, start + size, dtype=np.int64).reshape(shape)
        start += size
    if start >= 2**20:
        raise ValueError(f"{start} elements; float32 holds the values of 2**20 exactly")
    return arrays


def fill(numbers: np.ndarray, dtype: type = np.float64) -> np.ndarray:
    """What a tensor of the source holds."""
    return (numbers * STEP + FIRST).astype(dtype)


def recover(values: np.ndarray) -> tuple[np.ndarray, int]:
    """The number of the source element for each value that came out, -1 for what was made up; and what was added to all."""
    values = np.asarray(values, dtype=np.float64)
    known = np.isfinite(values) & (values >= FIRST - 1)
    whole = np.where(known, values, 0)
    if not np.array_equal(whole, np.round(whole)):
        raise ValueError("values are not whole numbers: the converter computes or casts")
    added = {int(a) for a in np.unique((whole[known] - FIRST) % STEP)}
    if len(added) > 1:
        raise ValueError(f"different amounts were added within one tensor: {sorted(added)}")
    amount = added.pop() if added else 0
    if amount > STEP // 2:
        amount -= STEP
    return np.where(known, (whole - FIRST - amount) // STEP, -1).astype(np.int64), amount


def digest(numbers: np.ndarray) -> str:
    """The hash of an array of numbers: 16 hex digits of blake2b over int64, little-endian, in C order."""
    data = np.ascontiguousarray(numbers, dtype="<i8").tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest()[:16]


def record(
    source: Mapping[str, Iterable[int]],
    target: Mapping[str, np.ndarray],
    *,
    about: Mapping[str, object],
    absent: Mapping[str, Iterable[int]] | None = None,
    debug: Path | None = None,
    out: Path,
) -> Path:
    """Write what was found as a file of `tests/extras/maps/oracles`; with `debug`, whole index arrays too."""
    found: Arrays = {}
    added: dict[str, int] = {}
    for name in sorted(target):
        found[name], amount = recover(target[name])
        if amount:
            added[name] = amount
    numbers = number(source)
    used = (
        np.unique(np.concatenate([a.ravel() for a in found.values()]))
        if found
        else np.empty(0, np.int64)
    )
    total = sum(a.size for a in numbers.values())
    if used.size and used[-1] >= total:
        raise ValueError("a value came out that did not go in")
    left_out = [name for name, a in numbers.items() if a.size and not np.isin(a, used).any()]
    partly = [
        name for name, a in numbers.items() if name not in left_out and not np.isin(a, used).all()
    ]
    document: dict[str, object] = {
        **about,
        "source": [[name, list(a.shape)] for name, a in numbers.items()],
        "target": [[name, list(a.shape), digest(a)] for name, a in found.items()],
        "left_out": left_out,
        "absent": [[name, list(shape)] for name, shape in sorted((absent or {}).items())],
        "added": added,
        "note": about.get("note", ""),
    }
    if partly:
        document["partly_left_out"] = partly
    stem = f"{about['family']}-{about['variant']}.{about['from']}-{about['to']}"
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{stem}.json"
    path.write_text(_laid_out(document))
    if debug is not None:
        debug.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            debug / f"{stem}.npz",
            **{f"source/{n}": a for n, a in numbers.items()},
            **{f"target/{n}": a for n, a in found.items()},
        )
    counts = f"{len(numbers)} -> {len(found)} tensors, {total} elements"
    print(f"{path.name}: {counts}, left out {len(left_out)}, absent {len(absent or {})}")
    return path


def _laid_out(document: Mapping[str, object]) -> str:
    """JSON with one tensor a line, so that two runs can be compared by eye."""
    parts = []
    for key, value in document.items():
        if key in ("source", "target", "absent") and value:
            rows = ",\n".join("  " + json.dumps(row) for row in value)  # type: ignore[attr-defined]
            parts.append(f" {json.dumps(key)}: [\n{rows}\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
