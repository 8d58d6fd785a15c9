"""Extensions that a client asks for: word times, binary audio, other formats, gaps, acknowledgements, resuming."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import av
import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from engine.options import Options
from tests.e2e.conftest import Serve
from tests.e2e.raw_client import COMPLETED, DELTA, RawClient, greeted_client, raw_client
from tests.realtime.gateway_doubles import MULTILINGUAL, FakeEngine, silence, tone
from tests.waiting import until

WORDS = "item.input_audio_transcription.words"


async def test_word_times_and_positions_come_only_when_asked_for(serve: Serve) -> None:
    async with serve() as running, greeted_client(running.ws) as client:
        await client.append(silence(1.0) + tone(1.0) + silence(0.8))
        plain = await client.until(COMPLETED)
        assert not any("words" in event for event in plain)
        await client.update(include=[WORDS])
        await client.append(tone(1.0) + silence(0.8))
        events = await client.until(COMPLETED)
        from_deltas = [word for event in events if event["type"] == DELTA for word in event["words"]]
        done = events[-1]
        assert from_deltas == done["words"] and [word["word"] for word in done["words"]] == ["w3", "w4", "w5"]
        first = done["words"][0]
        assert 2.5 <= first["start"] < first["end"] <= 3.4
        assert done["audio_start_ms"] <= first["start"] * 1000 and done["audio_end_ms"] >= 3800


END_OF_TURN = "input_audio_buffer.end_of_turn"
PAUSE_SCORED = "input_audio_buffer.pause_scored"
DETECTOR = replace(MULTILINGUAL, turn_detector=True)


def turn_fields(events: list[dict[str, Any]]) -> list[str]:
    """What the events tell about the end of the turn."""
    named = (event["type"] for event in events if "end_of_turn_confidence" in event)
    return [name.rpartition(".")[2] for name in named]


async def test_how_sure_the_end_of_a_turn_is_comes_only_when_asked_for(serve: Serve) -> None:
    engine = FakeEngine(words=["It", "works."])
    engine.takes(DETECTOR)
    semantic = {"type": "semantic_vad", "eagerness": "medium"}
    async with serve(engine) as running, greeted_client(running.ws) as client:
        await client.update(turn_detection=semantic)
        await client.append(tone(0.9) + silence(4.5))
        assert turn_fields(await client.until(COMPLETED)) == []
        shown = await client.update(turn_detection=semantic, include=[END_OF_TURN])
        assert shown["include"] == [END_OF_TURN]
        await client.append(tone(0.9) + silence(4.5))
        events = await client.until(COMPLETED)
        told = turn_fields(events)
        assert 1 <= told.count("pause_scored") <= 3 and told[-2:] == ["speech_stopped", "completed"]
        scored = [event for event in events if "end_of_turn_confidence" in event]
        assert all(0 <= event["end_of_turn_confidence"] <= 1 for event in scored)
        assert len({event["item_id"] for event in scored}) == 1
        assert scored[-1]["end_of_turn_confidence"] == scored[-2]["end_of_turn_confidence"]
        ends = [event["audio_end_ms"] for event in scored[:-1]]
        assert ends == sorted(ends)


@pytest.mark.parametrize(
    ("options", "detection"),
    [
        (MULTILINGUAL, {"type": "semantic_vad", "eagerness": "high"}),
        (DETECTOR, {"type": "server_vad"}),
        (DETECTOR, None),
    ],
)
async def test_turns_that_no_score_has_ended_have_no_confidence(
    serve: Serve, options: Options, detection: dict[str, Any] | None
) -> None:
    engine = FakeEngine(words=["It", "works."])
    engine.takes(options)
    async with serve(engine) as running, greeted_client(running.ws) as client:
        await client.update(turn_detection=detection, include=[END_OF_TURN])
        await client.append(tone(0.9) + silence(2.5))
        if detection is None:
            await client.send("input_audio_buffer.commit")
        assert turn_fields(await client.until(COMPLETED)) == []


async def test_binary_frames_carry_audio_at_any_rate(serve: Serve) -> None:
    engine = FakeEngine()
    async with serve(engine) as running, greeted_client(running.ws) as client:
        for number, rate in enumerate((8_000, 11_025, 16_000, 22_050, 44_100, 48_000)):
            audio_format = {"type": "audio/pcm", "rate": rate, "transport": "binary"}
            shown = await client.update(format=audio_format, turn_detection=None)
            assert shown["audio"]["input"]["format"] == audio_format
            audio = tone(1.0, rate)
            for start in range(0, len(audio), 3001):
                await client.socket.send(audio[start : start + 3001])
            await client.send("input_audio_buffer.commit")
            done = (await client.until(COMPLETED))[-1]
            assert done["usage"] == {"type": "duration", "seconds": 1.0}
            assert engine.streams[0].samples == 16_000 * (number + 1)


@pytest.mark.parametrize("kind", ["audio/pcmu", "audio/pcma"])
async def test_g711_is_understood(serve: Serve, kind: str) -> None:
    # A loud square wave: u-law 0x80/0x00 and A-law 0xAA/0x2A are near full scale.
    high, low = (b"\x90", b"\x10") if kind == "audio/pcmu" else (b"\x9a", b"\x1a")
    audio = (high * 8 + low * 8) * 500
    async with serve() as running, greeted_client(running.ws) as client:
        shown = await client.update(format={"type": kind}, turn_detection=None)
        assert shown["audio"]["input"]["format"] == {"type": kind}
        await client.append(audio)
        await client.send("input_audio_buffer.commit")
        done = (await client.until(COMPLETED))[-1]
        assert done["transcript"] == "w1 w2" and done["usage"]["seconds"] == 1.0


async def test_float_samples_and_bad_ones(serve: Serve) -> None:
    samples = np.frombuffer(tone(1.0, 16_000), "<i2").astype("<f4") / 32768
    async with serve() as running, greeted_client(running.ws) as client:
        await client.update(format={"type": "audio/pcm-f32", "rate": 16000}, turn_detection=None)
        await client.append(np.full(100, np.nan, "<f4").tobytes(), event_id="nan")
        error = (await client.receive())["error"]
        assert error["code"] == "invalid_audio" and error["event_id"] == "nan"
        await client.append(samples.tobytes())
        await client.send("input_audio_buffer.commit")
        assert (await client.until(COMPLETED))[-1]["transcript"] == "w1 w2"


def opus(container: str, seconds: float) -> bytes:
    """Sound as a browser's MediaRecorder would send it."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        track = output.add_stream("libopus", rate=48_000)
        track.layout = "mono"
        samples = np.frombuffer(tone(seconds, 48_000), "<i2").reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.sample_rate = 48_000
        for packet in [*track.encode(frame), *track.encode(None)]:
            output.mux(packet)
    return file.getvalue()


