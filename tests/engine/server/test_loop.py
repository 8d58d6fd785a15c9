from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from engine.core.plan import DecodeResult, StepPlan, TimedToken
from engine.core.scheduler import Limits, Scheduler
from engine.errors import EngineDead
from engine.messages import (
    Abort,
    Closed,
    Dead,
    Failed,
    Feed,
    Finish,
    Flush,
    Flushed,
    Item,
    Open,
    Opened,
    Output,
    Refused,
    Speech,
    SpeechPaused,
    SpeechStarted,
    Text,
)
from engine.runner.base import Detector, SynchronousRunner, never
from engine.server.loop import EngineLoop
from engine.server.speech_track import GateSettings
from engine.spec import ModelSpec, Vocabulary

SPEC = ModelSpec(name="echo", sample_rate=16_000, samples_per_position=1280, look_back_samples=4, look_ahead_samples=2)
WINDOWED = replace(
    SPEC,
    look_back_samples=0,
    look_ahead_samples=0,
    rereads_window=True,
    stride_positions=4,
    window_positions=50,
    embeds_per_stream=50,
)


class EchoRunner(SynchronousRunner):
    """Says a letter for every position it hears; the letter is in the payload's first own sample."""

    def __init__(self, spec: ModelSpec = SPEC, fail: Callable[[StepPlan], None] | None = None) -> None:
        self.spec = spec
        self.vocabulary = Vocabulary([b"", *(bytes([97 + index]) for index in range(26))])
        self.fail = fail
        self.rows: dict[int, int] = {0: 0}

    def check_open(self, message: Open) -> None:
        if "language" in message.options:
            raise ValueError("this model has no languages; leave the option out")

    def compute(self, plan: StepPlan, time_is_up: Callable[[], bool] = never) -> list[DecodeResult]:
        if self.fail:
            self.fail(plan)
        for task in plan.encode:
            own = task.payload[self.spec.look_back_samples :][:: self.spec.samples_per_position]
            if task.mask is not None:
                own = own[: len(task.mask)][task.mask]
            self.rows |= dict(zip(task.rows, map(int, own), strict=False))
        results = []
        for task in plan.decode:
            heard = [self.rows[row] for row in task.rows]
            if not self.spec.rereads_window:
                results.append(DecodeResult(heard))
                continue
            new = heard[task.start - task.base :] if not task.final else heard
            timed = [TimedToken(token, task.base, task.end) for token in new if token] if task.final else []
            results.append(DecodeResult(timed=timed))
        return results

    def warm_up(self) -> None:
        pass

    def close(self) -> None:
        pass


class LoudnessDetector(Detector):
    """Speech is wherever the samples are not zero; one probability per 640 samples."""

    def __init__(self) -> None:
        self.streams: dict[str, int] = {}
        self.most = 0

    def open(self, stream: str, sample: int = 0) -> None:
        self.streams[stream] = sample

    def close(self, stream: str) -> None:
        del self.streams[stream]

    def launch(self, batch: list[tuple[str, NDArray[np.float32]]]) -> Callable[[], list[Speech]]:
        answers = []
        for stream, samples in batch:
            frames = samples.reshape(-1, 640)
            self.most = max(self.most, samples.size)
            answers.append(Speech(stream, self.streams[stream], 640, [float(bool(f.any())) for f in frames]))
            self.streams[stream] += samples.size
        return lambda: answers

    def pass_silence(self, stream: str, samples: int) -> Speech:
        self.streams[stream] += samples
        return Speech(stream, self.streams[stream] - samples, samples, [0.0])


def engine(
    runner: EchoRunner | None = None, detector: LoudnessDetector | None = None, gated: bool = False
) -> EngineLoop:
    runner = runner or EchoRunner()
    limits = Limits(max_streams=3, cache_embeds=200, step_positions=64, step_embeds=64)
    scheduler = Scheduler(runner.spec, limits, runner.vocabulary)
    return EngineLoop(scheduler, runner, detector, GateSettings() if gated else None)


