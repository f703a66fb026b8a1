"""The requests to etcd by its JSON gateway, and the meaning of its answers.

In the gateway's JSON 64-bit numbers are strings, bytes are base64, and a field that is false, 0 or empty is absent.

The keys of a cluster begin with ``/zcactor/NAME/``: ``head`` is the leader's, under its lease; ``token`` tells clusters
of one name apart; ``cluster`` is the id of all clusters of that name; ``candidates/ADDRESS`` are processes that lead
or would, each under a lease of its own; ``entries/KIND/KEY`` are what is recorded. All values but that of ``token``, a
hash under the token, are sealed (`zcactor.control.log_seal`): others write to etcd as well. Those of ``head`` and of
candidates belong to their leases, in place of an epoch.
"""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec

from zcactor.control.head_log import MAX_CHANGES, MAX_NBYTES, Candidate, LeaderAt, LogUnusable
from zcactor.control.log_seal import NOT_OURS, DoesNotOpen, LogSeal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from zcactor.control.head_log import Change

__all__ = [
    "PAGE", "EtcdKeys", "EtcdRefused", "EtcdSilent", "EtcdView", "Message", "answer_of", "as_epoch", "merged",
    "odd", "text_of",
]  # fmt: skip

Message = dict[str, Any]
PAGE: Final = 256
"""Entries that are read at once: with recipes of 16 KiB at most, some 4 MiB."""
_UNSURE: Final = frozenset({1, 2, 4, 13, 14})
"""Codes of gRPC that say nothing about whether the request was carried out: cancelled, unknown, deadline exceeded,
internal, unavailable (grpc/grpc, doc/statuscodes.md). A member that has lost its leader answers with the last."""
_HEAD, _CLUSTER, _CANDIDATE = "head", "cluster", "candidates"
"""The kinds of sealed values beside the entries'."""
_USER: Final = "ZCACTOR_ETCD_USER and ZCACTOR_ETCD_PASSWORD_FILE"


class EtcdRefused(Exception):
    """The answer of etcd that it does not carry a request out.

    Args:
        code: the code of gRPC.
        message: etcd's words.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.stale = code == 16 or "revision of auth store is old" in message
        """Whether the proof of the user has expired, so that authenticating again helps."""
        self.full = "space exceeded" in message
        """Whether etcd is out of space. It may have carried out the request that finds this (etcd-io/etcd,
        server/etcdserver/apply.go, quotaApplierV3)."""


class EtcdSilent(Exception):
    """No endpoint has answered.

    Args:
        why: the behaviour of each endpoint instead.
        doubt: whether the request may have been carried out, or may still be.
        unusable: whether asking again can help only after something was changed by a person.
    """

    def __init__(self, why: str, *, doubt: bool, unusable: bool = False) -> None:
        super().__init__(why)
        self.doubt = doubt
        self.unusable = unusable


# The fields of etcd's answers that are read. 64-bit numbers are strings.
_Number = Annotated[str, msgspec.Meta(pattern="^[0-9]{1,19}$")]
_Bytes = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9+/]*={0,2}$")]


class _Kv(msgspec.Struct):
    key: _Bytes
    create_revision: _Number
    mod_revision: _Number
    version: _Number
    value: _Bytes = ""
    lease: _Number = "0"


class _Range(msgspec.Struct):
    kvs: list[_Kv] = []
    more: bool = False


class _Head(msgspec.Struct):
    revision: _Number


class _Answer(msgspec.Struct):
    header: _Head
    responses: list[dict[str, Any]] = []
    succeeded: bool = False


class _Granted(msgspec.Struct):
    ID: _Number
    TTL: _Number


class _Left(msgspec.Struct):
    TTL: _Number = "0"


class _Kept(msgspec.Struct):
    result: _Left


class _Proven(msgspec.Struct):
    token: str


class _Place(msgspec.Struct):
    key: _Bytes
    mod_revision: _Number


class _Gone(msgspec.Struct):
    kv: _Place


class _Changed(msgspec.Struct):
    kv: _Kv


class _Watched(msgspec.Struct):
    events: list[dict[str, Any]] = []


class _Watch(msgspec.Struct):
    result: _Watched = msgspec.field(default_factory=_Watched)


_FORMS: Final[Mapping[str, type]] = {
    "/v3/kv/txn": _Answer, "/v3/lease/grant": _Granted, "/v3/lease/keepalive": _Kept, "/v3/auth/authenticate": _Proven,
    "/v3/watch": _Watch,
}  # fmt: skip


def odd(path: str, body: Message, answer: Message) -> str:
    """The fault of an answer to a request that was carried out: something that answers need not be etcd. Empty
    where it has the form that the functions here read."""
    form = _FORMS.get(path)
    try:
        if form is not None:
            msgspec.convert(answer, form)
        for event in answer.get("result", {}).get("events", ()) if form is _Watch else ():
            msgspec.convert(event, _Gone if event.get("type") == "DELETE" else _Changed)
        if form is _Answer:
            asked = body.get("success" if answer.get("succeeded") or "compare" not in body else "failure", [])
            found = answer.get("responses", [])
            if len(found) != len(asked):
                return f"{len(found)} parts for {len(asked)} requests"
            for request, response in zip(asked, found, strict=True):
                if "request_range" in request:
                    msgspec.convert(response.get("response_range"), _Range)
    except msgspec.ValidationError as error:
        return str(error)
    return ""


class EtcdView(NamedTuple):
    """The state of a cluster in etcd, at one moment."""

    revision: int
    """The revision of etcd's store."""
    leader: LeaderAt | None
    lease: int
    """The leader's; 0 where there is none."""
    token_revision: int
    """The revision of the last change of ``token``; 0 where that is not there."""


