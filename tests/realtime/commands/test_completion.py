"""Completion scripts: they know every command, and a shell can use them."""

from __future__ import annotations

import subprocess

import pytest

from realtime import cli
from realtime.commands.completion import commands_of

COMMANDS = [command.name for command in commands_of(cli.build_parser())]


def test_completion_knows_every_command_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert cli.main(["completion", shell]) == 0
        script = capsys.readouterr().out
        assert all(command in script for command in COMMANDS)
        assert "output-dir" in script and "slo-final" in script
        assert "limits.max-sessions" not in script, "flags for every key would drown the others"


def test_bash_completes(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["completion", "bash"])
    script = capsys.readouterr().out
    ask = """
COMP_WORDS=(tickertape tr); COMP_CWORD=1; _tickertape; echo "${COMPREPLY[@]}"
COMP_WORDS=(tickertape transcribe --s); COMP_CWORD=2; _tickertape; echo "${COMPREPLY[@]}"
COMP_WORDS=(tickertape completion z); COMP_CWORD=2; _tickertape; echo "${COMPREPLY[@]}"
"""
    done = subprocess.run(["bash", "-c", script + ask], capture_output=True, text=True, timeout=30)
    assert done.stdout.splitlines() == ["transcribe", "--srt --speakers --server", "zsh"], done.stderr
