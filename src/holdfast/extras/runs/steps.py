"""The steps in a run's directory: which folders count, under which number, and whether each is whole.

    runs/llama/
        step-00001000/          saved by a Run: data files, the manifest, and `holdfast.seal.json`, published by one rename
        step-2000/              saved by `save` or `save_sharded` straight into the folder: no seal, whole by its manifest
        checkpoint-3000/        another trainer's, sealed by `holdfast seal`
        epoch=4.ckpt            and the same for one file, with `epoch=4.ckpt.seal.json` beside it

1. One listing. A name `step-N` says its number; a seal inside that says another one means that somebody renamed the folder, and it
   does not count. Any other folder counts under the number in its seal, whatever its name. Of two for one number the first in this
   order does: as a Run would call it, `step-N` written otherwise, any other name.
2. `newest` looks from the highest number down until one is whole: its seal has its own checksum, and every file that it lists is
   there with its size. So it costs a listing, and one small file with a look at each file that this names.
3. What is hidden never counts: saves in progress, steps that are being deleted, links. The one exception is what a crash caught
   between two renames (`.step-….old` without a `step-…`): that is the step, and `open` finds it under its name.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.limits import Limits
from holdfast.core.value import Value
from holdfast.engine.commit.temporaries import SAFE_NAME_NBYTES, TargetLocation, find_hidden_folders
from holdfast.errors import HoldfastError, StoreError
from holdfast.formats import format_of
from holdfast.formats.safetensors.schema import MANIFEST
from holdfast.stores.files import FileEntry, Files, read_all
from holdfast.verbs.open import open as open_checkpoint
from holdfast.verbs.seals.document import LARGEST, SEAL, SUFFIX, Seal, Stamp, misfits, parse_seal
from holdfast.verbs.trainers import looks_like_a_step

NAMED = re.compile(r"step-([0-9]{1,19})", re.ASCII)
ASIDE = re.compile(r"\.(step-[0-9]{1,19})\.[0-9a-f]{16}\.old", re.ASCII)

DOCUMENTS = frozenset(f"holdfast.{one}.json" for one in ("run", "pins", "doubts", "exports"))
"""Files of the run itself, beside its steps (`runs/record.py`)."""

LAST = frozenset({".metadata", "model.safetensors", "model.safetensors.index.json"})
"""Files that other programs write last into a folder: `dcp.save`, `save_pretrained`, TorchTitan's last step."""

LIMITS = Limits()


def step_number(name: str) -> int | None:
    """Return the number in a name `step-N`; None for any other name.

    >>> step_number("step-1000"), step_number("epoch=4.ckpt")
    (1000, None)
    """
    match = NAMED.fullmatch(name)
    number = LARGEST + 1 if match is None else int(match[1])
    return number if number <= LARGEST else None


def step_name(step: int) -> str:
    """The name that a Run gives the folder of a step.

    >>> step_name(1000)
    'step-00001000'
    """
    return f"step-{step:08d}"


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was whole when it was looked at."""

    step: int
    path: str
    saved: float
    """When, in seconds since 1970."""
    metrics: Mapping[str, float]
    nbytes: int
    """Bytes of its files."""
    name: str
    """In the run's directory."""
    files: tuple[str, ...] = ()
    ran: float | None = None
    """For how many seconds the run had run, where the step says it."""

    def open(self) -> Checkpoint:
        """Open it, as `holdfast.open` does."""
        try:
            return open_checkpoint(self.path)
        except StoreError as error:
            if error.errno == errno.ENOENT:
                error.message = f"step {self.step} is not there any more: it was deleted after it was looked for; look again"
            raise

    def __str__(self) -> str:
        metrics = "".join(f"  {name} {value:.4g}" for name, value in self.metrics.items())
        return f"step {self.step}{metrics}  {self.path}"


def stamped(
    stamp: Stamp | Seal, number: int, path: str, nbytes: int, name: str, files: tuple[str, ...]
) -> Step:
    """Return the step of a number, with what its stamp or seal says of time and metrics."""
    return Step(number, path, stamp.saved, stamp.metrics, nbytes, name, files, stamp.ran)


