"""The windowed runner: bad payloads and options, drafts that change nothing, streams that stay apart, windows.

The model is tiny and random, so its text means nothing; what is tested is that the runner treats it right.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.core.plan import DecodeResult, DecodeTask, EncodeTask, OpenTask, StepPlan, TimedToken
from engine.messages import Item, Open
from engine.models.moonshine import Moonshine, MoonshineConfig
from engine.models.seq2seq import Encoded
from engine.options import Keyword
from engine.runner import bias
from engine.runner.bias import KeywordTree, KeywordTrees
from engine.runner.windowed.decoder import DecodedToken, GreedyDecoder, Row
from engine.runner.windowed.encoders import SAMPLES_PER_POSITION, AudioSlab, EncodedAudio, WindowEncoder
from engine.runner.windowed.runner import WindowedRunner, windowed_spec
from engine.runner.windowed.stability import HypothesisToken, Policy, Progress
from engine.runner.windowed.windows import HostWindows
from engine.spec import Vocabulary

VOCABULARY = 60
STRIDE = 5
WINDOW = 40
EXPECTED = {"keywords": "w58x\t1"}


@pytest.fixture(scope="module")
def model() -> Moonshine:
    torch.manual_seed(3)
    config = MoonshineConfig(32, 64, 1, 2, 4, 8, 10_000.0, VOCABULARY, start_token=1, end_token=2)
    made = Moonshine(config).eval()
    # Sharper attention and outputs than a fresh model has: ties would make comparisons meaningless.
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    return made


def make_runner(model: Moonshine, threads: int = 1) -> WindowedRunner:
    pieces = [b"", b"", b""] + [b" w%d" % token if token % 3 else b"x" for token in range(3, VOCABULARY)]
    policy = Policy(agreed_margin=2.0, lone_margin=4.0, cut_beyond=30.0, doubt=-100.0)
    spec = windowed_spec("tiny", WINDOW, STRIDE)
    stream_encoders = WindowEncoder(model, pieces, policy), WindowEncoder(model, pieces, policy)
    windows = HostWindows(model, *stream_encoders, 400, threads)
    return WindowedRunner(model, Vocabulary(pieces), spec, policy, windows)


def slab_of(runner: WindowedRunner) -> AudioSlab:
    assert isinstance(runner.windows, HostWindows)
    return runner.windows.slab


def speech(seed: int, positions: int) -> NDArray[np.float32]:
    generator = np.random.default_rng(seed)
    return generator.normal(0.0, 0.3, positions * SAMPLES_PER_POSITION).astype(np.float32)


class Streams:
    """A scheduler of the simplest kind: every stream gets `STRIDE` new positions in every step."""

    def __init__(
        self, runner: WindowedRunner, audio: dict[int, NDArray[np.float32]], keywords: Sequence[int] = ()
    ) -> None:
        """Streams of the slots in `keywords` expect a word."""
        self.runner = runner
        self.audio = audio
        self.base = dict.fromkeys(audio, 0)
        self.results: dict[int, list[DecodeResult]] = {slot: [] for slot in audio}
        self.steps = 0
        options = [EXPECTED if slot in keywords else {} for slot in audio]
        opened = [OpenTask(slot, f"s{slot}", 0, own, []) for slot, own in zip(audio, options, strict=True)]
        runner.execute(StepPlan(0, opened=opened))
        for slot in keywords:
            tree = runner.slots[slot].keywords
            assert tree is not None and tree.tree, "it is ready from now on"

    def end_here(self) -> None:
        """A final task without new audio."""
        end = self.steps * STRIDE
        plan = StepPlan(self.steps)
        for slot, base in self.base.items():
            window = [1 + slot * 100 + position % 100 for position in range(base, end)]
            plan.decode.append(DecodeTask(slot, f"s{slot}", base, end, end, window, [], True))
        plan.live = len(plan.decode)
        for task, result in zip(plan.decode, self.runner.execute(plan), strict=True):
            assert result.error is None
            self.base[task.slot] = end
            self.results[task.slot].append(result)

    def step(self, final: bool = False, pause: bool = False) -> None:
        start, end = self.steps * STRIDE, (self.steps + 1) * STRIDE
        plan = StepPlan(self.steps)
        for slot, audio in self.audio.items():
            rows = [1 + slot * 100 + position % 100 for position in range(start, end)]
            samples = audio[start * SAMPLES_PER_POSITION : end * SAMPLES_PER_POSITION]
            plan.encode.append(EncodeTask(f"s{slot}", samples, None, rows))
            window = [1 + slot * 100 + position % 100 for position in range(self.base[slot], end)]
            plan.decode.append(DecodeTask(slot, f"s{slot}", self.base[slot], start, end, window, [], final, pause))
        plan.live = len(plan.decode)
        for task, result in zip(plan.decode, self.runner.execute(plan), strict=True):
            assert result.keep_from is not None and task.base <= result.keep_from <= task.end
            self.base[task.slot] = result.keep_from
            self.results[task.slot].append(result)
        self.steps += 1

    def tokens(self, slot: int) -> list[int]:
        return [timed.token for result in self.results[slot] for timed in result.timed]


# Bad input


def test_options_and_delays_are_refused(model: Moonshine) -> None:
    runner = make_runner(model)
    runner.check_open(Open("s"))
    with pytest.raises(ValueError, match="delay"):
        runner.check_open(Open("s", delay_positions=3))
    with pytest.raises(ValueError, match="'language'"):
        runner.check_open(Open("s", options={"language": "de"}))


@pytest.mark.parametrize("positions", [1, 2])
def test_a_window_too_short_for_the_front_end(model: Moonshine, positions: int) -> None:
    runner = make_runner(model)
    runner.execute(StepPlan(0, opened=[OpenTask(0, "s", 0, {}, [])]))
    task = DecodeTask(0, "s", 0, 0, positions, [0] * positions, [], True)
    (result,) = runner.execute(StepPlan(1, decode=[task]))
    assert result.keep_from == positions


def test_masked_items_fill_only_their_rows(model: Moonshine) -> None:
    runner = make_runner(model)
    samples = speech(1, 3)
    runner.execute(StepPlan(0, encode=[EncodeTask("s", samples, [True, False, True], [4, 6])]))
    kept = samples.reshape(3, -1)
    rows = slab_of(runner).rows
    assert np.array_equal(rows[4], kept[0]) and np.array_equal(rows[6], kept[2])
    assert not rows[0].any() and not rows[5].any()


def test_audio_that_is_not_numbers_ends_its_stream_alone(model: Moonshine) -> None:
    runner, tasks, encode = make_runner(model), [], []
    for slot, samples in enumerate((speech(1, STRIDE), speech(2, STRIDE))):
        samples[300] = np.nan if slot == 0 else samples[300]
        rows = [1 + slot * 100 + position for position in range(STRIDE)]
        encode.append(EncodeTask(f"s{slot}", samples, None, rows))
        tasks.append(DecodeTask(slot, f"s{slot}", 0, 0, STRIDE, rows, [], True))
    opened = [OpenTask(slot, f"s{slot}", 0, {}, []) for slot in range(2)]
    broken, whole = runner.execute(StepPlan(0, opened=opened, encode=encode, decode=tasks, live=2))
    assert broken.error == "its audio has NaN or infinite values"
    alone = Streams(make_runner(model), {0: speech(2, STRIDE)})
    alone.step(final=True)
    assert whole.error is None and [timed.token for timed in whole.timed] == alone.tokens(0)


# Decoding


@pytest.mark.parametrize("wrong_from", [0, 1, 3, 8])
def test_a_draft_changes_the_time_and_not_the_text(model: Moonshine, wrong_from: int) -> None:
    decoder = GreedyDecoder(model)
    audio = torch.from_numpy(speech(2, 20))[None]
    with torch.inference_mode():
        encoded = model.encode(audio, [audio.shape[1]])
        plain = Row([5, 6], [], 8, None, encoded.lengths[0])
        decoder.run([plain], encoded)
        draft = [token if index < wrong_from else 59 for index, token in enumerate(plain.tokens)]
        helped = Row([5, 6], draft, 8, None, encoded.lengths[0])
        decoder.run([helped], encoded)
    assert len(plain.tokens) > 1
    assert (helped.tokens, helped.peaks, helped.ended) == (plain.tokens, plain.peaks, plain.ended)


@pytest.mark.parametrize("wrong_from", [0, 2, 8])
def test_keywords_decide_what_is_said_and_a_draft_is_checked_with_them(
    model: Moonshine, monkeypatch: pytest.MonkeyPatch, wrong_from: int
) -> None:
    monkeypatch.setattr(bias, "FULL_WORTH", 1000.0)
    keywords = KeywordTrees(make_runner(model).vocabulary).tree(EXPECTED)
    audio = torch.from_numpy(speech(2, 20))[None]
    with torch.inference_mode():
        encoded = model.encode(audio, [audio.shape[1]])

        def said(draft: list[int], keywords: KeywordTree | None) -> Row:
            row = Row([5, 6], draft, 8, None, encoded.lengths[0], keywords=keywords)
            GreedyDecoder(model).run([row], encoded)
            return row

        plain, favoured = said([], None), said([], keywords)
        draft = [token if index < wrong_from else 59 for index, token in enumerate(favoured.tokens)]
        helped = said(draft, keywords)
    assert favoured.tokens != plain.tokens and 58 in favoured.tokens
    assert helped.tokens == favoured.tokens and helped.keyword_state == favoured.keyword_state
    # A keyword is no evidence: the model finds its tokens as unlikely as before.
    first = next(i for i, (one, other) in enumerate(zip(favoured.tokens, plain.tokens, strict=False)) if one != other)
    assert favoured.log_probabilities[first] < plain.log_probabilities[first]


def test_rows_of_a_batch_do_not_touch_each_other(model: Moonshine) -> None:
    decoder = GreedyDecoder(model)

    def rows() -> list[Row]:
        return [Row([5], [6, 7], 10, None, 0), Row([], [], 3, None, 0), Row([8, 9, 10], [11], 12, 20.0, 0)]

    with torch.inference_mode():
        audio = [torch.from_numpy(speech(seed, length))[None] for seed, length in ((4, 6), (5, 30), (6, 14))]
        encoded = [model.encode(part, [part.shape[1]]) for part in audio]
        together, alone = rows(), rows()
        for row, other, part in zip(together, alone, encoded, strict=True):
            row.frames = other.frames = part.lengths[0]
        decoder.run(together, Encoded.stack(encoded))
        for row, part in zip(alone, encoded, strict=True):
            decoder.run([row], part)
    for row, other in zip(together, alone, strict=True):
        assert (row.tokens, row.peaks, row.ended) == (other.tokens, other.peaks, other.ended)


@pytest.mark.parametrize(
    ("peaks", "taken"), [([40, 9, 8, 41], 3), ([40, 9, 41, 8], 4), ([40, 9, 41, 8, 7, 42], 5), ([90, 32, 35, 41], 4)]
)
def test_a_row_that_begins_again_is_not_decoded_on(peaks: list[int], taken: int) -> None:
    """Two tokens in a row that attend to what is said already; one alone, before it or behind it, may be a stray."""
    row = Row([], [], 20, None, 100, progress=Progress(30.0, far_back=20.0))
    for token, peak in enumerate(peaks, 3):
        if not row.done:
            row.add_token(DecodedToken(token, 0.0, peak), end_token=2)
    assert len(row.tokens) == taken and not row.ended


# Streams


@pytest.mark.parametrize("threads", [1, 2])
def test_streams_together_say_what_each_says_alone(model: Moonshine, threads: int) -> None:
    audio = {slot: speech(10 + slot, 60) for slot in range(3)}
    together = Streams(make_runner(model, threads), audio)
    for step in range(12):
        together.step(final=step == 11)
    together.runner.close()
    for slot, samples in audio.items():
        alone = Streams(make_runner(model), {slot: samples})
        for step in range(12):
            alone.step(final=step == 11)
        assert alone.tokens(slot) == together.tokens(slot)
        assert alone.tokens(slot)


class Uploads:
    """Windows of two uploads; each stint ends after so many pieces of work."""

    def __init__(self, runner: WindowedRunner, seeds: tuple[int, ...] = (40, 41)) -> None:
        self.runner = runner
        self.results: dict[int, DecodeResult] = {}
        self.plan = StepPlan(0)
        for slot, seed in enumerate(seeds):
            rows = list(range(1 + slot * 100, 1 + slot * 100 + WINDOW))
            self.plan.opened.append(OpenTask(slot, f"u{slot}", 0, {}, [], live=False))
            self.plan.encode.append(EncodeTask(f"u{slot}", speech(seed, WINDOW), None, rows))
            self.plan.decode.append(DecodeTask(slot, f"u{slot}", 0, 0, WINDOW, rows, [], True))

    def read(self, pieces: int) -> tuple[list[DecodeResult], int]:
        """What came out in the end, and how many stints it took."""
        stints = 0
        while self.plan.decode:
            stints += 1
            self.stint(pieces)
        return [self.results[slot] for slot in sorted(self.results)], stints

    def stint(self, pieces: int, closed: Sequence[int] = ()) -> None:
        """Read on; what is finished is not in the next plan, nor are uploads that are closed before."""
        self.plan.closed = list(closed)
        self.plan.decode = [task for task in self.plan.decode if task.slot not in closed]
        left = iter(range(pieces - 1))
        results = self.runner.compute(self.plan, lambda: next(left, None) is None)
        read = list(zip(self.plan.decode, results, strict=True))
        self.results |= {task.slot: result for task, result in read if not result.unfinished}
        self.plan = StepPlan(self.plan.step + 1, decode=[task for task, result in read if result.unfinished])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_backlog_laid_aside_at_any_piece_says_the_same(model: Moonshine, pieces: int, threads: int) -> None:
    at_once, stints = Uploads(make_runner(model)).read(10_000)
    assert stints == 1 and all(result.timed for result in at_once)
    runner = make_runner(model, threads)
    in_pieces, stints = Uploads(runner).read(pieces)
    runner.close()
    assert in_pieces == at_once and stints > 3


SPANS = [(0, 35), (38, 70), (70, 105), (110, 114), (115, 150)]


def read_in_order(runner: WindowedRunner, pieces: int, ahead: bool) -> list[DecodeResult]:
    """Read an upload of these windows, so many pieces of work at a time; `ahead`: plans have the next window too."""
    audio = speech(5, SPANS[-1][1])
    rows = list(range(1, SPANS[-1][1] + 1))
    runner.compute(
        StepPlan(0, opened=[OpenTask(0, "u", 0, {}, [], live=False)], encode=[EncodeTask("u", audio, None, rows)])
    )
    tasks = [DecodeTask(0, "u", base, base, end, rows[base:end], [], True) for base, end in SPANS]
    results: list[DecodeResult] = []
    for number, task in enumerate(tasks):
        following = tasks[number + 1 : number + 2] if ahead else []
        while len(results) == number:
            calls = iter([False] * (pieces - 1))
            [result] = runner.compute(
                StepPlan(1, decode=[task], ahead=following), lambda calls=calls: next(calls, True)
            )
            following = []
            if not result.unfinished:
                results.append(result)
    return results


@pytest.mark.parametrize("pieces", [1, 3, 1000])
def test_windows_encoded_ahead_have_the_same_words_and_are_encoded_once(
    model: Moonshine, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read_in_order(make_runner(model), 1000, ahead=False)
    encoded: list[tuple[int, int]] = []
    encode = WindowEncoder._encode_in_pieces

    def counted(self: WindowEncoder, task: DecodeTask, audio: torch.Tensor) -> Generator[None, None, EncodedAudio]:
        encoded.append((task.base, task.end))
        return (yield from encode(self, task, audio))

    monkeypatch.setattr(WindowEncoder, "_encode_in_pieces", counted)
    runner = make_runner(model, 2)
    assert read_in_order(runner, pieces, ahead=True) == expected
    runner.close()
    assert sorted(encoded) == SPANS and any(result.timed for result in expected)


def test_a_window_that_cannot_be_encoded_ahead_is_encoded_when_it_is_read(
    model: Moonshine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read_in_order(make_runner(model), 1000, ahead=False)
    encode, failed = WindowEncoder._encode_in_pieces, list[int]()

    def fails_once(self: WindowEncoder, task: DecodeTask, audio: torch.Tensor) -> Generator[None, None, EncodedAudio]:
        if task.base not in failed and task.base:
            failed.append(task.base)
            raise RuntimeError("out of memory")
        return (yield from encode(self, task, audio))

    monkeypatch.setattr(WindowEncoder, "_encode_in_pieces", fails_once)
    runner = make_runner(model, 2)
    # A window that may need the text before it is not begun ahead, so its only failure would end the stream.
    failed.append(110)
    assert read_in_order(runner, 2, ahead=True) == expected
    runner.close()
    assert len(failed) == 4


def test_a_closed_upload_leaves_no_window_ahead(model: Moonshine) -> None:
    runner = make_runner(model, 2)
    read_in_order(runner, 1000, ahead=True)
    encoder = runner.windows.upload_encoder
    task = DecodeTask(0, "u", 200, 200, 240, list(range(1, 41)), [], True)
    encoder.begin_ahead(task, runner.windows.audio(task), 150)
    assert encoder.window_ahead(0, 150) is not None
    runner.compute(StepPlan(9, closed=[0]))
    assert encoder.window_ahead(0, 150) is None
    runner.close()


def test_uploads_are_read_on_all_threads_and_the_first_does_not_wait_for_the_second(model: Moonshine) -> None:
    runner, both, threads = make_runner(model, 2), threading.Barrier(2, timeout=60), set()
    file_encoder = runner.windows.stream_encoder(False)
    assert isinstance(file_encoder, WindowEncoder)
    encode_in_pieces = file_encoder.encode_in_pieces

    def hear(task: DecodeTask, audio: torch.Tensor) -> Generator[None, None, EncodedAudio]:
        both.wait()  # one is not encoded before the other begins
        threads.add(threading.current_thread())
        return encode_in_pieces(task, audio)

    file_encoder.encode_in_pieces = hear  # type: ignore[method-assign]
    uploads = Uploads(runner)
    uploads.stint(1)
    assert len(threads) == 2
    # The second one is held up from here on.
    uploads.plan.decode, second = uploads.plan.decode[:1], uploads.plan.decode[1]
    runner._readings[second.slot].work = iter([None] * 10_000)
    while not uploads.results:
        uploads.stint(1)
    runner.close()
    assert list(uploads.results) == [0] and runner._readings.keys() == {1}


def test_live_streams_run_between_the_pieces_of_backlog(model: Moonshine) -> None:
    alone = Streams(make_runner(model), {2: speech(10, 60)})
    beside_backlog = Streams(make_runner(model), {2: speech(10, 60)})
    uploads = Uploads(beside_backlog.runner)
    at_once, _ = Uploads(make_runner(model)).read(10_000)
    for step in range(12):
        for streams in (alone, beside_backlog):
            streams.step(final=step == 11)
        if uploads.plan.decode:
            uploads.stint(2)
    assert beside_backlog.tokens(2) == alone.tokens(2)
    assert uploads.read(2)[0] == at_once


def test_backlog_that_closes_half_read_leaves_the_others_their_words(model: Moonshine) -> None:
    (_, kept), _ = Uploads(make_runner(model)).read(10_000)
    uploads = Uploads(make_runner(model))
    uploads.stint(3)
    uploads.stint(10_000, closed=[0])
    assert uploads.results == {1: kept}
    uploads = Uploads(uploads.runner)
    uploads.stint(3)
    assert not uploads.results
    uploads.stint(1, closed=[0, 1])
    again, _ = Uploads(uploads.runner).read(10_000)
    assert again[1] == kept, "nothing is left of windows whose streams have gone"


class Scripted:
    """A decoder that says the same of every window; attention to its first words is far off."""

    tokens, peaks = [4, 5, 7, 8, 10], [120, 128, 30, 50, 90]

    def passes(self, rows: list[Row], encoded: Encoded) -> Iterator[None]:
        for row in rows:
            row.tokens, row.peaks, row.log_probabilities = self.tokens, self.peaks, [0.0] * 5
            row.ended = row.done = True
        return iter(())


@pytest.mark.parametrize("live", [False, True])
def test_a_stray_peak_costs_a_file_no_words(model: Moonshine, monkeypatch: pytest.MonkeyPatch, live: bool) -> None:
    """A live stream would take it for audio that it has read before."""
    runner = make_runner(model)
    monkeypatch.setattr(runner.windows, "decoder", Scripted())
    plan = Uploads(runner, seeds=(42,)).plan
    plan.opened[0].live, plan.live = live, int(live)
    (result,) = runner.execute(plan)
    said = [timed.token for timed in result.timed]
    assert result.keep_from == WINDOW and said == (Scripted.tokens[:2] if live else Scripted.tokens)
    assert all(0 <= timed.start <= timed.end <= WINDOW for timed in result.timed)
    if not live:
        assert result.timed[2].end < result.timed[4].start < 28, "a word is where attention to it peaks"


class Dictation:
    """A decoder that says given tokens, one list for each pass."""

    def __init__(self, *passes: list[int]) -> None:
        self.left = list(passes)
        self.prefixes: list[list[int]] = []

    def passes(self, rows: list[Row], encoded: Encoded) -> Iterator[None]:
        for row in rows:
            self.prefixes.append(row.committed)
            row.tokens = self.left.pop(0)
            row.peaks = [round(row.frames * (place + 1) / (len(row.tokens) + 1)) for place in range(len(row.tokens))]
            row.log_probabilities = [-0.5] * len(row.tokens)
            row.ended = row.done = True
        return iter(())


# What the pieces of `dictated` spell.
US, WE, WE_CAPITAL, HAD, STOP, COMMA = range(3, 9)


def dictated(model: Moonshine, *passes: list[int]) -> tuple[WindowedRunner, Dictation]:
    pieces = [b"", b"", b"", b" us", b" we", b" We", b" had", b".", b","] + [b"x"] * (VOCABULARY - 9)
    policy = Policy(doubt=-100.0)
    stream_encoders = WindowEncoder(model, pieces, policy), WindowEncoder(model, pieces, policy)
    windows, decoder = HostWindows(model, *stream_encoders, 400), Dictation(*passes)
    windows.decoder = decoder  # type: ignore[assignment]
    return WindowedRunner(model, Vocabulary(pieces), windowed_spec("tiny", WINDOW, STRIDE), policy, windows), decoder


def utterance(runner: WindowedRunner, base: int, end: int, pending: bool) -> DecodeResult:
    plan = StepPlan(base, decode=[DecodeTask(0, "s", base, base, end, [0] * (end - base), [], True, pending=pending)])
    plan.live = 1
    if not runner.slots:
        plan.opened.append(OpenTask(0, "s", 0, {}, []))
    return runner.execute(plan)[0]


def tokens(timed: Sequence[TimedToken]) -> list[int]:
    return [each.token for each in timed]


@pytest.mark.parametrize(
    ("gap", "pending", "prefix", "new", "said"),
    [
        (5, True, [US], [WE, HAD], [WE, HAD]),
        (5, True, [US], [COMMA, WE, HAD], [COMMA, WE, HAD]),
        (5, True, [US], [WE_CAPITAL, HAD], [STOP, WE_CAPITAL, HAD]),
        (5, False, [US, STOP], [WE, HAD], [WE_CAPITAL, HAD]),
        (60, True, [], [WE, HAD], [STOP, WE_CAPITAL, HAD]),
        (60, True, [], [STOP, WE, HAD], [STOP, WE_CAPITAL, HAD]),
    ],
    ids=["goes on", "comma", "new sentence", "new turn", "after a while", "no second mark"],
)
def test_what_stands_between_two_utterances(
    model: Moonshine, gap: int, pending: bool, prefix: list[int], new: list[int], said: list[int]
) -> None:
    """It is the same in a runner that goes on from a saved state."""
    first, decoder = dictated(model, [US, STOP], new)
    result = utterance(first, 0, 20, pending=False)
    assert (tokens(result.timed), tokens(result.pending)) == ([US], [STOP])
    saved, _ = first.save(0, 20, 20)
    assert tokens(utterance(first, 20 + gap, 50 + gap, pending).timed) == said
    assert decoder.prefixes == [[], prefix]
    other, _ = dictated(model, new)
    silence = [Item(0, 20, 0, b"k", np.zeros(20 * SAMPLES_PER_POSITION, np.float32))]
    other.execute(StepPlan(0, opened=[OpenTask(0, "s", 0, {}, [], saved, silence)]))
    assert tokens(utterance(other, 20 + gap, 50 + gap, pending).timed) == said


def test_a_window_never_outgrows_its_bound_and_times_move_forward(model: Moonshine) -> None:
    streams = Streams(make_runner(model), {0: speech(20, 60 * STRIDE)})
    for _ in range(60):
        streams.step()
        assert streams.steps * STRIDE - streams.base[0] < WINDOW
    times = [timed for result in streams.results[0] for timed in result.timed]
    assert all(timed.start <= timed.end <= 60 * STRIDE for timed in times)
    starts = [timed.start for timed in times]
    assert starts == sorted(starts)


def test_final_ends_the_window_and_forgets_it(model: Moonshine) -> None:
    streams = Streams(make_runner(model), {0: speech(21, 40)})
    for _ in range(4):
        streams.step()
    streams.step(final=True)
    assert streams.base[0] == streams.steps * STRIDE
    slot = streams.runner.slots[0]
    assert not slot.committed and not slot.hypothesis and not slot.spoken


def test_an_utterance_that_ends_at_its_pause_is_not_read_again(
    model: Moonshine, monkeypatch: pytest.MonkeyPatch
) -> None:
    audio = {slot: speech(30 + slot, 20) for slot in range(2)}
    plain, paused = Streams(make_runner(model), audio), Streams(make_runner(model), audio)
    for streams in (plain, paused):
        for _ in range(3):
            streams.step()
    plain.step(final=True)
    paused.step(pause=True)
    monkeypatch.setattr(model, "encode_in_pieces", None)
    paused.end_here()
    for slot in audio:
        assert paused.tokens(slot) == plain.tokens(slot) and plain.tokens(slot)
        assert not paused.runner.slots[slot].hypothesis


def test_an_utterance_that_goes_on_after_its_pause_is_read_to_its_end(
    model: Moonshine, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = Streams(make_runner(model), {0: speech(32, 30)})
    streams.step()
    streams.step(pause=True)
    streams.step()
    encoded, encode = list[int](), model.encode_in_pieces

    def counted(audio: torch.Tensor, lengths: list[int]) -> Iterator[None]:
        encoded.append(len(lengths))
        return (yield from encode(audio, lengths))

    monkeypatch.setattr(model, "encode_in_pieces", counted)
    streams.end_here()
    assert encoded == [1]


def test_words_go_out_at_a_pause_that_surely_ends_a_sentence_and_its_mark_stays_open(model: Moonshine) -> None:
    """A model that has ended its sentence has nothing more to say, and the speaker may go on."""
    runner = make_runner(model)
    runner.vocabulary.pieces[6] = b"."
    runner.execute(StepPlan(0, opened=[OpenTask(0, "s", 0, {}, [])]))
    audio = torch.from_numpy(speech(9, 20))[None]
    with torch.inference_mode():
        sound = EncodedAudio(model.encode(audio, [audio.shape[1]]), 0.0, 20.0)
    said = Row([], [], 9, None, sound.frames)
    for token, peak in ((4, 10), (5, 30), (6, 60), (2, 60)):
        said.add_token(DecodedToken(token, 0.0, peak), end_token=2)
    result = runner._result(DecodeTask(0, "s", 0, 15, 20, [], [], False, pause=True), sound, said)
    assert [timed.token for timed in result.timed] == [4, 5] and not result.pending
    final = runner._finish(DecodeTask(0, "s", 0, 20, 20, [0] * 20, [], True))
    assert not final.timed and [timed.token for timed in final.pending] == [6]


@pytest.mark.parametrize(("heard_at", "kept_from"), [((10, 14), 19), ((90, 95), 0)], ids=["old words", "new words"])
def test_a_pass_that_says_old_words_again_is_followed_by_one_that_does_not_know_them(
    model: Moonshine, heard_at: tuple[int, int], kept_from: int
) -> None:
    """A phrase is spoken for the second time, and the model continues as after the first time."""
    runner = make_runner(model)
    runner.execute(StepPlan(0, opened=[OpenTask(0, "s", 0, {}, [])]))
    audio = torch.from_numpy(speech(9, 30))[None]
    with torch.inference_mode():
        sound = EncodedAudio(model.encode(audio, [audio.shape[1]]), 0.0, 30.0)
    runner.slots[0].spoken = True
    runner.slots[0].committed = [
        HypothesisToken(4, 5.0),
        HypothesisToken(5, 10.0),
        HypothesisToken(7, 12.0),
        HypothesisToken(4, 15.0),
    ]
    said = Row([4, 5, 7, 4], [], 9, None, sound.frames)
    for token, peak in zip((5, 7), heard_at, strict=True):
        said.add_token(DecodedToken(token, -0.5, peak), end_token=2)
    result = runner._result(DecodeTask(0, "s", 0, 25, 29, [], [], False), sound, said)
    assert result.keep_from == kept_from and [timed.token for timed in result.timed] == []
    assert bool(runner.slots[0].committed) == (kept_from == 0)


def test_a_reused_slot_starts_afresh(model: Moonshine) -> None:
    runner = make_runner(model)
    streams = Streams(runner, {0: speech(22, 40)})
    for _ in range(4):
        streams.step()
    runner.execute(StepPlan(9, closed=[0]))
    assert not runner.slots
    again = Streams(runner, {0: speech(23, 40)})
    fresh = Streams(make_runner(model), {0: speech(23, 40)})
    for step in range(4):
        again.step(final=step == 3)
        fresh.step(final=step == 3)
    assert again.tokens(0) == fresh.tokens(0)


def test_warm_up_leaves_no_trace(model: Moonshine) -> None:
    runner = make_runner(model)
    runner.warm_up()
    assert not runner.slots and not slab_of(runner).rows.any()
    runner.close()


def opened(slot: int, saved: dict[str, object] | None = None) -> OpenTask:
    return OpenTask(slot, f"s{slot}", 0, {}, [], saved, [])


def reading_plan(runner: WindowedRunner, slots: Sequence[int], states: dict[int, dict[str, object]]) -> StepPlan:
    """Streams are opened and read for the first time."""
    plan = StepPlan(1, opened=[opened(slot, states.get(slot)) for slot in slots])
    for slot in slots:
        rows = list(range(1 + slot * 2 * STRIDE, 1 + (slot + 1) * 2 * STRIDE))
        plan.encode.append(EncodeTask(f"s{slot}", speech(slot, len(rows)), None, rows))
        plan.decode.append(DecodeTask(slot, f"s{slot}", 0, 0, len(rows), rows, [], False))
    plan.live = len(slots)
    return plan


def test_a_stream_whose_keywords_are_not_ready_waits_alone(model: Moonshine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that computes steps for all streams does not build trees, and waits for none."""
    may_build, make = threading.Event(), bias.KeywordTree
    builders: list[int] = []

    def building(keywords: list[Keyword], index: bias.TokenIndex) -> bias.KeywordTree:
        builders.append(threading.get_ident())
        assert may_build.wait(60)
        return make(keywords, index)

    def results_of(runner: WindowedRunner, ready_after: int) -> list[list[DecodeResult]]:
        plan = reading_plan(runner, [0, 1, 2], {})
        plan.opened[1].options = EXPECTED
        found = [runner.execute(plan)]
        for step in range(1, 5):
            if step == ready_after:
                may_build.set()
                tree = runner.slots[1].keywords
                assert tree is not None and tree.tree
            again = [task for task, result in zip(plan.decode, found[-1], strict=True) if result.unfinished]
            plan = StepPlan(step, decode=again)
            found.append(runner.execute(plan))
        return found

    wanted = make_runner(model)
    ready = reading_plan(wanted, [0, 1, 2], {})
    ready.opened[1].options = EXPECTED
    wanted._keywords.tree_in_background(EXPECTED).result()  # type: ignore[union-attr]
    expected = wanted.execute(ready)
    monkeypatch.setattr(bias, "KeywordTree", building)
    found = results_of(make_runner(model), 3)
    assert found[0][0] == expected[0] and found[0][2] == expected[2]
    assert [result.unfinished for results in found[:3] for result in results] == [False, True, False, True, True]
    assert found[3] == [expected[1]] and found[4] == []
    assert len(builders) == 1 and builders[0] != threading.get_ident()


