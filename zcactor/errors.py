"""Every exception that zcactor raises, in one tree.

::

    ZcactorError
    ├── ActorError
    │   ├── ActorDied(actor, cause, maybe_executed)
    │   │   └── GroupBroken(rank, actor, cause, epoch)
    │   ├── ActorUnavailable(actor, cause, maybe_executed)
    │   ├── MailboxFull
    │   ├── NameTaken
    │   ├── NoSuchActor
    │   └── InsufficientResources
    ├── RemoteError                  also an instance of the original exception's type when that type can be pickled
    ├── GroupMismatch(ranks, signatures)
    ├── DeadlineExceeded             also a TimeoutError
    │   └── GroupTimeout(what, seconds, missing)
    ├── ObjectLost
    ├── OutOfMemory(requested, used, capacity, largest_free)   also a MemoryError
    ├── ConnectionLost(maybe_executed)                         also a ConnectionError
    ├── HeadUnavailable(log, since)
    ├── ProtocolError
    │   ├── VersionMismatch
    │   └── AuthenticationError
    ├── DeviceUnavailable
    ├── DeviceError(call, code, device, fatal)
    ├── NotInitialized
    │   └── ForkedProcess
    └── AlreadyInitialized

Each message names the event, the place, the limit and the value, and the next step. The exceptions can be pickled,
because they travel between actors.
"""

from __future__ import annotations

from abc import ABCMeta
from typing import Any, Final, NamedTuple, SupportsIndex

from zcactor.exception_pickling import (
    class_name,
    fields_of,
    has_own_reduction,
    module_of,
    mro_of,
    namespace_of,
    put_together,
    take_apart,
    type_name,
)

__all__ = [
    "ActorDied",
    "ActorError",
    "ActorUnavailable",
    "AlreadyInitialized",
    "AuthenticationError",
    "ConnectionLost",
    "CopyWarning",
    "DeadlineExceeded",
    "DeviceError",
    "DeviceUnavailable",
    "ForkedProcess",
    "GroupBroken",
    "GroupMismatch",
    "GroupTimeout",
    "HeadUnavailable",
    "InsufficientResources",
    "MailboxFull",
    "NameTaken",
    "NoSuchActor",
    "NotInitialized",
    "ObjectLost",
    "OutOfMemory",
    "ProtocolError",
    "RemoteError",
    "VersionMismatch",
    "ZcactorError",
    "make_remote_error",
    "original_of",
    "remote_of",
]


class ZcactorError(Exception):
    """The base class of every exception that zcactor raises on its own account.

    Usual causes:
        the classes on this page, and a few of the package's inside that have no public name.

    Remedy:
        catch it where any failure of zcactor is handled in the same way; otherwise catch the class that you expect.
    """


class ActorError(ZcactorError):
    """An error about one actor: it is dead, unreachable, full, not found, or cannot be placed.

    Usual causes:
        its subclasses: this class itself is not raised.

    Remedy:
        catch it where it does not matter why an actor is of no use; otherwise catch the subclass.
    """


class _ActorGone(ActorError):
    """The common base of `ActorDied` and `ActorUnavailable`: the actor, the cause, and whether the call may have run.

    Attributes:
        actor: label of the actor.
        cause: why the actor is gone; empty where no cause is known.
        maybe_executed: whether the call may have run.
    """

    _what = "is gone"

    def __init__(self, actor: str, cause: str = "", maybe_executed: bool = False) -> None:
        super().__init__(actor, cause, maybe_executed)
        self.actor = actor
        self.cause = cause
        self.maybe_executed = maybe_executed

    def __str__(self) -> str:
        return self._said(self.maybe_executed)

    def _said(self, maybe_executed: bool) -> str:
        ran = "the call may have run" if maybe_executed else "the call did not run"
        return f"actor {self.actor} {self._what}: {self.cause or 'no cause is known'}; {ran}"


class ActorDied(_ActorGone):
    """The actor's process ended, or the actor was stopped or killed. It does not come back.

    Usual causes:
        the actor's process was killed (``zc.kill``, a signal, the kernel for lack of memory), ended itself or crashed
        in native code; the actor was stopped, or its last handle or its spawner went; its constructor raised when it
        was to start again.

    Remedy:
        read `cause`, which names signal or exit status; call another actor, and spawn with ``max_restarts`` where the
        actor is to come back.

    Attributes:
        actor: label of the actor.
        cause: why the actor died; empty where no cause is known.
        maybe_executed: whether the call may have run; False only when the call certainly never started.
    """

    _what = "died"


