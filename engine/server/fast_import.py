"""Imports the engine's modules and torch faster than plain imports would. Imported for this effect, before torch.

While it imports, garbage collection is off, and without an NVIDIA device a part of torch that only its compilers need
is left out. The fork server (`engine/client/fork_server.py`) imports this module in advance, so that engines start as
forks with everything loaded; a process that runs an engine itself (`tickertape engine`, `EngineThread`) imports it
first. If torch is already imported, it does nothing.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import ModuleType

# Descriptions of operators for compilers of torch, which an engine on a CPU does not use: a third of torch's imports.
_NOT_NEEDED = "torch._meta_registrations"

if "torch" not in sys.modules:
    # With a GPU the whole of torch is imported: libraries for it may compile.
    if not Path("/dev/nvidiactl").exists():
        sys.modules[_NOT_NEEDED] = ModuleType(_NOT_NEEDED)
    # Collections would walk over all modules again and again, and free nothing.
    gc.disable()
    try:
        import engine.server.main  # noqa: F401
    finally:
        # Modules stay: no later collection looks at them, and forked processes share their memory.
        gc.freeze()
        gc.enable()
