"""Attacks with files: endless forms, wrong lengths, and files that are not what their name says."""

from __future__ import annotations

import asyncio

from tests.attacks.real_server import OTHER_KEY
from tests.attacks.sound import flac, flac_bomb, mp4_of_free_boxes
from tests.attacks.target import BOUNDARY, FORM, Answer, RawSocket, Target, attack, form_field, form_file

LIMIT = 4 * 1024 * 1024
PATH = "/v1/audio/transcriptions"


def head(target: Target, *lines: str, content_type: str = FORM) -> bytes:
    return "\r\n".join(
        (
            f"POST {PATH} HTTP/1.1",
            "Host: x",
            f"Authorization: Bearer {target.key}",
            f"Content-Type: {content_type}",
            *lines,
            "\r\n",
        )
    ).encode()


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def answer_of(socket: RawSocket) -> Answer:
    """The answer on a connection that may be kept open behind it."""
    received = await socket.read_head()
    length = int(received.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    return Answer.parse(received + await socket.reader.readexactly(length))


@attack()
async def a_language_twice(target: Target) -> None:
    """A form that names two languages, which once crashed the engine: the last one counts, or the form is refused."""
    answer = await target.upload(form_field("language", "en"), form_field("language", "de"), form_file(flac(0.5)))
    assert answer.status in (200, 400), answer.body
    if answer.status == 400:
        assert answer.code == "invalid_value"


@attack()
async def every_field_twice(target: Target) -> None:
    """Every field of the form twice and three times, with files where text belongs."""
    for name in (
        "model",
        "prompt",
        "response_format",
        "stream",
        "language",
        "temperature",
        "timestamp_granularities[]",
    ):
        for parts in (
            (form_field(name, "text"), form_field(name, "json"), form_field(name, "\x00")),
            (form_file(b"a file", name), form_file(flac(0.2))),
        ):
            answer = await target.upload(*parts, form_file(flac(0.2)))
            assert answer.status in (200, 400), (name, answer.status, answer.body)


@attack()
async def ten_thousand_fields(target: Target) -> None:
    """A form of ten thousand fields."""
    answer = await target.upload(*(form_field(f"f{number}", "x") for number in range(10_000)), form_file(b"x"))
    assert answer.status == 400 and answer.code == "invalid_form"


@attack()
async def texts_without_a_total(target: Target) -> None:
    """Forms of 600 fields of 60 kB, each with a letter that makes a text four times as large: refused by their sum."""
    field = form_field("prompt", "x" * 60_000 + "😀")

    async def fill() -> Answer:
        async with target.raw() as socket:
            await socket.send(head(target, "Transfer-Encoding: chunked"))
            answer = asyncio.create_task(answer_of(socket))
            for _ in range(600):
                if answer.done() or not await socket.try_send(chunk(field)):
                    break
                await asyncio.sleep(0)
            return await answer

    for answer in await asyncio.gather(*(fill() for _ in range(3))):
        assert (answer.status, answer.code) == (413, "form_too_large") and b"262144" in answer.body


@attack()
async def forms_that_stop_half_way(target: Target) -> None:
    """Twenty forms that send as much text as is allowed and then stop: bounded together, and cut off."""

    async def begin_and_wait() -> bytes:
        async with target.raw() as socket:
            await socket.send(head(target, "Transfer-Encoding: chunked"))
            for _ in range(7):
                await socket.try_send(chunk(form_field("prompt", "é" * 15_000)))
            return await socket.read_rest(15)

    answers = await asyncio.gather(*(begin_and_wait() for _ in range(20)))
    assert {answer[:12] for answer in answers} <= {b"", b"HTTP/1.1 408", b"HTTP/1.1 503"}
    answer = await target.upload(form_file(flac(0.3)))
    assert answer.status == 200, answer.body


@attack()
async def chunks_of_a_byte(target: Target) -> None:
    """Two hundred kilobytes of body in chunks of one byte, from two clients: they take turns with other clients."""

    async def trickle() -> Answer:
        async with target.raw() as socket:
            await socket.send(head(target, "Transfer-Encoding: chunked"))
            await socket.send(chunk(form_file(b"")[:-2]) + b"1\r\nx\r\n" * 35_000)
            await socket.send(chunk(f"\r\n--{BOUNDARY}--\r\n".encode()) + chunk(b""))
            return await answer_of(socket)

    for answer in await asyncio.gather(trickle(), trickle()):
        assert (answer.status, answer.code) == (400, "not_audio"), answer.body


@attack()
async def renderings_that_nobody_asked_for(target: Target) -> None:
    """Forty requests to render a file without `server.inject`: refused before the file is read."""
    body = form_file(flac(20)) + f"--{BOUNDARY}--\r\n".encode()
    answers = await asyncio.gather(*(target.post("/v1/audio/render", body, FORM) for _ in range(40)))
    assert {(answer.status, answer.code) for answer in answers} == {(403, "render_not_allowed")}


@attack()
async def a_codec_that_takes_long(target: Target) -> None:
    """A form that names a text codec whose time grows with the square of the length."""
    body = b"".join((*(form_field(f"f{n}", "-" + "b" * 60_000) for n in range(20)), form_file(b"x")))
    answer = await target.post(PATH, body + f"--{BOUNDARY}--\r\n".encode(), f"{FORM}; charset=punycode")
    assert answer.status == 400 and answer.code == "invalid_form"


@attack()
async def two_files(target: Target) -> None:
    """A form with two files."""
    answer = await target.upload(form_file(flac(0.2)), form_file(flac(0.2)))
    assert answer.status == 400 and answer.code == "invalid_form"


@attack()
async def forms_without_an_end(target: Target) -> None:
    """No last boundary, a boundary of a megabyte, a field of three megabytes, headers of a part that never end."""
    cut = form_file(flac(0.2))
    for body, content_type, statuses in (
        (cut, FORM, (200, 400)),
        (b"--" + b"b" * 1_000_000, f"multipart/form-data; boundary={'b' * 200}", (400, 413)),
        (form_field("prompt", "p" * 3_000_000) + cut, FORM, (400, 413)),
        (f"--{BOUNDARY}\r\n".encode() + b"X-Long: " + b"a" * 1_000_000, FORM, (400, 413)),
        (f"--{BOUNDARY}\r\n".encode() + b"X: a\r\n" * 50_000, FORM, (400, 413)),
        (f"--{BOUNDARY}\r\n\r\n".encode() * 1000, FORM, (400, 413)),
        (b"anything", "multipart/form-data", (400,)),
        (b"a=b&" * 1000, "application/x-www-form-urlencoded", (400,)),
    ):
        answer = await target.post(PATH, body, content_type)
        assert answer.status in statuses, (answer.status, body[:40], answer.body[:200])


@attack()
async def lies_about_the_length(target: Target) -> None:
    """A body longer than its Content-Length, and a Content-Length far beyond the limit."""
    async with target.raw() as socket:
        await socket.send(head(target, "Content-Length: 999999999999"))
        answer = await answer_of(socket)
        assert answer.status == 413 and answer.code == "file_too_large"
    body = form_file(flac(0.2)) + f"--{BOUNDARY}--\r\n".encode()
    async with target.raw() as socket:
        await socket.send(head(target, f"Content-Length: {len(body) - 10}") + body)
        first = await answer_of(socket)
        assert first.status in (200, 400)


@attack()
async def chunks_without_an_end(target: Target) -> None:
    """A file in chunks that grows beyond `limits.upload_bytes`, which counts the received bytes."""
    async with target.raw() as socket:
        await socket.send(head(target, "Transfer-Encoding: chunked"))
        await socket.send(chunk(form_file(b"")[:-2]))
        answer = asyncio.create_task(answer_of(socket))
        piece = chunk(bytes(65_536))
        while not answer.done() and target.sent < 3 * LIMIT and await socket.try_send(piece):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        told = await answer
        assert told.status == 413, told.body
    assert target.sent < 2 * LIMIT


@attack()
async def chunks_that_are_none(target: Target) -> None:
    """Chunk sizes that are negative, huge or text, and endless chunk extensions."""
    for size in (b"-1\r\n", b"ffffffffffffffffffff\r\n", b"xyz\r\n", b"1;" + b"e" * 200_000 + b"\r\n", b"0x10\r\n"):
        async with target.raw() as socket:
            await socket.send(head(target, "Transfer-Encoding: chunked", "Connection: close"))
            await socket.try_send(size + bytes(100))
            answer = await socket.read_rest(10)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 400"), (size[:30], answer[:100])


@attack(gateway_mib=48)
async def a_flac_bomb_as_a_file(target: Target) -> None:
    """Twenty kilobytes of FLAC that are three hours of silence."""
    upload = asyncio.create_task(target.upload(form_file(flac_bomb(3 * 3600))))
    done, _ = await asyncio.wait((upload,), timeout=3)
    if done:
        assert upload.result().status == 400 and upload.result().code in ("corrupt_audio", "audio_too_compressed")
    upload.cancel()
    await asyncio.gather(upload, return_exceptions=True)


@attack(gateway_mib=48)
async def an_mp4_without_an_index(target: Target) -> None:
    """Four megabytes of empty MP4 boxes as a file."""
    answer = await target.upload(form_file(mp4_of_free_boxes(LIMIT - 4096)))
    assert answer.status == 400 and "audio" in answer.code, answer.body


@attack()
async def files_that_are_none(target: Target) -> None:
    """Empty, noise, text, a playlist that names other files, a cut file, a form inside the form."""
    whole = flac(1)
    for data in (
        b"",
        b"\x00" * 5000,
        b"hello" * 100,
        b"#EXTM3U\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        whole[: len(whole) // 2],
        whole[:30],
        form_file(whole),
        b"PK\x03\x04" + whole,
    ):
        answer = await target.upload(form_file(data))
        assert answer.status == 400 and answer.code, (data[:20], answer.status)
        assert b"/etc/passwd" not in answer.body and b"root:" not in answer.body


@attack()
async def uploads_cancelled_in_the_middle(target: Target) -> None:
    """Thirty uploads whose clients leave while the file is sent, and ten that leave while it is transcribed."""
    body = form_file(flac(20)) + f"--{BOUNDARY}--\r\n".encode()
    for number in range(40):
        async with target.raw() as socket:
            await socket.send(head(target, f"Content-Length: {len(body)}"))
            await socket.send(body if number % 4 == 0 else body[: len(body) // 2])
            await asyncio.sleep(0.02)


@attack()
async def streamed_answers_that_nobody_waits_for(target: Target) -> None:
    """Eight uploads with `stream=true` whose clients leave: their slots become free."""
    body = form_field("stream", "true") + form_file(flac(20)) + f"--{BOUNDARY}--\r\n".encode()
    for _ in range(8):
        async with target.raw() as socket:
            await socket.send(head(target, f"Content-Length: {len(body)}") + body)
            await asyncio.sleep(0.05)
    answer = await target.upload(form_file(flac(0.3)))
    assert answer.status == 200, answer.body


@attack()
async def a_crowd_of_uploads(target: Target) -> None:
    """Forty uploads at once: a few run, some wait, the others get 503 with `Retry-After`."""
    answers = await asyncio.gather(*(target.upload(form_file(flac(0.3))) for _ in range(40)))
    assert {answer.status for answer in answers} <= {200, 429, 503}
    refused = [answer for answer in answers if answer.status != 200]
    assert all(answer.code and b"etry-" in answer.headers for answer in refused)


@attack()
async def slow_uploads(target: Target) -> None:
    """Twenty uploads of one key that send nothing: half get a place and are cut off; another key's file is read."""

    async def begin_and_wait() -> bytes:
        async with target.raw() as socket:
            await socket.send(head(target, "Content-Length: 100000") + f"--{BOUNDARY}\r\n".encode())
            return await socket.read_rest(15)

    waiting = [asyncio.create_task(begin_and_wait()) for _ in range(20)]
    theirs = await target.upload(form_file(flac(0.3)), key=OTHER_KEY)
    assert theirs.status == 200, theirs.body
    answers = await asyncio.gather(*waiting)
    assert {answer[:12] for answer in answers} <= {b"", b"HTTP/1.1 408", b"HTTP/1.1 503"}, answers
    assert any(answer.startswith(b"HTTP/1.1 503") for answer in answers), answers
    answer = await target.upload(form_file(flac(0.3)))
    assert answer.status == 200, answer.body
