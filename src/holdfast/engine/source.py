"""`OpenSource`: a store, the limits that hold for it, and the way its bytes reach memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from weakref import ref

import numpy as np

from holdfast.core.dense import DenseRows
from holdfast.core.limits import DEFAULTS, Limits
from holdfast.core.placement_rules import PlacementRule
from holdfast.core.protocols import Content, Request, Store, by_source
from holdfast.core.tensor import LazyTensor
from holdfast.engine.blocks import Slab, read_slab
from holdfast.engine.checks import Checks, whole_storages
from holdfast.engine.dense import SMALL_NBYTES, fetch, read_dense
from holdfast.engine.strips import execute
from holdfast.engine.threads import default_threads
from holdfast.errors import Unsupported
from holdfast.plan.coalesce import FAR, MEMORY, Policy
from holdfast.plan.reads import ReadPlan, plan_reads
from holdfast.stores.virtual import Virtual

HEAD_NBYTES = 4096
"""First bytes of a file that are read at once, since formats are told by them."""

NO_FILE = (None, b"", 0)
"""Where no first bytes were read yet."""


class OpenSource:
    """What formats read headers from and lazy tensors read elements from."""

    def __init__(
        self,
        store: Store,
        *,
        limits: Limits | None = None,
        threads: int | None = None,
        mapped: bool = False,
        verify: bool = True,
        policy: Policy | None = None,
        rules: Sequence[str | PlacementRule] = (),
    ) -> None:
        requests = store.requests
        self.store = store
        self.rules = tuple(rules)
        self.limits = limits or DEFAULTS
        self.threads = threads or requests or default_threads()
        self.mapped = mapped
        self.verify = verify
        """Whether checksums that the file records are compared when a storage is read from end to end."""
        self.policy = policy or (FAR if requests else MEMORY)
        self._resident = store.resident
        self._reads_ahead = not (requests or store.exact)
        """Whether more may be read of a file than was asked for."""
        self._first: tuple[str | None, bytes, int] = NO_FILE
        """The file whose first bytes were read last, these, and how many were wanted."""
        self.read_nbytes = 0
        """Bytes that were read for tensors so far."""

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_first": NO_FILE}

    def over(self, store: Store, *, threads: int | None = None) -> OpenSource:
        return OpenSource(
            store, limits=self.limits, threads=threads or self.threads, mapped=self.mapped, verify=self.verify, policy=self.policy,
            rules=self.rules,
        )  # fmt: skip

    def bytes(self, key: str, start: int, stop: int) -> bytes:
        content = self.store.map(key) if self._resident else None
        if content is not None and 0 <= start <= stop <= content.nbytes:
            return bytes(content[start:stop])
        if self._reads_ahead and 0 <= start <= stop <= HEAD_NBYTES:
            head = self.first(key, HEAD_NBYTES)
            if stop <= len(head):
                return head[start:stop]
        return self._read(key, start, stop)

    def first(self, key: str, nbytes: int) -> Content:
        known, head, wanted = self._first
        if known != key or nbytes > wanted:
            wanted = max(nbytes, HEAD_NBYTES) if self._reads_ahead else nbytes
            head = self._read(key, 0, min(self.store.size(key), wanted))
            self._first = key, head, wanted
        return head[:nbytes]

    def _read(self, key: str, start: int, stop: int) -> Content:
        out = bytearray(max(stop - start, 0))
        self.store.peek(key, start, memoryview(out))
        return Content(out)

    def plan(self, requests: Sequence[Request]) -> ReadPlan:
        """The reads that `read` would do."""
        return plan_reads(requests, self.policy)

    def read(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.tensor.traits.meta:
                raise Unsupported(
                    "this tensor was saved on the meta device: it has a shape and no data", tensor=request.tensor.name
                )
        checks = Checks(whole_storages(requests) if self.verify else {})
        self.carry_out(requests, checks)
        checks.finish()
        for request in requests:
            _resolve(request)

    def arrays(self, rows: DenseRows, numbers: Sequence[int], tensor: Callable[[int], LazyTensor]) -> Mapping[int, np.ndarray]:
        found: dict[int, np.ndarray] = {}
        if self.limits.expansion >= 1 and len(rows):
            policy, verify = self.policy, self.verify
            found, nbytes = read_dense(self.store, rows, tensor, policy=policy, verify=verify, threads=self.threads)
            self.read_nbytes += nbytes
        if len(found) < len(numbers):
            requests = []
            for number in numbers:
                if number not in found:
                    one = tensor(number)
                    found[number] = one.empty()
                    requests.append(Request(one, found[number]))
            for source, own in by_source(requests).items():
                source.read(own)
        return found

    def fetch(self, tensor: LazyTensor) -> np.ndarray:
        place = tensor.file_range() if self.limits.expansion >= 1 else None
        if place is None or place[2] > SMALL_NBYTES or self.store.requests or self.store.in_order:
            out = tensor.empty()
            self.read([Request(tensor, out)])
            return out
        array = fetch(self.store, tensor, place, verify=self.verify)
        self.read_nbytes += array.nbytes
        return array

    @contextmanager
    def lend(self, tensor: LazyTensor) -> Iterator[memoryview]:
        yield read_slab(Slab(tensor, 0))

    def carry_out(self, requests: Sequence[Request], checks: Checks) -> None:
        """Read as the plan says; `checks` sees every block that passes by, and it is up to the caller to finish them."""
        plan = self.plan(requests)
        execute(plan, self.store, self.threads, checks)
        self.read_nbytes += plan.read_nbytes

    def view(self, tensor: LazyTensor) -> np.ndarray | None:
        if not self.mapped or tensor.traits.conj or tensor.traits.neg:
            return None
        if tensor.position is not None:
            storage, offset, strides = tensor.position.layout()
            if 0 in tensor.shape:
                return None
        else:
            if len(tensor.chunks) != 1:
                return None
            (chunk,) = tensor.chunks
            if chunk.shape != tensor.shape or chunk.box.count == 0:
                return None
            storage, offset, strides = chunk.storage, chunk.offset, chunk.strides
        dtype = tensor.dtype
        foreign_order = storage.byteorder != "little" and dtype.swap_nbytes > 1
        memory = None if dtype.packed or foreign_order else self.store.map(storage.key)
        if memory is None:
            return None
        return np.ndarray(tensor.shape, dtype.numpy, memory, storage.start + offset // 8, tuple([s // 8 for s in strides]))

    def digest(self, tensors: Sequence[LazyTensor]) -> list[int]:
        from holdfast.engine.digest import tensor_crcs

        return tensor_crcs(tensors, threads=self.threads)


def _resolve(request: Request) -> None:
    """torch stores a lazily conjugated or negated tensor unresolved; give the elements that it stands for."""
    traits, out = request.tensor.traits, request.out
    if traits.conj:
        if request.tensor.dtype.paired:
            out["imag"] = -out["imag"]
        else:
            np.conjugate(out, out=out)
    if traits.neg:
        if request.tensor.dtype.paired:
            for part in ("real", "imag"):
                out[part] = -out[part]
        elif request.tensor.dtype.kind in ("float", "complex", "int", "uint"):
            np.negative(out, out=out)
        else:
            raise Unsupported(f"a {request.tensor.dtype} tensor that is marked as negated", tensor=request.tensor.name)


class Sourced(Virtual):
    """A virtual store that makes tensors over itself. They keep their source, and it keeps the store; nothing else keeps it."""

    _given: ref[OpenSource] | None = None

    @property
    def source(self) -> OpenSource:
        """The source of its tensors: the same one, for as long as one of them has it."""
        found = None if self._given is None else self._given()
        if found is None:
            found = OpenSource(self, threads=1)
            self._given = ref(found)
        return found
