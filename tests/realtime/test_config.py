"""The configuration: wrong keys and values are named, and sources override each other in order."""

from __future__ import annotations

import json
import os
import pprint
import re
import subprocess
import traceback
import typing
from dataclasses import FrozenInstanceError, asdict, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from realtime.config import (
    RELOADABLE,
    AuthConfig,
    Config,
    ConfigError,
    Secret,
    ServerConfig,
    WebhooksConfig,
    WebrtcConfig,
    check,
    check_tls,
    hook_of,
    known_keys,
    load_config,
    take_over,
)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"server.prot": 1}, "did you mean 'server.port'"),
        ({"nothing.like.it": 1}, "unknown key 'nothing.like.it'"),
        ({"server.port": "many"}, "server.port must be a whole number"),
        ({"server.port": 1.5}, "server.port must be a whole number"),
        ({"server.port": 70_000}, "between 0 and 65535"),
        ({"server.host": 5}, "server.host must be text"),
        ({"server.drain_s": float("nan")}, "server.drain_s must be a finite number"),
        ({"server.drain_s": "1e999"}, "server.drain_s must be a finite number"),
        ({"server.drain_s": "nan"}, "server.drain_s must be a number in plain digits, not 'nan'"),
        ({"limits.idle_s": -1}, "limits.idle_s cannot be negative"),
        ({"auth.no_auth": "perhaps"}, "auth.no_auth must be true or false"),
        ({"auth.keys": [1]}, "auth.keys must be a list of texts"),
        ({"auth.keys": "short"}, "at least 8 characters"),
        ({"auth.keys": "long-enough", "auth.no_auth": True}, "contradicts"),
        ({"server.host": "0.0.0.0"}, "can be reached by other machines"),
        ({"server.host": "example.org"}, "can be reached by other machines"),
        ({"server.tls_cert": "x.pem"}, "belong together"),
        ({"server.log_level": "loud"}, "server.log_level must be one of debug, info, warning, error, not 'loud'"),
        (
            {"model.spare": True, "model.engines": "tcp://gpu1:5555"},
            "model.spare needs an engine that this server starts",
        ),
        ({"server.tls_cert": "x.pem", "server.tls_key": "y.pem"}, "there is no file 'x.pem'"),
        ({"server.drain_s": 10**400}, "server.drain_s is too large a number"),
        ({"session.turn_s": 1e308}, "session.turn_s must be at most 1e.15, not 1e.308"),
        ({"limits.audio_in_flight_s": "1e16"}, "limits.audio_in_flight_s must be at most 1e"),
        ({"limits.viewers": 10**30}, "limits.viewers must be at most 1e"),
        ({"server.handshake_s": 0}, "server.handshake_s must be at least 0.1, not 0: with less requests"),
        ({"server.handshake_s": "0.0000001"}, "server.handshake_s must be at least 0.1, not 1e-07"),
        ({"limits.message_bytes": 0}, "limits.message_bytes must be at least 256, not 0: with less every message"),
        ({"limits.control_bytes": "0"}, "limits.control_bytes must be at least 256, not 0"),
        ({"limits.outbox_events": "1"}, "limits.outbox_events must be at least 8, not 1"),
        ({"limits.outbox_bytes": 0}, "limits.outbox_bytes must be at least 4096, not 0"),
        ({"limits.outbox_characters": 1}, "limits.outbox_characters must be 0 or at least 4096"),
        ({"limits.upload_bytes": 0}, "limits.upload_bytes must be at least 1, not 0"),
        ({"limits.upload_s": 0}, "limits.upload_s must be at least 1, not 0"),
        ({"limits.spool_bytes": 0}, "limits.spool_bytes must be at least 1, not 0"),
        ({"limits.uploads": 0}, "limits.uploads must be at least 1"),
        ({"auth.keys": ["long-enough\n"]}, "auth.keys: a key must be printable ASCII"),
        ({"auth.keys": [" long-enough"]}, "auth.keys: a key must be printable ASCII"),
        ({"auth.keys": ["schlüssel"]}, "auth.keys: a key must be printable ASCII"),
        ({"model.device": "tpu"}, "model.device must be auto, cpu, cuda, or cuda:1 for the second GPU, not 'tpu'"),
        ({"model.device": "cuda:-1"}, "model.device must be auto"),
        ({"model.device": ""}, "model.device must be auto"),
        ({"model.engines": "gpu1"}, "model.engines: 'gpu1' is not an engine address"),
        ({"model.engines": "http://gpu1:5555"}, "is not an engine address"),
        ({"model.engines": "tcp://gpu1"}, "is not an engine address"),
        ({"model.engines": "tcp://gpu 1:5555"}, "is not an engine address"),
        ({"model.engines": "tcp://gpu1:5555,tcp://gpu2:99999"}, "'tcp://gpu2:99999' is not an engine address"),
        ({"model.engines": ["ipc://"]}, "is not an engine address"),
    ],
)
def test_wrong_flag_names_the_key_and_the_fix(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match="(?s).*" + said.replace("(", r"\(")):
        load_config(environment={}, flags=flags)