@pytest.mark.parametrize("container", ["webm", "ogg"])
@pytest.mark.parametrize("binary", [True, False])
async def test_opus_containers_in_pieces(serve: Serve, container: str, binary: bool) -> None:
    data = opus(container, 2.5)
    async with serve() as running, greeted_client(running.ws) as client:
        audio_format = {"type": f"audio/{container}", **({"transport": "binary"} if binary else {})}
        await client.update(format=audio_format, turn_detection=None)
        for start in range(0, len(data), 700):
            piece = data[start : start + 700]
            await (client.socket.send(piece) if binary else client.append(piece))
        await client.send("input_audio_buffer.commit")
        assert (await client.until(COMPLETED))[-1]["transcript"].startswith("w1 w2 w3 w4")


async def test_bytes_that_are_no_container_are_an_error_and_the_session_lives(serve: Serve) -> None:
    async with serve() as running, greeted_client(running.ws) as client:
        await client.update(format={"type": "audio/webm", "transport": "binary"})
        await client.socket.send(b"this is not a container at all" * 10)
        assert (await client.receive())["error"]["code"] == "invalid_audio"
        await client.update(format={"type": "audio/pcm"})
        await client.append(tone(1.0) + silence(0.8))
        assert (await client.until(COMPLETED))[-1]["transcript"] == "w1 w2"


