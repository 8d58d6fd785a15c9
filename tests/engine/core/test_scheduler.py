from __future__ import annotations

from dataclasses import replace

import pytest

from engine.core.plan import SILENCE_ROW, DecodeResult, DecodeTask, StepPlan, TimedToken
from engine.core.scheduler import MAX_CATCH_UP_POSITIONS, STRIDES_IN_TIME, Limits, Scheduler
from engine.errors import (
    AtCapacity,
    BadItem,
    BadOption,
    DuplicateStream,
    ItemTooLarge,
    StreamError,
    StreamFinished,
    UnknownStream,
)
from engine.messages import Closed, Failed, Flushed, Item, Open, Output, Text
from engine.spec import KvGroup, ModelSpec, Vocabulary

VOCABULARY = Vocabulary([b"", b"", b" a", b" b", b" c", b".", b","], word_marker=1)
FRAMES = ModelSpec(
    name="frames",
    sample_rate=16_000,
    samples_per_position=100,
    prefix_positions=2,
    flush_positions=1,
    default_delay_positions=1,
    max_delay_positions=3,
    history_positions=8,
    embeds_per_stream=8,
    kv_groups=(KvGroup("decoder", window_positions=8, page_positions=4, bytes_per_position=1),),
)
WINDOWS = ModelSpec(
    name="windows",
    sample_rate=16_000,
    samples_per_position=100,
    rereads_window=True,
    stride_positions=4,
    window_positions=16,
    embeds_per_stream=20,
    history_positions=8,
)


def scheduler(spec: ModelSpec = FRAMES, streams: int = 4, **changes: int) -> Scheduler:
    pages = tuple(group.ring_pages * streams for group in spec.kv_groups)
    limits = Limits(streams, spec.embeds_for(live=False) * streams, pages, step_positions=64, step_embeds=64)
    return Scheduler(spec, replace(limits, **changes), VOCABULARY)


def frame(position: int, length: int = 1, key: bytes | None = None, spec: ModelSpec = FRAMES) -> Item:
    sample = (position - spec.prefix_positions) * spec.samples_per_position
    return Item(position, length, sample, key or b"%d" % position, b"pcm")


def gap(position: int, length: int, spec: ModelSpec = FRAMES) -> Item:
    sample = (position - spec.prefix_positions) * spec.samples_per_position
    return Item(position, length, sample)


def answer(plan: StepPlan, token: int = 0) -> list[DecodeResult]:
    return [DecodeResult([token] * (task.end - task.start)) for task in plan.decode]


def step(engine: Scheduler, token: int = 0) -> tuple[StepPlan, list[Output]]:
    plan = engine.plan()
    outputs = engine.commit(plan, answer(plan, token))
    engine.check_integrity()
    return plan, outputs


class TestBadInput:
    @pytest.mark.parametrize(
        ("bad", "error"),
        [
            (frame(1), BadItem),
            (Item(-1, 1, 0, b"k", b"pcm"), BadItem),
            (Item(4, -1, 0, b"k", b"pcm"), BadItem),
            (Item(4, 1, 100, b"k", b"pcm"), BadItem),  # samples run backwards
            (Item(4, 1, 200, b"k", None), BadItem),
            (Item(4, 1, 200, b"", b"pcm"), BadItem),
            (Item(4, 2, 200, b"k", b"pcm", mask=[True]), BadItem),
            (frame(4, 9), ItemTooLarge),
        ],
    )
    def test_an_item_that_cannot_be(self, bad: Item, error: type[StreamError]) -> None:
        engine = scheduler()
        for name in ("good", "bad"):
            engine.admit(Open(name))
            engine.feed(name, [frame(2), frame(3)], 0)
        with pytest.raises(error, match="'bad'"):
            engine.feed("bad", [bad], 1)
        engine.fail(BadItem("bad", "was refused"))
        plan, outputs = step(engine)
        assert [task.stream for task in plan.decode] == ["good"]
        assert outputs == [Failed("bad", "BadItem", "stream 'bad': was refused")]

    def test_unknown_duplicate_and_finished_streams(self) -> None:
        engine = scheduler()
        engine.admit(Open("a"))
        with pytest.raises(DuplicateStream, match="use another id"):
            engine.admit(Open("a"))
        for call in (lambda: engine.feed("b", [frame(2)], 0), lambda: engine.flush("b", 1), lambda: engine.abort("b")):
            with pytest.raises(UnknownStream, match="open it first"):
                call()
        engine.feed("a", [frame(2)], 0)
        engine.finish("a")
        with pytest.raises(StreamFinished, match="open a new stream"):
            engine.feed("a", [frame(3)], 0)
        engine.check_integrity()

    def test_a_delay_the_model_does_not_take(self) -> None:
        with pytest.raises(BadOption, match="0 to 3"):
            scheduler().admit(Open("a", delay_positions=4))

    def test_limits_that_could_never_work_are_refused_at_the_start(self) -> None:
        with pytest.raises(ValueError, match="raise step_positions"):
            scheduler(WINDOWS, step_positions=8)
        with pytest.raises(ValueError, match="raise step_embeds"):
            scheduler(step_embeds=0)
        with pytest.raises(ValueError, match="groups of pages"):
            Scheduler(FRAMES, Limits(1, 8), VOCABULARY)
        with pytest.raises(ValueError, match="at least the window of 16"):
            scheduler(replace(WINDOWS, embeds_per_stream=8))

    def test_an_item_larger_than_a_step_may_encode(self) -> None:
        engine = scheduler(step_embeds=2)
        engine.admit(Open("a"))
        with pytest.raises(ItemTooLarge, match="at most 2"):
            engine.feed("a", [frame(2, 3)], 0)

    def test_a_model_that_fails_on_one_stream_ends_that_stream(self) -> None:
        engine = scheduler()
        for name in ("a", "b"):
            engine.admit(Open(name))
            engine.feed(name, [frame(2, key=name.encode())], 0)
        plan = engine.plan()
        results = answer(plan)
        results[0] = DecodeResult(error="NaN in the logits")
        outputs = engine.commit(plan, results)
        assert outputs == [
            Failed("a", "StreamFailed", "stream 'a': the model failed on this stream: NaN in the logits")
        ]
        engine.check_integrity()
        engine.feed("b", [frame(3)], 1)
        plan, _ = step(engine)
        assert plan.closed == [0] and [task.stream for task in plan.decode] == ["b"]

    @pytest.mark.parametrize(
        ("spec", "result", "complaint"),
        [
            (FRAMES, DecodeResult([]), "0 tokens for 1 positions"),
            (WINDOWS, DecodeResult(keep_from=-1), "outside"),
            (WINDOWS, DecodeResult(keep_from=99), "outside"),
            (WINDOWS, DecodeResult(), "did not move"),
        ],
    )
    def test_a_runner_that_breaks_its_promise_ends_the_stream(
        self, spec: ModelSpec, result: DecodeResult, complaint: str
    ) -> None:
        engine = scheduler(spec)
        engine.admit(Open("a", live=False))
        start = spec.prefix_positions
        engine.feed("a", [frame(p, spec=spec) for p in range(start, start + spec.upload_positions)], 0)
        outputs = engine.commit(engine.plan(), [result])
        assert isinstance(outputs[0], Failed) and complaint in outputs[0].message
        engine.check_integrity()


