"""The only package that imports Ray: the actors of a fleet, and starting, joining and calling a Ray cluster.

Only `tickertape fleet` imports it, and the benchmark of a fleet.
"""
