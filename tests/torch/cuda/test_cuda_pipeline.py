"""The pipeline between readers and copies: order, errors, blocks that come back. No GPU is needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from holdfast.torch.cuda import pipeline
from holdfast.torch.cuda.host import BLOCK_NBYTES, HostBlock, Pool
from holdfast.torch.cuda.pipeline import run_pipeline


class Copies:
    """A device that copies as slowly as it is told, and watches that no block is touched meanwhile."""

    def __init__(self, delay: float = 0.0, *, known: bool = True) -> None:
        self.delay = delay
        self.known = known
        """Whether a copy is said to be done before somebody waits for it."""
        self.busy: set[int] = set()
        self.most = 0
        self.done: list[int] = []
        self.threads: set[int] = set()

    def read(self, task: int, block: list[int]) -> None:
        assert id(block) not in self.busy, "a block is read into while it is copied from"
        block[:] = [task]

    def put(self, full: Sequence[tuple[int, list[int]]]) -> Copies.Under:
        assert 0 < len(full) <= pipeline.MOST_BLOCKS
        assert all(block == [task] for task, block in full)
        self.threads.add(threading.get_ident())
        self.busy.update(id(block) for _, block in full)
        self.most = max(self.most, len(self.busy))
        return Copies.Under(self, full)

    class Under:
        def __init__(self, copies: Copies, full: Sequence[tuple[int, list[int]]]) -> None:
            self.copies, self.full = copies, full

        def query(self) -> bool:
            return self.copies.known and not self.copies.delay

        def synchronize(self) -> None:
            time.sleep(self.copies.delay)
            for task, block in self.full:
                assert block == [task], "a block changed before its copy was done"
                self.copies.busy.discard(id(block))
                self.copies.done.append(task)


@pytest.mark.parametrize(
    ("tasks", "blocks", "threads"), [(0, 2, 2), (1, 1, 1), (100, 2, 8), (100, 8, 2), (500, 24, 16)]
)
@pytest.mark.parametrize("known", [True, False])
def test_every_task_passes_once(tasks, blocks, threads, known):
    copies = Copies(known=known)
    run_pipeline(
        range(tasks), [[] for _ in range(blocks)], threads=threads, read=copies.read, put=copies.put
    )
    assert sorted(copies.done) == list(range(tasks))
    assert copies.most <= blocks
    assert not copies.busy
    assert copies.threads <= {threading.get_ident()}


@pytest.mark.parametrize("allowed", [0, 1, 2, 5])
def test_those_that_can_start_do_all_of_it(monkeypatch, allowed):
    """The system refuses threads; one that leads others may be among those."""
    left, turn, before = [allowed], threading.Lock(), pipeline.start_thread

    def start(run, **more):
        with turn:
            left[0] -= 1
            refused = left[0] < 0
        return None if refused else before(run, **more)

    monkeypatch.setattr(pipeline, "start_thread", start)
    copies = Copies()
    run_pipeline(range(50), [[] for _ in range(4)], threads=8, read=copies.read, put=copies.put)
    assert sorted(copies.done) == list(range(50))
    assert not copies.busy


def test_tasks_are_made_as_they_are_needed():
    made = []

    def tasks():
        for i in range(50):
            made.append(i)
            yield i

    seen = []
    copies = Copies()

    def put(full):
        seen.append(len(made))
        return copies.put(full)

    run_pipeline(tasks(), [[] for _ in range(2)], threads=1, read=copies.read, put=put)
    assert seen[0] < 50
    assert len(copies.done) == 50


class Broken(Exception):
    pass


@pytest.mark.parametrize("where", ["tasks", "read", "put"])
@pytest.mark.parametrize("delay", [0.0, 0.002])
def test_the_first_failure_is_raised_when_all_has_come_to_rest(where, delay):
    copies = Copies(delay)
    begun = []
    failing: Future[threading.Thread] = Future()

    def tasks():
        for i in range(200):
            if where == "tasks" and i == 20:
                raise Broken("tasks")
            yield i

    def read(task, block):
        begun.append(task)
        if where == "read" and task == 20:
            failing.set_result(threading.current_thread())
            raise Broken("read")
        if where == "read" and task > 20:
            failing.result(60).join(60)  # by its end it has stopped the others
        copies.read(task, block)

    def put(full):
        if where == "put" and any(task >= 20 for task, _ in full):
            raise Broken("put")
        return copies.put(full)

    threads = set(threading.enumerate())
    # Where the readers wait for the one that fails, it needs a block that nobody else holds.
    blocks = [[] for _ in range(30 if where == "read" else 4)]
    with pytest.raises(Broken, match=where):
        run_pipeline(tasks(), blocks, threads=3, read=read, put=put)
    assert set(threading.enumerate()) <= threads, "a thread was left behind"
    assert not copies.busy, "a copy was left behind"
    assert len(begun) < 30, "the others went on"


def test_a_mark_that_fails_is_raised():
    class Never:
        def query(self):
            return False

        def synchronize(self):
            raise Broken("mark")

    with pytest.raises(Broken, match="mark"):
        run_pipeline(
            range(10),
            [[] for _ in range(2)],
            threads=2,
            read=lambda task, block: None,
            put=lambda full: Never(),
        )


def test_what_is_full_by_then_is_put_together():
    """One slow start, and the blocks that have come meanwhile are started by one call."""
    copies = Copies()
    sizes: list[int] = []

    def put(full):
        sizes.append(len(full))
        if len(sizes) == 1:
            time.sleep(0.1)
        return copies.put(full)

    run_pipeline(range(24), [[] for _ in range(12)], threads=3, read=copies.read, put=put)
    assert sum(sizes) == 24
    assert sizes[1] == pipeline.MOST_BLOCKS


def test_a_pool_lends_what_it_has_and_keeps_what_it_may():
    made = []

    def make(nbytes):
        made.append(HostBlock(nbytes, lock_nbytes=0))
        return made[-1]

    pool = Pool(kept_nbytes=3 * BLOCK_NBYTES, make=make)
    first = pool.lend(5)
    assert len(first) == len(made) == 5
    pool.take_back(first)
    assert pool.kept_nbytes == 3 * BLOCK_NBYTES
    again = pool.lend(3)
    assert len(made) == 5
    assert {id(block) for block in again} <= {id(block) for block in first}
    odd = pool.lend(1, 1 << 20)
    assert odd[0].nbytes == 1 << 20
    pool.take_back([*odd, *again])
    assert pool.kept_nbytes == 3 * BLOCK_NBYTES
    pool.free()
    assert pool.kept_nbytes == 0


def test_a_pool_takes_back_what_it_lent_when_more_cannot_be_had():
    def make(nbytes):
        if len(made) == 2:
            raise MemoryError
        made.append(HostBlock(nbytes, lock_nbytes=0))
        return made[-1]

    made = []
    pool = Pool(make=make)
    with pytest.raises(MemoryError):
        pool.lend(4)
    assert pool.kept_nbytes == 2 * BLOCK_NBYTES


def test_a_block_is_memory_for_arrays_and_tensors():
    block = HostBlock(10_000, lock_nbytes=0)
    assert not block.locked
    assert block.address % 4096 == 0
    block.array[:10_000] = 7
    assert int(block.tensor[:10_000].sum()) == 70_000
