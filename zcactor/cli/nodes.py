"""The commands that bring nodes up and down: ``start``, ``stop``, ``token``."""

from __future__ import annotations

import asyncio
import json
import math
import os
import select
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from zcactor.cluster.child import fork_agent
from zcactor.cluster.daemon import DEFAULT_PORT, EtcdState, KeptState, start_node, state_directory, stop_nodes
from zcactor.cluster.program import OF_BATCH_SYSTEMS, Signals
from zcactor.cluster.records import nodes_here
from zcactor.config import load_config
from zcactor.control.head_log import LogUnavailable, LogUnusable
from zcactor.errors import AuthenticationError, ConnectionLost, ZcactorError
from zcactor.node.agent_main import AGAIN
from zcactor.options import check_can_be_sent
from zcactor.process.cluster import HeadService
from zcactor.process.loops import run
from zcactor.token import default_file, find_token, make_token_file
from zcactor.workers.kept_records import nodes_apart

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from zcactor.cluster.daemon import StartedNode
    from zcactor.config import Config

__all__ = [
    "WARNING", "Seconds", "custom_resources", "fail", "have_it_act", "heads_here", "is_there", "settings",
    "small", "start", "stop", "token",
]  # fmt: skip

R = TypeVar("R")

WARNING: Final = (
    "zcactor: WARNING: --force lets the head act though less than half of the nodes on record serve it. Nodes that are "
    "silent are given up, and their actors start elsewhere. If such a node still lives, cut off from here, its actors "
    "live twice: make sure that it has ended"
)


def small(config: Config, address: str) -> Config:
    """The settings of a program that only asks."""
    return replace(config, address=address, store_capacity=1 << 24, num_cpus=None, num_gpus=None)


async def is_there(config: Config, url: str, port: int) -> bool:
    """Look at the head that leads, before one is started that may be forced.

    Args:
        config: the settings.
        url: of the etcd.
        port: the port at which the head is about to be started.

    Returns:
        Whether the head that leads is at that place, so that none has to be started.

    Raises:
        ConnectionLost: a head leads that acts.
            Or etcd does not tell who leads.
        ValueError: `url` or a variable is not as it must be.
    """
    from zcactor.control.etcd_log import EtcdLog
    from zcactor.node.standby import written

    found = find_token(None, os.environ)
    if found is None:  # it is about to be made, so nothing was started yet
        return False
    log = EtcdLog.at(url, found[0], os.environ)
    try:
        async with asyncio.timeout(config.head_timeout):
            leader = await anext(aiter(log.leaders()), None)
    except TimeoutError:
        raise ConnectionLost(f"{log} does not answer in {config.head_timeout:g} s", False) from None
    except (LogUnavailable, LogUnusable) as error:
        raise ConnectionLost(str(error), False) from error
    finally:
        await log.aclose()
    if leader is None:
        return False
    try:
        told = await _ask_head(small(config, leader.address), HeadService.leader)
    except ConnectionLost:  # it was killed, and its term is about to end
        return False
    if told["state"] == "leading":
        raise ConnectionLost(f"the head at {leader.address} leads and acts: start this one without --force", False)
    return leader.address == written(config.host, port)


async def _ask_head(config: Config, method: Callable[[Any], Coroutine[Any, Any, R]]) -> R:
    from zcactor.driver import driver
    from zcactor.process.context import current

    async with driver.init(config=config):
        return await current().head.ask(method)


async def have_it_act(config: Config, url: str) -> None:
    """Have the head act that leads, and print what it gives up.

    Raises:
        ConnectionLost: no head leads, or it was lost.
    """
    from zcactor.driver import driver
    from zcactor.process.context import current

    async with driver.init(config=small(config, url)):
        head = current().head
        waits_for = (await head.ask(HeadService.leader)).get("waits_for", [])
        if waits_for:
            click.echo(f"zcactor: it waits for {', '.join(waits_for)}", err=True)
        try:
            lost = await head.ask(HeadService.force)
        except ValueError as error:
            click.echo(f"zcactor: {error}", err=True)
            return
    given_up = ", ".join(lost) or "no node"
    click.echo(f"zcactor: the head acts; it has given up {given_up}", err=True)


