"""On-disk layouts. Each describes a source without reading tensor data; detection is by content alone.

`FORMATS` is the one list of them: an entry says what a format is called, how it is known, who reads and writes it, and what the
rest of Holdfast must know of it. Nothing outside of this package compares the name of a format. Extras add entries to the list
(`holdfast.extras`). Formats of other packages (`PLUGINS`) are looked for when no entry of the list fits.

torch/           what `torch.save` writes: zip, legacy stream, tar; folders of them
safetensors/     one file, or a directory with an index
native/          Holdfast's own directory
dcp/             directories of `torch.distributed.checkpoint`
npy/             numpy's array files, and zips of them
gguf/            the files of llama.cpp
onnx/            the initializers of ONNX models
diffusers        the folder of a pipeline, with a folder for each model
pickle/, zip/    the closed interpreter and the strict archive under them
tree_json/       nested states as typed JSON
detect           which of them is this?
plugins          the formats of other packages
sharded          the files of a rank, of the formats that ranks write together
index_file       the index of a Hugging Face folder: which file has which tensor
recorded         what is noted beside plain tensors: other names, shared storages, the tree
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, cast

from holdfast.core.registry import get_extras_table
from holdfast.core.value import Value

if TYPE_CHECKING:
    from holdfast.core.protocols import Description, Source, State
    from holdfast.engine.saves import SavePlan
    from holdfast.formats.index_file import WeightFiles
    from holdfast.formats.sharded import Sharded


@cache
def load_function(where: str) -> Any:  # noqa: ANN401  # functions of many kinds
    """Import the function "module:function". A module that begins with a dot is in this package."""
    module, _, name = where.partition(":")
    return getattr(import_module(module, __name__), name)


class Format(Value, frozen=True):
    """One on-disk layout.

    Functions are given as "module:function" and imported on use, since opening a file takes few of
    them. A module whose name begins with a dot is in this package.
    """

    name: str
    """The value of `Checkpoint.format`."""
    read_by: str
    """The function that describes a source."""
    begins: bytes = b""
    """First bytes of a single file."""
    known_by: str = ""
    """The function that returns whether a source is of this format: `(source)` for a folder,
    `(source, key)` for a file. It is cheap and raises nothing for bad content. It is not needed if
    the first bytes of a file suffice, or the `index` of a folder.
    """
    suffixes: tuple[str, ...] = ()
    """Ends of names; a new file gets the first. An empty one is a name without a suffix."""
    folder: bool = False
    choices: tuple[str, ...] = ()
    """Values of `format=` besides the name; messages show the first. A folder has the choices of its files: the place decides."""
    never_first: bytes = b""
    """For a zip: the end of a name that its first record never has. `known_by` is not called for such a zip."""
    key_pattern: str = ""
    """For a folder: a regular expression that the beginning of some key matches. Otherwise `known_by` is not called."""
    yields_to: str = ""
    """For a folder: the index of another format. `known_by` is not called if the folder holds it."""

    written_by: str = ""
    """The function that lays out a state: `(state, *, …) -> SavePlan`. Without one, `save` does not write it."""
    takes: tuple[str, ...] = ()
    """The arguments of that function, among those of a layout (`verbs.shared.formats.LAYOUT`)."""
    sharded_by: str = ""
    """A class of `formats.sharded` if ranks write it together."""

    keeps: Literal["state", "items", "tensors"] = "state"
    """The part of a state that is stored: all with its containers; tensors and values under dotted names; or tensors alone."""
    storages: bool = False
    """Whether tensors are views of storages, so that views of one storage share it again."""
    metadata: bool = False
    """Whether it has free text of the user."""
    programs_by: str = ""
    """For archives of programs: the function that returns the names of the models with a program."""
    rewritten_by: str = ""
    """For archives of programs: the function that lays out the tree of an open checkpoint as one."""

    index: str = ""
    """For a folder: the file that makes the others a checkpoint. It is written last."""
    files: tuple[str, ...] = ()
    """For a folder: globs of the files of a checkpoint, which are replaced with it."""
    before: str = ""
    """For the format of an extra: the built-in format before which it is tried."""
    file_pattern: str = ""
    """For a folder: a regular expression of file names that no other format has."""
    data: str = ""
    """For a folder: the suffix of data files that count also without tensors."""
    weights_by: str = ""
    """For formats of Hugging Face's programs: the function that finds the files with weights."""

    torch: bool = False
    """Whether `torch.load` recognises the first bytes. It unpickles every other file, which then must not be a pickle."""
    arrays: bool = False
    """Whether it is a zip of array files."""
    rules: bool = False
    """Whether the caller must give the cuts of tensors (`open(…, rules=…)`)."""
    templates: str = ""
    """Part of the names of metadata that programs execute."""
    code: Literal["none", "scanned", "unknown"] = "unknown"
    """Whether its files can contain code that runs when they are loaded. "none": they cannot. "scanned": `scan` reads
    every part of them that can. An entry must say one of these; otherwise `scan` reports its files as unknown.
    """

    @property
    def sharded(self) -> Sharded:
        return cast("Sharded", load_function(self.sharded_by)())

    @property
    def programs(self) -> bool:
        """Whether it is an archive of programs."""
        return bool(self.programs_by)

    @property
    def packages(self) -> bool:
        return self.programs or (bool(self.written_by) and self.keeps == "state" and self.metadata)

    @property
    def title(self) -> str:
        """The name for people."""
        return self.choices[0] if self.choices else self.name

    @property
    def opened_as(self) -> tuple[str, ...]:
        """The formats that a folder may be opened as: one file in a folder of its own is just that file."""
        if not self.folder or not self.choices:
            return (self.name,)
        file_formats = [entry for entry in FORMATS if not entry.folder]
        return self.name, *(e.name for e in file_formats if e.choices == self.choices)

    def owns(self, name: str) -> bool:
        """Whether a file in a folder belongs to a checkpoint of this format, by its name."""
        return any(fnmatchcase(name, glob) for glob in self.files)

    def matches(self, source: Source) -> bool:
        """Whether the content, never the suffix, is of this format."""
        key = source.store.single_key
        head = b"" if key is None else source.read_head(key, FIRST_NBYTES)
        return self.recognises(source, key, head)

    def recognises(self, source: Source, key: str | None, head: bytes) -> bool:
        """Whether a file with these first bytes, or a folder if there is no key, is of this format.

        The content decides, never the suffix.
        """
        if self.folder:
            may_be = key is None or source.store.is_folder or key == self.index
            # A file alone may be all that there is of a folder: the file of the only rank.
            if not may_be and self.file_pattern:
                may_be = re.fullmatch(self.file_pattern, key or "") is not None
            if not may_be:
                return False
            if not self.known_by:
                return source.store.has_key(self.index)
            if self.yields_to and source.store.has_key(self.yields_to):
                return False
            if self.key_pattern:
                keys = source.store.list()
                if not any(re.match(self.key_pattern, key) for key in keys):
                    return False
            return bool(load_function(self.known_by)(source))
        if key is None or not head.startswith(self.begins):
            return False
        if self.never_first:
            # A local header of a zip has 30 bytes before the name of the record.
            name_nbytes = int.from_bytes(head[26:28], "little")
            if head[30 : 30 + name_nbytes].endswith(self.never_first):
                return False
        return not self.known_by or bool(load_function(self.known_by)(source, key))

    def describe(self, source: Source) -> Description:
        """Read and check headers, indexes and pickles. Raises only Holdfast errors."""
        return cast("Description", load_function(self.read_by)(source))

    def lay_out(self, state: State, **given: object) -> SavePlan:
        """The plan of a state. Raises `CannotHold` with every problem."""
        return cast("SavePlan", load_function(self.written_by)(state, **given))

    def weight_files(self, source: Source) -> WeightFiles:
        """The files of a folder with its weights. Raises as `open` does."""
        return cast("WeightFiles", load_function(self.weights_by)(source))


