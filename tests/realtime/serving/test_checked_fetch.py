"""Which URLs of clients may be reached: listed hosts with public addresses, or with addresses that are listed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from realtime.serving import checked_fetch
from realtime.serving.checked_fetch import CheckedFetch, NotAllowed, check_address, check_url


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[None]:
    """The pulling process may block."""
    yield


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "concat:http://radio.example/a", "data:audio/wav;base64,AAAA", "ftp://radio.example/a",
        "rtsp://radio.example/a", "http://", "http:///a", "http://other.example/", "http://radio.example.evil.test/",
        "http://evilradio.example/", "http://user:pass@radio.example/", "http://radio.example:99999/",
        "http://radio.example/a b", "http://radio.example/\r\nHost: x", "http://räd.example/", "http://[::1/",
        "http://radio.example@127.0.0.1/", "http://127.0.0.1/", "http://0x7f000001/", "http://2130706433/",
        "gopher://radio.example/", "HTTP+UNIX://radio.example/", "http:radio.example/a", "//radio.example/a", "",
    ],
)  # fmt: skip
def test_url_that_is_not_of_a_listed_host_is_refused(url: str) -> None:
    with pytest.raises(NotAllowed):
        check_url(url, ["radio.example", "*.tv.example"])


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("http://radio.example/live", ["radio.example"]),
        ("https://RADIO.example:8443/live?x=1", ["Radio.Example"]),
        ("https://one.tv.example/a.m3u8", ["*.tv.example"]),
        ("http://anything.test/", ["*"]),
        ("http://10.1.2.3/", ["10.0.0.0/8"]),
        ("http://[fd00::5]:80/", ["fd00::/8"]),
    ],
)
def test_url_of_a_listed_host_is_taken(url: str, hosts: list[str]) -> None:
    assert check_url(url, hosts).hostname


PRIVATE = [
    "127.0.0.1", "127.8.8.8", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
    "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fd00::1", "ff02::1", "::ffff:127.0.0.1",
    "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1", "2002:7f00:1::", "2002:a00:1::", "2001:db8::1",
    # Local NAT64, site-local, IPv4-compatible, IPv4-translated, protocol assignments, documentation, segment routing,
    # 6to4 and Teredo with a public IPv4 address, relays of 6to4, Azure's service for its virtual machines.
    "64:ff9b:1::7f00:1", "fec0::1", "::127.0.0.1", "::93.184.216.34", "::ffff:0:127.0.0.1", "192.0.0.192", "192.0.0.9",
    "3fff::1", "3fff:fff::1", "5f00::1", "4000::1", "2002:5db8:d822::1", "2001:0:5db8:d822::1", "2001:20::1",
    "192.88.99.1", "168.63.129.16", "::ffff:168.63.129.16", "64:ff9b::a83f:8110", "100::1",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_address_that_is_not_public_is_refused_even_for_any_host(address: str) -> None:
    with pytest.raises(NotAllowed, match="not public"):
        check_address(address, ["*", "radio.example", "*.example"])


def test_address_that_is_public_or_listed_is_taken() -> None:
    check_address("93.184.216.34", ["radio.example"])
    check_address("2606:2800:220:1::1", ["radio.example"])
    check_address("2001:4860:4860::8888", ["radio.example"])
    check_address("64:ff9b::5db8:d822", ["radio.example"])
    check_address("168.63.129.17", ["radio.example"])
    check_address("192.0.1.1", ["radio.example"])
    check_address("3fff:1000::1", ["radio.example"])
    check_address("fec0::1", ["fec0::/10"])
    check_address("10.1.2.3", ["radio.example", "10.1.0.0/16"])
    check_address("::ffff:10.1.2.3", ["10.1.2.3"])
    with pytest.raises(NotAllowed):
        check_address("10.2.2.3", ["radio.example", "10.1.0.0/16"])


def test_a_private_address_of_webhooks_has_the_port_that_is_written() -> None:
    for hosts in (["*", "10.0.0.5:9000"], ["*:*", "10.0.0.5:9000"]):
        check_address("10.0.0.5", hosts, "webhooks.hosts", 9000)
        for port in (22, 80):
            with pytest.raises(NotAllowed, match=f"port {port}"):
                check_address("10.0.0.5", hosts, "webhooks.hosts", port)
    # The port is that of the name's entry.
    check_address("10.0.0.5", ["hooks.example:8443", "10.0.0.0/8"], "webhooks.hosts", 8443)


def test_name_that_leads_to_a_private_address_is_never_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if only one of its addresses is private, and if the second answer differs from the first (DNS rebinding)."""
    connected: list[Any] = []
    answers = [["93.184.216.34", "127.0.0.1"], ["169.254.169.254"]]

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in answers.pop(0)]

    class Refusing(socket.socket):
        def connect(self, address: Any) -> None:
            connected.append(address)
            raise OSError("refused")

    monkeypatch.setattr(checked_fetch.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(checked_fetch.socket, "socket", Refusing)
    for _ in range(2):
        with pytest.raises(NotAllowed, match="not public"):
            CheckedFetch(["*"], 1.0)("http://radio.example/live")
    assert not connected
    # The address that was checked is the one that is connected to: the name is resolved once.
    answers.append(["93.184.216.34"])
    with pytest.raises(OSError, match="refused"):
        CheckedFetch(["*"], 1.0)("http://radio.example/live")
    assert connected == [("93.184.216.34", 80)] and not answers
