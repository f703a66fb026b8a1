"""`Binding` over pyverbs, rdma-core's own Python binding: 44 (Debian 12) and 59 and later.

pyverbs is written for rdma-core's tests, and this module hides its peculiarities:

- its enumerations are in ``pyverbs.enums`` up to 58 and in ``pyverbs.libibverbs_enums`` after that;
- importing it calls ``logging.basicConfig``, so `load` puts the root logger back;
- it holds the GIL in every call, so this module makes no call that blocks;
- ``SGE``, ``SendWR`` and ``RecvWR`` leak up to 64 because their destructor's name is misspelt (``__dealloc``, wr.pyx);
  they must then be closed exactly once, and not at all where the name is right;
- ``CompChannel.fd`` is missing before 57, and the descriptor of a device's events is missing;
- the properties ``Context.context`` and ``CQ.cq`` crash the interpreter, so no object is ever inspected;
- a parent's ``close`` closes children, so the `Ledger` closes all of them first;
- ``QPInitAttr`` makes datagram queue pairs that signal all requests by default;
- ``QP.qp_state`` is a cached copy.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import os
from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Self

from zcactor.transport.verbs.driver import base, checks, codes
from zcactor.transport.verbs.driver.adapter import (
    DriverCompletionQueue,
    DriverDevice,
    DriverRegion,
    OpenQueuePair,
    OwnedObject,
    device_attributes,
    port_attributes,
)
from zcactor.transport.verbs.driver.device_resources import ResourceKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

__all__ = ["PyverbsBinding", "load"]

_MODULES: Final = ("addr", "cq", "device", "mr", "pd", "qp", "srq", "wr")
_MISSPELT: Final = "__dealloc"
"""The misspelt name of ``__dealloc__``. Where it exists, this module has to free work requests."""
_EVENT_FILES: Final = "infinibandevent"
"""The kernel's name for a completion channel's descriptor: ``anon_inode:[infinibandevent]``."""


@contextlib.contextmanager
def _root_logger_kept() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        for handler in root.handlers[:]:
            if handler not in handlers:
                root.removeHandler(handler)
                handler.close()
        root.setLevel(level)


def _constants(importer: Callable[[str], ModuleType]) -> SimpleNamespace:
    """Collect all ``IBV_`` names. Cython 3.1 and later export only the enumeration classes, so their members are
    added."""
    try:
        module = importer("pyverbs.libibverbs_enums")
    except ImportError:
        module = importer("pyverbs.enums")
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if isinstance(value, type) and issubclass(value, Enum):
            found.update(value.__members__)
        elif name.startswith("IBV_"):
            found[name] = value
    return SimpleNamespace(**found)


def load(importer: Callable[[str], ModuleType] = importlib.import_module) -> PyverbsBinding:
    """Import pyverbs.

    Raises:
        ImportError: pyverbs is not installed, or does not fit the installed libibverbs.
    """
    with _root_logger_kept():
        library = SimpleNamespace(e=_constants(importer))
        for name in _MODULES:
            setattr(library, name, importer(f"pyverbs.{name}"))
        library.error = importer("pyverbs.pyverbs_error").PyverbsError
    return PyverbsBinding(library)


def _errno(error: Exception, default: int) -> int:
    """Return the errno in pyverbs' error: it is positive, negated, or -1 where pyverbs did not read it."""
    code = int(getattr(error, "error_code", -1))
    return code if code > 0 else -code if code < -1 else default


class _Guard:
    """A context manager that turns pyverbs' errors into `OSError`: ``with guard("the action"):``."""

    def __init__(self, error: type[Exception], device: str) -> None:
        self._error = error
        self._device = device
        self._what = ""
        self._default = errno.EIO

    def __call__(self, what: str, default: int = errno.EIO) -> _Guard:
        self._what = what
        self._default = default
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, self._error):
            text = f"{self._device}: {self._what} failed: {error}"
            raise OSError(_errno(error, self._default), text) from error


