"""The options of the verbs: types in a record, everything else in one table.

    class ConvertOptions(EditingOptions, FormatOption, WriteOptions, total=False):
        dequantize: bool

    OPTIONS["dequantize"] = switch(False, "decode the quantized blocks of GGUF to floating point")

    @validate_arguments
    def convert(src, dst, **options: Unpack[ConvertOptions]) -> Conversion: ...

Type checkers read the record that a verb names in its signature. `OPTIONS` has the default, the help,
the check and the flag of each option by its name, since an option means the same in every verb; the
few differences are in `RECORD_OPTIONS`. From both come `inspect.signature` and `help()`, the flags and
the `--help` of the command (cli/options.py), and the page of the reference.

A verb receives every option of its record, checked, with the default where nothing was given. None
stands for the default, too. Records of the layers below (`Edits`, `Writing`, `Selection`) are filled
by the names of their fields (`pick_fields`).
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    ForwardRef,
    Literal,
    NamedTuple,
    ParamSpec,
    Required,
    TypedDict,
    TypeVar,
    cast,
    overload,
)

from holdfast.core import arguments
from holdfast.core.arguments import AnyDType, Reader
from holdfast.core.quantities import Size, parse_count, parse_fraction, parse_seconds
from holdfast.core.runtime import cut_traceback
from holdfast.errors import BadArgumentType, RankLost, RanksFailed

if TYPE_CHECKING:
    from holdfast.core.group import AnyGroup
    from holdfast.core.limits import Limits
    from holdfast.extras.maps.find import AnyMap

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

MAX_MEMORY = "1GiB"
"""The default budget of verbs that make a checkpoint of a checkpoint."""

DEADLINE = 60.0
"""The seconds without a sign of life after which a rank counts as lost."""

DIGESTS = ("xxh3-128", "sha256")

Progress = Callable[[int], None]
"""Called with the number of bytes that were done since the last call."""

CopyConfig = bool | str | os.PathLike[str]
"""Whether config and tokenizer files are copied, or the folder that they are copied from."""


class ReadOptions(TypedDict, total=False):
    """The options of every verb that reads tensors."""

    limits: Limits | None
    threads: int | None
    progress: Progress | None


class OverwriteOptions(TypedDict, total=False):
    """The options of every verb that publishes something."""

    overwrite: bool | None
    durable: bool


class CheckOptions(TypedDict, total=False):
    read_back: bool
    max_memory: Size | None


class DryRunOption(TypedDict, total=False):
    dry_run: bool


class WriteOptions(OverwriteOptions, CheckOptions, DryRunOption, ReadOptions, total=False):
    """The options of every verb that writes a checkpoint."""


class FormatOption(TypedDict, total=False):
    folder: bool
    format: str | None


class InPlaceOption(TypedDict, total=False):
    in_place: bool


class StoreOption(TypedDict, total=False):
    store: object | None


class GroupOption(TypedDict, total=False):
    group: AnyGroup | None


class MapOption(TypedDict, total=False):
    map: AnyMap | None


class ShardOption(TypedDict, total=False):
    max_shard_size: Size | None


class FolderOptions(ShardOption, total=False):
    """The options of a directory that is written."""

    copy_config: CopyConfig


class EditingOptions(TypedDict, total=False):
    dtype: AnyDType | Mapping[str, AnyDType] | None
    keep: str | Iterable[str]
    drop: str | Iterable[str]
    rename: Mapping[str, str] | Iterable[tuple[str, str]]
    tensors_only: bool


class ConvertOptions(
    EditingOptions, MapOption, FolderOptions, StoreOption, FormatOption, GroupOption, WriteOptions,
    total=False,
):  # fmt: skip
    model: str | None
    constants: bool
    sample_inputs: bool
    dequantize: bool
    keep_tree: bool
    resume: bool


class EditOptions(
    InPlaceOption, EditingOptions, FolderOptions, FormatOption, GroupOption, WriteOptions,
    total=False,
):  # fmt: skip
    set_metadata: Mapping[str, str] | None
    unset_metadata: str | Iterable[str]


class CopyOptions(StoreOption, GroupOption, WriteOptions, total=False):
    """The options of `copy`."""


class InPlaceOptions(InPlaceOption, FormatOption, WriteOptions, total=False):
    """The options of `tie` and `compact`."""


class PruneOptions(FolderOptions, FormatOption, GroupOption, WriteOptions, total=False):
    masks: str | None


class PackageOptions(WriteOptions, total=False):
    deduplicate: str
    format: str | None


class ReplaceOptions(InPlaceOption, WriteOptions, total=False):
    weights: Required[object]
    model: str | None


class ReshardOptions(MapOption, GroupOption, WriteOptions, total=False):
    mesh: Required[Mapping[str, int] | str]


class SaveOptions(ShardOption, StoreOption, FormatOption, WriteOptions, total=False):
    metadata: Mapping[str, str] | None
    keep_tree: bool
    base: str | os.PathLike[str] | None
    hashes: bool


class RankStateOptions(TypedDict, total=False):
    """The options of a state of which every rank has a part."""

    metadata: Mapping[str, str] | None
    values: Literal["agree", "first"]
    per_rank: str | Sequence[str]
    check_replicas: bool
    overwrite: bool | None
    threads: int | None
    progress: Progress | None


class ShardedOptions(RankStateOptions, StoreOption, total=False):
    format: Literal["native", "dcp", "safetensors"]
    durable: bool
    deadline: float
    when_busy: Literal["wait", "refuse"]
    base: str | os.PathLike[str] | None
    hashes: bool


class HostMemoryOption(TypedDict, total=False):
    max_host_memory: int | None


class AsyncShardedOptions(ShardedOptions, HostMemoryOption, total=False):
    """The options of `async_save_sharded`."""


class RankStepOptions(RankStateOptions, total=False):
    metrics: Mapping[str, float] | None


class AsyncRankStepOptions(RankStepOptions, HostMemoryOption, total=False):
    """The options of `holdfast.torch.Run.async_save`."""


class SealOptions(OverwriteOptions, DryRunOption, ReadOptions, total=False):
    step: int | None
    metrics: Mapping[str, float] | None
    ran: float | str | None
    digest: str


class Option(NamedTuple):
    """The default of an option, its help, its check, and how it is given at a shell."""

    default: object
    """The value if none is given. An ellipsis means that one must be given."""
    help: str
    word: str = ""
    """The word behind the flag: SIZE, N, GLOB. Empty if the flag stands for True or False."""
    read: Reader | None = None
    """The check. None if every value is allowed."""
    many: bool = False
    """Whether the flag may be given several times."""
    choices: tuple[str, ...] = ()
    flag: str | None = None
    """The flag if it differs from the name of the option; empty if the command line has none."""
    short: str = ""
    given: object = True
    """The value that a flag without a word stands for."""

    def flag_of(self, name: str) -> str:
        return f"--{name.replace('_', '-')}" if self.flag is None else self.flag


def switch(default: bool, help: str, *, flag: str | None = None, short: str = "") -> Option:
    """Return an option that is True or False."""
    return Option(default, help, read=arguments.flag, flag=flag, short=short)


PICKLED_TREE = "safetensors: store non-tensor values in the header, where Holdfast finds them"

OPTIONS: dict[str, Option] = {
    "limits": Option(
        None, "bounds for what a file may demand, such as the number of tensors: holdfast.Limits()",
        read=arguments.limits, flag="",
    ),
    "threads": Option(
        None, "number of threads (default: chosen for this machine)", "N", arguments.count
    ),
    "progress": Option(
        None, "function to call with the number of bytes done since its last call",
        read=arguments.progress, flag="",
    ),
    "overwrite": switch(False, "replace an existing file or folder (default: stop with an error)"),
    "durable": switch(True, "wait until the data is on the disk, with fsync (default: yes)"),
    "read_back": switch(
        True, "read the written data again and compare it before it appears at DST (default: yes)"
    ),
    "max_memory": Option(
        MAX_MEMORY, "memory limit for buffers (default: 1GiB)", "SIZE", arguments.size
    ),
    "dry_run": switch(
        False, "report the files, sizes and free space, and write nothing", short="-n"
    ),
    "folder": switch(False, "write a folder, as if DST ended with a slash"),
    "format": Option(
        None, "output format (default: from the suffix of DST)", "FORMAT", arguments.text
    ),
    "in_place": switch(False, "replace the source atomically instead of writing to DST"),
    "store": Option(None, "obstore store that contains the target; DST is a key in it", flag=""),
    "group": Option(
        None,
        "ranks that share the work, from holdfast.torch.group(); call the function on every rank",
        read=arguments.group, flag="",
    ),
    "map": Option(
        None,
        "layout map to apply, such as 'qwen3:hf:megatron' (FAMILY:FROM:TO); 'auto' detects the family "
        "and converts to Hugging Face names",
        "MAP", arguments.map_name,
    ),
    "max_shard_size": Option(
        None, "split the tensors into files of at most this size, such as 5GB", "SIZE",
        arguments.size,
    ),
    "copy_config": Option(
        True, "if DST is a directory, copy config and tokenizer files from this folder (default: SRC)",
        "DIR",
    ),
    "dtype": Option(
        None,
        "cast floating-point tensors to bf16, f16, f32, …; '*norm*=f32' casts only tensors whose "
        "names match, '*norm*=keep' leaves them unchanged",
        "[GLOB=]DTYPE", arguments.dtypes, many=True,
    ),
    "keep": Option(
        (), "keep only names that match; repeatable", "GLOB", arguments.patterns, many=True
    ),
    "drop": Option(
        (), "remove names that match; repeatable", "GLOB", arguments.patterns, many=True
    ),
    "rename": Option(
        (), "rename tensors: 'model.*=*' removes the prefix 'model.'; repeatable", "OLD=NEW",
        arguments.pairs, many=True,
    ),
    "tensors_only": switch(False, "leave out values that are not tensors"),
    "model": Option(
        None, "extract the state dict of this model from a .pt2 package", "NAME", arguments.text
    ),
    "constants": switch(False, "include the constants of the programs in a .pt2 package"),
    "sample_inputs": switch(False, "include the sample inputs of the programs in a .pt2 package"),
    "dequantize": switch(False, "decode the quantized blocks of GGUF to floating point"),
    "keep_tree": switch(True, PICKLED_TREE, flag=""),
    "resume": switch(
        False, "continue an interrupted conversion to a directory: reuse its finished files"
    ),
    "set_metadata": Option(
        None, "set a metadata entry; repeatable", "KEY=VALUE", arguments.texts, many=True,
        flag="--set",
    ),
    "unset_metadata": Option(
        (), "remove a metadata entry; repeatable", "KEY", arguments.patterns, many=True,
        flag="--unset",
    ),
    "masks": Option(
        None,
        "write the pruning masks: 'beside' the weights in the directory DST, or 'only' the masks",
        "HOW", arguments.text, choices=("beside", "only"),
    ),
    "deduplicate": Option(
        "storage", "store tensors with equal content once, even if they come from different files",
        read=arguments.text, flag="--content", given="content",
    ),
    "weights": Option(..., "a state dict, an open checkpoint, or the path of a checkpoint", flag=""),
    "mesh": Option(..., "mesh of ranks, such as dp=2,tp=4", "NAME=N,…", arguments.counts),
    "metadata": Option(
        None, "text entries to store with the checkpoint, by name", read=arguments.texts
    ),
    "base": Option(
        None, "previous checkpoint: tensors that are unchanged since then are not written again"
    ),
    "hashes": switch(
        False, "store content hashes, so that a later save can use this checkpoint as its base"
    ),
    "values": Option(
        "agree",
        "'agree': fail if values that are not tensors differ between ranks; "
        "'first': save the values of the first rank",
        read=arguments.one_of("agree", "first"),
    ),
    "per_rank": Option(
        (), "names of values that every rank saves for itself", read=arguments.patterns
    ),
    "check_replicas": switch(
        True, "compare the checksums of tensors that several ranks hold (default: yes)"
    ),
    "deadline": Option(
        DEADLINE, "consider a rank lost after this many seconds without a heartbeat (default: 60)",
        read=parse_seconds,
    ),
    "when_busy": Option(
        "wait", "'wait' until another save of this process ends, or 'refuse'",
        read=arguments.one_of("wait", "refuse"),
    ),
    "max_host_memory": Option(
        None, "limit for the page-locked memory of GPU copies (default: half of what is available)",
        read=arguments.size,
    ),
    "metrics": Option(None, "metrics of this step, by name", read=arguments.metrics),
    "step": Option(
        None, "number of the step (default: read from the files)", "STEP", arguments.step
    ),
    "ran": Option(None, "seconds that the training has run", read=parse_seconds, flag=""),
    "digest": Option(
        "xxh3-128", "digest algorithm (default: xxh3-128)", "HOW", arguments.one_of(*DIGESTS),
        choices=DIGESTS,
    ),
}  # fmt: skip
"""Each option by its name."""

# A state in memory need not be streamed, and it can be saved again if the disk fails.
OF_STATES = {
    "read_back": switch(
        False, "read the written data again and compare it before publishing (default: no)"
    ),
    "max_memory": OPTIONS["max_memory"]._replace(
        default=None, help="memory limit for buffers (default: none)"
    ),
}
OF_RANKS = {
    "format": Option(
        "native",
        "output format: native, dcp or safetensors (default: native)",
        read=arguments.text,
    )
}

RECORD_OPTIONS: dict[Callable[..., object], Mapping[str, Option]] = {
    SaveOptions: {
        **OF_STATES,
        "overwrite": OPTIONS["overwrite"]._replace(
            default=None, help="replace an existing file or folder (default: replace only a file)"
        ),
        "keep_tree": switch(False, PICKLED_TREE),
    },
    PackageOptions: {**OF_STATES, "format": OPTIONS["format"]._replace(word="PACKAGE")},
    ReplaceOptions: {
        "model": Option(
            None, "model to replace, if the archive has several", "NAME", arguments.text, flag=""
        )
    },
    ShardedOptions: OF_RANKS,
    AsyncShardedOptions: OF_RANKS,
    SealOptions: {
        "metrics": Option(
            None, "record a metric (default: read from the files); repeatable", "NAME=VALUE",
            arguments.metrics, many=True, flag="--metric",
        )
    },
}  # fmt: skip
"""Options of one record that differ from `OPTIONS`."""

READERS: dict[str, Reader | None] = {
    "allow": arguments.allowed,
    "bins": lambda value, name: parse_count(value, name, least=0, most=arguments.MOST),
    "by": arguments.text,
    "extra_files": arguments.contents,
    "filter": arguments.text,
    "models": arguments.mapping,
    "opset_version": arguments.versions,
    "pattern": arguments.text,
    "prefix": arguments.text,
    "sample": parse_fraction,
}
"""The checks of parameters that are not in a record."""

NULLABLE = frozenset({"max_memory"})
"""Options whose None does not stand for the default: it means that there is no budget."""


@functools.cache
def get_options(record: Callable[..., object]) -> dict[str, Option]:
    """Return the options of a record; those that every writing verb has come last."""
    names = list(record.__annotations__)
    common = [*FormatOption.__annotations__, *WriteOptions.__annotations__]
    names.sort(key=lambda name: common.index(name) if name in common else -1)
    differing = RECORD_OPTIONS.get(record, {})
    return {name: differing[name] if name in differing else OPTIONS[name] for name in names}


def annotation_of(record: Callable[..., object], name: str) -> str:
    """Return the type of an option, as its record has it."""
    kind = record.__annotations__[name]
    text = kind.__forward_arg__ if isinstance(kind, ForwardRef) else inspect.formatannotation(kind)
    return text.removeprefix("Required[").removesuffix("]") if "Required[" in text else text


def pick_fields(record: Callable[..., T], options: Mapping[str, Any], **more: Any) -> T:  # noqa: ANN401  # whatever the fields take
    """Return a record (`Value`) of those options that are fields of it."""
    fields: tuple[str, ...] = record.__struct_fields__  # type: ignore[attr-defined]
    return record(**{name: options[name] for name in fields if name in options}, **more)


def checked(record: Callable[..., T], given: Mapping[str, object]) -> T:
    """Return all options of a record: those that are given, checked, and defaults for the others."""
    values = {}
    for name, option in get_options(record).items():
        value = given.get(name)
        if value is not None:
            values[name] = option.read(value, f"{name}=") if option.read else value
        elif name in given and name in NULLABLE:
            values[name] = None
        else:
            values[name] = option.default
    return cast("T", values)


@overload
def validate_arguments(verb: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def validate_arguments(**readers: Reader) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def validate_arguments(verb: Callable[P, R] | None = None, /, **readers: Reader) -> object:
    """Decorate a verb so that it only receives arguments that are checked.

    Parameters are checked by their names; `readers` take precedence over the checks of all verbs. An
    unknown keyword is a `TypeError` that suggests the closest name.
    """
    if verb is None:
        return lambda verb: _validate(verb, readers)
    return _validate(verb, readers)


def _validate(verb: Callable[P, R], readers: Mapping[str, Reader]) -> Callable[P, R]:
    signature = inspect.signature(verb)
    parameters = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    positional = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    record = _record_of(verb)
    options = {} if record is None else get_options(record)
    required = [name for name, option in options.items() if option.default is ...]
    defaults = {name: options[name].default for name in options if name not in required}

    checks = {parameter.name: _reader_of(parameter) for parameter in parameters}
    checks.update((name, option.read) for name, option in options.items())
    checks.update((name, reader) for name, reader in readers.items() if name in checks)
    # None stands for these values.
    absent = {one.name: one.default for one in parameters if one.default is not one.empty}
    absent.update(defaults)
    absent.update((name, None) for name in NULLABLE if name in absent)

    @functools.wraps(verb)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        checked_values = []
        for name, value in (*zip(positional, args, strict=False), *kwargs.items()):
            if name not in checks:
                raise _unexpected_keyword(verb.__name__, name, checks)
            reader = checks[name]
            if value is None and name in absent:
                value = absent[name]
            elif reader is not None:
                value = reader(value, f"{name}=")
            checked_values.append(value)
        for name in required:
            if name not in kwargs:
                raise BadArgumentType(f"{verb.__name__}() needs {name}=: {options[name].help}")

        count = min(len(positional), len(args))
        checked_kwargs = dict(zip(kwargs, checked_values[count:], strict=True))
        try:
            # Arguments beyond the known ones are passed on for Python's own error.
            return verb(*checked_values[:count], *args[count:], **defaults | checked_kwargs)  # type: ignore[arg-type]  # the same parameters, of narrower kinds
        except (RanksFailed, RankLost) as error:
            # Every rank prints this error. The frames inside of Holdfast are the same on all of them.
            cut_traceback(error)
            raise

    if record is not None:
        keywords = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation_of(record, name),
                default=defaults.get(name, inspect.Parameter.empty),
            )
            for name in options
        ]  # fmt: skip
        call.__signature__ = signature.replace(parameters=[*parameters, *keywords])  # type: ignore[attr-defined]
        width = max(map(len, options))
        lines = [f"    {name:{width}}  {option.help}" for name, option in options.items()]
        call.__doc__ = "\n".join([inspect.cleandoc(verb.__doc__ or ""), "", "Options:", *lines])
    return call


def _reader_of(parameter: inspect.Parameter) -> Reader | None:
    """Return the check of a parameter that is not in a record."""
    name = parameter.name
    if name in OPTIONS and OPTIONS[name].read:
        return OPTIONS[name].read
    return READERS.get(name) or (arguments.flag if isinstance(parameter.default, bool) else None)


def _record_of(verb: Callable[..., object]) -> type | None:
    """Return the record that a verb names in its signature: `**options: Unpack[ConvertOptions]`."""
    for annotation in map(str, verb.__annotations__.values()):
        if annotation.startswith("Unpack["):
            # As text: the other names of the signature may exist for type checkers only.
            name = annotation.removeprefix("Unpack[").removesuffix("]")
            return cast("type", verb.__globals__[name])
    return None


def _unexpected_keyword(verb: str, name: str, known: Iterable[str]) -> BadArgumentType:
    import difflib  # Only for misspelled names.

    similar = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {similar[0]!r}?" if similar else f"it takes {', '.join(known)}"
    return BadArgumentType(
        f"{verb}() got an unexpected keyword argument {name!r}; {hint}", found=name
    )
