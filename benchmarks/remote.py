"""`python -m benchmarks.remote`: object stores. Holdfast beside boto3 with threads, s3fs, DCP over fsspec, s3torchconnector.

    read    all tensors of a checkpoint into memory
    slice   1 MiB out of a larger one, opening included
    save    a state that is in memory

The server is SeaweedFS on this machine, so there is no network: what is compared is how much work each client makes of it. Each
side runs in a process of its own, in turn, after a small request; figures are those of the best round. Memory is what the process
had at the most beyond what it had before, the state that is read included. Bytes and requests are counted by a proxy in a run of
their own, without that request: it would slow down everybody. A side that is not installed, or fails, is said to be so.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

BUCKET = "bucket"
TENSORS = 32
THREADS = 24
PIECE = 8 << 20
SLICE = 1 << 20
JOBS = ("read", "slice", "save")


def state(nbytes: int) -> dict[str, np.ndarray]:
    """Tensors of so many bytes together, of numbers that differ."""
    each = nbytes // TENSORS // 4
    start = np.arange(each, dtype=np.uint32)
    return {
        f"layers.{i}.weight": (start + np.uint32(i)).view(np.float32).reshape(-1, 1024)
        for i in range(TENSORS)
    }


def holdfast_side(job: str, nbytes: int) -> Callable[[], object]:
    import holdfast

    if "COUNTED" not in os.environ:
        holdfast.save({"w": np.ones(3)}, f"s3://{BUCKET}/bench/warm-{os.getpid()}")
        with holdfast.open(f"s3://{BUCKET}/bench/warm-{os.getpid()}") as warm:
            holdfast.read(warm.values())
    if job == "read":

        def read() -> object:
            with holdfast.open(f"s3://{BUCKET}/bench/native") as checkpoint:
                return holdfast.read(checkpoint.values())

        return read
    if job == "slice":

        def piece() -> object:
            with holdfast.open(f"s3://{BUCKET}/bench/native") as checkpoint:
                return checkpoint["layers.7.weight"][100 : 100 + SLICE // 4096].numpy()

        return piece
    content = state(nbytes)
    return lambda: holdfast.save(content, f"s3://{BUCKET}/bench/saved-{os.getpid()}")


def boto3_side(job: str, nbytes: int) -> Callable[[], object]:
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=os.environ["AWS_ENDPOINT_URL"],
        config=Config(max_pool_connections=THREADS),
    )
    key = "bench/x.safetensors"
    if "COUNTED" not in os.environ:
        client.head_bucket(Bucket=BUCKET)

    def ranged(start: int, stop: int) -> bytes:
        return client.get_object(Bucket=BUCKET, Key=key, Range=f"bytes={start}-{stop - 1}")[
            "Body"
        ].read()

    if job == "read":

        def read() -> object:
            size = client.head_object(Bucket=BUCKET, Key=key)["ContentLength"]
            out = np.empty(size, np.uint8).data

            def fill(start: int) -> None:
                data = ranged(start, min(start + PIECE, size))
                out[start : start + len(data)] = data

            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(fill, range(0, size, PIECE)))
            return out

        return read
    if job == "slice":

        def piece() -> object:
            head = ranged(0, 128 << 10)
            begin = int.from_bytes(head[:8], "little")
            at = 8 + begin + json.loads(head[8 : 8 + begin])["layers.7.weight"]["data_offsets"][0]
            return ranged(at + 100 * 4096, at + 100 * 4096 + SLICE)

        return piece
    raw = io.BytesIO(b"".join(array.tobytes() for array in state(nbytes).values()))
    config = TransferConfig(multipart_chunksize=16 << 20, max_concurrency=12)
    return lambda: client.upload_fileobj(raw, BUCKET, f"bench/boto3-{os.getpid()}", Config=config)


def s3fs_side(job: str, nbytes: int) -> Callable[[], object]:
    import s3fs

    files = s3fs.S3FileSystem(
        endpoint_url=os.environ["AWS_ENDPOINT_URL"], key="key", secret="secret"
    )
    place = f"{BUCKET}/bench/x.safetensors"
    if "COUNTED" not in os.environ:
        files.ls(f"{BUCKET}/bench")
    if job == "read":
        return lambda: files.cat_file(place)
    if job == "slice":

        def piece() -> object:
            with files.open(place, "rb", block_size=1 << 20) as file:
                begin = int.from_bytes(file.read(8), "little")
                at = 8 + begin + json.loads(file.read(begin))["layers.7.weight"]["data_offsets"][0]
                file.seek(at + 100 * 4096)
                return file.read(SLICE)

        return piece
    raw = b"".join(array.tobytes() for array in state(nbytes).values())
    return lambda: files.pipe_file(f"{BUCKET}/bench/s3fs-{os.getpid()}", raw)


def dcp_side(job: str, nbytes: int) -> Callable[[], object]:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"], "key": "key", "secret": "secret"}
    if job == "slice":
        raise NotImplementedError("DCP reads whole tensors")
    tensors = {name: torch.from_numpy(array) for name, array in state(nbytes).items()}
    if job == "read":
        for tensor in tensors.values():
            tensor.zero_()
        return lambda: dcp.load(
            tensors, storage_reader=FsspecReader(f"s3://{BUCKET}/bench/dcp", **options)
        )
    # Files to memory before they are sent, in as many threads as the others have.
    target = os.environ.get("DCP_TARGET", f"s3://{BUCKET}/bench/dcp-{os.getpid()}")
    return lambda: dcp.save(tensors, storage_writer=FsspecWriter(target, thread_count=4, **options))


def connector_side(job: str, nbytes: int) -> Callable[[], object]:
    import torch
    from s3torchconnector import S3Checkpoint, S3ClientConfig

    made = S3Checkpoint(
        region="us-east-1",
        endpoint=os.environ["AWS_ENDPOINT_URL"],
        s3client_config=S3ClientConfig(force_path_style=True),
    )
    if job == "slice":
        raise NotImplementedError("it reads files, whole with torch.load")
    if job == "read":

        def read() -> object:
            with made.reader(f"s3://{BUCKET}/bench/x.pt") as file:
                return torch.load(file, weights_only=True)

        return read
    tensors = {name: torch.from_numpy(array) for name, array in state(nbytes).items()}

    def save() -> None:
        with made.writer(f"s3://{BUCKET}/bench/connector-{os.getpid()}.pt") as file:
            torch.save(tensors, file)

    return save


SIDES = {
    "holdfast": holdfast_side,
    "boto3, threads": boto3_side,
    "s3fs": s3fs_side,
    "DCP, fsspec": dcp_side,
    "s3torchconnector": connector_side,
}


def child(side: str, job: str, nbytes: int) -> None:
    """One measured run; prints what it took."""
    call = SIDES[side](job, nbytes)
    touch(2 * nbytes if job != "slice" else SLICE)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = peak_nbytes()
    used, started = time.process_time(), time.perf_counter()
    result = call()
    wall, cpu = time.perf_counter() - started, time.process_time() - used
    peak = peak_nbytes() - before
    del result
    print(json.dumps({"wall": wall, "cpu": cpu, "peak": peak}))


def touch(nbytes: int) -> None:
    """Have the system find so much memory, and give it back.

    In a virtual machine, pages that nobody had before cost several times their copying, and whoever runs first pays.
    """
    np.ones(nbytes, np.uint8)


def peak_nbytes() -> int:
    """The most memory that this process had since it was last forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def run(side: str, job: str, nbytes: int, port: int, **more: str) -> dict[str, float] | str:
    """The same in a process of its own; text where it fails."""
    from tests.remote.servers import environment

    command = [
        sys.executable,
        "-m",
        "benchmarks.remote",
        "--child",
        side,
        job,
        "--size",
        str(nbytes),
    ]
    done = subprocess.run(
        command,
        env={**os.environ, **environment(port), **more},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["failed"])[-1][:100]
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def prepare(job: str, nbytes: int, port: int) -> None:
    """Put there what a job reads."""
    from tests.remote.servers import environment

    import holdfast

    os.environ.update(environment(port))
    if job == "save":
        return
    holdfast.save(state(nbytes), f"s3://{BUCKET}/bench/native", overwrite=True)
    for name in ("x.safetensors", "x.pt")[: 1 if job == "slice" else 2]:
        holdfast.convert(
            f"s3://{BUCKET}/bench/native",
            f"s3://{BUCKET}/bench/{name}",
            read_back=False,
            overwrite=True,
        )
    if job == "read":
        run("DCP, fsspec", "save", nbytes, port, DCP_TARGET=f"s3://{BUCKET}/bench/dcp")


