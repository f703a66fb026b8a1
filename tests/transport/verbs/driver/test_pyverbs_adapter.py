"""The adapter of pyverbs: the contract on a device, if there is one, and the rest without."""

from __future__ import annotations

import enum
import errno
import logging
import subprocess
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from tests.transport.verbs.on_device import DeviceSuite, not_installed
from zcactor.transport.verbs.driver import pyverbs_adapter as module
from zcactor.transport.verbs.driver.base import Binding, Marking, PathAttributes, QpAddress
from zcactor.transport.verbs.driver.pyverbs_adapter import load


@pytest.mark.rdma
class TestOnADevice(DeviceSuite):
    """The contract on the first device."""

    adapter = module


class PyverbsError(Exception):
    """An error like pyverbs': with the errno, or -1 where pyverbs did not look."""

    def __init__(self, message: str, error_code: int = -1) -> None:
        super().__init__(message)
        self.error_code = error_code


class Library:
    """An importer of modules that look like pyverbs'. Like it, each adds a handler to the root logger."""

    def __init__(self, *, old: bool, devices: Any = ()) -> None:
        self.old = old
        self.devices = devices

    def __call__(self, name: str) -> ModuleType:
        found = ModuleType(name)
        if name == "pyverbs.libibverbs_enums":
            if self.old:
                raise ModuleNotFoundError(name=name)
            found.__dict__["ibv_qp_type"] = enum.IntEnum("ibv_qp_type", {"IBV_QPT_RC": 2})
        if name == "pyverbs.enums":
            found.__dict__["IBV_QPT_RC"] = 2
        if name == "pyverbs.device":
            found.__dict__["get_device_list"] = self.get_device_list
            logging.basicConfig(level=logging.INFO)
        if name == "pyverbs.pyverbs_error":
            found.__dict__["PyverbsError"] = PyverbsError
        return found

    def get_device_list(self) -> Any:
        """The devices, or the error that keeps them from being listed."""
        if isinstance(self.devices, Exception):
            raise self.devices
        return self.devices


class Named:
    """A device in pyverbs' list, whose name is bytes."""

    name = b"rxe0"


@pytest.mark.parametrize("old", [True, False])
def test_load(old: bool) -> None:
    binding = load(Library(old=old, devices=[Named()]))
    assert isinstance(binding, Binding)
    assert binding.devices() == ["rxe0"]
    assert binding._library.e.IBV_QPT_RC == 2
    with pytest.raises(OSError, match="mlx5_9") as caught:
        binding.open("mlx5_9")
    assert caught.value.errno == errno.ENODEV


def test_root_logger_is_left_alone() -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    for handler in handlers:
        root.removeHandler(handler)
    root.setLevel(logging.ERROR)
    try:
        load(Library(old=True))
        assert root.handlers == []
        assert root.level == logging.ERROR
    finally:
        for handler in handlers:
            root.addHandler(handler)
        root.setLevel(level)


def test_not_installed() -> None:
    with pytest.raises(ModuleNotFoundError):
        load(not_installed)


@pytest.mark.parametrize(("code", "number"), [(-1, errno.ENOSYS), (13, 13), (-12, 12), (0, errno.ENOSYS)])
def test_errors_are_mapped(code: int, number: int) -> None:
    binding = load(Library(old=False, devices=PyverbsError("Failed to get devices list", code)))
    with pytest.raises(OSError, match="ibv_get_device_list failed") as caught:
        binding.devices()
    assert caught.value.errno == number


def test_other_errors_pass() -> None:
    binding = load(Library(old=False, devices=KeyError("x")))
    with pytest.raises(KeyError):
        binding.devices()


class Freed:
    """A work request or scatter-gather entry that counts how often it is freed."""

    def __init__(self, *_: object) -> None:
        self.freed = 0

    def close(self) -> None:
        """Free it; twice is a double free."""
        self.freed += 1


@pytest.mark.parametrize("leaky", [True, False])
def test_work_requests_are_freed_once(leaky: bool) -> None:
    class SGE(Freed):
        pass

    if leaky:
        setattr(SGE, "__dealloc", None)
    library = load(Library(old=False))._library
    library.wr.SGE = SGE
    with pytest.raises(OverflowError), module._WorkRequests(library) as chain:
        entry = chain.entry(1, 2, 3)
        request = chain.keep(Freed())
        raise OverflowError
    assert [entry.freed, request.freed] == [int(leaky), int(leaky)]


