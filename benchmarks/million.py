"""`python -m benchmarks.million [--count N] [--format F] [--verb V]`: very many tensors of 64 bytes, every verb in a fresh process.

Everything shall be linear, and a tensor shall take a kilobyte of memory. So there is a row for each verb and format, and a column
for each count: microseconds of processor time a tensor, and bytes a tensor of the peak above what the process had after its imports
(for `save` without the state itself). `diff` has two checkpoints open, and its bytes are those of both for a tensor of one of them;
one tensor in a hundred is another. A safetensors header passes the 100 MB of the format with a million of longer names, so there
names are short; `shards` is a folder of eight safetensors files and an index. A million in a `.pt` open with raised limits alone,
and `holdfast.save` refuses to write such a file. So `holdfast.torch.save` makes it, and `convert` takes it to a native directory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.probe import measure

__all__ = ["main"]

COUNTS = (10_000, 100_000, 1_000_000)

FORMATS = {"native": "", "safetensors": ".safetensors", "shards": ".folder", "pt": ".pt"}
"""What files are called."""

SHARDS = 8

CHANGED = 100
"""Of so many tensors one is another."""

Job = Callable[[Path], object]


def name(number: int, short: bool) -> str:
    return (
        f"{number // 100}.{number % 100}.w"
        if short
        else f"layers.{number // 100}.experts.{number % 100}.w"
    )


def made(count: int, *, short: bool, changed: int = 0) -> dict[str, object]:
    """The state; of every `changed` tensors one is another."""
    import numpy as np

    rows = np.arange(16 * count, dtype=np.float32).reshape(count, 16)
    if changed:
        rows[::changed] += 1
    return {name(number, short): row.copy() for number, row in enumerate(rows)}


def raised() -> object:
    from holdfast import Limits

    return Limits(pickle_nbytes=1 << 30, zip_directory_nbytes=1 << 30, zip_records=1 << 24)


def options(suffix: str, count: int) -> dict[str, object]:
    """What a verb that writes is given beside its target."""
    if suffix != ".folder":
        return {"durable": False}
    return {
        "durable": False,
        "format": "safetensors-dir",
        "max_shard_size": -(-64 * count // SHARDS),
    }


def save(suffix: str, count: int) -> Job:
    state = made(count, short=suffix == ".safetensors")
    if suffix == ".pt":
        import torch

        state = {name: torch.from_numpy(array) for name, array in state.items()}
    return lambda path: write(state, path / f"new{suffix}", count)


def opened(suffix: str, count: int) -> Job:
    import holdfast

    def job(path: Path) -> object:
        with holdfast.open(path / f"a{suffix}", limits=raised()) as checkpoint:
            return list(checkpoint)

    return job


def read(suffix: str, count: int) -> Job:
    import holdfast

    def job(path: Path) -> object:
        with holdfast.open(path / f"a{suffix}", limits=raised()) as checkpoint:
            return len(checkpoint.read())

    return job


def convert(suffix: str, count: int) -> Job:
    import holdfast

    target = f"new{'' if suffix == '.pt' else suffix}"
    return lambda path: holdfast.convert(
        path / f"a{suffix}", path / target, limits=raised(), **options(suffix, count)
    )


def diff(suffix: str, count: int) -> Job:
    import holdfast

    return lambda path: len(
        holdfast.diff(path / f"a{suffix}", path / f"b{suffix}", limits=raised()).changed
    )


def diff_exact(suffix: str, count: int) -> Job:
    import holdfast

    return lambda path: (
        holdfast.diff(path / f"a{suffix}", path / f"a{suffix}", limits=raised(), exact=True).equal
    )


def verify(suffix: str, count: int) -> Job:
    import holdfast

    return lambda path: holdfast.verify(path / f"a{suffix}", limits=raised()).ok


def show(suffix: str, count: int) -> Job:
    import holdfast
    from holdfast.cli.show import show_tree

    def job(path: Path) -> object:
        with holdfast.open(path / f"a{suffix}", limits=raised()) as checkpoint:
            return list(show_tree(checkpoint))

    return job


VERBS = {
    "save": save, "open": opened, "read": read, "show": show, "convert": convert, "diff": diff, "diff-exact": diff_exact,
    "verify": verify,
}  # fmt: skip


def one(verb: str, folder: Path, suffix: str, *, count: int) -> None:
    """A verb in this process; what it took, as JSON."""
    # What a verb imports when it is first called is no part of it.
    warm = folder / f"warm{suffix}"
    warm.mkdir(exist_ok=True)
    state = made(200, short=True)

    for key in "ab":
        write(state, warm / f"{key}{suffix}", 200)
    VERBS[verb](suffix, 200)(warm)
    shutil.rmtree(warm)
    job = VERBS[verb](suffix, count)
    used = time.process_time()
    measured = measure(job, folder)
    used = time.process_time() - used
    print(
        json.dumps({"microseconds": used / count * 1e6, "nbytes": measured["peak_nbytes"] / count})
    )


def write(state: dict[str, object], path: Path, count: int) -> None:
    """What the verbs look at."""
    import holdfast

    if path.suffix != ".pt":
        holdfast.save(state, path, **options(path.suffix, count))
        return
    import numpy as np
    import torch

    import holdfast.torch

    arrays = isinstance(next(iter(state.values())), np.ndarray)
    holdfast.torch.save(
        {name: torch.from_numpy(array) for name, array in state.items()} if arrays else state, path
    )


def main(counts: list[int], formats: list[str], verbs: list[str]) -> None:
    rows: dict[tuple[str, str], list[str]] = {
        (verb, format): [] for verb in verbs for format in formats
    }
    for count in counts:
        for format in formats:
            suffix = FORMATS[format]
            with tempfile.TemporaryDirectory() as place:
                for key, changed in (("a", 0), ("b", CHANGED)):
                    write(
                        made(count, short=suffix == ".safetensors", changed=changed),
                        Path(place) / f"{key}{suffix}",
                        count,
                    )
                for verb in verbs:
                    words = [
                        sys.executable,
                        "-m",
                        "benchmarks.million",
                        "--one",
                        verb,
                        place,
                        suffix,
                        str(count),
                    ]
                    ran = subprocess.run(words, capture_output=True, text=True, check=False)
                    if ran.returncode:
                        rows[verb, format].append(f"failed: {ran.stderr.strip().splitlines()[-1]}")
                    else:
                        found = json.loads(ran.stdout)
                        rows[verb, format].append(
                            f"{found['microseconds']:.1f} µs, {found['nbytes']:,.0f} B"
                        )
                    for new in Path(place).glob("new*"):
                        shutil.rmtree(new) if new.is_dir() else new.unlink()
                    print(
                        f"{verb}, {format}, {count:,}: {rows[verb, format][-1]}",
                        file=sys.stderr,
                        flush=True,
                    )
    print("| | | " + " | ".join(f"{count:,}" for count in counts) + " |")
    print("| --- | --- |" + " --- |" * len(counts), flush=True)
    for (verb, format), cells in rows.items():
        print(f"| {verb} | {format} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2], Path(sys.argv[3]), sys.argv[4], count=int(sys.argv[5]))
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("--count", type=int, nargs="+", default=list(COUNTS))
        parser.add_argument("--format", nargs="+", choices=FORMATS, default=list(FORMATS))
        parser.add_argument("--verb", nargs="+", choices=VERBS, default=list(VERBS))
        given = parser.parse_args()
        main(given.count, given.format, given.verb)
