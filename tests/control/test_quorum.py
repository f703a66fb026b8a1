"""Rights of heads and duties of members, under any order of losses, pauses, cuts and returns."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from zcactor.control.head_log import Deposed
from zcactor.control.quorum import GRACE, TRANSITIONS, Allegiance, LeaderEvent, LeaderState, Quorum

PATIENCE = 6.0
TTL, MARGIN = 2.0, 0.3
ALL = ("a", "b", "c", "d")


def leading(members: tuple[str, ...] = ALL, epoch: int = 1) -> Quorum:
    """A head that leads until 10, and has asked all members at 0."""
    quorum = Quorum(PATIENCE)
    quorum.begin(epoch, 10.0, members, 0.0)
    for member in members:
        quorum.reported(member, epoch, 0.0, 1.0)
    assert quorum.settle(1.0) == frozenset()
    return quorum


def test_the_table() -> None:
    assert {state for state, _ in TRANSITIONS} == set(LeaderState)
    assert {event for _, event in TRANSITIONS} == set(LeaderEvent)
    assert all(TRANSITIONS[state, LeaderEvent.DEPOSED] is LeaderState.FOLLOWING for state in LeaderState)


def test_a_head_begins_and_is_deposed() -> None:
    quorum = Quorum(PATIENCE)
    assert (quorum.state(0.0), quorum.age(0.0), quorum.settle(0.0)) == (LeaderState.FOLLOWING, None, None)
    quorum.renew(100.0, 0.0)
    assert not quorum.asks(0.0)
    quorum.begin(1, 10.0, ALL, 0.0)
    assert quorum.asks(1.0) and not quorum.acts(1.0)
    for member in ALL:
        assert quorum.settle(1.0) is None
        quorum.reported(member, 1, 0.5, 1.0)
    assert quorum.settle(1.0) == frozenset()
    assert quorum.acts(1.0)
    assert not quorum.see(1) and quorum.acts(1.0)
    assert quorum.see(2)
    assert quorum.state(1.0) is LeaderState.FOLLOWING
    quorum.accepted("a", 1, 1.0, 1.0)
    quorum.begin(3, 10.0, ALL, 2.0)
    assert not quorum.acts(2.0)
    with pytest.raises(KeyError):
        quorum.begin(4, 10.0, ALL, 2.0)


def test_a_term_ends_by_the_clock_before_anything_else_is_looked_at() -> None:
    quorum = leading()
    assert quorum.acts(9.9)
    assert not quorum.acts(10.0)
    assert quorum.state(10.0) is LeaderState.ADRIFT
    quorum.renew(20.0, 11.0)
    assert quorum.acts(11.0)
    quorum = Quorum(PATIENCE)
    quorum.begin(1, 10.0, ALL, 0.0)
    assert quorum.settle(10.0) is None
    quorum.renew(20.0, 11.0)
    assert quorum.state(11.0) is LeaderState.TAKING_OVER


def test_silent_members_are_lost_when_they_have_ended() -> None:
    quorum = Quorum(PATIENCE)
    quorum.begin(1, 1000.0, ALL, 0.0)
    quorum.reported("a", 1, 90.0, 100.0)
    assert quorum.settle(500.0) is None
    quorum.accepted("b", 1, 590.0, 600.0)
    assert quorum.settle(600.0 + PATIENCE + GRACE - 0.1) is None
    assert quorum.settle(600.0 + PATIENCE + GRACE) == frozenset("bcd")


def test_members_that_join_meanwhile_are_no_part_of_the_half() -> None:
    quorum = Quorum(PATIENCE)
    quorum.begin(1, 1000.0, ALL, 0.0)
    quorum.reported("a", 1, 0.0, 0.0)
    for member in ("e", "f", "g"):
        quorum.joined(member)
        quorum.reported(member, 1, 0.0, 0.0)
    assert quorum.settle(500.0) is None


def test_the_half_is_waived_by_force() -> None:
    quorum = Quorum(PATIENCE)
    quorum.begin(1, 1000.0, ALL, 0.0)
    quorum.reported("a", 1, 0.0, 0.0)
    assert quorum.lacks_half()
    assert quorum.silent == frozenset(ALL) - {"a"}
    assert quorum.settle(500.0) is None
    quorum.force(0.0)
    assert not quorum.lacks_half()
    assert quorum.settle(PATIENCE + GRACE - 0.1) is None
    assert quorum.settle(PATIENCE + GRACE) == frozenset(ALL) - {"a"}
    first = Quorum(PATIENCE)
    first.begin(1, 1000.0, (), 0.0)
    assert first.settle(0.0) == frozenset()


def test_answers_of_other_epochs_count_for_nothing() -> None:
    quorum = Quorum(PATIENCE)
    quorum.begin(2, 1000.0, ("a",), 0.0)
    quorum.reported("a", 1, 0.0, 0.0)
    assert quorum.settle(500.0) is None


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
    quorum = leading()
    assert quorum.age(9.0) == 0.0
    for member, asked in heard.items():
        quorum.accepted(member, 1, asked, asked + 0.5)
    assert quorum.age(20.0) == age


def test_members_in_doubt_count_against_an_adrift_head() -> None:
    quorum = leading()
    quorum.left("d")
    assert quorum.age(20.0) == 20.0
    for member in "bc":
        quorum.accepted(member, 1, 19.0, 19.0)
    assert quorum.age(20.0) == 1.0
    quorum.joining("c")
    assert quorum.age(20.0) == 20.0
    quorum.joining("e")
    quorum.accepted("e", 1, 20.0, 20.0)
    assert quorum.age(20.0) is None
    quorum.joined("e")
    quorum.joined("c")
    assert quorum.age(20.0) == 1.0


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
    quorum: Quorum
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


ALL_OF = frozenset(range(5))
FEW = st.sets(st.integers(0, 4), max_size=2)


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

    @initialize(count=st.integers(2, 5))
    def start(self, count: int) -> None:
        self.heads = [Head(f"h{number}", 1000.0 * number, Quorum(PATIENCE)) for number in range(3)]
        self.members = [
            Member(f"m{number}", -77.0 * number, Allegiance(PATIENCE, -77.0 * number)) for number in range(count)
        ]
        self.recorded = {member.name for member in self.members}
        head = self.heads[0]
        self.lead(head)
        for number in range(count):
            self.talk(0, number)
        self.settle(head)
        assert head.quorum.acts(head.skew)

    # ---------------------------------------------------------------- time and faults

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.leases = [each for each in self.leases if each[0] > self.now]
        for member in self.members:
            if self.now + member.skew >= member.allegiance.ends_at():
                member.ended = True
                member.actors.clear()

    @rule(tenths=st.integers(1, 10))
    def wait(self, tenths: int) -> None:
        self.pass_time(tenths / 10)

    @rule(which=st.integers(0, 2))
    def stop(self, which: int) -> None:
        """Stop a head, or let it go on."""
        self.heads[which].stopped = not self.heads[which].stopped

    @rule(which=st.integers(0, 2), away=st.booleans())
    def reach(self, which: int, away: bool) -> None:
        (self.cut.add if away else self.cut.discard)(self.heads[which].name)

    @rule(which=st.integers(0, 4))
    def lose(self, which: int) -> None:
        if which < len(self.members) and sum(member.ended for member in self.members) < 2:
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
        head.quorum.begin(self.epoch, at + TTL - MARGIN, self.recorded, at)

    @rule(which=st.integers(0, 2), without=FEW)
    def take_over(self, which: int, without: set[int]) -> None:
        """Campaign once the lease has ended, and ask members."""
        if self.reaches(self.heads[which]):
            for end, _, head in self.leases:
                if head is not self.heads[which]:
                    self.pass_time(end - self.now)
            self.campaign(which)
            for number in ALL_OF - without:
                self.talk(which, number)

    @rule(seconds=st.sampled_from((2, 4, 10)), without=FEW, leads=st.booleans())
    def live(self, seconds: int, without: set[int], leads: bool) -> None:
        """Let time pass, with renewals, and questions of some of the members."""
        for _ in range(seconds):
            self.pass_time(1.0)
            for number in range(3):
                if leads:
                    self.extend(number, 0)
            self.questions(without)

    @rule(which=st.integers(0, 2), to=st.integers(0, 4))
    def act(self, which: int, to: int) -> None:
        """Settle, and construct elsewhere at once what is gone."""
        self.settle_one(which)
        while self.replace(which, to):
            pass

    def replace(self, which: int, to: int) -> bool:
        frame = self.construct(which, to)
        self.deliver(frame)
        return frame is not None

    @rule(which=st.integers(0, 2), to=st.integers(0, 4))
    def spawn(self, which: int, to: int) -> None:
        """Spawn an actor without a delay."""
        self.deliver(self.begin_spawn(which, to))

    @rule(which=st.integers(0, 2))
    def campaign(self, which: int) -> None:
        head = self.heads[which]
        if not self.reaches(head):
            return
        if head.quorum.see(self.epoch) or not self.leases:
            if head.quorum.state(self.now + head.skew) is not LeaderState.FOLLOWING:
                head.quorum.depose()  # its lease has ended, as the log says
            if not self.leases:
                self.lead(head)

    @rule(which=st.integers(0, 2), late=st.integers(0, 5))
    def renew(self, which: int, late: int) -> None:
        """Renew a term, and hear of it a moment later."""
        self.extend(which, late)

    def extend(self, which: int, late: int) -> None:
        head = self.heads[which]
        asked = self.now + head.skew
        if not self.reaches(head) or head.quorum.state(asked) is LeaderState.FOLLOWING:
            return
        if self.commits(head):
            self.leases = [(self.now + TTL, head.quorum.epoch, head)]
            self.pass_time(late / 10)
            head.quorum.renew(asked + TTL - MARGIN, self.now + head.skew)
        else:
            head.quorum.depose()

    def commits(self, head: Head) -> bool:
        """Whether the log makes a change for that head."""
        return self.reaches(head) and any(epoch == head.quorum.epoch for _, epoch, _ in self.leases)

    # ---------------------------------------------------------------- orders

    @rule(which=st.integers(0, 2), to=st.integers(0, 4), target=frames)
    def order(self, which: int, to: int) -> Frame | None:
        """Spawn an actor: recorded first, then ordered."""
        return self.begin_spawn(which, to)

    def begin_spawn(self, which: int, to: int) -> Frame | None:
        head = self.heads[which]
        if to >= len(self.members) or head.stopped or not head.quorum.acts(self.now + head.skew):
            return None
        member = self.members[to]
        if member.name not in self.recorded or not self.commits(head):
            return None
        self.number += 1
        self.places[self.number] = member.name
        return Frame("order", head, member, head.quorum.epoch, actors=frozenset([self.number]))

    @rule(which=st.integers(0, 2))
    def settle_one(self, which: int) -> None:
        if self.reaches(self.heads[which]):
            self.settle(self.heads[which])

    def settle(self, head: Head) -> None:
        if not self.commits(head):
            return
        lost = head.quorum.settle(self.now + head.skew)
        if lost is None:
            return
        for name in lost:
            self.recorded.discard(name)
            head.quorum.left(name)

    @rule(which=st.integers(0, 2), to=st.integers(0, 4), target=frames)
    def restart(self, which: int, to: int) -> Frame | None:
        """Construct elsewhere what was at a lost member, or what its member has not reported."""
        return self.construct(which, to)

    def construct(self, which: int, to: int) -> Frame | None:
        head = self.heads[which]
        if to >= len(self.members) or not head.quorum.acts(self.now + head.skew) or not self.commits(head):
            return None
        member = self.members[to]
        gone = {
            actor
            for actor, place in self.places.items()
            if place not in self.recorded
            or (place in head.reports and actor not in head.reports[place] and actor <= head.before)
        }
        if not gone or member.name not in self.recorded or member.name not in head.reports:
            return None
        actor = min(gone)
        self.places[actor] = member.name
        head.reports[member.name].add(actor)
        return Frame("order", head, member, head.quorum.epoch, actors=frozenset([actor]))

    @rule(which=st.integers(0, 2), answered=st.booleans())
    def join(self, which: int, answered: bool) -> None:
        """Record a new member. Where the log's answer is lost, the head does not serve it."""
        head = self.heads[which]
        if len(self.members) == 5 or not head.quorum.asks(self.now + head.skew) or not self.commits(head):
            return
        number = len(self.members)
        name, skew = f"m{number}", -77.0 * number
        head.quorum.joining(name)
        self.recorded.add(name)
        self.members.append(Member(name, skew, Allegiance(PATIENCE, self.now + skew)))
        if answered:
            head.quorum.joined(name)
            self.talk(which, number)

    # ---------------------------------------------------------------- questions

    @rule(which=st.integers(0, 2), to=st.integers(0, 4), target=frames)
    def ask(self, which: int, to: int) -> Frame | None:
        """Ask a member for its report."""
        return self.inquiry(which, to)

    def inquiry(self, which: int, to: int) -> Frame | None:
        head = self.heads[which]
        state = head.quorum.state(self.now + head.skew)
        if to >= len(self.members) or head.stopped or state is LeaderState.FOLLOWING:
            return None
        return Frame("ask", head, self.members[to], head.quorum.epoch, self.now + head.skew)

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
        self.deliver(self.deliver(self.inquiry(which, to)))

    @rule(without=FEW)
    def breathe(self, without: set[int]) -> None:
        """Let members ask without a delay whether they may stay, and their heads hear of them."""
        self.questions(without)

    def questions(self, without: set[int]) -> None:
        for number in ALL_OF - without:
            question = self.question(number)
            if question is not None:
                self.talk(self.heads.index(question.head), number)
                self.deliver(self.deliver(question))

    @rule(frame=frames, target=frames)
    def arrive(self, frame: Frame | None) -> Frame | None:
        """A frame arrives, perhaps once more."""
        return self.deliver(frame)

    def deliver(self, frame: Frame | None) -> Frame | None:
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
                head.quorum.see(frame.seen)
            case "report":
                if frame.epoch == head.quorum.epoch and head.quorum.asks(at):
                    head.reports.setdefault(member.name, set(frame.actors))
                    head.quorum.reported(member.name, frame.epoch, frame.asked, at)
                else:
                    head.quorum.accepted(member.name, frame.epoch, frame.asked, at)
            case "stay":
                if frame.epoch == head.quorum.epoch:
                    return dataclasses.replace(frame, kind="may", age=head.quorum.age(at))
            case "may":
                member.allegiance.heard(frame.epoch, frame.asked, frame.age)
        return None

    # ---------------------------------------------------------------- what holds

    @invariant()
    def one_head_acts(self) -> None:
        acting = [head.name for head in self.heads if head.quorum.acts(self.now + head.skew)]
        assert len(acting) <= 1, acting

    @invariant()
    def one_instance_lives(self) -> None:
        living = [actor for member in self.members for actor in member.actors if not member.ended]
        assert len(living) == len(set(living))


