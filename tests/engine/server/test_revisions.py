"""Which parts of a stream are decoded again, when, and what happens if that fails or takes too long."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.plan import TimedToken
from engine.errors import BadItem
from engine.messages import Closed, Flushed, Item, Output, Revised, Text, Word
from engine.options import REVISED
from engine.runner.base import EndedUtterance, Reviser
from engine.server.revisions import (
    FEW_STREAMS,
    LONG_SAMPLES,
    MAX_SAMPLES,
    MAX_WAITING,
    PATIENCE_SECONDS,
    PLACES_FOR_OTHERS,
    PROBE_EVERY,
    WORDLESS_SAMPLES,
    Revisions,
)
from engine.spec import ModelSpec, Vocabulary

RATE = 16_000
SPEC = ModelSpec("m", RATE, 1280, rereads_window=True)
PIECES = [b" one", b" two", b" three", b"."]


@dataclass
class FakeReviser(Reviser):
    """Keeps what it is asked; the test answers."""

    asked: list[tuple[EndedUtterance, Future[list[TimedToken]]]] = field(default_factory=list)

    def submit(self, utterance: EndedUtterance) -> Future[list[TimedToken]]:
        self.asked.append((utterance, Future()))
        return self.asked[-1][1]


class Bench:
    """One engine's revisions, and the clock that they use."""

    def __init__(self, *streams: str, threads: int = 1) -> None:
        self.reviser, self.now = FakeReviser(), 0
        self.reviser.threads = threads
        self.failed: list[str] = []
        self.revisions = Revisions(
            SPEC,
            Vocabulary(PIECES),
            self.reviser,
            None,
            lambda: self.now,
            self.computed,
            lambda name, error: self.failed.append(name),
        )
        # Seconds of audio that the model has not computed.
        self.behind = 0.0
        for name in streams or ("s",):
            self.revisions.open(name, {REVISED: "yes", "keywords": "a\t1"}, live=True)

    def computed(self, name: str) -> int:
        return self.revisions._streams[name].audio.end - int(self.behind * RATE)

    def step(self, *outputs: Output) -> list[Output]:
        made = list(outputs)
        self.revisions.add_revisions(made)
        return made


def audio(seconds: float, start: float = 0.0) -> list[Item]:
    """A ramp, so that every sample says where it stands."""
    positions, first = int(seconds * RATE) // 1280, int(start * RATE) // 1280
    return [
        Item(at, 1, at * 1280, b"k", (np.arange(at * 1280, (at + 1) * 1280) % 30_000 / 32768).astype(np.float32))
        for at in range(first, first + positions)
    ]


def said(word: str, start: float, end: float, *tokens: int, stream: str = "s") -> Text:
    chances = [(PIECES[token], -0.5) for token in tokens]
    return Text(stream, f" {word}", [Word(word, int(start * RATE), int(end * RATE), chances)], list(tokens))


def test_a_flush_has_the_part_before_it_decoded_again() -> None:
    bench = Bench()
    bench.revisions.add_audio("s", audio(4.0))
    bench.step(said("one", 1.5, 2.0, 0))
    (flushed,) = bench.step(Flushed("s", 1, 3 * RATE))
    assert isinstance(flushed, Flushed) and flushed.is_revised and bench.revisions.is_waiting
    ((utterance, answer),) = bench.reviser.asked
    assert list(utterance.draft) == [0] and utterance.options == {"keywords": "a\t1"}
    # A second before the first word, a second after the last one.
    assert utterance.samples[0] == pytest.approx(0.5 * RATE / 32768) and len(utterance.samples) == 2.5 * RATE
    assert not bench.revisions.has_work and not bench.step()
    answer.set_result([TimedToken(1, 12.5, 18.75, -0.1), TimedToken(3, 18.75, 18.75, -0.1)])
    assert bench.revisions.has_work
    assert bench.step() == [Revised("s", 0, 3 * RATE, [Word("two.", 24_000, 32_000, [(b" two", -0.1), (b".", -0.1)])])]
    assert (bench.revisions.done, bench.revisions.words_changed) == (1, 1)


