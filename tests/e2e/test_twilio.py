"""Twilio Media Streams over real sockets: words of a call reach viewers; keys, signatures, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.e2e.conftest import Running, Serve
from tests.e2e.viewing import socket_viewer, until
from tests.phone_calls import CALL, CONNECTED, FORMAT, RATE, PhoneCall, mulaw, phone_call, start_message
from tests.realtime.gateway_doubles import FakeEngine, silence, tone
from tests.waiting import PATIENCE_S
from tests.waiting import until as until_so

KEY, OTHER = "the-key-of-the-line", "the-key-of-another"
TOKEN = "12345678901234567890123456789012"


def speech(seconds: float = 1.3) -> bytes:
    return mulaw(tone(seconds, RATE))


def pause(seconds: float = 0.9) -> bytes:
    return mulaw(silence(seconds, RATE))


async def closed(call: PhoneCall) -> tuple[int, str]:
    """How the server closes the socket. It sends nothing before that."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            message = await call.socket.recv()
    except ConnectionClosed as error:
        assert error.rcvd is not None
        return error.rcvd.code, error.rcvd.reason
    raise AssertionError(f"the server sent {message!r} to Twilio")


async def refused(running: Running, start: dict[str, Any], **options: Any) -> tuple[int, str]:
    async with phone_call(running.port, start, **options) as call:
        return await closed(call)


def texts(events: list[dict[str, Any]]) -> list[str]:
    return [event["text"] for event in events if event["type"] == "final"]


async def test_words_of_a_call_reach_viewers_under_the_name_of_the_stream(serve: Serve) -> None:
    start = start_message(customParameters={"publish": "line"})
    async with serve() as running, socket_viewer(running.port, "line") as viewer:
        async with phone_call(running.port, start) as call:
            await call.media(speech() + pause())
            await call.dtmf()
            await call.send_next("mark", mark={"name": "played"})
            assert texts(await until(viewer, "final")) == ["w1 w2 w3"]
            await call.media(speech())
            await call.stop()
            assert await closed(call) == (1000, "finished")
        assert texts(await until(viewer, "end")) == ["w4 w5 w6"]
        assert running.metric("sessions_opened_total", dialect="twilio") == 1


async def test_last_words_reach_viewers_if_twilio_closes_the_socket_at_once(serve: Serve) -> None:
    """Twilio does not wait: it closes the socket with or right after `stop`; a lost connection sends no `stop`."""
    async with serve() as running, socket_viewer(running.port, CALL) as viewer:
        for stops in (True, False):
            async with phone_call(running.port) as call:
                await call.media(speech())
                if stops:
                    await call.stop()
            # An open turn is dropped at the end of a session; a final text shows that it was finished.
            assert texts(await until(viewer, "end")) == ["w1 w2 w3"]
        await until_so(lambda: len(running.gateway.sessions) == 0)


async def test_each_of_two_tracks_has_its_words_and_its_name(serve: Serve) -> None:
    engine = FakeEngine()
    start = start_message(["inbound", "outbound"], customParameters={"publish": "line"})
    async with (
        serve(engine) as running,
        socket_viewer(running.port, "line-inbound") as inbound,
        socket_viewer(running.port, "line-outbound") as outbound,
        phone_call(running.port, start) as call,
    ):
        for _ in range(2):
            await call.media(speech(1.3) + pause(1.7), "inbound")
            await call.media(pause(0.9) + speech(2.1), "outbound")
        await call.stop()
        assert (await closed(call))[0] == 1000
        assert texts(await until(inbound, "end")) == ["w1 w2 w3", "w4 w5 w6"]
        assert texts(await until(outbound, "end")) == ["w1 w2 w3 w4 w5", "w6 w7 w8 w9 w10"]


async def test_a_silent_track_for_which_nothing_is_sent_follows_the_clock_of_the_call(serve: Serve) -> None:
    """Its turn ends although no audio of it comes, and its next words have the time of the call."""
    start = start_message(["inbound", "outbound"], customParameters={"publish": "line"})
    async with (
        serve() as running,
        socket_viewer(running.port, "line-outbound") as outbound,
        phone_call(running.port, start) as call,
    ):
        await call.media(speech(), "outbound")
        await call.media(pause(8.0), "inbound")
        assert texts(await until(outbound, "final")) == ["w1 w2 w3"]
        call.at["outbound"] = 20_000
        await call.media(speech() + pause(), "outbound")
        line = (await until(outbound, "final"))[-1]
        assert 19.0 < line["start"] < line["end"] < 22.5


