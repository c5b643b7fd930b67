"""The options of the verbs: each stands here once, with its default, its check, its flag and its help.

    class ConvertOptions(EditingOptions, FormatOption, WriteOptions, total=False):
        dequantize: Annotated[bool, Option(False, "of GGUF: the numbers that its quantised blocks stand for")]

    @validated
    def convert(src, dst, **options: Unpack[ConvertOptions]) -> Conversion: ...

A verb names its record in its signature. From the record come `inspect.signature` and `help()` (`validated`), the flags and the
`--help` of the command (cli/options.py), and the page of the reference. A verb sees every option of its record, checked, with the
default where nothing was given; None stands for the default as well. Records of the layers below (`Edits`, `Writing`, `Selection`)
are filled from it by the names of their fields (`pick`).
"""

# No `from __future__ import annotations`: the annotations are data.

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ForwardRef,
    Literal,
    NamedTuple,
    ParamSpec,
    Required,
    TypedDict,
    TypeVar,
    cast,
    get_args,
    get_origin,
    overload,
)

from holdfast.core import arguments
from holdfast.core.arguments import AnyDType, Reader
from holdfast.core.limits import Limits
from holdfast.core.quantities import Size, seconds, share, whole_number
from holdfast.errors import BadArgumentType

if TYPE_CHECKING:
    from holdfast.core.group import AnyGroup
    from holdfast.extras.maps.find import AnyMap

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

MAX_MEMORY = (
    "1GiB"  # What verbs keep to that make a checkpoint of a checkpoint, unless told otherwise.
)
DEADLINE = 60.0  # After so many seconds without a sign of life, a rank is lost.
DIGESTS = ("xxh3-128", "sha256")

Progress = Callable[[int], None]  # Called with how many bytes more are done.
CopyConfig = (
    bool | str | os.PathLike[str]
)  # Whether config and tokenizer come along, or the folder that they are taken from.


class Option(NamedTuple):
    """An option: what it is where nobody says, what it means, and how it is given at a shell."""

    default: object
    """An ellipsis: there is none, it must be given."""
    help: str
    word: str = ""
    """What comes behind the flag: SIZE, N, GLOB; nothing, for what is True or False."""
    read: Reader | None = None
    """What checks a value; none where it may be anything."""
    many: bool = False
    """Whether the flag may be given several times."""
    choices: tuple[str, ...] = ()
    flag: str | None = None
    """The flag, where it is not called as the option is; empty: a command line has none."""
    short: str = ""
    given: object = True
    """What a flag without a word stands for."""

    def flag_of(self, name: str) -> str:
        return f"--{name.replace('_', '-')}" if self.flag is None else self.flag


class ReadOptions(TypedDict, total=False):
    """What every verb takes that reads tensors."""

    limits: Annotated[
        Limits | None,
        Option(None, "what a file may ask for, at the most", read=arguments.limits, flag=""),
    ]
    threads: Annotated[int | None, Option(None, "how many threads", "N", arguments.count)]
    progress: Annotated[
        Progress | None,
        Option(None, "called with numbers of bytes", read=arguments.progress, flag=""),
    ]


class OverwriteOptions(TypedDict, total=False):
    """What every verb takes that puts something in place."""

    overwrite: Annotated[bool | None, Option(False, "replace what is there")]
    durable: Annotated[bool, Option(True, "wait for the disk (fsync)")]


class CheckOptions(TypedDict, total=False):
    read_back: Annotated[bool, Option(True, "read what was written before publishing it")]
    max_memory: Annotated[
        Size | None, Option(MAX_MEMORY, "use no more than this (1GiB)", "SIZE", arguments.size)
    ]


class DryRunOption(TypedDict, total=False):
    dry_run: Annotated[
        bool, Option(False, "say what would be written, and write nothing", short="-n")
    ]


class WriteOptions(OverwriteOptions, CheckOptions, DryRunOption, ReadOptions, total=False):
    """What every verb takes that writes a checkpoint."""


class FormatOption(TypedDict, total=False):
    folder: Annotated[bool, Option(False, "DST is a folder, as with a slash at its end")]
    format: Annotated[
        str | None, Option(None, "the format, whatever the suffix", "FORMAT", arguments.text)
    ]


