"""How many sessions the whole server holds: sockets, gateways, engine process, speech detection, default limits.

    python -m benchmarks.server_capacity --sessions 600 500:24000:50 1000:16000:80:0.5 --kv fp8 --seconds 60 \\
        --workers 6 --json docs/data/h200-server.json

The model is Voxtral Realtime at full dimensions with random weights (`benchmarks/random_weights.py`); everything else
is what `tickertape serve --engine` runs. Clients in separate processes send speech in real time over sockets, with turn
detection (`benchmarks/clients.py`). A word's lag is the time from sending its last sample to receiving the delta with
its text, minus the model's delay; appends of 80 ms alone cause up to 80 ms of it, because an item needs the next 2.5 ms
of audio. A load holds if the 99th percentile is at most 250 ms, the lag does not grow and no session fails. Words in
pauses, by the server's own detector on the audio that is sent, are counted and not scored: random weights output some,
and these wait until the turn before is completed.

With --whisper SIZE the model is Whisper with random weights and scripted tokens, with --model NAME a windowed model
with its real weights. All their words are scored, but they wait for the next pass, and for another one if the first is
not sure. A load holds if 95 % of the turns have their final text at most 1.5 s after the end of speech, and if in 95 %
of the queries of the server the latest stream has at most 1.5 s of audio without a pass. With --null there is no
model: that measures the cost of gateways.

Several loads share one start: SESSIONS[:RATE[:APPEND_MS[:SILENT_SHARE]]].

--join-later N: halfway through the counted time, N more sessions join within five seconds. --drain N: N more sessions
are on a second engine of the same device, which is drained halfway. Both compare the lags of the first sessions before
and after that moment, and tell those of the N. --kill: halfway, the engine is killed and started again. The figures are
the seconds until it has started (`back_s`) and, from then on, until the next text of each session.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.clients import ClientProcesses, Findings, Schedule, play_lags
from benchmarks.measuring import is_at_most, parser_of, percentiles, run_command, show, write_json
from benchmarks.recordings import sample_path
from benchmarks.servers import Server, add_server_options
from benchmarks.sounds import SAMPLE_RATE, speech, speech_probabilities, utterances

SETTLE_S = 3.0
ASK_EVERY_S = 0.5
# Seconds in which sessions join later, for which sessions speak before their engine is drained, and in which an engine
# starts beside another.
LATER_JOIN_S, DRAINED_AFTER_S, SECOND_START_S = 5.0, 30.0, 75.0
# Texts that come sooner after the engine was killed were on their way before.
ON_THEIR_WAY_S = 0.5
# A lag that grows by more than this in a minute counts as growing.
MAX_GROWTH_MS_PER_MIN = 100.0
# A model that answers every frame is held to the lag of its words (99th percentile), less its own delay; one that reads
# windows to how far the engine is behind and to when texts are final (95th percentiles).
MAX_LAG_MS, VOXTRAL_DELAY_MS = 250.0, 480
MAX_WINDOWED_LAG_MS = 1500.0

Result = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """The number of sessions, how they send, and the share of the time for which each is silent."""

    sessions: int
    rate: int = SAMPLE_RATE
    append_ms: int = 80
    silent: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Load:
        """SESSIONS[:RATE[:APPEND_MS[:SILENT_SHARE]]]"""
        return cls(*(kind(part) for kind, part in zip((int, int, int, float), text.split(":"), strict=False)))

    def __str__(self) -> str:
        silent = f", each silent for {self.silent:.0%} of the time" if self.silent else ""
        return f"{self.sessions} sessions, {self.rate // 1000} kHz, appends of {self.append_ms} ms{silent}"


def spans_of_speech(audio: Path | None, everywhere: bool) -> list[tuple[float, float]]:
    """Where the server's detector finds speech in the audio that clients play in a loop, in seconds. Models that output
    nothing in pauses need no detector to score their words."""
    sound = speech(audio)
    seconds = len(sound) / SAMPLE_RATE
    if everywhere:
        return [(0.0, seconds)]
    # The detector has heard the audio before, as for clients that play it in a loop.
    probabilities, frame = speech_probabilities(np.concatenate([sound, sound]))
    spans = utterances(probabilities, frame / SAMPLE_RATE)
    return [(max(0.0, start - seconds), end - seconds) for start, end in spans if end > seconds]


def measure(server: Server, load: Load, options: argparse.Namespace, spans: list[tuple[float, float]]) -> Result:
    windowed, later = is_windowed(options), options.join_later or options.drain
    orders = {
        "url": server.url,
        "recording": options.audio,
        "rate": load.rate,
        "append_ms": load.append_ms,
        "delay_ms": 0 if windowed else VOXTRAL_DELAY_MS,
        "language": "en" if windowed else None,
        "silent_share": load.silent,
        "speakers": options.speakers,
        "semantic": options.semantic,
        "speech": spans,
    }
    with (
        ClientProcesses(play_lags, load.sessions, options.clients, **orders) as clients,
        ClientProcesses(play_lags, later, options.clients, **orders, first_number=load.sessions) as others,
    ):
        begins, join_s = time.monotonic() + 0.5, load.sessions / options.joins_per_second
        settle_s = 0.5 if options.small else SETTLE_S
        prepare_s = settle_s if not options.drain else 10.0 if options.small else SECOND_START_S + DRAINED_AFTER_S
        counts_from = begins + join_s + prepare_s
        schedule = Schedule(begins, join_s, counts_from, counts_from + options.seconds)
        middle = counts_from + options.seconds / 2
        if options.kill:
            schedule = replace(schedule, waits_from=middle + ON_THEIR_WAY_S)
        clients.begin(schedule)
        if options.join_later:
            others.begin(replace(schedule, begins=middle, join_s=LATER_JOIN_S, counts_from=middle + LATER_JOIN_S))
        elif options.drain:
            sleep_until(begins + join_s)
            server.start_second_engine(options, options.drain)
            others.begin(replace(schedule, begins=time.monotonic(), join_s=options.drain / options.joins_per_second))
        sleep_until(counts_from)
        before = {**server.cpu_seconds(), "clients": clients.cpu_seconds()}
        capacities = watch(server, middle)
        if options.drain:
            print("engines before the drain:", [engine["streams"] for engine in server.capacity()["engines"]])
            server.drain_second_engine()
        back_at = middle
        if options.kill:
            server.restart_engine()
            server.wait_for_restarted_engine()
            back_at = time.monotonic()
        capacities += watch(server, schedule.counts_until)
        after = {**server.cpu_seconds(), "clients": clients.cpu_seconds()}
        findings = clients.findings()
        cores = {name: (after[name] - before.get(name, 0.0)) / options.seconds for name in after}
        figures = summary(load, options.seconds, findings, cores, capacities)
        if options.kill:
            waits = [moment - back_at for found in findings for moment in found.next_texts]
            figures |= {"back_s": back_at - middle, **percentiles("next_text_s", waits, 50, 95, 100)}
        if later:
            figures |= before_and_after(findings, options.seconds / 2) | of_later(others.findings())
    if not options.drain:
        server.check()
    return figures


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def before_and_after(findings: list[Findings], middle: float) -> Result:
    """Lags of words and final texts before and after `middle`, in seconds since counting began."""
    figures: Result = {}
    for name, is_part in (("before", lambda moment: moment < middle), ("after", lambda moment: moment >= middle)):
        lags = [lag for found in findings for moment, lag in found.lags if is_part(moment)]
        finals = [lag for found in findings for moment, lag in found.finals if is_part(moment)]
        figures |= percentiles(f"{name}_lag", lags, 50, 99, 100) | percentiles(f"{name}_final", finals, 50, 95)
    return figures


def of_later(findings: list[Findings]) -> Result:
    """Figures of the sessions that joined later or were drained."""
    lags = [lag for found in findings for _, lag in found.lags]
    return {
        "later_connected": sum(found.connected for found in findings),
        "later_failures": [text for found in findings for text in found.failures][:20],
        **percentiles("later_lag", lags, 50, 99, 100),
    }


def is_windowed(options: argparse.Namespace) -> bool:
    return bool(options.whisper or options.model)


def watch(server: Server, until: float) -> list[tuple[int, float]]:
    """Polls `/capacity`: pairs of the streams that hold by the server's figures, and the engines' largest lag in ms."""
    told = []
    while time.monotonic() < until:
        capacity = server.capacity()
        behind = max((engine["lag_ms"] for engine in capacity["engines"]), default=0)
        told.append((capacity["streams_that_hold"], behind))
        sleep_until(min(time.monotonic() + ASK_EVERY_S, until))
    return told


def summary(
    load: Load,
    seconds: float,
    findings: list[Findings],
    cores: dict[str, float],
    capacities: list[tuple[int, float]],
) -> Result:
    """Times in milliseconds, processor time in cores."""
    pairs = [pair for found in findings for pair in found.lags]
    lags = [lag for _, lag in pairs]
    moments = [moment for moment, _ in pairs]
    grows = len(pairs) > 1 and np.ptp(moments) > 0
    finals = [lag for found in findings for _, lag in found.finals]
    appends = sum(found.appends for found in findings)
    gateways = sorted((used for name, used in cores.items() if name.startswith("gateway")), reverse=True)
    each_us = 1e6 * seconds / max(1, appends)
    return {
        "load": asdict(load),
        "connected": sum(found.connected for found in findings),
        "refusals": sum(found.refusals for found in findings),
        "said_to_hold": capacities[-1][0] if capacities else 0,
        "failures": [text for found in findings for text in found.failures][:20],
        "seconds": seconds,
        "words": len(pairs),
        "words_in_pauses": sum(found.in_pauses for found in findings),
        **percentiles("lag", lags, 50, 95, 99),
        "lag_max": max(lags, default=None),
        "growth_per_min": float(np.polyfit(moments, lags, 1)[0]) * 60 if grows else 0.0,
        # Audio that the engine has and has not read, of the stream that is furthest behind, by the engine's own count.
        **percentiles("behind", [behind for _, behind in capacities], 50, 95),
        # From the end of speech to the final text of a turn, which waits for the turn's silence.
        "finals": len(finals),
        **percentiles("final", finals, 50, 95),
        "appends": appends,
        **percentiles("append_late", [value for found in findings for value in found.late_ms], 99),
        "engine_cores": cores["engine"],
        # Of each process of the gateways, the busiest first.
        "gateway_cores": gateways,
        "client_cores": cores["clients"],
        "gateway_us_per_append": sum(gateways) * each_us,
        "engine_us_per_append": cores["engine"] * each_us,
    }


def holds(result: Result, windowed: bool) -> bool:
    is_whole = result["connected"] == result["load"]["sessions"] and not result["failures"] and result["words"] > 0
    if windowed:
        in_time = all(is_at_most(result[name], MAX_WINDOWED_LAG_MS) for name in ("behind_p95", "final_p95"))
    else:
        in_time = is_at_most(result["lag_p99"], MAX_LAG_MS)
    return is_whole and in_time and result["growth_per_min"] <= MAX_GROWTH_MS_PER_MIN


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    if options.model and options.audio is None:
        options.audio = sample_path()
    report: dict[str, Any] = {"arguments": vars(options), "results": []}
    windowed, began = is_windowed(options), time.monotonic()
    spans = spans_of_speech(options.audio, options.null or windowed)
    with Server(options, counts_streams_only=options.small) as server:
        print(f"ready after {time.monotonic() - began:.0f} s", flush=True)
        for load in map(Load.parse, options.sessions):
            result = measure(server, load, options, spans)
            report["results"].append(result)
            outcome = "holds" if holds(result, windowed) else "FAILS"
            show(f"Whole server, {load}, {options.seconds:.0f} s: {outcome}", result)
            write_json(options, report)
    return report


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sessions", nargs="+", default=["600"], metavar="LOAD", help="see above")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds that are counted, for each load")
    parser.add_argument("--join-later", type=int, default=0, metavar="N", help="sessions that join halfway")
    parser.add_argument("--drain", type=int, default=0, metavar="N", help="sessions whose engine is drained halfway")
    parser.add_argument("--kill", action="store_true", help="kill the engine halfway, and start it again")
    parser.add_argument("--speakers", action="store_true", help="sessions ask for speaker labels")
    parser.add_argument("--semantic", action="store_true", help="turns end by semantic_vad, with the turn detector")
    add_server_options(parser)
    # A small run has a tiny Voxtral on the CPU, unless another model is asked for.
    small = {"sessions": ["2:24000:50:0.2"], "seconds": 1.5, "clients": 1, "max_streams": 4, "workers": 1}
    run_command(parser, arguments, measure_all, **small)


if __name__ == "__main__":
    main()
