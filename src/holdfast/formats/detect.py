"""Which format is this? By content alone, in an order in which no two formats claim the same bytes.

Files of torch are recognised here, because detection asks of every file, and describing one needs
the pickle interpreter.
"""

from __future__ import annotations

import re

from holdfast.core.protocols import Source
from holdfast.errors import FormatError, StoreError, UnknownFormat, Unsupported
from holdfast.formats import (
    FIRST_NBYTES,
    FORMATS,
    PLUGINS,
    Format,
    file_suffixes,
    load_plugins,
)

MAGIC = 0x1950A86A20F9469CFC6C
"""The first value in the stream of `torch.save` before 1.6."""

MAGIC_BYTES, MAGIC_TEXT = MAGIC.to_bytes(10, "little"), str(MAGIC).encode()
BEFORE_MAGIC_NBYTES = 16
"""The most bytes before the magic number: PROTO, a frame, and the opcode with its length take 13."""

BLOCK_NBYTES, OCTAL = 512, b"01234567"
MEMBERS = ("storages", "tensors", "pickle")
"""The members of the tar that torch 0.1 wrote."""

OPCODES = frozenset(
    map(
        bytes,
        zip(b"()BCFGIJKLMNPSTUVX]ci}\x80\x82\x83\x84\x88\x89\x8a\x8b\x8c\x8d\x8e\x8f\x95\x96\x97"),
    )
)
"""First bytes of pickles. An unpickler refuses every other byte at once: most opcodes need a stack or a memo. (`i` needs a
stack as well, but CPython's unpickler in Python imports first.)
"""


def _unpickles(source: Source, key: str) -> bool:
    """Whether an unpickler does anything with this file before it fails."""
    from holdfast.formats.pickle.recording import read_ahead  # few files begin like a pickle

    size = source.store.size(key)
    found = read_ahead(
        lambda start, stop: source.bytes(key, start, min(stop, size)) if start < size else b"",
        size,
        source.limits,
    )
    return found.acts or found.value == MAGIC


HINTS = (
    (b"\x89HDF", "it is an HDF5 file, which Holdfast does not read"),
    (b"\x1f\x8b", "it is gzip-compressed; unpack it first"),
    (b"PYTORCH1", "it was written by a preview release of torch that no torch reads today"),
    (
        b"version https://git-lfs",
        "it is a Git LFS pointer, not the file itself; run `git lfs pull`",
    ),
    (b"<", "it looks like a web page; the download went wrong"),
)
"""Files that people open by mistake, and hints."""


def detect(source: Source, *, plugins: bool = True) -> Format:
    """Return the format of a source. Raises `UnknownFormat` if it is of none.

    Formats of other packages are tried if no other fits, unless `plugins` is false. A file that
    torch would read as something else is refused: torch tries zip, then tar, and then its old
    stream of pickles.
    """
    # An index that lies alone in its folder is still the index of a folder, which lacks its files.
    key = None if source.store.index else source.store.single_key
    head = b"" if key is None else source.read_head(key, FIRST_NBYTES)
    format = next((entry for entry in FORMATS if entry.recognises(source, key, head)), None)
    if format is None:
        format = _detect_plugin(source, key, head, plugins=plugins)
    if key is None or format.folder or format.torch:
        return format

    # A tar header is known by its checksum, and any content can be made to have one.
    if begins_like_tar(head):
        raise tar_error(key, format.name)
    # What is no zip and no tar is unpickled from its first byte on. The length at the start of
    # safetensors and the counts of GGUF can be made to allow that.
    if head[:1] in OPCODES and _unpickles(source, key):
        raise FormatError(
            f"the file is {format.name} and a pickle at once, and torch.load would run the pickle; "
            "`holdfast scan` shows what that would do",
            file=key,
        )
    return format


def _detect_plugin(source: Source, key: str | None, head: bytes, *, plugins: bool) -> Format:
    """Return the format of another package that a source is of. Raises `UnknownFormat` if there is none."""
    problems: list[str] = []
    if plugins:
        problems += load_plugins()
        for format in PLUGINS:
            try:
                if format.recognises(source, key, head):
                    return format
            except Unsupported as error:
                problems.append(error.message)

    if not problems:
        # It has no name here: an error that a frame of its own traceback holds would keep the source.
        raise _unknown_source(source)
    unknown_error = _unknown_source(source)
    message = "; ".join([unknown_error.message, *problems])
    raise UnknownFormat(message, file=unknown_error.file, found=unknown_error.found)