class PyverbsBinding:
    """The imported package. Satisfies `Binding`."""

    name = "pyverbs"

    def __init__(self, library: SimpleNamespace) -> None:
        self._library = library

    def devices(self) -> list[str]:
        with _Guard(self._library.error, "pyverbs")("ibv_get_device_list", errno.ENOSYS):
            return [_text(device.name) for device in self._library.device.get_device_list()]

    def open(self, name: str) -> PyverbsDevice:
        if name not in self.devices():
            raise OSError(errno.ENODEV, f"there is no RDMA device {name!r}")
        return PyverbsDevice(self._library, name)


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _event_fds() -> set[int]:
    """Return the descriptors of this process that are completion channels (or a device's asynchronous events)."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if _EVENT_FILES in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
        except OSError:  # the descriptor of the listing itself is closed by now
            continue
    return found


def _fd_of(channel: Any, before: set[int]) -> int:
    """Return a new channel's descriptor. `before` are the `_event_fds` before its creation."""
    fd = getattr(channel, "fd", None)
    if fd is not None:
        return int(fd)
    new = _event_fds() - before
    if len(new) != 1:
        raise OSError(
            errno.EIO,
            f"cannot tell the completion channel's descriptor: {len(new)} of that kind appeared; open devices from "
            "one thread at a time, or use pyverbs 57 or later",
        )
    return new.pop()


class PyverbsDevice(DriverDevice):
    """Satisfies `Device`."""

    def __init__(self, library: SimpleNamespace, name: str) -> None:
        super().__init__(name)
        self._library = library
        self._guard = _Guard(library.error, name)
        before = _event_fds()
        with self._guard("ibv_open_device", errno.EACCES):
            self._context = library.device.Context(name=name)
        try:
            new = _event_fds() - before
            self._watch_events(new.pop() if len(new) == 1 else None)  # another thread may open one, too
            with self._guard("ibv_alloc_pd"):
                self._pd = library.pd.PD(self._context)
            with self._guard("ibv_query_device"):
                found = self._context.query_device()
        except OSError:
            self._context.close()
            raise
        self.attributes = device_attributes(found, found.max_qp_init_rd_atom)

    def _take_event(self) -> int:
        event = self._context.get_async_event()
        event.ack()
        return int(event.event_type)

    def port(self, number: int) -> base.PortAttributes:
        self._check()
        with self._guard(f"ibv_query_port {number}", errno.EINVAL):
            found = self._context.query_port(number)
        return port_attributes(number, found)

    def register(self, address: int, nbytes: int, *, remote_read: bool) -> DriverRegion:
        self._check_region(address, nbytes)
        try:
            region = self._library.mr.MR(self._pd, nbytes, self._access(remote_read), address=address)
        except self._library.error as error:
            raise checks.registration_error(_errno(error, errno.EIO), address, nbytes, self.name) from error
        return DriverRegion(self, region, address, nbytes)

    def register_dma_buf(self, fd: int, nbytes: int, *, remote_read: bool) -> DriverRegion:
        self._check_dma_buf(nbytes)
        make = getattr(self._library.mr, "DmaBufMR", None)
        if make is None:
            raise OSError(errno.EOPNOTSUPP, "this release of pyverbs registers no dma-buf: install 34 or later")
        try:
            region = make(
                self._pd, nbytes, self._access(remote_read), dmabuf=fd, offset=0
            )  # offset is the address, too
        except self._library.error as error:
            raise checks.dma_buf_error(_errno(error, errno.EIO), nbytes, self.name) from error
        return DriverRegion(self, region, 0, nbytes)

    def _access(self, remote_read: bool) -> int:
        e = self._library.e
        return int(e.IBV_ACCESS_LOCAL_WRITE) | (int(e.IBV_ACCESS_REMOTE_READ) if remote_read else 0)

    def create_completion_queue(self, depth: int) -> PyverbsCompletionQueue:
        self._check_completion_queue(depth)
        return PyverbsCompletionQueue(self, depth)

    def create_shared_receive_queue(self, depth: int) -> PyverbsSharedReceiveQueue:
        self._check_shared_receive_queue(depth)
        return PyverbsSharedReceiveQueue(self, depth)

    def create_queue_pair(
        self, cq: base.CompletionQueue, srq: base.SharedReceiveQueue | None, *, max_send_wr: int, max_inline: int
    ) -> PyverbsQueuePair:
        self._check_queue_pair(max_send_wr)
        own_cq = self._own(PyverbsCompletionQueue, cq)
        own_srq = None if srq is None else self._own(PyverbsSharedReceiveQueue, srq)
        return PyverbsQueuePair(self, own_cq, own_srq, max_send_wr, max_inline)

    def closing(self, what: str) -> _Guard:
        """Return a context for the verb `what`, which raises pyverbs' own errors."""
        return self._guard(what)


