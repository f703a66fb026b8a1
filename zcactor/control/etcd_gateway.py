"""Requests to etcd by its JSON gateway, to whichever of several endpoints answers. Needs aiohttp, and is imported late.

The gateway is a part of etcd, at the port of its clients. `docs/explanation/decisions/0031-etcd-by-json.md` has the
reasons for it.
"""

from __future__ import annotations

import asyncio
import io
import os
import ssl
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from zcactor.control.etcd_messages import EtcdRefused, EtcdSilent, Message, answer_of, odd
from zcactor.control.head_log import LogUnusable
from zcactor.errors import AuthenticationError
from zcactor.token import check_private

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from zcactor.control.etcd_url import EtcdAccess, EtcdPlace

__all__ = ["EtcdGateway"]

NEXT_AFTER: Final = 0.7
"""Seconds without an answer after which the next endpoint is asked: two attempts fit into the 1.7 s that a term is
valid without a renewal."""
ALONE: Final = 5.0
"""Seconds for an answer of the only endpoint, as no other could be asked meanwhile. A disk that others use may take
seconds for an fsync."""
LONGEST: Final = 10.0
"""Seconds to which the time for an answer grows while nobody answers, so that a slow etcd gets its word in."""
PAUSE: Final = 0.1
"""Seconds between two rounds over all endpoints."""


