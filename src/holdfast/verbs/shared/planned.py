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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar

from msgspec import field as value_field
from msgspec.structs import force_setattr

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
from holdfast.engine.targets.target import (
    BucketOptions,
    DiskOptions,
    SaveContext,
    Target,
    join_target,
    make_target,
)
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

UNLIMITED_NBYTES = 1 << 62
"""The free bytes of a place that reports none, such as an object store."""


class Writing(Value, frozen=True, kw_only=True):
    """How a plan is written: options that all verbs that write have in common."""

    overwrite: bool | None = False
    """Whether an existing target may be replaced. None: a file may, a directory may not."""
    durable: bool = True
    """Whether to wait for the disk."""
    threads: int | None = None
    read_back: bool = False
    """Whether the written bytes are read and compared before they are published."""
    max_memory: Size | None = None
    """Limit for the memory above the interpreter's own. None: a few blocks for each thread."""
    resume: bool = False
    """Whether to take over the finished files of an interrupted save to the same directory."""
    dry_run: bool = False
    requests: int = 0
    """How many requests the source should receive at the same time (`ReadProfile.request_count`)."""
    save: str = ""
    """In an object store: the id in the names of this save's objects, if several ranks write them."""
    processes: int = 1
    """How many ranks share this machine."""

    @property
    def budget(self) -> MemoryBudget | None:
        """The threads and the block size that keep to `max_memory`. None if there is no limit."""
        if self.max_memory is None:
            return None
        return plan_memory(
            self.max_memory, self.threads, request_count=self.requests, processes=self.processes
        )

    @property
    def upload_part_count(self) -> int | None:
        """How many parts of an upload may be in memory at once. They get half of the memory."""
        if self.max_memory is None:
            return None
        part_nbytes = (parse_nbytes(self.max_memory) - BASE_NBYTES) // 2
        return max(1, min(UPLOAD_PARTS_AT_ONCE, part_nbytes // PART_NBYTES))

    @property
    def reading_threads(self) -> int:
        """How many threads may read before the save, in blocks whose size cannot be chosen."""
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
        file_count = f"{len(self.files):,} file"
        if len(self.files) != 1:
            file_count += "s"
        write = f"write  {self.nbytes:,} bytes in {file_count}"
        if self.shared_nbytes:
            write += f", {self.shared_nbytes:,} of them shared with the base"
        lines = [f"→ {self.path} ({self.format})", write]

        if self.free_nbytes < UNLIMITED_NBYTES:
            space = f"space  {self.free_nbytes:,} bytes free"
            if not self.done and self.free_nbytes < self.new_nbytes:
                space += ": NOT ENOUGH"
            lines.append(space)
        return lines


class ReportFields(TypedDict):
    """The fields of `Saved` that are known when a plan is made."""

    path: str
    format: str
    nbytes: int
    files: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]
    free_nbytes: int
    shared_nbytes: int


def make_report_fields(plan: SavePlan, target: str) -> ReportFields:
    """Return the fields of a report that the plan of a save determines.

    Raises `NotCommitted` if the folder of the target cannot be used.
    """
    name = os.path.basename(target.rstrip("/"))
    linked_files = [(file.key, file.nbytes) for file in plan.linked]
    written_files = [(file.key or name, file.nbytes) for file in (*plan.files, *plan.index)]
    files = (*linked_files, *written_files)
    return ReportFields(
        path=target,
        format=plan.format,
        nbytes=sum([nbytes for _, nbytes in files]),
        files=files,
        notes=plan.notes,
        free_nbytes=count_free_nbytes(target),
        shared_nbytes=sum([nbytes for _, nbytes in linked_files]),
    )


def count_free_nbytes(target: str) -> int:
    """Return the free bytes where a target lies.

    Raises `NotCommitted` if the folder of the target cannot be used.
    """
    try:
        free_nbytes = place_at(target).free_nbytes()
    except StoreError as error:
        raise NotCommitted(
            f"the folder to save into cannot be used: {error.message} ({error.file!r})",
            file=target,
            errno=error.errno,
        ) from None
    return UNLIMITED_NBYTES if free_nbytes is None else free_nbytes


R = TypeVar("R", bound=Saved)


class Planned(Value, Generic[R], frozen=True, eq=False):
    """A save that is laid out and not begun. `carry_out` writes it once, and closes its sources."""

    plan: SavePlan
    report: R
    """The result, as far as it is known before the save."""
    writing: Writing
    reads: tuple[Store, ...] = ()
    """The stores that are read. If one of them changes meanwhile, nothing is published."""
    sources: ExitStack = value_field(default_factory=ExitStack)
    """What is closed after the save."""
    before_publish: Callable[[], None] | None = None
    """Called when everything is written. If it raises, nothing is published."""
    finish: Callable[[R, Progress | None], R] = lambda report, progress: report
    """Completes the report after everything was read. In a dry run it may have to read for that."""
    ranks: Ranks = ALONE
    """The ranks that write the checkpoint together."""
    hash_source: Callable[[], bytes] = bytes
    """Hashes the source, which must be the same on all ranks."""
    findings: Findings = NO_FINDINGS
    """Collects on all ranks what is found out during the save."""

    def preview(self, progress: Progress | None = None) -> R:
        """Return the report of a dry run."""
        reports: list[R] = []
        # A run compares the hashes when it begins to write. All ranks return the same report.
        if self.ranks.size > 1:
            compare_marks(self.ranks, self.hash_source())
        with joint_phase(self.ranks), self.ranks.joint_progress(progress) as joint_progress:
            reports.append(self.finish(self.report, joint_progress))
        return reports[0]

    def run(self, progress: Progress | None = None) -> R:
        """Write and publish the plan, and return the report.

        Raises:
            NotCommitted: There is not enough space, or a source changed. Nothing was published.
        """
        report = self.report
        path = report.path
        with ExitStack() as stack:
            if self.ranks.size > 1:
                stack.enter_context(shared_errors(self.ranks))
                progress = stack.enter_context(self.ranks.joint_progress(progress))
            local_stores = [store for store in self.reads if store.read_profile.is_file]
            replaced_stores = [store for store in local_stores if is_same_place(store.name, path)]
            check_replaced = None
            if replaced_stores:
                check_replaced = partial(check_in_place, replaced_stores, path)
                check_replaced()
            if report.free_nbytes < report.nbytes - report.shared_nbytes:
                report = _wait_for_space(report)

            # A stream that must be read from front to back is read by the one thread that writes.
            writing = self.writing
            for store in self.reads:
                if store.read_profile.is_sequential:
                    stack.enter_context(store.reading())
                    writing = replace(writing, threads=1)

            before_publish = self.before_publish
            if self.reads:
                before_publish = partial(self._check_before_publish, check_replaced)
            copied_files: list[LinkedFile] = []
            crcs = write_plan(
                self.plan,
                path,
                writing,
                progress=progress,
                before_publish=before_publish,
                before_rename=check_replaced,
                on_copy=copied_files.append,
                ranks=self.ranks,
                hash_source=self.hash_source,
                findings=self.findings,
            )
            if copied_files:
                report = _note_copied_files(report, copied_files)
            return self.finish(replace_fields(report, done=True, crcs=crcs), None)

    def _check_before_publish(self, check_replaced: Callable[[], None] | None) -> None:
        """Raise `NotCommitted` if a source was changed since it was opened."""
        for store in self.reads:
            changed_keys = store.find_changed()
            if changed_keys:
                raise _build_changed_error(store, changed_keys, self.report.path)
        if check_replaced is not None:
            check_replaced()
        if self.before_publish is not None:
            self.before_publish()

    def carry_out(self, progress: Progress | None = None) -> R:
        """Run the plan, or only preview it in a dry run, and close its sources."""
        with self.sources:
            return self.preview(progress) if self.writing.dry_run else self.run(progress)


def _build_changed_error(store: Store, keys: Sequence[str], target: str) -> NotCommitted:
    """Return the error for a source that changed while it was read."""
    error = NotCommitted(
        f"the source {store.name!r} changed while it was read ({', '.join(keys[:3])}); "
        "nothing was published: start again when nobody writes to it",
        file=target,
        errno=errno.ESTALE,
    )
    error.found = tuple(keys)
    return error


def _note_copied_files(report: R, copied_files: Sequence[LinkedFile]) -> R:
    """Return the report with the files of the base that were copied instead of shared."""
    copied_nbytes = sum(file.nbytes for file in copied_files)
    note = (
        f"the file system cannot link {len(copied_files):,} files of the base: "
        f"{copied_nbytes:,} bytes were copied"
    )
    return replace(
        report,
        notes=(*report.notes, note),
        shared_nbytes=report.shared_nbytes - copied_nbytes,
    )


def _wait_for_space(report: R) -> R:
    """Wait until files that were replaced before are removed in the background.

    Raises `NotCommitted` if there is still too little space afterwards.
    """
    if wait_for_room():
        report = replace(report, free_nbytes=count_free_nbytes(report.path))
    # In a folder without the permission to write, the missing permission is the better message.
    folder = os.path.dirname(os.path.abspath(report.path))
    if report.free_nbytes < report.new_nbytes and os.access(folder, os.W_OK):
        error = NotCommitted(
            f"the disk is full: {report.new_nbytes:,} bytes are to be written and "
            f"{report.free_nbytes:,} are free",
            file=report.path,
            errno=errno.ENOSPC,
        )
        error.expected = report.new_nbytes
        error.found = report.free_nbytes
        raise error
    return report


class Destination(Value, frozen=True):
    """The target of a verb that makes a new checkpoint out of another one."""

    path: str
    format: str | None
    """The format that the caller asks for, or that of the replaced source. None: by the suffix."""
    writing: Writing
    layout: LayoutOptions


def begin_ranks(
    options: Mapping[str, Any], dst: object, stack: ExitStack
) -> tuple[Ranks, dict[str, Any]]:
    """Begin a save of several ranks, if the options of a verb name a process group.

    Args:
        options: The options of the verb.
        dst: The target, for messages.
        stack: Closes the ranks. Until then, an error of one rank is sent to all of them.

    Returns:
        The ranks, and the fields of `Writing` that all of them agree on.
    """
    if options.get("group") is None:
        return ALONE, {}
    ranks = begin(options["group"], f"write {dst}")
    stack.callback(ranks.close)
    stack.enter_context(shared_errors(ranks))
    save_id = ranks.agree(b"", lambda messages: [secrets.token_hex(8).encode()] * len(messages))
    # After the agreement every rank is there, and can be counted.
    return ranks, {"save": save_id.decode(), "processes": ranks.count_local_ranks()}


def plan_derived_checkpoint(
    src: Openable | Checkpoint,
    dst: str | os.PathLike[str] | None,
    lay_out: Callable[[Checkpoint, Destination], Planned[R]],
    options: Mapping[str, Any],
    *,
    elsewhere: bool = False,
    directory: bool | None = None,
    programs: bool = False,
) -> Planned[R]:
    """Plan a verb that makes a new checkpoint out of another one.

    A folder also receives the files beside the weights of the source, such as its config.

    Args:
        src: The source. The plan closes it.
        dst: The target. None to replace the source.
        lay_out: Lays out the new checkpoint, from the open source and the target.
        options: The options of the verb.
        elsewhere: Whether the target must not be the source.
        directory: Whether a folder is written. None if the format of the target decides.
        programs: Whether the verb writes archives of programs (`.pt2`).

    Raises:
        NotCommitted: The target cannot be written. This is checked before `lay_out` reads anything.
        Unsupported: The options do not fit the target.
    """
    limits = options.get("limits")
    copy_config = options.get("copy_config")
    if copy_config is None:
        copy_config = True
    with ExitStack() as stack:
        ranks = ALONE
        rank_fields: dict[str, Any] = {}
        if options.get("group") is not None:
            ranks, rank_fields = begin_ranks(options, dst, stack)

        # One thread suffices: blocks are read later, by the threads that write them.
        source = stack.enter_context(
            opened_checkpoint(src, threads=1, limits=limits, map=options.get("map"))
        )
        if not isinstance(src, Checkpoint):
            source.drop_lazy_tensors()
        where = _choose_destination(source, dst, {**options, **rank_fields}, programs=programs)
        is_in_place = is_same_place(where.path, source.path)
        if elsewhere and is_in_place:
            problem = f"the target {where.path!r} is the source; write beside it"
            raise CannotHold("the target is read while it is written", [problem], file=where.path)
        if directory is None:
            where, directory = _choose_format(source, where, copy_config, programs=programs)
        check_target(where.path, directory=directory, writing=where.writing)
        store = source.source.store
        if is_in_place and not where.writing.dry_run:
            refuse_sealed(source.path, store.list(), limits)

        side_files = SideFiles({})
        is_alone = not store.is_folder and len(store.list()) == 1
        if directory or not is_alone or not isinstance(copy_config, bool):
            side_files = find_side_files(
                source, where.path, copy_config, directory=directory, stack=stack, limits=limits
            )
        if source.torch_dist and where.format == source.usual_format:
            side_files = replace(side_files, files={**side_files.files, **torch_dist_files()})

        layout = replace(
            where.layout,
            # Only an index tells other safetensors files from those that are written.
            index=where.layout.index or any(name.endswith(SUFFIX) for name in side_files.files),
            stem=side_files.stem,
            ranks=ranks,
            save=where.writing.save,
        )
        planned = lay_out(source, replace(where, layout=layout))
        stack.callback(planned.sources.close)
        if side_files.files or side_files.notes:
            planned = _add_side_files(planned, side_files, source)
        reads = planned.reads
        if is_in_place and store not in reads:
            # The source of a checkpoint without tensors is not read, but it may change as well.
            reads = (*reads, store)
        return replace(
            planned,
            reads=reads,
            sources=stack.pop_all(),
            ranks=ranks,
            hash_source=partial(hash_checkpoint, source),
        )


def _choose_destination(
    source: Checkpoint,
    dst: str | os.PathLike[str] | None,
    options: Mapping[str, Any],
    *,
    programs: bool,
) -> Destination:
    """Return the target of a verb: the given one, or the place of the source.

    Only verbs with the option `in_place` can replace their source.
    """
    writing = pick_fields(Writing, options, requests=source.source.store.read_profile.request_count)
    # A checkpoint that is made out of another one keeps its tree by default.
    layout = pick_fields(LayoutOptions, {"keep_tree": True, **options})
    format = options.get("format")
    is_folder = bool(options.get("folder"))
    in_place = options.get("in_place")
    if in_place is None:
        return Destination(target_place(dst, folder=is_folder), format, writing, layout)

    # A dry run without a target previews a replacement of the source.
    in_place = in_place or (dst is None and writing.dry_run)
    if dst is None:
        _check_replaceable_source(source, in_place=in_place, is_folder=is_folder)
        path = source.path
    else:
        if in_place:
            raise Unsupported(
                "a target and in_place=True exclude each other; leave one of them out",
                file=source.path,
            )
        path = target_place(dst, folder=is_folder)
        if not is_same_place(path, source.path):
            return Destination(path, format, writing, layout)

    source_format = format_of(source.format)
    is_writable = bool(source_format.written_by) or (programs and source_format.programs)
    if format is None and not is_writable:
        raise Unsupported(
            f"{source.format} can be read and not written, so it cannot be replaced; "
            "give the new one another path",
            file=source.path,
            found=source.format,
        )
    writing = replace(writing, overwrite=writing.overwrite or in_place)
    return Destination(path, format or source.format, writing, layout)


def _check_replaceable_source(source: Checkpoint, *, in_place: bool, is_folder: bool) -> None:
    """Raise `Unsupported` unless a verb without a target may replace its source."""
    if not in_place:
        message = "say where to write: a target, or in_place=True to replace the source"
        raise Unsupported(f"{message}; dry_run=True only looks", file=source.path)
    if source.source.store.identity() != place_at(source.path).identity:
        raise Unsupported(
            "what was not opened by a path has no place to be replaced in; give a target",
            file=source.path,
        )
    if is_folder:
        raise Unsupported(
            "folder=True says what a target is, and there is none; leave it out", file=source.path
        )


def _choose_format(
    source: Checkpoint, where: Destination, copy_config: CopyConfig, *, programs: bool
) -> tuple[Destination, bool]:
    """Choose the format of a target where neither the caller nor the suffix decides.

    Returns:
        The target with its format, and whether a folder is written.
    """
    if programs and find_archive_format(where.path, where.format) is not None:
        return where, False
    if not find_suffix(where.path):
        model_format = _find_model_format(source, where, copy_config)
        if model_format is not None:
            where = replace(where, format=model_format)
    format = resolve_format(where.path, where.format, where.layout)
    return where, format_of(format).folder


def _find_model_format(
    source: Checkpoint, where: Destination, copy_config: CopyConfig
) -> str | None:
    """Return the folder format that other programs expect of this model, or None.

    A Hugging Face folder becomes one again, and so does a model in a layout that has a usual
    format.
    """
    format = where.format
    if format is None:
        format = source.usual_format or None
        if format is None:
            return _find_hugging_face_format(source, where, copy_config)
    elif not is_model(source, copy_config):
        return None
    name = resolve_format(where.path, format, where.layout, is_target=False)
    return find_folder_format(name)


def _find_hugging_face_format(
    source: Checkpoint, where: Destination, copy_config: CopyConfig
) -> str | None:
    """Return the format of Hugging Face folders if the source is a model with a config."""
    if not is_model(source, copy_config):
        return None
    default_format = resolve_format(where.path, None, where.layout, is_target=False)
    # A native directory with a config beside it stays one, unless a config is given.
    if source.format == default_format and isinstance(copy_config, bool):
        return None
    return next(entry.name for entry in written_formats() if entry.weights_by and entry.folder)


def _add_side_files(planned: Planned[R], side_files: SideFiles, source: Checkpoint) -> Planned[R]:
    """Return a plan that also writes the side files, and publishes them with the folder."""
    plan, added_files = side_files.add_to(planned.plan, source)
    if plan is planned.plan and not added_files:
        return planned
    report = planned.report
    files = (*report.files, *((file.key, file.nbytes) for file in added_files))
    new_notes = plan.notes[len(planned.plan.notes) :]
    report = replace(
        report,
        files=files,
        nbytes=sum(nbytes for _, nbytes in files),
        notes=(*report.notes, *new_notes),
    )
    side_stores = [origin.store for origin in side_files.files.values()]
    reads = tuple(dict.fromkeys((*planned.reads, *side_stores)))
    return replace(planned, plan=plan, report=report, reads=reads)


def check_target(path: str, *, directory: bool, writing: Writing) -> None:
    """Raise `NotCommitted` if a target cannot be written, before anything is read.

    For a dry run only the folder of the target must be usable. A save to an object store checks the
    rest itself, with requests that it needs anyway.
    """
    count_free_nbytes(path)
    if writing.dry_run:
        return
    if not place_at(path).on_disk:
        if writing.resume:
            raise Unsupported(
                "resume=True takes over files of a directory; a save to an object store begins anew",
                file=path,
            )
        return
    target = open_target(system_files(), path)
    try:
        overwrite = not directory if writing.overwrite is None else writing.overwrite
        check_replaceable(target.existing, path, is_folder=directory, overwrite=overwrite)
    finally:
        target.close()


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
            error = NotCommitted(message, file=target, errno=errno.ESTALE)
            error.found = tuple(replaced_keys)
            raise error


def _load_bucket_names() -> BucketNames:
    from holdfast.verbs.shared.references import NAMES  # its imports are only needed for buckets

    return NAMES


FILES_REPLACED = Writing(overwrite=None)
"""The default: a file is replaced, a directory is not."""


def write_plan(
    plan: SavePlan,
    path: str,
    writing: Writing = FILES_REPLACED,
    *,
    progress: Progress | None = None,
    before_publish: Callable[[], None] | None = None,
    before_rename: Callable[[], None] | None = None,
    files: Files | None = None,
    on_copy: Callable[[LinkedFile], None] | None = None,
    ranks: Ranks = ALONE,
    hash_source: Callable[[], bytes] = bytes,
    findings: Findings = NO_FINDINGS,
) -> Mapping[str, int]:
    """Write a plan and publish it. A plan can be written once.

    With `writing.read_back`, and always if several ranks write, the reader opens what was written
    before it is published.

    Args:
        plan: The plan.
        path: The target.
        writing: The options.
        progress: Called with the number of bytes after each write.
        before_publish: Called when everything is written. If it raises, nothing is published.
        before_rename: Called right before a file or folder on a disk is replaced. The same holds.
        files: The file system, for tests.
        on_copy: Called with each file of a base that is copied because it cannot be linked.
        ranks: The ranks that write the plan together.
        hash_source: Hashes the source, which must be the same on all ranks.
        findings: Collects on all ranks what is found out during the save.

    Returns:
        The CRC-32 of each tensor or file part by its label. Of several ranks, the first one has all.
    """
    is_url = is_parsed_url(path)
    threads = writing.threads
    block_nbytes = None
    upload_part_count = None
    if writing.max_memory is not None:
        memory = plan_memory(
            writing.max_memory,
            threads,
            request_count=writing.requests,
            processes=writing.processes,
        )
        threads = memory.threads
        block_nbytes = memory.block_nbytes
        upload_part_count = writing.upload_part_count if is_url else None
    elif threads is None and writing.processes > 1:
        threads = default_threads(writing.processes)

    overwrite = writing.overwrite is not False
    if plan.directory or plan.is_copy:
        overwrite = bool(writing.overwrite)
    # The keys are the names of all files. Only a save that replaces a folder needs them.
    list_written_names = cache(lambda: dict(plan.file_sizes))
    make_this_target = partial(
        make_target,
        path,
        plan,
        overwrite=overwrite,
        disk=DiskOptions(
            durable=writing.durable,
            is_replaceable=lambda name: name in list_written_names() or is_replaceable(name),
            resume=writing.resume,
            files=files,
        ),
        bucket=BucketOptions(
            load_names=_load_bucket_names,
            save_id=writing.save,
            parts_at_once=upload_part_count,
            has_other_ranks=ranks.size > 1,
        ),
    )

    def link_files(target: Target) -> None:
        for file in plan.linked:
            if not target.link_file(file) and on_copy is not None:
                on_copy(file)

    def check_opens(store: Store) -> None:
        if not is_url:
            # A manifest is its text and what it is made of, 280 bytes for each tensor. It is on the
            # disk now, and the reader needs as much memory again.
            for file in plan.index:
                force_setattr(file, "segments", ())
        check_plan_opens(plan, path, store)

    # The files of a copy are those of a checkpoint that was opened, and need no check.
    needs_check = (writing.read_back or ranks.size > 1) and not plan.is_copy
    context = SaveContext(
        check_opens=check_opens if needs_check else None,
        threads=threads,
        block_nbytes=block_nbytes,
        progress=progress,
        read_back=writing.read_back,
        before_publish=before_publish or (lambda: None),
        before_rename=before_rename or (lambda: None),
        attributes=plan.attributes,
    )
    if ranks.size > 1:
        joint_save = PlanSave(
            plan,
            ranks,
            context,
            open_target=lambda: make_this_target().__enter__(),
            link_files=link_files,
            join_target=partial(
                join_target, path=path, durable=writing.durable, plan=plan, resume=writing.resume
            ),
            hash_source=hash_source,
            findings=findings,
        )
        joint_save.write()
        return remove_hashes(context.crcs)

    with make_this_target() as target:
        if plan.linked:
            link_files(target)
        for file in plan.files:
            target.prepare_file(file)(context)
            if not is_url:
                # The segments of a million tensors take 260 MB, which the check of the written file
                # needs. A file in a bucket may still have to be uploaded.
                force_setattr(file, "segments", ())
        target.publish(plan.index, context)
    return remove_hashes(context.crcs)
