"""Wire dialects: the message formats of OpenAI's, vLLM's, Deepgram's and Twilio's clients, over one session core.

Part of the gateway, without I/O. It imports `realtime.session` and `realtime.errors`, and nothing of the engine.
"""