@pytest.mark.parametrize("address", ["ipc:///run/engine", "tcp://gpu1:5555", "tcp://10.0.0.7:1", "tcp://[::1]:65535"])
def test_addresses_of_engines_are_taken(address: str) -> None:
    assert load_config(environment={}, flags={"model.engines": [address]}).model.engines == (address,)


def test_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    file = tmp_path / "tickertape.toml"
    file.write_text("[server]\nport = 9000", encoding="utf-8-sig")
    assert load_config(file, environment={}).server.port == 9000


def test_wrong_environment_variable_names_the_closest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'TICKERTAPE_SERVER_PORT'"):
        load_config(environment={"TICKERTAPE_SERVR_PORT": "1"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[server]\nprot = 1", "unknown key 'server.prot'; did you mean 'server.port'"),
        ("[sever]\nport = 1", "unknown key 'sever'; did you mean 'server'"),
        ("server = 1", "server must be a section"),
        ("[server", "is not valid TOML"),
        ("[server]\nport = " + "9" * 5000, "is not valid TOML"),
        ("a = " + "[" * 5000 + "]" * 5000, "is nested too deeply"),
        ("[limits]\nmax_sessions = true", "limits.max_sessions must be a whole number"),
        ("[limits]\nmax_load = 1.5", "limits.max_load is a share and cannot be more than 1, but is 1.5"),
    ],
)
def test_wrong_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "tickertape.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_config(file, environment={})


NOT_PLAIN = ["٣", "1_000", "１", "²", "+5", "0x10", "010", "", " ", "- 1", "1e", "five", "1" * 5000]


@pytest.mark.parametrize("text", NOT_PLAIN)
def test_numbers_are_written_in_plain_digits_in_every_source(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tickertape.toml"
    for key, kind in (("limits.max_sessions", "a whole number"), ("limits.upload_s", "a number")):
        section, name = key.split(".")
        file.write_text(f'[{section}]\n{name} = "{text}"\n')
        for source in (
            {"path": file},
            {"environment": {f"TICKERTAPE_{section}_{name}".upper(): text}},
            {"flags": {key: text}},
        ):
            with pytest.raises(ConfigError, match=f"^{key} must be {kind} in plain digits, not '"):
                load_config(**{"environment": {}, **source})


def test_ways_to_write_a_number_in_a_setting(tmp_path: Path) -> None:
    file = tmp_path / "tickertape.toml"
    file.write_text('[limits]\nmax_sessions = "1000"\nuploads = 1_000\nupload_s = "1e3"\nidle_s = 5\n')
    limits = load_config(file, environment={"TICKERTAPE_LIMITS_UPLOADS_WAITING": " 7\r\n"}).limits
    assert (limits.max_sessions, limits.uploads, limits.upload_s, limits.idle_s) == (1000, 1000, 1000.0, 5.0)
    assert limits.uploads_waiting == 7, "files of environment variables have spaces and returns at the ends of lines"


LONG = ["x" * 10_000, "\x1b[2J\n" * 5_000, "é" * 10_000, ["x" * 10_000], ["x"] * 10_000, {"x": "x" * 10_000}]


@pytest.mark.parametrize("value", [*LONG, 10**4000, -(10**4000), "9" * 4000, "-" + "9" * 18], ids=lambda _: "")
def test_an_error_shows_the_beginning_of_a_wrong_value(tmp_path: Path, value: Any) -> None:
    errors = []
    for key in known_keys():
        try:
            load_config(environment={}, flags={key: value})
        except ConfigError as error:
            errors.append(str(error))
    assert errors
    for text in errors:
        assert len(text) < 300 and text.isprintable(), text


def test_an_error_shows_the_beginning_of_a_wrong_name(tmp_path: Path) -> None:
    file = tmp_path / "tickertape.toml"
    file.write_text(f"[server]\n{'x' * 10_000} = 1\n")
    sources: list[dict[str, Any]] = [
        {"path": file},
        {"path": tmp_path / ("x" * 4_000)},
        {"flags": {"server.x" + "\n" * 10_000: 1}},
        {"environment": {"TICKERTAPE_" + "X\n" * 10_000: "1"}},
    ]
    for source in sources:
        with pytest.raises(ConfigError) as error:
            load_config(**{"environment": {}, **source})
        assert len(str(error.value)) < 300 + len(str(tmp_path)) and str(error.value).isprintable()


@pytest.mark.parametrize("key", ["fleet.table", "fleet.figures"])
def test_a_path_at_which_the_fleet_can_write_no_file_is_refused(tmp_path: Path, key: str) -> None:
    (tmp_path / "file").write_text("{}")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "file" / "table.json", tmp_path / ("x" * 300)):
        with pytest.raises(
            ConfigError, match=f"^{key}: .*set the path of a JSON file that the fleet's supervisor writes$"
        ):
            load_config(environment={}, flags={key: str(path)})
    for path in (tmp_path / "file", tmp_path / "comes later", tmp_path / "folder too" / "table.json"):
        load_config(environment={}, flags={key: str(path)})


