"""Several gateway processes behind one port (`--workers`): the parent process and the workers that it starts.

The parent owns the port and the engine, counts the sessions of all workers, and serves no clients; each worker is a
gateway. A server with a single gateway process has neither.
"""
