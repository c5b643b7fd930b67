"""`slices`: a checkpoint for programs that load models piece by piece (transformers, vLLM, SGLang).

They know the objects that `safetensors.safe_open(…).get_slice(name)` gives: a shape, a dtype, and `[…]` that reads. Here these
come out of any format. `stream` gives all tensors, one after the other, and reads ahead.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Self

import torch

from holdfast.core.limits import Limits
from holdfast.core.options import DEADLINE, validate_arguments
from holdfast.core.tensor import LazyTensor
from holdfast.engine.threads import BackgroundCall
from holdfast.torch.tensors.allocate import read_tensors
from holdfast.torch.tensors.fill import batches
from holdfast.torch.tensors.from_lazy import tensor_from_lazy, torch_dtype
from holdfast.verbs.open import Openable, hash_checkpoint
from holdfast.verbs.open import open as open_checkpoint

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from holdfast.extras.maps.find import AnyMap

Index = int | slice | EllipsisType | None | tuple[int | slice | EllipsisType | None, ...]

Read = Callable[[], dict[str, torch.Tensor]]
ShareBatch = Callable[
    [dict[str, LazyTensor]], tuple[Read, Callable[[Read], dict[str, torch.Tensor]]]
]
"""How a batch is read: by a function that may run on any thread, and by one that is given it, on the caller's."""

BATCH_NBYTES = 256 << 20
"""Bytes that `stream` reads at a time: enough for all reading threads, little beside a model."""


class Slice:
    """A tensor that has not been read. Indexing it reads what is asked for, and gives a torch tensor."""

    __slots__ = ("lazy",)

    def __init__(self, lazy: LazyTensor) -> None:
        self.lazy = lazy

    def __getitem__(self, index: Index) -> torch.Tensor:
        return tensor_from_lazy(self.lazy[index])

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.lazy.shape)

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.lazy.dtype)

    @property
    def ndim(self) -> int:
        return self.lazy.ndim

    def size(self) -> torch.Size:
        return self.shape

    def numel(self) -> int:
        return self.lazy.size

    def get_shape(self) -> list[int]:
        return list(self.lazy.shape)

    def get_dtype(self) -> str:
        """The dtype as safetensors names it: F32, BF16, …"""
        return self.lazy.dtype.safetensors or str(self.lazy.dtype)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __repr__(self) -> str:
        return f"<slice of {self.lazy.name!r}: {self.dtype}, {self.get_shape()}>"


class Slices(Mapping[str, Slice]):
    """The tensors of a checkpoint by name, as slices. The checkpoint is open until `close`."""

    def __init__(
        self,
        path: Openable,
        *,
        prefix: str,
        mmap: bool,
        verify: bool,
        limits: Limits | None,
        group: ProcessGroup | None,
        deadline: float,
        map: AnyMap | None,
    ) -> None:
        self._checkpoint = open_checkpoint(path, mmap=mmap, verify=verify, limits=limits, map=map)
        self._names = self._checkpoint.model_names(prefix)
        self._prefix, self._group, self._deadline = prefix, group, deadline
        self._doing = f"stream (mmap={mmap}, verify={verify}, limits={limits})"

    def __getitem__(self, name: str) -> Slice:
        return Slice(self._checkpoint[self._prefix + name])

    def __iter__(self) -> Iterator[str]:
        return (name[len(self._prefix) :] for name in self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<Slices {self._checkpoint.path!r}, {len(self):,} tensors>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def stream(
        self, *, skip: Callable[[str], bool] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Every name and its tensor, read whole, so that checksums are compared; the next ones while the caller works with these.

        In memory are the tensors of two batches, or the largest one. Names that `skip` says yes to are not read.
        With a group each rank reads its share of a batch, and gets the rest when the caller asks for the next tensor. All ranks go
        through the whole stream, with a `skip` that says the same.
        """
        names = [name for name in self if skip is None or not skip(name)]
        coming = map(
            dict,
            batches(
                [(name, self[name].lazy) for name in names],
                BATCH_NBYTES,
                lambda item: item[1].nbytes,
            ),
        )
        with self._sharing(names) as share:
            read, finish = share(next(coming, {}))
            tensors = finish(read)
            while tensors:
                read, finish = share(next(coming, {}))
                with BackgroundCall(read, name="holdfast-stream") as call:
                    yield from tensors.items()
                    tensors = finish(call.result)

    def _sharing(self, names: Sequence[str]) -> AbstractContextManager[ShareBatch]:
        if self._group is None:
            return nullcontext(lambda batch: (partial(read_tensors, batch), operator.call))
        from holdfast.torch.ranks.replicas import sharing

        mark = hash_checkpoint(self._checkpoint)
        return sharing(self._group, mark, names, doing=self._doing, deadline=self._deadline)

    def close(self) -> None:
        """Close the checkpoint; slices of it cannot be read any more."""
        self._checkpoint.close()


@validate_arguments
def slices(
    path: Openable | os.PathLike[str], *, prefix: str = "", mmap: bool = False, verify: bool = True, limits: Limits | None = None,
    group: ProcessGroup | None = None, deadline: float = DEADLINE, map: AnyMap | None = None,
) -> Slices:  # fmt: skip
    """A checkpoint of any format as a mapping of unread tensors, for programs that load a model piece by piece.

    `LlamaForCausalLM.from_pretrained(None, config=config, state_dict=slices("step-1000", prefix="model."))` makes a model of a
    training step as it lies. `prefix` selects the names that begin with it, and is taken off them.
    With a `group` of ranks that all want everything, as those of a server that is tensor parallel, `stream` reads each byte on one
    of them and hands it on; `[…]` reads on this rank alone. A rank without a sign of life for `deadline` seconds is lost.
    The rest is as in `holdfast.open`, also `map`, which shows the tensors in the layout of another framework.
    """
    return Slices(
        path,
        prefix=prefix,
        mmap=mmap,
        verify=verify,
        limits=limits,
        group=group,
        deadline=deadline,
        map=map,
    )
