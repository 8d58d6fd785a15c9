"""Speaker enrolment: computes voice embeddings from names and reference recordings, for uploads and for sockets.

Recordings are data URLs. Each is decoded in a process of its own and run through an engine stream with speaker labels;
the voice embedding of its only speaker is taken from the labels. Only the embedding is current.
`realtime/http/file_transcription.py` enrols before it transcribes a file, and `realtime/serving/inbox.py` when a client
sends `known_speakers`.
"""

from __future__ import annotations

import asyncio
import secrets
from binascii import Error as BadBase64
from binascii import a2b_base64
from collections.abc import Sequence
from contextlib import aclosing, suppress
from tempfile import TemporaryFile
from typing import BinaryIO, cast
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from audio.errors import AudioError, TooManyDecoders
from engine import messages
from engine.errors import AtCapacity, EngineError
from engine.options import SPEAKERS, Enrolled, check_names, speakers_text
from realtime.errors import Refusal, storage_refusal
from realtime.serving.engine_api import EngineApi
from realtime.serving.isolated_decoder import decoded_file

REFERENCES = "known_speaker_references"
MIN_SECONDS, MAX_SECONDS = 2.0, 10.0
# The shortest speech in a reference, and the largest share of it that may be of a second voice.
MIN_SPEECH_SECONDS = 1.0
OTHER_SHARE = 0.25

# Characters of base64 that are decoded in one call, because decoding does not let other threads run. A multiple of 4.
PIECE_CHARACTERS = 128 * 1024

# Clients of sockets whose voices are enrolled at the same time, and the longest wait for that.
MAX_SOCKETS_AT_ONCE = 2
MAX_ENROL_SECONDS = 60.0

# A name, and its recording in base64.
Reference = tuple[str, str]


def base64_of(name: str, url: str) -> str:
    """The recording in a data URL; it is not decoded. Raises Refusal."""
    head, comma, encoded = url.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        raise refused(f"The recording of {name!r} must be a data URL: data:audio/wav;base64,...", REFERENCES)
    return encoded


def refused(text: str, param: str) -> Refusal:
    return Refusal(400, "invalid_value", text, param=param)


class SocketEnrolment:
    """Enrols the voices that clients of sockets name; a few clients at a time, so that live sessions go first."""

    def __init__(self, engine: EngineApi) -> None:
        self._engine = engine
        self._places = asyncio.Semaphore(MAX_SOCKETS_AT_ONCE)
        # One for each caller that enrols: a caller has at most one of the places.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def enrol(
        self, caller: str, requested: Sequence[tuple[str, str | None]], known: Sequence[Enrolled]
    ) -> tuple[Enrolled, ...]:
        """The voices for these names and data URLs; a name without one keeps the voice that it has. Raises Refusal."""
        current = dict(known)
        check_speaker_names([name for name, _ in requested], "known_speakers")
        for name, url in requested:
            if url is None and name not in current:
                needed = f"a data URL with {MIN_SECONDS:g} to {MAX_SECONDS:g} s of this voice"
                raise refused(f"{name!r} needs a 'reference', {needed}.", REFERENCES)
        references = [(name, base64_of(name, url)) for name, url in requested if url is not None]
        try:
            turn = self._turns.setdefault(caller, asyncio.Lock())
            async with asyncio.timeout(MAX_ENROL_SECONDS), turn, self._places:
                voices = dict(await enrolled(self._engine, references))
        except TimeoutError:
            text = "The server enrols too many voices at the moment; try again."
            raise Refusal(503, "server_busy", text, retry_after_s=30, kind="server_error") from None
        return tuple((name, voices.get(name) or current[name]) for name, _ in requested)


def check_speaker_names(names: Sequence[str], param: str) -> None:
    """Raises Refusal."""
    try:
        check_names(names)
    except ValueError as error:
        raise refused(f"'{param}': {error}.", param) from None


async def enrolled(engine: EngineApi, references: Sequence[Reference]) -> tuple[Enrolled, ...]:
    """The names and the embeddings of their voices, as `Settings.known_speakers` has them. Raises Refusal."""
    found = []
    for name, encoded in references:
        samples = await _samples(name, encoded, engine.spec.sample_rate)
        labels = await _labels_of(engine, samples)
        found.append((name, _voice(name, labels, engine.spec.sample_rate)))
    return tuple(found)


