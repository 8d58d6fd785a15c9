"""Redaction: what is hidden, across words, turns, deltas and revisions; and what stays."""

from __future__ import annotations

import cProfile
import pstats
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import messages
from realtime.dialects.base import SessionFacts, encode_json
from realtime.dialects.deepgram import DeepgramDialect, Listening, read_socket_query
from realtime.dialects.openai import OpenAIDialect
from realtime.session.core import SavedSession, Session
from realtime.session.events import Commit, Completed, Configure, Delta, End, TimedWord
from realtime.session.redaction import MAX_HELD, RedactedStream, Redactor, is_redacted, without_hidden
from realtime.session.settings import INCLUDE_LOGPROBS, INCLUDE_WORDS, REDACTED, Settings, make_formatting
from tests.realtime.session.test_core import RATE, Driver, append, counter

ALL = Redactor(("card", "phone", "email"), ("Ada Lovelace", "Grace"))
FACTS = SessionFacts("sess", 0, RATE, "m", frozenset({"m"}), lambda: "event")


def timed(text: str) -> list[TimedWord]:
    return [TimedWord(part, 100 * place, 100 * place + 90) for place, part in enumerate(text.split())]


def redacted(text: str, redactor: Redactor = ALL, carry: int = 0, *, ends: bool = True) -> str:
    words, _ = redactor.redact(timed(text), carry, ends=ends)
    return " ".join(one.text for one in words)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("My card is 4111 1111 1111 1111, thanks.", "My card is [REDACTED], thanks."),
        ("My card is 4111111111111111.", "My card is [REDACTED]."),
        ("My card is 4111-1111-1111-1111 you see", "My card is [REDACTED] you see"),
        ("It is four one one one one one one one one one one one now.", "It is [REDACTED] now."),
        ("It is four one one one uh one one one one, um, one one one one now.", "It is [REDACTED] now."),
        ("Call 555 123 4567 now.", "Call [REDACTED] now."),
        ("Call five five five twelve thirty four now.", "Call [REDACTED] now."),
        ("Call double five five one two three four now.", "Call [REDACTED] now."),
        ("Call five five five to one three four now.", "Call [REDACTED] now."),
        ("Call (415) 555-1234 now.", "Call ([REDACTED] now."),
        ("Write to ada@example.com, please.", "Write to [REDACTED], please."),
        ("Write to ada dot lovelace at example dot com please.", "Write to [REDACTED] please."),
        ("Write to a d a 99 at example dot co dot uk please.", "Write [REDACTED] please."),
        ("It is 4111 1111 and 1111 9876 now.", "It is [REDACTED] now."),
        ("It is 4111, okay, 1111, yeah, 1111 9876 now.", "It is [REDACTED] now."),
        ("It is four triple ones uh four ones nought nought nine now.", "It is [REDACTED] now."),
        ("It was between 2019 and 2020 there.", "It was between 2019 and 2020 there."),
        ("Write to ada @example.com please.", "Write to [REDACTED] please."),
        ("Write to ada@ example.com please.", "Write to [REDACTED] please."),
        ("Write to ada at the rate example dot com please.", "Write to [REDACTED] please."),
        ("Write to ada at sign example.com please.", "Write to [REDACTED] please."),
        ("Write to ada99 at gmail com please.", "Write to [REDACTED] please."),
        ("Ask Ada Lovelace, not Ada.", "Ask [REDACTED], not Ada."),
        ("It is Grace's turn. Grace!", "It is [REDACTED] turn. [REDACTED]!"),
        ("It was in 1999.", "It was in 1999."),
        ("It was in nineteen ninety nine.", "It was in nineteen ninety nine."),
        ("We sold five hundred.", "We sold five hundred."),
        ("We sold eight hundred and twenty five.", "We sold eight hundred and twenty five."),
        ("We sold fifteen hundred.", "We sold fifteen hundred."),
        ("We sold a hundred and twenty-five.", "We sold a hundred and twenty-five."),
        ("We sold 5,300,200 of them.", "We sold 5,300,200 of them."),
        ("It costs $1234567 today.", "It costs $1234567 today."),
        ("There are 25 people at 3 tables.", "There are 25 people at 3 tables."),
        ("Look at the dot.", "Look at the dot."),
        ("Graceful people.", "Graceful people."),
        # More digits may follow in the next turn.
        ("My card is 4111.", "My card is [REDACTED]."),
        ("My card is 4111, uh", "My card is [REDACTED], uh"),
    ],
)
def test_what_is_hidden_and_what_is_not(said: str, shown: str) -> None:
    assert redacted(said) == shown


