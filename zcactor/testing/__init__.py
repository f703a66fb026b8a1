"""Fixtures for tests of actors; `zcactor.testing.plugin` is the plugin for pytest."""

from zcactor.testing.waiting import until

__all__ = ["until"]
