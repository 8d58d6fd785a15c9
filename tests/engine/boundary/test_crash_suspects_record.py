"""The record of the streams in the current step."""

from __future__ import annotations

from pathlib import Path

from engine.boundary.crash_suspects import RECORD_BYTES, CrashRecord, StreamInStep

FLIGHTS = [StreamInStep("g/1/a", 3, 7), StreamInStep("h/12/ä/b", 0, 1)]


def test_another_process_reads_what_was_written_and_nothing_after_a_wipe(tmp_path: Path) -> None:
    writer, reader = CrashRecord.at(tmp_path / "record"), CrashRecord.at(tmp_path / "record")
    assert reader.read() == []
    writer.write(FLIGHTS)
    assert reader.read() == FLIGHTS
    writer.write(FLIGHTS[:1])
    assert reader.read() == FLIGHTS[:1]
    writer.wipe()
    assert reader.read() == []
    for record in (writer, reader):
        record.close()


def test_more_than_fits_is_unknown_not_wrong(tmp_path: Path) -> None:
    record = CrashRecord.at(tmp_path / "record")
    record.write([StreamInStep("x" * 1000, 0, 1)] * (RECORD_BYTES // 1000))
    assert record.read() is None
    record.write(FLIGHTS)
    assert record.read() == FLIGHTS
    record.close()


def test_a_torn_record_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "record"
    record = CrashRecord.at(path)
    record.write(FLIGHTS)
    with path.open("r+b") as file:
        file.seek(4)
        file.write(b"\xc1\xc1")
    assert record.read() is None
    record.close()


def test_a_record_in_memory_holds_whatever_it_is_given() -> None:
    record = CrashRecord()
    assert record.read() == []
    record.write(FLIGHTS * 20_000)
    assert record.read() == FLIGHTS * 20_000
    record.wipe()
    assert record.read() == []


def test_a_gateway_knows_its_own_streams() -> None:
    assert [flight.stream_of("h") for flight in FLIGHTS] == [None, "ä/b"]
    assert FLIGHTS[0].stream_of("g") == "a"
