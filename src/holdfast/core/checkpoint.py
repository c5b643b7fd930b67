"""`Checkpoint`: what `open` returns. A read-only mapping of names to lazy tensors, and all other
contents of the files."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from holdfast.core.arguments import check_patterns
from holdfast.core.chunk import Storage
from holdfast.core.digest import Digest, canonicalize, combine_digests
from holdfast.core.opaque import AnyValue
from holdfast.core.protocols import Description, Source
from holdfast.core.quantities import describe_value
from holdfast.core.registry import find_hook
from holdfast.core.runtime import compact_in_place
from holdfast.core.table import Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value, replace
from holdfast.errors import BadArgumentType, NoSuchTensor, Unsupported

if TYPE_CHECKING:
    from holdfast.core.sharing import SharedRows
    from holdfast.metadata import Metadata


MAX_COMPARED_NAMES = 10_000
"""The most names that are compared with one that does not exist, to suggest a similar one."""


class Alias(Value, frozen=True):
    """Tensors that share a storage: tied weights, or views of one buffer."""

    names: tuple[str, ...]
    storage: Storage


def find_aliases(table: Table, shared: SharedRows) -> tuple[Alias, ...]:
    """Return the storages that several rows of a table share, in the order of their first rows.

    Args:
        table: The tensors.
        shared: Which of its rows share storages.
    """
    aliases: list[Alias] = []
    for storage_id, rows in shared.groups():
        first_row = rows[0]
        storage = shared.find_storage(storage_id, table.lazy_tensor(first_row), first_row)
        aliases.append(Alias(tuple([table.names[row] for row in rows]), storage))
    return tuple(aliases)


def _reopen_and_transform(
    reopen: Callable[[Source], Checkpoint],
    transform: Callable[[Checkpoint], Checkpoint],
    source: Source,
) -> Checkpoint:
    """Open a checkpoint that arrived in another process, and describe it in another way again."""
    return transform(reopen(source))


class Checkpoint(Mapping[str, LazyTensor]):
    """An open checkpoint: a read-only mapping of names to lazy tensors.

    Use it as a context manager, which closes the files. Opening reads headers and indexes. The data
    of a tensor is read when you call a method that needs it.

    Attributes:
        path: The path or URL that was opened.
        format: `torch-zip`, `torch-legacy`, `torch-tar`, `torch-dir`, `torchscript`, `pt2`,
            `safetensors`, `safetensors-dir`, `dcp`, `native`, `npy`, `npz`, `gguf`, `gguf-dir`,
            `rank-files`, `deepspeed`, `megatron` or `meta-llama`.
        metadata: Text that the file contains about itself, such as the metadata of safetensors.
        foreign: The globals that a pickle mentions and that were not built.
        notes: Sentences about what is unusual in this file.
        non_model_keys: Keys at the top of the tree that do not belong to the model, such as the
            optimizer.

    Examples:
        >>> import holdfast
        >>> with holdfast.open("model.safetensors") as checkpoint:
        ...     print(checkpoint["layers.0.weight"].shape)
        ...     row = checkpoint["layers.0.weight"][0].numpy()  # reads one row
        (4, 3)
    """

    def __init__(
        self,
        source: Source,
        description: Description,
        *,
        reopen: Callable[[Source], Checkpoint] | None = None,
    ) -> None:
        """Make a checkpoint of its description. To open files, call `holdfast.open`.

        Args:
            source: The open files.
            description: What a format found in them.
            reopen: Makes the checkpoint of its source again in another process that receives the
                checkpoint as a pickle. It must be a function of a module.
        """
        self._reopen = reopen
        self._description = description
        self._aliases: tuple[Alias, ...] | None = None
        self._tree: object = None

        self.source = source
        """The open files, which the tensors are read from."""
        self.path = source.store.name
        """The path or URL that was opened."""
        self.stored: Table = description.tensors
        """The tensors as columns. They are available without making a lazy tensor for each."""
        self.is_flat = description.tree is description.tensors
        """Whether the checkpoint has tensors under their names and nothing else."""
        self.format = description.format
        """The name of the format."""
        self.foreign = description.foreign
        """The globals that a pickle mentions and that were not built."""
        self.notes: tuple[str, ...] = (*description.notes_on_blocks, *description.notes)
        """Sentences about what is unusual in this file."""
        self.notes_on_numbers = description.notes
        """The notes that remain true if quantization blocks are read as the numbers they encode."""
        self.usual_format = description.usual_format
        """The format in which other programs expect the tensors, if a layout map knows it."""
        self.torch_dist = description.torch_dist
        """Whether the names are those of Megatron. A save then adds two small files for it."""
        self.non_model_keys = description.non_model_keys
        """Keys at the top of the tree that do not belong to the model, such as the optimizer."""
        self.metadata = description.metadata
        """Text that the file contains about itself."""

    def __getitem__(self, name: str) -> LazyTensor:
        """Return a tensor by its name. Nothing is read.

        Raises:
            NoSuchTensor: No tensor has this name. The message suggests similar names.
            BadArgumentType: The name is not hashable, such as a list of names.
        """
        table = self._description.tensors
        try:
            row = table.row_indices[name]
        except TypeError:
            if isinstance(name, Hashable):
                raise
            raise BadArgumentType(
                f"a name is text, not {describe_value(name)}; read(*names) reads several",
                file=self.path,
            ) from None
        except KeyError:
            raise NoSuchTensor(
                self._describe_missing_name(name), file=self.path, tensor=None, found=name
            ) from None
        return table.lazy_tensor(row)

    def __iter__(self) -> Iterator[str]:
        return iter(self._description.tensors)

    def __len__(self) -> int:
        return len(self._description.tensors)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, Hashable) and name in self._description.tensors

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files.

        Arrays that were read stay valid. Lazy tensors of this checkpoint raise `Closed` when they
        are read.
        """
        self.source.store.close()

    def drop_lazy_tensors(self) -> None:
        """Forget the lazy tensors that opening has made, for a verb that only reads the columns.

        A checkpoint of a million tensors shrinks to a quarter. Nobody else may hold it.
        """
        table = self.stored.without_lazy_tensors()
        if self.is_flat and table is not self.stored:
            self.stored = table
            self._description = replace(self._description, tensors=table, tree=table)
            if isinstance(table.names, list):
                compact_in_place(table.names)

    def with_description(
        self, description: Description, transform: Callable[[Checkpoint], Checkpoint]
    ) -> Checkpoint:
        """Return a checkpoint of the same files that describes them in another way.

        Args:
            description: The tensors and values of the new checkpoint, such as renamed tensors.
            transform: Makes the new checkpoint of this one. It is called in another process that
                receives the new checkpoint as a pickle. It must be picklable itself.
        """
        reopen = None
        if self._reopen is not None:
            reopen = partial(_reopen_and_transform, self._reopen, transform)
        return Checkpoint(self.source, description, reopen=reopen)

    @property
    def tree(self) -> AnyValue:
        """All values, nested as they were saved.

        Its tensors are lazy tensors. Objects of classes that Holdfast does not build are `Opaque`.
        """
        if self._tree is None:
            if self.is_flat:
                # The table of a flat format makes its lazy tensors on request. A tree has them all.
                self._tree = dict(self._description.tensors)
            else:
                self._tree = self._description.tree
        return self._tree

    def model_names(self, prefix: str = "") -> list[str]:
        """Return the names of the tensors of the model.

        Args:
            prefix: Return only names that start with it. With the prefix of a non-model key, such
                as `optimizer.`, the tensors of that key are returned as well.
        """
        skipped_prefixes = tuple(
            [f"{key}." for key in self.non_model_keys if not prefix.startswith(f"{key}.")]
        )
        return [
            name
            for name in self
            if name.startswith(prefix) and not name.startswith(skipped_prefixes)
        ]

    def describe(self) -> Metadata:
        """Describe all tensors, with their boxes, and all other values. Nothing is read.

        Returns:
            The same kind of `holdfast.metadata.Metadata` for every format.
        """
        metadata: Metadata = find_hook("metadata_of")(
            self, stored_nbytes=self.stored_nbytes, flat=self.is_flat
        )
        return metadata

    @property
    def stored_nbytes(self) -> int:
        """The size of all files of the checkpoint in bytes."""
        store = self.source.store
        return sum(map(store.size, store.list()))

    @property
    def aliases(self) -> tuple[Alias, ...]:
        """The storages that several tensors share, each with the names of its tensors."""
        if self._aliases is None:
            # Imported here, because a program that reads one tensor does not need it.
            from holdfast.core.sharing import find_shared_rows

            shared_rows = find_shared_rows([self.stored], stored_aliases=True)
            self._aliases = find_aliases(self.stored, shared_rows)
        return self._aliases

    @property
    def nbytes(self) -> int:
        """The size of the tensor data in bytes. A storage that tensors share counts once."""
        # Imported here, because a program that reads one tensor does not need it.
        from holdfast.core.sharing import find_shared_rows

        return find_shared_rows([self.stored]).total_nbytes()

    def read(self, *names: str | Iterable[str]) -> dict[str, np.ndarray]:
        """Read several tensors at once, in parallel.

        This is much faster than reading one tensor after the other.

        Args:
            names: The names of the tensors, one by one or as lists. By default all tensors are
                read.

        Returns:
            The arrays by name, in the order of the names.

        Raises:
            NoSuchTensor: No tensor has one of the names.
            LimitExceeded: The arrays would take much more memory than is stored.
            HoldfastError: A tensor cannot be read.

        Examples:
            >>> arrays = checkpoint.read("layers.0.weight", "layers.0.bias")
            >>> arrays["layers.0.bias"]
            array([0., 0., 0.], dtype=float32)
        """
        # Imported here, because a program that reads one tensor does not need it.
        from holdfast.core.sharing import check_expansion

        table = self._description.tensors
        requested_names: Sequence[str] = table.names
        rows: Sequence[int] = range(len(requested_names))
        if names:
            requested_names = _flatten_names(names)
            # All names are checked before anything is read.
            for name in requested_names:
                if not isinstance(name, Hashable) or name not in table.row_indices:
                    self[name]  # Raises the error for this name.
            rows = [table.row_indices[name] for name in requested_names]
        # A small file can describe tensors that fill the memory.
        check_expansion(table, rows)
        return dict(zip(requested_names, table.read_arrays(rows), strict=True))

    def digests(self) -> dict[str, Digest]:
        """Return the dtype, the shape and the CRC-32 of each tensor.

        Equal tensors have equal digests, in whatever format, sharding or strides they are stored.
        Tensors whose checksum is recorded in the file are not read.
        """
        table = self.stored
        row_crcs = table.recorded_crcs()
        # Rows without a recorded checksum are read. Tensors on the meta device have no elements, and
        # so no checksum.
        unknown_rows: list[int] = []
        for row, kind_index in enumerate(table.kind_indices):
            if row not in row_crcs and not table.kinds[kind_index].traits.meta:
                unknown_rows.append(row)
        tensors = [table.lazy_tensor(row) for row in unknown_rows]
        row_crcs.update(zip(unknown_rows, self.source.digest(tensors), strict=True))

        # Very many tensors have few kinds, so dtypes and shapes are computed once for each kind.
        kind_descriptions = [canonicalize(kind.dtype, kind.shape) for kind in table.kinds]
        digests: dict[str, Digest] = {}
        for row, name in enumerate(table.names):
            dtype, shape = kind_descriptions[table.kind_indices[row]]
            digests[name] = Digest(dtype, shape, row_crcs.get(row))
        return digests

    def digest(self) -> str:
        """Return one digest of all tensors and their names, as 32 hexadecimal digits.

        Checkpoints with equal tensors have equal digests, in whatever format they are stored.
        Tensors whose checksum is recorded in the file are not read.
        """
        return combine_digests(self.digests())

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the path. The process that receives it opens the files again.

        It raises `Replaced` if the files are not the same any more.
        """
        if self._reopen is None:
            raise Unsupported(
                "this checkpoint cannot be sent to another process; open it there", file=self.path
            )
        return self._reopen, (self.source,)

    def __copy__(self) -> Checkpoint:
        return self

    def __deepcopy__(self, memo: object) -> Checkpoint:
        """Return this checkpoint. It is read-only, so a copy is not needed."""
        return self

    def _repr_html_(self) -> str:
        """Return the card that a notebook shows: facts, and a table of the first tensors."""
        # Imported here because only notebooks need them.
        from holdfast.core.notebook import MAX_ROWS, Bar, render_card, render_table
        from holdfast.core.order import sort_naturally
        from holdfast.core.text import format_nbytes

        tensors = [self[name] for name in sort_naturally(self)[:MAX_ROWS]]
        # At least 1, because the size of the largest tensor is a divisor.
        max_nbytes = max([1, *[tensor.nbytes for tensor in tensors]])
        rows: list[tuple[str | Bar, ...]] = []
        for tensor in tensors:
            size = Bar(format_nbytes(tensor.nbytes), tensor.nbytes / max_nbytes)
            rows.append((tensor.name, tensor.dtype.name, str(list(tensor.shape)), size))

        facts = [
            ("format", self.format),
            ("tensors", f"{len(self):,}"),
            ("foreign objects", f"{len(self.foreign):,}"),
        ]
        columns = ("name", "dtype", "shape", "size")
        return render_card(self.path, facts, tables=[render_table(columns, rows, len(self))])

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path!r} {self.format}, {len(self):,} tensors>"

    def _describe_missing_name(self, name: str) -> str:
        """Return the message for a name that no tensor has. It suggests up to three names."""
        import difflib

        # Comparing a name with very many others would take seconds.
        names = list(self)[:MAX_COMPARED_NAMES]
        similar_names = difflib.get_close_matches(str(name), names, n=3, cutoff=0.6)
        if not similar_names:
            return f"no tensor called {name!r}; it has {len(self):,} tensors"
        return f"no tensor called {name!r}; did you mean {' or '.join(map(repr, similar_names))}?"


def _flatten_names(names: Iterable[str | Iterable[str]]) -> list[str]:
    """Return names that were passed one by one or as lists, as one list."""
    flat_names: list[str] = []
    for name_or_names in names:
        if isinstance(name_or_names, str):
            flat_names.append(name_or_names)
        else:
            flat_names += check_patterns(name_or_names, "names=")
    return flat_names