def letter(position: int, value: int, spec: ModelSpec = SPEC) -> Item:
    payload = np.zeros(spec.look_back_samples + 1280 + spec.look_ahead_samples, np.float32)
    payload[spec.look_back_samples : spec.look_back_samples + 1280] = value
    return Item(position, 1, position * 1280, b"%d" % value, payload)


def drain(loop: EngineLoop) -> list[Output]:
    outputs: list[Output] = []
    while loop.has_work():
        step = loop.step()
        outputs += step.outputs if step else []
        loop.scheduler.check_integrity()
    return outputs


class TestBadInput:
    def test_each_mistake_ends_at_most_its_own_stream(self) -> None:
        loop = engine()
        loop.submit([Open("good"), Open("bad"), Feed("good", [letter(0, 1)])], 0)
        loop.submit([Feed("bad", [letter(5, 1)]), Feed("bad", [letter(2, 1)])], 1)
        loop.submit([Feed("nobody", [letter(0, 1)]), Open("good"), Flush("nobody", 1), Abort("nobody")], 2)
        outputs = drain(loop)
        assert [(output.stream, output.code) for output in outputs if isinstance(output, Failed)] == [
            ("bad", "BadItem")
        ]
        refused = [(output.stream, output.code) for output in outputs if isinstance(output, Refused)]
        assert refused == [
            ("nobody", "UnknownStream"),
            ("good", "DuplicateStream"),
            ("nobody", "UnknownStream"),
            ("nobody", "UnknownStream"),
        ]
        assert [output.delta for output in outputs if isinstance(output, Text)] == ["a"]
        assert list(loop.scheduler.streams) == ["good"]

    def test_feeding_after_finish_is_refused_and_the_stream_still_ends_well(self) -> None:
        loop = engine()
        loop.submit([Open("a"), Feed("a", [letter(0, 1)]), Finish("a"), Feed("a", [letter(1, 2)])], 0)
        outputs = drain(loop)
        assert [type(output) for output in outputs] == [Opened, Refused, Text, Closed]

    @pytest.mark.parametrize("detector", [None, LoudnessDetector()])
    def test_an_option_the_model_does_not_take(self, detector: LoudnessDetector | None) -> None:
        loop = engine(detector=detector)
        loop.submit([Open("a", options={"language": "en"})], 0)
        (failed,) = drain(loop)
        assert isinstance(failed, Failed) and failed.code == "BadOption" and "leave the option out" in failed.message

    def test_a_full_engine_says_so(self) -> None:
        loop = engine()
        loop.submit([Open(name) for name in "abcd"], 0)
        outputs = drain(loop)
        assert [type(output) for output in outputs] == [Opened, Opened, Opened, Failed]
        assert isinstance(outputs[-1], Failed) and outputs[-1].code == "AtCapacity"

    def test_a_runner_that_fails_altogether_is_reported_once(self, caplog: pytest.LogCaptureFixture) -> None:
        def explode(plan: StepPlan) -> None:
            if plan.decode:
                raise RuntimeError("device lost")

        loop = engine(EchoRunner(fail=explode))
        loop.submit([Open("a")], 0)
        loop.step()
        loop.submit([Feed("a", [letter(0, 1)])], 0)
        step = loop.step()
        assert step is not None and step.outputs == [Dead("the model runner failed: RuntimeError: device lost")]
        for call in (loop.step, lambda: loop.submit([Open("b")], 0)):
            with pytest.raises(EngineDead, match="start it anew"):
                call()
        assert "every stream" in caplog.text


def test_one_message_per_step_for_all_streams() -> None:
    loop = engine()
    loop.submit([Open("a"), Open("b")], 0)
    assert loop.step() is not None
    loop.submit([Feed("a", [letter(0, 1)]), Feed("b", [letter(0, 2)])], 1)
    step = loop.step()
    assert step is not None and step.step == 2
    assert [(output.stream, output.delta) for output in step.outputs if isinstance(output, Text)] == [
        ("a", "a"),
        ("b", "b"),
    ]
    assert loop.step() is None and not loop.has_work()


