"""The files beside the weights of a Hugging Face folder: config, tokenizer, generation settings. They go where the weights go.

    model.safetensors  config.json  generation_config.json  tokenizer.json  tokenizer_config.json  chat_template.jinja  README.md  …

1. In a new directory, what is known by its name as such a file comes along, if the folder has a config or a tokenizer at all; or it
   is taken from another folder (`copy_config="base/"`). Anything else stays behind, and a note says what: pickles, other weights,
   folders. Code of a model (`*.py`) comes along with a note; nobody runs it here.
2. In the place of the source, every other file of the folder stays, whatever it is: other variants of the weights, a log, a pickle.
3. `config.json` says in which dtype the weights are (`torch_dtype`, `dtype` since transformers 5). Where the weights are cast, it
   is set to what they are now; nothing else in it changes.

Side files are files of the plan like any other: streamed, read back, and published with the weights by one rename. Links are
followed as `open` follows them: inside of the folder, or to the blobs of the Hugging Face cache.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack

from holdfast.core.box import Box
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.chunk import Chunk, Storage
from holdfast.core.dtype import DTYPES
from holdfast.core.limits import Limits
from holdfast.core.options import CopyConfig
from holdfast.core.protocols import Source
from holdfast.core.strict_json import parse
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value, replace
from holdfast.engine.saves import Data, FilePlan, Literal, SavePlan
from holdfast.engine.source import OpenSource
from holdfast.engine.write import assemble_file
from holdfast.errors import CannotHold, HoldfastError, NoSuchPath, StoreError, Unsupported
from holdfast.formats import format_of
from holdfast.formats.index_file import INDEX, NUMBERED
from holdfast.formats.safetensors.directory import INDEX_SUFFIX, SUFFIX
from holdfast.formats.safetensors.write import STEM
from holdfast.formats.torch.write import lay_out_torch_zip
from holdfast.stores.memory import MemoryStore
from holdfast.stores.paths import place_of
from holdfast.stores.place import is_same_place, place_at
from holdfast.verbs.open import open_store
from holdfast.verbs.seals.document import SEAL
from holdfast.verbs.seals.document import SUFFIX as SEAL_SUFFIX
from holdfast.verbs.shared.formats import is_checkpoint_file, is_replaceable
from holdfast.verbs.shared.state import tabulate_tree

CONFIG, TORCH_STEM = "config.json", "pytorch_model"

SUFFIXES = (
    ".json",
    ".jsonl",
    ".txt",
    ".model",
    ".jinja",
    ".md",
    ".py",
    ".tiktoken",
    ".vocab",
    ".bpe",
    ".spm",
    ".yaml",
    ".yml",
)
"""The suffixes of config, tokenizer, template, code and text files. `.model` is a SentencePiece tokenizer."""

PLAIN_NAMES = ("LICENSE", "LICENCE", "NOTICE", "COPYING")

MOST_NBYTES, CONFIG_NBYTES = 256 << 20, 16 << 20
"""The longest file that is copied, and the longest config that is parsed. The largest tokenizers take tens of megabytes."""

PICKLE, ZIP = b"\x80", b"PK\x03\x04"
"""How a pickle of protocol 2 or later begins, and an archive, such as one of `torch.save`."""

DTYPE_KEYS = ("torch_dtype", "dtype")
"""transformers up to 4.55 writes the first, later ones the second; both are read."""

NAMED = ("float16", "bfloat16", "float32", "float64")
"""The dtypes that a config can name."""

SHOWN = 5


def is_side_file(name: str) -> bool:
    """Whether a name is that of a file which describes a model and is no weights.

    >>> [is_side_file(name) for name in ("tokenizer.json", "model.safetensors.index.json", "training_args.bin", "LICENSE")]
    [True, False, False, True]
    """
    if (
        "/" in name
        or name.startswith(".")
        or is_replaceable(name)
        or name.endswith((".index.json", SEAL_SUFFIX))
    ):
        return False
    return name.lower().endswith(SUFFIXES) or name.partition(".")[0].upper() in PLAIN_NAMES


def _shows_model(name: str) -> bool:
    """Whether a folder with such a file is a model's."""
    return is_side_file(name) and (
        name.endswith(CONFIG) or name.startswith("tokenizer") or name == "params.json"
    )


