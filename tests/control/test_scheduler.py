"""The ledger, checked against a model that walks the whole queue each time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from zcactor.control.scheduler import Ledger, Order, request_of
from zcactor.errors import InsufficientResources
from zcactor.options import ActorSpec


def test_requests() -> None:
    assert request_of(ActorSpec("n")) == {}
    assert request_of(ActorSpec("n", num_gpus=0.5, resources={"a": 1, "b": 0})) == {"GPU": 0.5, "a": 1.0}
    assert request_of(ActorSpec("n", num_cpus=2)) == {"CPU": 2.0}


ONE = "0" * 32


class Grants:
    """A ledger, and the names of granted and refused requests, in order."""

    def __init__(self, total: dict[str, float]) -> None:
        self.ledger = Ledger()
        self.ledger.add(ONE, total)
        self.order: list[str] = []
        self.places: dict[str, str] = {}
        self.gpus: dict[str, tuple[int, ...]] = {}
        self.refused: dict[str, str] = {}

    def ask(self, name: str, where: str | None = None, near: str = ONE, **request: float) -> Callable[[], None]:
        """Ask for `request` at nodes in the order of `where` and `near`; return a function that withdraws it."""

        def granted(node: str, gpus: tuple[int, ...]) -> None:
            self.order.append(name)
            self.places[name] = node
            self.gpus[name] = gpus

        def refused(error: InsufficientResources) -> None:
            self.refused[name] = str(error)

        return self.ledger.acquire(request, Order(where, lambda: near), granted, refused)


TWO = "1" * 32


def test_a_closed_node_gets_nothing_until_it_is_open() -> None:
    grants = Grants({"CPU": 2})
    grants.ledger.add(TWO, {"CPU": 1})
    grants.ask("before", near=ONE, CPU=1)
    grants.ledger.close(ONE)
    assert not grants.ledger.is_open(ONE) and grants.ledger.is_open(TWO) and not grants.ledger.is_open("2" * 32)
    grants.ask("elsewhere", near=ONE, CPU=1)
    grants.ask("waits", near=ONE, CPU=1)
    grants.ask("only there", where=ONE, CPU=1)
    grants.ask("too large for others", CPU=2)
    assert grants.places == {"before": ONE, "elsewhere": TWO}
    assert not grants.refused
    grants.ledger.release(ONE, {"CPU": 1})
    assert grants.order == ["before", "elsewhere"]
    grants.ledger.open(ONE)
    assert grants.places == {"before": ONE, "elsewhere": TWO, "waits": ONE, "only there": ONE}
    grants.ledger.close(ONE)
    grants.ledger.remove(ONE)
    assert list(grants.refused) == ["too large for others"]
    grants.ledger.add(ONE, {"CPU": 1})
    assert grants.ledger.is_open(ONE)


def test_room_elsewhere_for_all_or_for_none() -> None:
    ledger = Ledger()
    for node in (ONE, TWO, "2" * 32):
        ledger.add(node, {"CPU": 4, "GPU": 1})
    assert ledger.room([({"CPU": 4.0}, ONE), ({"CPU": 2.0}, ONE), ({"CPU": 2.0}, ONE)]) is None
    assert ledger.room([({"CPU": 2.0}, ONE), ({"CPU": 4.0}, ONE), ({"CPU": 3.0}, ONE)]) == {"CPU": 2.0}
    assert ledger.room([({"GPU": 0.5}, ONE)] * 4) is None
    assert ledger.room([({"GPU": 0.5}, ONE)] * 5) == {"GPU": 0.5}
    ledger.close(TWO)
    assert ledger.room([({"CPU": 4.0}, ONE), ({"CPU": 1.0}, ONE)]) == {"CPU": 1.0}
    assert ledger.room([({}, ONE)]) is None
    ledger.close("2" * 32)
    assert ledger.room([({}, ONE)]) == {}
    assert ledger.free() == ledger.total(), "nothing is taken"


def test_grants_of_another_ledger_are_taken_again() -> None:
    again = Ledger()
    again.add(ONE, {"CPU": 4, "GPU": 2})
    again.restore(ONE, {"CPU": 1, "GPU": 1}, (1,))
    assert again.free() == {"CPU": 3, "GPU": 1}
    given: list[tuple[int, ...]] = []
    again.acquire({"GPU": 1}, Order(None, lambda: ONE), lambda _, gpus: given.append(gpus), lambda _: None)
    assert given == [(0,)], "the other one is taken"
    again.release(ONE, {"CPU": 1, "GPU": 1}, (1,))
    assert again.free() == {"CPU": 4, "GPU": 1}


def test_first_come_first_served() -> None:
    grants = Grants({"CPU": 2})
    grants.ask("one", CPU=2)
    grants.ask("large", CPU=2)
    grants.ask("small", CPU=0.5)
    assert grants.order == ["one"]
    grants.ledger.release(ONE, {"CPU": 1})
    assert grants.order == ["one"], "the small one would fit, but is behind the large one"
    grants.ledger.release(ONE, {"CPU": 1})
    assert grants.order == ["one", "large"]
    grants.ledger.release(ONE, {"CPU": 2})
    assert grants.order == ["one", "large", "small"]
    assert grants.ledger.waiting == 0


def test_those_who_need_something_else_do_not_wait() -> None:
    grants = Grants({"CPU": 2, "tape": 1})
    grants.ask("tape", tape=1)
    grants.ask("more tape", tape=1, CPU=1)
    grants.ask("CPU", CPU=1)
    assert grants.order == ["tape"], "CPU is awaited by the one before"
    grants.ask("nothing")
    assert grants.order == ["tape", "nothing"]
    grants.ledger.release(ONE, {"tape": 1})
    assert grants.order == ["tape", "nothing", "more tape", "CPU"]


def test_withdrawing() -> None:
    grants = Grants({"CPU": 2})
    grants.ask("one", CPU=1)
    withdraw = grants.ask("large", CPU=2)
    grants.ask("small", CPU=1)
    withdraw()
    assert grants.order == ["one", "small"]
    withdraw()
    assert grants.ledger.free() == {"CPU": 0}


def test_what_never_fits() -> None:
    grants = Grants({"CPU": 2})
    with pytest.raises(InsufficientResources, match=r"3 CPU were asked for, but this node has 2 in all"):
        grants.ask("three", CPU=3)
    with pytest.raises(InsufficientResources, match=r"1 tape .* has 0 in all \(its resources: CPU: 2\)"):
        grants.ask("tape", tape=1)
    grants.ledger.add("a" * 32, {"tape": 1})
    with pytest.raises(InsufficientResources, match=r"no node has CPU: 1, tape: 1 .*00000000: CPU: 2; aaaaaaaa: "):
        grants.ask("both", CPU=1, tape=1)
    with pytest.raises(InsufficientResources, match=r"no node has room in all \(nodes that may be taken: none\)"):
        grants.ask("nowhere", "b")
    assert grants.ledger.waiting == 0


def test_fractions_add_up() -> None:
    grants = Grants({"CPU": 1})
    for number in range(10):
        grants.ask(str(number), CPU=0.1)
    assert len(grants.order) == 10
    for _ in range(10):
        grants.ledger.release(ONE, {"CPU": 0.1})
    assert grants.ledger.free() == {"CPU": 1.0}


def test_the_first_node_with_room_is_taken() -> None:
    grants = Grants({"CPU": 1})
    grants.ledger.add("b", {"CPU": 2})
    grants.ask("one", CPU=1)
    grants.ask("two", CPU=1)
    grants.ask("nothing", near="b")
    grants.ask("three", "b", CPU=1)
    assert grants.places == {"one": ONE, "two": "b", "nothing": "b", "three": "b"}
    assert grants.ledger.total() == {"CPU": 3}
    assert grants.ledger.total("b") == {"CPU": 2}
    assert grants.ledger.free() == {"CPU": 0}
    grants.ask("waits", CPU=1)
    grants.ask("waits for the first", ONE, CPU=1)
    grants.ledger.release("b", {"CPU": 1})
    assert grants.places["waits"] == "b"
    grants.ledger.release(ONE, {"CPU": 1})
    assert grants.places["waits for the first"] == ONE


def test_one_that_may_go_anywhere_does_not_hold_up_what_fits_elsewhere() -> None:
    grants = Grants({"CPU": 1})
    grants.ledger.add("b", {"CPU": 1, "tape": 1})
    grants.ask("first", ONE, CPU=1)
    grants.ask("waits", ONE, CPU=1)
    grants.ask("elsewhere", CPU=1)
    assert grants.places["elsewhere"] == "b"


def test_a_new_node_serves_who_waits() -> None:
    grants = Grants({"CPU": 1})
    grants.ask("one", CPU=1)
    grants.ask("two", CPU=1)
    grants.ledger.add("b", {"CPU": 1})
    assert grants.places["two"] == "b"


def test_a_node_that_is_gone() -> None:
    grants = Grants({"CPU": 1})
    grants.ledger.add("b", {"CPU": 2})
    grants.ask("there", "b", CPU=2)
    grants.ask("waits for it", "b", CPU=1)
    grants.ask("waits for both", CPU=2)
    grants.ask("waits for any", CPU=1)
    grants.ledger.remove("b")
    assert sorted(grants.refused) == ["waits for both", "waits for it"]
    assert "nodes that may be taken: none" in grants.refused["waits for it"]
    assert "this node has 1 in all" in grants.refused["waits for both"]
    assert grants.places["waits for any"] == ONE
    grants.ledger.release("b", {"CPU": 2})
    assert grants.ledger.total() == {"CPU": 1}


def test_which_node_is_preferred() -> None:
    grants = Grants({"CPU": 8})
    for node in "bcd":
        grants.ledger.add(node, {"CPU": 8})
    for number in range(4):
        grants.ask(f"spread {number}", "spread", CPU=1)
    assert grants.places == {"spread 0": ONE, "spread 1": "b", "spread 2": "c", "spread 3": "d"}
    grants.ask("one more there", "c")
    for number in range(4):
        grants.ask(f"pack {number}", "pack", CPU=2 + number)
    assert [grants.places[f"pack {number}"] for number in range(4)] == ["c", "c", ONE, "b"]
    grants.ask("at home", near="d", CPU=7)
    grants.ask("elsewhere", near="d", CPU=2)
    assert (grants.places["at home"], grants.places["elsewhere"]) == ("d", ONE)
    grants.ask("no home", near="gone")
    assert grants.places["no home"] == ONE


def test_a_refusal_does_not_list_a_thousand_nodes() -> None:
    grants = Grants({"CPU": 1})
    for number in range(20):
        grants.ledger.add(f"n{number}", {"CPU": 1})
    with pytest.raises(InsufficientResources, match=r"; n6: CPU: 1; and 13 more\)"):
        grants.ask("large", CPU=2)


class Exhaustive:
    """A model of the ledger, which looks at every request and every node at each step."""

    def __init__(self) -> None:
        self.totals: dict[str, dict[str, float]] = {}
        self.free: dict[str, dict[str, float]] = {}
        self.actors: dict[str, int] = {}
        self.queue: list[tuple[int, dict[str, float], str | None, str]] = []
        self.granted: list[tuple[int, str]] = []
        self.refused: list[int] = []

    def order(self, where: str | None, near: str) -> list[str]:
        nodes = list(self.totals)
        if where == "spread":
            return sorted(nodes, key=lambda node: self.actors[node])
        if where == "pack":
            return sorted(nodes, key=lambda node: -self.actors[node])
        if where is None:
            return sorted(nodes, key=lambda node: node != near)
        return [where] if where in nodes else []

    def possible(self, request: dict[str, float], nodes: list[str]) -> list[str]:
        return [node for node in nodes if all(self.totals[node][name] >= amount for name, amount in request.items())]

    def serve(self) -> None:
        awaited: set[tuple[str, str]] = set()
        queue, self.queue = self.queue, []
        for entry in queue:
            number, request, where, near = entry
            possible = self.possible(request, self.order(where, near))
            for node in possible:
                free = self.free[node]
                fits = all(free[name] >= amount for name, amount in request.items())
                if fits and awaited.isdisjoint((node, name) for name in request):
                    for name, amount in request.items():
                        free[name] -= amount
                    self.actors[node] += 1
                    self.granted.append((number, node))
                    break
            else:
                if possible:
                    self.queue.append(entry)
                    awaited.update((node, name) for node in possible for name in request)
                else:
                    self.refused.append(number)


NODES = "wxyz"


class LedgerMachine(RuleBasedStateMachine):
    """The ledger grants and refuses as the exhaustive model does, in the same order, after any steps."""

    asked = Bundle("asked")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.model = Exhaustive()
        self.granted: list[tuple[int, str]] = []
        self.refused: list[int] = []
        self.requests: list[dict[str, float]] = []
        self.withdraw: dict[int, Callable[[], None]] = {}
        self.held: dict[int, str] = {}
        self.add("x", 4, 2)

    @rule(node=st.sampled_from(NODES), a=st.integers(0, 4), b=st.integers(0, 2))
    def add(self, node: str, a: int, b: int) -> None:
        if node not in self.model.totals:
            total = {"a": float(a), "b": float(b)}
            self.model.totals[node], self.model.free[node], self.model.actors[node] = total, dict(total), 0
            self.ledger.add(node, total)
            self.model.serve()

    @rule(node=st.sampled_from(NODES))
    def remove(self, node: str) -> None:
        if node in self.model.totals:
            del self.model.totals[node], self.model.free[node], self.model.actors[node]
            self.held = {number: place for number, place in self.held.items() if place != node}
            self.ledger.remove(node)
            self.model.serve()

    @rule(
        target=asked, a=st.integers(0, 4), b=st.integers(0, 2),
        where=st.sampled_from([None, None, "spread", "pack", *NODES]), near=st.sampled_from(NODES),
    )  # fmt: skip
    def acquire(self, a: int, b: int, where: str | None, near: str) -> int:
        request = {name: float(n) for name, n in (("a", a), ("b", b)) if n}
        number = len(self.requests)
        self.requests.append(request)

        def grant(node: str, gpus: tuple[int, ...]) -> None:
            assert gpus == ()
            self.granted.append((number, node))
            self.held[number] = node

        possible = self.model.possible(request, self.model.order(where, near))
        try:
            self.withdraw[number] = self.ledger.acquire(
                request, Order(where, lambda: near), grant, lambda _: self.refused.append(number)
            )
        except InsufficientResources:
            assert not possible
        else:
            assert possible
            self.model.queue.append((number, request, where, near))
            self.model.serve()
        return number

    @rule(number=consumes(asked))
    def give_back(self, number: int) -> None:
        node = self.held.pop(number, None)
        if node is not None:
            for name, amount in self.requests[number].items():
                self.model.free[node][name] += amount
            self.model.actors[node] -= 1
            self.ledger.release(node, self.requests[number])
        elif number in self.withdraw:
            self.withdraw[number]()
            self.model.queue = [entry for entry in self.model.queue if entry[0] != number]
        self.model.serve()

    @invariant()
    def does_as_the_model(self) -> None:
        assert self.granted == self.model.granted
        assert self.refused == self.model.refused
        assert self.ledger.waiting == len(self.model.queue)
        first = self.ledger.first
        assert (first and first.request) == (self.model.queue[0][1] if self.model.queue else None)
        for node, free in self.model.free.items():
            assert self.ledger.free(node) == free
            assert self.ledger.total(node) == self.model.totals[node]


TestLedgerMachine = pytest.mark.slow(LedgerMachine.TestCase)
TestLedgerMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_gpus_are_granted_one_by_one() -> None:
    grants = Grants({"GPU": 2})
    grants.ask("half", GPU=0.5)
    grants.ask("whole", GPU=1)
    grants.ask("most", GPU=0.7)
    assert (grants.gpus["half"], grants.gpus["whole"]) == ((0,), (1,))
    assert "most" not in grants.gpus, "the halves of two GPUs would make no room for it"
    grants.ledger.release(ONE, {"GPU": 1.0}, grants.gpus["whole"])
    assert grants.gpus["most"] == (1,)
    grants.ask("both", GPU=2)
    grants.ledger.release(ONE, {"GPU": 0.5}, grants.gpus["half"])
    assert "both" not in grants.gpus
    grants.ledger.release(ONE, {"GPU": 0.7}, grants.gpus["most"])
    assert grants.gpus["both"] == (0, 1)
    with pytest.raises(InsufficientResources, match="3 GPU were asked for, but this node has 2"):
        grants.ask("three", GPU=3)
    grants.ledger.release(ONE, {"GPU": 2.0}, grants.gpus["both"])
    assert grants.ledger.free() == grants.ledger.total() == {"GPU": 2}


def test_a_node_whose_gpus_have_room_is_found() -> None:
    grants = Grants({"GPU": 2})
    grants.ledger.add("b", {"GPU": 2})
    for name, node, amount in (("a", ONE, 0.6), ("b", ONE, 0.6), ("c", "b", 0.2), ("d", "b", 1)):
        grants.ask(name, node, GPU=amount)
    assert grants.ledger.free(ONE)["GPU"] == pytest.approx(0.8) == grants.ledger.free("b")["GPU"]
    grants.ask("most", GPU=0.7)
    assert (grants.places["most"], grants.gpus["most"]) == ("b", (0,))


class GpuMachine(RuleBasedStateMachine):
    """No GPU is given twice, fractions fill one GPU before the next, and all are free in the end."""

    asked = Bundle("asked")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.requests: list[dict[str, float]] = []
        self.grants: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.withdraw: dict[int, Callable[[], None]] = {}
        self.count = {"x": 1, "y": 3}
        for node, count in self.count.items():
            self.ledger.add(node, {"GPU": float(count), "CPU": 8.0})

    def used(self, node: str) -> list[float]:
        """The share of each GPU that is in use, by the grants alone."""
        shares = [0.0] * self.count[node]
        for number, (place, gpus) in self.grants.items():
            amount = self.requests[number]["GPU"]
            for gpu in gpus if place == node else ():
                shares[gpu] += min(amount, 1.0)
        return shares

    @rule(
        target=asked, amount=st.sampled_from([0.1, 0.25, 0.3, 0.5, 0.7, 1.0, 1.0, 2.0, 3.0]),
        where=st.sampled_from([None, "spread", "pack", "x", "y"]),
    )  # fmt: skip
    def acquire(self, amount: float, where: str | None) -> int:
        number = len(self.requests)
        self.requests.append({"GPU": amount, "CPU": 0.5})

        def grant(node: str, gpus: tuple[int, ...]) -> None:
            before = self.used(node)
            assert len(set(gpus)) == len(gpus) == max(1, int(amount))
            assert all(before[gpu] < 1e-6 for gpu in gpus) or amount < 1.0
            if amount < 1.0 and before[gpus[0]] < 1e-6:
                assert all(share < 1e-6 or share + amount > 1.0 + 1e-9 for share in before), "another had room"
            self.grants[number] = node, gpus

        try:
            self.withdraw[number] = self.ledger.acquire(
                self.requests[number], Order(where, lambda: "x"), grant, lambda error: pytest.fail(str(error))
            )
        except InsufficientResources:
            assert amount > (1 if where == "x" else 3)
        return number

    @rule(number=consumes(asked))
    def give_back(self, number: int) -> None:
        grant = self.grants.pop(number, None)
        if grant is not None:
            self.ledger.release(grant[0], self.requests[number], grant[1])
        elif number in self.withdraw:
            self.withdraw[number]()

    @invariant()
    def no_gpu_is_given_twice(self) -> None:
        for node, count in self.count.items():
            used = self.used(node)
            assert all(share < 1.0 + 1e-6 for share in used)
            assert self.ledger.free(node)["GPU"] == pytest.approx(count - sum(used))

    def teardown(self) -> None:
        for number in range(len(self.requests)):
            self.give_back(number)
        assert self.ledger.free() == self.ledger.total()


TestGpuMachine = GpuMachine.TestCase
TestGpuMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
