"""`CompiledGraph`: a graph that is ready to run."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from zcactor.api.future import ObjectRef
from zcactor.api.operation import operation
from zcactor.graphs.explaining import GraphEdge, GraphPlan
from zcactor.options import checked_seconds
from zcactor.process.context import call_deadline

if TYPE_CHECKING:
    from zcactor.graphs.runs import Runs

__all__ = ["CompiledGraph"]


class CompiledGraph:
    """A graph that is ready to run, from `zcactor.graphs.graph.Graph.compile`.

    Calling it starts a run, whose values go straight from actor to actor. Runs enter the actors' ordinary mailboxes, so
    the actors serve other calls and other graphs as well. Each method sees the runs in the order of their start. The
    graph keeps its actors alive. When one of them dies the runs under way fail with `ActorDied`; the next run compiles
    the graph again if the actor has restarts left. Dropping the graph lets its runs end.
    """

    __slots__ = ("__weakref__", "_runs")

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def __call__(self, *inputs: Any, timeout: float | None = None) -> ObjectRef[Any]:
        """Start a run. Any thread may call this.

        Args:
            inputs: a value for each input of the graph, in the order in which they were made. Arrays are shared as
                arguments of calls are; a reference stands for its value.
            timeout: seconds until the run is given up, also limited by the deadline of the method that runs; None for
                no limit.

        Returns:
            A reference to the output, or to a tuple of them. Its `cancel` gives the run up: its place is free at once,
            and its methods stop as cancelled calls do.

        Raises:
            RuntimeError: the graph is closed.
            TypeError: another number of inputs, a dtype that the graph does not take, or a timeout that is no number.
            ValueError: an input of another shape, or a negative timeout.
            MailboxFull: as many runs wait as calls to an actor may (`max_pending_calls`). Beyond `in_flight` runs wait.
            OutOfMemory: the store has no room for an input.
            RemoteError: a method raised. The reference raises this and the errors below.
            ActorDied: an actor died during the run, which may have been executed in part.
            ConnectionLost: messages of the run were lost between living actors.
            DeadlineExceeded: the timeout has passed.
        """
        runs, layout = self._runs, self._runs.layout
        if runs.closing:
            raise RuntimeError("the graph is closed: compile another one")
        if len(inputs) != len(layout.inputs):
            raise TypeError(
                f"the number of inputs of the graph is {len(layout.inputs)}, and {len(inputs)} values were given"
            )
        for index, (node, value) in enumerate(zip(layout.inputs, inputs, strict=True)):
            if node._limits is not None and type(value) is not ObjectRef:
                node._limits.check(index, value)
        timeout = checked_seconds(timeout, "the graph")
        deadline = call_deadline.get()
        if deadline is not None:
            left = max(deadline - runs.process.loop.time(), 0.0)
            timeout = left if timeout is None else min(left, timeout)
        return runs.begin(inputs, timeout)

    async def map(self, items: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
        """Run the graph for each item, and give the results in the order of the items.

        The next item is taken only while fewer than `in_flight` results of taken ones are still to come out, so that
        the memory in use does not depend on the number of items.

        Args:
            items: the input of each run; for a graph with several inputs, a tuple of them.

        Raises:
            Exception: as calling the graph and awaiting the result, at the place of the item; the iteration ends. So
                does an error of `items`.

        Leaving the iteration cancels the runs whose results have not come out.
        """
        runs = self._runs
        several = len(runs.layout.inputs) != 1
        waiting: deque[ObjectRef[Any]] = deque()
        source = _each(items)
        more, failure = True, None
        try:
            while True:
                while more and len(waiting) < runs.in_flight:
                    try:
                        item = await anext(source)
                        waiting.append(self(*item) if several else self(item))
                    except StopAsyncIteration:
                        more = False
                    except Exception as error:  # of this item, or of the source: raised in its turn
                        more, failure = False, error
                if not waiting:
                    if failure is not None:
                        raise failure
                    return
                reference = waiting[0]
                value = await reference
                waiting.popleft()
                del reference
                yield value
                del value
        finally:
            for left in waiting:
                left.cancel()
            await source.aclose()

    def explain(self) -> GraphPlan:
        """The edges of the graph, with the transport and the bytes of each."""
        runs, layout = self._runs, self._runs.layout
        own = runs.process.process
        places = [own] * (layout.start + 1) + [seat.process for seat in runs.seats]
        edges = []
        for step in layout.steps:
            edges += [self._edge(number, step.spec.label, places, places[step.number]) for number in step.needs]
        edges += [self._edge(number, "output", places, own) for number in layout.outputs]
        return GraphPlan(tuple(edges), runs.in_flight)

    def _edge(self, number: int, target: str, places: list[bytes], to: bytes) -> GraphEdge:
        runs = self._runs
        nbytes = runs.sizes.get(number, 0)
        transport = runs.paths.get((places[number], to), "") if runs.share is not None else ""
        blocks = runs.in_flight if nbytes > runs.process.config.eager_limit else 0
        return GraphEdge(runs.layout.label(number), target, transport, nbytes, blocks)

    @operation
    async def close(self) -> None:
        """Let the runs end, then have all processes forget the graph. Later runs raise ``RuntimeError``. Idempotent.

        Cancelling ends the waiting; the graph stays closed.
        """
        runs = self._runs
        runs.closing = True
        await runs.idle()
        runs.release()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a CompiledGraph belongs to the process that has compiled it, and travels nowhere")

    def __del__(self) -> None:
        runs = self._runs
        try:
            runs.process.loop.call_soon_threadsafe(runs.release)
        except RuntimeError:  # the loop is closed: the process ends, and forgets the graph
            runs.closing = True


async def _each(items: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
    """The items of either kind of iterable."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
