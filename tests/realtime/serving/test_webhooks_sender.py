"""One attempt to deliver a webhook, over real sockets: which places are reached, and what an answer may do."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from realtime.serving import webhooks
from realtime.serving.checked_fetch import NotAllowed, check_address, check_url
from realtime.serving.webhooks import HOSTS_SETTING, WebhookSender, shown_secret, signature, signing_secret
from tests.waiting import forever
from tests.webhook_receiver import hang, receiver

HOSTS = ("127.0.0.1:*",)


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[None]:
    """Certificates are made by a program, which is the test's doing."""
    yield


async def send(
    url: str, hosts: tuple[str, ...] = HOSTS, seconds: float = 20.0, sender: WebhookSender | None = None
) -> int:
    return await (sender or WebhookSender()).send(url, hosts, {"webhook-id": "msg_1"}, b"{}", seconds)


@pytest.mark.parametrize(
    ("url", "hosts", "is_allowed"),
    [
        ("https://a.example/", ("a.example",), True),
        ("http://a.example/", ("a.example",), True),
        ("https://a.example:443/", ("a.example",), True),
        # The port of the other scheme, and ports of other services on the same machine.
        ("https://a.example:80/", ("a.example",), True),
        ("http://a.example:8080/", ("a.example",), False),
        ("http://a.example:22/", ("*",), False),
        ("http://a.example:8080/", ("a.example:8080",), True),
        ("https://a.example/", ("a.example:8080",), False),
        ("http://b.a.example:8080/", ("*.a.example:8080",), True),
        ("http://a.example:22/", ("*:*",), True),
        ("http://10.1.2.3:8080/", ("10.0.0.0/8",), False),
        ("http://10.1.2.3:8080/", ("10.0.0.0/8:8080",), True),
        ("http://[::1]:8080/", ("::1",), False),
        ("http://[::1]/", ("::1",), True),
        ("http://[::1]:8080/", ("[::1]:8080",), True),
    ],
)
def test_a_host_is_listed_with_its_port(url: str, hosts: tuple[str, ...], is_allowed: bool) -> None:
    with nullcontext() if is_allowed else pytest.raises(NotAllowed, match=r"is not listed in webhooks\.hosts"):
        check_url(url, hosts, HOSTS_SETTING)


def test_an_address_is_listed_with_or_without_its_port() -> None:
    for listed in ("10.0.0.5", "10.0.0.5:8080", "10.0.0.0/8:*"):
        check_address("10.0.0.5", (listed,), HOSTS_SETTING)
    with pytest.raises(NotAllowed):
        check_address("10.0.0.6", ("10.0.0.5:8080",), HOSTS_SETTING)


async def test_status_is_that_of_the_answer_and_redirects_are_not_followed() -> None:
    async with receiver() as hook, receiver() as other:

        async def redirect(writer: asyncio.StreamWriter) -> None:
            writer.write(f"HTTP/1.1 307 X\r\nLocation: {other.url()}\r\nContent-Length: 0\r\n\r\n".encode())

        async def interim(writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\nHTTP/1.1 103 Hints\r\n\r\nHTTP/1.1 202 OK\r\n\r\n")

        hook.replies = [200, 404, redirect, interim]
        assert [await send(hook.url("/a?b=c")) for _ in range(4)] == [200, 404, 307, 202]
        assert set(hook.paths) == {"/a?b=c"} and hook.heads[0]["Host"] == f"127.0.0.1:{hook.port}"
        assert other.connections == 0


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.2/", "http://localhost/", "http://u:p@127.0.0.1/", "http://127.0.0.1@example.org/", "ftp://127.0.0.1/",
     "http://[::ffff:127.0.0.2]/", "http://127.0.0.1/\r\nX: y", "http://2130706434/", "//127.0.0.1/", "http://10.0.0.1/"],
)  # fmt: skip
async def test_places_that_are_not_listed_are_not_reached(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WebhookSender, "_connect", forever)
    with pytest.raises(NotAllowed, match=r"webhooks\.hosts|URL|http and https only"):
        await send(url)


@pytest.mark.parametrize("host", ["a..example.org", ".example.org", "x" * 64 + ".example.org"])
async def test_a_host_that_cannot_be_looked_up_is_refused(host: str) -> None:
    with pytest.raises(NotAllowed, match="the URL is not valid"):
        await send(f"http://{host}/", ("*",))


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["93.184.216.34", "10.0.0.1"], ["::1"], ["169.254.169.254"]])
async def test_a_listed_name_with_a_private_address_is_not_reached(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str]
) -> None:
    async with receiver() as hook:
        connected: list[Any] = []
        monkeypatch.setattr(webhooks.socket, "getaddrinfo", resolving(addresses, hook.port))
        monkeypatch.setattr(asyncio, "open_connection", lambda *given, **_: connected.append(given))
        with pytest.raises(NotAllowed, match="not public and not in webhooks.hosts"):
            await send(f"http://hooks.example:{hook.port}/", ("hooks.example:*", "*"))
        assert not connected and hook.connections == 0