class InPlaceOption(TypedDict, total=False):
    in_place: Annotated[bool, Option(False, "write it in place of SRC, atomically")]


class StoreOption(TypedDict, total=False):
    store: Annotated[
        object | None, Option(None, "an obstore store that the target is a key in", flag="")
    ]


class GroupOption(TypedDict, total=False):
    group: Annotated["AnyGroup | None", Option(
        None, "the ranks that share the work: holdfast.torch.group(); every one of them calls this", read=arguments.group, flag=""
    )]  # fmt: skip


class MapOption(TypedDict, total=False):
    map: Annotated["AnyMap | None", Option(
        None, "see SRC in the layout of another framework: qwen3:hf:megatron; auto", "MAP", arguments.map_name
    )]  # fmt: skip


class ShardOption(TypedDict, total=False):
    max_shard_size: Annotated[
        Size | None,
        Option(None, "split into files of at most 5GB, 500MiB, …", "SIZE", arguments.size),
    ]


class FolderOptions(ShardOption, total=False):
    """What is in a directory that is written."""

    copy_config: Annotated[CopyConfig, Option(
        True, "to a directory: where config and tokenizer files come from; by default from SRC", "DIR", arguments.folder_or_flag
    )]  # fmt: skip


class EditingOptions(TypedDict, total=False):
    dtype: Annotated["AnyDType | Mapping[str, AnyDType] | None", Option(
        None, "cast floating-point tensors: bf16, f16, f32, …; or those of a name: '*norm*=f32' ('=keep': not at all)",
        "[GLOB=]DTYPE", arguments.dtypes, many=True,
    )]  # fmt: skip
    keep: Annotated[
        str | Iterable[str],
        Option((), "only names that match", "GLOB", arguments.patterns, many=True),
    ]
    drop: Annotated[
        str | Iterable[str],
        Option((), "all but names that match", "GLOB", arguments.patterns, many=True),
    ]
    rename: Annotated[
        Mapping[str, str] | Iterable[tuple[str, str]],
        Option((), "'model.*=*'", "OLD=NEW", arguments.pairs, many=True),
    ]
    tensors_only: Annotated[bool, Option(False, "leave out what is no tensor")]


class ConvertOptions(
    EditingOptions,
    MapOption,
    FolderOptions,
    StoreOption,
    FormatOption,
    GroupOption,
    WriteOptions,
    total=False,
):
    model: Annotated[
        str | None,
        Option(None, "of a package: the state dict of this model", "NAME", arguments.text),
    ]
    constants: Annotated[bool, Option(False, "of a package: with the constants of its programs")]
    sample_inputs: Annotated[
        bool, Option(False, "of a package: with the inputs that they were exported with")
    ]
    dequantize: Annotated[
        bool, Option(False, "of GGUF: the numbers that its quantised blocks stand for")
    ]
    keep_tree: Annotated[
        bool,
        Option(True, "safetensors: keep what is no tensor in the header, for Holdfast", flag=""),
    ]
    resume: Annotated[bool, Option(False, "to a directory: keep what an interrupted try finished")]


class EditOptions(
    InPlaceOption,
    EditingOptions,
    FolderOptions,
    FormatOption,
    GroupOption,
    WriteOptions,
    total=False,
):
    set_metadata: Annotated[
        Mapping[str, str] | None,
        Option(None, "set metadata", "KEY=VALUE", arguments.texts, many=True, flag="--set"),
    ]
    unset_metadata: Annotated[
        str | Iterable[str],
        Option((), "take metadata out", "KEY", arguments.patterns, many=True, flag="--unset"),
    ]


class CopyOptions(StoreOption, GroupOption, WriteOptions, total=False):
    """What `copy` takes."""


class InPlaceOptions(InPlaceOption, FormatOption, WriteOptions, total=False):
    """What `tie` and `compact` take."""


class PruneOptions(FolderOptions, FormatOption, GroupOption, WriteOptions, total=False):
    masks: Annotated[str | None, Option(
        None, "write the masks too, into the directory DST; or only them, to DST", "HOW", arguments.text, choices=("beside", "only")
    )]  # fmt: skip