def test_file_of_streams_must_be_a_file_and_needs_names_of_keys_that_last(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / ("x" * 300)):
        with pytest.raises(ConfigError, match=r"^server.stream_file: .*set the path of a file$"):
            load_config(environment={}, flags={"server.stream_file": str(path)})
    flags = {"server.stream_file": str(tmp_path / "streams.json"), "auth.keys": ["a-long-secret"]}
    with pytest.raises(ConfigError, match=r"^server.stream_file needs auth.secret: "):
        load_config(environment={}, flags=flags)
    load_config(environment={}, flags=flags | {"auth.secret": "a secret for tokens, long enough to be one"})


def test_no_text_contains_a_nul_character(tmp_path: Path) -> None:
    """Only a file can contain one. Paths, names and addresses cannot: each part of the server fails in its own way."""
    hints = {
        f"{section.name}.{key.name}": typing.get_type_hints(type(getattr(Config(), section.name)))[key.name]
        for section in fields(Config)
        for key in fields(getattr(Config(), section.name))
    }
    texts = {key: kind for key, kind in hints.items() if kind not in (int, float, bool)}
    assert {"fleet.table", "server.host", "model.engines", "auth.keys", "auth.secret"} <= set(texts)
    file = tmp_path / "tickertape.toml"
    for key, kind in texts.items():
        section, name = key.split(".")
        value = '["mark\\u0000x"]' if "tuple" in str(kind) else '"mark\\u0000x"'
        file.write_text(f"[{section}]\n{name} = {value}\n")
        with pytest.raises(ConfigError, match=f"^{key} contains a NUL character; remove it$"):
            load_config(file, environment={})


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load_config(tmp_path / "none.toml", environment={})


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "tickertape.toml"
    file.write_text('[server]\nport = 1\ndrain_s = 1\nhost = "::1"\n[model]\naliases = ["a", "b"]\n')
    environment = {"TICKERTAPE_SERVER_PORT": "2", "TICKERTAPE_SERVER_DRAIN_S": "2", "HOME": "/"}
    config = load_config(file, environment, {"server.port": 3})
    assert (config.server.port, config.server.drain_s, config.server.host) == (3, 2.0, "::1")
    assert config.model.aliases == ("a", "b")


def test_keys_make_other_addresses_possible_and_so_does_saying_so() -> None:
    with_keys = load_config(
        environment={"TICKERTAPE_AUTH_KEYS": "first-key, second-key"}, flags={"server.host": "0.0.0.0"}
    )
    assert with_keys.auth.keys == ("first-key", "second-key")
    assert load_config(environment={}, flags={"server.host": "0.0.0.0", "auth.no_auth": "yes"}).auth.no_auth
    assert load_config(environment={}, flags={"server.host": "localhost"}).server.host == "localhost"


def test_configuration_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Config().server.port = 1  # type: ignore[misc]


def test_a_silence_that_is_cut_out_is_longer_than_any_delay() -> None:
    assert load_config(environment={}, flags={"model.cut_silence_s": "0"}).model.cut_silence_s == 0
    with pytest.raises(ConfigError, match=r"model.cut_silence_s must be 0 or at least 0.5"):
        load_config(environment={}, flags={"model.cut_silence_s": "0.2"})


# Secrets

MARK = "mark-7f3a9c-do-not-show"