TestReigns = pytest.mark.slow(Reigns.TestCase)
TestReigns.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def scene(count: int) -> Reigns:
    """Members of which the first has an actor, and the first head leads."""
    made = Reigns()
    made.start(count)
    made.spawn(0, 0)
    assert made.members[0].actors == {1}
    return made


def holds(made: Reigns) -> None:
    made.one_head_acts()
    made.one_instance_lives()


def test_an_order_that_was_held_up() -> None:
    made = scene(2)
    order = made.begin_spawn(0, 0)
    made.live(2, set(), False)
    made.take_over(1, set())
    made.act(1, 1)
    assert made.members[1].actors == {2}
    made.deliver(order)
    assert made.members[0].actors == {1}
    holds(made)


def test_half_of_the_members_do_not_stay_with_an_adrift_head() -> None:
    made = scene(4)
    made.cut.add("h0")
    made.live(2, {2, 3}, False)
    made.take_over(1, {0, 1})
    made.live(10, set(), True)
    made.act(1, 2)
    assert made.heads[1].quorum.acts(made.now + 1000.0)
    assert [member.ended for member in made.members] == [True, True, False, False]
    assert made.members[2].actors == {1}
    holds(made)


@pytest.mark.parametrize("joining", [False, True])
def test_members_that_leave_an_adrift_head_late(joining: bool) -> None:
    made = scene(4)
    made.cut.add("h0")
    made.live(2, {3}, False)
    made.take_over(1, {0, 1, 2})
    if joining:
        made.join(1, True)
    for _ in range(3):
        made.live(4, set(), True)
        made.act(1, 3)
        assert made.members[0].actors == {1} and not made.heads[1].quorum.acts(made.now + 1000.0)
        holds(made)
    made.talk(1, 2)
    made.act(1, 3)
    holds(made)
    made.live(10, set(), True)
    made.act(1, 3)
    assert made.heads[1].quorum.acts(made.now + 1000.0)
    assert [member.ended for member in made.members][:4] == [True, True, False, False]
    assert made.members[3].actors == {1}
    holds(made)


def test_an_outage_of_the_log_ends_nothing() -> None:
    made = scene(3)
    made.cut |= {"h0", "h1", "h2"}
    for _ in range(10):
        made.live(10, {2}, True)
    assert made.heads[0].quorum.state(made.now) is LeaderState.ADRIFT
    assert [member.ended for member in made.members] == [False, False, True]
    assert made.members[0].actors == {1}


def test_members_that_have_ended_count_as_such_that_serve_this_head() -> None:
    quorum = Quorum(PATIENCE)
    quorum.begin(1, 100.0, ALL, 0.0)
    quorum.ended("a", 1.0)
    assert quorum.settle(1.0 + PATIENCE + GRACE) is None, "that is less than half"
    quorum.ended("b", 2.0)
    quorum.reported("c", 1, 1.0, 2.0)
    assert quorum.settle(2.0) is None
    assert quorum.settle(2.0 + PATIENCE + GRACE) == frozenset("d")
