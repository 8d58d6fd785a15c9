"""Keys and client secrets: accepted in all places where clients put them, never shown, limited in time and number."""

from __future__ import annotations

import random
import zlib

import msgspec
import pytest

from realtime.errors import Refusal
from realtime.http.authentication import (
    PURPOSE,
    SECRET_PREFIX,
    Authenticator,
    asks_for_beta,
    offered_key,
    select_subprotocol,
)
from realtime.serving.quota import Caller
from realtime.serving.signed_tokens import Signer
from realtime.session.settings import Settings


def test_keys_are_found_wherever_clients_put_them() -> None:
    assert offered_key({"authorization": "bearer k1"}, []) == "k1"
    assert offered_key({"authorization": "Token k2"}, []) == "k2"
    assert offered_key({"authorization": "Basic abc"}, []) is None
    assert offered_key({"authorization": "Bearer "}, []) is None
    assert offered_key({"api-key": "k3"}, []) == "k3"
    assert offered_key({}, ["realtime", "openai-insecure-api-key.k4"]) == "k4"
    assert offered_key({}, ["token", "k5"]) == "k5"
    assert offered_key({}, ["token"]) is None


def test_subprotocol_with_a_secret_is_never_selected() -> None:
    assert select_subprotocol(["openai-insecure-api-key.k", "realtime"]) == "realtime"
    assert select_subprotocol(["openai-insecure-api-key.k"]) is None
    assert select_subprotocol([]) is None


def test_a_browser_of_the_beta_gets_one_of_the_names_it_offers() -> None:
    """It fails the socket otherwise."""
    beta = "openai-beta.realtime-v1"
    assert select_subprotocol([beta, "openai-insecure-api-key.k", "realtime"]) == "realtime"
    assert select_subprotocol(["openai-insecure-api-key.k", beta]) == beta


@pytest.mark.parametrize(
    ("header", "offered", "beta"),
    [
        ("realtime=v1", [], True),
        ("assistants=v2, realtime=v1", [], True),
        ("realtime=v1,assistants=v2", [], True),
        ("", ["realtime", "openai-beta.realtime-v1"], True),
        ("assistants=v2", ["realtime"], False),
        ("realtime=v10", [], False),
    ],
)
def test_the_beta_is_asked_for_in_either_place(header: str, offered: list[str], beta: bool) -> None:
    assert asks_for_beta({"openai-beta": header} if header else {}, offered) is beta


def test_client_secrets_expire_and_are_as_good_at_any_server_with_the_same_secret() -> None:
    now = 1000.0
    signer = Signer(b"shared")
    authenticator, other = (Authenticator(("the-real-key",), signer, lambda: now) for _ in range(2))
    caller = authenticator.check("the-real-key", "")
    secret = authenticator.issue(caller, Settings(language="de"), 60)
    assert authenticator.check(secret.value, "").settings == Settings(language="de")
    assert authenticator.check(secret.value, "").name == caller.name
    assert authenticator.check(secret.value, "").is_secret and not caller.is_secret
    assert other.check(secret.value, "").settings == Settings(language="de")
    assert authenticator.issue(caller, Settings(language="de"), 60).value != secret.value
    for stranger in (Authenticator(("the-real-key",), Signer(b"another"), lambda: now),):
        with pytest.raises(Refusal):
            stranger.check(secret.value, "")
    now = 1061.0
    with pytest.raises(Refusal) as refused:
        authenticator.check(secret.value, "")
    assert refused.value.status == 401


def test_a_client_secret_that_would_not_fit_into_a_request_is_refused() -> None:
    authenticator = Authenticator((), Signer())
    noise = "".join(chr(0x4E00 + random.Random(0).randrange(20_000)) + str(number) for number in range(4000))
    with pytest.raises(Refusal) as refused:
        authenticator.issue(Caller("address 1"), Settings(prompt=noise), 60)
    assert (refused.value.status, refused.value.code) == (400, "settings_too_long")


