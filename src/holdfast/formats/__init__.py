"""On-disk layouts. Each describes a source without reading tensor data; detection is by content alone.

`FORMATS` is the one list of them: an entry says what a format is called, how it is known, who reads and writes it, and what the
rest of Holdfast must know of it. Nothing outside of this package compares the name of a format.

torch/           what `torch.save` writes: zip, legacy stream, tar; folders of them
safetensors/     one file, or a directory with an index
native/          Holdfast's own directory
dcp/             directories of `torch.distributed.checkpoint`
pt2/             exported programs
npy/             numpy's array files, and zips of them
gguf/            the files of llama.cpp
rank_files/      folders in which every rank left a `.pt` of its own
pickle/, zip/    the closed interpreter and the strict archive under them
tree_json/       nested states as typed JSON
detect           which of them is this?
sharded          the files of a rank, of the formats that ranks write together
index_file       the index of a Hugging Face folder: which file has which tensor
recorded         what is noted beside plain tensors: other names, shared storages, the tree
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, cast

from holdfast.core.value import Value

if TYPE_CHECKING:
    from holdfast.core.protocols import Description, Source, State
    from holdfast.engine.saves import SavePlan
    from holdfast.formats.index_file import WeightFiles
    from holdfast.formats.sharded import Sharded


@cache
def named(where: str) -> Any:  # noqa: ANN401  # whatever an entry names
    module, _, name = where.partition(":")
    return getattr(import_module(module, __name__), name)


class Format(Value, frozen=True):
    """One on-disk layout.

    Functions are named `module:function`, and imported when they are needed: to open a file takes few of them. A module whose name
    begins with a dot is in this package.
    """

    name: str
    """What `Checkpoint.format` says."""
    read_by: str
    """The function that describes a source."""
    begins: bytes = b""
    """What a single file of it begins with."""
    known_by: str = ""
    """The function that says whether a source is of this format, for a folder, or whether a file of a source is: `(source, key)`.
    Cheap, and raises nothing on bad content. Not needed for a file that is known by how it begins."""
    suffixes: tuple[str, ...] = ()
    """What its names end with; a new file gets the first. An empty one is a name without a suffix."""
    folder: bool = False
    """Whether it is a folder of files."""
    choices: tuple[str, ...] = ()
    """What `format=` takes beside the name; people are told of the first. A folder has the same ones as the files in it: which of
    the two is meant, the place says."""

    written_by: str = ""
    """The function that lays out a state: `(state, *, …) -> SavePlan`. Without one, `save` does not write it."""
    takes: tuple[str, ...] = ()
    """Of what can be asked of a layout (`saving.formats.LAYOUT`), the arguments of that function."""
    sharded_by: str = ""
    """How ranks write it together: a class as `formats.sharded` has them."""

    keeps: Literal["state", "items", "tensors"] = "state"
    """What it keeps of a state: all of it with its containers; tensors and values, under dotted names; or tensors alone."""
    storages: bool = False
    """Whether its tensors are views of storages, so that what was cut from one storage shares it again."""
    metadata: bool = False
    """Whether it carries text that somebody put there, and not only what is true of the file."""
    programs: bool = False
    """Whether it is an archive of programs with weights."""

    index: str = ""
    """Of a folder: the file that makes the others a checkpoint. It is written last."""
    files: tuple[str, ...] = ()
    """Of a folder: globs of the files that belong to such a checkpoint by their names, and are replaced with it."""
    data: str = ""
    """Of a folder: what its data files end with, where a file counts also if no tensor lies in it."""
    weights_by: str = ""
    """Of what Hugging Face's programs read, with config and tokenizer beside it: the function that finds the files with weights."""

    torch: bool = False
    """Whether `torch.load` knows such a file by how it begins. It unpickles every other one, which then may not be a pickle."""
    arrays: bool = False
    """Whether it is a zip of array files, each of which says itself what is in it."""
    rules: bool = False
    """Whether it does not say how tensors were cut, so that the caller does (`open(…, rules=…)`)."""
    templates: str = ""
    """What is in the names of its metadata that programs carry out."""

    @property
    def sharded(self) -> Sharded:
        return cast("Sharded", named(self.sharded_by)())

    @property
    def packages(self) -> bool:
        """Whether it can hold several models, and say which."""
        return self.programs or (bool(self.written_by) and self.keeps == "state" and self.metadata)

    @property
    def title(self) -> str:
        """What people are told that it is called."""
        return self.choices[0] if self.choices else self.name

    @property
    def opened_as(self) -> tuple[str, ...]:
        """The formats that a folder of it may be opened as: one file in a folder of its own is just that file."""
        alone = (one.name for one in FORMATS if self.folder and not one.folder and one.choices and one.choices == self.choices)
        return self.name, *alone

    def owns(self, name: str) -> bool:
        """Whether a file in a folder belongs to a checkpoint of this format, by its name."""
        return any(fnmatchcase(name, glob) for glob in self.files)

    def matches(self, source: Source) -> bool:
        """Whether the content, never the suffix, is of this format."""
        key = source.store.single
        head = b"" if key is None else source.first(key, FIRST_NBYTES)
        return self.may_be(key, head) and self.knows(source, key)

    def may_be(self, key: str | None, head: bytes) -> bool:
        """Whether a file that begins so can be of this format; or a folder, where there is no one file."""
        return self.folder if key is None else head.startswith(self.begins)

    def knows(self, source: Source, key: str | None) -> bool:
        """Whether what can be of this format is."""
        if self.folder:
            return bool(named(self.known_by)(source))
        return not self.known_by or bool(named(self.known_by)(source, key))

    def describe(self, source: Source) -> Description:
        """Read headers, indexes and pickles; check everything, also that the tree can be printed. Raises only Holdfast errors."""
        found = cast("Description", named(self.read_by)(source))
        if found.tree is not found.tensors:
            from holdfast.core.printed import check_printable

            check_printable(found.tree, source.limits)
        return found

    def lay_out(self, state: State, **given: object) -> SavePlan:
        """The plan of a state. Raises `CannotHold` with every problem."""
        return cast("SavePlan", named(self.written_by)(state, **given))

    def weight_files(self, source: Source) -> WeightFiles:
        """Which files of a folder hold its weights. Raises as `open` does."""
        return cast("WeightFiles", named(self.weights_by)(source))


