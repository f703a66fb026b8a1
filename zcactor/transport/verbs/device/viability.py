"""A check whether RDMA works, as far as one host can find out.

A device and an active port prove little: a wrong GID, a memlock limit or a virtual machine's broken passthrough show
only when bytes move. So the last step is a READ through the adapter from one buffer to another.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import resource
import select
import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from zcactor.config import rdma_of
from zcactor.transport.verbs.device.self_loopback import connect_to_itself
from zcactor.transport.verbs.driver.base import (
    UNMARKED,
    Completion,
    DeviceAttributes,
    Gid,
    Marking,
    PortAttributes,
    Read,
    VerbsError,
)
from zcactor.transport.verbs.driver.bindings import Absent
from zcactor.transport.verbs.driver.codes import (
    DEFAULT_PARTITION,
    FULL_MEMBER,
    CompletionStatus,
    LinkLayer,
    PortState,
    describe_status,
)
from zcactor.transport.verbs.driver.sysfs import nearness

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zcactor.config import Config
    from zcactor.transport.verbs.driver.base import Binding, CompletionQueue, Device

__all__ = [
    "NotViable", "Viable", "choose_gid", "look_again", "memlock_limit", "prove", "viability", "viable_ports",
    "wishes",
]  # fmt: skip

PROOF_NBYTES: Final = 4096
"""Bytes of the proof: a page, and one packet of the largest MTU."""
PROOF_SECONDS: Final = 5.0
"""Seconds of the proof. A READ takes microseconds, and 50 ms in an emulated machine. It does not wait for the device's
own retries (`PathAttributes`, 7.5 s), as no packet to itself is lost."""
_CAP_IPC_LOCK: Final = 14
"""Bit of CapEff in /proc/self/status; capabilities(7). With it the kernel ignores the limit of pinned memory, unless it
is that of a user namespace, as in a rootless container."""
_ALL_USERS: Final = ["0", "0", "4294967295"]
"""The map of user ids of the first user namespace; user_namespaces(7)."""


@dataclass(frozen=True, slots=True)
class Viable:
    """The answer that RDMA works here, through this port."""

    binding: str
    device: str
    port: PortAttributes
    gid: Gid | None
    """The address to send from; None on an InfiniBand port, where the LID is used."""
    attributes: DeviceAttributes
    memlock: int | None = None
    """Bytes that may be pinned; None for any number."""
    needed: int = 0
    """Bytes that are pinned with one peer: the arena, the memory that all connections share, and the peer's slots."""
    peers: int = 0
    """Peers that there is room for at the same time, in the device's queues and in pinned memory."""
    local_address: str = ""
    gid_index: int | None = None
    """The argument of `viability` that chose the address."""
    marking: Marking = UNMARKED
    """The marks of packets."""
    partition: int = DEFAULT_PARTITION
    """The key of the partition that these marks name."""

    @property
    def is_global(self) -> bool:
        """Whether peers are addressed by GID."""
        return self.gid is not None

    @property
    def address(self) -> str:
        """The address that peers use, as text."""
        return f"LID {self.port.lid}" if self.gid is None else f"GID {self.gid.index} ({self.gid.address})"

    def has_address_of(self, other: Viable) -> bool:
        """Whether connections that use `other` can continue: it has the same port and address."""
        if self.gid is None or other.gid is None:
            return self.gid is other.gid and self.port.lid == other.port.lid
        return (self.gid.index, self.gid.raw) == (other.gid.index, other.gid.raw)


@dataclass(frozen=True, slots=True)
class NotViable:
    """The answer that RDMA does not work here."""

    reason: str
    fix: str
    """The remedy for the user."""

    def __str__(self) -> str:
        return f"{self.reason}; {self.fix}"