async def test_a_key_is_a_parameter_of_the_stream(serve: Serve) -> None:
    async with serve(auth={"keys": (KEY, OTHER)}) as running:
        bearer = {"Authorization": f"Bearer {KEY}"}
        code, reason = await refused(running, start_message())
        assert code == 1008 and "the custom parameter 'key'" in reason
        code, reason = await refused(running, start_message(customParameters={"key": "wrong"}))
        assert (code, reason) == (1008, "Incorrect API key provided.")
        assert running.metric("refused_total", reason="auth") == 2
        async with (
            socket_viewer(running.port, "line", additional_headers=bearer) as viewer,
            phone_call(running.port, start_message(customParameters={"key": KEY, "publish": "line"})) as call,
        ):
            await call.media(speech() + pause())
            await until(viewer, "final")
            # A name is taken for its owner only.
            taken = start_message(customParameters={"key": KEY, "publish": "line"})
            assert await refused(running, taken) == (
                1008,
                "Another session is published as 'line'; choose another name.",
            )
            async with phone_call(
                running.port, start_message(customParameters={"key": OTHER, "publish": "line"})
            ) as other:
                await other.stop()
                assert (await closed(other))[0] == 1000
        # A client that can send headers may give its key there, and is refused before the upgrade.
        with pytest.raises(InvalidStatus):
            await refused(running, {}, additional_headers={"Authorization": "Bearer wrong"})
        async with phone_call(running.port, additional_headers=bearer) as call:
            await call.stop()
            assert (await closed(call))[0] == 1000


async def test_a_client_secret_opens_a_call_under_its_own_name_only(serve: Serve) -> None:
    async with serve(auth={"keys": (KEY,)}) as running, httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(
            f"{running.base_url}/realtime/client_secrets",
            json={"session": {"type": "transcription", "publish": "line"}},
            headers={"Authorization": f"Bearer {KEY}"},
        )
        secret = answer.json()["value"]
        # Twilio takes 500 characters for the name and the value of a parameter; the secret has more.
        assert 500 < len(secret) < 900
        keys = {"key": secret[:450], "key2": secret[450:]}
        code, reason = await refused(running, start_message(customParameters={**keys, "publish": "other"}))
        assert code == 1008 and "only under the name that its secret was made with" in reason
        for tracks in (["inbound"], ["inbound", "outbound"]):
            start = start_message(tracks, customParameters={**keys, "publish": "line"})
            async with phone_call(running.port, start) as call:
                await call.stop()
                assert (await closed(call))[0] == 1000


def signature(url: str) -> str:
    return base64.b64encode(hmac.digest(TOKEN.encode(), url.encode(), hashlib.sha1)).decode()


async def test_a_signature_is_asked_for_before_the_upgrade_if_the_token_is_set(serve: Serve) -> None:
    async with serve(auth={"twilio_auth_token": TOKEN}) as running:
        host = f"127.0.0.1:{running.port}"
        good = (f"wss://{host}/v1/twilio", "wss://127.0.0.1/v1/twilio")
        for url in good:
            async with phone_call(running.port, additional_headers={"X-Twilio-Signature": signature(url)}) as call:
                await call.stop()
                assert (await closed(call))[0] == 1000
        bad = ("", "x", signature("wss://other/v1/twilio"), signature(f"ws://{host}/v1/twilio"), "é".encode().decode())
        for value in bad:
            with pytest.raises(InvalidStatus) as answer:
                await refused(running, {}, additional_headers={"X-Twilio-Signature": value})
            body = json.loads(answer.value.response.body)
            assert (answer.value.response.status_code, body["error"]["code"]) == (401, "invalid_signature")
        with pytest.raises(InvalidStatus):
            await refused(running, {})
        assert running.metric("refused_total", reason="auth") == len(bad) + 1


async def test_twilios_own_library_makes_the_twiml_and_the_signature(serve: Serve) -> None:
    """The XML that sends a call here, read as Twilio reads it, and Twilio's signature. Unmodified, if installed."""
    twiml = pytest.importorskip("twilio.twiml.voice_response", reason="pip install twilio")
    from twilio.request_validator import RequestValidator

    response = twiml.VoiceResponse()
    begin = response.start()
    stream = begin.stream(url="wss://captions.example/v1/twilio", track="both_tracks")
    stream.parameter(name="key", value=KEY)
    stream.parameter(name="publish", value="line")
    response.dial("+15550100")
    element = ElementTree.fromstring(str(response)).find("./Start/Stream")
    assert element is not None and element.get("track") == "both_tracks"
    parameters = {found.get("name"): found.get("value") for found in element.iter("Parameter")}
    signed = RequestValidator(TOKEN).compute_signature(element.get("url"), {})
    # The test connects without TLS, as a proxy in front of the server does.
    url = str(element.get("url")).replace("wss:", "ws:")
    auth = {"keys": (KEY,), "twilio_auth_token": TOKEN}
    start = start_message(["inbound", "outbound"], customParameters=parameters)
    bearer = {"Authorization": f"Bearer {KEY}"}
    async with (
        serve(auth=auth) as running,
        socket_viewer(running.port, "line-inbound", additional_headers=bearer) as viewer,
        phone_call(running.port, start, url, additional_headers={"X-Twilio-Signature": signed}) as call,
    ):
        await call.media(speech() + pause())
        assert texts(await until(viewer, "final")) == ["w1 w2 w3"]