async def _samples(name: str, encoded: str, rate: int) -> NDArray[np.float32]:
    """The samples of the recording; decoding stops when it is longer than allowed."""
    parts: list[NDArray[np.float32]] = []
    length = 0
    file = await asyncio.to_thread(_write_file, name, encoded)
    try:
        async with aclosing(decoded_file(file)) as steps:
            async for part in steps:
                parts.append(part)
                length += len(part)
                if length > MAX_SECONDS * rate:
                    break
    except TooManyDecoders as error:
        raise Refusal(503, error.code, error.client_message, retry_after_s=60, kind="server_error") from error
    except AudioError as error:
        raise refused(f"The recording of {name!r} cannot be read: {error.client_message}", REFERENCES) from error
    finally:
        file.close()
    if not MIN_SECONDS * rate <= length <= MAX_SECONDS * rate:
        known = f"lasts {_seconds(length, rate)} s" if length <= MAX_SECONDS * rate else "is longer"
        text = f"The recording of {name!r} {known}; send {MIN_SECONDS:g} to {MAX_SECONDS:g} seconds of one voice."
        raise refused(text, REFERENCES)
    return np.concatenate(parts)


def _seconds(samples: int, rate: int) -> str:
    """A length in seconds, rounded down: one that is too short does not read as long enough."""
    return f"{samples * 10 // rate / 10:.1f}"


def _write_file(name: str, encoded: str) -> BinaryIO:
    """A temporary file with the recording, because decoders read a real file. Raises Refusal."""
    try:
        file = TemporaryFile()
        try:
            for start in range(0, len(encoded), PIECE_CHARACTERS):
                file.write(
                    _decode_base64(encoded[start : start + PIECE_CHARACTERS], start + PIECE_CHARACTERS >= len(encoded))
                )
            file.seek(0)
        except BaseException:
            with suppress(OSError):  # on a full disk closing writes once more, and fails
                file.close()
            raise
    except ValueError as error:
        raise refused(f"The recording of {name!r} is not valid base64.", REFERENCES) from error
    except OSError as error:
        raise storage_refusal(error) from error
    return cast(BinaryIO, file)


def _decode_base64(piece: str, last: bool) -> bytes:
    """A piece of base64; only the last one may end with padding. Raises ValueError."""
    data = a2b_base64(piece, strict_mode=True)
    if not last and len(data) * 4 != len(piece) * 3:
        raise BadBase64("padding before the end")
    return data


async def _labels_of(engine: EngineApi, samples: NDArray[np.float32]) -> messages.Labels:
    """All labels of a recording, with their last state."""
    name = f"voice_{secrets.token_hex(8)}"
    try:
        stream = await engine.open(name, live=False, options={SPEAKERS: speakers_text()})
        labels = messages.Labels(name, [])
        try:
            await stream.feed(samples)
            await stream.finish()
            async for output in stream:
                if isinstance(output, messages.Labels):
                    labels.decided += output.decided
                    labels.state = output.state or labels.state
                elif isinstance(output, messages.Failed | messages.Dead | messages.Refused):
                    raise Refusal(500, "transcription_failed", output.message, kind="server_error")
        finally:
            await stream.abort()
    except AtCapacity as error:
        text = "The server is at capacity; try again."
        raise Refusal(503, "server_busy", text, retry_after_s=5, kind="server_error") from error
    except EngineError as error:
        text = "The engine is not available; try again."
        raise Refusal(503, "engine_unavailable", text, None, 5, "server_error") from error
    return labels


def _voice(name: str, labels: messages.Labels, rate: int) -> bytes:
    """The embedding of the only voice of a recording, as `engine.options.Enrolled` has it. Raises Refusal."""
    samples_of: dict[int, int] = {}
    for start, end, speaker, _ in labels.decided:
        samples_of[speaker] = samples_of.get(speaker, 0) + end - start
    spoken = sum(samples_of.values())
    if spoken < MIN_SPEECH_SECONDS * rate or labels.state is None:
        has = f"The recording of {name!r} has {_seconds(spoken, rate)} s of speech"
        raise refused(f"{has}; at least {MIN_SPEECH_SECONDS:g} s is needed.", REFERENCES)
    # A voice that is not in the state was merged with another.
    voices = sorted(labels.state["labels"]["voices"], key=lambda voice: -samples_of.get(voice["number"], 0))
    if len(voices) > 1 and samples_of.get(voices[1]["number"], 0) > OTHER_SHARE * spoken:
        text = f"The recording of {name!r} has more than one voice; send one in which only they speak."
        raise refused(text, REFERENCES)
    total = np.frombuffer(voices[0]["total"], "<i4").astype(np.float64)
    weight = max(1, int(voices[0]["weight"]))
    return np.rint(total / weight).astype("<i2").tobytes()
