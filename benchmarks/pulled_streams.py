"""Pulled HLS and RTMP streams whose encoders break off and whose gateway is killed: how many words differ?

    python -m benchmarks.pulled_streams [--minutes 30] [--manifest M.jsonl] [--away 10] [--model NAME]

ffmpeg plays a recording in real time as two live streams: HLS, served by a small web server, and RTMP, served by nginx
with its RTMP module (Debian: libnginx-mod-rtmp). A gateway with one process pulls the first (`POST /v1/streams`, with
`server.stream_file`); `tickertape listen URL --server` pulls the second, through a gateway with two workers. The engine
is a process of its own. Each encoder is killed twice and started again `--away` seconds later, where the recording
would be by then. Once both gateways are killed with all of their processes (SIGKILL) and started again. The recording
is the sample that `tickertape pull` provides, again and again, or the clips of a manifest.

The words are compared with those of a calm session: the same coded audio, at the same time, at a gateway that is not
killed. A second calm session begins elsewhere in the recording, so that the model divides the audio differently: it
shows how much two calm sessions differ. At the end the server transcribes the recording as a file. Words in a gap that
is marked, and next to it, do not count; nor do those before the stream was joined.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.clients import PLAIN_SESSION, PacedClient, appends_of, sleep_until
from benchmarks.measuring import RunFailed, parser_of, run_command, show, until
from benchmarks.recordings import joined_sessions, load_audio, read_manifest, sample_speech
from benchmarks.scoring import Word, plain_words
from benchmarks.servers import Child, Server, add_server_options, free_port, program, use_default_model
from benchmarks.sounds import SAMPLE_RATE, Samples, pcm16, voice, write_wav
from realtime.bench.words import align
from realtime.client.wire_client import DELTA

RTMP_MODULE = Path("/usr/lib/nginx/modules/ngx_rtmp_module.so")
PAUSE_S = 1.0
# When encoders break off and the gateway is killed, as shares of the time after all listeners have their first words.
INTERRUPTED_AT = {"hls": (0.2, 0.6), "rtmp": (0.35, 0.8)}
KILLED_AT = 0.48
# Where the second calm session begins: not a multiple of the embedded model's strides.
ELSEWHERE_S = 3.37
# Seconds next to a gap, and around the kill, that are counted by themselves.
EDGE_S, KILL_S = 2.0, 20.0
# Segments of HLS by which a listener is late at the end; and the longest wait for its last words.
LATE_SEGMENTS = 6
# Seconds of a small run after all listeners have their first words.
SMALL_S = 4.0
LAST_WORDS_S = 120.0
# Seconds without a byte after which a reader of events connects again, and before it does.
READER_S, ASK_AGAIN_S = 60.0, 0.5
# The gateways: of `tickertape listen`, of calm sessions, of streams that the server pulls.
LISTENS, CALM, PULLS = 0, 1, 2

Figures = dict[str, Any]
Span = tuple[float, float]


# Streams


@dataclass
class Source:
    """A live stream of the recording. Times are seconds since it began, and so of the recording."""

    name: str
    url: str
    # The end of ffmpeg's command.
    target: list[str]
    coded: Path
    interruptions: list[Span] = field(default_factory=list)
    began: float = 0.0
    _encoder: Child | None = None

    def begin(self) -> None:
        self.began = time.monotonic()
        self._encode(0.0)

    async def interrupt(self, away_s: float) -> None:
        assert self._encoder is not None
        lost_at = self._now()
        self._encoder.kill()
        await asyncio.sleep(away_s)
        back_at = self._now()
        self._encode(back_at)
        self.interruptions.append((lost_at, back_at))
        print(f"{self.name}: away from {lost_at:.1f} to {back_at:.1f} s", flush=True)

    def stop(self) -> None:
        if self._encoder is not None:
            self._encoder.stop()

    def _now(self) -> float:
        return time.monotonic() - self.began

    def _encode(self, position: float) -> None:
        command = [program("ffmpeg"), "-nostdin", "-v", "error", "-re", "-ss", f"{position:.3f}", "-i", str(self.coded)]
        log = self.coded.with_name(f"{self.name}-encoder.log")
        self._encoder = Child(f"{self.name} encoder", [*command, "-c", "copy", *self.target], log)


def hls(coded: Path, segment_s: int, children: list[Child]) -> Source:
    """Served by Python's web server."""
    folder, port = coded.with_name("hls"), free_port()
    folder.mkdir()
    web = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(folder), str(port)]
    children.append(Child("web server", web, coded.with_name("web.log")))
    target = ["-f", "hls", "-hls_time", str(segment_s), "-hls_list_size", "6"]
    target += ["-hls_flags", "append_list+delete_segments+omit_endlist", str(folder / "live.m3u8")]
    return Source("hls", f"http://127.0.0.1:{port}/live.m3u8", target, coded)


