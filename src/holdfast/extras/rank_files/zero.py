"""DeepSpeed's folders: the weights in full precision under their names, and everything else beside them.

    run/latest                                             the step to open
    run/global_step9/mp_rank_00_model_states.pt            stages 1 and 2: the model in 16 bits, shapes, buffers, counters
    …/zero_pp_rank_R_mp_rank_00_model_states.pt            stage 3: the same for a rank, without the parameters
    …/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt     the rank's part of weights in full precision, and of moments

    zero/emb.weight/fp32.pt       universal checkpoint (`ds_to_universal`): {"param": the whole tensor, "cat_dim": …}
    zero/emb.weight/exp_avg.pt    a moment; of stage 3 as a flat row, whose shape is in `param_shapes`
    zero/emb.weight/step.pt       a tensor or a number

The folder opens as the trained model, with the names of the module:

    emb.weight                            full precision, put together from all ranks; untrained tensors as they are stored
    deepspeed.module.emb.weight           the 16 bits that stages 1 and 2 store as well
    deepspeed.optimizer.exp_avg.…         moments by the names of their parameters; `state` and `param_groups` as they are
    deepspeed.state.global_steps          the rest of the first model file: counters, configuration, entries of the program

Tied parameters stay tied. Newer files list them; in older files they are one tensor in the module. Frozen parameters are taken from
the module where no list has them: files of stage 1 have no list. Folders with model-parallel ranks and experts are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, field

from holdfast.core.opaque import Opaque
from holdfast.core.protocols import Description, Source
from holdfast.core.sharing import identify_view
from holdfast.core.tensor import LazyTensor
from holdfast.core.text import list_names
from holdfast.core.value import replace
from holdfast.errors import FormatError, MetadataError, Unsupported, error_context
from holdfast.extras.rank_files.assemble import (
    Assembly,
    RankFile,
    described,
    free_key,
    moved,
    read_rank,
)
from holdfast.extras.rank_files.recognise import (
    RankSet,
    check_complete,
    chosen_step,
)
from holdfast.extras.rank_files.zero_parts import (
    FlatGroups,
    FlatRow,
    Optimizer,
    cut,
    flat_groups,
    optimizer_of,
    shapes_of,
)
from holdfast.formats.detect import begins_like_torch
from holdfast.formats.torch.tensors import brief

FILE = re.compile(r"zero/(?P<name>[^/]+)/(?P<what>\w{1,64})\.pt")
WEIGHT = "fp32"


class Universal:
    def __init__(
        self,
        source: Source,
        files: Mapping[str, tuple[str, str]],
        assembly: Assembly,
        *,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.files: list[RankFile] = []
        self.weights: dict[str, LazyTensor] = {}
        self.optimizer: dict[object, dict[object, object]] = {}
        for number, (key, (name, what)) in enumerate(files.items()):
            file = read_rank(source, number, key)
            self.files.append(file)
            value = file.tree.get("param") if isinstance(file.tree, dict) else file.tree
            if isinstance(value, LazyTensor):
                with error_context(file=key, tensor=name):
                    value = _shaped(
                        assembly.replica(name, [(0, value)]), shapes.get(name), assembly.source
                    )
            if what != WEIGHT:
                self.optimizer.setdefault(what, {})[name] = moved(value, assembly)
            elif isinstance(value, LazyTensor):
                self.weights[name] = value
            else:
                raise MetadataError(
                    "the file of a weight has no tensor `param`",
                    file=key,
                    tensor=name,
                    found=brief(value),
                )


def _shaped(tensor: LazyTensor, shape: tuple[int, ...] | None, source: Source) -> LazyTensor:
    if shape is None or tensor.shape == shape or tensor.ndim != 1:
        return tensor
    if tensor.size != math.prod(shape):
        message = f"it has {tensor.size:,} elements, and param_shapes says {list(shape)}"
        raise MetadataError(message, expected=shape, found=tensor.shape)
    return cut(shape, [(FlatRow([tensor]), 0, tensor.size)], tensor.dtype, source=source)


LATEST = "latest"
BESIDE = "deepspeed"
"""Everything except the weights of the model stands under this name."""

MODEL = re.compile(
    r"(?:zero_pp_rank_(?P<rank>0|[1-9]\d{0,8})_)?mp_rank_(?P<mp>\d{2,4})_model_states\.pt"
)
OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>0|[1-9]\d{0,8})_mp_rank_(?P<mp>\d{2,4})_?optim_states\.pt"
)
OTHER = re.compile(r"(?:layer_\d+.*[-_]model_states|expp_rank_\d+.*optim_states)\.pt")
"""Layers of a pipeline, and experts."""

TAKEN = (
    "module",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "buffer_names",
)
"""Entries of a model file that are shown as tensors, and left out of the rest."""


class StepFiles(Struct):
    whole: str | None = None
    """The model file of stages 1 and 2."""
    models: dict[int, str] = {}
    """The model files of stage 3."""
    optimizers: dict[int, str] = {}
    others: list[str] = []
    mp: set[int] = field(default_factory=set)
    twice: list[str] = []
    """Second files of a rank."""


def is_deepspeed(source: Source) -> bool:
    found = _steps(source.store.list())
    return any(
        begins_like_torch(source, key) for files in found.values() for key in _some_model(files)
    )


def describe(source: Source) -> Description:
    steps = _steps(source.store.list())
    step = chosen_step(
        source, [folder for folder, files in steps.items() if _some_model(files)], LATEST
    )
    files = steps[step]
    _check_files(files)
    below = f"{step}/zero/" if step else "zero/"
    found = filter(None, map(FILE.fullmatch, source.store.list() if not step else ()))
    universal = {match[0]: (match["name"], match["what"]) for match in found}
    if not universal and any(key.startswith(below) for key in source.store.list()):
        raise Unsupported(
            f"a universal checkpoint; open its folder {step!r} itself", file=step or None
        )
    return _Step(source, files, universal).description(step)


def _steps(keys: Iterable[str]) -> dict[str, StepFiles]:
    found: dict[str, StepFiles] = {}
    for key in keys:
        folder, _, name = key.rpartition("/")
        if "/" in folder or not name.endswith(".pt"):
            continue
        model, optimizer = MODEL.fullmatch(name), OPTIMIZER.fullmatch(name)
        match = model or optimizer
        if match is None and OTHER.fullmatch(name) is None:
            continue
        files = found.setdefault(folder, StepFiles())
        if match is None:
            files.others.append(key)
            continue
        files.mp.add(int(match["mp"]))
        of_ranks = files.optimizers if model is None else files.models
        if match["rank"] is None:
            files.whole = files.whole or key
        elif of_ranks.setdefault(int(match["rank"]), key) != key:
            files.twice.append(key)
    return found


def _some_model(files: StepFiles) -> list[str]:
    return [key for key in (files.whole, *files.models.values()) if key is not None][:1]


def _check_files(files: StepFiles) -> None:
    if files.others:
        raise Unsupported(
            "experts and the layers of a pipeline have files of their own, which this does not put together; open the files one by "
            f"one: {list_names(files.others)}",
            found=tuple(files.others[:5]),
        )
    if len(files.mp) > 1:
        ranks = [f"mp_rank_{rank:02d}" for rank in sorted(files.mp)]
        raise Unsupported(
            f"the model is split over model-parallel ranks ({list_names(ranks)}) by rules that the files do not say; open the "
            "files one by one, or convert it with the program that wrote it",
            found=tuple(ranks[:5]),
        )
    if files.twice:
        raise FormatError(
            "a rank has two files of one kind: files of two saves lie in one folder",
            file=files.twice[0],
        )
    if files.whole is not None and files.models:
        key = files.models[min(files.models)]
        raise FormatError(
            f"{files.whole} has a whole model, and this one a rank of stage 3: they are of two saves",
            file=key,
        )


class _Step:
    def __init__(
        self, source: Source, files: StepFiles, universal: Mapping[str, tuple[str, str]]
    ) -> None:
        self.limits = source.limits
        self.assembly = Assembly(source)
        self.own = self.assembly.source
        self.notes: list[str] = []
        models = {0: files.whole} if files.whole is not None else files.models
        self.models = [read_rank(source, rank, key) for rank, key in sorted(models.items())]
        self.optimizers: list[Optimizer] = []
        self.files = list(self.models)
        for rank, key in sorted(files.optimizers.items()):
            file = read_rank(source, rank, key)
            self.optimizers.append(optimizer_of(file))
            self.files.append(file)
        self.contents = [_model_content(file) for file in self.models]
        self.universal = (
            Universal(source, universal, self.assembly, shapes=self._shapes())
            if universal
            else None
        )
        self.files += self.universal.files if self.universal is not None else []
        self._split = bool(files.models)
        """Whether this is stage 3, whose model files have no parameters."""
        self._check_ranks(files)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        with error_context(file=self.models[0].key):
            groups = shapes_of(
                self.contents[0].get("param_shapes") or [], "param_shapes", self.limits
            )
        return {name: shape for group in groups for name, shape in group.items()}

    def _check_ranks(self, files: StepFiles) -> None:
        split = self._split
        if self.optimizers:
            first = self.optimizers[0]
            if (first.stage == 3) is not split:
                kind = "stage 3" if split else "stage 1 or 2"
                message = f"it is of stage {first.stage}, and the model files are of {kind}: they are of two saves"
                raise FormatError(message, file=first.key)
            world = first.partitions
            check_complete(RankSet("optimizer", world, files.optimizers))
            if split:
                check_complete(RankSet("model", world, files.models))
        elif self.universal is not None:
            check_complete(RankSet("model", max(models := files.models or {0: ""}) + 1, models))
        elif split:
            raise FormatError(
                "the optimizer files are missing, and with them the weights: a model file of stage 3 has none"
            )
        for file, content in zip(self.models[1:], self.contents[1:], strict=True):
            for key in ("global_steps", "param_shapes", "frozen_param_shapes"):
                if content.get(key) != self.contents[0].get(key):
                    message = f"{key} differs from that of rank {self.models[0].rank}: they are of two saves"
                    raise FormatError(message, file=file.key)

    def description(self, step: str) -> Description:
        weights, optimizer = self._weights()
        kept: dict[object, object] = {}
        if len(self.models) == 1 and self.models[0].rank == 0 and not self._split:
            kept["module"] = moved(self.contents[0]["module"], self.assembly)
        kept["optimizer"] = optimizer
        kept["state"] = moved(
            {key: value for key, value in self.contents[0].items() if key not in TAKEN},
            self.assembly,
        )
        beside = free_key(BESIDE, weights)
        stage = self.optimizers[0].stage if self.optimizers else 0
        metadata = {"zero_stage": str(stage), "ranks": str(max(1, len(self.optimizers)))} | (
            {"step": step} if step else {}
        )
        found = described(
            "deepspeed", {**weights, beside: kept}, self.files, source=self.own, notes=self.notes, metadata=metadata,
            unequal=self.assembly.unequal,
        )  # fmt: skip
        return replace(found, non_model_keys=(beside,))

    def _weights(self) -> tuple[dict[str, LazyTensor], dict[object, object]]:
        masters: dict[str, LazyTensor] = {}
        optimizer: dict[object, object] = {}
        if self.optimizers:
            with error_context(file=self.models[0].key):
                shapes = shapes_of(
                    self.contents[0].get("param_shapes"), "param_shapes", self.limits
                )
            groups = flat_groups(self.optimizers, shapes)
            for number in range(len(groups.places)):
                masters |= groups.tensors(
                    number, [one.masters[number] for one in self.optimizers], source=self.own
                )
            optimizer = self._optimizer(groups)
        elif self.universal is not None:
            masters, optimizer = self.universal.weights, {**self.universal.optimizer}
        else:
            self.notes.append(
                "there are no optimizer files, so these are the weights as the model had them, and no others"
            )
        with error_context(file=self.models[0].key):
            frozen = self._frozen()
            return self._named(masters, frozen), optimizer

    def _frozen(self) -> dict[str, LazyTensor]:
        frozen, fragments = (
            self.contents[0].get("frozen_param_shapes"),
            [content.get("frozen_param_fragments") for content in self.contents],
        )
        if not frozen:
            return {}
        (shapes,) = shapes_of(frozen, "frozen_param_shapes", self.limits)
        found = {}
        for name, shape in shapes.items():
            parts = [
                part
                for own in fragments
                if isinstance(own, dict) and isinstance(part := own.get(name), LazyTensor)
            ]
            with error_context(tensor=name):
                if len(parts) != len(self.models):
                    raise MetadataError(
                        "not every model file has its part of this frozen parameter"
                    )
                found[name] = self._frozen_tensor(name, shape, parts)
        return found

    def _frozen_tensor(
        self, name: str, shape: tuple[int, ...], parts: Sequence[LazyTensor]
    ) -> LazyTensor:
        if not self._split:
            if parts[0].shape != shape:
                message = f"a frozen parameter of {list(parts[0].shape)}, and its shape is said to be {list(shape)}"
                raise MetadataError(message, expected=shape, found=parts[0].shape)
            return self.assembly.replica(name, [(0, parts[0])])
        row = FlatRow(parts)
        size = LazyTensor("", row.dtype, shape, (), self.own).size
        step = -(-size // len(parts))
        if any(part.size != step for part in parts):
            raise MetadataError(
                f"parts of {', '.join(str(part.size) for part in parts[:5])} elements, and {len(parts)} ranks have {step} each of "
                f"{size:,}",
                expected=step, found=tuple(part.size for part in parts[:5]),
            )  # fmt: skip
        return cut(shape, [(row, 0, size)], row.dtype, source=self.own)

    def _named(
        self, masters: Mapping[str, LazyTensor], frozen: Mapping[str, LazyTensor]
    ) -> dict[str, LazyTensor]:
        """Every name of the module with its tensor: in full precision, frozen, tied to one of these, or the module's own."""
        module = self.contents[0]["module"]
        entries = {
            name: value
            for name, value in module.items()
            if isinstance(name, str) and isinstance(value, LazyTensor)
        }
        shared = self.contents[0].get("shared_params")
        tied = (
            {str(name): str(other) for name, other in shared.items()}
            if isinstance(shared, dict)
            else {}
        )
        known = {**masters, **frozen}
        listed_buffers = self.contents[0].get("buffer_names")
        buffers = listed_buffers if isinstance(listed_buffers, list | tuple | set) else ()
        firsts = {_same(entry): name for name, entry in reversed(entries.items()) if name in known}
        found: dict[str, LazyTensor] = {}
        lost = []
        for name, entry in entries.items():
            # What is tied is tied, also where a universal checkpoint has a copy of it in 16 bits.
            other = (
                tied[name]
                if tied.get(name) in known
                else name
                if name in known
                else firsts.get(_same(entry), name)
            )
            if other in known:
                found[name] = known[other]
            elif self._split and not entry.size and name not in buffers:
                # Stage 3 leaves an empty tensor in the place of a parameter.
                lost.append(name)
            else:
                found[name] = self._buffer(name)
        found |= {name: tensor for name, tensor in known.items() if name not in found}
        found |= {
            name: known[other]
            for name, other in tied.items()
            if name not in found and other in known
        }
        if lost:
            self.notes.append(
                f"the files have no elements of {list_names([repr(name[:80]) for name in lost])}, which the module lists"
            )
        return found

    def _buffer(self, name: str) -> LazyTensor:
        copies = [
            (file.rank, value)
            for file, content in zip(self.models, self.contents, strict=True)
            if isinstance(value := content["module"].get(name), LazyTensor)
        ]
        if len(copies) != len(self.models):
            raise MetadataError("not every model file has it", tensor=name)
        return self.assembly.replica(name, copies)

    def _optimizer(self, groups: FlatGroups) -> dict[object, object]:
        moments: dict[object, dict[str, LazyTensor]] = {}
        rest: dict[object, dict[object, object]] = {}
        for number in range(len(groups.places)):
            states = [one.states[number] for one in self.optimizers]
            for key in states[0]:
                values = [state.get(key) for state in states]
                parts = [value for value in values if isinstance(value, LazyTensor)]
                rows = len(parts) == len(values) and all(part.ndim == 1 for part in parts)
                if rows and groups.lie_alike(number, parts):
                    moments.setdefault(key, {}).update(
                        groups.tensors(number, parts, source=self.own)
                    )
                else:
                    rest.setdefault(number, {})[key] = self._alike(
                        f"{BESIDE}.optimizer.state.{number}.{brief(key)}", values
                    )
        base = self.optimizers[0].content.get(
            "optimizer_state_dict" if groups.split else "base_optimizer_state"
        )
        settings = base.get("param_groups") if isinstance(base, dict) else None
        others = {"state": rest, "param_groups": moved(settings, self.assembly)}
        return {
            **moments,
            **{key: value for key, value in others.items() if value and key not in moments},
        }

    def _alike(self, name: str, values: Sequence[object]) -> object:
        first, key = values[0], self.optimizers[0].key
        if all(isinstance(value, LazyTensor) for value in values):
            copies = [
                (one.rank, value)
                for one, value in zip(self.optimizers, values, strict=True)
                if isinstance(value, LazyTensor)
            ]
            made = self.assembly.replica(name, copies)
            if made.size == 1 and name in self.assembly.unequal:
                raise FormatError(
                    f"{name} is not the same on all ranks: they are of two saves", file=key
                )
            return made
        if all(isinstance(value, int | float | str | bool | None) for value in values):
            differing = next(
                (one for one, value in zip(self.optimizers, values, strict=True) if value != first),
                None,
            )
            if differing is not None:
                message = f"{name} is not the same as on rank {self.optimizers[0].rank}: they are of two saves"
                raise FormatError(message, file=differing.key)
        return first


def _model_content(file: RankFile) -> dict[object, dict[object, object]]:
    content = file.tree
    if not isinstance(content, dict) or not isinstance(content.get("module"), dict):
        found = type(content).__name__ if not isinstance(content, Opaque) else str(content.what)
        raise FormatError(
            "not a model file of DeepSpeed: it has no dict `module`", file=file.key, found=found
        )
    return content


def _same(tensor: LazyTensor) -> object:
    if not tensor.chunks:
        return id(tensor)
    return identify_view(tensor) if tensor.size else tensor.chunks[0].storage.label
