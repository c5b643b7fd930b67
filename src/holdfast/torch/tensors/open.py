"""`holdfast.torch.open`: a checkpoint as torch tensors, with every storage once.

    with holdfast.torch.open("model.pt") as checkpoint:
        w = checkpoint["encoder.weight"]          one tensor, read now
        state = checkpoint.read()                 all of them, in one parallel batch
        everything = checkpoint.tree              the nested state, parameters and all (`read_tree` onto a device)

Names over one storage of the file are views of one torch storage, with the offsets and strides that they had. Read one by one, they
are views of each other while one of them is in use. Names that stand alone are read again each time.

Sparse, quantised and nested tensors have their own name here, and not those of their parts.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType

import torch

from holdfast.core.arguments import check_patterns
from holdfast.core.checkpoint import Checkpoint
from holdfast.core.limits import Limits
from holdfast.core.opaque import AnyValue
from holdfast.core.options import validate_arguments
from holdfast.core.runtime import make_fork_safe
from holdfast.core.sharing import check_expansion
from holdfast.core.tensor import Composite
from holdfast.engine.files import tabulate
from holdfast.torch.arguments import device as device_given
from holdfast.torch.arguments import dtype as float_dtype
from holdfast.torch.tensors.allocate import (
    Fresh,
    Region,
    Want,
    make_storage,
    plan_regions,
    read_lazies,
    read_tensors,
    view_of,
)
from holdfast.torch.tensors.fill import fill
from holdfast.torch.tensors.from_lazy import torch_dtype
from holdfast.torch.tensors.tree import find_value, torch_tree
from holdfast.verbs.open import Openable
from holdfast.verbs.open import open as open_checkpoint

PARTS = frozenset(
    (
        *("indices", "values", "crow_indices", "col_indices", "ccol_indices", "row_indices"),
        *("int_repr", "scales", "zero_points", "buffer", "sizes", "strides", "offsets", "lengths"),
    )
)
"""The last word in the name of a composite's part."""

Place = torch.device | str | int


@validate_arguments
def open(
    path: Openable | Checkpoint,
    *,
    mmap: bool = False,
    verify: bool = True,
    limits: Limits | None = None,
    threads: int | None = None,
) -> TorchCheckpoint:
    """Open a checkpoint of any known format as torch tensors, without running anything in it; the words are `holdfast.open`'s.

    With `mmap=True` tensors are views of the mapped file (copied on write) where their layout allows. If a program
    truncates the file in place meanwhile, the process ends (SIGBUS). A checkpoint that is open already is taken as it is.
    """
    if isinstance(path, Checkpoint):
        return TorchCheckpoint(path)
    return TorchCheckpoint(
        open_checkpoint(path, mmap=mmap, verify=verify, limits=limits, threads=threads)
    )


