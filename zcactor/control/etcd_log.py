"""A head's log in etcd, of which several heads of a cluster can be candidates."""

from __future__ import annotations

import asyncio
import contextlib
import math
from functools import partial
from typing import TYPE_CHECKING, Final

from zcactor.control.etcd_messages import EtcdKeys, EtcdRefused, EtcdSilent, as_epoch, merged
from zcactor.control.etcd_url import find_access, parse_url
from zcactor.control.head_log import Deposed, LogInUse, LogUnavailable, LogUnusable, check_batch
from zcactor.control.head_watch import boot_clock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence

    from zcactor.control.etcd_gateway import EtcdGateway
    from zcactor.control.etcd_messages import EtcdView, Message
    from zcactor.control.etcd_url import EtcdAccess, EtcdPlace
    from zcactor.control.head_log import Candidate, Change, HeadState, LeaderAt, Term

__all__ = ["KNOWN", "EtcdCandidates", "EtcdLog", "EtcdTerm"]

KNOWN: Final = 10
"""Seconds for which a candidate is known that was killed."""


class EtcdCandidates:
    """The candidates of one cluster. Used on the loop's thread.

    Args:
        gateway: returns the way to etcd, or raises LogUnusable.
        keys: of the cluster.
    """

    def __init__(self, gateway: Callable[[], EtcdGateway], keys: EtcdKeys) -> None:
        self._gateway = gateway
        self._keys = keys
        self.lease = 0
        """The lease under which others know of this process; 0 where they do not."""

    async def announce(self, me: Candidate) -> None:
        """Have others know of this process, until this is cancelled. Its lease lasts on then for a while."""
        while True:
            try:
                await self._renew(me)
            except EtcdRefused:
                self.lease = 0  # it has ended
            except (EtcdSilent, LogUnusable):
                pass  # it lasts for a while, or is made again
            await asyncio.sleep(KNOWN / 5)

    async def _renew(self, me: Candidate) -> None:
        call = self._gateway().call
        if self.lease:
            answer = await call("/v3/lease/keepalive", {"ID": str(self.lease)}, within=0)
            if answer.get("result", {}).get("TTL"):
                return
            self.lease = 0
        lease = int((await call("/v3/lease/grant", {"TTL": str(KNOWN)}, within=0))["ID"])
        await call("/v3/kv/txn", self._keys.candidate(me, lease), within=0)
        self.lease = lease

    async def all(self) -> list[str]:
        """The addresses of all candidates, ``host:port``.

        Raises:
            EtcdSilent, EtcdRefused, LogUnusable: etcd does not tell them.
        """
        return self._keys.candidates(await self._gateway().call("/v3/kv/txn", self._keys.all_candidates(), within=0))


TTL: Final = 2
"""Seconds that a term lasts without a renewal: the least that etcd grants with its usual election timeout of 1 s."""
MARGIN: Final = 0.3
"""Seconds by which a term ends earlier here than in etcd: clocks of two hosts drift by less than that in `TTL`, and
what was checked just before has been sent by then."""
LONGEST: Final = 10.0
"""Seconds to which the time for an answer to changes grows."""
PAUSE: Final = 0.1
"""Seconds until etcd is asked again."""
LAST: Final = 1.0
"""Seconds for the answer to the last request of a term. Without it, the term ends `TTL` later."""
_TXN: Final = "/v3/kv/txn"
_NOT_FOUND: Final = 5
"""The code of gRPC for a lease that has ended."""


class EtcdTerm:
    """The right to decide, renewed by a lease of etcd."""

    def __init__(self, lease: int, until: float) -> None:
        self.epoch = 0
        self.lease = lease
        self.until = until
        self.version = 1
        """The version of the leader's key."""
        self.doubt = False
        """Whether a request may still be under way that would make changes."""
        self.over = False

    def valid_until(self) -> float:
        """The time until which nobody else can lead, in seconds of CLOCK_BOOTTIME."""
        return -math.inf if self.over else self.until


