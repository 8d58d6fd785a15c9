"""From transcripts and live runs to the figures of the accuracy benchmark. Pure, apart from the printing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.live_run import Cost, SessionRun
from benchmarks.recordings import Clip, Part
from benchmarks.scoring import (
    ClipScore,
    Errors,
    ShownWord,
    TimedWord,
    bootstrap_interval,
    calibration,
    emission_delays,
    errors_by_minute,
    judged,
    percentile,
    plain_words,
    pooled,
    score,
    spread_times,
    times_to_final,
    utterances,
)
from benchmarks.seams import SeamErrors, compare, seams_of
from realtime.bench.words import Normaliser

# A session shorter than this has no first and last third worth comparing.
LONG_SESSION_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Transcript:
    clip: Clip
    text: str


def accuracy(transcripts: Sequence[Transcript], normalise: Normaliser) -> dict[str, Any]:
    """Error rate of clips with speech, and words that appeared in clips without."""
    speech = [item for item in transcripts if item.clip.text.strip()]
    silent = [item for item in transcripts if not item.clip.text.strip()]
    scores = [score(normalise(item.clip.text), normalise(item.text)) for item in speech]
    figures: dict[str, Any] = {}
    if scores:
        figures |= _error_rates(scores)
    if silent:
        minutes = sum(item.clip.seconds for item in silent) / 60
        inserted = {item.clip.path.name: item.text for item in silent if normalise(item.text)}
        words = sum(len(normalise(text)) for text in inserted.values())
        figures |= {
            "silent_minutes": minutes,
            "words_in_silence": words,
            "insertions_per_silent_minute": words / minutes,
            "texts_in_silence": inserted,
        }
    return figures


def _error_rates(scores: Sequence[ClipScore]) -> dict[str, Any]:
    errors = [clip.errors for clip in scores]
    total, edges, inside = pooled(errors), pooled([s.edges for s in scores]), pooled([s.inside for s in scores])
    return {
        "clips": len(scores),
        "words": total.words,
        "wer": total.rate,
        "wer_interval": bootstrap_interval(errors),
        "substitutions": total.substitutions,
        "deletions": total.deletions,
        "insertions": total.insertions,
        # A clip is a turn: were its first and last words lost more often than the others?
        "edge_words": edges.words,
        "edge_deletions": edges.deletions,
        "edge_deletion_rate": edges.deletions / edges.words if edges.words else None,
        "inside_deletion_rate": inside.deletions / inside.words if inside.words else None,
    }


def transcripts_of(run: SessionRun) -> list[Transcript]:
    """The text of each clip of a session: all of it if there is one clip, or the words that fall into each."""
    if len(run.parts) == 1:
        return [Transcript(run.parts[0].clip, run.emissions.text)]
    shown = run.emissions.shown()
    return [Transcript(part.clip, " ".join(word.text for word in _words_of(part, shown))) for part in run.parts]


def _words_of(part: Part, shown: Sequence[ShownWord]) -> list[ShownWord]:
    return [word for word in shown if part.start <= (word.start + word.end) / 2 < part.end]


@dataclass(frozen=True, slots=True)
class HeardPart:
    """The words of a clip, and where somebody spoke."""

    clip: Clip
    words: Sequence[ShownWord | TimedWord]
    spoken: Sequence[tuple[float, float]]


def heard_parts(run: SessionRun) -> list[HeardPart]:
    shown, spoken = run.emissions.shown(), utterances(run.probabilities, run.frame_seconds)
    return [HeardPart(part.clip, _words_of(part, shown), spoken) for part in run.parts]


def seams_in(parts: Sequence[HeardPart], whole: dict[Path, str]) -> dict[str, Any]:
    """Marks and capitals at pauses, where the text of the whole clip is at hand."""
    compared = [part for part in parts if part.clip.path in whole]
    if not compared:
        return {}
    errors = SeamErrors()
    for part in compared:
        errors += compare(whole[part.clip.path], [word.text for word in part.words], seams_of(part.words, part.spoken))
    return {"seams": asdict(errors)}


@dataclass(slots=True)
class Delays:
    """Seconds, over all sessions."""

    emission: list[float] = field(default_factory=list)
    final: list[float] = field(default_factory=list)
    lag: list[float] = field(default_factory=list)
    after_end: list[float] = field(default_factory=list)
    # How sure the model was of a word, and whether it was right.
    judged: list[tuple[float, bool]] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        return {
            "words_timed": len(self.emission),
            "emission_delay_p50": percentile(self.emission, 50),
            "emission_delay_p95": percentile(self.emission, 95),
            "utterances_timed": len(self.final),
            "time_to_final_p50": percentile(self.final, 50),
            "time_to_final_p95": percentile(self.final, 95),
            "lag_p50": percentile(self.lag, 50),
            "lag_p95": percentile(self.lag, 95),
            "lag_max": max(self.lag, default=None),
            "closed_after_end_max": max(self.after_end, default=None),
            "wrong_in_lowest_tenth_and_upper_half": calibration(self.judged),
        }


def delays_of(runs: Sequence[SessionRun]) -> Delays:
    delays = Delays()
    for run in runs:
        shown = run.emissions.shown()
        for part in run.parts:
            said, words = plain_words(part.clip.text), _words_of(part, shown)
            delays.emission += emission_delays(said, words)
            delays.judged += judged(said, words)
        delays.final += times_to_final(utterances(run.probabilities, run.frame_seconds), shown)
        delays.lag += run.lags
        if run.closed_at is not None:
            delays.after_end.append(run.closed_at - run.seconds)
    return delays


def drift_of(runs: Sequence[SessionRun], normalise: Normaliser) -> dict[str, Any]:
    """Error rate and delay by minute of session, over all sessions that are long enough to drift."""
    errors: dict[int, Errors] = {}
    lags: dict[int, list[float]] = {}
    longest = 0
    for run in runs:
        if run.seconds < LONG_SESSION_SECONDS:
            continue
        longest = max(longest, int(run.seconds // 60) + 1)
        for minute, part in _minutes_of(run, normalise):
            errors[minute] = errors.get(minute, Errors()) + part
        for word in run.emissions.shown():
            lags.setdefault(int(word.end // 60), []).append(word.shown_at - word.end)
    if not errors:
        return {}
    third = longest / 3
    return {
        "wer_by_minute": [errors.get(minute, Errors()).rate for minute in range(longest)],
        "delay_p50_by_minute": [percentile(lags.get(minute, []), 50) for minute in range(longest)],
        "wer_first_third": pooled([part for minute, part in errors.items() if minute < third]).rate,
        "wer_last_third": pooled([part for minute, part in errors.items() if minute >= 2 * third]).rate,
    }


def rounds_of(
    runs: Sequence[SessionRun], rounds: int, costs: Sequence[Cost], normalise: Normaliser
) -> list[dict[str, Any]]:
    """Error rate and cost of each round of sessions that play the same recordings over and over."""
    errors: list[list[Errors]] = [[] for _ in range(rounds)]
    ends = [0.0] * rounds
    for run in runs:
        items = transcripts_of(run)
        for index, (item, part) in enumerate(zip(items, run.parts, strict=True)):
            number = index * rounds // len(items)
            errors[number].append(score(normalise(item.clip.text), normalise(item.text)).errors)
            ends[number] = max(ends[number], part.end)
    figures = []
    start = 0.0
    for part_errors, end in zip(errors, ends, strict=True):
        first, last = _cost_at(costs, start), _cost_at(costs, end)
        figures.append(
            {
                "seconds": end - start,
                "wer": pooled(part_errors).rate,
                "cpu_per_audio_second": (last.cpu_seconds - first.cpu_seconds) / max(last.at - first.at, 1e-9),
                "resident_mib": last.resident_bytes / 2**20,
            }
        )
        start = end
    return figures


def _cost_at(costs: Sequence[Cost], moment: float) -> Cost:
    return min(costs, key=lambda cost: abs(cost.at - moment))


def _minutes_of(run: SessionRun, normalise: Normaliser) -> list[tuple[int, Errors]]:
    """Errors by minute: of each clip where it began, or word by word if the session is one recording."""
    if len(run.parts) > 1:
        return [
            (int(part.start // 60), score(normalise(part.clip.text), normalise(item.text)).errors)
            for part, item in zip(run.parts, transcripts_of(run), strict=True)
        ]
    words = normalise(run.emissions.text)
    seconds = spread_times([word.start for word in run.emissions.words], len(words))
    return list(errors_by_minute(normalise(run.parts[0].clip.text), words, seconds).items())


# Printing


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f} %"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def print_accuracy(title: str, figures: dict[str, Any]) -> None:
    print(f"\n{title}")
    if "wer" in figures:
        low, high = figures["wer_interval"] or (None, None)
        print(f"  word error rate        {_percent(figures['wer'])}  (95 %: {_percent(low)} to {_percent(high)})")
        print(
            f"  of {figures['words']} words           {figures['substitutions']} substituted, "
            f"{figures['deletions']} deleted, {figures['insertions']} inserted"
        )
        print(
            f"  deleted at turn edges  {figures['edge_deletions']} of {figures['edge_words']} "
            f"({_percent(figures['edge_deletion_rate'])}; inside turns {_percent(figures['inside_deletion_rate'])})"
        )
    if "silent_minutes" in figures:
        print(
            f"  where nobody speaks    {figures['words_in_silence']} words in {figures['silent_minutes']:.1f} minutes "
            f"({figures['insertions_per_silent_minute']:.2f} a minute)"
        )
        for name, text in figures["texts_in_silence"].items():
            print(f"    {name}: {text!r}")
    if "seams" in figures:
        _print_seams(figures["seams"])
    if "cpu_per_audio_second" in figures:
        print(f"  CPU per audio second   {figures['cpu_per_audio_second']:.3f} s")


def _print_seams(seams: dict[str, int]) -> None:
    for name, places in (("at_seams", seams["seams"]), ("elsewhere", seams["elsewhere"])):
        marks, capitals = (seams[f"{what}_{name}"] for what in ("marks", "capitals"))
        rates = f"{_percent(marks / max(1, places))} marks, {_percent(capitals / max(1, places))} capitals"
        print(f"  wrong {name.replace('_', ' '):16} {rates} other than on whole clips  ({places} places)")
    print(
        f"  wrong in any text      {seams['doubled_marks']} doubled marks, "
        f"{seams['small_letters_behind_sentences']} small letters behind the end of a sentence"
    )


def print_live(figures: dict[str, Any]) -> None:
    print(
        f"  emission delay         p50 {_seconds(figures['emission_delay_p50'])}, "
        f"p95 {_seconds(figures['emission_delay_p95'])}  ({figures['words_timed']} words)"
    )
    print(
        f"  time to final          p50 {_seconds(figures['time_to_final_p50'])}, "
        f"p95 {_seconds(figures['time_to_final_p95'])}  ({figures['utterances_timed']} utterances)"
    )
    if figures["wrong_in_lowest_tenth_and_upper_half"] is not None:
        lowest, upper = figures["wrong_in_lowest_tenth_and_upper_half"]
        print(f"  wrong by confidence    {_percent(lowest)} of the lowest tenth, {_percent(upper)} of the upper half")
    print(f"  behind the live edge   p95 {_seconds(figures['lag_p95'])}, at most {_seconds(figures['lag_max'])}")
    if "wer_by_minute" in figures:
        print("  minute   word error rate   delay p50")
        rows = zip(figures["wer_by_minute"], figures["delay_p50_by_minute"], strict=True)
        for minute, (rate, delay) in enumerate(rows):
            print(f"  {minute:6d}   {_percent(rate):>15}   {_seconds(delay):>9}")
        print(
            f"  first third            {_percent(figures['wer_first_third'])}, "
            f"last third {_percent(figures['wer_last_third'])}"
        )
    for number, of_round in enumerate(figures.get("rounds", []), 1):
        print(
            f"  round {number}, {of_round['seconds'] / 60:.0f} minutes   {_percent(of_round['wer'])}, "
            f"{of_round['cpu_per_audio_second']:.3f} CPU-s/s, {of_round['resident_mib']:.0f} MiB"
        )