class ActorUnavailable(_ActorGone):
    """The actor is being restarted or cannot be reached now; a later call may succeed.

    Usual causes:
        the actor's process ended and restarts are left; the connection to it broke, or its host does not answer.

    Remedy:
        call again where `maybe_executed` is False or the method may run twice; ``@zc.method(idempotent=True,
        retries=n)`` does so by itself.

    Attributes:
        actor: label of the actor.
        cause: why the actor is not available; empty where no cause is known.
        maybe_executed: whether the call may have run.
    """

    _what = "is not available now"


class GroupBroken(ActorDied):
    """A member of the group is gone, or the group was formed anew: this value of it takes no further collectives.

    ``await group.reform()`` or ``await group.without(rank)`` makes a group that works.

    Usual causes:
        a member died while others waited in a collective; a value of the group from before ``reform()`` or
        ``without()`` was used.

    Remedy:
        make a group that works by ``await group.without(error.rank)`` or ``await group.reform()``, and pass it to the
        members.

    Attributes:
        rank: rank of the member that is gone; -1 where a later epoch has superseded the group.
        actor: label of that member; empty where the group was superseded.
        cause: why the group is broken.
        epoch: epoch of the group that is broken.
    """

    def __init__(self, rank: int, actor: str, cause: str, epoch: int) -> None:
        super().__init__(actor, cause, True)
        self.args = (rank, actor, cause, epoch)
        self.rank = rank
        self.epoch = epoch

    def _said(self, maybe_executed: bool) -> str:
        del maybe_executed
        if self.rank < 0:
            return f"the group of epoch {self.epoch} is broken: {self.cause}; use the value that the new group has"
        return (
            f"the group of epoch {self.epoch} is broken: rank {self.rank}, actor {self.actor}, is gone: "
            f"{self.cause or 'no cause is known'}; await group.reform() or group.without({self.rank})"
        )


class MailboxFull(ActorError):
    """A caller already has `max_pending_calls` unfinished calls to the actor; await some of them before sending
    more.

    Usual causes:
        a loop that sends calls, and awaits none of them, has outrun the actor.

    Remedy:
        await calls as you go, as by ``zc.wait``, or raise ``max_pending_calls``.
    """


class NameTaken(ActorError):
    """A living actor in the namespace has that name; use ``get_if_exists=True`` or another name.

    Usual causes:
        a program that ran before left a detached actor of that name; two programs share a namespace.

    Remedy:
        pass ``get_if_exists=True``, end the other actor by ``zc.kill``, or choose another name or namespace.
    """


class NoSuchActor(ActorError):
    """No living actor in the namespace has that name, or the node does not know the actor of the handle.

    Usual causes:
        the name is misspelt, or belongs to another namespace; the actor has ended.

    Remedy:
        compare with the names in the message, and spawn the actor with ``get_if_exists=True`` where it may be missing.
    """


class InsufficientResources(ActorError):
    """The node can never satisfy the request, not even when it is idle.

    Usual causes:
        more CPUs, GPUs or other resources were asked for than any one node has in all; the system starts no further
        process.

    Remedy:
        ask for less, or give the node more, by ``zc.init(num_cpus=...)`` or ``zcactor start --resources``.
    """


class Remote(NamedTuple):
    """An exception of a method as text, its original, and the place where it was raised: the attributes of
    `RemoteError`, of which `traceback` is called ``remote_traceback`` there."""

    type_name: str = ""
    message: str = ""
    traceback: str = ""
    actor: str = ""
    host: str = ""
    pid: int = 0
    original: BaseException | None = None


