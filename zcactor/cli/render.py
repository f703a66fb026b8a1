"""A `Report` as text: titles, and tables without frames, which a terminal and a file show alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zcactor.sizes import sized

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zcactor.cli.doctor import DeviceInfo, MachineReport, PortInfo, Rdma, Report, StoreReport, Transport
    from zcactor.cli.gpus import GpuFinding, Gpus

__all__ = ["nbytes", "plain_console", "render", "table"]

_LEAST_COLUMNS: Final = 140
"""Columns of output to a file or a pipe, where no window limits it."""

_UNSET = "-"
_PATHS = {"mapped": "over the same memory", "host": "through host memory"}


def plain_console() -> Console:
    """Standard output, where text is shown as it is: brackets of names and IPv6 addresses are no markup, and ``:x:`` is
    no picture."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = max(console.width, _LEAST_COLUMNS)
    return console


def nbytes(count: int | None) -> str:
    """A number of bytes with its unit, None for any number."""
    return "unlimited" if count is None else sized(count)


def table(rows: Iterable[tuple[object, ...]], header: tuple[str, ...] = ()) -> Table:
    """A table whose cells are texts, so that findings are shown as they are: no markup, no colours of numbers, nothing
    cut off."""
    table = Table(box=None, show_header=bool(header), header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    rows = list(rows)
    for number in range(len(rows[0]) if rows else len(header)):
        table.add_column(header[number] if header else "", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return table


def _yes(good: bool) -> Text:
    return Text("yes", "green") if good else Text("no", "red")


def _machine(machine: MachineReport) -> Iterable[tuple[object, ...]]:
    yield "kernel", f"Linux {machine.kernel}", ""
    quota = "" if machine.quota is None else f"control groups pay for {machine.quota:g} at a time"
    yield "processors", str(machine.cpus), quota
    for sentence in machine.missing_calls:
        yield "missing", Text("no", "red"), sentence
    for sentence in machine.folders:
        yield "folder", Text("no", "red"), sentence


def _store(store: StoreReport) -> Iterable[tuple[object, ...]]:
    yield "memory", nbytes(store.memory), ""
    yield "control group", nbytes(store.group), store.group_from
    yield "capacity", nbytes(store.capacity), store.capacity_from
    fix = f"slower for arrays of some MiB; to have them: {store.huge_pages_fix}" if store.huge_pages_fix else ""
    yield "huge pages", store.huge_pages or "none", fix
    hard = "unlimited" if store.descriptors_hard is None else f"{store.descriptors_hard:,}"
    soft = "unlimited" if store.descriptors is None else f"{store.descriptors:,}"
    yield "open files", soft, f"RLIMIT_NOFILE; {hard} are possible"
    yield "pinned memory", nbytes(store.memlock), "RLIMIT_MEMLOCK; only RDMA needs it"


def _rdma(console: Console, rdma: Rdma) -> None:
    rows: list[tuple[object, ...]] = [("binding", rdma.binding or "none")]
    verdict = rdma.verdict
    if verdict.works:
        gid = f", GID {verdict.gid_index} ({verdict.address})" if verdict.address else ", by LID"
        rows.append(("works", Text("yes", "green")))
        rows.append(("chosen", f"{verdict.device} port {verdict.port}{gid}; a READ through it was proven"))
        if verdict.further:
            rows.append(("offered too", ", ".join(verdict.further)))
        rows.append(("pins", f"{nbytes(verdict.needed)} with one peer: the store, its slots, and what all peers share"))
        rows.append(("peers", f"{verdict.peers:,} at a time in each process, and further ones by the next transport"))
    else:
        rows.append(("works", Text("no", "red")))
        if not rdma.missing:  # those reasons have a table of their own
            rows += [("reason", verdict.reason), ("fix", verdict.fix)]
    rows += [("note", note) for note in rdma.notes]
    console.print(table(rows))
    if rdma.missing:
        console.print()
        reasons = [(reason.binding, reason.cause, reason.fix) for reason in rdma.missing]
        console.print(table(reasons, ("binding", "cannot be used", "fix")))
    for device in rdma.devices:
        console.print()
        _device(console, device)


def _device(console: Console, device: DeviceInfo) -> None:
    rows: list[tuple[object, ...]] = [("device", device.name)]
    if device.problem:
        rows.append(("problem", Text(device.problem, "red")))
    found = device.attributes
    if found is not None:
        reads = f"max_qp_rd_atom {found.max_qp_rd_atom}, max_qp_init_rd_atom {found.max_qp_init_rd_atom}"
        queues = f"max_qp_wr {found.max_qp_wr:,}, max_srq_wr {found.max_srq_wr:,}, max_cqe {found.max_cqe:,}"
        rows += [("READs at a time", reads), ("queues", queues)]
    rows += [(f"port {port.number}", _port(port)) for port in device.ports]
    console.print(table(rows))
    gids = [
        (port.number, gid.index, gid.address, gid.kind, gid.interface or _UNSET)
        for port in device.ports
        for gid in port.gids
    ]
    if gids:
        console.print(table(gids, ("port", "GID", "address", "type", "interface")))


def _port(port: PortInfo) -> str:
    limits = f"MTU {port.mtu}, max_msg_sz {nbytes(port.max_msg_sz)}, LID {port.lid}"
    return f"{port.state}, {port.link_layer}, {limits}"


def _gpus(console: Console, gpus: Gpus) -> None:
    if not gpus.driver:
        console.print(table([("works", Text("no", "red")), ("reason", gpus.reason)]))
        return
    given = ", ".join(gpus.offered) or "none: their number is counted, if num_gpus says one"
    console.print(table([("driver", gpus.driver), ("for num_gpus", given)]))
    for gpu in gpus.gpus:
        console.print()
        console.print(table(_gpu(gpu)))


def _gpu(gpu: GpuFinding) -> Iterable[tuple[object, ...]]:
    yield f"cuda:{gpu.index}", f"{gpu.uuid}, {gpu.name}, {nbytes(gpu.total)}, {nbytes(gpu.free)} of them free"
    yield "works", _yes(gpu.proven)
    if gpu.path:
        came = "came out right" if gpu.proven else "came out wrong"
        yield "transfer", f"64 KiB from another process {came}, {_PATHS[gpu.path]}"
    if gpu.reason:
        yield "reason", gpu.reason
        yield "fix", gpu.fix
    yield "memory leaves by", gpu.exports
    yield "events are shared", _yes(gpu.shared_events)
    readonly = Text("unknown, as nothing was mapped") if gpu.readonly_imports is None else _yes(gpu.readonly_imports)
    yield "imports are read-only", readonly
    yield "dma-buf for cards", _yes(gpu.dma_buf)
    proven = f"64 KiB by {gpu.card} came out right both ways; between hosts it is unverified on hardware"
    yield "GPUDirect", proven if gpu.card else gpu.no_card or "unknown"


def _transport(transport: Transport) -> tuple[object, ...]:
    return transport.name, _yes(transport.usable), transport.reason, transport.fix


def render(report: Report, console: Console) -> None:
    """Print the whole report."""

    def title(text: str) -> None:
        console.print()
        console.print(Text(text, "bold"))

    verdict, step = report.verdict
    console.print(Text(verdict, "bold green" if report.usable else "bold red"))
    if step:
        console.print(Text(step))
    console.print()
    console.print(Text(f"zcactor {report.version}", "bold"))
    console.print(Text(f"{report.python} on {report.system}"))
    if report.bytecode_fix:
        why = "PYTHONDONTWRITEBYTECODE is set, or the package's folder cannot be written to"
        console.print(f"{why}, and modules of it are not compiled: every start compiles them anew.")
        console.print(Text(f"Once: {report.bytecode_fix}"))
    title("Configuration")
    settings = [(one.name, _UNSET if one.value is None else one.value, one.source) for one in report.settings]
    console.print(table(settings, ("setting", "value", "source")))
    title("Machine")
    console.print(table(_machine(report.machine)))
    title("Object store")
    console.print(table(_store(report.store)))
    title("RDMA")
    _rdma(console, report.rdma)
    title("GPU arrays")
    _gpus(console, report.gpus)
    title("Transports, in the order of preference")
    console.print(table(map(_transport, report.transports), ("transport", "usable", "why", "fix")))
    console.print()
    other = report.other_host or (f"none; {report.other_host_fix}" if report.other_host_fix else "none")
    rows = [("peers on this host get", report.same_host or "none"), ("peers on other hosts get", other)]
    console.print(table(rows))
