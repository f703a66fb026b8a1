"""The findings of ``python -m zcactor doctor``: the settings, the store's limits, RDMA, GPUs, and which transports can
work.

`examine` looks and returns plain data; it prints nothing, and raises no finding. It opens RDMA devices and one
listening socket, and closes them again. Where there are GPUs it starts a node, and ends it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import platform
import re
import resource
import socket
import struct
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import cache_from_source
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

import zcactor
from zcactor.cli.gpus import look_at_gpus
from zcactor.config import NOT_BY_TLS, TRANSPORTS, rdma_of, security_of
from zcactor.errors import AuthenticationError
from zcactor.folders import folder_problem
from zcactor.machine import cpu_quota, missing_calls, usable_cpus
from zcactor.objectstore.groups import default_capacity, memory_of_machine, own_groups, smallest
from zcactor.transport import registry
from zcactor.transport.stream.tls import ends_soon
from zcactor.transport.verbs.device.viability import NotViable, memlock_limit, viable_ports, wishes
from zcactor.transport.verbs.driver import bindings as drivers
from zcactor.transport.verbs.driver.bindings import Absent, Reason
from zcactor.transport.verbs.driver.codes import LinkLayer, PortState
from zcactor.workers.run_directory import base_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zcactor.cli.gpus import Gpus
    from zcactor.config import Config
    from zcactor.objectstore.groups import MemoryGroup
    from zcactor.transport.verbs.driver.base import Binding, DeviceAttributes, Gid, PortAttributes

__all__ = [
    "DeviceInfo",
    "GidInfo",
    "MachineReport",
    "PortInfo",
    "Rdma",
    "Report",
    "Setting",
    "StoreReport",
    "Transport",
    "Verdict",
    "bytecode_fix",
    "card_notes",
    "examine",
]

_WAYS: Final = {"local": "by reference", "tcp": "over TCP", "verbs": "by RDMA"}
HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_WITH_HUGE_PAGES: Final = frozenset({"always", "within_size", "advise", "force"})


@dataclass(frozen=True, slots=True)
class Setting:
    """One value of the configuration."""

    name: str
    value: str | float | bool | None
    source: str
    """``"default"``, the variable's name or the file's path."""


@dataclass(frozen=True, slots=True)
class MachineReport:
    """The processors, the kernel, and the folders of this user."""

    kernel: str
    cpus: int
    """The processors that this process may use."""
    quota: float | None
    """Processors that its control groups pay for at a time; None where they set no quota."""
    missing_calls: tuple[str, ...]
    """A sentence for each call of the kernel that is needed and fails."""
    folders: tuple[str, ...]
    """A sentence for each folder of the user that cannot be used."""


@dataclass(frozen=True, slots=True)
class StoreReport:
    """The bounds of one process's store."""

    memory: int
    """The memory of the machine, in bytes."""
    group: int | None
    """Bytes that this process's control groups allow at most; None where they set no limit."""
    group_from: str
    """The file that sets the limit; empty without one."""
    capacity: int
    """Bytes one arena may grow to."""
    capacity_from: str
    """``"30 % of memory"``, or the source of the setting."""
    huge_pages: str
    """The kernel's choice for shared memory (``"advise"``); empty where it has no such setting."""
    huge_pages_fix: str
    """The remedy that switches huge pages on; empty where they are on."""
    descriptors: int | None
    """RLIMIT_NOFILE, None for any number; `zc.init` raises it towards `descriptors_hard`."""
    descriptors_hard: int | None
    memlock: int | None
    """Bytes that may be pinned for RDMA: RLIMIT_MEMLOCK, None for any number."""


@dataclass(frozen=True, slots=True)
class GidInfo:
    """One address of a port."""

    index: int
    address: str
    kind: str
    """``"RoCE v1"``, ``"RoCE v2"`` or ``"InfiniBand"``."""
    interface: str
    """The network interface; empty without one."""


@dataclass(frozen=True, slots=True)
class PortInfo:
    """One port of a device."""

    number: int
    state: str
    """The name of the state in `PortState`, or the number of another state."""
    link_layer: str
    mtu: int
    """Bytes."""
    max_msg_sz: int
    """Bytes."""
    lid: int
    """0 on Ethernet."""
    gids: tuple[GidInfo, ...]


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One RDMA device."""

    name: str
    attributes: DeviceAttributes | None
    """None where the device cannot be opened."""
    ports: tuple[PortInfo, ...]
    problem: str
    """The error of looking at the device; empty without one."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on whether RDMA works here."""

    works: bool
    """Whether a READ through the port was done and its bytes were right."""
    device: str
    port: int
    """0 where no port works."""
    gid_index: int | None
    """None where no port works, and on InfiniBand, where the LID is used."""
    address: str
    """The address of that GID."""
    reason: str
    """The reason why RDMA does not work; empty where it works."""
    fix: str
    needed: int = 0
    """Bytes that a process pins with one peer: its arena, the parts that all connections share, and the peer's
    slots."""
    peers: int = 0
    """Peers that a process reaches by RDMA at a time; it reaches further ones by the next allowed transport."""
    further: tuple[str, ...] = ()
    """The other ports that are offered to peers, in this order; each is proven when it is used."""


