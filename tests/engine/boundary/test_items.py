"""Which items are accepted: every number in range, and audio of the size that its positions need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from engine.boundary.items import complaint_about
from engine.messages import Item
from engine.spec import FeatureShape, ModelSpec

SPEC = ModelSpec(name="m", sample_rate=1600, samples_per_position=128, look_back_samples=4, look_ahead_samples=2)
GOOD = Item(3, 2, 256, b"k" * 16, np.zeros(262, np.float32))
COUNTS = ("offset", "length", "sample", "samples")
NO_COUNTS = ("x", True, 1.0, float("nan"), 2**53, -(2**70), 10**5000, [1])
FEATURES = replace(SPEC, features=FeatureShape(4, 6, 2))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        *(({name: value}, "must") for name in COUNTS for value in NO_COUNTS),
        ({"offset": -1}, "0 or more"),
        ({"length": 0}, "1 or more"),
        ({"sample": -1}, "0 or more"),
        ({"offset": 2**53 - 1}, "longer than any session"),
        ({"sample": 2**53 - 1}, "longer than any session"),
        ({"length": 2**50}, "longer than any session"),
        ({"samples": -1}, "between 0 and 256"),
        ({"samples": 257}, "between 0 and 256"),
        ({"mask": [True]}, "1 entries for 2 positions"),
        ({"mask": [True] * 3}, "3 entries for 2 positions"),
        ({"mask": [False, False]}, "gap carries no audio"),
        ({"key": b""}, "16 bytes"),
        ({"key": b"", "payload": None, "mask": [True, False]}, "16 bytes"),
        ({"key": b"k" * 17}, "16 bytes"),
        ({"key": "k" * 16}, "16 bytes"),
        ({"payload": b"raw"}, "type bytes"),
        ({"payload": np.zeros(262)}, "float64"),
        ({"payload": np.zeros(524, np.float32)[::2]}, "contiguous"),
        ({"payload": np.zeros(261, np.float32)}, "shape"),
        ({"payload": np.zeros((1, 262), np.float32)}, "not features"),
        ({"payload": np.zeros((1, 1, 262), np.float32)}, "shape"),
        ({"payload": np.float32(1)}, "type float32"),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], says: str) -> None:
    complaint = complaint_about(structs.replace(GOOD, **changes), SPEC)
    assert complaint is not None and says in complaint and len(complaint) < 200


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"samples": 0},
        {"samples": 256},
        {"mask": [True, False]},
        {"payload": None},
        {"offset": 2**53 - 3},
        {"mask": [False, False], "key": b"", "payload": None},
        {"length": 10**9, "key": b"", "payload": None},
    ],
)
def test_what_is_right_is_taken(changes: dict[str, Any]) -> None:
    assert complaint_about(structs.replace(GOOD, **changes), SPEC) is None


def test_features_are_taken_in_their_own_shape() -> None:
    assert complaint_about(structs.replace(GOOD, payload=np.zeros((4, 14), np.float32)), FEATURES) is None
    for shape in ((4, 13), (14, 4)):
        complaint = complaint_about(structs.replace(GOOD, payload=np.zeros(shape, np.float32)), FEATURES)
        assert complaint is not None and "takes (4, 14)" in complaint
