"""Fuzz for as long as one likes, with new examples each time:

    python -m tests.hostile.soak --seconds 60 [--seed 1]

Prints every input after which something else than a Holdfast error came out, or which took long, once for each place
in the source; writes the input to `--out`. Exits with 1 if there was any.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
import warnings
from pathlib import Path

from .craft_pickle import stream
from .craft_torch import legacy, state, tar, torch_zip
from .golden import FILES, FOLDERS, look
from .mutate import NUMBERS, Edit, apply
from .test_fuzz import CHECKED, repacked

SLOW = 5.0
"""Seconds of processor time for an input of some kilobytes."""

OPCODES = b"(.012FGIJKLMNPQRSTUVX]abcdeghijlopqrstu})" + bytes(range(0x80, 0x99)) + b"BC"


def random_edits(rng: random.Random) -> list[Edit]:
    kinds = ["set", "set", "set", "insert", "delete", "repeat", "move"]
    return [
        (
            rng.choice(kinds),
            rng.randrange(1 << 16),
            rng.randint(1, 64),
            rng.choice(NUMBERS) if rng.random() < 0.5 else rng.randbytes(rng.randint(1, 6)),
        )
        for _ in range(rng.randint(1, 8))
    ]


def random_pickle(rng: random.Random) -> bytes:
    """Opcodes at random, between fragments of a real pickle."""
    real = state()
    parts = []
    for _ in range(rng.randint(1, 60)):
        if rng.random() < 0.3:
            at = rng.randrange(len(real))
            parts.append(real[at : at + rng.randint(1, 120)])
        else:
            parts.append(bytes([rng.choice(OPCODES)]))
    return stream(*parts, protocol=rng.choice([2, 4, 5]))


def example(rng: random.Random) -> bytes | dict[str, bytes]:
    """One damaged input."""
    match rng.randrange(6):
        case 0:
            return apply(rng.choice(list(FILES.values())), random_edits(rng))
        case 1 | 2:
            return repacked(rng.choice(CHECKED), random_edits(rng))
        case 3:
            pickle = random_pickle(rng)
            return rng.choice([torch_zip, legacy, tar])(pickle)
        case 4:
            a, b = rng.choice(list(FILES.values())), rng.choice(list(FILES.values()))
            return a[: rng.randrange(len(a) + 1)] + b[rng.randrange(len(b) + 1) :]
        case _:
            files = dict(rng.choice(list(FOLDERS.values())))
            key = rng.choice(sorted(files))
            return {**files, key: apply(files[key], random_edits(rng))}


def place_of(error: BaseException) -> str:
    """The last line of Holdfast in a traceback."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if "/src/holdfast/" in f.filename
    ]
    where = (
        f"{frames[-1].filename.rpartition('/src/')[2]}:{frames[-1].lineno}" if frames else "outside"
    )
    return f"{type(error).__name__} at {where}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--out", type=Path, default=Path("soak-found"))
    options = parser.parse_args()
    rng = random.Random(options.seed)
    warnings.simplefilter("error")
    found: dict[str, int] = {}
    opened = count = 0
    until = time.monotonic() + options.seconds
    while time.monotonic() < until:
        content = example(rng)
        count += 1
        begin = time.process_time()
        try:
            opened += look(content) is not None
            what = "slow" if time.process_time() - begin > SLOW else None
        except Exception as error:  # anything: that is what is looked for
            what = place_of(error)
            if what not in found:
                traceback.print_exception(error, limit=-6)
        if what is None:
            continue
        found[what] = found.get(what, 0) + 1
        if found[what] == 1:
            options.out.mkdir(exist_ok=True)
            for key, raw in (content if isinstance(content, dict) else {"file": content}).items():
                (options.out / f"{len(found)}-{key}").write_bytes(raw)
            print(f"{what}: input {options.out}/{len(found)}-*", flush=True)
    print(
        f"seed {options.seed}: {count:,} inputs, {opened:,} opened, {len(found)} findings: {found}"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
