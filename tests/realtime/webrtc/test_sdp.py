"""Offers that can be answered, and many that cannot."""

from __future__ import annotations

import pytest

from realtime.webrtc.sdp import MAX_LINES, MAX_SECTIONS, BadOffer, LocalDescription, read_offer, write_answer

DIGEST = ":".join(["AB"] * 32)
COMMON = f"v=0\r\no=- 1 1 IN IP4 0.0.0.0\r\ns=-\r\nt=0 0\r\na=group:BUNDLE 0 1\r\na=fingerprint:sha-256 {DIGEST}\r\n"
ICE = "a=ice-ufrag:abcd\r\na=ice-pwd:0123456789012345678901\r\na=setup:actpass\r\n"
AUDIO = (
    f"m=audio 9 UDP/TLS/RTP/SAVPF 63 111\r\n{ICE}a=mid:0\r\na=sendonly\r\na=rtcp-mux\r\n"
    "a=rtpmap:63 red/48000/2\r\na=rtpmap:111 opus/48000/2\r\n"
)
DATA = (
    f"m=application 9 UDP/DTLS/SCTP webrtc-datachannel\r\n{ICE}a=mid:1\r\na=sctp-port:5000\r\na=max-message-size:9\r\n"
)
VIDEO = f"m=video 9 UDP/TLS/RTP/SAVPF 96\r\n{ICE}a=mid:2\r\na=rtpmap:96 VP8/90000\r\n"
LOCAL = LocalDescription(["127.0.0.1", "10.0.0.1"], 4000, "ufrag", "password", ("sha-256", DIGEST), 65536)


def test_what_the_server_needs_of_an_offer() -> None:
    offer = read_offer(COMMON + AUDIO + DATA)
    assert offer.payload_type == 111 and offer.ufrag == "abcd" and offer.client_begins
    assert offer.fingerprints == (("sha-256", DIGEST),)
    assert offer.sctp_port == 5000 and offer.message_bytes == 9


def test_an_answer_has_the_sections_of_the_offer_and_refuses_those_it_does_not_know() -> None:
    answer = write_answer(read_offer(COMMON + VIDEO + AUDIO + DATA), LOCAL).splitlines()
    assert [line for line in answer if line.startswith("m=")] == [
        "m=video 0 UDP/TLS/RTP/SAVPF 96",
        "m=audio 4000 UDP/TLS/RTP/SAVPF 111",
        "m=application 4000 UDP/DTLS/SCTP webrtc-datachannel",
    ]
    assert "a=group:BUNDLE 0 1" in answer and "a=ice-lite" in answer and answer.count("a=setup:passive") == 2
    candidates = [line for line in answer if line.startswith("a=candidate")]
    assert len(candidates) == 4 and candidates[0].split()[4:6] == ["127.0.0.1", "4000"]


def test_a_client_that_waits_for_the_handshake_gets_one() -> None:
    offer = read_offer(COMMON + AUDIO.replace("actpass", "passive"))
    assert not offer.client_begins
    assert "a=setup:active" in write_answer(offer, LOCAL)


def test_a_publisher_without_a_data_channel_is_answered() -> None:
    offer = read_offer(COMMON + AUDIO)
    assert offer.data is None
    assert write_answer(offer, LOCAL).count("m=") == 1


@pytest.mark.parametrize("in_bundle", [True, False])
def test_a_data_channel_of_a_bundle_alone_is_accepted_and_a_disabled_one_is_not(in_bundle: bool) -> None:
    """What browsers offer with the bundle policy `max-bundle` (RFC 8843)."""
    data = DATA.replace("m=application 9", "m=application 0") + ("a=bundle-only\r\n" if in_bundle else "")
    offer = read_offer(COMMON + AUDIO + data)
    assert (offer.data is not None) == in_bundle
    port = 4000 if in_bundle else 0
    assert f"m=application {port} UDP/DTLS/SCTP webrtc-datachannel" in write_answer(offer, LOCAL)


def test_candidates_are_ignored() -> None:
    lines = "".join(f"a=candidate:{number} 1 udp 1 10.0.0.1 {number} typ host\r\n" for number in range(1, 1000))
    offer = read_offer(COMMON + AUDIO + lines)
    assert "10.0.0.1 7 " not in write_answer(offer, LOCAL)


@pytest.mark.parametrize(
    ("offer", "why"),
    [
        ("", "no SDP"),
        ("hello", "no SDP"),
        ("v=0\r\n" * 2, "no audio section"),
        ("\x00" * 1000, "no SDP"),
        (COMMON + DATA, "no audio section"),
        (COMMON + VIDEO, "no audio section"),
        (COMMON + AUDIO.replace("opus/48000", "PCMU/8000"), "no audio section"),
        (COMMON + AUDIO.replace("sendonly", "recvonly"), "no audio section"),
        (COMMON + AUDIO.replace("m=audio 9", "m=audio 0"), "no audio section"),
        (COMMON + AUDIO.replace("111", "999"), "no audio section"),
        (COMMON + AUDIO.replace("ufrag:abcd", "ufrag:a b"), "ice-ufrag"),
        (COMMON + AUDIO.replace("a=ice-ufrag:abcd\r\n", ""), "ice-ufrag"),
        (COMMON.replace("sha-256", "md5") + AUDIO, "fingerprint"),
        (COMMON.replace(DIGEST, "AB:zz") + AUDIO, "fingerprint"),
        (COMMON.replace("BUNDLE 0 1", "BUNDLE 0") + AUDIO + DATA, "BUNDLE"),
        (COMMON + AUDIO.replace("mid:0", "mid:0 a"), "mid"),
        (COMMON + "m=\r\n", "m= line"),
        (COMMON + "m=audio many UDP/TLS/RTP/SAVPF 111\r\n", "m= line"),
        (COMMON + "m=audio 9 UDP/TLS/RTP/SAVPF 111\x0b\r\n", "printable"),
        (COMMON + VIDEO * (MAX_SECTIONS + 1), "sections"),
        (COMMON + "a=x\r\n" * MAX_LINES, "lines"),
        (COMMON + f"a=x:{'y' * 2000}\r\n", "longer"),
    ],
)
def test_offers_that_are_none_are_refused_in_words(offer: str, why: str) -> None:
    with pytest.raises(BadOffer, match=why) as error:
        read_offer(offer)
    # No word of the client, which could be anything, comes back in an error.
    assert "zz" not in str(error.value) and "a b" not in str(error.value)
