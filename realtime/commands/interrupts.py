"""Ctrl-C while sound comes in: the first ends the sound, and what was heard is finished; the second stops at once."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

from realtime.commands.terminal import note


class EndOnInterrupt:
    """Use as a context; `ended` says that Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.ended = False
        self._before: Any = signal.SIG_DFL

    def __enter__(self) -> EndOnInterrupt:
        self._before = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self.ended = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        note("ending; Ctrl-C again stops at once")
