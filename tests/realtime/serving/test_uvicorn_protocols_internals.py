"""uvicorn, websockets and h11 still have what our protocol classes change and use, under the same names and arguments.

What is used is read off our source, so that a new use is checked too. A new version of uvicorn that fails here needs a
look at `realtime/serving/uvicorn_protocols.py` before the ceiling in pyproject.toml goes up.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import textwrap
from pathlib import Path
from typing import Any

import h11
import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets import frames
from websockets.protocol import Protocol, State
from websockets.server import ServerProtocol

from realtime import app
from realtime.serving import uvicorn_protocols
from realtime.serving.uvicorn_protocols import HttpWithDeadlines, RealtimeWebSocket

PATCHED = [
    pytest.param(RealtimeWebSocket, WebSocketsSansIOProtocol, id="websocket"),
    pytest.param(HttpWithDeadlines, H11Protocol, id="http"),
    pytest.param(app.Server, uvicorn.Server, id="server"),
]
# Attribute of ours that holds an object of theirs -> the class of that object.
HELD = {
    (RealtimeWebSocket, "conn"): ServerProtocol,
    (HttpWithDeadlines, "conn"): h11.Connection,
    (HttpWithDeadlines, "cycle"): RequestResponseCycle,
}


def tree(of: type) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(of)))


def attributes_of_self(of: type, context: type[ast.expr_context] | None = None) -> set[str]:
    """Names that come behind `self.` in the source of a class; only those assigned to, with ast.Store."""
    return {
        node.attr
        for node in ast.walk(tree(of))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        if context is None or isinstance(node.ctx, context)
    }


def defined(of: type) -> set[str]:
    """Methods and class attributes of a class and of those it is made from, and what its methods put on `self`."""
    classes = [one for one in of.__mro__ if one.__module__ != "builtins"]
    own = {name for one in classes for name in vars(one)}
    written = [one for one in classes if one.__module__.split(".")[0] in ("uvicorn", "websockets", "h11", "realtime")]
    return own.union(*(attributes_of_self(one, ast.Store) for one in written))


def used_of_theirs(ours: type, theirs: type) -> set[str]:
    """What our class uses of `self` that it neither defines nor first assigns itself. Names with an underscore of ours
    are ours; those that they assign too are theirs."""
    assigned = attributes_of_self(ours, ast.Store) | set(vars(ours))
    return {name for name in attributes_of_self(ours) if name not in assigned or name in defined(theirs)}


@pytest.mark.parametrize(("ours", "theirs"), PATCHED)
def test_every_attribute_that_is_used_exists(ours: type, theirs: type) -> None:
    used = used_of_theirs(ours, theirs)
    assert len(used) > 3
    missing = used - defined(theirs)
    assert not missing, f"{theirs.__name__} has no {', '.join(sorted(missing))}"


@pytest.mark.parametrize(("ours", "theirs"), PATCHED)
def test_every_method_that_is_called_of_theirs_exists(ours: type, theirs: type) -> None:
    called = {
        node.attr
        for node in ast.walk(tree(ours))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call)
        if isinstance(node.value.func, ast.Name) and node.value.func.id == "super"
    }
    assert called - {"__init__"} and all(hasattr(theirs, name) for name in called), called


@pytest.mark.parametrize(("ours", "theirs"), PATCHED)
def test_methods_that_are_replaced_take_the_same_arguments(ours: type, theirs: type) -> None:
    replaced = [name for name in vars(ours) if callable(getattr(theirs, name, None)) and not name.startswith("__")]
    assert replaced
    for name in replaced:
        before, after = inspect.signature(getattr(theirs, name)), inspect.signature(getattr(ours, name))
        assert list(before.parameters) == list(after.parameters), f"{name}{before} became {name}{after}"
        assert asyncio.iscoroutinefunction(getattr(theirs, name)) == asyncio.iscoroutinefunction(getattr(ours, name))


@pytest.mark.parametrize(("holder", "held"), [pytest.param(*key, id=f"{key[0].__name__}.{key[1]}") for key in HELD])
def test_what_is_used_of_their_objects_exists(holder: type, held: str) -> None:
    """`self.conn.fail(...)`: the class behind `conn` has it."""
    theirs = HELD[holder, held]
    used = {
        node.attr
        for node in ast.walk(tree(holder))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == held
        if isinstance(node.value.value, ast.Name) and node.value.value.id == "self"
    }
    assert used
    has = defined(theirs)
    if hasattr(theirs, "__slots__"):
        has |= set(theirs.__slots__)
    assert used <= has, f"{theirs.__name__} has no {', '.join(sorted(used - has))}"


def test_the_parser_hands_frames_to_the_methods_that_are_replaced() -> None:
    """A method that is still there and not called any more would be replaced in vain."""
    calls = {
        node.func.attr
        for node in ast.walk(tree(WebSocketsSansIOProtocol))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "self"
    }
    handlers = {name for name in vars(RealtimeWebSocket) if name.startswith("handle_")}
    assert handlers and handlers | {"send_receive_event_to_app"} <= calls
    named = {
        node.attr
        for node in ast.walk(tree(WebSocketsSansIOProtocol))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    assert "keepalive_timeout" in named, "the timer of a pong calls it"


def test_fragments_are_kept_as_pieces_of_one_message() -> None:
    """`handle_cont` joins them in place; the first frame of a message must be the only one in the list."""
    source = inspect.getsource(WebSocketsSansIOProtocol)
    assert source.count("self.frames = [event.data]") == 2 and "self.frames.append(event.data)" in source


def test_the_queue_that_is_replaced_is_used_through_what_ours_has() -> None:
    uses = {
        node.attr
        for node in ast.walk(tree(WebSocketsSansIOProtocol))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "queue"
    }
    assert uses and uses <= set(dir(uvicorn_protocols._Mailbox)), uses


def test_frames_are_unmasked_and_states_named_as_the_short_way_for_frames_needs_it() -> None:
    assert uvicorn_protocols.apply_mask is frames.apply_mask  # type: ignore[attr-defined]
    assert bytes(frames.apply_mask(b"\x01\x02\x03\x04\x05", b"\x01\x01\x01\x01")) == b"\x00\x03\x02\x05\x04"  # type: ignore[attr-defined]
    assert State.OPEN in State and isinstance(inspect.getattr_static(Protocol, "state"), property)


def test_h11_has_the_states_that_deadlines_follow() -> None:
    for name in ("IDLE", "SEND_BODY", "SEND_RESPONSE"):
        assert getattr(h11, name)
    connection: Any = h11.Connection(h11.SERVER)
    assert connection.their_state is h11.IDLE and connection.our_state is h11.IDLE


def test_uvicorn_takes_the_options_and_classes_that_the_server_gives() -> None:
    source = ast.parse(Path(app.__file__).read_text())
    (call,) = [
        node
        for node in ast.walk(source)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "uvicorn.Config" and node.keywords
    ]
    given = {keyword.arg for keyword in call.keywords}
    assert given <= set(inspect.signature(uvicorn.Config).parameters), given
