"""Several gateway processes behind one port: a parent that starts and replaces them, and the workers.

Runs in the parent and in each worker; a server with a single process does not use it.
"""
