"""`HoldfastIO`: how Lightning's Trainer and Fabric write and read their checkpoints.

    Trainer(plugins=[HoldfastIO()])                  each file is the old one or the new one, whatever is killed
    Trainer(plugins=[HoldfastIO(background=True)])   copied, and written while the training goes on

1. A save is published by one rename, straight from the tensors to the file.
2. In the background, saves and removals are done in order. So the checkpoint before is removed when its successor is there, and
   stays if that failed. The failure is raised by the next call.
3. `ModelCheckpoint` asks the disk which names are taken, and links `last.ckpt` to the newest. Both wait for a save to that very
   name, if it is on its way.
4. The end of the program waits for all saves. Sent to another process, a plugin has no saves under way there.
"""

from __future__ import annotations

import copy
import functools
import os
import shutil
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeGuard
from weakref import WeakSet

import torch

try:
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
except ImportError:  # the older packages, each by itself
    from lightning_fabric.plugins.io.checkpoint_io import CheckpointIO

from holdfast.core.runtime import at_fork, start_thread
from holdfast.core.tree import LinkedPath, copy_with_children, get_children, rebuild
from holdfast.stores.files import make_parents
from holdfast.stores.paths import local_path
from holdfast.torch.serialization.loading import MapLocation, load
from holdfast.torch.serialization.saving import save
from holdfast.verbs.seals.make import unseal

Where = str | os.PathLike[str]


class HoldfastIO(CheckpointIO):  # type: ignore[misc]  # Lightning may not be there when types are checked
    """Reads and writes Lightning's checkpoints (`.ckpt`, which are files of `torch.save`)."""

    def __init__(self, *, background: bool = False, durable: bool = True) -> None:
        for package in ("lightning.fabric", "lightning_fabric"):
            # `lightning` and `pytorch_lightning` may both be there, and each asks for a `CheckpointIO` of its own.
            module = sys.modules.get(f"{package}.plugins.io.checkpoint_io")
            if module is not None:
                module.CheckpointIO.register(type(self))
        self._durable = durable
        self._queue = Queue() if background else None

    def save_checkpoint(
        self, checkpoint: dict[str, object], path: Where, storage_options: object = None
    ) -> None:
        """Save a checkpoint. In the background, this returns when the checkpoint has been copied."""
        if storage_options is not None:
            raise TypeError(f"a file on disk has no storage_options; found {storage_options!r}")
        target = local_path(path)
        if self._queue is None:
            self._write(checkpoint, target)
            return
        _have_model_checkpoint_wait()
        self._queue.check()
        copied, target = StateCopies().of(checkpoint), os.path.join(os.getcwd(), target)
        self._queue.put(lambda: self._write(copied, target), target)

    def load_checkpoint(
        self, path: Where, map_location: MapLocation = None, weights_only: bool | None = None
    ) -> dict[str, object]:
        """Load a checkpoint, after all saves. Nothing in it is run, unless `weights_only=False`."""
        found = local_path(path)
        if self._queue is not None:
            self._queue.wait()
        _wait_for(found)  # of another plugin
        if not os.path.exists(found):
            raise FileNotFoundError(f"Checkpoint file not found: {found}")
        return load(found, map_location, weights_only=weights_only)  # type: ignore[no-any-return]  # what was saved

    def remove_checkpoint(self, path: Where) -> None:
        """Remove a checkpoint, if it is there; in the background behind the saves that came before, and not if they failed."""
        target = local_path(path)
        if self._queue is None:
            _remove(target)
        else:
            target = os.path.join(os.getcwd(), target)
            self._queue.put(lambda: _remove(target), target, after_success=True)

    def teardown(self) -> None:
        """Wait for saves in the background, and raise what went wrong."""
        if self._queue is not None:
            self._queue.wait()

    def _write(self, checkpoint: object, target: str) -> None:
        make_parents(target, durable=self._durable)
        unseal(target, durable=self._durable)  # it spoke of what is replaced now
        save(checkpoint, target, durable=self._durable)


def _remove(target: str) -> None:
    unseal(target)
    if os.path.isdir(target) and not os.path.islink(target):
        shutil.rmtree(target)
    else:
        with suppress(FileNotFoundError):
            os.remove(target)


