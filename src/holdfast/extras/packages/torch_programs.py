"""Exported programs in a `.pt2` that stock torch loads: what `torch.export.save` and `package_pt2` write, each storage once.

    holdfast.torch.package_program(torch.export.export(model, inputs), "model.pt2")
    holdfast.torch.package_program({"classify": first, "embed": second}, "heads.pt2")     one encoder, stored once

torch serialises the programs and their inputs; weights and constants are laid out and written here (formats/pt2/write.py). torch's
own writer shares storages within a model; here models share them, too, and torch's reader accepts that.

Other differences: a fake tensor, for which torch writes nothing and loads zeros, is refused; and a record has what its views reach,
where torch writes all of a storage (`trim=False` does that, and gives torch's bytes for one model).
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping

import torch
from torch._export.serde.serialize import _dataclass_to_dict, serialize_tensor_meta
from torch.export import ExportedProgram

from holdfast.core.options import validate_arguments
from holdfast.core.quantities import Size, describe_value
from holdfast.core.runtime import gc_paused
from holdfast.core.tensor import LazyTensor
from holdfast.engine.write import Progress
from holdfast.errors import BadArgumentType, CannotHold
from holdfast.extras.packages.pt2.program import summarise
from holdfast.extras.packages.pt2.schema import OBJECT, OPAQUE, TENSOR, WEIGHT
from holdfast.extras.packages.pt2.write import MODEL, ModelWeights, Pickled, lay_out_pt2
from holdfast.formats.torch.write import archive_name
from holdfast.stores.paths import local_path
from holdfast.torch import versions
from holdfast.verbs.shared.formats import check_archive_name
from holdfast.verbs.shared.planned import Planned, Saved, Writing, check_target, make_report_fields
from holdfast.verbs.shared.state import make_lazy_tree, tabulate_state

PROTOCOL = 2
"""The protocol of pickles in the archive: torch's `DEFAULT_PICKLE_PROTOCOL`."""