def rtmp(coded: Path, children: list[Child]) -> Source:
    """Served by nginx with its RTMP module."""
    folder, port = coded.parent, free_port()
    server = f"rtmp {{ server {{ listen 127.0.0.1:{port}; application live {{ live on; }} }} }}"
    config = folder / "rtmp.conf"
    config.write_text(f"load_module {RTMP_MODULE}; daemon off; pid {folder}/pid; events {{}} {server}\n")
    command = [program("nginx"), "-p", str(folder), "-e", "stderr", "-c", str(config)]
    children.append(Child("nginx", command, folder / "nginx.log"))
    url = f"rtmp://127.0.0.1:{port}/live/studio"
    return Source("rtmp", url, ["-f", "flv", url], coded)


class Listener:
    """`tickertape listen`, and the transcript that it writes."""

    def __init__(self, source: Source, server_url: str) -> None:
        self.source = source
        self._transcript = source.coded.with_name(f"{source.name}.json")
        command = [sys.executable, "-m", "realtime.cli", "listen", source.url, "--server", server_url, "--words"]
        command += ["--output", str(self._transcript)]
        self._child = Child("tickertape listen", command, source.coded.with_name("listen.log"))

    def has_words(self) -> bool:
        self._child.check()
        return self._transcript.exists() and '"words"' in self._transcript.read_text()

    def end(self) -> None:
        self._child.check()
        self._child.stop(LAST_WORDS_S)

    def heard(self) -> tuple[list[Word], list[Span]]:
        """Its words, and the gaps that it has marked, in seconds of the stream."""
        lines = [json.loads(line) for line in self._transcript.read_text().splitlines()]
        gaps = [(line["start"], line["end"]) for line in lines if line.get("gap")]
        return words_of([word for line in lines for word in line.get("words", ())]), gaps


class ServerStream:
    """A stream that the server pulls, and a reader of its events that connects again."""

    def __init__(self, source: Source, server_url: str) -> None:
        self.source = source
        request = urllib.request.Request(f"{server_url}/v1/streams", json.dumps({"url": source.url}).encode())
        with urllib.request.urlopen(request) as answer:
            self._url = f"{server_url}/v1/streams/{json.load(answer)['id']}"
        self._events: list[dict[str, Any]] = []
        self._last = 0
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def has_words(self) -> bool:
        return any(event["type"] == DELTA for event in self._events)

    def end(self) -> None:
        with urllib.request.urlopen(urllib.request.Request(self._url, method="DELETE")):
            pass
        self._reading.join(LAST_WORDS_S)
        if self._reading.is_alive():
            raise RunFailed("the events of the stream did not end")

    def heard(self) -> tuple[list[Word], list[Span]]:
        """Its words, and the gaps that it has marked, in seconds of the stream."""
        sessions: list[tuple[float, list[dict[str, Any]]]] = []
        for event in self._events:
            if event["type"] == "stream.session":
                sessions.append((event["stream_seconds"], []))
            elif sessions:
                sessions[-1][1].append(event)
        words: list[Word] = []
        gaps: list[Span] = []
        for begins, events in sessions:
            # Words of the earlier session after `begins` are sent again.
            words = [word for word in words if word.middle < begins]
            words += [replace(word, start=word.start + begins, end=word.end + begins) for word in told(events)]
            marked = [event for event in events if event["type"] == "stream.gap"]
            gaps += [(begins + gap["audio_start_ms"] / 1000, begins + gap["audio_end_ms"] / 1000) for gap in marked]
        return words, gaps

    def _read(self) -> None:
        while True:
            request = urllib.request.Request(f"{self._url}/events", headers={"Last-Event-ID": str(self._last)})
            try:
                with urllib.request.urlopen(request, timeout=READER_S) as answer:
                    for line in answer:
                        name, _, value = line.decode().partition(": ")
                        if name == "id":
                            self._last = int(value)
                        elif name == "data":
                            self._events.append(json.loads(value))
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    return  # it was deleted
            except (OSError, http.client.HTTPException):
                pass
            if self._events and self._events[-1].get("message") == "deleted":
                return
            time.sleep(ASK_AGAIN_S)


