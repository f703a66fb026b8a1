"""The configuration: one frozen `Config`, and `load_config`, which fills it and records the source of each value.

Precedence, weakest first: the default, ``zcactor.toml`` of the user, ``zcactor.toml`` of the working directory, the
environment (``ZCACTOR_`` and the field's name in capitals), arguments. Importing this module reads nothing.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from dataclasses import dataclass, fields, replace
from functools import cache
from inspect import Signature, signature
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self, TypedDict

from zcactor.folders import NoFolder, is_there, opened_at_once, shared_by, user_folder
from zcactor.sizes import LONGEST_NAME, size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "FILE_NAME", "MAXIMUM", "MAX_VERBS_EAGER_LIMIT", "MINIMUM", "NOT_BY_TLS", "PREFIX", "RESERVED", "SIZES",
    "TRANSPORTS", "Config", "FurtherSettings", "Rdma", "Security", "load_config", "ports_of", "rdma_of", "security_of",
    "unknown_setting",
]  # fmt: skip

FILE_NAME = "zcactor.toml"
"""Name of the configuration file, in the working directory and in the user's directory."""

PREFIX = "ZCACTOR_"
"""Prefix of every environment variable that is read."""

TRANSPORTS: Final[dict[str, str]] = {
    "local": "zcactor.transport.local.endpoint",
    "verbs": "zcactor.transport.verbs.endpoint",
    "tcp": "zcactor.transport.tcp.endpoint",
}
"""The transports in the default order of preference, each with the module that registers it; see
`zcactor.transport.registry`."""

NOT_BY_TLS = "security is TLS, and bytes by RDMA cannot be encrypted"
"""The reason why RDMA is off with TLS."""

MAX_VERBS_EAGER_LIMIT: Final = 32768
"""Bytes of the largest payload in a frame by RDMA: each receive that is posted to a card has room for it, and peers
refuse more."""

RESERVED: Mapping[str, str] = MappingProxyType(
    {
        "ZCACTOR_ETCD_CA": "`--directory etcd://`: the authorities that vouch for etcd; TLS is used where it is set",
        "ZCACTOR_ETCD_CERT": "`--directory etcd://`: the file with the certificate that etcd is shown",
        "ZCACTOR_ETCD_KEY": "`--directory etcd://`: the file with the key of that certificate",
        "ZCACTOR_ETCD_PASSWORD_FILE": "`--directory etcd://`: the file with the password of the user at etcd",
        "ZCACTOR_ETCD_USER": "`--directory etcd://`: the user at etcd",
        "ZCACTOR_FAIL": "fault injection of zcactor's own tests; programs do not set it",
        "ZCACTOR_HEAD": "`zcactor run`: where rank 0 is, `host` or `host:port`",
        "ZCACTOR_NODE": "mark of a node's processes, by which a later start finds what a killed node has left",
        "ZCACTOR_RANK": "`zcactor run`: the rank of this process, from 0, where no launcher says it",
        "ZCACTOR_RENDEZVOUS": "`zcactor run`: a folder that all hosts share, where ranks find each other",
        "ZCACTOR_RUN": "`zcactor run`: the name of the run, which no other run has at the same time",
        "ZCACTOR_SIZE": "`zcactor run`: the number of ranks",
        "ZCACTOR_SSH": "`zcactor up` and `down`: the command for ssh, with its options",
        "ZCACTOR_TOKEN": "the cluster's token as 64 hexadecimal digits; readers of the environment have it",
        "ZCACTOR_TOKEN_FILE": "path of the file with the cluster's token; it is looked at before `ZCACTOR_TOKEN`",
    }
)
"""Variables that have the prefix and are not fields, each with its meaning. The cluster's token is kept out of `Config`
so that printing the configuration never shows it."""