class PackageOptions(WriteOptions, total=False):
    deduplicate: Annotated[str, Option(
        "storage", "store equal tensors once, wherever they are; reads what looks equal", read=arguments.text, flag="--content",
        given="content",
    )]  # fmt: skip
    format: Annotated[
        str | None, Option(None, "the format, whatever the suffix", "PACKAGE", arguments.text)
    ]


class ReplaceOptions(InPlaceOption, WriteOptions, total=False):
    weights: Required[
        Annotated[
            object, Option(..., "a state dict, an open checkpoint, or what `open` takes", flag="")
        ]
    ]
    model: Annotated[
        str | None,
        Option(None, "of an archive of several models: which", "NAME", arguments.text, flag=""),
    ]


class ReshardOptions(MapOption, GroupOption, WriteOptions, total=False):
    mesh: Required[
        Annotated[
            Mapping[str, int] | str,
            Option(..., "the ranks: 'dp=2,tp=4'", "NAME=N,…", arguments.counts),
        ]
    ]


class SaveOptions(ShardOption, StoreOption, FormatOption, WriteOptions, total=False):
    metadata: Annotated[
        Mapping[str, str] | None, Option(None, "text about the whole", read=arguments.texts)
    ]
    keep_tree: Annotated[
        bool, Option(False, "safetensors: keep what is no tensor in the header, for Holdfast")
    ]
    base: Annotated[
        str | os.PathLike[str] | None,
        Option(None, "the step before: what did not change is not written again"),
    ]
    hashes: Annotated[
        bool, Option(False, "what did not change since this save need not be written again")
    ]


class RankStateOptions(TypedDict, total=False):
    """What every rank says of its part of a state."""

    metadata: Annotated[
        Mapping[str, str] | None, Option(None, "text about the whole", read=arguments.texts)
    ]
    values: Annotated[Literal["agree", "first"], Option(
        "agree", "must values that are no tensors be the same on all ranks?", read=arguments.one_of("agree", "first")
    )]  # fmt: skip
    per_rank: Annotated[
        str | Sequence[str],
        Option((), "names of what each rank keeps for itself", read=arguments.patterns),
    ]
    check_replicas: Annotated[
        bool, Option(True, "compare plain tensors of all ranks by their checksums")
    ]
    overwrite: Annotated[bool | None, Option(False, "replace what is there")]
    threads: Annotated[int | None, Option(None, "how many threads", "N", arguments.count)]
    progress: Annotated[
        Progress | None, Option(None, "called with numbers of bytes", read=arguments.progress)
    ]


class ShardedOptions(RankStateOptions, StoreOption, total=False):
    format: Annotated[Literal["native", "dcp", "safetensors"], Option(
        "native", "the format: native, dcp or safetensors", read=arguments.text
    )]  # fmt: skip
    durable: Annotated[bool, Option(True, "wait for the disk (fsync)")]
    deadline: Annotated[
        float,
        Option(DEADLINE, "a rank without a sign of life for so many seconds is lost", read=seconds),
    ]
    when_busy: Annotated[Literal["wait", "refuse"], Option(
        "wait", "what to do while another save of this process goes on", read=arguments.one_of("wait", "refuse")
    )]  # fmt: skip
    base: Annotated[
        str | os.PathLike[str] | None,
        Option(None, "the step before: what did not change is not written again"),
    ]
    hashes: Annotated[
        bool, Option(False, "what did not change since this save need not be written again")
    ]


class HostMemoryOption(TypedDict, total=False):
    max_host_memory: Annotated[
        int | None,
        Option(
            None,
            "page-locked memory for copies of what is on GPUs, at the most",
            read=arguments.size,
        ),
    ]


class AsyncShardedOptions(ShardedOptions, HostMemoryOption, total=False):
    """What `async_save_sharded` takes."""


class RankStepOptions(RankStateOptions, total=False):
    metrics: Annotated[
        Mapping[str, float] | None, Option(None, "numbers of this step", read=arguments.metrics)
    ]


class AsyncRankStepOptions(RankStepOptions, HostMemoryOption, total=False):
    """What `holdfast.torch.Run.async_save` takes."""


