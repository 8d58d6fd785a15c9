"""Process supervisors (keepers): each starts, watches, restarts and drains one `tickertape engine` or `tickertape
serve` process on its node.

They do not use Ray; `fleet/cluster/actors.py` runs them. A process outlives its keeper: the next keeper of the same
name finds the process by the record on the node's disk and continues with it.
"""
