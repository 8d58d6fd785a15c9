"""How long the answer to a long file blocks the event loop at a time, and how long it takes in total.

    python -m benchmarks.answer_holds [--hours 4]

A transcript as Whisper would give it, ten tokens a second with their probabilities, is written in every format of the
upload routes. `at once` is the time of writing it without a break. All times are processor time of this thread, so
other programs on the machine hardly change them.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import uvloop

from realtime.dialects.deepgram import read_file_query
from realtime.http import deepgram_file_route
from realtime.http.file_transcription import Transcript, UploadRequest, sse_done, write_answer
from realtime.http.long_responses import PiecesResponse
from realtime.session.events import TimedWord
from realtime.session.settings import Settings

RATE = 16_000
WORDS_PER_SECOND = 3
SPOKEN = "it was the best of times, it was the worst of times & nothing was before us; in short, that period".split()


def spoken(hours: float) -> Transcript:
    words = []
    for number in range(int(3600 * hours * WORDS_PER_SECOND)):
        text = SPOKEN[number % len(SPOKEN)] + ("." if number % 17 == 16 else "")
        start = number * RATE // WORDS_PER_SECOND
        chances = tuple((piece.encode(), -0.1) for piece in (f" {text[:2]}", text[2:4], text[4:]) if piece)
        words.append(TimedWord(text, start, start + RATE // 4, chances, 0.9, "en", 0.01))
    made = Transcript(RATE, "en", " ".join(word.text for word in words), samples=int(3600 * hours * RATE))
    made.add_words(words)
    return made


def shapes() -> dict[str, Callable[[Transcript], Iterable[bytes]]]:
    def asked(name: str, logprobs: bool = False) -> UploadRequest:
        return UploadRequest(name, Settings(), stream=False, words=True, logprobs=logprobs)

    def deepgram(**query: str) -> Callable[[Transcript], Iterable[bytes]]:
        return lambda made: deepgram_file_route.write_answer(made, read_file_query(query), "model", "id", "sha256")

    return {
        **{name: lambda made, name=name: write_answer(made, asked(name))[0] for name in ("text", "srt", "vtt", "json")},
        "verbose_json with words": lambda made: write_answer(made, asked("verbose_json"))[0],
        "json with logprobs": lambda made: write_answer(made, asked("json", logprobs=True))[0],
        "the last event of a stream with logprobs": lambda made: sse_done(made, asked("json", logprobs=True)),
        "deepgram": deepgram(),
        "deepgram, smart_format and utterances": deepgram(smart_format="true", utterances="true"),
        "deepgram, one utterance": deepgram(utterances="true", utt_split="100000"),
    }


async def longest_hold(pieces: Iterable[bytes]) -> tuple[float, int]:
    """The longest time without a turn for other tasks, in processor seconds of this thread, and the bytes sent."""
    longest, sent, turned = 0.0, 0, time.thread_time()

    async def others() -> None:
        nonlocal longest, turned
        while True:
            longest, turned = max(longest, time.thread_time() - turned), time.thread_time()
            await asyncio.sleep(0)

    async def send(message: Any) -> None:
        nonlocal sent
        sent += len(message.get("body", b""))

    async def nothing() -> Any:
        return None

    watching = asyncio.create_task(others())
    await asyncio.sleep(0)
    turned = time.thread_time()
    await PiecesResponse(pieces, "application/json", nothing)({"type": "http"}, nothing, send)
    await asyncio.sleep(0)
    watching.cancel()
    return longest, sent


async def run(hours: float) -> None:
    made = spoken(hours)
    sys.stdout.write(f"{hours:g} h of speech, {len(made.words)} words\n")
    for name, write in shapes().items():
        began = time.thread_time()
        size = sum(map(len, write(made)))
        at_once = time.thread_time() - began
        # The worst of three, because one of them includes a run of the garbage collector.
        hold, _ = max([await longest_hold(write(made)) for _ in range(3)])
        sys.stdout.write(f"{name}: {size / 1e6:.1f} MB, at once {1000 * at_once:.0f} ms, held {1000 * hold:.1f} ms\n")
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=4.0)
    uvloop.run(run(parser.parse_args().hours))


if __name__ == "__main__":
    main()
