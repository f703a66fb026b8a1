"""The findings of the doctor on hosts with and without RDMA."""

from __future__ import annotations

import compileall
import ipaddress
import json
import os
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

import zcactor
from tests.cli.conftest import NO_BINDING, Look
from tests.objectstore.faked_groups import Usage, groups_of
from tests.transport.certificates import DAY, Authority
from zcactor.cli.doctor import (
    GidInfo,
    PortInfo,
    Report,
    Setting,
    Transport,
    bytecode_fix,
    card_notes,
    examine,
)
from zcactor.cli.gpus import look_at_gpus
from zcactor.config import TRANSPORTS, Config, load_config
from zcactor.objectstore.groups import default_capacity
from zcactor.transport.verbs.device.sizing import CQE_OF_PEER, pinned_nbytes
from zcactor.transport.verbs.driver.base import Gid
from zcactor.transport.verbs.driver.codes import LinkLayer, PortState
from zcactor.transport.verbs.driver.fake import FakeFabric


def transport(report: Report, name: str) -> Transport:
    """The report's entry for one transport."""
    (found,) = (one for one in report.transports if one.name == name)
    return found


# ---- settings and the store


def test_every_setting_with_its_source(look: Look) -> None:
    report = look(recv_depth=99)
    assert [setting.name for setting in report.settings] == [field.name for field in fields(Config)]
    assert Setting("recv_depth", 99, "argument") in report.settings
    assert Setting("store_capacity", None, "default") in report.settings
    assert report.version == zcactor.__version__


def test_store(look: Look) -> None:
    store = look(memlock=64 << 20).store
    assert store.memory == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert (store.group, store.group_from) == (None, "")
    assert store.capacity == default_capacity([])
    assert store.capacity_from == "30 % of memory"
    assert store.memlock == 64 << 20
    assert (store.huge_pages, store.huge_pages_fix) == ("advise", "")


def test_store_in_a_control_group(tmp_path: Path) -> None:
    (group,) = groups_of(tmp_path, {"job": Usage(limit=300 << 20)})
    config, sources = load_config(environ={}, directory=tmp_path, user_directory=tmp_path)
    store = examine(config, sources, binding=FakeFabric().binding(), groups=[group]).store
    assert (store.group, store.group_from) == (300 << 20, str(group.folder / "memory.max"))
    assert store.capacity == default_capacity([group]) == 90 << 20


def test_store_of_a_chosen_capacity(look: Look) -> None:
    store = look(store_capacity=1 << 30).store
    assert (store.capacity, store.capacity_from) == (1 << 30, "argument")


@pytest.mark.parametrize(
    ("text", "chosen", "fix"),
    [("always [never] deny", "never", "echo advise > "), ("[always] never", "always", ""), (None, "", "kernel")],
)
def test_huge_pages(tmp_path: Path, look: Look, text: str | None, chosen: str, fix: str) -> None:
    path = tmp_path / "setting"
    if text is not None:
        path.write_text(text)
    config, sources = load_config(environ={}, directory=tmp_path, user_directory=tmp_path)
    binding = FakeFabric().binding()
    store = examine(config, sources, binding=binding, huge_pages=path).store
    assert store.huge_pages == chosen
    assert fix in store.huge_pages_fix
    assert bool(fix) == bool(store.huge_pages_fix)


# ---- RDMA


def test_no_binding(look: Look) -> None:
    report = look()
    assert report.rdma.binding == ""
    assert [reason.binding for reason in report.rdma.missing] == ["pyverbs", "ibverbs"]
    assert report.rdma.devices == ()
    assert not report.rdma.verdict.works
    verbs = transport(report, "verbs")
    assert not verbs.usable
    assert "this kernel has no RDMA" in verbs.reason
    assert verbs.fix == "apt install"
    assert report.usable
    assert report.same_host == "local"


def test_rdma_switched_off(tmp_path: Path) -> None:
    config, sources = load_config({"verbs": "off"}, environ={}, directory=tmp_path, user_directory=tmp_path)
    report = examine(config, sources)
    assert [reason.binding for reason in report.rdma.missing] == ["none"]