def test_nothing_that_shows_a_configuration_shows_its_secrets() -> None:
    config = Config(auth=AuthConfig(keys=(MARK, f"{MARK}-2"), secret=MARK))
    shown = [repr(config), str(config), f"{config.auth.secret}", f"{config.auth.keys}"]
    shown += [repr(asdict(config)), pprint.pformat(config), pprint.pformat(asdict(config)), str(vars_of(config.auth))]
    assert not [text for text in shown if MARK in text]
    for dump in (json.dumps, msgspec.json.encode):
        with pytest.raises(TypeError):
            dump(asdict(config))
    assert config.auth.keys[0].reveal() == config.auth.secret.reveal() == MARK


def vars_of(section: object) -> dict[str, Any]:
    return {item.name: getattr(section, item.name) for item in fields(section)}  # type: ignore[arg-type]


def test_every_setting_whose_name_says_that_it_is_secret_has_the_type_of_a_secret() -> None:
    sections = {"auth": AuthConfig, "webhooks": WebhooksConfig}
    hints = {
        f"{section}.{name}": kind
        for section, made in sections.items()
        for name, kind in typing.get_type_hints(made).items()
    }
    secret = {key for key, kind in hints.items() if kind in (Secret, tuple[Secret, ...])}
    webhooks = {"webhooks.secret", "webhooks.on_final"}
    assert secret == {"auth.keys", "auth.secret", "auth.twilio_auth_token", *webhooks}
    named = {key for key in known_keys() if re.search(r"secret$|\.keys?$|password|token", key)}
    # Its entries may contain keys.
    assert named | {"webhooks.on_final"} == secret, "a new setting that holds a secret needs the type Secret"


