"""`Planned`: a save that a verb has laid out and not begun yet.

    sources → State → change → plan_save → Planned → run

Every verb that writes is a function `plan_…` that returns a `Planned`, and a call of its
`carry_out`. So all verbs check the free space, keep to the memory budget, read back what they wrote,
and publish nothing if a source changed meanwhile.

Verbs that make a checkpoint of another one use `plan_derived_checkpoint`. It opens the source,
refuses a target that cannot be written before a tensor is read, and calls the verb to lay out the
new checkpoint. A checkpoint that a seal lists is not replaced in its own place.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar

from msgspec import field as value_field

from holdfast.core.checkpoint import Checkpoint
from holdfast.core.group import ALONE, Ranks, begin, compare_marks, joint_phase, shared_errors
from holdfast.core.notebook import NotebookResult
from holdfast.core.options import CopyConfig, Progress, pick_fields
from holdfast.core.protocols import Store
from holdfast.core.quantities import Size, parse_nbytes
from holdfast.core.value import Value, replace
from holdfast.engine.commit.target import check_replaceable, open_target
from holdfast.engine.commit.temporaries import wait_for_room
from holdfast.engine.saves import LinkedFile, SavePlan, remove_hashes
from holdfast.engine.targets.plan_save import Findings, PlanSave
from holdfast.engine.targets.target import SaveContext, Target, join_target, make_target
from holdfast.engine.threads import (
    BASE_NBYTES,
    MemoryBudget,
    count_reading_threads,
    default_threads,
    plan_memory,
)
from holdfast.errors import CannotHold, NotCommitted, StoreError, Unsupported
from holdfast.formats import format_of, written_formats
from holdfast.formats.safetensors.directory import SUFFIX
from holdfast.stores.files import Files, system_files
from holdfast.stores.paths import is_parsed_url, target_place
from holdfast.stores.place import is_same_place, place_at
from holdfast.stores.remote.url import PART_NBYTES, UPLOAD_PARTS_AT_ONCE
from holdfast.verbs.open import Openable, hash_checkpoint, opened_checkpoint
from holdfast.verbs.seals.check import refuse_sealed
from holdfast.verbs.shared.formats import (
    LayoutOptions,
    find_archive_format,
    find_folder_format,
    find_suffix,
    is_replaceable,
    resolve_format,
)
from holdfast.verbs.shared.read_back import check_plan_opens
from holdfast.verbs.shared.side_files import (
    SideFiles,
    find_side_files,
    is_model,
    torch_dist_files,
)

if TYPE_CHECKING:
    from holdfast.engine.targets.bucket import BucketNames

NO_FINDINGS = Findings()

ENDLESS = 1 << 62
"""The free bytes of an object store."""


class Writing(Value, frozen=True, kw_only=True):
    overwrite: bool | None = False
    """Whether what is there may be replaced. None: a file may, a directory may not."""
    durable: bool = True
    """Whether to wait for the disk."""
    threads: int | None = None
    read_back: bool = False
    """Whether what was written is read again and compared before it is published."""
    max_memory: Size | None = None
    """Memory above the interpreter's own; None: a few blocks a thread."""
    resume: bool = False
    """Whether finished files of an interrupted try at the same directory are taken over (engine/targets/folder.py)."""
    dry_run: bool = False
    requests: int = 0
    """How many reads the source wants under way at once (`ReadProfile.requests`)."""
    save: str = ""
    """In an object store: the id that the names of this save's objects carry, where several ranks write them."""
    processes: int = 1
    """How many ranks share this machine."""

    @property
    def budget(self) -> MemoryBudget | None:
        if self.max_memory is None:
            return None
        return plan_memory(
            self.max_memory, self.threads, request_count=self.requests, processes=self.processes
        )

    @property
    def parts(self) -> int | None:
        """How many parts of an upload may be under way at once: half of the memory is theirs."""
        if self.max_memory is None:
            return None
        return max(
            1,
            min(
                UPLOAD_PARTS_AT_ONCE,
                (parse_nbytes(self.max_memory) - BASE_NBYTES) // 2 // PART_NBYTES,
            ),
        )

    @property
    def reading_threads(self) -> int:
        """How many threads may read before anything is written, in blocks that are not of our choice."""
        return count_reading_threads(self.max_memory, self.threads, self.processes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved(NotebookResult):
    """The result of a function that writes: the files that it wrote, or in a dry run would write."""

    path: str
    format: str
    nbytes: int
    files: tuple[tuple[str, int], ...]
    notes: tuple[str, ...] = ()
    """Sentences about the result that a user should read."""
    free_nbytes: int
    """Free bytes at the target before the save. The old target stays until the new one is in place."""
    done: bool = False
    """Whether the files were written. False after a dry run."""
    crcs: Mapping[str, int] = field(default_factory=dict, repr=False)
    """CRC-32 of each part of a file, by its name in the file. Empty until the files are written."""
    shared_nbytes: int = 0
    """Bytes of files that are shared with the base. They are not written again and use no additional space."""

    @property
    def folder(self) -> bool:
        """Whether the result is a folder and not a single file."""
        return format_of(self.format).folder

    @property
    def new_nbytes(self) -> int:
        """Number of bytes that are written."""
        return self.nbytes - self.shared_nbytes

    def explain(self) -> str:
        """Describe the result in a few lines of text."""
        return "\n".join([*self._lines(), *(f"note   {note}" for note in self.notes)])

    def _lines(self) -> list[str]:
        count, enough = len(self.files), self.done or self.free_nbytes >= self.new_nbytes
        shared = (
            f", {self.shared_nbytes:,} of them shared with the base" if self.shared_nbytes else ""
        )
        room = f"space  {self.free_nbytes:,} bytes free" + ("" if enough else ": NOT ENOUGH")
        return [
            f"→ {self.path} ({self.format})",
            f"write  {self.nbytes:,} bytes in {count:,} file{'s' if count != 1 else ''}{shared}",
            *([room] if self.free_nbytes < ENDLESS else []),
        ]


class PlannedFields(TypedDict):
    path: str
    format: str
    nbytes: int
    files: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]
    free_nbytes: int
    shared_nbytes: int


