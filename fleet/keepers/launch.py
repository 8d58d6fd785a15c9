"""Starts a detached program and prints its process id: `python -m fleet.keepers.launch LOG PROGRAM ...`.

The program is no child of the keeper, so a Ray worker that kills its children when it ends does not kill it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys


def main() -> None:
    log, *command = sys.argv[1:]
    # Ray gives its workers a low priority, which engines and gateways must not inherit. Raising it needs a privilege.
    # A higher priority that the operator has set stays.
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
