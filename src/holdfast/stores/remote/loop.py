"""`waited`: requests wait for their answers on one event loop, and none is under way when the program has ended.

obstore answers from threads of its own, which need the interpreter to hand an answer over. A thread that wants the interpreter
while it is taken down ends the whole process (SIGABRT, up to Python 3.13; docs/design/023). So:

1. A request is under way until the thread that answers it leaves the interpreter. The last that it does there is to ask the future
   whether it was `cancelled`, or to give the loop its result; both are ours (`RequestFuture`, `Events`), and take that down.
2. Memory that is lent to obstore (`lent`) is waited for: to give it back takes the interpreter as well.
3. When the program ends, the requests that daemon threads wait for are cancelled, their uploads are stopped, and all that is under
   way is waited for. That is done after all handlers of `atexit` that were registered since Holdfast was imported.
4. Whoever asks later, or where no thread can start, runs a loop of its own, and waits at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar, TypeVarTuple, cast

from holdfast.core.runtime import at_exit, at_fork, renewed, start
from holdfast.errors import Unsupported

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LEAVING_S = 5.0  # How long a thread that leaves the interpreter, or an upload that is given up, is waited for.
PARKED_S = 60.0  # How long a daemon thread stays where it is when the program ends. There is no program any more by then.


class RequestFuture(asyncio.Future[Any]):
    left = False  # Whether the thread that answers has left the interpreter.

    def cancelled(self) -> bool:
        """`Future.cancelled`. Asked from a thread of obstore, of a cancelled future, it is the last that this thread does."""
        over = super().cancelled()
        last = over and threading.get_ident() != cast(Events, self.get_loop()).home
        # No call after this: at a call the interpreter may go to another thread, which would believe that this one has left.
        if last:
            self.left = True
            if self in under_way:
                del under_way[self]  # noqa: RUF051  # `pop` is a call
        return over


class Events(asyncio.SelectorEventLoop):
    """An event loop whose futures are `RequestFuture`s."""

    home = 0  # The thread that it runs on.

    def create_future(self) -> RequestFuture:
        return RequestFuture(loop=self)

    def run_forever(self) -> None:
        self.home = threading.get_ident()
        super().run_forever()

    def awaited(self) -> list[RequestFuture]:
        return [
            one
            for one in list(under_way)
            if isinstance(one, RequestFuture) and one.get_loop() is self
        ]

    def run_on_thread(self) -> None:
        self.run_forever()
        if not self.awaited():
            self.close()

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Any = None,  # noqa: ANN401
    ) -> asyncio.Handle:
        handle = super().call_soon_threadsafe(callback, *args, context=context)
        answer = args[0] if args else None
        if isinstance(answer, RequestFuture):
            answer.left = True  # and no call after this
            if answer in under_way:
                del under_way[answer]  # noqa: RUF051
        return handle


def answered(request: Awaitable[T]) -> Awaitable[T]:
    """Mark a request of obstore as under way, and return it: no coroutine, which might be cancelled before it begins."""
    if isinstance(request, RequestFuture):
        under_way[request] = None
        if request.left:
            under_way.pop(request, None)
    return request


@asynccontextmanager
async def lent(data: bytes | memoryview, *, kept: bool) -> AsyncIterator[memoryview]:
    """Lend memory to obstore; nobody else has it when the block ends, unless it is `kept`."""
    view = memoryview(data)
    if kept:
        yield view
        return
    under_way[id(view)] = None
    try:
        yield view
    finally:
        await until(lambda: given_back(view))
        del under_way[id(view)]


def given_back(view: memoryview) -> bool:
    """Whether nobody has this memory any more."""
    try:
        view.release()
    except BufferError:
        return False
    return True


async def until(done: Callable[[], bool]) -> None:
    """Wait for something that takes microseconds as a rule, and for no more than `LEAVING_S`."""
    turns, end = 0, time.monotonic() + LEAVING_S
    while not done() and time.monotonic() < end:
        turns += 1
        await asyncio.sleep(0 if turns < 20 else 0.001)


under_way: dict[
    object, None
] = {}  # Requests, and memory that is lent: a set, from which something can be taken without a call.
unfinished: dict[
    object, Callable[[], Coroutine[Any, Any, object]]
] = {}  # How each upload that has begun is stopped.
_lock = renewed(threading.Lock())
_thread: threading.Thread | None = None
_loops: list[Events] = []  # Those that run; the one that has a thread is the first.
_used = False
_forked = False
_over = False


def waited(ask: Callable[[], Awaitable[T]]) -> T:
    async def work() -> T:
        return await ask()

    future = None
    with _lock:
        if _begun():
            future = asyncio.run_coroutine_threadsafe(work(), _loops[0])
    if future is None:
        return _alone(work)
    try:
        return future.result()
    except BaseException as error:
        future.cancel()
        if isinstance(error, CancelledError):
            raise _parked() from None
        raise


def _begun() -> bool:
    global _thread
    if _forked:
        raise left_behind("")
    if _thread is None and not _over:
        loop = Events()
        _thread = start(loop.run_on_thread, name="object-store requests", daemon=True)
        if _thread is None:
            loop.close()
        else:
            _loops.insert(0, loop)
    return _thread is not None and not _over


def _alone(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    if _over and threading.current_thread().daemon:
        raise _parked()
    loop = Events()
    _loops.append(loop)
    try:
        try:
            return loop.run_until_complete(work())
        finally:
            loop.run_until_complete(until(lambda: not loop.awaited()))
    except asyncio.CancelledError:
        raise _parked() from None
    finally:
        _loops.remove(loop)
        loop.close()


def _parked() -> Unsupported:
    """For a daemon thread, when the program ends: it would not be seen to end, and an error of it would be."""
    if threading.current_thread().daemon:
        time.sleep(PARKED_S)
    return Unsupported(
        "the program ends, and a thread that it does not wait for asks an object store for something"
    )


@at_exit
def _end() -> None:
    """Let nothing be under way when the interpreter is taken down."""
    global _over
    until = time.monotonic() + 2 * LEAVING_S
    with _lock:
        _over = True
    for loop in tuple(_loops):
        with suppress(RuntimeError):  # closed meanwhile
            loop.call_soon_threadsafe(_give_up, loop)
    while (under_way or (_thread is not None and _thread.is_alive())) and time.monotonic() < until:
        with suppress(KeyboardInterrupt):  # it ends already
            time.sleep(0.001)


def _give_up(loop: Events) -> None:
    """Cancel all that others wait for; and where it is the loop with a thread, stop the uploads and the loop."""
    tasks = asyncio.all_tasks(loop)
    for one in (*tasks, *loop.awaited()):
        one.cancel()
    if _thread is not None and loop is _loops[0]:
        _last.add(loop.create_task(_stop(loop, tasks)))


_last: set[object] = set()  # The loop itself would let go of a task.


async def _stop(loop: Events, tasks: set[asyncio.Task[Any]]) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=LEAVING_S)
    for drop in list(unfinished.values()):
        await drop()
    await until(lambda: not loop.awaited())
    loop.stop()


def used() -> None:
    """Say that the client was used: a fork has none from now on."""
    global _used
    _used = True


def is_forked() -> bool:
    """Whether this process was forked from one that had used the client."""
    return _forked


def left_behind(file: str) -> Unsupported:
    message = "this process was forked from one that had used object stores, and their client does not survive that"
    return Unsupported(
        f"{message}; start processes by 'spawn' or 'forkserver', or fork before the first URL",
        file=file,
    )


def _in_child() -> None:
    # The loop's thread stayed in the parent, and so did the client's, without which no answer ever comes.
    global _forked, _thread
    _forked = _forked or _used
    _thread = None
    _loops.clear()
    under_way.clear()
    unfinished.clear()


at_fork(after_in_child=_in_child)