@validate_arguments
def package_program(
    exported_programs: ExportedProgram | Mapping[str, ExportedProgram],
    dst: str | os.PathLike[str],
    *,
    sample_inputs: bool = True,
    extra_files: Mapping[str, str | bytes] | None = None,
    opset_version: Mapping[str, int] | None = None,
    trim: bool = True,
    overwrite: bool = False,
    durable: bool = True,
    read_back: bool = False,
    max_memory: Size | None = None,
    dry_run: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Saved:
    """Save exported programs with their weights, so that stock torch loads them.

    A program that is given by itself is called `model`, and `torch.export.load` loads the one of that name. Those of other names
    torch's `load_pt2` gives; a note says so where `torch.export.load` has nothing to load. Storages that several
    programs share are written once. With `sample_inputs=False` the inputs that a program was exported with stay out of the file.
    Raises `CannotHold` with every weight that cannot be written or that a program lacks, by model and name; nothing is written.
    """
    versions.PT2_ARCHIVE.require("package_program")
    target = local_path(dst)
    check_archive_name(target)
    if not isinstance(exported_programs, ExportedProgram | Mapping):
        given = describe_value(exported_programs)
        raise BadArgumentType(
            f"exported_programs= takes what torch.export.export gives, or a dict of such, not {given}"
        )
    programs = (
        {MODEL: exported_programs}
        if isinstance(exported_programs, ExportedProgram)
        else dict(exported_programs)
    )
    wrong = [
        f"{name!r}: a {type(p).__name__}, and no exported program"
        for name, p in programs.items()
        if not isinstance(p, ExportedProgram)
    ]
    if wrong or not programs:
        raise CannotHold(
            "a package holds exported programs by their names", wrong or ["there is no program"]
        )
    writing = Writing(
        overwrite=overwrite,
        durable=durable,
        threads=threads,
        read_back=read_back,
        max_memory=max_memory,
        dry_run=dry_run,
    )
    check_target(target, directory=False, writing=writing)
    # torch makes a hundred thousand objects of a program, and a collection among all of its own takes longer than that.
    with gc_paused():
        parts = _parts(programs, sample_inputs, dict(opset_version) if opset_version else None)
    extra = {
        name: text.encode() if isinstance(text, str) else bytes(text)
        for name, text in (extra_files or {}).items()
    }
    plan = lay_out_pt2(parts, name=archive_name(target), extra=extra, trim=trim)
    return Planned(plan, Saved(**make_report_fields(plan, target)), writing).carry_out(progress)


def _parts(
    programs: Mapping[str, ExportedProgram], sample_inputs: bool, opset: dict[str, int] | None
) -> dict[str, ModelWeights]:
    """The programs as parts of a package. Their tensors are described together, so that storages stay shared."""
    problems: list[str] = []
    # Weights and constants of each model, in this order.
    values: dict[str, list[dict[str, torch.Tensor | Pickled]]] = {}
    for model, program in programs.items():
        values[model] = [
            _sort(model, program.state_dict, prefix=WEIGHT, problems=problems),
            _sort(model, program.constants, prefix=TENSOR, problems=problems),
        ]
        # torch would write a program without some of its weights, and fail to load it.
        signature = program.graph_signature
        known = {*program.state_dict, *program.constants}
        wanted = (*signature.inputs_to_parameters.values(), *signature.inputs_to_buffers.values())
        problems += [
            f"{model}.{name}: the program asks for it and does not have it"
            for name in wanted
            if name not in known
        ]
    if problems:
        raise CannotHold("these programs cannot be packaged", problems)

    raw = {
        model: [
            {name: value for name, value in part.items() if isinstance(value, torch.Tensor)}
            for part in parts
        ]
        for model, parts in values.items()
    }
    tree = make_lazy_tree(tabulate_state(raw))
    assert isinstance(tree, dict)
    packaged: dict[str, ModelWeights] = {}
    for model, program in programs.items():
        serialized, inputs = versions.serialize_program(program, opset, PROTOCOL)
        weights, constants = (
            {name: described.get(name, value) for name, value in part.items()}
            for part, described in zip(values[model], tree[model], strict=True)
        )
        # torch writes no bytes for a program that has no inputs.
        part = ModelWeights(weights, constants, serialized, inputs if sample_inputs else b"")
        problems += _find_other_dtypes(model, part)
        packaged[model] = part
    if problems:
        raise CannotHold("these programs cannot be packaged", problems)
    return packaged


def _sort(
    model: str, values: Mapping[str, object], *, prefix: str, problems: list[str]
) -> dict[str, torch.Tensor | Pickled]:
    """The tensors that become raw records, and the pickles of all other values, as in torch's writer. Objects come last."""
    found: dict[str, torch.Tensor | Pickled] = {}
    objects: dict[str, Pickled] = {}
    for name, value in values.items():
        if versions.is_fake(value):
            problems.append(
                f"{model}.{name}: a fake tensor has no data, and torch would load zeros"
            )
        elif isinstance(value, torch.Tensor) and type(value.data) is torch.Tensor:
            found[name] = value
        elif isinstance(value, torch.Tensor):
            buffer = io.BytesIO()
            torch.save(value, buffer, pickle_protocol=PROTOCOL)
            meta = _dataclass_to_dict(serialize_tensor_meta(value))
            found[name] = Pickled(
                buffer.getvalue(), prefix, meta, isinstance(value, torch.nn.Parameter)
            )
        elif prefix == TENSOR and isinstance(value, torch._C.ScriptObject):
            objects[name] = Pickled(torch._C._pickle_save(value), OBJECT)
        elif prefix == TENSOR and versions.is_custom_object(value):
            objects[name] = Pickled(pickle.dumps(value, protocol=PROTOCOL), OPAQUE)
        else:
            problems.append(
                f"{model}.{name}: a {type(value).__name__}, which such a file has no place for"
            )
    return found | objects


def _find_other_dtypes(model: str, part: ModelWeights) -> list[str]:
    """Return problems of weights whose dtype is not the one in the serialised program."""
    program = summarise(part.program if isinstance(part.program, bytes) else b"")
    problems = []
    for name, value in program.weights.items():
        weight = part.weights.get(name, part.constants.get(name))
        if isinstance(weight, LazyTensor) and value.dtype and value.dtype != weight.dtype.name:
            problems.append(
                f"{model}.{name}: {weight.dtype} where the program was exported with {value.dtype}"
            )
    return problems
