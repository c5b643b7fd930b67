"""`HoldfastIO`: how Lightning's Trainer and Fabric write and read their checkpoints.

    Trainer(plugins=[HoldfastIO()])                  each file is the old one or the new one, whatever is killed
    Trainer(plugins=[HoldfastIO(background=True)])   copied, and written while the training goes on

1. A save is published by one rename, straight from the tensors to the file.
2. In the background, saves and removals are done in the order in which they were asked for. So the checkpoint before is removed
   when its successor is there, and stays if that failed. The failure is raised by the next call.
3. The end of the program waits for what is under way.
"""

from __future__ import annotations

import copy
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import torch

try:
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
except ImportError:  # the older packages, each by itself
    from lightning_fabric.plugins.io.checkpoint_io import CheckpointIO

from holdfast.engine.threads import start
from holdfast.rewrite.seal import unseal
from holdfast.stores.files import make_parents
from holdfast.stores.paths import local_path
from holdfast.torch.serialization.load import MapLocation, load
from holdfast.torch.serialization.save import save

__all__ = ["HoldfastIO"]

Where = str | os.PathLike[str]


class HoldfastIO(CheckpointIO):  # type: ignore[misc]  # Lightning may not be there when types are checked
    """Reads and writes Lightning's checkpoints (`.ckpt`, which are files of `torch.save`)."""

    def __init__(self, *, background: bool = False, durable: bool = True) -> None:
        self._durable = durable
        self._queue = Queue() if background else None

    def save_checkpoint(self, checkpoint: dict[str, object], path: Where, storage_options: object = None) -> None:
        """Save a checkpoint. Behind the caller's back, if that was asked for: then this returns when it has been copied."""
        if storage_options is not None:
            raise TypeError(f"a file on disk has no storage_options; found {storage_options!r}")
        target = local_path(path)
        if self._queue is None:
            self._write(checkpoint, target)
            return
        self._queue.check()
        copied = Copies().of(checkpoint)
        self._queue.put(lambda: self._write(copied, target))

    def load_checkpoint(self, path: Where, map_location: MapLocation = None, weights_only: bool | None = None) -> dict[str, object]:
        """Load one, when all that was to be written is written. Nothing in it is run, unless `weights_only=False`."""
        if self._queue is not None:
            self._queue.wait()
        found = local_path(path)
        if not os.path.exists(found):
            raise FileNotFoundError(f"Checkpoint file not found: {found}")
        return load(found, map_location, weights_only=weights_only)  # type: ignore[return-value]  # what was saved

    def remove_checkpoint(self, path: Where) -> None:
        """Remove a checkpoint, if it is there; in the background behind the saves that came before, and not if they failed."""
        target = local_path(path)
        if self._queue is None:
            _remove(target)
        else:
            self._queue.put(lambda: _remove(target), after_success=True)

    def teardown(self) -> None:
        """Wait for what is under way, and raise what went wrong."""
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
    """Work that one thread does in order. It is no daemon: the program ends when the work is done."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[], None], bool]] = deque()
        self._turn = threading.Condition()
        self._working = False
        self._failure: BaseException | None = None
        self._failed = False
        """Whether the last save failed, told or not."""

    def put(self, work: Callable[[], None], *, after_success: bool = False) -> None:
        """Do it behind all that was put before; with `after_success`, not at all if the last of that failed."""
        with self._turn:
            self._waiting.append((work, after_success))
            begin = not self._working
            self._working = True
        if begin and start(self._run, name="holdfast-lightning", daemon=False) is None:
            self._run()

    def check(self) -> None:
        """Raise what went wrong since somebody asked."""
        with self._turn:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def wait(self) -> None:
        """Come back when everything is done; raises what went wrong."""
        with self._turn:
            while self._working:
                self._turn.wait()
        self.check()

    def _run(self) -> None:
        while True:
            with self._turn:
                if not self._waiting:
                    self._working = False
                    self._turn.notify_all()
                    return
                work, after_success = self._waiting.popleft()
            if after_success and self._failed:
                continue
            try:
                work()
                self._failed = self._failed and after_success
            except Exception as error:  # whatever it is, it is told to the caller
                with self._turn:
                    self._failure = self._failure or error
                self._failed = True


class Copies:
    """Copies of a state that share what the originals share; those of tensors on a GPU are in the memory of the host."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._made: dict[int, object] = {}

    def of(self, value: object) -> object:
        """The copy of a value and of all that is in it."""
        if id(value) in self._made:
            return self._made[id(value)]
        made: object
        match value:
            case torch.Tensor() if type(value) in (torch.Tensor, torch.nn.Parameter) and _plain(value):
                made = self._tensor(value)
            case dict() if type(value) is dict:
                made = {key: self.of(inner) for key, inner in value.items()}
            case list() if type(value) is list:
                made = [self.of(inner) for inner in value]
            case tuple() if type(value) is tuple:
                made = tuple(self.of(inner) for inner in value)
            case dict() if hasattr(value, "_metadata") or type(value).__name__ == "OrderedDict":
                made = copy.copy(value)
                for key, inner in value.items():
                    made[key] = self.of(inner)
            case _:
                made = copy.deepcopy(value)
        self._made[id(value)] = made
        return made

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


def _plain(tensor: torch.Tensor) -> bool:
    special = tensor.is_quantized or tensor.is_nested or tensor.is_meta or tensor.is_conj() or tensor.is_neg()
    return tensor.layout is torch.strided and not special and tensor.is_leaf