class _Told:
    """An attribute that stands for a field of `RemoteError.remote` unless the original has an attribute of its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, error: RemoteError | None, cls: type | None = None) -> Any:
        return getattr(Remote() if error is None else remote_of(error), self._name)


class RemoteError(ZcactorError):
    """A method raised an exception. It is also an instance of the original exception's type, so ``except ValueError``
    catches a ``ValueError``, when that type can be pickled.

    The attributes of the original exception stay as they are. Those of zcactor stand under `remote`, as in
    ``error.remote.host``. Each is an attribute of the error, too, where the original has no attribute of its name.

    ``str()`` gives the text of the original exception, preceded by the name of its type where the exception could not
    be rebuilt as that type. A note (PEP 678), which printed tracebacks show, names the actor, the process id, the host
    and the remote traceback. ``__cause__`` and ``__context__`` are the original's, up to 16 in a row.

    An `ActorDied`, `ActorUnavailable` or `ConnectionLost` that a method raised has ``maybe_executed=True`` here,
    because that method ran; ``remote.original.maybe_executed`` is the value of the inner call's own error.

    Usual causes:
        the code of a method, or of a constructor, raised.

    Remedy:
        catch the original type (``except ValueError``), and read `remote_traceback` for the line that raised.

    Attributes:
        remote: all that zcactor knows of the exception: `type_name`, `message`, `traceback`, `actor`, `host`, `pid` and
            `original`.
        type_name: qualified name of the original type.
        message: ``str()`` of the original exception.
        remote_traceback: the traceback as text, as the actor's process saw it.
        actor: label of the actor that raised.
        host: name of the host on which that actor runs.
        pid: process id of that actor's process.
        original: the original exception as rebuilt in this process; None when it could not be rebuilt.
    """

    __zcactor_remote__ = Remote()
    type_name = _Told("type_name")
    message = _Told("message")
    remote_traceback = _Told("traceback")
    actor = _Told("actor")
    host = _Told("host")
    pid = _Told("pid")
    original = _Told("original")

    @property
    def remote(self) -> Remote:
        """The fields of the failure. An attribute of this name of the original is at ``remote.original.remote``."""
        return remote_of(self)

    def __init_subclass__(cls) -> None:
        """Run no hook of the original's class, which may raise, or enter in its tables a class that is not its own."""

    def __reduce__(self) -> tuple[Any, ...]:
        remote = remote_of(self)
        original = remote.original
        parts = original if original is None or has_own_reduction(type(original)) else take_apart(original)
        return _restore, (parts, {name: getattr(remote, field) for name, field in _REMOTE_FIELDS.items()})

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return RemoteError.__reduce__(self)

    def __str__(self) -> str:
        remote = remote_of(self)
        if type(self) is RemoteError:
            return f"{remote.type_name}: {remote.message}" if remote.message else remote.type_name
        said: Any = remote.original if issubclass(type(remote.original), _TELLING) else None
        return remote.message if said is None else said._said(True)


def remote_of(error: BaseException | None) -> Remote:
    """The fields of a `RemoteError`; without a look at attributes of its original's class."""
    return BaseException.__getattribute__(error, "__zcactor_remote__")  # type: ignore[no-any-return]


def original_of(error: BaseException) -> Any:
    """The error behind the failure of a request: the original of a `RemoteError`, which may be of any class or None, or
    else `error` itself."""
    return remote_of(error).original if issubclass(type(error), RemoteError) else error


_REMOTE_FIELDS = {
    "type_name": "type_name", "message": "message", "remote_traceback": "traceback", "actor": "actor", "host": "host",
    "pid": "pid",
}  # fmt: skip
"""The fields of a failure in messages, and their names in `Remote`."""


class DeadlineExceeded(ZcactorError, TimeoutError):
    """The call's timeout passed before its result came. The actor was asked to cancel the call, which may have had
    effects.

    Usual causes:
        the method took longer than its ``timeout``; it waited behind other calls of the actor; its loop was blocked.

    Remedy:
        allow more time, or find what the actor does: the log lines of ``warn_after`` say.
    """


class GroupMismatch(ZcactorError):
    """The members of a group made different calls in the same place of their order. Each of them raises this. The
    operation counts as done, and the group stays usable.

    Usual causes:
        one rank skipped a collective, or called another one, as in a branch that depends on its rank; dtypes or shapes
        differ.

    Remedy:
        make the same calls in the same order on all ranks; `signatures` has the two that differ.

    Attributes:
        ranks: two ranks whose calls differ.
        signatures: their calls: operation, dtype, shape and what else has to agree.
    """

    def __init__(self, ranks: tuple[int, int], signatures: tuple[str, str]) -> None:
        super().__init__(ranks, signatures)
        self.ranks = ranks
        self.signatures = signatures

    def __str__(self) -> str:
        first, second = self.ranks
        return (
            f"the members of a group made different calls: rank {first} called {self.signatures[0]}, and rank {second} "
            f"called {self.signatures[1]}; all members make the same calls in the same order"
        )


