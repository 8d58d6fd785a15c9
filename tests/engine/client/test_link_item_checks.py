"""Hashing, checking and rendering of items; which path may touch the mirrored cache."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from engine.boundary.input_cache import CacheStats, SenderCache
from engine.boundary.items import hash_payload, make_cutter, prepare
from engine.client.link import ItemChecker, ItemRefused, warm_up
from engine.client.prepared_audio import check_same_model, parse_items, render
from engine.messages import Item
from engine.spec import FeatureShape
from tests.engine import fakes

SPEC = fakes.FRAMES
SAMPLES = SPEC.look_back_samples + SPEC.samples_per_position + SPEC.look_ahead_samples


def make_checker(capacity: int = 1 << 20, features: FeatureShape | None = None) -> ItemChecker:
    return ItemChecker("main", replace(SPEC, features=features), SenderCache(capacity))


def item(payload: object, **changes: object) -> Item:
    key = hash_payload(np.ascontiguousarray(payload)) if isinstance(payload, np.ndarray) else b"k" * 16
    return structs.replace(Item(3, 1, 0, key, payload), **changes)  # type: ignore[arg-type]


GOOD = np.linspace(-1, 1, SAMPLES, dtype=np.float32)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (item(GOOD, key=b"x" * 16), "not the hash of its data"),
        (item(GOOD, key=b"short"), "16 bytes"),
        (item(GOOD[:-1]), "shape"),
        (item(GOOD.astype(np.float64)), "float64"),
        (item(GOOD.astype(np.int16)), "int16"),
        (item(b"raw bytes"), "bytes"),
        (item(np.repeat(GOOD, 2)[::2]), "contiguous"),
        (item(np.full(SAMPLES, np.nan, np.float32)), "NaN"),
        (item(np.full(SAMPLES, np.inf, np.float32)), "NaN or infinite"),
        (item(np.zeros((4, 8), np.float32)), f"takes audio, not features; send the item's {SAMPLES} samples"),
        (item(GOOD, offset=-1), "0 or more"),
        (item(GOOD, length=0), "1 or more"),
        (item(GOOD, mask=[False]), "gap carries no audio"),
        (item(GOOD, mask=[True, True]), "2 entries for 1 positions"),
        (item(GOOD, samples="x"), "whole numbers"),
        (item(GOOD, offset=2**70), "below 2"),
    ],
)
def test_a_malformed_item_is_refused_with_the_reason(bad: Item, says: str) -> None:
    checker = make_checker()
    with pytest.raises(ItemRefused, match=says):
        checker.check([item(GOOD), bad])
    assert checker.cache.stats == CacheStats()


@pytest.mark.parametrize("shape", [(8, 4), (4, 9), (4, 7)])
def test_features_of_the_wrong_shape_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ItemRefused, match=r"takes \(4, 8\)"):
        make_checker(features=FeatureShape(4, 6, 2)).check([item(np.ones(shape, np.float32))])


def test_features_of_the_right_shape_are_taken_and_do_not_share_keys_with_samples() -> None:
    features = np.ones((4, 8), np.float32)
    assert make_checker(features=FeatureShape(4, 6, 2)).check([item(features)])[0].payload is features
    assert hash_payload(features) != hash_payload(features.reshape(-1))


def test_nan_features_are_refused() -> None:
    with pytest.raises(ItemRefused, match="NaN"):
        make_checker(features=FeatureShape(4, 6, 2)).check([item(np.full((4, 8), np.nan, np.float32))])


def test_items_that_are_none_are_skipped_and_gaps_and_bare_hashes_pass() -> None:
    gap = Item(4, 2, 0, mask=[False, False])
    bare = Item(6, 1, 0, b"h" * 16)
    assert make_checker().check([None, gap, None, bare]) == [gap, bare]


def test_the_key_is_the_hash_of_the_payload_bytes() -> None:
    assert hash_payload(GOOD) == blake2b(GOOD.tobytes(), digest_size=16).digest()


def test_digital_silence_hits_from_the_second_item_on() -> None:
    main, cutter = make_checker(), make_cutter(SPEC)
    items = prepare(cutter, cutter.cut(np.zeros(SPEC.samples_per_position * 50, np.float32)), SPEC)
    assert main.pack(items) == [True] + [False] * (len(items) - 1)
    assert main.cache.stats.hits == main.cache.stats.queries - 1 == len(items) - 1
    assert main.cache.stats.bytes_sent == SAMPLES * 4


def test_a_declared_gap_asks_nothing() -> None:
    main, cutter = make_checker(), make_cutter(SPEC)
    items = prepare(cutter, cutter.cut_gap(SPEC.samples_per_position * 5), SPEC)
    assert items and not any(main.pack(items))
    assert main.cache.stats == CacheStats()


@given(st.lists(st.integers(1, 400), max_size=12), st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_items_cover_the_audio_exactly_and_padding_is_not_audio(sizes: list[int], pads: int) -> None:
    cutter = make_cutter(SPEC)
    items = []
    for size in sizes:
        items += prepare(cutter, cutter.cut(np.ones(size, np.float32)), SPEC)
    items += prepare(cutter, cutter.flush(pads), SPEC)
    covered = sum(
        entry.length * SPEC.samples_per_position if entry.samples is None else entry.samples for entry in items
    )
    assert covered == sum(sizes)
    assert [entry.offset for entry in items[:1]] == [SPEC.prefix_positions][: len(items)]
    for before, after in zip(items, items[1:], strict=False):
        assert after.offset == before.offset + before.length


def test_a_bare_hash_is_looked_up_but_never_sent() -> None:
    main = make_checker()
    assert main.pack([Item(3, 1, 0, b"h" * 16)]) == [False]
    assert main.cache.keys() == []
    known = item(GOOD)
    main.pack([known])
    assert main.pack([structs.replace(known, payload=None)]) == [False]
    assert main.cache.stats.bytes_saved == GOOD.nbytes


def test_warm_up_leaves_no_trace_and_one_failure_does_not_stop_the_other(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, healthy = make_checker(), ItemChecker("preparing", SPEC, SenderCache(1 << 20))
    monkeypatch.setattr(broken, "pack", lambda items: 1 / 0)
    with caplog.at_level(logging.INFO):
        assert warm_up(broken) is None and warm_up(healthy) is not None
    assert "main item checker failed" in caplog.text and "preparing item checker is warm after" in caplog.text
    assert healthy.cache.keys() == [] and healthy.cache.stats == CacheStats()


# Render.


def test_render_describes_without_touching_the_mirror() -> None:
    mirror, preparing = SenderCache(1 << 20), ItemChecker("preparing", SPEC, SenderCache(1 << 20))
    audio = np.concatenate([fakes.speech(1, 1), np.zeros(fakes.RATE, np.float32)])
    rendered = render(preparing, audio, mirror)
    assert mirror.keys() == [] and mirror.stats == CacheStats()
    assert not any(rendered.cached)
    assert rendered.samples == len(audio)
    assert rendered.positions == sum(entry.length for entry in rendered.items)
    distinct = {entry.key: entry for entry in rendered.items if entry.key}
    assert rendered.bytes_to_send == len(distinct) * SAMPLES * 4 < rendered.payload_bytes
    assert rendered.positions_to_encode == len(distinct)


def test_render_knows_what_the_engine_holds() -> None:
    main, preparing = make_checker(), ItemChecker("preparing", SPEC, SenderCache(1 << 20))
    first = render(preparing, fakes.speech(1, 1), main.cache)
    main.pack(first.items)
    again = render(preparing, fakes.speech(1, 1), main.cache)
    assert [cached for cached, entry in zip(again.cached, again.items, strict=True) if entry.key] == [True] * len(
        [entry for entry in again.items if entry.key]
    )
    assert again.bytes_to_send == again.positions_to_encode == 0


def test_rendered_items_survive_json_and_pass_the_check() -> None:
    preparing = ItemChecker("preparing", SPEC, SenderCache(1 << 20))
    rendered = render(preparing, fakes.speech(2, 1), SenderCache(0))
    answer = json.loads(json.dumps(rendered.as_json()))
    assert answer["model"] == SPEC.name and answer["positions"] == rendered.positions
    parsed = make_checker().check(parse_items(answer["items"]))
    assert [entry.key for entry in parsed] == [entry.key for entry in rendered.items]
    assert [entry.samples for entry in parsed] == [entry.samples for entry in rendered.items]


def test_render_without_data_names_hashes_only() -> None:
    preparing = ItemChecker("preparing", SPEC, SenderCache(1 << 20))
    answer = render(preparing, fakes.speech(1, 1), SenderCache(0)).as_json(with_data=False)
    assert not any("data" in entry for entry in answer["items"])


def test_render_of_no_audio_has_no_items() -> None:
    rendered = render(make_checker(), np.zeros(0, np.float32), SenderCache(0))
    assert rendered.items == [] and rendered.positions == 0


def test_audio_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(ItemRefused, match="float64"):
        render(make_checker(), np.zeros(10), SenderCache(0))


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"offset": 0, "length": 1}, "lacks 'sample'"),
        ({"offset": 0, "length": 1, "sample": 0, "hash": "zz"}, "malformed"),
        ({"offset": 0, "length": 1, "sample": 0, "data": "!!"}, "malformed"),
        ({"offset": 0, "length": 1, "sample": 0, "data": "AAA="}, "malformed"),
        ({"offset": 0, "length": 1, "sample": 0, "data": "AAAAAA==", "shape": [3, 3]}, "malformed"),
        ({"offset": "x", "length": 1, "sample": 0}, "malformed: 'offset'"),
        ({"offset": 2**70, "length": 1, "sample": 0}, "malformed: 'offset'"),
        ({"offset": 10**5000, "length": 1, "sample": 0}, "malformed: 'offset'"),
        ({"offset": True, "length": 1, "sample": 0}, "malformed: 'offset'"),
        ({"offset": 0, "length": 1.5, "sample": 0}, "malformed: 'length'"),
        ({"offset": 0, "length": float("nan"), "sample": 0}, "malformed: 'length'"),
        ({"offset": 0, "length": 1, "sample": -1}, "malformed: 'sample'"),
        ({"offset": 0, "length": 1, "sample": 0, "samples": "x"}, "malformed: 'samples'"),
        ({"offset": 0, "length": 1, "sample": 0, "samples": False}, "malformed: 'samples'"),
        ({"offset": 0, "length": 1, "sample": 0, "mask": [0, 1]}, "malformed: 'mask'"),
        ({"offset": 0, "length": 1, "sample": 0, "mask": "ab"}, "malformed: 'mask'"),
        ({"offset": 0, "length": 1, "sample": 0, "hash": 5}, "malformed"),
        ({"offset": 0, "length": 1, "sample": 0, "data": 5}, "malformed"),
        ({"offset": 0, "length": 1, "sample": 0, "data": "AAAAAA==", "shape": [2**70]}, "malformed"),
        ({"offset": 0, "length": 1, "sample": 0, "data": "AAAAAA==", "shape": [True]}, "malformed"),
        ({"offset": 0, "length": 1, "sample": 0, "data": "AAAAAA==", "shape": 1}, "malformed"),
        ({"offset": 0, "length": 1, "sample": 0, "data": "AAAAAA==", "shape": [1] * 40}, "malformed"),
    ],
)
def test_a_malformed_description_is_refused(entry: dict[str, object], says: str) -> None:
    with pytest.raises(ItemRefused, match=says):
        parse_items([entry])


def test_items_for_another_model_are_refused() -> None:
    check_same_model(SPEC.name, SPEC)
    with pytest.raises(ItemRefused, match="prepared for 'other'"):
        check_same_model("other", SPEC)