class EtcdGateway:
    """The connections to one etcd.

    Args:
        place: its endpoints.
        access: the user, and the files for TLS.

    Raises:
        LogUnusable: a file for TLS cannot be read.
    """

    def __init__(self, place: EtcdPlace, access: EtcdAccess) -> None:
        self.first_limit = NEXT_AFTER if len(place.endpoints) > 1 else ALONE
        """Seconds for the first answer of an endpoint."""
        self._endpoints = place.endpoints
        self._access = access
        self._scheme = "http" if access.ca is None else "https"
        remedy = "wants TLS, set" if access.ca is None else "does not speak TLS, unset"
        self._hint = f" (if it {remedy} ZCACTOR_ETCD_CA)"
        self._at = 0
        self._token = ""
        connector = aiohttp.TCPConnector(ssl=_tls(access) or True, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())

    async def aclose(self) -> None:
        """Close all connections. Idempotent."""
        await self._session.close()

    async def call(
        self, path: str, body: Message, *, within: float, once: bool = False, limit: float | None = None
    ) -> Message:
        """Send a request until an endpoint answers it.

        Args:
            path: as in ``/v3/kv/txn``.
            body: the request.
            within: seconds after which no further round over the endpoints begins.
            once: whether the request may be carried out at most once: it is not sent again where it may have been.
            limit: seconds for the first answer of an endpoint; None for the usual ones.

        Raises:
            LogUnusable: etcd asks for another user, or no endpoint is one that could be used.
            EtcdRefused: etcd does not carry the request out.
            EtcdSilent: no endpoint has answered.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + within
        limit = limit or self.first_limit
        doubt = False
        while True:
            failures: list[EtcdSilent] = []
            start = self._at
            for step in range(len(self._endpoints)):
                at = (start + step) % len(self._endpoints)
                try:
                    answer = await self._proven(self._endpoints[at], path, body, limit)
                except EtcdSilent as failure:
                    failures.append(failure)
                    doubt = doubt or failure.doubt
                    if once and doubt:
                        self._at = (at + 1) % len(self._endpoints)
                        raise
                else:
                    self._at = at
                    return answer
            why = "; ".join(str(failure) for failure in failures)
            if all(failure.unusable for failure in failures):
                raise LogUnusable(why)
            if clock() >= deadline:
                raise EtcdSilent(why, doubt=doubt)
            limit = min(2 * limit, LONGEST)
            await asyncio.sleep(PAUSE)

    async def stream(self, path: str, body: Message, silence: float) -> AsyncIterator[Message]:
        """Send a request to the endpoint that has answered last, and yield each message of its answer.

        Args:
            path: as in ``/v3/watch``.
            body: the request.
            silence: seconds without a message after which the stream ends.

        The iterator ends where the stream does, and where the endpoint does not answer.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.first_limit, sock_read=silence)
        url = f"{self._scheme}://{self._endpoints[self._at]}{path}"
        headers = {"Authorization": self._token} if self._token else {}
        try:
            async with self._session.post(url, json=body, headers=headers, timeout=timeout) as response:
                while response.status == 200 and (line := await response.content.readline()):
                    message = msgspec.json.decode(line, type=Message)
                    if odd(path, body, message):
                        return
                    yield message
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
            return

    # ---------------------------------------------------------------- one endpoint

    async def _proven(self, endpoint: str, path: str, body: Message, limit: float) -> Message:
        """Send a request with the proof of the user, which is renewed where etcd has forgotten it."""
        if not self._access.user:
            try:
                return await self._post(endpoint, path, body, limit)
            except EtcdRefused as refused:
                if refused.stale:
                    raise LogUnusable(f"etcd at {endpoint} refuses this process: {refused}") from refused
                raise
        if not self._token:
            await self._authenticate(endpoint, limit)
        token = self._token
        try:
            return await self._post(endpoint, path, body, limit)
        except EtcdRefused as refused:
            if not refused.stale:
                raise
        if token == self._token:
            self._token = ""
            await self._authenticate(endpoint, limit)
        try:
            return await self._post(endpoint, path, body, limit)
        except EtcdRefused as refused:
            if refused.stale:  # the password may have changed once more: the next round asks again
                raise EtcdSilent(f"{endpoint} answers: {refused}", doubt=False) from refused
            raise

    async def _authenticate(self, endpoint: str, limit: float) -> None:
        body = {"name": self._access.user, "password": self._password()}
        answer = await self._post(endpoint, "/v3/auth/authenticate", body, limit)
        self._token = str(answer["token"])

    def _password(self) -> str:
        """Read the password, which may have been changed since it was read last.

        Raises:
            LogUnusable: the file cannot be read, or others can read it.
        """
        path = self._access.password_file
        assert path is not None
        try:
            with open(path, encoding="utf-8") as file:
                check_private("the file with the password", path, os.fstat(file.fileno()), "make a new one")
                return file.readline().rstrip("\r\n")
        except (OSError, UnicodeDecodeError, AuthenticationError) as error:
            raise LogUnusable(f"ZCACTOR_ETCD_PASSWORD_FILE: {error}") from error

    async def _post(self, endpoint: str, path: str, body: Message, limit: float) -> Message:
        url = f"{self._scheme}://{endpoint}{path}"
        headers = {"Authorization": self._token} if self._token else {}
        timeout = aiohttp.ClientTimeout(total=limit)
        try:
            async with self._session.post(
                url, data=io.BytesIO(msgspec.json.encode(body)), headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                status, content = response.status, await response.read()
        except aiohttp.ClientConnectorCertificateError as error:
            raise EtcdSilent(
                f"{endpoint} shows a certificate that {self._access.ca} does not vouch for, or that is another host's: "
                f"{error.certificate_error}",
                doubt=False, unusable=True,
            ) from error  # fmt: skip
        except aiohttp.ClientConnectorSSLError as error:
            raise EtcdSilent(
                f"{endpoint} does not speak TLS as ZCACTOR_ETCD_CA asks for: {error.os_error}",
                doubt=False, unusable=True,
            ) from error  # fmt: skip
        except aiohttp.ClientConnectorError as error:
            why = error.os_error.strerror or error.os_error
            if isinstance(error.os_error, ConnectionResetError):  # a plain etcd resets what begins as TLS
                why = f"it has closed the connection{self._hint}"
            raise EtcdSilent(f"{endpoint} cannot be reached: {why}", doubt=False) from error
        except aiohttp.ConnectionTimeoutError as error:
            raise EtcdSilent(f"{endpoint} does not answer within {limit:g} s", doubt=False) from error
        except aiohttp.ClientResponseError as error:
            raise EtcdSilent(
                f"{endpoint} does not speak HTTP: it needs the client port of etcd", doubt=False, unusable=True
            ) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if _refused_by_tls(error):
                raise EtcdSilent(
                    f"{endpoint} refuses this client's certificate, or wants one: check ZCACTOR_ETCD_CERT and "
                    f"ZCACTOR_ETCD_KEY ({error})",
                    doubt=False, unusable=True,
                ) from error  # fmt: skip
            if isinstance(error, TimeoutError):
                raise EtcdSilent(f"{endpoint} does not answer within {limit:g} s", doubt=True) from error
            raise EtcdSilent(
                f"{endpoint} has closed the connection without an answer{self._hint}", doubt=True
            ) from error
        answer = answer_of(endpoint, status, content, self._access.user)
        problem = odd(path, body, answer)
        if problem:
            raise EtcdSilent(
                f"{endpoint} answers {path} otherwise than etcd does ({problem}): it needs the client port of etcd 3.4 "
                "or newer",
                doubt=True, unusable=True,
            )  # fmt: skip
        return answer


def _refused_by_tls(error: BaseException | None) -> bool:
    """Whether TLS has failed after the handshake, as where a client's certificate is refused (RFC 8446, 4.4)."""
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _tls(access: EtcdAccess) -> ssl.SSLContext | None:
    if access.ca is None:
        return None
    try:
        context = ssl.create_default_context(cafile=access.ca)
    except (OSError, ssl.SSLError) as error:
        raise LogUnusable(f"ZCACTOR_ETCD_CA: {access.ca} holds no certificates: {error}") from error
    if access.cert is not None:
        try:
            context.load_cert_chain(access.cert, access.key)
        except (OSError, ssl.SSLError) as error:
            raise LogUnusable(
                f"ZCACTOR_ETCD_CERT and ZCACTOR_ETCD_KEY: {access.cert} and {access.key} cannot be used: {error}"
            ) from error
    return context
