"""The command line itself: wrong use is refused in one line, help teaches and is quick, exit codes can be relied on."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from realtime import cli
from realtime.bench import clients, load_test
from realtime.commands import completion, pull
from realtime.commands.terminal import CommandFailed, UsageError, read_config
from realtime.config import Config, load_config
from tests.realtime.commands.conftest import sound, write_wav

ROOT = Path(__file__).parents[2]
COMMANDS = [command.name for command in completion.commands_of(cli.build_parser())]


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_output_is_no_error(closed: str) -> None:
    command = f'"{sys.executable}" -m realtime.cli check-config {closed}'
    assert subprocess.run(["bash", "-c", command], cwd=ROOT, check=False).returncode == 0


def test_no_command_shows_the_help_and_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "tickertape serve" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["listen"],
        ["transcribe"],
        ["transcribe", "--jsn", "x.wav"],
        ["serve", "--limits.max-session", "3"],
        ["engine"],
        ["bench", "--streams", "0"],
        ["bench", "--hold", "1"],
        ["bench", "--rate", "1"],
        ["bench", "--rate", "192001"],
        ["bench", "--warm-up", "nan"],
        ["bench", "--slo-final", "-1"],
        ["completion", "powershell"],
    ],
)
def test_wrong_arguments_exit_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2


def numbers_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The options and arguments of all commands whose value is converted, apart from paths."""
    found = [action for action in parser._actions if action.type not in (None, Path)]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [each for command in action.choices.values() for each in numbers_of(command)]
    return found


