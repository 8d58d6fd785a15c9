"""The configuration of a server: all sections, keys and defaults, and how they are read and checked.

`load_config` reads a TOML file, the environment and command-line flags. Flags override the environment, which overrides
the file. Every key has the same name everywhere: `limits.max_sessions` is `[limits] max_sessions` in the file,
`TICKERTAPE_LIMITS_MAX_SESSIONS` in the environment, and `--limits.max-sessions` as a flag. An unknown key is an error
that names the most similar key. A process has one `Config`, which all parts share; only `take_over` changes it, when
the configuration is reloaded.
"""

from __future__ import annotations

import difflib
import hmac
import os
import re
import socket
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from ipaddress import ip_address, ip_network
from pathlib import Path
from stat import S_ISREG
from types import UnionType
from typing import Any

from engine.logs import FORMATS
from engine.toml_file import read_toml
from realtime.text_values import listed_host, plain_float, plain_int, web_url

ENVIRONMENT_PREFIX = "TICKERTAPE_"
# Shorter turns would cut ordinary speech.
MIN_TURN_S = 60.0
MIN_SECRET = 16
# The origin of a page as browsers write it: scheme, name or address, and the port unless it is the default one.
ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]+)?")
# Names and IP addresses.
HOST = re.compile(r"[A-Za-z0-9_.-]+|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*")
# Addresses of engines: ipc on the same machine, tcp on another one, inproc in the same process.
ENGINE = re.compile(r"ipc://.+|inproc://.+|tcp://[^\s:/]+:([0-9]{1,5})|tcp://\[[0-9A-Fa-f:.]+\]:([0-9]{1,5})")
# Devices that models run on.
DEVICE = re.compile(r"auto|cpu|cuda(?::(?:0|[1-9][0-9]{0,2}))?")
# More processes would only compete for the processors.
MOST_WORKERS = 64
# Pauses inside sentences are shorter. A stream computes at least until its last word is complete in any case.
MIN_CUT_SILENCE_S = 0.5
# Largest share of the free host memory for parked streams.
MAX_PARKED_SHARE = 0.9
# The smallest values of settings for which 0 does not mean "no limit", and what would happen with less.
MINIMUMS = {
    "server.handshake_s": (0.1, "requests would be cut off before they arrive"),
    "limits.message_bytes": (256, "every message of a client would be refused"),
    "limits.control_bytes": (256, "every message that is not audio would be refused"),
    "limits.outbox_events": (8, "every client would be closed as one that does not read"),
    "limits.outbox_bytes": (4096, "every client would be closed as one that does not read"),
    "limits.upload_bytes": (1, "every file would be refused"),
    "limits.upload_s": (1.0, "every file would be refused"),
    "limits.spool_bytes": (1, "every file would be refused"),
    "limits.uploads": (1, "no file would ever be transcribed"),
    "webhooks.timeout_s": (0.1, "every webhook would fail"),
    "webhooks.queue_events": (1, "every webhook would be dropped"),
    "webhooks.queue_bytes": (4096, "every webhook would be dropped"),
    "webrtc.connect_s": (1.0, "no call would ever connect"),
}
# The largest number of any setting. Products of a larger one, such as the samples of seconds, would overflow, and every
# session would fail.
LARGEST_NUMBER = 10**15
# Longest text of a wrong value in an error.
SHOWN_CHARACTERS = 80
LOG_LEVELS = ("debug", "info", "warning", "error")
# Keys that a running server applies at a reload; all others need a restart. Keys of [session], and limits for the
# memory of a session, apply to sessions that begin afterwards.
RELOADABLE = frozenset(
    {
        *("server.drain_s", "server.drain_spread_s", "server.ping_interval_s", "server.dead_after_s"),
        *("server.handshake_s", "server.inject", "server.log_level", "server.access_log"),
        *("auth.keys", "auth.no_auth", "auth.twilio_auth_token"),
        *("limits.max_sessions", "limits.max_load", "limits.sessions_per_key", "limits.new_sessions_per_minute"),
        *("limits.message_bytes", "limits.control_bytes", "limits.messages_per_second", "limits.mistakes_per_second"),
        *("limits.audio_in_flight_s", "limits.replay_s", "limits.gap_s", "limits.idle_s", "limits.session_s"),
        *("limits.outbox_events", "limits.outbox_bytes", "limits.outbox_characters"),
        *("limits.upload_bytes", "limits.upload_s", "limits.uploads_waiting", "limits.spool_bytes"),
        "limits.inject_bytes",
        *("session.stall_s", "session.keep_s", "session.turn_s", "session.resume_s"),
        *("session.resume_events", "session.resume_bytes"),
        *("webhooks.on_final", "webhooks.hosts", "webhooks.per_session", "webhooks.timeout_s", "webhooks.retry_s"),
        *("webhooks.queue_events", "webhooks.queue_bytes", "webhooks.urls", "webhooks.drain_s"),
        *("webrtc.calls", "webrtc.addresses", "webrtc.ports", "webrtc.connect_s"),
    }
)