FIRST_NBYTES = 30 + 512
"""First bytes of a file that its format is told by, at the most."""

ZIP = b"PK"

SAFETENSORS = ("*.safetensors", "*.safetensors.index.json")

FORMATS = [
    # Files of torch.save, each with a rank in its name; also where there is one alone, which is then all there is.
    Format("rank-files", ".rank_files.dtensors:describe", ZIP, ".rank_files.recognise:is_rank_files", folder=True),
    Format("megatron", ".rank_files.megatron:describe", ZIP, ".rank_files.recognise:is_megatron", folder=True, rules=True),
    # A .pt2 is a zip as well, and told from one of torch.save by a record that only it has.
    Format("pt2", ".pt2.read:describe_pt2", ZIP, ".pt2.archive:is_pt2", (".pt2",), torch=True, programs=True),
    Format("npz", ".npy.read:describe_npz", ZIP, ".npy.archive:is_npz", (".npz",), keeps="tensors", torch=True, arrays=True),
    Format(
        "torch-zip", ".torch.zip:describe", ZIP + b"\3\4", "", (".pt", ".pth", ".bin", ".ckpt"),
        choices=("torch", "pt"), written_by=".torch.write:lay_out_torch_zip", takes=("name",), storages=True, torch=True,
    ),
    # What is known as torch's zip may say that it is this one.
    Format("torchscript", ".torch.zip:describe", ZIP + b"\3\4", torch=True),
    Format("npy", ".npy.read:describe_npy", b"\x93NUMPY", "", (".npy",), keeps="tensors"),
    Format("torch-legacy", ".torch.legacy:describe_legacy", b"", ".torch.legacy:begins_like_legacy", (".th",), torch=True),
    Format("torch-tar", ".torch.legacy:describe_tar", b"", ".torch.legacy:begins_like_torch_tar", (".pth.tar",), torch=True),
    Format("gguf", ".gguf.read:describe_gguf", b"GGUF", "", (".gguf",), keeps="tensors", metadata=True, templates="chat_template"),
    Format(
        "safetensors", ".safetensors.read:describe", b"", ".safetensors.read:begins_like_safetensors", (".safetensors",),
        choices=("safetensors",), written_by=".safetensors.write:lay_out_safetensors",
        takes=("keep_tree",), keeps="tensors", metadata=True, weights_by=".safetensors.directory:weight_files",
    ),
    # It holds safetensors files and an index of them as well, so it is looked for first.
    Format(
        "native", ".native.read:describe", b"", ".native.read:is_native", ("",), folder=True, choices=("native",),
        written_by=".native.write:lay_out_native",
        takes=("max_shard_size", "pack", "hashes", "take_over", "save"), sharded_by=".sharded:NativeShards", metadata=True,
        index="holdfast.json", files=(*SAFETENSORS, "holdfast.json"),
    ),
    Format(
        "dcp", ".dcp.read:describe", b"", ".dcp.read:is_dcp", folder=True, sharded_by=".sharded:DcpShards", keeps="items",
        index=".metadata", files=("*.distcp", "*.metadata", ".holdfast.json"), data=".distcp",
    ),
    Format(
        "safetensors-dir", ".safetensors.directory:describe", b"", ".safetensors.directory:is_directory", folder=True,
        choices=("safetensors",), written_by=".safetensors.write:lay_out_safetensors",
        takes=("keep_tree", "directory", "max_shard_size", "index", "stem", "save"), sharded_by=".sharded:SafetensorsShards",
        keeps="tensors", metadata=True, index="model.safetensors.index.json", files=SAFETENSORS,
        weights_by=".safetensors.directory:weight_files",
    ),
    # torch's last of all: who made something else of these files, and put it beside them, means that.
    Format(
        "gguf-dir", ".gguf.read:describe_directory", b"", ".gguf.read:is_directory", folder=True, keeps="tensors", metadata=True
    ),
    Format("deepspeed", ".rank_files.zero:describe", b"", ".rank_files.zero:is_deepspeed", folder=True),
    Format(
        "torch-dir", ".torch.directory:describe", b"", ".torch.directory:is_directory", folder=True,
        weights_by=".torch.directory:weight_files",
    ),
]  # fmt: skip
"""Every format, in the order in which content is compared with them: the first that matches has it. Of several that are written
under one name or suffix, the first is meant."""


