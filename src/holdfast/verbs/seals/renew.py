"""`Renewal`: a checkpoint that is rewritten in its own place stays sealed, with the step, the time and the metrics that it had.

**Inside** (`holdfast.seal.json` of a folder, and those of files in it) seals are files of the plan, written last: they go with the
same rename.

**Around** (`last.ckpt.seal.json`, or the seal of a folder that this lies in) no rename covers both. So it says both meanwhile:

    1  the new file is complete under its hidden name, and digested
    2  the seal is replaced by one that says what will be there, and `before`: what is there
    3  the rename
    4  the seal is replaced by one that says what is there

Each is on the disk before the next begins, so the seal fits whatever a crash leaves: after 2 by `before`, after 3 by the new. Where
one seal lists another, the outer one begins and the inner one ends, and meanwhile the outer one does not list it.

**In a bucket** nobody looks at a seal, but it comes along in a copy. It is deleted before the index is put, and put anew after it.

What is taken over as it is keeps what the old seal says of it. What is replaced has to be as it was sealed, or nothing is written:
a new seal must not call whole what the old one calls damaged.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import compress

from msgspec import field

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.limits import Limits
from holdfast.core.value import Value, replace
from holdfast.engine.commit.target import refusal
from holdfast.engine.commit.transactions import read_file, replace_file
from holdfast.engine.file_digest import Digesting, digest_of
from holdfast.engine.saves import FilePlan, Late, SavePlan
from holdfast.engine.stream import Writer
from holdfast.engine.targets.target import Target
from holdfast.engine.threads import default_threads, run_all
from holdfast.errors import CannotHold, DurabilityUncertain, HoldfastError, NotCommitted, SaveError
from holdfast.formats.safetensors.schema import MANIFEST
from holdfast.stores.files import Files
from holdfast.stores.place import place_at
from holdfast.stores.remote.url import Url
from holdfast.verbs.seals.check import check_digests, read_seal, seal_path
from holdfast.verbs.seals.document import (
    DIGESTS,
    SEAL,
    SUFFIX,
    Seal,
    SealedFile,
    encode_seal,
    parse_seal,
)

SHOWN = 3


class Known(Value, frozen=True):
    """A seal that lists what is replaced."""

    seal: Seal
    folder: str
    """The folder that its names are relative to."""
    name: str = ""
    """The name of what is replaced in that folder; empty for a seal inside."""
    place: str = ""
    """The path of the seal itself."""

    @property
    def key(self) -> str:
        return os.path.basename(self.place)

    @property
    def is_whole(self) -> bool:
        """Whether the seal is a folder's, and not that of one file."""
        return self.key == SEAL

    @property
    def algorithm(self) -> str:
        return next(
            (file.digest.partition(":")[0] for file in self.seal.files if file.digest), "xxh3-128"
        )

    @property
    def is_bare(self) -> bool:
        """Whether digests of some files are in a manifest, and not in the seal."""
        return any(file.digest is None for file in self.seal.files)

    def named(self, key: str) -> str:
        """The name in the seal of a file of what is replaced."""
        return f"{self.name}/{key}" if self.name and key else self.name or key

    def about(self, names: Collection[str]) -> Seal:
        return replace(
            self.seal, files=tuple(file for file in self.seal.files if file.name in names)
        )