def versions() -> list[str]:
    """What is installed of the sides."""
    found = []
    for name in ("obstore", "boto3", "s3fs", "torch", "s3torchconnector"):
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return found


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.remote", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument(
        "--size", type=int, default=1 << 30, help="bytes that are read and saved (default: 1 GiB)"
    )
    parser.add_argument(
        "--slice-of",
        type=int,
        default=4 << 30,
        help="bytes of what a slice is read from (default: 4 GiB)",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--job", choices=JOBS, action="append", help="of these only")
    asked = parser.parse_args()
    if asked.child:
        child(*asked.child, asked.size)
        return 0
    from tests.remote.servers import weed

    load = f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    print(
        f"Python {platform.python_version()}, {os.cpu_count()} cores, {load}; {', '.join(versions())}; {asked.rounds} rounds"
    )
    print("\n| job | side | seconds | of ours | processor s | peak memory | bytes | requests |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for job in asked.job or JOBS:
        # A server of its own: what was deleted keeps its place on the disk.
        with tempfile.TemporaryDirectory() as folder, weed(Path(folder)) as port:
            nbytes = asked.slice_of if job == "slice" else asked.size
            prepare(job, nbytes, port)
            for row in table(job, nbytes, port, rounds=asked.rounds):
                print(row, flush=True)
    return 0


def table(job: str, nbytes: int, port: int, *, rounds: int) -> Iterator[str]:
    """The rows of one job."""
    from tests.remote.servers import Proxy

    done: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    failed: dict[str, str] = {}
    for number in range(rounds):
        # Each of them begins a round, and comes after each of the others.
        order = [*SIDES][number % len(SIDES) :] + [*SIDES][: number % len(SIDES)]
        for side in order if number % 2 else reversed(order):
            if side not in failed:
                found = run(side, job, nbytes, port)
                if isinstance(found, str):
                    failed[side] = found
                else:
                    done[side].append(found)
    named = f"{job}, {nbytes / 2**30:g} GiB"
    for side, runs in done.items():
        if side in failed:
            yield f"| {named} | {side} | not run: {failed[side]} | | | | | |"
            continue
        with Proxy(port) as proxy:
            run(side, job, nbytes, proxy.port, COUNTED="1")
            moved = proxy.sent_nbytes if job != "save" else sum(one.nbytes for one in proxy.asked)
            count = len(proxy.asked)
        # The best of each: whatever else happens on a machine only adds.
        wall, cpu, peak = (min(one[name] for one in runs) for name in ("wall", "cpu", "peak"))
        ours = min((one["wall"] for one in done["holdfast"]), default=float("nan"))
        figures = f"{wall:.3f} | {wall / ours:.2f} | {cpu:.3f} | {peak / 2**20:.0f} MiB | {moved / 2**20:.1f} MiB | {count}"
        yield f"| {named} | {side} | {figures} |"


if __name__ == "__main__":
    raise SystemExit(main())
