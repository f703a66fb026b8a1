"""The table of addresses, from files that look like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from zcactor.transport.verbs.driver.base import Gid
from zcactor.transport.verbs.driver.sysfs import gid_table, nearness, partition_key, speaks_iwarp


def make_port(root: Path, entries: dict[int, tuple[str, str, str]]) -> None:
    """Make port 1 of rxe0 with entries of address, type and interface."""
    base = root / "rxe0" / "ports" / "1"
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (base / folder).mkdir(parents=True)
    for index, (gid, kind, netdev) in entries.items():
        (base / "gids" / str(index)).write_text(gid + "\n")
        if kind:  # the kernel answers EINVAL for unused entries; here the file is missing
            (base / "gid_attrs" / "types" / str(index)).write_text(kind + "\n")
            (base / "gid_attrs" / "ndevs" / str(index)).write_text(netdev + "\n")


def test_table(tmp_path: Path) -> None:
    zero = ":".join(["0000"] * 8)
    make_port(
        tmp_path,
        {
            10: ("0000:0000:0000:0000:0000:ffff:0a4d:0001", "RoCE v2", "eth0"),
            2: ("0000:0000:0000:0000:0000:ffff:0a4d:0001", "IB/RoCE v1", "eth0"),
            0: ("fe80:0000:0000:0000:5054:00ff:fe12:3456", "RoCE v2", "eth0"),
            3: (zero, "", ""),
            4: ("fe80:0000:0000:0000:0000:0000:0000:0001", "", ""),
        },
    )
    table = gid_table("rxe0", 1, tmp_path)
    assert [(gid.index, gid.address, gid.roce_v2, gid.netdev) for gid in table] == [
        (0, "fe80::5054:ff:fe12:3456", True, "eth0"),
        (2, "10.77.0.1", False, "eth0"),
        (4, "fe80::1", False, ""),
        (10, "10.77.0.1", True, "eth0"),
    ]
    assert isinstance(table[0], Gid)


def test_keys_of_partitions(tmp_path: Path) -> None:
    keys = tmp_path / "mlx5_0" / "ports" / "1" / "pkeys"
    keys.mkdir(parents=True)
    for index, text in enumerate(("0xffff", "0x7ffe", "0x0000")):
        (keys / str(index)).write_text(text + "\n")
    assert [partition_key("mlx5_0", 1, index, tmp_path) for index in range(4)] == [0xFFFF, 0x7FFE, 0, 0]


def test_iwarp(tmp_path: Path) -> None:
    for name, kind in (("irdma0", "4: RNIC"), ("mlx5_0", "1: CA")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "node_type").write_text(kind + "\n")
    assert [speaks_iwarp(name, tmp_path) for name in ("irdma0", "mlx5_0", "none")] == [True, False, False]


def make_pci(root: Path, cards: dict[str, str], gpus: dict[str, str]) -> None:
    """Make cards and GPUs at places of PCI, such as ``"00:01.0/01:00.0"``."""
    base = root / "sys/devices/pci0000:00"
    for name, place in cards.items():
        (base / place).mkdir(parents=True)
        (root / "sys/class/infiniband" / name).mkdir(parents=True)
        (root / "sys/class/infiniband" / name / "device").symlink_to(base / place)
    for uuid, place in gpus.items():
        (base / place).mkdir(parents=True)
        address = place.rpartition("/")[2]
        (root / "sys/bus/pci/devices").mkdir(parents=True, exist_ok=True)
        (root / "sys/bus/pci/devices" / address).symlink_to(base / place)
        facts = root / "proc/driver/nvidia/gpus" / address
        facts.mkdir(parents=True)
        (facts / "information").write_text(f"Model: \t H100\nGPU UUID: \t {uuid}\nDevice Minor: \t 1\n")


CARDS = {"mlx5_0": "00:01.0/01:00.0/02:00.0", "mlx5_1": "00:02.0/03:00.0/04:00.0"}
GPUS = {"GPU-a": "00:01.0/01:00.0/05:00.0", "GPU-b": "00:02.0/03:00.0/06:00.0"}


@pytest.mark.parametrize(("visible", "nearest"), [("GPU-a", "mlx5_0"), ("GPU-b", "mlx5_1"), ("GPU-b,MIG-1", "mlx5_1")])
def test_the_card_behind_the_bridge_of_a_gpu_is_nearest(tmp_path: Path, visible: str, nearest: str) -> None:
    make_pci(tmp_path, CARDS, GPUS)
    found = {name: nearness(name, {"CUDA_VISIBLE_DEVICES": visible}, tmp_path) for name in CARDS}
    assert max(found, key=lambda name: found[name]) == nearest and len(set(found.values())) == 2


def test_no_card_is_nearer_where_the_gpus_are_not_known(tmp_path: Path) -> None:
    make_pci(tmp_path, CARDS, GPUS)
    for environ in ({}, {"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "GPU-c"}):
        assert [nearness(name, environ, tmp_path) for name in CARDS] == [0, 0]
    assert nearness("rxe0", {"CUDA_VISIBLE_DEVICES": "GPU-a"}, tmp_path) == 0


def test_the_only_gpu_needs_no_name(tmp_path: Path) -> None:
    make_pci(tmp_path, CARDS, {"GPU-b": GPUS["GPU-b"]})
    assert nearness("mlx5_1", {}, tmp_path) > nearness("mlx5_0", {}, tmp_path)


def test_missing_port(tmp_path: Path) -> None:
    make_port(tmp_path, {})
    assert gid_table("rxe0", 1, tmp_path) == []
    with pytest.raises(FileNotFoundError):
        gid_table("rxe0", 2, tmp_path)
