"""The suite that every `Binding` must pass, on a device or without one.

A binding joins by a subclass of `VerbsSuite` with a fixture ``rig``. The suite knows nothing of the way in which work
gets done: it awaits completions through the queue's descriptor until a deadline, and calls `Rig.progress` meanwhile,
for a fabric that works only then.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import select
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from zcactor.transport.verbs.driver.base import (
    MAX_U32,
    Binding,
    Completion,
    CompletionQueue,
    Device,
    MemoryRegion,
    PathAttributes,
    QpAddress,
    QueuePair,
    Read,
    Receive,
    Send,
    SharedReceiveQueue,
    VerbsError,
)
from zcactor.transport.verbs.driver.codes import (
    CompletionStatus,
    EventType,
    Opcode,
    PortState,
    QpState,
    describe_status,
)

SLOT = 256
"""Bytes of one receive."""
SLOTS = 32
NBYTES = 1 << 20
"""Bytes of each end's memory; more than any MTU, so that messages take several packets."""
SECONDS = 20.0
"""The longest wait for a completion: emulated machines are slow, and a dead peer takes half a second on a fast one."""


@dataclass
class Rig:
    """A binding, and the device to use it on."""

    binding: Binding
    device: str
    port: int = 1
    gid_index: int = 1
    progress: Callable[[], object] = field(default=lambda: None)
    dma_buf: Callable[[bytes], int] | None = None
    """The function that makes a dma-buf of some bytes, and returns its descriptor; None where nothing makes one."""


@dataclass
class End:
    """One end of a connection, with memory to send from and receive into."""

    rig: Rig
    device: Device
    cq: CompletionQueue
    srq: SharedReceiveQueue
    qp: QueuePair
    memory: ctypes.Array[ctypes.c_char]
    region: MemoryRegion
    psn: int

    def address(self) -> QpAddress:
        """The address that the other end needs."""
        port = self.device.port(self.rig.port)
        gid = next(gid for gid in self.device.gids(self.rig.port) if gid.index == self.rig.gid_index)
        return QpAddress(self.qp.qp_num, self.psn, gid.raw, port.lid, port.active_mtu)

    def path(self) -> PathAttributes:
        """The attributes of this end's connection, with retries that end soon."""
        port = self.device.port(self.rig.port)
        return PathAttributes(self.rig.port, self.rig.gid_index, self.psn, port.active_mtu, retry_count=2, rnr_retry=2)

    def post_slots(self, count: int, first: int = 0) -> None:
        """Post receives numbered from `first`, in the upper half of the memory."""
        base = self.region.address + NBYTES // 2
        self.srq.post_receives(
            [Receive(i, base + i * SLOT, SLOT, self.region.lkey) for i in range(first, first + count)]
        )

    def slot(self, number: int, nbytes: int) -> bytes:
        """The first bytes of one receive."""
        start = NBYTES // 2 + number * SLOT
        return self.at(start, nbytes)

    def at(self, offset: int, nbytes: int) -> bytes:
        """The bytes of the memory at `offset`."""
        return ctypes.string_at(self.region.address + offset, nbytes)

    def write(self, data: bytes, offset: int = 0) -> None:
        """Write bytes to the memory."""
        ctypes.memmove(self.region.address + offset, data, len(data))

    def send(self, wr_id: int, nbytes: int, offset: int = 0, *, signalled: bool = True) -> Send:
        """Make a SEND from the lower half of the memory."""
        return Send(wr_id, self.region.address + offset, nbytes, self.region.lkey, signalled)

    def read(self, wr_id: int, other: End, nbytes: int, offset: int = 0, *, signalled: bool = True) -> Read:
        """Make a READ of the same place of the other end's memory."""
        address = self.region.address + offset
        remote = other.region.address + offset
        return Read(wr_id, address, nbytes, self.region.lkey, remote, other.region.rkey, signalled)

    def collect(self, count: int, seconds: float = SECONDS) -> list[Completion]:
        """The next `count` completions, awaited through the descriptor; fewer when time runs out."""
        found: list[Completion] = []
        end = time.monotonic() + seconds
        poller = select.poll()
        poller.register(self.cq.fd, select.POLLIN)
        while True:
            self.rig.progress()
            self.cq.drain_events()
            self.cq.arm()
            found += self.cq.poll(count - len(found))
            left = end - time.monotonic()
            if len(found) == count or left <= 0:
                return found
            poller.poll(min(left, 0.5) * 1000)

    def one(self) -> Completion:
        """The next completion."""
        found = self.collect(1)
        assert found, "no completion came"
        return found[0]

    def quiet(self) -> None:
        """Check that no further completion comes."""
        assert self.collect(1, seconds=0.05) == []


