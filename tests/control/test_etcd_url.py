"""URLs of etcd, and the variables beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from zcactor.config import RESERVED
from zcactor.control.etcd_url import EtcdAccess, EtcdPlace, find_access, parse_url


@pytest.mark.parametrize(
    ("url", "endpoints", "name"),
    [
        ("etcd://h:2379", ("h:2379",), "default"),
        ("etcd://h:2379/", ("h:2379",), "default"),
        ("etcd://h:1,10.0.0.2:65535,[::1]:3/a.b-c_D", ("h:1", "10.0.0.2:65535", "[::1]:3"), "a.b-c_D"),
        ("etcd://h:1,h:1", ("h:1",), "default"),
    ],
)
def test_urls(url: str, endpoints: tuple[str, ...], name: str) -> None:
    place = parse_url(url)
    assert place == EtcdPlace(endpoints, name)
    assert parse_url(str(place)) == place


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("etcd://", "'' is no host:port"),
        ("etcd://h", "'h' is no host:port; the form is etcd://host:port"),
        ("etcd://h:0", "'h:0' is no host:port"),
        ("etcd://h:65536", "'h:65536' is no host:port"),
        ("etcd://h:٣", "is no host:port"),
        ("etcd://h:1,", "'' is no host:port"),
        ("etcd://http://h:1", "'http:' is no host:port"),
        ("http://h:1", "is no URL of etcd: it has the form"),
        ("etcd://h:1/a/b", "'a/b' is no name of a cluster"),
        ("etcd://h:1/a?x=1", "is no name of a cluster"),
        (f"etcd://h:1/{'a' * 65}", "1 to 64 letters"),
    ],
)
def test_urls_that_are_none(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_url(url)


@pytest.mark.parametrize("url", ["etcd://user:secret@h:1", "etcd://secret@h:1/x", "etcd://h:1/secret@x"])
def test_secrets_in_the_url(url: str) -> None:
    with pytest.raises(ValueError, match="set ZCACTOR_ETCD_USER and ZCACTOR_ETCD_PASSWORD_FILE") as raised:
        parse_url(url)
    assert "secret" not in str(raised.value)


def test_access() -> None:
    assert find_access({}) == EtcdAccess()
    every = {
        "ZCACTOR_ETCD_CA": "/ca", "ZCACTOR_ETCD_CERT": "/cert", "ZCACTOR_ETCD_KEY": "~/key", "ZCACTOR_ETCD_USER": "me",
        "ZCACTOR_ETCD_PASSWORD_FILE": "/password",
    }  # fmt: skip
    assert find_access(every) == EtcdAccess(Path("/ca"), Path("/cert"), Path.home() / "key", "me", Path("/password"))
    assert set(every) <= set(RESERVED)


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        (("CERT", "CA"), "KEY"),
        (("KEY", "CA"), "CERT"),
        (("CERT", "KEY"), "CA"),
        (("USER",), "PASSWORD_FILE"),
        (("PASSWORD_FILE",), "USER"),
    ],
)
def test_variables_that_need_others(given: tuple[str, ...], missing: str) -> None:
    with pytest.raises(ValueError, match=f"ZCACTOR_ETCD_{missing} is not: set both, or neither"):
        find_access({f"ZCACTOR_ETCD_{name}": "/x" for name in given})
