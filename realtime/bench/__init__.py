"""A load generator for servers that speak the OpenAI realtime wire. It knows nothing of our engine.

Clients play speech at the pace it was spoken, on an absolute schedule, from processes of their own. Everything a server
says is written down as it comes; every figure is worked out from that record afterwards.
"""
