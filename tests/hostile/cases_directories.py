"""Directories whose index, links or files lead somewhere else, or do not go together."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

from holdfast.errors import (
    FormatError,
    HeaderError,
    HoldfastError,
    LimitExceeded,
    MetadataError,
    StoreError,
    Truncated,
    UnknownFormat,
    UnsafePath,
    Unsupported,
)
from tests.formats.safetensors.craft_safetensors import craft, entry, index, shards

from .case import Case, opens, refused
from .craft_pickle import NONE, dict_of, list_of, stream, text
from .craft_torch import legacy, state, torch_zip, weight

__all__ = ["CASES"]

INDEX = "model.safetensors.index.json"
ONE = craft({"a": entry("U8", [4], 0, 4)}, 4)
TWO = craft({"b": entry("U8", [4], 0, 4)}, 4)

Change = Callable[[Path], object]


def folder(files: dict[str, bytes], change: Change | None = None) -> Callable[[Path], Path]:
    """A directory of these files, changed by `change`; its neighbour `secret.safetensors` must not be reached."""

    def make(place: Path) -> Path:
        (place / "secret.safetensors").write_bytes(ONE)
        root = place / "model"
        root.mkdir()
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        if change is not None:
            change(root)
        return root

    return make


def mapped(
    name: str, target: object, *errors: type[HoldfastError], change: Change | None = None
) -> Case:
    """An index that sends the tensor `a` to `target`."""
    files = {
        "one.safetensors": ONE,
        "two.safetensors": TWO,
        INDEX: index({"a": target, "b": "two.safetensors"}),
    }
    return refused(f"dir-{name}", folder(files, change), *errors)


def indexed(name: str, content: bytes, *errors: type[HoldfastError]) -> Case:
    return refused(
        f"dir-index-{name}",
        folder({"one.safetensors": ONE, INDEX: content}),
        *(errors or (HeaderError,)),
    )


def link(name: str, target: str) -> Change:
    def make(root: Path) -> None:
        (root / name).unlink(missing_ok=True)
        (root / name).symlink_to(target)

    return make


def fifo(root: Path) -> None:
    os.mkfifo(root / "x.safetensors")


def unix_socket(root: Path) -> None:
    # A path of a socket has at most 107 bytes, so it is bound from inside its folder.
    before = os.getcwd()
    os.chdir(root)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("x.safetensors")
    finally:
        os.chdir(before)


def alone(make: Callable[[Path], object]) -> Callable[[Path], Path]:
    """Something that is opened by itself."""

    def made(place: Path) -> Path:
        make(place)
        return place / "x.safetensors"

    return made


def hub(blob: str) -> Callable[[Path], Path]:
    """The hub's cache: snapshots/<revision>/file is a link into blobs/."""

    def make(place: Path) -> Path:
        (place / "blobs").mkdir()
        (place / "blobs" / "abc").write_bytes(ONE)
        (place / "secret").write_bytes(ONE)
        root = place / "snapshots" / "main"
        root.mkdir(parents=True)
        (root / "config.json").write_bytes(b"{}")
        (root / "model.safetensors").symlink_to(blob)
        return root

    return make


BIN_INDEX = "pytorch_model.bin.index.json"
BIN = "pytorch_model-0000{}-of-00002.bin".format
FIRST, SECOND = torch_zip(state()), legacy(stream(dict_of(text("b"), weight(NONE))))
"""Shards of torch: `weight` in a zip, `b` in the container of old."""


def shard(
    name: str, files: dict[str, bytes], *errors: type[HoldfastError], change: Change | None = None
) -> Case:
    """A folder of `pytorch_model*.bin`, of which each part is honest unless it is replaced."""
    honest = {
        BIN(1): FIRST,
        BIN(2): SECOND,
        BIN_INDEX: index({"weight": BIN(1), "b": BIN(2)}),
        "config.json": b"{}",
    }
    made = folder({key: content for key, content in {**honest, **files}.items() if content}, change)
    if errors:
        return refused(f"bin-{name}", made, *errors)
    return opens(f"bin-{name}", made, lambda ckpt: list(ckpt) == ["weight", "b"])


def bin_hub(blob: str) -> Callable[[Path], Path]:
    """The hub's cache with weights of torch."""

    def make(place: Path) -> Path:
        root = hub("../../blobs/abc")(place)
        (root / "model.safetensors").unlink()
        (place / "blobs" / "abc").write_bytes(FIRST)
        (place / "secret").write_bytes(FIRST)
        (root / "pytorch_model.bin").symlink_to(blob)
        return root

    return make