class EtcdKeys:
    """The requests about one cluster's keys.

    Args:
        name: the cluster's name.
        token: the cluster's token.
    """

    def __init__(self, name: str, token: bytes) -> None:
        prefix = f"/zcactor/{name}/"
        self.head = text_of(f"{prefix}head".encode())
        self._token = text_of(f"{prefix}token".encode())
        self._mark = text_of(hashlib.blake2b(name.encode(), key=token, digest_size=16).hexdigest().encode())
        self._cluster = text_of(f"{prefix}cluster".encode())
        self._candidates = f"{prefix}candidates/".encode()
        self._entries = f"{prefix}entries/".encode()
        self._name = name
        self._seal = LogSeal(token, name.encode())

    # ---------------------------------------------------------------- who leads

    def view(self) -> Message:
        """The request for what `seen` reads."""
        ranges: list[Message] = [
            {"key": self.head},
            {"key": self._token},
            {**self._range(self._entries), "limit": "1", "keys_only": True},
        ]
        return {"success": [{"request_range": each} for each in ranges]}

    def seen(self, answer: Message) -> EtcdView:
        """The meaning of the answer to `view`.

        Raises:
            LogUnusable: the cluster of that name has another token, or another program uses its keys.
        """
        head, token, entries = (_kvs(each) for each in answer["responses"])
        if token and token[0].get("value") != self._mark and (head or entries):
            raise LogUnusable(
                f"etcd has a cluster named {self._name!r} with another token: use that cluster's token, or another "
                "name at the end of the URL"
            )
        leader = self.leader(head[0]) if head else None
        return EtcdView(
            int(answer["header"]["revision"]), leader, int(head[0].get("lease", 0)) if head else 0,
            int(token[0]["mod_revision"]) if token else 0,
        )  # fmt: skip

    def leader(self, kv: Message) -> LeaderAt:
        """The leader that an entry for ``head`` names.

        Raises:
            LogUnusable: somebody without the token has written it.
        """
        me = msgspec.json.decode(self._open(_HEAD, kv, int(kv.get("lease", 0))), type=Candidate)
        return LeaderAt(int(kv["create_revision"]), me.address)

    def lead(self, me: Candidate, lease: int, token_revision: int) -> Message:
        """The transaction that makes a candidate the leader, where there is none, and where ``token`` was not changed
        since `token_revision`."""
        value = self._seal.seal(_HEAD, "", lease, msgspec.json.encode(me))
        return {
            "compare": [
                {"key": self.head, "target": "CREATE", "result": "EQUAL", "create_revision": "0"},
                {"key": self._token, "target": "MOD", "result": "EQUAL", "mod_revision": str(token_revision)},
            ],
            "success": [
                {"request_put": {"key": self.head, "value": text_of(value), "lease": str(lease)}},
                {"request_put": {"key": self._token, "value": self._mark}},
            ],
            "failure": self._head_range(),
        }

    def watch(self, revision: int) -> Message:
        """The request for changes of ``head`` from a revision on."""
        return {"create_request": {"key": self.head, "start_revision": str(revision)}}

    # ---------------------------------------------------------------- the cluster and its candidates

    def mint(self, cluster: bytes) -> Message:
        """The transaction that gives the clusters of this name their id, where they have none."""
        value = text_of(self._seal.seal(_CLUSTER, "", 0, cluster))
        return {
            "compare": [{"key": self._cluster, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}],
            "success": [{"request_put": {"key": self._cluster, "value": value}}],
            "failure": [{"request_range": {"key": self._cluster}}],
        }

    def minted(self, answer: Message, cluster: bytes) -> bytes:
        """The id after `mint` with `cluster`.

        Raises:
            LogUnusable: somebody without the token has written it.
        """
        if answer.get("succeeded"):
            return cluster
        return self._open(_CLUSTER, _kvs(answer["responses"][0])[0], 0)

    def candidate(self, me: Candidate, lease: int) -> Message:
        """The request that makes a candidate known as long as the lease lasts."""
        key = text_of(self._candidates + me.address.encode())
        value = text_of(self._seal.seal(_CANDIDATE, me.address, lease, b""))
        return {"success": [{"request_put": {"key": key, "value": value, "lease": str(lease)}}]}

    def all_candidates(self) -> Message:
        """The request for what `candidates` reads."""
        return {"success": [{"request_range": self._range(self._candidates)}]}

    def candidates(self, answer: Message) -> list[str]:
        """The addresses of all candidates, in order, without those that somebody without the token has written."""
        found = []
        for kv in _kvs(answer["responses"][0]):
            try:
                address = base64.b64decode(kv["key"]).removeprefix(self._candidates).decode()
                lease = int(kv.get("lease", 0))
                self._seal.open(
                    _CANDIDATE, address, base64.b64decode(kv.get("value", "")), latest=lease, earliest=lease
                )
            except (DoesNotOpen, UnicodeDecodeError):
                continue
            found.append(address)
        return found

    # ---------------------------------------------------------------- entries

    def sealed(
        self, epoch: int, changes: Mapping[tuple[str, str], bytes | None]
    ) -> dict[tuple[str, str], bytes | None]:
        """Changes as they are written in a term. They are sealed once, so that `are_made` knows them again."""
        return {
            place: None if value is None else self._seal.seal(*place, epoch, value) for place, value in changes.items()
        }

    def record(self, epoch: int, version: int, changes: Mapping[tuple[str, str], bytes | None]) -> Message:
        """The transaction that makes sealed changes, where the term lasts and nothing has touched ``head`` since
        `version`."""
        success: list[Message] = []
        for (kind, key), value in changes.items():
            named = {"key": text_of(self._entries + f"{kind}/{key}".encode())}
            put = {"request_put": {**named, "value": text_of(value)}} if value is not None else None
            success.append(put or {"request_delete_range": named})
        compare = [
            self._in_term(epoch), {"key": self.head, "target": "VERSION", "result": "EQUAL", "version": str(version)}
        ]  # fmt: skip
        return {"compare": compare, "success": success, "failure": self._head_range()}

    def same(self, epoch: int, changes: Iterable[tuple[str, str]]) -> Message:
        """The transaction that reads the entries of changes, where the term lasts."""
        keys = [{"key": text_of(self._entries + f"{kind}/{key}".encode())} for kind, key in changes]
        return {
            "compare": [self._in_term(epoch)], "success": [{"request_range": each} for each in keys],
            "failure": self._head_range(),
        }  # fmt: skip

    @staticmethod
    def are_made(answer: Message, changes: Mapping[tuple[str, str], bytes | None]) -> bool:
        """Whether sealed changes are made, by the answer to `same`."""
        found = [_kvs(each) for each in answer["responses"]]
        return [base64.b64decode(kvs[0].get("value", "")) if kvs else None for kvs in found] == [*changes.values()]

    def touch(self, epoch: int) -> Message:
        """The transaction that gives ``head`` its next version, where the term lasts: earlier `record` requests that
        are still under way come to nothing."""
        put = {"request_put": {"key": self.head, "ignore_value": True, "ignore_lease": True}}
        return {
            "compare": [self._in_term(epoch)], "success": [put, *self._head_range()], "failure": self._head_range()
        }  # fmt: skip

    def page(self, epoch: int, after: bytes | None, revision: int) -> Message:
        """The transaction that reads `PAGE` entries, where the term lasts.

        Args:
            epoch: of the term.
            after: the last key of the page before; None for the first page.
            revision: of the first page, from its answer; 0 for the first page.
        """
        wanted = self._range(self._entries, after)
        wanted |= {"limit": str(PAGE), "revision": str(revision)}
        return {
            "compare": [self._in_term(epoch)], "success": [{"request_range": wanted}], "failure": self._head_range()
        }  # fmt: skip

    def entry(self, epoch: int, kind: str, key: str) -> Message:
        """The transaction that reads one entry, where the term lasts; `entries` takes its answer."""
        wanted = {"key": text_of(self._entries + f"{kind}/{key}".encode())}
        return {
            "compare": [self._in_term(epoch)], "success": [{"request_range": wanted}], "failure": self._head_range()
        }  # fmt: skip

    def entries(self, epoch: int, answer: Message, state: dict[str, dict[str, bytes]]) -> bytes | None:
        """Add a page's entries to `state`, as read in the term of `epoch`. Returns its last key where there are more.

        Raises:
            LogUnusable: somebody without the token has written one.
        """
        found = answer["responses"][0]["response_range"]
        last = b""
        for kv in found.get("kvs", ()):
            last = base64.b64decode(kv["key"])
            kind, _, key = last.removeprefix(self._entries).decode("utf-8", "backslashreplace").partition("/")
            try:
                value = self._seal.open(kind, key, base64.b64decode(kv.get("value", "")), latest=epoch)
            except DoesNotOpen:
                raise self._forged(f"entries/{kind}/{key}") from None
            state.setdefault(kind, {})[key] = value
        return last if found.get("more") else None

    # ---------------------------------------------------------------- parts

    def _open(self, kind: str, kv: Message, epoch: int) -> bytes:
        """The value of a key of which a cluster has one, sealed for exactly this epoch."""
        try:
            value = base64.b64decode(kv.get("value", ""))
            return self._seal.open(kind, "", value, latest=epoch, earliest=epoch)
        except DoesNotOpen:
            raise self._forged(kind) from None

    def _forged(self, key: str) -> LogUnusable:
        return LogUnusable(
            f"the key /zcactor/{self._name}/{key} in etcd was written by somebody else: {NOT_OURS}. Let nobody else "
            f"write there, and begin anew (etcdctl del --prefix /zcactor/{self._name}/), or use another name at the "
            "end of the URL"
        )

    def _in_term(self, epoch: int) -> Message:
        return {"key": self.head, "target": "CREATE", "result": "EQUAL", "create_revision": str(epoch)}

    def _head_range(self) -> list[Message]:
        return [{"request_range": {"key": self.head}}]

    @staticmethod
    def _range(prefix: bytes, after: bytes | None = None) -> Message:
        end = prefix[:-1] + bytes([prefix[-1] + 1])
        return {"key": text_of(prefix if after is None else after + b"\0"), "range_end": text_of(end)}