def test_the_kind_decides() -> None:
    numbers = Redactor(("numbers",), ())
    assert redacted("We sold 5,300 of them for 25 dollars.", numbers) == "We sold [REDACTED] of them for 25 dollars."
    assert (
        redacted("It is one hundred and it is five thousand now.", numbers)
        == "It is [REDACTED] and it is [REDACTED] now."
    )
    assert redacted("Call 555 1234 now.", Redactor(("card",), ())) == "Call 555 1234 now."
    assert redacted("Mine is 123 45 6789 yes.", Redactor(("ssn",), ())) == "Mine is [REDACTED] yes."
    assert redacted("Write to ada@example.com, please.", Redactor(("card",), ())) == "Write to ada@example.com, please."


def test_a_number_goes_on_in_the_next_turn() -> None:
    card, carry = Redactor(("card",), ()), 0
    shown = []
    for said in ("My card is 41", "11", "1111 1111", "11 11. Thanks."):
        words, carry = card.redact(timed(said), carry, ends=True)
        shown.append(" ".join(one.text for one in words))
    # At most two digits at the end of a turn are shown.
    assert shown == ["My card is 41", REDACTED, REDACTED, f"{REDACTED}. Thanks."]
    words, carry = card.redact(timed("It was 1999."), 0, ends=True)
    assert redacted("25 people came.", card, carry) == "25 people came."


@pytest.mark.parametrize(
    "said",
    [
        "eight hundred five five five",
        "hundred twenty five five",
        "eight hundred double five",
        "8 hundred 555",
        "four one five eight hundred",
        "one hundred two hundred",
    ],
)
def test_an_amount_with_hundred_has_at_most_one_number_on_each_side(said: str) -> None:
    """`call eight hundred five five five` and, in the next turn, `one two three four`: the start of a phone number."""
    phone = Redactor(("phone",), ())
    shown, carry = phone.redact(timed(f"call {said}"), 0, ends=True)
    assert [word.text for word in shown] == ["call", REDACTED]
    assert redacted("one two three four", phone, carry) == REDACTED


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        ("call 555 123", "and 4567 is it thanks", "and [REDACTED] is it thanks"),
        ("call 555 123", "so it's 4567 thanks", "so it's [REDACTED] thanks"),
        ("call 555 123", "to 4567 thanks", "to [REDACTED] thanks"),
        ("call 555 123 and", "4567 thanks", "[REDACTED] thanks"),
        ("call 555 123 to", "4567 thanks", "[REDACTED] thanks"),
        ("call 555 123", "but 4567 thanks", "but 4567 thanks"),
    ],
)
def test_words_that_join_a_number_across_turns(before: str, after: str, shown: str) -> None:
    phone = Redactor(("phone",), ())
    words, carry = phone.redact(timed(before), 0, ends=True)
    assert [word.text for word in words][:2] == ["call", REDACTED]
    assert redacted(after, phone, carry) == shown


def test_a_turn_of_joining_words_does_not_end_a_number() -> None:
    phone = Redactor(("phone",), ())
    _, carry = phone.redact(timed("call 555 123"), 0, ends=True)
    _, carry = phone.redact(timed("and so"), carry, ends=True)
    assert redacted("it's 4567 thanks", phone, carry) == "it's [REDACTED] thanks"


def test_a_redaction_has_the_times_of_its_words() -> None:
    words, _ = ALL.redact(timed("call 555 123 4567 now"), 0, ends=True)
    assert [(one.start, one.end) for one in words] == [(0, 90), (100, 390), (400, 490)]


VOCABULARY = (
    "the is 4111 1111 41 one four oh uh at dot ada example com grace lovelace ada@example.com nine, 2020. for and "
    "rate sign okay ones @example.com ada@ thousand [REDACTED] $5 triple"
).split()


@given(st.lists(st.sampled_from(VOCABULARY), max_size=40), st.data())
@settings(max_examples=300, deadline=None)
def test_redacting_in_parts_gives_the_same_as_redacting_the_whole(said: list[str], data: st.DataObject) -> None:
    words = timed(" ".join(said))
    whole, _ = ALL.redact(words, 0, ends=True)
    stream, parts, at = RedactedStream(ALL), list[TimedWord](), 0
    while at < len(words):
        step = data.draw(st.integers(1, 5))
        parts += stream.take(words[at : at + step])
        at += step
    parts += stream.take([], ends=True)
    assert parts == whole
    assert ALL.redact(whole, 0, ends=True)[0] == whole or any(map(is_redacted, whole))


def test_few_words_are_held_back() -> None:
    stream, shown = RedactedStream(ALL), list[TimedWord]()
    for _ in range(50):
        shown += stream.take(timed("one two three four five six seven eight nine"))
        assert len(stream._held) <= MAX_HELD
    shown += stream.take([], ends=True)
    assert {one.text for one in shown} == {REDACTED}


