"""How an engine is to be built, and what gateway and engine must agree on: plain data for both processes."""

from __future__ import annotations

from dataclasses import dataclass, fields

DEFAULT_MODEL = "moonshine-base-streaming"
# A stream counts as speaking for so long after it came, and after speech was last heard in it. Long enough for the
# pauses of a conversation: a speaker who falls silent for a moment finds the room still there.
COUNTED_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Travels to the process that runs the engine; weights and torch are loaded there, from what it says."""

    # A name that `tickertape pull` knows, or the path of a checkpoint.
    model: str = DEFAULT_MODEL
    # auto, cpu, cuda or cuda:N.
    device: str = "auto"
    # Streams at once; 0 takes what the device allows.
    max_streams: int = 0
    # CPU threads for the model, 0: as many as there are cores. A windowed model reads so many streams side by side.
    threads: int = 0
    # Frame-synchronous models: tokens the decoder looks back on, 8-bit keys and values, the guard against blank ruts.
    decoder_window: int = 1024
    kv_8bit: bool = False
    blank_guard: bool = True
    # Engines that share the device: each plans with its part of the memory.
    share_of: int = 1
    # Frame-synchronous models: so many seconds of silence are computed, and what follows until speech is not; 0: all.
    cut_silence_s: float = 3.0

    @classmethod
    def from_settings(cls, model: str, settings: object) -> EngineConfig:
        """A model and settings from an object that has them under the same names, such as a part of a configuration."""
        return cls(model, **{name: getattr(settings, name) for name in cls.setting_names()})

    @classmethod
    def setting_names(cls) -> list[str]:
        """What a configuration says: not the model itself, nor what follows from the others."""
        return [field.name for field in fields(cls) if field.name not in ("model", "share_of")]
