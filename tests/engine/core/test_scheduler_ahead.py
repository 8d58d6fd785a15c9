"""Windows of uploads that are planned ahead: they are the next windows, and planning them changes nothing else."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.plan import DecodeResult, DecodeTask, TimedToken
from engine.core.scheduler import Scheduler
from engine.messages import Item, Open, Text
from tests.engine.core.test_scheduler_properties import VOCABULARY, WINDOWS, build

SPEC = replace(WINDOWS, file_window_positions=20)
Span = tuple[int, int, bool]


def result_of(task: DecodeTask) -> DecodeResult:
    timed = [TimedToken(2 + (7 * task.base + task.end + task.final) % 50, task.end, task.end)]
    return DecodeResult(timed=timed, keep_from=task.end if task.final else max(task.base + 1, task.end - 4))


def read(
    utterances: list[tuple[int, int]], chunk: int, unfinished: list[int], ahead: bool, rows: int
) -> tuple[list[Span], str, int]:
    """Upload utterances of (positions, silent positions after them); each task is suspended as often as the next number
    of `unfinished`. Returns the windows, the text, and how many windows were planned ahead."""
    engine = build(SPEC, 2, step_positions=24, step_embeds=rows)
    engine = Scheduler(SPEC, replace(engine.limits, cache_embeds=200, plans_ahead=ahead), VOCABULARY)
    engine.admit(Open("u", live=False))
    marks, position = [], 0
    for spoken, silent in utterances:
        position += spoken
        marks.append((position, position + silent))
        position += silent
    planned: dict[tuple[int, int], list[int]] = {}
    windows: list[Span] = []
    text, fed, steps, left = "", 0, 0, 0
    while engine.streams:
        until = min(position, fed + chunk)
        if until > fed:
            engine.feed("u", [Item(place, 1, place * 10, b"%d" % place, b"pcm") for place in range(fed, until)], steps)
        while marks and marks[0][1] <= until:
            end, resume = marks.pop(0)
            engine.flush("u", None, end)
            if resume > end:
                engine.skip("u", resume)
        if fed < position == until:
            engine.finish("u")
        fed = until
        plan = engine.plan()
        for task in plan.ahead:
            assert (task.base, task.end) not in planned, "each window is planned ahead once"
            planned[task.base, task.end] = task.rows
        results = []
        for task in plan.decode:
            is_new = not windows or windows[-1] != (task.base, task.end, task.final)
            if is_new:
                windows.append((task.base, task.end, task.final))
                left = unfinished[len(windows) % len(unfinished)]
                later = [span for span in planned if span[0] < task.end]
                assert all(span == (task.base, task.end) for span in later), "it is the next window"
                for span in later:
                    assert planned.pop(span) == task.rows
            left -= 1
            results.append(DecodeResult(unfinished=True) if left >= 0 else result_of(task))
        text += "".join(output.delta for output in engine.commit(plan, results) if isinstance(output, Text))
        engine.check_integrity()
        steps += 1
        assert steps < 3_000, "the upload waits for ever"
    return windows, text, sum(len(span) for span in planned)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 12)), min_size=1, max_size=8),
    st.integers(1, 80),
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.integers(1, 24),
)
def test_a_window_ahead_is_the_next_window(
    utterances: list[tuple[int, int]], chunk: int, unfinished: list[int], rows: int
) -> None:
    windows, text, _ = read(utterances, chunk, unfinished, False, rows)
    found, said, left = read(utterances, chunk, unfinished, True, rows)
    assert (found, said, left) == (windows, text, 0)


def test_all_windows_but_the_first_are_planned_ahead_if_their_ends_are_known() -> None:
    engine = Scheduler(SPEC, replace(build(SPEC, 2, 24, 64).limits, cache_embeds=200, plans_ahead=True), VOCABULARY)
    engine.admit(Open("u", live=False))
    engine.feed("u", [Item(place, 1, place * 10, b"%d" % place, b"pcm") for place in range(60)], 0)
    for end, resume in ((15, 20), (35, 35), (50, 55)):
        engine.flush("u", None, end)
        engine.skip("u", resume)
    ahead = []
    for _ in range(3):
        plan = engine.plan()
        ahead += [(task.base, task.end) for task in plan.ahead]
        engine.commit(plan, [result_of(task) for task in plan.decode])
        engine.check_integrity()
    assert ahead == [(20, 35), (35, 50)]


def test_nothing_is_planned_ahead_while_a_live_stream_is_open() -> None:
    engine = Scheduler(SPEC, replace(build(SPEC, 2, 24, 64).limits, cache_embeds=200, plans_ahead=True), VOCABULARY)
    engine.admit(Open("u", live=False))
    engine.admit(Open("live"))
    engine.feed("u", [Item(place, 1, place * 10, b"%d" % place, b"pcm") for place in range(60)], 0)
    for end in (15, 35, 50):
        engine.flush("u", None, end)
    plan = engine.plan()
    assert plan.decode and not plan.ahead
    results = [DecodeResult(unfinished=True) for _ in plan.decode]
    engine.commit(plan, results)
    engine.abort("live")
    assert [(task.base, task.end) for task in engine.plan().ahead] == [(15, 35)]
