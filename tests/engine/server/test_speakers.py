"""Pieces and labels do not depend on how the audio arrived, survive saving at any point, and are bounded."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.options import (
    EMBEDDING_SIZE,
    MAX_ENROLLED,
    MAX_NAME_CHARACTERS,
    PART_HOP_SAMPLES,
    PART_SAMPLES,
    PIECE_SAMPLES,
)
from engine.server.speaker_labels import (
    FRAME_SAMPLES,
    MAX_PENDING,
    MAX_STATE_BYTES,
    MAX_VOICES,
    SAMPLE_RATE,
    CutSettings,
    Heard,
    Label,
    Piece,
    PieceCutter,
    Samples,
    SpeakerLabels,
    rounded,
    shipped_model,
)
from engine.server.speech_track import voiced_frames

WHOLE = CutSettings().piece_frames * FRAME_SAMPLES
HOP = CutSettings().hop_frames * FRAME_SAMPLES
PAUSE = CutSettings().pause_frames * FRAME_SAMPLES
PARTS = (PIECE_SAMPLES - PART_SAMPLES) // PART_HOP_SAMPLES + 1


def audio_of(frames: int, seed: int = 0) -> Samples:
    return np.random.default_rng(seed).standard_normal((frames, FRAME_SAMPLES)).astype(np.float32)


def plain(found: list[tuple[Piece, Samples]]) -> list[tuple[Piece, bytes]]:
    return [(piece, audio.tobytes()) for piece, audio in found]


def vector_of(voice: int, spread: float = 0.0, seed: int = 0) -> Samples:
    """A voice's direction, and one that is off by `spread`."""
    centre = np.random.default_rng(1000 + voice).standard_normal(EMBEDDING_SIZE)
    off = np.random.default_rng(seed).standard_normal(EMBEDDING_SIZE)
    vector = centre / np.linalg.norm(centre) + spread * off / np.linalg.norm(off)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def embedding(voice: int, spread: float = 0.0, seed: int = 0, parts: Sequence[int] = ()) -> Heard:
    """A piece of a voice that is off by `spread`; its parts are further off. `parts`: their voices, if they differ."""
    voices = parts or [voice] * PARTS
    far = [vector_of(one, 1.5 * spread, 1000 * seed + number) for number, one in enumerate(voices)]
    return rounded(np.stack([vector_of(voice, spread, seed), *far]))


def whole(embedding: Samples) -> Heard:
    """A piece whose parts have the same embedding."""
    return rounded(np.tile(embedding, (1 + PARTS, 1)))


