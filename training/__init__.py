"""Trains Moonshine's encoder to stream, and measures how voices differ; docs/training.md says how.

`python -m training` runs it. It is a program for developers: no part of the server imports it.
"""
