"""Handoffs that gateways save at an engine: one owner at a time, and nothing is lost on the way to the next."""

from __future__ import annotations

from typing import Any

import pytest

from engine import messages
from engine.boundary import codec
from engine.boundary.sockets import SILENCE_SECONDS
from engine.messages import NEXT_OWNER
from engine.server import handoff
from engine.server.handoff import (
    CLAIM_SECONDS,
    ENDED_SECONDS,
    FROZEN_ENGINE_SECONDS,
    MAX_ENTRIES,
    RELEASE_SECONDS,
    REVIEW_SECONDS,
)
from engine.server.host import COMMANDS_AN_ITEM, MIN_ITEMS
from tests.engine.server.test_host import Host, calm, command, say_all

__all__ = ["calm"]
KEEP_S = 60.0
# Numbers of the second and of the third owner.
SECOND, THIRD = 1 + NEXT_OWNER, 1 + 2 * NEXT_OWNER


def entrust(host: Host, name: bytes, consumed: int, number: int = 1, **changes: Any) -> None:
    fields = {"entries": [], "base": b"base", "keep_s": KEEP_S, "keep_bytes": 100} | changes
    host.send(name, command(messages.SaveHandoff("good", "s", number, consumed, **fields)))


def adopt(host: Host, name: bytes, number: int | None = None) -> None:
    """Ask for the session first, and adopt what the engine says it has."""
    if number is None:
        host.send(name, command(messages.Ask("", "s", 1)))
        number = held(host, name)[-1].owner_number
    host.send(name, command(messages.Adopt("", "s", number)))


def held(host: Host, name: bytes) -> list[messages.Held]:
    return [output for output in host.said(name) if isinstance(output, messages.Held)]


def claim(host: Host, name: bytes, *claims: tuple[str, int, bool]) -> None:
    host.send(name, command(messages.Claim("", 7, list(claims))))
    assert messages.Claimed(7) in host.said(name)


def fenced(host: Host, name: bytes) -> list[messages.Fenced]:
    return [output for output in host.said(name) if isinstance(output, messages.Fenced)]


def listen(host: Host, seconds: float) -> None:
    """So long passes, in which the engine looks at what comes."""
    for _ in range(round(seconds / 0.1)):
        host.now += 0.1
        host.tick()


def come_back(host: Host, name: bytes, *claims: tuple[str, int, bool]) -> None:
    """A gateway connects anew, with these sessions."""
    host.greet(name)
    claim(host, name, *claims)


def adopted(host: Host, name: bytes) -> list[messages.SessionGiven]:
    return [output for output in host.said(name) if isinstance(output, messages.SessionGiven)]


def heard(host: Host, name: bytes) -> list[messages.Output]:
    """The outputs of the stream that a gateway was told."""
    return [
        output
        for output in host.said(name)
        if getattr(output, "stream", None) == "good" and output.__class__ is not messages.SessionGiven
    ]


def text(outputs: list[messages.Output]) -> str:
    return "".join(output.delta for output in outputs if isinstance(output, messages.Text))


@pytest.fixture
def host() -> Host:
    """An engine with two gateways, and a stream of the first that has heard ten positions."""
    host = Host()
    host.greet(b"a")
    host.greet(b"b")
    host.send(b"a", command(messages.Open("good")))
    say_all(host, b"a", "good", range(10))
    return host


def finish_at(host: Host, name: bytes, first: int) -> None:
    say_all(host, name, "good", range(first, 20))
    host.send(name, command(messages.Finish("good")))


@pytest.mark.parametrize("unread", [0, 1, 5])
def test_a_stream_moves_to_another_gateway_without_a_change_in_its_words(host: Host, calm: str, unread: int) -> None:
    known = heard(host, b"a")
    known = known[: len(known) - unread]
    entrust(host, b"a", len(known), last=True)
    adopt(host, b"b")
    (value,) = adopted(host, b"b")
    assert (value.owner_number, value.base, value.stream, value.consumed) == (SECOND, b"base", "good", len(known))
    assert value.end == host.loop.scheduler.spec.prefix_positions + 10
    assert value.sample == 10 * host.loop.scheduler.spec.samples_per_position
    finish_at(host, b"b", 10)
    assert text(known) + text(heard(host, b"b")) == calm
    assert len(heard(host, b"b")) >= unread