_AMOUNT = click.IntRange(min=0)


def fail(message: object, code: int = 1) -> click.exceptions.Exit:
    """Print an error on standard error; the result is the exception to raise."""
    if isinstance(message, ConnectionLost):  # without the note on whether a call may have run
        message = message.args[0]
    click.echo(f"zcactor: {message}", err=True)
    return click.exceptions.Exit(code)


class Seconds(click.FloatRange):
    """A finite number of seconds. No bound of a range would refuse NaN."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType.convert`."""
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is no number of seconds", param, ctx)
        return found


def settings(**given: Any) -> tuple[Config, bool]:
    """The settings, and whether a setting names the host address. `given` are those of the command line. A command that
    joins a cluster ends without a summary."""
    try:
        config, sources = load_config(given)
    except (ValueError, TypeError, OSError) as error:
        raise fail(" ".join(str(error).split()), 2) from error
    return replace(config, summary="off"), sources["host"] != "default"


def custom_resources(text: str | None) -> dict[str, float]:
    """The amounts of the option ``--resources``, by name."""
    if text is None:
        return {}
    try:
        resources = json.loads(text)
    except json.JSONDecodeError as error:
        raise fail(f"--resources is no JSON: {error}; for instance --resources '{{\"tape\": 1}}'", 2) from error
    good = isinstance(resources, dict) and all(
        isinstance(amount, int | float) and not isinstance(amount, bool) and 0 <= amount <= sys.float_info.max
        for amount in resources.values()
    )
    if not good:
        raise fail(f"--resources must be a JSON object of amounts >= 0, not {text}", 2)
    try:
        check_can_be_sent("--resources", dict.fromkeys(resources, 0))
    except ValueError as error:
        raise fail(error, 2) from error
    for name in ("CPU", "GPU"):
        if name in resources:
            raise fail(f"give {name} by --num-{name.lower()}s, not in --resources", 2)
    return {name: float(amount) for name, amount in resources.items()}