def test_a_part_without_words_is_left_alone() -> None:
    bench = Bench()
    bench.revisions.add_audio("s", audio(4.0))
    (flushed,) = bench.step(Flushed("s", 1, 3 * RATE))
    assert isinstance(flushed, Flushed) and not flushed.is_revised and not bench.reviser.asked


def test_the_end_of_a_stream_waits_for_its_last_part() -> None:
    bench = Bench()
    bench.revisions.add_audio("s", audio(4.0))
    assert not bench.step(said("one", 1.5, 2.0, 0), Closed("s", 4 * RATE))[1:]
    bench.reviser.asked[0][1].set_result([TimedToken(0, 12.5, 18.75, -0.1)])
    revised, closed = bench.step()
    assert isinstance(revised, Revised) and isinstance(closed, Closed)


def test_what_the_model_takes_for_noise_keeps_its_streamed_words() -> None:
    bench = Bench()
    bench.revisions.add_audio("s", audio(4.0))
    bench.step(said("one", 1.5, 2.0, 0), Flushed("s", 1, 3 * RATE))
    bench.reviser.asked[0][1].set_result([])
    assert bench.step() == [Revised("s", 0, 3 * RATE, None)]


def test_a_reviser_that_fails_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench("s", "t")
    for name in ("s", "t"):
        bench.revisions.add_audio(name, audio(4.0))
        bench.step(said("one", 1.5, 2.0, 0, stream=name), Flushed(name, 1, 3 * RATE))
    bench.reviser.asked[0][1].set_exception(RuntimeError("broken"))
    bench.reviser.asked[1][1].set_result([TimedToken(0, 12.5, 18.75, -0.1)])
    first, second = bench.step()
    assert first == Revised("s", 0, 3 * RATE, None) and isinstance(second, Revised) and second.words
    assert "could not be revised" in caplog.text and not bench.failed


def test_late_revisions_are_given_up_and_too_many_are_skipped() -> None:
    names = [f"s{number}" for number in range(MAX_WAITING + 1)]
    bench = Bench(*names)
    told = []
    for name in names:
        bench.revisions.add_audio(name, audio(4.0))
        told += bench.step(said("one", 1.5, 2.0, 0, stream=name), Flushed(name, 1, 3 * RATE))
    waits = [output.is_revised for output in told if isinstance(output, Flushed)]
    assert waits == [True] * MAX_WAITING + [False]
    bench.now = int((PATIENCE_SECONDS + 1) * 1e9)
    given_up = bench.step()
    assert [output.words for output in given_up if isinstance(output, Revised)] == [None] * MAX_WAITING
    assert bench.revisions.skipped == MAX_WAITING + 1 and not bench.revisions.is_waiting


def test_a_client_that_sends_much_at_once_leaves_places_for_the_others() -> None:
    bench = Bench("hasty", "calm", "quiet")

    def ends(name: str, tag: int) -> bool:
        bench.revisions.add_audio(name, audio(4.0, 4 * (tag - 1)))
        start = 4.0 * (tag - 1)
        told = bench.step(
            said("one", start + 1.5, start + 2, 0, stream=name), Flushed(name, tag, int(start + 3) * RATE)
        )
        return any(output.is_revised for output in told if isinstance(output, Flushed))

    # The later turns wait for the earlier ones, and keep their words.
    assert all(ends("hasty", tag) for tag in range(1, 20 * MAX_WAITING))
    assert len(bench.reviser.asked) == MAX_WAITING - PLACES_FOR_OTHERS
    state, _ = bench.revisions.save("hasty")
    assert len(state["revisions"]["waiting"]) == MAX_WAITING - PLACES_FOR_OTHERS + 1
    assert ends("calm", 1) and ends("quiet", 1)
    assert len(bench.reviser.asked) == MAX_WAITING


