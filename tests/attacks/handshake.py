"""Attacks before a session exists: connections, heads, upgrades."""

from __future__ import annotations

import asyncio
import json
import ssl

from tests.attacks.target import Answer, Target, attack


@attack()
async def bad_upgrades(target: Target) -> None:
    """Upgrades without a key, with a wrong version, a wrong method or a wrong path."""
    good = target.upgrade_head().decode()
    for head, statuses in (
        (good.replace("Sec-WebSocket-Version: 13", "Sec-WebSocket-Version: 99"), (400, 426)),
        (good.replace("Sec-WebSocket-Key:", "X-Nothing:"), (400, 426)),
        (good.replace("GET ", "POST ", 1), (400, 404, 405)),
        (good.replace("/v1/realtime", "/v1/nowhere"), (403, 404)),
        (good.replace("Upgrade: websocket", "Upgrade: h2c"), (400, 404, 405, 426)),
    ):
        async with target.raw() as socket:
            await socket.send(head.encode())
            answer = Answer.parse(await socket.read_head())
        assert answer.status in statuses, (answer.status, head)


@attack()
async def huge_head(target: Target) -> None:
    """A request head of eight megabytes."""
    async with target.raw() as socket:
        await socket.send(b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\n")
        answer = await socket.send_until_answered(b"X-Long: " + b"a" * 65_000 + b"\r\n", 2**23)
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))


@attack()
async def endless_header_name(target: Target) -> None:
    """A header whose name never ends."""
    async with target.raw() as socket:
        await socket.send(b"GET /health HTTP/1.1\r\n")
        answer = await socket.send_until_answered(b"a" * 65_536, 2**23)
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))


@attack()
async def a_thousand_half_open_sockets(target: Target) -> None:
    """A thousand connections that send nothing: each is cut after `server.handshake_s`."""
    opened = [await asyncio.open_connection("127.0.0.1", target.port) for _ in range(1000)]
    try:
        async with asyncio.timeout(15):
            answers = await asyncio.gather(*(reader.read() for reader, _ in opened), return_exceptions=True)
        assert all(answer == b"" or isinstance(answer, ConnectionResetError) for answer in answers)
    finally:
        for _, writer in opened:
            writer.transport.abort()


@attack()
async def slow_loris_heads(target: Target) -> None:
    """Two hundred request heads that arrive a byte at a time: the deadline is for the whole head."""

    async def drip() -> None:
        async with target.raw() as socket:
            for byte in b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\nX-Slow: " + b"a" * 1000:
                if not await socket.try_send(bytes([byte])) or socket.reader.at_eof():
                    return
                await asyncio.sleep(0.1)
            raise AssertionError("a head that never ends was waited for")

    await asyncio.wait_for(asyncio.gather(*(drip() for _ in range(200))), 20)


