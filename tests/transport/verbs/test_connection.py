"""`VerbsConnection` on a fake fabric: the suite of all connections, and what only RDMA has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.connection import PullingSuite, Side
from tests.transport.verbs.sides import SIDES


class TestConformance(PullingSuite):
    @pytest.fixture(params=SIDES)
    def sides(self, request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
        with SIDES[request.param]() as sides:
            yield sides
