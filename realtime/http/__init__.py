"""The gateway's HTTP port, on Starlette: authentication, WebSocket endpoints, uploads, JSON routes, the web page.

Part of the gateway. Routes translate HTTP into calls of `realtime.serving`, which has the sessions. It imports
`realtime.serving` and the layers below; only `realtime.app` imports it.
"""