class GroupTimeout(DeadlineExceeded):
    """The timeout of a collective passed while members were missing. The operation goes on, its place in the order is
    kept, and the group stays usable.

    Usual causes:
        one rank computes longer than the timeout, has ended its loop early, or does not call the group at all.

    Remedy:
        look at the ranks in `missing`, allow more time, and await the reference again: the operation goes on.

    Attributes:
        missing: ranks that had not made the call, or not finished their part of it.
    """

    def __init__(self, what: str, seconds: float, missing: tuple[int, ...]) -> None:
        super().__init__()
        self.args = (what, seconds, missing)  # given to it, OSError would keep two
        self.what = what
        self.seconds = seconds
        self.missing = missing

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.missing)) or "none, only bytes are on their way"
        return (
            f"{self.what} did not finish within its {self.seconds:.6g} s; missing ranks: {ranks}; the operation goes "
            "on, and the next call is the next in the order"
        )


class ObjectLost(ZcactorError):
    """The process that owned the object ended, or does not know the object; compute the value again.

    Usual causes:
        the process that held a value was killed before anybody had read it; a reference was kept for longer than its
        owner lived.

    Remedy:
        compute the value again; let a process that lives longer own it, by ``zc.put`` there.
    """


class OutOfMemory(ZcactorError, MemoryError):
    """The store has no free block of the requested size.

    Usual causes:
        arrays or references are kept that are not needed (a list of results, a slice of a large array); many processes
        share a small machine; a container has a low limit.

    Remedy:
        drop them (``zc.stats()`` has ``store_used`` and ``leases``), or start with a larger ``store_capacity``.

    Args:
        requested: bytes that were requested.
        used: bytes that are allocated now.
        capacity: bytes that the store may grow to; 0 where no store is possible, for the reason in `note`.
        largest_free: bytes of the largest block that could still be allocated.
        note: text that the message shows in addition.
        setting: the setting of the capacity, or ``"ulimit -f"`` where that limit bounds it.
    """

    def __init__(
        self, requested: int, used: int, capacity: int, largest_free: int, note: str = "",
        setting: str = "store_capacity",
    ) -> None:  # fmt: skip
        super().__init__(requested, used, capacity, largest_free, note, setting)
        self.requested = requested
        self.used = used
        self.capacity = capacity
        self.largest_free = largest_free
        self.note = note
        self.setting = setting

    def __str__(self) -> str:
        if not self.capacity and self.note:
            return self.note
        remedy = f"pass a larger {self.setting} to zc.init()"
        if self.setting == "ulimit -f":
            remedy = "raise ulimit -f: the store is a file, which that limit bounds"
        text = (
            f"the store cannot hold {self.requested:,} more bytes: {self.used:,} of {self.capacity:,} are used and the "
            f"largest free block is {self.largest_free:,}; drop arrays that are no longer needed, or {remedy}"
        )
        return f"{text} ({self.note})" if self.note else text


class ConnectionLost(ZcactorError, ConnectionError):
    """The connection to a process ended.

    Usual causes:
        a spawn, a question such as ``zc.nodes()``, a run of a graph or the making of a group was under way when the
        process at the other end ended, the network was cut, or the runtime was shut down.

    Remedy:
        do it again where `maybe_executed` is False or a second run does no harm.

    Attributes:
        maybe_executed: whether the call may have run; False only when the call was never sent.
    """

    def __init__(self, message: str = "", maybe_executed: bool = False) -> None:
        super().__init__(message, maybe_executed)
        self.maybe_executed = maybe_executed

    def __str__(self) -> str:
        return self._said(self.maybe_executed)

    def _said(self, maybe_executed: bool) -> str:
        return f"{self.args[0]}; {'the call may have run' if maybe_executed else 'nothing was sent'}"


_TELLING = (_ActorGone, ConnectionLost)
"""Types whose text says whether a call may have run."""


class HeadUnavailable(ZcactorError):
    """The cluster's head is away, or cannot decide because its log takes nothing. Nothing was done so far.

    Calls between living actors, arrays and streams go on. A later attempt may succeed. An actor that was to be stopped
    or killed may end later even so, where the log neither took nor refused that in time.

    Usual causes:
        the head's process has ended or its host is cut off; its log, a file or etcd, does not answer.

    Remedy:
        start the head again on its host by ``zcactor start --head``, or mend the log, and try again.

    Attributes:
        log: the log of the cluster's heads: a path, or an ``etcd://`` URL.
        since: for how many seconds there has been no answer.
        silent: ``"log"`` or ``"head"``, the one that does not answer.
    """

    def __init__(self, log: str, since: float, silent: str = "log") -> None:
        super().__init__(log, since, silent)
        self.log = log
        self.since = since
        self.silent = silent

    def __str__(self) -> str:
        if self.silent == "head":
            return (
                f"the cluster's head has not answered for {self.since:.1f} s; calls between actors go on; start it "
                f"again by 'zcactor start --head' on its host, where its log is {self.log}, and try again"
            )
        return (
            f"the cluster's head cannot decide now: its log {self.log} has not answered for {self.since:.1f} s; "
            "nothing was done so far, and calls between actors go on; look after the log, and try again"
        )


