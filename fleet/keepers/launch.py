"""Starts a program that is nobody's child, and prints its process id: `python -m fleet.keepers.launch LOG PROGRAM ...`.

Whoever ends its own children when it ends, as Ray's workers do, does not find this one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys


def main() -> None:
    log, *command = sys.argv[1:]
    # Ray gives its workers a low priority. Speech must not have it; taking it off is allowed to few. A higher one that
    # the operator gave stays.
    if os.getpriority(os.PRIO_PROCESS, 0) > 0:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
    with open(log, "ab") as file:
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    sys.stdout.write(f"{started.pid}\n")


if __name__ == "__main__":
    main()
