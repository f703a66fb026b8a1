"""The suite that every `GpuDriver` must pass.

A driver joins by a subclass of `GpuDriverSuite` with the fixture ``opener``: a function without arguments that makes
the driver, and that can be pickled, because a second process makes one, too.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.conformance.device_peer import (
    DevicePeer,
    finish,
    is_done,
    is_idle,
    know_events,
    map_anew,
    mapped,
    read,
    record_all,
    until_done,
    write,
)
from zcactor.device.driver import (
    EVENT_NBYTES,
    PAGE_NBYTES,
    PATTERNS,
    THREAD_STREAM,
    CudaCode,
    GpuDriver,
)
from zcactor.errors import DeviceError, DeviceUnavailable, ForkedProcess

__all__ = ["GpuDriverSuite"]

Opener = Callable[[], GpuDriver]

_PATIENCE = 60.0
"""Seconds until a function counts as never called."""


class GpuDriverSuite:
    """The contract of a driver. Tests use GPU 0, and 1 where it is there."""

    @pytest.fixture
    def driver(self, opener: Opener) -> GpuDriver:
        """A driver."""
        return opener()

    @pytest.fixture
    def peer(self, opener: Opener) -> Iterator[DevicePeer]:
        """A second process."""
        with DevicePeer(opener) as peer:
            yield peer

    # ---- devices

    def test_devices(self, driver: GpuDriver) -> None:
        facts = driver.devices()
        assert [each.index for each in facts] == list(range(len(facts)))
        assert len({each.uuid for each in facts}) == len(facts) > 0
        for each in facts:
            assert each.uuid.startswith(("GPU-", "MIG-")) and len(each.uuid) == 40 and each.name
            assert 0 <= driver.free(each.index) <= each.total
            assert driver.can_access(each.index, each.index)

    def test_devices_are_the_same_in_another_process(self, driver: GpuDriver, peer: DevicePeer) -> None:
        assert [each.uuid for each in peer.call("devices")] == [each.uuid for each in driver.devices()]

    def test_a_forked_child_has_no_gpu(self, driver: GpuDriver) -> None:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                driver.devices()
            except ForkedProcess:
                try:
                    driver.free(0)
                except ForkedProcess:
                    code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    def test_a_device_that_is_not_there(self, driver: GpuDriver) -> None:
        with pytest.raises(DeviceUnavailable, match="GPU 99"):
            driver.create(99, driver.granularity)

    # ---- memory

    def test_memory_is_taken_and_given_back(self, driver: GpuDriver) -> None:
        driver.stream(0)  # a context takes memory, too
        before = driver.free(0)
        handle = driver.create(0, 4 * driver.granularity)
        assert driver.free(0) <= before - 4 * driver.granularity
        driver.release(0, handle)
        assert driver.free(0) == before

    def test_memory_lives_while_it_is_mapped(self, driver: GpuDriver) -> None:
        driver.stream(0)
        before, nbytes = driver.free(0), driver.granularity
        handle = driver.create(0, nbytes)
        base = driver.reserve(0, nbytes)
        driver.map(0, base, handle, nbytes, True)
        driver.release(0, handle)
        write(driver, 0, base, b"still here")
        assert read(driver, 0, base, 10) == b"still here"
        driver.unmap(0, base, nbytes)
        driver.unreserve(0, base, nbytes)
        assert driver.free(0) == before

    def test_more_memory_than_there_is(self, driver: GpuDriver) -> None:
        total = driver.devices()[0].total
        with pytest.raises(DeviceError) as caught:
            driver.create(0, (total // driver.granularity + 1) * driver.granularity)
        assert caught.value.code == CudaCode.OUT_OF_MEMORY
        assert (caught.value.call, caught.value.device, caught.value.fatal) == ("create", 0, False)

    def test_sizes_are_multiples(self, driver: GpuDriver) -> None:
        for nbytes in (0, -driver.granularity, driver.granularity + 1):
            with pytest.raises(DeviceError) as caught:
                driver.create(0, nbytes)
            assert caught.value.code == CudaCode.INVALID_VALUE

    def test_unknown_handles(self, driver: GpuDriver) -> None:
        base = driver.reserve(0, driver.granularity)
        for call in (
            lambda: driver.release(0, 12345),
            lambda: driver.export(0, base, driver.granularity),
            lambda: driver.map(0, base, 12345, driver.granularity, True),
        ):
            with pytest.raises(DeviceError):
                call()

    def test_owner_of(self, driver: GpuDriver) -> None:
        nbytes = 2 * driver.granularity
        address = mapped(driver, 0, nbytes)
        assert driver.owner_of(address) == driver.owner_of(address + nbytes - 1) == (0, address, nbytes)
        buffer = ctypes.create_string_buffer(8)
        assert driver.owner_of(ctypes.addressof(buffer)) is None

    def test_extents_behind_each_other(self, driver: GpuDriver) -> None:
        step = driver.granularity
        base = driver.reserve(0, 4 * step)
        for number in range(3):
            handle = driver.create(0, step)
            driver.map(0, base + number * step, handle, step, True)
            driver.release(0, handle)
        data = random.Random(1).randbytes(step + 20)
        write(driver, 0, base + step - 10, data)
        assert read(driver, 0, base + step - 10, step + 20) == data
        driver.unmap(0, base + step, step)
        assert driver.owner_of(base + step) is None
        assert read(driver, 0, base + step - 10, 10) == data[:10]
        assert read(driver, 0, base + 2 * step, 10) == data[-10:]

    # ---- copies and fills

    def test_copies_between_places(self, driver: GpuDriver) -> None:
        address, nbytes = mapped(driver, 0, driver.granularity), 100_003
        data = random.Random(2).randbytes(nbytes)
        write(driver, 0, address + 1, data)
        driver.copy(0, address + 500_000, address + 1, 1, nbytes, (0, 0), 0)
        assert read(driver, 0, address + 500_000, nbytes) == data

    def test_copies_of_rows(self, driver: GpuDriver) -> None:
        address = mapped(driver, 0, driver.granularity)
        write(driver, 0, address, bytes(4096))
        data = bytes(range(64))
        source = ctypes.create_string_buffer(data, 64)
        driver.copy(0, address, ctypes.addressof(source), 4, 3, (10, 16), 0)
        finish(driver, 0)
        expected = b"".join(data[row * 16 : row * 16 + 3] + bytes(7) for row in range(4))
        assert read(driver, 0, address, 40) == expected
        target = ctypes.create_string_buffer(b"\xff" * 20, 20)
        driver.copy(0, ctypes.addressof(target), address, 4, 3, (5, 10), 0)
        finish(driver, 0)
        tail = (b"\xff" * 2, b"\xff" * 2, b"\xff" * 2, b"\xff" * 2)
        assert target.raw == b"".join(data[row * 16 : row * 16 + 3] + tail[row] for row in range(4))

    def test_copies_of_nothing(self, driver: GpuDriver) -> None:
        address = mapped(driver, 0, driver.granularity)
        driver.copy(0, address, address, 0, 10, (10, 10), 0)
        driver.copy(0, address, address, 10, 0, (10, 10), 0)
        driver.fill(0, address, b"a", 0, 0)
        finish(driver, 0)

    def test_rows_that_overlap(self, driver: GpuDriver) -> None:
        address = mapped(driver, 0, driver.granularity)
        with pytest.raises(DeviceError) as caught:
            driver.copy(0, address, address + 4096, 2, 10, (9, 10), 0)
        assert caught.value.code == CudaCode.INVALID_VALUE

    @pytest.mark.parametrize("width", PATTERNS)
    def test_fills(self, driver: GpuDriver, width: int) -> None:
        address, pattern = mapped(driver, 0, driver.granularity), bytes(range(1, width + 1))
        write(driver, 0, address, bytes(1024))
        driver.fill(0, address + 16, pattern, 5, 0)
        assert read(driver, 0, address, 1024) == bytes(16) + pattern * 5 + bytes(1024 - 16 - 5 * width)

    def test_fills_of_another_width(self, driver: GpuDriver) -> None:
        with pytest.raises(DeviceError) as caught:
            driver.fill(0, mapped(driver, 0, driver.granularity), b"abc", 5, 0)
        assert caught.value.code == CudaCode.INVALID_VALUE

    def test_pinned_memory_is_copied(self, driver: GpuDriver) -> None:
        address = mapped(driver, 0, driver.granularity)
        buffer = ctypes.create_string_buffer(b"x" * 65536, 65536)
        driver.pin(ctypes.addressof(buffer), 65536)
        driver.copy(0, address, ctypes.addressof(buffer), 1, 65536, (0, 0), 0)
        finish(driver, 0)
        driver.unpin(ctypes.addressof(buffer), 65536)
        assert read(driver, 0, address, 65536) == b"x" * 65536

    def test_memory_is_pinned_once(self, driver: GpuDriver) -> None:
        address = mapped(driver, 0, driver.granularity)
        memory = mmap.mmap(-1, 4 * PAGE_NBYTES)
        host = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        driver.pin(host, 2 * PAGE_NBYTES)
        for low in (host, host + PAGE_NBYTES):
            with pytest.raises(DeviceError) as caught:
                driver.pin(low, 2 * PAGE_NBYTES)
            assert (caught.value.code, caught.value.fatal) == (CudaCode.ALREADY_PINNED, False)
        for low in (host, host + 2 * PAGE_NBYTES):  # pinned memory, and other memory beside it
            memory[low - host : low - host + 5] = b"bytes"
            driver.copy(0, address, low, 1, 2 * PAGE_NBYTES, (0, 0), 0)
            assert read(driver, 0, address, 5) == b"bytes"
        driver.unpin(host, 2 * PAGE_NBYTES)
        with pytest.raises(DeviceError) as caught:
            driver.unpin(host, 2 * PAGE_NBYTES)
        assert caught.value.code == CudaCode.NOT_PINNED
        driver.pin(host + PAGE_NBYTES, 3 * PAGE_NBYTES)
        driver.unpin(host + PAGE_NBYTES, 3 * PAGE_NBYTES)

    # ---- other processes

    def test_another_process_maps_memory(self, driver: GpuDriver, peer: DevicePeer) -> None:
        nbytes = 2 * driver.granularity
        handle = driver.create(0, nbytes)
        address = map_anew(driver, 0, handle, nbytes)
        if not driver.exports:
            with pytest.raises(DeviceError) as caught:
                driver.export(0, address, nbytes)
            assert caught.value.code == CudaCode.NOT_SUPPORTED
            return
        there = self._import(driver, peer, address, nbytes)
        write(driver, 0, address + nbytes - 5, b"hello")
        assert peer.call("read", 0, there + nbytes - 5, 5) == b"hello"

    def test_memory_outlives_its_process(self, driver: GpuDriver, peer: DevicePeer) -> None:
        if not driver.exports:
            pytest.skip("memory is not shared")
        nbytes = driver.granularity
        handle = driver.create(0, nbytes)
        address = map_anew(driver, 0, handle, nbytes)
        write(driver, 0, address, b"from here")
        there = self._import(driver, peer, address, nbytes)
        driver.unmap(0, address, nbytes)
        driver.release(0, handle)
        assert peer.call("read", 0, there, 9) == b"from here"

    @staticmethod
    def _import(driver: GpuDriver, peer: DevicePeer, address: int, nbytes: int) -> int:
        """Map memory in the second process, without write access. Returns the address there."""
        exported = driver.export(0, address, nbytes)
        imported = peer.call("import_", 0, -1, nbytes, driver.devices()[0].uuid, fd=exported)
        os.close(exported)
        there: int = peer.call("map_anew", 0, imported, nbytes, False)
        return there

    def test_imports_of_other_things(self, driver: GpuDriver) -> None:
        with open("/dev/null", "rb") as file, pytest.raises(DeviceError) as caught:
            driver.import_(0, file.fileno(), driver.granularity, driver.devices()[0].uuid)
        assert caught.value.code == CudaCode.INVALID_VALUE

    def test_a_descriptor_for_a_network_card(self, driver: GpuDriver) -> None:
        nbytes = driver.granularity
        address = mapped(driver, 0, nbytes)
        if not driver.exports_to_cards:
            for call in (lambda: driver.dma_buf(0, address, nbytes), lambda: driver.flush(0)):
                with pytest.raises(DeviceError) as caught:
                    call()
                assert caught.value.code == CudaCode.NOT_SUPPORTED
            return
        first, second = (driver.dma_buf(0, address, nbytes) for _ in range(2))
        assert first != second, "each belongs to its caller"
        os.close(first)
        os.close(second)
        driver.flush(0)
        assert driver.owner_of(address) == (0, address, nbytes)

    def test_each_extent_has_a_descriptor_for_network_cards(self, driver: GpuDriver) -> None:
        if not driver.exports_to_cards:
            pytest.skip("the driver does not export memory to network cards")
        extents = [(mapped(driver, 0, nbytes), nbytes) for nbytes in (driver.granularity, 3 * driver.granularity)]
        for address, nbytes in extents:
            os.close(driver.dma_buf(0, address, nbytes))

    def test_a_card_registers_whole_pages(self, driver: GpuDriver) -> None:
        if not driver.exports_to_cards:
            pytest.skip("the driver does not export memory to network cards")
        address, nbytes = mapped(driver, 0, driver.granularity), driver.granularity
        for wrong in ((address + 256, nbytes), (address, nbytes - 1), (address, 0), (address, -PAGE_NBYTES)):
            with pytest.raises(DeviceError) as caught:
                driver.dma_buf(0, *wrong)
            assert caught.value.code == CudaCode.INVALID_VALUE
        buffer = mmap.mmap(-1, 2 * PAGE_NBYTES)
        with pytest.raises(DeviceError):  # memory of the host
            driver.dma_buf(0, ctypes.addressof(ctypes.c_char.from_buffer(buffer)), PAGE_NBYTES)

    # ---- order

    def test_idle_streams(self, driver: GpuDriver) -> None:
        address, stream = mapped(driver, 0, driver.granularity), driver.stream(0)
        assert is_idle(driver, 0, stream)
        driver.fill(0, address, b"a", 1 << 20, stream)
        finish(driver, 0, stream)
        while not is_idle(driver, 0, stream):  # the event is a little earlier than the end of its own record
            finish(driver, 0, stream)
        with pytest.raises(DeviceError):
            driver.idle(0, stream + 1)

    def test_a_stream_is_in_order(self, driver: GpuDriver) -> None:
        address, stream = mapped(driver, 0, driver.granularity), driver.stream(0)
        for byte in b"abc":
            driver.fill(0, address, bytes((byte,)), 1 << 20, stream)
        assert read(driver, 0, address, 1 << 20, stream) == b"c" * (1 << 20)
        driver.end_stream(0, stream)

    def test_what_is_queued_on_a_stream_that_ends_is_done(self, driver: GpuDriver) -> None:
        address, stream, event = mapped(driver, 0, driver.granularity), driver.stream(0), driver.event(0)
        driver.fill(0, address, b"z", 1 << 20, stream)
        driver.record(0, event, stream)
        driver.end_stream(0, stream)
        until_done(driver, 0, event)
        assert read(driver, 0, address, 1 << 20) == b"z" * (1 << 20)

    def test_events_without_a_record_are_done(self, driver: GpuDriver) -> None:
        event, stream = driver.event(0), driver.stream(0)
        assert is_done(driver, 0, event) and not driver.event_is_lost(0, event)
        driver.wait(0, stream, event)
        finish(driver, 0, stream)
        driver.end_event(0, event)
        with pytest.raises(DeviceError):
            driver.done(0, event)

    def test_a_wait_orders_streams(self, driver: GpuDriver) -> None:
        address, producer, consumer = mapped(driver, 0, driver.granularity), driver.stream(0), driver.stream(0)
        event = driver.event(0)
        for byte in b"abcdefgh":
            driver.fill(0, address, bytes((byte,)), 1 << 20, producer)
            driver.record(0, event, producer)
            driver.wait(0, consumer, event)
            assert read(driver, 0, address, 1 << 20, consumer) == bytes((byte,)) * (1 << 20)

    def test_a_wait_orders_processes(self, driver: GpuDriver, peer: DevicePeer) -> None:
        if not driver.shared_events or not driver.exports:
            pytest.skip("events or memory are not shared")
        nbytes = driver.granularity
        handle = driver.create(0, nbytes)
        address = map_anew(driver, 0, handle, nbytes)
        there, event, stream = self._import(driver, peer, address, nbytes), driver.event(0), driver.stream(0)
        peer.share_events(driver)
        peer.share_events(driver)  # again: nothing changes
        handles = set()
        for byte in b"xyz":
            driver.fill(0, address, bytes((byte,)), nbytes, stream)
            driver.record(0, event, stream)
            exported = driver.export_event(0, event)
            assert len(exported) == EVENT_NBYTES and driver.export_event(0, event) == exported
            handles.add(exported)
            opened = peer.call("open_event", 0, exported)
            peer.call("wait", 0, 0, opened)
            assert peer.call("read", 0, there, 1000) == bytes((byte,)) * 1000
            assert peer.call("is_done", 0, opened) and not peer.call("event_is_lost", 0, opened)
            peer.call("end_event", 0, opened)
        assert len(handles) == 3
        again = peer.call("open_event", 0, exported)
        assert peer.call("is_done", 0, again), "its place serves others, and it stays done"

    def test_events_that_are_exported_when_their_work_is_done_or_before_any(
        self, driver: GpuDriver, peer: DevicePeer
    ) -> None:
        if not driver.shared_events:
            pytest.skip("events are not shared")
        peer.share_events(driver)
        event, ended = driver.event(0), driver.event(0)
        first = peer.call("open_event", 0, driver.export_event(0, event))
        address = mapped(driver, 0, driver.granularity)
        driver.fill(0, address, b"a", 1000, 0)
        for each in (event, ended):
            driver.record(0, each, 0)
        until_done(driver, 0, event)
        second = peer.call("open_event", 0, driver.export_event(0, event))
        third = peer.call("open_event", 0, driver.export_event(0, ended))
        driver.end_event(0, ended)
        for each in (first, second, third):
            peer.call("wait", 0, 0, each)
            peer.call("finish", 0, 0)
            assert peer.call("is_done", 0, each)

    @pytest.mark.parametrize("done", [True, False])
    def test_an_event_whose_outcome_is_promised(self, driver: GpuDriver, peer: DevicePeer, done: bool) -> None:
        if not driver.shared_events:
            pytest.skip("events are not shared")
        peer.share_events(driver)
        event, behind = driver.promise_event(0), driver.event(0)
        exported = driver.export_event(0, event)
        there = peer.call("open_event", 0, exported)
        assert len(exported) == EVENT_NBYTES and driver.export_event(0, event) == exported
        assert not is_done(driver, 0, event) and not driver.event_is_lost(0, event)
        assert not peer.call("is_done", 0, there) and not peer.call("event_is_lost", 0, there)
        peer.call("wait", 0, 0, there)
        driver.wait(0, 0, event)
        driver.record(0, behind, 0)
        assert not is_done(driver, 0, behind) and not peer.call("is_idle", 0, 0)
        with pytest.raises(DeviceError):
            driver.record(0, event, 0)
        driver.keep_promise(0, event, done)
        peer.call("finish", 0, 0)
        until_done(driver, 0, behind)
        assert is_done(driver, 0, event) == peer.call("is_done", 0, there) == done
        assert driver.event_is_lost(0, event) == peer.call("event_is_lost", 0, there) == (not done)
        for other in (event, behind, 12345):
            with pytest.raises(DeviceError):
                driver.keep_promise(0, other, True)
        driver.end_event(0, event)
        assert peer.call("is_done", 0, peer.call("open_event", 0, exported)) == done

    def test_peers_go_on_where_a_context_is_broken(self, driver: GpuDriver, peer: DevicePeer) -> None:
        if not driver.shared_events:
            driver.lose_events()
            return
        peer.share_events(driver)
        promised, event = driver.promise_event(0), driver.event(0)
        driver.wait(0, 0, promised)
        driver.record(0, event, 0)
        there = peer.call("open_event", 0, driver.export_event(0, event))
        peer.call("wait", 0, 0, there)
        assert not peer.call("event_is_lost", 0, there)
        for _ in range(2):
            driver.lose_events()
        peer.call("finish", 0, 0)
        assert peer.call("event_is_lost", 0, there) and not peer.call("is_done", 0, there)
        assert not driver.event_is_lost(0, promised)
        driver.keep_promise(0, promised, True)
        finish(driver, 0)

    def test_places_of_promised_events_serve_again_where_they_are_done(self, driver: GpuDriver) -> None:
        if not driver.shared_events:
            pytest.skip("events are not shared")
        for number in range(1100):
            event = driver.promise_event(0)
            driver.keep_promise(0, event, number % 4 > 0)
            assert driver.event_is_lost(0, event) == (not number % 4)
            driver.end_event(0, event)

    def test_more_events_than_there_are_places(self, driver: GpuDriver) -> None:
        if not driver.shared_events:
            pytest.skip("events are not shared")
        event, address = driver.event(0), mapped(driver, 0, driver.granularity)
        handles, refused = [], set[int]()
        for _ in range(1100):
            driver.fill(0, address, b"a", 1, 0)
            driver.record(0, event, 0)
            try:
                handles.append(driver.export_event(0, event))
            except DeviceError as error:
                refused.add(error.code)
                finish(driver, 0)
        assert len(set(handles)) == len(handles) > 510 and refused <= {CudaCode.NOT_SUPPORTED}

    def test_an_event_behind_all_work(self, driver: GpuDriver) -> None:
        address, streams = mapped(driver, 0, driver.granularity), [driver.stream(0) for _ in range(4)]
        event, *ended, last = driver.event(0), *streams
        for number, stream in enumerate([*ended, THREAD_STREAM, 0]):
            driver.fill(0, address + number * 1000, b"n", 1000, stream)
        for stream in ended:
            driver.end_stream(0, stream)
        record_all(driver, 0, event)
        driver.wait(0, last, event)
        assert read(driver, 0, address, 5000, last) == b"n" * 5000

    def test_each_thread_has_a_default_stream(self, driver: GpuDriver) -> None:
        address, event = mapped(driver, 0, driver.granularity), driver.event(0)

        def other() -> None:
            for byte in b"abc":
                driver.fill(0, address, bytes((byte,)), 1 << 20, THREAD_STREAM)
            driver.record(0, event, THREAD_STREAM)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        driver.wait(0, THREAD_STREAM, event)
        assert read(driver, 0, address, 1 << 20, THREAD_STREAM) == b"c" * (1 << 20)

    def test_an_event_is_opened_elsewhere_only(self, driver: GpuDriver) -> None:
        event = driver.event(0)
        if not driver.shared_events:
            with pytest.raises(DeviceError) as caught:
                driver.export_event(0, event)
            assert caught.value.code == CudaCode.NOT_SUPPORTED
            with pytest.raises(DeviceError) as caught:
                driver.event_page()
            assert caught.value.code == CudaCode.NOT_SUPPORTED
            return
        exported = driver.export_event(0, event)
        with pytest.raises(DeviceError):
            driver.open_event(0, exported)
        for wrong in (bytes(EVENT_NBYTES), exported[:-1]):
            with pytest.raises(DeviceError):
                driver.open_event(0, wrong)
        with open("/dev/null", "r+b", buffering=0) as file, pytest.raises(DeviceError) as caught:
            know_events(driver, file.fileno(), os.getpid())
        assert caught.value.code == CudaCode.INVALID_VALUE

    # ---- two GPUs

    def test_memory_of_another_gpu(self, driver: GpuDriver) -> None:
        if len(driver.devices()) < 2:
            pytest.skip("there is one GPU")
        nbytes = driver.granularity
        handle = driver.create(0, nbytes)
        base = driver.reserve(1, nbytes)
        if not driver.can_access(1, 0):
            with pytest.raises(DeviceError) as caught:
                driver.map(1, base, handle, nbytes, True)
            assert caught.value.code == CudaCode.PEER_ACCESS_UNSUPPORTED
            return
        driver.map(1, base, handle, nbytes, True)
        write(driver, 1, base, b"to the other")
        assert read(driver, 1, base, 12) == b"to the other"

    def test_streams_belong_to_their_gpu(self, driver: GpuDriver) -> None:
        if len(driver.devices()) < 2:
            pytest.skip("there is one GPU")
        stream, event = driver.stream(0), driver.event(1)
        with pytest.raises(DeviceError) as caught:
            driver.record(1, event, stream)
        assert caught.value.code == CudaCode.INVALID_HANDLE
