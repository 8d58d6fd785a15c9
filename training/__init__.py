"""Trains Moonshine's encoder to stream, without transcripts. See docs/training.md; nothing else imports this."""
