"""The control plane of a fleet: decides which engines and gateways run on which machine. Used by `tickertape fleet`.

`manager.py`, `plan.py` and `state.py` decide; their only I/O is to read the fleet file and the secret and to write
tables of engines. `supervisors.py` starts and watches processes, and only `fleet/cluster` imports Ray. Neither audio
nor text passes through any of them.
"""
