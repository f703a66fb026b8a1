"""The seam to a GPU's driver: a fake with each set of options passes the suite."""

from __future__ import annotations

from functools import partial

import pytest

from tests.conformance.device import GpuDriverSuite
from tests.device.helpers import draw_openers
from zcactor.device.fake import FakeGpuDriver

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


class TestDrawn(GpuDriverSuite):
    """The suite, by options that seeds draw. ``--rounds N`` draws N times as many."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draw the options of `TestDrawn`."""
    if metafunc.cls is TestDrawn and "opener" in metafunc.fixturenames:
        draw_openers(metafunc, FakeGpuDriver)
