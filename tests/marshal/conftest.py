"""Fixtures of the marshalling tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.marshal.wire import Wire


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()