class ConfigError(Exception):
    """The configuration is invalid. The text names the key and how to fix it."""


def shown(value: Any) -> str:
    """A wrong value as errors show it: escaped, and only its beginning if it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


class Secret:
    """A text that is never shown: printing or formatting it, or an object that contains it, gives a placeholder.

    Secret settings have this type, so that no message can show them by accident. `reveal` is for code that compares or
    signs with the text, and for the connection from a parent to its workers.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str = "") -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "<secret>" if self._text else "<no secret>"

    def __len__(self) -> int:
        return len(self._text)

    def __eq__(self, other: object) -> bool:
        text = other._text if isinstance(other, Secret) else other
        return isinstance(text, str) and hmac.compare_digest(_as_bytes(self._text), _as_bytes(text))

    def __hash__(self) -> int:
        return hash(self._text)


def _as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    # Gateway processes; 0 lets the server choose: one if the engine runs on the CPU of this machine, else one per 150
    # streams of the engine, limited by the number of cores.
    workers: int = 0
    # Address to listen on. Any address but a loopback address needs `auth.keys` or `auth.no_auth`.
    host: str = "127.0.0.1"
    port: int = 8000
    # PEM files; set both to serve https and wss.
    tls_cert: str | None = None
    tls_key: str | None = None
    # Seconds for running turns to finish when the server stops.
    drain_s: float = 10.0
    # Seconds over which a draining gateway closes the sockets of sessions that it hands off, so that their clients do
    # not all reconnect at once.
    drain_spread_s: float = 5.0
    # Seconds between pings, and seconds without any byte from a client after which its socket is closed.
    ping_interval_s: float = 20.0
    dead_after_s: float = 180.0
    # Seconds for a client to send the headers of a request. A body slower than 1 KiB/s for this time is cut off too.
    handshake_s: float = 10.0
    # Allow clients to render audio into items and to inject items into the engines' caches: POST /v1/audio/render and
    # /v1/audio/inject, and the inject event on sockets.
    inject: bool = False
    # Addresses and networks (10.0.0.0/8) of proxies whose X-Forwarded-For and X-Forwarded-Proto are trusted. Behind a
    # proxy that is not listed, all clients have the proxy's address.
    trusted_proxies: tuple[str, ...] = ()
    # Origins of web pages that may use the server from a browser (https://example.org), beside its own page. `null` is
    # a page opened from disk, `*` any page. Empty: without keys no other page, with keys any page.
    allowed_origins: tuple[str, ...] = ()
    # Host names that a server without keys accepts in the Host header, beside those of this machine; `*` accepts any.
    allowed_hosts: tuple[str, ...] = ()
    # Hosts from which the server may pull streams for clients (POST /v1/streams): names, `*.example.org`, `*` for any
    # public host; addresses and networks (10.0.0.0/8), which also allow private addresses. Empty: the route is off.
    stream_hosts: tuple[str, ...] = ()
    # File in which the streams that the server pulls are kept, with their URLs, so that they go on after a restart;
    # unset: they end with the server. With keys it needs `auth.secret`.
    stream_file: str | None = None
    # Lowest level of log lines: debug, info, warning or error.
    log_level: str = "info"
    # Format of log lines: text, or json with an object in each line.
    log_format: str = "text"
    # Log a line for every request and every socket when it ends, without its query.
    access_log: bool = False


@dataclass(frozen=True, slots=True)
class AuthConfig:
    # API keys of clients. Empty: every client may connect; then `server.host` must be a loopback address by default.
    keys: tuple[Secret, ...] = ()
    # Must be set to serve without keys on an address that other machines can reach.
    no_auth: bool = False
    # Has no effect any more: client secrets (ek_...) are signed and not stored.
    max_client_secrets: int = 10_000
    # Secret that client secrets and resume tokens are signed with. Empty: a random one at every start. Servers that
    # accept each other's tokens need the same.
    secret: Secret = Secret()
    # Auth token of the Twilio account. If it is set, calls on /v1/twilio must have Twilio's signature, besides a key.
    twilio_auth_token: Secret = Secret()

    def __post_init__(self) -> None:
        """Convert plain texts to `Secret`. A key that is listed twice is one key: shares depend on their number."""
        object.__setattr__(self, "keys", tuple(dict.fromkeys(_as_secret(key) for key in self.keys)))
        object.__setattr__(self, "secret", _as_secret(self.secret))
        object.__setattr__(self, "twilio_auth_token", _as_secret(self.twilio_auth_token))