FIRST_NBYTES = 30 + 512
"""The most first bytes of a file that tell its format."""

ZIP = b"PK"

SAFETENSORS = ("*.safetensors", "*.safetensors.index.json")

FORMATS = [
    Format(
        "npz",
        ".npy.read:describe_npz",
        ZIP,
        ".npy.detect:is_npz",
        (".npz",),
        never_first=b"/data.pkl",
        keeps="tensors",
        torch=True,
        arrays=True,
        code="scanned",
    ),
    Format(
        "torch-zip",
        ".torch.zip:describe",
        ZIP + b"\3\4",
        "",
        (".pt", ".pth", ".bin", ".ckpt"),
        choices=("torch", "pt"),
        written_by=".torch.write:lay_out_torch_zip",
        takes=("name",),
        storages=True,
        torch=True,
        code="scanned",
    ),
    # What is known as torch's zip may say that it is this one.
    Format("torchscript", ".torch.zip:describe", ZIP + b"\3\4", torch=True, code="scanned"),
    Format(
        "npy",
        ".npy.read:describe_npy",
        b"\x93NUMPY",
        "",
        (".npy",),
        keeps="tensors",
        code="scanned",
    ),
    Format(
        "gguf",
        ".gguf.read:describe_gguf",
        b"GGUF",
        "",
        (".gguf",),
        keeps="tensors",
        metadata=True,
        templates="chat_template",
        code="none",
    ),
    Format(
        "safetensors",
        ".safetensors.read:describe",
        b"",
        ".safetensors.read:has_safetensors_start",
        (".safetensors",),
        choices=("safetensors",),
        written_by=".safetensors.write:lay_out_safetensors",
        takes=("keep_tree",),
        keeps="tensors",
        metadata=True,
        weights_by=".safetensors.directory:weight_files",
        code="none",
    ),
    Format(
        "torch-legacy",
        ".torch.legacy:describe_legacy",
        b"",
        ".detect:begins_like_legacy",
        (".th",),
        torch=True,
        code="scanned",
    ),
    Format(
        "torch-tar",
        ".torch.legacy:describe_tar",
        b"",
        ".detect:begins_like_torch_tar",
        (".pth.tar",),
        torch=True,
        code="scanned",
    ),
    # It holds safetensors files and an index of them as well, so it is looked for first.
    Format(
        "native",
        ".native.read:describe",
        suffixes=("",),
        folder=True,
        choices=("native",),
        written_by=".native.write:lay_out_native",
        takes=("max_shard_size", "hashed", "take_over", "save"),
        sharded_by=".sharded:NativeShards",
        metadata=True,
        index="holdfast.json",
        files=(*SAFETENSORS, "holdfast.json"),
        code="none",
    ),
    Format(
        "dcp",
        ".dcp.read:describe",
        b"",
        ".dcp.read:is_dcp",
        folder=True,
        choices=("dcp",),
        written_by=".sharded:lay_out_dcp",
        takes=("max_shard_size", "save"),
        sharded_by=".sharded:DcpShards",
        keeps="items",
        index=".metadata",
        file_pattern=r"\.metadata",
        files=("*.distcp", "*.metadata", ".holdfast.json"),
        data=".distcp",
        code="scanned",
    ),
    # It may have the whole pipeline in one safetensors file beside its components.
    Format(
        "diffusers",
        ".diffusers:describe",
        b"",
        ".diffusers:is_diffusers",
        folder=True,
        keeps="tensors",
        metadata=True,
        code="scanned",
    ),
    Format(
        "safetensors-dir",
        ".safetensors.directory:describe_directory",
        b"",
        ".safetensors.directory:is_directory",
        folder=True,
        choices=("safetensors",),
        written_by=".safetensors.write:lay_out_safetensors",
        takes=("keep_tree", "directory", "max_shard_size", "index", "stem", "save"),
        sharded_by=".sharded:SafetensorsShards",
        keeps="tensors",
        metadata=True,
        index="model.safetensors.index.json",
        files=SAFETENSORS,
        weights_by=".safetensors.directory:weight_files",
        code="none",
    ),
    # torch's last of all: who made something else of these files, and put it beside them, means that.
    Format(
        "gguf-dir",
        ".gguf.read:describe_directory",
        b"",
        ".gguf.read:is_directory",
        folder=True,
        keeps="tensors",
        metadata=True,
        code="none",
    ),
    Format(
        "torch-dir",
        ".torch.directory:describe",
        b"",
        ".torch.directory:is_directory",
        folder=True,
        weights_by=".torch.directory:weight_files",
        code="scanned",
    ),
    # A graph may name operators of libraries that its runtime loads, so nothing here says that it holds no code.
    Format(
        "onnx",
        ".onnx.read:describe",
        b"\x08",
        ".onnx.read:begins_like_onnx",
        (".onnx",),
        keeps="tensors",
        metadata=True,
    ),
    # Behind everything else that has pickles in it, and behind files whose first length or magic number looks like an opcode.
    Format(
        "pickle",
        ".torch.bare_pickle:describe",
        b"",
        ".torch.bare_pickle:is_bare_pickle",
        (".pkl", ".pickle"),
        torch=True,
        code="scanned",
    ),
]
"""Every format, in the order of detection: the first match counts. Of several formats with one name or suffix, the first counts."""


