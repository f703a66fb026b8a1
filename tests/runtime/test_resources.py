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


class Grants:
    """Who was granted, in order."""

    def __init__(self, total: dict[str, float]) -> None:
        self.ledger = Ledger(total)
        self.order: list[str] = []

    def ask(self, name: str, **request: float) -> Callable[[], None]:
        """Ask for `request`; the function that withdraws."""
        return self.ledger.acquire(request, lambda: self.order.append(name))


def test_first_come_first_served() -> None:
    grants = Grants({"CPU": 2})
    grants.ask("one", CPU=2)
    grants.ask("large", CPU=2)
    grants.ask("small", CPU=0.5)
    assert grants.order == ["one"]
    grants.ledger.release({"CPU": 1})
    assert grants.order == ["one"], "the small one would fit, but is behind the large one"
    grants.ledger.release({"CPU": 1})
    assert grants.order == ["one", "large"]
    grants.ledger.release({"CPU": 2})
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
    grants.ledger.release({"tape": 1})
    assert grants.order == ["tape", "nothing", "more tape", "CPU"]


def test_withdrawing() -> None:
    grants = Grants({"CPU": 2})
    grants.ask("one", CPU=1)
    withdraw = grants.ask("large", CPU=2)
    grants.ask("small", CPU=1)
    withdraw()
    assert grants.order == ["one", "small"]
    withdraw()
    assert grants.ledger.free == {"CPU": 0}


def test_what_never_fits() -> None:
    ledger = Ledger({"CPU": 2})
    with pytest.raises(InsufficientResources, match=r"3 CPU were asked for, but this node has 2 in all"):
        ledger.acquire({"CPU": 3}, lambda: None)
    with pytest.raises(InsufficientResources, match=r"1 tape .* has 0 in all \(its resources: CPU: 2\)"):
        ledger.acquire({"tape": 1}, lambda: None)
    assert ledger.waiting == 0


def test_fractions_add_up() -> None:
    grants = Grants({"CPU": 1})
    for number in range(10):
        grants.ask(str(number), CPU=0.1)
    assert len(grants.order) == 10
    for _ in range(10):
        grants.ledger.release({"CPU": 0.1})
    assert grants.ledger.free == {"CPU": 1.0}


class LedgerMachine(RuleBasedStateMachine):
    """Whatever happens, what is granted plus what is free is the total, and nobody waits who could go."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger({"a": 4.0, "b": 2.0})
        self.granted: list[dict[str, float]] = []
        self.waiting: list[tuple[dict[str, float], Callable[[], None]]] = []

    @rule(target=held, a=st.integers(0, 4), b=st.integers(0, 2))
    def acquire(self, a: int, b: int) -> dict[str, float]:
        request = {name: float(n) for name, n in (("a", a), ("b", b)) if n}

        def grant() -> None:
            self.granted.append(request)
            self.waiting = [entry for entry in self.waiting if entry[0] is not request]

        withdraw = self.ledger.acquire(request, grant)
        if not any(each is request for each in self.granted):
            self.waiting.append((request, withdraw))
        return request

    @rule(request=consumes(held))
    def give_back(self, request: dict[str, float]) -> None:
        for entry in list(self.waiting):
            if entry[0] is request:
                self.waiting.remove(entry)
                entry[1]()
                return
        self.granted = [each for each in self.granted if each is not request]
        self.ledger.release(request)

    @invariant()
    def adds_up(self) -> None:
        for name, total in self.ledger.total.items():
            assert self.ledger.free[name] + sum(each.get(name, 0) for each in self.granted) == total
        assert self.ledger.waiting == len(self.waiting)

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        awaited: set[str] = set()
        for request, _ in self.waiting:
            fits = all(self.ledger.free[name] >= amount for name, amount in request.items())
            assert not (fits and awaited.isdisjoint(request))
            awaited.update(request)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
