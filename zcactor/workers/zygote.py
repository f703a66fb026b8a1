"""The zygote: a small process that has imported the modules of workers, and forks a worker when the node agent asks.

It is forked from the agent before the agent has a thread or an event loop, and never gets either, so that its children
may use both. Forking takes a few milliseconds where starting Python and importing NumPy takes a hundred, and the
children share the imported pages.

It ends when the agent's socket closes, and takes all workers with it; workers end by PR_SET_PDEATHSIG when it is
killed. It adopts the processes that workers start and leave behind (PR_SET_CHILD_SUBREAPER), so that it can end them,
too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import select
import signal
import socket
import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TextIO

import msgspec

from zcactor import signals
from zcactor.lazy_numpy import np
from zcactor.workers.exits import forget_exit_functions, run_exit_functions

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "ZYGOTE_MESSAGE",
    "adopt_orphans",
    "adopts_orphans",
    "children_of_ours",
    "is_tracker",
    "kill_group",
    "kill_orphans",
    "outlive_sigterm",
    "pass_over_user_signals",
    "run_zygote",
    "set_death_signal",
    "set_name",
    "wait_for_end",
]

ZYGOTE_MESSAGE = 128 << 10
"""Bytes of the largest request (an actor's environment variables): a size that one message of a socket surely holds."""
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 15, 36, 37
_QUIET = 0.2
"""Seconds without a request until NumPy is imported: by then the node has joined its cluster."""
_LAST_STEPS = 1.0
"""Seconds of the last steps of a worker that has failed."""
_KILL_ROUNDS = 100
"""Generations of orphans killed at the end: the children of a killed process become ours, and are next."""

_TRACKER: Final = b"resource_tracker import main"
"""Part of the command line of multiprocessing's resource tracker, and of joblib's."""
_CLEARING: Final = 1.0
"""Seconds that a resource tracker gets to end by itself, which takes some hundredths."""

_prctl = ctypes.CDLL(None, use_errno=True).prctl


def set_name(name: str) -> None:
    """Name this process in the lists of the system, by up to 15 bytes (prctl(2), PR_SET_NAME)."""
    _prctl(_PR_SET_NAME, name.encode(errors="replace")[:15], 0, 0, 0)


def set_death_signal(sig: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that forked it ends (prctl(2), PR_SET_PDEATHSIG)."""
    _prctl(_PR_SET_PDEATHSIG, sig, 0, 0, 0)


_outlives = False
"""Whether SIGTERM and SIGHUP pass over this process, or over one that it was forked from."""


def outlive_sigterm() -> None:
    """Let SIGTERM and SIGHUP pass over this process. Launchers send them to every process of a job at once, and a node
    of a run is ended by its head, in order.

    Programs that are started in it have the signals' usual effect, and so have its forks: each fork that is to outlive
    them calls this again.
    """
    global _outlives
    _outlives = True
    for number in (signal.SIGTERM, signal.SIGHUP):
        signals.handle(number, _do_nothing)


def pass_over_user_signals() -> None:
    """Let SIGUSR1 and SIGUSR2 pass over this process and its forks, unless they set handlers of their own.

    Batch systems send them to every process of a job, and mean the program. In programs that are started here they have
    their usual effect.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _do_nothing)


def _do_nothing(number: int, _: object) -> None: ...


def adopt_orphans(*, yes: bool = True) -> None:
    """Become the parent of descendants whose own parent ends (prctl(2), PR_SET_CHILD_SUBREAPER); with ``yes=False``
    stop that."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


def adopts_orphans() -> bool:
    """Whether this process is the parent of such descendants."""
    answer = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0)
    return bool(answer.value)


def kill_orphans() -> None:
    """Send SIGKILL to every child of this process, and to their children as they become ours. Returns when all have
    ended. Resource trackers (`is_tracker`) are killed last, when they have had time to end by themselves.

    All are dead before the first is reaped. Should this process be killed meanwhile, its adopter finds the sessions of
    dead workers by their entries, and so the processes left in those sessions (`zcactor.workers.orphans.LastResort`). A
    child that cannot be killed (it runs as another user) is left alone.
    """
    seen: set[int] = set()
    killed: list[int] = []
    for _ in range(_KILL_ROUNDS):
        children = [pid for pid in children_of_ours() if pid not in seen]
        left = [pid for pid in children if not is_tracker(pid)]
        if children and not left:  # trackers alone
            left = children
            _let_end(children, _CLEARING)
        if not left:
            break
        dying = []
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                dying.append(pid)
        for pid in dying:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # the processes that it has started are ours then
        seen.update(left)
        killed += dying
    for pid in killed:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def is_tracker(pid: int) -> bool:
    """Whether a process is a resource tracker: it removes what the users of a pipe have left in /dev/shm, once the last
    of them has ended. Killed with them, it leaves that there for ever."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return _TRACKER in file.read()
    except OSError:  # the process is gone
        return False


def _let_end(pids: list[int], seconds: float) -> None:
    """Wait until all these children have ended, and at most `seconds`."""
    until = time.monotonic() + seconds
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            wait_for_end(pidfd, until - time.monotonic())
            os.close(pidfd)


def children_of_ours() -> list[int]:
    """The pids of this process's children, adopted ones included."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        return []


def wait_for_end(pidfd: int, seconds: float) -> bool:
    """Wait at most `seconds` for the end of the process of `pidfd` (pidfd_open(2)); return whether it has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(seconds, 0.0) * 1000))


