"""The messages between the gateway (`isolated_decoder.py`) and the decoder processes (`decoder_process.py`)."""

from __future__ import annotations

import struct

# The module that is run as the decoder program. The gateway does not import it, so that libav is not loaded there.
PROGRAM = "realtime.serving.decoder_process"

# Kinds of orders (`fork_protocol.py`): BEGIN comes with the decoder's socket, and for an upload the file; PULL with the
# socket of a process that pulls a stream from the network (`pull_protocol.py`).
BEGIN, PULL = b"b", b"p"
# Gateway to decoder: the number of bytes that follow. 0 asks for the next samples, NO_MORE says that the stream ends.
PIECE = struct.Struct("<I")
NO_MORE = 0xFFFF_FFFF
# Decoder to gateway, one answer for each piece: kind, length in bytes of the content that follows. FAULT: the error.
# Else float32 samples, and MORE can be decoded without new bytes, HUNGRY needs new bytes, DONE is the end.
ANSWER = struct.Struct("<cI")
MORE, HUNGRY, DONE, FAULT = b"m", b"h", b"d", b"f"
