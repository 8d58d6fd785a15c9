"""The frame-synchronous runner: refusals, failures of one stream, and what stays on the device between steps."""

from __future__ import annotations

import base64
import gc
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.core.plan import DecodeResult, DecodeTask, EncodeTask, OpenTask, StepPlan
from engine.core.scheduler import Limits, Scheduler
from engine.messages import Failed, Finish, Item, Open, Output
from engine.messages import Feed as FeedCommand
from engine.options import Keyword, keywords_text
from engine.runner import bias
from engine.runner.bias import KeywordTrees
from engine.runner.device import NoDevice
from engine.runner.frames.runner import RunnerSettings, VoxtralRunner
from engine.runner.load import frames_limits
from engine.server.loop import EngineLoop
from engine.weights.checkpoint import BadCheckpoint
from tests.engine.runner.frames.voxtral_driver import (
    SMALL,
    STEP,
    Driver,
    Feed,
    LogitsTap,
    payload,
    random_tensors,
    small_runner,
    speech_like,
)
from tests.gpu.steps import in_turns

PAD = 32
CPU = RunnerSettings("cpu", torch.float32, torch.float32, 24, max_streams=1)


@pytest.mark.parametrize("delay", [0, -1, 31])
def test_a_delay_out_of_range_is_refused(delay: int) -> None:
    with pytest.raises(ValueError, match=r"this model takes 80 to 2400 ms in steps of 80 ms"):
        small_runner().check_open(Open("a", delay_positions=delay))


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match="takes no option 'language'"):
        small_runner().check_open(Open("a", options={"language": "en"}))


@pytest.mark.parametrize("delay", [None, 1, 30])
def test_good_delays_are_taken(delay: int | None) -> None:
    small_runner().check_open(Open("a", delay_positions=delay))


def write_checkpoint(directory: Path, **changes: object) -> Path:
    stacks = {}
    for part, stack in (("audio_config", SMALL.audio), ("text_config", SMALL.text)):
        stacks[part] = {
            "hidden_size": stack.width,
            "intermediate_size": stack.ffn,
            "num_hidden_layers": stack.layers,
            "num_attention_heads": stack.heads.query_heads,
            "num_key_value_heads": stack.heads.kv_heads,
            "head_dim": stack.heads.dim,
            "sliding_window": stack.heads.window,
            "rope_parameters": {"rope_type": "default", "rope_theta": stack.theta},
        }
    stacks["audio_config"]["num_mel_bins"] = SMALL.mel_bins
    stacks["text_config"]["vocab_size"] = SMALL.vocabulary
    config = {"model_type": "voxtral_realtime", **stacks, **changes}
    (directory / "config.json").write_text(json.dumps(config))
    vocabulary = [{"token_bytes": base64.b64encode(b"x").decode()}]
    (directory / "tekken.json").write_text(json.dumps({"vocab": vocabulary}))
    save_file(random_tensors(SMALL), directory / "model.safetensors")
    return directory


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model_type is 'llama'"):
        VoxtralRunner.from_checkpoint(write_checkpoint(tmp_path, model_type="llama"), CPU)


def test_a_window_beyond_training_is_refused(tmp_path: Path) -> None:
    settings = RunnerSettings("cpu", torch.float32, torch.float32, 65, max_streams=1)
    with pytest.raises(ValueError, match=r"decoder window of 65 tokens.*choose 1 to 64"):
        VoxtralRunner.from_checkpoint(write_checkpoint(tmp_path), settings)


