"""What is kept of a stream, and how a repeated text is told from a new one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import Item, Text, Word
from engine.replay import CONTEXT_SECONDS, FlushMark, KeptAudio, TokenMemory, WindowMemory, memory_for, repeated_words
from tests.engine import fakes

SPEC = fakes.FRAMES
FIRST = SPEC.prefix_positions
CONTEXT = CONTEXT_SECONDS * fakes.RATE // fakes.POSITION
VOCABULARY = ["the", "cat", "sat", "on", "a", "mat"]


def items(start: int, count: int) -> list[Item]:
    return [Item(FIRST + i, 1, i * fakes.POSITION, b"k%d" % i) for i in range(start, start + count)]


def spoken(words: list[str], start: int = 0) -> Text:
    """One delta; word i is heard over samples [100 i, 100 i + 100)."""
    timed = [Word(word, 100 * i, 100 * i + 100) for i, word in enumerate(words, start)]
    return Text("s", "".join(f" {word}" for word in words), timed, [])


def test_each_kind_of_model_has_its_memory() -> None:
    assert isinstance(memory_for(fakes.FRAMES, 10), TokenMemory)
    assert isinstance(memory_for(fakes.WINDOWED, 10), WindowMemory)


def test_kept_audio_is_replayed_on_a_clock_that_starts_at_the_beginning() -> None:
    kept = KeptAudio(SPEC)
    kept.add(items(0, 10))
    kept.mark_flush(1, {1})
    kept.add(items(10, 2))
    assert kept.drop_before(FIRST + 4) == items(4, 1)[0]
    replay = kept.replay([7, 8])
    assert (replay.positions, replay.samples, replay.forced_tokens) == (4, 4 * fakes.POSITION, [7, 8])
    replayed = [entry for entry in replay.entries if isinstance(entry, Item)]
    assert [(entry.offset, entry.sample) for entry in replayed] == [(e.offset, e.sample) for e in items(0, 8)]
    assert replay.entries[6] == FlushMark(1)
    # What is kept itself stays on the stream's own clock.
    assert kept.first() == items(4, 1)[0]


def test_a_replay_of_nothing_starts_where_the_stream_is() -> None:
    kept = KeptAudio(SPEC)
    kept.add(items(0, 3))
    assert kept.drop_before(kept.end) is None
    replay = kept.replay([])
    assert (replay.positions, replay.samples, replay.entries) == (3, 3 * fakes.POSITION, [])


def test_flushes_without_audio_do_not_pile_up() -> None:
    kept = KeptAudio(SPEC)
    for tag in range(1000):
        kept.mark_flush(tag, {tag})
    assert len(kept) == 1
    kept.mark_flush(1000, {999, 1000})
    assert len(kept) == 2, "somebody waits for the answer to 999"


@pytest.mark.parametrize(("position", "sample"), [(FIRST, 0), (FIRST + 1, 128), (FIRST + 2, 228), (FIRST + 9, 228)])
def test_positions_become_samples_and_padding_is_no_audio(position: int, sample: int) -> None:
    kept = KeptAudio(SPEC)
    kept.add([*items(0, 1), replace(items(1, 1)[0], samples=100), Item(FIRST + 2, 3, 228, samples=0)])
    assert kept.sample_at(position) == sample


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=30))
@settings(max_examples=100, deadline=None)
def test_forced_tokens_always_belong_to_the_audio_that_is_kept(steps: list[tuple[int, int]]) -> None:
    """Each step: so many items are fed, then so many tokens heard of, if there are as many positions."""
    memory, kept = TokenMemory(SPEC, keep_positions=8), KeptAudio(SPEC)
    fed = heard = 0
    for more, news in steps:
        kept.add(items(fed, more))
        fed += more
        news = min(news, fed - heard)
        memory.hear(Text("s", "", [], list(range(heard, heard + news))))
        heard += news
        first = kept.drop_before(memory.keep_from(kept, FIRST + heard, FIRST + heard))
        start = kept.end if first is None else first.offset
        memory.trimmed(start, kept.sample_at(start))
        assert memory.forced_tokens() == list(range(start - FIRST, heard))
        assert len(kept) <= max(8, fed - heard) + 1


def test_a_word_that_a_replayed_flush_completes_again_is_dropped() -> None:
    memory = TokenMemory(SPEC, 100)
    memory.hear(spoken(["the", "cat"]))
    memory.replayed()
    again = memory.hear(Text("s", "", [Word("cat", 100, 200)], []))
    assert again is None
    news = memory.hear(replace(spoken(["sat"], 2), tokens=[4]))
    assert news is not None and [word.text for word in news.words] == ["sat"]


# A model that rereads its window repeats itself after a replay.


@given(
    st.lists(st.sampled_from(VOCABULARY), min_size=1, max_size=12),
    st.integers(0, 12),
    st.lists(st.integers(1, 4), max_size=8),
)
@settings(max_examples=200, deadline=None)
def test_a_faithful_repetition_is_dropped_however_it_is_cut(words: list[str], known: int, cuts: list[int]) -> None:
    known = min(known, len(words))
    memory = WindowMemory(fakes.WINDOWED)
    said = memory.hear(spoken(words[:known])) if known else None
    heard = [] if said is None else [said]
    memory.replayed()
    start = 0
    for size in [*cuts, len(words)]:
        if start < len(words):
            news = memory.hear(spoken(words[start : start + size], start))
            heard += [] if news is None else [news]
            start += size
    last = memory.settle(KeptAudio(fakes.WINDOWED), 1)
    heard += [] if last is None else [last]
    assert "".join(text.delta for text in heard) == "".join(f" {word}" for word in words)
    assert [word.text for text in heard for word in text.words] == words


def test_half_a_word_is_continued() -> None:
    memory = WindowMemory(fakes.WINDOWED)
    memory.hear(Text("s", " the ca", [Word("the", 0, 100)], []))
    memory.replayed()
    news = memory.hear(Text("s", "the cat sat", [Word("the", 0, 100), Word("cat", 100, 200)], []))
    assert news is not None
    assert news.delta == "t sat" and [word.text for word in news.words] == ["cat"]


def test_what_is_heard_differently_the_second_time_is_not_said_twice() -> None:
    memory = WindowMemory(fakes.WINDOWED)
    memory.hear(spoken(["the", "cat", "sat"]))
    memory.replayed()
    assert memory.hear(spoken(["the", "cap", "sat"])) is None
    news = memory.hear(spoken(["on", "a"], 3))
    assert news is not None and news.delta == " on a"
    assert [word.text for word in news.words] == ["on", "a"]


def test_a_doubt_is_settled_when_the_segment_ends() -> None:
    memory, kept = WindowMemory(fakes.WINDOWED), KeptAudio(fakes.WINDOWED)
    memory.hear(spoken(["the", "cat", "sat"]))
    memory.replayed()
    assert memory.hear(spoken(["the", "cap"])) is None
    assert memory.settle(kept, 1) is None
    memory.hear(spoken(["on", "a"], 3))
    memory.replayed()
    assert memory.hear(spoken(["under", "the"], 3)) is None
    assert memory.hear(spoken(["mat"], 4)) is None
    news = memory.settle(kept, 2)
    assert news is not None and news.delta == " mat" and [word.text for word in news.words] == ["mat"]


def test_an_answered_flush_takes_its_audio_with_it_if_the_model_rereads() -> None:
    for spec in (fakes.WINDOWED, fakes.FRAMES):
        memory, kept = memory_for(spec, 100), KeptAudio(spec)
        kept.add(items(0, 3))
        kept.mark_flush(1, {1})
        kept.add(items(3, 2))
        memory.settle(kept, 1)
        assert len(kept) == (2 if spec.rereads_window else 6)
        memory.settle(kept, 99)
        assert len(kept) == (2 if spec.rereads_window else 6)


def test_a_second_death_during_the_repetition_repeats_the_same_audio() -> None:
    memory, kept = WindowMemory(fakes.WINDOWED), KeptAudio(fakes.WINDOWED)
    memory.hear(spoken(["the", "cat", "sat"]))
    memory.replayed()
    assert memory.hear(spoken(["the"])) is None
    assert memory.keep_from(kept, computed=20, base=10) == 0, "nothing may be dropped before the repetition is over"
    memory.replayed()
    news = memory.hear(spoken(["the", "cat", "sat", "on"]))
    assert news is not None and news.delta == " on"
    assert memory.keep_from(kept, computed=90, base=80) == 80 - CONTEXT


def test_the_audio_of_a_word_that_has_only_begun_is_kept() -> None:
    memory, kept = WindowMemory(fakes.WINDOWED), KeptAudio(fakes.WINDOWED)
    kept.add([Item(i, 1, i * fakes.POSITION) for i in range(100)])
    memory.hear(Text("s", " the ca", [Word("the", 0, 5 * fakes.POSITION)], []))
    assert memory.keep_from(kept, computed=50, base=40) == 5
    assert memory.keep_from(kept, computed=99, base=90) == 50, "but no more than a window before the window"
    memory.hear(Text("s", "t", [Word("cat", 5 * fakes.POSITION, 8 * fakes.POSITION)], []))
    assert memory.keep_from(kept, computed=50, base=40) == 40 - CONTEXT


def test_words_before_the_window_are_beyond_repetition() -> None:
    memory = WindowMemory(fakes.WINDOWED)
    memory.hear(spoken(["the", "cat", "sat"]))
    memory.trimmed(position=5, sample=200)
    memory.replayed()
    news = memory.hear(spoken(["sat", "on"], 2))
    assert news is not None and news.delta == " on"


@pytest.mark.parametrize(
    ("said", "heard", "repeated"),
    [
        ("", "a b", 0),
        ("a b", "", 0),
        ("a b", "a b c", 2),
        ("a b", "A, b. c", 2),
        ("a b c", "a x c d", 3),
        ("a b c d", "c d e", 2),
        ("a b", "a an b c", 3),
    ],
)
def test_the_place_where_a_repetition_ends(said: str, heard: str, repeated: int) -> None:
    assert repeated_words(said.split(), heard.split()) == repeated
