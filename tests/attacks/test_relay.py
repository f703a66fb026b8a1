"""An attacker at another address, with a certificate of the cluster's CA and no token, who relays decrypted bytes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.hosts import TOKEN, Hosts, cluster, missing
from tests.transport.certificates import Authority

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

PROGRAM = """
import asyncio, sys
import zcactor as zc

async def main():
    async with asyncio.timeout(30):
        async with zc.init(sys.argv[1], store_capacity=1 << 26):
            print("joined", len(await zc.nodes()))

try:
    zc.run(main())
except zc.ZcactorError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def authority() -> Authority:
    """The authority that has signed all certificates."""
    return Authority()


@pytest.fixture(scope="module")
def encrypted(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hosts, str, Path]]:
    """A cluster with `tls`, its head's address, and the folder of its hosts."""
    folder = authority.folder(tmp_path_factory.mktemp("tls") / "hosts")
    with cluster({"ZCACTOR_SECURITY": f"tls:{folder}"}) as (hosts, head):
        yield hosts, head, folder


def join(hosts: Hosts, place: str, folder: Path) -> str:
    """The output of a program that tries to join at `place`."""
    line = [sys.executable, "-c", PROGRAM, place]
    with hosts.b.start(
        *line,
        env={**TOKEN, "ZCACTOR_SECURITY": f"tls:{folder}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        output, _ = process.communicate(timeout=60)
    return str(output)


def test_a_program_does_not_join_through_a_relay(
    encrypted: tuple[Hosts, str, Path], authority: Authority, tmp_path: Path
) -> None:
    hosts, head, folder = encrypted
    own = authority.folder(tmp_path / "relay")
    assert join(hosts, head, folder).startswith("joined 2")
    address, _, port = head.rpartition(":")
    log = tmp_path / "log"
    with log.open("w") as errors:
        relay = hosts.b.start(
            sys.executable, "-m", "tests.attacks.relay", str(own), address, port,
            stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
        assert relay.stdout is not None
        with relay.stdout:
            place = f"{hosts.b.address}:{relay.stdout.readline().strip()}"
            told = join(hosts, place, folder)
        relay.kill()
        relay.wait(30)
    assert told.startswith("AuthenticationError"), told
    assert "bytes" in log.read_text(), "both ends had spoken to the relay, which read what they said"
