"""A mailbox: the order in which an actor's calls start, and the threads that its sync methods run in.

The promised order is per caller: its calls *start* in the order they were made, sync and async alike. So each caller
has a lane. A call that cannot start yet (an argument has not arrived, an earlier sync call still waits for the thread,
the limit is reached) is held in its lane, and everything behind it with it. Lanes do not wait for each other. On an
actor with async methods, a call whose arguments have not arrived steps out of its lane instead.

Sync calls whose turn has come go into one queue that the actor's thread empties by itself: between two of them the loop
takes no part. An actor in a shared process has no thread of its own: one of the process's threads empties its queue, in
the actor's own context (NumPy's allocator is set there). The loop's thread alone asks a lane for admission, and holds
calls in it; the threads say there which calls they begin.

Whether a call may start now is decided by `Lane.admit` alone, in C: the shortest way from a frame to a method asks it,
too.
"""

from __future__ import annotations

import contextvars
import threading
from collections import OrderedDict, deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from zcactor.execution.failure import passable
from zcactor.interface import MethodKind, MethodSpec
from zcactor.native import hot

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from zcactor.execution.threads import Runner
    from zcactor.rpc.incoming import Incoming

__all__ = ["Mailbox"]

_THREADED = frozenset({int(MethodKind.SYNC), int(MethodKind.GENERATOR)})
_INLINE = int(MethodKind.INLINE)