class Renewal(Value, frozen=True):
    """The seals that list what is replaced, and what is known of the files that take its place."""

    path: str = ""
    seals: tuple[Known, ...] = ()
    replaced: frozenset[str] = frozenset()
    """Files that are there and are not taken over as they are. The name of a single file is empty."""
    made: tuple[tuple[str, int], ...] = ()
    """The files that are written in their place, with their lengths."""
    data: frozenset[str] = frozenset()
    """The files among them whose checksums are in a manifest."""
    limits: Limits = Limits()
    """The limits within which the seals were read."""
    digests: dict[tuple[str, str], str] = field(default_factory=dict)
    """Digests by algorithm and name, as they become known."""

    def laid_out(self, plan: SavePlan, kept: Collection[str], there: Collection[str]) -> Renewal:
        """The renewal for a plan, whose files of the names in `kept` are as they were; `there` are all names that there were.

        Raises `CannotHold` where a file would go that a seal around it lists: the seal could not fit before and after then.
        """
        if not self.seals:
            return self
        made = tuple(one for one in plan.listed if one[0] not in kept)
        replaced = frozenset(there).difference(kept) if plan.directory else frozenset([""])
        index = {file.key for file in plan.index}
        data = [key for key, _ in made if key not in index] if MANIFEST in index else ()
        names = {key for key, _ in made}
        # The seal of a file that goes is not renewed.
        stay = [
            one.name or one.is_whole or names.issuperset(file.name for file in one.seal.files)
            for one in self.seals
        ]
        seals = tuple(compress(self.seals, stay))
        renewed = replace(self, seals=seals, replaced=replaced, made=made, data=frozenset(data))
        for one in seals:
            gone = one.about(
                set(map(one.named, replaced - names)).difference(renewed._listed(one))
            ).files
            if one.name and gone:
                problem = (
                    f"{gone[0].name!r} would go, and {one.place!r} says that it is there; "
                    "remove that seal, or write elsewhere"
                )
                raise CannotHold(
                    "this is a part of something that was sealed", [problem], file=self.path
                )
        return renewed

    def files(self) -> tuple[FilePlan, ...]:
        inside = sorted((one for one in self.seals if not one.name), key=lambda one: one.is_whole)

        def late(one: Known, crcs: Mapping[str, int]) -> bytes:
            return self._text(one)

        return tuple(
            FilePlan(one.key, (Late(len(self._text(one)), partial(late, one)),)) for one in inside
        )

    def check(self, threads: int | None = None) -> None:
        """Raise `NotCommitted` where what is to be replaced is not as it was sealed."""
        for one in self.seals:
            old = one.about({*map(one.named, self.replaced), *self._listed(one)})
            wrong = (
                check_digests(one.folder, old, threads=threads)
                if place_at(self.path).on_disk
                else []
            )
            if wrong:
                reasons = "; ".join(f"{misfit.name}: {misfit.message}" for misfit in wrong[:SHOWN])
                message = f"this is not as it was sealed ({reasons}), and in its place nothing would tell; nothing was changed"
                raise refusal(
                    f"{message}. Seal it again first if it is right as it is (seal with overwrite=True)",
                    self.path,
                )

    def take(self, target: Target, threads: int | None = None) -> None:
        """Digest what was written to a target, as far as it is there and not known."""
        if self.seals:
            run_all(
                [partial(self._take, target, key) for key, _ in self.made],
                threads or default_threads(),
            )

    def _take(self, target: Target, key: str) -> None:
        if not (wanted := self.wanted(key)):
            return
        with target.reading(key) as read:
            if read is not None:
                self.digests.update(
                    {(algorithm, key): digest_of(algorithm, read)[0] for algorithm in wanted}
                )

    @contextmanager
    def noting(self, key: str, file: Writer) -> Iterator[Writer]:
        """A writer to this one, for the whole content of a file, whose digest is recorded."""
        wanted = self.wanted(key)
        if not wanted:
            yield file
            return
        passing = Digesting(file, wanted)
        yield passing
        self.digests.update(
            {(algorithm, key): digest for algorithm, digest in passing.digests.items()}
        )

    def wanted(self, key: str) -> set[str]:
        """The algorithms by which a file has to be digested yet."""
        seals = (one for one in self.seals if key not in self.data or not one.is_bare)
        return {one.algorithm for one in seals if (one.algorithm, key) not in self.digests}

    def around(self, files: Files, *, durable: bool) -> AbstractContextManager[None]:
        """The block in which the rename is: seals around it list the old and the new files, and then the new ones."""
        outer = [one for one in self.seals if one.name]
        return self._around(outer, files, durable=durable) if outer else nullcontext()

    @contextmanager
    def _around(self, outer: list[Known], files: Files, *, durable: bool) -> Iterator[None]:
        ready = False
        for one in outer:
            present_seal = self._read_present(one, files)
            if present_seal is None or _settled(replace(one, seal=present_seal)) != one.seal:
                raise refusal(
                    f"its seal {one.place!r} was changed or removed meanwhile; nothing was changed. "
                    "Open it again, and repeat this",
                    self.path,
                    errno.ESTALE,
                )
        try:
            for one in reversed(outer):
                replace_file(one.place, self._text(one, both=True), durable=durable, files=files)
            ready = True
            yield
        except SaveError as error:
            if ready and not isinstance(error, NotCommitted):
                raise
            for one in outer:
                with suppress(HoldfastError):
                    # A seal that somebody else has written meanwhile belongs to a newer checkpoint.
                    present_seal = self._read_present(one, files)
                    if present_seal and encode_seal(present_seal) == self._text(one, both=True):
                        replace_file(one.place, encode_seal(one.seal), durable=durable, files=files)
            if isinstance(error, NotCommitted):
                raise
            raise refusal(
                f"its seal cannot be renewed: {error.message}; nothing else changed",
                self.path,
                error.errno,
            ) from error
        for one in outer:
            try:
                replace_file(one.place, self._text(one), durable=durable, files=files)
            except SaveError as error:
                message = f"it is in place, and its seal says that what was there before may be there still: {error.message}"
                raise _uncertain(message, self.path, error) from error

    def _read_present(self, one: Known, files: Files) -> Seal | None:
        """Read the seal that has the path of a known seal now; None if there is none."""
        text = read_file(one.place, most_nbytes=self.limits.index_nbytes + 1, files=files)
        return None if text is None else parse_seal(text, self.limits, file=one.place)

    @contextmanager
    def in_bucket(self, url: Url, gone: Collection[str]) -> Iterator[None]:
        """The block in which the index is put; `gone` are names of objects that are deleted when it is."""
        inside = next((one for one in self.seals if one.is_whole), None)
        if inside is None:
            yield
            return
        from holdfast.stores.remote.client import bucket_of  # for those who have a bucket

        bucket, key = bucket_of(url), url.below(SEAL).key
        try:
            bucket.delete([key])
            yield
        except DurabilityUncertain:
            raise
        except BaseException:
            with suppress(HoldfastError):
                bucket.put(key, encode_seal(inside.seal), create=True)
            raise
        try:
            bucket.put(key, replace(self, replaced=frozenset(gone))._text(inside), create=True)
        except HoldfastError as error:
            raise _uncertain(
                f"it is in place, and its seal could not be put: {error.message}", url, error
            ) from error

    def _text(self, one: Known, *, both: bool = False) -> bytes:
        """The text of a seal of the new files; with `both`, of the old ones as well."""
        files, seals = {file.name: file for file in one.seal.files}, self._listed(one)
        gone = {*map(one.named, () if both else self.replaced), *seals}
        new = {name: file for name, file in files.items() if name not in gone}
        for key, nbytes in self.made:
            name, blank = one.named(key), f"{one.algorithm}:{'0' * DIGESTS[one.algorithm]}"
            digest = (
                None
                if one.is_bare and key in self.data
                else self.digests.get((one.algorithm, key), blank)
            )
            if not both or name in files:
                new[name] = SealedFile(name, nbytes, digest, before=files[name] if both else None)
        for name, other in () if both else seals.items():
            text = self._text(other)
            new[name] = SealedFile(
                name, len(text), digest_of(one.algorithm, partial(_slice, text))[0]
            )
        return encode_seal(replace(one.seal, files=tuple(new.values())))

    def _listed(self, one: Known) -> Mapping[str, Known]:
        """The other seals that this one lists, by their names in it."""
        others = {_below(other.place, one.folder): other for other in self.seals if other.place}
        return {file.name: others[file.name] for file in one.seal.files if file.name in others}


