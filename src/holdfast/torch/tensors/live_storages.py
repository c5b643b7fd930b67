"""The torch storages that `LazyTensor.torch()` made and that are still in use, so that a second name of one gets a view of it.

A tensor that fills its storage is noted when it is read, weakly: the note goes with the last torch tensor over that storage.
Another name over the same storage of the file (a tied weight, a slice that was saved beside its base) is then a view of what is
there. Asking again for a name that has been given reads it again, so that what was changed since does not come back.

A part of a storage that comes first is read by itself, for a lazy tensor reads no more than it is asked for. `holdfast.torch.open`
knows the whole checkpoint and keeps those together as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from holdfast.core.chunk import Storage, in_c_order
from holdfast.core.protocols import Source
from holdfast.core.tensor import LazyTensor

__all__ = ["keep", "view_of_kept"]

Place = tuple[str, int, int]
"""A storage of a source: its file, first byte and length. Not the `Storage`, which would keep the source's files open."""


class Note(weakref.ref[torch.UntypedStorage]):
    """A storage that is in use as long as the reference is alive, and the names that were given views of it."""

    __slots__ = ("names", "place")

    names: tuple[str, ...]
    place: Place


class Notes(dict[Place, Note]):
    """The notes of one source."""

    __slots__ = ("__weakref__", "forget")

    forget: Callable[[weakref.ref[torch.UntypedStorage]], None]

    def __init__(self) -> None:
        super().__init__()
        own = weakref.ref(self)

        def forget(note: weakref.ref[torch.UntypedStorage]) -> None:
            notes = own()
            if notes is not None and isinstance(note, Note) and notes.get(note.place) is note:
                del notes[note.place]

        self.forget = forget


_notes: weakref.WeakKeyDictionary[Source, Notes] = weakref.WeakKeyDictionary()


def keep(lazy: LazyTensor, tensor: torch.Tensor) -> None:
    """Note the storage of a tensor that was just read, where it holds the file's storage as it is."""
    chunk = lazy.chunks[0]
    storage = chunk.storage
    if chunk.offset or storage.nbytes * 8 != lazy.size * lazy.dtype.bits or storage.byteorder != "little":
        return
    if not in_c_order(lazy.shape, chunk.strides, lazy.dtype.bits):
        return
    notes = _notes.get(lazy.source)
    if notes is None:
        notes = _notes[lazy.source] = Notes()
    note = Note(tensor.untyped_storage(), notes.forget)
    note.names, note.place = (lazy.name,), _place(storage)
    notes[note.place] = note


def view_of_kept(lazy: LazyTensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The tensor as a view of a storage that another name was given and that is still in use; else None."""
    notes = _notes.get(lazy.source)
    if not notes:
        return None
    chunk = lazy.chunks[0]
    note = notes.get(_place(chunk.storage))
    if note is None or lazy.name in note.names or chunk.storage.byteorder != "little" or chunk.shape != lazy.shape:
        return None
    bits = lazy.dtype.bits
    storage = note()
    if storage is None or chunk.offset % bits or any(s < 0 or s % bits for s in chunk.strides):
        return None
    lazy.source.store.size(chunk.storage.key)  # raises `Closed` as reading would
    note.names = (*note.names, lazy.name)
    strides = tuple(s // bits for s in chunk.strides)
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, chunk.offset // bits, lazy.shape, strides)


def _place(storage: Storage) -> Place:
    return storage.key, storage.start, storage.nbytes
