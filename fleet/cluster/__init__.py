"""The thin face to Ray: actors around keepers and the manager, and how a cluster is started, joined and spoken to.

Nothing else of ours imports ray, and this is imported by `tickertape fleet` alone.
"""