def kill_group(pid: int) -> None:
    """Kill a worker and the processes that it started: each worker leads a process group of its own."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def run_zygote(
    sock: socket.socket, prepare: Callable[[], Callable[[dict[str, Any]], float]], *, at_once: bool = True
) -> None:
    """Serve fork requests on `sock` until it closes. Returns only in the zygote; a worker never leaves this function.

    Each request is one message (SOCK_SEQPACKET), a mapping, with two descriptors for the worker's standard output and
    error. The answer is ``{"pid": n}``; ``{"pid": n, "status": s}`` is sent when a child has ended, `s` as
    ``os.waitpid`` gives it.

    Args:
        sock: the socket to the agent.
        prepare: called once: imports the modules of workers, and returns the function that is called in a child with
            the request, and returns the time (`time.monotonic`) at which the child is to have ended.
        at_once: whether `prepare` is called now; otherwise at the first request, which waits for it. Then NumPy alone
            is imported before, once the zygote has been idle for a moment.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    set_name("zc zygote")
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    become_worker = _prepared(prepare) if at_once else None
    idle = None if at_once else _QUIET
    workers = _Workers()
    encode = msgspec.msgpack.encode
    while True:
        patience = workers.patience()
        ready, _, _ = select.select([sock.fileno(), wake_read], [], [], idle if patience is None else patience)
        if not ready and patience is None:
            import_module("numpy")
        if patience is None:
            idle = None
        if wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
        if wake_read in ready or patience is not None:
            for pid, status in workers.reap():
                with contextlib.suppress(OSError):  # the agent is gone: the next read notices it
                    sock.send(encode({"pid": pid, "status": status}))
        if sock.fileno() not in ready:
            continue
        try:
            message, descriptors, _, _ = socket.recv_fds(sock, ZYGOTE_MESSAGE, 2)
        except ConnectionResetError:  # the agent is gone, and has not read all reports
            break
        if not message:
            break
        request: dict[str, Any] = msgspec.msgpack.decode(message)
        if become_worker is None:
            become_worker = _prepared(prepare)
        try:
            pid = os.fork()
        except OSError as error:  # too many processes, or no memory: the agent tells the spawner
            for fd in descriptors:
                os.close(fd)
            with contextlib.suppress(OSError):
                sock.send(encode({"pid": 0, "error": str(error)}))
            continue
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for fd in (wake_read, wake_write):
                os.close(fd)
            sock.close()
            _enter_child(descriptors, request["label"])
            status, until = 1, time.monotonic() + _LAST_STEPS
            try:
                until = become_worker(request)
                status = 0
            except BaseException:  # the last frame of a process: report, and leave without the parent's handlers
                sys.excepthook(*sys.exc_info())
            finally:
                try:
                    run_exit_functions(until)
                except BaseException:  # a file of a class of the user's
                    sys.excepthook(*sys.exc_info())
                finally:
                    os._exit(status)
        workers.pids.add(pid)
        for fd in descriptors:
            os.close(fd)
        with contextlib.suppress(OSError):
            sock.send(encode({"pid": pid}))
    kill_orphans()


def _prepared(prepare: Callable[[], Callable[[dict[str, Any]], float]]) -> Callable[[dict[str, Any]], float]:
    become_worker = prepare()
    gc.collect()
    gc.freeze()  # children share these pages as long as the collector does not touch them
    return become_worker