class ProtocolError(ZcactorError):
    """The peer sent invalid data; its connection is closed, and other connections are not affected.

    Usual causes:
        another program listens at the port; ``security`` asks for TLS at one end only; the peer runs a changed zcactor.

    Remedy:
        compare ``zcactor.__version__`` at both ends, and check host and port; between equal versions report it as a
        defect.
    """


class VersionMismatch(ProtocolError):
    """The peer speaks another protocol version or runs another Python minor version; the message names both
    versions.

    Usual causes:
        hosts have different environments; one was updated.

    Remedy:
        install the same zcactor and the same minor version of Python everywhere.
    """


class AuthenticationError(ProtocolError):
    """The peer could not be authenticated, or this process has no credentials of its own that are safe.

    The peer is a process of another user, does not hold this cluster's token, or has no certificate that is accepted;
    or the token or certificate of this process is missing, or other users can read it.

    Usual causes:
        the token was not copied to this host or is another cluster's; its file, or the key of a certificate, is
        readable by others; with TLS, a certificate is not signed by the CA of the other end.

    Remedy:
        copy the head's token file with mode 0600, or give ``token=``; the message names the file and what is wrong with
        it.
    """


class DeviceUnavailable(ZcactorError):
    """No such GPU is in this process: there is no driver, no GPU of that number, or GPUs are switched off. The message
    says which, and the next step.

    Usual causes:
        the extra ``gpu`` or NVIDIA's driver is missing; ``CUDA_VISIBLE_DEVICES`` hides the GPU; the setting ``gpu`` is
        ``"off"``.

    Remedy:
        do as the message says; ``zcactor doctor`` shows the GPUs, and ``gpu="fake"`` runs the program without one.
    """


class DeviceError(ZcactorError):
    """A call of the GPU's driver failed.

    Usual causes:
        a kernel of the program has touched a wrong address; another thread captures a CUDA graph, which forbids the
        call.

    Remedy:
        where `fatal` is True let the process end, as by ``max_restarts``; otherwise do as `reason` says.

    Attributes:
        call: the call of `zcactor.device.driver.GpuDriver` that failed.
        code: number of the error, as CUDA's ``CUresult`` has them.
        device: index of the GPU among those that this process sees; -1 where no GPU is concerned.
        fatal: whether the process can use the GPU no more, as after an access to an illegal address.
        reason: text that says what was wrong.
    """

    def __init__(self, call: str, code: int, device: int, fatal: bool = False, reason: str = "") -> None:
        super().__init__(call, code, device, fatal, reason)
        self.call = call
        self.code = code
        self.device = device
        self.fatal = fatal
        self.reason = reason

    def __str__(self) -> str:
        where = "" if self.device < 0 else f" on GPU {self.device}"
        text = f"{self.call}{where} failed with error {self.code}: {self.reason or 'the driver gives no reason'}"
        return f"{text}; this process can use the GPU no more, so start it again" if self.fatal else text


class NotInitialized(ZcactorError):
    """No runtime is running in this process: use ``async with zc.init():`` around the program, or ``with zc.init():``
    around a plain script.

    Usual causes:
        ``zc.*`` is used before ``zc.init()`` or after its block; ``zc.current_actor()`` is called outside of an actor.

    Remedy:
        put ``async with zc.init():`` around the program, or ``with zc.init():`` around a plain script.
    """


class ForkedProcess(NotInitialized):
    """This process was forked from one that runs zcactor: handles and references work in the parent only.

    Usual causes:
        ``multiprocessing`` with ``fork``, or ``os.fork()``, after ``zc.init()``.

    Remedy:
        start actors instead of processes, fork before ``zc.init()``, or call ``zc.init()`` in the child.
    """


class AlreadyInitialized(ZcactorError):
    """`zc.init` was called twice without `zc.shutdown` in between.

    Usual causes:
        a library or an earlier cell of a notebook has called it; it is called in an actor, which has a runtime already.

    Remedy:
        leave the second call out; for other settings call ``await zc.shutdown()`` first.
    """