async def test_the_longest_gap_is_counted_in_seconds_whatever_the_rate(serve: Serve) -> None:
    async with serve(limits={"gap_s": 60.0}) as running, greeted_client(running.ws) as client:
        for rate in (8000, 24_000, 48_000):
            await client.update(format={"type": "audio/pcm", "rate": rate})
            for too_long in ({"samples": 60 * rate + 1}, {"duration_ms": 60_001}, {"duration_ms": 1e300}):
                await client.send("input_audio_buffer.gap", **too_long)
                error = (await client.receive())["error"]
                assert error["code"] == "invalid_value" and "60 seconds (limits.gap_s)" in error["message"]
        await client.send("input_audio_buffer.gap", duration_ms=60_000)
        await client.send("input_audio_buffer.clear")
        await client.until("input_audio_buffer.cleared")
        assert running.engine.streams[0].samples == 60 * 16_000


async def test_gap_moves_the_clock_without_audio(serve: Serve) -> None:
    engine = FakeEngine()
    async with serve(engine) as running, greeted_client(running.ws) as client:
        await client.append(tone(1.0))
        await client.send("input_audio_buffer.gap", duration_ms=60_000)
        events = await client.until(COMPLETED)
        assert events[-1]["transcript"] == "w1 w2"
        await client.append(tone(1.0))
        started = (await client.until("input_audio_buffer.speech_started"))[-1]
        assert 60_600 <= started["audio_start_ms"] <= 60_750
        assert engine.streams[0].samples >= 61 * 16_000


async def test_delay_is_passed_on_the_model_clock(serve: Serve) -> None:
    engine = FakeEngine()
    async with serve(engine) as running:
        for delay, positions in (("minimal", 2), ("medium", None), ("xhigh", 30), (400, 5), (50_000, 30)):
            async with greeted_client(running.ws) as client:
                await client.update(transcription={"delay": delay})
                await client.append(tone(0.2))
                await client.until("input_audio_buffer.speech_started")
            assert engine.opened[-1]["delay"] == positions


async def test_option_the_model_does_not_know_is_left_out_in_silence(serve: Serve) -> None:
    engine = FakeEngine()
    engine.takes(Options())
    async with serve(engine) as running, greeted_client(running.ws) as client:
        await client.update(transcription={"language": "xx", "prompt": "names"})
        await client.append(tone(1.0) + silence(0.8))
        assert (await client.until(COMPLETED))[-1]["transcript"] == "w1 w2"


async def test_acknowledgements_count_the_clients_own_samples(serve: Serve) -> None:
    async with serve() as running, greeted_client(running.ws) as client:
        await client.update(turn_detection=None, include=["input_audio_buffer.acks"])
        await client.append(tone(1.0))
        seen = (await client.until("input_audio_buffer.acknowledged"))[-1]["samples"]
        await client.append(tone(0.5))
        while seen < 36_000:
            event = await client.receive()
            if event["type"] == "input_audio_buffer.acknowledged":
                assert event["samples"] > seen
                seen = event["samples"]
        assert seen == 36_000


async def test_stalled_stream_is_replaced_and_the_user_keeps_getting_text(serve: Serve) -> None:
    engine = FakeEngine()
    engine.mute_first = 1
    async with serve(engine, session={"stall_s": 0.5}) as running, greeted_client(running.ws) as client:
        await client.update(turn_detection=None)
        await client.append(tone(2.0))
        await client.until(DELTA)
        assert running.metric("stalls_total") == 1
        await client.append(tone(2.0))
        await client.send("input_audio_buffer.commit")
        transcript = (await client.until(COMPLETED))[-1]["transcript"]
        assert len(transcript.split()) == 10
        assert len(engine.streams) == 2 and engine.streams[0].aborted


# Resuming.

RESUME = ["session.resume", "input_audio_buffer.acks"]