def make_end(rig: Rig, device: Device, psn: int, *, inline: int = 64, max_send_wr: int = 16) -> End:
    """Make an end that is not connected."""
    cq = device.create_completion_queue(4 * SLOTS)
    srq = device.create_shared_receive_queue(SLOTS)
    qp = device.create_queue_pair(cq, srq, max_send_wr=max_send_wr, max_inline=inline)
    memory = ctypes.create_string_buffer(NBYTES)
    region = device.register(ctypes.addressof(memory), NBYTES, remote_read=True)
    return End(rig, device, cq, srq, qp, memory, region, psn)


def join(left: End, right: End) -> None:
    """Connect both ends."""
    left_address, right_address = left.address(), right.address()
    left.qp.connect(right_address, left.path())
    right.qp.connect(left_address, right.path())


@contextlib.contextmanager
def fails(number: int | None = None) -> Iterator[None]:
    """Check that the body raises an `OSError`, with that errno if one is given. Texts differ between bindings."""
    with pytest.raises(OSError, match=".") as caught:
        yield
    assert number in {None, caught.value.errno}, caught.value


def pattern(nbytes: int, start: int = 0) -> bytes:
    """Bytes that differ from their neighbours and from bytes a page away."""
    return bytes((i * 31 + i // 251 + start) % 256 for i in range(nbytes))


class VerbsSuite:
    """The suite. A subclass joins by a fixture ``rig`` with the `Rig` to run on."""

    @pytest.fixture
    def device(self, rig: Rig) -> Iterator[Device]:
        """The opened device."""
        device = rig.binding.open(rig.device)
        yield device
        device.close()

    @pytest.fixture
    def ends(self, rig: Rig, device: Device) -> tuple[End, End]:
        """Two connected ends of one device."""
        left, right = make_end(rig, device, 0x123456), make_end(rig, device, 0xFFFFF0)
        join(left, right)
        return left, right

    # ---- devices

    def test_shapes(self, rig: Rig, ends: tuple[End, End]) -> None:
        left, _ = ends
        assert isinstance(rig.binding, Binding)
        assert isinstance(left.device, Device)
        assert isinstance(left.cq, CompletionQueue)
        assert isinstance(left.srq, SharedReceiveQueue)
        assert isinstance(left.qp, QueuePair)
        assert isinstance(left.region, MemoryRegion)

    def test_devices(self, rig: Rig, device: Device) -> None:
        assert rig.device in rig.binding.devices()
        assert device.name == rig.device
        assert device.attributes.ports >= 1
        assert min(device.attributes.max_qp_rd_atom, device.attributes.max_qp_init_rd_atom) >= 1
        assert device.attributes.max_qp_wr >= 16
        assert device.attributes.max_srq_wr >= SLOTS
        assert device.attributes.max_cqe >= 4 * SLOTS

    def test_no_such_device(self, rig: Rig) -> None:
        with pytest.raises(OSError, match="no_such_device") as caught:
            rig.binding.open("no_such_device")
        assert caught.value.errno == errno.ENODEV

    def test_port(self, rig: Rig, device: Device) -> None:
        port = device.port(rig.port)
        assert port.port == rig.port
        assert port.state == PortState.ACTIVE
        assert 1 <= port.active_mtu <= 5
        assert port.max_msg_sz >= 1 << 20
        with fails():
            device.port(200)

    def test_asynchronous_events(self, rig: Rig, ends: tuple[End, End]) -> None:
        device = ends[0].device
        assert device.async_fd is not None and not os.get_blocking(device.async_fd)
        device.async_events()  # takes the events that came before
        assert list(device.async_events()) == [], "and nothing waits for one"
        ends[0].qp.to_error()
        assert ends[0].qp.state() == QpState.ERR
        known = {EventType.COMM_EST, EventType.QP_LAST_WQE_REACHED, EventType.SQ_DRAINED}
        assert set(device.async_events()) <= known, "fencing is no failure"
        other = rig.binding.open(rig.device)
        assert other.async_fd not in (None, device.async_fd)
        other.close()
        with pytest.raises(VerbsError, match="closed"):
            other.async_events()

    def test_gids(self, rig: Rig, device: Device) -> None:
        gids = device.gids(rig.port)
        assert [gid.index for gid in gids] == sorted({gid.index for gid in gids})
        gid = next(gid for gid in gids if gid.index == rig.gid_index)
        assert gid.roce_v2
        assert len(gid.raw) == 16

    @pytest.mark.parametrize("depth", [0, -1, 1 << 31])
    def test_depths_are_checked(self, device: Device, depth: int) -> None:
        with pytest.raises(VerbsError, match="max_cqe"):
            device.create_completion_queue(depth)
        with pytest.raises(VerbsError, match="max_srq_wr"):
            device.create_shared_receive_queue(depth)
        cq = device.create_completion_queue(1)
        assert cq.depth >= 1
        with pytest.raises(VerbsError, match="max_qp_wr"):
            device.create_queue_pair(cq, None, max_send_wr=depth, max_inline=0)

    def test_too_much_inline_data(self, device: Device) -> None:
        cq = device.create_completion_queue(1)
        with fails():
            device.create_queue_pair(cq, None, max_send_wr=1, max_inline=1 << 20)

    # ---- memory

    def test_registration(self, device: Device) -> None:
        memory = mmap.mmap(-1, 8192)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        regions = [device.register(address, 8192, remote_read=remote_read) for remote_read in (True, False)]
        for region in regions:
            assert (region.address, region.nbytes) == (address, 8192)
            assert 0 <= region.lkey <= MAX_U32
            region.close()
            region.close()

    def test_read_only_memory_cannot_be_registered(self, device: Device) -> None:
        memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ)
        view = (ctypes.c_char * 4096).from_address(_address_of(memory))
        with pytest.raises(OSError, match="write access") as caught:
            device.register(ctypes.addressof(view), 4096, remote_read=True)
        assert caught.value.errno == errno.EFAULT

    @pytest.mark.parametrize(("address", "nbytes"), [(0, 4096), (4096, 0), (4096, -1), (2**64 - 4096, 8192)])
    def test_ranges_are_checked(self, device: Device, address: int, nbytes: int) -> None:
        with pytest.raises(VerbsError, match="cannot register"):
            device.register(address, nbytes, remote_read=False)

    def test_dma_buf_of_another_thing(self, device: Device) -> None:
        with open("/dev/null", "rb") as null:
            for fd in (null.fileno(), -1):
                with pytest.raises(OSError, match="dma-buf"):
                    device.register_dma_buf(fd, 4096, remote_read=True)
        for nbytes in (0, -4096):
            with pytest.raises(VerbsError, match="positive"):
                device.register_dma_buf(0, nbytes, remote_read=True)

    # ---- messages

    def test_send(self, ends: tuple[End, End]) -> None:
        left, right = ends
        right.post_slots(2)
        left.write(b"hello")
        left.qp.post_sends([left.send(7, 5)])
        arrived = right.one()
        assert arrived == Completion(0, CompletionStatus.SUCCESS, Opcode.RECV, 5, right.qp.qp_num)
        assert right.slot(0, 5) == b"hello"
        sent = left.one()
        assert (sent.wr_id, sent.status, sent.opcode, sent.qp_num) == (7, 0, Opcode.SEND, left.qp.qp_num)
        left.quiet()
        right.quiet()

    def test_both_ways_and_wide_ids(self, ends: tuple[End, End]) -> None:
        for here, there in (ends, ends[::-1]):
            there.post_slots(1)
            here.write(b"x" * SLOT)
            here.qp.post_sends([here.send(2**64 - 1, SLOT)])
            assert there.one().byte_len == SLOT
            assert here.one().wr_id == 2**64 - 1

    def test_chain_of_sends(self, ends: tuple[End, End]) -> None:
        left, right = ends
        right.post_slots(10)
        for i in range(10):
            left.write(bytes([i]) * (i + 1), i * 16)
        left.qp.post_sends([left.send(i, i + 1, i * 16, signalled=i == 9) for i in range(10)])
        arrived = right.collect(10)
        assert [(c.wr_id, c.status, c.byte_len) for c in arrived] == [(i, 0, i + 1) for i in range(10)]
        assert [right.slot(i, i + 1) for i in range(10)] == [bytes([i]) * (i + 1) for i in range(10)]
        assert left.one().wr_id == 9
        left.quiet()

    def test_empty_chains(self, ends: tuple[End, End]) -> None:
        left, _ = ends
        left.qp.post_sends([])
        left.qp.post_reads([])
        left.srq.post_receives([])
        left.quiet()

    def test_inline(self, ends: tuple[End, End]) -> None:
        left, right = ends
        assert left.qp.max_inline >= 64
        right.post_slots(2)
        left.write(b"copied")
        left.qp.post_sends([Send(1, left.region.address, 6, 0, inline=True)])
        left.write(b"after!")
        assert right.one().byte_len == 6
        assert right.slot(0, 6) == b"copied"
        assert left.one().status == CompletionStatus.SUCCESS
        too_long = Send(2, left.region.address, left.qp.max_inline + 1, 0, inline=True)
        with pytest.raises(VerbsError, match="inline"):
            left.qp.post_sends([too_long])

    def test_room_comes_back(self, ends: tuple[End, End]) -> None:
        left, right = ends
        for turn in range(20):
            right.post_slots(8)
            left.qp.post_sends([left.send(i, 8, signalled=i == 7) for i in range(8)])
            assert [c.wr_id for c in right.collect(8)] == list(range(8)), turn
            assert left.one().wr_id == 7

    def test_shared_queues(self, rig: Rig, ends: tuple[End, End]) -> None:
        left, right = ends
        third = make_end(rig, right.device, 5)
        shared = right.device.create_queue_pair(right.cq, right.srq, max_send_wr=4, max_inline=0)
        fourth = replace(right, qp=shared, psn=99)
        join(third, fourth)
        right.post_slots(2)
        left.qp.post_sends([left.send(1, 3)])
        first = right.one()
        third.qp.post_sends([third.send(1, 4)])
        second = right.one()
        assert (first.qp_num, first.wr_id, first.byte_len) == (right.qp.qp_num, 0, 3)
        assert (second.qp_num, second.wr_id, second.byte_len) == (shared.qp_num, 1, 4)

    # ---- reads

    @pytest.mark.parametrize(("offset", "nbytes"), [(0, 64), (4096, 4096), (1, 333), (4095, 70_000), (0, NBYTES)])
    def test_read(self, ends: tuple[End, End], offset: int, nbytes: int) -> None:
        left, right = ends
        data = pattern(nbytes)
        right.write(data, offset)
        left.qp.post_reads([left.read(3, right, nbytes, offset)])
        done = left.one()
        assert (done.wr_id, done.status, done.opcode, done.byte_len) == (3, 0, Opcode.RDMA_READ, nbytes)
        assert left.at(offset, nbytes) == data
        right.quiet()

    def test_read_of_nothing(self, ends: tuple[End, End]) -> None:
        left, right = ends
        left.qp.post_reads([left.read(1, right, 0)])
        assert left.one().status == CompletionStatus.SUCCESS

    def test_chain_of_reads(self, ends: tuple[End, End]) -> None:
        left, right = ends
        data = pattern(16 * 4096)
        right.write(data)
        left.qp.post_reads([left.read(i, right, 4096, i * 4096, signalled=i == 15) for i in range(16)])
        assert left.one()[:2] == (15, 0)
        assert left.at(0, len(data)) == data
        left.quiet()

    def test_fenced_read(self, ends: tuple[End, End]) -> None:
        left, right = ends
        data = pattern(8 * 4096)
        right.write(data)
        reads = [left.read(i, right, 4096, i * 4096, signalled=i == 7) for i in range(8)]
        left.qp.post_reads([read._replace(fenced=read.wr_id in (4, 7)) for read in reads])
        assert left.one()[:2] == (7, 0)
        assert left.at(0, len(data)) == data
        left.quiet()

    # ---- failures

    def _expect_remote_access(self, left: End, right: End, bad: Read) -> None:
        left.qp.post_reads([left.read(1, right, 64), bad, left.read(3, right, 64, signalled=False)])
        first, second, third = left.collect(3)
        assert first[:2] == (1, CompletionStatus.SUCCESS)
        assert second[:2] == (2, CompletionStatus.REM_ACCESS)
        assert third[:2] == (3, CompletionStatus.WR_FLUSH)
        assert {c.qp_num for c in (first, second, third)} == {left.qp.qp_num}
        assert left.qp.state() == QpState.ERR
        assert right.qp.state() == QpState.ERR

    def test_forged_rkey(self, ends: tuple[End, End]) -> None:
        left, right = ends
        self._expect_remote_access(left, right, left.read(2, right, 64)._replace(rkey=right.region.rkey ^ 0x5500))

    @pytest.mark.parametrize("offset", [-8, NBYTES - 8, NBYTES])
    def test_read_out_of_range(self, ends: tuple[End, End], offset: int) -> None:
        left, right = ends
        bad = left.read(2, right, 64)._replace(remote_address=right.region.address + offset)
        self._expect_remote_access(left, right, bad)

    def test_revoked_region(self, ends: tuple[End, End]) -> None:
        left, right = ends
        other = right.device.register(right.region.address, 4096, remote_read=True)
        bad = left.read(2, right, 64)._replace(rkey=other.rkey)
        other.close()
        self._expect_remote_access(left, right, bad)

    def test_region_that_peers_may_not_read(self, ends: tuple[End, End]) -> None:
        left, right = ends
        private = right.device.register(right.region.address, 4096, remote_read=False)
        self._expect_remote_access(left, right, left.read(2, right, 64)._replace(rkey=private.rkey))

    @pytest.mark.parametrize("kind", ["send", "read"])
    def test_bad_lkey(self, ends: tuple[End, End], kind: str) -> None:
        left, right = ends
        right.post_slots(1)
        lkey = left.region.lkey ^ 0x5500
        if kind == "send":
            left.qp.post_sends([left.send(1, 8)._replace(lkey=lkey)])
        else:
            left.qp.post_reads([left.read(1, right, 8)._replace(lkey=lkey)])
        done = left.one()
        # rdma_rxe of 6.1 says LOC_QP_OP of a SEND: rxe_req.c knows LOC_PROT for EFAULT only, and a bad key is EINVAL
        # there.
        allowed = {CompletionStatus.LOC_PROT} | ({CompletionStatus.LOC_QP_OP} if kind == "send" else set())
        assert done.wr_id == 1
        assert done.status in allowed, describe_status(done.status)
        assert left.qp.state() == QpState.ERR

    def test_no_receive_posted(self, ends: tuple[End, End]) -> None:
        left, _ = ends
        left.qp.post_sends([left.send(1, 8, signalled=False)])
        assert left.one()[:2] == (1, CompletionStatus.RNR_RETRY_EXC)
        assert left.qp.state() == QpState.ERR

    def test_peer_is_destroyed(self, ends: tuple[End, End]) -> None:
        left, right = ends
        right.qp.close()
        left.qp.post_reads([left.read(1, right, 64)])
        assert left.one()[:2] == (1, CompletionStatus.RETRY_EXC)

    def test_fence(self, ends: tuple[End, End]) -> None:
        left, right = ends
        right.qp.to_error()
        left.qp.post_reads([left.read(1, right, 64)])
        assert left.one()[:2] == (1, CompletionStatus.RETRY_EXC)

    def test_posting_in_error_flushes(self, ends: tuple[End, End]) -> None:
        left, right = ends
        left.qp.to_error()
        assert left.qp.state() == QpState.ERR
        left.qp.post_reads([left.read(i, right, 64, signalled=i == 2) for i in range(3)])
        assert [c[:2] for c in left.collect(3)] == [(i, CompletionStatus.WR_FLUSH) for i in range(3)]

    def test_reconnect(self, ends: tuple[End, End]) -> None:
        left, right = ends
        for turn in range(3):
            left.qp.post_reads([left.read(1, right, 64)._replace(rkey=right.region.rkey ^ 0x5500)])
            assert left.one().status == CompletionStatus.REM_ACCESS, turn
            left.qp.reset()
            right.qp.reset()
            assert left.qp.state() == QpState.RESET
            left.psn, right.psn = left.psn ^ 0x55, right.psn ^ 0xAA
            join(left, right)
            assert left.qp.state() == QpState.RTS
            right.write(pattern(64, turn))
            left.qp.post_reads([left.read(2, right, 64)])
            assert left.one()[:2] == (2, CompletionStatus.SUCCESS)
            assert left.at(0, 64) == pattern(64, turn)

    def test_full_send_queue(self, ends: tuple[End, End]) -> None:
        left, right = ends
        with fails(errno.ENOMEM):
            left.qp.post_reads([left.read(i, right, 1, signalled=False) for i in range(4096)])
        left.qp.to_error()

    def test_full_receive_queue(self, ends: tuple[End, End]) -> None:
        left, _ = ends
        with fails(errno.ENOMEM):
            for _ in range(64):
                left.post_slots(SLOTS)

    # ---- mistakes

    def test_messages_that_are_too_long(self, ends: tuple[End, End]) -> None:
        left, right = ends
        limit = left.device.port(left.rig.port).max_msg_sz
        for nbytes in (min(limit, MAX_U32) + 1, MAX_U32 + 1, -1):
            with pytest.raises(VerbsError, match="limit"):
                left.qp.post_reads([left.read(1, right, nbytes)])
            with pytest.raises(VerbsError, match="limit"):
                left.qp.post_sends([left.send(1, nbytes)])
        with pytest.raises(VerbsError, match="limit"):
            left.srq.post_receives([Receive(1, left.region.address, MAX_U32 + 1, left.region.lkey)])
        left.quiet()

    def test_connecting_twice(self, ends: tuple[End, End]) -> None:
        left, right = ends
        with fails():
            left.qp.connect(right.address(), left.path())

    def test_posting_before_connecting(self, rig: Rig, device: Device) -> None:
        end = make_end(rig, device, 1)
        assert end.qp.state() == QpState.RESET
        with pytest.raises(VerbsError, match="not connected"):
            end.qp.post_sends([end.send(1, 1)])
        with pytest.raises(VerbsError, match="not connected"):
            end.qp.post_reads([end.read(1, end, 1)])

    def test_endless_retries_are_refused(self, rig: Rig, device: Device) -> None:
        end = make_end(rig, device, 1)
        for path in (replace(end.path(), retry_count=7), replace(end.path(), rnr_retry=7)):
            with pytest.raises(VerbsError, match="0 to 6"):
                end.qp.connect(end.address(), path)

    def test_read_attributes_the_device_lacks(self, rig: Rig, device: Device) -> None:
        end = make_end(rig, device, 1)
        with pytest.raises((OSError, VerbsError)):
            end.qp.connect(end.address(), replace(end.path(), max_rd_atomic=255, max_dest_rd_atomic=255))

    # ---- events

    def _readable(self, end: End, seconds: float) -> bool:
        end.rig.progress()
        return bool(select.select([end.cq.fd], [], [], seconds)[0])

    def test_event_only_when_armed(self, ends: tuple[End, End]) -> None:
        left, right = ends
        left.qp.post_reads([left.read(1, right, 8)])
        assert not self._readable(left, 0.2)
        assert left.cq.drain_events() == 0
        assert left.one().wr_id == 1
        left.cq.drain_events()
        left.cq.arm()
        assert left.cq.poll(1) == []
        left.qp.post_reads([left.read(2, right, 8), left.read(3, right, 8)])
        assert self._readable(left, SECONDS)
        assert left.cq.drain_events() == 1
        assert not self._readable(left, 0)
        assert [c.wr_id for c in left.collect(2)] == [2, 3]

    def test_event_for_a_receive(self, ends: tuple[End, End]) -> None:
        left, right = ends
        right.post_slots(1)
        right.cq.arm()
        left.qp.post_sends([left.send(1, 8)])
        assert self._readable(right, SECONDS)
        assert right.cq.drain_events() == 1

    def test_poll_takes_no_more_than_asked(self, ends: tuple[End, End]) -> None:
        left, right = ends
        left.qp.post_reads([left.read(i, right, 8) for i in range(5)])
        assert left.collect(1)[0].wr_id == 0
        assert [c.wr_id for c in left.collect(3)] == [1, 2, 3]
        assert left.one().wr_id == 4
        assert len(left.cq.poll(8)) == 0

    def test_closing_with_events_waiting(self, ends: tuple[End, End]) -> None:
        left, right = ends
        left.cq.arm()
        left.qp.post_reads([left.read(1, right, 8)])
        assert self._readable(left, SECONDS)

    # ---- closing

    def test_queues_in_use_stay_open(self, ends: tuple[End, End]) -> None:
        left, _ = ends
        for queue in (left.cq, left.srq):
            with fails(errno.EBUSY):
                queue.close()
        left.qp.close()
        left.qp.close()
        for queue in (left.srq, left.cq):
            queue.close()
            queue.close()

    def test_closed_objects(self, rig: Rig, ends: tuple[End, End]) -> None:
        left, right = ends
        read, send = left.read(1, right, 1), left.send(1, 1)
        left.device.close()
        left.device.close()
        for call in (
            lambda: left.device.port(rig.port),
            lambda: left.device.gids(rig.port),
            lambda: left.device.register(left.region.address, 4096, remote_read=False),
            lambda: left.device.register_dma_buf(0, 4096, remote_read=False),
            lambda: left.device.create_completion_queue(1),
            lambda: left.device.create_shared_receive_queue(1),
            lambda: left.device.create_queue_pair(left.cq, None, max_send_wr=1, max_inline=0),
            left.cq.arm,
            left.cq.drain_events,
            lambda: left.cq.poll(1),
            lambda: left.srq.post_receives([Receive(1, left.region.address, 1, left.region.lkey)]),
            lambda: left.qp.post_sends([send]),
            lambda: left.qp.post_reads([read]),
            left.qp.state,
            left.qp.to_error,
            left.qp.reset,
        ):
            with pytest.raises(VerbsError, match="closed"):
                call()
        for thing in (left.qp, left.srq, left.region, left.cq):
            thing.close()

    def test_open_again(self, rig: Rig) -> None:
        for _ in range(3):
            device = rig.binding.open(rig.device)
            left, right = make_end(rig, device, 1), make_end(rig, device, 2)
            join(left, right)
            left.qp.post_reads([left.read(1, right, 64)])
            assert left.one().status == CompletionStatus.SUCCESS
            device.close()

    def test_queues_of_another_device(self, rig: Rig, ends: tuple[End, End]) -> None:
        other = rig.binding.open(rig.device)
        try:
            cq = other.create_completion_queue(1)
            with pytest.raises(VerbsError, match="another device"):
                other.create_queue_pair(ends[0].cq, None, max_send_wr=1, max_inline=0)
            with pytest.raises(VerbsError, match="another device"):
                other.create_queue_pair(cq, ends[0].srq, max_send_wr=1, max_inline=0)
        finally:
            other.close()


def _address_of(memory: mmap.mmap) -> int:
    """The address of a read-only map: ctypes refuses to take an address that it cannot write to."""
    buffer = (ctypes.c_ssize_t * 16)()  # Py_buffer, whose first field is the address
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(memory), ctypes.byref(buffer), 0)
    address = buffer[0]
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return int(address)


