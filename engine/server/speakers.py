"""Speaker labels of all streams (`SpeakerTracks`): pieces of speech get embeddings, and the embeddings get labels.

A part of the engine loop, or of the background process (`engine/server/background_process.py`). It has a `SpeakerTrack`
for each stream that asks for labels, and delays the end of a stream until its last labels are known. A track keeps the
audio until the speech detector has processed it, cuts it into pieces, has their embeddings computed on other threads
(`engine/runner/background.py`), and decides the labels from these, in the order of the audio. Pieces and labels of one
stream are in `engine/server/speaker_labels.py`.

Labels depend on the audio alone, unless the engine is overloaded: then the oldest pieces of live streams get no label
(`MAX_WAITING`). When labels are sent depends on how fast embeddings are computed.

A track that was restored from a saved state (`resume`) first gets again the audio that the state needs, without cutting
it into new pieces (`replay`, `_take_if_new`). Then it computes the embeddings that were still missing, and continues
with new audio.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import BadOption, reading_state
from engine.messages import Closed, Item, Labels, LabelSpan, Output, Saved, Speech
from engine.options import SPEAKERS, read_speakers
from engine.runner.base import Embedder
from engine.server.recent_audio import RecentAudio
from engine.server.speaker_labels import (
    FRAME_SAMPLES,
    SAMPLE_RATE,
    Embedding,
    Label,
    Piece,
    PieceCutter,
    Samples,
    SpeakerLabels,
    piece_of,
    rounded,
    shipped_model,
)
from engine.spec import ModelSpec

# Pieces of a live stream that may wait for their embedding: about 16 s of speech. With more, the engine is overloaded,
# and the oldest piece gets no label.
MAX_WAITING = 32
# With more waiting pieces than this, an upload is sent audio more slowly.
MAX_UPLOAD_WAITING = 16
# Interval, in samples, at which labels contain the state from which another stream can continue.
STATE_EVERY = 2 * SAMPLE_RATE
# Interval, in samples, at which a stream without new labels reports `Labels.settled`.
SETTLED_EVERY = SAMPLE_RATE


@dataclass(slots=True)
class _Waiting:
    """A piece whose embedding is not computed yet."""

    piece: Piece
    embedding: Future[NDArray[np.float32]]


class SpeakerTrack:
    """The labels of one stream. `embed` computes the embedding of a piece elsewhere."""

    def __init__(
        self, embed: Callable[[Samples], Future[NDArray[np.float32]]], enrolled: Sequence[tuple[str, Embedding]] = ()
    ) -> None:
        self._embed = embed
        self._cutter = PieceCutter()
        self._labels = SpeakerLabels()
        for name, embedding in enrolled:
            self._labels.enrol(name, [embedding])
        # Audio that the detector has not judged, or that a saved state may need.
        self._audio = RecentAudio()
        self._waiting: deque[_Waiting] = deque()
        # The state to restore, and the audio collected for it so far: the samples from `_restored_from` on.
        self._restoring: tuple[Saved, list[Samples]] | None = None
        self._restored_from = 0
        # No more audio comes.
        self._ended = False
        # The track was restored, and the speech that it received since then has no embeddings yet.
        self._is_behind = False
        # Values of `Labels.is_behind` and `Labels.settled` that were sent last.
        self._sent_is_behind = False
        self._sent_settled = 0
        # The sample at which a state was sent last.
        self._state_at = -STATE_EVERY
        # Pieces without a label, because the engine was overloaded.
        self.dropped = 0

    # Audio in

    def add_audio(self, items: Iterable[Item], spec: ModelSpec) -> None:
        """Keep new audio until the detector has judged it."""
        self._audio.add(items, spec)

    def add_part(self, sample: int, position: int, audio: Samples | int) -> None:
        """The same for audio that is not in an item; a number of samples is silence."""
        self._audio.add_part(sample, position, audio)

    def add_frames(self, speech: Speech, is_speech: Sequence[bool]) -> None:
        """The next frames that the detector has judged, and which of them it counts as speech."""
        if speech.frame_samples != FRAME_SAMPLES:
            # A long silence that was not computed.
            for _ in speech.probabilities:
                if self._take_if_new(speech.sample + speech.frame_samples, None):
                    self._submit(self._cutter.pass_silence(speech.frame_samples))
        else:
            frames = self._audio.cut(speech.sample, speech.end).reshape(-1, FRAME_SAMPLES)
            new = 0
            while new < len(frames) and not self._take_if_new(speech.sample + new * FRAME_SAMPLES, frames[new]):
                new += 1
            self._submit(self._cutter.feed(frames[new:], is_speech[new:]))
        self._audio.drop_before(self.needs_from if self._restoring is None else speech.end)

    def end(self) -> None:
        """No more audio comes: the last run of speech is a piece, and everything is decided."""
        if not self._ended:
            self._finish_restoring(self._cutter.sample)
            self._submit(self._cutter.end())
            self._ended = True

    # Labels out

    @property
    def waiting(self) -> int:
        """Pieces without an embedding."""
        return len(self._waiting)

    @property
    def upload_waits_from(self) -> int | None:
        """The first sample of the oldest piece without an embedding, if more wait than an upload should have."""
        return self._waiting[0].piece.start if len(self._waiting) > MAX_UPLOAD_WAITING else None

    def advance(self, stream: str) -> Labels | None:
        """The labels that can be decided by now; None if nothing is new. An error of the computation of an embedding is
        raised here."""
        decided: list[Label] = []
        has_embeddings = False
        while self._waiting and self._waiting[0].embedding.done():
            waiting = self._waiting.popleft()
            decided += self._labels.push(waiting.piece, rounded(waiting.embedding.result()))
            has_embeddings = True
        if not self._waiting:
            decided += self._labels.end() if self._ended else self._labels.advance(self._cutter.sample)
            self._is_behind = self._is_behind and not (has_embeddings or self._ended)
        settled = self._settled
        is_new = bool(decided) or has_embeddings
        if not is_new and settled - self._sent_settled < SETTLED_EVERY and self._is_behind == self._sent_is_behind:
            return None
        self._sent_settled, self._sent_is_behind = settled, self._is_behind
        guess = self._labels.best_guess() if self._labels.has_pending else []
        state: Saved | None = None
        if is_new and (self._ended or self._cutter.sample - self._state_at >= STATE_EVERY):
            self._state_at = self._cutter.sample
            state = self.save()
        return Labels(stream, spans(decided), spans(guess), state, settled, self._is_behind)

    @property
    def _settled(self) -> int:
        """All labels that begin before this sample are decided."""
        if self._restoring is not None:
            return 0
        starts = [self._cutter.needs_from, *(one.piece.start for one in self._waiting)]
        pending = self._labels.pending_from
        return min(starts if pending is None else [pending, *starts])

    # Saved and restored

    @property
    def needs_from(self) -> int:
        """The first sample whose audio `resume` needs for a state that is saved now."""
        return min([self._cutter.needs_from, *(one.piece.starts[0] for one in self._waiting)])

    @property
    def needs_position(self) -> int | None:
        """The position of the item with that sample; None if it is not known."""
        if self._restoring is None:
            self._audio.drop_before(self.needs_from)
        return self._audio.position

    def save(self) -> Saved:
        """The state as plain data, without audio."""
        if self._restoring is not None:
            return self._restoring[0]
        waiting = [asdict(one.piece) for one in self._waiting]
        return {"cutter": self._cutter.save(), "labels": self._labels.save(), "waiting": waiting}

    def resume(self, saved: Saved, earlier: int = 0) -> None:
        """Continue from a saved state, whose sample 0 lies `earlier` samples before the stream's. Audio before the
        state's last sample is sent again and gets no label a second time."""
        saved = _shifted(saved, earlier)
        self._labels = SpeakerLabels.resumed(saved["labels"])
        pieces = (start for piece in saved["waiting"] for start in piece["starts"][:1])
        self._restored_from = min([saved["cutter"]["sample"], *saved["cutter"]["starts"], *pieces])
        self._restoring = saved, []
        self._cutter.sample = saved["cutter"]["sample"]
        self._is_behind = True

    def replay(self, items: Iterable[Item], spec: ModelSpec) -> None:
        """Audio that the restored state needs and the detector does not get again, followed by new audio."""
        assert self._restoring is not None
        end = self._restoring[0]["cutter"]["sample"]
        self.add_audio(items, spec)
        self._restored_from = max(self._restored_from, end if self._audio.position is None else self._audio.start)
        self._restoring[1].append(self._audio.cut(self._restored_from, end))
        self._finish_restoring(end)

    def _take_if_new(self, start: int, frame: Samples | None) -> bool:
        """Returns whether a frame is new. A frame that the restored state has seen is only kept, for its pieces; the
        first new one ends the restoring. `frame`: None for a long silence."""
        if self._restoring is None:
            return True
        saved, audio = self._restoring
        if start < saved["cutter"]["sample"]:
            if frame is None:
                audio.clear()  # no piece has frames from before and after a long silence
            elif start + FRAME_SAMPLES > self._restored_from:
                if not audio:
                    self._restored_from = start
                audio.append(frame.copy())
            return False
        self._finish_restoring(start)
        return True

    def _finish_restoring(self, sample: int) -> None:
        if self._restoring is None:
            return
        (saved, parts), self._restoring = self._restoring, None
        # The end of the last frame may be missing.
        audio = np.concatenate([*parts, np.zeros(FRAME_SAMPLES, np.float32)])
        first, end = self._restored_from, self._restored_from + len(audio) - FRAME_SAMPLES

        def cut(starts: Sequence[int]) -> Samples | None:
            """The audio of frames; None if some of it has not come again."""
            if any(not first <= start < end for start in starts):
                return None
            return np.concatenate([audio[start - first : start - first + FRAME_SAMPLES] for start in starts])

        for fields in saved["waiting"]:
            piece = piece_of(fields)
            sound = cut(piece.starts)
            if sound is not None:
                self._submit([(piece, self._cutter.filled(sound))])
        cutter = saved["cutter"]
        starts = [start for start in cutter["starts"] if first <= start < end]
        if starts and end + FRAME_SAMPLES >= cutter["sample"]:
            cutter = {**cutter, "starts": starts}
        else:
            # The frames of the last run are missing: the next frame begins a run.
            cutter = {**cutter, "starts": [], "count": 0, "cut": 0}
        self._cutter.resume(cutter, audio[min([*cutter["starts"], end]) - first :])
        self._cutter.sample = max(sample, saved["cutter"]["sample"])

    def _submit(self, pieces: Iterable[tuple[Piece, Samples]]) -> None:
        for piece, audio in pieces:
            self._waiting.append(_Waiting(piece, self._embed(audio)))

    def drop_oldest(self) -> None:
        """The engine is overloaded: the oldest piece gets no label."""
        self._waiting.popleft().embedding.cancel()
        self.dropped += 1