# The session: no message has the digits.

REDACTING = make_formatting(redact=["card", "phone", "email"], names=["Ada Lovelace"], smart=True, search=["card"])


def openai_settings() -> Settings:
    return Settings(turn_detection=None, formatting=REDACTING, include=(INCLUDE_WORDS, INCLUDE_LOGPROBS))


def spoken(text: str, start: float) -> messages.Text:
    """A word with tokens, as a model writes it."""
    sample = int(start * RATE)
    tokens = [(f" {text}".encode(), -0.1)]
    return messages.Text("s", f" {text}", [messages.Word(text, sample, sample + 1600, tokens)], [1])


SECRET = ["4111", "1111", "1111", "9876"]


@given(st.integers(0, 6), st.lists(st.integers(0, 9), max_size=3), st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_message_of_a_session_has_redacted_digits(before: int, commits: list[int], deepgram: bool) -> None:
    """A card number among other words, with ends of turns anywhere, through the whole session and its dialect."""
    said = [*["well"] * before, *SECRET, "is", "mine", "truly"]
    dialect: Any = OpenAIDialect(FACTS)
    chosen = openai_settings()
    if deepgram:
        pairs = [("encoding", "linear16"), ("redact", "pci"), ("smart_format", "true"), ("interim_results", "true")]
        query = read_socket_query(dict(pairs), pairs)
        dialect, chosen = (
            DeepgramDialect(FACTS, Listening(query, "request")),
            Settings(turn_detection=None, formatting=query.settings.formatting),
        )
    drive = Driver(Session(chosen, RATE, counter()))
    frames = []
    for place, text in enumerate(said):
        events = drive(append(0.5), spoken(text, place * 0.5))
        if place in commits:
            events += drive(Commit(), messages.Flushed("s", 1, (place + 1) * 8000, False))
        frames += [encode_json(body) for event in events for body in dialect.write(event, chosen)]
    events = drive(End(), messages.Closed("s", 1))
    frames += [encode_json(body) for event in events for body in dialect.write(event, chosen)]
    everything = "".join(frames)
    assert "4111" not in everything and "9876" not in everything and "1111" not in everything
    assert REDACTED in everything and "truly" in everything
    finals = [event for event in drive.sent if isinstance(event, Completed)]
    for final in finals:
        assert all(final.start <= one.start <= one.end <= final.end + RATE for one in final.words)


def test_deltas_wait_until_a_word_cannot_be_redacted() -> None:
    drive = Driver(Session(openai_settings(), RATE, counter()))
    drive(append(6.0))
    told: list[str] = []
    for place, text in enumerate("my card is 4111 1111 1111 9876 and so on".split()):
        told += [event.text for event in drive(spoken(text, place * 0.5)) if isinstance(event, Delta)]
    assert "".join(told) == f"my card is {REDACTED} and so"
    events = drive(Commit(), messages.Flushed("s", 1, 6 * RATE, False))
    assert [event.text for event in events if isinstance(event, Delta)] == [" on"]
    (final,) = [event for event in events if isinstance(event, Completed)]
    assert final.transcript == f"my card is {REDACTED} and so on"


def test_an_incomplete_word_is_not_sent_when_text_is_redacted() -> None:
    drive = Driver(Session(openai_settings(), RATE, counter()))
    events = drive(append(2.0), messages.Text("s", " 41111111", [], [1]), messages.Text("s", "1111", [], [1]))
    assert not [event for event in events if isinstance(event, Delta)]
    events = drive(Commit(), messages.Flushed("s", 1, 2 * RATE, False))
    assert [event.text for event in events if isinstance(event, Delta)] == [REDACTED]
    assert [event.transcript for event in events if isinstance(event, Completed)] == [REDACTED]


def test_redaction_that_is_turned_on_in_a_turn_covers_its_whole_final() -> None:
    plain = Settings(turn_detection=None, include=(INCLUDE_WORDS,))
    drive = Driver(Session(plain, RATE, counter()))
    drive(append(4.0), *(spoken(text, place * 0.5) for place, text in enumerate(SECRET[:2])))
    drive(Configure(openai_settings()))
    events = drive(*(spoken(text, 1 + place * 0.5) for place, text in enumerate([*SECRET[2:], "yes", "sir"])))
    events += drive(Commit(), messages.Flushed("s", 1, 4 * RATE, False))
    (final,) = [event for event in events if isinstance(event, Completed)]
    assert final.transcript == f"{REDACTED} yes sir"
    assert not any(group in repr(events) for group in SECRET)


def test_the_words_of_a_second_pass_are_redacted_too() -> None:
    drive = Driver(Session(openai_settings(), RATE, counter()))
    said = ["card", "4111", "1111", "1111", "9876", "yes", "sir"]
    drive(append(4.0), *(spoken(text, place * 0.5) for place, text in enumerate(said)))
    # The second pass covers a part of the number only.
    better = [
        messages.Word(text, place * 8000, place * 8000 + 1600, [(f" {text}".encode(), -0.1)])
        for place, text in enumerate(said[:3])
    ]
    events = drive(
        Commit(),
        messages.Flushed("s", 1, 4 * RATE, True),
        messages.Revised("s", 0, 12000, better),
        messages.Revised("s", 12000, 4 * RATE, None),
    )
    (final,) = [event for event in events if isinstance(event, Completed)]
    assert not any(group in repr(events) for group in SECRET)
    assert final.transcript == f"card {REDACTED} yes sir"


def test_words_within_redactions_are_found_without_a_scan() -> None:
    """A final with many redactions: calls are counted. The order and the overlaps of the words do not matter."""

    def calls(count: int) -> int:
        words = [TimedWord(REDACTED if at % 2 else "well", 100 * at, 100 * at + 90) for at in range(count)]
        profile = cProfile.Profile()
        assert profile.runcall(without_hidden, words) == words
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    assert calls(4000) < 5 * calls(1000)
    places = [(0, 100), (90, 112), (98, 100), (20, 20), (40, 60), (101, 103), (130, 150), (139, 141)]
    texts = [REDACTED, "shown", "a", "b", REDACTED, "shown", REDACTED, "c"]
    words = [TimedWord(text, *place) for text, place in zip(texts, places, strict=True)]
    assert [word.text for word in without_hidden(words)] == [REDACTED, "shown", REDACTED, "shown", REDACTED]


def test_a_saved_session_goes_on_redacting() -> None:
    drive = Driver(Session(openai_settings(), RATE, counter()))
    drive(append(1.0), spoken("4111", 0.0), spoken("11", 0.5))
    drive(Commit(), messages.Flushed("s", 1, RATE, False))
    saved = msgspec.msgpack.decode(msgspec.msgpack.encode(drive.core.save()), type=SavedSession)
    again = Session(saved.settings, RATE, counter())
    again.load(saved, 0.0)
    events = Driver(again)(
        append(1.0), spoken("9876", 1.0), spoken("mine", 1.5), Commit(), messages.Flushed("s", 1, 2 * RATE, False)
    )
    (final,) = [event for event in events if isinstance(event, Completed)]
    assert final.transcript == f"{REDACTED} mine"


def test_log_probabilities_do_not_have_the_tokens_of_redacted_words() -> None:
    drive = Driver(Session(openai_settings(), RATE, counter()))
    drive(append(3.0), *(spoken(text, place * 0.5) for place, text in enumerate(["mine", *SECRET])))
    events = drive(Commit(), messages.Flushed("s", 1, 3 * RATE, False))
    (final,) = [event for event in events if isinstance(event, Completed)]
    (body,) = OpenAIDialect(FACTS).write(final, openai_settings())
    assert [entry["token"] for entry in body["logprobs"]] == ["mine"]
    assert body["redactions"] == [{"start": 0.5, "end": 2.1}]
    assert body["raw_transcript"] == f"mine {REDACTED}"


NAMES = "zero one two three four five six seven eight nine".split()


@given(
    st.sampled_from([("card", 16), ("phone", 10), ("numbers", 12)]),
    st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.booleans(), st.sampled_from(["", "", "", "uh", "okay,"]))),
    st.integers(0, 10**16 - 1),
)
@settings(max_examples=300, deadline=None)
def test_what_ends_of_turns_show_of_a_number(kind: tuple[str, int], groups: list[Any], number: int) -> None:
    """A number in groups of any size, as digits or words, with ends of turns anywhere: at most two digits are seen, or
    four that read as a year."""
    rest, turns = f"{number:016}"[: kind[1]], [["my", "number", "is"]]
    for length, in_words, ends_turn, filler in [*groups, *[(4, False, False, "")] * 4]:
        if ends_turn:
            turns.append([])
        group, rest = rest[:length], rest[length:]
        turns[-1] += [NAMES[int(digit)] for digit in group] if in_words else [group] if group else []
        turns[-1] += [filler] if filler and group else []
    turns[-1] += ["thanks", "bye"]
    redactor, carry, seen = Redactor((kind[0],), ()), 0, list[str]()
    for said in turns:
        words, carry = redactor.redact(timed(" ".join(said)), carry, ends=True)
        seen += [one.text for one in words if one.text in NAMES or one.text.isdigit()]
    digits = sum(1 if text in NAMES else len(text) for text in seen)
    assert digits <= 2 or (len(seen) == 1 and seen[0].startswith(("18", "19", "20")))
