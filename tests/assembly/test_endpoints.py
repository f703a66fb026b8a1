"""The endpoint of a process, as the configuration chooses it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.transport.certificates import Authority
from tests.transport.local_arena import TOKEN, run_directory
from zcactor.assembly.endpoints import hear_of_heads, make_endpoint, tell_of_term
from zcactor.config import Config
from zcactor.errors import AuthenticationError
from zcactor.objectstore.store import Store
from zcactor.objectstore.table import LeaseTable
from zcactor.transport.local.endpoint import LocalEndpoint
from zcactor.transport.registry import tls_of
from zcactor.transport.selector import SelectingEndpoint
from zcactor.transport.tcp.endpoint import TcpEndpoint
from zcactor.transport.verbs.endpoint import VerbsEndpoint

NAME = bytes(range(16))
CONFIG = replace(Config(), host="127.0.0.1", verbs="off")


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store(1 << 20, NAME)
    yield made
    made.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return run_directory(tmp_path)


def make(directory: Path, store: Store, transports: str, **more: Any) -> Any:
    return make_endpoint(replace(CONFIG, transports=transports, **more), directory, NAME, TOKEN, store)


@pytest.mark.parametrize("transports", ["local", "local,tcp", "local,verbs,tcp", "local,verbs"])
def test_local_first_is_local_only(directory: Path, store: Store, transports: str) -> None:
    endpoint = make(directory, store, transports)
    assert type(endpoint) is LocalEndpoint


@pytest.mark.parametrize(
    ("transports", "kinds"),
    [
        ("tcp", ["tcp"]),
        ("verbs", ["verbs"]),
        ("verbs,tcp", ["verbs"]),
        ("tcp,verbs", ["tcp"]),
        ("verbs,tcp,local", ["verbs", "local"]),
        ("tcp,local", ["tcp", "local"]),
        ("tcp,local,verbs", ["tcp", "local"]),
        ("verbs,local,tcp", ["verbs", "local"]),
    ],
)
def test_ways(directory: Path, store: Store, transports: str, kinds: list[str]) -> None:
    endpoint = make(directory, store, transports)
    assert isinstance(endpoint, SelectingEndpoint)
    assert [way.kind for way in endpoint.ways] == kinds
    assert endpoint.address == NAME.hex()
    assert {"local": LocalEndpoint, "tcp": TcpEndpoint, "verbs": VerbsEndpoint}[kinds[0]] is type(endpoint.ways[0])


@pytest.mark.parametrize(("transports", "falls_back"), [("verbs", False), ("verbs,tcp", True), ("verbs,local", False)])
def test_falling_back_is_allowed_where_tcp_is(directory: Path, store: Store, transports: str, falls_back: bool) -> None:
    (endpoint, *_) = make(directory, store, transports).ways
    assert endpoint._falls_back is falls_back


def test_settings_are_handed_on(directory: Path, store: Store) -> None:
    (endpoint,) = make(
        directory, store, "verbs,tcp", verbs="mlx5_7:2:5,traffic_class=104,service_level=3,pkey_index=2",
        recv_depth=77, eager_limit=4096,
    ).ways  # fmt: skip
    assert endpoint._wanted == ("mlx5_7", 2, 5)
    assert endpoint._marks == (104, 3, 2)
    assert (endpoint._recv_depth, endpoint._eager_limit) == (77, 4096)
    assert endpoint.process == NAME


@pytest.mark.parametrize(("limit", "by_rdma"), [(64, 128), (16383, 32766), (16384, 32768), (1 << 20, 32768)])
def test_frames_by_rdma_have_twice_the_room_up_to_that_of_a_receive(
    directory: Path, store: Store, limit: int, by_rdma: int
) -> None:
    (endpoint,) = make(directory, store, "verbs,tcp", eager_limit=limit).ways
    assert endpoint._verbs_eager_limit == by_rdma


async def test_binding_that_is_switched_off(directory: Path, store: Store) -> None:
    (endpoint,) = make(directory, store, "verbs,tcp").ways
    assert endpoint.open_engine() is None
    assert endpoint.problem


@dataclass
class Peer:
    """The part of a session that leases need."""

    leases: LeaseTable = field(default_factory=LeaseTable)
    connection: Any = field(default_factory=lambda: SimpleNamespace(maps=True))


@pytest.mark.parametrize("transports", ["tcp", "verbs,tcp"])
def test_peers_may_read_what_they_hold_a_lease_on_and_no_more(directory: Path, store: Store, transports: str) -> None:
    (endpoint,) = make(directory, store, transports).ways
    block = store.allocate(1000)
    low, high = block.offset, block.offset + 1000
    holder, other = Peer(), Peer()

    def may(number: int, offset: int, nbytes: int, peer: Peer | None = holder) -> bool:
        kept = endpoint.authorize(peer, number, offset, nbytes)
        assert kept is None or kept is store.lookup(number)
        return kept is not None

    store.export(block)
    assert not may(block.id, low, 1000), "the peer has no lease"
    block.grant(holder)
    block.grant(holder)
    assert may(block.id, low, 1000) and may(block.id, high - 1, 1)
    assert not may(block.id, low, 1001) and not may(block.id, low - 1, 2) and not may(block.id, high, 1)
    assert not may(block.id + 1, low, 1)
    assert not may(block.id, low, 1000, other)
    assert not may(block.id, low, 1000, None)
    holder.leases.release(block.id, 1)
    assert may(block.id, low, 1000)
    holder.leases.release(block.id, 1)
    assert not may(block.id, low, 1000), "it has given it back, and the object lives"
    holder.leases.grant(5, object())
    assert not may(5, low, 1), "a lease on something that has no bytes"


@pytest.mark.parametrize("transports", ["tcp", "verbs,tcp"])
def test_certificates_are_handed_on(directory: Path, store: Store, tmp_path: Path, transports: str) -> None:
    folder = Authority().folder(tmp_path / "tls")
    (endpoint,) = make(directory, store, transports, security=f"tls:{folder}").ways
    assert endpoint._tls is not None
    assert endpoint._sealing is False
    assert endpoint.viability() is None
    with pytest.raises(AuthenticationError, match="none, and ca.pem there cannot be read"):
        make(directory, store, transports, security=f"tls:{tmp_path}/none")


def test_nothing_is_loaded_where_there_are_no_other_hosts(directory: Path, store: Store) -> None:
    assert type(make(directory, store, "local,tcp", security="tls:/none")) is LocalEndpoint


def test_a_folder_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Authority().folder(tmp_path / "tls")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tls_of(CONFIG) is None
    assert tls_of(replace(CONFIG, security="tls:~/tls")) is not None


async def test_no_rdma_by_tls(directory: Path, store: Store, tmp_path: Path) -> None:
    folder = Authority().folder(tmp_path / "tls")
    (endpoint,) = make(directory, store, "verbs,tcp", security=f"tls:{folder}").ways
    assert endpoint.open_engine() is None
    assert endpoint.problem.startswith("security is TLS, and bytes by RDMA cannot be encrypted")
    (endpoint,) = make(directory, store, "verbs", security=f"tls:{folder}").ways
    assert endpoint.viability() == endpoint.problem


@pytest.mark.slow
def test_a_process_with_local_peers_only_never_loads_the_rest() -> None:
    program = (
        "import sys; from zcactor.assembly import endpoints; from zcactor.config import Config\n"
        "from pathlib import Path; from zcactor.objectstore.store import Store\n"
        "s = Store(1 << 20, bytes(16)); endpoints.make_endpoint(Config(), Path('/tmp'), bytes(16), bytes(32), s)\n"
        "print([m for m in sys.modules if 'verbs' in m or m.endswith(('transport.tcp', 'transport.select'))])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True])
def test_what_drives_a_device_is_loaded_where_the_kernel_lists_one(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "mlx5_0").mkdir()
    program = (
        "import sys; from pathlib import Path; from zcactor.assembly import endpoints\n"
        "from zcactor.transport.verbs.driver import presence\n"
        f"presence.has_device.__defaults__ = (Path({str(tmp_path)!r}),)\n"
        "endpoints.preload('local,verbs,tcp', clustered=True)\n"
        "names = 'zcactor.transport.tcp.endpoint', 'zcactor.transport.verbs.driver.base'\n"
        "print([name in sys.modules for name in names])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == f"[True, {there}]\n"


@pytest.mark.parametrize("transports", ["tcp", "verbs,tcp", "local,tcp"])
def test_arrays_are_to_be_authenticated_and_nothing_can(
    directory: Path, store: Store, monkeypatch: pytest.MonkeyPatch, transports: str
) -> None:
    config = replace(CONFIG, transports=transports, security="arrays")
    make_endpoint(config, directory, NAME, TOKEN, store)
    monkeypatch.setattr("zcactor.assembly.endpoints.can_seal", lambda: False)
    with pytest.raises(AuthenticationError, match=r"cryptography.*is not installed; pip install 'zcactor\[cluster\]'"):
        make_endpoint(config, directory, NAME, TOKEN, store)
    make_endpoint(replace(config, security="auto"), directory, NAME, TOKEN, store)


@pytest.mark.parametrize("transports", ["tcp", "verbs,tcp"])
@pytest.mark.parametrize("integrity", ["auto", "arrays", "frames"])
def test_the_wish_for_integrity_is_handed_on(directory: Path, store: Store, transports: str, integrity: str) -> None:
    config = replace(CONFIG, transports=transports, security=integrity)
    made: Any = make_endpoint(config, directory, NAME, TOKEN, store)
    assert made.ways[0]._integrity.name.lower() == integrity


@pytest.mark.parametrize("transports", ["local,tcp", "tcp,local", "tcp"])
def test_who_hears_of_heads(directory: Path, store: Store, transports: str) -> None:
    config = replace(CONFIG, transports=transports)
    endpoint: Any = make_endpoint(config, directory, NAME, TOKEN, store, clustered=True)
    heard: list[tuple[str, int]] = []
    hear_of_heads(endpoint, lambda *word: heard.append(word))
    (far,) = [way for way in endpoint.ways if way.kind == "tcp"]
    far.summoned("a:1", 3)
    assert heard == [("a:1", 3)]


def test_an_endpoint_of_one_way_hears_of_heads(directory: Path, store: Store) -> None:
    heard: list[tuple[str, int]] = []
    local = make(directory, store, "local")
    hear_of_heads(local, lambda *word: heard.append(word))
    local.summoned("a:1", 3)
    assert heard == [("a:1", 3)]


@pytest.mark.parametrize("transports", ["local,tcp", "tcp"])
def test_who_tells_of_a_term(directory: Path, store: Store, transports: str) -> None:
    endpoint: Any = make_endpoint(replace(CONFIG, transports=transports), directory, NAME, TOKEN, store, clustered=True)
    (far,) = [way for way in endpoint.ways if way.kind == "tcp"]
    assert far.term() == 0
    tell_of_term(endpoint, lambda: 5)
    assert far.term() == 5