def format_of(name: str) -> Format:
    """The entry of a format's name, as a checkpoint or a plan has it. Of anything else nothing is known."""
    for one in FORMATS:
        if one.name == name:
            return one
    return Format(name, "")


def chosen(name: str, among: Iterable[Format]) -> Format | None:
    """What `format=` means: the first of some formats that is called so."""
    for one in among:
        if name == one.name or name in one.choices:
            return one
    return None


def written_formats() -> list[Format]:
    """The formats that `save` writes."""
    return [one for one in FORMATS if one.written_by]


def rank_formats() -> list[Format]:
    """The formats that ranks write together, those that `save` writes as well first."""
    return sorted((one for one in FORMATS if one.sharded_by), key=lambda one: not one.written_by)


def titles(formats: Iterable[Format]) -> tuple[str, ...]:
    """What people may choose from."""
    return tuple(dict.fromkeys(one.title for one in formats))


def written_in_words() -> str:
    """The formats that `save` writes, and what their names end with, as people are told."""
    told = []
    for one in written_formats():
        ends = [suffix for suffix in one.suffixes if suffix != f".{one.title}"]
        more = f" ({', '.join(suffix or 'no suffix' for suffix in ends)})" if ends else ""
        told += [f"a {one.title} directory{more}" if one.folder else f"{one.title}{more}"] if one.suffixes else []
    return f"{', '.join(told[:-1])}, or {told[-1]}"


def file_suffixes() -> tuple[str, ...]:
    """What names of single files end with that are checkpoints."""
    return tuple(suffix for one in FORMATS if not one.folder for suffix in one.suffixes)