def make_report_fields(plan: SavePlan, target: str) -> PlannedFields:
    """The fields of a result that a plan knows."""
    name = os.path.basename(target.rstrip("/"))
    linked = [(file.key, file.nbytes) for file in plan.linked]
    written = [(file.key or name, file.nbytes) for file in (*plan.files, *plan.index)]
    files = (*linked, *written)
    return PlannedFields(
        path=target, format=plan.format, nbytes=sum([nbytes for _, nbytes in files]), files=files, notes=plan.notes,
        free_nbytes=_free(target), shared_nbytes=sum([file.nbytes for file in plan.linked]),
    )  # fmt: skip


def _free(target: str) -> int:
    try:
        free = place_at(target).free_nbytes()
    except StoreError as error:
        raise NotCommitted(
            f"the folder to save into cannot be used: {error.message} ({error.file!r})",
            file=target,
            errno=error.errno,
        ) from None
    return ENDLESS if free is None else free


R = TypeVar("R", bound=Saved)


class Planned(Value, Generic[R], frozen=True, eq=False):
    """A save that is laid out and not begun. Whoever has it closes its sources."""

    plan: SavePlan
    report: R
    writing: Writing
    reads: tuple[Store, ...] = ()
    """Stores that are read; when one changes meanwhile, nothing is published."""
    sources: ExitStack = value_field(default_factory=ExitStack)
    """Sources that are closed in the end."""
    sure: Callable[[], None] | None = None
    """Called when all is written and before it is published: an error that it raises keeps everything as it was."""
    finish: Callable[[R, Progress | None], R] = lambda report, progress: report
    """Completes the report with what is known when all was read; `look` may have to read for that."""
    ranks: Ranks = ALONE
    """The ranks that write it together."""
    mark: Callable[[], bytes] = bytes
    """A hash of the source, which all of them must have opened."""
    findings: Findings = NO_FINDINGS
    """What is found out while it is written."""

    def look(self, progress: Progress | None = None) -> R:
        found: list[R] = []
        # A run compares when it begins to write. What a dry run says of the source is one report, too.
        if self.ranks.size > 1:
            compare_marks(self.ranks, self.mark())
        with joint_phase(self.ranks), self.ranks.joint_progress(progress) as counted:
            found.append(self.finish(self.report, counted))
        return found[0]

    def run(self, progress: Progress | None = None) -> R:
        """Write and publish the plan. Raises `NotCommitted` where there is no room, or where a source changes meanwhile."""
        report, path = self.report, self.report.path
        with ExitStack() as blocks:
            if self.ranks.size > 1:
                blocks.enter_context(shared_errors(self.ranks))
                progress = blocks.enter_context(self.ranks.joint_progress(progress))
            files = [store for store in self.reads if store.read_profile.is_file]
            replaced_stores = [store for store in files if is_same_place(store.name, path)]
            if replaced_stores:
                check_in_place(replaced_stores, path)
            if report.free_nbytes < report.nbytes - report.shared_nbytes:
                report = _await_room(report)

            def before_commit() -> None:
                check_sources_unchanged(self.reads, path)
                if replaced_stores:
                    check_in_place(replaced_stores, path)
                if self.sure is not None:
                    self.sure()

            # What wants to be read from front to back is read by the one thread that writes, in one go.
            writing = self.writing
            for store in self.reads:
                if store.read_profile.is_sequential:
                    blocks.enter_context(store.reading())
                    writing = replace(writing, threads=1)
            copied: list[LinkedFile] = []
            crcs = write_plan(
                self.plan,
                path,
                writing,
                progress=progress,
                # Nothing that is read can change if there is nothing but memory.
                before_commit=before_commit if self.reads else self.sure,
                before_rename=partial(check_in_place, replaced_stores, path)
                if replaced_stores
                else None,
                copied=copied.append,
                ranks=self.ranks,
                mark=self.mark,
                findings=self.findings,
            )
            if copied:
                nbytes = sum(file.nbytes for file in copied)
                note = f"the file system cannot link {len(copied):,} files of the base: {nbytes:,} bytes were copied"
                report = replace(
                    report, notes=(*report.notes, note), shared_nbytes=report.shared_nbytes - nbytes
                )
            return self.finish(replace_fields(report, done=True, crcs=crcs), None)

    def carry_out(self, progress: Progress | None = None) -> R:
        """Run the plan, or only look (`Writing.dry_run`), and close its sources."""
        with self.sources:
            return self.look(progress) if self.writing.dry_run else self.run(progress)


