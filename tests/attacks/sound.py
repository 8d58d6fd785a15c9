"""Attacks with audio: bytes that are not audio, endless silence, and containers that decompress to very much audio."""

from __future__ import annotations

import asyncio
import io
import json
import struct
from typing import Any

import av
import numpy as np
from websockets.exceptions import ConnectionClosed

from tests.attacks.target import Client, Target, attack, form_file
from tests.audio.test_mp4_filter import box, index, track

APPEND, COMMIT, GAP = (f"input_audio_buffer.{name}" for name in ("append", "commit", "gap"))


def flac_bomb(seconds: float) -> bytes:
    """Silence in the largest blocks that FLAC has: 15 bytes become half a megabyte of samples."""
    info = struct.pack(">HH", 65535, 65535) + bytes(6) + (8000 << 44 | 15 << 36).to_bytes(8, "big") + bytes(16)
    frames = [b"fLaC" + b"\x80\x00\x00\x22" + info]
    for number in range(int(seconds * 8000 / 65535) + 1):
        head = b"\xff\xf8\x74\x08" + chr(number).encode() + struct.pack(">H", 65534)
        head += bytes([_crc(head, 8, 0x07)])
        # One sample stands for the whole block.
        frame = head + b"\x00\x00\x00"
        frames.append(frame + struct.pack(">H", _crc(frame, 16, 0x8005)))
    return b"".join(frames)


def _crc(data: bytes, bits: int, polynomial: int) -> int:
    value, top, mask = 0, 1 << (bits - 1), (1 << bits) - 1
    for byte in data:
        value ^= byte << (bits - 8)
        for _ in range(8):
            value = (value << 1 ^ polynomial if value & top else value << 1) & mask
    return value


