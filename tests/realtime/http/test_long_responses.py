"""Long answers are made in pieces: the work for one piece does not grow with the answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from realtime.dialects.deepgram import plain, plain_parts, read_file_query
from realtime.http import listen_route
from realtime.http.file_transcription import Transcript, UploadRequest, sse_done, write_answer
from realtime.http.long_responses import (
    CHARACTERS_AT_ONCE,
    ENTRIES_AT_ONCE,
    PART_BYTES,
    Entries,
    LazyValue,
    PiecesResponse,
    TextParts,
    in_turns,
    json_pieces,
)
from realtime.session.events import TimedWord
from realtime.session.settings import NO_FORMATTING, Formatting, Settings, make_formatting

RATE = 16_000
SHORT, LONG = 8_000, 16_000
PARAGRAPHS = make_formatting(paragraphs=True)


class Watched(list[TimedWord]):
    """A list that counts reads of its words."""

    looks = 0

    def __iter__(self) -> Iterator[TimedWord]:
        for word in super().__iter__():
            self.looks += 1
            yield word

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.looks += len(found) if isinstance(place, slice) else 1
        return found


def transcript(words: int, spoken: str = "Word,") -> Transcript:
    """Said without a full stop or a pause: one sentence and one utterance, however long it is."""
    made = Transcript(RATE, "en", " ".join([spoken] * words), samples=words * RATE)
    chances = tuple((letter.encode(), -0.25) for letter in f" {spoken}")
    made.add_words([TimedWord(spoken, n * 1000, n * 1000 + 900, chances, 0.5, "en", 0.1) for n in range(words)])
    made.words = Watched(made.words)
    return made


def openai(response_format: str, logprobs: bool = False, formatting: Formatting = NO_FORMATTING) -> UploadRequest:
    settings = Settings(formatting=formatting)
    return UploadRequest(response_format, settings, stream=False, words=True, logprobs=logprobs)


def deepgram(**query: str) -> Any:
    return lambda made: listen_route.write_listen_answer(
        made, read_file_query({"utt_split": "1000", **query}), "m", "id", "0"
    )


ANSWERS = {
    **{name: lambda made, name=name: write_answer(made, openai(name))[0] for name in ("text", "srt", "vtt")},
    "verbose_json": lambda made: write_answer(made, openai("verbose_json"))[0],
    "paragraphs": lambda made: write_answer(made, openai("text", formatting=PARAGRAPHS))[0],
    "logprobs": lambda made: write_answer(made, openai("json", logprobs=True))[0],
    "events": lambda made: sse_done(made, openai("json", logprobs=True)),
    "deepgram": deepgram(),
    "deepgram's utterances": deepgram(utterances="true"),
    "deepgram's utterances with marks": deepgram(utterances="true", punctuate="true"),
}


def largest_steps(made: Transcript, answer: Any) -> tuple[int, int]:
    """The most words that are looked at, and the most bytes that are made, between two pieces."""
    words = made.words
    assert isinstance(words, Watched)
    most_looks, most_bytes, before = 0, 0, 0
    for piece in answer(made):
        most_looks, before = max(most_looks, words.looks - before), words.looks
        most_bytes = max(most_bytes, len(piece))
    return max(most_looks, words.looks - before), most_bytes


@pytest.mark.parametrize("spoken", ["Word,", "--"], ids=["words", "marks alone"])
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_no_step_of_an_answer_grows_with_its_length(answer: Any, spoken: str) -> None:
    short, long = (largest_steps(transcript(words, spoken), answer) for words in (SHORT, LONG))
    assert long[0] <= 16 * ENTRIES_AT_ONCE and long[1] <= PART_BYTES, long
    # But for the digits of times and numbers.
    assert long[0] <= short[0] + 2 * ENTRIES_AT_ONCE and long[1] <= 1.2 * short[1] + 200, (short, long)


@pytest.mark.parametrize("punctuate", ["true", "false"])
def test_deepgrams_answer_in_pieces_is_what_it_was_as_a_whole(punctuate: str) -> None:
    made = Transcript(RATE, "en", "Hello, - there. Good day", samples=RATE)
    words = [("Hello,", 0, 800, 0.9), ("-", 800, 900, None), ("there.", 900, 1600, 0.6), ("Good", 40_000, 41_000, 0.8)]
    made.add_words([TimedWord(text, start, end, (), sure, "en") for text, start, end, sure in words])
    query = read_file_query({"utterances": "true", "punctuate": punctuate})
    results = json.loads(b"".join(listen_route.write_listen_answer(made, query, "m", "id", "0")))["results"]
    best = results["channels"][0]["alternatives"][0]
    first, second = results["utterances"]
    marks = punctuate == "true"
    assert best["transcript"] == ("Hello, - there. Good day" if marks else "hello there good day")
    assert best["confidence"] == pytest.approx((0.9 + 0.6 + 0.8) / 3, abs=1e-4) and best["languages"] == ["en"]
    assert len(best["words"]) == (4 if marks else 3) and first["words"] + second["words"] == best["words"]
    assert first["transcript"] == ("Hello, - there." if marks else "hello there")
    assert (first["confidence"], second["confidence"]) == (0.75, 0.8)
    assert (first["start"], first["end"], second["start"], second["end"]) == (0.0, 0.1, 2.5, 2.562)


def test_a_long_text_without_marks_is_that_of_its_whole() -> None:
    text = "  The  Best,\nof “times”; - ÄÖ " * 3000
    parts = list(plain_parts(text))
    assert "".join(parts) == plain(text) and len(parts) > 5
    assert "".join(plain_parts("nospaces" * 5000)) == "nospaces" * 5000 and "".join(plain_parts("  ")) == ""


@pytest.mark.parametrize("count", [0, 1, ENTRIES_AT_ONCE - 1, ENTRIES_AT_ONCE, ENTRIES_AT_ONCE + 1, 1000])
@pytest.mark.parametrize("nested", [True, False])
def test_pieces_are_json_of_the_whole(count: int, nested: bool) -> None:
    numbers = [None if n % 3 == 0 else {"n": n} for n in range(count)]
    text = 'a "long"\ntext \\ of all kinds ü😀' * 2000
    value = {
        "a": Entries(numbers, nested),
        "b": TextParts([text, "", text]),
        "c": text,
        "d": LazyValue(lambda: [1]),
        "e": {},
    }
    found = json.loads(b"".join(json_pieces({"x": value, "y": [1, {"z": None}]})))
    kept = [number for number in numbers if number is not None]
    assert found == {"x": {"a": kept, "b": text + text, "c": text, "d": [1], "e": {}}, "y": [1, {"z": None}]}
    assert max(map(len, json_pieces(value))) < 4 * CHARACTERS_AT_ONCE


async def test_others_have_their_turn_while_pieces_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realtime.http.long_responses.MAKING_S", -1.0)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    assert b"".join([part async for part in in_turns(b"x" for _ in range(100))]) == b"x" * 100
    task.cancel()
    assert turns >= 100


async def answered(pieces: list[bytes]) -> tuple[list[dict[str, Any]], int]:
    sent: list[dict[str, Any]] = []
    ended = 0

    async def send(message: Any) -> None:
        sent.append(message)

    async def at_end() -> None:
        nonlocal ended
        ended += 1

    await PiecesResponse(pieces, "text/plain", at_end)({"type": "http"}, None, send)  # type: ignore[arg-type]
    return sent, ended


async def test_a_short_answer_says_how_long_it_is_and_a_long_one_comes_in_parts() -> None:
    (start, body), ended = await answered([b"ab", b"", b"c"])
    assert (b"content-length", b"3") in start["headers"] and ended == 1
    assert body == {"type": "http.response.body", "body": b"abc", "more_body": False}
    (start, *parts), ended = await answered([b"x" * PART_BYTES] * 3 + [b"y"])
    assert not any(name == b"content-length" for name, _ in start["headers"]) and ended == 1
    assert [part["more_body"] for part in parts] == [True, True, True, False]
    assert b"".join(part["body"] for part in parts) == b"x" * PART_BYTES * 3 + b"y"
    (start, body), _ = await answered([])
    assert (b"content-length", b"0") in start["headers"] and body["body"] == b""


async def test_a_response_that_fails_gives_its_place_back() -> None:
    ended = False

    async def send(message: Any) -> None:
        raise OSError("gone")

    async def at_end() -> None:
        nonlocal ended
        ended = True

    with pytest.raises(OSError, match="gone"):
        await PiecesResponse([b"x"], "text/plain", at_end)({"type": "http"}, None, send)  # type: ignore[arg-type]
    assert ended