def spans(labels: Iterable[Label]) -> list[LabelSpan]:
    """Labels in the form in which they are sent."""
    return [(label.start, label.end, label.speaker, label.confidence) for label in labels]


def _shifted(saved: Saved, earlier: int) -> Saved:
    """A saved state whose samples are counted from a later sample."""
    if not earlier:
        return saved
    cutter, labels = saved["cutter"], saved["labels"]

    def piece(fields: Mapping[str, Any]) -> Saved:
        moved = {name: fields[name] - earlier for name in ("start", "end", "middle", "cut_at")}
        return {**fields, **moved, "starts": starts(fields["starts"])}

    def starts(given: Sequence[int]) -> list[int]:
        return [start - earlier for start in given]

    return {
        "cutter": {**cutter, "sample": cutter["sample"] - earlier, "starts": starts(cutter["starts"])},
        "labels": {
            **labels,
            "voices": [{**voice, "heard": voice["heard"] - earlier} for voice in labels["voices"]],
            "pending": [{**one, "piece": piece(one["piece"])} for one in labels["pending"]],
            "labelled": labels["labelled"] - earlier,
        },
        "waiting": [piece(one) for one in saved["waiting"]],
    }


class SpeakerTracks:
    """The tracks of all streams with labels. `end_failed` ends one stream with an error."""

    def __init__(
        self, spec: ModelSpec, embedder: Embedder | None, end_failed: Callable[[str, Exception], None]
    ) -> None:
        self._spec = spec
        self._embedder = embedder
        self._end_failed = end_failed
        self._tracks: dict[str, SpeakerTrack] = {}
        # Ends of streams that wait for their last labels.
        self._delayed_ends: dict[str, Closed] = {}
        # Live streams, whose pieces may be dropped if they wait too long.
        self._live: set[str] = set()
        # Streams that may have new labels; other threads add those whose embeddings they have computed.
        self._changed: deque[str] = deque()

    def check(self, stream: str, options: Mapping[str, str]) -> None:
        """Raises BadOption."""
        if SPEAKERS not in options:
            return
        if self._embedder is None:
            raise BadOption(stream, "this engine has no speaker labels; run `tickertape pull speakers` and restart it")
        try:
            read_speakers(options[SPEAKERS])
        except ValueError as error:
            raise BadOption(stream, str(error)) from None

    def open(self, name: str, options: Mapping[str, str], live: bool) -> None:
        if SPEAKERS in options and self._embedder is not None:
            voices = read_speakers(options[SPEAKERS])
            # Enrolled vectors are stored without the mean of all voices.
            mean = shipped_model().mean
            enrolled = [(voice, np.frombuffer(vector, "<i2").astype(np.int64) + mean) for voice, vector in voices]
            embedder = self._embedder

            def embed(audio: Samples) -> Future[NDArray[np.float32]]:
                embedding = embedder.submit(audio)
                embedding.add_done_callback(lambda _: self._changed.append(name))
                return embedding

            self._tracks[name] = SpeakerTrack(embed, enrolled)
            # On a GPU an engine that was not warmed up waits here: graphs cannot be recorded beside steps.
            embedder.warm_up()
            embedder.prepare()
            if live:
                self._live.add(name)

    def resume(self, name: str, saved: Saved, earlier: int = 0) -> None:
        """Continue from a saved state, as `SpeakerTrack.resume` does. Raises BadItem."""
        if name in self._tracks:
            with reading_state(name, "speaker labels"):
                self._tracks[name].resume(saved, earlier)
            self._changed.append(name)

    def replay(self, name: str, items: Sequence[Item]) -> None:
        """The audio before a restored state, if the detector does not judge that again."""
        if name in self._tracks:
            with reading_state(name, "speaker labels"):
                self._tracks[name].replay(items, self._spec)

    def save(self, name: str) -> tuple[dict[str, Saved], int | None]:
        """The state of a stream, and the position from which on its audio is needed."""
        track = self._tracks.get(name)
        return ({}, None) if track is None else ({"speakers": track.save()}, track.needs_position)

    def close(self, name: str) -> Closed | None:
        """Drop a stream. Returns its end (`Closed`), if that was delayed."""
        self._tracks.pop(name, None)
        self._live.discard(name)
        return self._delayed_ends.pop(name, None)

    def add_audio(self, name: str, items: Iterable[Item]) -> None:
        track = self._tracks.get(name)
        if track is not None:
            track.add_audio(items, self._spec)

    def add_part(self, name: str, sample: int, position: int, audio: Samples | int) -> None:
        """Audio from this sample and position on; a number of samples is silence."""
        track = self._tracks.get(name)
        if track is not None:
            track.add_part(sample, position, audio)

    def has_labels(self, name: str) -> bool:
        """Whether the stream has asked for labels."""
        return name in self._tracks

    def add_frames(self, speech: Speech, is_speech: Sequence[bool]) -> None:
        """The next frames that the detector has judged, and which of them it counts as speech."""
        track = self._tracks.get(speech.stream)
        if track is not None:
            track.add_frames(speech, is_speech)
            self._changed.append(speech.stream)

    @property
    def has_work(self) -> bool:
        """Whether a step may bring labels."""
        return bool(self._changed)

    @property
    def is_waiting(self) -> bool:
        """Whether embeddings are being computed."""
        return any(track.waiting for track in self._tracks.values())

    def upload_waits_from(self, name: str) -> int | None:
        """The sample from which on an upload waits for embeddings. None: a live stream, no labels, or few pieces that
        wait."""
        track = self._tracks.get(name)
        return None if track is None or name in self._live else track.upload_waits_from

    def add_labels(self, outputs: list[Output]) -> None:
        """Add the labels that can be decided by now to the outputs of a step, and delay ends that wait for labels."""
        if not self._tracks:
            return
        for output in [one for one in outputs if isinstance(one, Closed) and one.stream in self._tracks]:
            outputs.remove(output)
            self._delayed_ends[output.stream] = output
            try:
                self._tracks[output.stream].end()
            except Exception as error:
                self._end_failed(output.stream, error)
            self._changed.append(output.stream)
        for name in dict.fromkeys(self._changed.popleft() for _ in range(len(self._changed))):
            track = self._tracks.get(name)
            if track is None:
                continue
            try:
                while name in self._live and track.waiting > MAX_WAITING:
                    track.drop_oldest()
                labels = track.advance(name)
            except Exception as error:
                self._end_failed(name, error)
                continue
            if labels is not None:
                outputs.append(labels)
            if name in self._delayed_ends and not track.waiting:
                outputs.append(self._delayed_ends.pop(name))