def text_of(value: bytes) -> str:
    """Bytes as the gateway's JSON has them."""
    return base64.b64encode(value).decode()


def as_epoch(answer: Message) -> tuple[int, int]:
    """The epoch and the version of ``head`` in the last part of a transaction's answer; zeros where it is not there."""
    kvs = _kvs(answer["responses"][-1])
    return (int(kvs[0]["create_revision"]), int(kvs[0]["version"])) if kvs else (0, 0)


def _kvs(response: Message) -> list[Message]:
    found: list[Message] = response["response_range"].get("kvs", [])
    return found


def merged(batches: Sequence[Sequence[Change]]) -> tuple[int, dict[tuple[str, str], bytes | None]]:
    """As many of the first batches as fit into one transaction, and the changes that are left of them: etcd takes each
    key once.

    Returns:
        The number of batches, at least one, and the last value of each entry.
    """
    changes: dict[tuple[str, str], bytes | None] = {}
    for count, batch in enumerate(batches):
        more = changes | {(kind, key): value for kind, key, value in batch}
        nbytes = sum(len(key.encode()) + len(value or b"") for (_, key), value in more.items())
        if count and (len(more) > MAX_CHANGES or nbytes > MAX_NBYTES):
            return count, changes
        changes = more
    return len(batches), changes