_SERVICE = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
"""The ends of the names that Kubernetes sets for each Service in a pod's namespace. A Service called ``zcactor`` or
``zcactor-head`` gives them our prefix. Of ``ZCACTOR_PORT`` and ``ZCACTOR_HEAD_PORT`` the value shows it, which is a URL
then (``tcp://10.96.0.12:7433``)."""


@dataclass(frozen=True, slots=True)
class Config:
    """Every setting of one process. Immutable. Settings in bytes are given as numbers, or as texts such as ``"1GiB"``.

    Attributes:
        store_capacity: bytes that one process's arena may grow to. None means 30 % of memory (the machine's, or the
            limit of the process's control groups where that is less): a driver and one busy actor can both fill their
            arenas, and a third is left for everything else. An arena that is too small raises `OutOfMemory`.
        store_min_nbytes: least size in bytes at which NumPy's own arrays are allocated in the store. Smaller arrays
            travel in frames or cost a copy of a few microseconds, and would fragment the store.
        store_keep_nbytes: bytes of free memory that a process keeps ready in its store. Free memory above twice that
            goes back to the system after some seconds. With 128 MiB a loop over arrays of some MiB has no page faults,
            and the sum over all actors stays bearable.
        eager_limit: bytes of the largest payload that travels in a frame; larger payloads go by reference. At most
            1 MiB. By RDMA twice this, and at most 32,768 bytes: each receive that is posted to a card has room for
            such a frame. Copying 16 KiB takes about as long as resolving one reference. Larger frames delay the calls
            queued behind them.
        recv_depth: frames that a peer may have outstanding towards this process. 1,024 frames of `eager_limit` bytes
            bound the memory that a peer can take to 16 MiB. With a smaller number senders wait for credits at high call
            rates.
        max_pending_calls: unfinished calls that one caller may have to one actor; the next call raises `MailboxFull`.
            131,072 calls take about 1 KiB of bookkeeping each, 128 MiB together: a caller that reaches this has outrun
            the actor.
        max_concurrency_async: coroutines of one actor that run at once, unless the actor sets ``max_concurrency``.
            1,000 is far more than one core overlaps usefully; the limit bounds memory.
        spawn_timeout: seconds that the process of a new actor has to report before the spawn fails. 60 covers importing
            a large framework from a cold disk. The time of the constructor is not counted.
        shutdown_timeout: seconds that processes have to end on their own before they are killed. A running method of
            ordinary length finishes within 5.
        warn_after: seconds after which a wait is logged, once: a blocked event loop, a call behind a plain method, a
            rank of a group that waits for others. 5 is longer than ordinary work takes and shorter than a person waits
            patiently. 0 switches all such log lines off, including the lines about spawns that wait and about the end
            of a program.
        log_to_driver: whether the output and the log records of actors appear at the driver.
        summary: whether a program that has used arrays ends with one line on standard error: its calls, and the bytes
            that it passed and got by reference, and copied. ``"auto"`` prints it in a terminal, outside of IPython and
            pytest; or ``"on"`` or ``"off"``.
        loop: the event loop of the actors: ``"auto"`` takes uvloop, which is faster, where it can be imported, and
            asyncio's own otherwise; ``"uvloop"`` and ``"asyncio"`` take that one. `zc.run` makes the program's loop
            before there are settings, and takes the variable ``ZCACTOR_LOOP`` alone.
        address: ``"host:port"`` of the cluster to join as a driver, several of them with commas between them, or the
            ``etcd://`` URL of its heads; None starts an embedded node.
        namespace: the namespace of this program's actor names, 1 to 1,000 characters. Programs with different
            namespaces do not see each other's names.
        num_cpus: CPUs that this node offers to actors that ask for CPUs; None counts the CPUs that this process may run
            on, and no more than the quota of its control groups pays for, rounded up.
        num_gpus: GPUs that this node offers, the first ones of those that it sees; None offers all.
        transports: the transports that are allowed, separated by commas, the preferred one first: ``local`` (the same
            host), ``verbs`` (RDMA) and ``tcp``. As an argument of `zc.init` they are a sequence of names.
        host: the IP address at which this process listens for peers by transports other than ``local``. Only this host
            reaches the default.
        ports: the ports that processes of this host listen at for other hosts, as ``"first-last"``: each process takes
            a free one. A firewall has to let them pass. None lets the system choose. The head's own port is set
            where it is started.
        security: the protection of all data to other hosts; processes of one host use ``local``, which needs none.
            ``"auto"``: frames are encrypted, on loopback addresses too, and arrays that are pulled over TCP are
            authenticated, so that a change on the way is detected; both the bytes of arrays and arrays by RDMA can be
            read on the way, and those by RDMA changed. ``"arrays"``: arrays by RDMA are authenticated, too.
            ``"frames"``: of arrays only those of a pickle are authenticated. ``"off"``: nothing is encrypted or
            authenticated. The stricter setting of the two ends holds. ``"tls:FOLDER"``, with the absolute path of a
            folder with ``ca.pem``, ``cert.pem`` and ``key.pem`` of this host (``~`` is the user's home): all traffic
            with other hosts passes through TLS 1.3, arrays included, and only processes with a certificate of that CA
            are admitted. All hosts must set it then, and there is no RDMA.
        verbs: the use of RDMA: ``"auto"`` offers all ports of all devices that work to peers, ``"off"`` none, and
            ``"device:port:gid"``, as in ``"mlx5_0:1:3"``, this device alone (a name in /sys/class/infiniband), this
            port of it and this entry of the port's GID table. ``"mlx5_0"`` leaves port and entry open. Further parts
            follow after commas. ``traffic_class=104``: the traffic class of packets, by which switches choose a queue:
            four times the DSCP of RoCE v2, and ECN; a lossless network has one for RDMA. ``service_level=3``: the lane
            of InfiniBand, or the priority of RoCE in a VLAN. ``pkey_index=2``: the place of the partition's key in the
            port's table; all hosts name the same partition. ``binding=pyverbs`` or ``binding=ibverbs``: the Python
            binding of libibverbs.
        head_timeout: seconds that a request to the cluster's head waits while the head is away; then it raises
            `HeadUnavailable`. A head that is started again needs two or three.
        head_patience: seconds that a node goes on after it has lost its head, as the head's setting says. Then it ends
            its actors and itself. Only a head that keeps a log, in a file or in etcd, is waited for. Longer than a
            start of the head takes, and short, because names of a lost node's actors are free only two seconds after
            this.
        idle_timeout: seconds after which an unused connection is closed, because it takes descriptors at both ends; the
            next call opens it again. The connection to the agent of the own node stays open. 0 keeps all connections.
        gpu: the driver of GPUs: ``"cuda"`` for NVIDIA's, ``"auto"`` for these where they work and none elsewhere,
            or ``"off"``. ``"fake"`` simulates GPUs in memory, so that programs for GPUs can be tested without one, with
            options behind a colon as in ``"fake:devices=2,late=80"``; the page about arrays on GPUs lists them.
        device_capacity: bytes that one process may take of each GPU; None for what the GPU has.
        device_keep_nbytes: bytes of free memory that a process keeps ready on each GPU. More goes back to the GPU as
            soon as the work on it is done. 256 MiB are four extents, so a loop over arrays makes none anew.
        check: ``"bytes"`` looks for programs that change arrays after passing them, through views, buffers or
            memoryviews that are older than the passing: digests of the passed bytes are compared when they
            are passed again and when the leases on them end. Each time they are read once more. Empty: no check.

    Raises:
        ValueError: a value is outside its range, no text that its field takes, or contradicts another value.
        TypeError: a value is not of the field's type.
    """

    store_capacity: int | None = None
    store_min_nbytes: int = 65536
    store_keep_nbytes: int = 128 << 20
    eager_limit: int = 16384
    recv_depth: int = 1024
    max_pending_calls: int = 131072
    max_concurrency_async: int = 1000
    spawn_timeout: float = 60.0
    shutdown_timeout: float = 5.0
    warn_after: float = 5.0
    log_to_driver: bool = True
    summary: Literal["auto", "on", "off"] = "auto"
    loop: Literal["auto", "uvloop", "asyncio"] = "auto"
    address: str | None = None
    namespace: str = "default"
    num_cpus: int | None = None
    num_gpus: int | None = None
    transports: str = "local,verbs,tcp"
    host: str = "127.0.0.1"
    ports: str | None = None
    security: str = "auto"
    verbs: str = "auto"
    idle_timeout: float = 300.0
    head_timeout: float = 10.0
    head_patience: float = 6.0
    gpu: str = "auto"
    device_capacity: int | None = None
    device_keep_nbytes: int = 256 << 20
    check: Literal["", "bytes"] = ""

    if not TYPE_CHECKING:  # checkers take the parameters from the fields

        def __new__(cls, *_: object, **given: object) -> Self:
            """Refuse settings of versions before."""
            for name in given:
                if name in _GONE:
                    raise TypeError(unknown_setting("Config", name))
            return object.__new__(cls)

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if type(value) is not type(field.default) or value != field.default:
                object.__setattr__(self, name, _checked(name, value, f"{name} = {value!r}"))
        for name, check in _FORMS.items():
            if (value := getattr(self, name)) is not None:
                check(value)


