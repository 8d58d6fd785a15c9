"""A client of the OpenAI Realtime API and of the upload routes, for the commands and the load generator.

It is part of the commands and not of the server. It works with any server that has these APIs, and imports nothing else
of this repository.
"""
