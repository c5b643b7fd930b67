"""Runs requests to object stores on one event loop, and ends all of them before the program ends.

obstore answers from its own threads, which need the interpreter to deliver an answer. Up to Python
3.13, a thread that requests the interpreter while it shuts down aborts the process (SIGABRT;
docs/design/023). Therefore:

1. A request counts as under way until the thread that answers it has left the interpreter. Its last
   action there is to ask the future whether it was `cancelled`, or to hand the result to the loop.
   `RequestFuture` and `RequestLoop` override both calls and record that.
2. Memory that was lent to obstore (`lend_memory`) is waited for, because returning it also needs
   the interpreter.
3. When the program ends, requests of daemon threads are cancelled, their uploads are stopped, and
   everything under way is waited for. This happens after all `atexit` handlers that were registered
   since the import of Holdfast.
4. Later requests, and requests in a process that cannot start threads, run on a loop of their own.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar, TypeVarTuple, cast

from holdfast.core.runtime import at_exit, at_fork, make_fork_safe, start_thread
from holdfast.errors import Unsupported

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LEAVING_S = 5.0
"""The longest wait for a thread that leaves the interpreter, or for an upload that is stopped."""

PARKED_S = 60.0
"""How long a daemon thread sleeps when the program ends. The process is gone before that."""


class RequestFuture(asyncio.Future[Any]):
    """A future that records when the thread that answers it has left the interpreter."""

    has_left = False

    def cancelled(self) -> bool:
        """Return whether the future was cancelled.

        If it was, this is the last call of the thread of obstore that answers it.
        """
        is_cancelled = super().cancelled()
        loop = cast(RequestLoop, self.get_loop())
        is_last_call = is_cancelled and threading.get_ident() != loop.thread_id
        # No calls after this line: a call may let another thread run, and that thread would believe
        # that this one has left already.
        if is_last_call:
            self.has_left = True
            if self in active_requests:
                del active_requests[self]  # noqa: RUF051  # `pop` is a call
        return is_cancelled


class RequestLoop(asyncio.SelectorEventLoop):
    """An event loop whose futures are `RequestFuture`s."""

    thread_id = 0
    """The id of the thread that runs the loop."""

    def create_future(self) -> RequestFuture:
        return RequestFuture(loop=self)

    def run_forever(self) -> None:
        self.thread_id = threading.get_ident()
        super().run_forever()

    def list_requests(self) -> list[RequestFuture]:
        """Return the requests of this loop that are under way."""
        return [
            request
            for request in list(active_requests)
            if isinstance(request, RequestFuture) and request.get_loop() is self
        ]

    def run_on_thread(self) -> None:
        """Run until the loop is stopped. It is closed unless requests are still under way."""
        self.run_forever()
        if not self.list_requests():
            self.close()

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Any = None,  # noqa: ANN401
    ) -> asyncio.Handle:
        """Schedule a callback, and record that the calling thread leaves the interpreter.

        A thread of obstore hands over its answer with this call, its last one in Python.
        """
        handle = super().call_soon_threadsafe(callback, *args, context=context)
        request = args[0] if args else None
        if isinstance(request, RequestFuture):
            # No calls after this line: a call may let another thread run, and that thread would
            # believe that this one has left already.
            request.has_left = True
            if request in active_requests:
                del active_requests[request]  # noqa: RUF051  # `pop` is a call
        return handle


def track_request(request: Awaitable[T]) -> Awaitable[T]:
    """Record a request of obstore as under way, and return it.

    This is not a coroutine, because a coroutine can be cancelled before it starts.
    """
    if isinstance(request, RequestFuture):
        active_requests[request] = None
        # The answer may have come before this function was called.
        if request.has_left:
            active_requests.pop(request, None)
    return request


@asynccontextmanager
async def lend_memory(data: bytes | memoryview, *, is_kept: bool) -> AsyncIterator[memoryview]:
    """Lend memory to obstore. At the end of the block, wait until obstore has released it.

    With `is_kept`, do not wait: a store in memory never releases what is put.
    """
    view = memoryview(data)
    if is_kept:
        yield view
        return
    # By its id, because a memoryview of writable memory cannot be the key of a dict. The view lives
    # until the end of the block, so the id cannot stand for another object.
    active_requests[id(view)] = None
    try:
        yield view
    finally:
        await poll_until(lambda: is_released(view))
        del active_requests[id(view)]


def is_released(view: memoryview) -> bool:
    """Release a view of memory. Returns False if somebody else still uses the view."""
    try:
        view.release()
    except BufferError:
        return False
    return True


async def poll_until(is_done: Callable[[], bool]) -> None:
    """Wait for a condition that usually takes microseconds, for at most `LEAVING_S`."""
    # The first polls only let other tasks run. Later ones sleep, to leave the processor to others.
    poll_count = 0
    deadline = time.monotonic() + LEAVING_S
    while not is_done() and time.monotonic() < deadline:
        poll_count += 1
        await asyncio.sleep(0 if poll_count < 20 else 0.001)


active_requests: dict[object, None] = {}
"""Requests, and memory that is lent. Unlike a set, a dict loses an item without a call."""

unfinished_uploads: dict[object, Callable[[], Coroutine[Any, Any, object]]] = {}
"""For each upload that has started, the function that stops it."""

_lock = make_fork_safe(threading.Lock())
_thread: threading.Thread | None = None
"""The thread that runs the shared loop."""
_shared_loop: RequestLoop | None = None
"""The loop for the requests of all threads. It exists if `_thread` does."""
_loops: list[RequestLoop] = []
"""All loops that run: the shared one, and those of `_run_on_own_loop`."""
_was_used = False
"""Whether this process has used the client."""
_is_forked = False
"""Whether this process is a fork of one that had used the client."""
_is_ending = False
"""Whether the program ends."""


def wait_for_answer(send: Callable[[], Awaitable[T]]) -> T:
    """Send a request to an object store and wait for its answer. An interrupt cancels the request.

    Requests of all threads run on one event loop, which has a thread of its own. Only if this
    process cannot start a thread, or the program ends, the request runs on a loop in this thread.

    Args:
        send: Sends the request. It is called on the thread of the loop.

    Raises:
        Unsupported: The program ends, or this process is a fork.
    """

    async def send_and_wait() -> T:
        # A client of obstore must be called on the thread of the loop that waits for its answer.
        # This coroutine takes the call there. The caller has only made the coroutine.
        return await send()

    future = None
    with _lock:
        # The request is added under the lock. So it either comes before `_finish_requests`, which
        # cancels it, or does not use the shared loop any more.
        loop = _ensure_loop()
        if loop is not None:
            future = asyncio.run_coroutine_threadsafe(send_and_wait(), loop)
    if future is None:
        return _run_on_own_loop(send_and_wait)
    try:
        return future.result()
    except CancelledError:
        # Requests are cancelled only when the program is shutting down.
        raise _make_exit_error() from None
    except BaseException:
        # An interrupt ends the wait. The request must not go on without its caller.
        future.cancel()
        raise


def _ensure_loop() -> RequestLoop | None:
    """Return the shared loop, and start it if necessary. The caller holds the lock.

    Returns:
        None if no thread can start, or if the program ends.

    Raises:
        Unsupported: This process is a fork of one that had used the client.
    """
    global _shared_loop, _thread
    if _is_forked:
        raise make_fork_error("")
    if _is_ending:
        return None
    if _shared_loop is None:
        loop = RequestLoop()
        _thread = start_thread(loop.run_on_thread, name="object-store requests", daemon=True)
        if _thread is None:
            loop.close()
            return None
        _shared_loop = loop
        _loops.append(loop)
    return _shared_loop


def _run_on_own_loop(send: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Send a request on an event loop of its own, in this thread.

    This is for processes that cannot start threads, and for requests while the program ends.
    """
    # Nobody waits for a daemon thread, so its request could outlive the interpreter.
    if _is_ending and threading.current_thread().daemon:
        raise _make_exit_error()
    loop = RequestLoop()
    # From now on, the end of the program cancels the requests of this loop as well.
    _loops.append(loop)
    try:
        try:
            return loop.run_until_complete(send())
        finally:
            # The loop cannot be closed before the threads of obstore have handed over their
            # answers.
            loop.run_until_complete(poll_until(lambda: not loop.list_requests()))
    except asyncio.CancelledError:
        # Requests are cancelled only when the program is shutting down.
        raise _make_exit_error() from None
    finally:
        _loops.remove(loop)
        loop.close()