# `__new__` hides the parameters from `help` and notebooks.
setattr(Config, "__signature__", Signature([*signature(Config.__init__).parameters.values()][1:]))  # noqa: B010


def _check_transports(text: str) -> None:
    names = text.split(",")
    if len(set(names)) != len(names) or not set(names) <= set(TRANSPORTS):
        raise ValueError(
            f"transports must be some of {', '.join(TRANSPORTS)}, separated by commas and each once, not {text!r}"
        )


def _check_host(text: str) -> None:
    if _is_link_local(text):
        raise ValueError(
            f"host is {text!r}, a link-local address, which means another host on each network: give an address of "
            "this host that the others reach (ip addr, scope global)"
        )
    if not _is_address(text):
        raise ValueError(f"host must be an IP address of this host, not {text!r}")


def _check_address(text: str) -> None:
    if not all(each.strip() for each in text.split(",")):
        raise ValueError(f"address must be 'host:port', or several with commas between them, not {text!r}")


def _check_namespace(text: str) -> None:
    if not 0 < len(text) <= LONGEST_NAME:
        raise ValueError(f"namespace must have 1 to {LONGEST_NAME:,} characters, not {len(text):,}")


def _check_gpu(text: str) -> None:
    if text not in _GPU and not text.startswith("fake:"):
        raise ValueError(f"gpu must be one of {', '.join(_GPU)}, or 'fake:' and options, not {text!r}")