Puller = Listener | ServerStream


def words_of(words: Sequence[dict[str, Any]]) -> list[Word]:
    return [Word(word["word"], word["start"], word["end"]) for word in words]


def told(events: Sequence[dict[str, Any]]) -> list[Word]:
    """The words of a session as they were streamed. The last of a turn has no time; it gets that of the one before."""
    texts: dict[str, str] = {}
    timed: dict[str, list[Word]] = {}
    for event in events:
        if event["type"] == DELTA:
            item = event["item_id"]
            texts[item] = texts.get(item, "") + event["delta"]
            timed.setdefault(item, []).extend(words_of(event.get("words") or ()))
    found: list[Word] = []
    for item, text in texts.items():
        words = timed[item] or found[-1:] or [Word("", 0.0, 0.0)]
        found += [replace(words[min(at, len(words) - 1)], text=word) for at, word in enumerate(text.split())]
    return found


# Calm sessions


def calm_client(url: str, audio: Samples, start: float, is_over: Callable[[], bool]) -> PacedClient:
    """Sends the audio from `start` seconds on."""
    appends = appends_of(pcm16(audio[round(start * SAMPLE_RATE) :]))
    appends_until = takewhile(lambda _: not is_over(), appends)
    return PacedClient(url, appends_until, options=replace(PLAIN_SESSION, finals="streamed"))


def transcribed(coded: Path, server_url: str) -> list[Word]:
    """The words of the whole file."""
    command = [sys.executable, "-m", "realtime.cli", "transcribe", "--json", "--words", "--server", server_url]
    done = subprocess.run([*command, str(coded)], check=True, stdout=subprocess.PIPE)
    return words_of(json.loads(done.stdout)["words"])


# Comparison


@dataclass(frozen=True)
class Difference:
    """A word that differs: when, in seconds of the heard stream, what was expected and what was heard."""

    moment: float
    expected: str
    heard: str


@dataclass
class Comparison:
    words: int = 0
    differences: list[Difference] = field(default_factory=list)
    # Words of the reference that are in a gap or next to one, or before the first one that was heard.
    left_out: int = 0
    # For each stretch between gaps: seconds from a word's time in the stream to its time in the reference (median).
    shifts: list[float] = field(default_factory=list)


def compare(reference: Sequence[Word], heard: Sequence[Word], gaps: Sequence[Span] = ()) -> Comparison:
    """Compare words, case and punctuation aside."""
    left = [(plain, word.middle) for word in reference for plain in plain_words(word.text)]
    right = [(plain, word.middle) for word in heard for plain in plain_words(word.text)]
    pairs = align([word for word, _ in left], [word for word, _ in right])
    same = [(i, j) for i, j in pairs if i is not None and j is not None and left[i][0] == right[j][0]]
    if not same:
        raise RunFailed("no word of the reference was heard")
    found = Comparison()
    moments = [right[j][1] for _, j in same]
    away = [left[i][1] - right[j][1] for i, j in same]
    borders = np.searchsorted(moments, [start for start, _ in gaps])
    found.shifts = [float(np.median(part)) for part in np.split(away, borders) if len(part)]
    shift, first, last = found.shifts[0], right[0][1], left[-1][1]
    for i, j in pairs:
        expected, heard_word = "" if i is None else left[i][0], "" if j is None else right[j][0]
        if expected == heard_word and i is not None and j is not None:
            shift = left[i][1] - right[j][1]
        moment = right[j][1] if j is not None else left[i][1] - shift if i is not None else 0.0
        is_at_end = moment < first + EDGE_S or moment > last - shift - EDGE_S
        if is_at_end or any(start - EDGE_S < moment < end + EDGE_S for start, end in gaps):
            found.left_out += i is not None
            continue
        found.words += i is not None
        if expected != heard_word:
            found.differences.append(Difference(moment, expected, heard_word))
    return found


