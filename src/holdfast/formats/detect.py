"""Which format is this? By content alone, in an order in which no two formats claim the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from holdfast.core.printed import check_printable
from holdfast.core.protocols import Description, Format, Source
from holdfast.errors import FormatError, StoreError, UnknownFormat


@cache
def _of_ranks() -> tuple[Format, ...]:
    # Files of torch.save, each with a rank in its name; also where there is one alone, which is then all there is.
    from holdfast.formats.rank_files.megatron_files import MegatronDirectory
    from holdfast.formats.rank_files.recognise import RankFiles

    return RankFiles(), MegatronDirectory()


@cache
def _zips() -> tuple[Format, ...]:
    from holdfast.formats.npy.archive import NpzArchive
    from holdfast.formats.pt2.archive import Pt2Archive
    from holdfast.formats.torch.zip import TorchZip

    # A .pt2 is a zip as well, and told from one of torch.save by a record that only it has.
    return Pt2Archive(), NpzArchive(), TorchZip()


@cache
def _arrays() -> tuple[Format, ...]:
    from holdfast.formats.npy.archive import NpyFile

    return (NpyFile(),)


@cache
def _streams() -> tuple[Format, ...]:
    from holdfast.formats.torch.legacy import TorchLegacy, TorchTar

    return TorchLegacy(), TorchTar()


@cache
def _gguf() -> tuple[Format, ...]:
    from holdfast.formats.gguf.read import GgufFile

    return (GgufFile(),)


@cache
def _safetensors() -> tuple[Format, ...]:
    from holdfast.formats.safetensors.read import SafetensorsFile

    return (SafetensorsFile(),)


@cache
def _native() -> tuple[Format, ...]:
    # It holds safetensors files and an index of them as well, so it is looked for first.
    from holdfast.formats.native.read import NativeDirectory

    return (NativeDirectory(),)


@cache
def _directories() -> tuple[Format, ...]:
    from holdfast.formats.dcp.read import DcpDirectory
    from holdfast.formats.safetensors.directory import SafetensorsDirectory

    return DcpDirectory(), SafetensorsDirectory()


@cache
def _last() -> tuple[Format, ...]:
    from holdfast.formats.gguf.read import GgufDirectory
    from holdfast.formats.rank_files.zero import ZeroDirectory
    from holdfast.formats.torch.directory import TorchDirectory

    # torch's last of all: who made something else of these files, and put it beside them, means that.
    return GgufDirectory(), ZeroDirectory(), TorchDirectory()


ZIP = b"PK"
FIRST_NBYTES = 30 + 512
"""First bytes of a file that its format is told by, at the most."""

FORMATS: Sequence[tuple[Callable[[], tuple[Format, ...]], bytes]] = (
    (_of_ranks, ZIP), (_zips, ZIP), (_arrays, b"\x93NUMPY"), (_streams, b""), (_gguf, b"GGUF"), (_safetensors, b""),
    (_native, b""), (_directories, b""), (_last, b""),
)  # fmt: skip
"""The formats in the order in which they are tried, with what a single file of them begins with. They are imported when their turn
comes: to open a file takes few."""

PLAIN = ("safetensors", "npy", "gguf")
"""Formats of one file that torch does not know."""


def _refuse_second_reading(source: Source, found: Format) -> None:
    """Refuse a file that torch would read as something else: it tries zip, then tar, and then its old stream of pickles.

    A tar header is told by a checksum, and any content can be made to have one. And whatever is no zip and no tar is unpickled from
    its first byte on, which the length at the start of safetensors and the counts of GGUF can be made to allow.
    """
    if found.name not in PLAIN:
        return
    from holdfast.formats.torch.legacy import refuse_tar

    (key,) = source.store.list()
    refuse_tar(source, key, found.name)
    if _unpickles(source, key):
        raise FormatError(
            f"the file is {found.name} and a pickle at once, and torch.load would run the pickle; `holdfast scan` shows what that "
            "would do",
            file=key,
        )


OPCODES = frozenset(bytes([op]) for op in (*b"().012BCFGIJKLMNPQRSTUVX]abcdeghijlopqrstu}", *range(0x80, 0x99)))
"""What a pickle may begin with. An unpickler refuses every other byte at once."""


def _unpickles(source: Source, key: str) -> bool:
    """Whether an unpickler that is given this file does anything before it fails."""
    if source.first(key, 1) not in OPCODES:
        return False
    from holdfast.formats.pickle.recording import read_ahead
    from holdfast.formats.torch.legacy import MAGIC

    size = source.store.size(key)
    found = read_ahead(lambda start, stop: source.bytes(key, start, min(stop, size)) if start < size else b"", size, source.limits)
    return found.acts or found.value == MAGIC


HINTS = (
    (b"\x80", "it begins like a bare pickle, which `holdfast scan` can look into"),
    (b"\x89HDF", "it is an HDF5 file, which Holdfast does not read"),
    (b"\x1f\x8b", "it is gzip-compressed; unpack it first"),
    (b"PYTORCH1", "it was written by a preview release of torch that no torch reads today"),
    (b"version https://git-lfs", "it is a Git LFS pointer, not the file itself; run `git lfs pull`"),
    (b"<", "it looks like a web page; the download went wrong"),
)
"""What people open by mistake, and what to tell them."""


def detect(source: Source) -> Format:
    """The format whose content this is."""
    key = source.store.single
    head = b"" if key is None else source.first(key, FIRST_NBYTES)
    for group, begins in FORMATS:
        if key is not None and not head.startswith(begins):
            continue
        for candidate in group():
            if candidate.matches(source):
                _refuse_second_reading(source, candidate)
                return candidate
    keys = source.store.list()
    if not keys:
        raise StoreError("the folder is empty", file=source.store.name)
    from holdfast.formats.rank_files.recognise import PATTERN

    halves = (key.partition("/") for key in keys)
    inner = sorted({folder for folder, _, name in halves if name == ".metadata" or PATTERN.fullmatch(name)})
    if inner:
        raise UnknownFormat(f"no checkpoint in this folder itself; its folder {inner[0]!r} has one, open that", found=inner[:3])
    if len(keys) > 1:
        from holdfast.formats.index_file import FOREIGN, some

        foreign = [key for key in keys if FOREIGN.fullmatch(key)]
        if foreign and not any(key.endswith((".pt", ".pth", ".ckpt", ".gguf", ".npz")) for key in keys):
            raise UnknownFormat(
                f"the weights in this folder are of kinds that Holdfast does not read: {some(foreign)}; get the model with its "
                "safetensors, or load it where these belong (transformers 4: from_tf=True, from_flax=True) and save it from there",
                found=foreign[:3],
            )
        raise UnknownFormat(
            "no checkpoint in this folder: no holdfast.json, no .metadata, no safetensors files and no pytorch_model.bin; open one "
            "of its files instead",
            found=keys[:3],
        )
    raise unknown(source, keys[0])


def unknown(source: Source, key: str) -> UnknownFormat:
    """What to say of a file that is none of the formats."""
    head = source.first(key, 32)
    if not head:
        return UnknownFormat("the file is empty")
    hint = next((text for start, text in HINTS if head.startswith(start)), "it is none of the formats that Holdfast knows")
    return UnknownFormat(f"not a checkpoint: {hint}", found=head[:8])


def describe(source: Source, reader: Format) -> Description:
    """What a format finds in a source, with a tree that can be printed. Raises `LimitExceeded` where it cannot."""
    found = reader.describe(source)
    if found.tree is not found.tensors:
        check_printable(found.tree, source.limits)
    return found
