"""The options of the verbs: their types in option sets, everything else in one table.

    class ConvertOptions(EditingOptions, FormatOption, WriteOptions, total=False):
        dequantize: bool

    OPTIONS["dequantize"] = Option(False, "decode the quantized blocks of GGUF", check_flag)

    @validate_arguments
    def convert(src, dst, **options: Unpack[ConvertOptions]) -> Conversion: ...

A verb names an option set in its signature, where type checkers read it. `OPTIONS` has the default,
the help, the check and the flag of each option by its name, because an option means the same in every
verb. Where one verb differs, the table has an entry with the name of its option set in front, such as
"SaveOptions.overwrite". `inspect.signature`, `help()`, the flags and the `--help` of the command
(cli/options.py), and the page of the reference are made from both.

A verb receives every option of its set, checked, with the default if the caller did not pass it or
passed None. `pick_fields` hands some of them on to values of lower layers, such as `Edits` and
`Writing`, by the names of their fields.
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

from holdfast.core.arguments import (
    AnyDType,
    ArgumentCheck,
    check_allowed,
    check_bin_count,
    check_count,
    check_counts,
    check_dtypes,
    check_extra_files,
    check_flag,
    check_group,
    check_limits,
    check_map,
    check_mapping,
    check_mesh,
    check_metrics,
    check_patterns,
    check_progress,
    check_renames,
    check_size,
    check_step,
    check_text,
    check_texts,
    make_choice_check,
)
from holdfast.core.quantities import Size, parse_fraction, parse_seconds
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
"""The seconds without a heartbeat after which a rank counts as lost."""

DIGESTS = ("xxh3-128", "sha256")
"""The algorithms for the digests in a seal."""

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
    """The options of every verb that publishes a result."""

    overwrite: bool | None
    durable: bool


class CheckOptions(TypedDict, total=False):
    """The options that guard a save against damage and too much memory."""

    read_back: bool
    max_memory: Size | None


class DryRunOption(TypedDict, total=False):
    """The option of a verb that can report what it would write."""

    dry_run: bool


class WriteOptions(OverwriteOptions, CheckOptions, DryRunOption, ReadOptions, total=False):
    """The options of every verb that writes a checkpoint."""


class FormatOption(TypedDict, total=False):
    """The options that choose the format of what is written."""

    folder: bool
    format: str | None


class InPlaceOption(TypedDict, total=False):
    """The option of a verb that can replace its source."""

    in_place: bool


class StoreOption(TypedDict, total=False):
    """The option of a verb that can write into an object store of the caller."""

    store: object | None


class GroupOption(TypedDict, total=False):
    """The option of a verb whose work several ranks can share."""

    group: AnyGroup | None


class MapOption(TypedDict, total=False):
    """The option of a verb that can convert between layouts of a family of models."""

    map: AnyMap | None


class ShardOption(TypedDict, total=False):
    """The option of a verb that can write several data files."""

    max_shard_size: Size | None


class FolderOptions(ShardOption, total=False):
    """The options of a verb that can write a directory."""

    copy_config: CopyConfig


class EditingOptions(TypedDict, total=False):
    """The options that choose, rename and cast tensors."""

    dtype: AnyDType | Mapping[str, AnyDType] | None
    keep: str | Iterable[str]
    drop: str | Iterable[str]
    rename: Mapping[str, str] | Iterable[tuple[str, str]]
    tensors_only: bool


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
    """The options of `convert`."""

    model: str | None
    constants: bool
    sample_inputs: bool
    dequantize: bool
    keep_tree: bool
    resume: bool


class EditOptions(
    InPlaceOption,
    EditingOptions,
    FolderOptions,
    FormatOption,
    GroupOption,
    WriteOptions,
    total=False,
):
    """The options of `edit`."""

    set_metadata: Mapping[str, str] | None
    unset_metadata: str | Iterable[str]


class CopyOptions(StoreOption, GroupOption, WriteOptions, total=False):
    """The options of `copy`."""


class InPlaceOptions(InPlaceOption, FormatOption, WriteOptions, total=False):
    """The options of `tie` and `compact`."""


class PruneOptions(FolderOptions, FormatOption, GroupOption, WriteOptions, total=False):
    """The options of `prune`."""

    masks: str | None


class PackageOptions(WriteOptions, total=False):
    """The options of `package`."""

    deduplicate: str
    format: str | None


class ReplaceOptions(InPlaceOption, WriteOptions, total=False):
    """The options of `replace_weights`."""

    weights: Required[object]
    model: str | None


class ReshardOptions(MapOption, GroupOption, WriteOptions, total=False):
    """The options of `reshard`."""

    mesh: Required[Mapping[str, int] | str]


class SaveOptions(ShardOption, StoreOption, FormatOption, WriteOptions, total=False):
    """The options of `save`."""

    metadata: Mapping[str, str] | None
    keep_tree: bool
    base: str | os.PathLike[str] | None
    hashes: bool


class RankStateOptions(TypedDict, total=False):
    """The options of a state that is spread over several ranks."""

    metadata: Mapping[str, str] | None
    values: Literal["agree", "first"]
    per_rank: str | Sequence[str]
    check_replicas: bool
    overwrite: bool | None
    threads: int | None
    progress: Progress | None


class ShardedOptions(RankStateOptions, StoreOption, total=False):
    """The options of `holdfast.torch.save_sharded`."""

    format: Literal["native", "dcp", "safetensors"]
    durable: bool
    deadline: float
    when_busy: Literal["wait", "refuse"]
    base: str | os.PathLike[str] | None
    hashes: bool


class HostMemoryOption(TypedDict, total=False):
    """The option of a save that copies a state from GPUs in the background."""

    max_host_memory: int | None


class AsyncShardedOptions(ShardedOptions, HostMemoryOption, total=False):
    """The options of `async_save_sharded`."""


class RankStepOptions(RankStateOptions, total=False):
    """The options of `holdfast.torch.Run.save`."""

    metrics: Mapping[str, float] | None


class AsyncRankStepOptions(RankStepOptions, HostMemoryOption, total=False):
    """The options of `holdfast.torch.Run.async_save`."""


class SealOptions(OverwriteOptions, DryRunOption, ReadOptions, total=False):
    """The options of `seal`."""

    step: int | None
    metrics: Mapping[str, float] | None
    ran: float | str | None
    digest: str


class Option(NamedTuple):
    """The default of an option, its help, its check, and its flag on the command line."""

    default: object
    """The value if the caller passes none. An ellipsis means that the option is required."""
    help: str
    check: ArgumentCheck | None = None
    """Checks a value that the caller passes. None if every value is allowed."""
    metavar: str = ""
    """The word behind the flag: SIZE, N, GLOB. Empty if the flag takes no value."""
    is_repeatable: bool = False
    """Whether the flag may be given several times."""
    choices: tuple[str, ...] = ()
    """The words that the flag accepts. Empty if it accepts any."""
    flag: str | None = None
    """The flag if it differs from the name of the option. Empty if the command line has none."""
    short_flag: str = ""
    flag_value: object = True
    """The value that a flag without a word stands for."""

    def get_flag(self, name: str) -> str:
        """Return the flag of this option, whose name is `name`: "--max-memory"."""
        if self.flag is not None:
            return self.flag
        return "--" + name.replace("_", "-")


READ_BACK_OF_STATES = Option(
    False,
    "read the written data again and compare it before publishing (default: no)",
    check_flag,
)
MAX_MEMORY_OF_STATES = Option(
    None,
    "memory limit for buffers (default: none)",
    check_size,
    metavar="SIZE",
)
"""A state in memory need not be streamed, and it can be saved again if the disk fails."""

FORMAT_OF_RANKS = Option(
    "native",
    "output format: native, dcp or safetensors (default: native)",
    check_text,
)

OPTIONS: dict[str, Option] = {
    "limits": Option(
        None,
        "bounds for what a file may demand, such as the number of tensors: holdfast.Limits()",
        check_limits,
        flag="",
    ),
    "threads": Option(
        None,
        "number of threads (default: chosen for this machine)",
        check_count,
        metavar="N",
    ),
    "progress": Option(
        None,
        "function to call with the number of bytes done since its last call",
        check_progress,
        flag="",
    ),
    "overwrite": Option(
        False,
        "replace an existing file or folder (default: stop with an error)",
        check_flag,
    ),
    "SaveOptions.overwrite": Option(
        None,
        "replace an existing file or folder (default: replace only a file)",
        check_flag,
    ),
    "durable": Option(
        True,
        "wait until the data is on the disk, with fsync (default: yes)",
        check_flag,
    ),
    "read_back": Option(
        True,
        "read the written data again and compare it before it appears at DST (default: yes)",
        check_flag,
    ),
    "SaveOptions.read_back": READ_BACK_OF_STATES,
    "PackageOptions.read_back": READ_BACK_OF_STATES,
    "max_memory": Option(
        MAX_MEMORY,
        "memory limit for buffers (default: 1GiB)",
        check_size,
        metavar="SIZE",
    ),
    "SaveOptions.max_memory": MAX_MEMORY_OF_STATES,
    "PackageOptions.max_memory": MAX_MEMORY_OF_STATES,
    "dry_run": Option(
        False,
        "report the files, sizes and free space, and write nothing",
        check_flag,
        short_flag="-n",
    ),
    "folder": Option(
        False,
        "write a folder, as if DST ended with a slash",
        check_flag,
    ),
    "format": Option(
        None,
        "output format (default: from the suffix of DST)",
        check_text,
        metavar="FORMAT",
    ),
    "PackageOptions.format": Option(
        None,
        "output format (default: from the suffix of DST)",
        check_text,
        metavar="PACKAGE",
    ),
    "ShardedOptions.format": FORMAT_OF_RANKS,
    "AsyncShardedOptions.format": FORMAT_OF_RANKS,
    "in_place": Option(
        False,
        "replace the source atomically instead of writing to DST",
        check_flag,
    ),
    "store": Option(
        None,
        "obstore store that contains the target; DST is a key in it",
        flag="",
    ),
    "group": Option(
        None,
        "ranks that share the work, from holdfast.torch.group(); call the function on every rank",
        check_group,
        flag="",
    ),
    "map": Option(
        None,
        "layout map to apply, such as 'qwen3:hf:megatron' (FAMILY:FROM:TO); 'auto' detects the "
        "family and converts to Hugging Face names",
        check_map,
        metavar="MAP",
    ),
    "max_shard_size": Option(
        None,
        "split the tensors into files of at most this size, such as 5GB",
        check_size,
        metavar="SIZE",
    ),
    "copy_config": Option(
        True,
        "if DST is a directory, copy config and tokenizer files from this folder (default: SRC)",
        metavar="DIR",
    ),
    "dtype": Option(
        None,
        "cast floating-point tensors to bf16, f16, f32, …; '*norm*=f32' casts only tensors whose "
        "names match, '*norm*=keep' leaves them unchanged",
        check_dtypes,
        metavar="[GLOB=]DTYPE",
        is_repeatable=True,
    ),
    "keep": Option(
        (),
        "keep only names that match; repeatable",
        check_patterns,
        metavar="GLOB",
        is_repeatable=True,
    ),
    "drop": Option(
        (),
        "remove names that match; repeatable",
        check_patterns,
        metavar="GLOB",
        is_repeatable=True,
    ),
    "rename": Option(
        (),
        "rename tensors: 'model.*=*' removes the prefix 'model.'; repeatable",
        check_renames,
        metavar="OLD=NEW",
        is_repeatable=True,
    ),
    "tensors_only": Option(
        False,
        "leave out values that are not tensors",
        check_flag,
    ),
    "model": Option(
        None,
        "extract the state dict of this model from a .pt2 package",
        check_text,
        metavar="NAME",
    ),
    "ReplaceOptions.model": Option(
        None,
        "model to replace, if the archive has several",
        check_text,
        metavar="NAME",
        flag="",
    ),
    "constants": Option(
        False,
        "include the constants of the programs in a .pt2 package",
        check_flag,
    ),
    "sample_inputs": Option(
        False,
        "include the sample inputs of the programs in a .pt2 package",
        check_flag,
    ),
    "dequantize": Option(
        False,
        "decode the quantized blocks of GGUF to floating point",
        check_flag,
    ),
    "keep_tree": Option(
        True,
        "safetensors: store non-tensor values in the header, where Holdfast finds them",
        check_flag,
        flag="",
    ),
    "SaveOptions.keep_tree": Option(
        False,
        "safetensors: store non-tensor values in the header, where Holdfast finds them",
        check_flag,
    ),
    "resume": Option(
        False,
        "continue an interrupted conversion to a directory: reuse its finished files",
        check_flag,
    ),
    "set_metadata": Option(
        None,
        "set a metadata entry; repeatable",
        check_texts,
        metavar="KEY=VALUE",
        is_repeatable=True,
        flag="--set",
    ),
    "unset_metadata": Option(
        (),
        "remove a metadata entry; repeatable",
        check_patterns,
        metavar="KEY",
        is_repeatable=True,
        flag="--unset",
    ),
    "masks": Option(
        None,
        "write the pruning masks: 'beside' the weights in the directory DST, or 'only' the masks",
        check_text,
        metavar="HOW",
        choices=("beside", "only"),
    ),
    "deduplicate": Option(
        "storage",
        "store tensors with equal content once, even if they come from different files",
        check_text,
        flag="--content",
        flag_value="content",
    ),
    "weights": Option(
        ...,
        "a state dict, an open checkpoint, or the path of a checkpoint",
        flag="",
    ),
    "mesh": Option(
        ...,
        "mesh of ranks, such as dp=2,tp=4",
        check_mesh,
        metavar="NAME=N,…",
    ),
    "metadata": Option(
        None,
        "text entries to store with the checkpoint, by name",
        check_texts,
    ),
    "base": Option(
        None,
        "previous checkpoint: tensors that are unchanged since then are not written again",
    ),
    "hashes": Option(
        False,
        "store content hashes, so that a later save can use this checkpoint as its base",
        check_flag,
    ),
    "values": Option(
        "agree",
        "'agree': fail if values that are not tensors differ between ranks; "
        "'first': save the values of the first rank",
        make_choice_check("agree", "first"),
    ),
    "per_rank": Option(
        (),
        "names of values that every rank saves for itself",
        check_patterns,
    ),
    "check_replicas": Option(
        True,
        "compare the checksums of tensors that several ranks hold (default: yes)",
        check_flag,
    ),
    "deadline": Option(
        DEADLINE,
        "consider a rank lost after this many seconds without a heartbeat (default: 60)",
        parse_seconds,
    ),
    "when_busy": Option(
        "wait",
        "'wait' until another save of this process ends, or 'refuse'",
        make_choice_check("wait", "refuse"),
    ),
    "max_host_memory": Option(
        None,
        "limit for the page-locked memory of GPU copies (default: half of what is available)",
        check_size,
    ),
    "metrics": Option(
        None,
        "metrics of this step, by name",
        check_metrics,
    ),
    "SealOptions.overwrite": Option(
        False, "replace an existing seal (default: stop with an error)", check_flag
    ),
    "SealOptions.metrics": Option(
        None,
        "record a metric (default: read from the files); repeatable",
        check_metrics,
        metavar="NAME=VALUE",
        is_repeatable=True,
        flag="--metric",
    ),
    "step": Option(
        None,
        "number of the step (default: read from the files)",
        check_step,
        metavar="STEP",
    ),
    "ran": Option(
        None,
        "seconds that the training has run",
        parse_seconds,
        flag="",
    ),
    "digest": Option(
        "xxh3-128",
        "digest algorithm (default: xxh3-128)",
        make_choice_check(*DIGESTS),
        metavar="HOW",
        choices=DIGESTS,
    ),
}
"""Each option by its name. "SaveOptions.overwrite" is the entry for one option set."""

PARAMETER_CHECKS: dict[str, ArgumentCheck] = {
    "allow": check_allowed,
    "bins": check_bin_count,
    "by": check_text,
    "extra_files": check_extra_files,
    "filter": check_text,
    "models": check_mapping,
    "opset_version": check_counts,
    "pattern": check_text,
    "prefix": check_text,
    "sample": parse_fraction,
}
"""The checks of parameters that are not in an option set."""

NULLABLE = frozenset({"max_memory"})
"""Options whose None does not stand for the default. It means that there is no memory limit."""


@functools.cache
def get_options(option_set: Callable[..., object]) -> dict[str, Option]:
    """Return the options of an option set by their names, in the order of help texts.

    Options that nearly all verbs have come last.
    """
    names = option_set.__annotations__
    common_names = [*FormatOption.__annotations__, *WriteOptions.__annotations__]
    special_names = [name for name in names if name not in common_names]
    ordered_names = special_names + [name for name in common_names if name in names]

    # Where a verb differs from all others, the table has an entry for its option set.
    options: dict[str, Option] = {}
    for name in ordered_names:
        specific_name = f"{option_set.__name__}.{name}"
        options[name] = OPTIONS.get(specific_name) or OPTIONS[name]
    return options


def get_annotation(option_set: Callable[..., object], name: str) -> str:
    """Return the type of an option as text, as its option set has it."""
    annotation = option_set.__annotations__[name]
    text = inspect.formatannotation(annotation)
    if isinstance(annotation, ForwardRef):
        text = annotation.__forward_arg__
    if "Required[" in text:
        text = text.removeprefix("Required[").removesuffix("]")
    return text


def pick_fields(value_type: Callable[..., T], options: Mapping[str, Any], **other_fields: Any) -> T:  # noqa: ANN401  # whatever the fields take
    """Make a value of a lower layer from the options that have the names of its fields.

    Args:
        value_type: A subclass of `Value`, such as `Edits`.
        options: The options of a verb. Those that are not fields are ignored.
        other_fields: Fields that are not options.
    """
    field_names: tuple[str, ...] = value_type.__struct_fields__  # type: ignore[attr-defined]
    fields = {name: options[name] for name in field_names if name in options}
    return value_type(**fields, **other_fields)


def check_options(option_set: Callable[..., T], values: Mapping[str, object]) -> T:
    """Check the values of some options, and return the values of all options of an option set.

    Options that are missing or None get their defaults.
    """
    checked_values: dict[str, object] = {}
    for name, option in get_options(option_set).items():
        value = values.get(name)
        if value is None and name in NULLABLE and name in values:
            # The caller passed None, which means something for this option.
            checked_values[name] = None
        elif value is None:
            checked_values[name] = option.default
        elif option.check is None:
            checked_values[name] = value
        else:
            checked_values[name] = option.check(value, f"{name}=")
    return cast("T", checked_values)


@overload
def validate_arguments(verb: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def validate_arguments(**checks: ArgumentCheck) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def validate_arguments(verb: Callable[P, R] | None = None, /, **checks: ArgumentCheck) -> object:
    """Decorate a verb, such as `convert`, so that it receives only arguments that were checked.

    Args:
        verb: The function. Without it, the call returns the decorator.
        checks: Checks for some of its parameters. The checks of the others are found by their
            names.

    Returns:
        The decorated verb. It raises `BadArgument` for an argument that is not allowed. For an
        unknown keyword, it raises a `TypeError` that suggests the most similar name.
    """
    if verb is None:
        return lambda decorated_verb: _validate(decorated_verb, checks)
    return _validate(verb, checks)


class _ParameterRule(NamedTuple):
    """How an argument of a verb is checked."""

    check: ArgumentCheck | None
    none_value: object
    """The value that None stands for."""
    allows_none: bool
    """Whether None stands for `none_value`. Otherwise it is checked as any other value."""


def _validate(verb: Callable[P, R], checks: Mapping[str, ArgumentCheck]) -> Callable[P, R]:
    """Return a function that checks the arguments of a verb, and then calls the verb.

    The function has the signature and the help of the verb, and lists its options in both. What does
    not depend on the arguments is computed once, when the verb is defined.
    """
    signature = inspect.signature(verb)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    positional_names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    option_set = _find_option_set(verb)
    options: dict[str, Option] = {}
    if option_set is not None:
        options = get_options(option_set)
    rules = _make_rules(parameters, options, checks)
    required_names = [name for name in options if options[name].default is ...]
    defaults = {name: options[name].default for name in options if name not in required_names}

    @functools.wraps(verb)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        """Check the arguments, and call the verb with them and with defaults for other options."""
        # A keyword for a positional parameter is checked by the same rule as its value in `args`.
        checked_values = []
        for name, value in (*zip(positional_names, args, strict=False), *kwargs.items()):
            if name not in rules:
                raise _make_keyword_error(verb.__name__, name, rules)
            rule = rules[name]
            if value is None and rule.allows_none:
                value = rule.none_value
            elif rule.check is not None:
                value = rule.check(value, f"{name}=")
            checked_values.append(value)
        for name in required_names:
            if name not in kwargs:
                raise BadArgumentType(f"{verb.__name__}() needs {name}=: {options[name].help}")

        # Surplus positional arguments are passed on, so that Python raises its own error for them.
        positional_count = min(len(positional_names), len(args))
        checked_args = (*checked_values[:positional_count], *args[positional_count:])
        checked_kwargs = dict(zip(kwargs, checked_values[positional_count:], strict=True))
        try:
            return verb(*checked_args, **defaults | checked_kwargs)  # type: ignore[arg-type]  # the parameters of the verb
        except (RanksFailed, RankLost) as error:
            # Every rank prints this error. The frames in Holdfast are the same on all ranks, so
            # they are removed.
            cut_traceback(error)
            raise

    if option_set is not None:
        keywords = [_make_parameter(option_set, name) for name in options]
        call.__signature__ = signature.replace(parameters=[*parameters, *keywords])  # type: ignore[attr-defined]
        call.__doc__ = _append_options(verb.__doc__ or "", options)
    return call


def _make_rules(
    parameters: Sequence[inspect.Parameter],
    options: Mapping[str, Option],
    checks: Mapping[str, ArgumentCheck],
) -> dict[str, _ParameterRule]:
    """Decide how each argument of a verb is checked.

    Args:
        parameters: The parameters that the verb lists in its signature.
        options: The options of its option set.
        checks: The checks of its decorator, by the name of a parameter.
    """
    # A check of the decorator takes precedence over the usual check for the name. None stands for
    # the default of a parameter; if it has no default, None is checked as any other value.
    rules: dict[str, _ParameterRule] = {}
    for parameter in parameters:
        check = checks.get(parameter.name) or _find_check(parameter)
        has_default = parameter.default is not parameter.empty
        rules[parameter.name] = _ParameterRule(check, parameter.default, has_default)
    for name, option in options.items():
        check = checks.get(name) or option.check
        rules[name] = _ParameterRule(check, option.default, option.default is not ...)
    for name in NULLABLE.intersection(rules):
        rules[name] = rules[name]._replace(none_value=None)
    return rules


def _find_check(parameter: inspect.Parameter) -> ArgumentCheck | None:
    """Return the check of a parameter that a verb lists in its signature."""
    name = parameter.name
    if name in OPTIONS and OPTIONS[name].check:
        return OPTIONS[name].check
    if name in PARAMETER_CHECKS:
        return PARAMETER_CHECKS[name]
    return check_flag if isinstance(parameter.default, bool) else None


def _find_option_set(verb: Callable[..., object]) -> type | None:
    """Return the option set that a verb names: `**options: Unpack[ConvertOptions]`."""
    for annotation in map(str, verb.__annotations__.values()):
        if annotation.startswith("Unpack["):
            # Only this name is looked up. Others may be imported for type checkers alone.
            name = annotation.removeprefix("Unpack[").removesuffix("]")
            return cast("type", verb.__globals__[name])
    return None


def _make_parameter(option_set: type, name: str) -> inspect.Parameter:
    """Return an option as a keyword parameter of a signature."""
    default = get_options(option_set)[name].default
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=get_annotation(option_set, name),
        default=inspect.Parameter.empty if default is ... else default,
    )


def _append_options(docstring: str, options: Mapping[str, Option]) -> str:
    """Append a list of options with their help to a docstring."""
    name_width = max(map(len, options))
    lines = [f"    {name:{name_width}}  {option.help}" for name, option in options.items()]
    return "\n".join([inspect.cleandoc(docstring), "", "Options:", *lines])


def _make_keyword_error(
    verb_name: str, keyword: str, known_names: Iterable[str]
) -> BadArgumentType:
    """Return the error for an unknown keyword. It suggests the most similar name."""
    # Imported here because only a misspelled name needs it.
    import difflib

    similar_names = difflib.get_close_matches(keyword, known_names, n=1)
    hint = f"it takes {', '.join(known_names)}"
    if similar_names:
        hint = f"did you mean {similar_names[0]!r}?"
    return BadArgumentType(
        f"{verb_name}() got an unexpected keyword argument {keyword!r}; {hint}", found=keyword
    )