def test_a_revision_that_would_come_late_is_not_begun_and_another_is_tried_later() -> None:
    bench = Bench()

    def ends(tag: int, seconds: float) -> bool:
        """One utterance of 4 s; the reviser takes so long for it."""
        start = 4.0 * (tag - 1)
        bench.revisions.add_audio("s", audio(4.0, start))
        told = bench.step(said("one", start + 1.5, start + 2, 0), Flushed("s", tag, int(start + 3) * RATE))
        bench.now += int(seconds * 1e9)
        for _, answer in bench.reviser.asked:
            if not answer.done():
                answer.set_result([])
        bench.step()
        return any(output.is_revised for output in told if isinstance(output, Flushed))

    assert all(ends(tag, 0.2 * PATIENCE_SECONDS) for tag in range(1, 4))
    # A busy machine: late ones are given up, and soon none is begun.
    while ends(len(bench.reviser.asked) + 1, 4 * PATIENCE_SECONDS):
        pass
    first = len(bench.reviser.asked) + 2
    begun = [ends(tag, 0.0) for tag in range(first, first + 20 * PROBE_EVERY)]
    assert begun.index(True) == PROBE_EVERY - 2, "the load may be over"
    assert begun[-1], "and it is"
    assert bench.revisions.skipped == begun.count(False) + 1


@pytest.mark.parametrize(
    ("speaking", "threads", "begins"), [(FEW_STREAMS, 1, True), (2 * FEW_STREAMS, 1, False), (2 * FEW_STREAMS, 2, True)]
)
def test_with_many_speaking_streams_a_revision_must_take_less_time_to_be_begun(
    speaking: int, threads: int, begins: bool
) -> None:
    bench = Bench(*map(str, range(4 * FEW_STREAMS)), threads=threads)
    for name in map(str, range(1, speaking)):
        bench.revisions.add_audio(name, audio(2.0))
        bench.step(said("one", 0.5, 1.0, 0, stream=name))
    found = []
    for tag, start in ((1, 0.0), (2, 4.0)):
        bench.revisions.add_audio("0", audio(4.0, start))
        word, flush = said("one", start + 1.5, start + 2, 0, stream="0"), Flushed("0", tag, int(start + 3) * RATE)
        found += [output.is_revised for output in bench.step(word, flush) if isinstance(output, Flushed)]
        # The second utterance is decoded with the first as context, and takes 2.6 times as long.
        bench.now += int(0.3 * PATIENCE_SECONDS * 1e9)
        for _, answer in bench.reviser.asked:
            if not answer.done():
                answer.set_result([])
        bench.step()
    assert found == [True, begins]


def test_a_rebuilt_stream_is_revised_however_long_that_takes() -> None:
    """The engine is new and busy with the audio that it missed: finals must not depend on that."""
    first = Bench()
    first.revisions.add_audio("s", audio(2.0))
    first.step(said("one", 0.5, 1.0, 0))
    state, _ = first.revisions.save("s")
    bench = Bench()
    bench.revisions.resume("s", state["revisions"], audio(2.0))
    bench.revisions.add_audio("s", audio(10.0, 2.0))
    # The model is behind at the first flush, and has caught up at the second.
    for tag, (behind, patience) in enumerate([(8.0, 4.0), (0.0, 4.0), (0.0, 1.0)], start=1):
        bench.behind = behind
        end = 2 + 4 * tag
        bench.step(said("two", end - 2, end - 1.5, 0))
        (flushed,) = bench.step(Flushed("s", tag, end * RATE))
        assert isinstance(flushed, Flushed) and flushed.is_revised
        bench.now += int(patience * PATIENCE_SECONDS * 1e9) - 1
        assert bench.step() == [] and bench.revisions.is_waiting
        if tag < 3:
            bench.reviser.asked[-1][1].set_result([TimedToken(0, 0.0, 1.0, -0.1)])
        else:
            bench.now += 2
        (revised,) = bench.step()
        assert isinstance(revised, Revised) and (revised.words is None) == (tag == 3)


def test_with_many_speaking_streams_a_revision_is_given_up_sooner() -> None:
    bench = Bench(*map(str, range(2 * FEW_STREAMS)))
    for name in map(str, range(2 * FEW_STREAMS)):
        bench.revisions.add_audio(name, audio(2.0))
        bench.step(said("one", 0.5, 1.0, 0, stream=name))
    bench.step(Flushed("0", 1, 2 * RATE))
    bench.now = int(0.49 * PATIENCE_SECONDS * 1e9)
    assert bench.step() == []
    bench.now = int(0.51 * PATIENCE_SECONDS * 1e9)
    assert [output.words for output in bench.step() if isinstance(output, Revised)] == [None]