def _await_room(report: R) -> R:
    """Wait until what was replaced before is freed. Raises `NotCommitted` if there is still too little room."""
    if wait_for_room():
        report = replace(report, free_nbytes=_free(report.path))
    # Where nobody may write, how much room there is is not what is wrong.
    folder = os.path.dirname(os.path.abspath(report.path))
    if report.free_nbytes < report.new_nbytes and os.access(folder, os.W_OK):
        room = f"{report.new_nbytes:,} bytes are to be written and {report.free_nbytes:,} are free"
        refused = NotCommitted(f"the disk is full: {room}", file=report.path, errno=errno.ENOSPC)
        refused.expected, refused.found = report.new_nbytes, report.free_nbytes
        raise refused
    return report


class Destination(Value, frozen=True):
    """The target of a verb that makes a checkpoint of a checkpoint."""

    path: str
    format: str | None
    """The format that was asked for, or that of the source which is replaced; None for the one of the suffix."""
    writing: Writing
    layout: LayoutOptions
    """The options of the layout, with what the place needs of it."""


def begin_ranks(
    asked: Mapping[str, Any], dst: object, stack: ExitStack
) -> tuple[Ranks, dict[str, Any]]:
    """The ranks that a verb is asked to write with, and fields of `Writing` that they have in common. `stack` closes them, and
    what fails before is sent to all of them."""
    if asked.get("group") is None:
        return ALONE, {}
    ranks = begin(asked["group"], f"write {dst}")
    stack.callback(ranks.close)
    stack.enter_context(shared_errors(ranks))
    # When all have come, each knows how many share its machine.
    save = ranks.agree(b"", lambda messages: [secrets.token_hex(8).encode()] * len(messages))
    return ranks, {"save": save.decode(), "processes": ranks.count_local_ranks()}