class FoundStep(Value):
    """A folder or file that is a step, or would be one."""

    name: str
    step: int | None
    """The number that its name or its seal says."""
    whole: Step | None
    why: str = ""
    sealed: bool = True
    """False for a finished checkpoint of another program that nobody sealed: it is no step, and not torn either."""


def found_steps(
    claims: Mapping[int, Sequence[str]],
    examine: Callable[[str, int], Step | str | None],
    *,
    sealed: Callable[[str], bool] = lambda name: True,
) -> list[FoundStep]:
    """What is found under the names that claim each number. `examine` gives a step, or what is wrong, or None for nothing."""
    rows: list[FoundStep] = []
    for number in sorted(claims):
        taken: Step | None = None
        for name in claims[number]:
            found = examine(name, number)
            if isinstance(found, str):
                rows.append(FoundStep(name, number, None, found, sealed(name)))
            elif found is not None and taken is not None:
                rows.append(FoundStep(name, number, None, f"{taken.name} is step {number} already"))
            elif found is not None:
                taken = found
                rows.append(FoundStep(name, number, found))
    return rows


def claim(claims: dict[int, list[str]], number: int, name: str) -> None:
    """Add a name to those of a number; the one that a Run would give counts first."""
    claimed = claims.setdefault(number, [])
    claimed.insert(0 if name == step_name(number) else len(claimed), name)


def first_step(examined: Iterable[Step | str | None]) -> Step | None:
    """Return the first whole step of what `examine` returned for some names."""
    return next((found for found in examined if isinstance(found, Step)), None)


@contextmanager
def opened_folder(files: Files, name: str, *, at: int | None = None) -> Iterator[int]:
    folder = files.open_directory(name, dir_fd=at)
    try:
        yield folder
    finally:
        with suppress(OSError):
            files.close(folder)