@pytest.mark.parametrize("spec", [SPEC, replace(WINDOWED, embeds_per_stream=60)], ids=["frames", "windowed"])
def test_the_same_audio_with_other_masks_is_other_input(spec: ModelSpec) -> None:
    loop = engine(EchoRunner(spec))
    payload = np.repeat(np.arange(1, 5, dtype=np.float32), 1280)
    payload = np.pad(payload, (spec.look_back_samples, spec.look_ahead_samples))
    masks = {"a": [True, True, False, True], "b": [False, True, True, False], "c": None}
    said = dict.fromkeys(masks, "")
    for _ in range(2):
        for name, mask in masks.items():
            loop.submit([Open(name), Feed(name, [Item(0, 4, 0, b"k" * 16, payload, mask)]), Finish(name)], 0)
        steps = 0
        while loop.has_work():
            step = loop.step()
            loop.scheduler.check_integrity()
            for output in [] if step is None else step.outputs:
                said[output.stream] += output.delta if isinstance(output, Text) else ""
            steps += 1
            assert steps < 50, "a stream that never ends"
        assert not loop.scheduler.streams
    assert said == {"a": "abd" * 2, "b": "bc" * 2, "c": "abcd" * 2}
    assert loop.scheduler.cache.hits == 3, "the second time all three are cached"


def test_times_say_where_the_step_went() -> None:
    ticks = iter(range(0, 1000, 10))
    runner = EchoRunner()
    limits = Limits(max_streams=1, cache_embeds=20)
    loop = EngineLoop(Scheduler(SPEC, limits, runner.vocabulary), runner, clock=lambda: next(ticks))
    loop.submit([Open("a"), Feed("a", [letter(0, 1)])], 0)
    loop.step()
    times = loop.meter.times
    # Waiting for results reads the clock twice more.
    assert (times.speech_ns, times.plan_ns, times.execute_ns, times.commit_ns) == (10, 10, 30, 10)
    assert loop.meter.totals.wait_ns == 10
    assert (times.streams, times.positions) == (1, 1)


