"""The door of a process that listens before it can serve."""

from __future__ import annotations

from typing import Any

from zcactor.node.agent_main import Door


def test_those_who_wait_come_first_and_in_order() -> None:
    served: list[Any] = []
    door = Door(served.append)
    one, two, three = (object() for _ in range(3))
    connections: list[Any] = [one, two, three]
    door.accepted(connections[0])
    door.accepted(connections[1])
    assert served == []
    door.open()
    door.accepted(connections[2])
    door.open()
    assert served == [one, two, three]