NOTHING = Renewal()


def find_seals(source: Checkpoint, limits: Limits | None = None) -> Renewal:
    """The seals that list files of a checkpoint: inside of it, beside it, and of folders that it lies in."""
    if not (place := place_at(source.path)).on_disk:
        store = source.source.store
        if SEAL not in store.list():
            return NOTHING
        seal = parse_seal(source.source.bytes(SEAL, 0, store.size(SEAL)), source.source.limits)
        return Renewal(source.path, (Known(seal, source.path, place=place.below(SEAL)),))
    path = os.path.realpath(source.path)
    own, found = read_seal(path, limits), list[Known]()
    inside = os.path.isdir(path)
    for key in source.source.store.list() if inside else ():
        one = (
            read_seal(os.path.join(path, key.removesuffix(SUFFIX)), limits)
            if key != SEAL and key.endswith(SUFFIX)
            else None
        )
        if one is not None:
            found.append(Known(one, path, place=os.path.join(path, key)))
    if own is not None:
        folder, name = (path, "") if inside else os.path.split(path)
        found.append(Known(own, folder, name, seal_path(path)))
    folder = os.path.dirname(path)
    while True:
        with suppress(HoldfastError):  # a seal that cannot be read is passed over
            over, name = read_seal(folder, limits), _below(path, folder)
            if over is not None and any(
                file.name == name or file.name.startswith(f"{name}/") for file in over.files
            ):
                found.append(Known(over, folder, name, seal_path(folder)))
        if folder == os.path.dirname(folder):
            seals = tuple(replace(one, seal=_settled(one)) for one in found)
            return Renewal(source.path, seals, limits=limits or Limits())
        folder = os.path.dirname(folder)


def _below(path: str, folder: str) -> str:
    return os.path.relpath(path, folder).replace(os.sep, "/")


def _settled(one: Known) -> Seal:
    """The seal of the files that are there, of one that a crash left with both."""
    files = []
    for file in one.seal.files:
        now = replace(file, before=None)
        is_now = file.before is None or not check_digests(
            one.folder, replace(one.seal, files=(now,))
        )
        files.append(now if is_now or file.before is None else file.before)
    return replace(one.seal, files=tuple(files))


def _slice(text: bytes, nbytes: int, offset: int) -> bytes:
    return text[offset : offset + nbytes]


def _uncertain(message: str, path: str, error: HoldfastError) -> DurabilityUncertain:
    raised = DurabilityUncertain(f"{message}; seal it again", file=path)
    raised.errno = error.errno if isinstance(error, OSError) else None
    return raised
