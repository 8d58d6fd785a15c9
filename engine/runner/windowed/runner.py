"""The runner of windowed models: rereads each stream's window, decodes on from committed text, commits what is stable.

All streams of a plan are decoded as one batch. Encoding is done stream by stream on a CPU: a window fills the machine
by itself, needs no padding then, and a stream's text cannot depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.core.plan import DecodeResult, DecodeTask, EncodeTask, StepPlan, TimedToken
from engine.core.text import Vocabulary
from engine.messages import Open, Saved
from engine.models.seq2seq import Encoded, SpeechModel
from engine.runner.windowed.ears import SAMPLES_PER_POSITION, Ear, Sound
from engine.runner.windowed.greedy import GreedyDecoder, Row
from engine.runner.windowed.stability import (
    Heard,
    Policy,
    best_cut,
    committable,
    is_noise,
    loop_start,
    rereads_from,
    rising,
    spans,
    without_second_mark,
)
from engine.spec import ModelSpec

SAMPLE_RATE = 16_000


def windowed_spec(name: str, window_positions: int, stride_positions: int) -> ModelSpec:
    return ModelSpec(
        name=name,
        sample_rate=SAMPLE_RATE,
        samples_per_position=SAMPLES_PER_POSITION,
        stride_positions=stride_positions,
        rereads_window=True,
        window_positions=window_positions,
        history_positions=window_positions,
        # An item may stick out of the window at both ends.
        embeds_per_stream=window_positions + 64,
    )


@dataclass(slots=True)
class _Slot:
    """What a stream's window holds: text that was committed from it, and what the last pass said after that."""

    committed: list[Heard] = field(default_factory=list)
    hypothesis: list[Heard] = field(default_factory=list)
    # Something of this utterance has been committed: somebody speaks.
    spoken: bool = False
    # If set, the hypothesis is the whole rest of the window [start, end): a final pass has nothing left to decode.
    understood: tuple[int, int] | None = None

    def restart(self) -> None:
        self.committed.clear()
        self.hypothesis.clear()
        self.spoken = False
        self.understood = None


