"""Trains Moonshine's encoder to stream, without transcripts; docs/training.md says how.

Nothing that serves imports this.
"""
