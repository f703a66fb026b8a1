"""The URL of etcd, and the variables of the environment beside it.

A URL is ``etcd://host:port[,host:port...][/NAME]``. NAME tells the clusters apart that one etcd has; it is ``default``
where it is not given. Secrets are never in the URL, as command lines and log files show that.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from zcactor.folders import NoFolder, expanded

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["SCHEME", "EtcdAccess", "EtcdPlace", "find_access", "parse_url"]

SCHEME: Final = "etcd://"
_ENDPOINT: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_FORM: Final = "etcd://host:port[,host:port...][/NAME]"


class EtcdPlace(NamedTuple):
    """The place of one cluster's log."""

    endpoints: tuple[str, ...]
    """``host:port`` of each member of etcd that is known; IPv6 addresses stand in brackets."""
    name: str
    """The cluster's name in that etcd."""

    def __str__(self) -> str:
        return f"{SCHEME}{','.join(self.endpoints)}/{self.name}"


class EtcdAccess(NamedTuple):
    """The files and the user with which etcd is reached. Without a CA there is no TLS."""

    ca: Path | None = None
    """The certificates of the authorities that sign those of etcd, in PEM. With these, all traffic is TLS."""
    cert: Path | None = None
    """The certificate that etcd is shown, in PEM."""
    key: Path | None = None
    """The key of that certificate, in PEM."""
    user: str = ""
    """The user at etcd; empty where etcd has no users."""
    password_file: Path | None = None
    """The file with the user's password."""


def parse_url(url: str) -> EtcdPlace:
    """Parse an ``etcd://`` URL.

    Raises:
        ValueError: it has another form, a user or a password. The message then does not repeat the URL.
    """
    if "@" in url:
        raise ValueError(
            "the URL of etcd has a user or a password, which command lines and log files would show: set "
            "ZCACTOR_ETCD_USER and ZCACTOR_ETCD_PASSWORD_FILE, and leave them out of the URL"
        )
    if not url.startswith(SCHEME):
        raise ValueError(f"{url!r} is no URL of etcd: it has the form {_FORM}")
    authority, _, name = url.removeprefix(SCHEME).partition("/")
    endpoints = tuple(dict.fromkeys(authority.split(",")))
    for endpoint in endpoints:
        found = _ENDPOINT.fullmatch(endpoint)
        if found is None or not 0 < int(found[1]) < 1 << 16:
            raise ValueError(f"{url!r}: {endpoint!r} is no host:port; the form is {_FORM}")
    if name and _NAME.fullmatch(name) is None:
        raise ValueError(
            f"{url!r}: {name!r} is no name of a cluster: it has 1 to 64 letters, digits, dots, dashes and underscores"
        )
    return EtcdPlace(endpoints, name or "default")


def find_access(environ: Mapping[str, str]) -> EtcdAccess:
    """The access that the variables ``ZCACTOR_ETCD_*`` describe.

    Raises:
        ValueError: one of them is set, and another that it needs is not, or a path begins with the home of a user who
            has no home. A user needs a CA: without TLS everybody on the way would learn the password.
    """
    value = {name: environ.get(f"ZCACTOR_ETCD_{name}", "") for name in ("CA", "CERT", "KEY", "USER", "PASSWORD_FILE")}
    for name, needed in (("CERT", "KEY"), ("KEY", "CERT"), ("CERT", "CA"), ("USER", "PASSWORD_FILE")):
        if value[name] and not value[needed]:
            raise ValueError(f"ZCACTOR_ETCD_{name} is set, and ZCACTOR_ETCD_{needed} is not: set both, or neither")
    if value["PASSWORD_FILE"] and not value["USER"]:
        raise ValueError("ZCACTOR_ETCD_PASSWORD_FILE is set, and ZCACTOR_ETCD_USER is not: set both, or neither")
    if value["USER"] and not value["CA"]:
        raise ValueError(
            "ZCACTOR_ETCD_USER is set, and ZCACTOR_ETCD_CA is not: the password would go to whoever listens there, in "
            "the clear; set ZCACTOR_ETCD_CA to the certificates of etcd's authorities, by which TLS is used"
        )
    try:
        paths = {name: expanded(value[name], environ) if value[name] else None for name in value if name != "USER"}
    except NoFolder as error:
        raise ValueError(f"the variables ZCACTOR_ETCD_*: {error}, or name the files in full") from error
    return EtcdAccess(paths["CA"], paths["CERT"], paths["KEY"], value["USER"], paths["PASSWORD_FILE"])
