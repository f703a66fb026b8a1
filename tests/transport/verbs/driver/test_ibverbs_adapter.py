"""The adapter of PyPI's ibverbs: the contract on a device, if there is one, and the rest without."""

from __future__ import annotations

import errno
import os
from types import ModuleType, SimpleNamespace

import pytest

from tests.transport.verbs.on_device import DeviceSuite, not_installed
from zcactor.transport.verbs.driver import ibverbs_adapter
from zcactor.transport.verbs.driver.base import Binding, Marking, PathAttributes, QpAddress
from zcactor.transport.verbs.driver.codes import EventType
from zcactor.transport.verbs.driver.ibverbs_adapter import load

MASKS = [
    "STATE",
    "PKEY_INDEX",
    "PORT",
    "ACCESS_FLAGS",
    "AV",
    "PATH_MTU",
    "DEST_QPN",
    "RQ_PSN",
    "MAX_DEST_RD_ATOMIC",
    "MIN_RNR_TIMER",
    "TIMEOUT",
    "RETRY_CNT",
    "RNR_RETRY",
    "SQ_PSN",
    "MAX_QP_RD_ATOMIC",
]


@pytest.mark.rdma
class TestOnADevice(DeviceSuite):
    """The contract on the first device."""

    adapter = ibverbs_adapter


def test_not_installed() -> None:
    with pytest.raises(ModuleNotFoundError):
        load(not_installed)


def test_no_device() -> None:
    module = ModuleType("ibverbs")
    module.__dict__["get_device_list"] = lambda: [SimpleNamespace(name="mlx5_0")]
    binding = load(lambda _: module)
    assert isinstance(binding, Binding)
    assert binding.devices() == ["mlx5_0"]
    with pytest.raises(OSError, match="rxe0"):
        binding.open("rxe0")


class Context:
    """An open device of the package, whose events are bytes in a pipe."""

    def __init__(self, fd: int) -> None:
        self.async_fd = fd
        self.acknowledged: list[int] = []

    def query_device(self) -> SimpleNamespace:
        """The attributes that the adapter asks for."""
        return SimpleNamespace(phys_port_cnt=1, max_qp_rd_atom=1, max_qp_wr=1, max_srq_wr=1, max_cqe=1)

    def alloc_pd(self) -> Context:
        """A child with a `close`."""
        return self

    def get_async_event(self) -> SimpleNamespace:
        """The next event."""
        return SimpleNamespace(event_type=os.read(self.async_fd, 1)[0])

    def ack_async_event(self, event: SimpleNamespace) -> None:
        """Record the acknowledgement."""
        self.acknowledged.append(event.event_type)

    def close(self) -> None:
        """Do nothing."""


def test_events_are_acknowledged() -> None:
    read, write = os.pipe()
    try:
        context = Context(read)
        module = ModuleType("ibverbs")
        module.__dict__["get_device_list"] = lambda: [SimpleNamespace(name="mlx5_0", open=lambda: context)]
        device = load(lambda _: module).open("mlx5_0")
        os.write(write, bytes([EventType.PORT_ERR, EventType.GID_CHANGE]))
        assert device.async_events() == context.acknowledged == [EventType.PORT_ERR, EventType.GID_CHANGE]
        device.close()
    finally:
        os.close(read)
        os.close(write)


def test_device_that_cannot_be_queried_is_closed() -> None:
    closed = []

    def fail() -> None:
        raise OSError(5, "ibv_query_device failed")

    context = SimpleNamespace(query_device=fail, close=lambda: closed.append(True))
    module = ModuleType("ibverbs")
    module.__dict__["get_device_list"] = lambda: [SimpleNamespace(name="mlx5_0", open=lambda: context)]
    with pytest.raises(OSError, match="ibv_query_device"):
        load(lambda _: module).open("mlx5_0")
    assert closed == [True]


@pytest.mark.parametrize("is_global", [True, False])
def test_packets_are_marked(is_global: bool) -> None:
    changes: list[tuple[dict[str, object] | None, dict[str, int]]] = []
    qp = object.__new__(ibverbs_adapter.IbverbsQueuePair)
    masks = {name: 1 << at for at, name in enumerate(MASKS)}
    qp._library = SimpleNamespace(AHAttr=dict, QPAttrMask=SimpleNamespace(**masks))
    qp._device = SimpleNamespace(name="mlx5_0", port=lambda _: SimpleNamespace(max_msg_sz=1 << 20))  # type: ignore[assignment]
    qp._ledger = SimpleNamespace(uses={id(qp)})  # type: ignore[assignment]
    qp._qp = SimpleNamespace(modify=lambda _, vector, **fields: changes.append((vector, fields)))
    qp.connect(QpAddress(1, 2, bytes(16), 3, 5), PathAttributes(1, 0, 4, 5, is_global, marking=Marking(104, 3, 2)))
    (_, at_first), (vector, _), _ = changes
    assert at_first["pkey_index"] == 2
    assert vector is not None and vector["sl"] == 3
    assert vector.get("traffic_class") == (104 if is_global else None)


class Domain:
    """A protection domain of the package, which registers by dma-buf."""

    def __init__(self, error: OSError | None = None) -> None:
        self.error = error
        self.asked: list[tuple[int, ...]] = []
        self.closed = 0

    def reg_dmabuf_mr(self, *arguments: int) -> SimpleNamespace:
        """Register: offset, length, address, descriptor, access."""
        self.asked.append(arguments)
        if self.error is not None:
            raise self.error
        return SimpleNamespace(lkey=7, rkey=8, close=self.close)

    def close(self) -> None:
        """Count it."""
        self.closed += 1


def device_with(domain: object) -> ibverbs_adapter.IbverbsDevice:
    """An open device with that protection domain."""
    context = Context(0)
    context.alloc_pd = lambda: domain  # type: ignore[method-assign, assignment, return-value]
    context.async_fd = None  # type: ignore[assignment]
    return ibverbs_adapter.IbverbsDevice(ModuleType("ibverbs"), "mlx5_0", context)


def test_a_dma_buf_is_named_from_0() -> None:
    domain = Domain()
    device = device_with(domain)
    region = device.register_dma_buf(33, 4096, remote_read=True)
    device.register_dma_buf(34, 8192, remote_read=False)
    assert domain.asked == [(0, 4096, 0, 33, 1 | 4), (0, 8192, 0, 34, 1)]
    assert (region.address, region.nbytes, region.lkey, region.rkey) == (0, 4096, 7, 8)
    region.close()
    region.close()
    assert domain.closed == 1
    device.close()
    assert domain.closed == 3


def test_a_dma_buf_is_refused() -> None:
    device = device_with(Domain(OSError(errno.EOPNOTSUPP, "ibv_reg_dmabuf_mr failed")))
    with pytest.raises(OSError, match="mlx5_0 cannot register a dma-buf of 4,096 bytes.*by dma-buf") as caught:
        device.register_dma_buf(33, 4096, remote_read=True)
    assert caught.value.errno == errno.EOPNOTSUPP
    with pytest.raises(OSError, match="install a later one") as caught:
        device_with(SimpleNamespace(close=bool)).register_dma_buf(33, 4096, remote_read=True)
    assert caught.value.errno == errno.EOPNOTSUPP
