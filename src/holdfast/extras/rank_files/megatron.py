"""Megatron's folders: the parameters of tensor- and pipeline-parallel ranks, put together by rules.

    run/latest_checkpointed_iteration.txt                  200, or release
    run/iter_0000200/mp_rank_00/model_optim_rng.pt         tensor-parallel rank 0
    …/mp_rank_01_003/model_optim_rng.pt                    tensor-parallel rank 1 of stage 3 of a pipeline

The files do not contain how a parameter was cut. Rules by names do, in the syntax of `reshard`: `RULES` for Megatron's own layers,
and before them those of `open(…, rules=…)`. A parameter without a rule is a replica, and must be equal on all ranks. So a cut
parameter without a rule is refused, and never joined by guess.

Two cuts are not what they look like. A gated layer (`swiglu`) has two matrices on top of each other, and each rank half of both:

    rank 0  │ gate[0:2] up[0:2] │        whole  │ gate[0:2] gate[2:4] up[0:2] up[2:4] │
    rank 1  │ gate[2:4] up[2:4] │

The arguments of the run tell whether a layer is gated. Before version 1 of these files, queries, keys and values lay so, too.

The stages of a pipeline count their layers from 0. They are renumbered in the order in which a batch passes them; with `model0`,
`model1`, … in a file, through the first part of all stages, then the second.

The folder opens as the model, with the names of the files. `megatron.…` has the rest: arguments, counters, and each rank's state
of the optimizer, which goes by numbers and is not put together.

Names and cuts as of `megatron/training/checkpointing.py` and `megatron/core/tensor_parallel/layers.py` of Megatron-LM 0.7 to 0.12.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from holdfast.core.box import Box
from holdfast.core.opaque import Opaque
from holdfast.core.patterns import make_matcher
from holdfast.core.placement_rules import parse_rule
from holdfast.core.protocols import Description, Source
from holdfast.core.tensor import LazyTensor
from holdfast.core.text import list_names
from holdfast.core.tree import FREE_CHARACTERS, NAME_CHARACTERS_A_BYTE, join_linked_path, walk
from holdfast.core.value import Value, replace
from holdfast.errors import (
    BadPlacement,
    FormatError,
    LimitExceeded,
    MetadataError,
    Unsupported,
    error_context,
)
from holdfast.extras.rank_files.assemble import (
    Assembly,
    RankBox,
    RankFile,
    described,
    free_key,
    moved,
    read_rank,
)
from holdfast.extras.rank_files.recognise import Place, chosen_step, megatron_files

POINTER = "latest_checkpointed_iteration.txt"
BESIDE = "megatron"
RULES = (
    "*word_embeddings.weight: tp=0",
    "*word_embeddings_for_head.weight: tp=0",
    "*output_layer.weight: tp=0",
    "*output_layer.bias: tp=0",
    "*lm_head.bias: tp=0",
    *(
        f"*.{layer}.{what}: tp=0"
        for layer in (
            "query_key_value",
            "query",
            "key_value",
            "linear_qkv",
            "linear_q",
            "linear_kv",
            "dense_h_to_4h",
            "linear_fc1",
        )
        for what in ("weight", "bias")
    ),
    *(
        f"*{layer}.weight: tp=1"
        for layer in ("attention.dense", ".linear_proj", ".dense_4h_to_h", ".linear_fc2")
    ),
)
"""How Megatron's own layers are cut: by rows where outputs are split, by columns where inputs are."""

GATED = ("dense_h_to_4h", "linear_fc1")
JOINED = ("query_key_value", "key_value")

OWN_STATE = ("optimizer", "rng_state")

MODEL = re.compile(r"model(\d{0,3})")


class Rank(Value):
    """One file, and its rank in the grid."""

    tp: int
    pp: int
    file: RankFile

    @property
    def content(self) -> dict[object, object]:
        if not isinstance(self.file.tree, dict):
            raise FormatError("not a file of Megatron: it has no dict", file=self.file.key)
        return self.file.tree

    def argument(self, name: str) -> object:
        """One of the arguments of the run, which are a pickled namespace; None where it is missing."""
        args = self.content.get("args")
        return (
            args.attribute(name)
            if isinstance(args, Opaque)
            else args.get(name)
            if isinstance(args, dict)
            else None
        )


