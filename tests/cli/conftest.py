"""Reports of made-up hosts, for tests of examining and rendering."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from zcactor.cli.doctor import Report, examine
from zcactor.cli.gpus import look_at_gpus
from zcactor.config import Config
from zcactor.transport.verbs.driver.base import Binding
from zcactor.transport.verbs.driver.bindings import Absent, Reason
from zcactor.transport.verbs.driver.fake import FakeFabric

Look = Callable[..., Report]
"""``look(binding, memlock, **settings)``: the report of a made-up host.

The host has that binding (by default none), a limit of that many pinned bytes (by default none), and a configuration of
those settings.
"""

NO_BINDING = Absent(
    (
        Reason("pyverbs", "not installed", "apt install"),
        Reason("ibverbs", "this kernel has no RDMA", "modprobe rdma_rxe"),
    )
)


@pytest.fixture
def fabric() -> FakeFabric:
    """A fabric without adapters."""
    return FakeFabric()


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """A function that reports on a host whose huge pages for shared memory are set to ``advise``."""
    huge_pages = tmp_path / "shmem_enabled"
    huge_pages.write_text("always within_size [advise] never deny force\n")

    def report(binding: Binding | Absent = NO_BINDING, memlock: int | None = None, **settings: object) -> Report:
        sources = {field.name: "argument" if field.name in settings else "default" for field in fields(Config)}
        config = Config(**settings)  # type: ignore[arg-type]
        return examine(
            config, sources, binding=binding, memlock=lambda: memlock, huge_pages=huge_pages, groups=(),
            gpus=lambda config: look_at_gpus(config, tmp_path),
        )  # fmt: skip

    return report
