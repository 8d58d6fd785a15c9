"""The control plane of a fleet: which engines and gateways should run where, and what to do about it.

The modules here decide and do no I/O but for the fleet's file and secret; `fleet/keepers` runs processes, and
`fleet/cluster` alone knows Ray. No audio and no token of a session passes through any of it.
"""
