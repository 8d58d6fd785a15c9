"""Which streams become suspects after a crash of the engine."""

from __future__ import annotations

from engine.boundary.crash_suspects import (
    FEW_SUSPECTS,
    STRIKES_AFTER_CRASH,
    STRIKES_AFTER_SIGNAL,
    STRIKES_IF_SHARED_AND_UNKNOWN,
    STRIKES_IF_SHARED_OR_UNKNOWN,
    CrashSuspicion,
    EngineDeath,
    find_culprit,
)

SPOT = range(20, 24)
CRASH = EngineDeath(0.0, crashed=True, step_known=True)
SIGNAL = EngineDeath(0.0, crashed=False, step_known=True)
UNSEEN = EngineDeath(0.0, crashed=False, step_known=False)
CRASH_AMONG_STRANGERS = EngineDeath(0.0, crashed=True, step_known=True, other_gateways=True)


def test_only_deaths_at_the_same_spot_count_and_passing_it_clears() -> None:
    suspicion = CrashSuspicion()
    for start, end, strikes in (
        (20, 24, 1),
        (4, 20, 1),  # on the way there
        (22, 38, 2),
        (23, 23, 2 + 1),  # an empty step, as a flush makes, counts as its first position
        (24, 28, 1),  # beyond: a spot of its own
        (27, 30, 2),
    ):
        suspicion.strike(start, end)
        assert suspicion.strikes == strikes
    suspicion.keep_apart = suspicion.must_wait = True
    suspicion.passed(27)
    assert suspicion.strikes == 2
    suspicion.passed(28)
    assert not (suspicion.strikes or suspicion.keep_apart or suspicion.must_wait)


def test_a_stream_alone_at_the_spot_of_two_crashes_is_guilty() -> None:
    suspicion = CrashSuspicion()
    for _ in range(STRIKES_AFTER_CRASH - 1):
        assert find_culprit({suspicion: SPOT}, CRASH) is None
        assert suspicion.keep_apart and not suspicion.must_wait
    assert find_culprit({suspicion: SPOT}, CRASH) is suspicion


def test_a_signal_from_outside_counts_for_less_than_a_crash() -> None:
    suspicion = CrashSuspicion()
    for _ in range(STRIKES_AFTER_SIGNAL - 1):
        assert find_culprit({suspicion: SPOT}, SIGNAL) is None
    assert find_culprit({suspicion: SPOT}, SIGNAL) is suspicion


def test_two_suspects_are_both_spared_and_kept_apart() -> None:
    one, other = CrashSuspicion(), CrashSuspicion()
    for _ in range(3):
        assert find_culprit({one: SPOT, other: SPOT}, CRASH) is None
    assert one.keep_apart and other.keep_apart


def test_many_suspects_of_a_first_death_are_not_held_up() -> None:
    crowd = {CrashSuspicion(): SPOT for _ in range(FEW_SUSPECTS + 1)}
    find_culprit(crowd, CRASH)
    assert not any(suspicion.keep_apart for suspicion in crowd)


def test_suspects_of_a_first_signal_from_outside_are_not_held_up_and_those_of_a_second_one_are_kept_apart() -> None:
    one, other = CrashSuspicion(), CrashSuspicion()
    assert find_culprit({one: SPOT, other: SPOT}, SIGNAL) is None
    assert not one.keep_apart and not other.keep_apart
    assert find_culprit({one: SPOT, other: SPOT}, SIGNAL) is None
    assert one.keep_apart and other.keep_apart
    assert find_culprit({one: SPOT}, SIGNAL) is one


def test_suspects_of_an_unseen_step_wait_for_each_other_after_a_second_death() -> None:
    suspicion = CrashSuspicion()
    find_culprit({suspicion: SPOT}, UNSEEN)
    assert not suspicion.must_wait
    find_culprit({suspicion: SPOT}, UNSEEN)
    assert suspicion.must_wait


def test_a_step_shared_with_a_stranger_convicts_nobody_and_the_next_one_alone_does() -> None:
    ours = CrashSuspicion()
    for _ in range(STRIKES_AFTER_CRASH):
        assert find_culprit({ours: SPOT}, CRASH_AMONG_STRANGERS) is None
    assert ours.keep_apart, "the engine keeps it apart from now on"
    assert find_culprit({ours: SPOT}, CRASH) is ours


def test_a_stranger_that_is_always_there_protects_nobody_for_ever() -> None:
    ours = CrashSuspicion()
    deaths = [find_culprit({ours: SPOT}, CRASH_AMONG_STRANGERS) for _ in range(STRIKES_IF_SHARED_OR_UNKNOWN)]
    assert deaths == [None] * (STRIKES_IF_SHARED_OR_UNKNOWN - 1) + [ours]


def test_a_crash_in_an_unseen_step_is_not_blamed_on_the_only_stream_that_is_ours() -> None:
    ours = CrashSuspicion()
    unseen = EngineDeath(0.0, crashed=True, step_known=False)
    assert all(find_culprit({ours: SPOT}, unseen) is None for _ in range(STRIKES_IF_SHARED_OR_UNKNOWN - 1))
    ours, waits = CrashSuspicion(), []
    for number in range(1, STRIKES_IF_SHARED_AND_UNKNOWN):
        death = EngineDeath(100.0 * number, crashed=True, step_known=False, other_gateways=True)
        assert find_culprit({ours: SPOT}, death) is None
        waits.append(ours.not_before - death.at)
    assert waits[0] < 0 and all(0 <= wait <= number for number, wait in enumerate(waits[1:], 2)), (
        "a first death is none"
    )
    ours.passed(SPOT.stop)
    assert (ours.strikes, ours.not_before) == (0, 0.0)