class TestSpeech:
    def test_probabilities_come_out_and_padding_is_not_heard(self) -> None:
        detector = LoudnessDetector()
        loop = engine(detector=detector)
        padded = structs.replace(letter(1, 2), samples=640)
        gap = Item(2, 2, 1920, mask=[False, False])
        loop.submit([Open("a"), Feed("a", [letter(0, 1), padded, gap])], 0)
        speech = [output for output in drain(loop) if isinstance(output, Speech)]
        assert [(heard.sample, heard.frame_samples) for heard in speech] == [(0, 640)]
        assert speech[0].probabilities == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
        assert speech[0].events == [SpeechStarted(0, 1280), SpeechPaused(1920, 2560)] and speech[0].spoken == 1920
        loop.submit([Finish("a")], 0)
        assert [type(output) for output in drain(loop)] == [Text, Closed] and detector.streams == {}

    def feed(self, loop: EngineLoop, start: int, values: list[int]) -> list[Output]:
        outputs = []
        for index, value in enumerate(values):
            loop.submit([Feed("a", [letter(start + index, value, WINDOWED)])], start + index)
            outputs += drain(loop)
        return outputs

    def test_the_gate_lets_speech_by_and_silence_never_reaches_the_model(self) -> None:
        runner = EchoRunner(WINDOWED)
        loop = engine(runner, LoudnessDetector(), gated=True)
        loop.submit([Open("a")], 0)
        drain(loop)
        self.feed(loop, 0, [0] * 500)
        assert loop.scheduler.cache.queries == 0, "nothing was encoded"
        outputs = self.feed(loop, 500, [1] * 10 + [0] * 10)
        texts = [output for output in outputs if isinstance(output, Text) and output.delta]
        assert [text.delta for text in texts] == ["a" * 10]
        assert not loop.has_work()

    def test_silence_in_a_burst_never_reaches_the_model(self) -> None:
        loop = engine(EchoRunner(WINDOWED), LoudnessDetector(), gated=True)
        values = [0] * 30 + [1] * 10 + [0] * 100 + [2] * 10 + [0] * 40
        items = [letter(position, value, WINDOWED) for position, value in enumerate(values)]
        loop.submit([Open("a"), Feed("a", items)], 0)
        texts = [output for output in drain(loop) if isinstance(output, Text)]
        assert "".join(text.delta for text in texts) == "a" * 10 + "b" * 10
        assert loop.scheduler.cache.queries < 50, "only speech and what surrounds it is encoded"

    def windows(self, values: list[int], live: bool) -> tuple[str, list[tuple[int, int]]]:
        """What was said of a stream that comes position by position, and the windows whose text was final."""
        final: list[tuple[int, int]] = []

        def note(plan: StepPlan) -> None:
            final.extend((task.base, task.end) for task in plan.decode if task.final)

        spec = replace(WINDOWED, file_window_positions=64)
        loop = engine(EchoRunner(spec, note), LoudnessDetector(), gated=True)
        loop.submit([Open("a", live=live)], 0)
        outputs = self.feed(loop, 0, values)
        loop.submit([Finish("a")], len(values))
        outputs += drain(loop)
        return "".join(output.delta for output in outputs if isinstance(output, Text)), final

    def test_a_pause_in_a_file_ends_nothing(self) -> None:
        values = [1] * 10 + [0] * 12 + [2] * 10 + [0] * 120
        live, utterances = self.windows(values, live=True)
        said, final = self.windows(values, live=False)
        assert said == live == "a" * 10 + "b" * 10
        assert len(utterances) == 2 and len(final) == 1

    def test_what_is_too_long_in_a_file_is_cut_where_it_is_quiet(self) -> None:
        said, final = self.windows([0] * 50 + [3] * 40 + [0] * 3 + [4] * 100, live=False)
        assert said == "c" * 40 + "d" * 100
        assert all(end - base <= 64 for base, end in final) and len(final) == 3
        assert 90 <= final[0][1] <= 93 and [base for base, _ in final[1:]] == [end for _, end in final[:-1]]

    def test_an_hour_of_declared_silence_costs_next_to_nothing(self) -> None:
        hour, detector = 45_000, LoudnessDetector()
        loop = engine(EchoRunner(WINDOWED), detector, gated=True)
        items = [letter(position, 1, WINDOWED) for position in range(10)]
        items.append(Item(10, hour, 10 * 1280))
        end = 10 + hour
        items += [letter(end + index, 2 if index < 10 else 0, WINDOWED) for index in range(20)]
        loop.submit([Open("a"), Feed("a", items)], 0)
        outputs = drain(loop)
        assert detector.most <= 10 * 1280 + 2 * SPEC.sample_rate
        speech = [output for output in outputs if isinstance(output, Speech)]
        assert len(speech) == 3
        assert [part.sample for part in speech[1:]] == [
            part.sample + len(part.probabilities) * part.frame_samples for part in speech[:-1]
        ]
        texts = [output for output in outputs if isinstance(output, Text) and output.delta]
        assert "".join(text.delta for text in texts) == "a" * 10 + "b" * 10

    def test_a_flush_ends_an_utterance_in_the_middle_and_the_rest_follows(self) -> None:
        loop = engine(EchoRunner(WINDOWED), LoudnessDetector(), gated=True)
        loop.submit([Open("a")], 0)
        outputs = drain(loop) + self.feed(loop, 0, [1] * 8)
        loop.submit([Flush("a", 3)], 9)
        outputs += drain(loop)
        assert [type(output) for output in outputs[-2:]] == [Text, Flushed]
        outputs += self.feed(loop, 8, [2] * 8)
        loop.submit([Finish("a")], 20)
        outputs += drain(loop)
        said = "".join(output.delta for output in outputs if isinstance(output, Text))
        assert said == "a" * 8 + "b" * 8
        assert isinstance(outputs[-1], Closed)

    def test_finish_closes_a_stream_that_never_spoke(self) -> None:
        loop = engine(EchoRunner(WINDOWED), LoudnessDetector(), gated=True)
        loop.submit([Open("a"), Feed("a", [letter(0, 0, WINDOWED)]), Finish("a")], 0)
        outputs = drain(loop)
        assert isinstance(outputs[-1], Closed) and not [o for o in outputs if isinstance(o, Text)]