def ports_of(text: str) -> range:
    """The ports of `Config.ports`.

    Raises:
        ValueError: `text` has another form than ``"first-last"``, or there are no such ports.
    """
    first, _, last = text.partition("-")
    if first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 1 << 16:
        return range(int(first), int(last) + 1)
    raise ValueError(f"ports must be two ports from 1 to 65535, the lower first, as in '7434-7533', not {text!r}")


_GPU: Final = ("auto", "cuda", "fake", "off")


class Security(NamedTuple):
    """The parts of `Config.security`."""

    sealing: bool
    """Whether frames are encrypted where there is no TLS."""
    integrity: Literal["auto", "arrays", "frames"]
    """The data beside frames that is authenticated."""
    tls: str | None
    """The folder with this host's certificate; None without TLS."""


_SECURITY: Final[Mapping[str, Security]] = {
    "auto": Security(True, "auto", None),
    "arrays": Security(True, "arrays", None),
    "frames": Security(True, "frames", None),
    "off": Security(False, "auto", None),
}


def security_of(text: str) -> Security:
    """The parts of `Config.security`.

    Raises:
        ValueError: `text` has another form.
    """
    if text.startswith(("tls:/", "tls:~")) and "\0" not in text:
        return _SECURITY["auto"]._replace(tls=text.removeprefix("tls:"))
    if text in _SECURITY:
        return _SECURITY[text]
    raise ValueError(
        f"security must be one of {', '.join(_SECURITY)}, or 'tls:' and the absolute path of a folder, which processes "
        f"in other directories find too, not {text!r}"
    )