class TestAdmission:
    def test_a_full_engine_refuses_and_changes_nothing(self) -> None:
        engine = scheduler(streams=2)
        engine.admit(Open("a"))
        engine.admit(Open("b"))
        with pytest.raises(AtCapacity, match="all 2 streams"):
            engine.admit(Open("c"))
        engine.check_integrity()
        engine.abort("a")
        engine.admit(Open("c"))

    def test_pages_and_cache_rows_are_set_aside(self) -> None:
        with pytest.raises(AtCapacity, match="decoder pages"):
            scheduler(group_pages=(2,)).admit(Open("a"))  # type: ignore[arg-type]
        with pytest.raises(AtCapacity, match="encoder cache"):
            scheduler(cache_embeds=7).admit(Open("a"))

    def test_a_stream_that_closes_before_its_first_plan_never_reaches_the_runner(self) -> None:
        engine = scheduler()
        engine.admit(Open("a"))
        engine.abort("a")
        plan, outputs = step(engine)
        assert plan.opened == [] and plan.closed == [] and outputs == [Closed("a", 0)]

    def test_a_slot_is_closed_before_it_is_opened_again(self) -> None:
        engine = scheduler(streams=1)
        engine.admit(Open("a"))
        step(engine)
        engine.abort("a")
        engine.admit(Open("b"))
        plan, _ = step(engine)
        assert plan.closed == [0] and [task.stream for task in plan.opened] == ["b"]


