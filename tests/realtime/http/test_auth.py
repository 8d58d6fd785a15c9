"""Keys and client secrets: found wherever clients put them, never shown, and limited in time and number."""

from __future__ import annotations

import pytest

from realtime.errors import Refusal
from realtime.http.auth import Gatekeeper, offered_key, select_subprotocol
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


def test_client_secrets_expire_and_are_limited() -> None:
    now = 1000.0
    keeper = Gatekeeper(("the-real-key",), 2, lambda: now)
    caller = keeper.check("the-real-key", "")
    secret = keeper.issue(caller, Settings(language="de"), 60)
    assert keeper.check(secret.value, "").settings == Settings(language="de")
    assert keeper.check(secret.value, "").name == caller.name
    assert keeper.check(secret.value, "").is_secret and not caller.is_secret
    keeper.issue(caller, Settings(), 60)
    with pytest.raises(Refusal) as refused:
        keeper.issue(caller, Settings(), 60)
    assert refused.value.status == 429
    now = 1061.0
    with pytest.raises(Refusal) as refused:
        keeper.check(secret.value, "")
    assert refused.value.status == 401
    keeper.issue(caller, Settings(), 60)


def test_without_keys_anybody_may_come_and_is_counted_by_address() -> None:
    keeper = Gatekeeper((), 10)
    assert keeper.check("whatever", "10.0.0.1").name == "address 10.0.0.1"
    assert keeper.check("ek_unknown", "10.0.0.1").settings is None