def test_a_broken_checkpoint_is_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    tensors = random_tensors(SMALL)
    del tensors["model.audio_tower.norm.weight"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"model\.audio_tower\.norm\.weight is missing"):
        VoxtralRunner.from_checkpoint(directory, CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(NoDevice, match="no CUDA device is visible"):
        VoxtralRunner.from_checkpoint(write_checkpoint(tmp_path), RunnerSettings("cuda"))


def test_a_checkpoint_gives_the_same_tokens_as_its_tensors(tmp_path: Path) -> None:
    audio = speech_like(30, seed=2)
    rows = []
    for runner in (VoxtralRunner.from_checkpoint(write_checkpoint(tmp_path), CPU), small_runner()):
        feed, driver = Feed(0, audio), Driver(runner)
        for _ in range(30):
            driver.step([(feed, 1)])
        rows.append(feed.tokens)
        runner.close()
        runner.close()  # closing twice is allowed
    assert rows[0] == rows[1]


def test_nan_in_one_stream_fails_that_stream_alone() -> None:
    runner = small_runner(3)
    driver = Driver(runner)
    feeds = [Feed(slot, speech_like(40, seed=slot)) for slot in range(3)]
    for _ in range(20):
        driver.step([(feed, 1) for feed in feeds])
    feeds[1].audio[20 * STEP + 500] = float("nan")
    results = driver.step([(feed, 1) for feed in feeds])
    assert [result.error is None for result in results] == [True, False, True]
    assert "not a number" in (results[1].error or "")
    # The slot and its pages go to a healthy stream, which must not notice.
    claimant = Feed(1, speech_like(40, seed=7))
    driver.step([(claimant, 1), (feeds[0], 1)], closed=[1])
    for _ in range(18):
        driver.step([(claimant, 1), (feeds[0], 1)])
    alone, lone_driver = Feed(0, claimant.audio), Driver(small_runner())
    for _ in range(19):
        lone_driver.step([(alone, 1)])
    assert claimant.tokens == alone.tokens


def test_a_malformed_item_fails_its_stream_alone() -> None:
    runner = small_runner(2)
    driver = Driver(runner)
    good, bad = Feed(0, speech_like(5, 1)), Feed(1, speech_like(5, 2))
    driver.step([(good, 1), (bad, 1)])
    plan = StepPlan(2)
    for feed, samples in ((good, payload(good.audio, 1)), (bad, np.zeros(7, np.float32))):
        plan.encode.append(EncodeTask(feed.name, samples, None, [50 + feed.slot]))
        plan.decode.append(DecodeTask(feed.slot, feed.name, 33, 33, 34, [50 + feed.slot], [], False))
    results = runner.execute(plan)
    assert results[0].error is None
    assert len(results[0].tokens) == 1
    assert "must have 2000 samples of float32" in (results[1].error or "")


def test_encoding_without_decoding_and_reading_rows_twice() -> None:
    """An item may be encoded a step before it is read, and a cache hit reads rows that another stream made."""
    runner = small_runner(2)
    driver = Driver(runner)
    audio = speech_like(12, seed=4)
    feeds = [Feed(0, audio), Feed(1, audio)]
    for position in range(12):
        runner.execute(StepPlan(0, encode=[EncodeTask("x", payload(audio, position), None, [900])]))
        for feed in feeds:
            start = 32 + position
            opened = [] if feed.opened else [OpenTask(feed.slot, feed.name, feed.delay, {}, [])]
            feed.opened = True
            pages = [(group, 0, feed.slot * kv.ring_pages) for group, kv in enumerate(runner.spec.kv_groups)]
            pages += [(0, r, feed.slot * runner.spec.kv_groups[0].ring_pages + r) for r in range(1, 2)]
            task = DecodeTask(feed.slot, feed.name, start, start, start + 1, [900], pages, False)
            feed.tokens += runner.execute(StepPlan(0, opened=opened, decode=[task]))[0].tokens
    alone = Feed(0, audio)
    driver = Driver(small_runner())
    for _ in range(12):
        driver.step([(alone, 1)])
    assert feeds[0].tokens == feeds[1].tokens == alone.tokens


def test_more_streams_than_one_batch_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.runner.frames.runner.LARGEST_BATCH", 2)
    driver = Driver(small_runner(5))
    feeds = [Feed(slot, speech_like(12, seed=slot)) for slot in range(5)]
    for _ in range(12):
        driver.step([(feed, 1) for feed in feeds])
    for feed in feeds:
        alone, lone_driver = Feed(0, feed.audio), Driver(small_runner())
        for _ in range(12):
            lone_driver.step([(alone, 1)])
        assert feed.tokens == alone.tokens


def put_in_a_rut(runner: VoxtralRunner, lead: float) -> None:
    """The model loves blanks: their logits are ahead of all others by `lead`."""
    compute = runner.passes.model.logits

    def blanks_ahead(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        logits[:, PAD] = logits.max(dim=-1).values + lead
        return logits

    runner.passes.model.logits = blanks_ahead  # type: ignore[method-assign]


def test_the_guard_breaks_a_rut_is_counted_and_is_rebuilt_by_a_replay() -> None:
    """A model that loves blanks: the guard ends the run, and a replay of the run leaves the guard where it was."""
    guarded = small_runner(guard=True)
    audio = speech_like(230, seed=6)
    tap = LogitsTap(guarded)
    put_in_a_rut(guarded, 4.25)
    feed, driver = Feed(0, audio), Driver(guarded)
    for _ in range(230):
        driver.step([(feed, 1)])
    breaks = [index for index, token in enumerate(feed.tokens) if token != PAD]
    # 200 blanks after the delay, then 0.5 more per blank: past a lead of 4.25 with the ninth.
    assert breaks[0] == 6 + 200 + 9
    assert guarded.blank_guard_activations == len(breaks) > 0
    assert len(tap.rows) == 230
    again = Feed(0, audio, forced=feed.tokens[:212])
    driver.step([(again, 212)], closed=[0])
    for _ in range(18):
        driver.step([(again, 1)])
    assert again.tokens == feed.tokens


def test_keywords_are_favoured_on_the_device_as_their_tree_says_and_after_a_replay() -> None:
    pieces = [b""] * 40 + [(" " * (token % 2) + "abcd"[token % 4] + "efg"[token % 3]).encode() for token in range(56)]
    runner = small_runner(2, pieces=pieces)
    option = {"keywords": keywords_text([Keyword("aegf", 8.0), Keyword("ceaf df", 6.0), Keyword("be", 7.0)])}
    runner.check_open(Open("a", options=option))
    tap, driver = LogitsTap(runner), Driver(runner)
    feeds = [Feed(0, speech_like(60, seed=6)), Feed(1, speech_like(60, seed=7), options=option)]
    for _ in range(60):
        driver.step([(feed, 1) for feed in feeds])
    tree, state, changed = KeywordTrees(runner.vocabulary).tree(option), 0, 0
    assert tree is not None
    for position, (logits, token) in enumerate(zip(tap.rows, feeds[1].tokens, strict=True)):
        best = int(logits[1].argmax())
        expected = tree.choose(state, logits[1].numpy(), best) if position >= feeds[1].delay else PAD
        assert token == expected
        changed += expected not in (best, PAD)
        state = tree.after(state, token)
    assert changed > 2 and any(feeds[0].tokens)
    assert all(int(rows[0].argmax()) == token for rows, token in list(zip(tap.rows, feeds[0].tokens, strict=True))[6:])
    again = Feed(1, feeds[1].audio, forced=feeds[1].tokens[:40], options=option)
    driver.step([(again, 40)], closed=[1])
    for _ in range(20):
        driver.step([(again, 1)])
    assert again.tokens == feeds[1].tokens


def test_a_rebuild_with_several_plans_under_way_says_what_the_streams_would_have_said() -> None:
    known = {"a": 150, "b": 97, "c": 31}
    audio = {name: speech_like(170, seed=seed) for seed, name in enumerate(known)}

    def tokens_with(forced: dict[str, list[int]], ahead: int) -> tuple[dict[str, list[int]], int]:
        """Tokens of all streams, and in how many plans a stream was that was in the plan before, not committed."""
        runner = small_runner(3)
        scheduler = Scheduler(runner.spec, frames_limits(runner.memory), runner.vocabulary)
        tokens, in_both = {name: list[int]() for name in known}, 0
        for name, sound in audio.items():
            scheduler.admit(Open(name, forced_tokens=forced.get(name, [])))
            for position in range(170):
                offset, key = runner.spec.prefix_positions + position, f"{name} {position}".encode()
                item = Item(offset, 1, position * STEP, key, payload(sound, position))
                scheduler.feed(name, [item], position)
        under_way: deque[tuple[StepPlan, Callable[[], list[DecodeResult]]]] = deque()
        while scheduler.has_work() or under_way:
            plan = scheduler.plan()
            before = {task.stream for earlier, _ in under_way for task in earlier.decode}
            in_both += any(task.stream in before for task in plan.decode)
            under_way.append((plan, runner.launch(plan)))
            while len(under_way) > (ahead if plan.decode else 0):
                plan, results = under_way.popleft()
                answers = results()
                for task, answer in zip(plan.decode, answers, strict=True):
                    assert answer.error is None
                    tokens[task.stream] += answer.tokens
                scheduler.commit(plan, answers)
                scheduler.check_integrity()
        runner.close()
        return tokens, in_both

    calm, _ = tokens_with({}, 0)
    assert len({*calm["a"]}) > 5
    found, in_both = tokens_with({name: calm[name][:count] for name, count in known.items()}, 2)
    assert found == calm and in_both >= 2


def test_a_long_list_of_keywords_is_prepared_once_and_beside_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that computes steps for all streams does not build trees, and waits for one when it is needed."""
    pieces = [b""] * 40 + [(" " * (token % 2) + "abcd"[token % 4] + "efg"[token % 3]).encode() for token in range(56)]
    runner = small_runner(2, pieces=pieces)
    option = {"keywords": keywords_text([Keyword("aegf", 8.0), Keyword("be", 7.0)])}
    builders, may_build, make = list[int](), threading.Event(), bias.KeywordTree

    def building(keywords: list[Keyword], index: bias.TokenIndex) -> bias.KeywordTree:
        builders.append(threading.get_ident())
        assert may_build.wait(60)
        return make(keywords, index)

    monkeypatch.setattr(bias, "KeywordTree", building)
    runner.check_open(Open("a", options=option))
    runner.check_open(Open("b", options=option))
    driver, feeds = Driver(runner), [Feed(slot, speech_like(20, seed=7), options=option) for slot in (0, 1)]
    for _ in range(feeds[0].delay):
        driver.step([(feed, 1) for feed in feeds])
    may_build.set()
    for _ in range(14):
        driver.step([(feed, 1) for feed in feeds])
    assert len(builders) == 1 and builders[0] != threading.get_ident()
    assert all(slot.keywords is not None for slot in runner.slots.values())
    runner.close()


def test_a_stream_whose_keywords_are_not_ready_waits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words are those that it has with keywords that are ready at once; the other stream has no step less."""
    pieces = [b""] * 40 + [(" " * (token % 2) + "abcd"[token % 4] + "efg"[token % 3]).encode() for token in range(56)]
    options = {"slow": {"keywords": keywords_text([Keyword("aegf", 8.0), Keyword("be", 7.0)])}, "other": {}}
    may_build, make = threading.Event(), bias.KeywordTree

    def building(keywords: list[Keyword], index: bias.TokenIndex) -> bias.KeywordTree:
        assert may_build.wait(60)
        return make(keywords, index)

    monkeypatch.setattr(bias, "KeywordTree", building)

    def words(ready_after: int) -> tuple[dict[str, list[int]], int]:
        """Tokens of both streams, and how many positions the other one had when the keywords were ready."""
        runner = small_runner(2, pieces=pieces)
        scheduler = Scheduler(runner.spec, frames_limits(runner.memory), runner.vocabulary)
        tokens, meanwhile = {name: list[int]() for name in options}, 0
        for name, option in options.items():
            runner.check_open(Open(name, options=option))
            scheduler.admit(Open(name, options=option))
        audio = {name: speech_like(30, seed=seed) for seed, name in enumerate(options)}
        for position in range(30):
            for name in options:
                offset, key = runner.spec.prefix_positions + position, f"{name} {position}".encode()
                item = Item(offset, 1, position * STEP, key, payload(audio[name], position))
                scheduler.feed(name, [item], position)
        steps = 0
        while scheduler.has_work():
            if steps == ready_after:
                may_build.set()
                meanwhile = len(tokens["other"])
                wait([slot.pending_keywords for slot in runner.slots.values() if slot.pending_keywords])
            steps += 1
            plan = scheduler.plan()
            results = runner.execute(plan)
            for task, result in zip(plan.decode, results, strict=True):
                assert result.error is None
                tokens[task.stream] += result.tokens
            scheduler.commit(plan, results)
            scheduler.check_integrity()
        runner.close()
        may_build.clear()
        return tokens, meanwhile

    (at_once, _), (later, meanwhile) = words(0), words(25)
    assert at_once == later and meanwhile == 30


@given(st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), max_size=10))
@settings(max_examples=15, deadline=None)
def test_a_late_stream_has_the_tokens_of_one_that_is_never_late(arrivals: list[list[int]]) -> None:
    """However many positions arrive between two steps, and however many a step computes."""
    audio = [speech_like(24, seed=seed) for seed in range(3)]

    def tokens(arrivals: Iterable[list[int]]) -> list[list[int]]:
        runner = small_runner(3)
        scheduler = Scheduler(runner.spec, frames_limits(runner.memory), runner.vocabulary)
        found: list[list[int]] = [[] for _ in audio]
        for stream in range(3):
            scheduler.admit(Open(str(stream)))
        fed, longest = [0, 0, 0], 0
        for arrival in chain(arrivals, repeat([1, 1, 1])):
            for stream, count in enumerate(arrival):
                for position in range(fed[stream], min(24, fed[stream] + count)):
                    offset, key = runner.spec.prefix_positions + position, f"{stream} {position}".encode()
                    item = Item(offset, 1, position * STEP, key, payload(audio[stream], position))
                    scheduler.feed(str(stream), [item], position)
                    fed[stream] += 1
            if not scheduler.has_work() and min(fed) == 24:
                break
            plan = scheduler.plan()
            longest = max([longest, *(task.end - task.start for task in plan.decode)])
            results = runner.execute(plan)
            for task, result in zip(plan.decode, results, strict=True):
                found[int(task.stream)] += result.tokens
            scheduler.commit(plan, results)
            scheduler.check_integrity()
        runner.close()
        assert longest == 1 or arrivals
        return found

    assert tokens(arrivals) == tokens([])