class PyverbsCompletionQueue(DriverCompletionQueue):
    """Satisfies `CompletionQueue`. It has a channel of its own, as ``get_cq_event`` loses events of other queues."""

    def __init__(self, device: PyverbsDevice, depth: int) -> None:
        self._guard = device._guard
        library = device._library
        self._error = library.error
        before = set() if hasattr(library.cq.CompChannel, "fd") else _event_fds()
        with self._guard("ibv_create_comp_channel"):
            channel = library.cq.CompChannel(device._context)
        try:
            self.fd = _fd_of(channel, before)
            os.set_blocking(self.fd, False)  # get_cq_event holds the GIL: blocking there freezes the interpreter
            with self._guard(f"ibv_create_cq of depth {depth}"):
                cq = library.cq.CQ(device._context, depth, None, channel, 0)
        except OSError:
            channel.close()
            raise
        super().__init__(device, depth, cq, channel)

    def arm(self) -> None:
        self._check()
        with self._guard("ibv_req_notify_cq"):
            self.cq.req_notify()

    def drain_events(self) -> int:
        self._check()
        count = 0
        while True:
            try:
                self._channel.get_cq_event(self.cq)
            except self._error as error:
                if _errno(error, errno.EIO) in {errno.EAGAIN, errno.EINTR}:
                    return count
                raise OSError(_errno(error, errno.EIO), f"ibv_get_cq_event failed: {error}") from error
            self.cq.ack_events(1)  # destroying the queue waits for every event to be acknowledged
            count += 1

    def poll(self, limit: int) -> list[base.Completion]:
        self._check()
        with self._guard("ibv_poll_cq"):
            _, found = self.cq.poll(limit)
        return [base.Completion(wc.wr_id, wc.status, wc.opcode, wc.byte_len, wc.qp_num) for wc in found]


class _WorkRequests:
    """The chain of one post. It frees each object once where pyverbs does not, also after an exception."""

    def __init__(self, library: SimpleNamespace) -> None:
        self._wr = library.wr
        self._ours_to_free = hasattr(library.wr.SGE, _MISSPELT)
        self._made: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        made, self._made = self._made, []
        if self._ours_to_free:
            for thing in made:
                thing.close()

    def entry(self, address: int, nbytes: int, lkey: int) -> Any:
        """Make a scatter-gather entry."""
        made = self._wr.SGE(address, nbytes, lkey)
        self._made.append(made)
        return made

    def keep(self, request: Any) -> Any:
        """Return `request`, which is freed with the chain."""
        self._made.append(request)
        return request


class PyverbsSharedReceiveQueue(OwnedObject):
    """Satisfies `SharedReceiveQueue`."""

    kind = ResourceKind.SHARED_RECEIVE_QUEUE

    def __init__(self, device: PyverbsDevice, depth: int) -> None:
        self.depth = depth
        self._guard = device._guard
        library = self._library = device._library
        attributes = library.srq.SrqInitAttr(library.srq.SrqAttr(max_wr=depth, max_sge=1))
        with self._guard(f"ibv_create_srq of depth {depth}"):
            self.srq = library.srq.SRQ(device._pd, attributes)
        super().__init__(device.ledger)

    def post_receives(self, receives: Sequence[base.Receive]) -> None:
        self._check()
        checks.check_receives(receives)
        if not receives:
            return
        request = None
        with _WorkRequests(self._library) as chain:
            for wr_id, address, nbytes, lkey in reversed(receives):
                entry = chain.entry(address, nbytes, lkey)
                request = chain.keep(self._library.wr.RecvWR(wr_id, 1, [entry], request))
            with self._guard(f"ibv_post_srq_recv of {len(receives)} receives", errno.ENOMEM):
                self.srq.post_recv(request)

    def _release(self) -> None:
        with self._guard("ibv_destroy_srq"):
            self.srq.close()


