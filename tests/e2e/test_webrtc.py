"""WebRTC calls over real UDP: aiortc is the client. What it says, what is refused, and clients that mean harm."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import openai
import pytest
from aioice import stun
from aiortc.rtcsctptransport import ErrorChunk, RTCSctpTransport, SackChunk

from realtime.serving import webrtc_calls
from realtime.webrtc.peer_connection import MAX_CHANNELS
from tests.e2e.conftest import Running, Serve
from tests.e2e.viewing import socket_viewer
from tests.e2e.viewing import until as until_seen
from tests.lossy_line import lossy_line
from tests.realtime.gateway_doubles import silence, tone
from tests.waiting import PATIENCE_S, stays, until
from tests.webrtc_client import RATE, Caller, call, caller, post

SPEECH = silence(0.5, RATE) + tone(1.3, RATE) + silence(1.0, RATE)
COMPLETED = "conversation.item.input_audio_transcription.completed"
KEY, OTHER = "the-key-of-a-browser", "the-key-of-another"


def whip(running: Running) -> str:
    return f"{running.http}/v1/whip"


async def ended(running: Running) -> None:
    """Until the server has no session, no call and no process of one."""
    await until(lambda: len(running.gateway.sessions) == 0 and not running.gateway.calls.by_id)


async def offer_of() -> str:
    async with caller() as made:
        return await made.offer()


@asynccontextmanager
async def requests(key: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S, headers=headers) as client:
        yield client


# What calls do


async def test_words_of_a_call_come_on_its_data_channel(serve: Serve) -> None:
    async with serve() as running:
        async with call(whip(running), SPEECH) as speaker:
            events = await speaker.until(COMPLETED)
            assert events[0]["type"] == "session.created"
            assert events[-1]["transcript"] == "w1 w2 w3"
            assert "call.gap" not in [event["type"] for event in events]
            assert running.metric("sessions_opened_total", dialect="webrtc") == 1
        await ended(running)


async def test_client_events_on_the_data_channel(serve: Serve) -> None:
    async with serve() as running, call(whip(running), tone(30, RATE)) as speaker:
        await speaker.until("session.created")
        session = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}
        speaker.send(type="session.update", session=session | {"include": ["session.resume"]})
        updated = (await speaker.until("session.updated"))[-1]["session"]
        assert updated["audio"]["input"]["turn_detection"] is None and "resume" not in updated
        assert updated["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": 16000}
        await until(lambda: speaker.speaker.seconds > 2)
        speaker.send(type="input_audio_buffer.commit")
        assert (await speaker.until(COMPLETED))[-1]["transcript"]
        speaker.send(type="input_audio_buffer.clear")
        await speaker.until("input_audio_buffer.cleared")
        speaker.send(type="input_audio_buffer.append", audio="AAAA")
        assert "Opus" in (await speaker.until("error"))[-1]["error"]["message"]
        speaker.send(type="nonsense")
        await speaker.until("error")


async def test_a_publisher_without_a_data_channel_is_read_by_viewers(serve: Serve) -> None:
    """The key is a client secret, which has the name."""
    async with serve(auth={"keys": (KEY,)}) as running:
        async with requests(KEY) as client:
            body = {"session": {"type": "transcription", "publish": "stage"}}
            made = await client.post(f"{running.base_url}/realtime/client_secrets", json=body)
        secret, headers = made.json()["value"], {"Authorization": f"Bearer {KEY}"}
        async with socket_viewer(running.port, "stage", additional_headers=headers) as viewer:
            async with call(whip(running), SPEECH, key=secret, channel=None):
                seen = await until_seen(viewer, "final")
            assert [event["text"] for event in seen if event["type"] == "final"] == ["w1 w2 w3"]
        await ended(running)


async def test_openais_own_client_makes_a_call_with_a_session(serve: Serve) -> None:
    async with serve(auth={"keys": (KEY,)}) as running, caller(SPEECH) as speaker:
        async with openai.AsyncOpenAI(api_key=KEY, base_url=running.base_url) as client:
            session: Any = {"type": "transcription", "include": ["item.input_audio_transcription.words"]}
            answer = await client.realtime.calls.create(sdp=await speaker.offer(), session=session)
            assert answer.response.status_code == 201
            place = answer.response.headers["location"]
            await speaker.take(answer.response.text)
            done = (await speaker.until(COMPLETED))[-1]
            assert done["transcript"] == "w1 w2 w3" and len(done["words"]) == 3
            await client.realtime.calls.hangup(place.rpartition("/")[2])
        await ended(running)


async def test_delete_ends_a_call_and_only_its_own_key_may(serve: Serve) -> None:
    async with serve(auth={"keys": (KEY, OTHER)}) as running, call(whip(running), SPEECH, key=KEY) as speaker:
        await speaker.until("session.created")
        place = running.http + speaker.location
        async with requests(OTHER) as client:
            assert (await client.delete(place)).status_code == 404
        async with requests(KEY) as client:
            trickled = await client.patch(place, content="a=end-of-candidates\r\n")
            assert trickled.status_code == 405 and trickled.headers["allow"] == "DELETE"
            assert trickled.json()["error"]["code"] == "trickle_not_needed"
            assert (await client.delete(place)).status_code == 200
            await ended(running)
            assert (await client.delete(place)).status_code == 404
        async with asyncio.timeout(PATIENCE_S):
            await speaker.closed.wait()


async def test_delete_ends_the_call_of_a_client_that_opens_no_channel_for_events(serve: Serve) -> None:
    """Events wait for that channel in the process of the call, and the order to end it waits behind them."""
    async with serve() as running, caller(SPEECH, channel="something-else") as speaker:
        answer = await post(whip(running), await speaker.offer())
        await speaker.take(answer.text)
        await until(lambda: speaker.peer.connectionState == "connected")
        async with requests() as client:
            assert (await client.delete(running.http + answer.headers["location"])).status_code == 200
        await ended(running)


async def test_what_the_network_lost_is_a_marked_gap_and_the_call_goes_on(serve: Serve) -> None:
    async with serve() as running, lossy_line(loss=0.0, jitter_s=0.03) as line:
        pcm = tone(1.3, RATE) + silence(1.0, RATE) + tone(1.3, RATE) + silence(60.0, RATE)
        async with call(whip(running), pcm, change=line.through) as speaker:
            await speaker.until("session.created")
            line.loss = 0.1
            events = await speaker.until(COMPLETED) + await speaker.until(COMPLETED)
            gaps = [event for event in events if event["type"] == "call.gap"]
            assert gaps and all(0 <= gap["audio_start_ms"] < gap["audio_end_ms"] for gap in gaps)
            # An outage: nothing passes for a while.
            line.loss = 1.0
            began = speaker.speaker.seconds
            await until(lambda: speaker.speaker.seconds > began + 2)
            line.loss = 0.0
            longest = 0
            while longest < 1500:
                gap = (await speaker.until("call.gap"))[-1]
                longest = max(longest, gap["audio_end_ms"] - gap["audio_start_ms"])
            assert longest < 20_000


# Admission, keys and settings


async def test_a_call_needs_a_key_where_the_server_asks_for_keys(serve: Serve) -> None:
    async with serve(auth={"keys": (KEY,)}) as running:
        offer = await offer_of()
        for key in (None, OTHER):
            assert (await post(whip(running), offer, key)).status_code == 401
        assert (await post(whip(running), offer, KEY)).status_code == 201


async def test_pages_of_other_websites_may_not_call_a_server_without_keys(serve: Serve) -> None:
    async with serve() as running, requests() as client:
        headers = {"Content-Type": "application/sdp", "Origin": "https://elsewhere.example"}
        answer = await client.post(whip(running), content=await offer_of(), headers=headers)
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "origin_not_allowed"


async def test_a_call_that_never_connects_counts_until_its_deadline(serve: Serve) -> None:
    limits = {"sessions_per_key": 1}
    async with serve(limits=limits, webrtc={"connect_s": 2.0}) as running, requests() as client:
        offer = await offer_of()
        assert (await post(whip(running), offer)).status_code == 201
        assert (await client.get(f"{running.http}/capacity")).json()["sessions"] == 1
        refused = await post(whip(running), offer)
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "too_many_sessions"
        await ended(running)
        assert (await post(whip(running), offer)).status_code == 201


async def test_a_handshake_that_is_never_completed_ends_at_the_deadline(serve: Serve) -> None:
    async with serve(webrtc={"connect_s": 2.0}) as running:
        offer = await offer_of()
        answer = (await post(whip(running), offer)).text
        with stranger(answer) as (udp, server):
            udp.sendto(check(offer, answer), server)
            reply = await asyncio.get_running_loop().sock_recv(udp, 2048)
            assert stun.parse_message(reply).message_class is stun.Class.RESPONSE
            await ended(running)


async def test_there_are_so_many_calls_and_no_more(serve: Serve) -> None:
    async with serve(webrtc={"calls": 2}) as running:
        offer = await offer_of()
        answers = [await post(whip(running), offer) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [201, 201, 503]
        assert answers[2].json()["error"]["code"] == "too_many_calls"
        assert running.metric("refused_total", reason="calls") == 1
    async with serve(webrtc={"calls": 0}) as running:
        assert (await post(whip(running), offer)).json()["error"]["code"] == "calls_off"


async def test_one_of_several_keys_has_half_of_the_calls(serve: Serve) -> None:
    async with serve(webrtc={"calls": 2}, auth={"keys": ("a-long-secret", "another-secret")}) as running:
        offer = await offer_of()
        found = [
            (await post(whip(running), offer, key)).status_code
            for key in ("a-long-secret", "a-long-secret", "another-secret")
        ]
        assert found == [201, 503, 201]


async def test_ports_and_addresses_are_those_of_the_configuration(serve: Serve) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    webrtc = {"ports": f"{port}-{port}", "addresses": ("203.0.113.7",)}
    async with serve(webrtc=webrtc) as running:
        offer = await offer_of()
        answer = await post(whip(running), offer)
        assert f"203.0.113.7 {port} typ host" in answer.text and "127.0.0.1" not in answer.text
        refused = await post(whip(running), offer)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_udp_port"
        await until(lambda: len(running.gateway.sessions) == 1)


async def test_without_the_extra_the_routes_name_the_command_that_installs_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webrtc_calls, "is_installed", lambda: False)
    async with serve() as running:
        for path in ("/v1/whip", "/v1/realtime/calls"):
            answer = await post(running.http + path, await offer_of())
            assert answer.status_code == 501
            assert "pip install 'tickertape[webrtc]'" in answer.json()["error"]["message"]


async def test_bodies_that_are_no_offer_are_refused(serve: Serve) -> None:
    async with serve() as running:
        cases = [
            (b"v=0\r\n" + b"a=x\r\n" * 20_000, "application/sdp", 413),
            (b"hello", "application/sdp", 400),
            (b"\xff\xfe", "application/sdp", 400),
            (b"{}", "application/json", 415),
            (b"", "application/sdp", 400),
        ]
        for body, kind, status in cases:
            for path in ("/v1/whip", "/v1/realtime/calls"):
                assert (await post(running.http + path, body, kind=kind)).status_code == status
        form = b'--x\r\nContent-Disposition: form-data; name="session"\r\n\r\n{}\r\n--x--\r\n'
        kind = "multipart/form-data; boundary=x"
        assert (await post(f"{running.base_url}/realtime/calls", form, kind=kind)).status_code == 400
        assert (await post(whip(running), form, kind=kind)).status_code == 415
        assert len(running.gateway.sessions) == 0


async def test_settings_that_are_wrong_are_refused_before_anything_is_opened(serve: Serve) -> None:
    async with serve() as running:
        parts = {"sdp": (None, await offer_of()), "session": (None, json.dumps({"type": "transcription", "audio": 5}))}
        async with requests() as client:
            answer = await client.post(f"{running.base_url}/realtime/calls", files=parts)
        assert answer.status_code == 400
        await ended(running)


async def test_a_client_that_leaves_while_its_offer_is_answered_leaves_nothing(serve: Serve) -> None:
    async with serve(webrtc={"connect_s": 1.0}) as running:
        offer = await offer_of()
        for _ in range(5):
            posting = asyncio.create_task(post(whip(running), offer))
            await until(lambda: len(running.gateway.calls.by_id) > 0)
            posting.cancel()
            await asyncio.gather(posting, return_exceptions=True)
        await ended(running)


async def test_a_server_that_stops_ends_its_calls_and_says_so(serve: Serve) -> None:
    async with serve() as running, call(whip(running), SPEECH) as speaker:
        await speaker.until(COMPLETED)
        draining = asyncio.create_task(running.gateway.sessions.drain(1.0))
        last = (await speaker.until("call.ended"))[-1]
        assert last["code"] == 1012
        assert (await post(whip(running), await offer_of())).status_code == 503
        await draining
        async with asyncio.timeout(PATIENCE_S):
            await speaker.closed.wait()
        await ended(running)


async def test_a_call_for_which_no_process_can_be_started_leaves_nothing(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_process(kind: bytes) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(webrtc_calls._program, "connect", no_process)
    async with serve(limits={"sessions_per_key": 1}) as running:
        for _ in range(3):
            answer = await post(whip(running), await offer_of())
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "call_failed"
        await ended(running)


async def test_a_call_whose_process_dies_ends_alone(serve: Serve) -> None:
    async with serve() as running, call(whip(running), SPEECH) as one, call(whip(running), SPEECH) as other:
        await one.until("session.created")
        await other.until("session.created")
        running.gateway.calls.by_id[one.location.rpartition("/")[2]].line.kill()
        assert (await other.until(COMPLETED))[-1]["transcript"] == "w1 w2 w3"
        await until(lambda: len(running.gateway.sessions) == 1)


# Clients that mean harm


@asynccontextmanager
async def victim() -> AsyncIterator[tuple[socket.socket, int]]:
    """A UDP port that has nothing to do with the server."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        udp.setblocking(False)
        yield udp, udp.getsockname()[1]


