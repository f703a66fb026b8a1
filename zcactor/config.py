"""The configuration: one frozen `Config`, and `load_config`, which fills it and remembers where each value came from.

Precedence, weakest first: the default, ``zcactor.toml`` of the user, ``zcactor.toml`` of the working directory, the
environment (``ZCACTOR_`` and the field's name in capitals), arguments. Nothing is read when this module is imported.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FILE_NAME", "NOT_BY_TLS", "PREFIX", "RESERVED", "TRANSPORTS", "Config", "load_config"]

FILE_NAME = "zcactor.toml"
"""Name of the configuration file, in the working directory and in the user's directory."""

PREFIX = "ZCACTOR_"
"""What the name of each environment variable that is read begins with."""

TRANSPORTS = ("local", "verbs", "tcp")
"""The ways to reach a peer, in the default order of preference."""

NOT_BY_TLS = "tls is set, and bytes by RDMA cannot be encrypted"
"""Why there is no RDMA where `Config.tls` is set."""

RESERVED = frozenset({"ZCACTOR_FAIL", "ZCACTOR_NATIVE", "ZCACTOR_NODE", "ZCACTOR_TOKEN", "ZCACTOR_TOKEN_FILE"})
"""Variables with the prefix that are no field: the fault injection of tests, the switch of the native part (read when
the package is imported), the mark of a node's processes, and the cluster's token, which is kept out of `Config` so that
printing the configuration never shows it."""