def test_no_device(look: Look, fabric: FakeFabric) -> None:
    report = look(fabric.binding())
    assert (report.rdma.binding, report.rdma.missing, report.rdma.devices) == ("fake", (), ())
    assert "no RDMA device" in report.rdma.verdict.reason


def test_a_good_device(look: Look, fabric: FakeFabric) -> None:
    nic = fabric.add_nic("mlx5_0", "10.0.0.1")
    nic.gids = (*nic.gids, Gid(2, ipaddress.ip_address("2001:db8::1").packed, False))
    binding = fabric.binding()
    report = look(binding, host="0.0.0.0")
    (device,) = report.rdma.devices
    assert (device.name, device.attributes, device.problem) == ("mlx5_0", nic.attributes, "")
    gids = (
        GidInfo(0, "fe80::5054:ff:fe12:3456", "RoCE v2", "eth0"),
        GidInfo(1, "10.0.0.1", "RoCE v2", "eth0"),
        GidInfo(2, "2001:db8::1", "RoCE v1", ""),
    )
    assert device.ports == (PortInfo(1, "ACTIVE", "Ethernet", 4096, 8 << 20, 0, gids),)
    verdict = report.rdma.verdict
    assert (verdict.works, verdict.device, verdict.port) == (True, "mlx5_0", 1)
    assert (verdict.gid_index, verdict.address, verdict.reason) == (1, "10.0.0.1", "")
    assert verdict.needed == pinned_nbytes(report.store.capacity)
    assert verdict.peers == nic.attributes.max_cqe // CQE_OF_PEER > 0
    assert transport(report, "verbs").reason == "a READ through mlx5_0 port 1 with GID 1 (10.0.0.1) was done"
    assert (report.same_host, report.other_host, report.other_host_fix) == ("local", "verbs", "")
    assert all(opened.closed for opened in binding.opened)


def test_infiniband(look: Look, fabric: FakeFabric) -> None:
    fabric.add_nic("ib0", link_layer=LinkLayer.INFINIBAND)
    report = look(fabric.binding())
    (port,) = report.rdma.devices[0].ports
    assert (port.link_layer, port.lid, [gid.kind for gid in port.gids]) == ("InfiniBand", 1, ["InfiniBand"])
    assert (report.rdma.verdict.works, report.rdma.verdict.gid_index) == (True, None)
    assert "with its LID" in transport(report, "verbs").reason


def test_port_is_down(look: Look, fabric: FakeFabric) -> None:
    fabric.add_nic("mlx5_0", state=PortState.DOWN)
    report = look(fabric.binding())
    assert report.rdma.devices[0].ports[0].state == "DOWN"
    assert "port 1 is DOWN" in report.rdma.verdict.reason
    assert "ip link set" in report.rdma.verdict.fix


def test_low_memlock(look: Look, fabric: FakeFabric) -> None:
    fabric.add_nic("mlx5_0")
    report = look(fabric.binding(), 8 << 20, host="0.0.0.0")
    assert "RLIMIT_MEMLOCK is 8,388,608 bytes" in transport(report, "verbs").reason
    assert "ulimit -l unlimited" in transport(report, "verbs").fix
    assert report.other_host == "tcp"
    assert look(fabric.binding(), 8 << 20, store_capacity=1 << 20).rdma.verdict.works


def test_no_gid(look: Look, fabric: FakeFabric) -> None:
    nic = fabric.add_nic("mlx5_0")
    nic.gids = ()
    report = look(fabric.binding())
    assert report.rdma.devices[0].ports[0].gids == ()
    assert "no usable RoCE v2 GID" in report.rdma.verdict.reason


def test_two_devices(look: Look, fabric: FakeFabric) -> None:
    fabric.add_nic("a", "10.0.0.1", state=PortState.DOWN)
    fabric.add_nic("b", "10.0.0.2")
    report = look(fabric.binding())
    assert [device.name for device in report.rdma.devices] == ["a", "b"]
    assert (report.rdma.verdict.works, report.rdma.verdict.device) == (True, "b")
    named = look(fabric.binding(), verbs="a")
    assert len(named.rdma.devices) == 2
    assert "a port 1 is DOWN" in named.rdma.verdict.reason
    assert "with index 7" in look(fabric.binding(), verbs="b::7").rdma.verdict.reason