def _add_formats_of_extras() -> None:
    """Insert the formats of extras into the list, each before the format that its entry names."""
    for name, fields in get_extras_table("FORMATS").items():
        names = [entry.name for entry in FORMATS]
        FORMATS.insert(names.index(fields["before"]), Format(name, **fields))


_add_formats_of_extras()

PLUGINS: list[Format] = []
"""The formats of other packages. The list is empty until `load_plugins` is called."""


@cache
def load_plugins() -> tuple[str, ...]:
    """Fill `PLUGINS`, and return a sentence for each plugin that cannot be used.

    This is slow, so it is only called when no built-in format fits.
    """
    from holdfast.formats.plugins import load_plugin_formats

    PLUGINS[:], problems = load_plugin_formats()
    return problems


def format_of(name: str) -> Format:
    """Return the entry of a format by its name; an empty entry for an unknown name."""
    for entry in (*FORMATS, *PLUGINS):
        if entry.name == name:
            return entry
    return Format(name, "")


def chosen(name: str, among: Iterable[Format]) -> Format | None:
    """Return the format that `format=` means: the first with this name or choice."""
    for entry in among:
        if name == entry.name or name in entry.choices:
            return entry
    return None


def written_formats() -> list[Format]:
    """Return the formats that `save` writes; of plugins, those that are loaded."""
    return [entry for entry in (*FORMATS, *PLUGINS) if entry.written_by]