@dataclass(frozen=True, slots=True)
class Rdma:
    """The RDMA devices and the verdict on them."""

    binding: str
    """The binding of libibverbs; empty where none can be used."""
    missing: tuple[Reason, ...]
    """The reason against each of the bindings that were tried, where no binding can be used."""
    devices: tuple[DeviceInfo, ...]
    verdict: Verdict
    notes: tuple[str, ...] = ()
    """A sentence for each fact of this host that matters to its cards and is no reason against them."""


@dataclass(frozen=True, slots=True)
class Transport:
    """One way to reach a peer."""

    name: str
    usable: bool
    """Whether the transport is configured, and this host has the means for it."""
    reason: str
    """The finding, or why the transport is not usable."""
    fix: str
    """Empty where it is usable."""


@dataclass(frozen=True, slots=True)
class Report:
    """The whole report."""

    version: str
    python: str
    system: str
    settings: tuple[Setting, ...]
    machine: MachineReport
    store: StoreReport
    rdma: Rdma
    gpus: Gpus
    transports: tuple[Transport, ...]
    """The configured ones, in their order, then the others."""
    same_host: str
    """The transport to a peer on this host; empty for none."""
    other_host: str
    """The transport to a peer on another host, if that host has it too; empty for none."""
    other_host_fix: str
    """The remedy that would let peers on other hosts in; empty where they come in."""
    bytecode_fix: str
    """The command that spares each process the compiling of the package; empty where its modules are compiled."""

    @property
    def usable(self) -> bool:
        """Whether any transport is usable, and the kernel has what is needed."""
        return any(transport.usable for transport in self.transports) and not self.machine.missing_calls

    @property
    def verdict(self) -> tuple[str, str]:
        """The verdict on this machine in one sentence, and the next step; that is empty where there is none to take."""
        if self.machine.missing_calls:
            return "zcactor does not run here", self.machine.missing_calls[0]
        if not self.usable:
            first = self.transports[0]
            return f"no transport works here: {first.name}: {first.reason}", first.fix
        ways = [f"arrays on this host go {_WAYS.get(self.same_host, f'by {self.same_host}')}"]
        ways.append(f"to other hosts by {self.other_host}" if self.other_host else "other hosts do not reach it")
        if self.gpus.gpus:
            proven = sum(gpu.proven for gpu in self.gpus.gpus)
            ways.append(f"{proven} of {len(self.gpus.gpus)} GPUs work")
        return f"zcactor works here: {', '.join(ways)}", ""

    def plain(self) -> dict[str, Any]:
        """The report in the types of JSON: numbers, strings, lists and dictionaries, with the attributes' names."""
        return {**msgspec.to_builtins(self), "usable": self.usable}


def _setting(config: Config, name: str, source: str) -> Setting:
    return Setting(name, getattr(config, name), source)


def _machine(environ: Mapping[str, str], calls: Callable[[], Sequence[str]]) -> MachineReport:
    return MachineReport(
        platform.release(), usable_cpus(), cpu_quota(), tuple(calls()),
        tuple(text for kind in ("config", "state") if (text := folder_problem(kind, environ))),
    )  # fmt: skip


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _store(
    config: Config, source: str, huge_pages: Path, memlock: Callable[[], int | None], groups: Sequence[MemoryGroup]
) -> StoreReport:
    tightest = smallest(groups)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        chosen = huge_pages.read_text().partition("[")[2].partition("]")[0]
    except OSError:  # a kernel without transparent huge pages, or a container that hides them
        chosen = ""
    fix = "" if chosen in _WITH_HUGE_PAGES else f"echo advise > {huge_pages}" if chosen else "a kernel that has them"
    return StoreReport(
        memory_of_machine(),
        None if tightest is None else tightest.limit,
        "" if tightest is None else tightest.paths[0],
        config.store_capacity or default_capacity(groups),
        source if config.store_capacity else "30 % of memory",
        chosen,
        fix,
        _limit(soft),
        _limit(hard),
        memlock(),
    )


def _gid(gid: Gid, link_layer: int) -> GidInfo:
    kind = "RoCE v2" if gid.roce_v2 else "RoCE v1" if link_layer == LinkLayer.ETHERNET else "InfiniBand"
    return GidInfo(gid.index, gid.address, kind, gid.netdev)


