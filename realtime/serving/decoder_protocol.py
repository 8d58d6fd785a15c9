"""What the gateway and the decoders of strangers' audio say to each other, over sockets between processes."""

from __future__ import annotations

import struct

# The program that has libav loaded, and forks a decoder for each file and each stream. The gateway does not load it.
PROGRAM = "realtime.serving.decoder_process"

# What the program is told: begin, with the line to the gateway and maybe a file, or end. Then a decoder's number.
ORDER = struct.Struct("<cQ")
BEGIN, END = b"b", b"e"
# What a decoder is told: so many bytes follow, none to go on, or no more will come.
PIECE = struct.Struct("<I")
NO_MORE = 0xFFFF_FFFF
# What a decoder answers to each of these: samples, of which more can be made without more bytes, or not, or never; or
# what is wrong. Then the length of it.
ANSWER = struct.Struct("<cI")
MORE, HUNGRY, DONE, FAULT = b"m", b"h", b"d", b"f"