def is_model(source: Checkpoint, copy_config: CopyConfig = True) -> bool:
    """Whether weights lie beside a config or a tokenizer, or are to lie beside one."""
    return not isinstance(copy_config, bool) or any(map(_shows_model, source.source.store.list()))


class SideFiles(Value, frozen=True):
    files: Mapping[str, Source]
    """The source of each file, by its name."""
    elsewhere: bool = False
    """Whether they come from another folder, and say nothing of these weights yet."""
    stays: bool = False
    """Whether they are at the target already, in an object store: only what changes is written."""
    notes: tuple[str, ...] = ()
    stem: str = STEM
    """How the names of the weights in that folder begin."""

    def add_to(
        self, plan: SavePlan, source: Mapping[str, LazyTensor]
    ) -> tuple[SavePlan, tuple[FilePlan, ...]]:
        """The plan with these files in it, and their own plans. `source` are the tensors that the weights are made of."""
        if not self.files and not self.notes:
            return plan, ()
        written = {file.key for file in (*plan.files, *plan.index)}
        labels = {
            segment.label
            for file in plan.files
            for segment in file.segments
            if isinstance(segment, Data)
        }
        both = [name for name in self.files if name in written]
        lost = [
            f"{name!r} is no part of the checkpoint, and a file of that name is written"
            for name in both
        ]
        if lost:
            raise CannotHold(
                "other files of the folder would be lost; move them away, or give another target",
                lost,
            )
        added, late, notes = [], [], list(self.notes)
        for name, origin in self.files.items():
            config = self._config(origin, plan, source, notes) if name == CONFIG else None
            if config is not None:
                # With the index: a try that is taken up again knows a file by its length, and this one may differ in a letter.
                late.append(FilePlan(name, (Literal(config),)))
            elif not self.stays:
                added.append(_copied(name, origin, labels))
        accompanied = replace(
            plan,
            files=(*plan.files, *added),
            index=(*late, *plan.index),
            notes=(*plan.notes, *notes),
        )
        return accompanied, (*added, *late)

    def _config(
        self, origin: Source, plan: SavePlan, source: Mapping[str, LazyTensor], notes: list[str]
    ) -> bytes | None:
        """The config with the dtype that the weights have now; None where nothing is to be changed in it."""
        now = None if plan.expected_table is None else _prevailing(plan.expected_table.values())
        if now is None or (not self.elsewhere and now == _prevailing(source.values())):
            return None
        changes: dict[str, str] = {}
        try:
            made = _edited(origin, now, changes)
        except HoldfastError as error:
            notes.append(
                f"{CONFIG} is unchanged, and its dtype may differ from that of the weights: {error.message}"
            )
            return None
        if changes:
            notes.append(
                f"{CONFIG} has the new dtype of the weights: {', '.join(f'{at} {how}' for at, how in changes.items())}"
            )
        return made if changes else None


def _edited(origin: Source, dtype: str, changes: dict[str, str]) -> bytes:
    """The config with a dtype; `changes` gets what that changed. Raises a `HoldfastError` where it has to stay as it is."""
    if dtype not in NAMED:
        raise Unsupported(f"{dtype} is none that it could name")
    size = origin.store.size(CONFIG)
    if size > CONFIG_NBYTES:
        raise Unsupported(f"it has {size:,} bytes")
    raw = origin.bytes(CONFIG, 0, size)
    made = _with_dtype(parse(raw, origin.limits, file=CONFIG), dtype, "", changes)
    rest = raw.partition(b"\n")[2]
    indent = len(rest) - len(rest.lstrip(b" ")) or None
    return (json.dumps(made, indent=indent, ensure_ascii=False) + "\n").encode("utf-8")