class Rdma(NamedTuple):
    """The parts of `Config.verbs`."""

    device: str | None
    """The only device; None for all."""
    port: int | None
    """The only port; None for all."""
    gid_index: int | None
    """The entry of the port's GID table; None for the one of `Config.host`."""
    marks: tuple[int, int, int]
    """Traffic class, service level, and place of the partition's key."""
    binding: str | None
    """The binding; None for the first that works, ``"none"`` where RDMA is off."""


_MARKS: Final = {"traffic_class": 255, "service_level": 15, "pkey_index": 0xFFFF}
"""The largest values: 8 and 4 bits of a packet, 16 of the kernel's interface."""


def rdma_of(text: str) -> Rdma:
    """The parts of `Config.verbs`.

    Raises:
        ValueError: `text` has another form, or a number is out of its range. The message names the part.
    """
    place, *options = text.split(",")
    if "=" in place:
        place, options = "auto", [place, *options]
    if place == "off" and not options:
        return Rdma(None, None, None, (0, 0, 0), "none")
    device, _, numbers = place.partition(":")
    port, _, gid = numbers.partition(":")
    if device.strip().lower() in ("", "off", "none", "null", *_MARKS):
        raise ValueError(f"verbs is {text!r}: it must be 'auto', 'off' or 'device:port:gid', as in 'mlx5_0:1:3'")
    given: dict[str, str] = {}
    for each in options:
        name, _, value = each.partition("=")
        if name in given or name not in (*_MARKS, "binding"):
            raise ValueError(
                f"verbs is {text!r}: {each!r} must be one of {', '.join(_MARKS)} and binding, each once, with its "
                "value behind ="
            )
        given[name] = value
    binding = given.get("binding")
    if binding not in (None, "pyverbs", "ibverbs"):
        raise ValueError(f"verbs is {text!r}: binding must be pyverbs or ibverbs, not {binding!r}")
    traffic_class, service_level, pkey_index = (
        _number(text, name, given.get(name, "0"), 0, most) for name, most in _MARKS.items()
    )
    return Rdma(
        None if device == "auto" else device,
        _number(text, "port", port, 1, 255) if port else None,
        _number(text, "gid", gid, 0, 0xFFFF) if gid else None,
        (traffic_class, service_level, pkey_index),
        binding,
    )


def _number(text: str, name: str, value: str, least: int, most: int) -> int:
    if value.isascii() and value.isdecimal() and len(value) <= 5 and least <= int(value) <= most:
        return int(value)
    raise ValueError(f"verbs is {text!r}: {name} must be a number from {least} to {most}, not {value!r}")


_FORMS: Final[Mapping[str, Callable[[str], object]]] = {
    "transports": _check_transports, "host": _check_host, "ports": ports_of, "gpu": _check_gpu,
    "security": security_of, "verbs": rdma_of, "address": _check_address, "namespace": _check_namespace,
}  # fmt: skip
"""The functions that raise ValueError for a text of another form than its setting has."""


class FurtherSettings(TypedDict, total=False):
    """The settings that `zcactor.init` takes by name beside those in its signature; see `Config`. None counts as not
    given."""

    store_min_nbytes: int | str | None
    store_keep_nbytes: int | str | None
    eager_limit: int | str | None
    recv_depth: int | None
    max_pending_calls: int | None
    max_concurrency_async: int | None
    spawn_timeout: float | None
    shutdown_timeout: float | None
    warn_after: float | None
    summary: Literal["auto", "on", "off"] | None
    loop: Literal["auto", "uvloop", "asyncio"] | None
    host: str | None
    ports: str | None
    verbs: str | None
    idle_timeout: float | None
    head_timeout: float | None
    head_patience: float | None
    gpu: str | None
    device_capacity: int | str | None
    device_keep_nbytes: int | str | None
    check: Literal["", "bytes"] | None