def flac(seconds: float) -> bytes:
    """An honest file: a tone."""
    out = io.BytesIO()
    with av.open(out, "w", format="flac") as container:
        stream = container.add_stream("flac", rate=16000, layout="mono")
        wave = (8000 * np.sin(np.arange(int(seconds * 16000)) * 0.17)).astype(np.int16)
        frame = av.AudioFrame.from_ndarray(wave[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = 16000, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()


def written(container: str, codec: str, rate: int) -> bytes:
    """A second of noise in any format that libav can write."""
    out = io.BytesIO()
    noise = (3000 * np.random.default_rng(0).standard_normal((1, rate))).astype(np.int16)
    with av.open(out, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout="mono")
        size = stream.codec_context.frame_size or 1024
        convert = av.AudioResampler(format=stream.codec_context.format, layout="mono", rate=rate, frame_size=size)
        frame = av.AudioFrame.from_ndarray(noise, format="s16", layout="mono")
        frame.sample_rate, frame.pts = rate, 0
        for piece in (*convert.resample(frame), *convert.resample(None)):
            output.mux(stream.encode(piece))
        output.mux(stream.encode(None))
    return out.getvalue()


def mp4_of_free_boxes(size: int) -> bytes:
    """The beginning of an MP4 file that never comes to its index."""
    box = struct.pack(">I4s", 1024, b"free") + bytes(1016)
    return struct.pack(">I4s4sI4s", 20, b"ftyp", b"isom", 0, b"isom") + box * (size // 1024)


def endless_ogg_header(size: int) -> bytes:
    """Pages of a comment header that goes on and on."""
    page = b"OggS\x00\x01" + bytes(8) + struct.pack("<II", 7, 1) + bytes(4) + b"\xff" + b"\xff" * 255
    return page + bytes(255 * 255) * (size // 65025)


def endless_matroska(size: int) -> bytes:
    """An EBML header, then a Void element that fills whatever is sent."""
    head = bytes.fromhex(
        "1a45dfa39f4286810142f7810142f2810442f381084282847765626d42878102428581021853806701ffffffffffffff"
    )
    return head + b"\xec\x01" + (2**40).to_bytes(7, "big") + bytes(size)


@attack()
async def bad_base64(target: Target) -> None:
    """Audio whose base64 has wrong padding, spaces, line ends, URL letters or other alphabets in it."""
    async with target.client() as client:
        for audio in (
            "A",
            "AAA",
            "AAAA=",
            "====",
            "AA AA",
            "AAAA\nAAAA",
            "AA-_",
            "é===",
            "\x00\x00\x00\x00",
            "%41" * 4,
        ):
            await client.send(APPEND, audio=audio)
            error = await client.error()
            assert error["code"] == "invalid_audio" and error["param"] == "audio", (audio, error)
        await client.still_works()


@attack(gateway_mib=180)
async def the_largest_bad_base64(target: Target) -> None:
    """Twenty megabytes of base64 with one wrong letter at the end, from two sockets at once."""

    async def send() -> None:
        async with target.client() as client:
            await client.update(format={"type": "audio/pcm", "rate": 48000}, turn_detection=None)
            await client.send(APPEND, audio="A" * 20_000_000 + "!AAA")
            assert (await client.error())["code"] == "invalid_audio"
            await client.still_works()

    await asyncio.gather(send(), send())


@attack()
async def the_largest_appends(target: Target) -> None:
    """Fifteen megabytes of audio in one append, OpenAI's limit, in raw samples and in G.711."""
    for audio_format in ({"type": "audio/pcm", "rate": 48000}, {"type": "audio/pcmu"}):
        async with target.client() as client:
            await client.update(format=audio_format, turn_detection=None, include=["input_audio_buffer.acks"])
            message = json.dumps({"type": APPEND, "audio": "A" * (20 * 2**20)})
            sending = asyncio.create_task(client.send_raw(message))
            # Its first part is heard while the last is on its way.
            assert (await client.until("input_audio_buffer.acknowledged"))["samples"] > 0
            await asyncio.wait((sending,), timeout=2)
            # The server reads no faster than its engine hears; half an hour of sound is not worth waiting for.
            client.socket.transport.abort()
            await asyncio.gather(sending, return_exceptions=True)


@attack(gateway_mib=40)
async def one_frame_of_eight_channels(target: Target) -> None:
    """A binary frame of 21 MiB with the samples of eight channels: given to eight sessions in pieces."""
    query = "encoding=linear16&sample_rate=48000&channels=8&multichannel=true"
    async with target.client(f"{target.listen}?{query}", greeted=False) as client:
        await client.send_raw(bytes(21 * 2**20))
        await client.send("CloseStream")
        assert await client.close_code() == 1000


@attack()
async def samples_that_are_no_numbers(target: Target) -> None:
    """NaN, infinity, and numbers far out of range as float samples."""
    async with target.client() as client:
        await client.update(format={"type": "audio/pcm-f32", "rate": 16000})
        for value in (np.nan, np.inf, -np.inf, 1e30, 32768.0):
            await client.append(np.full(160, value, np.float32).tobytes())
            assert (await client.error())["code"] == "invalid_audio"
        await client.still_works()


@attack()
async def appends_of_one_byte(target: Target) -> None:
    """Five thousand appends with a single byte, most of which complete no sample."""
    async with target.client() as client:
        await client.update(turn_detection=None)
        for _ in range(5000):
            await client.append(b"\x01")
        await client.send(COMMIT, event_id="c")
        # 2,500 samples at 24 kHz are just enough for a commit.
        await client.until("input_audio_buffer.committed")


@attack()
async def another_format_with_every_message(target: Target) -> None:
    """Three hundred changes of format, containers among them, with audio in another format in between."""
    formats: list[dict[str, Any]] = [
        {"type": "audio/pcm", "rate": 8000},
        {"type": "audio/pcmu"},
        {"type": "audio/webm"},
        {"type": "audio/pcm-f32", "rate": 48000},
        {"type": "audio/pcma"},
        {"type": "audio/ogg"},
    ]
    async with target.client() as client:
        reading = asyncio.create_task(_drain(client))
        for number in range(300):
            audio_format = formats[number % len(formats)]
            await client.send("session.update", session={"audio": {"input": {"format": audio_format}}})
            await client.append(b"\x12" * 321)
        await client.send("session.update", session={"audio": {"input": {"format": {"type": "audio/pcm"}}}})
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


@attack()
async def a_gap_of_six_days(target: Target) -> None:
    """Six days of declared silence in sixty bytes: a gap is bounded by its seconds."""
    async with target.client() as client:
        await client.update(format={"type": "audio/pcm", "rate": 8000})
        await client.send(GAP, samples=6 * 86400 * 8000)
        assert (await client.error())["param"] == "samples"
        await client.still_works()


@attack()
async def gap_upon_gap(target: Target) -> None:
    """Thirty gaps of the greatest allowed length: many of them do not evade the limit on one."""
    async with target.client() as client:
        await client.update(turn_detection=None, format={"type": "audio/pcm", "rate": 8000})
        for _ in range(30):
            await client.send(GAP, duration_ms=86_400_000)
        await client.send("no.such.thing", event_id="the end")
        while (await client.error())["event_id"] != "the end":
            pass


@attack()
async def gaps_that_are_no_lengths(target: Target) -> None:
    """Gaps whose length is NaN, negative, a text, or too large for a float."""
    async with target.client() as client:
        for text in ("-1", '"1"', "true", "[]", "1e309", "-1e-300", "9" * 400):
            await client.send_raw(f'{{"type": "{GAP}", "samples": {text}}}')
            assert (await client.error())["code"] in ("invalid_value", "invalid_json"), text
        await client.still_works()


@attack(gateway_mib=48)
async def a_flac_bomb_on_a_socket(target: Target) -> None:
    """Twenty kilobytes of FLAC that are three hours of silence: decoded piece by piece, or refused."""
    bomb = flac_bomb(3 * 3600)
    async with target.client() as client:
        await client.update(format={"type": "audio/webm", "transport": "binary"}, turn_detection=None)
        await client.send_raw(bomb)
        await asyncio.sleep(1.0)


@attack(gateway_mib=48)
async def an_mp4_that_never_begins(target: Target) -> None:
    """Sixteen megabytes of empty boxes instead of an index."""
    await _container_is_refused(target, mp4_of_free_boxes(16 * 2**20))


@attack(gateway_mib=48)
async def containers_with_endless_headers(target: Target) -> None:
    """Ogg and Matroska whose headers never end."""
    for data in (endless_ogg_header(8 * 2**20), endless_matroska(8 * 2**20)):
        async with target.client() as client:
            await client.update(format={"type": "audio/webm", "transport": "binary"})
            for start in range(0, len(data), 2**20):
                await client.send_raw(data[start : start + 2**20])
            # No audio was decoded and nothing is held: only the sender pays for it.
            await client.send("no.such.thing", event_id="the end")
            while (await client.error())["event_id"] != "the end":
                pass


@attack()
async def containers_that_are_none(target: Target) -> None:
    """Noise, a ZIP archive, a page of HTML, a WAV header followed by an image, cut and damaged files."""
    whole = flac(2)
    rng = np.random.default_rng(5)
    for data in (
        b"PK\x03\x04" + bytes(1000),
        b"<html><script>" * 100,
        rng.bytes(3000),
        b"GIF89a" + rng.bytes(2000),
        b"#EXTM3U\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        whole[:42] + rng.bytes(4000),
        whole[: len(whole) // 2],
    ):
        async with target.client(target.listen, greeted=False) as client:
            await client.send_raw(data)
            await client.send("CloseStream")
            assert (await client.until("Error"))["variant"] == "invalid_audio", data[:20]
            assert await client.close_code() == 1000


@attack()
async def codecs_that_are_not_served(target: Target) -> None:
    """Codecs that libav could decode and the server does not allow, in files and on sockets: refused by name."""
    for container, codec, rate in (
        ("matroska", "ac3", 48_000),
        ("matroska", "mp2", 48_000),
        ("matroska", "wavpack", 16_000),
        ("wav", "adpcm_ms", 16_000),
        ("wav", "g726", 8_000),
        ("avi", "pcm_s16le", 16_000),
        ("aiff", "pcm_s16be", 16_000),
    ):
        data = written(container, codec, rate)
        answer = await target.upload(form_file(data))
        assert (answer.status, answer.code) == (400, "format_not_served"), answer.body
        assert (codec.encode() if container in ("matroska", "wav") else container.upper().encode()) in answer.body
        await _container_is_refused(target, data)


@attack(gateway_mib=12)
async def a_codec_that_wants_gigabytes(target: Target) -> None:
    """ALAC whose header declares the largest frames of eight channels: its decoder is a bounded process."""
    data = bytearray(written("matroska", "alac", 44_100))
    head = data.index(struct.pack(">I", 4096))
    data[head : head + 4], data[head + 9] = struct.pack(">I", 4096 * 4096), 8
    answers = await asyncio.gather(*(target.upload(form_file(bytes(data))) for _ in range(8)))
    for answer in answers:
        assert answer.status in (400, 503) and answer.code in ("corrupt_audio", "audio_too_large", "server_busy")


@attack()
async def an_index_at_the_end_that_never_ends(target: Target) -> None:
    """MP4 files whose index is at the end and describes millions of packets, or endless boxes."""
    kind, media = box(b"ftyp", b"isom" + bytes(4)), box(b"mdat", bytes(4000))
    for index_of in (
        index(track(samples=50_000_000, per_chunk=50_000_000)),
        index(track(samples=0xFFFFFFFF)),
        index(track(samples=100_000, per_chunk=100_000, edits=1000)),
        index(*[track(handler=b"vide")] * 2000),
        box(b"free", b"") * 100_000 + index(track()),
        b"\x00\x00\x00\x01moov" + b"\xff" * 8,
    ):
        answer = await target.upload(form_file(kind + media + index_of))
        assert (answer.status, answer.code) == (400, "corrupt_audio"), (answer.status, answer.body)
        assert await target.listened(kind + media + index_of) == 400


@attack()
async def audio_after_the_end(target: Target) -> None:
    """Deepgram: container audio after CloseStream is ignored, and the socket is closed normally."""
    async with target.client(target.listen, greeted=False) as client:
        await client.send_raw(flac(2))
        await client.send("CloseStream")
        for _ in range(20):
            await client.send_raw(flac(2))
        assert await client.close_code() == 1000


async def _container_is_refused(target: Target, data: bytes) -> None:
    async with target.client() as client:
        await client.update(format={"type": "audio/webm", "transport": "binary"})
        try:
            for start in range(0, len(data), 2**20):
                await client.send_raw(data[start : start + 2**20])
            error = await client.error()
            assert error["code"] == "invalid_audio", error
        except ConnectionClosed as closed:
            assert closed.rcvd is not None and closed.rcvd.code in (1007, 1008)


async def _drain(client: Client) -> None:
    async for frame in client.socket:
        assert json.loads(frame)["type"]
