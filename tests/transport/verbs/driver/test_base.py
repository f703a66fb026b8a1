"""Numbers, names and limits of the verbs interface."""

from __future__ import annotations

import ipaddress

import pytest

from zcactor.transport.verbs.driver.base import Gid


@pytest.mark.parametrize(
    ("text", "address", "link_local"),
    [
        ("::ffff:10.9.0.1", "10.9.0.1", False),
        ("fe80::5054:ff:fe12:3456", "fe80::5054:ff:fe12:3456", True),
        ("2001:db8::7", "2001:db8::7", False),
    ],
)
def test_gid(text: str, address: str, link_local: bool) -> None:
    gid = Gid(3, ipaddress.IPv6Address(text).packed, True)
    assert gid.address == address
    assert gid.link_local is link_local