def plan_derived_checkpoint(
    src: Openable | Checkpoint, dst: str | os.PathLike[str] | None, lay_out: Callable[[Checkpoint, Destination], Planned[R]],
    asked: Mapping[str, Any], *, elsewhere: bool = False, directory: bool | None = None, programs: bool = False,
) -> Planned[R]:  # fmt: skip
    """The plan of a verb that makes a checkpoint of a checkpoint: `lay_out` gets the open source, and where to write.

    The plan closes the source. Beside what was laid out, a directory has the files that lie beside the weights of the source
    (`saving/side_files.py`). Where nothing says its format, a Hugging Face folder becomes one again.

    `asked` are the options of the verb. `elsewhere` says that the target may not be the source. `directory` says
    whether a directory is written, where the format of the path does not; `programs` whether the verb writes such archives. Raises
    `NotCommitted` for a target that cannot be written, and `Unsupported` as `_destination` does, before `lay_out` reads anything.
    """
    limits, format, in_place, copy_config = map(
        asked.get, ("limits", "format", "in_place", "copy_config")
    )
    copy_config = True if copy_config is None else copy_config
    folder = bool(asked.get("folder"))
    # A checkpoint that is made of another keeps its tree by default.
    layout = pick_fields(LayoutOptions, {"keep_tree": True, **asked})
    with ExitStack() as stack:
        ranks, common = ALONE, dict[str, Any]()
        if asked.get("group") is not None:
            ranks, common = begin_ranks(asked, dst, stack)
        # Blocks are read by the threads that write them.
        source = stack.enter_context(
            opened_checkpoint(src, threads=1, limits=limits, map=asked.get("map"))
        )
        if not isinstance(src, Checkpoint):
            source.drop_lazy_tensors()
        writing = pick_fields(
            Writing, {**asked, **common}, requests=source.source.store.read_profile.request_count
        )
        if in_place is None:
            where = Destination(target_place(dst, folder=folder), format, writing, layout)
        else:
            where = _destination(
                source, dst, in_place=in_place, format=format, writing=writing, layout=layout,
                programs=programs, folder=folder,
            )  # fmt: skip
        if elsewhere and is_same_place(where.path, source.path):
            problem = f"the target {where.path!r} is the source; write beside it"
            raise CannotHold("the target is read while it is written", [problem], file=where.path)
        if directory is None:
            archive = programs and find_archive_format(where.path, where.format) is not None
            if not archive and not find_suffix(where.path):
                where = replace(
                    where, format=_model_format(source, where, copy_config) or where.format
                )
            directory = (
                not archive and format_of(resolve_format(where.path, where.format, layout)).folder
            )
        check_target(where.path, directory=directory, writing=where.writing)
        is_in_place = is_same_place(where.path, source.path)
        if is_in_place and not where.writing.dry_run:
            refuse_sealed(source.path, source.source.store.list(), limits)
        store = source.source.store
        is_alone = not store.is_folder and len(store.list()) == 1
        side_files = SideFiles({})
        if directory or not is_alone or not isinstance(copy_config, bool):
            side_files = find_side_files(
                source, where.path, copy_config, directory=directory, stack=stack, limits=limits
            )
        if source.torch_dist and where.format == source.usual_format:
            side_files = replace(side_files, files={**side_files.files, **torch_dist_files()})
        layout = replace(
            layout,
            # Only an index tells other safetensors files from those that are written.
            index=layout.index or any(name.endswith(SUFFIX) for name in side_files.files),
            stem=side_files.stem,
            ranks=ranks,
            save=writing.save,
        )
        planned = lay_out(source, replace(where, layout=layout))
        stack.callback(planned.sources.close)
        if side_files.files or side_files.notes:
            planned = _accompanied(planned, side_files, source)
        if is_in_place:
            # Also of a checkpoint without tensors, nothing of which is read while it is written.
            reads = dict.fromkeys((*planned.reads, source.source.store))
            planned = replace(planned, reads=tuple(reads))
        return replace(
            planned, sources=stack.pop_all(), ranks=ranks, mark=partial(hash_checkpoint, source)
        )