def test_the_owner_is_asked_first_and_its_last_word_counts(host: Host, calm: str) -> None:
    entrust(host, b"a", 0)
    adopt(host, b"b")
    assert messages.Wanted("s", 1) in host.said(b"a")
    assert not adopted(host, b"b"), "the owner has not answered yet"
    known = heard(host, b"a")
    entrust(host, b"a", len(known), base=b"last", last=True)
    assert adopted(host, b"b")[0].base == b"last"
    assert messages.Fenced("s", SECOND) in host.said(b"a")


def test_an_owner_that_does_not_answer_is_fenced_and_changes_nothing_any_more(host: Host, calm: str) -> None:
    known = heard(host, b"a")
    entrust(host, b"a", len(known))
    adopt(host, b"b")
    listen(host, RELEASE_SECONDS + 1)
    assert adopted(host, b"b")[0].base == b"base"
    assert messages.Fenced("s", SECOND) in host.said(b"a")
    # It wakes up and goes on as if it still had the session.
    say_all(host, b"a", "good", range(10, 13))
    host.send(b"a", command(messages.Flush("good", 7)), command(messages.Abort("good")))
    entrust(host, b"a", len(known), base=b"stale")
    host.send(b"a", command(messages.DropHandoff("good", "s", 1)))
    finish_at(host, b"b", 10)
    assert text(known) + text(heard(host, b"b")) == calm
    entrust(host, b"b", 0, number=SECOND, base=b"fresh", last=True)
    host.greet(b"c")
    adopt(host, b"c")
    assert (adopted(host, b"c")[0].base, adopted(host, b"c")[0].owner_number) == (b"fresh", THIRD)


def test_an_owner_that_is_gone_is_noticed_at_once(host: Host, calm: str) -> None:
    known = heard(host, b"a")
    entrust(host, b"a", len(known))
    host.line.gone.add(b"a")
    adopt(host, b"b", 1)
    assert adopted(host, b"b")
    finish_at(host, b"b", 10)
    assert text(known) + text(heard(host, b"b")) == calm


