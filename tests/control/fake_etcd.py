"""The JSON gateway of an etcd in this process: a few keys, leases that end when a test says so, and faults on request.

Answers have the form that etcd 3.4.23 gives them: 64-bit numbers are strings, and what is false, 0 or empty is absent.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections import deque
from types import TracebackType
from typing import Any, Self

from aiohttp import web

Message = dict[str, Any]


class Held:
    """A request that is held up on its way: it is carried out once `go` is set, whether anybody waits or not."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.go = asyncio.Event()
        self.done = asyncio.Event()


Fault = str | Held | tuple[int, int, str] | list[Any]


class FakeEtcd:
    """The store and its server. As a context manager it listens at as many endpoints as asked for.

    Args:
        count: the number of endpoints.
        user: the user and the password, with which users exist; None for none.
    """

    def __init__(self, count: int = 1, user: tuple[str, str] | None = None) -> None:
        self.endpoints: list[str] = []
        self.revision = 1
        self.keys: dict[bytes, Message] = {}
        self.leases: dict[int, int] = {}
        """Granted seconds by lease."""
        self.kept: list[int] = []
        """Leases that were renewed, in order."""
        self.seen: list[tuple[str, str]] = []
        """The endpoint and the kind of each request."""
        self.faults: dict[str, deque[Fault]] = {}
        """For each kind of request what becomes of the next ones: ``"lost"``, ``"answer lost"``, held up, or refused
        with a status, a code and words; by such a list a request is carried out nevertheless. A fault of a kind with
        ``*`` at its end holds for all of them."""
        self.tokens: set[str] = set()
        self.user = user
        self._count = count
        self._number = 0
        self._history: list[tuple[int, Message]] = []
        self._changed = asyncio.Event()
        self._sites: list[web.TCPSite] = []
        self._runner: web.AppRunner

    async def __aenter__(self) -> Self:
        application = web.Application(client_max_size=1 << 22)
        application.router.add_post("/v3/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        for _ in range(self._count):
            site = web.TCPSite(self._runner, "127.0.0.1", 0)
            await site.start()
            self._sites.append(site)
            assert site._server is not None
            port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
            self.endpoints.append(f"127.0.0.1:{port}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        """The URL of a cluster in it."""
        return f"etcd://{','.join(self.endpoints)}/test"

    def fail(self, kind: str, *faults: Fault) -> None:
        """Let the next requests of a kind fail."""
        self.faults.setdefault(kind, deque()).extend(faults)

    def count(self, kind: str) -> int:
        """The number of requests of a kind so far."""
        return sum(each == kind for _, each in self.seen)

    # ---------------------------------------------------------------- requests

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path, body = request.match_info["path"], json.loads(await request.text())
        kind = _kind(path, body)
        self.seen.append((f"127.0.0.1:{request.url.port}", kind))
        fault: Fault | None = None
        if self.faults.get(f"{kind}*"):
            fault = self.faults[f"{kind}*"][0]
        elif self.faults.get(kind):
            fault = self.faults[kind].popleft()
        if isinstance(fault, tuple):
            return _refuse(*fault)
        if fault == "lost":
            return self._hang_up(request)
        if isinstance(fault, Held):
            fault.arrived.set()
            await fault.go.wait()
        if self.user is not None and path != "auth/authenticate":
            token = request.headers.get("Authorization", "")
            if not token:
                return _refuse(400, 3, "etcdserver: user name is empty")
            if token not in self.tokens:
                return _refuse(401, 16, "etcdserver: invalid auth token")
        if path == "watch":
            return await self._watch(request, body["create_request"])
        answer = self._carry_out(path, body)
        if isinstance(fault, Held):
            fault.done.set()
        if fault == "answer lost":
            return self._hang_up(request)
        return _refuse(*fault) if isinstance(fault, list) else answer

    @staticmethod
    def _hang_up(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    def _carry_out(self, path: str, body: Message) -> web.Response:
        match path:
            case "kv/txn":
                return web.json_response(self._txn(body))
            case "lease/grant":
                self._number += 1
                self.leases[self._number] = int(body["TTL"])
                return web.json_response({**self._header(), "ID": str(self._number), "TTL": body["TTL"]})
            case "lease/keepalive":
                lease = int(body["ID"])
                self.kept.append(lease)
                left = {"TTL": str(self.leases[lease])} if lease in self.leases else {}
                return web.json_response({"result": {**self._header(), "ID": body["ID"], **left}})
            case "lease/revoke":
                if int(body["ID"]) not in self.leases:
                    return _refuse(404, 5, "etcdserver: requested lease not found")
                self.expire(int(body["ID"]))
                return web.json_response(self._header())
            case "auth/authenticate":
                if self.user is None:
                    return _refuse(412, 9, "etcdserver: authentication is not enabled")
                if (body["name"], body["password"]) != self.user:
                    return _refuse(400, 3, "etcdserver: authentication failed, invalid user ID or password")
                self._number += 1
                self.tokens.add(f"token.{self._number}")
                return web.json_response({**self._header(), "token": f"token.{self._number}"})
        return _refuse(404, 5, "Not Found")

    def expire(self, lease: int) -> None:
        """Let a lease end, with its keys."""
        del self.leases[lease]
        gone = [key for key, kv in self.keys.items() if kv.get("lease") == str(lease)]
        if gone:
            self.revision += 1
        for key in gone:
            self._delete(key)

    def expire_all(self) -> None:
        """Let all leases end."""
        for lease in list(self.leases):
            self.expire(lease)

    # ---------------------------------------------------------------- keys

    def _header(self) -> Message:
        return {"header": {"cluster_id": "1", "member_id": "2", "revision": str(self.revision), "raft_term": "2"}}

    def _txn(self, body: Message) -> Message:
        holds = all(self._compare(each) for each in body.get("compare", ()))
        operations = body.get("success" if holds else "failure", ())
        if len(operations) > 128:
            return {"error": "etcdserver: too many operations in txn request"}
        if any(set(each) & {"request_put", "request_delete_range"} for each in operations):
            self.revision += 1
        responses = [self._operate(each) for each in operations]
        return {**self._header(), **({"succeeded": True} if holds else {}), "responses": responses}

    def _compare(self, wanted: Message) -> bool:
        field = {"CREATE": "create_revision", "VERSION": "version", "MOD": "mod_revision"}[wanted["target"]]
        return bool(self.keys.get(_bytes(wanted["key"]), {}).get(field, "0") == wanted[field])

    def _operate(self, operation: Message) -> Message:
        if "request_put" in operation:
            self._put(operation["request_put"])
            return {"response_put": self._header()}
        if "request_delete_range" in operation:
            key = _bytes(operation["request_delete_range"]["key"])
            if key in self.keys:
                self._delete(key)
            return {"response_delete_range": self._header()}
        return {"response_range": {**self._header(), **self._range(operation["request_range"])}}

    def _put(self, put: Message) -> None:
        key = _bytes(put["key"])
        old = self.keys.get(key)
        kv = {
            "key": put["key"],
            "create_revision": old["create_revision"] if old else str(self.revision),
            "mod_revision": str(self.revision),
            "version": str(int(old["version"]) + 1 if old else 1),
        }
        value = (old or {}).get("value") if put.get("ignore_value") else put.get("value")
        lease = (old or {}).get("lease") if put.get("ignore_lease") else put.get("lease")
        assert not lease or int(lease) in self.leases
        kv |= {name: each for name, each in (("value", value), ("lease", lease)) if each}
        self.keys[key] = kv
        self._happened({"kv": kv})

    def _delete(self, key: bytes) -> None:
        del self.keys[key]
        gone = {"key": base64.b64encode(key).decode(), "mod_revision": str(self.revision)}
        self._happened({"type": "DELETE", "kv": gone})

    def _range(self, wanted: Message) -> Message:
        first, end = _bytes(wanted["key"]), _bytes(wanted.get("range_end", ""))
        found = [kv for key, kv in sorted(self.keys.items()) if (first <= key < end if end else key == first)]
        limit = int(wanted.get("limit", 0)) or len(found)
        more = {"more": True} if len(found) > limit else {}
        return {**({"kvs": found[:limit], "count": str(len(found))} if found else {}), **more}

    # ---------------------------------------------------------------- changes

    def _happened(self, event: Message) -> None:
        self._history.append((self.revision, event))
        self._changed.set()
        self._changed = asyncio.Event()

    async def _watch(self, request: web.Request, wanted: Message) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await self._tell(response, {**self._header(), "created": True})
        at = 0
        while request.transport is not None:
            for revision, event in self._history[at:]:
                if event["kv"]["key"] == wanted["key"] and revision >= int(wanted["start_revision"]):
                    await self._tell(response, {**self._header(), "events": [event]})
            at = len(self._history)
            await self._changed.wait()
        return response

    @staticmethod
    async def _tell(response: web.StreamResponse, result: Message) -> None:
        await response.write(json.dumps({"result": result}).encode() + b"\n")


def _kind(path: str, body: Message) -> str:
    if path != "kv/txn":
        return path.rpartition("/")[2]
    targets = [each["target"] for each in body.get("compare", ())]
    if not targets:
        return "announce" if "request_put" in body["success"][0] else "view"
    if len(body["success"]) == 1 and "request_put" in body["success"][0] and targets == ["CREATE"]:
        return "mint"
    if "MOD" in targets:
        return "lead"
    if "VERSION" in targets:
        return "record"
    if "request_put" in body["success"][0]:
        return "touch"
    return "entry" if _bytes(body["success"][0]["request_range"]["key"]).endswith(b"/entries/cluster/state") else "page"


def _refuse(status: int, code: int, message: str) -> web.Response:
    return web.json_response({"error": message, "message": message, "code": code}, status=status)


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