def _accompanied(planned: Planned[R], side_files: SideFiles, source: Checkpoint) -> Planned[R]:
    """The plan with the side files in its directory, published with it."""
    plan, added = side_files.add_to(planned.plan, source)
    if plan is planned.plan and not added:
        return planned
    report = planned.report
    files = (*report.files, *((file.key, file.nbytes) for file in added))
    notes = (*report.notes, *plan.notes[len(planned.plan.notes) :])
    report = replace(report, files=files, nbytes=sum(nbytes for _, nbytes in files), notes=notes)
    reads = dict.fromkeys((*planned.reads, *(origin.store for origin in side_files.files.values())))
    return replace(planned, plan=plan, report=report, reads=tuple(reads))


def _model_format(source: Checkpoint, where: Destination, copy_config: CopyConfig) -> str | None:
    """The format that others expect where the target has no suffix: of a layout, or of a Hugging Face folder."""
    options = where.layout
    if where.format is None and source.usual_format:
        return find_folder_format(
            resolve_format(where.path, source.usual_format, options, is_target=False)
        )
    if not is_model(source, copy_config):
        return None
    if where.format is not None:
        return find_folder_format(
            resolve_format(where.path, where.format, options, is_target=False)
        )
    # A native directory with a config beside it stays one, unless it is told otherwise.
    stays = source.format == resolve_format(
        where.path, None, options, is_target=False
    ) and isinstance(copy_config, bool)
    models = (one.name for one in written_formats() if one.weights_by and one.folder)
    return None if stays else next(models)


def check_target(path: str, *, directory: bool, writing: Writing) -> None:
    """Raise `NotCommitted` for a target that cannot be written, before anything is read. A dry run needs only its folder."""
    _free(path)
    if writing.dry_run:
        return
    if not place_at(path).on_disk:
        if writing.resume:
            raise Unsupported(
                "resume=True takes over files of a directory; a save to an object store begins anew",
                file=path,
            )
        return  # the save itself looks, with the same requests
    target = open_target(system_files(), path)
    try:
        overwrite = not directory if writing.overwrite is None else writing.overwrite
        check_replaceable(target.existing, path, is_folder=directory, overwrite=overwrite)
    finally:
        target.close()


def _destination(
    source: Checkpoint,
    dst: str | os.PathLike[str] | None,
    *,
    in_place: bool,
    format: str | None,
    writing: Writing,
    layout: LayoutOptions,
    programs: bool,
    folder: bool,
) -> Destination:
    """The target that was named, or the place of the source, in its own format.

    Raises `Unsupported` where neither was said, or both; and for a place in a format that can be read and not written.
    """
    # A dry run without a target looks at what it would be in place.
    in_place = in_place or (dst is None and writing.dry_run)
    if dst is not None and in_place:
        raise Unsupported(
            "a target and in_place=True exclude each other; leave one of them out", file=source.path
        )
    if dst is None and not in_place:
        message = "say where to write: a target, or in_place=True to replace the source"
        raise Unsupported(f"{message}; dry_run=True only looks", file=source.path)
    if dst is None and source.source.store.identity() != place_at(source.path).identity:
        raise Unsupported(
            "what was not opened by a path has no place to be replaced in; give a target",
            file=source.path,
        )
    if dst is None and folder:
        raise Unsupported(
            "folder=True says what a target is, and there is none; leave it out", file=source.path
        )
    path = source.path if dst is None else target_place(dst, folder=folder)
    if dst is not None and not is_same_place(path, source.path):
        return Destination(path, format, writing, layout)
    own = format_of(source.format)
    if format is None and not own.written_by and not (programs and own.programs):
        message = f"{source.format} can be read and not written, so it cannot be replaced; give the new one another path"
        raise Unsupported(message, file=source.path, found=source.format)
    return Destination(
        path,
        format or source.format,
        replace(writing, overwrite=writing.overwrite or in_place),
        layout,
    )


def check_sources_unchanged(stores: Iterable[Store], target: str) -> None:
    """Raise `NotCommitted` where a file of these stores was written to since it was opened."""
    for store in stores:
        changed = store.find_changed()
        if changed:
            message = f"the source {store.name!r} changed while it was read ({', '.join(changed[:3])}); nothing was published"
            raised = NotCommitted(
                f"{message}: start again when nobody writes to it", file=target, errno=errno.ESTALE
            )
            raised.found = changed
            raise raised


