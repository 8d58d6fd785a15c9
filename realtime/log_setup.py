"""The log of a process of the server: its format, and how much it says."""

from __future__ import annotations

import logging

PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"
WITH_PROCESS = "%(asctime)s %(levelname)s %(name)s [%(process)d]: %(message)s"


def set_up_log(level: str, form: str = PLAIN) -> None:
    logging.basicConfig(format=form)
    set_log_level(level)
    # Below that level they log what clients send, keys among it.
    for name in ("websockets", "python_multipart"):
        logging.getLogger(name).setLevel(logging.WARNING)


def set_log_level(level: str) -> None:
    """One of `realtime.config.LOG_LEVELS`."""
    logging.getLogger().setLevel(level.upper())
