"""The registry of transports, and what is loaded by whom."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.transport.local_arena import TOKEN
from zcactor.config import TRANSPORTS, Config
from zcactor.objectstore.store import Store
from zcactor.transport.registry import SUFFIXES, EndpointSettings, prefers_host, transport


@pytest.mark.parametrize("name", TRANSPORTS)
def test_each_transport_makes_endpoints_of_its_name(name: str, tmp_path: Path) -> None:
    config = replace(Config(), verbs="off", recv_depth=77, ports="4000-4001")
    store = Store(1 << 20, bytes(16))
    settings = EndpointSettings(config, [name], tmp_path, bytes(16), TOKEN, store, lambda *_: None)
    endpoint = transport(name).make(settings)
    assert (endpoint.kind, endpoint.by_name) == (name, transport(name).by_name)
    store.close()


@pytest.mark.parametrize(("transports", "expected"), [("local,tcp", True), ("tcp,local", False), ("verbs", False)])
def test_hosts_are_preferred_where_the_first_transport_connects_by_name(transports: str, expected: bool) -> None:
    assert prefers_host(transports) is expected


def test_files_of_each_transport_are_known() -> None:
    assert {"sock", "tcp", "verbs"} <= set(SUFFIXES)


def test_the_package_loads_no_transport() -> None:
    program = "import sys, zcactor; print([m for m in sys.modules if m.endswith('endpoint') or 'verbs' in m])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