def describe(source: Source) -> Description:
    steps = megatron_files(source.store.list())
    step = chosen_step(source, list(steps), POINTER, named=_folder)
    ranks = _grid(source, steps[step])
    return _Iteration(source, ranks).description(step)


def _folder(said: str) -> str:
    return (
        f"iter_{int(said):07d}" if said.isascii() and said.isdecimal() and len(said) < 19 else said
    )


def _grid(source: Source, files: Mapping[Place, str]) -> list[Rank]:
    experts = [key for (_, _, more), key in files.items() if more]
    if experts:
        raise Unsupported(
            "ranks of experts are not put together; open the files one by one", file=experts[0]
        )
    flat = [key for (_, pp, _), key in files.items() if pp is None]
    if flat and len(flat) < len(files):
        raise FormatError(
            "some files are of a pipeline and some are not: they are of two runs", file=flat[0]
        )
    ranks = [
        Rank(tp, pp or 0, read_rank(source, number, key))
        for number, ((tp, pp, _), key) in enumerate(sorted(files.items()))
    ]
    first = ranks[0]
    if first.argument("expert_model_parallel_size") not in (None, 1):
        raise Unsupported(
            "ranks of experts are not put together; open the files one by one", file=first.file.key
        )
    sizes = max(rank.tp for rank in ranks) + 1, max(rank.pp for rank in ranks) + 1
    for at, (name, size) in enumerate(zip(("tensor", "pipeline"), sizes, strict=True)):
        said = first.argument(f"{name}_model_parallel_size")
        if type(said) is int and said != size:
            raise FormatError(
                f"there are files of {size} {name}-parallel ranks, and the arguments of the run say {said}: get all files of one "
                "save into one folder", file=first.file.key, expected=said, found=sizes[at],
            )  # fmt: skip
    if len(ranks) != sizes[0] * sizes[1]:
        # Bounded by the files that are there, whatever numbers they have: each name has one hole before it at the most.
        there = {(rank.tp, rank.pp) for rank in ranks}
        near = (
            (tp, pp)
            for rank in ranks
            for tp in (rank.tp, rank.tp - 1, 0)
            for pp in (rank.pp, rank.pp - 1, 0)
        )
        absent = sorted({place for place in near if min(place) >= 0 and place not in there})
        names = [f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if not flat else "") for tp, pp in absent]
        raise FormatError(
            f"{len(ranks)} of {sizes[0] * sizes[1]} ranks are here, and {list_names(names)} "
            f"{'is' if len(names) == 1 else 'are'} missing: get all files of the save into one folder",
            expected=sizes[0] * sizes[1], found=len(ranks),
        )  # fmt: skip
    for rank in ranks[1:]:
        for key in ("iteration", "checkpoint_version"):
            if _plain(rank.content.get(key)) != _plain(first.content.get(key)):
                raise FormatError(
                    f"{key} differs from that of {first.file.key}: they are of two saves",
                    file=rank.file.key,
                )
    return ranks


def _plain(value: object) -> object:
    return value if isinstance(value, int | float | str | None) else None


Copies = list[tuple[Rank, LazyTensor]]
"""A parameter on the tensor-parallel ranks of a stage, in the order of the ranks."""