CASES = [
    shard("honest", {}),
    shard("without-index", {BIN_INDEX: b""}),
    shard("without-index-and-a-shard", {BIN_INDEX: b"", BIN(1): b""}, StoreError),
    shard("missing-shard", {BIN(2): b""}, StoreError),
    shard("shard-cut", {BIN(2): SECOND[:-1]}, HoldfastError),
    shard("shard-is-text", {BIN(2): b"hello"}, UnknownFormat),
    shard("shard-is-a-bare-pickle", {BIN(2): b"\x80\x02}."}, UnknownFormat),
    shard("shard-is-no-dict", {BIN(2): torch_zip(stream(list_of()))}, MetadataError),
    shard("two-claim-one-tensor", {BIN(2): FIRST}, MetadataError),
    shard(
        "tensor-its-file-lacks", {BIN_INDEX: index({"weight": BIN(2), "b": BIN(2)})}, MetadataError
    ),
    shard("path-climbs", {BIN_INDEX: index({"weight": "../" + BIN(1), "b": BIN(2)})}, UnsafePath),
    shard("path-absolute", {BIN_INDEX: index({"weight": "/etc/passwd", "b": BIN(2)})}, UnsafePath),
    shard("link-outside", {}, UnsafePath, change=link(BIN(2), "../secret.safetensors")),
    shard("link-to-the-other", {}, MetadataError, change=link(BIN(2), BIN(1))),
    shard("names-the-index", {BIN_INDEX: index({"weight": BIN_INDEX})}, UnknownFormat),
    shard("two-models", {BIN_INDEX: b"", "adapter_model.bin": FIRST}, Unsupported),
    opens(
        "bin-hub-cache", bin_hub("../../blobs/abc"), lambda ckpt: ckpt["weight"].numpy().size == 4
    ),
    refused("bin-hub-cache-beside-blobs", bin_hub("../../secret"), HoldfastError),
    opens(
        "dir-honest",
        folder({"one.safetensors": ONE, "two.safetensors": TWO}),
        lambda ckpt: sorted(ckpt) == ["a", "b"],
    ),
    mapped("path-absolute", "/etc/passwd", UnsafePath),
    mapped("path-climbs", "../secret.safetensors", UnsafePath),
    mapped("path-climbs-inside", "x/../one.safetensors", UnsafePath),
    mapped("path-climbs-far", "../" * 40 + "etc/passwd", UnsafePath),
    mapped("path-dot", "./one.safetensors", UnsafePath),
    mapped("path-backslash", "..\\secret.safetensors", UnsafePath),
    mapped("path-nul", "one.safetensors\0.txt", UnsafePath),
    mapped("path-empty", "", UnsafePath),
    mapped("path-double-slash", "x//one.safetensors", UnsafePath),
    mapped("path-slash-at-the-end", "one.safetensors/", UnsafePath),
    mapped("path-is-the-folder", ".", UnsafePath),
    mapped("path-of-10000-characters", "x" * 10_000, StoreError),
    mapped("path-missing", "three.safetensors", StoreError),
    mapped("path-in-other-case", "ONE.safetensors", StoreError),
    mapped("path-url", "https://example.invalid/one.safetensors", UnsafePath),
    mapped("path-home", "~/one.safetensors", StoreError),
    mapped("path-environment", "$HOME", StoreError),
    mapped("path-glob", "*.safetensors", StoreError),
    mapped("path-ansi-escape", "\x1b[2J", StoreError),
    mapped("path-is-a-number", 1, HeaderError),
    mapped("path-is-a-list", ["one.safetensors"], HeaderError),
    mapped("path-is-null", None, HeaderError),
    mapped("path-is-the-index", INDEX, FormatError, LimitExceeded),
    mapped("path-to-a-fifo", "x.safetensors", UnsafePath, StoreError, change=fifo),
    mapped("path-to-a-socket", "x.safetensors", UnsafePath, StoreError, change=unix_socket),
    mapped(
        "path-to-a-device",
        "x.safetensors",
        UnsafePath,
        StoreError,
        change=link("x.safetensors", "/dev/zero"),
    ),
    mapped(
        "path-to-a-folder",
        "x.safetensors",
        UnsafePath,
        StoreError,
        change=lambda root: (root / "x.safetensors").mkdir(),
    ),
    mapped(
        "path-to-a-dead-link",
        "x.safetensors",
        StoreError,
        UnsafePath,
        change=link("x.safetensors", "nowhere"),
    ),
    mapped(
        "path-to-a-link-outside",
        "x.safetensors",
        UnsafePath,
        change=link("x.safetensors", "../secret.safetensors"),
    ),
    mapped(
        "path-to-an-absolute-link",
        "x.safetensors",
        UnsafePath,
        change=link("x.safetensors", "/etc/passwd"),
    ),
    mapped(
        "path-to-a-link-loop",
        "x.safetensors",
        StoreError,
        UnsafePath,
        change=link("x.safetensors", "x.safetensors"),
    ),
    mapped(
        "path-to-proc-self-mem",
        "x.safetensors",
        UnsafePath,
        change=link("x.safetensors", "/proc/self/mem"),
    ),
    mapped(
        "path-through-a-linked-folder",
        "x/secret.safetensors",
        UnsafePath,
        StoreError,
        change=link("x", ".."),
    ),
    mapped("path-through-a-file", "one.safetensors/x", StoreError),
    mapped(
        "index-is-a-link-outside",
        "one.safetensors",
        UnsafePath,
        change=link(INDEX, "../secret.safetensors"),
    ),
    refused(
        "dir-file-is-a-link-outside",
        folder({"one.safetensors": ONE}, link("two.safetensors", "../secret.safetensors")),
        UnsafePath,
    ),
    opens(
        "dir-link-inside-is-followed",
        folder({"sub/real": TWO, "one.safetensors": ONE}, link("two.safetensors", "sub/real")),
        lambda ckpt: ckpt["b"].numpy().size == 4,
    ),
    refused(
        "dir-link-to-itself-twice",
        folder({"one.safetensors": ONE}, link("two.safetensors", "one.safetensors")),
        MetadataError,
    ),
    opens("dir-fifo-beside", folder({"one.safetensors": ONE, "two.safetensors": TWO}, fifo)),
    opens(
        "dir-socket-beside", folder({"one.safetensors": ONE, "two.safetensors": TWO}, unix_socket)
    ),
    opens(
        "dir-linked-root-beside",
        folder({"one.safetensors": ONE, "two.safetensors": TWO}, link("root", "/")),
    ),
    refused("fifo-alone", alone(lambda p: os.mkfifo(p / "x.safetensors")), UnsafePath, StoreError),
    refused("socket-alone", alone(unix_socket), UnsafePath, StoreError),
    refused("device-alone", lambda _: Path("/dev/zero"), UnsafePath, StoreError),
    refused("device-null-alone", lambda _: Path("/dev/null"), UnsafePath, StoreError),
    refused("missing-alone", lambda place: place / "x.safetensors", StoreError),
    refused(
        "path-below-a-file",
        lambda place: (place / "f").write_bytes(ONE) and place / "f" / "x",
        StoreError,
    ),
    refused("path-with-nul", lambda place: Path(f"{place}/x\0y"), StoreError),
    refused("path-with-surrogate", lambda place: Path(f"{place}/\udfff\ud800"), StoreError),
    refused("path-too-long", lambda place: place / ("x" * 5000), StoreError),
    refused(
        "link-loop-alone",
        alone(lambda p: (p / "x.safetensors").symlink_to("x.safetensors")),
        StoreError,
    ),
    opens(
        "hub-cache-link-into-blobs",
        hub("../../blobs/abc"),
        lambda ckpt: ckpt["a"].numpy().size == 4,
    ),
    refused("hub-cache-link-beside-blobs", hub("../../secret"), HoldfastError),
    refused("hub-cache-link-through-blobs", hub("../../blobs/../secret"), HoldfastError),
    refused("hub-cache-link-to-etc", hub("/etc/passwd"), HoldfastError),
    refused("dir-empty", folder({}), StoreError, FormatError),
    refused("dir-of-nothing-known", folder({"a.txt": b"x", "b.txt": b"y"}), UnknownFormat),
    refused(
        "dir-two-claim-one-tensor",
        folder({"one.safetensors": ONE, "two.safetensors": ONE}),
        MetadataError,
    ),
    refused(
        "dir-two-claim-one-tensor-with-index",
        folder(
            {
                "one.safetensors": ONE,
                "two.safetensors": craft(
                    {"a": entry("U8", [4], 0, 4), "b": entry("U8", [0], 4, 4)}, 4
                ),
                INDEX: index({"a": "one.safetensors", "b": "two.safetensors"}),
            }
        ),
        MetadataError,
    ),
    refused(
        "dir-index-tensor-its-file-lacks",
        folder({"one.safetensors": ONE, INDEX: index({"zzz": "one.safetensors"})}),
        MetadataError,
    ),
    refused(
        "dir-index-swaps-files",
        folder(
            {
                "one.safetensors": ONE,
                "two.safetensors": TWO,
                INDEX: index({"b": "one.safetensors", "a": "two.safetensors"}),
            }
        ),
        MetadataError,
    ),
    refused(
        "dir-truncated-file",
        folder({"one.safetensors": ONE, "two.safetensors": TWO[:-1]}),
        Truncated,
    ),
    refused(
        "dir-file-cut-to-nothing",
        folder({"one.safetensors": ONE, "two.safetensors": b""}),
        Truncated,
    ),
    refused(
        "dir-file-is-a-pickle",
        folder({"one.safetensors": ONE, "two.safetensors": torch_zip(state())}),
        FormatError,
    ),
    refused(
        "dir-file-is-an-lfs-pointer",
        folder(
            {
                "one.safetensors": ONE,
                "two.safetensors": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            }
        ),
        FormatError,
    ),
    refused(
        "dir-lost-piece", folder(shards(r0={"w": ([0], [4])}, r2={"w": ([8], [4])})), MetadataError
    ),
    refused(
        "dir-overlapping-pieces",
        folder(shards(r0={"w": ([0], [4])}, r1={"w": ([2], [4])})),
        MetadataError,
    ),
    refused(
        "dir-pieces-of-other-rank",
        folder(shards(r0={"w": ([0], [4])}, r1={"w": ([4, 0], [4, 1])})),
        MetadataError,
    ),
    refused(
        "dir-pieces-at-2^62",
        folder(shards(r0={"w": ([0], [4])}, r1={"w": ([1 << 62], [4])})),
        MetadataError,
    ),
    refused(
        "dir-many-pieces-at-one-place",
        folder(shards(**{f"r{i}": {"w": ([0, i], [4, 1])} for i in range(0, 40, 2)})),
        MetadataError,
    ),
    opens(
        "dir-extra-files-beside",
        folder(
            {
                "one.safetensors": ONE,
                "two.safetensors": TWO,
                INDEX: index({"a": "one.safetensors"}),
                "evil.pkl": b"cos\nsystem\n(Vtrue\ntR.",
                "x.py": b"evil()",
            }
        ),
        lambda ckpt: list(ckpt) == ["a"],
    ),
    refused(
        "dir-two-indexes",
        folder(
            {
                "one.safetensors": ONE,
                "x.safetensors.index.json": index({}),
                "y.safetensors.index.json": index({}),
            }
        ),
        Unsupported,
    ),
    indexed("not-json", b"weight_map"),
    indexed("empty", b""),
    indexed("nul-bytes", bytes(100)),
    indexed("a-list", b"[]"),
    indexed("without-map", b"{}"),
    indexed("map-is-a-list", b'{"weight_map":[]}'),
    indexed("key-twice", b'{"weight_map":{"a":"one.safetensors","a":"/etc/passwd"}}'),
    indexed("map-twice", b'{"weight_map":{},"weight_map":{"a":"one.safetensors"}}'),
    indexed("nan", b'{"metadata":{"total_size":NaN},"weight_map":{"a":"one.safetensors"}}'),
    indexed(
        "deep",
        b'{"metadata":' + b"[" * 100_000 + b"]" * 100_000 + b',"weight_map":{}}',
        HeaderError,
        LimitExceeded,
    ),
    indexed("million-digits", b'{"metadata":' + b"9" * 1_000_000 + b',"weight_map":{}}'),
    indexed("lone-surrogate", b'{"weight_map":{"\\ud800":"one.safetensors"}}'),
    indexed("a-pickle", b"cos\nsystem\n(Vtrue\ntR."),
    refused(
        "dir-metadata-that-calls",
        folder({".metadata": b"\x80\x04cos\nsystem\n(Vtrue\ntR.", "__0_0.distcp": b"x"}),
        HoldfastError,
    ),
    refused(
        "dir-metadata-beside-safetensors",
        folder(
            {
                ".metadata": b"cos\nsystem\n(Vtrue\ntR.",
                "one.safetensors": ONE,
                "two.safetensors": TWO,
            }
        ),
        HoldfastError,
    ),
]
