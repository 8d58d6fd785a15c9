"""SDP of a WebRTC call: reads the client's offer, and writes the server's answer.

`read_offer` takes the values that the server needs from an offer: the audio section with Opus, the section of data
channels, and the client's ICE and DTLS parameters. `write_answer` accepts one incoming audio track and the data
channels, and rejects all other sections. Only `a=` lines and `m=` lines of an offer are used, without its ICE
candidates (`IceLite` in `peer_connection.py` learns the client's address from signed checks).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

MAX_LINES = 2000
MAX_LINE_CHARACTERS = 1024
# Media sections of an offer. A browser's offer has one for each track, and one for all data channels.
MAX_SECTIONS = 16
MAX_FINGERPRINTS = 4
# Patterns of values in an offer: a codec in a=rtpmap, a token (RFC 8866), ICE user names, a=fingerprint and m= lines.
OPUS = re.compile(r"opus/48000(?:/[12])?", re.IGNORECASE)
TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`{|}~-]{1,64}")
ICE_CHARACTERS = re.compile(r"[A-Za-z0-9+/]{4,256}")
DIGEST = re.compile(r"(sha-256|sha-384|sha-512) ((?:[0-9A-F]{2}:)+[0-9A-F]{2})", re.IGNORECASE)
MEDIA = re.compile(r"([a-z]{1,20}) ([0-9]{1,5})(?:/[0-9]{1,5})? ([A-Z/]{1,30}) ([^ ].*)")
RTP, SCTP = ("UDP/TLS/RTP/SAVPF", "UDP/TLS/RTP/SAVP", "RTP/SAVPF", "RTP/SAVP"), ("UDP/DTLS/SCTP", "DTLS/SCTP")
# The longest message for a client whose offer has no a=max-message-size (RFC 8841).
DEFAULT_MESSAGE_BYTES = 65536


class BadOffer(Exception):
    """The offer cannot be answered. The text says why, and quotes nothing of the offer."""


@dataclass(slots=True)
class Section:
    """One media section (`m=`) of the offer, with its attributes."""

    # "audio", "video" or "application".
    media: str
    protocol: str
    # RTP payload types, or the name of the data channel application.
    formats: list[str]
    has_port: bool
    attributes: list[tuple[str, str]] = field(default_factory=list)

    @property
    def is_disabled(self) -> bool:
        """Whether the client does not use the section: its port is 0, and it is not meant for a bundle alone (RFC 8843;
        browsers write that with the bundle policy `max-bundle`)."""
        return not self.has_port and self.get("bundle-only") is None

    def get(self, name: str) -> str | None:
        """The value of the first attribute with this name."""
        return next((value for key, value in self.attributes if key == name), None)

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.attributes if key == name]


@dataclass(frozen=True, slots=True)
class Offer:
    """The values of an offer that the server needs."""

    sections: tuple[Section, ...]
    audio: Section
    # The RTP payload type of Opus in the audio section.
    payload_type: int
    # The section of data channels, if there is one.
    data: Section | None
    # The client's ICE user name.
    ufrag: str
    # Digests of the client's certificate: (algorithm, value).
    fingerprints: tuple[tuple[str, str], ...]
    # The client begins the DTLS handshake.
    client_begins: bool
    # The client's SCTP port, and the longest message that it accepts on a data channel.
    sctp_port: int
    message_bytes: int


@dataclass(frozen=True, slots=True)
class LocalDescription:
    """The server's own values in an answer."""

    # Addresses at which the client reaches this server, all with the same port.
    addresses: Sequence[str]
    port: int
    ufrag: str
    password: str
    # A digest of the certificate: (algorithm, value).
    fingerprint: tuple[str, str]
    # The longest message that the server accepts on a data channel.
    message_bytes: int