def answer_of(endpoint: str, status: int, body: bytes, user: str) -> Message:
    """The meaning of an answer by HTTP.

    Args:
        endpoint: for the messages.
        status: of HTTP.
        body: the answer's.
        user: the user at etcd that was named; empty for none.

    Raises:
        LogUnusable: etcd asks for another user.
        EtcdRefused: etcd does not carry the request out.
        EtcdSilent: there is no etcd, or it does not know whether it has carried the request out.
    """
    try:
        answer = msgspec.json.decode(body, type=Message)
    except msgspec.DecodeError:
        if status >= 500:
            raise EtcdSilent(f"{endpoint} answers with status {status}", doubt=True) from None
        raise EtcdSilent(
            f"{endpoint} does not speak the protocol of etcd's clients by JSON (status {status}): it needs the client "
            "port of etcd 3.4 or newer",
            doubt=False, unusable=True,
        ) from None  # fmt: skip
    if status == 200:
        return answer
    code, message = answer.get("code"), str(answer.get("message") or answer.get("error"))
    if not isinstance(code, int):
        raise EtcdSilent(f"{endpoint} answers with status {status}: {message}", doubt=True)
    if "user name is empty" in message:
        raise LogUnusable(f"etcd at {endpoint} asks for a user: set {_USER}")
    if "invalid user ID or password" in message:
        raise LogUnusable(f"etcd at {endpoint} refuses the password of user {user!r}: check {_USER}")
    if "authentication is not enabled" in message:
        raise LogUnusable(f"etcd at {endpoint} has no users, and {user!r} is to be one: unset {_USER}")
    if code == 7:
        raise LogUnusable(
            f"etcd at {endpoint} does not let user {user!r} read and write the keys of this cluster: give the user a "
            "role with read and write permission for the prefix /zcactor/"
        )
    if code in _UNSURE or "too many requests" in message:
        raise EtcdSilent(f"{endpoint} answers: {message}", doubt=True)
    raise EtcdRefused(code, message)
