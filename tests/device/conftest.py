"""Fixtures of the tests of GPUs."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_leftovers() -> Iterator[None]:
    """Collect the garbage of earlier tests before a test that counts descriptors or threads, and none in its midst:
    drivers and runtimes have both."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
