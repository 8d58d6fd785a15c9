"""A client of the OpenAI realtime wire, for commands and the load generator.

Runs outside the gateway, against any server. Imports nothing of ours.
"""
