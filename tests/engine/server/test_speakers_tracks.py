"""Labels of a stream do not depend on how its audio arrives, when embeddings are ready, or where an engine dies."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from zlib import crc32

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from engine.errors import BadItem, BadOption
from engine.messages import Closed, Item, Labels, LabelSpan, Output, Saved, Speech
from engine.options import EMBEDDING_SIZE, PART_HOP_SAMPLES, PART_SAMPLES, SPEAKERS, speakers_text
from engine.runner.base import Embedder
from engine.server.speaker_labels import FRAME_SAMPLES, SAMPLE_RATE, Samples
from engine.server.speakers import MAX_UPLOAD_WAITING, MAX_WAITING, SpeakerTrack, SpeakerTracks
from engine.server.speech_track import voiced_frames
from engine.spec import ModelSpec

SPEC = ModelSpec(name="double", sample_rate=SAMPLE_RATE, samples_per_position=1280)
POSITION = SPEC.samples_per_position
VECTOR = np.ones(EMBEDDING_SIZE, "<i2").tobytes()
ON = {SPEAKERS: speakers_text()}


class Embeddings(Embedder):
    """The voice is in the loudness of a piece, and every sample of it changes the embedding a little. Embeddings are
    ready when `compute` is called."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Samples, Future[NDArray[np.float32]]]] = []
        self.fails: Exception | None = None
        self.computed = 0

    def submit(self, audio: Samples) -> Future[NDArray[np.float32]]:
        future: Future[NDArray[np.float32]] = Future()
        self.waiting.append((audio, future))
        return future

    def compute(self, count: int | None = None) -> None:
        count = len(self.waiting) if count is None else count
        due, self.waiting = self.waiting[:count], self.waiting[count:]
        for audio, future in due:
            if not future.set_running_or_notify_cancel():
                continue
            self.computed += 1
            if self.fails is not None:
                future.set_exception(self.fails)
            else:
                future.set_result(embeddings_of(audio))


def embeddings_of(audio: Samples) -> NDArray[np.float32]:
    """Those of a piece and of its parts."""
    ends = range(PART_SAMPLES, len(audio) + 1, PART_HOP_SAMPLES)
    return np.stack([embedding_of(audio), *(embedding_of(audio[end - PART_SAMPLES : end]) for end in ends)])


def embedding_of(audio: Samples) -> NDArray[np.float32]:
    voice = round(float(np.abs(audio).mean()) * 10)
    centre = np.random.default_rng(1000 + voice).standard_normal(EMBEDDING_SIZE)
    off = np.random.default_rng(crc32(audio.tobytes())).standard_normal(EMBEDDING_SIZE)
    vector = centre / np.linalg.norm(centre) + 0.5 * off / np.linalg.norm(off)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def conversation(turns: Sequence[tuple[int, int]]) -> tuple[Samples, list[float]]:
    """Audio and speech probabilities of turns (voice, frames), each followed by half a second of silence."""
    random = np.random.default_rng(len(turns))
    audio, probabilities = [], []
    for voice, frames in turns:
        said = 0.1 * voice + 0.01 * random.standard_normal(frames * FRAME_SAMPLES)
        audio += [said, 0.001 * random.standard_normal(16 * FRAME_SAMPLES)]
        probabilities += [0.9] * frames + [0.1] * 16
    return np.concatenate(audio).astype(np.float32), probabilities


def heard(speech: Speech) -> tuple[Speech, list[bool]]:
    """Frames as a track is told of them."""
    return speech, voiced_frames(speech.probabilities)


AUDIO, PROBABILITIES = conversation([(1, 70), (3, 60), (1, 9), (3, 50), (1, 90), (2, 60), (3, 40)])