def test_of_the_installed_pyverbs() -> None:
    try:
        binding = load()
    except ImportError as error:
        pytest.skip(f"pyverbs is not installed here: {error}")
    library = binding._library
    with module._WorkRequests(library) as chain:
        request = None
        for i in range(3):
            entry = chain.entry(4096, 2**32 - 1, 2**32 - 1)
            request = chain.keep(
                library.wr.SendWR(2**64 - 1 - i, library.e.IBV_WR_RDMA_READ, 1, 0, [entry], 2, next_wr=request)
            )
            request.set_wr_rdma(2**32 - 1, 2**64 - 1)
    for name in (
        "IBV_QPT_RC", "IBV_WR_SEND", "IBV_WR_RDMA_READ", "IBV_SEND_SIGNALED", "IBV_SEND_INLINE", "IBV_QP_STATE",
        "IBV_QPS_ERR", "IBV_QPS_RESET", "IBV_ACCESS_LOCAL_WRITE", "IBV_ACCESS_REMOTE_READ",
    ):  # fmt: skip
        assert hasattr(library.e, name), name
    assert "offset" in str(library.mr.DmaBufMR.__init__.__doc__)
    try:
        assert all(isinstance(name, str) for name in binding.devices())
    except OSError as error:
        assert error.errno == errno.ENOSYS  # noqa: PT017 - having devices is as good


@pytest.mark.parametrize("is_global", [True, False])
def test_packets_are_marked(is_global: bool) -> None:
    found: list[SimpleNamespace] = []
    qp = object.__new__(module.PyverbsQueuePair)
    qp._library = SimpleNamespace(
        e=SimpleNamespace(IBV_ACCESS_REMOTE_READ=4),
        qp=SimpleNamespace(QPAttr=SimpleNamespace),
        addr=SimpleNamespace(GID=str, GlobalRoute=SimpleNamespace, AHAttr=SimpleNamespace),
    )
    qp._guard = lambda *_: nullcontext()  # type: ignore[assignment]
    qp._device = SimpleNamespace(port=lambda _: SimpleNamespace(max_msg_sz=1 << 20))  # type: ignore[assignment]
    qp._ledger = SimpleNamespace(uses={id(qp)})  # type: ignore[assignment]
    qp._qp = SimpleNamespace(to_rts=found.append)
    qp.qp_num = 1
    qp.connect(QpAddress(1, 2, bytes(16), 3, 5), PathAttributes(1, 0, 4, 5, is_global, marking=Marking(104, 3, 2)))
    assert (found[0].pkey_index, found[0].ah_attr.sl) == (2, 3)
    if is_global:
        assert found[0].ah_attr.gr.traffic_class == 104


class DmaBufMR:
    """A region like pyverbs': its address is the offset in the dma-buf."""

    lkey, rkey = 7, 8
    made: ClassVar[list[tuple[object, ...]]] = []

    def __init__(self, pd: object, length: int, access: int, *, dmabuf: int, offset: int) -> None:
        if length == 8192:
            raise PyverbsError("Failed to register a dma-buf MR. Errno: 95, Operation not supported", errno.EOPNOTSUPP)
        self.made.append((length, access, dmabuf, offset))

    def close(self) -> None:
        """Do nothing."""


def opened(mr: Any) -> module.PyverbsDevice:
    """An open device of a library with these regions."""
    library = load(Library(old=True))._library
    found = {"phys_port_cnt": 1, "max_qp_rd_atom": 1, "max_qp_init_rd_atom": 1, "max_qp_wr": 1, "max_srq_wr": 1}
    context = SimpleNamespace(query_device=lambda: SimpleNamespace(**found, max_cqe=1), close=bool)
    library.device = SimpleNamespace(Context=lambda name: context)
    library.pd = SimpleNamespace(PD=lambda context: SimpleNamespace(close=bool))
    library.mr = mr
    library.e = SimpleNamespace(IBV_ACCESS_LOCAL_WRITE=1, IBV_ACCESS_REMOTE_READ=4)
    return module.PyverbsDevice(library, "rxe0")


def test_a_dma_buf_is_named_from_0() -> None:
    device = opened(SimpleNamespace(DmaBufMR=DmaBufMR))
    region = device.register_dma_buf(33, 4096, remote_read=True)
    device.register_dma_buf(34, 4096, remote_read=False)
    assert DmaBufMR.made == [(4096, 1 | 4, 33, 0), (4096, 1, 34, 0)]
    assert (region.address, region.nbytes, region.lkey, region.rkey) == (0, 4096, 7, 8)
    device.close()


def test_a_dma_buf_is_refused() -> None:
    device = opened(SimpleNamespace(DmaBufMR=DmaBufMR))
    with pytest.raises(OSError, match="rxe0 cannot register a dma-buf of 8,192 bytes.*by dma-buf") as caught:
        device.register_dma_buf(33, 8192, remote_read=True)
    assert caught.value.errno == errno.EOPNOTSUPP
    with pytest.raises(OSError, match="install 34 or later") as caught:
        opened(SimpleNamespace()).register_dma_buf(33, 4096, remote_read=True)
    assert caught.value.errno == errno.EOPNOTSUPP


@pytest.mark.slow
def test_importing_zcactor_touches_no_binding() -> None:
    program = (
        "import sys, zcactor, zcactor.transport.verbs.device.viability; "
        "print([name for name in sys.modules if name.partition('.')[0] in {'pyverbs', 'ibverbs'}])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