class DirectoryLook:
    """One look at the directory: names, and the numbers that they claim."""

    def __init__(self, path: str, files: Files, at: int, *, names: Sequence[str]) -> None:
        self.path, self.files = path, files
        self.folder = at
        self.claims: dict[int, list[str]] = {}
        """Names of folders by number, the one that counts first."""
        self.others: dict[str, str] = {}
        """Names of folders that look like steps and have no number, with the reason."""
        self._seals: dict[str, Seal] = {}
        foreign = self._foreign = list[str]()
        asides: dict[str, str] = {}
        """Folders that were moved aside, and the step that each was."""
        for name in names:
            if (number := step_number(name)) is not None:
                claim(self.claims, number, name)
            elif not name.startswith(".") and name not in DOCUMENTS:
                foreign.append(name)
            elif (aside := ASIDE.fullmatch(name)) is not None:
                asides[name] = aside[1]
        for name, target in asides.items():
            # A crash caught the step between two renames: it is not there, and no other one was moved aside.
            location = TargetLocation(files, target, at, SAFE_NAME_NBYTES)
            if files.stat(target, dir_fd=at) is None and find_hidden_folders(
                location, [*asides], suffix="old"
            ) == [name]:
                claim(self.claims, int(target.removeprefix("step-")), name)
        for name in foreign:
            self._look_inside(name)

    def _look_inside(self, name: str) -> None:
        """Look at a folder, or at a file with a seal beside it, that has another name than ours."""
        is_file = name.endswith(SUFFIX) and name != SEAL
        target = name.removesuffix(SUFFIX) if is_file else name
        seal = None
        try:
            if is_file:
                seal = self._seal(name, at=self.folder)
            else:
                with self._opened(name) as folder:
                    if folder is not None:
                        seal = self._seal(SEAL, at=folder)
        except HoldfastError as error:
            self.others[target] = error.message
        if seal is None:
            return
        if seal.step is None:
            self.others[target] = "its seal says no step"
        else:
            self._seals[target] = seal
            claim(self.claims, seal.step, target)

    def unsealed(self) -> list[str]:
        """Names without a seal that are like those of other trainers' checkpoints."""
        known = {*self.others, *(name for names in self.claims.values() for name in names)}
        unsealed = []
        for name in self._foreign:
            entry = None if name in known else self.files.stat(name, dir_fd=self.folder)
            if entry is None or entry.kind not in ("file", "directory"):
                continue
            if looks_like_a_step(name, folder=entry.kind == "directory"):
                unsealed.append(name)
        return sorted(unsealed)

    def _seal(self, name: str, *, at: int) -> Seal | None:
        entry = self.files.stat(name, dir_fd=at)
        raw = read_all(self.files, name, entry, dir_fd=at, max_nbytes=LIMITS.index_nbytes)
        return None if raw is None else parse_seal(raw, LIMITS)

    @contextmanager
    def _opened(self, name: str) -> Iterator[int | None]:
        """Open a folder of the directory; None if it is not a folder, or is gone."""
        with ExitStack() as stack:
            folder = None
            with suppress(OSError):
                folder = stack.enter_context(opened_folder(self.files, name, at=self.folder))
            yield folder

    def lost(self, *, above: Step | None) -> bool:
        """Whether a step above `above` was listed and has been deleted since: then a newer one is there that was not seen yet."""
        return any(
            self.files.stat(name, dir_fd=self.folder) is None
            for number, names in self.claims.items()
            if above is None or number > above.step
            for name in names
        )

    def at(self, number: int) -> Step | None:
        """The whole step of a number."""
        return first_step(self.examine(name, number) for name in self.claims.get(number, ()))

    def examine(self, name: str, number: int) -> Step | str:
        """The step in a folder, or what is wrong with it."""
        try:
            if name in self._seals:
                single = self.files.stat(name, dir_fd=self.folder)
                if single is not None and single.kind == "file":
                    return self._sealed(name, number, self._seals[name], self.folder)
            with self._opened(name) as folder:
                if folder is None:
                    return "no folder that can be opened (a link, or something else)"
                seal = self._seal(SEAL, at=folder)
                if seal is not None:
                    return self._sealed(name, number, seal, folder)
                manifest = self.files.stat(MANIFEST, dir_fd=folder)
            if manifest is not None:
                return self._by_manifest(name, number, manifest)
            if self.is_of_others(name):
                return (
                    "another program wrote it, and it has no seal; `holdfast seal` makes it a step"
                )
            return "neither a seal nor a manifest: it was not written to its end"
        except HoldfastError as error:
            return error.message
        except OSError as error:
            return error.strerror or str(error)

    def is_of_others(self, name: str) -> bool:
        """Whether a folder has neither a seal nor a manifest, and what other writers write last: torch's DCP, transformers."""
        with self._opened(name) as folder:
            there = set() if folder is None else {*self.files.list(folder)}
        return not there & {SEAL, MANIFEST} and bool(there & LAST)

    def _sealed(self, name: str, number: int, seal: Seal, folder: int) -> Step | str:
        if seal.step is not None and seal.step != number:
            return f"it was renamed: its seal says step {seal.step}"

        sizes: dict[str, int] = {}

        def size(key: str) -> int | None:
            found = self.files.stat(key, dir_fd=folder)
            if found is None or found.kind != "file":
                return None
            sizes[key] = found.nbytes
            return found.nbytes

        for file, wrong in misfits(seal, size):
            return f"{file}: {wrong}"
        return stamped(seal, number, self._path(name), sum(sizes.values()), name, tuple(sizes))

    def _by_manifest(self, name: str, number: int, manifest: FileEntry) -> Step | str:
        with open_checkpoint(self._path(name)) as checkpoint:
            if format_of(checkpoint.format).index != MANIFEST:
                return f"it has no seal and is {checkpoint.format}; `holdfast seal` makes it a step"
            names = tuple(checkpoint.source.store.list())
            stamp = Stamp(number, manifest.changed_s, {})
            nbytes = checkpoint.stored_nbytes
            return stamped(stamp, number, self._path(name), nbytes, name, names)

    def _path(self, name: str) -> str:
        """The path under which a step is opened; of one that was moved aside, the one before."""
        aside = ASIDE.fullmatch(name)
        return os.path.join(self.path, name if aside is None else aside[1])
