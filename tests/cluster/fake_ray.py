"""The calls to Ray without Ray: a cluster that is a few numbers, and a log of the calls."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zcactor.cluster.ray import HostAnswer
from zcactor.errors import ConnectionLost, NameTaken


@dataclass(eq=False)
class FakeHost:
    number: int
    bundle: Mapping[str, float]
    settings: Mapping[str, Any]
    token: bytes


@dataclass
class FakeRay:
    """Ray, as `zcactor.cluster.ray` uses it. Tests set the first fields, and look at the log."""

    room: bool = True
    missing: frozenset[int] = frozenset()
    """The bundles whose hosts never answer."""
    problem: HostAnswer | None = None
    """The answer of the last bundle's host."""
    taken: set[str] = field(default_factory=set)
    groups_by_id: dict[str, str] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    hosts: list[FakeHost] = field(default_factory=list)
    asked: threading.Event = field(default_factory=threading.Event)
    """Set when the place of a group is asked for."""
    endless: bool = False
    """Whether hosts never end their nodes."""
    connected: bool = False

    def __call__(self, asked_by: str) -> FakeRayCalls:
        return FakeRayCalls(self, asked_by)


class FakeRayCalls:
    """The methods of `RayCalls`."""

    def __init__(self, fake: FakeRay, asked_by: str) -> None:
        self._fake, self.asked_by = fake, asked_by

    def connect(self, address: str | None) -> bool:
        self._fake.log.append(f"connect {address}")
        before, self._fake.connected = self._fake.connected, True
        return not before

    def disconnect(self) -> None:
        self._fake.log.append("disconnect")

    def claim(self, name: str) -> str:
        if name in self._fake.taken:
            raise NameTaken(name)
        self._fake.taken.add(name)
        self._fake.log.append(f"claim {name}")
        return name

    def claimed(self, name: str) -> bool:
        return name in self._fake.taken

    def kill(self, actor: Any) -> None:
        if isinstance(actor, FakeHost):
            self._fake.log.append(f"kill {actor.number}")
        else:
            self._fake.taken.discard(actor)
            self._fake.log.append(f"kill {actor}")

    def groups(self) -> dict[str, str]:
        return dict(self._fake.groups_by_id)

    def make_group(self, bundles: Sequence[Mapping[str, float]], strategy: str, name: str) -> str:
        self._fake.log.append(f"group {name} {strategy} {len(bundles)}")
        self._fake.groups_by_id["new"] = name
        return "new"

    def is_placed(self, group: str) -> bool:
        self._fake.asked.set()
        return self._fake.room

    def remove_group(self, group: str) -> None:
        self._fake.log.append(f"remove {group}")
        self._fake.groups_by_id.pop(group, None)

    def start_host(
        self, group: str, number: int, bundle: Mapping[str, float], settings: Mapping[str, Any], token: bytes, name: str
    ) -> FakeHost:
        self._fake.hosts.append(FakeHost(number, bundle, settings, token))
        return self._fake.hosts[-1]

    def call(self, actor: FakeHost, method: str, *args: Any) -> tuple[str, int]:
        if method != "answer":
            self._fake.log.append(f"{method} {actor.number}")
        return method, actor.number

    def wait(self, references: Sequence[tuple[str, int]], seconds: float) -> list[tuple[str, int]]:
        known = [
            (method, number)
            for method, number in references
            if not (method == "answer" and number in self._fake.missing)
            and not (method == "end" and self._fake.endless)
        ]
        return known[:1]

    def answer(self, reference: tuple[str, int], number: int) -> HostAnswer:
        if self._fake.problem is not None and number == len(self._fake.hosts) - 1:
            return self._fake.problem
        if reference[1] != number:
            raise ConnectionLost("this is another bundle's answer")
        return HostAnswer(f"10.0.0.{number}:7433")

    def room(self) -> str:
        return "it has nothing"
