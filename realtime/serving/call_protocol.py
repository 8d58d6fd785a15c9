"""The messages between the gateway (`calls.py`) and the process of a WebRTC call (`realtime/webrtc`)."""

from __future__ import annotations

import struct

# The module that is run as the program of calls. The gateway does not import it, so that aiortc is not loaded there.
PROGRAM = "realtime.webrtc.call_process"
# The kind of order that begins a call (`fork_protocol.py`).
CALL = b"c"
# Every message: kind, length in bytes of the content that follows.
FRAME = struct.Struct("<cI")
# Gateway to process. The first is the JOB (JSON: `offer`, `bind`, `addresses`, `ports`, `connect_s`, `message_bytes`),
# EVENT a text for the data channel, and CLOSE ends the call when the texts before it are sent.
JOB, EVENT, CLOSE = b"j", b"e", b"x"
# Process to gateway. The first is the ANSWER (SDP) or a FAULT (JSON: `status`, `code`, `message`, `param`). Then AUDIO
# (16-bit samples at 16 kHz); LOST and SILENCE (a number of such samples): audio that the network lost, and silence that
# the client did not send; MESSAGE (a text of the client); and at the end ENDED (text: why).
ANSWER, FAULT, AUDIO, LOST, SILENCE, MESSAGE, ENDED = b"a", b"f", b"s", b"l", b"q", b"m", b"z"
SAMPLES = struct.Struct("<I")
# The longest message in either direction. A client's text is bounded by the job's `message_bytes`.
MAX_FRAME_BYTES = 4 * 1024 * 1024
# The longest offer. A browser's offer of audio and a data channel has 2 to 6 KB.
MAX_OFFER_BYTES = 64 * 1024
