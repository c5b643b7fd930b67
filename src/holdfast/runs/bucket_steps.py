"""The steps of a run in a bucket: which prefixes count, under which number, and whether each is whole.

    s3://bucket/llama/
        step-00001000/holdfast.json                                   published: the manifest is there
        step-00001000/data-5f3a…-00001-of-00001.safetensors           its data, under names that no other save has
        step-00001500/holdfast.json                                   names data of step 1000, which did not change since then
        step-00002000/data-77e0…-00001-of-00001.safetensors           no manifest: a save that goes on, or a dead one; nothing

1. There is no seal: its name would be one that two saves at once both write. Step, time and metrics stand in the metadata of the
   manifest (`holdfast.step`), and once more as an attribute of its object, with a digest of the names and lengths of the data. So
   one HEAD and a listing tell whether a step is whole. Where the attribute is missing (another program copied it) the manifest is
   read.
2. `newest` lists names, and looks from the highest number down: a listing and a HEAD a step. `steps` is one listing of everything;
   what a manifest says is asked once and known by its etag from then on.
3. A listing and a HEAD are two moments. Before a step is called torn, both are asked for again.
4. What the store does not answer is an error, never a step that is passed over: an older one would be resumed from.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial

from holdfast.core.keys import DATA, sibling_key
from holdfast.core.limits import Limits
from holdfast.core.value import Value
from holdfast.engine.threads import run_all
from holdfast.errors import HoldfastError, LimitExceeded
from holdfast.formats.safetensors.record import MANIFEST
from holdfast.runs.steps import NAMED, FoundStep, Step, step_name
from holdfast.saving.references import listed, named_by
from holdfast.seals.document import LARGEST, Stamp
from holdfast.stores.remote import client
from holdfast.stores.remote.client import Bucket, bucket_of
from holdfast.stores.remote.failures import if_there
from holdfast.stores.remote.url import Url

METADATA = "holdfast.step"
"""Where step, time and metrics stand in the metadata of a manifest."""

ATTRIBUTE = "holdfaststep"
"""Where they stand in the attributes of its object. Azure takes letters and digits alone."""

ATTRIBUTE_NBYTES = 1600
"""Of its text at the most: S3 takes 2 KiB of attributes in all."""

MOST_OBJECTS = 5_000_000
"""Of a step."""

ASKING = 24
"""Steps that are asked about at once."""

LOOKS = 4
"""How often a step is looked at while somebody replaces it."""

LIMITS = Limits()

Sizes = Mapping[str, int]


class Says(Value, frozen=True):
    """What a published manifest says."""

    etag: str | None
    nbytes: int
    """Of the manifest itself."""
    stamp: Stamp | None
    save: str = ""
    digest: str = ""
    """Of the names and lengths of the data, where the attribute said it."""
    beside: tuple[str, ...] | None = None
    """Names of data in the folders of other steps, where the attribute said it."""
    files: tuple[tuple[str, int], ...] | None = None
    """Names and lengths, where the manifest was read."""
    wrong: str = ""
    """Why it cannot be understood."""


def stamp_text(says: Stamp, more: Mapping[str, object]) -> str:
    """A stamp as text of visible ASCII without spaces, which every header takes; numbers exactly."""
    metrics = {name: repr(float(value)) for name, value in says.metrics.items()}
    ran = {} if says.ran is None else {"ran": says.ran}
    text = json.dumps({"step": says.step, "saved": says.saved, **ran, "metrics": metrics, **more}, separators=(",", ":"))
    return text.replace(" ", "\\u0020").replace("\x7f", "\\u007f")


def metadata_of(says: Stamp) -> Mapping[str, str]:
    """What the metadata of a manifest has of a step."""
    return {METADATA: stamp_text(says, {})}


def attributes_of(says: Stamp, files: Iterable[tuple[str, int]]) -> Mapping[str, str]:
    """What the object of a manifest says of a step with this data; nothing where that is more than stores take."""
    sizes = dict(files)
    shared = sorted(name for name in sizes if sibling_key(name))
    saves = {found[1] if (found := DATA.fullmatch(name)) else "" for name in sizes if name not in shared}
    if len(saves) > 1 or "" in saves:
        return {}
    more = {"save": "".join(saves), "files": digest_of(sizes), "nbytes": sum(sizes.values()), "beside": shared}
    text = stamp_text(says, more)
    return {ATTRIBUTE: text} if len(text) <= ATTRIBUTE_NBYTES else {}


def digest_of(sizes: Sizes) -> str:
    """A digest of names and lengths."""
    text = "".join(f"{name} {sizes[name]}\n" for name in sorted(sizes))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_stamp(text: str | None) -> tuple[Stamp, Mapping[str, object]] | None:
    """What such a text says; None where it is none of ours."""
    try:
        found = json.loads(text or "")
        metrics = {name: float(value) for name, value in found["metrics"].items()}
        ran = float(found.get("ran", math.nan))  # an older Holdfast did not count
        stamp = Stamp(found["step"], float(found["saved"]), metrics, ran if 0 <= ran < math.inf else None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return (stamp, found) if type(stamp.step) is int and 0 <= stamp.step <= LARGEST else None


class BucketSteps:
    """The steps below a prefix. Every question is a new look."""

    def __init__(self, url: Url) -> None:
        self.path: Url = url
        self._said: dict[str, Says] = {}
        """By the key of the manifest, as long as it has the same etag."""
        self._lengths: dict[str, Mapping[str, int]] = {}
        """The keys and lengths of the objects of each step that was found whole, by its name."""

    @property
    def bucket(self) -> Bucket:
        """The client, for the process that asks."""
        return bucket_of(self.path)

    def key(self, *names: str) -> str:
        """The key of something in the run."""
        return "/".join((*([self.path.key] if self.path.key else []), *names))

    def newest(self, *, below: int | None = None) -> Step | None:
        """The whole step with the highest number, or with the highest below another; None where there is none."""
        claims, found = self._named(below), None
        for _ in range(LOOKS):
            numbers = sorted(claims, reverse=True)
            found = next(filter(None, (self._at(number, claims[number]) for number in numbers)), None)
            passed = [number for number in numbers if found is None or number > found.step]
            if not passed:
                break
            # A step goes when a newer one is there: one that was passed over may have gone since the names were listed.
            claims = self._named(below)
            if sorted(claims, reverse=True)[: len(passed)] == passed:
                break
        return found

    def get(self, step: int) -> Step | None:
        """The step of this number, if it is whole."""
        found = self._at(step, [step_name(step)])
        if found is not None:
            return found
        # Somebody may have written its number in another way.
        claims = self._named()
        return self._at(step, [name for name in claims.get(step, ()) if name != step_name(step)])

    def named(self, name: str) -> Step | None:
        """The step under a name that a Run gave it, if it is whole."""
        own = NAMED.fullmatch(name)
        found = self.get(int(own[1])) if own is not None else None
        return found if found is not None and found.name == name else None

    def steps(self) -> list[Step]:
        """All whole steps, the newest last."""
        return [found.whole for found in self.survey() if found.whole is not None]

    def survey(self) -> list[FoundStep]:
        """Whatever is published as a step, by number, and what is wrong with each that is none."""
        rows, gone = list[FoundStep](), -1
        for _ in range(LOOKS):
            rows, gone = self._survey()
            # As in `newest`.
            if gone <= max((row.whole.step for row in rows if row.whole is not None), default=-1):
                break
        return rows

    def unsealed(self) -> list[str]:
        """None: `holdfast seal` is for folders on a disk."""
        return []

    def _survey(self) -> tuple[list[FoundStep], int]:
        """One look, and the highest number of which the manifest went meanwhile."""
        tree = listed(self.path)
        published = [name for name, below in tree.items() if name and MANIFEST in below]
        claims = self._claims(published)
        seen: dict[str, Step | str | None] = {}

        def look(name: str, number: int) -> None:
            found = self._examine(name, number, lambda folder: tree.get(folder, {}))
            seen[name] = found if isinstance(found, Step) else self._look(name, number)

        run_all((partial(look, name, number) for number, names in claims.items() for name in names), ASKING)
        keys = {self.key(name, MANIFEST) for name in published}
        self._said = {key: said for key, said in self._said.items() if key in keys}
        rows: list[FoundStep] = []
        for number in sorted(claims):
            taken: Step | None = None
            for name in claims[number]:
                found = seen[name]
                if isinstance(found, str):
                    rows.append(FoundStep(name, number, None, found))
                elif found is not None and taken is not None:
                    rows.append(FoundStep(name, number, None, f"{taken.name} is step {number} already"))
                elif found is not None:
                    taken = found
                    rows.append(FoundStep(name, number, found))
        return rows, max((number for number, names in claims.items() for name in names if seen[name] is None), default=-1)

    def torn(self, step: int) -> bool:
        """Whether there is a manifest under the name of a step, which is not whole."""
        return isinstance(self._look(step_name(step), step), str)

    def etag(self, step: Step) -> str | None:
        """The etag of the manifest that a step was seen with."""
        said = self._said.get(self.key(step.name, MANIFEST))
        return None if said is None else said.etag

    def folders_named(self, folder: str, etag: str | None) -> set[str] | None:
        """The folders beside its own in which the manifest of a step names data; None where it has to be read for that."""
        said = self._said.get(self.key(folder, MANIFEST)) if folder else None
        if said is None or said.etag != etag or said.wrong:
            return None
        names = said.beside if said.files is None else [name for name, _ in said.files]
        return None if names is None else {found[0] for name in names if (found := sibling_key(name))}

    def _named(self, below: int | None = None) -> dict[int, list[str]]:
        """The names that are there now, by the number that they say."""
        claims = self._claims(name.rstrip("/").rpartition("/")[2] for name in self.bucket.folders(self.key() + "/")[0])
        return {number: names for number, names in claims.items() if below is None or number < below}

    def _claims(self, names: Iterable[str]) -> dict[int, list[str]]:
        """Names by the number that they say, the one that counts first."""
        claims: dict[int, list[str]] = {}
        for name in sorted(names):
            own = NAMED.fullmatch(name)
            if own is not None and int(own[1]) <= LARGEST:
                claimed = claims.setdefault(int(own[1]), [])
                claimed.insert(0 if name == step_name(int(own[1])) else len(claimed), name)
        return claims

    def _at(self, number: int, names: Iterable[str]) -> Step | None:
        return next((found for name in names if isinstance(found := self._look(name, number), Step)), None)

    def _look(self, name: str, number: int) -> Step | str | None:
        """A step by its own listing: whole, or what is wrong with it, or None where nothing was published."""
        found: Step | str | None = None
        for _ in range(LOOKS):
            folders = cache(self._objects)
            objects, found = folders(name), self._examine(name, number, folders)
            now = self._said.get(self.key(name, MANIFEST))
            if found is None and MANIFEST in objects:
                continue  # it went between the listing and the question
            if not isinstance(found, str) or (now is not None and now.etag == objects[MANIFEST].etag):
                break
        return found

    def _objects(self, folder: str) -> Mapping[str, client.RemoteObject]:
        """What is below a name in the run."""
        start = self.key(folder) + "/"
        return {one.key.removeprefix(start): one for one in self.bucket.below(start, MOST_OBJECTS)}

    def _examine(self, name: str, number: int, folders: Callable[[str], Mapping[str, client.RemoteObject]]) -> Step | str | None:
        """The step of this name, by the objects that are in the folders of the run."""
        objects = folders(name)
        manifest = objects.get(MANIFEST)
        if manifest is None:
            return None
        says = self._ask(name, manifest.etag)
        if says is None or says.wrong:
            return None if says is None else says.wrong
        if says.stamp is not None and says.stamp.step != number:
            return f"it was renamed: it says that it is step {says.stamp.step}"
        files = says.files
        if files is None:
            own = {key: one.nbytes for key, one in objects.items() if (found := DATA.fullmatch(key)) and found[1] == says.save}
            places = {file: sibling_key(file) for file in says.beside or ()}
            there = {file: folders(at[0]).get(at[1]) for file, at in places.items() if at}
            own |= {file: one.nbytes for file, one in there.items() if one}
            if digest_of(own) == says.digest:
                files = tuple(own.items())
            else:
                says = self._read(name)  # it names what is missing
                if says is None or says.files is None:
                    return None if says is None else says.wrong
                files = says.files
        lengths = {self.key(name, MANIFEST): says.nbytes}
        for file, nbytes in files:
            at = sibling_key(file) or (name, file)
            one = folders(at[0]).get(at[1])
            if one is None:
                return f"{file}: missing"
            if one.nbytes != nbytes:
                return f"{file}: {one.nbytes:,} of {nbytes:,} bytes"
            lengths[one.key] = nbytes
        self._lengths[name] = lengths
        stamp = says.stamp or Stamp(number, manifest.changed.timestamp(), {})
        total = sum(nbytes for _, nbytes in files) + says.nbytes
        names = tuple(file for file, _ in files)
        return Step(number, self.path.below(name), stamp.saved, stamp.metrics, total, name, names, stamp.ran)

    def _ask(self, name: str, etag: str | None) -> Says | None:
        """What a manifest says, of its attribute where it has one; None where it is gone."""
        key = self.key(name, MANIFEST)
        said = self._said.get(key)
        if said is not None and etag is not None and said.etag == etag:
            return said
        got = if_there(self.bucket.described, key)
        if got is None:
            return None
        told = read_stamp(got.attributes.get(ATTRIBUTE))
        if told is None:
            return self._read(name)
        stamp, more = told
        shared = more.get("beside", [])
        if not isinstance(shared, list) or not all(isinstance(one, str) and sibling_key(one) for one in shared):
            return self._read(name)
        says = Says(got.found.etag, got.found.nbytes, stamp, str(more.get("save")), str(more.get("files")), tuple(shared))
        self._said[key] = says
        return says

    def _read(self, name: str) -> Says | None:
        """What a manifest says, read; None where it is gone."""
        key = self.key(name, MANIFEST)
        try:
            got = if_there(self.bucket.whole, key, LIMITS.index_nbytes)
        except LimitExceeded as error:
            return Says(None, 0, None, wrong=error.message)
        if got is None:
            return None
        etag, nbytes = got.found.etag, got.data.nbytes
        try:
            files, metadata = named_by(bytes(got.data))
        except HoldfastError as error:
            says = Says(etag, nbytes, None, wrong=error.message)
        else:
            told = read_stamp(metadata.get(METADATA))
            says = Says(etag, nbytes, None if told is None else told[0], files=files)
        self._said[key] = says
        return says