def test_keywords_that_cannot_be_prepared_end_their_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = small_runner(2)
    option = {"keywords": keywords_text([Keyword("ab", 8.0)])}

    def breaks(keywords: list[Keyword], index: bias.TokenIndex) -> bias.KeywordTree:
        raise RuntimeError("no tree")

    monkeypatch.setattr(bias, "KeywordTree", breaks)
    runner.check_open(Open("a", options=option))
    driver, bad, good = Driver(runner), Feed(0, speech_like(20, 1), options=option), Feed(1, speech_like(20, 2))
    results = [driver.step([(bad, 1), (good, 1)]) for _ in range(bad.delay + 1)]
    errors = [bad_one.error for bad_one, _ in results if bad_one.error]
    assert len(errors) == 1 and "keywords" in errors[0] and not any(good_one.error for _, good_one in results)
    assert len(good.tokens) == bad.delay + 1


def test_without_the_guard_a_rut_goes_on() -> None:
    runner = small_runner()
    put_in_a_rut(runner, 4.0)
    feed, driver = Feed(0, speech_like(225, seed=6)), Driver(runner)
    for _ in range(225):
        driver.step([(feed, 1)])
    assert set(feed.tokens) == {PAD}
    assert runner.blank_guard_activations == 0


def test_through_the_real_loop() -> None:
    """Two streams over the scheduler: each gets the tokens that the driver gives."""
    runner = small_runner(2)
    memory = runner.memory
    limits = Limits(memory.streams, memory.cache_embeds, memory.group_pages)
    loop = EngineLoop(Scheduler(runner.spec, limits, runner.vocabulary), runner)
    audio = speech_like(40, seed=3)
    loop.submit([Open("a", delay_positions=3), Open("b")], 0)
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    failed = []
    commit = loop.scheduler.commit

    def recording(plan: StepPlan, results: list[DecodeResult]) -> list[Output]:
        for task, result in zip(plan.decode, results, strict=True):
            tokens[task.stream] += result.tokens
        return commit(plan, results)

    loop.scheduler.commit = recording  # type: ignore[method-assign]

    def step() -> None:
        output = loop.step()
        failed.extend(message for message in (output.outputs if output else []) if isinstance(message, Failed))

    for position in range(40):
        samples = payload(audio, position)
        items = [Item(32 + position, 1, position * STEP, samples.tobytes()[:32] + b"%d" % position, samples)]
        loop.submit([FeedCommand("a", items), FeedCommand("b", [Item(*_fields(items[0]))])], position)
        step()
    loop.submit([Finish("a"), Finish("b")], 99)
    for _ in range(80):
        step()
    assert not failed
    for name, delay in (("a", 3), ("b", 6)):
        feed, driver = Feed(0, audio, delay), Driver(small_runner())
        for _ in range(40):
            driver.step([(feed, 1)])
        assert tokens[name] == feed.tokens