def check_in_place(stores: Iterable[Store], target: str) -> None:
    """Raise `NotCommitted` if the target is no longer what these stores were opened from.

    A verb that rewrites a checkpoint in its own place reads the file that it opened. If somebody
    has saved a newer one under the same path since, the rename would remove that without a word.
    """
    for store in stores:
        replaced_keys = store.find_replaced()
        if replaced_keys:
            shown_keys = ", ".join(replaced_keys[:3])
            message = (
                f"the target was changed, replaced or removed after it was opened ({shown_keys}); "
                "it is left as it is now. Open it again, and repeat this"
            )
            raised = NotCommitted(message, file=target, errno=errno.ESTALE)
            raised.found = tuple(replaced_keys)
            raise raised


def _bucket_names() -> BucketNames:
    from holdfast.verbs.shared.references import (
        NAMES,  # what it imports is for those who have a bucket
    )

    return NAMES


FILES_REPLACED = Writing(overwrite=None)


def write_plan(
    plan: SavePlan, path: str, writing: Writing = FILES_REPLACED, *, progress: Progress | None = None,
    before_commit: Callable[[], None] | None = None, before_rename: Callable[[], None] | None = None,
    files: Files | None = None,
    copied: Callable[[LinkedFile], None] | None = None, ranks: Ranks = ALONE,
    mark: Callable[[], bytes] = bytes, findings: Findings = NO_FINDINGS,
) -> Mapping[str, int]:  # fmt: skip
    """Write a plan and publish it. Gives the CRC-32 of each piece that was written; of
    several ranks the first one has all of them.

    With `read_back`, and always if several ranks write, the reader opens what was written before it is published.
    `before_commit` is called when all is written, and `before_rename` right before something on a disk
    is replaced: their errors keep everything as it was. `copied` is called with each file that
    cannot be linked.
    """
    is_url = is_parsed_url(path)
    threads, block, parts = writing.threads, None, None
    if (within := writing.budget if writing.max_memory is not None else None) is not None:
        threads, block = within.threads, within.block_nbytes
        parts = writing.parts if is_url else None
    if threads is None and writing.processes > 1:
        threads = default_threads(writing.processes)
    overwrite = writing.overwrite is not False
    if plan.directory or plan.is_copy:
        overwrite = bool(writing.overwrite)
    written_names = cache(lambda: {key for key, _ in plan.file_sizes})
    target_at = partial(
        make_target, path, plan, overwrite=overwrite, durable=writing.durable, bucket_names=_bucket_names,
        is_replaceable=lambda name: name in written_names() or is_replaceable(name), resume=writing.resume, files=files,
        save_id=writing.save, upload_parts=parts, has_other_ranks=ranks.size > 1,
    )  # fmt: skip

    def link_files(target: Target) -> None:
        for linked in plan.linked:
            if not target.link_file(linked) and copied is not None:
                copied(linked)

    # A copy has the files of a checkpoint that was opened.
    is_checked = (writing.read_back or ranks.size > 1) and not plan.is_copy
    saving = SaveContext(
        check_opens=partial(check_plan_opens, plan, path) if is_checked else None,
        threads=threads, block_nbytes=block, progress=progress, read_back=writing.read_back,
        before_publish=before_commit or (lambda: None), before_rename=before_rename or (lambda: None), attributes=plan.attributes,
    )  # fmt: skip
    if ranks.size > 1:
        join = partial(
            join_target, path=path, durable=writing.durable, plan=plan, resume=writing.resume
        )
        joint_save = PlanSave(
            plan, ranks, saving, open_target=lambda: target_at().__enter__(), link_files=link_files, join_target=join,
            hash_source=mark, findings=findings,
        )  # fmt: skip
        joint_save.write()
    else:
        with target_at() as target:
            if plan.linked:
                link_files(target)
            for file in plan.files:
                target.prepare_file(file)(saving)
                if not is_url:
                    # A file in a bucket may be uploaded only when it is published.
                    file.forget_segments()
            target.publish(plan.index, saving)
    return remove_hashes(saving.crcs)
