"""`Binding` over the ``ibverbs`` package of PyPI (github.com/d4l3k/rdma4py), which opens libibverbs.so.1 itself.

It needs no particular rdma-core, releases the GIL where it matters, posts lists as chains, and its errors are `OSError`
already. This module adds missing parts. The type and interface of a GID come from `sysfs`. The number of READs that an
initiator may have outstanding is taken to be the responder's, because ``DeviceAttr`` has no ``max_qp_init_rd_atom``.
The granted inline size is queried from the queue pair. ``QP.to_rtr`` uses GIDs only, so state changes use
``QP.modify``.
"""

from __future__ import annotations

import errno
import importlib
import os
from typing import TYPE_CHECKING, Any, Final

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
    from collections.abc import Callable, Sequence
    from types import ModuleType

__all__ = ["IbverbsBinding", "load"]

# The numbers of <infiniband/verbs.h>. They are kernel ABI; the package's IntFlag classes cost a microsecond per `|`.
_LOCAL_WRITE: Final = 1
_REMOTE_READ: Final = 4
_FENCE: Final = 1
_SIGNALED: Final = 2
_INLINE: Final = 8
_OP_SEND: Final = 2
_OP_RDMA_READ: Final = 4
_QPT_RC: Final = 2


def load(importer: Callable[[str], ModuleType] = importlib.import_module) -> IbverbsBinding:
    """Import ibverbs.

    Raises:
        ImportError: ibverbs or libibverbs.so.1 is not installed.
    """
    return IbverbsBinding(importer("ibverbs"))


class IbverbsBinding:
    """The imported package. Satisfies `Binding`."""

    name = "ibverbs"

    def __init__(self, library: Any) -> None:
        self._library = library

    def devices(self) -> list[str]:
        return [device.name for device in self._library.get_device_list()]

    def open(self, name: str) -> IbverbsDevice:
        for device in self._library.get_device_list():
            if device.name == name:
                return IbverbsDevice(self._library, name, device.open())
        raise OSError(errno.ENODEV, f"there is no RDMA device {name!r}")


class IbverbsDevice(DriverDevice):
    """Satisfies `Device`."""

    def __init__(self, library: Any, name: str, context: Any) -> None:
        super().__init__(name)
        self._library = library
        self._context = context
        try:
            found = context.query_device()
            self._watch_events(context.async_fd)
            self._pd = context.alloc_pd()
        except OSError:
            context.close()
            raise
        self.attributes = device_attributes(found, max_qp_init_rd_atom=found.max_qp_rd_atom)

    def _take_event(self) -> int:
        event = self._context.get_async_event()
        self._context.ack_async_event(event)
        return int(event.event_type)

    def port(self, number: int) -> base.PortAttributes:
        self._check()
        if not 1 <= number <= self.attributes.ports:  # the package cuts the number to 8 bits
            raise OSError(errno.EINVAL, f"{self.name} has ports 1 to {self.attributes.ports}, not {number}")
        return port_attributes(number, self._context.query_port(number))

    def register(self, address: int, nbytes: int, *, remote_read: bool) -> DriverRegion:
        self._check_region(address, nbytes)
        try:
            region = self._pd.reg_mr(address, nbytes, _LOCAL_WRITE | (_REMOTE_READ if remote_read else 0))
        except OSError as error:
            raise checks.registration_error(error.errno or errno.EIO, address, nbytes, self.name) from error
        return DriverRegion(self, region, address, nbytes)

    def register_dma_buf(self, fd: int, nbytes: int, *, remote_read: bool) -> DriverRegion:
        self._check_dma_buf(nbytes)
        access = _LOCAL_WRITE | (_REMOTE_READ if remote_read else 0)
        if not hasattr(self._pd, "reg_dmabuf_mr"):
            raise OSError(errno.EOPNOTSUPP, "this release of ibverbs registers no dma-buf: install a later one")
        try:
            region = self._pd.reg_dmabuf_mr(0, nbytes, 0, fd, access)
        except OSError as error:
            raise checks.dma_buf_error(error.errno or errno.EIO, nbytes, self.name) from error
        return DriverRegion(self, region, 0, nbytes)

    def create_completion_queue(self, depth: int) -> IbverbsCompletionQueue:
        self._check_completion_queue(depth)
        return IbverbsCompletionQueue(self, depth)

    def create_shared_receive_queue(self, depth: int) -> IbverbsSharedReceiveQueue:
        self._check_shared_receive_queue(depth)
        return IbverbsSharedReceiveQueue(self, depth)

    def create_queue_pair(
        self, cq: base.CompletionQueue, srq: base.SharedReceiveQueue | None, *, max_send_wr: int, max_inline: int
    ) -> IbverbsQueuePair:
        self._check_queue_pair(max_send_wr)
        own_cq = self._own(IbverbsCompletionQueue, cq)
        own_srq = None if srq is None else self._own(IbverbsSharedReceiveQueue, srq)
        return IbverbsQueuePair(self, own_cq, own_srq, max_send_wr, max_inline)