def read_offer(text: str) -> Offer:
    """Raises BadOffer."""
    common, sections = _parse(text)
    audio = next((section for section in sections if _is_audio(section)), None)
    if audio is None:
        raise BadOffer("the offer has no audio section with Opus that the client sends")
    data = next((section for section in sections if _is_data(section)), None)
    if data is not None and not _is_bundled(common, audio, data):
        raise BadOffer("audio and data channel must share one transport; offer them in one group BUNDLE")
    return Offer(
        sections=tuple(sections),
        audio=audio,
        payload_type=_opus_payload_type(audio) or 0,
        data=data,
        ufrag=_checked(_attribute(common, audio, "ice-ufrag"), ICE_CHARACTERS, "ice-ufrag"),
        fingerprints=_fingerprints(common, audio),
        client_begins=_attribute(common, audio, "setup") != "passive",
        sctp_port=_number(data.get("sctp-port") if data else None, 5000, 65535),
        message_bytes=_number(data.get("max-message-size") if data else None, DEFAULT_MESSAGE_BYTES, 2**31),
    )


def write_answer(offer: Offer, local: LocalDescription) -> str:
    """The answer: it accepts the audio section and the data section, and rejects the other sections (port 0)."""
    bundled = [section.get("mid") for section in (offer.audio, offer.data) if section is not None]
    lines = ["v=0", "o=- 1 1 IN IP4 0.0.0.0", "s=-", "t=0 0", "a=ice-lite"]
    if all(bundled):
        lines.append(f"a=group:BUNDLE {' '.join(mid for mid in bundled if mid)}")
    for section in offer.sections:
        if section is offer.audio:
            lines += _audio_lines(offer, local)
        elif section is offer.data:
            lines += _data_lines(offer, local)
        else:
            lines += [f"m={section.media} 0 {section.protocol} {section.formats[0]}", "c=IN IP4 0.0.0.0", "a=inactive"]
            lines += _mid_lines(section)
    return "".join(f"{line}\r\n" for line in lines)


def _audio_lines(offer: Offer, local: LocalDescription) -> list[str]:
    payload_type = offer.payload_type
    return [
        f"m=audio {local.port} {offer.audio.protocol} {payload_type}",
        *_transport_lines(offer, local),
        *_mid_lines(offer.audio),
        "a=recvonly",
        "a=rtcp-mux",
        f"a=rtpmap:{payload_type} opus/48000/2",
        f"a=fmtp:{payload_type} minptime=10;useinbandfec=1;stereo=0",
    ]


def _data_lines(offer: Offer, local: LocalDescription) -> list[str]:
    assert offer.data is not None
    # The syntax of drafts before RFC 8841, which some clients still use.
    is_draft = offer.data.protocol == "DTLS/SCTP"
    lines = ["a=sctpmap:5000 webrtc-datachannel 16"] if is_draft else ["a=sctp-port:5000"]
    return [
        f"m=application {local.port} {offer.data.protocol} {'5000' if is_draft else 'webrtc-datachannel'}",
        *_transport_lines(offer, local),
        *_mid_lines(offer.data),
        *lines,
        f"a=max-message-size:{local.message_bytes}",
    ]


def _transport_lines(offer: Offer, local: LocalDescription) -> Iterable[str]:
    family = "IP6" if ":" in local.addresses[0] else "IP4"
    yield f"c=IN {family} {local.addresses[0]}"
    for number, address in enumerate(local.addresses, start=1):
        # The priority of a host candidate; the first address has the highest.
        priority = (126 << 24) + ((65536 - number) << 8) + 255
        yield f"a=candidate:{number} 1 udp {priority} {address} {local.port} typ host"
    yield "a=end-of-candidates"
    yield f"a=ice-ufrag:{local.ufrag}"
    yield f"a=ice-pwd:{local.password}"
    yield f"a=fingerprint:{local.fingerprint[0]} {local.fingerprint[1]}"
    yield f"a=setup:{'passive' if offer.client_begins else 'active'}"


def _mid_lines(section: Section) -> list[str]:
    mid = section.get("mid")
    return [] if mid is None else [f"a=mid:{mid}"]