def _is_link_local(text: str) -> bool:
    """Whether it is an address of fe80::/10, which needs the name of an interface (RFC 4291, 2.5.6)."""
    head = text.partition("%")[0]
    packed = socket.inet_pton(socket.AF_INET6, head) if ":" in head and _is_address(head) else b"\0\0"
    return packed[0] == 0xFE and packed[1] & 0xC0 == 0x80


def _is_address(text: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, text)
        except OSError:
            continue
        return True
    return False


MINIMUM: Mapping[str, float] = {
    "store_capacity": 1 << 20,  # an arena's first pages and tables must fit
    "store_min_nbytes": 4096,  # a page: below, an entry of the allocator costs more than the array
    "store_keep_nbytes": 0,
    "eager_limit": 64,  # a reference must fit into a frame
    "recv_depth": 4,  # one frame each way, and the two that carry credits
    "max_pending_calls": 1,
    "max_concurrency_async": 1,
    "spawn_timeout": 0.001,
    "shutdown_timeout": 0,
    "warn_after": 0,
    "num_cpus": 0,
    "num_gpus": 0,
    "idle_timeout": 0,
    "head_timeout": 0,
    "head_patience": 0,
    "device_capacity": 2 << 20,  # one granule of the driver
    "device_keep_nbytes": 0,
}
"""The least value of each numeric field, in the unit of the field."""

_MOST: Final = (1 << 63) - 1
"""The greatest number that processes tell each other."""
MAXIMUM: Mapping[str, int] = {
    "store_capacity": 1 << 47,  # the user half of an x86-64 address space
    "eager_limit": 1 << 20,  # a peer must not decide about the size of our receive buffers
    "recv_depth": 1 << 20,  # far above any useful window, and no product of it overflows
}
"""The largest value of some numeric fields, in the unit of the field. Peers refuse larger ones."""


SIZES: Final = frozenset(
    {
        "store_capacity", "store_min_nbytes", "store_keep_nbytes", "eager_limit",
        "device_capacity", "device_keep_nbytes",
    }
)  # fmt: skip
"""The settings in bytes. Each is also given as a text, such as ``"1GiB"``."""

_NO_ARGUMENTS: Mapping[str, object] = MappingProxyType({})


def load_config(
    arguments: Mapping[str, object] = _NO_ARGUMENTS,
    *,
    environ: Mapping[str, str] | None = None,
    directory: str | os.PathLike[str] | None = None,
    user_directory: str | os.PathLike[str] | None = None,
) -> tuple[Config, Mapping[str, str]]:
    """Read every source and return the configuration with the source of each value.

    Args:
        arguments: values by field name; None counts as not given.
        environ: the environment; None means the environment of this process. A variable that is set but empty counts as
            not set.
        directory: folder of the program's ``zcactor.toml``, which may be missing; None means the working directory.
        user_directory: folder of the user's file, likewise; None means ``$XDG_CONFIG_HOME/zcactor``, or
            ``~/.config/zcactor``. A user without a home directory has no such file. A file in a folder where this
            process may not look counts as missing.

    Returns:
        The `Config`, and for each field ``"default"``, ``"argument"``, the variable's name or the file's path.

    Raises:
        ValueError: a key or a ``ZCACTOR_`` variable that does not exist, a value out of its range, or a file that is
            not TOML, or that others than root and this user may write, or whose folder they may. The message names
            the source, the key, the value, what is expected and the valid keys.
        TypeError: a value of the wrong type, with the same message, or an argument that does not exist.
        OSError: a file exists and cannot be read.
    """
    environ = os.environ if environ is None else environ
    folders = [user_directory, "." if directory is None else directory]
    if user_directory is None:
        try:
            folders[0] = user_folder("config", environ)
        except NoFolder:
            del folders[0]

    values: dict[str, Any] = {}  # each has its field's type, by `_checked`
    sources = dict.fromkeys(_names(), "default")
    for folder in folders:
        assert folder is not None
        path = Path(folder, FILE_NAME)
        for name, value in _read_file(path).items():
            values[name] = _given(str(path), name, value)
            sources[name] = str(path)
    for name, value in _read_environment(environ).items():
        variable = PREFIX + name.upper()
        values[name] = _given(variable, name, value, lax=True)
        sources[name] = variable
    for name, value in arguments.items():
        if name not in sources:
            raise TypeError(unknown_setting("argument", name, _names()))
        if value is not None:
            values[name] = _given("argument", name, value)
            sources[name] = "argument"
    return replace(Config(), **values), MappingProxyType(sources)