def test_further_ports_are_named(look: Look, fabric: FakeFabric) -> None:
    for name in "abc":
        fabric.add_nic(name)
    fabric.nics["b"].set_active(False)
    verdict = look(fabric.binding()).rdma.verdict
    assert (verdict.device, verdict.further) == ("a", ("c port 1",))
    assert look(fabric.binding(), verbs="c").rdma.verdict.further == ()


def test_a_device_that_fails_half_way(look: Look, fabric: FakeFabric) -> None:
    nic = fabric.add_nic("mlx5_0")
    nic.attributes = replace(nic.attributes, ports=2)  # the second port cannot be queried
    (device,) = look(fabric.binding()).rdma.devices
    assert device.attributes == nic.attributes
    assert [port.number for port in device.ports] == [1]
    assert device.problem


def test_unknown_port_state(look: Look, fabric: FakeFabric) -> None:
    nic = fabric.add_nic("mlx5_0")
    nic.port = replace(nic.port, state=9)
    assert look(fabric.binding()).rdma.devices[0].ports[0].state == "9"


# ---- transports


def test_order_is_the_configured_one(look: Look, fabric: FakeFabric) -> None:
    fabric.add_nic("mlx5_0")
    report = look(fabric.binding(), transports="tcp,verbs", host="0.0.0.0")
    assert [one.name for one in report.transports] == ["tcp", "verbs", "local"]
    assert [one.usable for one in report.transports] == [True, True, False]
    assert transport(report, "local").fix == "add local to ZCACTOR_TRANSPORTS"
    assert (report.same_host, report.other_host) == ("tcp", "tcp")


def test_a_further_transport_is_listed_in_its_place(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSPORTS, "pipes", TRANSPORTS["local"])
    report = look(NO_BINDING, transports="pipes,tcp", host="0.0.0.0")
    assert [one.name for one in report.transports] == ["pipes", "tcp", "local", "verbs"]
    assert "no check" in transport(report, "pipes").reason
    assert (report.same_host, report.other_host) == ("pipes", "tcp")


def test_a_loopback_host_is_reached_by_nobody_else(look: Look, fabric: FakeFabric) -> None:
    fabric.add_nic("mlx5_0")
    report = look(fabric.binding())
    assert transport(report, "verbs").usable
    assert transport(report, "tcp").usable
    assert report.other_host == ""
    assert report.other_host_fix.startswith("host = 127.0.0.1 is reached from this host only")


def test_a_host_of_somebody_else(look: Look, fabric: FakeFabric) -> None:
    fabric.add_nic("mlx5_0")
    report = look(fabric.binding(), host="192.0.2.1")  # RFC 5737: no host has this address
    for name in ("verbs", "tcp"):
        assert not transport(report, name).usable
        assert "cannot listen at 192.0.2.1" in transport(report, name).reason
    assert (report.same_host, report.other_host) == ("local", "")
    assert "ZCACTOR_HOST" in report.other_host_fix


def test_tls(look: Look, fabric: FakeFabric, tmp_path: Path) -> None:
    fabric.add_nic("mlx5_0")
    folder = Authority().folder(tmp_path / "tls")
    report = look(fabric.binding(), security=f"tls:{folder}")
    assert not transport(report, "verbs").usable
    assert transport(report, "verbs").reason == "security is TLS, and bytes by RDMA cannot be encrypted"
    assert transport(report, "tcp").reason == "can listen at 127.0.0.1 by TLS, arrays are received in place"
    (folder / "key.pem").chmod(0o644)
    tcp = transport(look(fabric.binding(), security=f"tls:{folder}"), "tcp")
    assert not tcp.usable and "mode 0644" in tcp.reason