@dataclass(frozen=True, slots=True)
class Config:
    """Every setting of one process. A value outside its range is a `ValueError`, one that is no number a `TypeError`.

    Attributes:
        store_capacity: bytes one process's arena may grow to; None means 30 % of memory, the machine's or what the
            process's control groups allow, whichever is least, so that a driver and one busy actor can both fill theirs
            and a third is left for everything else. Too small: `OutOfMemory`.
        store_min_nbytes: bytes from which on NumPy's own arrays are allocated in the store. Smaller ones ride in frames
            or cost a copy of a few microseconds, and would fill the store with crumbs.
        store_keep_nbytes: bytes of free memory that a process keeps ready in its store; above twice as much it goes
            back to the system after some seconds. 128 MiB make a loop over arrays of some MiB free of page faults and
            are bearable times the number of actors.
        eager_limit: bytes of the largest payload that rides in a frame; larger ones go by reference. 16 KiB copies in
            about the time that resolving one reference takes. Larger frames delay the calls queued behind them.
        recv_depth: frames a peer may have outstanding towards this process. 1,024 frames of `eager_limit` bytes bound
            the memory a peer can take at 16 MiB; too small, and senders wait for credits at high call rates.
        max_pending_calls: unfinished calls one caller may have to one actor before `MailboxFull`. 131,072 calls of
            about 1 KiB of bookkeeping are 128 MiB: past that the caller has outrun the actor.
        max_concurrency_async: coroutines of one actor that run at once, where the actor does not say. 1,000 is far
            above what one core overlaps usefully; it exists to bound memory.
        spawn_timeout: seconds until a spawn fails whose process has not reported. 60 covers importing a large
            framework from a cold disk. The constructor itself is not counted.
        shutdown_timeout: seconds that processes get to end on their own before they are killed. 5 lets a running
            method of ordinary length finish.
        warn_after: seconds after which what waits is told of, once: a blocked event loop, a call behind a plain method.
            5 is above what ordinary work takes and below what somebody bears. 0 switches all such lines off, those
            about spawns that wait and about the end of a program, too.
        log_to_driver: whether what actors print and log appears at the driver.
        loop: the event loop of this process and its actors: ``"uvloop"``, the faster, or ``"asyncio"``.
        address: ``"host:port"`` of the cluster to join as a driver; None starts an embedded node.
        namespace: where actor names of this program live; programs of different namespaces do not see each other's.
        num_cpus: CPUs this node offers to actors that ask for some; None counts those this process may run on.
        num_gpus: GPUs this node offers; None counts the visible ones.
        transports: which ways to a peer are allowed, separated by commas, the preferred one first: ``local`` (the same
            host), ``verbs`` (RDMA) and ``tcp``.
        require: the transport that connections to other hosts must have; one that comes about in another way is an
            error instead of a slower connection. None takes any of `transports`.
        host: the IP address at which this process listens for peers of other transports than ``local``. The default is
            reached from this host only.
        sealing: whether frames that go to other hosts are encrypted: ``"auto"`` does where `host` is not a loopback
            address, ``"on"`` and ``"off"`` always or never. One side's wish is enough. The bytes of arrays are not.
        integrity: what besides frames is authenticated where frames are encrypted, so that nobody on the way can change
            it unnoticed: ``"arrays"``, every byte of every array that is pulled; ``"frames"``, only what belongs to a
            pickle, plain arrays travel bare; ``"auto"``, arrays over TCP and not by RDMA. The stricter wish of two ends
            holds. It means nothing where bytes are mapped, or with `tls`, which protects all.
        tls: absolute path of a folder with ``ca.pem``, ``cert.pem`` and ``key.pem`` of this host (``~`` is the user's
            home). Everything that goes to other hosts then passes through TLS 1.3, arrays included, and only processes
            with a certificate of that CA are let in; all hosts need it. It excludes RDMA, and `sealing` means nothing.
        verbs_binding: which Python binding of libibverbs to use; ``"none"`` switches RDMA off.
        verbs_device: name of the only RDMA device to use, as in /sys/class/infiniband; None takes the first that works.
        verbs_port: number of the only port to use of it; None tries all.
        verbs_gid_index: the entry of the port's GID table to use; None takes the one that stands for `host`.
        verbs_idle_timeout: seconds after which a connection by RDMA that nobody uses, and to whose process no handle is
            held at either end, is closed: cards slow down with thousands of them. 0 keeps all.
        verbs_eager_limit: like `eager_limit`, towards peers that are reached by RDMA; None measures at start where a
            READ becomes faster than a copy through a frame.
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
    loop: Literal["uvloop", "asyncio"] = "uvloop"
    address: str | None = None
    namespace: str = "default"
    num_cpus: int | None = None
    num_gpus: int | None = None
    transports: str = "local,verbs,tcp"
    require: Literal["verbs", "tcp"] | None = None
    host: str = "127.0.0.1"
    sealing: Literal["auto", "on", "off"] = "auto"
    integrity: Literal["auto", "arrays", "frames"] = "auto"
    tls: str | None = None
    verbs_binding: Literal["auto", "pyverbs", "ibverbs", "none"] = "auto"
    verbs_device: str | None = None
    verbs_port: int | None = None
    verbs_gid_index: int | None = None
    verbs_eager_limit: int | None = None
    verbs_idle_timeout: float = 300.0

    def __post_init__(self) -> None:
        for name, minimum in _MINIMUM.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number, not {value!r}")
            if not minimum <= value < float("inf"):
                raise ValueError(f"{name} must be finite and at least {minimum}, not {value!r}")
        names = self.transports.split(",")
        if len(set(names)) != len(names) or not set(names) <= set(TRANSPORTS):
            raise ValueError(
                f"transports must be some of {', '.join(TRANSPORTS)}, separated by commas and each once, "
                f"not {self.transports!r}"
            )
        if self.require is not None and self.require not in names:
            raise ValueError(f"require is {self.require!r}, which transports, {self.transports!r}, does not allow")
        if self.tls is not None and not self.tls.startswith(("/", "~")):
            raise ValueError(
                f"tls must be the absolute path of a folder, which processes in other directories find too, not "
                f"{self.tls!r}"
            )
        if self.tls is not None and self.require == "verbs":
            raise ValueError(f"require is 'verbs' and {NOT_BY_TLS}; unset one of them")
        if self.integrity == "arrays" and self.sealing == "off" and self.tls is None:
            raise ValueError(
                "integrity is 'arrays' and sealing is 'off', so there are no keys to authenticate arrays with; set "
                "sealing to 'auto' or 'on', or tls"
            )
        if not _is_address(self.host):
            raise ValueError(f"host must be an IP address of this host, not {self.host!r}")


def _is_address(text: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, text)
        except OSError:
            continue
        return True
    return False


_MINIMUM: Mapping[str, float] = {
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
    "verbs_port": 1,
    "verbs_gid_index": 0,
    "verbs_eager_limit": 64,
    "verbs_idle_timeout": 0,
}
"""The least value of each numeric field, in the field's own unit."""

