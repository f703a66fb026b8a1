"""The seam to a GPU's driver: a fake with each set of options passes the suite."""

from __future__ import annotations

from functools import partial

import pytest

from zcactor.device.fake import FakeGpuDriver
from zcactor.testing.conformance.device import GpuDriverSuite

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "opener",
    [
        partial(FakeGpuDriver, options)
        for options in (
            "",
            "devices=2,late=3",
            "devices=2,peer=none,export=none,events=none,dmabuf=no",
            "readonly=no",
        )
    ],
    ids=["default", "late", "without", "writable"],
)
class TestFake(GpuDriverSuite):
    """The suite, by the options."""