def _names() -> tuple[str, ...]:
    return tuple(field.name for field in fields(Config))


_VERBS: Final = (
    "write verbs='mlx5_0:1:3' for a device, a port and an entry of its GID table, and further parts after commas"
)
_GONE: Final[Mapping[str, str]] = {
    "require": "leave the other transports out of transports, as in transports='local,verbs'",
    "sealing": "write security='off', or leave it out",
    "integrity": "write security='arrays' or security='frames', or leave it out",
    "tls": "write security='tls:/folder'",
    "verbs_binding": "write verbs='binding=pyverbs', or verbs='off'",
    **dict.fromkeys(("verbs_device", "verbs_port", "verbs_gid_index"), _VERBS),
    "verbs_traffic_class": "write verbs='traffic_class=104'",
    "verbs_service_level": "write verbs='service_level=3'",
    "verbs_pkey_index": "write verbs='pkey_index=2'",
    "verbs_eager_limit": "write eager_limit, which is half of it",
    "gpu_fake": "write gpu='fake:devices=2'",
    "verbs_idle_timeout": "write idle_timeout, which counts by RDMA, too",
}
"""Settings of versions before, and what to write in their place."""


def unknown_setting(source: str, name: str, valid: tuple[str, ...] | None = None) -> str:
    """The message for a name that is no setting, with the closest of the `valid` ones, which are all settings by
    default."""
    gone = _GONE.get(name.removeprefix(PREFIX).lower())
    if gone is not None:
        return f"{source}: the setting {name!r} is gone: {gone}"
    import difflib  # for the message only

    valid = valid or _names()
    close = difflib.get_close_matches(name, valid, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"{source}: there is no setting {name!r}{hint} Valid keys: {', '.join(sorted(valid))}"


def _read_file(path: Path) -> dict[str, object]:
    """The keys and values of a file; empty where the file does not exist, as far as this process may look."""
    try:
        with open(path, "rb", opener=opened_at_once) as file:
            status = os.fstat(file.fileno())
            _refuse_others(path, status)
            _refuse_others(path.parent, os.stat(path.parent))
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{path.absolute()} is no file of settings: remove it, or start the program elsewhere")
            text = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except PermissionError as error:
        if not is_there(path):
            return {}
        raise PermissionError(
            f"{path.absolute()} cannot be read by user {os.geteuid()}: chmod it, or take it away"
        ) from error
    except OSError as error:  # a directory, or links in a circle
        raise ValueError(
            f"{path.absolute()} is no file of settings ({error.strerror}): remove it, or start the program elsewhere"
        ) from error
    import tomllib  # here and in `_checked`: programs without a file do not pay for the import

    try:
        table: dict[str, object] = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    valid = _names()
    for name in table:
        if name not in valid:
            raise ValueError(unknown_setting(str(path), name, valid))
    return table


def _refuse_others(path: Path, status: os.stat_result) -> None:
    """Refuse a file of settings, or its folder, that another user than root and this one may write: settings say where
    the cluster is, and so whose code runs here.

    Raises:
        ValueError: others may write it.
    """
    of_group = status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
    why = shared_by(status, stat.S_IWOTH | (stat.S_IWGRP if of_group else 0), by_root=True)
    if not why:
        return
    what = "the folder" if stat.S_ISDIR(status.st_mode) else "the file"
    name = Path(path, FILE_NAME) if stat.S_ISDIR(status.st_mode) else path
    raise ValueError(
        f"{name} is not obeyed: {what} {path.absolute()} {why}. Settings say whose code runs here; copy the file to a "
        "folder that only you may write, start the program there, or remove it"
    )


def _is_own_group(gid: int) -> bool:
    """Whether a group is that of this user alone, as distributions make one for each user."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _read_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The values of the environment's variables, by field name."""
    valid = {PREFIX + name.upper(): name for name in _names()}
    found = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable in RESERVED or _of_a_service(variable, value):
            continue
        if variable not in valid:
            raise ValueError(unknown_setting("environment", variable, (*valid, *RESERVED)))
        if value:
            found[valid[variable]] = value
    return found


def _of_a_service(variable: str, value: str) -> bool:
    """Whether Kubernetes has set this variable for a Service of that name; see `_SERVICE`."""
    return _SERVICE.search(variable) is not None or (variable.endswith("_PORT") and "://" in value)


@cache
def _kinds() -> dict[str, Any]:
    """The type of each field."""
    import typing

    return typing.get_type_hints(Config)


def _number_of(value: Any) -> Any:
    """A number of NumPy's as one of Python's own; other values stay."""
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _given(source: str, name: str, value: object, *, lax: bool = False) -> object:
    """Return the value that a source gives for a field, as one of the field's type; see `_checked`."""
    found = _checked(name, value, f"{source}: {name} = {value!r}", lax=lax)
    if name in _FORMS and isinstance(found, str):
        try:
            _FORMS[name](found)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
    return found


def _checked(name: str, value: object, where: str, *, lax: bool = False) -> object:
    """Return `value` as one of the field's type, within its range. A text is a plain one that can be sent.

    Args:
        name: of the field.
        value: the value that was given.
        where: the value, with its source, for messages.
        lax: read numbers and booleans from text, as the environment needs. Sizes are read from text anywhere.

    Raises:
        TypeError: the value is not of the field's type.
        ValueError: it is outside the field's range, or none of the few texts that the field takes.
    """
    import typing

    import msgspec

    kind = _kinds()[name]
    expected = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
    keys = f"Valid keys: {', '.join(sorted(_names()))}"
    if name in SIZES and isinstance(value, str) and not (lax and value == "null"):
        try:
            value = size(value)
        except ValueError:
            raise ValueError(f"{where} must be a number of bytes, or a size such as '256MiB'. {keys}") from None
    if not isinstance(value, bool):
        value = _number_of(value)
    try:
        converted: object = msgspec.convert(value, kind, strict=not lax)
        if isinstance(converted, str):
            converted = str.encode(converted).decode()
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        # A str where one of a few literals is expected has the right type and the wrong value
        literals = [one for one in (kind, *typing.get_args(kind)) if typing.get_origin(one) is Literal]
        one_of_a_few = bool(literals) and isinstance(value, str)
        raise (ValueError if one_of_a_few else TypeError)(f"{where} must be {expected} ({error}). {keys}") from error
    if isinstance(converted, int) and converted > MAXIMUM.get(name, _MOST):
        raise ValueError(f"{where} must be at most {MAXIMUM.get(name, _MOST):,}. {keys}")
    minimum = MINIMUM.get(name)
    if minimum is not None and isinstance(converted, (int, float)) and not minimum <= converted < float("inf"):
        raise ValueError(f"{where} must be {expected}, finite and at least {minimum}. {keys}")
    return converted
