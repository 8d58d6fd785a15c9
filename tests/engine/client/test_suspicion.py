"""Who is blamed for the death of an engine."""

from __future__ import annotations

from engine.client.suspicion import FEW_SUSPECTS, STRIKES_IF_CRASHED, STRIKES_IF_UNKNOWN, Suspicion, convict

SPOT = range(20, 24)


def test_only_deaths_at_the_same_spot_count_and_passing_it_clears() -> None:
    suspicion = Suspicion()
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
    suspicion.alone = suspicion.must_wait = True
    suspicion.passed(27)
    assert suspicion.strikes == 2
    suspicion.passed(28)
    assert not (suspicion.strikes or suspicion.alone or suspicion.must_wait)


def test_a_stream_alone_at_the_spot_of_two_crashes_is_guilty() -> None:
    suspicion = Suspicion()
    for _ in range(STRIKES_IF_CRASHED - 1):
        assert convict({suspicion: SPOT}, step_known=True, crashed=True) is None
        assert suspicion.alone and not suspicion.must_wait
    assert convict({suspicion: SPOT}, step_known=True, crashed=True) is suspicion


def test_a_signal_from_outside_counts_for_less_than_a_crash() -> None:
    suspicion = Suspicion()
    for _ in range(STRIKES_IF_UNKNOWN - 1):
        assert convict({suspicion: SPOT}, step_known=True, crashed=False) is None
    assert convict({suspicion: SPOT}, step_known=True, crashed=False) is suspicion


def test_two_suspects_are_both_spared_and_kept_apart() -> None:
    one, other = Suspicion(), Suspicion()
    for _ in range(3):
        assert convict({one: SPOT, other: SPOT}, step_known=True, crashed=True) is None
    assert one.alone and other.alone


def test_many_suspects_of_a_first_death_are_not_held_up() -> None:
    crowd = {Suspicion(): SPOT for _ in range(FEW_SUSPECTS + 1)}
    convict(crowd, step_known=True, crashed=True)
    assert not any(suspicion.alone for suspicion in crowd)


def test_suspects_of_an_unseen_step_wait_for_each_other_after_a_second_death() -> None:
    suspicion = Suspicion()
    convict({suspicion: SPOT}, step_known=False, crashed=False)
    assert not suspicion.must_wait
    convict({suspicion: SPOT}, step_known=False, crashed=False)
    assert suspicion.must_wait