def _make_exit_error() -> Unsupported:
    """Return the error for a request at the end of the program.

    A daemon thread sleeps instead: the user would see its error, but not its end.
    """
    # The program ends before the thread wakes up.
    if threading.current_thread().daemon:
        time.sleep(PARKED_S)
    return Unsupported(
        "the program ends while a daemon thread uses an object store; join the thread first"
    )


@at_exit
def _finish_requests() -> None:
    """Cancel all requests and wait for them, before the interpreter shuts down.

    A thread of obstore that answers later would abort the process.
    """
    global _is_ending
    # The loop waits twice for at most `LEAVING_S`: for cancelled requests, and for uploads.
    deadline = time.monotonic() + 2 * LEAVING_S
    with _lock:
        _is_ending = True
    for loop in tuple(_loops):
        # The loop may have been closed meanwhile.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_cancel_requests, loop)

    while time.monotonic() < deadline:
        has_thread = _thread is not None and _thread.is_alive()
        if not active_requests and not has_thread:
            break
        # The program ends already, so another interrupt changes nothing.
        with suppress(KeyboardInterrupt):
            time.sleep(0.001)


def _cancel_requests(loop: RequestLoop) -> None:
    """Cancel the requests of a loop. If it is the shared loop, also stop the uploads and the loop.

    The other loops end by themselves, when the call that started them returns.
    """
    tasks = asyncio.all_tasks(loop)
    for request in (*tasks, *loop.list_requests()):
        request.cancel()
    if loop is _shared_loop:
        _stop_tasks.add(loop.create_task(_stop_loop(loop, tasks)))