class CopyWarning(UserWarning):
    """One line of the program passes large arrays from outside the store again and again, and each is copied.

    It is issued once a line, before the third copy of 16 MiB or more: for arrays that are older than ``zc.init()``,
    memory maps, and other libraries' memory. Make such arrays after ``zc.init()``, or copy each into the store once, by
    ``x = zc.asarray(x)``.

    Usual causes:
        arrays are loaded before ``zc.init()``, by ``np.memmap``, or by a library with memory of its own, and passed in
        a loop.

    Remedy:
        make them after ``zc.init()``, or copy each once by ``x = zc.asarray(x)``.
    """


def _restore(parts: Any, fields: dict[str, Any]) -> RemoteError:
    """Rebuild a pickled `RemoteError`: the inverse of ``RemoteError.__reduce__``."""
    return make_remote_error(put_together(*parts) if type(parts) is tuple else parts, fields)


_PLAIN = (StopIteration, StopAsyncIteration)
"""Types that are not rebuilt, because raised at the caller they would end an iteration there."""
_DUALS: Final = 256
"""Classes that are kept, at most."""
_duals: dict[int, type[Exception]] = {}
"""Classes that are both a `RemoteError` and another, by the other's id: its metaclass may refuse to be hashed."""


def _dual_class(cls: type) -> type[Exception]:
    """The class whose instances are both a `RemoteError` and a `cls`."""
    known = _duals.get(id(cls))
    if known is not None:
        return known
    namespace = {"__module__": module_of(cls), "__qualname__": class_name(cls), "__slots__": (_SLOT,)}
    metaclass: Any = type(cls)
    dual: type[Exception]
    name = class_name(cls).rpartition(".")[2]
    if metaclass is type or metaclass is ABCMeta:
        dual = metaclass(name, (RemoteError, cls), namespace)
    else:  # without a metaclass's own code
        dual = type.__new__(metaclass, name, (RemoteError, cls), namespace)
    for name in _REMOTE_FIELDS:  # the original's properties and slots come before ours
        holder = next((base for base in mro_of(cls) if name in namespace_of(base)), None)
        if holder is not None:
            type.__setattr__(dual, name, namespace_of(holder)[name])
    if len(_duals) >= _DUALS:
        _duals.clear()
    _duals[id(cls)] = dual
    return dual


_SLOT: Final = "__zcactor_remote__"


def make_remote_error(original: BaseException | None, fields: dict[str, Any]) -> RemoteError:
    """Build the `RemoteError` for `fields`, which is also an instance of `original`'s type where Python allows such a
    class.

    The original's ``__init__`` is not run again: its ``args``, ``__dict__`` and slots are carried over, so exceptions
    with unusual constructors keep their state. Types outside ``Exception`` (``SystemExit``, ``KeyboardInterrupt``) stay
    plain, because they would end the caller, and so do ``StopIteration`` and ``StopAsyncIteration``, because they would
    end an iteration there.
    """
    error: Any = None
    stranger = ""
    cls = type(original)
    if original is not None and issubclass(cls, Exception) and not issubclass(cls, (RemoteError, *_PLAIN)):
        try:
            _, parts, state = take_apart(original)
            error = put_together(_dual_class(cls), parts, state)
        except Exception as failure:
            # A foreign class may refuse to be derived from, by its layout or by descriptors of its own. The call has
            # failed with its own error, which must reach the caller: as a plain `RemoteError`.
            stranger = type_name(type(failure))
    if error is None:
        error = RemoteError(fields["type_name"], fields["message"])
    own = fields_of(error)
    known = {field: fields[name] for name, field in _REMOTE_FIELDS.items()}
    BaseException.__setattr__(error, _SLOT, Remote(**known, original=original))
    if issubclass(type(error), _TELLING):  # a method raised it, which has run, with or without the call inside
        own["maybe_executed"] = True
    where = f"raised in actor {fields['actor']}, pid {fields['pid']}, host {fields['host']}"
    trace = fields["remote_traceback"].rstrip()
    notes = own.get("__notes__")
    # A new list: the existing one belongs to the original, too.
    notes = own["__notes__"] = [*notes] if type(notes) is list else []
    if stranger:
        notes.append(f"it is not an instance of its own type: deriving from that raised {stranger}")
    notes.append(f"{where}\n{trace}" if trace else where)
    return error  # type: ignore[no-any-return]