class IbverbsCompletionQueue(DriverCompletionQueue):
    """Satisfies `CompletionQueue`."""

    def __init__(self, device: IbverbsDevice, depth: int) -> None:
        channel = device._context.create_comp_channel()
        try:
            self.fd: int = channel.fd
            os.set_blocking(self.fd, False)
            cq = device._context.create_cq(depth, channel, 0)
        except (OSError, ValueError):
            channel.close()
            raise
        super().__init__(device, depth, cq, channel)

    def arm(self) -> None:
        self._check()
        self.cq.req_notify()

    def drain_events(self) -> int:
        self._check()
        count = 0
        while True:
            try:
                self._channel.get_cq_event()
            except OSError as error:
                if error.errno in {errno.EAGAIN, errno.EINTR}:
                    return count
                raise
            self.cq.ack_events(1)
            count += 1

    def poll(self, limit: int) -> list[base.Completion]:
        self._check()
        return [base.Completion(wc.wr_id, wc.status, wc.opcode, wc.byte_len, wc.qp_num) for wc in self.cq.poll(limit)]


class IbverbsSharedReceiveQueue(OwnedObject):
    """Satisfies `SharedReceiveQueue`."""

    kind = ResourceKind.SHARED_RECEIVE_QUEUE

    def __init__(self, device: IbverbsDevice, depth: int) -> None:
        self.depth = depth
        self._entry = device._library.SGE
        self._request = device._library.RecvWR
        self.srq = device._pd.create_srq(depth, 1, 0)
        super().__init__(device.ledger)

    def post_receives(self, receives: Sequence[base.Receive]) -> None:
        self._check()
        checks.check_receives(receives)
        entry, request = self._entry, self._request
        self.srq.post_recv(
            [request(wr_id, [entry(address, nbytes, lkey)]) for wr_id, address, nbytes, lkey in receives]
        )

    def _release(self) -> None:
        self.srq.close()