class Stream:
    """A stream with labels as the loop runs it: items in, the detector's frames, labels out. `kept` is what its gateway
    keeps for the loss of an engine."""

    def __init__(self, embeddings: Embeddings | None = None) -> None:
        self.embeddings = embeddings or Embeddings()
        self.track = SpeakerTrack(self.embeddings.submit)
        self.kept: list[Item] = []
        self.sent = 0
        self.judged = 0
        self.labels: list[LabelSpan] = []

    def feed(self, positions: int) -> None:
        """The next audio, and the frames that it completes."""
        for _ in range(positions):
            own = AUDIO[self.sent : self.sent + POSITION]
            if not len(own):
                break
            item = Item(self.sent // POSITION, 1, self.sent, b"k", own, samples=len(own))
            self.kept.append(item)
            self.track.add_audio([item], SPEC)
            self.sent += len(own)
        self.judge()

    def judge(self) -> None:
        until = self.sent // FRAME_SAMPLES
        probabilities = PROBABILITIES[self.judged : until]
        self.track.add_frames(*heard(Speech("s", self.judged * FRAME_SAMPLES, FRAME_SAMPLES, probabilities)))
        self.judged = until

    def take(self) -> None:
        labels = self.track.advance("s")
        if labels is not None:
            until = self.labels[-1][1] if self.labels else 0
            self.labels += [span for span in labels.decided if span[0] >= until]

    def finish(self) -> list[LabelSpan]:
        self.track.end()
        self.embeddings.compute()
        self.take()
        return self.labels

    def die(self) -> None:
        """Another engine goes on from the state now, as for a windowed model: the detector goes on where it was."""
        position = self.track.needs_position
        state = reread(self.track.save())
        needed = [item for item in self.kept if position is None or item.offset >= position]
        self.embeddings = Embeddings()
        self.track = SpeakerTrack(self.embeddings.submit)
        self.track.resume(state)
        self.track.replay(needed, SPEC)

    def die_and_repeat(self, state: Saved, first: int) -> None:
        """Another engine hears the audio from position `first` on again, and counts from there."""
        self.embeddings = Embeddings()
        self.track = SpeakerTrack(self.embeddings.submit)
        self.track.resume(reread(state), first * POSITION)
        for item in self.kept[first:]:
            moved = Item(
                item.offset - first, 1, item.sample - first * POSITION, b"k", item.payload, samples=item.samples
            )
            self.track.add_audio([moved], SPEC)
        began = first * POSITION // FRAME_SAMPLES
        assert first * POSITION % FRAME_SAMPLES == 0
        self.track.add_frames(*heard(Speech("s", 0, FRAME_SAMPLES, PROBABILITIES[began : self.judged])))


def reread(state: Saved) -> Saved:
    """As it comes back from another process."""
    again: Saved = msgspec.msgpack.decode(msgspec.msgpack.encode(state))
    return again


def expected() -> list[LabelSpan]:
    stream = Stream()
    while stream.sent < len(AUDIO):
        stream.feed(4)
        stream.embeddings.compute()
        stream.take()
    return stream.finish()


EXPECTED = expected()


def test_each_voice_has_one_number() -> None:
    assert [speaker for start, end, speaker, sure in EXPECTED if end - start > 0][:3] == [0, 0, 0]
    assert {speaker for _, _, speaker, _ in EXPECTED} == {0, 1, 2}


@pytest.mark.parametrize("seed", range(12))
def test_labels_are_the_same_for_any_chunks_and_delays_and_wherever_engines_die(seed: int) -> None:
    random, stream = np.random.default_rng(seed), Stream()
    while stream.sent < len(AUDIO):
        stream.feed(int(random.integers(1, 40)))
        stream.embeddings.compute(int(random.integers(0, 8)))
        stream.take()
        if random.integers(0, 4) == 0:
            stream.die()
    assert stream.finish() == EXPECTED


@pytest.mark.parametrize("seed", range(12))
def test_a_stream_that_is_replayed_goes_on_with_the_same_labels(seed: int) -> None:
    """As for a frame-synchronous model: the new engine hears the last part again, and counts from its beginning."""
    random, stream = np.random.default_rng(seed), Stream()
    dies_at, state = int(random.integers(60, len(AUDIO) // POSITION - 20)), Saved()
    while not state or stream.sent < dies_at * POSITION:
        stream.feed(3)
        stream.embeddings.compute(int(random.integers(0, 3)))
        stream.take()
        if random.integers(0, 3) == 0:
            state = stream.track.save()
    before, pieces = stream.labels, [piece["starts"][0] for piece in state["waiting"]]
    # At least what the state needs, from a position at which a frame begins.
    needed = min([state["cutter"]["sample"], *state["cutter"]["starts"], *pieces])
    first = int(random.integers(0, needed // POSITION // 2 + 1)) * 2
    stream.die_and_repeat(state, first)
    shift = first * POSITION
    rest = AUDIO[stream.sent :]
    stream.track.add_audio([Item(0, 1, stream.sent - shift, b"k", rest, samples=len(rest))], SPEC)
    unjudged = PROBABILITIES[stream.judged :]
    stream.track.add_frames(*heard(Speech("s", stream.judged * FRAME_SAMPLES - shift, FRAME_SAMPLES, unjudged)))
    stream.track.end()
    stream.embeddings.compute()
    labels = stream.track.advance("s")
    assert labels is not None
    until = before[-1][1] if before else 0
    after = [(start + shift, end + shift, speaker, sure) for start, end, speaker, sure in labels.decided]
    assert before + [span for span in after if span[0] >= until] == EXPECTED


@pytest.mark.parametrize("positions", [1, 7, 40])
@pytest.mark.parametrize("delay", [0, 3])
def test_no_label_begins_before_the_sample_up_to_which_all_were_said_to_be_decided(positions: int, delay: int) -> None:
    stream, settled, told = Stream(), 0, list[int]()
    while stream.sent < len(AUDIO):
        stream.feed(positions)
        stream.embeddings.compute(max(0, len(stream.embeddings.waiting) - delay))
        labels = stream.track.advance("s")
        if labels is not None:
            assert all(start >= settled for start, _, _, _ in labels.decided)
            assert labels.settled >= settled
            settled = labels.settled
            told.append(settled)
    assert told[-1] > len(AUDIO) - 6 * SAMPLE_RATE


def test_a_restored_stream_says_that_its_labels_are_behind_until_its_speech_has_embeddings() -> None:
    stream = Stream()
    while stream.sent < len(AUDIO) // 2:
        stream.feed(4)
        stream.embeddings.compute()
        told = stream.track.advance("s")
        assert told is None or not told.is_behind
    stream.die()
    told = stream.track.advance("s")
    assert told is not None and told.is_behind and not told.decided
    assert stream.track.advance("s") is None, "it is said once"
    stream.feed(40)
    stream.embeddings.compute(1)
    told = stream.track.advance("s")
    assert stream.embeddings.waiting and told is not None and told.is_behind
    stream.embeddings.compute()
    told = stream.track.advance("s")
    assert told is not None and not told.is_behind


@pytest.mark.parametrize("missing", [0, 1, 5, 40])
@pytest.mark.parametrize("has_voice", [True, False])
def test_a_restored_stream_whose_last_audio_does_not_come_again_goes_on(missing: int, has_voice: bool) -> None:
    stream = Stream()
    stream.feed(20)
    stream.embeddings.compute()
    stream.take()
    state = reread(stream.track.save())
    assert state["cutter"]["starts"], "it is in a run of speech"
    stream.track = SpeakerTrack(stream.embeddings.submit)
    stream.track.resume(state)
    first = state["cutter"]["sample"] // FRAME_SAMPLES + missing
    frames = AUDIO[first * FRAME_SAMPLES : (first + 100) * FRAME_SAMPLES]
    stream.track.add_part(first * FRAME_SAMPLES, 0, frames)
    stream.track.add_frames(Speech("s", first * FRAME_SAMPLES, FRAME_SAMPLES, [0.9] * 100), [has_voice] * 100)
    assert len(stream.embeddings.waiting) == (5 if has_voice else 0)
    stream.track.end()
    stream.embeddings.compute()
    assert stream.track.advance("s") is not None


def test_silence_is_not_computed() -> None:
    embeddings = Embeddings()
    track = SpeakerTrack(embeddings.submit)
    track.add_audio([Item(0, 1000, 0)], SPEC)
    track.add_frames(*heard(Speech("s", 0, FRAME_SAMPLES, [0.0] * 60)))
    track.add_frames(*heard(Speech("s", 60 * FRAME_SAMPLES, 1000 * FRAME_SAMPLES, [0.0])))
    assert not embeddings.waiting
    # Only how far all labels are decided is told, and not more often than every second.
    assert track.advance("s") == Labels("s", [], settled=1060 * FRAME_SAMPLES)
    assert track.advance("s") is None


def loop_tracks(embeddings: Embeddings, failed: list[str] | None = None) -> SpeakerTracks:
    return SpeakerTracks(SPEC, embeddings, lambda name, error: None if failed is None else failed.append(name))


def fed(tracks: SpeakerTracks, name: str) -> None:
    tracks.add_audio(name, [Item(0, 1, 0, b"k", AUDIO, samples=len(AUDIO))])
    tracks.add_frames(*heard(Speech(name, 0, FRAME_SAMPLES, PROBABILITIES)))


def test_the_end_of_a_stream_waits_for_its_last_labels() -> None:
    embeddings = Embeddings()
    tracks = loop_tracks(embeddings)
    tracks.open("s", ON, live=False)
    fed(tracks, "s")
    outputs: list[Output] = [Closed("s", len(AUDIO))]
    tracks.add_labels(outputs)
    assert not outputs
    embeddings.compute()
    assert tracks.has_work
    tracks.add_labels(outputs)
    labels, end = outputs
    assert isinstance(labels, Labels) and isinstance(end, Closed)
    assert labels.decided == EXPECTED
    assert labels.state is not None


def test_a_stream_that_is_dropped_meanwhile_ends_at_once() -> None:
    tracks = loop_tracks(Embeddings())
    tracks.open("s", ON, live=True)
    fed(tracks, "s")
    tracks.add_labels([end := Closed("s", 1)])
    assert tracks.close("s") is end
    assert tracks.close("s") is None


def test_a_stream_without_the_option_costs_nothing() -> None:
    embeddings = Embeddings()
    tracks = loop_tracks(embeddings)
    tracks.open("s", {}, live=True)
    fed(tracks, "s")
    outputs: list[Output] = [Closed("s", 1)]
    tracks.add_labels(outputs)
    assert outputs == [Closed("s", 1)]
    assert not embeddings.waiting
    assert tracks.save("s") == ({}, None)


def test_an_embedding_that_fails_ends_only_its_stream() -> None:
    embeddings, failed = Embeddings(), list[str]()
    tracks = loop_tracks(embeddings, failed)
    tracks.open("bad", ON, live=True)
    fed(tracks, "bad")
    embeddings.fails = RuntimeError("no weights")
    embeddings.compute()
    embeddings.fails = None
    tracks.open("good", ON, live=True)
    fed(tracks, "good")
    embeddings.compute()
    outputs: list[Output] = []
    tracks.add_labels(outputs)
    assert failed == ["bad"]
    assert [output.stream for output in outputs if isinstance(output, Labels)] == ["good"]


def test_an_overloaded_engine_keeps_a_bounded_number_of_pieces() -> None:
    embeddings = Embeddings()
    tracks = loop_tracks(embeddings)
    tracks.open("live", ON, live=True)
    tracks.open("upload", ON, live=False)
    for name in ("live", "upload"):
        tracks.add_audio(name, [Item(0, 1, 0, b"k", np.ones(4000 * FRAME_SAMPLES, np.float32), samples=4000 * 512)])
        tracks.add_frames(*heard(Speech(name, 0, FRAME_SAMPLES, [0.9] * 4000)))
    tracks.add_labels([])
    assert (
        sum(not future.cancelled() for _, future in embeddings.waiting[: len(embeddings.waiting) // 2]) == MAX_WAITING
    )
    # The gateway sends no more of an upload until its labels have come nearer.
    assert tracks.upload_waits_from("live") is None
    assert tracks.upload_waits_from("upload") == 0
    embeddings.compute(len(embeddings.waiting) - MAX_UPLOAD_WAITING)
    tracks.add_labels([])
    assert tracks.upload_waits_from("upload") is None


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("", "must begin with 'labels'"),
        ("labels\nAnn\tAAAA", "embedding of the speaker 'Ann' is not 192"),
        ("labels\nAnn", "embedding of the speaker 'Ann' is not 192"),
        (speakers_text([("", VECTOR)]), "1 to 64 characters"),
        (speakers_text([("A" * 65, VECTOR)]), "1 to 64 characters"),
        (speakers_text([("a\x00", VECTOR)]), "control characters"),
        (speakers_text([("Ann", VECTOR)] * 2), "two speakers are named 'Ann'"),
        (speakers_text([(f"{n}", VECTOR) for n in range(17)]), "at most 16 speakers"),
    ],
)
def test_a_bad_option_is_refused(given: str, complaint: str) -> None:
    with pytest.raises(BadOption, match=complaint):
        loop_tracks(Embeddings()).check("s", {SPEAKERS: given})


def test_an_engine_without_the_weights_names_the_command_that_fetches_them() -> None:
    with pytest.raises(BadOption, match="tickertape pull speakers"):
        SpeakerTracks(SPEC, None, lambda name, error: None).check("s", ON)


def test_an_enrolled_voice_has_the_first_number() -> None:
    stream = Stream()
    enrolled = np.rint(embedding_of(np.full(512, 0.3, np.float32)) * 1024).astype(np.int64)
    stream.track = SpeakerTrack(stream.embeddings.submit, [("Ann", enrolled)])
    stream.feed(1000)
    assert [speaker for _, _, speaker, _ in stream.finish()][:1] == [1]
    assert {speaker for _, _, speaker, _ in stream.labels} == {0, 1, 2}


def test_a_state_of_an_earlier_version_is_refused() -> None:
    """Its voices say how long they were heard, not how much they have learnt."""
    tracks = loop_tracks(Embeddings())
    tracks.open("s", ON, live=True)
    voice = {"number": 0, "samples": 16_000, "name": "", "heard": 0, "total": bytes(4 * EMBEDDING_SIZE)}
    labels = {"voices": [voice], "pending": [], "next": 1, "last": 0, "labelled": 0}
    cutter = {"sample": 0, "starts": [], "count": 0, "cut": 0, "silence": 0}
    with pytest.raises(BadItem, match="saved speaker labels cannot be read .KeyError"):
        tracks.resume("s", {"cutter": cutter, "labels": labels, "waiting": []})