async def resumed(url: str, token: str, after: int) -> Any:
    return connect(f"{url}?resume={token}&after={after}", compression=None)


async def test_dropped_client_resumes_without_losing_a_word(serve: Serve) -> None:
    engine = FakeEngine()
    async with serve(engine) as running:
        sent = tone(4.0)
        async with greeted_client(running.ws) as client:
            session = await client.update(turn_detection=None, include=RESUME)
            token = session["resume"]["token"]
            assert session["resume"]["keep_seconds"] == 120
            for start in range(0, 96_000, 4800):
                await client.append(sent[start : start + 4800])
            first = await client.until(DELTA)
            # The line drops without a word.
            client.socket.transport.abort()
        await until(lambda: not running.gateway.sessions.connected)
        last = max(event.get("seq", 0) for event in first)
        async with raw_client(f"{running.ws}?resume={token}&after={last}") as client:
            hello = await client.receive()
            assert hello["type"] == "session.resumed" and hello["id"] == session["id"]
            received = hello["received_samples"]
            assert 0 < received <= 48_000
            for start in range(received * 2, len(sent), 4800):
                await client.append(sent[start : start + 4800])
            await client.send("input_audio_buffer.commit")
            second = await client.until(COMPLETED)
        sequence = [event["seq"] for event in first + second if "seq" in event]
        assert sequence == list(range(2, len(sequence) + 2))
        deltas = "".join(event["delta"] for event in first + second if event["type"] == DELTA)
        assert deltas == second[-1]["transcript"] == " ".join(f"w{n}" for n in range(1, 11))
        assert len(engine.streams) == 1 and engine.streams[0].samples == 64_000
        assert running.metric("sessions_resumed_total") == 1


async def test_commit_behind_audio_that_was_let_go_is_let_go_too(serve: Serve) -> None:
    """A client sends audio and a commit and is gone: if not all of the audio is heard, nothing behind it is."""
    engine = FakeEngine()
    sent = tone(8.0, 16_000)
    binary = {"type": "audio/pcm", "rate": 16_000, "transport": "binary"}
    async with serve(engine) as running:
        async with greeted_client(running.ws) as client:
            session = await client.update(format=binary, turn_detection=None, include=RESUME)
            for start in range(0, len(sent), 1600):
                await client.socket.send(sent[start : start + 1600])
            await client.send("input_audio_buffer.commit")
            await client.socket.close(1001)
        async with raw_client(f"{running.ws}?resume={session['resume']['token']}&after=1") as client:
            hello = await client.receive()
            rest = sent[2 * hello["received_samples"] :]
            if rest:
                await client.socket.send(rest)
                await client.send("input_audio_buffer.commit")
            events = await client.until(COMPLETED)
        assert engine.streams[0].samples == 128_000
        assert events[-1]["usage"] == {"type": "duration", "seconds": 8.0}


async def test_events_missed_while_away_are_replayed(serve: Serve) -> None:
    async with serve() as running:
        async with greeted_client(running.ws) as client:
            token = (await client.update(turn_detection=None, include=["session.resume"]))["resume"]["token"]
            await client.append(tone(2.0))
            await client.send("input_audio_buffer.commit")
            before = await client.until(COMPLETED)
            client.socket.transport.abort()
        async with raw_client(f"{running.ws}?resume={token}&after=1") as client:
            assert (await client.receive())["type"] == "session.resumed"
            assert await client.until(COMPLETED) == before


async def test_second_socket_takes_a_half_open_session_over(serve: Serve) -> None:
    async with serve() as running, greeted_client(running.ws) as old:
        token = (await old.update(turn_detection=None, include=["session.resume"]))["resume"]["token"]
        async with raw_client(f"{running.ws}?resume={token}&after=1") as new:
            assert (await new.receive())["type"] == "session.resumed"
            with pytest.raises(ConnectionClosed) as closed:
                await old.receive()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 4409
            await new.append(tone(1.0))
            await new.send("input_audio_buffer.commit")
            assert (await new.until(COMPLETED))[-1]["transcript"] == "w1 w2"