class _Iteration:
    def __init__(self, source: Source, ranks: Sequence[Rank]) -> None:
        self.assembly = Assembly(source)
        self.source = source
        self.ranks = ranks
        self.tp = max(rank.tp for rank in ranks) + 1
        self.own = [parse_rule(rule) if isinstance(rule, str) else rule for rule in source.rules]
        for rule in self.own:
            if set(rule.axes) - {"tp"}:
                raise BadPlacement(
                    f"rule {rule.pattern!r}: Megatron's files are cut over 'tp' alone"
                )
        self.rules = [*self.own, *(parse_rule(text) for text in RULES)]
        stored = sum(rank.file.nbytes for rank in ranks)
        self._spare = 100_000 + stored
        self._room = NAME_CHARACTERS_A_BYTE * stored + FREE_CHARACTERS

    def description(self, step: str) -> Description:
        parameters: dict[str, Copies] = {}
        for chunk in self._chunks():
            for name, copies in chunk.items():
                parameters.setdefault(name, []).extend(copies)
        if not parameters:
            raise FormatError(
                "not a file of Megatron: it has no model with tensors in it",
                file=self.ranks[0].file.key,
            )
        for rule in self.own:
            if not any(map(make_matcher(rule.pattern), parameters)):
                raise BadPlacement(f"rule {rule.pattern!r} matches no tensor")
        weights = {name: self._tensor(name, copies) for name, copies in parameters.items()}
        kept = {
            key: value
            for key, value in self.ranks[0].content.items()
            if not _is_model(key) and key not in OWN_STATE
        }
        rest = cast("dict[object, object]", moved(kept, self.assembly))
        own = {
            rank.file.key.split("/")[-2]: moved(
                {key: rank.content[key] for key in OWN_STATE if key in rank.content}, self.assembly
            )
            for rank in self.ranks
        }
        rest |= {"ranks": {name: value for name, value in own.items() if value}}
        beside = free_key(BESIDE, weights)
        metadata = {
            "tensor_parallel": str(self.tp),
            "pipeline_parallel": str(len(self.ranks) // self.tp),
        }
        found = described(
            "megatron", {**weights, beside: rest}, [rank.file for rank in self.ranks], source=self.assembly.source,
            metadata=metadata | ({"step": step} if step else {}), unequal=self.assembly.unequal,
        )  # fmt: skip
        return replace(found, non_model_keys=(beside,))

    def _chunks(self) -> list[dict[str, Copies]]:
        """The parameters of each stage, in the order in which a batch passes. Names count the layers of the whole model."""
        keys = [key for key in self.ranks[0].content if _is_model(key)]
        keys.sort(key=lambda key: (len(str(key)), str(key)))
        local = [self._stage(key, pp) for key in keys for pp in range(len(self.ranks) // self.tp)]
        if len(local) < 2:
            return local
        before: dict[str, int] = {}
        found = []
        for chunk in local:
            numbers: dict[str, set[int]] = {}
            for name in chunk:
                split = _layer(name)
                if split is not None:
                    numbers.setdefault(split[0], set()).add(split[1])
            offsets = {}
            for stem, own in numbers.items():
                start = before.get(stem, 0)
                if own == set(range(len(own))):
                    offsets[stem] = start
                elif own != set(range(start, start + len(own))):
                    layers = list_names([str(n) for n in sorted(own)])
                    raise MetadataError(
                        f"a stage has layers {layers} under {stem[:80]!r}, which do not count up "
                        "from 0: nobody can say which ones of the whole model they are",
                        found=tuple(sorted(own)[:5]),
                    )
                before[stem] = start + len(own)
            found.append({_renumbered(name, offsets): copies for name, copies in chunk.items()})
        said = self.ranks[0].argument("num_layers")
        if len(before) == 1 and type(said) is int and sum(before.values()) != said:
            message = f"all stages together have {sum(before.values())} layers, and the arguments of the run say {said}"
            raise FormatError(
                message, file=self.ranks[0].file.key, expected=said, found=sum(before.values())
            )
        return found

    def _stage(self, key: object, pp: int) -> dict[str, Copies]:
        own = sorted((rank for rank in self.ranks if rank.pp == pp), key=lambda rank: rank.tp)
        flats = []
        for rank in own:
            with error_context(file=rank.file.key):
                flats.append(self._flatten(rank.content.get(key)))
        for rank, flat in zip(own[1:], flats[1:], strict=True):
            differing = sorted(flat.keys() ^ flats[0].keys())
            if differing:
                message = f"one of {own[0].file.key} and this file has it and the other has not: they are of two runs"
                raise MetadataError(message, file=rank.file.key, tensor=differing[0][:200])
        return {
            name: [(rank, flat[name]) for rank, flat in zip(own, flats, strict=True)]
            for name in flats[0]
        }

    def _flatten(self, model: object) -> dict[str, LazyTensor]:
        found: dict[str, LazyTensor] = {}

        def inside(value: object) -> Iterable[tuple[object, object]] | None:
            return (
                [item for item in value.items() if isinstance(item[0], str)]
                if isinstance(value, dict)
                else None
            )

        for way, value in walk(
            model, inside, max_values=self._spare, max_depth=self.source.limits.depth
        ):
            name = join_linked_path(way)
            self._spare -= 1
            self._room -= len(name)
            if self._room < 0:
                raise LimitExceeded("the model refers to the same long names too often")
            if isinstance(value, LazyTensor):
                found[name] = value
        return found

    def _tensor(self, name: str, tensors: Copies) -> LazyTensor:
        rule = next((rule for rule in self.rules if make_matcher(rule.pattern)(name)), None)
        if rule is None or not rule.axes or self.tp == 1:
            return self.assembly.replica(
                name, [(rank.file.rank, tensor) for rank, tensor in tensors]
            )
        with error_context(tensor=name):
            axis, first = rule.axes["tp"], tensors[0][1]
            for rank, tensor in tensors:
                if tensor.shape != first.shape or tensor.dtype is not first.dtype:
                    raise MetadataError(
                        f"it is {first.dtype} {list(first.shape)} on one rank and {tensor.dtype} {list(tensor.shape)} on another",
                        file=rank.file.key, expected=first.shape, found=tensor.shape,
                    )  # fmt: skip
            if not -first.ndim <= axis < first.ndim:
                raise BadPlacement(
                    f"rule {rule.pattern!r}: a tensor of {list(first.shape)} has no dimension {axis}"
                )
            axis %= first.ndim
            blocks = 1 if rule in self.own else self._blocks(name)
            length, uneven = divmod(first.shape[axis], blocks)
            if uneven:
                raise MetadataError(
                    f"{first.shape[axis]} rows are not {blocks} matrices", found=first.shape
                )
            shape = (*first.shape[:axis], first.shape[axis] * self.tp, *first.shape[axis + 1 :])
            parts = [
                RankBox(
                    rank.file.rank,
                    *_block(
                        tensor, axis, length, number=block, at=(block * self.tp + rank.tp) * length
                    ),
                )
                for rank, tensor in tensors
                for block in range(blocks)
            ]
            return self.assembly.tensor(name, first.dtype, shape, parts=parts, traits=first.traits)

    def _blocks(self, name: str) -> int:
        """The number of matrices on top of each other. A rank has a part of each."""
        layer, first = name.split(".")[-2] if "." in name else "", self.ranks[0]
        args = first.content.get("args")
        if layer in GATED:
            if args is None:
                raise Unsupported(
                    "the file has no arguments of the run, which would say whether this layer is gated; say how it is cut: "
                    f"rules=['*.{layer}.weight: tp=0'] where it is not",
                    file=first.file.key,
                )
            gated = any(
                first.argument(key) is True for key in ("swiglu", "gated_linear_unit", "geglu")
            )
            return 2 if gated or isinstance(first.argument("glu_activation"), str) else 1
        version = first.content.get("checkpoint_version", 0)
        if layer in JOINED and not (isinstance(version, int | float) and version >= 1):
            return 3 if layer == "query_key_value" else 2
        groups = first.argument("num_query_groups")
        grouped = (
            first.argument("group_query_attention") is True
            and type(groups) is int
            and groups < self.tp
        )
        if grouped and layer in ("query_key_value", "linear_qkv", "linear_kv", "key_value"):
            raise Unsupported(
                f"{groups} groups of keys on {self.tp} ranks: some ranks have the same, which is not put together"
            )
        return 1


def _block(
    tensor: LazyTensor, axis: int, length: int, *, number: int, at: int
) -> tuple[Box, LazyTensor]:
    offsets = [0] * tensor.ndim
    offsets[axis] = at
    own = (slice(None),) * axis + (slice(number * length, (number + 1) * length),)
    part = tensor[own]
    return Box.from_offsets(offsets, part.shape), replace(part, traits=tensor.traits)


def _is_model(key: object) -> bool:
    return isinstance(key, str) and MODEL.fullmatch(key) is not None


def _layer(name: str) -> tuple[str, int] | None:
    words = name.split(".")
    at = next(
        (at for at in range(len(words) - 1) if words[at] == "layers" and words[at + 1].isdecimal()),
        None,
    )
    if at is None or len(words[at + 1]) > 9:
        return None
    return ".".join(words[: at + 1]), int(words[at + 1])


def _renumbered(name: str, offsets: Mapping[str, int]) -> str:
    split = _layer(name)
    if split is None or not offsets.get(split[0]):
        return name
    stem, number = split
    rest = name[len(f"{stem}.{number}") :]
    return f"{stem}.{number + offsets[stem]}{rest}"