def _as_secret(given: Secret | str) -> Secret:
    return given if isinstance(given, Secret) else Secret(given)


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    # Most sessions at once; 0: as many as the engine has capacity for.
    max_sessions: int = 0
    # Share of its time that an engine may spend on live streams; sessions beyond it are refused. 0: only streams count.
    max_load: float = 0.95
    # Sessions at once and new sessions per minute for one key (without keys: for one client address); 0 is no limit.
    sessions_per_key: int = 0
    new_sessions_per_minute: int = 0
    # Largest WebSocket message; 15 MiB of audio in base64 need 20 MiB.
    message_bytes: int = 21 * 1024 * 1024
    # Largest message that is not audio.
    control_bytes: int = 64 * 1024
    # Messages per second of one client, beyond which it is slowed down; 0 is no limit.
    messages_per_second: float = 0.0
    # Invalid messages per second of one client, beyond which it is slowed down; 0 is no limit.
    mistakes_per_second: float = 50.0
    # Seconds of audio of one session that may wait for the engine; beyond it reading from its socket pauses.
    audio_in_flight_s: float = 60.0
    # Seconds of audio kept of each session to rebuild its stream when an engine is lost; at most what the model needs.
    replay_s: float = 120.0
    # Longest silence in seconds that a client may declare in one message instead of sending it.
    gap_s: float = 86_400.0
    # Events, and their bytes, that may wait for a client that does not read; beyond it the socket is closed with 1008.
    outbox_events: int = 1024
    outbox_bytes: int = 2_000_000
    # Old name of `outbox_bytes`; used if it is not 0.
    outbox_characters: int = 0
    # Seconds without a message, and total seconds, after which a session is closed; 0 is no limit.
    idle_s: float = 0.0
    session_s: float = 0.0
    # Largest uploaded file, and seconds for it to arrive, and again to be transcribed.
    upload_bytes: int = 512 * 1024 * 1024
    upload_s: float = 3600.0
    # Streams that the server pulls at once; one of several keys has at most half of them.
    streams: int = 8
    # Bytes of items that all inject requests together may hold in memory.
    inject_bytes: int = 16 * 1024 * 1024
    # Files transcribed at once, and files that may wait; further ones are refused. One of several keys has half.
    uploads: int = 4
    uploads_waiting: int = 16
    # Bytes that all uploaded files together may take on disk (TMPDIR) until they are transcribed.
    spool_bytes: int = 4 * 1024 * 1024 * 1024
    # Connections that may read published sessions; further ones are refused. One of several keys has at most half of
    # them. 0: sessions cannot be published.
    viewers: int = 2000


@dataclass(frozen=True, slots=True)
class SessionConfig:
    # Seconds of speech without text after which a new engine stream is started from the kept audio; 0 turns it off.
    stall_s: float = 8.0
    # Seconds of audio kept for such a new stream.
    keep_s: float = 30.0
    # Longest turn in seconds; a longer one is ended after a word and the next turn continues, which bounds memory.
    turn_s: float = 3600.0
    # Seconds for which a resumable session waits for its client; 0 turns resuming off.
    resume_s: float = 120.0
    # Events, and their bytes, kept for a client that resumes.
    resume_events: int = 4096
    resume_bytes: int = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ModelConfig:
    # The model to serve: a name from `tickertape models` or the path of a checkpoint; `default` is the embedded one.
    name: str = "default"
    # Further names that clients may use for the model. OpenAI clients may use any name. A name `publisher/model` is
    # listed in /v1/models only if it names the served model.
    aliases: tuple[str, ...] = ("mistralai/Voxtral-Mini-4B-Realtime-2602",)
    # Device of the model: auto, cpu, cuda, or cuda:1 for the second GPU.
    device: str = "auto"
    # Addresses of running engines (tcp://HOST:PORT or ipc://PATH); empty: the server starts its own engine.
    engines: tuple[str, ...] = ()
    # Keep a second engine loaded, which takes over when the first one is lost. It needs the same memory again.
    spare: bool = False
    # Most streams at once; 0: as many as the device's memory allows.
    max_streams: int = 0
    # CPU threads of the model; 0: one per core. A windowed model processes this many streams in parallel.
    threads: int = 0
    # Frame-synchronous models: positions that the decoder attends to, keys and values in 8 bits, and the guard that
    # ends a run of blanks while there is speech.
    decoder_window: int = 1024
    kv_8bit: bool = False
    blank_guard: bool = True
    # Frame-synchronous models: after this many seconds of silence a stream skips the model until there is speech again;
    # 0: all silence is computed.
    cut_silence_s: float = 3.0
    # Frame-synchronous models on a GPU: streams whose silence is skipped are parked in host memory, so that more
    # sessions fit. The share of the memory free at the start that they may use; 0: they stay on the device.
    parked_share: float = 0.7
    # Offer labels that say who speaks, if `tickertape pull speakers` has fetched their weights.
    speakers: bool = True
    # Ask the learnt turn detector in the pauses of semantic turn detection and Deepgram Flux, if its weights are there.
    turn_detector: bool = True
    # Bytes of prepared audio cached in gateway and engine, so that the same audio is not sent twice.
    input_cache_bytes: int = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FleetConfig:
    # JSON file with the engines of the fleet, kept up to date by the fleet's supervisor; used instead of
    # `model.engines`.
    table: str | None = None
    # File with the fleet's secret. Connections over tcp are encrypted with keys derived from it, and all gateways of
    # the fleet accept each other's tokens.
    secret_file: str | None = None
    # JSON file with the figures of the whole fleet, kept up to date by the fleet's supervisor; /capacity shows them.
    figures: str | None = None
    # Name of this gateway in /capacity and /metrics; empty: host name and port.
    gateway: str = ""


