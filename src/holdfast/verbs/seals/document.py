"""`holdfast.seal.json`: the record that says that a directory is a whole step. Its schema, its text, and the way back.

    {"format": "holdfast.seal", "version": 1, "step": 500, "saved": 1763270000.123, "metrics": {"val_loss": 2.1},
     "files": [{"name": "optimizer.pt", "nbytes": 123, "digest": "sha256:9f86d081…"}],
     "self": "1c291ca3"}

The seal is written last and atomically, so that it is there only where all the rest was. `files` are all files of the directory but
the seal, sorted by name; a name has "/" between its parts. `digest` names its algorithm, and is absent where the checksums of the
file stand elsewhere (the data files of a native directory: in the manifest). `step` is null where it was not known. `saved` is in
seconds since 1970. JSON has no NaN: metrics that are no finite number are the texts "nan", "inf" and "-inf". `self` is the checksum
of the document (`core.documents`).

The seconds that the run had run stand among the metrics, as `holdfast.ran`: older readers refuse a field that they do not
know, and would take the step for none; a metric they only show.

A reader needs this small file and one look at the size of each file to know that the step is whole. A single file has its seal
beside it, `NAME.seal.json`, with that one name in it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache

import msgspec

from holdfast.core.documents import HEX, SELF, DocumentType, read_document, write_document
from holdfast.core.keys import check_key
from holdfast.core.limits import DEFAULTS, Limits
from holdfast.core.strict_json import describe_json, format_pointer, quote
from holdfast.core.value import Value, replace
from holdfast.engine.saves import FilePlan, Late, Literal, SavePlan
from holdfast.errors import HeaderError, LimitExceeded, Unsupported, error_context

SEAL = "holdfast.seal.json"
"""The name of the file, in the directory that it seals."""

SUFFIX = ".seal.json"
"""The suffix that the name of a single file gets in the name of its seal."""

FORMAT = "holdfast.seal"
VERSION = 1

DIGESTS: Mapping[str, int] = {"sha256": 64, "xxh3-128": 32}
"""The algorithms, and how many hexadecimal digits each gives."""

LARGEST = (1 << 63) - 1
"""The largest step, and the largest size: what 64-bit readers of other languages hold."""

RAN = "holdfast.ran"
"""The name of `Seal.ran` among the metrics of a document."""

NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class SealedFile(Value, frozen=True):
    """One file of the step."""

    name: str
    """The path relative to the directory, with "/"."""
    nbytes: int
    digest: str | None
    """Algorithm, colon, hexadecimal digits; None where the checksums stand elsewhere."""


class Seal(Value, frozen=True):
    step: int | None
    saved: float
    """Seconds since 1970."""
    metrics: Mapping[str, float]
    files: tuple[SealedFile, ...]
    ran: float | None = None
    """The seconds that the run had run, where they were counted."""

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


class StoredFile(msgspec.Struct, gc=False, frozen=True, forbid_unknown_fields=True):
    name: str
    nbytes: int
    digest: str | msgspec.UnsetType = msgspec.UNSET


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    version: int
    step: int | None
    saved: float
    metrics: dict[str, float | str]
    files: tuple[StoredFile, ...]
    sealed: str | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name=SELF)


DOCUMENT = DocumentType(
    name="seal",
    file=SEAL,
    decoder=msgspec.json.Decoder(Document),
    format=FORMAT,
    versions=(VERSION,),
    field_versions={SELF: VERSION},
    remedy="seal the files again",
)


def seal_name(name: str) -> str:
    """The name of the seal of a single file.

    >>> seal_name("epoch=3.ckpt")
    'epoch=3.ckpt.seal.json'
    """
    return name + SUFFIX


def encode_seal(seal: Seal) -> bytes:
    """The text of a seal, its files sorted, with its own checksum.

    It is read again before it is given back, so that no seal is written that no reader takes: raises what `parse_seal` raises.
    """
    text = seal_text(seal)
    parse_seal(
        text, DEFAULTS if len(seal.files) <= DEFAULTS.files else Limits(files=len(seal.files))
    )
    return text


def seal_text(seal: Seal) -> bytes:
    """The text of a seal that is not read again: for one that differs in its digests alone from one that was read."""
    files = tuple(
        StoredFile(file.name, file.nbytes, file.digest or msgspec.UNSET)
        for file in sorted(seal.files, key=lambda file: file.name)
    )
    metrics = {name: _stored(value) for name, value in seal.metrics.items() if name != RAN}
    metrics |= {} if seal.ran is None else {RAN: _stored(seal.ran)}
    return write_document(
        DOCUMENT, Document(FORMAT, VERSION, seal.step, float(seal.saved), metrics, files)
    )


def parse_seal(raw: bytes, limits: Limits, *, file: str = SEAL) -> Seal:
    """The seal of a document. The form of every value is checked; `misfits` checks whether the files are as it says.

    Raises `Corrupted` where it has not its own checksum, `HeaderError`, `UnsafePath` for a name that leads out of the directory,
    `LimitExceeded`, or `Unsupported` for an unknown version or digest; with `file`, where the seal is.
    """
    if len(raw) > KNOWN_NBYTES:
        return _parsed(raw, limits, file)
    seal = _known(raw, limits, file)
    return replace(seal, metrics=dict(seal.metrics))


KNOWN_NBYTES = 16 << 10
"""Bytes of a seal that is remembered: a run that saves reads its last seals again and again."""


def _parsed(raw: bytes, limits: Limits, file: str) -> Seal:
    with error_context(file=file):
        return _validated(read_document(DOCUMENT, raw, limits, file=file), limits)


_known = lru_cache(64)(_parsed)


def misfits(seal: Seal, size: Callable[[str], int | None]) -> Iterator[tuple[str, str]]:
    """Each file that is not there, or not as long as the seal says, with what is wrong. No digest is computed.

    `size` gives the length of the file of a name, or None where there is no plain file.

    >>> sealed = Seal(1, 0.0, {}, (SealedFile("a", 3, None), SealedFile("b", 5, None)))
    >>> list(misfits(sealed, {"b": 2}.get))
    [('a', 'missing'), ('b', 'truncated: 2 of 5 bytes')]
    """
    for file in seal.files:
        found = size(file.name)
        if found is None:
            yield file.name, "missing"
        elif found != file.nbytes:
            yield (
                file.name,
                f"{'truncated' if found < file.nbytes else 'longer'}: {found:,} of {file.nbytes:,} bytes",
            )


def _stored(value: float) -> float | str:
    value = float(value)
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def _validated(document: Document, limits: Limits) -> Seal:
    if document.step is not None:
        _check_count(document.step, "step")
    if not document.saved >= 0:
        raise HeaderError(
            f"at $.saved: expected seconds since 1970, found {describe_json(document.saved)}"
        )
    metrics = {name: _metric(value, name) for name, value in document.metrics.items()}
    if len(document.files) > limits.files:
        count, most = len(document.files), limits.files
        raise LimitExceeded(
            f"a seal of {count:,} files is more than Limits(files={most})",
            expected=most,
            found=count,
        )
    last = ""
    files = []
    for i, file in enumerate(document.files):
        _check_name(check_key(file.name), last, i)
        _check_count(file.nbytes, "files", i, "nbytes")
        digest = (
            None
            if isinstance(file.digest, msgspec.UnsetType)
            else _digest(file.digest, "files", i, "digest")
        )
        files.append(SealedFile(file.name, file.nbytes, digest))
        last = file.name
    ran = metrics.pop(RAN, math.nan)
    return Seal(
        document.step, document.saved, metrics, tuple(files), ran if 0 <= ran < math.inf else None
    )


def _check_count(value: int, *at: str | int) -> None:
    if not 0 <= value <= LARGEST:
        raise HeaderError(
            f"at {format_pointer(*at)}: expected a number from 0 to 2^63 - 1, found {value}"
        )


def _check_name(name: str, last: str, i: int) -> None:
    if name == SEAL:
        raise HeaderError(f"at {format_pointer('files', i, 'name')}: a seal does not list itself")
    if name <= last:
        found = "occurs twice" if name == last else f"comes behind {quote(last)}; names are sorted"
        raise HeaderError(f"at {format_pointer('files', i, 'name')}: {quote(name)} {found}")


def _metric(value: float | str, name: str) -> float:
    if isinstance(value, str):
        if value not in NOT_FINITE:
            raise HeaderError(
                f"at {format_pointer('metrics', name)}: expected a number, found {describe_json(value)}"
            )
        return NOT_FINITE[value]
    return value


def _digest(text: str, *at: str | int) -> str:
    algorithm, _, digits = text.partition(":")
    if algorithm not in DIGESTS:
        known = ", ".join(DIGESTS)
        raise Unsupported(
            f"at {format_pointer(*at)}: {quote(text)} is no digest that this Holdfast knows ({known})"
        )
    if len(digits) != DIGESTS[algorithm] or not HEX.issuperset(digits):
        wanted = f"{DIGESTS[algorithm]} hexadecimal digits behind {algorithm}"
        raise HeaderError(f"at {format_pointer(*at)}: expected {wanted}, found {quote(digits)}")
    return text


# The seal of a step that Holdfast saves is one more file of the plan, written last, inside of the step's transaction: so a
# published step always has it. The data files stand in it with their sizes, because their checksums are in the manifest. Files of
# the index stand in it with a digest, which is known when they are made: the seal is a late segment, of a length that is not late.

BLANK_DIGEST = "sha256:" + "0" * 64


class Stamp(Value, frozen=True):
    """The content of a seal beside the files."""

    step: int
    saved: float
    """Seconds since 1970."""
    metrics: Mapping[str, float]
    ran: float | None = None


def stamp(step: int, metrics: Mapping[str, float] | None, ran: float | None = None) -> Stamp:
    """The stamp of a step that is saved now. A clock that is before 1970 is as wrong as can be, and says 1970."""
    return Stamp(step, max(time.time(), 0.0), metrics or {}, ran)


def digest_of(content: bytes) -> str:
    """The digest of a small file, as a seal has it."""
    import hashlib  # it loads OpenSSL, which is not needed to look at a seal

    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def with_seal(plan: SavePlan, says: Stamp) -> SavePlan:
    """The plan of a directory with its seal as one more file."""
    made: dict[str, bytes] = {}
    index = tuple(_recording(file, made) for file in plan.index)
    data = [
        *((file.key, file.nbytes) for file in plan.linked),
        *((file.key, file.nbytes) for file in plan.files),
    ]

    def make(crcs: Mapping[str, int]) -> bytes:
        # A seal with other digests of the same length was read before.
        return seal_text(
            _seal(
                data,
                index,
                says,
                lambda file: digest_of(made.get(file.key) or content_of(file, crcs)),
            )
        )

    late = Late(len(encode_seal(_seal(data, index, says, lambda file: BLANK_DIGEST))), make)
    return replace(plan, index=(*index, FilePlan(SEAL, (late,))))


def seal_file(data: Sequence[tuple[str, int]], index: Sequence[FilePlan], says: Stamp) -> FilePlan:
    """The seal of data files, by name and length, and of an index that is known."""
    return FilePlan(
        SEAL,
        (
            Literal(
                encode_seal(_seal(data, index, says, lambda file: digest_of(content_of(file, {}))))
            ),
        ),
    )


def _seal(
    data: Sequence[tuple[str, int]],
    index: Sequence[FilePlan],
    says: Stamp,
    digest: Callable[[FilePlan], str],
) -> Seal:
    files = [SealedFile(key, nbytes, None) for key, nbytes in data]
    files += [SealedFile(file.key, file.nbytes, digest(file)) for file in index]
    return Seal(says.step, says.saved, says.metrics, tuple(files), says.ran)


def _recording(file: FilePlan, made: dict[str, bytes]) -> FilePlan:
    """The plan of a file that puts its content into `made`: the manifest of a large state is not made twice."""
    if len(file.segments) != 1 or not isinstance(file.segments[0], Late):
        return file
    late = file.segments[0]

    def make(crcs: Mapping[str, int]) -> bytes:
        made[file.key] = late.make(crcs)
        return made[file.key]

    return FilePlan(file.key, (replace(late, make=make),))


def content_of(file: FilePlan, crcs: Mapping[str, int]) -> bytes:
    parts = []
    for segment in file.segments:
        if isinstance(segment, Literal):
            parts.append(segment.data)
        elif isinstance(segment, Late):
            parts.append(segment.make(crcs))
        else:
            raise TypeError("files of an index are literal or late")
    return b"".join(parts)