def find_side_files(
    source: Checkpoint,
    target: str,
    copy_config: CopyConfig,
    *,
    directory: bool,
    stack: ExitStack,
    limits: Limits | None,
) -> SideFiles:
    """The files that go beside the weights at the target. Another folder that is opened for them is closed with the stack.

    Raises `Unsupported` for side files of a single file, and for files that would be lost.
    """
    if not isinstance(copy_config, bool | str | os.PathLike) or copy_config == "":
        kind = type(copy_config).__name__
        raise Unsupported(
            f"copy_config is True, False, or the folder that config and tokenizer come from; not a {kind}"
        )
    own = tuple(source.source.store.list())
    folder = len(own) > 1 or source.source.store.is_folder
    if not directory:
        return _of_one_file(source, own if folder else (), copy_config)
    kept: dict[str, Source] = {}
    if folder and is_same_place(target, source.path):
        if copy_config is False:
            message = "in the place of its source a checkpoint keeps the other files of the folder; leave copy_config=False"
            raise Unsupported(f"{message} away, or give another target", file=target)
        kept = dict.fromkeys(_others(source, own), source.source)
    notes: list[str] = []
    if not isinstance(copy_config, bool):
        taken = dict.fromkeys(*_from_folder(copy_config, stack, limits, notes))
        kept = kept if place_at(target).on_disk else {}
        stem = _stem(next(iter(taken.values())).store.list(), source)
        return SideFiles(kept | taken, elsewhere=True, notes=tuple(notes), stem=stem)
    stem = _stem(own, source) if folder else STEM
    if kept and not place_at(target).on_disk:
        # Nothing there is moved out of the way, so nothing has to be put back.
        return SideFiles(
            {name: origin for name, origin in kept.items() if name == CONFIG}, stays=True, stem=stem
        )
    if kept:
        return SideFiles(kept, stem=stem)
    if not copy_config or not folder or not any(map(_shows_model, own)):
        return SideFiles({}, stem=stem)
    taken = dict.fromkeys(_chosen(source.source, own, notes), source.source)
    format = format_of(source.format)
    used = {*format.weight_files(source.source).files} if format.weights_by else set()
    others = (
        name
        for name in own
        if not is_checkpoint_file(name)
        and name not in taken
        and name not in used
        and name[0] != "."
    )
    left = sorted({name.partition("/")[0] for name in others if not name.endswith(INDEX)})
    if left:
        notes.append(
            f"not copied, because they are not config, tokenizer or text files: {_some(left)}"
        )
    return SideFiles(taken, notes=tuple(notes), stem=stem)


