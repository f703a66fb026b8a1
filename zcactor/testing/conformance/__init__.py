"""The suites that every implementation of a protocol of the package must pass: classes of tests, to inherit from.

Each is a module: `zcactor.testing.conformance.connection`, `zcactor.testing.conformance.device` and
`zcactor.testing.conformance.session`. Tests of connections and sessions are asynchronous, and run in both modes of
pytest-asyncio. Load `zcactor.testing.plugin` first, so that pytest shows the
values of a failed assertion in them.
"""

from zcactor.testing.conformance import connection, device, session

__all__ = ["connection", "device", "session"]
