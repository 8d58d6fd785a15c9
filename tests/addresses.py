"""The addresses of a server on this machine."""

from __future__ import annotations


class Addresses:
    """By the server's port."""

    __slots__ = ()

    port: int

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def base_url(self) -> str:
        return f"{self.http}/v1"

    @property
    def ws(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/realtime"

    @property
    def listen(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/listen"