def memlock_limit(status: Path = Path("/proc/self/status"), uid_map: Path = Path("/proc/self/uid_map")) -> int | None:
    """Return the bytes that this process may pin (RLIMIT_MEMLOCK; getrlimit(2)); None for any number. Never raises."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        if uid_map.exists() and uid_map.read_text().split() != _ALL_USERS:
            raise OSError("a capability of this user namespace does not lift the limit")
        line = next((line for line in status.read_text().splitlines() if line.startswith("CapEff:")), "CapEff: 0")
        if int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1:
            return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _stands_for(gid: Gid, address: str) -> bool:
    """Whether `address` is the IP address of `gid`."""
    try:
        wanted = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # a host name, or empty
        return False
    return ipaddress.ip_address(gid.address) == (getattr(wanted, "ipv4_mapped", None) or wanted)


def choose_gid(gids: Sequence[Gid], local_address: str = "") -> Gid | None:
    """Choose the RoCE v2 entry of `local_address`, otherwise the first that is valid beyond its own link.

    The address is that of the socket through which peers meet: a peer that reaches it reaches the entry as well. A
    wrong entry is the most common failure of RoCE, in all libraries.
    """
    usable = [gid for gid in gids if gid.roce_v2]
    for gid in usable:
        if _stands_for(gid, local_address):
            return gid
    return next((gid for gid in usable if not gid.link_local), None)


def _wait(cq: CompletionQueue, seconds: float, clock: Callable[[], float]) -> Completion | None:
    """Return the next completion; None without one in time."""
    end = clock() + seconds
    poller = select.poll()
    poller.register(cq.fd, select.POLLIN)
    while True:
        cq.drain_events()
        cq.arm()
        found = cq.poll(1)
        if found:
            return found[0]
        left = end - clock()
        if left <= 0:
            return None
        poller.poll(left * 1000)


def prove(
    device: Device,
    port: PortAttributes,
    gid: Gid | None,
    *,
    marking: Marking = UNMARKED,
    seconds: float = PROOF_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> str | None:
    """Make the queue pairs of a connection, and READ one buffer into another through one of them, which is connected to
    itself.

    Returns:
        None when the bytes have arrived, otherwise the failure. All objects that it makes are closed.

    Raises:
        OSError: a verb failed.
        VerbsError: the device's queues are too short for a connection.
    """
    from zcactor.transport.verbs.device.making import make_bulk, make_control  # as in `viability`

    source = ctypes.create_string_buffer(os.urandom(PROOF_NBYTES), PROOF_NBYTES)
    target = ctypes.create_string_buffer(PROOF_NBYTES)
    with contextlib.ExitStack() as stack:  # closes the queue pair before the memory that it may still write to
        from_region = device.register(ctypes.addressof(source), PROOF_NBYTES, remote_read=True)
        stack.callback(from_region.close)
        to_region = device.register(ctypes.addressof(target), PROOF_NBYTES, remote_read=False)
        stack.callback(to_region.close)
        cq = device.create_completion_queue(4)
        stack.callback(cq.close)
        srq = device.create_shared_receive_queue(1)
        stack.callback(srq.close)
        stack.callback(make_control(device, cq, srq).close)
        qp = make_bulk(device, cq)
        stack.callback(qp.close)
        connect_to_itself(qp, device, port, gid, marking)
        qp.post_reads([Read(1, to_region.address, PROOF_NBYTES, to_region.lkey, from_region.address, from_region.rkey)])
        completion = _wait(cq, seconds, clock)
        if completion is None:
            return f"a READ of {PROOF_NBYTES} bytes from itself did not complete in {seconds:g} s"
        if completion.status != CompletionStatus.SUCCESS:
            return f"a READ of {PROOF_NBYTES} bytes from itself failed: {describe_status(completion.status)}"
        if zlib.crc32(source) != zlib.crc32(target):
            return f"a READ of {PROOF_NBYTES} bytes from itself succeeded and delivered other bytes"
    return None


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A port that may be used."""

    device: str
    port: PortAttributes
    gid: Gid | None
    attributes: DeviceAttributes
    exact: bool
    """Whether its GID is that of the local address."""
    partition: int
    near: int = 0
    """See `nearness`."""


