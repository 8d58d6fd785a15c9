"""The files in which webhooks wait: one for each process, taken over when a process has ended."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from realtime.serving import webhooks
from realtime.serving.webhooks import StoredEvent, WebhookStore
from tests.waiting import until

ROOT = Path(__file__).parents[3]
# Opens a store, adds events with this session's name, waits until they are written, and says so.
PROGRAM = """
import asyncio, sys
from realtime.serving.webhooks import StoredEvent, WebhookStore

async def main():
    store = WebhookStore(sys.argv[1])
    found = await store.open()
    for number in range(int(sys.argv[3])):
        store.add(StoredEvent(1000 + number, "a", "http://x/", sys.argv[2], "k", float(number), 0, b"{}"))
    while store.unwritten:
        await asyncio.sleep(0.01)
    print(len(found), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[None]:
    """The tests look at the files; that the event loop does not wait for them is tested with a whole server."""
    yield


def event(number: int, session: str = "sess") -> StoredEvent:
    return StoredEvent(number, "account", "http://x/", session, "session.final", float(number), 0, b"{}")


async def test_what_was_added_and_not_removed_is_there_again_in_order(tmp_path: Path) -> None:
    store = WebhookStore(str(tmp_path / "new"))
    assert await store.open() == []
    for number in range(1, 101):
        store.add(event(number))
        if number % 2:
            store.remove(number)
    store.add(StoredEvent(2, "account", "http://x/", "sess", "session.final", 2.0, 7, b"{}"))
    assert await store.close(30.0)
    assert oct(os.stat(tmp_path / "new").st_mode)[-3:] == "700"
    assert oct(os.stat(tmp_path / "new" / "webhooks-0.sqlite").st_mode)[-3:] == "600"
    again = WebhookStore(str(tmp_path / "new"))
    kept = await again.open()
    assert [one.number for one in kept] == list(range(2, 101, 2)) and kept[0].dropped == 7
    for one in kept:
        again.remove(one.number)
    assert await again.close(30.0)
    last = WebhookStore(str(tmp_path / "new"))
    assert await last.open() == []
    assert await last.close(30.0)


async def test_events_that_are_removed_while_they_are_written_are_gone(tmp_path: Path) -> None:
    store = WebhookStore(str(tmp_path))
    await store.open()
    for number in range(1, 300):
        store.add(event(number))
        await asyncio.sleep(0)
        store.remove(number)
        await asyncio.sleep(0)
    assert await store.close(30.0)
    again = WebhookStore(str(tmp_path))
    assert await again.open() == []
    await again.close(30.0)


async def test_a_file_may_be_closed_while_it_is_written(tmp_path: Path) -> None:
    """SQLite ends the process if a connection is closed while another thread uses it."""
    for turn in range(20):
        store = WebhookStore(str(tmp_path / str(turn)))
        await store.open()
        for number in range(1, 200):
            store.add(event(number))
        await asyncio.sleep(0.0005 * turn)
        await store.close(0.0 if turn % 2 else 5.0)


async def test_an_event_that_was_written_changed_and_removed_is_gone(tmp_path: Path) -> None:
    store = WebhookStore(str(tmp_path))
    await store.open()
    store.add(event(1))
    await until(lambda: not store.unwritten)
    store.add(replace(event(1), dropped=1))
    store.remove(1)
    assert await store.close(30.0)
    assert await taken_over(tmp_path) == []


def begin(folder: Path, session: str, events: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", PROGRAM, str(folder), session, str(events)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def told(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def test_processes_have_files_of_their_own_and_the_next_one_takes_over_what_was_killed(tmp_path: Path) -> None:
    started = [begin(tmp_path, "one", 3)]
    try:
        assert told(started[0]) == 0
        started.append(begin(tmp_path, "two", 4))
        assert told(started[1]) == 0, "it has taken what a running process has"
        assert len(list(tmp_path.glob("*.sqlite"))) == 2
        for process in started:
            process.send_signal(signal.SIGKILL)
            process.wait()
        kept = asyncio.run(taken_over(tmp_path))
        assert sorted(one.session for one in kept) == ["one"] * 3 + ["two"] * 4
        assert len({one.number for one in kept}) == 7
        for session in ("one", "two"):
            times = [one.at for one in kept if one.session == session]
            assert times == sorted(times)
        # They were moved into one file, and are there once.
        assert len(asyncio.run(taken_over(tmp_path))) == 7
    finally:
        for process in started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


async def taken_over(folder: Path) -> list[StoredEvent]:
    store = WebhookStore(str(folder))
    kept = await store.open()
    assert await store.close(30.0)
    return kept


async def test_a_damaged_file_is_left_and_another_one_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "webhooks-0.sqlite").write_bytes(b"noise" * 1000)
    store = WebhookStore(str(tmp_path))
    assert await store.open() == []
    store.add(event(1))
    assert await store.close(30.0)
    assert "cannot read" in caplog.text
    assert [one.number for one in await taken_over(tmp_path)] == [1]
    assert (tmp_path / "webhooks-0.sqlite").read_bytes() == b"noise" * 1000


async def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"webhooks\.folder: .*/file"):
        await WebhookStore(str(tmp_path / "file")).open()


