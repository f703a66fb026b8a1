"""Folders as the setting `tls` names them, with certificates made by tests."""

from __future__ import annotations

import datetime
import ipaddress
import secrets
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Authority:
    """A certificate authority."""

    def __init__(self) -> None:
        self._name = f"CA {secrets.token_hex(4)}"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._signed(self._name, self._key.public_key(), ends_in=60 * DAY, ca=True)

    def _signed(self, name: str, key: Any, *, ends_in: datetime.timedelta, ca: bool, address: str = "") -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        made = x509.CertificateBuilder(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self._name)]),
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]),
            key, x509.random_serial_number(), now - 2 * DAY, now + ends_in,
        )  # fmt: skip
        made = made.add_extension(x509.BasicConstraints(ca, None), critical=True)
        if address:
            names = [x509.IPAddress(ipaddress.ip_address(address))]
            made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return made.sign(self._key, SHA256()).public_bytes(Encoding.PEM)

    def folder(self, path: Path, *, ends_in: datetime.timedelta = 30 * DAY, address: str = "") -> Path:
        """Make `path` with the three files of a host, and return it. `address` is the host's, where it is to be in the
        certificate."""
        path.mkdir(parents=True)
        key = ec.generate_private_key(ec.SECP256R1())
        (path / "ca.pem").write_bytes(self.certificate)
        (path / "cert.pem").write_bytes(
            self._signed("a host", key.public_key(), ends_in=ends_in, ca=False, address=address)
        )
        (path / "key.pem").touch(0o600)
        (path / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return path