def _port_candidate(
    device: Device, number: int, local_address: str, gid_index: int | None, marking: Marking, kept: Gid | None = None
) -> _Candidate | NotViable:
    """Return one port, or the reason against it. It keeps the address `kept`, if the port still has that.

    Raises:
        OSError: the port cannot be queried.
    """
    where = f"{device.name} port {number}"
    if device.iwarp:
        return NotViable(
            f"{where} speaks iWARP, which connects by rdmacm only, and RDMA is used by RoCE v2 and InfiniBand here",
            "switch the card to RoCE, where it can: for Intel's E810, devlink dev param set pci/ADDRESS name "
            "enable_iwarp value false cmode runtime, then enable_roce value true; other iWARP cards are not used",
        )
    port = device.port(number)
    if port.state != PortState.ACTIVE:
        known = {state.value: state.name for state in PortState}
        return NotViable(
            f"{where} is {known.get(port.state, port.state)}, not ACTIVE",
            "connect the cable, set the interface up (ip link set DEV up), run a subnet manager on InfiniBand",
        )
    partition = device.partition_key(number, marking.pkey_index)
    if not partition and not marking.pkey_index and port.link_layer == LinkLayer.ETHERNET:
        partition = DEFAULT_PARTITION  # some kernels list none for RoCE
    if not partition & FULL_MEMBER:
        what = f"only limited membership of partition {partition:#06x}" if partition else "no partition key"
        return NotViable(
            f"{where} has {what} at index {marking.pkey_index}",
            "set pkey_index in verbs to the place of a key from 0x8001 on (grep . /sys/class/infiniband/"
            f"{device.name}/ports/{number}/pkeys/*), or have the subnet manager make the port a full member: limited "
            "members do not reach each other",
        )
    if port.link_layer != LinkLayer.ETHERNET:
        if not port.lid:
            return NotViable(f"{where} has no LID", "run a subnet manager (opensm) on the InfiniBand fabric")
        return _Candidate(device.name, port, None, device.attributes, False, partition)
    gids = device.gids(number)
    if kept is not None and any((gid.index, gid.raw, gid.roce_v2) == (kept.index, kept.raw, True) for gid in gids):
        gid: Gid | None = kept
    elif gid_index is not None:
        gid = next((gid for gid in gids if gid.index == gid_index), None)
    else:
        gid = choose_gid(gids, local_address)
    if gid is None:
        wanted = "" if gid_index is None else f" with index {gid_index}"
        return NotViable(
            f"{where} has no usable RoCE v2 GID{wanted}: {len(gids)} entries",
            "give its network interface an IP address (ip addr add ... dev DEV), or name the entry of rdma link's "
            "device in /sys/class/infiniband",
        )
    return _Candidate(device.name, port, gid, device.attributes, _stands_for(gid, local_address), partition)


def look_again(device: Device, found: Viable) -> Viable | NotViable:
    """Query the port of `found` again. It keeps its address, if the port still has that, or gets another one."""
    try:
        answer = _port_candidate(
            device, found.port.port, found.local_address, found.gid_index, found.marking, found.gid
        )
    except OSError as error:
        return NotViable(f"{device.name} port {found.port.port} cannot be asked for its state: {error}", "restart")
    if isinstance(answer, NotViable):
        return answer
    return replace(found, port=answer.port, gid=answer.gid, partition=answer.partition)


def _first(problems: list[NotViable]) -> NotViable:
    """Make one answer of several problems: all reasons, and the first fix, which is that of the first device."""
    return NotViable(" and ".join(dict.fromkeys(problem.reason for problem in problems)), problems[0].fix)


def _candidates(
    binding: Binding,
    names: Sequence[str],
    port: int | None,
    local_address: str,
    gid_index: int | None,
    marking: Marking,
    near: Callable[[str], int],
) -> tuple[list[_Candidate], list[NotViable]]:
    found: list[_Candidate] = []
    problems: list[NotViable] = []
    for name in names:
        try:
            with contextlib.closing(binding.open(name)) as device:
                for number in (port,) if port else range(1, device.attributes.ports + 1):
                    answer = _port_candidate(device, number, local_address, gid_index, marking)
                    if isinstance(answer, NotViable):
                        problems.append(answer)
                    else:
                        found.append(replace(answer, near=near(name)))
        except OSError as error:
            problems.append(
                NotViable(
                    f"{name} cannot be opened: {error}", "give this user read and write access to /dev/infiniband"
                )
            )
    return sorted(found, key=lambda candidate: (-candidate.near, not candidate.exact)), problems


def wishes(config: Config) -> dict[str, Any]:
    """The arguments of `viable_ports` that the settings decide about."""
    rdma = rdma_of(config.verbs)
    return {
        "device": rdma.device,
        "port": rdma.port,
        "gid_index": rdma.gid_index,
        "local_address": config.host,
        "marking": Marking(*rdma.marks),
    }


