"""How long the server's event loop is blocked while it writes the response to a long file, and how long that takes.

    python -m benchmarks.response_cost [--hours 4] [--json FILE]

A transcript as Whisper would give it, ten tokens a second with their probabilities, is written in the longest formats
of the upload routes. `at_once` is the time of writing it without a break, `longest_block` the longest time without a
turn for other tasks. All times are processor time of this thread, so other programs on the machine hardly change them.
There is no server and no model.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import uvloop

from benchmarks.measuring import parser_of, run_command, show
from realtime.dialects.deepgram import read_file_query
from realtime.http import transcription_routes
from realtime.http.file_transcription import Transcript, UploadRequest, write_answer
from realtime.http.long_responses import PiecesResponse
from realtime.session.events import TimedWord
from realtime.session.settings import Settings

RATE = 16_000
WORDS_PER_SECOND = 3
SPOKEN = "it was the best of times, it was the worst of times & nothing was before us; in short, that period".split()


def transcript(hours: float) -> Transcript:
    words = []
    for number in range(int(3600 * hours * WORDS_PER_SECOND)):
        text = SPOKEN[number % len(SPOKEN)] + ("." if number % 17 == 16 else "")
        start = number * RATE // WORDS_PER_SECOND
        chances = tuple((piece.encode(), -0.1) for piece in (f" {text[:2]}", text[2:4], text[4:]) if piece)
        words.append(TimedWord(text, start, start + RATE // 4, chances, 0.9, "en", 0.01))
    made = Transcript(RATE, "en", " ".join(word.text for word in words), samples=int(3600 * hours * RATE))
    made.add_words(words)
    return made


def formats() -> dict[str, Callable[[Transcript], Iterable[bytes]]]:
    def verbose(made: Transcript) -> Iterable[bytes]:
        request = UploadRequest("verbose_json", Settings(), stream=False, words=True, logprobs=False)
        return write_answer(made, request)[0]

    def deepgram(made: Transcript, **query: str) -> Iterable[bytes]:
        return transcription_routes.write_listen_answer(made, read_file_query(query), "model", "id", "sha256")

    def formatted(made: Transcript) -> Iterator[bytes]:
        """The text is formatted and searched before it is written."""
        query = {"smart_format": "true", "profanity_filter": "true", "search": "times"}
        copy = replace(made)
        for _ in copy.format(read_file_query(query).settings.formatting):
            yield b""
        yield from deepgram(copy, **query)

    return {
        "verbose_json with words": verbose,
        "deepgram, smart_format and utterances": partial(deepgram, smart_format="true", utterances="true"),
        "deepgram, formatted": formatted,
    }


async def longest_block(pieces: Iterable[bytes]) -> float:
    """The longest time without a turn for other tasks while an answer is sent, in processor seconds of this thread."""
    longest, turned = 0.0, time.thread_time()

    async def others() -> None:
        nonlocal longest, turned
        while True:
            longest, turned = max(longest, time.thread_time() - turned), time.thread_time()
            await asyncio.sleep(0)

    async def nothing(message: Any = None) -> Any:
        return None

    watching = asyncio.create_task(others())
    await asyncio.sleep(0)
    turned = time.thread_time()
    await PiecesResponse(pieces, "application/json", nothing)({"type": "http"}, nothing, nothing)
    await asyncio.sleep(0)
    watching.cancel()
    return longest


async def measure(made: Transcript, write: Callable[[Transcript], Iterable[bytes]]) -> dict[str, float]:
    began = time.thread_time()
    size = sum(map(len, write(made)))
    at_once = time.thread_time() - began
    # The worst of three, because one of them includes a run of the garbage collector.
    blocks = [await longest_block(write(made)) for _ in range(3)]
    return {"bytes": size, "at_once_ms": 1000 * at_once, "longest_block_ms": 1000 * max(blocks)}


def measure_formats(options: argparse.Namespace) -> dict[str, Any]:
    made = transcript(options.hours)
    report: dict[str, Any] = {"words": len(made.words)}
    for name, write in formats().items():
        report[name] = uvloop.run(measure(made, write))
        show(name, report[name])
    return report


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--hours", type=float, default=4.0)
    run_command(parser, arguments, measure_formats, hours=0.01)


if __name__ == "__main__":
    main()
