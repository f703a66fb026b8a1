"""Reports as text."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from tests.cli.conftest import Look
from zcactor.cli.doctor import Report, Setting
from zcactor.cli.gpus import GpuFinding, Gpus
from zcactor.cli.render import nbytes, render
from zcactor.transport.verbs.driver.fake import FakeFabric


def text(report: Report, width: int = 200) -> str:
    """The report as printed into a file, with runs of blanks shortened to one."""
    output = io.StringIO()
    render(report, Console(file=output, width=width, highlight=False))
    return "\n".join(" ".join(line.split()) for line in output.getvalue().splitlines())


def has(shown: str, *parts: str) -> None:
    """Check that the text has each of `parts`."""
    for part in parts:
        assert part in shown, part


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (None, "unlimited"),
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (1024, "1 KiB"),
        (65536 * 3 // 2, "96 KiB"),
        (1610612736, "1.5 GiB"),
        (10 << 40, "10 TiB"),
        (1 << 60, "1048576 TiB"),
    ],
)
def test_nbytes(count: int | None, expected: str) -> None:
    assert nbytes(count) == expected


def test_without_rdma(look: Look) -> None:
    shown = text(look(recv_depth=99))
    has(
        shown,
        "zcactor ",
        "setting value source",
        "recv_depth 99 argument",
        "store_capacity - default",
        "control group unlimited",
        "30 % of memory",
        "huge pages advise",
        "pinned memory unlimited RLIMIT_MEMLOCK",
        "binding none",
        "works no",
        "pyverbs not installed apt install",
        "ibverbs this kernel has no RDMA modprobe rdma_rxe",
        "local yes sockets in",
        "verbs no pyverbs: not installed",
        "tcp yes can listen at 127.0.0.1",
        "peers on this host get local",
        "peers on other hosts get none; host = 127.0.0.1 is reached from this host only",
    )


def test_the_verdict_comes_first(look: Look) -> None:
    report = look()
    works = "zcactor works here: arrays on this host go by reference, "
    assert text(report).startswith(f"{works}other hosts do not reach it\n")
    lacking = replace(report, machine=replace(report.machine, missing_calls=("memfd_create(2) fails here",)))
    assert text(lacking).startswith("zcactor does not run here\nmemfd_create(2) fails here\n")
    reached = look(host="0.0.0.0")
    assert text(reached).startswith(f"{works}to other hosts by tcp\n")


def test_with_a_device(look: Look, fabric: FakeFabric) -> None:
    fabric.add_nic("mlx5_0", "10.0.0.1")
    shown = text(look(fabric.binding(), host="0.0.0.0"))
    has(
        shown,
        "binding fake",
        "works yes",
        "chosen mlx5_0 port 1, GID 1 (10.0.0.1); a READ through it was proven",
        "with one peer: the store, its slots, and what all peers share",
        "peers 244 at a time in each process, and further ones by the next transport",
        "device mlx5_0",
        "READs at a time max_qp_rd_atom 128, max_qp_init_rd_atom 128",
        "queues max_qp_wr 16,384, max_srq_wr 32,768, max_cqe 32,767",
        "port 1 ACTIVE, Ethernet, MTU 4096, max_msg_sz 8 MiB, LID 0",
        "port GID address type interface",
        "1 1 10.0.0.1 RoCE v2 eth0",
        "verbs yes a READ through mlx5_0 port 1",
        "peers on other hosts get verbs",
    )


def test_with_a_device_that_does_not_work(look: Look, fabric: FakeFabric) -> None:
    nic = fabric.add_nic("mlx5_0")
    nic.attributes = replace(nic.attributes, ports=2)
    nic.gids = ()
    nic.set_active(False)
    shown = text(look(fabric.binding()))
    has(shown, "works no", "reason mlx5_0 port 1 is DOWN", "fix connect the cable", "problem [Errno", "port 1 DOWN")
    assert "GID address" not in shown


def test_nothing_usable(look: Look) -> None:
    shown = text(look(transports="verbs"))
    assert "peers on this host get none" in shown
    assert "peers on other hosts get none; add tcp to ZCACTOR_TRANSPORTS" in shown


def test_a_package_without_bytecode(look: Look) -> None:
    shown = text(replace(look(), bytecode_fix="python -m compileall zcactor"))
    has(shown, "PYTHONDONTWRITEBYTECODE is set, or the package's folder", "Once: python -m compileall zcactor")
    assert "PYTHONDONTWRITEBYTECODE" not in text(replace(look(), bytecode_fix=""))


def test_nothing_is_cut_off_or_taken_for_markup(look: Look) -> None:
    odd = Setting("namespace", "[red]:smile:[/red]", "/a/very/long/path/" * 20 + "zcactor.toml")
    report = look()
    shown = text(replace(report, settings=(odd,)), width=60)
    assert "[red]:smile:[/red]" in shown
    assert "…" not in shown
    assert "zcactor.toml" in shown.replace("\n", "").replace(" ", "")


def test_gpus(look: Look) -> None:
    found = GpuFinding(
        0, "GPU-a", "a GPU", 2 << 30, 1 << 30, "descriptors", True, True, False, "mapped", True, "", ""
    )  # fmt: skip
    found = replace(found, card="mlx5_0")
    wrong = replace(found, index=1, path="host", proven=False, readonly_imports=None, reason="garbage", fix="test it")
    wrong = replace(wrong, card="", no_card="RDMA does not work here")
    failed = replace(wrong, index=2, path="", reason="no room", fix="look")
    report = look()
    has(text(report), "GPU arrays", "works no", "reason this machine has no GPU")
    shown = text(replace(report, gpus=Gpus("fake", (found, wrong, failed), ("GPU-a", "GPU-b"), "")))
    has(
        shown,
        "driver fake",
        "for num_gpus GPU-a, GPU-b",
        "cuda:0 GPU-a, a GPU, 2 GiB, 1 GiB of them free",
        "works yes",
        "transfer 64 KiB from another process came out right, over the same memory",
        "memory leaves by descriptors",
        "events are shared yes",
        "imports are read-only yes",
        "dma-buf for cards no",
        "GPUDirect 64 KiB by mlx5_0 came out right both ways; between hosts it is unverified on hardware",
        "GPUDirect RDMA does not work here",
        "transfer 64 KiB from another process came out wrong, through host memory",
        "reason garbage",
        "fix test it",
        "imports are read-only unknown, as nothing was mapped",
        "reason no room",
    )
    assert shown.count("transfer") == 2
    has(text(replace(report, gpus=Gpus("fake", (found,), (), ""))), "for num_gpus none: their number is counted")
