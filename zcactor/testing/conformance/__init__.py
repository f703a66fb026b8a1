"""The suites that every implementation of a protocol of the package must pass: classes of tests, to inherit from.

Each is a module: `zcactor.testing.conformance.connection` and `zcactor.testing.conformance.session`. Their tests are
asynchronous, and run in both modes of pytest-asyncio. Load `zcactor.testing.plugin` first, so that pytest shows the
values of a failed assertion in them.
"""

from zcactor.testing.conformance import connection, session

__all__ = ["connection", "session"]