_stop_tasks: set[object] = set()
"""Keeps tasks alive. A loop has only weak references to its tasks."""


async def _stop_loop(loop: RequestLoop, cancelled_tasks: set[asyncio.Task[Any]]) -> None:
    """Stop the uploads and the loop, when the cancelled tasks have ended."""
    if cancelled_tasks:
        await asyncio.wait(cancelled_tasks, timeout=LEAVING_S)
    # An upload that ends by itself meanwhile removes itself from the dict.
    for stop_upload in list(unfinished_uploads.values()):
        await stop_upload()
    await poll_until(lambda: not loop.list_requests())
    loop.stop()


def mark_used() -> None:
    """Record that the client was used. It does not work in processes that fork from now on."""
    global _was_used
    _was_used = True


def is_forked() -> bool:
    """Return whether this process is a fork of one that had used the client."""
    return _is_forked


def make_fork_error(file: str) -> Unsupported:
    """Return the error for a request in a forked process. `file` is the URL of the request."""
    return Unsupported(
        "this process is a fork of one that had used object stores, and their client cannot be "
        "forked; start processes with 'spawn' or 'forkserver', or fork before the first use of a "
        "URL",
        file=file,
    )


def _forget_parent() -> None:
    """Drop the loops of the parent in a forked child, where their threads do not exist."""
    global _is_forked, _shared_loop, _thread
    # A fork of a fork cannot use the client either.
    _is_forked = _is_forked or _was_used
    _thread = None
    _shared_loop = None
    _loops.clear()
    active_requests.clear()
    unfinished_uploads.clear()


at_fork(after_in_child=_forget_parent)
