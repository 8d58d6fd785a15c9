"""The only package that imports Ray: actors for keepers and the manager, and starting, joining and calling a cluster.

Only `tickertape fleet` imports it.
"""
