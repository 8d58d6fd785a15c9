"""The binary messages between the gateway and its media processes: decoders, pulled streams, WebRTC calls.

This file has message kinds, layouts and limits, and no code. Both sides import it, so it imports nothing of ours.
"""

from __future__ import annotations

import struct

# The modules that are run as programs. The gateway does not import them, so that libav and aiortc are not loaded there.
DECODER_PROGRAM = "realtime.serving.decoder_process"
CALL_PROGRAM = "realtime.webrtc.call_process"

# Orders of the gateway (`media_fork_client.py`) to a fork server (`media_fork_server.py`): kind, and number of the
# process. END kills a process. Every other kind begins one, and comes with file descriptors: the socket of the new
# process, and for an upload the file. BEGIN: a decoder; PULL: a process that pulls a stream from the network; CALL: a
# WebRTC call.
ORDER = struct.Struct("<cQ")
END, BEGIN, PULL, CALL = b"e", b"b", b"p", b"c"

# The head of a message: kind, length in bytes of the content that follows.
FRAME = struct.Struct("<cI")
# The longest content of a message of a call or a pulled stream, in either direction.
MAX_FRAME_BYTES = 4 * 1024 * 1024
# Messages of all processes: FAULT is an error, DONE the end.
FAULT, DONE = b"f", b"d"

# Gateway (`isolated_decoder.py`) to decoder (`decoder_process.py`): the number of bytes that follow. 0 asks for the
# next samples, NO_MORE says that the stream ends.
PIECE = struct.Struct("<I")
NO_MORE = 0xFFFF_FFFF
# Decoder to gateway, one frame for each piece: FAULT, or float32 samples, and MORE can be decoded without new bytes,
# HUNGRY needs new bytes, DONE is the end.
MORE, HUNGRY = b"m", b"h"

# To a pulling process (`pull_process.py`): the job, one line of JSON with `url`, `open_s` and `read_s`, the longest
# waits for the network; and `hosts`, the allowed hosts, or null for the command of a user, who may contact any host.
MAX_JOB_BYTES = 64 * 1024
# From it (to `pulled_audio.py`), as frames. OPENED: JSON with `seconds` and `keeps_time` of audio.network.StreamKind.
# BLOCK: START (`start` and `clock_shift` of audio.network.Block), then float32 samples. FAULT: JSON with `text`, and
# `final` if another attempt is useless. DONE has no content.
OPENED, BLOCK = b"o", b"b"
START = struct.Struct("<dd")

# Gateway (`calls.py`) to the process of a call (`realtime/webrtc`), as frames. The first is the JOB (JSON: `offer`,
# `bind`, `addresses`, `ports`, `connect_s`, `message_bytes`), EVENT a text for the data channel, and CLOSE ends the
# call when the texts before it are sent.
JOB, EVENT, CLOSE = b"j", b"e", b"x"
# Process to gateway. The first is the ANSWER (SDP) or a FAULT (JSON: `status`, `code`, `message`, `param`). Then AUDIO
# (16-bit samples at 16 kHz); LOST and SILENCE (a number of such samples): audio that the network lost, and silence that
# the client did not send; MESSAGE (a text of the client, bounded by the job's `message_bytes`); and at the end ENDED
# (text: why).
ANSWER, AUDIO, LOST, SILENCE, MESSAGE, ENDED = b"a", b"s", b"l", b"q", b"m", b"z"
SAMPLES = struct.Struct("<I")
# The longest offer. A browser's offer of audio and a data channel has 2 to 6 KB.
MAX_OFFER_BYTES = 64 * 1024
