"""The first contact with a cluster's head: by its address, by one of several, or by the etcd that knows who leads."""

from __future__ import annotations

import asyncio
import ipaddress
import os
from typing import TYPE_CHECKING, Final

from zcactor.control.etcd_url import SCHEME, parse_url
from zcactor.control.head_log import LogUnusable
from zcactor.errors import ConnectionLost
from zcactor.transport.stream.probe import find_leader, identify, parse_host_port

if TYPE_CHECKING:
    from zcactor.config import Config
    from zcactor.control.etcd_log import EtcdLog
    from zcactor.transport.stream.probe import Identity
    from zcactor.transport.stream.tls import Tls

__all__ = ["check_address", "check_reachable", "find_head", "is_one"]

_PAUSE: Final = 0.1
"""Seconds until a head is tried again that leads and does not answer: it may be about to listen, or killed."""


def is_one(address: str) -> bool:
    """Whether that is the address of one process, and neither several nor the URL of an etcd."""
    return "," not in address and not address.startswith(SCHEME)


def check_address(address: str) -> None:
    """Check the form of an address that `find_head` is to take.

    Raises:
        ValueError: `address` has another form.
    """
    if address.startswith(SCHEME):
        parse_url(address)
    else:
        for each in address.split(","):
            parse_host_port(each.strip())


async def find_head(address: str, token: bytes, tls: Tls | None, patience: float) -> Identity:
    """Find the head of a cluster.

    Args:
        address: ``"host:port"`` of the head or of a standby, several of them with commas between them, or an
            ``etcd://`` URL.
        token: the cluster's secret, 32 bytes.
        tls: the certificates where all bytes pass through TLS, otherwise None.
        patience: seconds for which a head is waited for where standbys or etcd know of none.

    Raises:
        ValueError: `address` has another form, or a variable ``ZCACTOR_ETCD_*`` is not as it must be.
        ConnectionLost: no head was found.
        AuthenticationError, VersionMismatch, ProtocolError: see `zcactor.transport.stream.probe.find_leader`.

    Cancelling ends the search.
    """
    if not address.startswith(SCHEME):
        return await find_leader(address, token, tls, patience)
    from zcactor.control.etcd_log import EtcdLog

    log = EtcdLog.at(address, token, os.environ)
    known = ""
    try:
        async with asyncio.timeout(patience):
            while True:
                known = await _leader_in(log)
                try:
                    return await identify(known, token, tls)
                except ConnectionLost:
                    await asyncio.sleep(_PAUSE)
    except TimeoutError:
        why = f"the head at {known}, which leads, does not answer" if known else "it names no head, or does not answer"
        raise ConnectionLost(f"{log}: no head was found in {patience:g} s: {why}", False) from None
    except LogUnusable as error:
        raise ConnectionLost(str(error), False) from error
    finally:
        await log.aclose()


async def _leader_in(log: EtcdLog) -> str:
    """Wait for a head that leads. Returns ``host:port``."""
    async for leader in log.leaders():
        if leader is not None:
            return leader.address
    raise ConnectionLost(f"{log} was closed", False)


def check_reachable(config: Config, head: Identity) -> None:
    """Check that the processes of the head's host can reach this one.

    Raises:
        ValueError: `Config.host` is a loopback address, and the head is on another host.
    """
    elsewhere = head.ours != head.host and not ipaddress.ip_address(head.ours).is_loopback
    if elsewhere and ipaddress.ip_address(config.host).is_loopback:
        raise ValueError(
            f"host is {config.host}, which leads to this host only, and the head is on another one, {head.host}: leave "
            f"host out, or give {head.ours}, this host's address on the way there"
        )
