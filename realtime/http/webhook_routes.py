"""The route that tells the holder of an API key which webhooks its sessions have, and the secret that signs them."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from realtime.errors import Refusal
from realtime.http.authentication import Context
from realtime.http.openapi import JSON, Operation, described
from realtime.serving.webhooks import Webhooks

WEBHOOKS = "/v1/webhooks"


class WebhooksOfKey(Struct, forbid_unknown_fields=True):
    """The URLs that get the finals of the key's sessions, and the secret that signs them."""

    object: Literal["webhooks"]
    on_final: list[str]
    per_session: bool
    signing_secret: str


class WebhookRoutes:
    """Answers requests about webhooks. Off unless the operator has set URLs, or allows clients to name them."""

    def __init__(self, context: Context, webhooks: Webhooks) -> None:
        self._context = context
        self._webhooks = webhooks

    @described(
        Operation(
            "The webhooks of the key",
            "Webhooks",
            {200: {JSON: WebhooksOfKey}},
            refusals=({403: ("webhooks_off", "webhook_secret_not_told")},),
        )
    )
    async def describe(self, request: Request) -> Response:
        caller = self._context.caller_of(request)
        settings = self._context.config.webhooks
        account = self._webhooks.account_of(caller.name)
        if account is None or not (settings.per_session or account.urls):
            text = "Webhooks are off for this key; the server's operator can set webhooks.on_final or per_session."
            raise Refusal(403, "webhooks_off", text)
        if not self._context.authenticator.asks_for_keys:
            # Any client that reaches the server could sign as the server.
            text = "A server without keys does not tell its signing secret; docs/webhooks.md says how to compute it."
            raise Refusal(403, "webhook_secret_not_told", text)
        return JSONResponse(
            {
                "object": "webhooks",
                "on_final": list(account.urls),
                "per_session": settings.per_session,
                "signing_secret": self._webhooks.shown_secret(caller.name),
            },
            headers={"Cache-Control": "no-store"},
        )
