"""A program joins a running cluster."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from zcactor import ids
from zcactor.assembly.endpoints import address_of, find_through, hear_of_heads, make_endpoint, problem_of
from zcactor.assembly.fork_guard import watch_forks
from zcactor.control.head_watch import HeadWatch
from zcactor.control.node_table import machine_of
from zcactor.driver.finding import check_address, check_reachable, find_head
from zcactor.driver.head_search import HeadSearch
from zcactor.driver.process import make_process
from zcactor.driver.runtimes import JoinedRuntime
from zcactor.errors import AuthenticationError, ConnectionLost
from zcactor.exception_pickling import hides
from zcactor.logs import logger
from zcactor.marshal.importable import search_here
from zcactor.node.agent_main import raise_descriptor_limit, search_path
from zcactor.objectstore.groups import default_capacity
from zcactor.objectstore.store import Store
from zcactor.process import context
from zcactor.process.cluster import MembershipService
from zcactor.process.epochs import Deposed
from zcactor.process.head_outage import HeadGone
from zcactor.token import default_file, find_token
from zcactor.transport.registry import prefers_host, tls_of
from zcactor.transport.stream.probe import identify
from zcactor.workers.kept_records import meeting_base, out_of_reach
from zcactor.workers.run_directory import RunDirectory, shared_names

if TYPE_CHECKING:
    from zcactor.config import Config

__tracebackhide__ = hides
__all__ = ["join"]

_AGAIN = 0.1
"""Seconds until the head is looked for again where the one that was found decides no more."""


async def join(config: Config, argument: str | None, *, own_host: bool) -> JoinedRuntime:
    """Join the cluster whose head listens at `config.address`.

    A head that was stopped and goes on answers there until it sees that another one leads, and one that was found may
    be killed before the program has joined. The program looks for the next one then, as long as for a head that does
    not answer.

    Args:
        config: the settings.
        argument: the token that the program gave, if any.
        own_host: whether a setting names `config.host`; otherwise the host is our own address on the way to the head.
    """
    assert config.address is not None
    check_address(config.address)
    loop = asyncio.get_running_loop()
    until = loop.time() + config.head_timeout
    found = False
    while True:
        try:
            return await _join_once(config, argument, own_host=own_host, patience=until - loop.time())
        except (Deposed, HeadGone) as error:
            found = True
            if loop.time() + _AGAIN > until:
                raise ConnectionLost(f"zc.init: the head at {config.address} decides no more: {error}", False) from None
        except ConnectionLost:
            if not found or loop.time() + _AGAIN > until:
                raise
        await asyncio.sleep(_AGAIN)


async def _join_once(config: Config, argument: str | None, *, own_host: bool, patience: float) -> JoinedRuntime:
    address = config.address
    assert address is not None
    found = find_token(argument, os.environ)
    if found is None:
        raise AuthenticationError(
            f"to join {address} the cluster's token is needed: copy {default_file(os.environ)} from the head's host, "
            "or set ZCACTOR_TOKEN_FILE or ZCACTOR_TOKEN, or pass token="
        )
    token, _ = found
    tls = tls_of(config)
    head = await find_head(address, token, tls, patience)
    if not own_host:
        config = replace(config, host=head.ours)
    check_reachable(config, head)
    raise_descriptor_limit()
    watch_forks()
    with contextlib.ExitStack() as undo:
        names = shared_names(head.process.hex(), token)
        directory = RunDirectory.shared(meeting_base(names, os.environ), *names)
        undo.callback(directory.remove)
        apart, gone = out_of_reach(names, directory.path, os.environ)
        if gone and prefers_host(config.transports):
            logger.warning("zc.init: calls and arrays go by other transports than local: %s", apart)
        driver = ids.new_process()
        store = Store(config.store_capacity or default_capacity(), driver)
        undo.callback(store.close)
        endpoint = make_endpoint(config, directory.path, driver, token, store, clustered=True, apart=apart)
        problem = problem_of(endpoint)
        if problem:
            raise ConnectionLost(f"zc.init: {address} cannot be joined: {problem}")
        process = make_process(config, directory, driver, store, endpoint, head.process)
        find_through(endpoint, process.places, process.head, head.address)
        process.head.identify = lambda place: identify(place, token, tls)
        watch = HeadWatch(process, process.news.known)
        process.news.on_heads = watch.told
        hear_of_heads(endpoint, watch.summoned)
        context.set_current(process)  # the answers to the calls below are unpacked in it
        try:
            await endpoint.start(process.connections.accepted)
            machine = machine_of(directory.path)
            try:
                joined = await process.head.ask(MembershipService.join_driver, address_of(endpoint), machine)
            except (ConnectionLost, AuthenticationError) as error:  # AuthenticationError: another process listens there
                if process.sessions.living(head.process) is not None:
                    raise
                raise HeadGone(str(error.args[0]), False) from error
        except BaseException:
            context.clear_current()
            await process.close()
            raise
        undo.pop_all()
    search_here(search_path())
    process.head.outage.joined(*joined)
    process.news.on_head_ends = process.head.outage.give_up
    process.connections.on_lost = HeadSearch(process, machine).session_lost
    return JoinedRuntime(config, process, directory, address)