class TorchCheckpoint(Mapping[str, torch.Tensor]):
    """An open checkpoint whose values are torch tensors, read when they are asked for. Also a context manager that closes it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.lazy = checkpoint
        """The checkpoint, whose values are lazy tensors."""
        self._names: dict[str, Composite | None] | None = None
        self._groups: dict[str, tuple[str, ...]] | None = None
        self._regions: dict[tuple[str, ...], dict[str, Region]] = {}
        self._storages: weakref.WeakValueDictionary[Region, torch.UntypedStorage] = (
            weakref.WeakValueDictionary()
        )
        self._lock = make_fork_safe(threading.RLock())

    def __getitem__(self, name: str) -> torch.Tensor:
        composite = self._listed().get(name) if isinstance(name, str) else None
        if composite is not None:
            return composite.torch()
        lazy = self.lazy[name]
        region = self._region(name)
        if region is None:
            return read_tensors({name: lazy})[name]
        lazy.source.store.size(
            lazy.chunks[0].storage.key
        )  # raises `Closed`, also where nothing is left to be read
        with self._lock:
            storage = self._storages.get(region)
            if storage is None:
                storage = self._read_region(region)
        return view_of(storage, region.views[name], torch_dtype(lazy.dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed())

    def __len__(self) -> int:
        return len(self._listed())

    def __contains__(self, name: object) -> bool:
        return name in self._listed()

    def __enter__(self) -> TorchCheckpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Tensors that were read stay valid."""
        self.lazy.close()

    @validate_arguments(dtype=float_dtype, device=device_given, names=check_patterns)
    def read(
        self,
        names: Iterable[str] | None = None,
        *,
        device: Place | None = None,
        dtype: torch.dtype | None = None,
        max_host_memory: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """Read several tensors (all of them when none is named) in one parallel batch; what shares a storage still does.

        They are fresh: nothing is shared with what was read before. `dtype` is for floating-point tensors, the others keep
        theirs. Memory beyond the tensors is 64 MiB, for those that are cast. Tensors on a GPU are read through page-locked memory,
        at most `max_host_memory` bytes of it (1 GiB unless said otherwise), which is kept for the next call.
        """
        listed = self._listed()
        order = list(listed if names is None else names)
        wholes = {name: whole for name in order if (whole := listed.get(name)) is not None}
        plain = [name for name in order if name not in wholes]
        for name in plain:
            if name not in self.lazy:
                self.lazy[name]  # raises, and says which names are like it
        _check_parts(wholes.values())
        made = read_tensors(
            self.lazy.stored,
            names=plain,
            device=_device(device),
            dtype=dtype,
            max_host_memory=max_host_memory,
        )
        made |= {name: _moved(whole.torch(), device, dtype) for name, whole in wholes.items()}
        return {name: made[name] for name in order}

    @property
    def tree(self) -> AnyValue:
        """The whole nested state with torch tensors in it; read anew each time, as by `read_tree()`."""
        return self.read_tree()

    @validate_arguments(dtype=float_dtype, device=device_given)
    def read_tree(
        self,
        *,
        device: Place | None = None,
        dtype: torch.dtype | None = None,
        max_host_memory: int | None = None,
    ) -> AnyValue:
        """The whole nested state with torch tensors in it: parameters are parameters, and what shares a storage still does.

        Objects of classes that are not built stay `Opaque`; tensors inside of them stay lazy. `max_host_memory` is as in `read`.
        """
        tree, how = self.lazy.tree, (device, dtype)
        # To list the names of a large checkpoint takes time, and without views nothing can be too large.
        if self.lazy.stored.rows_not_whole:
            _check_parts(whole for whole in self._listed().values() if whole is not None)
        made = read_lazies(
            tree, device=_device(device), dtype=dtype, max_host_memory=max_host_memory
        )
        return torch_tree(
            tree,
            lambda value: (
                _moved(value.torch(), *how) if isinstance(value, Composite) else made[id(value)]
            ),
        )

    def __reduce__(self) -> tuple[object, ...]:
        return TorchCheckpoint, (self.lazy,)

    def _repr_html_(self) -> str:
        """What Jupyter shows: the first tensors, and how many there are."""
        return self.lazy._repr_html_()

    def __repr__(self) -> str:
        return (
            f"<TorchCheckpoint {self.lazy.path!r} {self.lazy.format}, {len(self.lazy):,} tensors>"
        )

    def _listed(self) -> dict[str, Composite | None]:
        """Every name; with its composite where it is the name of one."""
        if self._names is None:
            names: dict[str, Composite | None] = {}
            for name in self.lazy:
                whole, _, part = name.rpartition(".")
                if part in PARTS and whole:
                    found = names[whole] if whole in names else find_value(self.lazy.tree, whole)
                    if isinstance(found, Composite) and part in found.parts:
                        names[whole] = found
                        continue
                names[name] = None
            self._names = names
        return self._names

    def _region(self, name: str) -> Region | None:
        with self._lock:
            if self._groups is None:
                self._groups = {
                    name: alias.names for alias in self.lazy.aliases for name in alias.names
                }
            group = self._groups.get(name)
            if group is None:
                return None
            if group not in self._regions:
                self._regions[group] = plan_regions(
                    {other: self.lazy[other] for other in group}
                ).by_name
            return self._regions[group].get(name)

    def _read_region(self, region: Region) -> torch.UntypedStorage:
        lazies = {name: self.lazy[name] for name in region.views}
        fresh = Fresh()
        storage = make_storage(
            region,
            {name: Want(lazy, torch_dtype(lazy.dtype)) for name, lazy in lazies.items()},
            fresh,
        )
        assert storage is not None, "tensors that are neither cast nor moved share a storage"
        fill(fresh.fills)
        self._storages[region] = storage
        return storage


def _check_parts(composites: Iterable[Composite]) -> None:
    """Raise `LimitExceeded` if the parts of composites take many more bytes than are stored. They are copied."""
    parts = [part for composite in composites for part in composite.parts.values()]
    check_expansion(tabulate([part.name for part in parts], parts))


def _device(device: Place | None) -> torch.device | None:
    """The device, a GPU with its number, as tensors there name it."""
    given = None if device is None else torch.device(device)
    if (
        given is not None
        and given.type == "cuda"
        and given.index is None
        and torch.cuda.is_available()
    ):
        return torch.device("cuda", torch.cuda.current_device())
    return given


def _moved(tensor: torch.Tensor, device: Place | None, dtype: torch.dtype | None) -> torch.Tensor:
    cast = (
        dtype
        if dtype is not None and tensor.is_floating_point() and not tensor.is_quantized
        else None
    )
    return tensor.to(device=_device(device), dtype=cast)
