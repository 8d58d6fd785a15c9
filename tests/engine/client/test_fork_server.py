"""The fork server is started without slow imports, and its processes have the engine's modules from their beginning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FORKED = """
import multiprocessing, sys
from engine.client.fork_server import start_fork_server

def loaded(answers):
    answers.put([name for name in ("torch", "engine.runner.load", "engine.server.main") if name in sys.modules])

if __name__ == "__main__":
    slow = {"torch", "numpy", "zmq", "msgspec"} & set(sys.modules)
    assert not slow, slow
    start_fork_server()
    start_fork_server()  # it runs already
    context = multiprocessing.get_context("forkserver")
    answers = context.Queue()
    process = context.Process(target=loaded, args=(answers,))
    process.start()
    print(answers.get(timeout=100))
    process.join()
"""


def test_processes_have_the_modules_that_were_imported_in_advance(tmp_path: Path) -> None:
    script = tmp_path / "forked.py"
    script.write_text(FORKED)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "['torch', 'engine.runner.load', 'engine.server.main']\n"