_OPTIONAL = frozenset({"store_capacity", "num_cpus", "num_gpus", "verbs_port", "verbs_gid_index", "verbs_eager_limit"})

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
        arguments: values by field name; one that is None counts as not given.
        environ: the environment; None means this process's. A variable that is set but empty counts as not set.
        directory: where the program's ``zcactor.toml`` may lie; None means the working directory.
        user_directory: where the user's may lie; None means ``$XDG_CONFIG_HOME/zcactor``, or ``~/.config/zcactor``.

    Returns:
        The `Config`, and for each field ``"default"``, ``"argument"``, the variable's name or the file's path.

    Raises:
        ValueError: a key or a ``ZCACTOR_`` variable that does not exist, a value out of its range, or a file that is
            not TOML. The message names the source, the key, the value, what is expected and the valid keys.
        TypeError: a value of the wrong type, named likewise; an argument that does not exist.
        OSError: a file exists and cannot be read.
    """
    environ = os.environ if environ is None else environ
    if user_directory is None:
        base = environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
        user_directory = os.path.join(base, "zcactor")

    values: dict[str, Any] = {}  # each of its field's type, by `_convert`
    sources = dict.fromkeys(_names(), "default")
    for folder in (user_directory, directory if directory is not None else "."):
        path = Path(folder, FILE_NAME)
        for name, value in _read_file(path).items():
            values[name] = _convert(name, value, str(path), lax=False)
            sources[name] = str(path)
    for name, value in _read_environment(environ).items():
        variable = PREFIX + name.upper()
        values[name] = _convert(name, value, variable, lax=True)
        sources[name] = variable
    for name, value in arguments.items():
        if name not in sources:
            raise TypeError(_unknown("argument", name, _names()))
        if value is not None:
            values[name] = _convert(name, value, "argument", lax=False)
            sources[name] = "argument"
    return replace(Config(), **values), MappingProxyType(sources)


def _names() -> tuple[str, ...]:
    return tuple(field.name for field in fields(Config))


def _unknown(source: str, name: str, valid: tuple[str, ...]) -> str:
    import difflib  # for the message only

    close = difflib.get_close_matches(name, valid, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{source}: there is no setting {name!r}{hint} Valid keys: {', '.join(sorted(valid))}"


def _read_file(path: Path) -> dict[str, object]:
    """The keys and values of a file; none where it does not exist."""
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    import tomllib  # here and in _convert: programs without a file should not pay for the import

    try:
        table: dict[str, object] = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error
    valid = _names()
    for name in table:
        if name not in valid:
            raise ValueError(_unknown(str(path), name, valid))
    return table


def _read_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The values by field name."""
    valid = {PREFIX + name.upper(): name for name in _names()}
    found = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable in RESERVED:
            continue
        if variable not in valid:
            raise ValueError(_unknown("environment", variable, (*valid, *RESERVED)))
        if value:
            found[valid[variable]] = value
    return found


def _convert(name: str, value: object, source: str, *, lax: bool) -> object:
    """`value` as the field's type. `lax` reads numbers and booleans from text, as the environment needs.

    Raises:
        TypeError: it is not of the field's type.
        ValueError: it is out of the field's range.
    """
    import typing

    import msgspec

    kind = typing.get_type_hints(Config)[name]
    expected = kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
    where = f"{source}: {name} = {value!r}"
    try:
        converted: object = msgspec.convert(value, kind, strict=not lax)
    except msgspec.ValidationError as error:
        text = f"{where} must be {expected} ({error}). Valid keys: {', '.join(sorted(_names()))}"
        # A text where one of a few is expected has the right type and the wrong value
        literals = [one for one in (kind, *typing.get_args(kind)) if typing.get_origin(one) is Literal]
        one_of_a_few = bool(literals) and isinstance(value, str)
        raise (ValueError if one_of_a_few else TypeError)(text) from error
    minimum = _MINIMUM.get(name)
    if minimum is not None and isinstance(converted, (int, float)) and not minimum <= converted < float("inf"):
        raise ValueError(
            f"{where} must be {expected}, finite and at least {minimum}. Valid keys: {', '.join(sorted(_names()))}"
        )
    return converted
