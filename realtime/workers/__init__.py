"""Several gateway processes behind one port: a parent that starts, counts and replaces them, and the workers.

Runs in the parent and in each worker; a server that is one process has no part of it.
"""
