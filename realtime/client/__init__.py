"""A client of the OpenAI Realtime API, for the commands and the load generator.

It works with any server, and imports nothing else of this repository.
"""
