"""Finished files of a conversion that was interrupted, kept for the next try.

With `resume=True` a directory is not written straight into its transaction. Each data file is first finished, flushed and
published in a hidden folder beside the target, with a receipt of its checksums; then all of them are linked into the transaction,
which is committed as always. A try that was cut off leaves that folder, and the next one finds it by its name, which is a hash of
everything that decides the bytes: the layout, and the source files with their lengths and times. A file is taken over only if
its bytes have the checksums of its receipt.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping

from holdfast.engine.commit.new_file import NewFile
from holdfast.engine.commit.target import refusing
from holdfast.engine.commit.transactions import DirectoryTransaction, FileTransaction
from holdfast.engine.readback import file_crcs
from holdfast.errors import HoldfastError
from holdfast.plan.saves import Data, FilePlan, Gathered, SavePlan
from holdfast.stores.files import Files, split_path
from holdfast.stores.local import LocalStore
from holdfast.stores.path_files import system_files
from holdfast.stores.virtual import tensor_stamp

RECEIPT = ".receipt"


def fingerprint(plan: SavePlan) -> str:
    """A hash of what decides the bytes of a save."""
    lines: list[object] = [plan.format]
    for file in plan.files:
        lines.append([file.key, file.nbytes])
        for segment in file.segments:
            if isinstance(segment, Data):
                lines.append([segment.label, tensor_stamp(segment.tensor)])
            elif isinstance(segment, Gathered):
                tensors = zip(segment.labels, segment.tensors(), strict=True)
                lines += [[label, tensor_stamp(tensor)] for label, tensor in tensors]
    return hashlib.blake2b(json.dumps(lines).encode(), digest_size=8).hexdigest()


class Staging:
    """The hidden folder of one conversion."""

    def __init__(self, target: str, plan: SavePlan, *, durable: bool, files: Files | None = None) -> None:
        self._files: Files = files or system_files()
        parent, name = split_path(os.path.abspath(target.rstrip("/")))
        self._name = f".{name}.{fingerprint(plan)}.part"
        self._parent = parent
        self._durable = durable
        with refusing("creating a folder for finished files", target):
            self._at = self._files.open_directory(parent)
            if self._files.stat(self._name, at=self._at) is None:
                self._files.mkdir(self._name, at=self._at, private=True)
            self._folder = self._files.open_directory(self._name, at=self._at)

    def put(self, file: FilePlan, write: Callable[[FilePlan, NewFile], Mapping[str, int]]) -> Mapping[str, int]:
        """The checksums of a file: of one that an earlier try finished, or of one that `write` makes now."""
        found = self._finished(file)
        if found is not None:
            return found
        with FileTransaction(self._path(file.key), durable=self._durable, files=self._files) as single:
            crcs = dict(write(file, single.file))
            single.commit()
        receipt = json.dumps(crcs).encode()
        with FileTransaction(self._path(file.key + RECEIPT), durable=self._durable, files=self._files) as single:
            single.allocate(len(receipt))
            single.write(0, receipt)
            single.commit()
        return crcs

    def adopt(self, folder: DirectoryTransaction, file: FilePlan) -> None:
        """Give a finished file a second name inside the transaction."""
        folder.adopt(file.key, f"../{self._name}/{file.key}")

    def close(self) -> None:
        """Leave the folder for the next try."""
        self._files.close(self._folder)
        self._files.close(self._at)

    def remove(self) -> None:
        """Remove the folder; its files live on under the names that the transaction gave them."""
        for name in self._files.list(self._folder):
            self._files.unlink(name, at=self._folder)
        self._files.rmdir(self._name, at=self._at)

    def _path(self, key: str) -> str:
        return os.path.join(self._parent, self._name, key)

    def _finished(self, file: FilePlan) -> Mapping[str, int] | None:
        found = self._files.stat(file.key, at=self._folder)
        if found is None or found.kind != "file" or found.nbytes != file.nbytes:
            return None
        try:
            store = LocalStore(self._path(file.key + RECEIPT))
            text = bytearray(store.size(file.key + RECEIPT))
            store.read(file.key + RECEIPT, 0, memoryview(text))
            store.close()
            recorded = json.loads(text)
        except (HoldfastError, ValueError):
            return None
        descriptor = self._files.open(file.key, at=self._folder)
        try:
            crcs = file_crcs(file, descriptor)
        finally:
            self._files.close(descriptor)
        return crcs if crcs == recorded else None
