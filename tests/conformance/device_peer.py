"""A second process for tests of GPU drivers, and what both do with a driver: read, write, and wait for streams.

It imports no pytest, as each test that needs the process starts it anew.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Self, TypeVar

from zcactor.errors import DeviceError, ZcactorError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from zcactor.device.driver import GpuDriver

__all__ = ["DevicePeer", "finish", "is_done", "is_idle", "main", "mapped", "read", "record_all", "until_done", "write"]

_WATCHDOG: Final = 30.0
"""Seconds until a test gives up."""
_FRAME_NBYTES: Final = 1 << 16
_Answer = TypeVar("_Answer")


def is_done(driver: GpuDriver, device: int, event: int) -> bool:
    """As `GpuDriver.done`, asked again where the driver does not answer for now."""
    return _answer(lambda: driver.done(device, event))


def is_idle(driver: GpuDriver, device: int, stream: int) -> bool:
    """As `GpuDriver.idle`, asked again where the driver does not answer for now."""
    return _answer(lambda: driver.idle(device, stream))


def _answer(ask: Callable[[], _Answer]) -> _Answer:
    end = time.monotonic() + _WATCHDOG
    while True:
        try:
            return ask()
        except DeviceError as error:
            if error.fatal or time.monotonic() > end:
                raise


def record_all(driver: GpuDriver, device: int, event: int) -> None:
    """As `GpuDriver.record_all`, called again where another thread captures a stream."""
    _answer(lambda: driver.record_all(device, event))


def until_done(driver: GpuDriver, device: int, event: int) -> None:
    """Wait for the work of an event.

    Raises:
        TimeoutError: it was not done within half a minute.
    """
    end = time.monotonic() + _WATCHDOG
    while not is_done(driver, device, event):
        if time.monotonic() > end:
            raise TimeoutError("the work on a stream does not end")
        time.sleep(0.0002)  # a driver has no wait that ends when the process that does the work has ended


def finish(driver: GpuDriver, device: int, stream: int = 0) -> None:
    """Wait for all work on a stream.

    Raises:
        TimeoutError: it was not done within half a minute.
    """
    event = driver.event(device)
    driver.record(device, event, stream)
    until_done(driver, device, event)
    driver.end_event(device, event)


def map_anew(driver: GpuDriver, device: int, handle: int, nbytes: int, writable: bool = True) -> int:
    """Map a handle's memory at addresses that are reserved for it. Returns the first."""
    address = driver.reserve(device, nbytes)
    driver.map(device, address, handle, nbytes, writable)
    return address


def mapped(driver: GpuDriver, device: int, nbytes: int) -> int:
    """Make one extent and map it, with write access. Returns its address."""
    handle = driver.create(device, nbytes)
    address = map_anew(driver, device, handle, nbytes)
    driver.release(device, handle)
    return address


def write(driver: GpuDriver, device: int, address: int, data: bytes, stream: int = 0) -> None:
    """Copy bytes to a GPU, and wait for that."""
    buffer = ctypes.create_string_buffer(data, len(data))
    driver.copy(device, address, ctypes.addressof(buffer), 1, len(data), (0, 0), stream)
    finish(driver, device, stream)


def read(driver: GpuDriver, device: int, address: int, nbytes: int, stream: int = 0) -> bytes:
    """Copy bytes from a GPU, behind what is queued on the stream."""
    buffer = ctypes.create_string_buffer(nbytes)
    driver.copy(device, ctypes.addressof(buffer), address, 1, nbytes, (0, 0), stream)
    finish(driver, device, stream)
    return buffer.raw


def know_events(driver: GpuDriver, fd: int, pid: int) -> None:
    """Let the driver open events of another process, by a descriptor of its page."""
    process = os.pidfd_open(pid)
    try:
        driver.add_event_page(fd, process)
    finally:
        os.close(process)


class DevicePeer:
    """Another process with a driver of its own. As a context manager it ends with the block.

    Args:
        opener: the function that makes the driver there; it is pickled, so its module should not import pytest.
        user: the user id under which it runs; None for this one's.
    """

    def __init__(self, opener: Callable[[], GpuDriver], *, user: int | None = None) -> None:
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_WATCHDOG)
        with there:
            program = f"from {__name__} import main; main({there.fileno()})"
            command = [sys.executable, "-c", program]
            self.process: Final = subprocess.Popen(command, pass_fds=[there.fileno()], user=user)
        self._socket.send(pickle.dumps(opener))

    def call(self, name: str, *arguments: Any, fd: int = -1) -> Any:
        """Call a method of the driver there, or a function of this module, which gets the driver first.

        Args:
            name: of the method or function.
            arguments: its arguments.
            fd: a descriptor, which takes the place of the argument -1.

        Raises:
            ZcactorError: the call raised it there.
            EOFError: the process has ended.
        """
        socket.send_fds(self._socket, [pickle.dumps((name, arguments))], [] if fd < 0 else [fd])
        answer = self._socket.recv(_FRAME_NBYTES)
        if not answer:
            raise EOFError("the second process has ended")
        result = pickle.loads(answer)
        if isinstance(result, ZcactorError):
            raise result
        return result

    def share_events(self, driver: GpuDriver) -> None:
        """Let both processes open each other's events."""
        fd = driver.event_page()
        self.call("know_events", -1, os.getpid(), fd=fd)
        os.close(fd)
        with self.event_page() as file:
            know_events(driver, file.fileno(), self.process.pid)

    def event_page(self) -> BinaryIO:
        """The page with the events of the process there."""
        return open(f"/proc/{self.process.pid}/fd/{self.call('event_page')}", "r+b", buffering=0)

    def kill(self) -> None:
        """Kill the process, and wait for its end."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()
        try:
            self.process.wait(_WATCHDOG)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


def main(number: int) -> None:
    """Do what the first process asks for, until it closes the connection.

    Args:
        number: the descriptor of the connection.
    """
    ours = (is_done, is_idle, finish, know_events, map_anew, mapped, read, write)
    functions: dict[str, Callable[..., Any]] = {each.__name__: each for each in ours}
    with socket.socket(fileno=number) as connection:
        driver = pickle.loads(connection.recv(_FRAME_NBYTES))()
        while True:
            request, fds, _, _ = socket.recv_fds(connection, _FRAME_NBYTES, 1)
            if not request:
                return
            name, arguments = pickle.loads(request)
            arguments = [fds[0] if fds and each == -1 else each for each in arguments]
            try:
                function = functions.get(name)
                result = function(driver, *arguments) if function else getattr(driver, name)(*arguments)
            except ZcactorError as error:
                result = error
            for fd in fds:
                socket.close(fd)
            connection.send(pickle.dumps(result))
