"""The gateway: clients on one side, an engine on the other.

`app` builds a server out of all rooms, `cli` is the command line, `config` and `errors` are shared by every room.
The rooms stand on one another: session, then dialects and metrics, then serving, then http, then `app`, then commands.
"""