class _Ended(NamedTuple):
    """A worker that has ended, and whose resource trackers have not."""

    status: int
    until: float
    """The time (`time.monotonic`) at which they are killed."""
    trackers: set[int]


class _Workers:
    """The workers of the zygote, and their ends."""

    def __init__(self) -> None:
        self.pids: set[int] = set()
        """The workers that have not ended."""
        self._ended: dict[int, _Ended] = {}

    def patience(self) -> float | None:
        """Seconds until `reap` has something to do even if no child ends; None for never."""
        if not self._ended:
            return None
        return max(0.0, min(each.until for each in self._ended.values()) - time.monotonic())

    def reap(self) -> list[tuple[int, int]]:
        """Reap every child that has ended. Returns the workers among them of which nothing is left, with their wait
        status.

        The rest of a worker's group is killed first, as long as the group can be found by the worker. Its resource
        trackers are left for a moment, and the group can be found by them.
        """
        gone: list[tuple[int, int]] = []
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if found is None:
                break
            pid = found.si_pid
            if pid in self.pids:
                self.pids.remove(pid)
                trackers = self._kill_all_but_trackers(pid)
                status = os.waitpid(pid, 0)[1]
                if trackers:
                    self._ended[pid] = _Ended(status, time.monotonic() + _CLEARING, trackers)
                else:
                    gone.append((pid, status))
                continue
            worker = next((each for each, ended in self._ended.items() if pid in ended.trackers), None)
            if worker is not None and len(self._ended[worker].trackers) == 1:
                kill_group(worker)
                gone.append((worker, self._ended.pop(worker).status))
            elif worker is not None:
                self._ended[worker].trackers.remove(pid)
            os.waitpid(pid, 0)
        return gone + self._give_up()

    def _give_up(self) -> list[tuple[int, int]]:
        """Kill the trackers whose time is over, so that `reap` finds them. Returns the workers whose trackers it will
        not find, as they are no children of ours."""
        now = time.monotonic()
        over = [worker for worker, ended in self._ended.items() if ended.until <= now]
        if not over:
            return []
        ours = set(children_of_ours())
        gone = []
        for worker in over:
            ended = self._ended[worker]
            for pid in ended.trackers:
                if _group_of(pid) == worker:  # the number is still its own
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
            ended.trackers.intersection_update(ours)
            if ended.trackers:
                self._ended[worker] = ended._replace(until=now + _CLEARING)
            else:
                gone.append((worker, self._ended.pop(worker).status))
        return gone

    def _kill_all_but_trackers(self, worker: int) -> set[int]:
        """Kill the group of a worker that has ended, except for resource trackers, which are returned.

        All processes of the system are looked at only where the worker has left some to us: thousands of workers may
        end together.
        """
        trackers: set[int] = set()
        if any(_group_of(pid) == worker for pid in children_of_ours() if pid != worker and pid not in self.pids):
            seen: set[int] = {worker}
            for _ in range(_KILL_ROUNDS):
                left = [pid for name in os.listdir("/proc") if name.isdecimal() and (pid := int(name)) not in seen]
                left = [pid for pid in left if _group_of(pid) == worker]
                if not left:
                    break
                for pid in left:
                    if is_tracker(pid):
                        trackers.add(pid)
                    else:
                        with contextlib.suppress(ProcessLookupError, PermissionError):
                            os.kill(pid, signal.SIGKILL)
                seen.update(left)
        if not trackers:
            kill_group(worker)
        return trackers


def _group_of(pid: int) -> int:
    """The process group of a process; 0 where it is gone."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _enter_child(descriptors: list[int], label: str) -> None:
    """Make the fork a process of its own: session, signals, standard streams, random state."""
    parent = os.getppid()
    os.setsid()
    set_death_signal()
    if os.getppid() != parent:  # the zygote had died before the call above took effect
        os._exit(1)
    set_name(f"zc {label}")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if _outlives:
        outlive_sigterm()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for target, fd in zip((1, 2), descriptors, strict=True):
        os.dup2(fd, target)
        os.close(fd)
    sys.stdout, sys.stderr = _text(1), _text(2)
    forget_exit_functions()
    random.seed()
    if "numpy.random" in sys.modules:
        np.random.seed()  # the legacy global state, which users' code may use and forks would share


def _text(fd: int) -> TextIO:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
