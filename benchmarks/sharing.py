"""`python -m benchmarks.sharing`: steps that share bytes (`base=`) beside steps that are saved whole.

    lora        a large frozen part and adapters that change in every step (`--changed` of all bytes): seconds and bytes of a save
                with `base=` and of one without, what `du` finds, and every step compared bit for bit after others are deleted
    everything  every tensor changes in every step, so nothing can be shared: what hashing and looking at the base cost. Saves with
                `base=` and without alternate in one process, each round in the other order; medians of clock and processors

Each save is durable. The steps go to `--folder`; whole saves are removed after each, since they would fill the disk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import holdfast
from benchmarks.report import machine

State = dict[str, np.ndarray]

LAYERS = 32


def measured(call: Callable[[], object]) -> tuple[float, float, object]:
    """Seconds by the clock, seconds of this process's processors, and what came back."""
    used, started = time.process_time(), time.perf_counter()
    result = call()
    return time.perf_counter() - started, time.process_time() - used, result


def filled(nbytes: int, seed: int) -> np.ndarray:
    """Numbers that differ everywhere, made faster than random ones."""
    count = nbytes // 4
    return (np.arange(count, dtype=np.uint32) * np.uint32(2654435761 + 2 * seed)).view(np.float32)


def lora_state(nbytes: int, changed: float) -> State:
    adapters = int(nbytes * changed)
    state: State = {}
    for layer in range(LAYERS):
        for part in range(4):
            state[f"layers.{layer}.base.{part}"] = filled(
                (nbytes - adapters) // LAYERS // 4, 4 * layer + part
            )
        for part in range(2):
            state[f"layers.{layer}.lora.{part}"] = filled(
                adapters // LAYERS // 2, 1000 + 2 * layer + part
            )
    return state


def train(state: State, step: int) -> None:
    for name, array in state.items():
        if ".lora." in name:
            array.view(np.uint32)[:] ^= np.uint32(step)


def backed(nbytes: int) -> None:
    """Touch and free as much memory as a save needs for its pages: on a virtual machine the first touch may cost ten times as much
    as any other, and would fall to one of the two sides."""
    np.ones(nbytes + (256 << 20), np.uint8)


def du(path: Path) -> int:
    return int(
        subprocess.run(
            ["du", "-s", "--block-size=1", path], capture_output=True, text=True, check=True
        ).stdout.split()[0]
    )


def lora(place: Path, nbytes: int, steps: int, *, changed: float, whole: int) -> None:
    state = lora_state(nbytes, changed)
    total = sum(array.nbytes for array in state.values())
    print(
        f"lora: {total / 2**30:.2f} GiB in {len(state)} tensors, {changed:.1%} of the bytes change a step, {steps} steps"
    )
    seconds, used, _ = measured(lambda: holdfast.save(state, place / "step-0", hashes=True))
    print(f"  first step, whole, with hashes      {seconds:7.3f} s  {used:7.3f} s of processors")
    alone = []
    for _ in range(whole):
        seconds, used, saved = measured(lambda: holdfast.save(state, place / "whole"))
        alone.append((seconds, used, saved.new_nbytes))
        shutil.rmtree(place / "whole")
    found = []
    kept: dict[int, State] = {}
    for step in range(1, steps + 1):
        train(state, step)
        kept[step] = {name: array.copy() for name, array in state.items() if ".lora." in name}
        seconds, used, saved = measured(
            lambda step=step: holdfast.save(
                state, place / f"step-{step}", base=place / f"step-{step - 1}"
            )
        )
        found.append((seconds, used, saved.new_nbytes))
    for name, rows in (("whole", alone), ("with base=", found)):
        clock, used, written = (statistics.median(row[i] for row in rows) for i in range(3))
        print(
            f"  {name:11} {len(rows):2} saves: {clock:7.3f} s  {used:7.3f} s of processors  {written / 2**20:9,.1f} MiB written"
        )
    ratio = statistics.median(row[0] for row in alone) / statistics.median(row[0] for row in found)
    used = du(place) / 2**30
    print(
        f"  1/{ratio:.1f} of the time; du of all {steps + 1} steps: {used:.2f} GiB, where one has {total / 2**30:.2f} GiB"
    )
    print(f"  data files of the last step: {len(list((place / f'step-{steps}').glob('data*')))}")
    # Every other step goes, the first one too; what is left must be what was saved.
    for step in range(0, steps, 2):
        shutil.rmtree(place / f"step-{step}")
    for step in (1, steps):
        if (place / f"step-{step}").exists():
            with holdfast.open(place / f"step-{step}") as opened:
                for name, array in state.items():
                    expected = kept[step].get(name, array)
                    assert np.array_equal(
                        opened[name].numpy().view(np.uint32), expected.view(np.uint32)
                    ), (step, name)
    print(
        f"  {len(list(place.iterdir()))} steps are left after deleting the others; the first and the last of them are bit-equal"
    )


def everything(place: Path, nbytes: int, rounds: int) -> None:
    state = {f"w{i}": filled(nbytes // 64, i) for i in range(64)}
    total = sum(array.nbytes for array in state.values())
    print(
        f"everything: {total / 2**30:.2f} GiB in {len(state)} tensors, all of them change, {rounds} rounds"
    )
    holdfast.save(state, place / "step-0", hashes=True)
    holdfast.save(state, place / "plain-0")
    rows: dict[str, list[tuple[float, float]]] = {"without": [], "with base=": []}
    for number in range(1, rounds + 1):
        for array in state.values():
            array.view(np.uint32)[:] += np.uint32(1)
        for kind in ("without", "with base=") if number % 2 else ("with base=", "without"):
            os.sync()
            backed(total)
            options = {"base": place / f"step-{number - 1}"} if kind == "with base=" else {}
            target = place / f"{'step' if options else 'plain'}-{number}"
            seconds, used, saved = measured(
                lambda target=target, options=options: holdfast.save(state, target, **options)
            )
            assert saved.shared_nbytes == 0
            rows[kind].append((seconds, used))
        shutil.rmtree(place / f"plain-{number - 1}")
        shutil.rmtree(place / f"step-{number - 1}")
    for kind, measurements in rows.items():
        clock, used = (statistics.median(row[i] for row in measurements) for i in range(2))
        least = [min(row[i] for row in measurements) for i in range(2)]
        print(
            f"  {kind:12} {clock:7.3f} s  {used:7.3f} s of processors; at best {least[0]:7.3f} s  {least[1]:7.3f} s"
        )
    pairs = [b[0] / a[0] for a, b in zip(rows["without"], rows["with base="], strict=True)]
    print(f"  median of the ratios of each round, by the clock: {statistics.median(pairs):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=("lora", "everything"), action="append")
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--changed", type=float, default=0.01)
    parser.add_argument("--whole", type=int, default=5, help="saves without base= to compare with")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    print(machine())
    for case in options.case or ("lora", "everything"):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            if case == "lora":
                lora(
                    Path(folder),
                    int(options.gib * 2**30),
                    options.steps,
                    changed=options.changed,
                    whole=options.whole,
                )
            else:
                everything(Path(folder), int(options.gib * 2**30), options.rounds)


if __name__ == "__main__":
    main()