def _unknown_source(source: Source) -> UnknownFormat:
    keys = source.store.list()
    if not keys:
        raise StoreError("the folder is empty", file=source.store.name)
    patterns = [re.compile(entry.file_pattern) for entry in FORMATS if entry.file_pattern]
    inner_folders = set()
    for key in keys:
        folder, _, name = key.partition("/")
        if any(pattern.fullmatch(name) for pattern in patterns):
            inner_folders.add(folder)
    inner = sorted(inner_folders)
    if inner:
        return UnknownFormat(
            f"no checkpoint in this folder itself; its folder {inner[0]!r} has one, open that",
            found=inner[:3],
        )
    if len(keys) > 1:
        from holdfast.formats.index_file import FOREIGN, USUAL, some

        foreign = [key for key in keys if FOREIGN.fullmatch(key)]
        # What Hugging Face's own loaders read would have made it one of the formats.
        others = tuple(suffix for suffix in file_suffixes() if suffix not in USUAL)
        if foreign and not any(key.endswith(others) for key in keys):
            return UnknownFormat(
                f"the weights in this folder are of kinds that Holdfast does not read: {some(foreign)}; get the model with its "
                "safetensors, or load it where these belong (transformers 4: from_tf=True, from_flax=True) and save it from there",
                found=foreign[:3],
            )
        return UnknownFormat(
            "no checkpoint in this folder: no holdfast.json, no .metadata, no safetensors files and no pytorch_model.bin; open one "
            "of its files instead",
            found=keys[:3],
        )
    return unknown(source, keys[0])


def unknown(source: Source, key: str) -> UnknownFormat:
    """The error for a file of an unknown format."""
    head = source.read_head(key, 32)
    if not head:
        return UnknownFormat("the file is empty")
    hint = next(
        (text for start, text in HINTS if head.startswith(start)),
        "it is none of the formats that Holdfast knows",
    )
    return UnknownFormat(f"not a checkpoint: {hint}", found=head[:8])


def begins_like_torch(source: Source, key: str) -> bool:
    """Return whether a file begins with a record of a zip."""
    return source.read_head(key, 4) == b"PK\3\4"


def begins_like_legacy(source: Source, key: str) -> bool:
    """Whether the magic number is the first value, whatever protocol wrote it."""
    head = source.read_head(key, 64)
    # A bare pickle of a storage has a whole stream of `torch.save` in it, a little further behind.
    places = head.find(MAGIC_BYTES), head.find(MAGIC_TEXT)
    return any(0 <= place <= BEFORE_MAGIC_NBYTES for place in places)


def begins_like_torch_tar(source: Source, key: str) -> bool:
    """Whether a file begins like a tar of POSIX, or with a header of torch's own members."""
    head = source.read_head(key, BLOCK_NBYTES)
    if len(head) < BLOCK_NBYTES:
        return False
    if head[257:262] == b"ustar":
        return True
    return head.split(b"\0", 1)[0].decode("latin-1") in MEMBERS and has_tar_checksum(head)


def has_tar_checksum(head: bytes) -> bool:
    """Whether the checksum of a tar header is that of its bytes."""
    field = head[148:156].strip(b" \0")
    if not field or field.strip(OCTAL):
        return False
    return int(field, 8) == sum(head[:148]) + 8 * 32 + sum(head[156:])


def begins_like_tar(head: bytes) -> bool:
    """Whether CPython's tarfile takes the first block for a header: by its checksum, whatever else is in it."""
    field = head[148:156].split(b"\0", 1)[0].strip(b" ")
    if len(head) < BLOCK_NBYTES or not field or field.strip(OCTAL):
        return False
    unsigned = sum(head[:148]) + 256 + sum(head[156:BLOCK_NBYTES])
    signed = unsigned - 256 * sum(c > 127 for c in head[:148] + head[156:BLOCK_NBYTES])
    return int(field, 8) in (unsigned, signed)


def tar_error(key: str, format: str) -> FormatError:
    """Return the error for a file of another format that torch would load as a tar."""
    both = f"the file is {format} and a tar at once, and torch would load the tar"
    why = "it was made to show one thing and load another; `holdfast scan` shows what both would do"
    return FormatError(f"{both}: {why}", file=key)