@pytest.mark.parametrize(
    "text",
    [
        f'[auth]\nkeys = ["{MARK}"',
        f"[auth]\nkeys = {MARK}",
        f'[auth]\nkeys = [["{MARK}"]]',
        f'[auth]\nkeys = {{ "{MARK}" = true }}',
        f'[auth]\nsecret = ["{MARK}"]',
        f'[auth]\nsecret = {{ of = "{MARK}" }}',
        f'[auth]\nsecret = "{MARK}" "{MARK}"',
        f'auth = "{MARK}"',
        f'[auth]\nkeys = ["{MARK}"]\nno_auth = true',
        f'[auth]\nsecret = "{MARK}"\n[fleet]\nsecret_file = "x"',
    ],
)
def test_an_error_of_the_configuration_does_not_show_a_secret(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tickertape.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(file, environment={})
    assert MARK not in "".join(traceback.format_exception(refused.value)).replace(text, "")


def test_a_secret_compares_by_its_text() -> None:
    assert Secret("a") == Secret("a") == "a" and Secret("a") != Secret("b") and Secret("a") != 1
    assert len(Secret("abc")) == 3 and not Secret() and hash(Secret("a")) == hash(Secret("a"))
    assert Secret("\udcff") != Secret("é")


# Reading it again


def test_every_setting_that_can_be_reloaded_exists() -> None:
    assert set(known_keys()) >= RELOADABLE
    assert not {"server.port", "server.host", "server.workers", "auth.secret", "fleet.table"} & RELOADABLE


def test_what_can_be_reloaded_changes_in_place_and_the_rest_is_named() -> None:
    config = Config()
    limits = config.limits
    new = load_config(
        environment={}, flags={"limits.max_sessions": 7, "auth.keys": MARK, "server.port": 9, "model.name": "x"}
    )
    changes = take_over(config, new)
    assert changes.taken_over == ("auth.keys", "limits.max_sessions")
    assert changes.need_restart == ("server.port", "model.name")
    assert str(changes) == (
        "changed: auth.keys, limits.max_sessions; changed and needs a restart: server.port, model.name"
    )
    assert str(take_over(config, replace(config, limits=replace(limits, uploads=9)))) == (
        "changed and needs a restart: limits.uploads"
    )
    assert limits.max_sessions == 7, "holders of the section see the change"
    assert config.auth.keys == (MARK,) and config.server.port == 8000 and config.model.name == "default"
    assert str(take_over(config, config)) == "nothing has changed"


def test_a_configuration_that_is_good_alone_is_refused_beside_what_stays_as_it_is() -> None:
    """The new one has no keys, on a loopback address. The address needs a restart, and others can reach the old one."""
    config = Config(server=ServerConfig(host="0.0.0.0"), auth=AuthConfig(keys=(MARK,)))
    new = load_config(environment={}, flags={"limits.max_sessions": 7})
    with pytest.raises(ConfigError, match=r"server.host '0.0.0.0' can be reached by other machines"):
        take_over(config, new)
    assert config.auth.keys == (MARK,) and config.limits.max_sessions == 0, "nothing has changed"


# Certificates


def test_a_certificate_that_cannot_be_used_is_one_sentence_with_the_way_out(tmp_path: Path) -> None:
    def pair(name: str, *options: str) -> tuple[str, str]:
        cert, key = str(tmp_path / f"{name}.cert"), str(tmp_path / f"{name}.key")
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "1", "-subj", "/CN=x"]
        subprocess.run([*command, *options, "-keyout", key, "-out", cert], check=True, capture_output=True)
        return cert, key

    one, other = pair("one", "-nodes"), pair("other", "-nodes")
    encrypted = pair("encrypted", "-passout", "pass:something")
    noise = tmp_path / "noise"
    noise.write_text("no PEM at all")
    check_tls(ServerConfig(tls_cert=one[0], tls_key=one[1]))
    check_tls(ServerConfig())
    for cert, key, said in (
        (one[0], other[1], "is not the key of the certificate"),
        (*encrypted, "is encrypted; use a key without a password"),
        (str(noise), one[1], "must be PEM files"),
        (one[0], str(noise), "must be PEM files"),
        (one[0], str(tmp_path), "server.tls_key: cannot read"),
        (str(tmp_path / "gone"), one[1], "server.tls_cert: cannot read"),
    ):
        with pytest.raises(ConfigError, match=said) as refused:
            check_tls(ServerConfig(tls_cert=cert, tls_key=key))
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ({"on_final": ["ftp://x.example/"]}, r"entry 1 must be 'URL' or 'KEY URL'"),
        ({"on_final": ["https://x.example/", "https://u:p@x.example/"]}, "entry 2 must be"),
        ({"on_final": ["https://x.example/"]}, r"webhooks\.secret must have at least 16"),
        ({"on_final": ["no-such-key https://x.example/"], "secret": "s" * 16}, "key of entry 1 is not in auth.keys"),
        ({"hosts": ["not a host"]}, "webhooks.hosts"),
        ({"hosts": ["a.example:0"]}, "webhooks.hosts"),
        ({"hosts": ["a.example:70000"]}, "webhooks.hosts"),
        ({"hosts": ["a.example:http"]}, "webhooks.hosts"),
        ({"hosts": ["a.example:²"]}, "webhooks.hosts"),
        ({"per_session": True, "secret": "s" * 16}, r"webhooks\.per_session needs webhooks\.hosts"),
        ({"queue_bytes": 10}, r"webhooks\.queue_bytes must be at least 4096"),
        ({"timeout_s": 0}, r"webhooks\.timeout_s must be at least 0\.1"),
    ],
)
def test_webhooks_that_cannot_work_are_refused_without_showing_keys(
    tmp_path: Path, hooks: dict[str, Any], message: str
) -> None:
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in hooks.items())
    (tmp_path / "x.toml").write_text(f"[webhooks]\n{lines}\n")
    with pytest.raises(ConfigError, match=message) as error:
        load_config(tmp_path / "x.toml", {})
    assert "no-such-key" not in str(error.value) and "u:p" not in str(error.value)


def test_webhooks_of_a_key_are_read_from_the_environment() -> None:
    environment = {
        "TICKERTAPE_AUTH_KEYS": "a-long-key",
        "TICKERTAPE_WEBHOOKS_ON_FINAL": "a-long-key https://x.example/a, https://y.example/",
        "TICKERTAPE_WEBHOOKS_SECRET": "s" * 16,
    }
    hooks = load_config(None, environment).webhooks
    assert [hook_of(entry.reveal()) for entry in hooks.on_final] == [
        ("a-long-key", "https://x.example/a"),
        ("", "https://y.example/"),
    ]
    assert "a-long-key" not in repr(hooks)


@pytest.mark.parametrize(
    ("webrtc", "why"),
    [
        ({"addresses": ("example.org",)}, "must be an address"),
        ({"addresses": ("203.0.113.7", "::1")}, "all IPv4 or all IPv6"),
        ({"ports": "80-90"}, "webrtc.ports"),
        ({"ports": "50100-50000"}, "webrtc.ports"),
        ({"ports": "many"}, "webrtc.ports"),
        ({"connect_s": 0.5}, "webrtc.connect_s"),
    ],
)
def test_settings_of_webrtc_that_cannot_work_are_refused(webrtc: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        check(Config(webrtc=WebrtcConfig(**webrtc)))
