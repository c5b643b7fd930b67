"""`Checkpoint`: what `open` returns. A read-only mapping of names to `LazyTensor`s, and everything around them."""

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
from holdfast.core.table import Table
from holdfast.core.tensor import LazyTensor
from holdfast.core.value import Value, replace
from holdfast.errors import BadArgumentType, NoSuchTensor, Unsupported

if TYPE_CHECKING:
    from holdfast.core.sharing import SharedRows
    from holdfast.metadata import Metadata


class Alias(Value, frozen=True):
    """Names that share one storage: tied weights, or views of one buffer."""

    names: tuple[str, ...]
    storage: Storage


def find_aliases(table: Table, shared: SharedRows) -> tuple[Alias, ...]:
    """The storages that several rows of a table share, in the order of first rows."""
    each = (
        (shared.storage_of(number, table.lazy_tensor(rows[0]), rows[0]), rows)
        for number, rows in shared.groups()
    )
    return tuple(
        [Alias(tuple([table.names[row] for row in rows]), storage) for storage, rows in each]
    )


def _seen_again(
    first: Callable[[Source], Checkpoint],
    through: Callable[[Checkpoint], Checkpoint],
    source: Source,
) -> Checkpoint:
    return through(first(source))


class Checkpoint(Mapping[str, LazyTensor]):
    """An open checkpoint. Use it as a mapping, and as a context manager that closes the files behind it.

    The mapping has the tensors by name, as `LazyTensor`s. `tree` has all values, as they were saved.

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
    """

    def __init__(
        self,
        source: Source,
        description: Description,
        *,
        again: Callable[[Source], Checkpoint] | None = None,
    ) -> None:
        """`again` makes the checkpoint out of its source where that arrives in another process; a function of a module."""
        self._again = again
        self._description = description
        self.source = source
        """What its tensors are read from."""
        self.path = source.store.name
        """What was opened."""
        self.stored: Table = description.tensors
        """The tensors as the format has them: a table, which knows where they lie without making one (`core/table.py`)."""
        self.flat = description.tree is description.tensors
        """Whether there is nothing but tensors under their names: then `tree` makes all of them, and `stored` none."""
        self.format = description.format
        """The name of the format."""
        self.foreign = description.foreign
        """Globals that the file mentioned and that were not built."""
        self.notes: tuple[str, ...] = (*description.notes_on_blocks, *description.notes)
        """Sentences about what is odd in this file."""
        self.notes_on_numbers = description.notes
        """The notes without those about quantised blocks, for whoever reads the numbers that the blocks stand for."""
        self.usual_format = description.usual_format
        """The format in which others expect it, where nothing else is said: that of the layout that a map gave it."""
        self.torch_dist = description.torch_dist
        """Whether it is in Megatron's layout, by a map: then two small files belong to it."""
        self.non_model_keys = description.non_model_keys
        """Keys at the top of the tree that are no part of the model, where the format knows: the optimizer, the state of a run."""
        self.metadata = description.metadata
        """Text that the file carries about itself: `metadata["format"]`. What it says of its tensors is `describe()`."""
        self._aliases: tuple[Alias, ...] | None = None
        self._tree: object = None

    def __getitem__(self, name: str) -> LazyTensor:
        try:
            return self._description.tensors[name]
        except TypeError:
            if isinstance(name, Hashable):
                raise
            raise BadArgumentType(
                f"a name is text, not {describe_value(name)}; read(*names) reads several",
                file=self.path,
            ) from None
        except KeyError:
            raise NoSuchTensor(
                self._missing(name), file=self.path, tensor=None, found=name
            ) from None

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
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Arrays that were read stay valid; lazy tensors raise `Closed` from now on."""
        self.source.store.close()

    def without_lazy_tensors(self) -> Checkpoint:
        """This checkpoint without lazy tensors that were made already, for a caller that reads its columns."""
        found = self._description
        table = found.tensors.without_lazy_tensors()
        if not self.flat or table is found.tensors:
            return self
        return Checkpoint(self.source, replace(found, tensors=table, tree=table), again=self._again)

    def with_description(
        self, description: Description, through: Callable[[Checkpoint], Checkpoint]
    ) -> Checkpoint:
        """The files of this checkpoint under another description, which `through` makes of this checkpoint."""
        again = None if self._again is None else partial(_seen_again, self._again, through)
        return Checkpoint(self.source, description, again=again)

    @property
    def tree(self) -> AnyValue:
        """The whole nested state, with `LazyTensor` leaves and `Opaque` nodes in place of what was not built."""
        if self._tree is None:
            # A flat format has nothing but its tensors and makes them when asked; whoever wants the tree wants a dict.
            self._tree = dict(self._description.tensors) if self.flat else self._description.tree
        return self._tree

    def model_names(self, prefix: str = "") -> list[str]:
        """The names that begin so, without the `non_model_keys`, unless the prefix leads there."""
        left = tuple(f"{key}." for key in self.non_model_keys if not prefix.startswith(f"{key}."))
        return [
            name
            for name in self
            if name.startswith(prefix) and not (left and name.startswith(left))
        ]

    def describe(self) -> Metadata:
        """Every tensor with its boxes and every other value, as `holdfast.metadata` has them for any format; reads nothing."""
        metadata: Metadata = find_hook("metadata_of")(
            self, stored_nbytes=self.stored_nbytes, flat=self.flat
        )
        return metadata

    @property
    def stored_nbytes(self) -> int:
        """Bytes of all files of the checkpoint: what bounds the cost of showing it."""
        store = self.source.store
        return sum(map(store.size, store.list()))

    @property
    def aliases(self) -> tuple[Alias, ...]:
        """Which names share a storage; names that stand alone are not listed."""
        if self._aliases is None:
            from holdfast.core.sharing import (
                find_shared_rows,  # reading one tensor needs none of it
            )

            self._aliases = find_aliases(
                self.stored, find_shared_rows([self.stored], stored_aliases=True)
            )
        return self._aliases

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data in the file; what is shared counts once."""
        from holdfast.core.sharing import find_shared_rows

        return find_shared_rows([self.stored]).total_nbytes()

    def read(self, *names: str | Iterable[str]) -> dict[str, np.ndarray]:
        """Read several tensors (all of them when none is named) in parallel, with neighbouring reads merged.

        Names may be given one by one, or as a list of them.
        """
        from holdfast.core.sharing import check_expansion

        table = self._description.tensors
        wanted: Sequence[str] = table.names
        rows: Sequence[int] = range(len(wanted))
        if names:
            wanted = [
                name
                for given in names
                for name in ([given] if isinstance(given, str) else check_patterns(given, "names="))
            ]
            for name in wanted:
                if not isinstance(name, Hashable) or name not in table.row_indices:
                    self[name]  # raises
            rows = [table.row_indices[name] for name in wanted]
        check_expansion(table, rows)
        return dict(zip(wanted, table.read_arrays(rows), strict=True))

    def digests(self) -> dict[str, Digest]:
        """What each tensor holds, independent of format, sharding and strides.

        Where the file records the checksum of exactly a tensor's bytes, that is taken at its word and nothing is read.
        """
        table = self.stored
        known = table.recorded_crcs()
        rows = [
            row
            for row, kind in enumerate(table.kind_indices)
            if row not in known and not table.kinds[kind].traits.meta
        ]
        known |= dict(
            zip(rows, self.source.digest([table.lazy_tensor(row) for row in rows]), strict=True)
        )
        outlines = [canonicalize(kind.dtype, kind.shape) for kind in table.kinds]
        each = enumerate(zip(table.names, table.kind_indices, strict=True))
        return {name: Digest(*outlines[kind], known.get(row)) for row, (name, kind) in each}

    def digest(self) -> str:
        """What all tensors hold under their names, as 32 hexadecimal digits: equal for equal content in every format."""
        return combine_digests(self.digests())

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the path: the checkpoint is opened again where it arrives. `Replaced` where another is there by then."""
        if self._again is None:
            raise Unsupported(
                "this checkpoint cannot be sent to another process; open it there", file=self.path
            )
        return self._again, (self.source,)

    def __copy__(self) -> Checkpoint:
        return self

    def __deepcopy__(self, memo: object) -> Checkpoint:
        """Itself: it is read-only, and a copy would be the same files once more."""
        return self

    def _repr_html_(self) -> str:
        from holdfast.core.notebook import ROWS, Bar, render_card, render_table
        from holdfast.core.order import sort_naturally
        from holdfast.core.text import format_nbytes

        first = [self[name] for name in sort_naturally(self)[:ROWS]]
        largest = max((tensor.nbytes for tensor in first), default=0) or 1
        rows = [
            (
                tensor.name,
                tensor.dtype.name,
                str(list(tensor.shape)),
                Bar(format_nbytes(tensor.nbytes), tensor.nbytes / largest),
            )
            for tensor in first
        ]
        facts = [
            ("format", self.format),
            ("tensors", f"{len(self):,}"),
            ("foreign objects", f"{len(self.foreign):,}"),
        ]
        return render_card(
            self.path,
            facts,
            tables=[render_table(("name", "dtype", "shape", "size"), rows, len(self))],
        )

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path!r} {self.format}, {len(self):,} tensors>"

    def _missing(self, name: str) -> str:
        import difflib

        near = difflib.get_close_matches(str(name), list(self)[:10_000], n=3, cutoff=0.6)
        hint = (
            f"; did you mean {' or '.join(map(repr, near))}?"
            if near
            else f"; it has {len(self):,} tensors"
        )
        return f"no tensor called {name!r}{hint}"