class stranger:
    """A UDP socket, and the address of the server in an answer."""

    def __init__(self, answer: str) -> None:
        port = re.search(r"127\.0\.0\.1 (\d+) typ host", answer)
        assert port is not None
        self._server = ("127.0.0.1", int(port[1]))

    def __enter__(self) -> tuple[socket.socket, tuple[str, int]]:
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(("127.0.0.1", 0))
        self._udp.setblocking(False)
        return self._udp, self._server

    def __exit__(self, *_: object) -> None:
        self._udp.close()


def attribute(name: str, text: str) -> str:
    found = re.search(rf"^a={name}:(\S+)", text, re.MULTILINE)
    assert found is not None
    return found[1]


def check(offer: str, answer: str, password: str | None = None) -> bytes:
    """A connectivity check, signed with the password of the answer or another one."""
    message = stun.Message(stun.Method.BINDING, stun.Class.REQUEST)
    message.attributes["USERNAME"] = f"{attribute('ice-ufrag', answer)}:{attribute('ice-ufrag', offer)}"
    message.attributes["PRIORITY"] = 1
    message.attributes["USE-CANDIDATE"] = None
    message.add_message_integrity((password or attribute("ice-pwd", answer)).encode())
    return bytes(message)


async def test_nothing_is_sent_to_the_candidates_of_an_offer(serve: Serve) -> None:
    """A candidate is an address that a client names; the server sends only to those that have asked for it."""
    async with serve() as running, victim() as (udp, port):
        lines = "".join(f"a=candidate:{n} 1 udp 2130706431 127.0.0.1 {port} typ host\r\n" for n in range(500))
        lines += (
            "a=candidate:1 1 udp 1 0123-4567.local 9 typ host\r\na=candidate:2 1 tcp 1 169.254.169.254 80 typ host\r\n"
        )
        async with caller(SPEECH) as speaker:
            offer = await speaker.offer()
            answer = await post(whip(running), offer.replace("a=mid:0\r\n", "a=mid:0\r\n" + lines))
            assert answer.status_code == 201
            await speaker.take(answer.text)
            await speaker.until(COMPLETED)
        with pytest.raises(BlockingIOError):
            udp.recv(2048)


