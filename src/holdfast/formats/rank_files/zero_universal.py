"""DeepSpeed's universal checkpoints: a folder for each parameter, with a file for the weight and one for each moment.

    zero/emb.weight/fp32.pt       {"param": the whole tensor, "cat_dim": …}
    zero/emb.weight/exp_avg.pt    the same of a moment
    zero/emb.weight/step.pt       a tensor or a number
    zero/optimizer_state.pt       settings

`ds_to_universal` has put the ranks together already; of stage 3 as flat rows, whose shapes are those of `param_shapes`.
Buffers, ties and counters are in the model files beside, as in any step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from holdfast.core.protocols import Source
from holdfast.core.tensor import LazyTensor
from holdfast.errors import MetadataError, located
from holdfast.formats.rank_files.assemble import Assembly, RankFile, read_rank
from holdfast.formats.rank_files.beside import Moving
from holdfast.formats.rank_files.flat import FlatRow, FlatSlice, cut
from holdfast.formats.torch.tensors import brief

FILE = re.compile(r"zero/(?P<name>[^/]+)/(?P<what>\w{1,64})\.pt")
WEIGHT = "fp32"


def universal_files(keys: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The files of parameters: which, and what of it."""
    found = {}
    for key in keys:
        match = FILE.fullmatch(key)
        if match is not None:
            found[key] = match["name"], match["what"]
    return found


class Universal:
    """What the files of all parameters hold."""

    def __init__(
        self, source: Source, files: Mapping[str, tuple[str, str]], assembly: Assembly, *, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.files: list[RankFile] = []
        self.weights: dict[str, LazyTensor] = {}
        self.optimizer: dict[object, object] = {}
        moving = Moving(assembly)
        kinds: dict[str, dict[object, object]] = {}
        for number, (key, (name, what)) in enumerate(files.items()):
            file = read_rank(source, number, key)
            self.files.append(file)
            value = file.tree.get("param") if isinstance(file.tree, dict) else file.tree
            if isinstance(value, LazyTensor):
                with located(file=key, tensor=name):
                    value = _shaped(assembly.replica(name, [(0, value)]), shapes.get(name), assembly.source)
            if what != WEIGHT:
                kinds.setdefault(what, {})[name] = moving.moved(value)
            elif isinstance(value, LazyTensor):
                self.weights[name] = value
            else:
                raise MetadataError("the file of a weight has no tensor `param`", file=key, tensor=name, found=brief(value))
        self.optimizer.update(kinds)


def _shaped(tensor: LazyTensor, shape: tuple[int, ...] | None, source: Source) -> LazyTensor:
    """A flat row in its shape, where that is known. What is no row stays as it is: a step."""
    if shape is None or tensor.shape == shape or tensor.ndim != 1:
        return tensor
    if tensor.size != math.prod(shape):
        raise MetadataError(
            f"it has {tensor.size:,} elements, and param_shapes says {list(shape)}", expected=shape, found=tensor.shape
        )
    return cut(shape, [FlatSlice(FlatRow([tensor]), 0, tensor.size)], tensor.dtype, source=source)