class WindowedRunner:
    def __init__(
        self,
        model: SpeechModel,
        vocabulary: Vocabulary,
        spec: ModelSpec,
        cache_embeds: int,
        policy: Policy,
        ear: Ear,
    ) -> None:
        self.spec = spec
        self.vocabulary = vocabulary
        self._model = model
        self._policy = policy
        model.go_live()
        self._ear = ear
        self._decoder = GreedyDecoder(model)
        # The samples of each position; row 0 is silence.
        self._slab = torch.zeros(cache_embeds + 1, spec.samples_per_position)
        self._slots: dict[int, _Slot] = {}

    def check_open(self, message: Open) -> None:
        if message.delay_positions is not None:
            raise ValueError("this model has no delay to choose; leave delay out")
        if message.options:
            raise ValueError(f"this model takes no option {next(iter(message.options))!r}")

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[DecodeResult]:
        for slot in plan.closed:
            self._slots.pop(slot, None)
            self._ear.forget(slot)
        for opened in plan.opened:
            self._slots[opened.slot] = _Slot()
            if opened.saved is not None:
                self._slots[opened.slot] = _resumed(opened.saved)
                self._ear.resume(opened.slot, opened.saved["ear"], opened.saved_items)
        for item in plan.encode:
            self._write(item)
        results = {task.slot: self._finish(task) for task in plan.decode if self._is_understood(task)}
        sounds = [(task, self._ear.hear(task, self._audio(task))) for task in plan.decode if task.slot not in results]
        heard = [(task, sound, self._row(task, sound)) for task, sound in sounds]
        audible = [(sound, row) for _, sound, row in heard if sound.frames]
        if audible:
            self._decoder.run([row for _, row in audible], Encoded.stack([sound.encoded for sound, _ in audible]))
        for task, sound, row in heard:
            results[task.slot] = self._result(task, sound, row)
        return [results[task.slot] for task in plan.decode]

    def save(self, slot: int, base: int, end: int) -> tuple[Saved, int]:
        """The slot's state as plain data, and the first position whose audio that state needs."""
        held = self._slots.get(slot) or _Slot()
        ear, audio_from = self._ear.save(slot, base, end)
        saved: Saved = {
            "committed": [(heard.token, heard.peak, heard.log_probability) for heard in held.committed],
            "hypothesis": [(heard.token, heard.peak, heard.log_probability) for heard in held.hypothesis],
            "spoken": held.spoken,
            "understood": held.understood,
            "ear": ear,
        }
        return saved, audio_from

    def warm_up(self) -> None:
        """Run a window of noise through everything once, so that the first utterance finds kernels and memory ready."""
        noise = torch.randn(self.spec.stride_positions * 4, SAMPLES_PER_POSITION) * 0.01
        with torch.inference_mode():
            encoded = self._model.encode(noise.view(1, -1), [noise.numel()])
            self._decoder.run([Row([], [], 8, None, encoded.lengths[0])], encoded)

    def close(self) -> None:
        self._slots.clear()

    def _write(self, task: EncodeTask) -> None:
        samples = torch.from_numpy(np.ascontiguousarray(task.payload)).view(-1, SAMPLES_PER_POSITION)
        if task.mask is not None:
            samples = samples[torch.tensor(task.mask)]
        self._slab[torch.tensor(task.rows)] = samples

    def _audio(self, task: DecodeTask) -> Tensor:
        return self._slab[torch.tensor(task.rows)].view(1, -1)

    def _row(self, task: DecodeTask, sound: Sound) -> Row:
        slot, model, policy = self._slots[task.slot], self._model, self._policy
        seconds = sound.frames * model.samples_per_frame / SAMPLE_RATE
        committed = [*sound.said, *(heard.token for heard in slot.committed)]
        room = model.max_tokens - len(model.start_tokens) - len(committed) - 1
        most = max(1, min(room, round(seconds * policy.tokens_per_second) + 4 - len(committed)))
        margin = policy.agreed_margin * SAMPLES_PER_POSITION / model.samples_per_frame
        return Row(
            committed=committed,
            draft=[heard.token for heard in slot.hypothesis[:most]],
            most=most,
            stop_frame=None if task.final or task.pause else sound.frames - margin,
            frames=sound.frames,
        )

    def _result(self, task: DecodeTask, sound: Sound, row: Row) -> DecodeResult:
        slot = self._slots[task.slot]
        floor = slot.committed[-1].peak if slot.committed else float(task.base)
        scale = self._model.samples_per_frame / SAMPLES_PER_POSITION
        places = [sound.origin + peak * scale for peak in row.peaks]
        heard = zip(row.tokens, rising(places, floor), row.log_probabilities, strict=True)
        new = [Heard(*each) for each in heard]
        loop = loop_start([heard.token for heard in slot.committed] + row.tokens)
        if loop is not None:
            new = new[: max(0, loop - len(slot.committed))]
        said = [heard.token for heard in slot.committed] or list(sound.said)
        new = without_second_mark(said, new[: rereads_from(places, floor)], self.vocabulary.pieces)
        text = b"".join(self.vocabulary.pieces[token] for token in row.tokens)
        if not slot.spoken and is_noise(text, row.log_probabilities, self._policy):
            new = []
        if task.final:
            slot.hypothesis = new
            return self._finish(task)
        window = (float(task.base), sound.edge)
        previous = [heard.token for heard in slot.hypothesis]
        count = committable(new, row.ended, previous, window, self.vocabulary.pieces, self._policy)
        upcoming = new[count].peak if count < len(new) else sound.edge
        timed = self._timed(new[:count], floor, upcoming)
        slot.committed += new[:count]
        slot.spoken = slot.spoken or count > 0
        slot.hypothesis = new[count:]
        keep_from = self._cut(task, slot, upcoming)
        slot.understood = (keep_from, task.end) if task.pause else None
        return DecodeResult(timed=timed, keep_from=keep_from)

    def _is_understood(self, task: DecodeTask) -> bool:
        """Whether the last pass has decoded all of a window that now ends."""
        return task.final and self._slots[task.slot].understood == (task.base, task.end)

    def _finish(self, task: DecodeTask) -> DecodeResult:
        """Commit what the slot's hypothesis says: it is the rest of a window that ends."""
        slot = self._slots[task.slot]
        floor = slot.committed[-1].peak if slot.committed else float(task.base)
        timed = self._timed(slot.hypothesis, floor, float(task.end))
        self._ear.end(task, self._audio(task), slot.committed + slot.hypothesis)
        slot.restart()
        return DecodeResult(timed=timed, keep_from=task.end)

    def _timed(self, tokens: list[Heard], before: float, after: float) -> list[TimedToken]:
        return [
            TimedToken(heard.token, start, end)
            for heard, (start, end) in zip(tokens, spans(tokens, before, after), strict=True)
        ]

    def _cut(self, task: DecodeTask, slot: _Slot, upcoming: float) -> int:
        """First position the next window still needs; the slot forgets the text before it."""
        length = task.end - task.base
        if length < min(self._policy.cut_beyond, self.spec.window_positions):
            return task.base
        found = best_cut(slot.committed, upcoming, task.end, self.vocabulary.pieces, self._policy)
        if found is not None:
            behind, place = found
            cut = min(max(task.base, int(place)), task.end)
            if cut > task.base:
                del slot.committed[:behind]
                return cut
        if length < self.spec.window_positions:
            return task.base
        # Nothing could be committed in a whole window: nobody speaks there.
        slot.restart()
        return task.end - length // 2


def _resumed(saved: Saved) -> _Slot:
    """The slot that `save` saw."""
    committed = [Heard(*heard) for heard in saved["committed"]]
    hypothesis = [Heard(*heard) for heard in saved["hypothesis"]]
    understood = None if saved["understood"] is None else tuple(saved["understood"])
    return _Slot(committed, hypothesis, saved["spoken"], understood)
