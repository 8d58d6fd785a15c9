"""Keepers run beside what they keep, on its node: one `tickertape engine` or one `tickertape serve` each.

They are plain classes with real processes and no Ray. A process outlives its keeper; the next keeper of the same name
finds it by the record on the node's disk and goes on with it.
"""