def conversation(turns: list[tuple[int, int]], spread: float = 0.5) -> list[tuple[Piece, Heard]]:
    """Pieces of turns (voice, pieces), with a pause of half a second before each turn."""
    found, at = [], 0
    for number, (voice, count) in enumerate(turns):
        at += SAMPLE_RATE // 2
        for index in range(count):
            end = at + WHOLE + index * HOP
            new = WHOLE if index == 0 else HOP
            # As from a cutter: the last piece of a run is cut after the pause that ends it.
            cut_at = end + PAUSE if index == count - 1 else end
            starts = tuple(range(end - WHOLE, end, FRAME_SAMPLES))
            piece = Piece(end - WHOLE, end, end - WHOLE // 2, WHOLE, new, index == 0, cut_at, starts)
            found.append((piece, embedding(voice, spread, seed=100 * number + index)))
        at += WHOLE + (count - 1) * HOP
    return found


def labels_of(pieces: list[tuple[Piece, Heard]], labels: SpeakerLabels | None = None) -> list[Label]:
    labels = labels or SpeakerLabels()
    found = [label for piece, one in pieces for label in labels.push(piece, one)]
    return found + labels.end()


def encoded(state: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode(state)


def reread(state: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from another process."""
    again: dict[str, Any] = msgspec.msgpack.decode(encoded(state))
    return again


# Pieces

voices = st.lists(st.tuples(st.sampled_from([0.0, 0.49, 0.5, 1.0]), st.integers(1, 60)), min_size=1, max_size=8).map(
    lambda runs: voiced_frames([probability for probability, count in runs for _ in range(count)])
)


def cut_at_once(frames: Samples, speech: list[bool]) -> list[tuple[Piece, bytes]]:
    cutter = PieceCutter()
    return plain(cutter.feed(frames, speech)) + plain(cutter.end())


@settings(max_examples=60, deadline=None)
@given(voices, st.data())
def test_any_chunking_gives_the_same_pieces(speech: list[bool], data: st.DataObject) -> None:
    frames = audio_of(len(speech))
    cutter, found, at = PieceCutter(), [], 0
    while at < len(speech):
        count = data.draw(st.integers(1, len(speech) - at))
        found += plain(cutter.feed(frames[at : at + count], speech[at : at + count]))
        at += count
    assert found + plain(cutter.end()) == cut_at_once(frames, speech)


@settings(max_examples=60, deadline=None)
@given(voices, st.data())
def test_a_cutter_that_was_saved_anywhere_continues_the_same(speech: list[bool], data: st.DataObject) -> None:
    frames = audio_of(len(speech))
    stream = frames.reshape(-1)
    at = data.draw(st.integers(0, len(speech)))
    first = PieceCutter()
    found = plain(first.feed(frames[:at], speech[:at]))
    second = PieceCutter()
    second.resume(reread(first.save()), stream[first.needs_from : at * FRAME_SAMPLES])
    assert second.needs_from == first.needs_from and second.save() == first.save()
    found += plain(second.feed(frames[at:], speech[at:]))
    assert found + plain(second.end()) == cut_at_once(frames, speech)


@settings(max_examples=60, deadline=None)
@given(voices)
def test_pieces_cover_all_speech_of_runs_that_are_long_enough_once(speech: list[bool]) -> None:
    found = cut_at_once(audio_of(len(speech)), speech)
    spoken = sum(speech) * FRAME_SAMPLES
    new = sum(piece.new for piece, _ in found)
    short = (CutSettings().shortest_frames - 1) * FRAME_SAMPLES
    assert new <= spoken <= new + short * (len(speech) // CutSettings().pause_frames + 1)
    for piece, audio in found:
        assert len(audio) == 4 * WHOLE and 0 < piece.new <= piece.length <= WHOLE
        assert piece.start <= piece.middle < piece.end and piece.length <= piece.end - piece.start
    ends = [piece.end for piece, _ in found]
    assert ends == sorted(set(ends))


def test_a_second_of_silence_counts_as_its_frames() -> None:
    speech = [True] * 20
    frames = audio_of(20)
    computed, passed = PieceCutter(), PieceCutter()
    expected = plain(computed.feed(np.concatenate([frames, audio_of(40)]), speech + [False] * 40))
    assert plain(passed.feed(frames, speech)) + plain(passed.pass_silence(40 * FRAME_SAMPLES)) == expected
    assert passed.sample == computed.sample == 60 * FRAME_SAMPLES


def test_a_run_shorter_than_a_piece_is_repeated() -> None:
    frames = audio_of(10)
    ((piece, audio),) = (cutter := PieceCutter()).feed(frames, [True] * 10) + cutter.end()
    assert piece.length == piece.new == 10 * FRAME_SAMPLES and piece.after_pause
    assert np.array_equal(audio[: 10 * FRAME_SAMPLES], frames.reshape(-1))
    assert np.array_equal(audio[10 * FRAME_SAMPLES : 20 * FRAME_SAMPLES], frames.reshape(-1))


def test_too_little_audio_for_a_saved_state_is_refused() -> None:
    cutter = PieceCutter()
    cutter.feed(audio_of(20), [True] * 20)
    with pytest.raises(ValueError, match="needs 10240 samples of audio, not 10239"):
        PieceCutter().resume(cutter.save(), np.zeros(10_239, np.float32))


def test_what_a_cutter_needs_does_not_grow_with_the_stream() -> None:
    cutter = PieceCutter()
    sizes = set()
    for _ in range(20):
        cutter.feed(audio_of(100), [True] * 100)
        assert cutter.sample - cutter.needs_from <= WHOLE
        sizes.add(len(cutter.save()["starts"]))
    assert sizes == {CutSettings().piece_frames}


# Labels


def test_two_voices_are_told_apart_and_found_again() -> None:
    pieces = conversation([(0, 6), (1, 6), (0, 4), (1, 4), (0, 8)])
    labels = labels_of(pieces)
    assert [label.speaker for label in labels] == [0] * 6 + [1] * 6 + [0] * 4 + [1] * 4 + [0] * 8


def test_one_voice_stays_one() -> None:
    assert {label.speaker for label in labels_of(conversation([(0, 20), (0, 3), (0, 40)], spread=0.7))} == {0}


def test_a_voice_is_found_again_after_hours_of_another() -> None:
    pieces = conversation([(0, 8), *[(1, 40)] * 30, (0, 8)])
    assert {label.speaker for label in labels_of(pieces)[-8:]} == {0}


def test_a_first_piece_that_is_far_off_makes_no_second_voice_of_one_person() -> None:
    """One odd piece, such as a cough or a laugh, gets the label of who speaks."""
    pieces = conversation([(0, 10), (0, 10)])
    pieces[5] = (pieces[5][0], embedding(7, 0.5, 3))
    assert {label.speaker for label in labels_of(pieces)} == {0}


def test_what_a_voice_has_learnt_is_bounded() -> None:
    """After hours a voice can still follow the person."""
    labels = SpeakerLabels()
    labels_of(conversation([(0, 400)]), labels)
    (voice,) = labels.save()["voices"]
    assert 256 <= voice["weight"] <= 512


def test_the_shipped_model_of_voices_is_one() -> None:
    model = shipped_model()
    assert model.mean.shape == (EMBEDDING_SIZE,) and np.linalg.norm(model.mean) < 1024
    assert 0 < model.between < 1 / EMBEDDING_SIZE and 0 < model.within < 1 / EMBEDDING_SIZE


def test_labels_follow_each_other_without_overlaps() -> None:
    labels = labels_of(conversation([(0, 6), (1, 1), (2, 2), (0, 9)]))
    for one, other in zip(labels, labels[1:], strict=False):
        assert one.start <= one.end <= other.start
    assert all(0 <= label.confidence <= 1 for label in labels)


def test_a_label_is_decided_at_most_1_5_s_after_the_middle_of_its_piece_and_at_once_after_a_pause() -> None:
    labels = SpeakerLabels()
    waiting: list[Piece] = []
    for piece, one in conversation([(0, 6), (1, 6), (0, 4)]):
        for sample in range(piece.start, piece.end, 320):
            for _ in labels.advance(sample):
                assert sample >= waiting.pop(0).middle + labels.settings.lag_samples
            assert all(sample < other.middle + labels.settings.lag_samples for other in waiting)
        for _ in labels.push(piece, one):
            waiting.pop(0)
        waiting.append(piece)
        if piece.ends_run:
            assert len(labels.advance(piece.cut_at)) == len(waiting)
            waiting.clear()
    assert labels.settings.lag_samples <= 1.5 * SAMPLE_RATE


def test_a_guess_changes_nothing() -> None:
    guessed, plain_run = SpeakerLabels(), SpeakerLabels()
    for piece, one in conversation([(0, 6), (1, 6), (0, 4)]):
        assert guessed.push(piece, one) == plain_run.push(piece, one)
        before = guessed.save()
        assert len(guessed.best_guess()) == len(before["pending"])
        assert guessed.save() == before
    assert guessed.end() == plain_run.end()


turns = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 8)), min_size=1, max_size=8)


@settings(max_examples=40, deadline=None)
@given(turns, st.data())
def test_labels_that_were_saved_anywhere_continue_the_same(told: list[tuple[int, int]], data: st.DataObject) -> None:
    pieces = conversation(told, spread=0.8)
    expected = labels_of(pieces)
    at = data.draw(st.integers(0, len(pieces)))
    first = SpeakerLabels()
    found = [label for piece, one in pieces[:at] for label in first.push(piece, one)]
    second = SpeakerLabels.resumed(reread(first.save()))
    assert second.save() == first.save()
    assert found + labels_of(pieces[at:], second) == expected


@settings(max_examples=40, deadline=None)
@given(turns, st.integers(0, 40))
def test_a_label_never_depends_on_later_pieces_than_those_before_its_time(
    told: list[tuple[int, int]], cut: int
) -> None:
    """What was decided stays decided, whatever follows."""
    pieces = conversation(told, spread=0.8)
    labels, other = SpeakerLabels(), SpeakerLabels()
    found = [label for piece, one in pieces[:cut] for label in labels.push(piece, one)]
    again = [label for piece, one in pieces[:cut] for label in other.push(piece, one)]
    for piece, one in pieces[cut:]:
        labels.push(piece, one)
        other.push(piece, embedding(9, 0.2, seed=piece.start % 1000) if one is not None else one)
    assert found == again


def heard(audio: Samples) -> Heard:
    """Stands for the model: embeddings that depend on the audio alone, of one of three voices."""
    parts = [int(abs(float(audio[number * PART_HOP_SAMPLES])) * 1000) % 3 for number in range(PARTS)]
    return embedding(parts[0], 0.6, seed=int(abs(float(audio[1])) * 1e6), parts=parts)


@settings(max_examples=30, deadline=None)
@given(voices, st.data())
def test_any_chunking_of_the_stream_gives_the_same_labels(speech: list[bool], data: st.DataObject) -> None:
    speech = speech * 3
    frames = audio_of(len(speech))

    def told(sizes: list[int]) -> list[Label]:
        cutter, labels, found, at = PieceCutter(), SpeakerLabels(), list[Label](), 0
        for size in sizes:
            for piece, audio in cutter.feed(frames[at : at + size], speech[at : at + size]):
                found += labels.push(piece, heard(audio))
            found += labels.advance(cutter.sample)
            at += size
        for piece, audio in cutter.end():
            found += labels.push(piece, heard(audio))
        return found + labels.end()

    sizes: list[int] = []
    while sum(sizes) < len(speech):
        sizes.append(data.draw(st.integers(1, len(speech) - sum(sizes))))
    assert told(sizes) == told([1] * len(speech)) == told([len(speech)])


@pytest.mark.parametrize("noise", [1e-6, 1e-5])
def test_labels_do_not_change_with_the_rounding_errors_of_a_batch(noise: float) -> None:
    def told(errors: float) -> list[tuple[Piece, Heard]]:
        random = np.random.default_rng(5)
        return [
            (piece, with_errors(one, errors * random.standard_normal((1 + PARTS, EMBEDDING_SIZE))))
            for piece, one in conversation([(0, 6), (1, 6), (2, 4), (1, 2), (0, 3)] * 4, spread=0.9)
        ]

    assert [label.speaker for label in labels_of(told(0.0))] == [label.speaker for label in labels_of(told(noise))]


def with_errors(one: Heard, errors: NDArray[np.float64]) -> Heard:
    exact = np.concatenate([one.embedding[None] / 1024, one.parts / 256])
    return rounded((exact + errors).astype(np.float32))


# Changes of the voice within a run of speech


def change(frames: int, gaps: Sequence[int] = ()) -> tuple[list[tuple[Piece, Heard]], int]:
    """Pieces of a run in which voice 0 says `frames` frames and voice 1 as many as make 200 frames, and the sample
    between them. Half of the piece decides its embedding. `gaps`: frames behind which two silent ones are."""
    cutter, found, said, border = PieceCutter(), list[tuple[Piece, Heard]](), dict[int, int](), 0
    for frame in range(200):
        border = cutter.sample if frame == frames else border
        said |= {cutter.sample: int(frame >= frames)}
        speech = [True, False, False] if frame in gaps else [True]
        pieces = cutter.feed(audio_of(len(speech)), speech)
        for piece, _ in pieces + (cutter.end() if frame == 199 else []):
            offsets = [number * PART_HOP_SAMPLES + PART_SAMPLES // 2 for number in range(PARTS)]
            voices = [said[piece.starts[offset // FRAME_SAMPLES]] for offset in offsets]
            voice = round(float(np.mean([said[start] for start in piece.starts])))
            found.append((piece, embedding(voice, 0.4, len(found), voices)))
    return found, border


@pytest.mark.parametrize("frames", range(80, 112, 2))
@pytest.mark.parametrize("gaps", [(), (80, 85, 90, 95, 100, 105)], ids=["without gaps", "with gaps"])
def test_labels_meet_where_the_voice_changes(frames: int, gaps: Sequence[int]) -> None:
    pieces, border = change(frames, gaps)
    labels = labels_of(pieces)
    assert [label.speaker for label in labels] == sorted(label.speaker for label in labels)
    last = next(number for number, label in enumerate(labels) if label.speaker)
    assert labels[last - 1].end == labels[last].start
    assert abs(labels[last].start - border) <= PART_HOP_SAMPLES + 3 * FRAME_SAMPLES


@pytest.mark.parametrize("frames", range(80, 112, 8))
def test_a_guess_has_the_borders_of_the_labels(frames: int) -> None:
    pieces, _ = change(frames)
    labels = SpeakerLabels()
    compared = 0
    for piece, one in pieces:
        labels.push(piece, one)
        guess, decided = labels.best_guess(), SpeakerLabels.resumed(labels.save()).end()
        if [label.speaker for label in guess] == [label.speaker for label in decided]:
            assert [(one.start, one.end) for one in guess] == [(one.start, one.end) for one in decided]
            compared += len({label.speaker for label in guess}) > 1
    assert compared


@settings(max_examples=40, deadline=None)
@given(st.integers(40, 160), st.data())
def test_a_border_is_the_same_after_saving(frames: int, data: st.DataObject) -> None:
    pieces, _ = change(frames)
    at = data.draw(st.integers(0, len(pieces)))
    first = SpeakerLabels()
    found = [label for piece, one in pieces[:at] for label in first.push(piece, one)]
    assert found + labels_of(pieces[at:], SpeakerLabels.resumed(reread(first.save()))) == labels_of(pieces)


def test_a_part_belongs_to_the_voice_whose_mean_is_nearer() -> None:
    """However much speech of each voice is known."""
    labels = SpeakerLabels()
    labels_of(conversation([(0, 30), (1, 2)]), labels)
    first, second = [
        labels._ratio / (1 + labels._ratio * voice.known.weight) * voice.known.total for voice in labels._voices
    ]
    parts = embedding(0, 0.5, 7, [0, 1] * 5).parts.astype(np.int64)
    (best,) = labels._hypotheses([])
    nearer = np.square(parts - second).sum(1) - np.square(parts - first).sum(1)
    assert labels._fit(parts, best, 0) - labels._fit(parts, best, 1) == pytest.approx(nearer / 2)


def test_large_numbers_of_a_part_keep_their_sign() -> None:
    vector = np.eye(1, EMBEDDING_SIZE, dtype=np.float32)[0]
    assert rounded(np.stack([vector, vector, -vector])).parts[:, 0].tolist() == [127, -127]


def test_a_pause_is_never_moved() -> None:
    """Where one voice ends before a pause and another begins after it, labels are those of the pieces."""
    pieces = conversation([(0, 6), (1, 6)])
    labels = labels_of(pieces)
    assert labels[5].end == pieces[5][0].end and labels[6].start == pieces[6][0].start


@settings(max_examples=60, deadline=None)
@given(voices, st.data())
def test_pieces_of_a_stream_never_wait_for_more_than_the_bound(speech: list[bool], data: st.DataObject) -> None:
    frames, cutter, labels = audio_of(len(speech)), PieceCutter(), SpeakerLabels()
    for number, has_speech in enumerate(speech):
        for piece, audio in cutter.feed(frames[number : number + 1], [has_speech]):
            labels.push(piece, heard(audio))
            assert len(labels.save()["pending"]) < MAX_PENDING
        labels.advance(cutter.sample)


def test_a_full_state_is_bounded() -> None:
    labels = SpeakerLabels()
    for number in range(MAX_ENROLLED):
        labels.enrol(f"{number:0{MAX_NAME_CHARACTERS}}", [embedding(200 + number).embedding])
    labels_of(conversation([(person, 6) for person in range(40)]), labels)
    at = 10**9
    for number in range(MAX_PENDING):
        starts = tuple(at + index * FRAME_SAMPLES for index in range(31))
        piece = Piece(at, at + WHOLE, at + WHOLE // 2, WHOLE, HOP, False, at + WHOLE, starts)
        labels.push(piece, embedding(number))
    assert len(labels.save()["pending"]) == MAX_PENDING
    in_json = json.dumps(labels.save(), default=lambda raw: base64.b64encode(raw).decode())
    assert max(len(encoded(labels.save())), len(in_json)) <= MAX_STATE_BYTES


# Bounds


def test_the_state_is_bounded_with_forty_people_and_all_names() -> None:
    labels = SpeakerLabels()
    for number in range(MAX_ENROLLED):
        labels.enrol(f"{number:0{MAX_NAME_CHARACTERS}}", [embedding(200 + number).embedding])
    largest = 0
    for piece, one in conversation([(person, 6) for person in range(40)] * 3):
        labels.push(piece, one)
        largest = max(largest, len(encoded(labels.save())))
    in_json = json.dumps(labels.save(), default=lambda raw: base64.b64encode(raw).decode())
    assert max(largest, len(in_json)) <= MAX_STATE_BYTES
    assert len(labels.speakers) == MAX_VOICES + MAX_ENROLLED
    assert labels.names == {number: f"{number:0{MAX_NAME_CHARACTERS}}" for number in range(MAX_ENROLLED)}


def test_the_state_does_not_grow_with_time() -> None:
    labels = SpeakerLabels()
    sizes: list[int] = []
    for piece, one in conversation([(0, 20), (1, 20)] * 40):
        labels.push(piece, one)
        sizes.append(len(encoded(labels.save())))
    assert max(sizes[800:]) <= max(sizes[:800]) + 64


def test_a_stream_that_pushes_without_advancing_is_bounded() -> None:
    labels = SpeakerLabels()
    found = 0
    for number in range(200):
        starts = tuple(range(number, number + WHOLE, FRAME_SAMPLES))
        piece = Piece(number, number + WHOLE, number + WHOLE // 2, WHOLE, HOP, False, number + WHOLE, starts)
        found += len(labels.push(piece, embedding(0, 0.3, number)))
        assert len(labels.save()["pending"]) <= MAX_PENDING
    assert found + len(labels.end()) == 200


# Enrolment


def test_an_enrolled_voice_is_found_by_its_name() -> None:
    labels = SpeakerLabels()
    ada = labels.enrol("Ada", [embedding(1, 0.4, seed).embedding for seed in range(4)])
    assert labels.names == {ada: "Ada"}
    found = labels_of(conversation([(0, 6), (1, 6), (0, 4)]), labels)
    assert {label.speaker for label in found[6:12]} == {ada}
    assert ada not in {label.speaker for label in found[:6]}


def test_names_survive_saving() -> None:
    labels = SpeakerLabels()
    labels.enrol("<v Zoë & 張>", [embedding(1).embedding])
    assert SpeakerLabels.resumed(reread(labels.save())).names == {0: "<v Zoë & 張>"}


@pytest.mark.parametrize(
    ("name", "count", "why"),
    [
        ("", 1, "has 1 to 64 characters"),
        ("x" * 65, 1, "has 1 to 64 characters"),
        ("Ada", 0, "'Ada' has no speech that is long enough"),
        ("Known", 1, "two speakers are named 'Known'"),
    ],
)
def test_a_reference_that_cannot_be_used_is_refused(name: str, count: int, why: str) -> None:
    labels = SpeakerLabels()
    labels.enrol("Known", [embedding(3).embedding])
    before = labels.save()
    with pytest.raises(ValueError, match=why):
        labels.enrol(name, [embedding(1).embedding] * count)
    assert labels.save() == before


def test_one_enrolled_voice_too_many_is_refused() -> None:
    labels = SpeakerLabels()
    for number in range(MAX_ENROLLED):
        labels.enrol(str(number), [embedding(number).embedding])
    with pytest.raises(ValueError, match="at most 16 speakers"):
        labels.enrol("one more", [embedding(99).embedding])


def test_two_enrolled_voices_that_are_alike_stay_two() -> None:
    labels = SpeakerLabels()
    labels.enrol("one", [embedding(1, 0.1, 1).embedding])
    labels.enrol("other", [embedding(1, 0.1, 2).embedding])
    labels_of(conversation([(1, 20)]), labels)
    assert len(labels.speakers) == 2


def test_a_voice_that_grows_like_an_older_one_takes_its_number() -> None:
    """The first pieces of a voice can be far off: once it is known better, it is the voice that it always was."""
    near, far = vector_of(1), vector_of(2)
    between = whole((0.4 * near + 0.9 * far) / np.linalg.norm(0.4 * near + 0.9 * far))
    pieces = [piece for piece, _ in conversation([(0, 10), (0, 6), (0, 30)])]
    labels = labels_of(list(zip(pieces, [whole(near)] * 10 + [between] * 6 + [whole(near)] * 30, strict=True)))
    assert {label.speaker for label in labels[-20:]} == {0}
    assert {label.speaker for label in labels} <= {0, 1}


def test_silence_and_broken_numbers_do_not_break_the_labels() -> None:
    pieces = conversation([(0, 5)])
    zero = whole(np.zeros(EMBEDDING_SIZE, np.float32))
    labels = labels_of([(piece, zero) for piece, _ in pieces])
    assert len(labels) == 5 and all(0 <= label.confidence <= 1 for label in labels)


@pytest.mark.parametrize("first", [6, 8, 10, 12, 16, 31])
def test_a_short_word_at_the_beginning_does_not_make_two_people_one(first: int) -> None:
    """A says a word of `first` frames; then A and B speak in turns. Embeddings are drawn from the shipped model."""
    model = shipped_model()
    for seed in range(5):
        random = np.random.default_rng(seed)
        a, b = (model.mean / 1024 + random.normal(0, model.between**0.5, EMBEDDING_SIZE) for _ in range(2))
        cutter, labels = PieceCutter(), SpeakerLabels()
        found: list[Label] = []
        turns: list[tuple[int, int]] = []
        for voice, frames in [(a, first), *[(a, 60), (b, 60)] * 3]:
            start = cutter.sample
            turn = random.normal(0, (0.4 * model.within) ** 0.5, EMBEDDING_SIZE)
            speech = [True] * frames + [False] * 12
            for piece, _ in cutter.feed(np.zeros((len(speech), FRAME_SAMPLES), np.float32), speech):
                heard = voice + turn + random.normal(0, (0.6 * model.within) ** 0.5, EMBEDDING_SIZE)
                found += labels.push(piece, whole((heard / np.linalg.norm(heard)).astype(np.float32)))
            turns.append((start, cutter.sample))
            found += labels.advance(cutter.sample)
        found += labels.end()
        said = [[label.speaker for label in found if start <= label.start < end] for start, end in turns]
        assert [max(set(one), key=one.count) for one in said] == [0, 0, 1, 0, 1, 0, 1]