def test_a_saved_state_that_cannot_be_loaded_ends_its_stream_alone(model: Moonshine) -> None:
    runner = make_runner(model)
    results = runner.execute(reading_plan(runner, [0, 1, 2], {1: {"committed": "nonsense"}}))
    assert [bool(result.error) for result in results] == [False, True, False]
    assert "state" in str(results[1].error)
    # The slot is free for another stream.
    again = reading_plan(runner, [1], {})
    again.closed = [1]
    assert runner.execute(again)[0].error is None


def broken_ear(runner: WindowedRunner, slots: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    hear = runner.windows.stream_encoder(True).encode

    def failing(task: DecodeTask, audio: torch.Tensor) -> EncodedAudio:
        if task.slot in slots:
            raise IndexError("a hole in the audio")
        return hear(task, audio)

    monkeypatch.setattr(runner.windows.stream_encoder(True), "encode", failing)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_stream_that_cannot_be_read_ends_alone(
    model: Moonshine, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(model, threads)
    broken_ear(runner, {1}, monkeypatch)
    results = runner.execute(reading_plan(runner, [0, 1, 2], {}))
    assert [bool(result.error) for result in results] == [False, True, False]


def test_streams_that_are_read_together_are_read_apart_when_that_fails(
    model: Moonshine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = make_runner(model)
    plan = reading_plan(calm, [0, 1, 2], {})
    calm._prepare(plan)
    wanted = calm._read_at_once(plan.decode)
    runner = make_runner(model)
    broken_ear(runner, {1}, monkeypatch)
    plan = reading_plan(runner, [0, 1, 2], {})
    runner._prepare(plan)
    found = runner._read_at_once(plan.decode)
    assert found[1].error and [found[slot] for slot in (0, 2)] == [wanted[slot] for slot in (0, 2)]


def test_a_model_that_can_read_no_stream_ends_the_engine(model: Moonshine, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(model)
    broken_ear(runner, set(range(6)), monkeypatch)
    with pytest.raises(RuntimeError, match="no stream can be read"):
        runner.execute(reading_plan(runner, range(6), {}))