def choose_written(name: str) -> Format | None:
    """Return the format that `format=` means, if it can be written. Plugins are asked last."""
    if chosen(name, (*FORMATS, *PLUGINS)) is None:
        load_plugins()
    return chosen(name, written_formats())


def rank_formats() -> list[Format]:
    """Return the formats that ranks write together."""
    return [entry for entry in FORMATS if entry.sharded_by]


def titles(formats: Iterable[Format]) -> tuple[str, ...]:
    """Return the names of formats for people, each once."""
    return tuple(dict.fromkeys(entry.title for entry in formats))


def written_in_words() -> str:
    """Describe the formats that `save` writes, with their suffixes."""
    phrases = []
    for entry in written_formats():
        suffixes = [suffix for suffix in entry.suffixes if suffix != f".{entry.title}"]
        listed = ", ".join(suffix or "no suffix" for suffix in suffixes)
        phrase = f"a {entry.title} directory" if entry.folder else entry.title
        if entry.suffixes:
            phrases.append(f"{phrase} ({listed})" if listed else phrase)
    return f"{', '.join(phrases[:-1])}, or {phrases[-1]}"


def file_suffixes() -> tuple[str, ...]:
    """Return the suffixes of checkpoints that are single files, without those of plugins."""
    files = [entry for entry in FORMATS if not entry.folder]
    return tuple(chain.from_iterable(entry.suffixes for entry in files))
