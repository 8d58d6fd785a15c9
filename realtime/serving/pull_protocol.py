"""The messages of a pulling process (`pull_process.py`) to the process that started it (`pulled_audio.py`)."""

from __future__ import annotations

import struct

# To the process: the job, one line of JSON with `url`, `open_s` and `read_s`, the longest waits for the network;
# and `hosts`, the allowed hosts, or null for the command of a user, who may contact any host.
MAX_JOB_BYTES = 64 * 1024
# From the process: kind, length in bytes of the content that follows.
FRAME = struct.Struct("<cI")
# OPENED: JSON with `seconds` and `keeps_time` of audio.network.StreamKind. BLOCK: START, then float32 samples.
# FAULT: JSON with `text`, and `final` if another attempt is useless. DONE: the stream has ended, without content.
OPENED, BLOCK, FAULT, DONE = b"o", b"b", b"f", b"d"
# `start` and `clock_shift` of audio.network.Block.
START = struct.Struct("<dd")
# The longest message: a block is 0.2 s of audio and one packet more.
MAX_FRAME_BYTES = 4 * 1024 * 1024