async def test_datagrams_of_strangers_are_dropped_without_an_answer(serve: Serve) -> None:
    async with serve() as running, caller(SPEECH) as speaker:
        offer = await speaker.offer()
        answer = (await post(whip(running), offer)).text
        await speaker.take(answer)
        await speaker.until("session.created")
        with stranger(answer) as (udp, server):
            rtp = bytes([0x80, 96]) + bytes(200)
            hello = bytes([22, 254, 253]) + bytes(100)
            for data in (rtp, hello, b"", b"\x00", check(offer, answer, "not the password of this call"), bytes(2000)):
                for _ in range(50):
                    udp.sendto(data, server)
            await speaker.until(COMPLETED)
            with pytest.raises(BlockingIOError):
                udp.recv(2048)


async def test_a_flood_of_datagrams_hurts_no_other_session(serve: Serve) -> None:
    async with serve() as running, call(whip(running)) as flooder, call(whip(running), SPEECH) as speaker:
        await flooder.until("session.created")
        with stranger(flooder.peer.remoteDescription.sdp) as (udp, server):
            for _ in range(20_000):
                udp.sendto(bytes(1000), server)
                if _ % 100 == 0:
                    await asyncio.sleep(0)
            assert (await speaker.until(COMPLETED))[-1]["transcript"] == "w1 w2 w3"


