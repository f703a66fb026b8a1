"""The options of the fake GPUs of one process, as a program writes them: ``devices=2,late=80,peer=none``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

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
            values = _OPTIONS[name][0](value) if name in _OPTIONS and equals and name not in found else None
            if name != "fail" and values is not None:
                values = {name: values}
            if not isinstance(values, dict) or values.get("fail", "") not in {"", _FATAL, *calls}:
                known = "\n".join(f"  {option}={meaning}" for option, (_, meaning) in _OPTIONS.items())
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


_Reader = Callable[[str], object]
"""Reads the text of a value. Returns None for one that is malformed."""


def _whole(least: int, most: int) -> _Reader:
    def read(value: str) -> object:
        return int(value) if re.fullmatch(r"-?\d{1,18}", value, re.ASCII) and least <= int(value) <= most else None

    return read


def _one_of(*values: str) -> _Reader:
    return lambda value: value if value in values else None


def _bytes(least: int) -> _Reader:
    def read(value: str) -> object:
        match = re.fullmatch(r"(\d{1,15})(|KiB|MiB|GiB)", value, re.ASCII)
        nbytes = int(match[1]) * _UNITS[match[2]] if match else -1
        return nbytes if nbytes >= least else None

    return read


def _real(pattern: str, most: float) -> _Reader:
    return lambda value: float(value) if re.fullmatch(pattern, value, re.ASCII) and float(value) <= most else None


def _name(value: str) -> object:
    return value if re.fullmatch(r"[A-Za-z0-9-]{0,32}", value, re.ASCII) else None


def _failure(value: str) -> object:
    match = re.fullmatch(r"([a-z_]+)(!?)(?::([1-9]\d{0,8}))?", value, re.ASCII)
    if match is None:
        return None if value else {"fail": ""}
    return {"fail": match[1], "breaks": bool(match[2]), "fail_at": int(match[3] or 1)}


_YES: Final[_Reader] = {"yes": True, "no": False}.get
_PART: Final = _real(r"0(\.\d{1,6})?", 0.9)
_OPTIONS: Final[dict[str, tuple[_Reader, str]]] = {
    "devices": (_whole(1, _MOST_DEVICES), f"1 to {_MOST_DEVICES} (1): GPUs of the host"),
    "memory": (_bytes(1), "bytes, or as 1GiB (1GiB): of each GPU"),
    "host": (_name, "name (): the processes that have the memory together; each has all of it where there is no name"),
    "context": (_bytes(0), "bytes, or as 300MiB (0): taken of a GPU by the first call of a process for it"),
    "late": (
        _real(r"\d{1,6}(\.\d{1,6})?", 1e6),
        "milliseconds (0): each copy and fill begins that much later, times 0.5 to 1.5",
    ),
    "seed": (_whole(-(1 << 31), 1 << 31), "int (0): of these factors"),
    "peer": (_one_of("all", "none"), "all, none (all): whether GPUs access each other's memory"),
    "export": (_one_of("vmm", "none"), "vmm, none (vmm): how memory leaves the process"),
    "events": (_one_of("ipc", "none"), "ipc, none (ipc): whether other processes can open events"),
    "readonly": (_YES, "yes, no (yes): whether a mapping without write access refuses writes"),
    "dmabuf": (_YES, "yes, no (yes): whether network cards can register memory"),
    "refuse": (_PART, "0 to 0.9 (0): the part of all questions whether work is done that are not answered for now"),
    "captures": (_PART, "0 to 0.9 (0): the part of all calls that come while another thread captures a stream"),
    "waits": (_YES, "yes, no (yes): no lets the waits of streams do nothing"),
    "fail": (
        _failure,
        "call[!][:n], fatal[:n] (): the n-th call of that name fails, and with ! breaks the context; the n-th copy or "
        "fill breaks the context",
    ),
}
"""The reader and the meaning of each option. That of `fail` stands for several fields."""