def _port(port: PortAttributes, gids: Sequence[Gid]) -> PortInfo:
    states = {state.value: state.name for state in PortState}
    return PortInfo(
        port.port,
        states.get(port.state, str(port.state)),
        "Ethernet" if port.link_layer == LinkLayer.ETHERNET else "InfiniBand",
        128 << port.active_mtu,  # enum ibv_mtu: 1 is 256 bytes
        port.max_msg_sz,
        port.lid,
        tuple(_gid(gid, port.link_layer) for gid in gids),
    )


def _device(binding: Binding, name: str) -> DeviceInfo:
    """The facts that `name` reports about itself, as far as they can be read."""
    attributes: DeviceAttributes | None = None
    ports: list[PortInfo] = []
    try:
        with contextlib.closing(binding.open(name)) as device:
            attributes = device.attributes
            ports.extend(_port(device.port(n), device.gids(n)) for n in range(1, attributes.ports + 1))
    except OSError as error:
        return DeviceInfo(name, attributes, tuple(ports), str(error))
    return DeviceInfo(name, attributes, tuple(ports), "")


def card_notes(kernel: str, environ: Mapping[str, str], root: Path = Path("/")) -> tuple[str, ...]:
    """A sentence for each fact of this host that matters to its RDMA cards.

    Args:
        kernel: the release of the kernel, such as ``"5.10.0-28-amd64"``.
        environ: the environment of this process.
        root: the folder of ``proc`` and ``sys``.
    """
    notes = []
    numbers = [int(part) for part in re.findall(r"\d+", kernel)[:2]]
    if numbers < [5, 12] and not environ.keys() & {"RDMAV_FORK_SAFE", "IBV_FORK_SAFE"}:
        notes.append(
            f"Linux {kernel} gives a process that forks copies of pages that its card uses (before 5.12), which breaks "
            "the queues of the card's driver: set RDMAV_FORK_SAFE=1 for all processes, or fork none that uses RDMA"
        )
    with contextlib.suppress(OSError):  # no GPU of NVIDIA's
        if any((root / "proc/driver/nvidia/gpus").iterdir()):
            notes.append(
                "memory of GPUs is registered in PCI's strict order, as otherwise a READ may end before its bytes are "
                "there; hosts that are tuned for relaxed ordering are slower by this path than NCCL is"
            )
    if (root / "sys/module/nvidia_peermem").exists():
        notes.append(
            "nvidia-peermem is loaded, and not used: memory of GPUs is registered by dma-buf, which needs Linux 5.12 "
            "and NVIDIA's open kernel modules"
        )
    return tuple(notes)


def _rdma(config: Config, binding: Binding | Absent, arena_nbytes: int, memlock: Callable[[], int | None]) -> Rdma:
    answer = viable_ports(binding, arena_nbytes=arena_nbytes, memlock=memlock, **wishes(config))
    if isinstance(answer, NotViable):
        verdict = Verdict(False, "", 0, None, "", answer.reason, answer.fix)
    else:
        first, *others = answer
        index, address = (None, "") if first.gid is None else (first.gid.index, first.gid.address)
        further = tuple(f"{one.device} port {one.port.port}" for one in others)
        verdict = Verdict(
            True, first.device, first.port.port, index, address, "", "", first.needed, first.peers, further
        )
    if isinstance(binding, Absent):
        return Rdma("", binding.reasons, (), verdict)
    devices: list[DeviceInfo] = []
    with contextlib.suppress(OSError):  # the verdict names it
        devices.extend(_device(binding, name) for name in binding.devices())
    return Rdma(binding.name, (), tuple(devices), verdict, card_notes(platform.release(), os.environ))


