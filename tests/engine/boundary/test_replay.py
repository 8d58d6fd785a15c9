"""The state that is kept of a stream, and the messages that rebuild it on a new engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from engine.boundary.items import can_be_split, complaint_about, make_cutter, positions_in, prepare, split_item
from engine.boundary.replay import (
    JOINED_POSITIONS,
    FlushRequest,
    ReplayLog,
    SavedWindow,
    TokenHistory,
    join,
    join_replayed,
    positions_to_keep,
    replay_state_for,
)
from engine.messages import SKIPPED, Item, StreamState, Text, Word
from engine.spec import KvGroup
from tests.engine import fakes

SPEC = fakes.FRAMES
FIRST = SPEC.prefix_positions


def items(start: int, count: int) -> list[Item]:
    return [Item(FIRST + i, 1, i * fakes.POSITION, b"k%d" % i) for i in range(start, start + count)]


def spoken(words: list[str], start: int = 0) -> Text:
    """One delta; word i is heard over samples [100 i, 100 i + 100)."""
    timed = [Word(word, 100 * i, 100 * i + 100) for i, word in enumerate(words, start)]
    return Text("s", "".join(f" {word}" for word in words), timed, [])


def test_no_more_is_kept_than_the_model_looks_back_on() -> None:
    groups = (KvGroup("encoder", 188, 16, 1), KvGroup("decoder", 1024, 16, 1))
    frames = replace(SPEC, sample_rate=16_000, samples_per_position=1280, kv_groups=groups)
    assert positions_to_keep(frames, 120.0) == 1024
    assert positions_to_keep(frames, 20.0) == 250
    assert positions_to_keep(replace(frames, kv_groups=()), 120.0) == 1500


def test_each_kind_of_model_has_its_replay_state() -> None:
    assert isinstance(replay_state_for(fakes.FRAMES, 10), TokenHistory)
    assert isinstance(replay_state_for(fakes.WINDOWED, 10), SavedWindow)


def test_kept_audio_is_replayed_on_a_clock_that_starts_at_the_beginning() -> None:
    kept = ReplayLog(SPEC)
    kept.add(items(0, 10))
    kept.mark_flush(1, {1})
    kept.add(items(10, 2))
    assert kept.drop_before(FIRST + 4) == items(4, 1)[0]
    positions, samples, entries = kept.rebased()
    assert (positions, samples) == (4, 4 * fakes.POSITION)
    replayed = [entry for entry in entries if isinstance(entry, Item)]
    assert [(entry.offset, entry.sample) for entry in replayed] == [(e.offset, e.sample) for e in items(0, 8)]
    assert entries[6] == FlushRequest(1)
    # What is kept itself stays on the stream's own clock.
    assert kept.first() == items(4, 1)[0]


def test_a_replay_of_nothing_starts_where_the_stream_is() -> None:
    kept = ReplayLog(SPEC)
    kept.add(items(0, 3))
    assert kept.drop_before(kept.end) is None
    assert kept.rebased() == (3, 3 * fakes.POSITION, [])


def test_flushes_without_audio_do_not_pile_up() -> None:
    kept = ReplayLog(SPEC)
    for tag in range(1000):
        kept.mark_flush(tag, {tag})
    assert len(kept) == 1
    kept.mark_flush(1000, {999, 1000})
    assert len(kept) == 2, "the answer to 999 is still expected"


@pytest.mark.parametrize(("position", "sample"), [(FIRST, 0), (FIRST + 1, 128), (FIRST + 2, 228), (FIRST + 9, 228)])
def test_positions_become_samples_and_padding_is_no_audio(position: int, sample: int) -> None:
    kept = ReplayLog(SPEC)
    kept.add([*items(0, 1), structs.replace(items(1, 1)[0], samples=100), Item(FIRST + 2, 3, 228, samples=0)])
    assert kept.sample_at(position) == sample


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=30))
@settings(max_examples=100, deadline=None)
def test_forced_tokens_always_belong_to_the_audio_that_is_kept(steps: list[tuple[int, int]]) -> None:
    """Each step: so many items are fed, then so many tokens heard of, if there are as many positions."""
    memory, kept = TokenHistory(SPEC, keep_positions=8), ReplayLog(SPEC)
    fed = heard = 0
    for more, news in steps:
        kept.add(items(fed, more))
        fed += more
        news = min(news, fed - heard)
        memory.on_text(Text("s", "", [], list(range(heard, heard + news))))
        heard += news
        memory.trim(kept)
        first = kept.first()
        start = kept.end if first is None else first.offset
        assert memory.replay(kept).forced_tokens == list(range(start - FIRST, heard))
        assert len(kept) <= max(8, fed - heard) + 1


def test_a_word_that_a_replayed_flush_completes_again_is_dropped() -> None:
    memory = TokenHistory(SPEC, 100)
    memory.on_text(spoken(["the", "cat"]))
    kept = ReplayLog(SPEC)
    kept.add(items(0, 3))
    memory.replay(kept)
    again = memory.on_text(Text("s", "", [Word("cat", 100, 200)], []))
    assert again is None
    news = memory.on_text(structs.replace(spoken(["sat"], 2), tokens=[4]))
    assert news is not None and [word.text for word in news.words] == ["sat"]


def test_a_word_is_known_as_long_as_tokens_of_it_are_kept() -> None:
    memory, kept = TokenHistory(SPEC, keep_positions=4), ReplayLog(SPEC)
    kept.add(items(0, 10))
    last = 10 * fakes.POSITION
    memory.on_text(Text("s", " catnip", [Word("catnip", last - 200, last)], [1] * 10))
    # The silence of a flush moves positions only; the word's last tokens are said in it.
    kept.add([Item(FIRST + 10, 4, last, samples=0)])
    kept.mark_flush(1, set())
    memory.on_text(Text("s", "", [], [0] * 4))
    memory.trim(kept)
    assert kept.sample_at(FIRST + 10) == last
    memory.replay(kept)
    assert memory.on_text(Text("s", "", [Word("nip", last - 100, last)], [])) is None
    assert memory.on_text(Text("s", " dog", [Word("dog", last, last + 100)], [2])) is not None


# A model that rereads its window goes on from its last saved state.


def windowed_items(start: int, count: int) -> list[Item]:
    return [Item(i, 1, i * fakes.POSITION, b"k%d" % i) for i in range(start, start + count)]


def test_without_a_state_everything_is_heard_again() -> None:
    memory, kept = SavedWindow(), ReplayLog(fakes.WINDOWED)
    kept.add(windowed_items(0, 3))
    kept.mark_flush(1, {1})
    kept.add(windowed_items(3, 2))
    memory.trim(kept)
    replay = memory.replay(kept)
    assert replay.state is None and replay.before_state == []
    assert replay.entries == [*windowed_items(0, 3), FlushRequest(1), *windowed_items(3, 2)]
    assert (replay.positions, replay.samples, replay.catch_up_until) == (0, 0, 10)


def test_a_state_says_what_was_heard_and_what_is_still_needed() -> None:
    memory, kept = SavedWindow(), ReplayLog(fakes.WINDOWED)
    kept.add(windowed_items(0, 6))
    kept.mark_flush(1, {1})
    kept.add(windowed_items(6, 2))
    kept.mark_flush(2, {1, 2})
    state = StreamState("s", audio_from=4, position=8, tag=1, parts={})
    memory.on_state(state)
    memory.trim(kept)
    kept.add(windowed_items(8, 3))
    replay = memory.replay(kept)
    assert replay.state is state
    assert replay.before_state == windowed_items(4, 4)
    assert replay.entries == [FlushRequest(2), *windowed_items(8, 3)]
    assert replay.catch_up_until == 14, "three positions wait, and as many may come meanwhile"


def test_answered_flushes_leave_with_their_audio() -> None:
    memory, kept = SavedWindow(), ReplayLog(fakes.WINDOWED)
    for tag in range(1, 100):
        kept.add(windowed_items(tag - 1, 1))
        kept.mark_flush(tag, {tag})
        memory.on_state(StreamState("s", tag, tag, tag, {}))
        memory.trim(kept)
        assert len(kept) <= 1


# Joined items of a replay

ROUND = replace(SPEC, samples_per_position=8, look_back_samples=5, look_ahead_samples=3)


def windows(item: Item) -> list[tuple[int, int, bytes | None]]:
    """Position, first sample and samples with look-around of each position of an item; gaps have no samples."""
    size = ROUND.look_back_samples + ROUND.samples_per_position + ROUND.look_ahead_samples
    found: list[tuple[int, int, bytes | None]] = []
    for index in range(item.length):
        first = index * ROUND.samples_per_position
        samples = None if item.payload is None else item.payload[first : first + size].tobytes()
        found.append((item.offset + index, item.sample + first, samples))
    return found


def cut(steps: list[tuple[str, int]]) -> list[Item]:
    """The items of a stream of noise, gaps and flushes."""
    cutter, items, noise = make_cutter(ROUND), list[Item](), np.random.default_rng(1)
    for kind, count in steps:
        if kind == "audio":
            pieces = cutter.cut(noise.standard_normal(count).astype(np.float32))
        else:
            pieces = cutter.flush(2) if kind == "flush" else cutter.cut_gap(count)
        items += prepare(cutter, pieces, ROUND)
    return items


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["audio", "gap", "flush"]), st.integers(1, 200)), min_size=1, max_size=8),
    skipped=st.sets(st.integers(0, 60), max_size=6),
    known=st.floats(0, 1),
)
def test_joined_items_have_the_audio_of_each_position(
    steps: list[tuple[str, int]], skipped: set[int], known: float
) -> None:
    items = cut(steps)
    positions = sum(item.length for item in items)
    tokens = [SKIPPED if index in skipped else 7 for index in range(round(known * positions))]
    joined = join_replayed(items, tokens, ROUND)
    assert [part for item in joined for part in windows(item)] == [part for item in items for part in windows(item)]
    for item in joined:
        assert complaint_about(item, ROUND) is None
        start = item.offset - ROUND.prefix_positions
        if item.length > 1 and item.payload is not None:
            assert item.length <= JOINED_POSITIONS and SKIPPED not in tokens[start : start + item.length]
            assert start + item.length <= len(tokens) or start >= len(tokens), "known and unknown tokens in one item"


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["audio", "gap", "flush"]), st.integers(1, 200)), min_size=1, max_size=8),
    data=st.data(),
)
def test_parts_of_an_item_are_as_if_they_had_been_cut_alone(steps: list[tuple[str, int]], data: st.DataObject) -> None:
    items = cut(steps)

    def facts(entries: list[Item]) -> list[Any]:
        return [
            (item.offset, item.length, item.sample, item.covered_samples(ROUND.samples_per_position), item.key)
            for item in entries
        ]

    assert facts(fakes.single_items(join(items, ROUND), ROUND)) == facts(items)
    for item in join(items, ROUND):
        if not can_be_split(item):
            continue
        positions = data.draw(st.integers(1, item.length - 1))
        parts = split_item(item, positions, ROUND)
        assert [part.length for part in parts] == [positions, item.length - positions]
        # The samples of padding are those of the end of its segment.
        heard = [[window[::2] for window in windows(entry)] for entry in (*parts, item)]
        assert heard[0] + heard[1] == heard[2]
        assert all(complaint_about(part, ROUND) is None for part in parts)
        covered = [part.covered_samples(ROUND.samples_per_position) for part in parts]
        assert sum(covered) == item.covered_samples(ROUND.samples_per_position)
        assert parts[1].sample == item.sample + covered[0]


def test_items_with_known_tokens_are_joined_apart_from_the_others() -> None:
    cutter = make_cutter(ROUND)
    samples = np.arange(1, 41 * ROUND.samples_per_position, dtype=np.float32)
    entries = prepare(cutter, cutter.cut(samples), ROUND)
    joined = join_replayed(entries, [7] * 35, ROUND)
    assert [item.length for item in joined] == [16, 16, 3, len(entries) - 35]
    assert len({item.key for item in joined}) == len(joined)
    assert [positions_in(item.payload.nbytes, ROUND) for item in joined[:3]] == [16, 16, 3]