@pytest.mark.parametrize("leaves", ["killed", "says goodbye"])
def test_the_last_words_of_an_owner_that_is_gone_count(leaves: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    for name in (b"b", b"a"):
        host.greet(name)
    host.send(b"a", command(messages.SaveHandoff("", "s", 1, 0, [], base=b"base", keep_s=KEEP_S)))
    with monkeypatch.context() as patch:
        patch.setattr(host, "tick", lambda: None)
        if leaves == "killed":
            adopt(host, b"b", 1)
        host.send(b"a", command(messages.SaveHandoff("", "s", 1, 0, [b"last"])))
        if leaves == "says goodbye":
            host.line.arriving.append((b"a", codec.encode(codec.Bye())))
            adopt(host, b"b", 1)
    host.line.gone.add(b"a")
    host.tick()
    assert adopted(host, b"b")[0].entries == [b"last"]


def test_a_stream_waits_for_its_next_gateway_and_is_forgotten_in_time(host: Host) -> None:
    entrust(host, b"a", 0)
    listen(host, SILENCE_SECONDS + 1)
    host.greet(b"c")
    host.tick()
    assert host.loop.scheduler.streams, "its gateway is gone, and it waits"
    host.now += KEEP_S + 1
    host.tick()
    host.now += 1
    host.tick()
    assert not host.loop.scheduler.streams and not len(host.host.handoffs)
    host.greet(b"d")
    adopt(host, b"d")
    assert held(host, b"d") == [messages.Held("s", 1)], "nobody has it"
    assert adopted(host, b"d") == [messages.SessionGiven("s")]


def test_an_engine_that_was_frozen_does_not_take_its_gateways_for_silent(host: Host) -> None:
    """After the machine was suspended, engine and gateways have heard nothing of each other."""
    host.now += 10 * SILENCE_SECONDS
    host.tick()
    listen(host, 0.8 * SILENCE_SECONDS)
    assert host.loop.scheduler.streams
    listen(host, 0.4 * SILENCE_SECONDS)
    assert not host.loop.scheduler.streams, "from then on the silence counts"


def test_a_stream_without_a_will_ends_with_its_gateway(host: Host) -> None:
    listen(host, SILENCE_SECONDS + 1)
    host.greet(b"c")
    host.tick()
    assert not host.loop.scheduler.streams


@pytest.mark.parametrize("claim", [("s", 2, True), ("s", 1, False)], ids=["elsewhere", "nowhere"])
def test_a_gateway_that_comes_back_begins_anew(host: Host, claim: tuple[str, int, bool]) -> None:
    entrust(host, b"a", 0)
    come_back(host, b"a", claim)
    assert not host.loop.scheduler.streams and not len(host.host.handoffs)
    assert not fenced(host, b"a")


def test_what_a_gateway_gave_up_without_being_heard_waits_for_another(host: Host) -> None:
    """The connection broke before its last word was here, and when it comes back it has the session no more."""
    entrust(host, b"a", 0)
    come_back(host, b"a")
    adopt(host, b"b")
    assert adopted(host, b"b")[0].owner_number == SECOND


def test_what_a_gateway_left_is_there_until_it_says_that_it_goes_on_with_it(host: Host) -> None:
    """It was thought lost. Its client may look for the session in the same moment at another gateway."""
    entrust(host, b"a", 0)
    host.line.gone.add(b"a")
    listen(host, 2.0)
    host.line.gone.clear()
    host.greet(b"a")
    adopt(host, b"b")
    assert adopted(host, b"b")[0].owner_number == SECOND
    claim(host, b"a", ("s", 1, False))
    assert fenced(host, b"a") == [messages.Fenced("s", SECOND)]
    assert len(host.host.handoffs) == 1


def test_a_session_whose_gateway_has_come_back_is_not_over(host: Host) -> None:
    """While a handoff is on its way, a gateway that asks for it does not get the answer that it is gone."""
    entrust(host, b"a", 0)
    come_back(host, b"a", ("s", 1, False))
    host.send(b"b", command(messages.Ask("", "s", 3)))
    assert held(host, b"b") == [messages.Held("s", 3, 1, whole=False)]
    host.send(b"a", command(messages.SaveHandoff("", "s", 2, 0, [], base=b"again", keep_s=KEEP_S)))
    adopt(host, b"b")
    assert messages.Wanted("s", 2) in host.said(b"a")
    listen(host, RELEASE_SECONDS + 1)
    assert (adopted(host, b"b")[-1].base, adopted(host, b"b")[-1].owner_number) == (b"again", SECOND + 1)


def test_what_a_gateway_claimed_and_never_left_is_forgotten_in_time_and_with_it(host: Host) -> None:
    for goes in (True, False):
        come_back(host, b"a", ("s", 1, False))
        if goes:
            host.line.gone.add(b"a")
            listen(host, 2.0)
            host.line.gone.clear()
        else:
            listen(host, CLAIM_SECONDS + 1)
        host.send(b"b", command(messages.Ask("", "s", 3)))
        assert held(host, b"b")[-1] == messages.Held("s", 3)


@pytest.mark.parametrize("leaves", ["gone", "silent"])
def test_an_engine_that_stood_still_gives_nothing_away_that_its_owner_may_have_taken_elsewhere(
    host: Host, leaves: str
) -> None:
    """Gateways lose an engine that stands still, and go on at another one. It hears of that when they are back."""
    entrust(host, b"a", 0)
    host.now += FROZEN_ENGINE_SECONDS + 5
    host.tick()
    if leaves == "gone":
        host.line.gone.add(b"a")
    adopt(host, b"b", 1)
    listen(host, RELEASE_SECONDS + 1)
    assert adopted(host, b"b") == [messages.SessionGiven("s")], "not now, and not for good"
    host.send(b"b", command(messages.Ask("", "s", 3)))
    assert held(host, b"b")[-1] == messages.Held("s", 3, 1, whole=leaves == "silent")
    assert not fenced(host, b"a")
    host.line.gone.clear()
    come_back(host, b"a", ("s", 2, True))
    host.send(b"b", command(messages.Ask("", "s", 4)))
    assert held(host, b"b")[-1] == messages.Held("s", 4), "it has gone on elsewhere"


def test_an_engine_that_stood_still_gives_nothing_away_when_the_first_that_it_hears_is_that_the_owner_is_back(
    host: Host,
) -> None:
    """The owner connects anew before the engine has looked at the time, and has gone on at another engine."""
    entrust(host, b"a", 0)
    adopt(host, b"b")
    host.now += FROZEN_ENGINE_SECONDS + 5
    host.greet(b"a")
    assert adopted(host, b"b") == [messages.SessionGiven("s")]
    claim(host, b"a", ("s", 2, True))
    assert not fenced(host, b"a")


def test_what_nobody_comes_back_for_after_a_standstill_of_the_engine_is_given_away(host: Host) -> None:
    entrust(host, b"a", 0)
    host.now += FROZEN_ENGINE_SECONDS + 5
    host.line.gone.add(b"a")
    listen(host, CLAIM_SECONDS + 1)
    adopt(host, b"b")
    assert adopted(host, b"b")[0].owner_number == SECOND


def test_what_an_owner_gives_up_after_a_standstill_of_the_engine_is_given_away(host: Host) -> None:
    host.now += FROZEN_ENGINE_SECONDS + 5
    host.tick()
    entrust(host, b"a", 0)
    adopt(host, b"b")
    entrust(host, b"a", 0, base=b"last", last=True)
    assert adopted(host, b"b")[0].base == b"last"


# A former owner moves the session from engine to engine as often as it likes.
@pytest.mark.parametrize("moves", [1, 2, 1000])
def test_a_former_owner_never_gets_past_the_next_one(host: Host, moves: int) -> None:
    entrust(host, b"a", 0)
    host.line.gone.add(b"a")
    adopt(host, b"b")
    entrust(host, b"b", 0, number=SECOND, base=b"fresh")
    host.line.gone.clear()
    host.greet(b"a")
    for number in range(1, 2 + moves):
        host.send(b"a", command(messages.SaveHandoff("", "s", number, 0, [], base=b"stale", keep_s=KEEP_S)))
    host.send(b"a", command(messages.DropHandoff("", "s", 1 + moves)))
    assert len(fenced(host, b"a")) == 1 + moves and not fenced(host, b"b")
    host.greet(b"c")
    adopt(host, b"c")
    entrust(host, b"b", 0, number=SECOND, base=b"fresh", last=True)
    assert (adopted(host, b"c")[-1].base, adopted(host, b"c")[-1].owner_number) == (b"fresh", THIRD)


def test_an_owner_that_comes_from_another_engine_fences_the_one_that_was_here(host: Host) -> None:
    entrust(host, b"a", 0)
    host.send(b"b", command(messages.SaveHandoff("", "s", SECOND + 1, 0, [], base=b"moved", keep_s=KEEP_S)))
    assert fenced(host, b"a") == [messages.Fenced("s", SECOND + 1)]


def test_a_request_from_before_somebody_else_had_the_session_takes_nothing(host: Host) -> None:
    """It waited in a process that stood still: the client has gone to another gateway since."""
    entrust(host, b"a", 0, last=True)
    host.greet(b"c")
    adopt(host, b"c")
    assert adopted(host, b"c")[0].owner_number == SECOND
    adopt(host, b"b", 1)
    assert adopted(host, b"b") == [messages.SessionGiven("s")]
    assert not [output for output in host.said(b"c") if isinstance(output, messages.Wanted)]
    listen(host, RELEASE_SECONDS + 1)
    assert not fenced(host, b"c")


def test_an_engine_that_stood_still_hears_the_owner_out_before_it_takes_a_session(host: Host) -> None:
    """The owner had answered within its time; the answer waited for the engine."""
    entrust(host, b"a", 0)
    adopt(host, b"b")
    host.post(b"a", command(messages.SaveHandoff("good", "s", 1, 0, [], base=b"last", keep_s=KEEP_S, last=True)))
    host.now += 2 * RELEASE_SECONDS
    host.tick()
    assert adopted(host, b"b")[0].base == b"last"
    # And one whose answer is not there yet gets the time that it would have had.
    host.greet(b"c")
    adopt(host, b"c")
    host.now += 2 * RELEASE_SECONDS
    host.tick()
    assert not adopted(host, b"c")
    listen(host, RELEASE_SECONDS + 1)
    assert adopted(host, b"c")


def test_a_late_owner_is_heard_out_however_much_it_has_sent(host: Host) -> None:
    """Its answer is behind more commands than the engine takes in before a step."""
    entrust(host, b"a", 0)
    adopt(host, b"b")
    listen(host, RELEASE_SECONDS - 0.1)
    assert not adopted(host, b"b")
    for _ in range(3):
        host.post(b"a", *(command(messages.Ask("", "other", 1)) for _ in range(COMMANDS_AN_ITEM * MIN_ITEMS)))
    host.post(b"a", command(messages.SaveHandoff("good", "s", 1, 0, [], base=b"last", keep_s=KEEP_S, last=True)))
    host.now += REVIEW_SECONDS
    host.tick()
    (given,) = adopted(host, b"b")
    assert given.base == b"last"


def test_of_two_who_ask_the_last_has_the_session(host: Host) -> None:
    entrust(host, b"a", 0)
    host.greet(b"c")
    adopt(host, b"b")
    adopt(host, b"c")
    entrust(host, b"a", 0, last=True)
    assert adopted(host, b"b") == [messages.SessionGiven("s")] and adopted(host, b"c")[0].owner_number == SECOND


def test_what_is_kept_is_bounded(host: Host) -> None:
    for chunk in range(50):
        entrust(host, b"a", 0, chunk=bytes([chunk]) * 30)
    entrust(host, b"a", 0, last=True)
    adopt(host, b"b")
    assert adopted(host, b"b")[0].chunks == [bytes([chunk]) * 30 for chunk in (47, 48, 49)]
    entrust(host, b"b", 0, number=SECOND, entries=[b"x"] * (MAX_ENTRIES + 1))
    assert not len(host.host.handoffs), "a will that outgrows its bounds is not kept"


def test_a_session_without_a_stream_is_a_value_too() -> None:
    host = Host()
    host.greet(b"a")
    host.greet(b"b")
    host.send(b"a", command(messages.SaveHandoff("", "s", 1, 0, [b"1"], base=b"base", keep_s=KEEP_S)))
    host.send(b"a", command(messages.SaveHandoff("", "s", 1, 0, [b"2"])))
    host.line.gone.add(b"a")
    adopt(host, b"b")
    (value,) = adopted(host, b"b")
    assert (value.stream, value.base, value.entries) == ("", b"base", [b"1", b"2"])


def test_a_session_that_is_over_is_forgotten(host: Host) -> None:
    entrust(host, b"a", 0)
    host.send(b"a", command(messages.DropHandoff("good", "s", 1)), command(messages.Abort("good")))
    assert not len(host.host.handoffs) and not host.loop.scheduler.streams


def test_flushes_and_tokens_are_counted_as_the_entries_account_for_them(host: Host) -> None:
    host.send(b"a", command(messages.Flush("good", 1)))
    known = heard(host, b"a")
    position = next(place for place, output in enumerate(known) if isinstance(output, messages.Flushed))
    tokens = sum(len(output.tokens) for output in known[:position] if isinstance(output, messages.Text))
    entrust(host, b"a", position, last=True)
    adopt(host, b"b")
    (value,) = adopted(host, b"b")
    assert (value.flushes, value.answered) == (1, 0)
    assert value.token == host.loop.scheduler.spec.prefix_positions + tokens
    assert value.segment == value.sample, "a flush ends a segment"


def test_a_session_that_has_moved_to_another_engine_is_not_gone(host: Host) -> None:
    """A gateway that looks for it may have asked the other engine before it came there."""
    entrust(host, b"a", 0)
    host.send(b"a", command(messages.DropHandoff("", "s", 2)))
    host.send(b"b", command(messages.Ask("", "s", 5)))
    assert held(host, b"b") == [messages.Held("s", 5, 2, whole=False)]
    # Also if the gateway that moved it is lost then.
    host.send(b"a", codec.encode(codec.Bye()))
    host.send(b"b", command(messages.Ask("", "s", 6)))
    assert held(host, b"b")[-1] == messages.Held("s", 6, 2, whole=False)
    listen(host, CLAIM_SECONDS + 1.0)
    host.send(b"b", command(messages.Ask("", "s", 7)))
    assert held(host, b"b")[-1] == messages.Held("s", 7)


@pytest.mark.parametrize("number", [1, 2])
def test_a_session_that_is_over_is_gone_at_once(host: Host, number: int) -> None:
    """Also one that came back to an engine from which it had moved."""
    if number == 2:
        entrust(host, b"a", 0)
        host.send(b"a", command(messages.DropHandoff("", "s", 2)))
    entrust(host, b"a", 0, number=number + 1)
    host.send(b"a", command(messages.DropHandoff("", "s", number + 1)))
    host.send(b"b", command(messages.Ask("", "s", 5)))
    assert held(host, b"b") == [messages.Held("s", 5)]


def test_a_former_owner_does_not_go_on_with_a_session_that_is_over(host: Host) -> None:
    entrust(host, b"a", 0, last=True)
    adopt(host, b"b")
    host.send(b"b", command(messages.DropHandoff("", "s", SECOND)))
    claim(host, b"a", ("s", 1, False))
    assert fenced(host, b"a") == [messages.Fenced("s", SECOND)]
    entrust(host, b"a", 0)
    assert fenced(host, b"a")[1:] == [messages.Fenced("s", SECOND)] and not len(host.host.handoffs)
    # A gateway with a higher number owns the session and continues.
    entrust(host, b"a", 0, number=THIRD)
    assert len(host.host.handoffs) == 1
    host.send(b"a", command(messages.DropHandoff("", "s", THIRD)))
    host.now += ENDED_SECONDS
    listen(host, 1.0)
    assert not host.host.handoffs.ended


def test_what_is_known_of_sessions_that_are_over_is_bounded(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "MAX_ENDED", 3)
    for number in range(5):
        key = f"s{number}"
        host.send(b"a", command(messages.SaveHandoff("", key, SECOND, 0, [], base=b"base", keep_s=KEEP_S)))
        host.send(b"a", command(messages.DropHandoff("", key, SECOND)))
    assert list(host.host.handoffs.ended) == ["s2", "s3", "s4"]
    # With a single owner there is no former owner to fence.
    host.send(b"a", command(messages.SaveHandoff("", "alone", 1, 0, [], base=b"base", keep_s=KEEP_S)))
    host.send(b"a", command(messages.DropHandoff("", "alone", 1)))
    assert "alone" not in host.host.handoffs.ended


def renew(host: Host, name: bytes, number: int, key: str = "s") -> int:
    host.send(name, command(messages.Renew("", key, 9, number)))
    return [output for output in host.said(name) if isinstance(output, messages.Renewed)][-1].owner_number


def test_whoever_asked_before_the_owner_went_on_gets_nothing(host: Host) -> None:
    """The client has come back to its owner."""
    entrust(host, b"a", 0)
    adopt(host, b"b")
    assert renew(host, b"a", 1) == SECOND
    assert adopted(host, b"b") == [messages.SessionGiven("s")]
    listen(host, 2 * RELEASE_SECONDS)
    adopt(host, b"b", number=1)
    assert adopted(host, b"b")[1:] == [messages.SessionGiven("s")]
    # The owner may speak on under the number that it had: it may not have heard of the new one yet.
    entrust(host, b"a", 0, base=None, entries=[b"x"])
    assert not fenced(host, b"a")
    adopt(host, b"b")
    listen(host, 2 * RELEASE_SECONDS)
    assert adopted(host, b"b")[-1].owner_number == THIRD


def test_only_the_owner_of_a_session_goes_on_with_it(host: Host) -> None:
    entrust(host, b"a", 0, last=True)
    adopt(host, b"b")
    assert renew(host, b"a", 1) == 0
    # A number from before it was this one's.
    assert renew(host, b"b", 1) == 0
    assert renew(host, b"b", SECOND) == THIRD
    assert renew(host, b"a", 7, key="unknown") == 7