class IbverbsQueuePair(OpenQueuePair):
    """Satisfies `QueuePair`."""

    def __init__(
        self,
        device: IbverbsDevice,
        cq: IbverbsCompletionQueue,
        srq: IbverbsSharedReceiveQueue | None,
        max_send_wr: int,
        max_inline: int,
    ) -> None:
        library = device._library
        self._library = library
        self._device = device
        attributes = library.QPInitAttr(
            cq.cq,
            cq.cq,
            _QPT_RC,
            max_send_wr=max_send_wr,
            max_recv_wr=1,  # without a shared queue: some providers refuse a queue of length 0
            max_send_sge=1,
            max_recv_sge=1,
            max_inline_data=max_inline,
            srq=None if srq is None else srq.srq,
            sq_sig_all=False,
        )
        self._qp = device._pd.create_qp(attributes)
        self.qp_num: int = self._qp.qp_num
        try:
            self.max_inline = int(self._qp.query()[1].max_inline_data) if max_inline else 0
        except OSError:  # a provider that does not answer before the queue pair is connected
            self.max_inline = 0
        super().__init__(device.ledger, cq, srq)

    def connect(self, remote: base.QpAddress, path: base.PathAttributes) -> None:
        self._check()
        checks.check_path(remote, path)
        max_message = self._device.port(path.port).max_msg_sz
        if path.is_global:
            vector = self._library.AHAttr(
                dgid=remote.gid,
                sgid_index=path.gid_index,
                dlid=remote.lid,
                is_global=1,
                port_num=path.port,
                hop_limit=path.hop_limit,
                traffic_class=path.marking.traffic_class,
                sl=path.marking.service_level,
            )
        else:
            vector = self._library.AHAttr(
                dlid=remote.lid, is_global=0, port_num=path.port, sl=path.marking.service_level
            )
        mask = self._library.QPAttrMask
        self._modify(
            mask.STATE | mask.PKEY_INDEX | mask.PORT | mask.ACCESS_FLAGS,
            qp_state=codes.QpState.INIT,
            pkey_index=path.marking.pkey_index,
            port_num=path.port,
            qp_access_flags=_REMOTE_READ if path.remote_read else 0,
        )
        self._modify(
            mask.STATE
            | mask.AV
            | mask.PATH_MTU
            | mask.DEST_QPN
            | mask.RQ_PSN
            | mask.MAX_DEST_RD_ATOMIC
            | mask.MIN_RNR_TIMER,
            vector,
            qp_state=codes.QpState.RTR,
            path_mtu=min(remote.mtu, path.mtu),
            dest_qp_num=remote.qpn,
            rq_psn=remote.psn,
            max_dest_rd_atomic=path.max_dest_rd_atomic,
            min_rnr_timer=path.min_rnr_timer,
        )
        self._modify(
            mask.STATE | mask.TIMEOUT | mask.RETRY_CNT | mask.RNR_RETRY | mask.SQ_PSN | mask.MAX_QP_RD_ATOMIC,
            qp_state=codes.QpState.RTS,
            timeout=path.timeout,
            retry_cnt=path.retry_count,
            rnr_retry=path.rnr_retry,
            sq_psn=path.psn,
            max_rd_atomic=path.max_rd_atomic,
        )
        self._max_message = max_message

    def to_error(self) -> None:
        self._check()
        self._modify(self._library.QPAttrMask.STATE, qp_state=codes.QpState.ERR)

    def reset(self) -> None:
        self._check()
        self._modify(self._library.QPAttrMask.STATE, qp_state=codes.QpState.RESET)
        self._max_message = None

    def _modify(self, mask: int, vector: Any = None, **fields: int) -> None:
        try:
            self._qp.modify(int(mask), vector, **{name: int(value) for name, value in fields.items()})
        except OSError as error:
            state = codes.QpState(fields["qp_state"]).name
            text = f"{self._device.name}: queue pair {self.qp_num} to {state}: {error.strerror}"
            raise OSError(error.errno, text) from error

    def state(self) -> codes.QpState:
        self._check()
        return codes.QpState(self._qp.state)

    def post_sends(self, sends: Sequence[base.Send]) -> None:
        checks.check_sends(sends, self.max_inline, self._limit())
        entry, request = self._library.SGE, self._library.SendWR
        self._qp.post_send(
            [
                request(
                    wr_id,
                    [entry(address, nbytes, lkey)],
                    _OP_SEND,
                    (_SIGNALED if signalled else 0) | (_INLINE if inline else 0),
                )
                for wr_id, address, nbytes, lkey, signalled, inline in sends
            ]
        )

    def post_reads(self, reads: Sequence[base.Read]) -> None:
        checks.check_reads(reads, self._limit())
        entry, request = self._library.SGE, self._library.SendWR
        self._qp.post_send(
            [
                request(
                    wr_id,
                    [entry(address, nbytes, lkey)],
                    _OP_RDMA_READ,
                    (_SIGNALED if signalled else 0) | (_FENCE if fenced else 0),
                    remote_address,
                    rkey,
                )
                for wr_id, address, nbytes, lkey, remote_address, rkey, signalled, fenced in reads
            ]
        )

    def _release(self) -> None:
        self._qp.close()
