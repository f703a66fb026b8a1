"""The costs of both protocols: the published numbers, and rules that hold for any numbers."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcactor.transport.cost import Line, calibrated, choose, crossover, fit

MIB = 2**20
EAGER = Line(165e-9, 5000 * MIB)
RENDEZVOUS = Line(3605e-9, 11794 * MIB)
"""The figures of the slides of SC Asia 2018."""

latencies = st.floats(0, 1e-3)
rates = st.floats(1e6, 1e12) | st.just(math.inf)
lines = st.builds(Line, latencies, rates)
samples = st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(0, 10)), min_size=1, max_size=20)


# ---- lines


def test_the_slides_cross_at_31309_bytes() -> None:
    assert round(crossover(EAGER, RENDEZVOUS)) == 31_309
    model = choose(EAGER, RENDEZVOUS)
    assert model.eager_limit == 31_296 == 489 * 64
    assert (model.eager, model.rendezvous) == (EAGER, RENDEZVOUS)
    assert model.reason == (
        "in a frame 0.17 us + bytes at 5,000 MiB/s, by READ 3.60 us + bytes at 11,794 MiB/s: "
        "equal at 31,309 bytes, so the limit is 31,296 bytes"
    )


def test_cost_is_constant_plus_bytes_by_rate() -> None:
    assert Line(2e-6, 1e9).cost(0) == 2e-6
    assert Line(2e-6, 1e9).cost(3000) == pytest.approx(5e-6)
    assert Line(2e-6, math.inf).cost(1 << 40) == 2e-6


@pytest.mark.parametrize(
    ("latency", "rate"), [(-1e-9, 1.0), (math.nan, 1.0), (math.inf, 1.0), (0.0, 0.0), (0.0, -1.0), (0.0, math.nan)]
)
def test_impossible_line(latency: float, rate: float) -> None:
    with pytest.raises(ValueError, match="no line of costs"):
        Line(latency, rate)


@given(lines, st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_more_bytes_never_cost_less(line: Line, one: int, other: int) -> None:
    assert line.cost(min(one, other)) <= line.cost(max(one, other))


# ---- crossover


@pytest.mark.parametrize(
    ("eager", "rendezvous", "expected"),
    [
        (Line(1e-6, 1e9), Line(1e-6, 2e9), 0),  # the same constant, the better rate
        (Line(2e-6, 1e9), Line(1e-6, 2e9), 0),  # better in both
        (Line(1e-6, 1e9), Line(1e-6, 1e9), 0),  # the same line
        (Line(1e-6, 2e9), Line(2e-6, 1e9), math.inf),  # worse in both
        (Line(1e-6, 1e9), Line(2e-6, 1e9), math.inf),  # parallel
        (Line(2e-6, 2e9), Line(1e-6, 1e9), math.inf),  # ahead for small sizes only
        (Line(1e-6, math.inf), Line(2e-6, math.inf), math.inf),
        (Line(0, 1e9), Line(1e-6, math.inf), 1000),
    ],
)
def test_crossover_of_lines_that_hardly_cross(eager: Line, rendezvous: Line, expected: float) -> None:
    assert crossover(eager, rendezvous) == pytest.approx(expected)


@given(lines, lines, st.integers(1, 1 << 40))
def test_costs_are_equal_at_the_crossover_and_ordered_beside_it(eager: Line, rendezvous: Line, more: int) -> None:
    size = crossover(eager, rendezvous)
    slack = 1 + 1e-9
    if math.isinf(size):
        far = 1e30  # bytes: so many that constants do not count
        assert eager.cost(far) <= rendezvous.cost(far) * slack
        return
    assert size >= 0
    if size > 0:
        assert eager.cost(size) == pytest.approx(rendezvous.cost(size), rel=1e-9)
        assert eager.cost(size / 2) <= rendezvous.cost(size / 2) * slack
    assert rendezvous.cost(size + more) <= eager.cost(size + more) * slack


# ---- choose


@given(lines, lines, st.integers(1, 1 << 20), st.integers(0, 1 << 20))
def test_limit_is_a_multiple_of_64_within_bounds(eager: Line, rendezvous: Line, low: int, extent: int) -> None:
    high = low + 64 + extent
    model = choose(eager, rendezvous, low, high)
    assert low <= model.eager_limit <= high
    assert model.eager_limit % 64 == 0
    assert f"{model.eager_limit:,} bytes" in model.reason
    assert "\n" not in model.reason
    size = crossover(eager, rendezvous)
    assert model.eager_limit <= size or model.eager_limit < low + 64
    assert model.eager_limit > size - 64 or model.eager_limit > high - 64


@pytest.mark.parametrize(
    ("rendezvous", "limit", "reason"),
    [
        (Line(300e-9, 11794 * MIB), 4096, "equal at 1,229 bytes, so the limit is the least allowed, 4,096 bytes"),
        (Line(100e-9, 11794 * MIB), 4096, "equal at 0 bytes, so the limit is the least allowed"),
        (Line(36e-6, 11794 * MIB), 65536, "so the limit is the largest allowed, 65,536 bytes"),
        (Line(3605e-9, 4000 * MIB), 65536, "a READ never becomes the cheaper one"),
        (
            Line(3605e-9, math.inf),
            17984,
            "3.60 us + nothing per byte: equal at 18,036 bytes, so the limit is 17,984 bytes",
        ),
    ],
)
def test_limit_is_clamped_and_the_reason_says_so(rendezvous: Line, limit: int, reason: str) -> None:
    model = choose(EAGER, rendezvous)
    assert model.eager_limit == limit
    assert reason in model.reason


@pytest.mark.parametrize(("low", "high"), [(0, 0), (-64, 0), (65, 127), (8192, 4096), (1, 63)])
def test_bounds_without_a_limit(low: int, high: int) -> None:
    with pytest.raises(ValueError, match=f"from {low} to {high}"):
        choose(EAGER, RENDEZVOUS, low, high)


# ---- fit


@pytest.mark.slow
@given(st.floats(1e-8, 1e-3), st.floats(1e7, 1e11), st.lists(st.integers(0, 1 << 24), min_size=2, unique=True))
def test_fit_finds_the_line_that_made_the_points(latency: float, rate: float, sizes: list[int]) -> None:
    line = Line(latency, rate)
    points = [(size, line.cost(size)) for size in sizes]
    found = fit(points)
    for size, seconds in points:
        assert found.cost(size) == pytest.approx(seconds, rel=1e-6)


@pytest.mark.slow
@given(samples)
def test_fit_of_anything_is_a_line(points: list[tuple[int, float]]) -> None:
    line = fit(points)
    assert line.latency_s >= 0
    assert line.bytes_per_s > 0
    assert line == fit(points[::-1])


def test_fit_ignores_interrupted_runs() -> None:
    rng = random.Random(1)
    line = Line(4e-6, 10e9)
    points = []
    for size in (4096, 65536, 1 << 20):
        points += [(size, line.cost(size) * rng.uniform(0.95, 1.05)) for _ in range(7)]
        points += [(size, line.cost(size) * 100)] * 2
    found = fit(points)
    assert found.latency_s == pytest.approx(line.latency_s, rel=0.1)
    assert found.bytes_per_s == pytest.approx(line.bytes_per_s, rel=0.1)


def test_noise_in_large_sizes_does_not_hide_the_constant() -> None:
    line = Line(2e-6, 10e9)
    points = [(size, line.cost(size)) for size in (64, 1024, 4096)]
    points += [(1 << 24, line.cost(1 << 24) * 1.05)]  # 84 us more: 40 times the constant
    assert fit(points).latency_s == pytest.approx(line.latency_s, rel=0.1)


def test_fit_where_times_do_not_grow() -> None:
    for points in ([(4096, 5e-6), (65536, 5e-6)], [(4096, 6e-6), (65536, 4e-6)], [(0, 5e-6)]):
        line = fit(points)
        assert math.isinf(line.bytes_per_s)
        assert 4e-6 <= line.latency_s <= 6e-6


def test_fit_through_the_origin() -> None:
    assert fit([(1000, 1e-6)]) == fit([(1000, 1e-6), (1000, 1e-6)])
    assert fit([(1000, 1e-6)]).bytes_per_s == pytest.approx(1e9)
    steep = fit([(1000, 1e-6), (2000, 3e-6)])
    assert steep.latency_s == 0
    assert 1000 / 1.5e-6 < steep.bytes_per_s < 1e9


def test_a_clock_that_stands_still_gives_a_line() -> None:
    assert fit([(64, 0.0), (128, 0.0)]) == Line(1e-9, math.inf)


@pytest.mark.parametrize("points", [[], [(-1, 1.0)], [(1, -1.0)], [(1, math.nan)], [(1, math.inf)]])
def test_no_measured_times(points: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="measured time"):
        fit(points)


# ---- calibrated


def measured(line: Line, *sizes: int) -> list[tuple[int, float]]:
    """Measured times without noise."""
    return [(size, line.cost(size)) for size in sizes]


def test_calibrated_is_two_copies_against_a_read() -> None:
    copy, read = Line(100e-9, 10e9), Line(4e-6, 12e9)
    model = calibrated(measured(copy, 4096, 65536), measured(read, 4096), measured(read, MIB))
    assert model.eager.latency_s == pytest.approx(200e-9)
    assert model.eager.bytes_per_s == pytest.approx(5e9)
    assert model.rendezvous.latency_s == pytest.approx(4e-6)
    assert model.rendezvous.bytes_per_s == pytest.approx(12e9)
    assert model.eager_limit == int(crossover(model.eager, model.rendezvous)) // 64 * 64


def test_bytes_in_a_frame_cross_the_link_too() -> None:
    copy, read, send = Line(0, 10e9), Line(4e-6, 12e9), Line(2e-6, 12e9)
    reads = measured(read, 4096), measured(read, MIB)
    sends = measured(send, 64, 16384)
    model = calibrated(measured(copy, 4096, 65536), *reads, sends=sends)
    assert model.eager.bytes_per_s == pytest.approx(1 / (2 / 10e9 + 1 / 12e9))
    assert model.eager.latency_s == pytest.approx(0, abs=1e-12)
    assert model.eager_limit < calibrated(measured(copy, 4096, 65536), *reads).eager_limit


def test_calibrated_bounds_are_passed_on() -> None:
    copies, reads = [(4096, 1e-6), (65536, 16e-6)], ([(4096, 900e-6)], [(MIB, 1e-3)])
    assert calibrated(copies, *reads).eager_limit == 65536
    assert calibrated(copies, *reads, high=16000).eager_limit == 16000
    assert calibrated(copies, [(4096, 1e-9)], [(MIB, 1e-3)], low=8192).eager_limit == 8192


@pytest.mark.slow
@given(samples, samples, samples, samples)
def test_calibrated_takes_any_times(
    copies: list[tuple[int, float]],
    small: list[tuple[int, float]],
    large: list[tuple[int, float]],
    sends: list[tuple[int, float]],
) -> None:
    assert 4096 <= calibrated(copies, small, large, sends=sends).eager_limit <= 65536


def test_calibrated_without_times() -> None:
    with pytest.raises(ValueError, match="at least one"):
        calibrated([], [(4096, 1e-6)], [(MIB, 1e-4)])
    with pytest.raises(ValueError, match="at least one"):
        calibrated([(4096, 1e-6)], [], [])