def overlap(gap: Span, interruption: Span) -> bool:
    """Whether this interruption has caused this gap; both in seconds of the recording."""
    return gap[0] < interruption[1] + EDGE_S and interruption[0] - EDGE_S < gap[1]


def stream_figures(puller: Puller, reference: Sequence[Word], file: Sequence[Word], killed: Span) -> Figures:
    """`killed`: when the gateways were killed, and when they were ready again (the clock's seconds)."""
    heard, gaps = puller.heard()
    source, against = puller.source, compare(reference, heard, gaps)
    shift = against.shifts[0]
    killed_at = killed[0] - source.began - shift
    near = [one for one in against.differences if abs(one.moment - killed_at) < KILL_S]
    for one in against.differences:
        print(f"{source.name} {one.moment:.1f} s: {one.expected or '-'} | {one.heard or '-'}")
    causes = [(f"encoder away for {end - start:.1f} s", (start, end)) for start, end in source.interruptions]
    # A stream is pulled some segments late.
    kill = killed[0] - source.began - KILL_S, killed[1] - source.began
    marks = {}
    for number, (start, end) in enumerate(gaps, 1):
        place = start + shift, end + shift
        known = [text for text, cause in causes if overlap(place, cause)]
        known = known or (["gateway killed"] if overlap(place, kill) else ["no cause"])
        marks[f"gap_{number}"] = f"{start:.1f} to {end:.1f} s, {end - start:.1f} s: {', '.join(known)}"
    unmarked = [
        cause for _, cause in causes if not any(overlap((start + shift, end + shift), cause) for start, end in gaps)
    ]
    return {
        "words": against.words,
        "words_that_differ": len(against.differences),
        "of_them_around_the_kill": len(near),
        "words_left_out": against.left_out,
        "words_that_differ_from_the_file": len(compare(file, heard, gaps).differences),
        **marks,
        "interruptions_without_a_gap": len(unmarked),
        "gaps_without_a_cause": sum(text.endswith("no cause") for text in marks.values()),
        # How much the times of the words have moved since the first stretch.
        "times_moved_s": [round(later - shift, 2) for later in against.shifts[1:]],
    }


# The run


def recording(options: argparse.Namespace) -> Samples:
    """As many minutes of speech as asked for."""
    if options.null:
        sound = voice(10.0, 130.0, seed=1)
    elif options.manifest is not None:
        sound, _ = joined_sessions(read_manifest(options.manifest, kind="clips"), 1, PAUSE_S)[0].load()
    else:
        sound = np.concatenate([sample_speech(), np.zeros(round(PAUSE_S * SAMPLE_RATE), np.float32)])
    return np.resize(sound, round(60 * options.minutes * SAMPLE_RATE))


def coded_as_aac(sound: Samples, folder: Path) -> Path:
    """The audio as both streams carry it."""
    raw, coded = folder / "recording.wav", folder / "recording.m4a"
    write_wav(raw, sound)
    subprocess.run(
        [program("ffmpeg"), "-nostdin", "-v", "error", "-i", raw, "-c:a", "aac", "-b:a", "64k", coded], check=True
    )
    return coded