async def status_of(url: str, **options: Any) -> int:
    with pytest.raises(InvalidStatus) as refused:
        async with connect(url, **options):
            pass
    return refused.value.response.status_code


async def test_resume_refuses_wrong_tokens_strange_numbers_and_other_callers(serve: Serve) -> None:
    keys = ("key-number-one", "key-number-two")
    one, two = ({"additional_headers": {"Authorization": f"Bearer {key}"}} for key in keys)
    async with serve(auth={"keys": keys}) as running:
        async with greeted_client(running.ws, **one) as client:
            token = (await client.update(include=["session.resume"]))["resume"]["token"]
            client.socket.transport.abort()
        assert await status_of(f"{running.ws}?resume=rt_unknown&after=1", **one) == 404
        assert await status_of(f"{running.ws}?resume={token}&after=1", **two) == 404
        assert await status_of(f"{running.ws}?resume={token}&after=-1", **one) == 400
        assert await status_of(f"{running.ws}?resume={token}&after=99", **one) == 410
        async with raw_client(f"{running.ws}?resume={token}&after=1", **one) as client:
            assert (await client.receive())["type"] == "session.resumed"


async def test_session_that_nobody_resumes_ends_and_one_that_did_not_ask_ends_at_once(serve: Serve) -> None:
    engine = FakeEngine()
    async with serve(engine, session={"resume_s": 0.5}) as running:
        async with greeted_client(running.ws) as client:
            await client.append(tone(0.5))
            await client.until("input_audio_buffer.speech_started")
        await until(lambda: not len(running.gateway.sessions))
        async with greeted_client(running.ws) as client:
            token = (await client.update(include=["session.resume"]))["resume"]["token"]
            await client.append(tone(0.5))
            await client.until("input_audio_buffer.speech_started")
            client.socket.transport.abort()
        await until(lambda: not running.gateway.sessions.connected)
        assert len(running.gateway.sessions) == 1 and len(engine.active) == 1
        await until(lambda: not len(running.gateway.sessions) and not engine.active)
        assert await status_of(f"{running.ws}?resume={token}&after=1") == 404


@pytest.mark.parametrize(("code", "kept"), [(1000, 0), (1001, 1), (4000, 1)])
async def test_client_that_says_goodbye_gives_up_its_place(serve: Serve, code: int, kept: int) -> None:
    async with serve() as running:
        async with greeted_client(running.ws) as client:
            token = (await client.update(include=["session.resume"]))["resume"]["token"]
            await client.socket.close(code)
        await until(lambda: not running.gateway.sessions.connected)
        assert len(running.gateway.sessions) == kept
        if not kept:
            assert await status_of(f"{running.ws}?resume={token}&after=1") == 404


async def test_resume_log_is_bounded(serve: Serve) -> None:
    async with serve(session={"resume_events": 10}) as running, greeted_client(running.ws) as client:
        token = (await client.update(include=["session.resume"]))["resume"]["token"]
        await flood(client, 30)
        assert await status_of(f"{running.ws}?resume={token}&after=1") == 410


async def test_session_whose_events_overrun_while_nobody_is_there_is_not_resumed_with_a_hole(serve: Serve) -> None:
    engine = FakeEngine()
    engine.output_delay_s = 0.02
    async with serve(engine, limits={"outbox_events": 6}) as running:
        async with greeted_client(running.ws) as client:
            session = await client.update(turn_detection=None, include=["session.resume"])
            for _ in range(20):
                await client.append(tone(0.5))
                await client.send("input_audio_buffer.commit")
            await client.socket.close(1001)
        await until(lambda: not len(running.gateway.sessions) and not engine.active)
        assert await status_of(f"{running.ws}?resume={session['resume']['token']}&after=1") == 404


async def flood(client: RawClient, count: int) -> None:
    for _ in range(count):
        await client.send("nothing")
    for _ in range(count):
        assert (await client.receive())["type"] == "error"