class TestFrames:
    def test_a_frame_that_arrives_is_in_the_next_step(self) -> None:
        engine = scheduler()
        engine.admit(Open("a", delay_positions=2, options={"language": "en"}))
        engine.feed("a", [frame(2)], 0)
        plan, outputs = step(engine)
        assert [(task.slot, task.delay_positions) for task in plan.opened] == [(0, 2)]
        (encode,) = plan.encode
        (decode,) = plan.decode
        assert encode.payload == b"pcm" and decode.rows == encode.rows
        assert (decode.base, decode.start, decode.end, decode.final) == (2, 2, 3, False)
        assert decode.new_pages == [(0, 0, 0)]  # the prefix and this position share a page
        assert outputs == []

    def test_payloads_are_dropped_when_encoded(self) -> None:
        engine = scheduler()
        engine.admit(Open("a"))
        item = frame(2)
        engine.feed("a", [item], 0)
        step(engine)
        assert item.payload is None

    def test_a_gap_costs_no_cache_and_reads_silence(self) -> None:
        engine = scheduler(replace(FRAMES, step_positions=8))
        engine.admit(Open("a"))
        engine.feed("a", [frame(2), gap(3, 3), frame(6)], 0)
        plan, _ = step(engine)
        assert len(plan.encode) == 2
        (task,) = plan.decode
        assert task.rows == [plan.encode[0].rows[0], *[SILENCE_ROW] * 3, plan.encode[1].rows[0]]

    def test_positions_without_an_item_read_silence(self) -> None:
        engine = scheduler(replace(FRAMES, step_positions=8))
        engine.admit(Open("a"))
        engine.feed("a", [frame(4), frame(7)], 0)
        (task,) = step(engine)[0].decode
        assert [row != SILENCE_ROW for row in task.rows] == [False, False, True, False, False, True]

    def test_part_of_an_item_is_read_by_several_steps(self) -> None:
        engine = scheduler(replace(FRAMES, step_positions=2))
        engine.admit(Open("a"))
        item = Item(2, 5, 0, b"k", b"pcm", mask=[True, False, True, True, False])
        engine.feed("a", [item], 0)
        rows = []
        plans = []
        while engine.has_work():
            plan, _ = step(engine)
            plans.append(plan)
            rows += [row for task in plan.decode for row in task.rows]
        encoded = plans[0].encode[0].rows
        assert len(encoded) == 3
        assert rows == [encoded[0], SILENCE_ROW, encoded[1], encoded[2], SILENCE_ROW]
        assert all(not plan.encode for plan in plans[1:])

    def test_equal_audio_is_encoded_once(self) -> None:
        engine = scheduler()
        for name in ("a", "b"):
            engine.admit(Open(name))
            engine.feed(name, [frame(2, key=b"same")], 0)
        plan, _ = step(engine)
        assert len(plan.encode) == 1 and len(plan.decode) == 2
        assert plan.decode[0].rows == plan.decode[1].rows
        assert engine.cache.hits == 1

    def test_text_words_and_times(self) -> None:
        engine = scheduler()
        engine.admit(Open("a", delay_positions=1))
        outputs: list[Output] = []
        for position, token in enumerate([0, 1, 2, 0, 1, 3, 0], 2):
            engine.feed("a", [frame(position)], position)
            outputs += step(engine, token)[1]
        engine.finish("a")
        outputs += step(engine)[1]
        texts = [output for output in outputs if isinstance(output, Text)]
        assert "".join(text.delta for text in texts) == " a b"
        words = [word for text in texts for word in text.words]
        assert [(word.text, word.start_sample) for word in words] == [("a", 0), ("b", 300)]
        assert texts[0].tokens == [0, 1, 2]

    def test_no_text_no_message(self) -> None:
        engine = scheduler()
        engine.admit(Open("a"))
        said = []
        for position in range(2, 200):
            engine.feed("a", [frame(position)], 0)
            said += step(engine)[1]
        assert len(said) == 3, "blanks are reported now and then, not at every step"
        assert all(isinstance(output, Text) and output.delta == "" and len(output.tokens) == 64 for output in said)

    def test_flush_is_answered_when_everything_before_it_is_computed(self) -> None:
        engine = scheduler()
        engine.admit(Open("a"))
        engine.feed("a", [frame(2)], 0)
        first = engine.plan()
        engine.feed("a", [frame(3)], 0)
        engine.flush("a", 7)
        assert engine.commit(first, [DecodeResult(tokens=[1])]) == []
        assert step(engine)[1] == [Flushed("a", 7, 200)]
        engine.flush("a", 8)
        assert engine.take_replies() == [Flushed("a", 8, 200)]

    def test_flush_ahead_of_the_audio_is_answered_when_the_audio_has_come(self) -> None:
        engine = scheduler()
        engine.admit(Open("a"))
        engine.feed("a", [frame(2)], 0)
        engine.flush("a", 7, 4)
        assert step(engine)[1] == []
        assert not engine.has_work(), "nothing can be done for it yet"
        engine.feed("a", [frame(3), frame(4)], 0)
        assert step(engine)[1] == [Flushed("a", 7, 200)]
        engine.flush("a", 8, 9)
        engine.finish("a")
        assert step(engine)[1] == [Flushed("a", 8, 300), Closed("a", 300)], "no more will come"

    def test_finish_runs_out_then_closes(self) -> None:
        engine = scheduler()
        engine.admit(Open("a"))
        engine.feed("a", [frame(position) for position in range(2, 2 + MAX_CATCH_UP_POSITIONS + 1)], 0)
        engine.finish("a")
        assert step(engine)[1] == []
        assert step(engine)[1] == [Closed("a", 500)]
        assert engine.streams == {} and engine.plan().closed == [0]

    def test_forced_tokens_run_in_chunks_and_are_not_said_again(self) -> None:
        engine = scheduler(replace(FRAMES, replay_positions=4))
        engine.admit(Open("a", forced_tokens=[0, 1, 2, 0, 1]))
        engine.feed("a", [frame(position) for position in range(2, 10)], 0)
        spans = []
        outputs: list[Output] = []
        forced = [0, 1, 2, 0, 1, 3, 0, 0]
        while engine.has_work():
            plan = engine.plan()
            (task,) = plan.decode
            spans.append((task.start, task.end))
            outputs += engine.commit(plan, [DecodeResult(forced[task.start - 2 : task.end - 2])])
        assert spans == [(2, 6), (6, 7), (7, 10)]
        assert [output.delta for output in outputs if isinstance(output, Text)] == [" b"]

    def test_a_rebuild_goes_on_in_the_next_plan_before_the_last_one_is_committed(self) -> None:
        """It needs no results. What follows the known tokens does, and waits."""
        engine = scheduler(replace(FRAMES, replay_positions=4, embeds_per_stream=32))
        forced = [0, 1, 2, 0, 1, 3, 0, 0, 2, 0]
        engine.admit(Open("a", forced_tokens=forced))
        engine.feed("a", [frame(position) for position in range(2, 16)], 0)
        plans = [engine.plan() for _ in range(4)]
        assert [[(task.start, task.end) for task in plan.decode] for plan in plans] == [
            [(2, 6)],
            [(6, 10)],
            [(10, 12)],
            [],
        ]
        assert [plan.rebuilt_positions for plan in plans] == [4, 4, 2, 0]
        engine.check_integrity()
        for plan in plans:
            engine.commit(plan, [DecodeResult(forced[task.start - 2 : task.end - 2]) for task in plan.decode])
            engine.check_integrity()
        assert not engine.rebuilding and [task.start for task in engine.plan().decode] == [12]

    def test_a_rebuild_that_ends_with_two_plans_under_way_leaves_its_slot_to_the_next_stream(self) -> None:
        engine = scheduler(replace(FRAMES, replay_positions=4, embeds_per_stream=32), streams=1)
        engine.admit(Open("a", forced_tokens=[0] * 8))
        engine.feed("a", [frame(position) for position in range(2, 12)], 0)
        old = [engine.plan(), engine.plan()]
        engine.abort("a")
        engine.admit(Open("b", forced_tokens=[0] * 8))
        engine.feed("b", [frame(position, key=b"b") for position in range(2, 12)], 0)
        new = [engine.plan(), engine.plan()]
        engine.check_integrity()
        for plan in (*old, *new):
            engine.commit(plan, [DecodeResult([0] * (task.end - task.start)) for task in plan.decode])
            engine.check_integrity()
        assert engine.streams["b"].computed == 10