class Queue:
    """Work on files that one thread does in order. It is no daemon: the program ends when the work is done."""

    def __init__(self) -> None:
        self._tasks: deque[tuple[Callable[[], None], str, bool]] = deque()
        """The work that is being done, and behind it what waits."""
        self._turn = threading.Condition()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._failed = False
        """Whether the last save failed, raised or not."""
        _queues.add(self)

    def __reduce__(self) -> tuple[object, ...]:
        return Queue, ()  # the work belongs to the process that was given it

    def put(self, work: Callable[[], None], path: str, *, after_success: bool = False) -> None:
        """Do this work behind all other; with `after_success`, at once if that is done, and not at all if it failed."""
        with self._turn:
            self._tasks.append((work, os.path.abspath(path), after_success))
            if len(self._tasks) > 1:
                return
            thread = (
                None
                if after_success
                else start_thread(self._run, name="holdfast-lightning", daemon=False)
            )
            self._thread = thread or self._thread
        if thread is None:
            self._run()

    def check(self) -> None:
        with self._turn:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def wait(self) -> None:
        """Wait until everything is done and the thread has ended; raises what went wrong."""
        with self._turn:
            self._turn.wait_for(lambda: not self._tasks)
            thread = self._thread
        if thread is not None:
            thread.join()
        self.check()

    def wait_for(self, path: Where) -> None:
        """Wait until no work on this file is left. What went wrong is raised to whoever put the work."""
        with self._turn:
            self._turn.wait_for(
                lambda: os.path.abspath(path) not in (task[1] for task in self._tasks)
            )

    def _run(self) -> None:
        while True:
            work, _, after_success = self._tasks[0]
            try:
                if not (after_success and self._failed):
                    work()
                    self._failed = False
            except BaseException as error:  # whatever it is, it is told to the caller
                with self._turn:
                    self._failure = self._failure or error
                self._failed = True
            del work  # and with it the copies, before whoever waits goes on
            with self._turn:
                self._tasks.popleft()
                self._turn.notify_all()
                if not self._tasks:
                    return


_queues: WeakSet[Queue] = WeakSet()


def _in_child() -> None:
    """In a fork: it has none of the threads, and none of their work."""
    for queue in list(_queues):
        queue.__init__()  # type: ignore[misc]  # all of it anew


at_fork(after_in_child=_in_child)

_patient: set[type] = set()


def _have_model_checkpoint_wait() -> None:
    """Have `ModelCheckpoint` wait for a file that is on its way, where it asks for that file. Lightning has no hook for it."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        module = sys.modules.get(f"{package}.callbacks.model_checkpoint")
        if module is not None and module.ModelCheckpoint not in _patient:
            kind = module.ModelCheckpoint
            _patient.add(kind)
            kind.file_exists = _waiting(kind.file_exists)
            if hasattr(kind, "_link_checkpoint"):  # since 2.1
                kind._link_checkpoint = staticmethod(_waiting(kind._link_checkpoint))


def _waiting(call: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(call)
    def waits(*given: object, **named: object) -> object:
        for value in (*given, *named.values()):
            if isinstance(value, str | os.PathLike):
                _wait_for(value)
        return call(*given, **named)

    return waits


def _wait_for(path: Where) -> None:
    for queue in list(_queues):
        queue.wait_for(path)


class StateCopies:
    """Copies of a state that share what the originals share; those of tensors on a GPU are in the memory of the host."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._made: dict[int, object] = {}

    def of(self, value: object) -> object:
        return rebuild(value, self._leaf, get_children=_entered, make_container=copy_with_children)

    def _leaf(self, value: object, _: LinkedPath) -> object:
        if id(value) not in self._made:
            self._made[id(value)] = self._tensor(value) if _plain(value) else copy.deepcopy(value)
        return self._made[id(value)]

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = storage.clone() if storage.device.type == "cpu" else storage.cpu()
        with torch.no_grad():
            made = torch.empty(0, dtype=tensor.dtype).set_(
                self._storages[key], tensor.storage_offset(), tensor.size(), tensor.stride()
            )
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)


def _entered(value: object) -> Iterable[tuple[object, object]] | None:
    ordered = isinstance(value, dict) and (
        hasattr(value, "_metadata") or type(value).__name__ == "OrderedDict"
    )
    return get_children(value) if ordered or type(value) in (dict, list, tuple) else None


def _plain(tensor: object) -> TypeGuard[torch.Tensor]:
    if not isinstance(tensor, torch.Tensor) or type(tensor) not in (
        torch.Tensor,
        torch.nn.Parameter,
    ):
        return False
    special = (
        tensor.is_quantized
        or tensor.is_nested
        or tensor.is_meta
        or tensor.is_conj()
        or tensor.is_neg()
    )
    return tensor.layout is torch.strided and not special and tensor.is_leaf
