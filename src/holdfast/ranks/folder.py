"""A sharded save that comes together in a hidden folder beside its target, on a file system that all ranks see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from holdfast.core.limits import Limits
from holdfast.core.protocols import Store
from holdfast.core.value import Value
from holdfast.engine.commit.linked import linked_or_copied
from holdfast.engine.commit.new_file import NewFile
from holdfast.engine.commit.target import refusing
from holdfast.engine.commit.transactions import DirectoryTransaction
from holdfast.engine.write import Progress, write_file
from holdfast.plan.saves import FilePlan, LinkedFile
from holdfast.ranks.files import Receipt, is_part
from holdfast.stores.files import make_parents
from holdfast.stores.local import LocalStore
from holdfast.stores.path_files import system_files


class BegunFile(Value, frozen=True):
    """A file in the hidden folder."""

    plan: FilePlan
    sink: NewFile
    durable: bool

    def write(self, *, threads: int, progress: Progress | None, block: int | None) -> Mapping[str, int]:
        crcs = write_file(self.plan, self.sink, threads=threads, progress=progress, block=block).crcs
        self.sink.finish(durable=self.durable)
        return crcs

    def give_up(self) -> None:
        self.sink.give_up()


class FirstFolder:
    """The hidden folder, on the rank that made it; and the folders that lead to the target."""

    save = ""

    def __init__(self, path: str, *, durable: bool, overwrite: bool) -> None:
        with refusing("making the folders that lead to it", path):
            make_parents(path, durable=durable)
        self._transaction = DirectoryTransaction(path, durable=durable, overwrite=overwrite, replaceable=is_part)
        self._transaction.__enter__()
        self._durable = durable

    @property
    def told(self) -> str:
        return self._transaction.folder

    def begin(self, plan: FilePlan) -> BegunFile:
        return BegunFile(plan, self._transaction.create(plan.key), self._durable)

    def link(self, file: LinkedFile) -> bool:
        system = system_files()
        with refusing("opening the base", file.folder):
            base = system.open_directory(file.folder)
        try:
            return self._transaction.link(file.key, file.nbytes, folder=base)
        finally:
            system.close(base)

    def publish(
        self,
        delivered: Sequence[Sequence[Receipt]],
        index: Sequence[FilePlan],
        *,
        check: Callable[[Store], None],
        attributes: Mapping[str, str] | None = None,
    ) -> None:
        folder = self._transaction
        for receipt in chain.from_iterable(delivered[1:]):
            folder.join(receipt.key, receipt.nbytes, linked=receipt.linked)
        folder.seal_data()
        for plan in index:
            write_file(plan, folder.create(plan.key))
        store = LocalStore(folder.folder, max_files=Limits().files)
        try:
            check(store)
        finally:
            store.close()
        folder.commit()

    def close(self) -> None:
        """Nothing: the folder stays open until it is published or given up."""

    def give_up(self) -> None:
        """Remove the folder, unless it was published."""
        self._transaction.__exit__(None, None, None)


class JoinedFolder:
    """The hidden folder, on another rank."""

    save = ""

    def __init__(self, folder: str, *, path: str, durable: bool) -> None:
        self._name, self._path, self._durable = folder, path, durable
        self._system = system_files()
        self._open: int | None = None

    @property
    def _folder(self) -> int:
        if self._open is None:
            self._open = self._system.open_directory(self._name)
        return self._open

    def begin(self, plan: FilePlan) -> BegunFile:
        sink = NewFile(
            self._system, self._system.create(plan.key, at=self._folder), path=f"{self._path}/{plan.key}", durable=self._durable
        )
        return BegunFile(plan, sink, self._durable)

    def link(self, file: LinkedFile) -> bool:
        label, system = f"{self._path}/{file.key}", self._system
        with refusing("opening the base", file.folder):
            base = system.open_directory(file.folder)
        try:
            with refusing("taking over a file of the base", label):
                made, linked = linked_or_copied(system, file.key, file.nbytes, source_at=base, at=self._folder, label=label)
                made.finish(durable=self._durable)
            return linked
        finally:
            system.close(base)

    def close(self) -> None:
        found, self._open = self._open, None
        if found is not None:
            self._system.close(found)

    def give_up(self) -> None:
        """Nothing: the folder is the first rank's."""