def test_a_turn_waits_for_parts_before_its_last_one_that_keeps_its_words() -> None:
    bench = Bench()
    for second in range(12):
        bench.revisions.add_audio("s", audio(1.0, second))
        bench.step(said("one", second + (0.5 if second == 9 else 0.1), second + 0.9, 0))
    ((_, first),) = bench.reviser.asked
    # All that is left is sure.
    bench.step(Text("s", " two", [Word("two", 12 * RATE, 12 * RATE + 800, [(b" two", -0.001)])], [1]))
    bench.revisions._streams["s"].words = bench.revisions._streams["s"].words[-1:]
    (flushed,) = bench.step(Flushed("s", 1, 13 * RATE))
    assert isinstance(flushed, Flushed) and flushed.is_revised and len(bench.reviser.asked) == 1
    state, _ = bench.revisions.save("s")
    other = Bench()
    other.revisions.resume("s", state["revisions"], audio(13.0))
    assert len(other.reviser.asked) == 1
    for made in (bench, other):
        made.reviser.asked[0][1].set_result([TimedToken(0, 0.0, 1.0, -0.1)])
        early, last = made.step()
        assert isinstance(early, Revised) and early.words and isinstance(last, Revised)
        assert (last.end, last.words) == (13 * RATE, None)
        assert (made.revisions.done, made.revisions.skipped) == (1, 0)


def test_a_part_that_waits_is_given_up_when_a_client_has_waited_for_its_final() -> None:
    bench = Bench()
    for second in range(12):
        bench.revisions.add_audio("s", audio(1.0, second))
        bench.step(said("one", second + (0.5 if second == 9 else 0.1), second + 0.9, 0))
    bench.now = int(1.5 * PATIENCE_SECONDS * 1e9)
    assert bench.step() == [] and bench.revisions.is_waiting, "nobody waits while the speaker goes on"
    bench.step(Flushed("s", 1, 12 * RATE))
    bench.now = int(3 * PATIENCE_SECONDS * 1e9)
    assert [output.words for output in bench.step() if isinstance(output, Revised)] == [None, None]


def test_a_short_part_after_a_long_one_is_decoded_together_with_its_last_words() -> None:
    bench = Bench()
    for second in range(11):
        bench.revisions.add_audio("s", audio(1.0, second))
        # The longest pause near the end of the part is before the seventh word.
        bench.step(said("one", second + (0.2 if second == 6 else 0.1), second + 0.9, second % 3))
    bench.revisions.add_audio("s", audio(3.0, 11))
    bench.step(Flushed("s", 1, 11 * RATE))
    bench.step(said("two", 12.0, 12.5, 1))
    bench.step(Flushed("s", 2, 13 * RATE))
    (long, _), (short, _) = bench.reviser.asked
    assert list(long.draft) == [second % 3 for second in range(11)] and not long.context_tokens
    assert list(short.context_tokens) == [second % 3 for second in range(6, 11)] and list(short.draft) == [1]
    assert short.context_samples == int(11 * RATE) - int(6.05 * RATE)


def test_a_client_that_sends_far_ahead_of_its_words_has_no_slices_decoded_again() -> None:
    bench = Bench()
    bench.revisions.add_audio("s", audio(60.0))
    for second in range(10):
        bench.behind = 58.0 - second
        bench.step(said("one", second + 0.1, second + 0.9, 0))
    assert not bench.reviser.asked
    # Its audio was dropped before the words came.
    (flushed,) = bench.step(Flushed("s", 1, 10 * RATE))
    assert isinstance(flushed, Flushed) and not flushed.is_revised and bench.revisions.skipped == 1
    assert not bench.reviser.asked


def test_parts_of_speech_that_goes_on_leave_the_reviser_to_finals() -> None:
    names = [f"s{number}" for number in range(4)]
    bench = Bench(*names)
    for name in names:
        for second in range(12):
            bench.revisions.add_audio(name, audio(1.0, second))
            bench.step(said("one", second + (0.5 if second == 9 else 0.1), second + 0.9, 0, stream=name))
    assert len(bench.reviser.asked) == 1 and bench.revisions.skipped == 3
    (flushed,) = bench.step(Flushed("s3", 1, 12 * RATE))
    assert isinstance(flushed, Flushed) and flushed.is_revised and len(bench.reviser.asked) == 2