class TestOrder:
    def test_the_frame_that_waited_longest_goes_first(self) -> None:
        engine = scheduler(step_positions=1)
        for name, arrival in (("late", 30), ("early", 10), ("middle", 20)):
            engine.admit(Open(name))
            engine.feed(name, [frame(2, key=name.encode())], arrival)
        order = [step(engine)[0].decode[0].stream for _ in range(3)]
        assert order == ["early", "middle", "late"]

    def test_backlog_fills_only_what_live_streams_leave(self) -> None:
        engine = scheduler(step_positions=2)
        engine.admit(Open("file", live=False))
        engine.feed("file", [frame(position, key=b"f%d" % position) for position in range(2, 12)], 0)
        for name in ("x", "y"):
            engine.admit(Open(name))
            engine.feed(name, [frame(2, key=name.encode())], 5)
        assert {task.stream for task in step(engine)[0].decode} == {"x", "y"}
        assert [task.stream for task in step(engine)[0].decode] == ["file"]

    def test_backlog_streams_take_turns(self) -> None:
        engine = scheduler(step_positions=1)
        for name in ("p", "q"):
            engine.admit(Open(name, live=False))
            engine.feed(name, [frame(position, key=b"%s%d" % (name.encode(), position)) for position in (2, 3)], 0)
        assert [step(engine)[0].decode[0].stream for _ in range(4)] == ["p", "q", "p", "q"]

    def test_a_plan_holds_no_more_backlog_than_it_may_and_all_live_streams(self) -> None:
        engine = scheduler(streams=8)
        for name in "pqrst":
            engine.admit(Open(name, live=False))
            engine.feed(name, [frame(position, key=b"%s%d" % (name.encode(), position)) for position in range(2, 8)], 0)
        engine.admit(Open("live"))
        computed = dict.fromkeys("pqrst", 0)
        for position in range(2, 17):
            engine.feed("live", [frame(position, key=b"l%d" % position)], position)
            plan = engine.plan(upload_positions=2)
            assert [task.stream for task in plan.decode[: plan.live]] == ["live"]
            backlog = plan.decode[plan.live :]
            assert sum(task.end - task.base for task in backlog) == 2
            for task in backlog:
                computed[task.stream] += 1
            assert max(computed.values()) - min(computed.values()) <= 1, "uploads take turns"
            engine.commit(plan, answer(plan))
            engine.check_integrity()
        assert set(computed.values()) == {6}

    def test_a_step_without_backlog_and_one_of_backlog_alone(self) -> None:
        engine = scheduler()
        for name, live in (("live", True), ("file", False)):
            engine.admit(Open(name, live=live))
            engine.feed(name, [frame(2, key=name.encode())], 0)
        assert engine.live_waits and engine.uploads_wait
        plan = engine.plan(live=False)
        assert [task.stream for task in plan.decode] == ["file"] and plan.live == 0 and len(plan.opened) == 2
        engine.commit(plan, answer(plan))
        engine.feed("file", [frame(3, key=b"more")], 0)
        plan = engine.plan(upload_positions=0)
        assert [task.stream for task in plan.decode] == ["live"] and plan.live == 1
        engine.commit(plan, answer(plan))
        assert engine.uploads_wait and not engine.live_waits

    def test_parked_streams_are_in_no_queue(self) -> None:
        engine = scheduler(streams=4)
        for name in ("a", "b", "c"):
            engine.admit(Open(name))
        step(engine)
        assert not engine.has_work()
        assert engine.live == [] and not engine.uploads

    def test_a_small_encoder_budget_spreads_the_work(self) -> None:
        engine = scheduler(step_embeds=1)
        for name in ("a", "b"):
            engine.admit(Open(name))
            engine.feed(name, [frame(2, key=name.encode())], 0)
        assert [task.stream for task in step(engine)[0].decode] == ["a"]
        assert [task.stream for task in step(engine)[0].decode] == ["b"]

    def test_a_stream_holds_no_more_of_the_cache_than_was_set_aside(self) -> None:
        engine = scheduler(replace(FRAMES, step_positions=64), streams=1)
        engine.admit(Open("a"))
        engine.feed("a", [frame(2 + 3 * index, 3) for index in range(6)], 0)
        spans = []
        while engine.has_work():
            (task,) = step(engine)[0].decode
            spans.append((task.start, task.end))
        assert spans == [(2, 8), (8, 14), (14, 20)]


class TestUnfinished:
    """A runner lays backlog aside and goes on with it in a later step."""

    def engine(self) -> Scheduler:
        engine = scheduler(WINDOWS)
        for name in ("p", "q"):
            engine.admit(Open(name, live=False))
            engine.feed(name, [frame(at, key=b"%s%d" % (name.encode(), at), spec=WINDOWS) for at in range(24)], 0)
        return engine

    @staticmethod
    def lay_aside(engine: Scheduler) -> StepPlan:
        plan = engine.plan()
        assert engine.commit(plan, [DecodeResult(unfinished=True) for _ in plan.decode]) == []
        engine.check_integrity()
        return plan

    def test_the_same_tasks_come_again_with_others_that_fit_beside_them(self) -> None:
        engine = self.engine()
        first = self.lay_aside(engine)
        assert [task.stream for task in first.decode] == ["p", "q"]
        engine.admit(Open("r", live=False))
        engine.feed("r", [frame(at, key=b"r%d" % at, spec=WINDOWS) for at in range(24)], 0)
        engine.feed("p", [frame(24, key=b"p24", spec=WINDOWS)], 1)
        engine.flush("p", 1, 3)
        second = self.lay_aside(engine)
        assert second.decode[:2] == first.decode and [task.stream for task in second.decode[2:]] == ["r"]
        assert {encoded.stream for encoded in second.encode} == {"r"}, "no new audio of the others is in it"
        assert engine.has_work() and engine.plan(upload_positions=0).decode == []
        plan = engine.plan()
        engine.commit(plan, [DecodeResult(keep_from=12), *[DecodeResult(unfinished=True)] * 2])
        engine.check_integrity()
        assert engine.streams["p"].computed == 16, "it does not wait for the others"
        assert [task.stream for task in engine.plan().decode] == ["q", "r", "p"]

    def test_a_stream_that_ends_meanwhile_is_forgotten_even_if_its_name_comes_again(self) -> None:
        engine = self.engine()
        self.lay_aside(engine)
        engine.abort("p")
        engine.admit(Open("p", live=False))
        engine.check_integrity()
        plan = engine.plan()
        assert [task.stream for task in plan.decode] == ["q"]
        assert plan.closed == [0] and [opened.slot for opened in plan.opened] == [0]