def _fields(item: Item) -> tuple[object, ...]:
    return item.offset, item.length, item.sample, item.key, item.payload


def test_a_long_stream_leaves_nothing_behind() -> None:
    """Tensors and Python objects after 300 steps are those after 100."""
    driver = Driver(small_runner())
    feed = Feed(0, speech_like(300, seed=1))

    def count() -> tuple[int, int]:
        gc.collect()
        objects = gc.get_objects()
        return len(objects), sum(type(thing) is torch.Tensor for thing in objects)

    for _ in range(100):
        driver.step([(feed, 1)])
    before = count()
    for _ in range(200):
        driver.step([(feed, 1)])
    after = count()
    assert after[1] == before[1]
    assert after[0] - before[0] < 50


@pytest.mark.soak
def test_memory_is_flat_over_100_000_steps() -> None:
    import resource

    # One layer in each stack does all that grows or does not; more would only take longer.
    one_layer = replace(SMALL, audio=replace(SMALL.audio, layers=1), text=replace(SMALL.text, layers=1))
    driver = Driver(small_runner(config=one_layer))
    feed = Feed(0, speech_like(1000, seed=1))
    audio = feed.audio
    sizes = []
    for step in range(100_000):
        feed.audio = audio[(step % 900) * STEP : (step % 900 + 4) * STEP]
        done, feed.done = feed.done, 1
        driver_step_at(driver, feed, done)
        if step % 10_000 == 9_999:
            sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert sizes[-1] - sizes[0] < 4096, f"resident KiB at every 10,000 steps: {sizes}"


def driver_step_at(driver: Driver, feed: Feed, position: int) -> None:
    """One step at `position` whose audio is found at position 1 of a short buffer."""
    runner = driver.runner
    samples = payload(feed.audio, 1)
    opened = [] if feed.opened else [OpenTask(0, feed.name, feed.delay, {}, [])]
    feed.opened = True
    start = runner.spec.prefix_positions + position
    pages = [(g, r, r) for g, kv in enumerate(runner.spec.kv_groups) for r in range(kv.ring_pages)] if opened else []
    plan = StepPlan(
        position,
        opened=opened,
        encode=[EncodeTask(feed.name, samples, None, [1])],
        decode=[DecodeTask(0, feed.name, start, start, start + 1, [1], pages, False)],
    )
    assert runner.execute(plan)[0].error is None
    feed.done = position + 1


def test_steps_that_overlap_say_what_steps_one_by_one_say() -> None:
    runner = small_runner(3)
    overlapping = in_turns(runner, 40, overlap=True)
    assert overlapping == in_turns(runner, 40, overlap=False)
    assert [len(overlapping[name]) for name in "abd"] == [40, 40, 20]
    assert len(set(overlapping["a"])) > 3