class SealOptions(OverwriteOptions, DryRunOption, ReadOptions, total=False):
    step: Annotated[
        int | None, Option(None, "the step, whatever the files say", "STEP", arguments.step)
    ]
    metrics: Annotated[Mapping[str, float] | None, Option(
        None, "a metric; in place of what the files say", "NAME=VALUE", arguments.metrics, many=True, flag="--metric"
    )]  # fmt: skip
    ran: Annotated[
        float | str | None,
        Option(None, "for how many seconds the training had run", read=seconds, flag=""),
    ]
    digest: Annotated[str, Option(
        "xxh3-128", "how files are digested (xxh3-128)", "HOW", arguments.one_of(*DIGESTS), choices=DIGESTS
    )]  # fmt: skip


OTHERS: dict[str, Reader] = {
    "allow": arguments.allowed,
    "bins": lambda value, name: whole_number(value, name, least=0, most=arguments.MOST),
    "by": arguments.text,
    "extra_files": arguments.contents,
    "filter": arguments.text,
    "models": arguments.mapping,
    "opset_version": arguments.versions,
    "pattern": arguments.text,
    "prefix": arguments.text,
    "sample": share,
}

SELF = frozenset({"max_memory"})  # Where None is no word for the default: no budget at all.


OF_STATES: Mapping[str, object] = {"read_back": False, "max_memory": None}
"""Other defaults, of verbs that save states: what is in memory need not be streamed, and is not read back."""


@functools.cache
def options_of(record: Callable[..., object]) -> dict[str, tuple[object, Option]]:
    """The options of a record, each with its type; those that every writing verb has come last."""
    common = [
        name
        for name in (*FormatOption.__annotations__, *WriteOptions.__annotations__)
        if name in record.__annotations__
    ]
    made: dict[str, tuple[object, Option]] = {}
    for name in (*(name for name in record.__annotations__ if name not in common), *common):
        kind = record.__annotations__[name]
        if isinstance(kind, ForwardRef):
            # The module of the record has its annotations as text.
            kind = eval(kind.__forward_code__, vars(sys.modules[record.__module__]))
        annotated = get_args(kind)[0] if get_origin(kind) is cast(object, Required) else kind
        option = annotated.__metadata__[0]
        if isinstance(option.default, bool) and option.read is None:
            option = option._replace(read=arguments.flag)
        made[name] = annotated.__origin__, option
    return made


@functools.cache
def readers() -> dict[str, Reader]:
    """What checks a parameter, by its name: it takes the same in every verb."""
    records = [one for one in globals().values() if isinstance(one, type) and issubclass(one, dict)]
    known = {
        name: option.read for record in records for name, (_, option) in options_of(record).items()
    }
    return OTHERS | {name: reader for name, reader in known.items() if reader is not None}


def pick(record: Callable[..., T], options: Mapping[str, Any], **more: Any) -> T:  # noqa: ANN401  # whatever the fields take
    """A record (`Value`) of those options that are fields of it."""
    fields: tuple[str, ...] = record.__struct_fields__  # type: ignore[attr-defined]
    return record(**{name: options[name] for name in fields if name in options}, **more)


def checked(
    record: Callable[..., T],
    given: Mapping[str, object],
    defaults: Mapping[str, object] = MappingProxyType({}),
) -> T:
    """All options of a record: what was given, checked, and the defaults."""
    read, absent = _checks(record, defaults)
    return cast("T", absent | {name: read(name, value) for name, value in given.items()})


def _checks(
    record: Callable[..., object], defaults: Mapping[str, object]
) -> tuple[Callable[[str, object], object], dict[str, object]]:
    options = {name: option for name, (_, option) in options_of(record).items()}
    absent = {name: defaults.get(name, option.default) for name, option in options.items()}

    def read(name: str, value: object) -> object:
        reader = options[name].read
        if value is None and options[name].default is not ...:
            return None if name in SELF else absent[name]
        return value if reader is None else reader(value, f"{name}=")

    return read, {name: value for name, value in absent.items() if value is not ...}