async def play(
    server: Server, sources: Sequence[Source], sound: Samples, options: argparse.Namespace
) -> tuple[list[Puller], list[PacedClient], Span]:
    """Plays everything; returns when the gateways were killed and when they were ready again, too."""
    for source in sources:
        source.begin()
    await until((sources[0].coded.with_name("hls") / "live.m3u8").exists)
    pullers: list[Puller] = [ServerStream(sources[0], server.http(PULLS, ""))]
    pullers += [Listener(source, server.http(LISTENS, "")) for source in sources[1:]]
    url = server.urls[CALM].partition("?")[0]
    ends = sources[0].began + len(sound) / SAMPLE_RATE
    calm = [calm_client(url, sound, start, lambda: time.monotonic() > ends) for start in (0.0, ELSEWHERE_S)]
    speaking = [asyncio.create_task(client.speak()) for client in calm]
    await until(lambda: all(puller.has_words() for puller in pullers))
    began = time.monotonic()
    if options.small:
        ends = began + SMALL_S

    async def interrupt(source: Source) -> None:
        for share in INTERRUPTED_AT[source.name]:
            await sleep_until(began + share * (ends - began))
            await source.interrupt(options.away)

    async def kill() -> Span:
        await sleep_until(began + KILLED_AT * (ends - began))
        killed_at = time.monotonic()
        await asyncio.to_thread(server.replace_gateways, LISTENS, PULLS)
        print(f"gateways killed, and ready again after {time.monotonic() - killed_at:.1f} s", flush=True)
        return killed_at, time.monotonic()

    killing = asyncio.create_task(kill())
    await asyncio.gather(killing, *speaking, *map(interrupt, sources))
    await asyncio.sleep((1 if options.small else LATE_SEGMENTS) * options.segment)
    server.check()
    for puller in pullers:
        await asyncio.to_thread(puller.end)
    return pullers, calm, killing.result()


def measure(options: argparse.Namespace) -> Figures:
    use_default_model(options)
    with tempfile.TemporaryDirectory(prefix="streams-") as folder:
        figures = figures_of(options, Path(folder))
    show("Pulled streams whose encoders break off and whose gateways are killed", figures)
    return {"command": " ".join(sys.argv[1:]), "cores": os.cpu_count(), "results": figures}


def figures_of(options: argparse.Namespace, folder: Path) -> Figures:
    coded = coded_as_aac(recording(options), folder)
    sound = load_audio(coded)
    config = folder / "tickertape.toml"
    # A gateway that is started again has to know the tokens of its sessions.
    config.write_text(f'[auth]\nsecret = "{secrets.token_hex(32)}"\n')
    pulls = folder / "pulls.toml"
    pulls.write_text(f'[server]\nstream_hosts = ["127.0.0.1"]\nstream_file = "{folder / "streams.json"}"\n')
    flags = {LISTENS: ["--config", str(config)], PULLS: ["--config", str(pulls), "--workers", "1"]}
    sources, children = list[Source](), list[Child]()
    try:
        sources.append(hls(coded, options.segment, children))
        if RTMP_MODULE.exists() or not options.small:
            sources.append(rtmp(coded, children))
        with Server(options, counts_streams_only=True, own_flags=flags) as server:
            pullers, calm, killed = asyncio.run(play(server, sources, sound, options))
            file = transcribed(coded, server.http(CALM, ""))
    finally:
        for running in (*sources, *children):
            running.stop()
    reference, other = (told(client.events) for client in calm)
    between = compare(reference, other)
    return {
        "minutes": len(sound) / SAMPLE_RATE / 60,
        "gateways_ready_again_s": killed[1] - killed[0],
        **{puller.source.name: stream_figures(puller, reference, file, killed) for puller in pullers},
        "two calm sessions": {"words": between.words, "words_that_differ": len(between.differences)},
        "calm session and file": {"words_that_differ": len(compare(file, reference).differences)},
    }


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--manifest", type=Path, help="recordings to play, as for benchmarks.accuracy")
    parser.add_argument("--away", type=float, default=10.0, help="seconds for which an encoder is away")
    parser.add_argument("--segment", type=int, default=4, help="seconds of an HLS segment")
    add_server_options(parser)
    parser.set_defaults(workers=2, gateways=3)
    # The recording of a small run is longer than the run.
    run_command(parser, arguments, measure, null=True, workers=1, minutes=1.0, away=1.0, segment=1)


if __name__ == "__main__":
    main()