class TestWindows:
    """Encoder-decoder streams: every step reads its window from the first item that is still alive."""

    @staticmethod
    def run(engine: Scheduler, result: DecodeResult) -> tuple[DecodeTask, list[Output]]:
        plan = engine.plan()
        (task,) = plan.decode
        outputs = engine.commit(plan, [result])
        engine.check_integrity()
        return task, outputs

    def engine(self) -> Scheduler:
        engine = scheduler(WINDOWS)
        engine.admit(Open("a"))
        engine.commit(engine.plan(), [])
        return engine

    def feed(self, engine: Scheduler, start: int, end: int) -> None:
        engine.feed("a", [frame(position, spec=WINDOWS) for position in range(start, end)], start)

    def test_a_step_waits_for_a_stride_and_reads_the_whole_window_again(self) -> None:
        engine = self.engine()
        self.feed(engine, 0, 3)
        assert not engine.has_work()
        self.feed(engine, 3, 4)
        task, _ = self.run(engine, DecodeResult())
        assert (task.base, task.start, task.end, len(task.rows)) == (0, 0, 4, 4)
        self.feed(engine, 4, 8)
        task, _ = self.run(engine, DecodeResult())
        assert (task.base, task.start, task.end, len(task.rows)) == (0, 4, 8, 8)

    def test_what_is_heard_does_not_depend_on_how_late_the_step_is(self) -> None:
        ends = []
        for late in (0, 3):
            engine = self.engine()
            self.feed(engine, 0, 4 + late)
            ends.append([self.run(engine, DecodeResult())[0].end])
            self.feed(engine, 4 + late, 8 + late)
            ends[-1].append(self.run(engine, DecodeResult())[0].end)
        assert ends == [[4, 8], [4, 8]]

    def test_the_window_slides_where_the_model_says(self) -> None:
        engine = self.engine()
        self.feed(engine, 0, 4)
        _, outputs = self.run(engine, DecodeResult(timed=[TimedToken(2, 0.5, 1.5)], keep_from=3))
        assert outputs == [Text("a", " a", [], [2], 400)]
        self.feed(engine, 4, 8)
        task, _ = self.run(engine, DecodeResult())
        assert (task.base, task.end, len(task.rows)) == (3, 8, 5)

    def test_a_flush_runs_a_final_step_even_without_new_audio(self) -> None:
        engine = self.engine()
        self.feed(engine, 0, 4)
        self.run(engine, DecodeResult())
        engine.flush("a", 1)
        task, outputs = self.run(engine, DecodeResult(timed=[TimedToken(2, 1, 2)]))
        assert task.final and (task.start, task.end) == (4, 4)
        (*texts, flushed) = outputs
        assert [word.text for text in texts if isinstance(text, Text) for word in text.words] == ["a"]
        assert flushed == Flushed("a", 1, 400)
        engine.flush("a", 2)
        assert engine.take_replies() == [Flushed("a", 2, 400)]

    def test_a_pause_is_heard_at_once_and_a_flush_there_asks_for_the_same_window(self) -> None:
        engine = self.engine()
        self.feed(engine, 0, 3)
        engine.pause("a", 2)
        task, _ = self.run(engine, DecodeResult())
        assert task.pause and not task.final and (task.base, task.end) == (0, 2)
        assert not engine.has_work(), "a pause is heard once"
        self.feed(engine, 3, 5)
        engine.flush("a", 1, 2)
        task, outputs = self.run(engine, DecodeResult())
        assert task.final and not task.pause and (task.base, task.start, task.end) == (0, 2, 2)
        assert outputs == [Flushed("a", 1, 200)]

    def test_strides_go_on_from_a_pause(self) -> None:
        engine = self.engine()
        self.feed(engine, 0, 5)
        engine.pause("a", 5)
        tasks = [self.run(engine, DecodeResult())[0] for _ in range(2)]
        self.feed(engine, 5, 9)
        tasks.append(self.run(engine, DecodeResult())[0])
        assert [(task.end, task.pause) for task in tasks] == [(4, False), (5, True), (9, False)]

    def test_a_model_says_when_its_next_step_is_worth_while(self) -> None:
        engine = self.engine()
        self.feed(engine, 0, 12)
        ends = [self.run(engine, DecodeResult(stride=stride))[0].end for stride in (1, 3, None)]
        assert ends == [4, 5, 8] and engine.streams["a"].stride == 3
        assert self.run(engine, DecodeResult(stride=2))[0].end == 11
        assert not engine.has_work(), "one position is less than the stride"
        self.feed(engine, 12, 13)
        assert self.run(engine, DecodeResult())[0].end == 13

    def test_pauses_that_come_late_are_heard_one_by_one_and_before_the_flush_that_ends_there(self) -> None:
        engine = self.engine()
        self.feed(engine, 0, 6)
        engine.pause("a", 2)
        engine.pause("a", 4)
        engine.flush("a", 1, 4)
        tasks = [self.run(engine, DecodeResult())[0] for _ in range(3)]
        assert [(task.end, task.pause, task.final) for task in tasks] == [
            (2, True, False),
            (4, True, False),
            (4, False, True),
        ]
        assert not engine.has_work()

    def test_a_stream_that_is_far_behind_leaves_pauses_out(self) -> None:
        engine = self.engine()
        self.feed(engine, 0, STRIDES_IN_TIME * WINDOWS.stride_positions)
        engine.pause("a", 3)
        engine.pause("a", 7)
        engine.flush("a", 1, 9)
        task, _ = self.run(engine, DecodeResult())
        assert task.final and task.end == 9

    def test_a_held_stream_hears_its_pause_and_no_more(self) -> None:
        engine = self.engine()
        self.feed(engine, 0, 3)
        engine.pause("a", 2)
        engine.hold("a", True)
        task, _ = self.run(engine, DecodeResult())
        assert task.pause and task.end == 2
        self.feed(engine, 3, 9)
        assert not engine.has_work()
        engine.hold("a", False)
        assert self.run(engine, DecodeResult())[0].end == 6, "strides count from the pause"

    def test_backlog_does_not_stop_for_pauses(self) -> None:
        engine = self.engine()
        engine.admit(Open("b", live=False))
        engine.commit(engine.plan(), [])
        engine.feed("b", [frame(position, spec=WINDOWS) for position in range(20)], 0)
        engine.pause("b", 2)
        assert self.run(engine, DecodeResult(keep_from=4))[0].end == 16

    def test_backlog_waits_for_a_whole_window_and_a_stride_behind_it(self) -> None:
        """How fast its audio comes then changes nothing of what is read."""
        engine = self.engine()
        engine.admit(Open("b", live=False))
        engine.commit(engine.plan(), [])
        for position in range(19):
            engine.feed("b", [frame(position, spec=WINDOWS)], position)
            assert not engine.has_work()
        engine.hold("b", True)  # the speaker pauses in what came last, behind the window
        engine.feed("b", [frame(19, spec=WINDOWS)], 19)
        task, _ = self.run(engine, DecodeResult(keep_from=10))
        assert (task.base, task.end) == (0, 16)
        assert not engine.has_work(), "the next window is not there yet"
        engine.flush("b", 1, 18)
        task, outputs = self.run(engine, DecodeResult())
        assert (task.base, task.end, task.final) == (10, 18, True) and outputs == [Flushed("b", 1, 1800)]

    def test_a_flush_never_lies_before_what_was_heard(self) -> None:
        engine = self.engine()
        self.feed(engine, 0, 4)
        self.run(engine, DecodeResult())
        engine.flush("a", 1, 2)
        task, outputs = self.run(engine, DecodeResult())
        assert task.final and (task.start, task.end) == (4, 4) and outputs == [Flushed("a", 1, 400)]

    def test_a_step_does_not_read_across_a_flush(self) -> None:
        engine = self.engine()
        self.feed(engine, 0, 2)
        engine.flush("a", None)
        self.feed(engine, 2, 8)
        task, outputs = self.run(engine, DecodeResult())
        assert task.final and task.end == 2 and outputs == []
        task, _ = self.run(engine, DecodeResult())
        assert not task.final and (task.base, task.end) == (2, 6), "a whole stride"

    MARK = TimedToken(5, 2.0, 2.0)

    def said(self, outputs: list[Output]) -> str:
        return "".join(output.delta for output in outputs if isinstance(output, Text))

    def paused(self, engine: Scheduler) -> None:
        """Says "a" up to a pause where the gate ends the utterance, and leaves a mark open."""
        self.feed(engine, 0, 3)
        engine.flush("a", None, 2)
        _, outputs = self.run(engine, DecodeResult(timed=[TimedToken(2, 1.0, 1.5)], pending=[self.MARK]))
        (text,) = outputs
        assert isinstance(text, Text) and text.delta == " a" and not text.words

    @pytest.mark.parametrize(("follows", "text"), [([3], " b."), ([6, 3], ", b.")])
    def test_what_follows_takes_the_place_of_open_marks(self, follows: list[int], text: str) -> None:
        engine = self.engine()
        self.paused(engine)
        self.feed(engine, 3, 6)
        engine.flush("a", 1)
        tokens = [TimedToken(token, 4.0, 4.5) for token in follows]
        task, outputs = self.run(engine, DecodeResult(timed=tokens, pending=[self.MARK]))
        assert task.pending
        assert self.said(outputs) == text, "the end of the turn settles what is open"
        words = [word.text for output in outputs if isinstance(output, Text) for word in output.words]
        assert words == ["a" + text[:-3], "b."]
        self.feed(engine, 6, 9)
        engine.flush("a", 2)
        assert not self.run(engine, DecodeResult())[0].pending

    @pytest.mark.parametrize("end", ["flush", "finish"])
    def test_a_turn_that_ends_says_the_open_marks(self, end: str) -> None:
        engine = self.engine()
        self.paused(engine)
        if end == "flush":
            engine.flush("a", 7, 2)
        else:
            engine.skip("a", 3)
            engine.finish("a")
        text, last = engine.take_replies()
        assert isinstance(text, Text) and text.delta == "." and [word.text for word in text.words] == ["a."]
        assert isinstance(last, Flushed if end == "flush" else Closed)

    def test_open_marks_are_part_of_the_saved_state(self) -> None:
        engine, other = self.engine(), self.engine()
        self.paused(engine)
        stream, copy = engine.streams["a"], other.streams["a"]
        copy.text.resume(stream.text.save())
        ends = [text.text.end_segment() for text in (stream, copy)]
        assert [text.delta for text in ends[0]] == [text.delta for text in ends[1]] == ["."]

    def test_the_windows_of_a_file_may_be_longer_than_those_of_a_live_stream(self) -> None:
        spec = replace(WINDOWS, file_window_positions=40)
        engine = scheduler(spec, cache_embeds=spec.embeds_for(live=False) + spec.embeds_for(live=True))
        for name in ("file", "live"):
            engine.admit(Open(name, live=name == "live"))
            engine.feed(name, [frame(p, spec=spec) for p in range(39)], 0)
            engine.flush(name, None, 38)
        engine.check_integrity()
        live, file = engine.plan().decode
        assert (file.base, file.end, file.final) == (0, 38, True)
        assert (live.base, live.end, live.final) == (0, 16, False)
        with pytest.raises(AtCapacity, match="cache"):
            engine.admit(Open("more"))

    def test_a_backlog_longer_than_the_window_is_read_in_windows(self) -> None:
        engine = self.engine()
        self.feed(engine, 0, 40)
        task, _ = self.run(engine, DecodeResult(keep_from=10))
        assert (task.base, task.end) == (0, 16)
        task, _ = self.run(engine, DecodeResult(keep_from=20))
        assert (task.base, task.start, task.end) == (10, 16, 24)

    def test_what_nobody_says_is_skipped_unheard(self) -> None:
        engine = self.engine()
        engine.hold("a", True)
        for start in range(0, 4_000, 4):
            self.feed(engine, start, start + 4)
            engine.skip("a", start)
            assert not engine.has_work()
        assert engine.cache.queries == 0
        stream = engine.streams["a"]
        assert len(stream.timeline._items) < 100 and stream.timeline.item(3_990).payload is None
        engine.hold("a", False)
        task, _ = self.run(engine, DecodeResult())
        assert (task.base, task.end) == (3_996, 4_000)

    def test_a_skip_never_passes_a_flush(self) -> None:
        engine = self.engine()
        self.feed(engine, 0, 2)
        engine.flush("a", 5)
        self.feed(engine, 2, 12)
        engine.skip("a", 10)
        task, outputs = self.run(engine, DecodeResult())
        assert (task.base, task.end, task.final) == (0, 2, True) and outputs == [Flushed("a", 5, 200)]
        assert not engine.has_work() and engine.streams["a"].base == 10, "the skip took effect behind the flush"

    def roomy(self, catch_up_until: int = 0) -> Scheduler:
        engine = scheduler(replace(WINDOWS, window_positions=60, embeds_per_stream=70))
        engine.admit(Open("a", catch_up_until=catch_up_until))
        engine.commit(engine.plan(), [])
        return engine

    def heard(self, engine: Scheduler) -> list[tuple[int, int, bool]]:
        heard = []
        while engine.has_work():
            task, _ = self.run(engine, DecodeResult())
            heard.append((task.base, task.end, task.final))
        return heard

    @pytest.mark.parametrize("fed", [9, 13, 16])
    def test_how_much_waits_does_not_change_the_steps_of_a_stream_in_time(self, fed: int) -> None:
        at_once, one_by_one = self.roomy(), self.roomy()
        self.feed(at_once, 0, fed)
        together = self.heard(at_once)
        alone = []
        for position in range(fed):
            self.feed(one_by_one, position, position + 1)
            alone += self.heard(one_by_one)
        assert together == alone == [(0, end, False) for end in range(4, fed + 1, 4)]
        for engine in (at_once, one_by_one):
            engine.flush("a", 1)
        assert self.heard(at_once) == self.heard(one_by_one)

    def test_a_flush_waits_for_the_strides_before_it(self) -> None:
        engine = self.roomy()
        self.feed(engine, 0, 9)
        engine.flush("a", 1)
        assert self.heard(engine) == [(0, 4, False), (0, 8, False), (0, 9, True)]
        self.feed(engine, 9, 17)
        engine.flush("a", 2)
        assert self.heard(engine) == [(9, 13, False), (9, 17, True)], "the last stride is the flush's own"

    def test_a_stream_far_behind_leaves_strides_out_unless_an_engine_was_lost(self) -> None:
        engine = self.roomy()
        self.feed(engine, 0, 23)
        assert self.heard(engine) == [(0, 20, False)]
        engine = self.roomy(catch_up_until=12)
        self.feed(engine, 0, 35)
        assert self.heard(engine)[:4] == [(0, 4, False), (0, 8, False), (0, 12, False), (0, 32, False)]

    def test_utterances_of_a_burst_are_heard_one_by_one_without_the_silence_between(self) -> None:
        engine = self.engine()
        engine.hold("a", True)
        self.feed(engine, 0, 60)
        for begin, end in ((2, 8), (20, 30), (50, 55)):
            engine.skip("a", begin)
            engine.hold("a", False)
            engine.flush("a", None, end)
            engine.hold("a", True)
        engine.skip("a", 58)
        heard = []
        while engine.has_work():
            task, _ = self.run(engine, DecodeResult())
            heard.append((task.base, task.end, task.final))
        # By the third, the stream is not far behind any more and takes every stride.
        assert heard == [(2, 8, True), (20, 30, True), (50, 54, False), (50, 55, True)]
        assert engine.streams["a"].base == 58

    def test_a_flush_in_the_middle_of_what_was_fed(self) -> None:
        engine = scheduler(replace(FRAMES, step_positions=8))
        engine.admit(Open("a"))
        engine.feed("a", [frame(position) for position in range(2, 8)], 0)
        engine.flush("a", 1, 5)
        plan, outputs = step(engine, token=2)
        assert (plan.decode[0].start, plan.decode[0].end) == (2, 5)
        assert [type(output) for output in outputs] == [Text, Flushed]
        assert step(engine)[0].decode[0].end == 8