@overload
def validated(verb: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def validated(
    *, defaults: Mapping[str, object] = ..., **own: Reader
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def validated(
    verb: Callable[P, R] | None = None,
    /,
    *,
    defaults: Mapping[str, object] = MappingProxyType({}),
    **own: Reader,
) -> object:
    """A verb that is only ever called with what it takes. Its parameters are checked by their names; `own` checks stand before
    those of all verbs. `defaults` are those of options that this verb means otherwise. An option that it does not have is a
    `TypeError` that says the nearest name."""
    return (
        _validated(verb, own, defaults)
        if verb is not None
        else lambda verb: _validated(verb, own, defaults)
    )


def _validated(
    verb: Callable[P, R], own: Mapping[str, Reader], defaults: Mapping[str, object]
) -> Callable[P, R]:
    signature = inspect.signature(verb)
    named = {
        name: one for name, one in signature.parameters.items() if one.kind is not one.VAR_KEYWORD
    }
    places = [name for name, one in named.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    by_name = readers()
    checks = {name: own.get(name) or by_name.get(name) for name in named}
    checks |= {
        name: arguments.flag
        for name, one in named.items()
        if not checks[name] and isinstance(one.default, bool)
    }
    absent = {
        name: None if name in SELF else one.default
        for name, one in named.items()
        if one.default is not one.empty
    }
    read_places = [at for at, name in enumerate(places) if checks[name] or name in absent]
    record = _record(verb)
    read_option, given_none = _checks(record, defaults) if record is not None else (None, {})

    def read(name: str, value: object) -> object:
        if name not in checks:
            if read_option is None or name not in known:
                raise _unexpected(verb.__name__, name, known)
            return (
                own[name](value, f"{name}=")
                if name in own and value is not None
                else read_option(name, value)
            )
        if value is None and name in absent:
            return absent[name]
        check = checks[name]
        return value if check is None else check(value, f"{name}=")

    @functools.wraps(verb)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given: list[object] = [*args]
        for at in read_places:
            if at >= len(given):
                break
            given[at] = read(places[at], given[at])
        for name, value in kwargs.items():
            kwargs[name] = read(name, value)
        missing = [name for name in required if name not in kwargs]
        if missing:
            raise BadArgumentType(
                f"{verb.__name__}() needs {missing[0]}=: {options[missing[0]][1].help}"
            )
        return verb(*given, **given_none | kwargs)  # type: ignore[arg-type]  # the same parameters, of narrower kinds

    options = {} if record is None else options_of(record)
    known = [*named, *options]
    required = [name for name in options if name not in given_none]
    if record is not None:
        shown = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, annotation=written(kind),
                default=inspect.Parameter.empty if option.default is ... else given_none[name],
            )
            for name, (kind, option) in options.items()
        ]  # fmt: skip
        call.__signature__ = signature.replace(parameters=[*named.values(), *shown])  # type: ignore[attr-defined]
        call.__doc__ = f"{inspect.cleandoc(verb.__doc__ or '')}\n\n{described(options)}"
    return call


def written(kind: object) -> str:
    if isinstance(kind, ForwardRef):
        return kind.__forward_arg__
    return re.sub(r"\b[a-z_.]+\.(?=[A-Z])", "", inspect.formatannotation(kind))


def described(options: Mapping[str, tuple[object, Option]]) -> str:
    width = max(map(len, options))
    return "\n".join(
        [
            "Options:",
            *(f"    {name:{width}}  {option.help}" for name, (_, option) in options.items()),
        ]
    )


def _record(verb: Callable[..., object]) -> type | None:
    """The record that a verb names in its signature: `**options: Unpack[ConvertOptions]`."""
    rest = [
        one.annotation
        for one in inspect.signature(verb).parameters.values()
        if one.kind is one.VAR_KEYWORD
    ]
    if not rest or not isinstance(rest[0], str):
        return get_args(rest[0])[0] if rest else None
    # As text: nothing else of the signature has to be there when it is looked at.
    return (
        cast("type", vars(sys.modules[verb.__module__])[rest[0][7:-1]])
        if rest[0].startswith("Unpack[")
        else None
    )


def _unexpected(verb: str, name: str, known: Iterable[str]) -> BadArgumentType:
    import difflib  # for those who misspelled

    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
    return BadArgumentType(
        f"{verb}() got an unexpected keyword argument {name!r}; {hint}", found=name
    )