def test_parts_do_not_depend_on_how_many_words_come_at_once() -> None:
    def lengths(at_once: int) -> list[int]:
        bench = Bench()
        texts = [said("one", second + 0.1, second + (0.8 if second % 7 == 5 else 0.9), 0) for second in range(56)]
        for first in range(0, len(texts), at_once):
            bench.revisions.add_audio("s", audio(float(at_once), first))
            words = [word for text in texts[first : first + at_once] for word in text.words]
            bench.step(Text("s", " one" * len(words), words, [0] * len(words)))
            for _, answer in bench.reviser.asked:
                if not answer.done():
                    answer.set_result([])
            bench.step()
        return [len(utterance.draft) for utterance, _ in bench.reviser.asked]

    assert lengths(1) == lengths(2) == lengths(7) and len(lengths(1)) >= 2


def test_speech_that_goes_on_is_decoded_again_in_parts_at_pauses() -> None:
    bench = Bench()
    for second in range(24):
        bench.revisions.add_audio("s", audio(1.0, second))
        # Pauses before the words of these seconds.
        bench.step(said("one", second + (0.3 if second in (4, 9, 18) else 0.1), second + 0.9, 0))
        for _, answer in bench.reviser.asked:
            if not answer.done():
                answer.set_result([])
        bench.step()
    lengths = [len(utterance.draft) for utterance, _ in bench.reviser.asked]
    assert lengths == [9, 9]


@pytest.mark.parametrize(("streamed", "final"), [((0,), "two"), ((0, 3), "two.")])
def test_a_part_after_which_the_speaker_went_on_gets_no_full_stop(streamed: tuple[int, ...], final: str) -> None:
    bench = Bench()
    for second in range(12):
        bench.revisions.add_audio("s", audio(1.0, second))
        tokens = streamed if second == 8 else (0,)
        bench.step(said("one", second + (0.5 if second == 9 else 0.1), second + 0.9, *tokens))
    state, _ = bench.revisions.save("s")
    other = Bench()
    other.revisions.resume("s", state["revisions"], audio(12.0))
    for made in (bench, other):
        ((_, answer),) = made.reviser.asked
        answer.set_result([TimedToken(1, 1.0, 2.0, -0.1), TimedToken(3, 2.0, 2.0, -0.1)])
        (revised,) = made.step()
        assert isinstance(revised, Revised) and revised.words is not None
        assert [word.text for word in revised.words] == [final]


def test_speech_without_pauses_is_decoded_again_in_parts_at_its_longest_pause() -> None:
    bench = Bench()
    made: list[Output] = []
    for second in range(24):
        bench.revisions.add_audio("s", audio(1.0, second))
        # A longer break before the word of the 13th second, which is no pause.
        start = second + (0.15 if second == 13 else 0.1)
        made += bench.step(said("one", start, second + 0.9, 0))
    ((utterance, _),) = bench.reviser.asked
    assert len(utterance.samples) == int(13.025 * RATE) and list(utterance.draft) == [0] * 13
    bench.reviser.asked[0][1].set_result([TimedToken(0, 0.0, 1.0, -0.1)])
    (revised,) = bench.step()
    assert isinstance(revised, Revised) and (revised.start, revised.end) == (0, int(13.025 * RATE))


@settings(deadline=None)
@given(st.lists(st.floats(0.05, 0.9), min_size=30, max_size=90), st.data())
def test_no_part_is_longer_than_the_model_can_read_and_memory_is_bounded(
    pauses: list[float], data: st.DataObject
) -> None:
    bench = Bench()
    at, fed = 0.2, 0.0
    for pause in pauses:
        length = data.draw(st.floats(0.1, 1.2))
        while fed < at + pause + length:
            bench.revisions.add_audio("s", audio(0.8, fed))
            fed += 0.8
        bench.step(said("one", at + pause, at + pause + length, 0))
        at += pause + length
        for utterance, answer in bench.reviser.asked:
            assert len(utterance.samples) <= MAX_SAMPLES
            if not answer.done():
                answer.set_result([])
        bench.step()
    saved, _ = bench.revisions.save("s")
    assert len(saved["revisions"]["words"]) * 0.15 * RATE <= LONG_SAMPLES + MAX_SAMPLES
    assert bench.revisions.kept_samples("s") <= LONG_SAMPLES + WORDLESS_SAMPLES + 4 * RATE