async def test_a_folder_without_permission_to_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def touch(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    # The tests may run as root, whom permissions do not stop.
    monkeypatch.setattr(Path, "touch", touch)
    with pytest.raises(OSError, match=r"^webhooks\.folder: cannot use '.*': Permission denied$"):
        await WebhookStore(str(tmp_path)).open()


async def test_a_disk_that_is_full_at_the_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = WebhookStore(str(tmp_path)), WebhookStore(str(tmp_path))
    for store in (one, two):
        await store.open()
        store.add(event(1))
    for store in (one, two):
        assert await store.close(30.0)

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    # The events of the second file are written into the first.
    with monkeypatch.context() as patch:
        patch.setattr(WebhookStore, "_write", full)
        with pytest.raises(OSError, match=r"^webhooks\.folder: cannot use '.*': database or disk is full$"):
            await WebhookStore(str(tmp_path)).open()
    assert len(await taken_over(tmp_path)) == 2


async def test_order_is_that_of_arrival_also_if_the_clock_was_set_back(tmp_path: Path) -> None:
    store = WebhookStore(str(tmp_path))
    await store.open()
    for number in range(1, 6):
        store.add(replace(event(number), at=1000.0 - number))
    assert await store.close(30.0)
    assert [one.number for one in await taken_over(tmp_path)] == [1, 2, 3, 4, 5]


async def test_a_file_of_a_server_that_did_not_keep_who_named_the_url_is_read(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "webhooks-0.sqlite")) as file, file:
        file.execute(
            "create table events (number integer primary key, account text, url text, session text, kind text, "
            "at real, dropped integer, data blob)"
        )
        file.execute("insert into events values (1, 'account', 'http://x/', 'sess', 'session.final', 1.0, 0, '{}')")
    store = WebhookStore(str(tmp_path))
    assert [(one.number, one.named) for one in await store.open()] == [(1, True)]
    store.add(event(2))
    assert await store.close(30.0)
    assert [(one.number, one.named) for one in await taken_over(tmp_path)] == [(1, True), (2, False)]


async def test_what_a_full_disk_never_took_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full for days, and webhooks are delivered all the time."""
    store = WebhookStore(str(tmp_path))
    await store.open()
    store.add(event(1))
    await until(lambda: not store.unwritten)

    def full(added: object, removed: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(webhooks, "RETRY_S", 0.01)
        patched.setattr(store, "_write", full)
        for number in range(2, 500):
            store.add(event(number))
            if not number % 100:
                await until(lambda: store._has_failed)
            store.remove(number)
        store.remove(1)
        # Those of a write that runs are remembered until it has failed.
        await until(lambda: store._removed == {1} and not store.unwritten)
    await until(lambda: not store._removed)
    # A number that was removed and comes again is in the file, and can be removed again.
    store.add(event(2))
    await until(lambda: not store.unwritten)
    store.remove(2)
    store.add(event(2))
    await until(lambda: not store.unwritten and not store._removed)
    store.remove(2)
    assert await store.close(30.0)
    again = WebhookStore(str(tmp_path))
    assert await again.open() == []
    assert await again.close(30.0)
