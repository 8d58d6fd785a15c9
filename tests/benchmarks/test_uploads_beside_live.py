"""The uploads of the benchmark: they send what may wait and no more, end, and begin again."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.live_run import RunFailed, VirtualClock
from benchmarks.uploads_beside_live import RunWithUploads, Upload, same_texts
from engine.messages import Closed, Failed, Feed, Finish, Open
from tests.benchmarks.test_live_run import SPEC, make_loop

AHEAD = 30


def upload(number: int, seconds: float = 4.0) -> Upload:
    return Upload(number, np.ones(round(seconds * 16_000), np.float32), SPEC, AHEAD)


def test_an_upload_sends_no_more_than_may_wait() -> None:
    one = upload(0)
    opened, *fed = one.commands(0)
    assert isinstance(opened, Open) and not opened.live
    ends = [command.items[-1].offset + command.items[-1].length for command in fed if isinstance(command, Feed)]
    # A second of audio is 12.5 positions.
    assert AHEAD <= ends[-1] < AHEAD + 13 and not list(one.commands(0))
    rest = list(one.commands(ends[-1]))
    assert isinstance(rest[-1], Finish)


def test_an_upload_that_ends_begins_again_under_another_name() -> None:
    one = upload(0)
    name = one.name
    list(one.commands(0))
    one.take(Closed(name, 0))
    assert one.name != name and one.texts == [""]
    assert [type(command) for command in one.commands(0)][0] is Open


def test_uploads_that_fail_end_the_run() -> None:
    with pytest.raises(RunFailed, match="out of tune"):
        upload(0).take(Failed("upload-0-0", "StreamFailed", "out of tune"))


def test_what_is_heard_of_uploads_is_counted_over_all_their_rounds() -> None:
    uploads = [upload(number) for number in range(2)]
    loop = make_loop()
    run = RunWithUploads(loop, VirtualClock(), uploads)
    while min(one.rounds for one in uploads) < 2:
        run.run_uploads(run._clock.now + 0.01)
    assert run.heard_seconds >= 2 * 2 * 4.0
    # A word at positions 2, 7, 12 ... 47 of 50.
    assert {text for one in uploads for text in one.texts} == {" tick" * 10}
    assert same_texts(uploads, uploads)


def test_runs_without_a_whole_upload_prove_nothing() -> None:
    with pytest.raises(RunFailed, match="no upload came to its end"):
        same_texts([upload(0)], [upload(0)])