def viability(binding: Binding | Absent, *, arena_nbytes: int, **options: Any) -> Viable | NotViable:
    """Find the first port that works, and prove that it does. The arguments are those of `viable_ports`.

    Returns:
        The port, or the reason and the fix. No failure of a device is raised, and all devices are closed.
    """
    found = viable_ports(binding, arena_nbytes=arena_nbytes, **options)
    return found if isinstance(found, NotViable) else found[0]


def _near(name: str) -> int:
    return nearness(name, os.environ)


def viable_ports(
    binding: Binding | Absent,
    *,
    arena_nbytes: int,
    device: str | None = None,
    port: int | None = None,
    gid_index: int | None = None,
    local_address: str = "",
    marking: Marking = UNMARKED,
    memlock: Callable[[], int | None] = memlock_limit,
    proof_seconds: float = PROOF_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    near: Callable[[str], int] = _near,
) -> tuple[Viable, ...] | NotViable:
    """Find the ports that may be used, and prove the first one that works. Ports before it do not work, and those
    behind it are proven when they are opened (`prove`).

    Args:
        binding: the result of `zcactor.transport.verbs.driver.bindings.bindings`.
        arena_nbytes: bytes of the arena, which is registered besides the memory of connections.
        device: name of the only device to use.
        port: number of the only port to use.
        gid_index: entry of the table to use, instead of the choice of `choose_gid`.
        local_address: IP address at which peers reach this host; of cards that are as near to our GPUs, the port that
            has it is preferred.
        marking: the marks of packets. A port without the partition that they name is of no use.
        memlock: returns the bytes that may be pinned; None for any number.
        proof_seconds: seconds that the proof may take on each candidate.
        clock: returns seconds.
        near: returns how near a card is to the GPUs of this process (`nearness`).

    Returns:
        The ports, the preferred one first, or the reason and the fix. Each card registers the arena anew, so there are
        no more ports than the limit of pinned memory has room for. No failure of a device is raised, and all devices
        are closed.
    """
    if isinstance(binding, Absent):
        return NotViable(binding.cause, binding.fix)
    try:
        names = list(binding.devices())
    except OSError as error:
        return NotViable(f"RDMA devices cannot be listed: {error}", "modprobe ib_uverbs")
    if not names:
        return NotViable("there is no RDMA device", "load the adapter's driver; rdma link shows the result")
    if device is not None and device not in names:
        return NotViable(f"there is no RDMA device {device!r}", f"use one of {', '.join(names)}")
    limit = memlock()
    # imported here, with the code for devices, as there is a device by now
    from zcactor.transport.verbs.device.sizing import peers_of, pinned_nbytes

    needed = pinned_nbytes(arena_nbytes)
    if limit is not None and needed > limit:
        return NotViable(
            f"RLIMIT_MEMLOCK is {limit:,} bytes and the arena needs {needed:,} with one peer's slots and the rest",
            f"ulimit -l unlimited (at least {-(-needed // 1024)}), memlock in /etc/security/limits.conf, "
            "LimitMEMLOCK=infinity in a systemd unit, --ulimit memlock=-1 in Docker; a rootless container has the "
            "limit of its user; or a smaller store_capacity",
        )
    names = names if device is None else [device]
    found, problems = _candidates(binding, names, port, local_address, gid_index, marking, near)
    for at, candidate in enumerate(found):
        where = f"{candidate.device} port {candidate.port.port}"
        where += f" with GID {candidate.gid.index} ({candidate.gid.address})" if candidate.gid else " with its LID"
        try:
            with contextlib.closing(binding.open(candidate.device)) as opened:
                wrong = prove(
                    opened, candidate.port, candidate.gid, marking=marking, seconds=proof_seconds, clock=clock
                )
        except (OSError, VerbsError) as error:
            wrong = str(error)
        if wrong is None:
            most = len(found) if limit is None else max(1, limit // needed)
            return tuple(
                Viable(
                    binding.name,
                    one.device,
                    one.port,
                    one.gid,
                    one.attributes,
                    limit,
                    needed,
                    peers_of(one.attributes, arena_nbytes, limit),
                    local_address,
                    gid_index,
                    marking,
                    one.partition,
                )
                for one in found[at : at + most]
            )
        problems.append(NotViable(f"{where}: {wrong}", "choose another GID (rdma link, show_gids) or device"))
    return _first(problems)
