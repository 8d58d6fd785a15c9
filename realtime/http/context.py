"""What all routes share. Routes get this, and not one another."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import Request

from realtime.config import Config, LimitsConfig
from realtime.errors import Refusal
from realtime.http.auth import Gatekeeper, offered_key
from realtime.metrics.gateway import Metrics
from realtime.serving.caller import Caller
from realtime.serving.engine_api import EngineApi
from realtime.serving.registry import Sessions


@dataclass(frozen=True, slots=True)
class Context:
    """The engine, the sessions, who may ask, and what is counted."""

    engine: EngineApi
    config: Config
    metrics: Metrics
    gatekeeper: Gatekeeper
    sessions: Sessions

    @property
    def limits(self) -> LimitsConfig:
        return self.config.limits

    @property
    def draining(self) -> bool:
        """The server is going away and takes nothing new."""
        return self.sessions.draining

    def caller(self, headers: Headers, subprotocols: list[str], address: str) -> Caller:
        """Who asks for a socket or sends a request; raises Refusal, and counts it."""
        try:
            return self.gatekeeper.check(offered_key(headers, subprotocols), address)
        except Refusal:
            self.metrics.refused.labels("auth").inc()
            raise

    def caller_of(self, request: Request) -> Caller:
        """Who sends a plain request; raises Refusal. Client secrets are made for sockets alone."""
        caller = self.caller(request.headers, [], request.client.host if request.client else "")
        if caller.is_secret:
            self.metrics.refused.labels("auth").inc()
            text = "A client secret opens realtime sockets only; use an API key from your own server for this."
            raise Refusal(403, "client_secret_not_allowed", text)
        return caller
