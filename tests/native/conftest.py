"""The end of a connection that the tests of the native part share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.native.ends import End


@pytest.fixture
def end() -> Iterator[End]:
    made = End()
    yield made
    made.close()
