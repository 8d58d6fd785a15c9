"""Word times: whatever the model gives, words end with speech and follow each other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.messages import Word
from engine.server.speech import GRACE_SAMPLES, KEPT_SAMPLES, ONSET_SAMPLES, WordTimes

FRAME = 512
SECOND = 16_000


def sounds(first: int, frames: list[bool]) -> list[tuple[int, int]]:
    """Intervals of the frames with sound; the first frame has this number."""
    return [(at * FRAME, (at + 1) * FRAME) for at, speaks in enumerate(frames, first) if speaks]


def listened(*spans: tuple[float, float], until: float = 10.0) -> WordTimes:
    """A stream with speech in these spans, in seconds."""
    times = WordTimes()
    frames = [any(a <= at * FRAME / SECOND < b for a, b in spans) for at in range(round(until * SECOND / FRAME))]
    times.add_sounds(sounds(0, frames))
    return times


def bounded(times: WordTimes, *words: tuple[float, float]) -> list[tuple[float, float]]:
    given_words = [Word("w", round(start * SECOND), round(end * SECOND)) for start, end in words]
    times.bound(given_words)
    return [(round(word.start_sample / SECOND, 2), round(word.end_sample / SECOND, 2)) for word in given_words]


def test_a_word_does_not_run_into_the_silence_behind_it() -> None:
    assert bounded(listened((0.0, 2.0)), (1.5, 3.0)) == [(1.5, 2.12)]


def test_a_pause_inside_of_speech_ends_a_word_too() -> None:
    assert bounded(listened((0.0, 2.0), (3.0, 4.0)), (1.5, 2.6), (3.1, 3.5)) == [(1.5, 2.12), (3.1, 3.5)]


def test_a_word_before_speech_that_was_noticed_late_stays_where_it_is() -> None:
    assert bounded(listened((0.0, 2.0), (3.0, 4.0)), (1.0, 1.5), (2.7, 2.98)) == [(1.0, 1.5), (2.7, 2.98)]


def test_a_word_said_in_silence_is_put_where_speech_ended() -> None:
    assert bounded(listened((0.0, 2.0)), (1.0, 1.5), (2.5, 2.9)) == [(1.0, 1.5), (2.12, 2.12)]


def test_a_word_begins_behind_the_one_before() -> None:
    assert bounded(listened((0.0, 9.0)), (1.0, 1.5), (1.2, 1.8), (1.1, 1.4)) == [(1.0, 1.5), (1.5, 1.8), (1.8, 1.8)]


def test_without_a_frame_nothing_is_known_and_nothing_changes() -> None:
    assert bounded(WordTimes(), (1.5, 3.0)) == [(1.5, 3.0)]


seconds = st.floats(0, 12, allow_nan=False)


@given(
    st.lists(st.tuples(seconds, seconds).map(sorted), max_size=6),
    st.lists(st.tuples(seconds, st.floats(0, 3))),
    st.integers(0, 400),
)
def test_no_word_ends_behind_speech_and_none_before_the_last(
    spans: list[list[float]], words: list[tuple[float, float]], cut: int
) -> None:
    """Whatever the model says, and however often the state goes to another engine meanwhile."""
    frames = [any(a <= at * FRAME / SECOND < b for a, b in spans) for at in range(400)]
    times = WordTimes()
    times.add_sounds(sounds(0, frames[:cut]))
    twin = WordTimes()
    twin.resume(times.save())
    twin.add_sounds(sounds(cut, frames[cut:]))
    said = [Word("w", round(start * SECOND), round((start + length) * SECOND)) for start, length in words]
    asked = [(word.start_sample, word.end_sample) for word in said]
    twin.bound(said)
    floor = 0
    spoken = [at * FRAME for at, speaks in enumerate(frames) if speaks]
    for word, (_, asked_end) in zip(said, asked, strict=True):
        assert floor <= word.start_sample <= word.end_sample <= max(asked_end, floor)
        ends = [at + FRAME for at in spoken if at < asked_end]
        follows = any(asked_end <= at <= asked_end + ONSET_SAMPLES for at in spoken)
        if ends and not follows:
            assert word.end_sample <= max(ends[-1] + GRACE_SAMPLES, floor)
        floor = word.end_sample


def test_what_is_kept_does_not_grow_with_the_age_of_a_stream() -> None:
    times, sizes = WordTimes(), []
    for second in range(4_000):
        times.forget_before(second * SECOND)
        times.add_sounds((second * SECOND + at * FRAME, second * SECOND + (at + 1) * FRAME) for at in range(0, 30, 2))
        sizes.append(len(times.save()["starts"]))
    assert max(sizes[2_000:]) <= max(sizes[:1_000]) <= 16 * (KEPT_SAMPLES // SECOND + 2)