def resolving(addresses: list[str], port: int) -> Any:
    def look_up(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    return look_up


async def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that means another address at its second lookup."""
    async with receiver() as hook:
        looked_up = 0
        real = socket.getaddrinfo

        def rebinding(host: str, *given: Any, **named: Any) -> Any:
            nonlocal looked_up
            if host != "hooks.example":
                return real(host, *given, **named)
            looked_up += 1
            return resolving(["127.0.0.1" if looked_up == 1 else "127.0.0.2"], hook.port)()

        monkeypatch.setattr(socket, "getaddrinfo", rebinding)
        assert await send(f"http://hooks.example:{hook.port}/", ("hooks.example:*", "127.0.0.1")) == 200
        assert looked_up == 1 and hook.heads[0]["Host"] == f"hooks.example:{hook.port}"


async def test_a_lookup_that_hangs_ends_at_the_deadline_and_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    real, is_over = socket.getaddrinfo, False
    lookups = 0

    def hanging(host: str, *given: Any, **named: Any) -> Any:
        nonlocal lookups
        if host != "hangs.example":
            return real(host, *given, **named)
        lookups += 1
        while not is_over:
            time.sleep(0.01)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    sender = WebhookSender()
    try:
        async with receiver() as hook:
            for _ in range(20):
                with pytest.raises(TimeoutError):
                    await send("http://hangs.example/", ("*",), 0.02, sender)
            assert await send(hook.url(), sender=sender) == 200
            assert lookups == 1, "each attempt has a thread that hangs"
    finally:
        is_over = True


async def test_answers_that_never_end_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "BODY_S", 0.1)
    sent = 0

    async def endless_body(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    async def slow_body(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with receiver() as hook:
        for reply in (endless_body, slow_body):
            hook.replies = [reply]
            assert await send(hook.url()) == 200
        # What the server has read, and what the buffers of the system take.
        assert sent < 16 * 1024 * 1024


async def test_answers_that_are_none_fail() -> None:
    async def long_line(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"HTTP/1.1 200" + b"y" * 65536)
            await writer.drain()

    async def interims(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            await writer.drain()

    async def headers(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 100 Continue\r\n")
        while True:
            writer.write(b"X: y\r\n")
            await writer.drain()

    async def noise(writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 smtp.example.org ESMTP\r\n")

    async def nothing(writer: asyncio.StreamWriter) -> None:
        pass

    async def cut(writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with receiver() as hook:
        for reply in (long_line, interims, headers, noise, nothing, cut):
            hook.replies = [reply]
            with pytest.raises(OSError):
                await send(hook.url())
        hook.replies = [hang]
        with pytest.raises(TimeoutError):
            await send(hook.url(), seconds=0.2)
        port = hook.port
    with pytest.raises(OSError):
        await send(f"http://127.0.0.1:{port}/")


async def test_a_receiver_that_reads_nothing_ends_at_the_deadline() -> None:
    reading = asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await reading.wait()
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    with pytest.raises(TimeoutError):
        await WebhookSender().send(url, HOSTS, {}, b"x" * 50_000_000, 0.5)
    reading.set()
    server.close()


def certificate(folder: Path, name: str) -> tuple[str, str]:
    key, cert = str(folder / f"{name}.key"), str(folder / f"{name}.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "1", "-subj", "/CN=x", "-addext", f"subjectAltName={name}", "-keyout", key, "-out", cert]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def joined(*files: str) -> str:
    both = Path(files[0]).with_name("both.pem")
    both.write_text("".join(Path(file).read_text() for file in files))
    return str(both)


def serving(cert: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context


async def test_tls_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = certificate(tmp_path, "IP:127.0.0.1"), certificate(tmp_path, "DNS:other.example")
    async with receiver(serving(*right)) as hook, receiver(serving(*wrong)) as other, receiver() as plain:
        with pytest.raises(ssl.SSLCertVerificationError):
            await send(hook.url())
        monkeypatch.setenv("SSL_CERT_FILE", joined(right[0], wrong[0]))
        sender = WebhookSender()
        assert await send(hook.url(), sender=sender) == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            await send(other.url(), sender=sender)
        with pytest.raises(OSError):
            await send(plain.url().replace("http", "https"), seconds=0.5, sender=sender)
        assert len(hook.bodies) == 1 and not other.bodies and not plain.bodies


def test_signature_is_that_of_the_published_example() -> None:
    """The example of the Standard Webhooks libraries."""
    import base64

    secret = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    signed = signature(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_secrets_of_keys_differ() -> None:
    secrets = {shown_secret(signing_secret("a secret of the server", key)) for key in ("", "one-key", "two-key")}
    assert len(secrets) == 3 and all(secret.startswith("whsec_") for secret in secrets)


async def test_the_package_of_standard_webhooks_verifies_what_is_sent() -> None:
    package = pytest.importorskip("standardwebhooks.webhooks")
    secret, now = signing_secret("a secret of the server", "key"), int(time.time())
    body = '{"text": "größe"}'.encode()
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(now),
        "webhook-signature": signature(secret, "msg_1", now, body),
    }
    async with receiver() as hook:
        assert await WebhookSender().send(hook.url(), HOSTS, headers, body, 20.0) == 200
        verified = package.Webhook(shown_secret(secret)).verify(hook.bodies[0], hook.heads[0])
        assert verified == {"text": "größe"}
        with pytest.raises(package.WebhookVerificationError):
            package.Webhook(shown_secret(signing_secret("another secret", "key"))).verify(hook.bodies[0], hook.heads[0])