@settings(deadline=None)
@given(st.integers(0, 7))
def test_a_stream_resumed_at_any_moment_has_the_same_parts_decoded_again(at: int) -> None:
    steps = [
        (audio(0.8, second * 0.8), [said("one", second * 0.8 + 0.1, second * 0.8 + 0.7, 0)]) for second in range(6)
    ]
    steps[3][1].append(Flushed("s", 1, int(3.2 * RATE)))  # type: ignore[arg-type]
    steps.append((audio(0.8, 4.8), [Flushed("s", 2, int(5.6 * RATE))]))  # type: ignore[list-item]

    def run(bench: Bench, part: list[tuple[list[Item], list[Text]]]) -> None:
        for items, outputs in part:
            bench.revisions.add_audio("s", items)
            bench.step(*outputs)

    alone = Bench()
    run(alone, steps)
    first, second = Bench(), Bench()
    run(first, steps[:at])
    state, position = first.revisions.save("s")
    items = [item for items, _ in steps[:at] for item in items if position is not None and item.offset >= position]
    second.revisions.resume("s", state["revisions"], items)
    asked = len(second.reviser.asked)
    run(second, steps[at:])
    before = [] if asked else first.reviser.asked
    found = [(u.draft, u.samples.tobytes()) for u, _ in (*before, *second.reviser.asked)]
    assert found == [(u.draft, u.samples.tobytes()) for u, _ in alone.reviser.asked]


@pytest.mark.parametrize("state", [{}, {"start": 0, "tokens": [], "words": [[1]], "waiting": []}, {"start": None}])
def test_a_state_that_cannot_be_read_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(BadItem, match="saved revisions cannot be read"):
        Bench().revisions.resume("s", state, [])


def test_a_word_and_hours_of_silence_keep_little_audio() -> None:
    bench = Bench()
    bench.revisions.add_audio("s", audio(2.0))
    bench.step(said("one", 0.5, 1.0, 0))
    for second in range(2, 200):
        bench.revisions.add_audio("s", audio(1.0, second))
        bench.step()
        for _, answer in bench.reviser.asked:
            if not answer.done():
                answer.set_result([])
    assert len(bench.reviser.asked) == 1 and bench.revisions.kept_samples("s") <= LONG_SAMPLES + WORDLESS_SAMPLES


def test_a_revision_is_given_up_though_nothing_else_happens_and_is_cancelled_with_its_stream() -> None:
    bench = Bench()
    bench.revisions.add_audio("s", audio(4.0))
    bench.step(said("one", 1.5, 2.0, 0), Flushed("s", 1, 3 * RATE))
    bench.now = int((PATIENCE_SECONDS + 1) * 1e9)
    assert bench.revisions.has_work
    bench.revisions.close("s")
    assert bench.reviser.asked[0][1].cancelled()


def test_a_turn_that_the_client_ended_is_no_context() -> None:
    for border in (False, True):
        bench = Bench()
        bench.revisions.add_audio("s", audio(6.0))
        if border:
            bench.revisions.mark_turn_end("s", 1)
        bench.step(said("one", 0.5, 1.0, 0), Flushed("s", 1, int(1.5 * RATE)))
        bench.step(said("two", 2.5, 3.0, 1), Flushed("s", 2, 4 * RATE))
        (_, _), (utterance, _) = bench.reviser.asked
        assert list(utterance.context_tokens) == ([] if border else [0]) and bool(utterance.context_samples) != border


def test_uploads_and_streams_that_did_not_ask_are_not_decoded_again() -> None:
    bench = Bench()
    bench.revisions.open("file", {REVISED: "yes"}, live=False)
    bench.revisions.open("plain", {}, live=True)
    for name in ("file", "plain"):
        bench.revisions.add_audio(name, audio(2.0))
        flushed = Flushed(name, 1, 2 * RATE)
        assert bench.step(said("one", 0.5, 1.0, 0, stream=name), flushed)[-1] is flushed and not flushed.is_revised