class Mailbox:
    """The calls to one actor, or to one of its concurrency groups.

    Args:
        name: of the threads, for debuggers.
        loop: the actor's loop.
        sync_limit: the number of threads, that is of sync calls at the same time.
        async_limit: the number of async calls at the same time.
        run_sync: ``run_sync(incoming, spec, more)`` runs a call in the thread; `more` says that another call waits.
        start_async: ``start_async(incoming, spec, lane)`` makes the task.
        run_inline: ``run_inline(incoming, spec)`` runs a call on the loop.
        enter_thread: called at each thread's start; with `threads` once in each context of methods.
        lost: ``lost(error)`` is called when a call or a thread ends by an exception that was not answered, or no thread
            can be started: a caller may wait for ever. Any thread may call it.
        threads: threads for the sync calls; None for threads of the mailbox's own.
    """

    def __init__(
        self,
        name: str,
        loop: asyncio.AbstractEventLoop,
        sync_limit: int,
        async_limit: int,
        *,
        steps_out: bool,
        run_sync: Callable[[Incoming, MethodSpec, bool], None],
        start_async: Callable[[Incoming, MethodSpec, hot.Lane], None],
        run_inline: Callable[[Incoming, MethodSpec], None],
        enter_thread: Callable[[], None],
        lost: Callable[[BaseException], None],
        threads: Runner | None = None,
    ) -> None:
        self.name = name
        self.loop = loop
        self.sync_limit = sync_limit
        self.tasks = hot.Admission(async_limit)
        """The async calls that run, and their limit."""
        self.steps_out = steps_out
        self._run_sync = run_sync
        self._start_async = start_async
        self._run_inline = run_inline
        self._enter_thread = enter_thread
        self._lost = lost
        self.lanes: dict[Any, hot.Lane] = {}
        """The lanes by the caller's session."""
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._shared = threads
        self._turns = 0
        """Shared threads that empty the queue, or are about to."""
        self._contexts: list[contextvars.Context] = []
        """The contexts of calls on shared threads: one for each turn at the same time."""
        self._count_lock = threading.Lock()
        self._open = 0
        """Calls that are queued for the threads or run in one; counted while threads may be added."""
        self._closed = False
        self._limited: OrderedDict[hot.Lane, None] = OrderedDict()
        """The lanes whose next call waits for the limit of async calls alone, in the order in which they take turns."""
        self._pumping = self._freed = False
        """Whether `_pump_limited` is at work, and whether a call has ended meanwhile."""

    def submit(self, incoming: Incoming, spec: MethodSpec) -> None:
        """Take a call. It starts now, or when its turn comes."""
        lane = self.lanes.get(incoming.session)
        if lane is None:
            # Calls by another connection of the same caller come after those by its first one.
            lane = self.lanes.get(getattr(incoming.session, "twin", None)) or hot.Lane(self.tasks, deque())
            self.lanes[incoming.session] = lane
        if incoming.blockers and self.steps_out:
            return  # `unblocked` brings it back
        if not incoming.blockers and lane.admit(spec.kind):
            self.start(incoming, spec, lane)
            return
        lane.held.append((incoming, spec))
        if len(lane.held) == 1:  # the thread may have begun the call before it, before it could see the held call
            self._pump(lane)

    def start(self, incoming: Incoming, spec: MethodSpec, lane: hot.Lane) -> None:
        """Start a call that was admitted."""
        kind = spec.kind
        if kind in _THREADED:
            if len(self._threads) < self.sync_limit:
                self._grow()
            self._queue.put((incoming, spec, lane))
            if self._shared is not None:
                self._take_turn()
        elif kind == _INLINE:
            self._run_inline(incoming, spec)
        else:
            self._start_async(incoming, spec, lane)

    def unblocked(self, incoming: Incoming, spec: MethodSpec) -> None:
        """Go on with a call whose last argument has arrived."""
        if self.steps_out:
            self.submit(incoming, spec)
        elif (lane := self.lanes.get(incoming.session)) is not None:
            self._pump(lane)

    def pump(self, lane: hot.Lane) -> None:
        """Start the calls of a lane that can start, after the present step of the loop: a task that calls this in its
        first step stays ahead of them."""
        self.loop.call_soon(self._pump, lane)

    def _pump(self, lane: hot.Lane) -> None:
        if lane.pumping:
            return
        lane.pumping = True
        held = lane.held
        try:
            while held and not held[0][0].blockers and lane.admit_held(held[0][1].kind):
                incoming, spec = held.popleft()
                self.start(incoming, spec, lane)
                if self._freed:  # the call has ended: the other lanes come first
                    break
        finally:
            lane.pumping = False
            if held and not held[0][0].blockers and (self._freed or self.tasks.full):
                self._limited[lane] = None

    def _pump_limited(self) -> None:
        """Start the calls that a full limit has held up, of one lane after the other."""
        if not self.loop.is_running():  # the collector has closed the coroutine of a call, after the end of the loop
            return
        if self._pumping:  # by a call that has ended in its first step, which runs further down this stack
            self._freed = True
            return
        self._pumping = True
        try:
            while self._limited and not self.tasks.full:
                self._freed = False
                lane, _ = self._limited.popitem(last=False)
                self._pump(lane)
        finally:
            self._pumping = self._freed = False

    def task_began(self, lane: hot.Lane) -> None:
        """Note that the first step of an async call is about to run."""
        if lane.task_began():
            self.pump(lane)

    def task_ended(self) -> None:
        """Note the end of an async call."""
        if self.tasks.task_ended():
            self._pump_limited()

    def forget(self, session: Any) -> None:
        """Forget a caller that is gone: its held calls never start."""
        lane = self.lanes.pop(session, None)
        if lane is not None and lane.held:
            kept = [entry for entry in lane.held if entry[0].session is not session]  # its twin's
            lane.held.clear()
            lane.held.extend(kept)
            self._pump(lane)

    def drop_held(self, incoming: Incoming) -> bool:
        """Take a cancelled call out of its lane; False when it is not held there."""
        lane = self.lanes.get(incoming.session)
        if lane is None:
            return False
        for entry in lane.held:
            if entry[0] is incoming:
                lane.held.remove(entry)
                self._pump(lane)
                return True
        return False

    def post(self, work: Callable[[], None]) -> None:
        """Run `work` in the actor's thread, behind the queued calls."""
        if len(self._threads) < self.sync_limit:
            self._grow()
        self._queue.put(work)
        if self._shared is not None:
            self._take_turn()

    async def run(self, function: Callable[[], Any]) -> Any:
        """Call `function` in the actor's thread, behind the queued calls. Returns its result, or raises its exception.

        Cancelling does not stop the function.
        """
        loop = self.loop
        done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            if not done.done():
                done.set_result((value, error))

        def work() -> None:
            try:
                value = function()
            except BaseException as error:
                loop.call_soon_threadsafe(settle, None, error)
            else:
                loop.call_soon_threadsafe(settle, value, None)

        self.post(work)
        value, error = await done
        if error is not None:
            raise passable(error, self.name)
        return value

    @property
    def idle(self) -> bool:
        """Whether nothing is held, queued for the thread or running as a task. (A running sync call shows only in the
        open call of its caller.)"""
        return self._queue.empty() and not self.tasks.running and not any(lane.held for lane in self.lanes.values())

    def _grow(self) -> None:
        """Count a call that is about to be queued, and add a thread if all are busy, up to the limit. Any thread may
        call this, and several at the same time."""
        if self._shared is not None:
            return
        with self._count_lock:
            self._open += 1
            if self._closed or self._open <= len(self._threads) or len(self._threads) >= self.sync_limit:
                return
            self._add_thread()

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=f"{self.name}-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more threads
            if not self._threads:
                self._lost(error)
            return
        self._threads.append(thread)

    def _work(self) -> None:
        try:
            self._enter_thread()
            self._serve()
        except BaseException as error:  # one that another thread has set in this one, between two calls
            self._lost(error)

    def _serve(self) -> None:
        queue = self._queue
        while (work := queue.get()) is not None:
            self._do(work)
            del work
            if len(self._threads) < self.sync_limit:
                with self._count_lock:
                    self._open -= 1

    def _do(self, work: Any) -> None:
        try:
            if type(work) is tuple:
                incoming, spec, lane = work
                if lane.thread_began():
                    self.loop.call_soon_threadsafe(self._pump, lane)
                self._run_sync(incoming, spec, not self._queue.empty())
            else:
                work()
        except BaseException as error:  # exceptions of methods were answered
            self._lost(error)

    # ---------------------------------------------------------------- shared threads

    def _take_turn(self) -> None:
        """Have a shared thread empty the queue, in which something was put, unless `sync_limit` threads do."""
        assert self._shared is not None
        with self._count_lock:
            if self._turns >= self.sync_limit:
                return
            self._turns += 1
        self._shared.submit(self._turn)

    def _turn(self) -> None:
        with self._count_lock:
            context = self._contexts.pop() if self._contexts else None
        if context is None:
            context = contextvars.Context()
            try:
                context.run(self._enter_thread)
            except BaseException as error:
                self._lost(error)
                return
        context.run(self._empty_queue)
        with self._count_lock:
            self._contexts.append(context)
            more = not self._queue.empty()  # queued meanwhile, or left for others that want the thread
            if not more:
                self._turns -= 1
        if more:
            assert self._shared is not None
            self._shared.submit(self._turn)

    def _empty_queue(self) -> None:
        """Run all that is queued, or only the first call where others wait for the thread."""
        assert self._shared is not None
        queue, threads = self._queue, self._shared
        while True:
            try:
                work = queue.get_nowait()
            except Empty:
                return
            self._do(work)
            del work
            if threads.wanted:
                return

    def close(self) -> None:
        """End the threads once they have emptied the queue. Idempotent; does not wait."""
        if not self._closed:
            self._closed = True
            for _ in self._threads:
                self._queue.put(None)
        for lane in self.lanes.values():
            lane.held.clear()
        self.lanes.clear()
        self._limited.clear()

    def join(self, timeout: float) -> bool:
        """Wait in the calling thread until its own threads have ended; False when one still runs after `timeout` s."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout)
        return not any(thread.is_alive() for thread in self._threads)