class EtcdLog:
    """The log of one head, or of a process that only follows `leaders`; see `zcactor.control.head_log.HeadLog`.

    etcd's leases exclude nobody by themselves (Jepsen, etcd 3.4.3, 2020). So every transaction compares the revision in
    which the leader's key was made, which is the epoch. It also compares that key's version: a transaction without an
    answer may be carried out later, so the key gets its next version before the same changes are sent again. A
    transaction that was held up on its way comes to nothing then.

    `record` raises `LogUnavailable` only where it is certain that nothing was changed. Where it is not, it waits until
    etcd answers again, or the term is over. Cancelling it is safe, and leaves the changes to the writer.

    Batches of one turn of the loop, and those that arrive while etcd is busy, are one transaction as far as they fit.

    Args:
        place: where etcd is; see `zcactor.control.etcd_url`.
        access: how it is reached.
        token: the cluster's token. A cluster of the same name with another token is refused.
        patience: seconds after which an etcd that does not answer is reported. Once a campaign has heard of etcd, it
            waits for as long as it takes.
        clock: the clock of terms.
    """

    recipe_nbytes: int = 16 << 10

    def __init__(
        self, place: EtcdPlace, access: EtcdAccess, token: bytes, *, patience: float = 5.0,
        clock: Callable[[], float] = boot_clock,
    ) -> None:  # fmt: skip
        self._place = place
        self._access = access
        self._keys = EtcdKeys(place.name, token)
        self._patience = patience
        self._clock = clock
        self._made: EtcdGateway | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._last: set[asyncio.Task[None]] = set()
        """Those of `_tasks` that are waited for at the end."""
        self._term: EtcdTerm | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._pending: list[tuple[EtcdTerm, Sequence[Change], asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._failure: LogUnusable | None = None
        self._leader: LeaderAt | None = None
        self._revision = 0
        """The revision of `_leader`; 0 before the first answer."""
        self._greatest = 0
        """The greatest epoch that is known."""
        self._changed = asyncio.Event()
        self._candidates = EtcdCandidates(self._gateway, self._keys)

    @classmethod
    def at(cls, url: str, token: bytes, environ: Mapping[str, str]) -> EtcdLog:
        """The log at a URL, with the access that the environment describes.

        Raises:
            ValueError: the URL or a variable is not as it must be; see `zcactor.control.etcd_url`.
        """
        return cls(parse_url(url), find_access(environ), token)

    def __str__(self) -> str:
        return str(self._place)

    # ---------------------------------------------------------------- terms

    async def campaign(self, me: Candidate) -> Term:
        if self._term is not None and not self._term.over:
            raise LogInUse(str(self), me)
        try:
            view = await self._look(self._patience)
        except EtcdSilent as silent:
            raise self._unavailable(silent) from silent
        while True:
            if view.leader is None:
                term = await self._stand(me, view)
                if term is not None:
                    return term
            else:
                await self._vacant(view.revision)
            view = await self._look(math.inf)

    async def _vacant(self, revision: int) -> None:
        """Wait until nobody leads, after `revision`."""
        self._watch()
        while self._leader is not None or self._revision < revision:
            if self._failure is not None:
                raise self._failure
            await self._changed.wait()

    async def _stand(self, me: Candidate, view: EtcdView) -> EtcdTerm | None:
        """Try to lead. Returns None where another candidate was faster."""
        asked = self._clock()
        try:
            granted = await self._call("/v3/lease/grant", {"TTL": str(TTL)}, within=math.inf)
        except EtcdRefused as refused:
            raise self._unavailable(refused) from refused
        term = EtcdTerm(int(granted["ID"]), asked + int(granted["TTL"]) - MARGIN)
        keeping = self._start(self._keep(term))
        try:
            term.epoch = await self._win(me, term, view)
        finally:
            if not term.epoch:
                keeping.cancel()
                self._last.add(self._start(self._revoke(term.lease)))
        if not term.epoch:
            return None
        self._term, self._keeping = term, keeping
        self._greatest = max(self._greatest, term.epoch)
        return term

    async def _win(self, me: Candidate, term: EtcdTerm, view: EtcdView) -> int:
        """Make the leader's key. Returns the epoch; 0 where there is another leader, or the lease has ended."""
        while view.leader is None and not term.over:
            body = self._keys.lead(me, term.lease, view.token_revision)
            try:
                answer = await self._call(_TXN, body, within=math.inf, once=True)
            except EtcdSilent:
                await asyncio.sleep(PAUSE)
            except EtcdRefused as refused:
                if refused.code != _NOT_FOUND:  # the lease has ended
                    raise self._unavailable(refused) from refused
                return 0
            else:
                if answer.get("succeeded"):
                    return int(answer["header"]["revision"])
            view = await self._look(math.inf)
        return view.leader.epoch if view.leader is not None and view.lease == term.lease else 0

    async def _keep(self, term: EtcdTerm) -> None:
        """Renew a term until it is over."""
        gateway = self._gateway()
        limit = min(gateway.first_limit, TTL)
        while True:
            await asyncio.sleep(TTL / 3)
            asked = self._clock()
            try:
                answer = await gateway.call("/v3/lease/keepalive", {"ID": str(term.lease)}, within=0, limit=limit)
            except EtcdRefused as refused:
                if refused.code != _NOT_FOUND:
                    continue
                answer = {}
            except (EtcdSilent, LogUnusable):
                continue  # the term is valid again later where its lease outlives that
            left = int(answer.get("result", {}).get("TTL", 0))
            if not left:
                term.over = True
                return
            term.until = asked + left - MARGIN

    async def resign(self, term: Term) -> None:
        held = self._term
        if held is not None and held.epoch == term.epoch and not held.over:
            self._end(held)
            await self._revoke(held.lease)

    def _end(self, term: EtcdTerm) -> None:
        term.over = True
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None

    async def _revoke(self, lease: int) -> None:
        """Give a lease back. Where etcd does not answer, it ends by itself."""
        try:
            await self._gateway().call("/v3/lease/revoke", {"ID": str(lease)}, within=0, limit=LAST)
        except (EtcdSilent, EtcdRefused, LogUnusable):
            return

    async def aclose(self) -> None:
        if self._closed:
            return
        if self._term is not None:
            await self.resign(self._term)
        self._closed = True
        for task in self._tasks - self._last:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        if self._candidates.lease:
            await self._revoke(self._candidates.lease)
        self._notify()
        if self._made is not None:
            await self._made.aclose()

    # ---------------------------------------------------------------- entries

    async def load(self, term: Term) -> HeadState:
        self._check(term)
        state: dict[str, dict[str, bytes]] = {}
        after: bytes | None = None
        revision = 0
        while True:
            try:
                answer = await self._call(_TXN, self._keys.page(term.epoch, after, revision), within=self._patience)
            except EtcdRefused as refused:
                if "compacted" not in str(refused):
                    raise self._unavailable(refused) from refused
                state, after, revision = {}, None, 0  # history was dropped meanwhile
                continue
            except (EtcdSilent, LogUnusable) as error:
                raise self._unavailable(error) from error
            if not answer.get("succeeded"):
                raise self._deposed(term.epoch, answer)
            after = self._keys.entries(term.epoch, answer, state)
            if after is None:
                return state
            revision = revision or int(answer["header"]["revision"])

    async def entry_of(self, epoch: int, kind: str, key: str) -> bytes | None:
        """One entry as it is in the term of another head, of that epoch; None where there is none, or that is over.

        Raises:
            LogUnusable: the entry is not of a holder of the cluster's token.
            LogUnavailable: the log does not answer.
        """
        try:
            answer = await self._call(_TXN, self._keys.entry(epoch, kind, key), within=self._patience)
        except (EtcdSilent, EtcdRefused) as error:
            raise self._unavailable(error) from error
        state: dict[str, dict[str, bytes]] = {}
        if answer.get("succeeded"):
            self._keys.entries(epoch, answer, state)
        return state.get(kind, {}).get(key)

    async def record(self, term: Term, changes: Sequence[Change]) -> None:
        check_batch(changes)
        held = self._check(term)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append((held, tuple(changes), done))
        if self._writing is None:
            self._writing = self._start(self._write_all())
            self._writing.add_done_callback(self._written)
        await done

    async def _write_all(self) -> None:
        """Write what is pending, and what becomes so meanwhile."""
        while self._pending:
            term = self._pending[0][0]
            count, changes = merged([each for owner, each, _ in self._pending if owner is term])
            failure: LogUnavailable | Deposed | None = None
            try:
                await self._write(term, changes)
            except (LogUnavailable, Deposed) as error:
                failure = error
            batches, self._pending = self._pending[:count], self._pending[count:]
            for _, _, done in batches:
                if not done.done():
                    done.set_result(None) if failure is None else done.set_exception(failure)
        self._writing = None

    def _written(self, writing: asyncio.Task[None]) -> None:
        """Let nobody wait for changes in vain where `_write_all` was cancelled, or has a defect."""
        if self._writing is not writing:
            return
        self._writing = None
        batches, self._pending = self._pending, []
        failure = None if writing.cancelled() else writing.exception()
        for term, _, done in batches:
            if not done.done():
                done.set_exception(failure or self._deposed(term.epoch))

    async def _write(self, term: EtcdTerm, changes: dict[tuple[str, str], bytes | None]) -> None:
        """Make changes once.

        Raises:
            Deposed: the term is over.
            LogUnavailable: etcd does not take them, and nothing was changed.
        """
        changes = self._keys.sealed(term.epoch, changes)
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._patience
        limit = self._gateway().first_limit
        unsure = False
        while not term.over:
            try:
                answer = await self._attempt(term, changes, limit)
            except (EtcdSilent, EtcdRefused, LogUnusable) as error:
                unsure = unsure or term.doubt
                patient = isinstance(error, EtcdSilent) and clock() < deadline
                if not unsure and not patient:
                    raise self._unavailable(error) from error
                limit = min(2 * limit, LONGEST)
                await asyncio.sleep(PAUSE)
                continue
            if answer.get("succeeded"):
                return
            epoch, version = as_epoch(answer)
            if epoch != term.epoch:
                raise self._deposed(term.epoch, answer)
            term.version = version  # an earlier `touch` has arrived late
        raise self._deposed(term.epoch)

    async def _attempt(self, term: EtcdTerm, changes: dict[tuple[str, str], bytes | None], limit: float) -> Message:
        """Send changes once. Returns the answer of etcd, also where it has made none of them."""
        call = self._gateway().call
        if term.doubt:
            answer = await call(_TXN, self._keys.touch(term.epoch), within=0, limit=limit)
            epoch, version = as_epoch(answer)
            if epoch != term.epoch:
                return answer
            term.version, term.doubt = version, False
        try:
            body = self._keys.record(term.epoch, term.version, changes)
            return await call(_TXN, body, within=0, once=True, limit=limit)
        except EtcdSilent as silent:
            term.doubt = silent.doubt
            raise
        except EtcdRefused as refused:
            if not (refused.full and await self._are_made(term, changes)):
                raise
            return {"succeeded": True}

    async def _are_made(self, term: EtcdTerm, changes: dict[tuple[str, str], bytes | None]) -> bool:
        """Whether changes were made that etcd has refused as it is out of space. Waits until it tells.

        Raises:
            Deposed: the term is over.
        """
        while not term.over:
            with contextlib.suppress(EtcdSilent, EtcdRefused, LogUnusable):  # as where it is not known what was made
                answer = await self._gateway().call(_TXN, self._keys.same(term.epoch, changes), within=0)
                if answer.get("succeeded"):
                    return self._keys.are_made(answer, changes)
                raise self._deposed(term.epoch, answer)
            await asyncio.sleep(PAUSE)
        raise self._deposed(term.epoch)

    # ---------------------------------------------------------------- the leader

    async def leaders(self) -> AsyncIterator[LeaderAt | None]:
        self._watch()
        told = False
        last: LeaderAt | None = None
        while not self._closed:
            if self._failure is not None:
                raise self._failure
            if self._revision and (not told or self._leader != last):
                told, last = True, self._leader
                yield last
            else:
                await self._changed.wait()

    def _watch(self) -> None:
        if self._watching is None:
            self._failure = None
            self._watching = self._start(self._follow())

    async def _follow(self) -> None:
        """Follow the leader's key. A stream that is silent for `TTL` may be one that was cut off: then the key is read
        again, from whichever endpoint answers."""
        while True:
            try:
                view = await self._look(math.inf)
                self._note(view.leader, view.revision)
                watching = partial(self._gateway().stream, "/v3/watch", self._keys.watch(view.revision + 1))
                async for message in watching(TTL):
                    result = message.get("result", {})
                    for event in result.get("events", ()):
                        gone = event.get("type") == "DELETE"
                        self._note(None if gone else self._keys.leader(event["kv"]), int(event["kv"]["mod_revision"]))
                    if result.get("canceled") or "error" in message:
                        break
            except LogUnusable as failure:
                self._failure, self._watching = failure, None
                self._notify()
                return
            except LogUnavailable:
                pass  # etcd refuses to read at present
            await asyncio.sleep(PAUSE)

    def _note(self, leader: LeaderAt | None, revision: int) -> None:
        if leader is not None:
            self._greatest = max(self._greatest, leader.epoch)
        self._leader, self._revision = leader, revision
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # ---------------------------------------------------------------- the cluster and its candidates

    async def cluster(self, proposed: bytes) -> bytes:
        """The id of all clusters of this name, which is `proposed` where they have none yet.

        Raises:
            LogUnusable: the log cannot be used as it is.
            LogUnavailable: the log does not answer.
        """
        try:
            await self._look(self._patience)  # whether they have another token
            answer = await self._call(_TXN, self._keys.mint(proposed), within=self._patience)
        except (EtcdSilent, EtcdRefused) as error:
            raise self._unavailable(error) from error
        return self._keys.minted(answer, proposed)

    def announce(self, me: Candidate) -> None:
        """Have others know that this process leads or would, until the log is closed. Call it once."""
        self._start(self._candidates.announce(me))

    async def candidates(self) -> list[str]:
        """The addresses of those that lead or would, ``host:port``.

        Raises:
            LogUnavailable: the log does not answer.
        """
        try:
            return await self._candidates.all()
        except (EtcdSilent, EtcdRefused, LogUnusable) as error:
            raise self._unavailable(error) from error

    # ---------------------------------------------------------------- parts

    def _gateway(self) -> EtcdGateway:
        if self._made is None:
            try:
                from zcactor.control.etcd_gateway import EtcdGateway
            except ImportError as error:
                raise LogUnusable(f"{self} needs aiohttp: pip install 'zcactor[etcd]'") from error
            self._made = EtcdGateway(self._place, self._access)
        return self._made

    async def _call(self, path: str, body: Message, *, within: float, once: bool = False) -> Message:
        return await self._gateway().call(path, body, within=within, once=once)

    async def _look(self, within: float) -> EtcdView:
        try:
            return self._keys.seen(await self._call(_TXN, self._keys.view(), within=within))
        except EtcdRefused as refused:
            raise self._unavailable(refused) from refused

    def _start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _check(self, term: Term) -> EtcdTerm:
        if self._term is None or self._term.epoch != term.epoch or self._term.over:
            raise self._deposed(term.epoch)
        return self._term

    def _deposed(self, epoch: int, answer: Message | None = None) -> Deposed:
        """The error that a term is over; `answer` ends with what is known of the leader's key."""
        if self._term is not None and self._term.epoch == epoch:
            self._end(self._term)
        self._greatest = max(self._greatest, epoch, as_epoch(answer)[0] if answer is not None else 0)
        return Deposed(epoch, self._greatest)

    def _unavailable(self, error: Exception) -> LogUnavailable:
        if isinstance(error, EtcdRefused) and error.full:
            return LogUnavailable(
                str(self), "etcd is out of space (its alarm NOSPACE): compact and defragment it, or raise "
                "--quota-backend-bytes, then run: etcdctl alarm disarm",
            )  # fmt: skip
        return LogUnavailable(str(self), str(error))
