"""A pause is found by the audio before it, however late and in whatever pieces the detector got that audio."""

from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from engine.server.speech import LastSpeech
from engine.server.speech_track import SpeechTrack

FRAME = 10


def hear(track: SpeechTrack, spoken: LastSpeech, probabilities: list[float]) -> None:
    """As the listener does it: frame by frame."""
    if probabilities:
        spoken.set_frame(FRAME)
    for probability in probabilities:
        track.add_frames([probability], FRAME)
        spoken.answer()


def told_of(probabilities: list[float], pieces: list[int], ends: list[int], early: int) -> dict[int, int]:
    """What is told of the audio before each of the ends, asked for so many frames early if not at the last moment."""
    track = SpeechTrack()
    spoken, told, heard, waiting = LastSpeech(track), dict[int, int](), 0, sorted(ends)
    for size in [*pieces, len(probabilities)]:
        part = probabilities[heard : heard + size]
        while waiting and (waiting[0] // FRAME <= heard + early or waiting[0] < (heard + len(part)) * FRAME):
            spoken.received_until = waiting[0]
            spoken.ask(partial(told.__setitem__, waiting[0]))
            waiting.pop(0)
        hear(track, spoken, part)
        heard += len(part)
    for end in waiting:
        spoken.received_until = end
        spoken.ask(partial(told.__setitem__, end))
    return told


@given(
    probabilities=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=30),
    pieces=st.lists(st.integers(1, 9), max_size=10),
    ends=st.lists(st.integers(1, 290), unique=True, max_size=4),
    early=st.integers(0, 40),
)
def test_the_answer_depends_on_the_audio_alone(
    probabilities: list[float], pieces: list[int], ends: list[int], early: int
) -> None:
    ends = [end for end in ends if end < (len(probabilities) + 1) * FRAME]
    told = told_of(probabilities, pieces, ends, early)
    for end in ends:
        before = probabilities[: end // FRAME]
        last = max((number for number, value in enumerate(before, 1) if value), default=0)
        assert told[end] == last * FRAME


def test_a_pause_waits_for_its_audio_and_is_told_in_order() -> None:
    track = SpeechTrack()
    spoken, told = LastSpeech(track), list[tuple[str, int]]()
    spoken.received_until = 25
    spoken.ask(lambda sample: told.append(("first", sample)))
    spoken.received_until = 40
    spoken.ask(lambda sample: told.append(("second", sample)))
    hear(track, spoken, [1.0])
    assert told == [] and spoken.is_asked
    hear(track, spoken, [0.0, 1.0])
    assert told == [("first", 10)]
    spoken.answer_all()
    assert told == [("first", 10), ("second", 30)] and not spoken.is_asked
