"""The uploads benchmark: each file is sent repeatedly under other names, and texts are compared file by file."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.measuring import RunFailed
from benchmarks.recordings import sound_session
from benchmarks.uploads import EndlessUploads, play, same_texts
from tests.benchmarks.test_playing import make_loop

AUDIO = np.random.default_rng(0).standard_normal(4 * 16_000).astype(np.float32)


def test_uploads_are_sent_again_and_again_for_as_long_as_the_live_session_speaks() -> None:
    uploads = EndlessUploads(AUDIO, 2)
    assert [session.name for session in uploads.waiting] == ["upload-0-0", "upload-1-0"]
    (live,), rate = play(make_loop(), [sound_session("live", AUDIO[:16_000])], uploads, 2)
    assert live.session.name == "live" and live.closed_at is not None
    assert rate > 0
    # A word at positions 2, 7, 12 ... 47 of 50.
    assert {text for texts in uploads.texts.values() for text in texts} == {" tick" * 10}
    assert min(len(texts) for texts in uploads.texts.values()) > 2
    assert same_texts(uploads, uploads)


def test_uploads_alone_stop_when_their_time_is_over() -> None:
    uploads = EndlessUploads(AUDIO, 2)
    live, rate = play(make_loop(), [], uploads, 2, until=0.05)
    assert not live and rate > 0


def test_runs_without_a_whole_upload_prove_nothing() -> None:
    with pytest.raises(RunFailed, match="no upload was finished"):
        same_texts(EndlessUploads(AUDIO, 1), EndlessUploads(AUDIO, 1))