async def ends_with(running: Running, speaker: Caller) -> None:
    """The server ends this call."""
    async with asyncio.timeout(PATIENCE_S):
        await speaker.closed.wait()
    await ended(running)


async def test_a_giant_message_ends_the_call(serve: Serve) -> None:
    async with serve() as running, call(whip(running)) as speaker:
        await speaker.until("session.created")
        assert speaker.channel is not None and speaker.peer.sctp is not None
        speaker.peer.sctp._remote_max_message_size = 0
        speaker.channel.send("x" * 3_000_000)
        await ends_with(running, speaker)


async def test_a_message_in_very_many_pieces_ends_the_call(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk has one byte, and the last never comes: bytes alone would allow a long list."""
    async with serve() as running, call(whip(running)) as speaker:
        await speaker.until("session.created")
        monkeypatch.setattr("aiortc.rtcsctptransport.USERDATA_MAX_LENGTH", 1)
        assert speaker.channel is not None
        speaker.channel.send("x" * 5_000)
        await ends_with(running, speaker)


async def test_many_data_channels_end_the_call(serve: Serve) -> None:
    async with serve() as running, call(whip(running)) as speaker:
        await speaker.until("session.created")
        for number in range(MAX_CHANNELS + 2):
            speaker.peer.createDataChannel(f"another {number}")
        await ends_with(running, speaker)


async def test_other_channels_are_closed_and_the_call_goes_on(serve: Serve) -> None:
    async with serve() as running, call(whip(running), SPEECH) as speaker:
        await speaker.until("session.created")
        closed = asyncio.Event()
        speaker.peer.createDataChannel("chat").on("close", closed.set)
        async with asyncio.timeout(PATIENCE_S):
            await closed.wait()
        assert (await speaker.until(COMPLETED))[-1]["transcript"] == "w1 w2 w3"
        assert len(running.gateway.sessions) == 1


async def test_bytes_on_the_channel_end_the_call(serve: Serve) -> None:
    async with serve() as running, call(whip(running)) as speaker:
        await speaker.until("session.created")
        assert speaker.channel is not None
        speaker.channel.send(b"\x00\x01")
        await ends_with(running, speaker)


async def test_a_flood_of_messages_hurts_no_other_session(serve: Serve) -> None:
    async with serve() as running, call(whip(running)) as flooder, call(whip(running), SPEECH) as speaker:
        await flooder.until("session.created")
        for _ in range(3000):
            flooder.send(type="nonsense", padding="x" * 500)
        assert (await speaker.until(COMPLETED))[-1]["transcript"] == "w1 w2 w3"


async def test_a_client_that_never_reads_its_channel_is_closed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """It acknowledges nothing, and asks for many events."""
    limits = {"outbox_events": 64, "outbox_bytes": 65_536, "mistakes_per_second": 0.0}
    async with serve(limits=limits) as running, call(whip(running)) as speaker:
        await speaker.until("session.created")
        speaker_sctp = speaker.peer.sctp
        assert speaker_sctp is not None

        async def no_sack() -> None:
            speaker_sctp._sack_needed = False

        monkeypatch.setattr(speaker_sctp, "_send_sack", no_sack)
        for _ in range(3000):
            speaker.send(type="nonsense " + "x" * 70, event_id="x" * 500)
        await until(lambda: running.metric("closed_total", reason="slow_reader") == 1)
        await ended(running)


async def test_messages_that_are_no_sctp_end_the_call_alone(serve: Serve) -> None:
    """Chunks that aiortc's own code trips over: an acknowledgement of nothing, a channel opened twice, bad UTF-8."""
    async with serve() as running:
        for pp_id, data in ((50, b"\x03" + bytes(11)), (50, b"\x02"), (51, b"\xff\xff")):
            async with call(whip(running)) as speaker:
                await speaker.until("session.created")
                sctp = speaker.peer.sctp
                assert isinstance(sctp, RTCSctpTransport)
                stream = 0 if pp_id == 51 or data[0] == 3 else 5
                await sctp._send(stream, pp_id, data)
                await ends_with(running, speaker)


class EndlessChunk(ErrorChunk):
    """Its parameter has the length zero: a parser that goes on by this length does not end."""

    @property
    def body(self) -> bytes:  # type: ignore[override]
        return bytes(8)


async def test_packets_that_would_be_computed_for_long_end_the_call(serve: Serve) -> None:
    acknowledgement = SackChunk()
    acknowledgement.gaps = [(0, 65_535)] * 250
    async with serve() as running:
        for chunk in (acknowledgement, EndlessChunk()):
            async with call(whip(running)) as speaker:
                await speaker.until("session.created")
                sctp = speaker.peer.sctp
                assert isinstance(sctp, RTCSctpTransport)
                await sctp._send_chunk(chunk)
                await ends_with(running, speaker)


async def test_chunks_on_many_streams_end_the_call(serve: Serve) -> None:
    async with serve() as running, call(whip(running)) as speaker:
        await speaker.until("session.created")
        assert speaker.peer.sctp is not None
        for stream in range(1000, 1200):
            await speaker.peer.sctp._send(stream, 51, b"x")
        await ends_with(running, speaker)


async def test_rtp_of_foreign_types_and_many_sources_is_dropped(serve: Serve) -> None:
    async with serve() as running, call(whip(running), SPEECH) as speaker:
        await speaker.until("session.created")
        # Its own source is known to the server before the others come, of which few are taken.
        await until(lambda: speaker.speaker.seconds > 0.2)
        transport = speaker.peer.getSenders()[0].transport
        for number in range(500):
            head = bytes([0x80, number % 128]) + number.to_bytes(2) + bytes(4) + (number + 7).to_bytes(4)
            with suppress(ConnectionError):
                await transport._send_rtp(head + bytes(100))
        assert (await speaker.until(COMPLETED))[-1]["transcript"] == "w1 w2 w3"
        await stays(lambda: len(running.gateway.sessions) == 1)