class PyverbsQueuePair(OpenQueuePair):
    """Satisfies `QueuePair`."""

    def __init__(
        self,
        device: PyverbsDevice,
        cq: PyverbsCompletionQueue,
        srq: PyverbsSharedReceiveQueue | None,
        max_send_wr: int,
        max_inline: int,
    ) -> None:
        library = device._library
        self._library = library
        self._guard = device._guard
        self._device = device
        # One receive of its own without a shared queue: some providers refuse a queue of length 0.
        capacity = library.qp.QPCap(
            max_send_wr=max_send_wr, max_recv_wr=1, max_send_sge=1, max_recv_sge=1, max_inline_data=max_inline
        )
        attributes = library.qp.QPInitAttr(
            qp_type=library.e.IBV_QPT_RC,
            scq=cq.cq,
            rcq=cq.cq,
            srq=None if srq is None else srq.srq,
            cap=capacity,
            sq_sig_all=0,
        )
        with self._guard(f"ibv_create_qp with {max_send_wr} sends and {max_inline} bytes inline", errno.EINVAL):
            self._qp = library.qp.QP(device._pd, attributes)
        self.qp_num = int(self._qp.qp_num)
        self.max_inline = int(attributes.max_inline_data)  # libibverbs writes the granted value
        super().__init__(device.ledger, cq, srq)

    def connect(self, remote: base.QpAddress, path: base.PathAttributes) -> None:
        self._check()
        checks.check_path(remote, path)
        library = self._library
        max_message = self._device.port(path.port).max_msg_sz
        attributes = library.qp.QPAttr(port_num=path.port, path_mtu=min(remote.mtu, path.mtu))
        attributes.pkey_index = path.marking.pkey_index
        attributes.qp_access_flags = library.e.IBV_ACCESS_REMOTE_READ if path.remote_read else 0
        attributes.dest_qp_num = remote.qpn
        attributes.rq_psn = remote.psn
        attributes.sq_psn = path.psn
        attributes.max_rd_atomic = path.max_rd_atomic
        attributes.max_dest_rd_atomic = path.max_dest_rd_atomic
        attributes.min_rnr_timer = path.min_rnr_timer
        attributes.timeout = path.timeout
        attributes.retry_cnt = path.retry_count
        attributes.rnr_retry = path.rnr_retry
        if path.is_global:
            text = remote.gid.hex()
            gid = library.addr.GID(":".join(text[i : i + 4] for i in range(0, 32, 4)))
            route = library.addr.GlobalRoute(
                dgid=gid, sgid_index=path.gid_index, hop_limit=path.hop_limit, traffic_class=path.marking.traffic_class
            )
            vector = library.addr.AHAttr(
                dlid=remote.lid, sl=path.marking.service_level, port_num=path.port, is_global=1, gr=route
            )
        else:
            vector = library.addr.AHAttr(
                dlid=remote.lid, sl=path.marking.service_level, port_num=path.port, is_global=0
            )
        attributes.ah_attr = vector
        with self._guard(f"connecting queue pair {self.qp_num} to {remote}", errno.EINVAL):
            self._qp.to_rts(attributes)
        self._max_message = max_message

    def to_error(self) -> None:
        self._modify(self._library.e.IBV_QPS_ERR)

    def reset(self) -> None:
        self._modify(self._library.e.IBV_QPS_RESET)
        self._max_message = None

    def _modify(self, state: Any) -> None:
        self._check()
        with self._guard(f"ibv_modify_qp of queue pair {self.qp_num} to {state}"):
            self._qp.modify(self._library.qp.QPAttr(qp_state=state), int(self._library.e.IBV_QP_STATE))

    def state(self) -> codes.QpState:
        self._check()
        with self._guard("ibv_query_qp"):
            attributes, _ = self._qp.query(int(self._library.e.IBV_QP_STATE))
        return codes.QpState(int(attributes.qp_state))

    def post_sends(self, sends: Sequence[base.Send]) -> None:
        checks.check_sends(sends, self.max_inline, self._limit())
        if not sends:
            return
        e = self._library.e
        signal, copy = int(e.IBV_SEND_SIGNALED), int(e.IBV_SEND_INLINE)
        request = None
        with _WorkRequests(self._library) as chain:
            for wr_id, address, nbytes, lkey, signalled, inline in reversed(sends):
                entry = chain.entry(address, nbytes, lkey)
                flags = (signal if signalled else 0) | (copy if inline else 0)
                request = chain.keep(
                    self._library.wr.SendWR(wr_id, e.IBV_WR_SEND, 1, 0, [entry], flags, next_wr=request)
                )
            self._post(request, len(sends))

    def post_reads(self, reads: Sequence[base.Read]) -> None:
        checks.check_reads(reads, self._limit())
        if not reads:
            return
        e = self._library.e
        signal, fence = int(e.IBV_SEND_SIGNALED), int(e.IBV_SEND_FENCE)
        request = None
        with _WorkRequests(self._library) as chain:
            for wr_id, address, nbytes, lkey, remote_address, rkey, signalled, fenced in reversed(reads):
                entry = chain.entry(address, nbytes, lkey)
                flags = (signal if signalled else 0) | (fence if fenced else 0)
                request = chain.keep(
                    self._library.wr.SendWR(wr_id, e.IBV_WR_RDMA_READ, 1, 0, [entry], flags, next_wr=request)
                )
                request.set_wr_rdma(rkey, remote_address)
            self._post(request, len(reads))

    def _post(self, request: Any, count: int) -> None:
        with self._guard(f"ibv_post_send of {count} requests to queue pair {self.qp_num}", errno.ENOMEM):
            self._qp.post_send(request)

    def _release(self) -> None:
        with self._guard("ibv_destroy_qp"):
            self._qp.close()
