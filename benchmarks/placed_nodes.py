"""Calls between nodes that several engines have placed, and the drain of a node; see `benchmarks.engines`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from benchmarks.harness import Measurement, Unmeasured, at_most, exactly
from benchmarks.serving import ITEM, PATIENCE, ZCACTOR, Serving, head_of, measured, place, start, start_head, zcactor
from tests.engines.etcds import Etcd
from tests.engines.etcds import missing as no_etcd
from tests.engines.launching import User
from tests.engines.ray_user import RayUser
from tests.engines.ray_user import missing as no_ray

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.harness import Scale

__all__ = ["calls", "drains"]

PLACED: Final = 1.1
"""Budget: calls between nodes that something else placed, next to nodes that were started one by one."""
DRAINED: Final = 2.0
"""Budget: the drain of a node next to the spawns of its actors."""
IDLE: Final = 50
"""Actors of a node that is drained."""
_STORE: Final = {"ZCACTOR_STORE_CAPACITY": str(1 << 28)}

_RUN, _RAY, _ETCD = "of a run", "placed by Ray", "with the head's log in etcd"
_MEASURES: Final = (
    ("call", "call with an int to another node"),
    ("array", "call with an array of 64 MiB to another node"),
)
"""The program's command, and the name of the measure."""
_ROUNDS: Final = 16
"""Rounds for each run: as many short ones in turns meet quiet moments of the machine on every side."""
_CALLS: Final = 200
"""Calls of a round."""


def _user(undo: contextlib.ExitStack) -> User:
    user = undo.enter_context(User())
    user.variables.update(_STORE)
    return user


def _beside(undo: contextlib.ExitStack, user: User, address: str) -> Serving:
    """A program of a cluster, to which a second node is added."""
    start(user, "--address", address)
    undo.callback(zcactor, user, "stop")
    return Serving(user, ZCACTOR_ADDRESS=address)


def _in_run(undo: contextlib.ExitStack) -> Serving:
    user = _user(undo)
    member = user.start(*ZCACTOR, "run", "--", "true", name="member", **place(user, 1, 2))
    undo.callback(member.wait, PATIENCE)
    return Serving(user, *ZCACTOR, "run", "--", **place(user, 0, 2))


def calls(scale: Scale) -> Iterator[Measurement | Unmeasured]:
    """Calls and arrays between nodes of a run, of Ray, or with a log in etcd, next to nodes started one by one."""
    with contextlib.ExitStack() as undo:
        ray = None
        if no_ray() is None:  # it starts beside the others
            ray = undo.enter_context(RayUser(**_STORE))
        plain = _user(undo)
        start(plain, "--head", "--port", "0")
        sides = {"": _beside(undo, plain, head_of(plain)["address"]), _RUN: _in_run(undo)}
        if no_etcd() is None:
            etcd, user = Etcd(undo.enter_context(User())), _user(undo)
            sides[_ETCD] = _beside(undo, user, start_head(user, "--directory", etcd.url("calls")))
        if ray is not None:
            ray.wait_for_ray()
            undo.callback(ray.end_ray)
            sides[_RAY] = Serving(ray)
        for serving in sides.values():
            undo.callback(serving.end)
            serving.ask("warm")
        for command, name in _MEASURES:
            found: dict[str, list[float]] = {side: [] for side in sides}
            for turn in range(_ROUNDS * scale.runs):
                for side in sorted(sides, reverse=bool(turn % 2)):
                    found[side].append(1e6 * sides[side].ask(command, scale.count(_CALLS)))
            for side in (_RUN, _RAY, _ETCD):
                if side in found:
                    yield measured(f"{name} {side}", found[side], "us", at_most(PLACED), found[""],
                                   "nodes started one by one")  # fmt: skip
    for side, reason in ((_RAY, no_ray()), (_ETCD, no_etcd())):
        if reason is not None:
            for _, name in _MEASURES:
                yield Unmeasured(ITEM, f"{name} {side}", reason)


def drains(scale: Scale) -> Iterator[Measurement]:
    """A node with idle actors that may restart is drained, while they are called one after the other."""
    spawned, drained, failed = list[float](), list[float](), 0
    with User() as user:
        address = start_head(user)
        serving = Serving(user, ZCACTOR_ADDRESS=address)
        count = min(IDLE, scale.count(2 * IDLE, 2))
        for _ in range(scale.count(5)):
            start(user, "--address", address)
            before, seconds, _, lost = serving.ask("drained", count)
            spawned.append(before)
            drained.append(seconds)
            failed += lost
        serving.end()
        zcactor(user, "stop")
    yield measured(
        f"drain of a node with {IDLE} idle actors", drained, "s", at_most(DRAINED), spawned, f"{count} spawns at once"
    )
    yield measured(f"drain of a node with {IDLE} idle actors: failed calls", [failed], "", exactly(0))
