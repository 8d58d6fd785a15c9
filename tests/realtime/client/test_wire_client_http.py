"""HTTP requests: errors of an address, a server or a file are one line, and files arrive complete."""

from __future__ import annotations

import io
import socket

import pytest

from realtime.client.wire_client import CannotConnect, FileUnreadable, Form, HttpAnswer, HttpClient, _head, realtime_url
from tests.realtime.plain_server import answering, reply


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "http://host:99999", ""])
def test_what_is_no_address_is_named(url: str) -> None:
    with pytest.raises(CannotConnect, match="write http://HOST:PORT"):
        HttpClient(url)


@pytest.mark.parametrize(
    "url", ["http://exa mple", "http://[::1", "http://host/a b", "http://host/ü", "http://a..b", "http://" + "x" * 64]
)
def test_what_no_request_can_carry_is_no_address(url: str) -> None:
    for use in (HttpClient, realtime_url):
        with pytest.raises(CannotConnect, match="is not the address of a server; write http://HOST:PORT"):
            use(url)


def test_server_without_a_certificate_says_to_write_http() -> None:
    with (
        answering(lambda connection: reply(connection, "400 Bad Request", b"{}")) as url,
        pytest.raises(CannotConnect, match="does not speak TLS; write http://"),
    ):
        HttpClient(url.replace("http://", "https://")).get("/health")


def test_nobody_there_says_what_to_start() -> None:
    with pytest.raises(CannotConnect, match="no server answers at http://127.0.0.1:9 .*tickertape serve"):
        HttpClient("127.0.0.1:9").get("/ready")


def test_server_that_hangs_up_or_speaks_something_else_is_said() -> None:
    with answering(lambda connection: None) as url, pytest.raises(CannotConnect, match="broke off"):
        HttpClient(url).get("/ready")
    with (
        answering(lambda connection: connection.sendall(b"SSH-2.0-OpenSSH\r\n")) as url,
        pytest.raises(CannotConnect, match="broke off"),
    ):
        HttpClient(url).get("/ready")


def test_an_answer_that_breaks_off_is_none() -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\ntickertape_sessions 1\n")

    with answering(answer) as url, pytest.raises(CannotConnect, match="broke off"):
        HttpClient(url).get("/metrics")


def test_address_may_be_the_page_the_base_url_or_the_socket() -> None:
    paths: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        paths.append(connection.recv(65536).split(b" ")[1])
        reply(connection, "200 OK", b"{}")

    with answering(answer) as url:
        host = url.removeprefix("http://")
        for written in (host, f"{url}/", f"{url}/v1", f"ws://{host}/v1/realtime", f"{url}/behind/v1/"):
            assert HttpClient(written).get("/ready").json() == {}
    assert paths == [b"/ready"] * 4 + [b"/behind/ready"]


def test_key_is_sent_and_never_shown() -> None:
    seen: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        seen.append(connection.recv(65536))
        reply(connection, "401 Unauthorized", b'{"error": {"message": "Incorrect API key provided."}}')

    with answering(answer) as url:
        refused = HttpClient(url.replace("http://", "http://user:pass@"), "a-long-secret")
        assert refused.get("/capacity").refusal == "refused with 401: Incorrect API key provided."
    assert b"Authorization: Bearer a-long-secret" in seen[0]
    assert "pass" not in refused.url
    assert HttpAnswer(500, b"<html>").refusal == "refused with 500: it gives no reason"


def test_refusal_in_the_middle_of_an_upload_is_what_is_reported() -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(1000)
        reply(connection, "413 Too Large", b'{"error": {"message": "The file is larger than 9 bytes."}}')
        connection.shutdown(socket.SHUT_WR)
        # The rest is read, or the system would take the answer back with a reset.
        while connection.recv(1 << 20):
            pass

    big = bytes(32 * 1024 * 1024)
    with answering(answer) as url:
        form = Form([("model", "default")], "a.wav", io.BytesIO(big), len(big))
        assert HttpClient(url).upload(form).refusal == "refused with 413: The file is larger than 9 bytes."


class Failing(io.BytesIO):
    def read(self, size: int | None = -1) -> bytes:
        raise OSError(5, "Input/output error")

    read1 = read  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("file", "size", "said"),
    [
        (io.BytesIO(b"abc"), 10, "became shorter while it was sent: it has 3 instead of 10 bytes"),
        (Failing(), 10, "cannot be read: Input/output error"),
        (Failing(), None, "cannot be read: Input/output error"),
    ],
)
def test_file_that_fails_is_no_fault_of_the_server(file: io.BytesIO, size: int | None, said: str) -> None:
    def answer(connection: socket.socket) -> None:
        while connection.recv(65536):
            pass

    with answering(answer) as url, pytest.raises(FileUnreadable, match=said):
        HttpClient(url).upload(Form([], "a.wav", file, size))


@pytest.mark.parametrize("size", [10, None])
def test_grown_file_is_sent_as_it_was_and_a_pipe_to_its_end(size: int | None) -> None:
    received = bytearray()

    def answer(connection: socket.socket) -> None:
        while not received.endswith(b"--\r\n") and b"--\r\n\r\n0\r\n\r\n" not in received:
            received.extend(connection.recv(65536))
        reply(connection, "200 OK", b'{"text": "ok"}')

    sent: list[int] = []
    with answering(answer) as url:
        form = Form([("prompt", 'say "ä"')], 'a"\r\nb.wav', io.BytesIO(b"0123456789MORE"), size, sent.append)
        assert HttpClient(url).upload(form).json() == {"text": "ok"}
    assert (b"0123456789" in received, b"MORE" in received) == (True, size is None)
    assert 'say "ä"'.encode() in received and b'filename="a%22%0D%0Ab.wav"' in received
    assert sent[-1] == (10 if size else 14)


def test_what_is_not_utf8_goes_out_as_the_bytes_that_it_was() -> None:
    head = _head(Form([("prompt", "caf\udce9")], "caf\udce9.wav", io.BytesIO(), 0), "b")
    assert b"caf\xe9\r\n" in head and b'filename="caf%E9.wav"' in head