@dataclass(frozen=True, slots=True)
class WebhooksConfig:
    # URLs that get the finals of sessions: `URL` for every key, `KEY URL` for one key of `auth.keys`. Empty: none.
    on_final: tuple[Secret, ...] = ()
    # Hosts that webhooks may reach: names, `*.example.org`, `*` for any public host; addresses and networks
    # (10.0.0.0/8), which also allow private addresses. Ports 80 and 443, or the port that is written (`HOST:8443`,
    # `HOST:*`). A URL of `on_final` lists its own host and port.
    hosts: tuple[str, ...] = ()
    # Allow clients to name a URL for their session, of a host that `hosts` lists.
    per_session: bool = False
    # The secret from which the signing secret of each key is derived; needed for webhooks.
    secret: Secret = Secret()
    # Seconds for one attempt, from the lookup of the name to the status of the answer.
    timeout_s: float = 10.0
    # Seconds after which an event that cannot be delivered is dropped.
    retry_s: float = 86_400.0
    # Events, and their bytes, that may wait for one URL; beyond it the oldest is dropped.
    queue_events: int = 1000
    queue_bytes: int = 1024 * 1024
    # URLs that sessions may name at once, in each gateway process.
    urls: int = 64
    # Folder for files in which waiting events survive a restart, with transcripts in them; unset: memory only.
    folder: str | None = None
    # Seconds to deliver waiting events when the server stops.
    drain_s: float = 5.0

    def __post_init__(self) -> None:
        """Convert plain texts to `Secret`."""
        object.__setattr__(self, "on_final", tuple(_as_secret(entry) for entry in self.on_final))
        object.__setattr__(self, "secret", _as_secret(self.secret))


@dataclass(frozen=True, slots=True)
class WebrtcConfig:
    # Calls at once, in each gateway process; each has a process of its own. 0: no calls.
    calls: int = 64
    # Addresses at which clients reach this server, as they are told to clients. Empty: the address that the client's
    # HTTP request has reached, which is right without NAT and without a proxy.
    addresses: tuple[str, ...] = ()
    # UDP ports of calls, one for each, as `50000-50100`. Empty: any free port.
    ports: str = ""
    # Seconds from the answer to the connection; a call that has not connected by then is ended.
    connect_s: float = 15.0

    @property
    def port_range(self) -> tuple[int, int] | None:
        """The first and the last port; None for any. Raises ValueError."""
        if not self.ports:
            return None
        first, dash, last = self.ports.partition("-")
        found = plain_int(first), plain_int(last if dash else first)
        if not 1024 <= found[0] <= found[1] <= 65535:
            raise ValueError
        return found


def hook_of(entry: str) -> tuple[str, str]:
    """The key and the URL of an entry of `webhooks.on_final`; the key is empty if the URL is for every key."""
    key, _, url = entry.strip().rpartition(" ")
    return key.strip(), url


