"""An attacker with a certificate of the cluster's CA and no token: ends TLS on both sides and relays the bytes inside.

``python -m tests.attacks.relay FOLDER HOST PORT`` listens at a port of its own, prints the port, and relays every
connection.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import sys
import threading
from pathlib import Path


def context(folder: Path, purpose: int) -> ssl.SSLContext:
    """A context like the cluster's, with the relay's certificate."""
    made = ssl.SSLContext(purpose)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(folder / "ca.pem")
    made.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return made


def carry(source: ssl.SSLSocket, sink: ssl.SSLSocket) -> None:
    """Relay one direction until it ends."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            print(f"read {len(data)} bytes", file=sys.stderr, flush=True)
            sink.sendall(data)
    for sock in (source, sink):
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)


def main() -> None:
    """Accept connections for ever."""
    folder, place = Path(sys.argv[1]), (sys.argv[2], int(sys.argv[3]))
    server, client = context(folder, ssl.PROTOCOL_TLS_SERVER), context(folder, ssl.PROTOCOL_TLS_CLIENT)
    with socket.create_server(("0.0.0.0", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            near = server.wrap_socket(listener.accept()[0], server_side=True)
            far = client.wrap_socket(socket.create_connection(place))
            for ends in ((near, far), (far, near)):
                threading.Thread(target=carry, args=ends, daemon=True).start()


if __name__ == "__main__":
    main()