def test_positions_beyond_fifty_million() -> None:
    spec = replace(FRAMES, prefix_positions=50_000_000)
    engine = scheduler(spec)
    engine.admit(Open("a"))
    for position in range(50_000_000, 50_000_100):
        engine.feed("a", [frame(position, spec=spec)], position)
        plan, _ = step(engine)
        assert plan.decode[0].start == position
    assert len(engine.streams["a"].rings[0].pages) == FRAMES.kv_groups[0].ring_pages


def test_abort_while_a_step_runs() -> None:
    engine = scheduler()
    engine.admit(Open("a"))
    engine.feed("a", [frame(2)], 0)
    plan = engine.plan()
    engine.abort("a")
    assert engine.commit(plan, answer(plan)) == [Closed("a", 0)]
    engine.check_integrity()


class TestLateStreams:
    """A stream is in every second step at most, so late ones compute several positions in one."""

    def late(self, counts: dict[str, int], live: bool = True) -> Scheduler:
        """Streams with this many positions that have arrived."""
        engine = scheduler(streams=8)
        for name, count in counts.items():
            engine.admit(Open(name, live=live))
            key = name.encode()
            engine.feed(name, [frame(position, key=b"%s%d" % (key, position)) for position in range(2, 2 + count)], 0)
        return engine

    @staticmethod
    def computed(engine: Scheduler) -> dict[str, int]:
        return {task.stream: task.end - task.start for task in step(engine)[0].decode}

    def test_many_late_streams_compute_several_positions_at_once(self) -> None:
        engine = self.late({"a": 9, "b": 3, "c": 1, "d": 1})
        assert self.computed(engine) == {"a": 4, "b": 3, "c": 1, "d": 1}
        assert self.computed(engine) == {"a": 4}
        assert self.computed(engine) == {"a": 1}

    def test_there_are_as_many_passes_as_many_streams_take_part_in(self) -> None:
        engine = self.late({"a": 9, "b": 2, "c": 2, "d": 2, "e": 1})
        assert self.computed(engine) == {"a": 2, "b": 2, "c": 2, "d": 2, "e": 1}
        engine = self.late({"a": 9, "b": 3, "c": 2, "d": 2, "e": 1})
        assert self.computed(engine) == {"a": 3, "b": 3, "c": 2, "d": 2, "e": 1}

    def test_recovered_streams_that_wait_for_rebuilds_do_not_count_as_late(self) -> None:
        engine = self.late({"r": 6, "s": 6, "l": 5, **dict.fromkeys("mnop", 1)})
        engine.recovering |= {"r", "s"}
        engine.admit(Open("z", forced_tokens=[0] * 40))
        engine.feed("z", [frame(position, key=b"z%d" % position) for position in range(2, 20)], 0)
        assert engine.rebuilding
        assert self.computed(engine) == {**dict.fromkeys("rslmnop", 1), "z": 8}

    def test_few_late_streams_do_not_make_the_step_longer_for_the_others(self) -> None:
        engine = self.late({"a": 9, **dict.fromkeys("bcde", 1)})
        assert self.computed(engine) == dict.fromkeys("abcde", 1)

    def test_uploads_take_their_share_and_no_more(self) -> None:
        assert self.computed(self.late({"a": 9, "b": 9}, live=False)) == {"a": 1, "b": 1}

    def test_a_flush_ends_what_is_computed_at_once(self) -> None:
        engine = self.late({"a": 6})
        engine.flush("a", 7, 4)
        assert self.computed(engine) == {"a": 2}
        assert self.computed(engine) == {"a": 4}

    def test_a_step_of_few_positions_computes_what_it_can(self) -> None:
        engine = scheduler(step_positions=5)
        for name in "abc":
            engine.admit(Open(name))
            engine.feed(name, [frame(position, key=b"%s%d" % (name.encode(), position)) for position in range(2, 6)], 0)
        assert self.computed(engine) == {"a": 4, "b": 1}
        assert self.computed(engine) == {"c": 4, "b": 1}


