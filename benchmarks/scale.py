"""`python -m benchmarks.scale`: a save of very many ranks or tensors as its first rank has it, and the manifest of it, opened.

Ranks are values here and tensors have no data: all that rank 0 does is done by the functions that do it in a save, with the
messages that ranks would send; all that it writes is written; data files are holes. Each line is a process of its own, and the
manifest is opened by another one. A second line under each shows by how much everything grew, where the work doubled.

    cut        every tensor cut along its first dimension over all ranks (FSDP)
    hybrid     two replicas of half as many shards each (HSDP)
    experts    every tensor whole on one rank, which knows no other (expert parallel)

    plan       seconds of rank 0 from the messages to the tasks, and the peak of its memory up to there
    up, down   bytes that rank 0 gets and gives: of all ranks, and of one
    index      seconds of rank 0 from the receipts to the index, the peak of its memory, and the bytes of the index
    open       seconds that `holdfast.open` takes in a fresh process; its peak of memory, with everything that it has imported
    chunks     what it takes then to ask one tensor for all of its chunks

`--messages`: what loads and verbs on ranks send through rank 0, and what it takes rank 0, with messages that are made as ranks
would make them. Sizes are those of one rank's message, of all of them, of one answer and of all answers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np

from benchmarks.planning import catalogue_of, states_of
from benchmarks.probe import status
from benchmarks.report import machine
from holdfast.core.arrays import Ints
from holdfast.core.documents import message_type, read_document, write_document
from holdfast.core.group import (
    MARK_NBYTES,
    UNCHANGED,
    DecideFunction,
    Ranks,
    assign_evenly,
    divide_work,
)
from holdfast.engine.saves import FilePlan, Gathered
from holdfast.engine.stream import write_stream
from holdfast.engine.targets.plan_save import RECEIPT, RankReceipt
from holdfast.engine.write import RankSums
from holdfast.formats import format_of
from holdfast.formats.native.manifest import StoredBoxes, as_bytes
from holdfast.formats.sharded import Receipt
from holdfast.ranks import together as joint
from holdfast.ranks.plan import RankWrites
from holdfast.ranks.state import BITS, Catalogue, RankState

__all__ = ["main"]

LAYOUTS = ("cut", "hybrid", "experts")
HEADER_NBYTES = 90
"""What a tensor takes in the header of a data file, beside the digits of its place."""

MIB = 1 << 20


def ranks_of(layout: str, ranks: int, tensors: int) -> list[RankState]:
    if layout != "experts":
        return states_of("sharded" if layout == "cut" else "hybrid", ranks, tensors)
    every = catalogue_of(tensors, 8)
    states = []
    for rank in range(ranks):
        own = Catalogue(
            every.names[rank::ranks], every.dtypes[rank::ranks], every.shapes[rank::ranks]
        )
        numbers = np.arange(len(own), dtype=np.int64)
        states.append(RankState(own, numbers, np.zeros_like(own.extents), own.extents))
    return states


def receipt_of(rank: int, ranks: int, writes: RankWrites, bits: Ints, *, suffix: str) -> Receipt:
    """What a rank would say of one file with its boxes: as far as places go, that file."""
    lengths = np.multiply.reduce(writes.sizes) * bits[writes.tensors] >> 3
    digits = np.char.str_len(writes.offsets.astype(str)).sum() if len(lengths) < 1 << 16 else 0
    first = 8 + -(-int(HEADER_NBYTES * len(lengths) + digits) // 8) * 8
    stops = first + lengths.cumsum()
    numbers = np.arange(len(lengths))
    sums = ("%08x" % (rank * 0x9E3779B1 % (1 << 32))) * len(lengths)
    key = (
        f"data-{rank + 1:05}-of-{ranks:05}.safetensors"
        if suffix == "native"
        else f"__{rank}_0.distcp"
    )
    return Receipt(
        key,
        int(stops[-1]),
        StoredBoxes(as_bytes(numbers), as_bytes(stops - lengths), as_bytes(stops), sums),
    )


def clocked(job: Callable[[], object]) -> tuple[object, float]:
    """What it made, and seconds of processor time: other work on the machine disturbs the clock on the wall."""
    begin = time.process_time()
    made = job()
    return made, time.process_time() - begin


def saved(layout: str, ranks: int, tensors: int, format: str, folder: str) -> dict[str, float]:
    """A save of so many ranks as the first one has it; its index goes into the folder."""
    from holdfast.torch.ranks.saving import RECEIPTS, TASK, RankTask

    states = ranks_of(layout, ranks, tensors)
    paths = (
        {}
        if format == "native"
        else {name: (name,) for state in states for name in state.catalogue.names}
    )
    empty = joint.Description(None, {}, {}, [], [], [])
    first = joint.Proposal(joint.Description(None, {}, paths, [], [], []), states[0])
    messages = [joint.write_proposal(joint.Proposal(empty, state)) for state in states[1:]]
    states = []
    up, one = sum(map(len, messages)), len(messages[-1])

    def plan() -> tuple[joint.Together, list[bytes]]:
        known = {first.state.catalogue.digest: first.state.catalogue}
        proposals = [first, *(joint.read_proposal(message, known) for message in messages)]
        together = joint.put_together(proposals, values="agree", per_rank=())
        tasks = [
            write_document(TASK, RankTask(as_bytes(w.boxes), list(w.values), [], None))
            for w in together.writes
        ]
        return together, tasks

    (together, tasks), plan_s = clocked(plan)
    plan_peak, boxes = status("VmHWM"), sum(len(w.boxes) for w in together.writes)
    messages.clear()
    contents = together.contents
    bits = np.array([BITS[dtype] for dtype in contents.dtypes], np.int64)
    listed = [
        receipt_of(r, ranks, w, bits, suffix=format)
        for r, w in enumerate(together.writes)
        if len(w.boxes)
    ]
    receipts = [write_document(RECEIPTS, [receipt]) for receipt in listed]
    files = [(receipt.key, receipt.nbytes) for receipt in listed]
    listed = []

    def index() -> object:
        delivered = [read_document(RECEIPTS, raw) for raw in receipts]
        writes = [w for w in together.writes if len(w.boxes)]
        joined = [*zip(writes, delivered, strict=True)]
        return format_of(format).sharded.index(together.contents, joined, path=str(folder))

    plans, index_s = clocked(index)
    nbytes = 0
    for file in plans:
        with open(os.path.join(folder, file.key), "wb") as out:
            write_stream(file, out)
        nbytes += file.nbytes
    index_peak = status("VmHWM")
    for key, length in files:
        with open(os.path.join(folder, key), "wb") as out:
            out.truncate(length)
    return {
        "boxes": boxes, "plan_s": plan_s, "plan_peak": plan_peak, "up": up, "up_one": one,
        "down": sum(map(len, tasks)), "down_one": len(tasks[-1]), "receipts": sum(map(len, receipts)),
        "receipts_one": len(receipts[-1]), "index_s": index_s, "index_peak": index_peak, "index": nbytes,
    }  # fmt: skip


def opened(folder: str) -> dict[str, float]:
    """In this process: open what is in a folder."""
    import holdfast

    with (
        tempfile.TemporaryDirectory() as small
    ):  # what is imported when a verb is first called is no part of it
        holdfast.save({"w": np.zeros(3)}, Path(small, "a"))
        with holdfast.open(Path(small, "a")) as checkpoint:
            list(checkpoint)
    checkpoint, took = clocked(lambda: holdfast.open(folder))
    peak = status("VmHWM")
    tensor, described = clocked(lambda: checkpoint[next(iter(checkpoint))])
    chunks, chunks_s = clocked(lambda: len(tensor.chunks))
    return {
        "open_s": took,
        "open_peak": peak,
        "tensors": len(checkpoint),
        "chunks": chunks,
        "chunks_s": described + chunks_s,
    }


class Many(Ranks):
    """The first of many ranks, where the others have sent their messages already."""

    def __init__(self, told: list[bytes]) -> None:
        self.size, self.told, self.answers = len(told), told, list[bytes]()

    def agree(
        self,
        local: bytes | BaseException,
        decide: DecideFunction,
        *,
        failure_summary: str = UNCHANGED,
    ) -> bytes:
        self.answers = decide(self.told)
        return self.answers[0]


def loading(ranks: int, tensors: int, whole: int) -> tuple[Many, float]:
    """A load of which each rank wants a part of each tensor, but for so many that all want whole."""
    from holdfast.torch.ranks.load_sharded import RANK_MATCH, RankMatch, _judge
    from holdfast.torch.ranks.replicas import Offers

    keys = [blake2b(b"%d" % n, digest_size=16).digest() for n in range(whole)]
    nbytes = np.full(whole, 16384, "<i8").tobytes()
    offers = Offers(b"".join(keys), nbytes, on_cpu=bytes(whole), apart=0)
    told = write_document(
        RANK_MATCH, RankMatch(b"0" * 16, b"1" * 16, b"\xff" * (tensors // 8), True, True, offers)
    )
    many = Many([told] * ranks)
    _, took = clocked(
        lambda: many.agree(told, lambda messages: _judge(messages, "auto", remote=True))
    )
    return many, took


def sharing_out(ranks: int, tensors: int) -> tuple[Many, float]:
    """A verb that looks at each tensor and finds a checksum."""
    weights = np.full(tensors, 1 << 20, np.int64)
    picks = np.bincount(
        ranks - 1 - assign_evenly(weights, np.zeros(ranks, np.int64)), minlength=ranks
    )
    mark = blake2b(weights.tobytes(), digest_size=MARK_NBYTES).digest()
    kind = message_type("list of results", list[int])
    many = Many([mark + write_document(kind, [0xFFFFFFFF] * int(count)) for count in picks])
    _, took = clocked(
        lambda: divide_work(many, weights, lambda numbers: [0xFFFFFFFF] * len(numbers), int)
    )
    return many, took


def receiving(ranks: int, tensors: int) -> tuple[Many, float]:
    """The receipts of a verb that writes (`convert`): each rank a file with its share of tensors, gathered by the thousand."""
    files = []
    for rank in range(ranks):
        names = [f"layers.{n}.experts.{rank}.w" for n in range(tensors // ranks)]
        pieces = [names[at : at + 1000] for at in range(0, len(names), 1000)]
        segments = tuple(Gathered(64 * len(own), own, lambda: (b"", {})) for own in pieces)
        files.append((FilePlan(f"data-{rank}", segments), dict.fromkeys(names, 0xFFFFFFFF)))
    told = [
        write_document(RECEIPT, RankReceipt({r: RankSums.from_crcs(*file)}, {}, b""))
        for r, file in enumerate(files)
    ]
    many, crcs = Many(told), dict[str, int]()

    def receive(messages: list[bytes]) -> list[bytes]:
        for one in [read_document(RECEIPT, raw) for raw in messages]:
            for number, sums in one.whole.items():
                crcs.update(sums.whole(files[number][0]))
        return [b""] * len(messages)

    _, took = clocked(lambda: many.agree(b"", receive))
    assert len(crcs) == tensors // ranks * ranks
    return many, took


def print_messages() -> None:
    print(
        "| | rank 0 | up, one | up, all | down, one | down, all |\n| --- | --- | --- | --- | --- | --- |"
    )
    rows = {
        f"load, all cut, {n:,} × 2,000": lambda n=n: loading(n, 2000, 0)
        for n in (1024, 2048, 4096, 8192)
    }
    rows |= {
        f"load, 200 of them whole, {n:,} × 2,000": lambda n=n: loading(n, 2000, 200)
        for n in (256, 512, 1024)
    }
    rows |= {
        f"a verb that looks, {n:,} × 2,000": lambda n=n: sharing_out(n, 2000)
        for n in (1024, 2048, 4096, 8192)
    }
    rows |= {
        f"a verb that looks, 64 × {n:,}": lambda n=n: sharing_out(64, n)
        for n in (250_000, 500_000, 1_000_000)
    }
    rows |= {
        f"a verb that writes, 64 × {n:,}": lambda n=n: receiving(64, n)
        for n in (250_000, 500_000, 1_000_000)
    }
    for name, job in rows.items():
        many, took = job()
        sizes = (
            len(many.told[-1]),
            sum(map(len, many.told)),
            len(many.answers[-1]),
            sum(map(len, many.answers)),
        )
        print(
            f"| {name} | {took:.3f} s | "
            + " | ".join(f"{nbytes / 1e6:,.3f} MB" for nbytes in sizes)
            + " |",
            flush=True,
        )


def alone(*arguments: object) -> dict[str, float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(saved, arguments)


def measured(
    layout: str, ranks: int, tensors: int, format: str, *, rounds: int
) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        found = alone(layout, ranks, tensors, format, folder)
        runs = []
        for _ in range(rounds):
            words = [sys.executable, "-m", "benchmarks.scale", "--open", folder]
            ran = subprocess.run(words, capture_output=True, text=True, check=False)
            if ran.returncode:
                print(ran.stderr.strip().splitlines()[-1][:200], file=sys.stderr)
                return found
            runs.append(json.loads(ran.stdout))
        runs.sort(key=lambda run: run["open_s"])
        return found | runs[len(runs) // 2]


COLUMNS: dict[str, Callable[[float], str]] = {
    "boxes": lambda n: f"{n / 1e6:.2f} M",
    "plan_s": lambda n: f"{n:.2f} s", "plan_peak": lambda n: f"{n / 1e9:.2f} GB",
    "up": lambda n: f"{n / 1e6:,.0f} MB", "up_one": lambda n: f"{n / 1e3:,.0f} kB",
    "down": lambda n: f"{n / 1e6:,.1f} MB", "down_one": lambda n: f"{n / 1e3:,.1f} kB",
    "receipts": lambda n: f"{n / 1e6:,.0f} MB", "receipts_one": lambda n: f"{n / 1e3:,.0f} kB",
    "index_s": lambda n: f"{n:.2f} s", "index_peak": lambda n: f"{n / 1e9:.2f} GB", "index": lambda n: f"{n / 1e6:,.0f} MB",
    "open_s": lambda n: f"{n:.2f} s", "open_peak": lambda n: f"{n / 1e9:.2f} GB", "chunks_s": lambda n: f"{n * 1e3:.1f} ms",
}  # fmt: skip


def lines(
    layout: str, format: str, sizes: Sequence[tuple[int, int]], rounds: int
) -> Iterator[list[str]]:
    before: dict[str, float] = {}
    for ranks, tensors in sizes:
        found = measured(layout, ranks, tensors, format, rounds=rounds)
        cells = [say(found[name]) if name in found else "—" for name, say in COLUMNS.items()]
        yield [f"{layout}, {format}, {ranks:,} × {tensors:,}", *cells]
        if before:
            grew = [
                f"×{found[name] / before[name]:.2f}" if name in found and name in before else ""
                for name in COLUMNS
            ]
            yield ["", *grew]
        before = found


def main() -> None:
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description=__doc__, formatter_class=text
    )
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[1024, 2048, 4096, 8192],
        help="of layouts that are cut",
    )
    parser.add_argument(
        "--tensors",
        type=int,
        nargs="+",
        default=[125_000, 250_000, 500_000, 1_000_000],
        help="of experts",
    )
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--format", nargs="+", choices=("native", "dcp"), default=["native", "dcp"])
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="how often each index is opened (default: 3; the median)",
    )
    parser.add_argument(
        "--messages", action="store_true", help="what loads and verbs send, instead"
    )
    parser.add_argument("--open", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.open:
        print(json.dumps(opened(asked.open)))
        return
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    if asked.messages:
        print_messages()
        return
    print("| | " + " | ".join(name.replace("_", " ") for name in COLUMNS) + " |")
    print("| --- |" + " --- |" * len(COLUMNS), flush=True)
    for layout in asked.layout:
        sizes = (
            [(64, n) for n in asked.tensors]
            if layout == "experts"
            else [(n, 2000) for n in asked.ranks]
        )
        for format in asked.format:
            for line in lines(layout, format, sizes, asked.rounds):
                print("| " + " | ".join(line) + " |", flush=True)


if __name__ == "__main__":
    main()