@attack()
async def slow_second_head(target: Target) -> None:
    """A kept-alive connection whose second request never ends has the same deadline as a first one."""
    async with target.raw() as socket:
        await socket.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await socket.read_head()
        await socket.reader.readexactly(len(b'{"status":"ok"}'))
        await socket.send(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        assert await socket.read_rest(8) == b""


@attack()
async def tls_on_the_plain_port(target: Target) -> None:
    """The first message of a TLS client on the plain port."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    hello = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    try:
        hello.do_handshake()
    except ssl.SSLWantReadError:
        pass
    assert (await target.exchange(outgoing.read(), 5)).startswith(b"HTTP/1.1 400")


@attack()
async def another_protocol(target: Target) -> None:
    """HTTP/2, SMTP, zeros and noise on the port."""
    noise = bytes(range(256)) * 4
    for data in (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"EHLO attacker\r\n\r\n",
        bytes(512),
        noise,
        b"\r\n" * 64 + b"x\r\n\r\n",
    ):
        answer = await target.exchange(data, 5)
        assert answer.startswith(b"HTTP/1.1 4"), (data[:20], answer[:100])


@attack()
async def two_content_lengths(target: Target) -> None:
    """Requests whose length can be read in two ways, as in request smuggling behind proxies."""
    secret = f"POST /v1/realtime/client_secrets HTTP/1.1\r\nHost: x\r\n{target.authorization}".encode()
    inner = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    for head in (
        b"Content-Length: 2\r\nContent-Length: 50\r\n\r\n{}",
        b"Content-Length: 2, 50\r\n\r\n{}",
        b"Content-Length: -1\r\n\r\n{}",
        b"Content-Length: +2\r\n\r\n{}",
        b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        b"Content-Length : 2\r\n\r\n{}",
    ):
        answer = await target.exchange(secret + head + inner, 5)
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 501")), (head, answer[:100])
        assert answer.count(b"HTTP/1.1 ") == 1


@attack()
async def a_flood_of_pipelined_requests(target: Target) -> None:
    """Five thousand requests in one go from a client that reads no answer for a while."""
    async with target.raw() as socket:
        await socket.try_send(b"GET /v1/nowhere HTTP/1.1\r\nHost: x\r\n\r\n" * 5000, 3)
        await asyncio.sleep(0.3)
        head = await socket.read_head()
        assert head.startswith(b"HTTP/1.1 404")


@attack()
async def long_addresses(target: Target) -> None:
    """A path of 50 kB, one with NUL in it, a query of ten thousand keys, a model's name of 30 kB."""
    many = "&".join(f"k{number}=v" for number in range(8000))
    for path, statuses in (
        ("/" + "a" * 50_000, (404, 414)),
        ("/v1/%00/models", (404,)),
        ("/v1/models/" + "m" * 30_000, (404, 414)),
        ("/v1/models?" + many, (200, 414)),
        ("/../../../../etc/passwd", (404,)),
        ("//v1//models", (404,)),
    ):
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{target.authorization}\r\n"
        answer = Answer.parse(await target.exchange(request.encode(), 10))
        assert answer.status in statuses or answer.status in (400, 431), (answer.status, path[:40])
        assert len(answer.body) < 4096


@attack()
async def a_storm_of_wrong_keys(target: Target) -> None:
    """Three hundred guesses at a key."""

    async def guess(number: int) -> None:
        assert await target.refused(target.ws, key=f"guess-{number}") == (401, "invalid_api_key")

    for start in range(0, 300, 20):
        await asyncio.gather(*(guess(number) for number in range(start, start + 20)))


@attack()
async def crowded_sub_protocols(target: Target) -> None:
    """An upgrade that offers two thousand sub-protocols, among them wrong keys."""
    offered = ", ".join(f"openai-insecure-api-key.nobody{number}" for number in range(1000))
    head = target.upgrade_head(extra=f"Sec-WebSocket-Protocol: {offered}\r\n").replace(b"Authorization", b"X-Nothing")
    answer = Answer.parse(await target.exchange(head, 10))
    assert answer.status in (400, 401, 431)
    if answer.status == 401:
        assert json.loads(answer.body)["error"]["code"] == "invalid_api_key"


@attack()
async def line_ends_in_every_value(target: Target) -> None:
    """Line ends, forged headers, forged log lines and terminal escapes, in paths and queries."""
    ends = (
        "%0d%0aX-Forged:%20yes",
        "%0a2026-01-01%2000:00:00,000%20ERROR%20forged",
        "%1b%5d0;forged%07",
        "%e2%80%a8%00%85",
    )
    listen = "encoding=linear16&sample_rate=16000"
    for text in ends:
        for path in (
            *(
                f"/v1/listen?{listen}&{name}=1{text}"
                for name in ("channels", "language", "endpointing", "keyterm", text)
            ),
            f"/v1/listen?encoding={text}",
            f"/v1/listen?{listen}&sample_rate={text}",
            *(
                f"/v2/listen?{listen}&{name}=0.7{text}"
                for name in ("eot_threshold", "eot_timeout_ms", "keyterm", "model")
            ),
            *(f"/v1/realtime?{name}=a{text}" for name in ("model", "resume", "call_id", text)),
            f"/v1/realtime?resume=a&after={text}",
            f"/v1/models/{text}",
            f"/{text}",
        ):
            head = target.upgrade_head(path)
            for request in (head, head.replace(b"Upgrade: websocket\r\nConnection: Upgrade", b"Connection: close")):
                async with target.raw() as socket:
                    await socket.send(request)
                    lines = (await socket.read_head()).split(b"\r\n")
                    assert lines[0].startswith(b"HTTP/1.1 "), (path, lines[0])
                    forged = [line for line in lines if line.startswith((b"X-Forged", b"2026")) or b"\x1b" in line]
                    assert not forged, (path, forged)


@attack()
async def plain_requests_for_a_socket(target: Target) -> None:
    """Two hundred plain requests to socket routes: each answer says that an upgrade is missing."""
    for number in range(200):
        path = ("/v1/realtime", "/realtime", "/v1/listen", "/v2/listen")[number % 4]
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{target.authorization}\r\n"
        answer = Answer.parse(await target.exchange(head.encode()))
        assert answer.status == 426 and b"upgrade: websocket" in answer.headers.lower() and b"proxy" in answer.body


@attack()
async def a_flood_of_scrapes(target: Target) -> None:
    """A thousand scrapes of the metrics, which need no key, and as many requests for the capacity and each document."""

    async def look(path: str) -> None:
        async with target.raw() as socket:
            for _ in range(50):
                await socket.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                head = await socket.read_head()
                assert head.startswith(b"HTTP/1.1 200"), head[:100]
                length = int(head.lower().partition(b"content-length: ")[2].split()[0])
                await socket.reader.readexactly(length)

    await asyncio.gather(
        *(look(path) for path in ("/metrics", "/capacity", "/openapi.json", "/events.schema.json") * 20)
    )


@attack()
async def leaving_in_the_handshake(target: Target) -> None:
    """Two hundred clients that ask for a socket and leave before the answer."""
    for _ in range(200):
        async with target.raw() as socket:
            await socket.send(target.upgrade_head())


@attack()
async def bodies_where_none_belongs(target: Target) -> None:
    """A body that is announced and never sent, and bytes after a refused upgrade."""
    request = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n{target.authorization}\r\n".encode()
    async with target.raw() as socket:
        await socket.send(request + b"x" * 100)
        assert (await socket.read_head()).startswith(b"HTTP/1.1 200")
    refused = target.upgrade_head().replace(b"Bearer ", b"Bearer not")
    answer = await target.exchange(refused + b"\xff" * 100_000, 10)
    # The connection may be reset while the unread bytes are on their way, and the answer with it.
    assert answer == b"" or answer.startswith(b"HTTP/1.1 401")