def _parse(text: str) -> tuple[list[tuple[str, str]], list[Section]]:
    """The attributes of the session (before the first section), and the media sections."""
    lines = text.split("\n")
    if len(lines) > MAX_LINES:
        raise BadOffer(f"the offer has more than {MAX_LINES} lines")
    if lines[0].rstrip("\r") != "v=0":
        raise BadOffer("the offer is no SDP: it must begin with the line v=0")
    common: list[tuple[str, str]] = []
    sections: list[Section] = []
    for line in lines[1:]:
        line = line.rstrip("\r")
        if len(line) > MAX_LINE_CHARACTERS or not line.isprintable():
            raise BadOffer(f"a line of the offer is longer than {MAX_LINE_CHARACTERS} characters, or not printable")
        if line.startswith("m="):
            sections.append(_section(line[2:]))
            if len(sections) > MAX_SECTIONS:
                raise BadOffer(f"the offer has more than {MAX_SECTIONS} media sections")
        elif line.startswith("a="):
            name, _, value = line[2:].partition(":")
            if name == "mid" and not TOKEN.fullmatch(value):
                raise BadOffer("a=mid is no token")
            (sections[-1].attributes if sections else common).append((name, value))
    return common, sections


def _section(line: str) -> Section:
    match = MEDIA.fullmatch(line)
    if match is None:
        raise BadOffer("an m= line of the offer is not valid")
    media, port, protocol, formats = match.groups()
    names = formats.split()
    if not all(TOKEN.fullmatch(name) for name in names):
        raise BadOffer("an m= line of the offer is not valid")
    return Section(media, protocol, names, has_port=port != "0")


def _is_audio(section: Section) -> bool:
    sends = section.get("recvonly") is None and section.get("inactive") is None
    is_rtp = section.media == "audio" and section.protocol in RTP
    return is_rtp and sends and not section.is_disabled and _opus_payload_type(section) is not None


def _is_data(section: Section) -> bool:
    return section.media == "application" and section.protocol in SCTP and not section.is_disabled


def _is_bundled(common: list[tuple[str, str]], audio: Section, data: Section) -> bool:
    """Whether one BUNDLE group has both sections, so that they share a transport."""
    wanted = {audio.get("mid"), data.get("mid")}
    groups = [value.split() for name, value in common if name == "group"]
    return None not in wanted and any(mids[:1] == ["BUNDLE"] and wanted <= set(mids[1:]) for mids in groups)


def _opus_payload_type(section: Section) -> int | None:
    for value in section.all("rtpmap"):
        number, _, codec = value.partition(" ")
        if OPUS.fullmatch(codec.strip()) and number in section.formats and number.isdecimal() and len(number) <= 3:
            return int(number) if int(number) < 128 else None
    return None


def _attribute(common: list[tuple[str, str]], section: Section, name: str) -> str | None:
    """The value of an attribute in the section, or else in the session."""
    return section.get(name) or next((value for key, value in common if key == name), None)


def _fingerprints(common: list[tuple[str, str]], section: Section) -> tuple[tuple[str, str], ...]:
    values = section.all("fingerprint") or [value for name, value in common if name == "fingerprint"]
    matches = [DIGEST.fullmatch(value) for value in values[:MAX_FINGERPRINTS]]
    digests = tuple((match[1].lower(), match[2].upper()) for match in matches if match)
    if not digests:
        raise BadOffer("the offer has no a=fingerprint with sha-256, sha-384 or sha-512")
    return digests


def _checked(value: str | None, pattern: re.Pattern[str], name: str) -> str:
    """The value. Raises BadOffer if the attribute is missing or not valid."""
    if value is None or not pattern.fullmatch(value):
        raise BadOffer(f"the offer has no valid a={name}")
    return value


def _number(value: str | None, default: int, maximum: int) -> int:
    if value is None or not (value.isascii() and value.isdecimal()) or len(value) > 10:
        return default
    return min(int(value), maximum)
