"""Rights of heads and duties of members, under any order of losses, pauses, cuts and returns."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from zcactor.control.head_log import Deposed
from zcactor.control.reign import GRACE, TRANSITIONS, Allegiance, Reign, ReignEvent, ReignState

PATIENCE = 6.0
TTL, MARGIN = 2.0, 0.3
ALL = ("a", "b", "c", "d")


def leading(members: tuple[str, ...] = ALL, epoch: int = 1) -> Reign:
    """A head that leads until 10, and has asked all members at 0."""
    reign = Reign(PATIENCE)
    reign.begin(epoch, 10.0, members, 0.0)
    for member in members:
        reign.reported(member, epoch, 0.0, 1.0)
    assert reign.settle(1.0) == frozenset()
    return reign


def test_the_table() -> None:
    assert {state for state, _ in TRANSITIONS} == set(ReignState)
    assert {event for _, event in TRANSITIONS} == set(ReignEvent)
    assert all(TRANSITIONS[state, ReignEvent.DEPOSED] is ReignState.FOLLOWING for state in ReignState)


def test_a_head_begins_and_is_deposed() -> None:
    reign = Reign(PATIENCE)
    assert (reign.state(0.0), reign.age(0.0), reign.settle(0.0)) == (ReignState.FOLLOWING, None, None)
    reign.renew(100.0, 0.0)
    assert not reign.asks(0.0)
    reign.begin(1, 10.0, ALL, 0.0)
    assert reign.asks(1.0) and not reign.acts(1.0)
    for member in ALL:
        assert reign.settle(1.0) is None
        reign.reported(member, 1, 0.5, 1.0)
    assert reign.settle(1.0) == frozenset()
    assert reign.acts(1.0)
    assert not reign.see(1) and reign.acts(1.0)
    assert reign.see(2)
    assert reign.state(1.0) is ReignState.FOLLOWING
    reign.accepted("a", 1, 1.0, 1.0)
    reign.begin(3, 10.0, ALL, 2.0)
    assert not reign.acts(2.0)
    with pytest.raises(KeyError):
        reign.begin(4, 10.0, ALL, 2.0)


def test_a_term_ends_by_the_clock_before_anything_else_is_looked_at() -> None:
    reign = leading()
    assert reign.acts(9.9)
    assert not reign.acts(10.0)
    assert reign.state(10.0) is ReignState.ADRIFT
    reign.renew(20.0, 11.0)
    assert reign.acts(11.0)
    reign = Reign(PATIENCE)
    reign.begin(1, 10.0, ALL, 0.0)
    assert reign.settle(10.0) is None
    reign.renew(20.0, 11.0)
    assert reign.state(11.0) is ReignState.TAKING_OVER


def test_silent_members_are_lost_when_they_have_ended() -> None:
    reign = Reign(PATIENCE)
    reign.begin(1, 1000.0, ALL, 0.0)
    reign.reported("a", 1, 90.0, 100.0)
    assert reign.settle(500.0) is None
    reign.accepted("b", 1, 590.0, 600.0)
    assert reign.settle(600.0 + PATIENCE + GRACE - 0.1) is None
    assert reign.settle(600.0 + PATIENCE + GRACE) == frozenset("bcd")


def test_members_that_join_meanwhile_are_no_part_of_the_half() -> None:
    reign = Reign(PATIENCE)
    reign.begin(1, 1000.0, ALL, 0.0)
    reign.reported("a", 1, 0.0, 0.0)
    for member in ("e", "f", "g"):
        reign.joined(member)
        reign.reported(member, 1, 0.0, 0.0)
    assert reign.settle(500.0) is None


def test_the_half_is_waived_by_force() -> None:
    reign = Reign(PATIENCE)
    reign.begin(1, 1000.0, ALL, 0.0, forced=True)
    assert reign.settle(PATIENCE + GRACE - 0.1) is None
    assert reign.settle(PATIENCE + GRACE) == frozenset(ALL)
    first = Reign(PATIENCE)
    first.begin(1, 1000.0, (), 0.0)
    assert first.settle(0.0) == frozenset()


def test_answers_of_other_epochs_count_for_nothing() -> None:
    reign = Reign(PATIENCE)
    reign.begin(2, 1000.0, ("a",), 0.0)
    reign.reported("a", 1, 0.0, 0.0)
    assert reign.settle(500.0) is None


@pytest.mark.parametrize(
    ("heard", "age"),
    [
        ({}, 20.0),
        ({"a": 15.0, "b": 16.0}, 20.0),
        ({"a": 15.0, "b": 16.0, "c": 17.0}, 5.0),
        ({"a": 15.0, "b": 16.0, "c": 17.0, "d": 19.0}, 4.0),
    ],
)
def test_an_adrift_head_tells_the_age_of_its_knowledge(heard: dict[str, float], age: float) -> None:
    reign = leading()
    assert reign.age(9.0) == 0.0
    for member, asked in heard.items():
        reign.accepted(member, 1, asked, asked + 0.5)
    assert reign.age(20.0) == age


def test_members_in_doubt_count_against_an_adrift_head() -> None:
    reign = leading()
    reign.left("d")
    assert reign.age(20.0) == 20.0
    for member in "bc":
        reign.accepted(member, 1, 19.0, 19.0)
    assert reign.age(20.0) == 1.0
    reign.joining("c")
    assert reign.age(20.0) == 20.0
    reign.joining("e")
    reign.accepted("e", 1, 20.0, 20.0)
    assert reign.age(20.0) is None
    reign.joined("e")
    reign.joined("c")
    assert reign.age(20.0) == 1.0


def test_a_member_serves_the_greatest_epoch() -> None:
    member = Allegiance(PATIENCE, 0.0)
    member.accept(2)
    member.accept(2)
    with pytest.raises(Deposed) as raised:
        member.accept(1)
    assert (raised.value.epoch, raised.value.known) == (1, 2)
    member.accept(3)
    assert member.epoch == 3


def test_a_member_ends_without_a_head() -> None:
    member = Allegiance(PATIENCE, 0.0)
    member.accept(2)
    assert member.ends_at() == PATIENCE
    member.heard(2, 10.0, 0.0)
    assert member.ends_at() == 10.0 + PATIENCE
    member.heard(2, 12.0, 3.0)
    member.heard(2, 20.0, None)
    member.heard(1, 20.0, 0.0)
    assert member.ends_at() == 10.0 + PATIENCE


# -------------------------------------------------------------------- everything at once


@dataclasses.dataclass(eq=False)
class Member:
    name: str
    skew: float
    allegiance: Allegiance
    actors: set[int] = dataclasses.field(default_factory=set)
    head: Head | None = None
    """The head whose epoch it serves."""
    ended: bool = False


@dataclasses.dataclass(eq=False)
class Head:
    name: str
    skew: float
    reign: Reign
    stopped: bool = False
    reports: dict[str, set[int]] = dataclasses.field(default_factory=dict)
    before: int = 0
    """The last actor that was on record before its term. Orders for later ones are its own, and may be under way."""


@dataclasses.dataclass
class Frame:
    """Something on its way, for as long as the network likes."""

    kind: str
    head: Head
    member: Member
    epoch: int
    asked: float = 0.0
    age: float | None = None
    actors: frozenset[int] = frozenset()
    seen: int = 0


class Reigns(RuleBasedStateMachine):
    """Heads, members and a log, each with a clock of its own, and a network that delays and loses as it likes."""

    frames = Bundle("frames")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.leases: list[tuple[float, int, Head]] = []
        """The end of the leader's lease, its epoch and its head: at most one."""
        self.epoch = 0
        self.recorded: set[str] = set()
        self.places: dict[int, str] = {}
        """The member of each actor, as the log has it."""
        self.cut: set[str] = set()
        """The heads that do not reach the log."""
        self.reigns: dict[int, Head] = {}
        self.number = 0

    @initialize(count=st.integers(1, 5))
    def start(self, count: int) -> None:
        self.heads = [Head(f"h{number}", 1000.0 * number, Reign(PATIENCE)) for number in range(3)]
        self.members = [
            Member(f"m{number}", -77.0 * number, Allegiance(PATIENCE, -77.0 * number)) for number in range(count)
        ]
        self.recorded = {member.name for member in self.members}
        head = self.heads[0]
        self.lead(head)
        for number in range(count):
            self.talk(0, number)
        self.settle(head)
        assert head.reign.acts(head.skew)

    # ---------------------------------------------------------------- time and faults

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.leases = [each for each in self.leases if each[0] > self.now]
        for member in self.members:
            if self.now + member.skew >= member.allegiance.ends_at():
                member.ended = True
                member.actors.clear()

    @rule(tenths=st.integers(1, 30))
    def wait(self, tenths: int) -> None:
        self.pass_time(tenths / 10)

    @rule(which=st.integers(0, 2))
    def stop(self, which: int) -> None:
        self.heads[which].stopped = True

    @rule(which=st.integers(0, 2))
    def resume(self, which: int) -> None:
        self.heads[which].stopped = False

    @rule(which=st.integers(0, 2), away=st.booleans())
    def reach(self, which: int, away: bool) -> None:
        (self.cut.add if away else self.cut.discard)(self.heads[which].name)

    @rule(which=st.integers(0, 4))
    def lose(self, which: int) -> None:
        if which < len(self.members):
            self.members[which].ended = True
            self.members[which].actors.clear()

    # ---------------------------------------------------------------- the log

    def reaches(self, head: Head) -> bool:
        return not head.stopped and head.name not in self.cut

    def lead(self, head: Head) -> None:
        self.epoch += 1
        assert self.epoch not in self.reigns
        self.reigns[self.epoch] = head
        self.leases = [(self.now + TTL, self.epoch, head)]
        head.reports, head.before = {}, self.number
        at = self.now + head.skew
        head.reign.begin(self.epoch, at + TTL - MARGIN, self.recorded, at)

    @rule(which=st.integers(0, 2))
    def campaign(self, which: int) -> None:
        head = self.heads[which]
        if not self.reaches(head):
            return
        if head.reign.see(self.epoch) or not self.leases:
            if head.reign.state(self.now + head.skew) is not ReignState.FOLLOWING:
                head.reign.depose()  # its lease has ended, as the log says
            if not self.leases:
                self.lead(head)

    @rule(which=st.integers(0, 2), late=st.integers(0, 5))
    def renew(self, which: int, late: int) -> None:
        head = self.heads[which]
        asked = self.now + head.skew
        if not self.reaches(head) or head.reign.state(asked) is ReignState.FOLLOWING:
            return
        if self.commits(head):
            self.leases = [(self.now + TTL, head.reign.epoch, head)]
            self.pass_time(late / 10)
            head.reign.renew(asked + TTL - MARGIN, self.now + head.skew)
        else:
            head.reign.depose()

    def commits(self, head: Head) -> bool:
        """Whether the log makes a change for that head."""
        return self.reaches(head) and any(epoch == head.reign.epoch for _, epoch, _ in self.leases)

    # ---------------------------------------------------------------- orders

    @rule(which=st.integers(0, 2), to=st.integers(0, 4), target=frames)
    def order(self, which: int, to: int) -> Frame | None:
        """Spawn an actor: recorded first, then ordered."""
        head = self.heads[which]
        if to >= len(self.members) or head.stopped or not head.reign.acts(self.now + head.skew):
            return None
        member = self.members[to]
        if member.name not in self.recorded or not self.commits(head):
            return None
        self.number += 1
        self.places[self.number] = member.name
        return Frame("order", head, member, head.reign.epoch, actors=frozenset([self.number]))

    @rule(which=st.integers(0, 2))
    def settle_one(self, which: int) -> None:
        if self.reaches(self.heads[which]):
            self.settle(self.heads[which])

    def settle(self, head: Head) -> None:
        if not self.commits(head):
            return
        lost = head.reign.settle(self.now + head.skew)
        if lost is None:
            return
        for name in lost:
            self.recorded.discard(name)
            head.reign.left(name)

    @rule(which=st.integers(0, 2), to=st.integers(0, 4), target=frames)
    def restart(self, which: int, to: int) -> Frame | None:
        """Construct elsewhere what was at a lost member, or what its member has not reported."""
        head = self.heads[which]
        if to >= len(self.members) or not head.reign.acts(self.now + head.skew) or not self.commits(head):
            return None
        member = self.members[to]
        gone = {
            actor
            for actor, place in self.places.items()
            if place not in self.recorded
            or (place in head.reports and actor not in head.reports[place] and actor <= head.before)
        }
        if not gone or member.name not in self.recorded:
            return None
        actor = min(gone)
        self.places[actor] = member.name
        head.reports.setdefault(member.name, set()).add(actor)
        return Frame("order", head, member, head.reign.epoch, actors=frozenset([actor]))

    @rule(which=st.integers(0, 2), answered=st.booleans())
    def join(self, which: int, answered: bool) -> None:
        """Record a new member. Where the log's answer is lost, the head does not serve it."""
        head = self.heads[which]
        if len(self.members) == 5 or not head.reign.asks(self.now + head.skew) or not self.commits(head):
            return
        number = len(self.members)
        name, skew = f"m{number}", -77.0 * number
        head.reign.joining(name)
        self.recorded.add(name)
        self.members.append(Member(name, skew, Allegiance(PATIENCE, self.now + skew)))
        if answered:
            head.reign.joined(name)
            self.talk(which, number)

    # ---------------------------------------------------------------- questions

    @rule(which=st.integers(0, 2), to=st.integers(0, 4), target=frames)
    def ask(self, which: int, to: int) -> Frame | None:
        head = self.heads[which]
        state = head.reign.state(self.now + head.skew)
        if to >= len(self.members) or head.stopped or state is ReignState.FOLLOWING:
            return None
        return Frame("ask", head, self.members[to], head.reign.epoch, self.now + head.skew)

    @rule(of=st.integers(0, 4), target=frames)
    def stay(self, of: int) -> Frame | None:
        """Ask whether a member may stay."""
        return self.question(of)

    def question(self, of: int) -> Frame | None:
        if of >= len(self.members) or self.members[of].ended or self.members[of].head is None:
            return None
        member = self.members[of]
        assert member.head is not None
        return Frame("stay", member.head, member, member.allegiance.epoch, self.now + member.skew)

    @rule(which=st.integers(0, 2), to=st.integers(0, 4))
    def talk(self, which: int, to: int) -> None:
        """Ask and answer without a delay."""
        self.arrive(self.arrive(self.ask(which, to)))

    @rule(of=st.sets(st.integers(0, 4)))
    def breathe(self, of: set[int]) -> None:
        """Let members ask without a delay whether they may stay, and their heads hear of them."""
        for number in sorted(of):
            question = self.question(number)
            if question is not None:
                self.talk(self.heads.index(question.head), number)
                self.arrive(self.arrive(question))

    @rule(frame=frames, target=frames)
    def arrive(self, frame: Frame | None) -> Frame | None:
        """A frame arrives, perhaps once more."""
        if frame is None:
            return None
        head, member = frame.head, frame.member
        at = self.now + head.skew
        to_member = frame.kind in {"order", "ask", "may"}
        if member.ended if to_member else head.stopped:
            return None
        match frame.kind:
            case "order" | "ask":
                try:
                    member.allegiance.accept(frame.epoch)
                except Deposed as deposed:
                    return dataclasses.replace(frame, kind="refusal", seen=deposed.known)
                member.head = head
                if frame.kind == "ask":
                    return dataclasses.replace(frame, kind="report", actors=frozenset(member.actors))
                if frame.seen == 0:  # a request id is carried out once
                    frame.seen = 1
                    member.actors |= frame.actors
            case "refusal":
                head.reign.see(frame.seen)
            case "report":
                if frame.epoch == head.reign.epoch and head.reign.asks(at):
                    head.reports.setdefault(member.name, set(frame.actors))
                    head.reign.reported(member.name, frame.epoch, frame.asked, at)
                else:
                    head.reign.accepted(member.name, frame.epoch, frame.asked, at)
            case "stay":
                if frame.epoch == head.reign.epoch:
                    return dataclasses.replace(frame, kind="may", age=head.reign.age(at))
            case "may":
                member.allegiance.heard(frame.epoch, frame.asked, frame.age)
        return None

    # ---------------------------------------------------------------- what holds

    @invariant()
    def one_head_acts(self) -> None:
        acting = [head.name for head in self.heads if head.reign.acts(self.now + head.skew)]
        assert len(acting) <= 1, acting

    @invariant()
    def one_instance_lives(self) -> None:
        living = [actor for member in self.members for actor in member.actors if not member.ended]
        assert len(living) == len(set(living))


TestReigns = pytest.mark.slow(Reigns.TestCase)
TestReigns.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
