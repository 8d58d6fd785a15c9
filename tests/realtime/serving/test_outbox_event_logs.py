"""Logs of sent frames: numbered, and given again to a client or a reader that missed them while they are kept."""

from __future__ import annotations

import asyncio

from realtime.serving.outbox import EventLog, SentLog


def test_frames_after_a_number_are_given_again_until_they_are_gone() -> None:
    log = SentLog("sess_1", 2, 1000)
    assert log.missed(0) == [] and log.missed(1) is None
    frames = [log.add({"type": name}) for name in ("a", "b", "c")]
    assert frames[0] == '{"type":"a","seq":1}'
    assert log.missed(1) == frames[1:] and log.missed(2) == frames[2:] and log.missed(3) == []
    assert log.missed(0) is None, "the first frame is gone"
    assert log.missed(4) is None, "nothing was sent with this number"


def test_frames_are_bounded_by_their_bytes_too() -> None:
    log = SentLog("sess_1", 4096, 1000)
    frames = [log.add({"type": "session.updated", "prompt": "ä" * 100}) for _ in range(20)]
    assert log.bytes <= 1000
    assert log.missed(17) == frames[17:] and log.missed(10) is None
    log.add({"type": "large", "text": "x" * 2000})
    assert log.bytes == 0 and log.missed(21) == [] and log.missed(20) is None


def test_frames_of_another_process_are_taken_once_however_often_they_come() -> None:
    log = SentLog("sess_1", 10, 1000)
    log.load(1, ["a", "b", "c"])
    log.load(2, ["b", "c", "d"])
    assert log.missed(0) == ["a", "b", "c", "d"] and log.last == 4


def test_the_id_of_an_event_is_that_of_its_number_whichever_process_writes_it() -> None:
    first, second = SentLog("sess_1", 10, 1000), SentLog("sess_1", 10, 1000)
    frames = [first.add({"type": "a", "event_id": f"event_9{number}"}) for number in range(3)]
    assert frames[0] == '{"type":"a","event_id":"event_1_1","seq":1}'
    second.load(1, frames[:1])
    assert [second.add({"type": "a", "event_id": "event_7"}) for _ in range(2)] == frames[1:]


async def test_events_of_a_stream_are_bounded_and_waited_for() -> None:
    log = EventLog(2000, 1024 * 1024)
    for number in range(10_000):
        log.add(f'{{"number": {number}, "text": "{"x" * 1000}"}}')
    kept = log.after(0, 100_000)
    assert log.last == 10_000 and kept[-1][0] == 10_000 and len(kept) < 1100
    assert log.after(9_998, 1) == [kept[-2]] and log.after(10_000, 5) == []
    waiting = asyncio.create_task(log.wait(60))
    await asyncio.sleep(0)
    log.close()
    await waiting
    assert log.is_closed