@click.command()
@click.option("--head", is_flag=True, help="Start a cluster: its head, and a node beside it.")
@click.option(
    "--address",
    metavar="HOST:PORT[,...]",
    help="Join the cluster whose head listens there, at one of several places, or an etcd:// URL.",
)
@click.option(
    "--host", help="IP address at which others reach this host. Default: this host only, or what leads to the head."
)
@click.option("--port", type=click.IntRange(0, 65535), help="Where to listen; 0 for any.  [a head's: 7433]")
@click.option("--num-cpus", type=_AMOUNT, help="CPUs that actors may reserve.")
@click.option("--num-gpus", type=_AMOUNT, help="GPUs that actors may reserve.")
@click.option("--resources", metavar="JSON", help="Custom resources.")
@click.option("--store-capacity", metavar="SIZE", help="Bound of each process's arena, as in 8GiB.")
@click.option(
    "--state",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Where a head keeps what it must not forget. Default: a folder of its address, in $XDG_STATE_HOME.",
)
@click.option(
    "--directory",
    metavar="etcd://H:P[,...][/NAME]",
    help="Keep it in etcd instead, where heads on other hosts find it.",
)
@click.option("--standby", is_flag=True, help="With --directory: lead once the head that leads now is gone.")
@click.option(
    "--force", is_flag=True, help="With --standby: let the head give up more than half of the nodes, which have ended."
)
@click.option("--fresh", is_flag=True, help="Begin a new cluster, though an earlier head's has not ended.")
@click.option("--block", is_flag=True, help="Stay in the foreground; Ctrl-C ends the node.")
def start(
    head: bool,
    address: str | None,
    host: str | None,
    port: int | None,
    num_cpus: int | None,
    num_gpus: int | None,
    resources: str | None,
    store_capacity: str | None,
    state: str | None,
    directory: str | None,
    standby: bool,
    force: bool,
    fresh: bool,
    block: bool,
) -> None:
    """Start a node of a cluster on this host.

    A head that was killed is started again by the same command, and takes its cluster over: its nodes wait for it for
    some seconds, and names, actors and counts of restarts are as before. The options of the node are of no effect then
    where the node beside the head is still there.

    With --directory a head on any host takes the cluster over. One with --standby waits for that. Where more than half
    of the nodes were lost at once, such a head waits for them, and --force lets the one that leads give them up.

    The exit status is 1 when the node could not start, and 2 for a wrong option.
    """
    if head == (address is not None):
        raise fail("give either --head, to start a cluster, or --address HOST:PORT, to join one", 2)
    if not head and (state is not None or fresh):
        raise fail("--state and --fresh are for --head: only a head keeps a log", 2)
    if not head and (directory is not None or standby):
        raise fail("--directory and --standby are for --head: only a head keeps a log", 2)
    if state is not None and directory is not None:
        raise fail("give either --state, for a log on this host, or --directory, for one in etcd", 2)
    if standby and (directory is None or fresh):
        why = "a standby takes over what is there" if fresh else "a standby needs a log that it reaches"
        raise fail(f"--standby goes with --directory etcd://... and not with --fresh: {why}", 2)
    if force and not standby:
        raise fail("--force goes with --head --directory etcd://... --standby: it is about a cluster that is there", 2)
    custom = custom_resources(resources)
    config, own_host = settings(host=host, num_cpus=num_cpus, num_gpus=num_gpus, store_capacity=store_capacity)
    if port is None:
        port = DEFAULT_PORT if head else 0
    folder = None
    kept: KeptState | EtcdState | None = None
    if directory is not None:
        kept = EtcdState(directory, fresh, standby)
    elif head and (state is not None or port):  # nobody finds a head again that listens at any port
        try:
            folder = state_directory(os.environ, config.host, port) if state is None else Path(state).absolute()
        except OSError as error:  # there is no home, or no working directory
            raise fail(f"{error}, or name a folder by --state DIR") from error
        kept = KeptState(folder, fresh)
    if force and directory is not None and _is_forced(config, directory, port):
        return
    status, follows = AGAIN, ""
    while status == AGAIN:
        try:
            node = start_node(
                replace(config, address=None), own_host=own_host, head=address, port=port, resources=custom,
                stays=not block, launch=fork_agent, follows=follows,
                state=kept,
            )  # fmt: skip
        except (ZcactorError, OSError, ValueError) as error:
            raise fail(error) from error
        with ExitStack() as staying:
            signals = staying.enter_context(Signals()) if block else None
            if signals is not None:
                _end_by(signals, node)  # before the line that names Ctrl-C is printed
            _tell(node, block, directory or (None if folder is None else str(folder)))
            if force and directory is not None:
                force = False  # it is said once
                _force(config, directory)
            status, follows = 0 if signals is None else _wait(node, signals), node.record.node
    raise click.exceptions.Exit(status)


def _is_forced(config: Config, url: str, port: int) -> bool:
    """Warn, and have the head act that waits at the very place where one is about to be started. Returns whether there
    is one."""
    try:
        there = asyncio.run(is_there(config, url, port))
    except (ZcactorError, OSError, ValueError) as error:
        raise fail(error) from error
    click.echo(WARNING, err=True)
    if there:
        _force(config, url)
    return there


def _force(config: Config, url: str) -> None:
    try:
        run(have_it_act(config, url))
    except (ZcactorError, OSError) as error:
        raise fail(error) from error


def _tell(node: StartedNode, block: bool, state: str | None) -> None:
    record = node.record
    if record.role == "head":
        click.echo(f'programs       zc.init("{record.address}")')
        click.echo(f"more nodes     zcactor start --address {record.address}")
        click.echo(f"token          {node.token}")
        click.echo("to end it      " + ("Ctrl-C" if block else "zcactor stop"))
    where = "" if block else f", log {record.log}"
    kept = "" if state is None else f", state {state}"
    click.echo(f"zcactor: {record.role} ready at {record.address} ({record.name}, pid {record.pid}{where}{kept})")
    if node.member is not None:
        _tell(node.member, block, None)


