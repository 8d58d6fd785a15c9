"""Protection against server-side request forgery: checks of outgoing URLs, and an HTTP client that applies them.

Clients can name URLs, for streams that the server pulls and for webhooks, and the server may reach networks that the
client cannot. So every request is checked, also each redirect and each segment of an HLS playlist: the operator must
have listed the host, and the address that it resolves to must be public or listed itself. The connection is made to the
address that was checked, so another DNS answer cannot change it. `CheckedFetch` runs in the process that pulls a
stream, where libav has no network access; webhooks use the checks only (`webhooks.py`).
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any
from urllib.parse import SplitResult, urljoin

from audio.errors import UnsupportedFormat
from realtime.text_values import WEB_PORTS, OtherScheme, listed_host, web_url

# The first bytes of an HLS playlist.
PLAYLIST = b"#EXTM3U"
ANY_HOST = "*"
MAX_REDIRECTS = 5
# The longest playlist and the longest segment. The body of a file or of a live stream has no bound, because it is
# decoded as it arrives.
MAX_PLAYLIST_BYTES = 1024 * 1024
MAX_SEGMENT_BYTES = 64 * 1024 * 1024
REDIRECTS = (301, 302, 303, 307, 308)
NAT64 = ip_network("64:ff9b::/96")
# Public IPv6 addresses are assigned from this network only.
GLOBAL_UNICAST = ip_network("2000::/3")
# Not public, whatever the tables of this version of Python say: addresses for protocols, relays of 6to4 and Teredo,
# documentation, and Azure's service for its virtual machines.
NOT_PUBLIC = tuple(
    map(ip_network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32", "2001::/23", "2002::/16", "3fff::/20"))
)

STREAM_HOSTS = "server.stream_hosts"

Address = IPv4Address | IPv6Address
# An address as `socket.getaddrinfo` returns it.
ResolvedAddress = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]


class NotAllowed(UnsupportedFormat):
    """The operator does not allow this address."""

    code = "host_not_allowed"


def check_url(url: str, hosts: Sequence[str], setting: str = STREAM_HOSTS) -> SplitResult:
    """The parts of a URL whose host is in the list `hosts`, which is the operator's `setting`. Raises NotAllowed. The
    addresses of the host are checked after the lookup (`check_addresses`). Streams may use any port of a listed host;
    webhooks the ports 80 and 443, or the port of the entry."""
    try:
        split = web_url(url)
    except OtherScheme:
        other = "; use `tickertape listen URL --server` for other streams" if setting == STREAM_HOSTS else ""
        raise NotAllowed(f"the server {'pulls' if other else 'sends to'} http and https only{other}") from None
    except ValueError as error:
        raise NotAllowed(str(error)) from None
    host = split.hostname or ""
    if not any(_matches(host, listed) for listed in hosts):
        raise NotAllowed(f"the host {host[:100]!r} is not listed in {setting}")
    port = port_of(split)
    if setting != STREAM_HOSTS and not any(_matches(host, listed) and _has_port(port, listed) for listed in hosts):
        raise NotAllowed(f"the host {host[:100]!r} with port {port} is not listed in {setting}")
    return split


def port_of(split: SplitResult) -> int:
    return split.port or WEB_PORTS[split.scheme]


def request_target(split: SplitResult) -> str:
    """Path and query, as in the first line of a request."""
    return f"{split.path or '/'}{'?' + split.query if split.query else ''}"


def _matches(host: str, listed: str) -> bool:
    listed, address = listed_host(listed.lower())[0], _as_address(host)
    if address is not None:
        return listed == ANY_HOST or _is_in(address, listed)
    return listed in (ANY_HOST, host) or (listed.startswith("*.") and host.endswith(listed[1:]))


def _has_port(port: int, listed: str) -> bool:
    listed_port = listed_host(listed)[1]
    return listed_port in ("*", str(port)) or (not listed_port and port in WEB_PORTS.values())


def _as_address(host: str) -> Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _is_in(address: Address, listed: str) -> bool:
    try:
        return address in ip_network(listed_host(listed)[0], strict=False)
    except (ValueError, TypeError):
        return False


def check_address(text: str, hosts: Sequence[str], setting: str = STREAM_HOSTS, port: int | None = None) -> None:
    """Raise NotAllowed unless the address is public or listed itself, as an address or in a network. With `port`,
    entries with another port do not count; entries without a port do."""
    address = _embedded_ipv4(ip_address(text.partition("%")[0]))
    if _is_public(address):
        return
    ports = ("", "*", str(port))
    if not any(_is_in(address, entry) and (port is None or listed_host(entry)[1] in ports) for entry in hosts):
        with_port = "" if port is None else f" with port {port}"
        raise NotAllowed(f"the host has the address {address}, which is not public and not in {setting}{with_port}")


def check_addresses(resolved: Sequence[ResolvedAddress], hosts: Sequence[str], setting: str = STREAM_HOSTS) -> None:
    """Check all addresses of a name before the first connection. Raises NotAllowed if any of them is not allowed."""
    for entry in resolved:
        address, port = entry[4][:2]
        check_address(str(address), hosts, setting, None if setting == STREAM_HOSTS else port)


def _is_public(address: Address) -> bool:
    if isinstance(address, IPv6Address) and address not in GLOBAL_UNICAST:
        return False
    return address.is_global and not address.is_multicast and not any(address in network for network in NOT_PUBLIC)


def _embedded_ipv4(address: Address) -> Address:
    """The IPv4 address that a mapped or NAT64 address stands for. 6to4 and Teredo are not public themselves."""
    if isinstance(address, IPv4Address):
        return address
    if address in NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address


class _Connection(http.client.HTTPConnection):
    """An HTTP or HTTPS connection to an address that was checked."""

    def __init__(self, split: SplitResult, hosts: Sequence[str], timeout_s: float) -> None:
        assert split.hostname is not None
        super().__init__(split.hostname, port_of(split), timeout=timeout_s)
        self._secure = split.scheme == "https"
        self._hosts = hosts

    def connect(self) -> None:
        resolved = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        failure: OSError = OSError("the host has no address")
        check_addresses(resolved, self._hosts)
        for family, kind, protocol, _, address in resolved:
            raw_socket = socket.socket(family, kind, protocol)
            try:
                raw_socket.settimeout(self.timeout)
                raw_socket.connect(address)
                self.sock = self._wrap_tls(raw_socket)
                return
            except OSError as error:
                raw_socket.close()
                failure = error
        raise failure

    def _wrap_tls(self, raw_socket: socket.socket) -> socket.socket:
        return (
            ssl.create_default_context().wrap_socket(raw_socket, server_hostname=self.host)
            if self._secure
            else raw_socket
        )


class Body(io.RawIOBase):
    """The body of a response as a file that cannot be seeked. `name` is its URL, to which a playlist refers."""

    def __init__(self, url: str, response: http.client.HTTPResponse, max_bytes: int | None) -> None:
        self.name = url
        self.length = response.length
        # Why the body ended too early; libav does not expect an exception from `read`.
        self.fault: OSError | None = None
        self._response = response
        self._max_bytes = max_bytes
        self._count = 0
        self._head = b""

    def peek(self, size: int) -> bytes:
        while len(self._head) < size and (data := self._response.read1(size)):
            self._head += data
        if self._head.startswith(PLAYLIST):
            self._max_bytes = MAX_PLAYLIST_BYTES
        return self._head[:size]

    def read(self, size: int = -1) -> bytes:
        if self.fault is not None:
            return b""
        try:
            data, self._head = (self._head, b"") if self._head else (self._response.read1(max(size, 1)), b"")
            if len(data) > size > 0:
                data, self._head = data[:size], data[size:]
            self._count += len(data)
            if not data and self.length is not None and self._count < self.length:
                raise OSError("the connection was closed within the response")
            if self._max_bytes is not None and self._count > self._max_bytes:
                raise OSError(f"the response has more than {self._max_bytes} bytes")
        except (OSError, http.client.HTTPException) as error:
            self.fault = error if isinstance(error, OSError) else OSError(str(error))
            return b""
        return data

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._response.close()
        super().close()


class CheckedFetch:
    """Opens URLs of allowed hosts. The first one is the stream; later ones are playlists and segments."""

    def __init__(self, hosts: Sequence[str], timeout_s: float) -> None:
        self.first: Body | None = None
        self._hosts = hosts
        self._timeout_s = timeout_s

    def __call__(self, url: str) -> Body:
        """The body of the response. Raises NotAllowed and OSError."""
        body = self._open(url, None if self.first is None else MAX_SEGMENT_BYTES)
        self.first = self.first or body
        return body

    def _open(self, url: str, max_bytes: int | None) -> Body:
        for _ in range(MAX_REDIRECTS + 1):
            split = check_url(url, self._hosts)
            connection = _Connection(split, self._hosts, self._timeout_s)
            try:
                connection.request(
                    "GET", request_target(split), headers={"Accept-Encoding": "identity", "Connection": "close"}
                )
                response = connection.getresponse()
            except http.client.HTTPException as error:
                raise OSError(f"the server's response is not HTTP ({type(error).__name__})") from error
            if response.status in REDIRECTS and (location := response.getheader("Location")):
                response.close()
                url = urljoin(url, location)
                continue
            if response.status != http.client.OK:
                response.close()
                raise OSError(f"the server answered with {response.status}")
            return Body(url, response, max_bytes)
        raise OSError(f"the server redirects more than {MAX_REDIRECTS} times")
