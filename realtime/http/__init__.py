"""The HTTP port of the gateway, on Starlette: authentication, sockets, uploads, JSON answers, the web page, routes.

Part of the gateway. It imports `realtime.serving` and the layers below; only `realtime.app` imports it.
"""