@dataclass(frozen=True, slots=True)
class Config:
    server: ServerConfig = field(default_factory=ServerConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    session: SessionConfig = field(default_factory=SessionConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    webhooks: WebhooksConfig = field(default_factory=WebhooksConfig)
    webrtc: WebrtcConfig = field(default_factory=WebrtcConfig)

    @property
    def gateway_name(self) -> str:
        return self.fleet.gateway or f"{socket.gethostname()}:{self.server.port}"

    @property
    def in_fleet(self) -> bool:
        """Whether other gateways can adopt the sessions of this one."""
        return bool(self.fleet.table or self.fleet.secret_file)

    @property
    def engines_elsewhere(self) -> bool:
        """Whether engines are not started by this server."""
        return bool(self.model.engines or self.fleet.table)


def load_config(
    path: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """Read and check the configuration. `flags` maps dotted keys to values, as text or typed. Raises ConfigError."""
    tree = _read_file(path) if path is not None else {}
    for key, value in _from_environment(os.environ if environment is None else environment).items():
        _put(tree, key, value)
    for key, value in (flags or {}).items():
        _put(tree, key, value)
    config: Config = _build(Config, tree, "")
    check(config)
    return config


def check(config: Config) -> None:
    """Raise ConfigError for invalid values and combinations."""
    server, auth = config.server, config.auth
    if not 0 <= server.port <= 65535:
        raise ConfigError(f"server.port must be between 0 and 65535, not {shown(server.port)}")
    if (server.tls_cert is None) != (server.tls_key is None):
        raise ConfigError("server.tls_cert and server.tls_key belong together: set both or neither")
    for name, file in (("server.tls_cert", server.tls_cert), ("server.tls_key", server.tls_key)):
        if file is not None and not os.path.isfile(file):
            raise ConfigError(f"{name}: there is no file {shown(file)}; set the path of an existing PEM file")
    if config.limits.max_load > 1:
        raise ConfigError(f"limits.max_load is a share and cannot be more than 1, but is {config.limits.max_load:g}")
    _check_minimums(config)
    if config.session.turn_s < MIN_TURN_S:
        raise ConfigError(f"session.turn_s must be at least {MIN_TURN_S:g}, not {config.session.turn_s:g}")
    _check_proxies(server)
    _check_browsers(server)
    _check_log(server)
    _check_model(config)
    _check_fleet(config.fleet)
    _check_workers(config)
    _check_keys(auth)
    _check_webhooks(config)
    _check_webrtc(config.webrtc)
    if auth.keys and auth.no_auth:
        raise ConfigError("auth.no_auth contradicts auth.keys: remove one of them")
    if not auth.keys and not auth.no_auth and not is_loopback(server.host):
        text = "can be reached by other machines: set auth.keys, or auth.no_auth to allow it"
        raise ConfigError(f"server.host {shown(server.host)} {text}")
    if config.fleet.secret_file and auth.secret:
        raise ConfigError("auth.secret and fleet.secret_file both set the secret for tokens: set one of them")
    for section in fields(config):
        _check_numbers(section.name, getattr(config, section.name))


def _check_keys(auth: AuthConfig) -> None:
    if any(len(key) < 8 for key in auth.keys):
        raise ConfigError("auth.keys: a key must have at least 8 characters")
    for key in map(Secret.reveal, auth.keys):
        if not key.isascii() or not key.isprintable() or key != key.strip():
            text = "a key must be printable ASCII without spaces around it, because it is sent in a header"
            raise ConfigError(f"auth.keys: {text}")


def _check_minimums(config: Config) -> None:
    for name, (least, consequence) in MINIMUMS.items():
        section, key = name.split(".")
        value = getattr(getattr(config, section), key)
        if 0 <= value < least:
            raise ConfigError(f"{name} must be at least {least:g}, not {value:g}: with less {consequence}")
    if 0 < config.limits.outbox_characters < MINIMUMS["limits.outbox_bytes"][0]:
        raise ConfigError(f"limits.outbox_characters must be 0 or at least {MINIMUMS['limits.outbox_bytes'][0]:g}")


def _check_proxies(server: ServerConfig) -> None:
    for proxy in server.trusted_proxies:
        try:
            ip_network(proxy)
        except ValueError:
            text = "must be an address such as 10.0.0.5 or a network such as 10.0.0.0/8"
            raise ConfigError(f"server.trusted_proxies: {shown(proxy)} {text}") from None


def _check_browsers(server: ServerConfig) -> None:
    for origin in server.allowed_origins:
        usual_port = origin.startswith("http://") and origin.endswith(":80") or origin.endswith(":443")
        if origin not in ("*", "null", "file://") and (usual_port or not ORIGIN.fullmatch(origin)):
            text = "must be an origin such as https://example.org, without path and default port; or null, or *"
            raise ConfigError(f"server.allowed_origins: {shown(origin)} {text}")
    for host in server.allowed_hosts:
        if host != "*" and not HOST.fullmatch(host):
            text = "must be a name such as captions.example.org, without scheme and port; or *"
            raise ConfigError(f"server.allowed_hosts: {shown(host)} {text}")
    _check_hosts("server.stream_hosts", server.stream_hosts)
    reason = server.stream_file and _file_problem(server.stream_file)
    if reason:
        raise ConfigError(f"server.stream_file: {shown(server.stream_file)} {reason}; set the path of a file")


def _check_hosts(name: str, hosts: tuple[str, ...]) -> None:
    for host in hosts:
        if host != "*" and not HOST.fullmatch(host.removeprefix("*.")) and not _is_network(host):
            text = "must be a name such as radio.example.org or *.example.org, an address, a network (10.0.0.0/8), or *"
            raise ConfigError(f"{name}: {shown(host)} {text}")


def _check_webhooks(config: Config) -> None:
    hooks = config.webhooks
    for host in hooks.hosts:
        port = listed_host(host)[1]
        if port not in ("", "*") and not 1 <= int(port[:6]) <= 65535:
            raise ConfigError(f"webhooks.hosts: {shown(host)} must have a port from 1 to 65535, or * for any")
    _check_hosts("webhooks.hosts", tuple(listed_host(host)[0] for host in hooks.hosts))
    for number, entry in enumerate(map(Secret.reveal, hooks.on_final), start=1):
        key, url = hook_of(entry)
        # Entries may contain keys and tokens, so they are not shown.
        try:
            web_url(url)
        except ValueError:
            text = "must be 'URL' or 'KEY URL' with an http or https URL without user name and password"
            raise ConfigError(f"webhooks.on_final: entry {number} {text}; its value is not shown") from None
        if key and key not in map(Secret.reveal, config.auth.keys):
            raise ConfigError(f"webhooks.on_final: the key of entry {number} is not in auth.keys")
    if hooks.per_session and not hooks.hosts:
        raise ConfigError("webhooks.per_session needs webhooks.hosts: list the hosts that clients may name")
    if (hooks.on_final or hooks.per_session) and len(hooks.secret) < MIN_SECRET:
        raise ConfigError(f"webhooks.secret must have at least {MIN_SECRET} characters: webhooks are signed with it")


def _check_webrtc(webrtc: WebrtcConfig) -> None:
    for address in webrtc.addresses:
        try:
            ip_address(address)
        except ValueError:
            raise ConfigError(f"webrtc.addresses: {shown(address)} must be an address such as 203.0.113.7") from None
    if len({":" in address for address in webrtc.addresses}) > 1:
        raise ConfigError("webrtc.addresses must be all IPv4 or all IPv6: a call has one socket")
    try:
        _ = webrtc.port_range
    except ValueError:
        text = "two numbers from 1024 to 65535 such as 50000-50100"
        raise ConfigError(f"webrtc.ports must be {text}, not {shown(webrtc.ports)}") from None


def _is_network(text: str) -> bool:
    try:
        ip_network(text)
    except ValueError:
        return False
    return True


def check_tls(server: ServerConfig) -> None:
    """Raise ConfigError unless certificate and key can be read and match. Not part of `check`, because only the server
    has to be able to read them."""
    if server.tls_cert is None or server.tls_key is None:
        return
    import ssl

    def no_password() -> str:
        raise ConfigError(f"server.tls_key: {shown(server.tls_key)} is encrypted; use a key without a password")

    for name, file in (("server.tls_cert", server.tls_cert), ("server.tls_key", server.tls_key)):
        try:
            Path(file).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{name}: cannot read {shown(file)}: {error.strerror}; make it readable for the server's user"
            ) from None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(server.tls_cert, server.tls_key, no_password)
    except ssl.SSLError as error:
        cert, key = shown(server.tls_cert), shown(server.tls_key)
        if error.reason == "KEY_VALUES_MISMATCH":
            text = f"server.tls_key {key} is not the key of the certificate {cert}"
        else:
            text = f"server.tls_cert {cert} and server.tls_key {key} must be PEM files"
        raise ConfigError(f"{text}: set a certificate and its own key") from None


def _check_log(server: ServerConfig) -> None:
    if server.log_level not in LOG_LEVELS:
        raise ConfigError(f"server.log_level must be one of {', '.join(LOG_LEVELS)}, not {shown(server.log_level)}")
    if server.log_format not in FORMATS:
        raise ConfigError(f"server.log_format must be {' or '.join(FORMATS)}, not {shown(server.log_format)}")


def _check_workers(config: Config) -> None:
    workers, secret = config.server.workers, config.auth.secret
    if secret and len(secret) < MIN_SECRET:
        raise ConfigError(f"auth.secret must have at least {MIN_SECRET} characters")
    if config.server.stream_file and config.auth.keys and not secret:
        raise ConfigError("server.stream_file needs auth.secret: the names of keys in the file are made with it")
    if workers > 1 and not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError(
            "server.workers: this system cannot share a port between processes (SO_REUSEPORT); set it to 1"
        )
    if workers > MOST_WORKERS:
        raise ConfigError(f"server.workers must be at most {MOST_WORKERS}, not {shown(workers)}")


def _check_model(config: Config) -> None:
    model = config.model
    if config.fleet.table and model.engines:
        raise ConfigError("fleet.table and model.engines both list the engines: set one of them")
    if model.spare and config.engines_elsewhere:
        raise ConfigError(
            "model.spare needs an engine that this server starts: remove it, or model.engines and fleet.table"
        )
    if not DEVICE.fullmatch(model.device):
        text = f"auto, cpu, cuda, or cuda:1 for the second GPU, not {shown(model.device)}"
        raise ConfigError(f"model.device must be {text}")
    for address in model.engines:
        match = ENGINE.fullmatch(address)
        port = match and (match[1] or match[2])
        if match is None or (port and not 0 < int(port) <= 65535):
            text = "is not an engine address; use ipc:///path/to/socket or tcp://host:port"
            raise ConfigError(f"model.engines: {shown(address)} {text}")
    if 0 < model.cut_silence_s < MIN_CUT_SILENCE_S:
        raise ConfigError(
            f"model.cut_silence_s must be 0 or at least {MIN_CUT_SILENCE_S:g}: shorter pauses belong to the speech"
        )
    if not 0 <= model.parked_share <= MAX_PARKED_SHARE:
        raise ConfigError(f"model.parked_share must be 0 to {MAX_PARKED_SHARE:g}: the system needs memory, too")


def _check_fleet(fleet: FleetConfig) -> None:
    """A file may be missing or unreadable: the server waits for it. At these paths none can ever be."""
    for name, path in (("fleet.table", fleet.table), ("fleet.figures", fleet.figures)):
        reason = path and _file_problem(path)
        if reason:
            text = "set the path of a JSON file that the fleet's supervisor writes"
            raise ConfigError(f"{name}: {shown(path)} {reason}; {text}")
    reason = fleet.secret_file and _file_problem(fleet.secret_file)
    if reason:
        raise ConfigError(f"fleet.secret_file: {shown(fleet.secret_file)} {reason}; set the path of an existing file")


def _file_problem(path: str) -> str:
    """Why there can never be a regular file at this path; empty if there can be one."""
    try:
        return "" if S_ISREG(os.stat(path).st_mode) else "is not a regular file"
    except (FileNotFoundError, PermissionError):
        return ""
    except OSError as error:
        return f"cannot be a file: {error.strerror}"


@dataclass(frozen=True, slots=True)
class Changes:
    """The keys that a reload has changed: those in force now, and those that need a restart."""

    taken_over: tuple[str, ...] = ()
    need_restart: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = ["changed: " + ", ".join(self.taken_over)] if self.taken_over else []
        parts += ["changed and needs a restart: " + ", ".join(self.need_restart)] if self.need_restart else []
        return "; ".join(parts) or "nothing has changed"


def take_over(config: Config, new: Config) -> Changes:
    """Apply the reloadable keys of `new` to the configuration in force.

    The sections are changed in place, and only here: all parts of the server share them and see the new values at once.
    Raises ConfigError, with nothing changed.
    """
    differing = [
        (section.name, key.name)
        for section in fields(config)
        for key in fields(getattr(config, section.name))
        if getattr(getattr(config, section.name), key.name) != getattr(getattr(new, section.name), key.name)
    ]
    taken = [(section, key) for section, key in differing if f"{section}.{key}" in RELOADABLE]
    check(_merged(config, new, taken))
    for section, key in taken:
        object.__setattr__(getattr(config, section), key, getattr(getattr(new, section), key))
    return Changes(
        tuple(".".join(name) for name in taken), tuple(".".join(name) for name in differing if name not in taken)
    )


def _merged(config: Config, new: Config, taken: typing.Iterable[tuple[str, str]]) -> Config:
    """The configuration after a reload, to be checked: a new value may contradict one that needs a restart."""
    for section, key in taken:
        changed = replace(getattr(config, section), **{key: getattr(getattr(new, section), key)})
        config = replace(config, **{section: changed})
    return config


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def known_keys() -> list[str]:
    """All keys, dotted."""
    return [
        f"{section.name}.{key.name}" for section in fields(Config) for key in fields(_type_of(Config, section.name))
    ]


def _check_numbers(section: str, values: Any) -> None:
    for key in fields(values):
        value = getattr(values, key.name)
        if isinstance(value, int | float) and value < 0:
            raise ConfigError(f"{section}.{key.name} cannot be negative, but is {shown(value)}")
        if isinstance(value, int | float) and value > LARGEST_NUMBER:
            raise ConfigError(f"{section}.{key.name} must be at most {LARGEST_NUMBER:g}, not {shown(value)}")


def _read_file(path: str | Path) -> dict[str, Any]:
    try:
        return read_toml(path)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {shown(str(path))}: {error.strerror}") from error
    except ValueError as error:  # `BadTomlFile`, or a path with NUL in it.
        raise ConfigError(f"the configuration file {shown(str(path))} {error}") from error


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    names = {ENVIRONMENT_PREFIX + key.replace(".", "_").upper(): key for key in known_keys()}
    given: dict[str, str] = {}
    for name, value in environment.items():
        if name in names:
            given[names[name]] = value
        elif name.startswith(ENVIRONMENT_PREFIX):
            text = shown(name).strip("'")
            raise ConfigError(f"unknown environment variable {text}{_closest(name, names)}")
    return given


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    if key not in known_keys():
        raise ConfigError(f"unknown key {shown(key)}{_closest(key, known_keys())}")
    section, name = key.split(".")
    tree.setdefault(section, {})[name] = value


def _build(kind: type, tree: Any, path: str) -> Any:
    if not isinstance(tree, dict):
        raise ConfigError(f"{path.rstrip('.')} must be a section with keys of its own")
    names = [item.name for item in fields(kind)]
    values = {}
    for name, value in tree.items():
        if name not in names:
            raise ConfigError(f"unknown key {shown(path + name)}{_closest(name, names, path)}")
        wanted = _type_of(kind, name)
        is_section = is_dataclass(wanted)
        values[name] = _build(wanted, value, f"{path}{name}.") if is_section else _convert(value, wanted, path + name)
    return kind(**values)


def _type_of(kind: type, name: str) -> Any:
    return typing.get_type_hints(kind)[name]


def _closest(name: str, known: typing.Iterable[str], path: str = "") -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"; did you mean {path + close[0]!r}?" if close else ""


def _convert(value: Any, wanted: Any, key: str) -> Any:
    texts = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
    if any(isinstance(text, str) and "\0" in text for text in texts):
        raise ConfigError(f"{key} contains a NUL character; remove it")
    if isinstance(wanted, UnionType):
        if value is None:
            return None
        wanted = next(kind for kind in wanted.__args__ if kind is not type(None))
    if wanted is Secret or wanted == tuple[Secret, ...]:
        return _to_secret(value, wanted, key)
    if wanted is bool:
        return _to_bool(value, key)
    if wanted in (int, float):
        return _to_number(value, wanted, key)
    if wanted is str:
        if not isinstance(value, str):
            raise ConfigError(f"{key} must be text, not {shown(value)}")
        return value
    return _to_texts(value, key)


def _to_secret(value: Any, wanted: Any, key: str) -> Any:
    """An invalid value is not shown either, because it may be a key without quotes."""
    if wanted is Secret:
        if not isinstance(value, str):
            raise ConfigError(f"{key} must be text in quotes; its value is not shown")
        return Secret(value)
    try:
        return tuple(map(Secret, _to_texts(value, key)))
    except ConfigError:
        raise ConfigError(f"{key} must be a list of texts in quotes; its value is not shown") from None


def _to_bool(value: Any, key: str) -> bool:
    if isinstance(value, bool):
        return value
    known = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if isinstance(value, str) and value.lower() in known:
        return known[value.lower()]
    raise ConfigError(f"{key} must be true or false, not {shown(value)}")


def _to_number(value: Any, wanted: type, key: str) -> Any:
    try:
        if isinstance(value, bool) or (wanted is int and isinstance(value, float)):
            raise ValueError
        if isinstance(value, str):
            # Files of environment variables may have spaces and carriage returns at the ends of lines.
            number = (plain_int if wanted is int else plain_float)(value.strip(" \t\r\n"))
        else:
            number = wanted(value)
    except OverflowError:
        raise ConfigError(f"{key} is too large a number") from None
    except (TypeError, ValueError):
        kind = "a whole number" if wanted is int else "a number"
        raise ConfigError(f"{key} must be {kind} in plain digits, not {shown(value)}") from None
    if number != number or number in (float("inf"), float("-inf")):
        raise ConfigError(f"{key} must be a finite number")
    return number


def _to_texts(value: Any, key: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ConfigError(f"{key} must be a list of texts, not {shown(value)}")