class TestSuspects:
    """Streams that may have killed an engine share no step at the spot where it died."""

    def test_one_at_a_time_until_they_are_past_it(self) -> None:
        engine = scheduler()
        for name, suspect in (("a", (4, 6)), ("b", (4, 6)), ("c", None)):
            engine.admit(Open(name, suspect=suspect))
            engine.feed(name, [frame(p, key=b"%s%d" % (name.encode(), p)) for p in range(2, 10)], 0)
        together, at_the_spot = [], []
        while engine.has_work():
            plan, _ = step(engine)
            together.append({task.stream for task in plan.decode})
            at_the_spot.append({task.stream for task in plan.decode if task.start < 6 and task.end > 4})
            alone = [task for task in plan.decode if task.stream != "c" and task.start < 6]
            assert all(task.end == task.start + 1 for task in alone), "no further than where it may die"
            engine.check_integrity()
        assert not [names for names in at_the_spot if {"a", "b"} <= names]
        assert {"a"} in at_the_spot and {"b"} in at_the_spot
        assert all("c" in names for names in together[: 8 // MAX_CATCH_UP_POSITIONS]), "nobody else is held up"
        assert engine.suspects == {}

    def test_suspects_are_rebuilt_together_and_kept_apart_at_the_spot_alone(self) -> None:
        engine = scheduler(replace(FRAMES, replay_positions=4))
        for name in "ab":
            engine.admit(Open(name, forced_tokens=[0] * 4, suspect=(6, 7)))
            engine.feed(name, [frame(position, key=b"%s%d" % (name.encode(), position)) for position in range(2, 8)], 0)
        assert [(task.stream, task.end) for task in step(engine)[0].decode] == [("a", 6), ("b", 6)]
        together = [{task.stream for task in step(engine)[0].decode if task.start == 6} for _ in range(4)]
        assert {"a", "b"} not in together and {"a"} in together and {"b"} in together

    def test_a_suspect_that_ends_is_forgotten(self) -> None:
        engine = scheduler()
        engine.admit(Open("a", suspect=(4, 6)))
        engine.abort("a")
        assert engine.suspects == {}
