"""Attacks in JSON: messages that parse but are invalid, and valid messages that are far too large or too many."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from websockets.exceptions import ConnectionClosed

from tests.attacks.target import ENGINE_MIB, TEXT, WAIT_S, Client, Target, attack, frame

APPEND, COMMIT, CLEAR, GAP = (f"input_audio_buffer.{name}" for name in ("append", "commit", "clear", "gap"))
# One value of each kind that JSON has, and some that it only pretends to have.
STRANGE: list[Any] = [None, True, -1, 0.5, 2**64, -(2**63), 1e308, "", "\x00", "a" * 3000, [], [[]], {}, {"": None}]
WORDS = "item.input_audio_transcription.words"


@attack()
async def bad_json(target: Target) -> None:
    """Messages that are not JSON, or not an object: each is answered, and the session goes on."""
    async with target.client() as client:
        for text in (
            "",
            "{",
            "nul",
            "[1,2]",
            '"text"',
            "{'type': 'session.update'}",
            '{"type": "session.update",}',
            '{"type": NaN}',
            '{"type": 1e400}',
            '{"type": "\\ud800"}',
            '{"a\x00b": 1}',
            '{"type": "\\x00"}',
            '{"type": 01}',
            "[" * 30_000,
            '{"a":' * 10_000 + "1" + "}" * 10_000,
        ):
            await client.send_raw(text)
            error = await client.error()
            assert error["code"] in ("invalid_json", "invalid_value"), (text[:40], error)
        await client.still_works()


@attack()
async def odd_json(target: Target) -> None:
    """Valid but unusual JSON: a key twice, NUL in a key, numbers beyond any float, an emoji."""
    digits = "9" * 4000
    async with target.client() as client:
        for text in (
            '{"type": "session.update", "type": "no.such.thing"}',
            '{"type": "no\\u0000thing"}',
            f'{{"type": "input_audio_buffer.gap", "duration_ms": {digits}}}',
            f'{{"type": "input_audio_buffer.gap", "samples": -{digits}}}',
            '{"type": "input_audio_buffer.gap", "duration_ms": 1e308}',
            '{"type": "input_audio_buffer.gap", "duration_ms": 123456789012345678901234567890}',
            '{"type": "\\ud83d\\ude00"}',
        ):
            await client.send_raw(text)
            error = await client.error()
            assert error["code"] in ("invalid_value", "invalid_json"), (text[:60], error)
        await client.still_works()


@attack()
async def wrong_types_everywhere(target: Target) -> None:
    """Every field that the server knows, with a value of every other type: each gets an answer and nothing else."""
    fields: list[tuple[str, ...]] = [
        ("type",),
        ("event_id",),
        ("audio",),
        ("samples",),
        ("duration_ms",),
        ("items",),
        ("final",),
        ("model",),
        ("session",),
        ("session", "type"),
        ("session", "include"),
        ("session", "audio"),
        ("session", "audio", "input"),
        *(
            ("session", "audio", "input", *rest)
            for rest in (
                ("format",),
                ("format", "type"),
                ("format", "rate"),
                ("format", "transport"),
                ("noise_reduction",),
                ("transcription",),
                *(("transcription", key) for key in ("model", "language", "prompt", "delay", "languages", "keywords")),
                ("turn_detection",),
                *(
                    ("turn_detection", key)
                    for key in (
                        "type",
                        "threshold",
                        "prefix_padding_ms",
                        "silence_duration_ms",
                        "idle_timeout_ms",
                        "eagerness",
                        "create_response",
                    )
                ),
            )
        ),
    ]
    async with target.client() as client:
        for path in fields:
            kind = (
                "session.update" if path[0] == "session" else GAP if path[0] in ("samples", "duration_ms") else APPEND
            )
            for value in STRANGE:
                await client.send_raw(json.dumps(_nested(kind, path, value)))
        # A binary transport among them may have been taken seriously, so ask for the answer in text.
        await client.send("session.update", session={"audio": {"input": {"format": {"type": "audio/pcm"}}}})
        await client.send("no.such.thing", event_id="the end")
        while (await client.error())["event_id"] != "the end":
            pass


def _nested(kind: str, path: tuple[str, ...], value: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"type": kind}
    inner = message
    for key in path[:-1]:
        inner = inner.setdefault(key, {})
    inner[path[-1]] = value
    return message


@attack()
async def long_event_ids(target: Target) -> None:
    """Invalid messages with an event id of 60 kB each, which the answer would have to repeat."""
    async with target.client() as client:
        for _ in range(100):
            await client.send("no.such.thing", event_id="e" * 60_000)
        await client.send("no.such.thing", event_id="short")
        shown = 0
        while True:
            event = await client.receive()
            shown = max(shown, len(json.dumps(event)))
            if event["type"] == "error" and event["error"]["event_id"] == "short":
                break
        assert shown < 8192, f"an answer of {shown} characters"


@attack(gateway_mib=40)
async def large_messages_without_audio(target: Target) -> None:
    """Messages over 64 KiB without audio: the rest of each is not parsed."""
    big = "k" * 1_000_000
    for message in (
        {"type": "session.update", "session": {"audio": {"input": {"noise_reduction": {"type": big}}}}},
        {"type": "session.update", "session": {"audio": {"input": {"transcription": {"keywords": [big]}}}}},
        {"type": "session.update", "session": {"include": [big]}},
        {"type": COMMIT, "event_id": big},
        {"type": "no.such.thing", "x": [0] * 300_000},
    ):
        async with target.client() as client:
            await client.send_raw(json.dumps(message))
            try:
                event = await client.receive()
                assert event["type"] == "error", event["type"]
                assert len(json.dumps(event)) < 8192
            except ConnectionClosed as closed:
                assert closed.rcvd is not None and closed.rcvd.code in (1008, 1009)


# As many and as long as they may be: the largest settings that every answer repeats.
KEYWORDS = [f"{number:014}" for number in range(500)]


@attack(gateway_mib=32)
async def echoes_that_nobody_reads(target: Target) -> None:
    """Settings of 9 kB, repeated in ten thousand answers to a client that reads none of them."""
    settings = {"audio": {"input": {"transcription": {"keywords": KEYWORDS}}}}
    ask = frame(TEXT, json.dumps({"type": "session.update", "session": {}}).encode())
    async with target.upgraded() as socket:
        socket.writer.transport.pause_reading()
        await socket.send_event(type="session.update", session=settings)
        for _ in range(500):
            if not await socket.try_send(ask * 20, 1):
                break
        # A fast machine has sent all of it before the first answer: it goes on not reading until the server hangs up.
        async with asyncio.timeout(WAIT_S):
            while await socket.try_send(ask, 1):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        socket.writer.transport.resume_reading()
        assert await socket.close_code() in (1008, 1006)


@attack(gateway_mib=32)
async def a_resume_log_full_of_echoes(target: Target) -> None:
    """Large answers to a client that may resume: the kept frames are bounded by their bytes."""
    async with target.client() as client:
        await client.update(include=["session.resume"], transcription={"keywords": KEYWORDS})
        for _ in range(40):
            for _ in range(25):
                await client.send("session.update", session={})
            for _ in range(25):
                event = await client.until("session.updated")
                assert len(json.dumps(event)) > 9_000, "the answer does not repeat the keywords"


@attack()
async def a_storm_of_updates(target: Target) -> None:
    """Hundreds of changes of the longest keyword list while audio comes: each needs a new engine stream."""
    async with target.client() as client:
        await client.update(turn_detection=None)
        reading = asyncio.create_task(_drain(client))
        for number in range(300):
            keywords = KEYWORDS[number % 3 :]
            await client.append(b"\x01\x00" * 480)
            await client.send("session.update", session={"audio": {"input": {"transcription": {"keywords": keywords}}}})
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


@attack()
async def a_storm_of_commits_and_clears(target: Target) -> None:
    """A thousand commits and clears with hardly any audio between them."""
    async with target.client() as client:
        await client.update(turn_detection=None)
        errors = 0
        for number in range(500):
            await client.append(b"\x01\x00" * (3000 if number % 5 == 0 else 10))
            await client.send(COMMIT if number % 2 else CLEAR)
            if number % 2:
                await client.send(COMMIT, event_id=f"c{number}")
        await client.send(CLEAR, event_id="end")
        await client.send("no.such.thing", event_id="the end")
        while True:
            error = await client.error()
            if error["event_id"] == "the end":
                break
            errors += error["code"] == "input_audio_buffer_commit_empty"
        assert errors > 100


@attack()
async def prompts_that_are_not_taken(target: Target) -> None:
    """A thousand prompts for a model that takes none: the log says so a few times and then only counts."""
    async with target.client() as client:
        reading = asyncio.create_task(_drain(client))
        for number in range(1000):
            prompt = f"Something that is no list of words was said here, {number}\n2026-01-01 ERROR forged"
            await client.send("session.update", session={"audio": {"input": {"transcription": {"prompt": prompt}}}})
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await client.still_works()


@attack()
async def audio_beside_mistakes(target: Target) -> None:
    """Short appends and an invalid message in one TCP segment, and nothing after it: the audio is processed at once."""
    async with target.upgraded() as socket:
        audio_input = {"format": {"type": "audio/pcm", "rate": 16000}, "turn_detection": None}
        session = {"audio": {"input": audio_input}, "include": ["input_audio_buffer.acks"]}
        await socket.send_event(type="session.update", session=session)
        spoken = frame(TEXT, json.dumps({"type": APPEND, "audio": "AAAA" * 1600}).encode())
        for number, mistake in enumerate(
            (b"{", b'{"type":"conversation.item.create"}', b'{"type":"no.such.thing"}'), 1
        ):
            await socket.send(spoken + spoken + frame(TEXT, mistake))
            async with asyncio.timeout(20):
                acknowledged = 0
                while acknowledged < number * 4800:
                    opcode, payload = await socket.read_frame()
                    event = json.loads(payload) if opcode == TEXT else {}
                    if event.get("type") == "input_audio_buffer.acknowledged":
                        acknowledged = event["samples"]


@attack()
async def updates_that_are_half_wrong(target: Target) -> None:
    """Updates with a new format and wrong options: the format is in force, and every wrong option is named."""
    async with target.client() as client:
        for rate in (8000, 16000, 48000):
            wrong = {"language": "qq", "task": "sing", "keywords": ["x" * 100], "delay": "never"}
            audio_input = {"format": {"type": "audio/pcm", "rate": rate}, "transcription": wrong}
            await client.send("session.update", session={"audio": {"input": audio_input}})
            named = {(await client.error())["param"].rpartition(".")[2] for _ in wrong}
            assert named == set(wrong)
            shown = (await client.until("session.updated"))["session"]["audio"]["input"]
            assert shown["format"]["rate"] == rate


@attack()
async def formats_out_of_bounds(target: Target) -> None:
    """Lists for redaction and search that are too long, of wrong types, or as long as allowed and always new."""
    wrong: list[Any] = [
        *(value for value in STRANGE if value not in (None, {}, {"": None})),
        {"names": ["a"] * 10_000},
        {"search": ["x" * 30_000]},
        {"replace": {f"{number}": "y" * 101 for number in range(200)}},
        {"replace": {"a " * 9: "b"}},
        {"redact": ["card"] * 5000 + ["all"]},
        {"names": [f"{number:03}{'z' * 90}" for number in range(200)]},
        {"redact": [["card"]]},
        {"smart": "yes"},
        {"search": ["\x00 ,"]},
        {"search": ["[REDACTED]"]},
        {"replace": {"[REDACTED]": "x"}},
    ]
    async with target.client() as client:
        for given in wrong:
            await client.send("session.update", session={"audio": {"input": {"transcription": {"format": given}}}})
            error = await client.error()
            assert error["param"].endswith("transcription.format"), (str(given)[:40], error)
        for number in range(50):
            names = [f"a{number} b{place} {'c' * 25}" for place in range(200)]
            options = {"smart": True, "redact": ["numbers", "email"], "names": names}
            await client.send("session.update", session={"audio": {"input": {"transcription": {"format": options}}}})
            shown = (await client.until("session.updated"))["session"]["audio"]["input"]["transcription"]
            assert shown["format"]["names"] == names
        await client.still_works()


@attack()
async def voices_that_cannot_be_enrolled(target: Target) -> None:
    """Speakers with hostile names and with recordings that are noise or no audio, from eight sockets at once."""
    speakers = "item.input_audio_transcription.speakers"
    noise = "data:audio/wav;base64," + "QUJD" * 12_000
    wrong: list[Any] = [
        *STRANGE[1:10],
        [STRANGE],
        [{"name": value, "reference": noise[:3000]} for value in STRANGE],
        [{"name": "Ann", "reference": noise}],
        [{"name": "Ann", "reference": "data:audio/wav;base64," + "=" * 40_000}],
        [{"name": "Ann", "reference": "file:///etc/passwd"}],
        [{"name": "Ann", "reference": "data:,"}] * 300,
        [{"name": f"{number}", "reference": noise[:3000]} for number in range(16)],
        [{"name": "\u202e<script>", "reference": noise}],
    ]

    async def enrol() -> None:
        async with target.client() as client:
            for given in wrong:
                transcription = {"known_speakers": given}
                session = {"include": [speakers], "audio": {"input": {"transcription": transcription}}}
                await client.send("session.update", session=session)
                error = await client.error()
                assert "known_speakers" in error["param"] or error["param"] == "session.include", error
            await client.still_works()

    await asyncio.gather(*(enrol() for _ in range(8)))


@attack()
async def mistakes_without_end(target: Target) -> None:
    """Two thousand invalid messages from twenty sockets: answered, but no faster than `limits.mistakes_per_second`."""

    async def err(number: int) -> int:
        async with target.client() as client:
            for _ in range(100):
                await client.send("no.such.thing", event_id=str(number))
            for _ in range(60):
                assert (await client.error())["code"] == "invalid_value"
            return 60

    assert sum(await asyncio.gather(*(err(number) for number in range(20)))) == 1200


# As they are written: some are no JSON, some are numbers that no float or 64-bit integer can hold.
ODD_NUMBERS = (
    *("NaN", "-Infinity", "1e999", "-1e999", "9" * 400, "9" * 5000, "-0", "0.1e-400", "1e-99999"),
    *('"\\ud800"', '"\\u0000"', "18446744073709551616", "9223372036854775808", "[]", "{}"),
)
CONFIGURES = (
    '{"type":"Configure","thresholds":{"eot_threshold":%s}}',
    '{"type":"Configure","thresholds":{"eot_timeout_ms":%s,"eager_eot_threshold":%s}}',
    '{"type":"Configure","thresholds":%s,"keyterms":[%s]}',
    '{"type":"Configure","keyterms":%s}',
    '{"type":%s}',
)


# The first session of Flux loads the turn detector.
@attack(engine_mib=ENGINE_MIB + 64)
async def odd_numbers_in_mid_stream(target: Target) -> None:
    """Flux: Configure with numbers that are none, beside audio: each is refused, and the stream ends normally."""
    url = f"ws://127.0.0.1:{target.port}/v2/listen?encoding=linear16&sample_rate=16000"

    async def configure(number: str) -> int:
        async with target.client(url, greeted=False) as client:
            for text in CONFIGURES:
                await client.send_raw(bytes(640))
                await client.send_raw(text.replace("%s", number))
            await client.send_raw('{"type":"CloseStream"}')
            return await client.close_code()

    assert {await configure(number) for number in ODD_NUMBERS} == {1000}


@attack()
async def turn_detection_that_changes_with_every_message(target: Target) -> None:
    """Eight sessions that change the way turns end three hundred times each, with audio in between: taken, in order."""

    async def change(audio: bytes) -> None:
        async with target.client() as client:
            for number in range(300):
                chosen = {"type": "semantic_vad", "eagerness": ("low", "high")[number % 2]} if number % 3 else None
                await client.send("session.update", session={"audio": {"input": {"turn_detection": chosen}}})
                await client.append(audio)
            await client.still_works()

    await asyncio.gather(*(change(bytes([number, 40] * 1500)) for number in range(8)))


async def _drain(client: Client) -> None:
    async for _ in client.socket:
        pass
