"""The options of the fake GPUs of one process, as a program writes them: ``devices=2,late=80,peer=none``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FakeOptions"]

_UNITS: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_MOST_DEVICES: Final = 16
"""GPUs of the largest hosts."""
_FATAL: Final = "fatal"


@dataclass(frozen=True, slots=True)
class FakeOptions:
    """The options.

    Attributes:
        devices: GPUs of the host, 1 to 16.
        memory: bytes of each GPU.
        host: names the processes that allocate the memory together. Empty: each process has all of it.
        context: bytes that a process takes of a GPU with its first call for it.
        late: milliseconds by which each copy and fill of a stream begins later, times 0.5 to 1.5 by `seed`.
        seed: seed of those factors.
        peer: ``all`` or ``none``: whether a GPU can access the memory of another.
        export: ``vmm`` or ``none``: how memory leaves the process.
        events: ``ipc`` or ``none``: whether other processes can open events.
        readonly: whether a mapping without write access refuses writes.
        dmabuf: whether memory can be exported to network cards.
        waits: False lets waits of streams do nothing: a test of order must fail then, or it tests nothing.
        fail: the call that fails, once; ``fatal`` for a copy or fill that breaks the context. Empty for no failure.
        breaks: whether that call breaks the context of its GPU, or of all where the call is for no particular one.
        fail_at: the number of that call among its kind, from 1.
        refuse: the part of all questions whether work is done that are not answered, from 0 to 0.9, by `seed`.
        captures: the part of all calls that come while a thread of the program captures a stream, from 0 to 0.9, by
            `seed`. It captures in CUDA's global mode, and captures nothing of ours.
    """

    devices: int = 1
    memory: int = 1 << 30
    late: float = 0.0
    seed: int = 0
    peer: str = "all"
    export: str = "vmm"
    events: str = "ipc"
    readonly: bool = True
    dmabuf: bool = True
    waits: bool = True
    fail: str = ""
    fail_at: int = 1
    refuse: float = 0.0
    host: str = ""
    context: int = 0
    breaks: bool = False
    captures: float = 0.0

    @classmethod
    def parse(cls, text: str, calls: frozenset[str]) -> FakeOptions:
        """Read options.

        Args:
            text: ``name=value`` pairs, separated by commas; empty for the defaults.
            calls: the calls that can be made to fail.

        Raises:
            ValueError: an option is unknown, given twice or malformed. The message lists all options.
        """
        found: dict[str, object] = {}
        for pair in filter(None, (each.strip() for each in text.split(","))):
            name, equals, value = (part.strip() for part in pair.partition("="))
            read = _READERS.get(name)
            values = None if read is None or not equals or name in found else read(value)
            if values is None or (name == "fail" and values["fail"] not in {"", _FATAL, *calls}):
                known = "\n".join(f"  {option}={meaning}" for option, meaning in _MEANINGS.items())
                twice = " twice" if name in found else ""
                raise ValueError(
                    f"the fake GPU does not know the option {pair!r}{twice}; its options are, separated by commas:\n"
                    f"{known}\nCalls: {', '.join(sorted(calls))}"
                )
            found.update(values)
        return cls(**found)  # type: ignore[arg-type]

    @property
    def breaks_at(self) -> int:
        """The number of the copy or fill that breaks the context; 0 for no such one."""
        return self.fail_at if self.fail == _FATAL else 0


_Read = dict[str, object] | None


def _whole(name: str, least: int, most: int) -> Callable[[str], _Read]:
    def read(value: str) -> _Read:
        fits = re.fullmatch(r"-?\d{1,18}", value, re.ASCII) and least <= int(value) <= most
        return {name: int(value)} if fits else None

    return read


def _one_of(name: str, *values: str) -> Callable[[str], _Read]:
    return lambda value: {name: value} if value in values else None


def _yes(name: str) -> Callable[[str], _Read]:
    return lambda value: {name: value == "yes"} if value in {"yes", "no"} else None


def _bytes(name: str, least: int) -> Callable[[str], _Read]:
    def read(value: str) -> _Read:
        match = re.fullmatch(r"(\d{1,15})(|KiB|MiB|GiB)", value, re.ASCII)
        nbytes = int(match[1]) * _UNITS[match[2]] if match else -1
        return {name: nbytes} if nbytes >= least else None

    return read


def _name(value: str) -> _Read:
    return {"host": value} if re.fullmatch(r"[A-Za-z0-9-]{0,32}", value, re.ASCII) else None


def _milliseconds(value: str) -> _Read:
    return {"late": float(value)} if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", value, re.ASCII) else None


def _part(name: str) -> Callable[[str], _Read]:
    def read(value: str) -> _Read:
        fits = re.fullmatch(r"0(\.\d{1,6})?", value, re.ASCII) and float(value) <= 0.9
        return {name: float(value)} if fits else None

    return read


def _failure(value: str) -> _Read:
    if not value:
        return {"fail": ""}
    match = re.fullmatch(r"([a-z_]+)(!?)(?::([1-9]\d{0,8}))?", value, re.ASCII)
    return {"fail": match[1], "breaks": bool(match[2]), "fail_at": int(match[3] or 1)} if match else None


_READERS: Final[dict[str, Callable[[str], _Read]]] = {
    "devices": _whole("devices", 1, _MOST_DEVICES),
    "memory": _bytes("memory", 1),
    "host": _name,
    "context": _bytes("context", 0),
    "late": _milliseconds,
    "seed": _whole("seed", -(1 << 31), 1 << 31),
    "peer": _one_of("peer", "all", "none"),
    "export": _one_of("export", "vmm", "none"),
    "events": _one_of("events", "ipc", "none"),
    "readonly": _yes("readonly"),
    "dmabuf": _yes("dmabuf"),
    "refuse": _part("refuse"),
    "captures": _part("captures"),
    "waits": _yes("waits"),
    "fail": _failure,
}
_MEANINGS: Final = {
    "devices": f"1 to {_MOST_DEVICES} (1): GPUs of the host",
    "memory": "bytes, or as 1GiB (1GiB): of each GPU",
    "host": "name (): the processes that have the memory together; each has all of it where there is no name",
    "context": "bytes, or as 300MiB (0): taken of a GPU by the first call of a process for it",
    "late": "milliseconds (0): each copy and fill begins that much later, times 0.5 to 1.5",
    "seed": "int (0): of these factors",
    "peer": "all, none (all): whether GPUs access each other's memory",
    "export": "vmm, none (vmm): how memory leaves the process",
    "events": "ipc, none (ipc): whether other processes can open events",
    "readonly": "yes, no (yes): whether a mapping without write access refuses writes",
    "dmabuf": "yes, no (yes): whether network cards can register memory",
    "refuse": "0 to 0.9 (0): the part of all questions whether work is done that are not answered for now",
    "captures": "0 to 0.9 (0): the part of all calls that come while another thread captures a stream",
    "waits": "yes, no (yes): no lets the waits of streams do nothing",
    "fail": "call[!][:n], fatal[:n] (): the n-th call of that name fails, and with ! breaks the context; the n-th copy "
    "or fill breaks the context",
}