def test_a_changed_secret_is_none_of_ours() -> None:
    authenticator = Authenticator(("the-real-key",), Signer())
    secret = authenticator.issue(Caller("key 0"), Settings(), 60).value
    for place in range(3, len(secret)):
        changed = secret[:place] + ("A" if secret[place] != "A" else "B") + secret[place + 1 :]
        with pytest.raises(Refusal):
            authenticator.check(changed, "")


def test_without_keys_anybody_may_come_and_is_counted_by_address() -> None:
    authenticator = Authenticator((), Signer())
    assert authenticator.check("whatever", "10.0.0.1").name == "address 10.0.0.1"
    assert authenticator.check("ek_unknown", "10.0.0.1").settings is None


def test_a_key_is_the_same_caller_at_any_server_with_the_same_secret_however_its_keys_are_ordered() -> None:
    here = Authenticator(("the-old-key", "the-new-key"), Signer(b"shared")).check("the-new-key", "").name
    assert Authenticator(("the-new-key",), Signer(b"shared")).check("the-new-key", "").name == here
    assert Authenticator(("the-new-key",), Signer(b"another")).check("the-new-key", "").name != here
    assert Authenticator(("the-old-key", "the-new-key"), Signer(b"shared")).check("the-old-key", "").name != here


def test_a_client_secret_is_valid_only_while_its_key_is_configured() -> None:
    signer = Signer(b"shared")
    authenticator = Authenticator(("the-old-key", "the-new-key"), signer)
    old, new = (
        authenticator.issue(authenticator.check(f"the-{name}-key", ""), Settings(), 60).value for name in ("old", "new")
    )
    # Other gateways with the same secret may list the keys otherwise.
    other = Authenticator(("the-new-key", "a-third-key"), signer)
    assert other.check(new, "").name == authenticator.check(new, "").name
    with pytest.raises(Refusal) as refused:
        other.check(old, "")
    assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
    # The same gateway, when its keys are replaced while it runs.
    authenticator.use_keys(("the-new-key",))
    assert authenticator.check(new, "").is_secret
    for gone in (old, "the-old-key"):
        with pytest.raises(Refusal):
            authenticator.check(gone, "")
    authenticator.use_keys(("the-new-key", "the-old-key"))
    assert authenticator.check(old, "").is_secret


def test_a_client_secret_of_a_server_without_keys_opens_no_server_with_keys() -> None:
    signer = Signer(b"shared")
    without = Authenticator((), signer)
    secret = without.issue(without.check(None, "127.0.0.1"), Settings(language="de"), 60).value
    assert without.check(secret, "10.0.0.1").settings == Settings(language="de")
    with pytest.raises(Refusal):
        Authenticator(("the-real-key",), signer).check(secret, "127.0.0.1")


def test_a_key_that_begins_like_a_client_secret_is_a_key() -> None:
    authenticator = Authenticator(("ek_a-real-key", "the-other-key"), Signer())
    caller = authenticator.check("ek_a-real-key", "")
    assert not caller.is_secret
    assert authenticator.check(authenticator.issue(caller, Settings(), 60).value, "").is_secret
    for wrong in ("ek_", "ek_a-real-ke", "ek_a-real-key2"):
        with pytest.raises(Refusal) as refused:
            authenticator.check(wrong, "")
        assert "client secret" in refused.value.message


def test_a_secret_that_another_version_signed_is_none() -> None:
    signer = Signer()
    authenticator = Authenticator(("the-real-key",), signer)
    for value in (b"not compressed", zlib.compress(b"no list"), zlib.compress(msgspec.msgpack.encode([1, 2]))):
        with pytest.raises(Refusal):
            authenticator.check(SECRET_PREFIX + signer.sign(PURPOSE, value), "")


def test_a_caller_is_found_among_many_keys_without_comparing_them() -> None:
    """Viewers ask in every tick whether their key is still there."""

    class Name(str):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Name.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    authenticator = Authenticator([f"the-key-{number}" for number in range(1000)], Signer(b"shared"))
    owner = Name(authenticator.check("the-key-999", "").name)
    assert owner == authenticator.name_of("the-key-999") and authenticator.vouches_for(owner)
    assert not authenticator.vouches_for(Name(authenticator.name_of("the-key-1000"))) and Name.compared < 10
