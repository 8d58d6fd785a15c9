"""The one port of the gateway: who may come in, sockets, file uploads, plain answers, the page, the table of paths.

Runs in the gateway, on Starlette. Imports serving and the rooms below it; only `realtime.app` imports it.
"""