TORCH_DIST = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""`metadata.json` of a folder that megatron-core 0.16 loads."""


def torch_dist_files() -> dict[str, Source]:
    """What megatron-core looks for beside a DCP directory: how it was written, and the state that all ranks have, of which there is
    none."""
    common, _ = assemble_file(lay_out_torch_zip(tabulate_tree({}), name="common").files[0], {})
    files = {"metadata.json": json.dumps(TORCH_DIST).encode(), "common.pt": common}
    return dict.fromkeys(files, OpenSource(MemoryStore(files), limits=Limits(), threads=1))


def _of_one_file(source: Checkpoint, own: Sequence[str], copy_config: CopyConfig) -> SideFiles:
    if not isinstance(copy_config, bool):
        message = "one file has no place for a config; give a directory (folder=True, or a slash at its end)"
        raise Unsupported(f"{message}, or leave copy_config= away", found=str(copy_config))
    left = (
        [name for name in own if is_side_file(name)]
        if copy_config and any(map(_shows_model, own))
        else []
    )
    notes = (
        (f"not copied from {source.path!r}, because the target is a single file: {_some(left)}",)
        if left
        else ()
    )
    return SideFiles({}, notes=notes)


def _others(source: Checkpoint, own: Sequence[str]) -> Iterable[str]:
    """The files of a folder that the checkpoint in it does not consist of. Seals of what it consists of are made anew."""
    format = format_of(source.format)
    if not format.written_by:
        # Of other formats it is not known; what may be replaced is, and of the rest the commit says that it would be lost.
        return []
    if format.weights_by:
        chosen = format.weight_files(source.source)
        used = {*chosen.files, chosen.index or "", SEAL}
    else:
        used = {name for name in own if is_replaceable(name)}
    return [name for name in own if name not in used and name.removesuffix(SEAL_SUFFIX) not in used]


def _stem(names: Sequence[str], source: Checkpoint) -> str:
    """How the names of the weights of a folder begin: by the index, or by the one file that they are."""
    format = format_of(source.format)
    if format.weights_by and not format.written_by:
        # What is pytorch_model.bin is model.safetensors; diffusers and adapters have one name for both.
        called = format.weight_files(source.source).stem
        return STEM + called.removeprefix(TORCH_STEM) if called.startswith(TORCH_STEM) else called
    top = [name for name in names if "/" not in name and not name.startswith(".")]
    found = [name.removesuffix(INDEX_SUFFIX) for name in top if name.endswith(INDEX_SUFFIX)]
    found = found or [
        NUMBERED.sub("", name.removesuffix(SUFFIX)) for name in top if name.endswith(SUFFIX)
    ]
    return found[0] if len(found) == 1 and found[0] else STEM


def _from_folder(
    folder: str | os.PathLike[str], stack: ExitStack, limits: Limits | None, notes: list[str]
) -> tuple[list[str], Source]:
    path, within = place_of(folder), limits or Limits()
    absent = NoSuchPath(
        "config and tokenizer were to be copied from this folder, and there is none", file=path
    )
    if place_at(path).on_disk and not os.path.isdir(path):
        raise absent
    try:
        store = open_store(path, within)
    except StoreError as error:
        raise absent if error.errno == errno.ENOENT else error from None
    stack.callback(store.close)
    if not store.is_folder:
        raise absent
    origin = OpenSource(store, limits=within, threads=1)
    found = _chosen(origin, store.list(), notes)
    if not any(map(_shows_model, found)):
        raise StoreError("there is no config and no tokenizer to copy in this folder", file=path)
    return found, origin


def _chosen(origin: Source, names: Sequence[str], notes: list[str]) -> list[str]:
    found = []
    for name in filter(is_side_file, names):
        size = origin.store.size(name)
        head = origin.bytes(name, 0, min(size, len(ZIP)))
        if size > MOST_NBYTES:
            notes.append(
                f"not copied: {name!r} has {size:,} bytes, too many for a config or tokenizer"
            )
        elif head.startswith(ZIP) or (head[:1] == PICKLE and b"\x02" <= head[1:2] <= b"\x05"):
            notes.append(f"not copied: {name!r} is a pickle or an archive with another suffix")
        else:
            found.append(name)
    code = [name for name in found if name.endswith(".py")]
    if code:
        notes.append(
            f"copied without changes: code that trust_remote_code=True would run: {_some(code)}"
        )
    return found


def _copied(name: str, origin: Source, labels: set[str]) -> FilePlan:
    """A file as it is, streamed: its bytes are a row of elements."""
    size = origin.store.size(name)
    if not size:
        return FilePlan(name, ())
    label = name
    while label in labels:
        label += "'"
    labels.add(label)
    storage = Storage(name, 0, size, label=name, home=origin.store)
    row = Chunk(Box((0,), (size,)), storage, 0, (8,))
    dtype = DTYPES.name("uint8")
    assert dtype is not None  # it is in the table
    return FilePlan(name, (Data(LazyTensor(name, dtype, (size,), (row,), origin), label),))


def _prevailing(tensors: Iterable[LazyTensor]) -> str | None:
    counts: dict[str, int] = {}
    for tensor in tensors:
        if tensor.dtype.kind == "float":
            counts[tensor.dtype.name] = counts.get(tensor.dtype.name, 0) + tensor.size
    return max(counts, key=lambda name: counts[name]) if counts else None


def _with_dtype(document: object, dtype: str, at: str, changes: dict[str, str]) -> object:
    """A config with another dtype where it names one: at its top, and in the configs of its parts (`text_config`)."""
    if not isinstance(document, dict):
        return document
    made = dict(document)
    for key, value in document.items():
        if key in DTYPE_KEYS and isinstance(value, str) and value.removeprefix("torch.") != dtype:
            made[key] = dtype
            changes[at + key] = f"{value} → {dtype}"
        elif key.endswith("_config") and key != "quantization_config":
            made[key] = _with_dtype(value, dtype, f"{at}{key}.", changes)
    return made


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:SHOWN]))
    return f"{shown} and {len(names) - SHOWN:,} more" if len(names) > SHOWN else shown