def test_a_certificate_that_ends(look: Look, fabric: FakeFabric, tmp_path: Path) -> None:
    soon, over = (Authority().folder(tmp_path / name, ends_in=days * DAY) for name, days in (("soon", 3), ("over", -1)))
    tcp = transport(look(fabric.binding(), security=f"tls:{soon}"), "tcp")
    day = datetime.now(UTC) + 3 * DAY
    assert tcp.usable and f"{soon}/cert.pem ends on {day:%Y-%m-%d}" in tcp.reason
    tcp = transport(look(fabric.binding(), security=f"tls:{over}"), "tcp")
    day = datetime.now(UTC) - DAY
    assert not tcp.usable and f"{over}/cert.pem has ended on {day:%Y-%m-%d}" in tcp.reason
    assert tcp.fix == "put a new certificate there"


def test_only_local(look: Look) -> None:
    report = look(transports="local")
    assert (report.same_host, report.other_host, report.usable) == ("local", "", True)
    assert report.other_host_fix == "add tcp to ZCACTOR_TRANSPORTS"


def test_nothing_usable(look: Look, fabric: FakeFabric) -> None:
    report = look(fabric.binding(), transports="verbs")
    assert not report.usable
    assert (report.same_host, report.other_host) == ("", "")


def test_no_directory_for_sockets(look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("zcactor.cli.doctor.base_directory", lambda: tmp_path / "missing")
    local = transport(look(), "local")
    assert not local.usable
    assert "XDG_RUNTIME_DIR" in local.fix

    def nowhere() -> Path:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("zcactor.cli.doctor.base_directory", nowhere)
    assert "No usable temporary directory" in transport(look(), "local").reason


# ---- bytecode


def test_a_package_that_each_process_compiles_anew(tmp_path: Path) -> None:
    module = tmp_path / "__init__.py"
    module.write_text("")
    assert bytecode_fix(tmp_path, writes=True) == ""
    assert bytecode_fix(tmp_path, writes=False) == f"python -m compileall {tmp_path}"
    assert compileall.compile_dir(tmp_path, quiet=1)
    assert bytecode_fix(tmp_path, writes=False) == ""


# ---- JSON


def test_plain_is_json(look: Look, fabric: FakeFabric) -> None:
    fabric.add_nic("mlx5_0")
    report = look(fabric.binding())
    plain = report.plain()
    assert json.loads(json.dumps(plain, allow_nan=False))["usable"] is True
    assert plain["rdma"]["devices"][0]["attributes"]["max_srq_wr"] == 32768
    assert plain["rdma"]["devices"][0]["ports"][0]["gids"][1]["address"] == "10.77.0.1"
    assert json.loads(json.dumps(look().plain()))["rdma"]["missing"][0]["binding"] == "pyverbs"


def test_the_machine_that_lacks_a_call_is_not_usable(tmp_path: Path) -> None:
    sources = {field.name: "default" for field in fields(Config)}
    found = examine(
        Config(), sources, binding=NO_BINDING, groups=(), gpus=lambda config: look_at_gpus(config, tmp_path),
        calls=lambda: ["memfd_create(2) fails here: [so]"],
    )  # fmt: skip
    assert found.machine.missing_calls == ("memfd_create(2) fails here: [so]",)
    assert not found.usable


def test_a_folder_that_cannot_be_used_is_named(look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert look().machine.folders == ()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    (sentence,) = look().machine.folders
    assert sentence == (
        f"{tmp_path}/file/zcactor cannot be used, as {tmp_path}/file is a file: set XDG_STATE_HOME to a folder of yours"
    )


def test_notes_about_cards(tmp_path: Path) -> None:
    (old,) = card_notes("5.10.0-28-amd64", {}, tmp_path)
    assert "Linux 5.10.0-28-amd64" in old and "RDMAV_FORK_SAFE=1" in old
    assert card_notes("5.10.0-28-amd64", {"RDMAV_FORK_SAFE": "1"}, tmp_path) == ()
    assert card_notes("5.12.0", {}, tmp_path) == card_notes("6.1.0-56-amd64", {}, tmp_path) == ()
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/gpus/0000:05:00.0").mkdir(parents=True)
    strict, unused = card_notes("6.1.0", {}, tmp_path)
    assert "strict order" in strict and "nvidia-peermem is loaded, and not used" in unused
