"""The interfaces of the agents' actors, imported on first use."""

from __future__ import annotations

from zcactor.assembly import interfaces


def test_they_are_those_of_the_agents_actors() -> None:
    assert {"reserve", "locate", "kill"} <= set(interfaces.of_head().by_name)
    assert {"join_node", "silence"} <= set(interfaces.of_membership().by_name)
    assert {"relay", "hold_actor"} <= set(interfaces.of_node().by_name)
    assert interfaces.of_head() is interfaces.of_head()