class DmaBufSuite(VerbsSuite):
    """The contract of devices for which something here makes dma-bufs."""

    def test_dma_buf_is_read(self, rig: Rig, ends: tuple[End, End]) -> None:
        assert rig.dma_buf is not None
        left, right = ends
        data = pattern(8192)
        source, target = rig.dma_buf(data), rig.dma_buf(bytes(8192))
        there = right.device.register_dma_buf(source, 8192, remote_read=True)
        here = left.device.register_dma_buf(target, 8192, remote_read=False)
        assert (there.address, there.nbytes) == (here.address, here.nbytes) == (0, 8192)
        os.close(source)
        reads = [
            Read(1, 4096, 4096, here.lkey, 1, there.rkey),  # from one to the other
            Read(2, left.region.address, 8192, left.region.lkey, 0, there.rkey),  # to memory of the host
            Read(3, 8, 5, here.lkey, right.region.address, right.region.rkey),  # from memory of the host
        ]
        right.write(b"hello")
        left.qp.post_reads(reads)
        assert [(c.wr_id, c.status) for c in left.collect(3)] == [(1, 0), (2, 0), (3, 0)]
        assert os.pread(target, 8192, 0) == bytes(8) + b"hello" + bytes(4083) + data[1:4097]
        assert left.at(0, 8192) == data
        os.close(target)

    @pytest.mark.parametrize(("at", "nbytes"), [(0, 8193), (8192, 1), (4096, 4097)])
    def test_dma_buf_has_bounds(self, rig: Rig, ends: tuple[End, End], at: int, nbytes: int) -> None:
        assert rig.dma_buf is not None
        left, right = ends
        fd = rig.dma_buf(bytes(8192))
        there = right.device.register_dma_buf(fd, 8192, remote_read=True)
        os.close(fd)
        left.write(b"untouched")
        left.qp.post_reads([Read(1, left.region.address, nbytes, left.region.lkey, at, there.rkey)])
        assert left.one().status == CompletionStatus.REM_ACCESS
        assert left.at(0, 9) == b"untouched"

    @pytest.mark.parametrize("how", ["closed", "not for peers"])
    def test_dma_buf_that_peers_may_not_read(self, rig: Rig, ends: tuple[End, End], how: str) -> None:
        assert rig.dma_buf is not None
        left, right = ends
        fd = rig.dma_buf(bytes(4096))
        there = right.device.register_dma_buf(fd, 4096, remote_read=how == "closed")
        os.close(fd)
        if how == "closed":
            there.close()
            there.close()
        left.qp.post_reads([Read(1, left.region.address, 64, left.region.lkey, 0, there.rkey)])
        assert left.one().status == CompletionStatus.REM_ACCESS
