"""Scaling: when the fleet grows and shrinks, without oscillation and within its bounds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.plan import Decision, Load, ScaleRules, ScaleState, decide

RULES = ScaleRules(least=1, most=4)
ONE_ENGINE = 100


def load(counted: int, engines: int, refused: int = 0) -> Load:
    return Load(counted, engines * ONE_ENGINE, engines, refused)


def watch(seconds: float, memory: ScaleState, seen: Load, start: float = 0.0) -> tuple[float | None, Decision]:
    """Look every second; the time of the first change, and the last decision."""
    decision = Decision(memory)
    for second in range(int(seconds)):
        decision = decide(RULES, decision.scaling, seen, start + second)
        if decision.why:
            return start + second, decision
    return None, decision


def test_a_high_share_for_half_a_minute_asks_for_one_more() -> None:
    when, decision = watch(100, ScaleState(1), load(81, 1))
    assert when == 30 and decision.scaling.wanted == 2
    assert "81% of the possible streams" in decision.why


def test_a_share_that_falls_in_between_starts_anew() -> None:
    _, high = watch(29, ScaleState(1), load(90, 1))
    _, calm = watch(1, high.scaling, load(80, 1), 29)
    when, _ = watch(100, calm.scaling, load(90, 1), 30)
    assert when == 60


def test_a_refusal_asks_for_one_more_at_once() -> None:
    when, decision = watch(5, ScaleState(1), load(10, 1, refused=1))
    assert when == 0 and decision.scaling.wanted == 2 and "refused" in decision.why


def test_refusals_while_an_engine_is_on_its_way_ask_for_no_further_one() -> None:
    memory = decide(RULES, ScaleState(1), load(100, 1, refused=1), 0.0).scaling
    for second in range(1, 300):
        memory = decide(RULES, memory, load(100, 1, refused=1), second).scaling
    assert memory.wanted == 2
    when, decision = watch(20, memory, load(100, 2), 300)
    assert when is None and decision.scaling.wanted == 2


def test_a_low_share_for_ten_minutes_asks_for_one_less() -> None:
    when, decision = watch(1000, ScaleState(2), load(60, 2))
    assert when == 600 and decision.scaling.wanted == 1


def test_one_less_is_not_asked_for_when_the_rest_would_be_full() -> None:
    when, _ = watch(2000, ScaleState(2), load(90, 2))
    assert when is None


def test_it_waits_after_a_change() -> None:
    memory = ScaleState(2, changed_at=0.0)
    when, _ = watch(200, memory, load(190, 2))
    assert when == 60


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 5), st.integers(0, 9), st.floats(0.1, 400)), max_size=60))
def test_it_stays_within_bounds_and_moves_by_one(looks: list[tuple[int, int, int, float]]) -> None:
    memory, now, last_change = ScaleState(1), 0.0, None
    for counted, engines, refused, passed in looks:
        now += passed
        decision = decide(RULES, memory, Load(counted, engines * ONE_ENGINE, engines, refused), now)
        assert RULES.least <= decision.scaling.wanted <= RULES.most
        assert abs(decision.scaling.wanted - memory.wanted) == (1 if decision.why else 0)
        if decision.why:
            assert last_change is None or now - last_change >= RULES.cool_down_s
            last_change = now
        memory = decision.scaling


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 400))
def test_a_steady_load_comes_to_rest(counted: int) -> None:
    """The engines follow the wish; with the same load the number settles, and does not go back and forth."""
    memory, changes = ScaleState(1), []
    for now in range(0, 6000, 20):
        decision = decide(RULES, memory, load(counted, memory.wanted), float(now))
        changes += [decision.scaling.wanted - memory.wanted] if decision.why else []
        memory = decision.scaling
    assert all(change == changes[0] for change in changes)
    assert memory.wanted == 4 or counted <= 0.8 * ONE_ENGINE * memory.wanted


def test_bounds_that_changed_count_at_once() -> None:
    decision = decide(ScaleRules(least=3, most=5), ScaleState(1), load(0, 1), 0.0)
    assert decision.scaling.wanted == 3 and decision.why == "the fleet may have 3 to 5 engines"
