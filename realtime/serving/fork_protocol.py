"""The orders of the gateway (`forking_program.py`) to a program that forks (`forks.py`)."""

from __future__ import annotations

import struct

# Kind, number of the process. END kills a process. Every other kind begins one, and comes with file descriptors: the
# socket of the new process, and for an upload the file.
ORDER = struct.Struct("<cQ")
END = b"e"
