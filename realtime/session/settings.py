"""What a client may choose for its session, as one frozen value. Dialects build it from their own shapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MIN_RATE = 8_000
MAX_RATE = 48_000
G711_RATE = 8_000

# Values of `include` that switch extensions on; anything else in the list is kept and echoed, nothing more.
INCLUDE_LOGPROBS = "item.input_audio_transcription.logprobs"
INCLUDE_WORDS = "item.input_audio_transcription.words"
INCLUDE_ACKS = "input_audio_buffer.acks"
INCLUDE_RESUME = "session.resume"


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """How the client's audio bytes are to be read. `binary` says that binary frames carry audio, not JSON."""

    type: str = "audio/pcm"
    rate: int = 24_000
    binary: bool = False

    @property
    def container(self) -> bool:
        """The bytes are a file format that says its own rate and packet sizes."""
        return self.type in ("audio/webm", "audio/ogg")


@dataclass(frozen=True, slots=True)
class TurnDetection:
    """Server-side turn detection. `semantic` ends a turn by the text and the pause, otherwise by the pause alone."""

    semantic: bool = False
    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    eagerness: str = "auto"
    # Silence that lasts so long is committed as an empty item, and the client is told; None turns that off.
    idle_timeout_ms: int | None = None
    # Sub-fields that change nothing here (create_response, ...) but are echoed as the client sent them.
    extra: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """The effective configuration of a session."""

    format: AudioFormat = field(default_factory=AudioFormat)
    model: str | None = None
    language: str | None = None
    prompt: str = ""
    languages: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    # A name of the OpenAI scale (minimal .. xhigh) or a number of milliseconds.
    delay: str | int | None = None
    noise_reduction: Any = None
    turn_detection: TurnDetection | None = field(default_factory=TurnDetection)
    # The client has said what it wants of turn detection; until then a default may depend on the model's name.
    turns_chosen: bool = False
    include: tuple[str, ...] | None = None
    # OpenAI items are shown with a trimmed start; vLLM promises the raw concatenation.
    trim_start: bool = True
    # Tell the client when no word followed the last one for so long; None leaves that to turns.
    utterance_end_ms: int | None = None
    # Least audio a commit must find in the buffer; vLLM closes empty utterances too.
    minimum_commit_ms: int = 100

    def wants(self, value: str) -> bool:
        return self.include is not None and value in self.include

    def engine_options(self) -> dict[str, str]:
        """Options for the model. The engine refuses what its model does not know; the shell then goes on without."""
        options: dict[str, str] = {}
        if self.language:
            options["language"] = self.language
        if self.prompt:
            options["prompt"] = self.prompt
        return options
