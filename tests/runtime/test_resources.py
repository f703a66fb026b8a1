"""The ledger, against a model that walks the whole queue each time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from zcactor.errors import InsufficientResources
from zcactor.runtime.resources import Ledger, request_of


def test_requests() -> None:
    assert request_of({}) == {}
    assert request_of({"num_cpus": 0, "num_gpus": 0.5, "resources": {"a": 1, "b": 0}}) == {"GPU": 0.5, "a": 1.0}
    assert request_of({"num_cpus": 2, "resources": None}) == {"CPU": 2.0}


ONE = "0" * 32


class Grants:
    """Who was granted or refused, in order."""

    def __init__(self, total: dict[str, float]) -> None:
        self.ledger = Ledger()
        self.ledger.add(ONE, total)
        self.order: list[str] = []
        self.places: dict[str, str] = {}
        self.refused: dict[str, str] = {}

    def ask(self, name: str, among: tuple[str, ...] = (ONE,), **request: float) -> Callable[[], None]:
        """Ask for `request` at one of the nodes `among`; the function that withdraws."""

        def granted(node: str) -> None:
            self.order.append(name)
            self.places[name] = node

        def refused(error: InsufficientResources) -> None:
            self.refused[name] = str(error)

        return self.ledger.acquire(request, lambda: among, granted, refused)


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
        grants.ask("both", (ONE, "a" * 32), CPU=1, tape=1)
    with pytest.raises(InsufficientResources, match=r"no node has room in all \(nodes that may be taken: none\)"):
        grants.ask("nowhere", ())
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
    grants.ask("one", (ONE, "b"), CPU=1)
    grants.ask("two", (ONE, "b"), CPU=1)
    grants.ask("nothing", ("b", ONE))
    grants.ask("three", ("b",), CPU=1)
    assert grants.places == {"one": ONE, "two": "b", "nothing": "b", "three": "b"}
    assert grants.ledger.total() == {"CPU": 3}
    assert grants.ledger.total("b") == {"CPU": 2}
    assert grants.ledger.free() == {"CPU": 0}
    grants.ask("waits", (ONE, "b"), CPU=1)
    grants.ask("waits for the first", (ONE,), CPU=1)
    grants.ledger.release("b", {"CPU": 1})
    assert grants.places["waits"] == "b"
    grants.ledger.release(ONE, {"CPU": 1})
    assert grants.places["waits for the first"] == ONE


def test_one_that_may_go_anywhere_does_not_hold_up_what_fits_elsewhere() -> None:
    grants = Grants({"CPU": 1})
    grants.ledger.add("b", {"CPU": 1, "tape": 1})
    grants.ask("first", (ONE,), CPU=1)
    grants.ask("waits", (ONE,), CPU=1)
    grants.ask("elsewhere", (ONE, "b"), CPU=1)
    assert grants.places["elsewhere"] == "b"


def test_a_new_node_serves_who_waits() -> None:
    grants = Grants({"CPU": 1})
    grants.ask("one", CPU=1)
    grants.ask("two", (ONE, "b"), CPU=1)
    grants.ledger.add("b", {"CPU": 1})
    assert grants.places["two"] == "b"


def test_a_node_that_is_gone() -> None:
    grants = Grants({"CPU": 1})
    grants.ledger.add("b", {"CPU": 2})
    grants.ask("there", ("b",), CPU=2)
    grants.ask("waits for it", ("b",), CPU=1)
    grants.ask("waits for both", (ONE, "b"), CPU=2)
    grants.ask("waits for any", (ONE, "b"), CPU=1)
    grants.ledger.remove("b")
    assert sorted(grants.refused) == ["waits for both", "waits for it"]
    assert "nodes that may be taken: none" in grants.refused["waits for it"]
    assert "this node has 1 in all" in grants.refused["waits for both"]
    assert grants.places["waits for any"] == ONE
    grants.ledger.release("b", {"CPU": 2})
    assert grants.ledger.total() == {"CPU": 1}


class LedgerMachine(RuleBasedStateMachine):
    """Whatever happens, what is granted plus what is free is the total, and nobody waits who could go."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.totals: dict[str, dict[str, float]] = {}
        self.granted: list[tuple[str, dict[str, float]]] = []
        self.waiting: list[tuple[dict[str, float], tuple[str, ...], Callable[[], None]]] = []
        self.add("x", 4, 2)

    @rule(node=st.sampled_from("xyz"), a=st.integers(0, 4), b=st.integers(0, 2))
    def add(self, node: str, a: int, b: int) -> None:
        if node not in self.totals:
            self.totals[node] = {"a": float(a), "b": float(b)}
            self.ledger.add(node, self.totals[node])

    @rule(node=st.sampled_from("yz"))
    def remove(self, node: str) -> None:
        if node in self.totals:
            del self.totals[node]
            self.granted = [each for each in self.granted if each[0] != node]
            self.ledger.remove(node)

    @rule(target=held, a=st.integers(0, 4), b=st.integers(0, 2), among=st.permutations("xyz"), most=st.integers(1, 3))
    def acquire(self, a: int, b: int, among: list[str], most: int) -> dict[str, float]:
        request = {name: float(n) for name, n in (("a", a), ("b", b)) if n}
        nodes = tuple(among[:most])
        over = []

        def settled() -> None:
            over.append(True)
            self.waiting = [entry for entry in self.waiting if entry[0] is not request]

        def grant(node: str) -> None:
            assert node in nodes
            self.granted.append((node, request))
            settled()

        try:
            withdraw = self.ledger.acquire(request, lambda: nodes, grant, lambda _: settled())
        except InsufficientResources:
            assert not any(self.possible(node, request) for node in nodes)
        else:
            if not over:
                self.waiting.append((request, nodes, withdraw))
        return request

    def possible(self, node: str, request: dict[str, float]) -> bool:
        total = self.totals.get(node)
        return total is not None and all(total[name] >= amount for name, amount in request.items())

    @rule(request=consumes(held))
    def give_back(self, request: dict[str, float]) -> None:
        for entry in list(self.waiting):
            if entry[0] is request:
                self.waiting.remove(entry)
                entry[2]()
                return
        for node, each in self.granted:
            if each is request:
                self.granted = [one for one in self.granted if one[1] is not request]
                self.ledger.release(node, request)
                return

    @invariant()
    def adds_up(self) -> None:
        for node, totals in self.totals.items():
            free = self.ledger.free(node)
            for name, total in totals.items():
                taken = sum(each.get(name, 0) for place, each in self.granted if place == node)
                assert free[name] + taken == total
        assert self.ledger.waiting == len(self.waiting)

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        awaited: set[tuple[str, str]] = set()
        for request, nodes, _ in self.waiting:
            possible = [node for node in nodes if self.possible(node, request)]
            assert possible
            for node in possible:
                free = self.ledger.free(node)
                fits = all(free[name] >= amount for name, amount in request.items())
                assert not (fits and awaited.isdisjoint((node, name) for name in request))
            awaited.update((node, name) for node in possible for name in request)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
