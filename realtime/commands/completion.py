"""`tickertape completion`: prints a completion script for bash, zsh or fish.

The script is generated from the argument parser of `realtime/cli.py`, so it knows all commands, options and choices. It
has no state, and starts nothing.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from realtime.commands.terminal import out

EPILOG = """\
Examples:
  eval "$(tickertape completion bash)"                                   in ~/.bashrc
  eval "$(tickertape completion zsh)"                                    in ~/.zshrc, after compinit
  tickertape completion fish > ~/.config/fish/completions/tickertape.fish
"""


@dataclass(frozen=True, slots=True)
class Command:
    """A command for completion: its options as (flag, help), and the fixed values of its arguments."""

    name: str
    about: str
    options: tuple[tuple[str, str], ...]
    choices: tuple[str, ...]


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "completion",
        help="print a completion script for your shell",
        description="Print a script that completes commands, options and file names.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    write = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}[options.shell]
    out(write(commands_of(options.parser)))
    return 0


def commands_of(parser: argparse.ArgumentParser) -> list[Command]:
    """The commands of the parser, from argparse's private attributes: it has no public ones for this."""
    commands: list[Command] = []
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        about = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for name, child in action.choices.items():
            options = []
            choices: list[str] = []
            for part in child._actions:
                flags = [option for option in part.option_strings if option.startswith("--")]
                if flags and part.help != argparse.SUPPRESS:
                    options.append((flags[0], part.help or ""))
                elif not part.option_strings and part.choices:
                    choices += [str(choice) for choice in part.choices]
            commands.append(Command(name, about.get(name, ""), tuple(options), tuple(choices)))
    return commands


def bash_script(commands: list[Command]) -> str:
    cases = "\n".join(
        f'    {command.name}) words="{" ".join([name for name, _ in command.options] + list(command.choices))}" ;;'
        for command in commands
    )
    return f"""\
_tickertape() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" words
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join(command.name for command in commands)} --help --version" -- "$current"))
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{cases}
    *) words="" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  [ ${{#COMPREPLY[@]}} -gt 0 ] || COMPREPLY=($(compgen -f -- "$current"))
}}
complete -o filenames -F _tickertape tickertape"""


def zsh_script(commands: list[Command]) -> str:
    names = " ".join(_quoted(f"{command.name}:{command.about}") for command in commands)
    cases = "\n".join(_zsh_case(command) for command in commands)
    return f"""\
_tickertape() {{
  local -a commands options values
  if (( CURRENT == 2 )); then
    commands=({names})
    _describe 'command' commands
    return
  fi
  case "$words[2]" in
{cases}
  esac
  if (( $#values )); then
    _arguments $options "*:value:($values)"
  else
    _arguments $options '*:file:_files'
  fi
}}
compdef _tickertape tickertape"""


def _zsh_case(command: Command) -> str:
    options = " ".join(_quoted(f"{name}[{_plain(about)}]") for name, about in command.options)
    return f"    {command.name}) options=({options}); values=({' '.join(command.choices)}) ;;"


def fish_script(commands: list[Command]) -> str:
    lines = []
    for command in commands:
        lines.append(
            f"complete -c tickertape -n __fish_use_subcommand -f -a {command.name} -d {_quoted(_plain(command.about))}"
        )
        inside = f"-n '__fish_seen_subcommand_from {command.name}'"
        lines += [
            f"complete -c tickertape {inside} -l {name.removeprefix('--')} -d {_quoted(_plain(about))}"
            for name, about in command.options
        ]
        if command.choices:
            lines.append(f"complete -c tickertape {inside} -f -a {_quoted(' '.join(command.choices))}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _plain(text: str) -> str:
    """A help text without characters that have a meaning in completion scripts or in argparse."""
    return text.replace("%%", "%").replace("[", "(").replace("]", ")").replace(":", " -")