async def test_options_are_those_of_deepgram(serve: Serve) -> None:
    parameters = {"publish": "line", "keyterm": "Kittila, Van der Berg", "redact": "numbers", "endpointing": "700"}
    async with serve() as running, phone_call(running.port, start_message(customParameters=parameters)) as call:
        await call.media(speech())
        await until_so(lambda: running.engine.streams)
        (entry,) = running.gateway.sessions.entries.values()
        settings = entry.live.session.settings
        assert settings.turn_detection.silence_duration_ms == 700 and settings.publish == "line"
        assert "numbers" in settings.formatting.redact
        assert not settings.format.binary


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (start_message(mediaFormat={**FORMAT, "encoding": "audio/x-alaw"}), "must be audio/x-mulaw"),
        (start_message(mediaFormat={**FORMAT, "sampleRate": 16_000}), "8000 samples a second"),
        (start_message(mediaFormat={**FORMAT, "channels": 2}), "one channel"),
        (start_message(mediaFormat=None), "'start.mediaFormat' must be an object"),
        (start_message([]), "'start.tracks' must be a list"),
        (start_message(["inbound", "inbound"]), "'start.tracks' must be a list"),
        (start_message(["both"]), "'start.tracks' must be a list"),
        (start_message(tracks=[{}]), "'start.tracks' must be a list"),
        (start_message(tracks="inbound"), "'start.tracks' must be a list"),
        (start_message(customParameters=[]), "must be an object of strings"),
        (start_message(customParameters={"publish": 3}), "must be an object of strings"),
        (start_message(customParameters={"publish": "a/b"}), "'publish' must be a name"),
        (start_message(["inbound", "outbound"], customParameters={"publish": "a" * 60}), "'publish' must be a name"),
        (start_message(callSid=None), "'start.callSid' must be a name"),
        (start_message(customParameters={"endpointing": "soon"}), "'endpointing' must be a whole number"),
        (start_message(customParameters={"callback": "https://a"}), "does not send results to a callback"),
        ({"event": "start", "start": "now"}, "'start' must be an object"),
        ({"event": "media", "media": {"track": "inbound", "payload": ""}}, "The first messages must be"),
        (CONNECTED, "The first messages must be"),
    ],
)
async def test_a_start_that_is_wrong_closes_the_socket_with_a_sentence(
    serve: Serve, start: dict[str, Any], said: str
) -> None:
    async with serve() as running:
        code, reason = await refused(running, start)
        assert code == 1008 and said in reason
        assert len(running.gateway.sessions) == 0


async def test_a_client_that_does_not_start_is_closed_after_the_deadline(serve: Serve) -> None:
    async with serve(server={"handshake_s": 0.2}) as running:
        assert await refused(running, {}) == (1008, "No 'start' message came in time.")
        assert running.metric("refused_total", reason="start") == 1


async def test_a_call_is_refused_where_there_is_no_room(serve: Serve) -> None:
    async with serve(limits={"sessions_per_key": 1}) as running:
        assert await refused(running, start_message(["inbound", "outbound"])) == (
            1013,
            "At most 1 sessions may be open at once.",
        )
        async with phone_call(running.port) as call:
            await call.stop()
            assert (await closed(call))[0] == 1000


async def test_mistakes_in_a_call_are_ignored_and_the_call_goes_on(serve: Serve) -> None:
    async with serve() as running, socket_viewer(running.port, CALL) as viewer, phone_call(running.port) as call:
        for media in (
            None,
            {},
            {"track": "inbound"},
            {"track": "outbound", "payload": "AAAA"},
            {"track": [], "payload": "AAAA"},
            {"track": "inbound", "payload": "%%%"},
            {"track": "inbound", "payload": 3},
            {"track": "inbound", "payload": "AAAA", "timestamp": "soon"},
            {"track": "inbound", "payload": "AAAA", "timestamp": -5},
        ):
            await call.send_next("media", media=media)
        for text in ("{", "[]", "null", '{"event": 3}', '{"event": "start"}', "x" * 70_000):
            await call.socket.send(text)
        await call.socket.send(b"\xff\x00")
        await call.media(speech() + pause())
        assert texts(await until(viewer, "final")) == ["w1 w2 w3"]
        await call.stop()
        await call.media(speech())
        assert (await closed(call))[0] == 1000


async def test_a_page_of_another_website_opens_no_call(serve: Serve) -> None:
    async with serve() as running:
        with pytest.raises(InvalidStatus) as answer:
            async with connect(f"ws://127.0.0.1:{running.port}/v1/twilio", origin="https://evil.example", proxy=None):  # type: ignore[arg-type]
                pass
        assert answer.value.response.status_code == 403
