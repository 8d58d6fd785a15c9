"""The saved value of a live session: one from another process is read or refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from realtime.errors import UnreadableValue
from realtime.serving.handoff import LIVE_VERSION, SavedLive, decode_live, encode_live
from realtime.session.settings import Settings
from tests.realtime.session.test_core import session

SAVED = SavedLive(
    version=LIVE_VERSION,
    session=session().save(),
    caller="somebody",
    created=1,
    started_at=2.0,
    may_inject=False,
    dialect="openai",
    dialect_state={},
    dialect_fixed=True,
    item_ids=("item", 3),
    outbox=[],
    sequence=5,
    engine_settings=Settings(),
    streams_opened=1,
    fed=6,
    reanchor=None,
    reopen=False,
    now=7.0,
)


def test_a_value_is_read_as_it_was_written() -> None:
    assert decode_live(encode_live(SAVED)) == SAVED


def test_values_of_another_version_or_of_nobody_are_refused() -> None:
    with pytest.raises(UnreadableValue, match="version 99"):
        decode_live(encode_live(msgspec.structs.replace(SAVED, version=99)))
    value = encode_live(SAVED)
    for broken in (b"", b"\x00", value[:-1], np.random.default_rng(0).bytes(100)):
        with pytest.raises(UnreadableValue):
            decode_live(broken)
