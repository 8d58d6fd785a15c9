"""Whisper at full dimensions with random weights, and a script that has it say as much as speech does.

Random weights would talk without end, or not at all. So every pass is computed as it is, and its answers are replaced
before the runner sees them: three tokens for each second of audio, each with the attention of its moment. The token
nearest to the live edge changes from pass to pass, as the last word of a draft does. So a pass that goes on by 0.8 s
has two or three tokens to decode one by one, and one draft token that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from engine.models.whisper import Whisper, WhisperConfig
from engine.runner.windowed.device_windows import DeviceWindows
from engine.runner.windowed.greedy import Answer, Row, Speaker

# mels, vocabulary, audio frames, width, audio heads, audio layers, text tokens, text heads, text layers
SIZES = {
    "tiny.en": WhisperConfig(80, 51_864, 1500, 384, 6, 4, 448, 6, 4),
    "base.en": WhisperConfig(80, 51_864, 1500, 512, 8, 6, 448, 8, 6),
    "small": WhisperConfig(80, 51_865, 1500, 768, 12, 12, 448, 12, 12),
    "large-v3-turbo": WhisperConfig(128, 51_866, 1500, 1280, 20, 32, 448, 20, 4),
    # To try the benchmark itself.
    "toy": WhisperConfig(80, 51_864, 1500, 32, 2, 1, 448, 2, 1),
}
TOKENS_PER_SECOND = 3.0
FIRST_TOKEN, TOKENS = 1_000, 20_000
SURE = -0.05


def random_whisper(size: str, device: torch.device) -> tuple[Whisper, list[bytes]]:
    """Made on the device, with the bytes of its tokens: each is a word."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Whisper(SIZES[size])
    with torch.no_grad():
        for embedding in (model.encoder.positional_embedding, model.decoder.positional_embedding):
            embedding.normal_(0.0, 0.02)
    pieces = [b" w%d" % token for token in range(model.end_token)]
    return model.eval(), pieces + [b""] * (model.config.vocabulary - len(pieces))


class ScriptedSpeaker(Speaker):
    """Computes what another speaker says, and says what the script has."""

    def __init__(self, speaker: Speaker, rows: Sequence[Row], frames_per_token: float, end_token: int) -> None:
        self._speaker = speaker
        self._rows = rows
        self._spacing = frames_per_token
        self._end_token = end_token
        self._begins = [max(0.0, row.progress._said_until) for row in rows]

    def read(self, known: list[list[int]], places: list[tuple[int, int]], kept: list[int]) -> list[Answer]:
        self._speaker.read(known, places, kept)
        self.logits = self._speaker.logits
        starts = [len(text) - len(row.draft) for text, row in zip(known, self._rows, strict=True)]
        return [self._answer(row, column - starts[row] + 1) for row, column in places]

    def say(self, last: list[tuple[int, int]]) -> list[Answer]:
        self._speaker.say(last)
        self.logits = self._speaker.logits
        return [self._answer(index, len(row.tokens)) for index, row in enumerate(self._rows)]

    def _answer(self, index: int, number: int) -> Answer:
        """The new token of this number in a row."""
        row = self._rows[index]
        peak = int(self._begins[index] + (number + 1) * self._spacing)
        if peak >= row.frames:
            return Answer(self._end_token, SURE, row.frames - 1)
        before = row.committed[-1] if row.committed else FIRST_TOKEN
        token = FIRST_TOKEN + (before - FIRST_TOKEN + number + 1) % TOKENS
        # Too close to the edge to be heard well: another word than it will be.
        return Answer(token + TOKENS if peak + self._spacing >= row.frames else token, SURE, peak)


def count_tokens(windows: DeviceWindows, counts: list[int], script_of: Whisper | None) -> None:
    """`counts` gets an entry, how many rows, for each token that a batch decodes one by one. With a model to make a
    script for, live streams say what the script has."""
    decoder = windows._decoder
    passes = decoder._passes

    def counted(rows: list[Row], speaker_for: Callable[[int], Speaker]) -> Iterator[None]:
        def scripted(text: int) -> Speaker:
            speaker = speaker_for(text)
            if script_of is None:
                return speaker
            spacing = 16_000 / script_of.samples_per_frame / TOKENS_PER_SECOND
            return ScriptedSpeaker(speaker, rows, spacing, script_of.end_token)

        for _ in passes(rows, scripted):
            counts.append(len(rows))
            yield

    decoder._passes = counted  # type: ignore[method-assign]