def test_numbers_of_options_are_written_in_plain_digits() -> None:
    numbers = numbers_of(cli.build_parser())
    assert len(numbers) > 15
    for action in numbers:
        assert callable(action.type)
        for text in ("٣", "1_000", "１０", "nan", "x" * 5000):
            with pytest.raises(argparse.ArgumentTypeError, match="in plain digits, not '") as refused:
                action.type(text)
            assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["serve", "--port", "many"], 2, "server.port must be a whole number"),
        (["serve", "--host", "0.0.0.0"], 2, "set auth.keys, or auth.no_auth"),
        (["serve", "--config", "/no/such.toml"], 2, "cannot read the configuration file"),
        (["check-config", "/no/such.toml"], 2, "cannot read the configuration file"),
        (["engine", "--listen", "somewhere"], 2, "use ipc:///path/to/socket or tcp://host:port"),
        (["bench", "ftp://host"], 2, "is not the address of a server"),
        (["bench", ""], 2, "'' is not the address of a server; write http://HOST:PORT"),
        (["bench", "http://host:99999"], 2, "has an invalid port"),
        (["bench", "--output", "/proc/bench"], 2, "cannot write to /proc/bench: "),
        (["status", ""], 2, "'' is not the address of a server"),
        (["status", "http://"], 2, "is not the address of a server"),
        (["mic", "--server", ""], 2, "'' is not the address of a server"),
        (["transcribe", "--server", "", "x.wav"], 2, "'' is not the address of a server"),
        (["transcribe", "--server", "", "--live", "x.wav"], 2, "'' is not the address of a server"),
        (["transcribe", "--server", "gopher://host", "x.wav"], 2, "is not the address of a server"),
        (["serve", "--device", "tpu"], 2, "model.device must be auto, cpu, cuda, or cuda:1 for the second GPU"),
        (["serve", "--model", "no-such-model"], 2, "Known names: moonshine-tiny"),
        (["bench", "--manifest", "/no/such.jsonl"], 1, "cannot read the manifest"),
        (["bench", "--warm-up", "60"], 2, "--warm-up must be shorter"),
        (["pull", "no-such-model"], 2, "Known names: moonshine-tiny"),
        (["transcribe", "/no/such.wav"], 1, "there is no such file"),
        (["doctor", "--model", "no-such-model"], 1, ""),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == code
    error = capsys.readouterr().err
    assert said in error and error.count("\n") <= 1 and "Traceback" not in error


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (CommandFailed("nothing\n  works"), 1, "error: nothing works"),
        (UsageError("not so"), 2, "error: not so"),
        (FileNotFoundError(2, "No such file or directory", "x.wav"), 1, "error: x.wav: No such file or directory"),
        (ZeroDivisionError("by zero"), 1, "unexpected ZeroDivisionError: by zero (set TICKERTAPE_DEBUG=1"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_a_command_raises_becomes_an_exit_code(
    error: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(options: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(pull, "run_models", fail)
    assert cli.main(["models"]) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["pull", "sample-two-cities"], ["serve", "--model", "moonshine-tiny"], ["bench", "127.0.0.1:9"]]
)
def test_a_cache_folder_that_cannot_be_written_is_said_before_anything_is_fetched(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TICKERTAPE_CACHE", str(tmp_path / "file" / "cache"))
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: cannot write to {tmp_path}/file/cache: ") and error.count("\n") == 1
    assert error.endswith("; name another TICKERTAPE_CACHE\n")


def test_bench_without_a_server_says_so_before_it_plays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = write_wav(tmp_path / "clip.wav", sound(1.0))
    manifest = tmp_path / "speech.jsonl"
    manifest.write_text(f'{{"path": "{clip.name}", "text": "one two", "seconds": 1.0}}')
    monkeypatch.setattr(clients, "play_all", lambda *_: pytest.fail("a run was started"))
    monkeypatch.setattr(load_test, "play_all", lambda *_: pytest.fail("a run was started"))
    output = ["--output", str(tmp_path / "out")]
    assert cli.main(["bench", "http://127.0.0.1:9", "--manifest", str(manifest), *output]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "127.0.0.1:9" in error and error.count("\n") == 1


def test_debugging_shows_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TICKERTAPE_DEBUG", "1")
    with pytest.raises(Exception, match="Known names"):
        cli.main(["pull", "no-such-model"])


def test_help_teaches_by_examples_and_loads_nothing_heavy() -> None:
    """In a separate process, where torch is not loaded yet."""
    script = f"""
import contextlib, io, sys
from realtime.cli import main
for command in {COMMANDS!r}:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([command, "--help"])
    assert "usage: tickertape " + command in text.getvalue()
    assert command == "models" or "Examples:" in text.getvalue(), command
assert main(["check-config"]) == 0
assert main(["transcribe", "/no/such/file"]) == 1
loaded = {{"torch", "numpy", "av", "zmq", "uvicorn", "websockets", "rich"}} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tickertape ")


def test_models_are_listed_by_the_names_that_pull_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("moonshine-tiny", "whisper-base.en", "sample-two-cities"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [["--version"], ["models"], ["completion", "bash"]])
def test_output_that_cannot_be_written_is_one_line_and_no_stack_trace(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "realtime.cli", *arguments]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    sentence = "error: cannot write to standard output: No space left on device"
    assert done.returncode == 1 and done.stderr.splitlines() == [sentence]


# Configuration


def test_check_config_prints_what_is_in_force_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tickertape.toml"
    file.write_text('[server]\nport = 9000\n[auth]\nkeys = ["a-long-secret"]\n[model]\nname = "a \\"b\\" \\\\c"\n')
    monkeypatch.setenv("TICKERTAPE_LIMITS_MAX_SESSIONS", "7")
    assert cli.main(["check-config", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "a-long-secret" not in shown
    tree = tomllib.loads(shown)
    assert tree["server"]["port"] == 9000 and tree["limits"]["max_sessions"] == 7
    assert tree["model"]["name"] == 'a "b" \\c'
    assert load_config(environment={}, flags={}).server.port == 8000


@pytest.mark.parametrize("between", ["", "\n"])
def test_no_command_shows_a_secret_whatever_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], between: str
) -> None:
    """`between`: a key with a line break in it, which no header can carry."""
    mark = "mark-7f3a9c-do-not-show"
    file = tmp_path / "tickertape.toml"
    file.write_text(f'[auth]\nkeys = ["{mark}"]\nsecret = "{mark}"\n')
    monkeypatch.setenv("TICKERTAPE_API_KEY", f"{mark}{between}{mark}")
    url = f"http://user:{mark}@127.0.0.1:9/v1/realtime?resume={mark}"
    for arguments in (
        ["check-config", str(file)],
        ["serve", "--config", str(file), "--port", "many"],
        ["serve", "--auth.key", mark],
        ["serve", f"--auth.key={mark}"],
        ["serve", "--auth.keys", mark, "--no-auth"],
        ["status", "--ready", "http://127.0.0.1:9"],
        ["status", "--ready", url],
        ["status", "--json", url.replace("http", "ftp")],
        ["bench", url, "--streams", "1", "--hold", "2", "--warm-up", "1", "--output", str(tmp_path)],
        ["bench", url.replace("http", "ftp"), "--streams", "1", "--output", str(tmp_path)],
        ["transcribe", "--server", url, str(file)],
        ["transcribe", "--live", "--server", url, str(file)],
    ):
        try:
            cli.main(arguments)
        except SystemExit as stopped:
            assert stopped.code == 2
        shown = capsys.readouterr()
        assert mark not in shown.out + shown.err, arguments
        assert shown.err, f"{arguments}: the command said nothing at all"


def test_the_documented_file_has_every_key_with_its_default() -> None:
    path = ROOT / "docs" / "tickertape.toml"
    assert load_config(path, environment={}) == Config()
    text = path.read_text()
    tree = tomllib.loads(text)
    for key in (key.split(".") for key in _known_keys()):
        assert key[1] in tree[key[0]] or f"# {key[1]} = " in text, key


def _known_keys() -> list[str]:
    from realtime.config import known_keys

    return known_keys()


def test_an_engine_takes_every_setting_of_the_model_that_serve_takes(tmp_path: Path) -> None:
    from engine.options import EngineConfig
    from realtime.commands.serve import config_of

    file = tmp_path / "tickertape.toml"
    file.write_text("[model]\nkv_8bit = true\nblank_guard = false\n[limits]\nmax_sessions = 3\n")
    arguments = ["--device", "cuda:1", "--max-streams", "7", "--threads", "2", "--model.decoder-window", "512"]
    options = cli.build_parser().parse_args(["engine", "--listen", "ipc:///x", "--config", str(file), *arguments])
    settings = EngineConfig.from_settings("voxtral", config_of(options).model)
    assert settings == EngineConfig("voxtral", "cuda:1", 7, 2, 512, True, False)
    for name in EngineConfig.setting_names():
        cli.build_parser().parse_args(["engine", "--listen", "ipc:///x", f"--model.{name.replace('_', '-')}", "1"])


def test_debugging_is_the_lowest_level_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_config(None, {}).server.log_level == "info"
    monkeypatch.setenv("TICKERTAPE_DEBUG", "1")
    assert read_config(None, {}).server.log_level == "debug"
    assert read_config(None, {"server.log_level": "error"}).server.log_level == "error", "what was said counts"


def test_flags_of_serve_reach_the_configuration() -> None:
    from realtime.commands.serve import config_of

    arguments = ["--port", "9", "--engine", "tcp://a:1,tcp://b:2", "--max-streams", "3", "--limits.idle-s", "5"]
    options = cli.build_parser().parse_args(["serve", "--host", "0.0.0.0", "--no-auth", *arguments])
    config = config_of(options)
    assert (config.server.host, config.server.port, config.auth.no_auth) == ("0.0.0.0", 9, True)
    assert config.model.engines == ("tcp://a:1", "tcp://b:2") and config.model.max_streams == 3
    assert config.limits.idle_s == 5