def _end_by(signals: Signals, node: StartedNode) -> None:
    """Let Ctrl-C and SIGHUP end the node in order, and SIGTERM have its actors move before, from here on. Other signals
    of batch systems, which are meant for a program, pass over."""
    signals.hand_on(OF_BATCH_SYSTEMS, lambda number: None)
    signals.hand_on((signal.SIGINT, signal.SIGHUP), lambda number: node.process.send_signal(signal.SIGHUP))
    signals.hand_on((signal.SIGTERM,), node.process.send_signal)


def _wait(node: StartedNode, signals: Signals) -> int:
    """Wait until the node has ended, or the head and the node beside it. Returns the exit status."""
    signals.wait()
    pidfd = os.pidfd_open(node.process.pid)
    try:
        while pidfd not in select.select([pidfd, signals.fd], [], [])[0]:
            pass  # a signal has come, and its handler has run
    finally:
        os.close(pidfd)
    status = node.process.wait()
    if not status and node.member is not None:  # a head that was killed leaves the node to the next one
        node.member.process.wait()
    return status


@click.command()
@click.option("--cluster", is_flag=True, help="End the whole cluster, on all hosts.")
@click.option(
    "--address", metavar="HOST:PORT[,...]", help="With --cluster: its head. Default: as for 'zcactor status'."
)
def stop(cluster: bool, address: str | None) -> None:
    """End every node of this user on this host that 'zcactor start' has started.

    Idle actors are closed in order; actors with running calls are killed. The cluster of a head ends with it, unless
    a standby is left: then that one leads, and the cluster goes on.
    """
    config, _ = settings(address=address)
    if cluster:
        _end_cluster(config)
        return
    if address is not None:
        raise fail("--address is for --cluster: without it, the nodes of this host are ended", 2)
    ended = stop_nodes(config.shutdown_timeout)
    for record, by_itself in ended:
        how = "has ended" if by_itself else "did not end in time and was killed"
        click.echo(f"zcactor: the {record.role} at {record.address} ({record.name}, pid {record.pid}) {how}")
    if not ended:
        click.echo(f"zcactor: no node of yours runs on this host{_but()}")


def _end_cluster(config: Config) -> None:
    address = config.address or heads_here()
    try:
        run(_ask_to_end(small(config, address)))
    except (ZcactorError, OSError, ValueError) as error:
        raise fail(error) from error
    click.echo(f"zcactor: the cluster at {address} has ended")


async def _ask_to_end(config: Config) -> None:
    from zcactor.driver import driver
    from zcactor.process.context import current

    async with driver.init(config=config):
        await current().head.ask(HeadService.shutdown, config.shutdown_timeout)


def _but() -> str:
    """The nodes that are listed in another session alone, for a message; empty where there are none."""
    apart = nodes_apart(os.environ)
    return apart and f" ({apart})"


def heads_here() -> str:
    """The addresses by which this host's nodes know their head, and those of heads on this host."""
    local = nodes_here()
    if not local:
        raise fail(f"no node of yours runs on this host{_but()}; give --address HOST:PORT")
    places = [
        local[0].head,
        *(record.head for record in local),
        *(each.address for each in local if each.role != "member"),
    ]
    return ",".join(dict.fromkeys(places))


@click.command()
def token() -> None:
    """Make a token for a cluster, in a file that only you can read. An existing one is left alone."""
    try:
        path = default_file(os.environ)
        make_token_file(path)
    except FileExistsError:
        click.echo(f"zcactor: there is a token in {path} already; copy that file to every host of the cluster")
    except (AuthenticationError, OSError) as error:
        raise fail(error) from error
    else:
        click.echo(f"zcactor: a token is in {path}; copy that file to every host of the cluster, with mode 0600")