def _listening_problem(host: str) -> str:
    """The reason why this process cannot listen at `host`; empty when it can."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind((host, 0))
    except OSError as error:
        return f"cannot listen at {host}: {error.strerror}"
    return ""


def _local() -> Transport:
    try:
        base = base_directory()
    except OSError as error:
        return Transport("local", False, f"no directory for sockets: {error}", "set XDG_RUNTIME_DIR to one of yours")
    if os.access(base, os.W_OK | os.X_OK):
        return Transport("local", True, f"sockets in {base}, arrays are mapped", "")
    return Transport("local", False, f"{base} cannot be written to", "set XDG_RUNTIME_DIR to a directory of yours")


def _tcp(config: Config) -> Transport:
    host = config.host
    problem = _listening_problem(host)
    if problem:
        return Transport("tcp", False, problem, "set ZCACTOR_HOST to an address of this host (ip addr)")
    try:
        tls = registry.tls_of(config)
    except AuthenticationError as error:
        return Transport("tcp", False, str(error), "put the files there that tls needs, or unset it")
    by_tls, ending = "", ""
    if tls is not None:
        by_tls, ending = " by TLS", ends_soon(tls.ends)
        if ending and tls.ends <= datetime.now(UTC):
            return Transport("tcp", False, f"the certificate {tls.cert} {ending}", "put a new certificate there")
        ending = ending and f"; the certificate {tls.cert} {ending}, put a new one there"
    return Transport("tcp", True, f"can listen at {host}{by_tls}, arrays are received in place{ending}", "")


def _verbs(verdict: Verdict, tcp: Transport) -> Transport:
    """The RDMA transport. Its connections are made over a socket, so what TCP lacks RDMA lacks as well."""
    if not verdict.works:
        return Transport("verbs", False, verdict.reason, verdict.fix)
    if not tcp.usable:
        return Transport("verbs", False, tcp.reason, tcp.fix)
    with_gid = f" with GID {verdict.gid_index} ({verdict.address})" if verdict.address else " with its LID"
    return Transport("verbs", True, f"a READ through {verdict.device} port {verdict.port}{with_gid} was done", "")


def _transports(config: Config, verdict: Verdict) -> tuple[Transport, ...]:
    wanted = config.transports.split(",")
    tcp = _tcp(config)
    verbs = _verbs(verdict, tcp)
    if security_of(config.security).tls is not None:
        verbs = Transport("verbs", False, NOT_BY_TLS, "unset security to use RDMA")
    found = {"local": _local(), "verbs": verbs, "tcp": tcp}
    left_out = [
        Transport(name, False, f"not among transports = {config.transports}", f"add {name} to ZCACTOR_TRANSPORTS")
        for name in TRANSPORTS
        if name not in wanted
    ]
    for name in wanted:
        found.setdefault(name, Transport(name, True, "registered, and this program has no check of it", ""))
    return (*(found[name] for name in wanted), *left_out)


def bytecode_fix(package: Path, writes: bool) -> str:
    """The remedy where every process compiles the package's modules anew; empty where none has to.

    Args:
        package: the package's folder.
        writes: whether the interpreter keeps compiled modules; PYTHONDONTWRITEBYTECODE forbids it, and so does a folder
            that this user cannot write to.
    """
    if writes or all(map(_is_compiled, package.rglob("*.py"))):
        return ""
    return f"python -m compileall {package}"


def _is_compiled(source: Path) -> bool:
    """Whether the interpreter finds a compiled module that is as old as its source (PEP 552, without hashes)."""
    try:
        header = Path(cache_from_source(str(source))).read_bytes()[:16]
    except OSError:
        return False
    status = source.stat()
    flags, *facts = struct.unpack("<III", header[4:]) if len(header) == 16 else (0, 0, 0)
    return bool(flags) or facts == [int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF]


def examine(
    config: Config,
    sources: Mapping[str, str],
    *,
    binding: Binding | Absent | None = None,
    memlock: Callable[[], int | None] = memlock_limit,
    huge_pages: Path = HUGE_PAGES,
    groups: Sequence[MemoryGroup] | None = None,
    gpus: Callable[[Config], Gpus] | None = None,
    calls: Callable[[], Sequence[str]] = missing_calls,
) -> Report:
    """Look at this host.

    Args:
        config: as `load_config` returns it.
        sources: the sources of the settings, as `load_config` returns them.
        binding: of libibverbs; None looks for the one that `config` names.
        memlock: bytes that may be pinned, None for any number.
        huge_pages: the kernel's setting for shared memory.
        groups: the control groups that bound our memory; None looks for them.
        gpus: looks at the GPUs; None for `look_at_gpus`.
        calls: tries the calls of the kernel.
    """
    if binding is None:
        binding = drivers.bindings(rdma_of(config.verbs).binding)
    store = _store(config, sources["store_capacity"], huge_pages, memlock, own_groups() if groups is None else groups)
    rdma = _rdma(config, binding, store.capacity, memlock)
    transports = _transports(config, rdma.verdict)
    package = Path(zcactor.__file__).parent
    usable = [transport.name for transport in transports if transport.usable]
    between_hosts = [name for name in usable if not registry.transport(name).by_name]
    fix = "" if between_hosts else next(transport.fix for transport in transports if transport.name == "tcp")
    if between_hosts and ipaddress.ip_address(config.host).is_loopback:
        between_hosts = []
        fix = f"host = {config.host} is reached from this host only: set ZCACTOR_HOST to an address that they reach"
    return Report(
        zcactor.__version__,
        f"{platform.python_implementation()} {platform.python_version()}",
        platform.platform(),
        tuple(_setting(config, name, source) for name, source in sources.items()),
        _machine(os.environ, calls),
        store,
        rdma,
        look_at_gpus(config, binding=binding) if gpus is None else gpus(config),
        transports,
        next(iter(usable), ""),
        next(iter(between_hosts), ""),
        fix,
        bytecode_fix(package, not sys.dont_write_bytecode and os.access(package, os.W_OK)),
    )
