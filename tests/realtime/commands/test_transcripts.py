"""A transcript that is saved while it is shown: with full disks, existing files and sudden ends nothing is lost."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from realtime.commands import transcripts
from realtime.commands.terminal import CommandFailed, UsageError
from realtime.commands.transcripts import FORMATS, LIVE_FORMATS, FileTranscript, TranscriptFile, chosen_extension
from realtime.session.events import TimedWord

TEXT = "One two three. Four five six seven eight nine ten eleven twelve thirteen fourteen fifteen! So"


def words(text: str = TEXT) -> list[TimedWord]:
    return [TimedWord(word, 8000 * at, 8000 * at + 6000) for at, word in enumerate(text.split())]


def test_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "talk.srt"
    path.write_text("an hour of work")
    with pytest.raises(UsageError, match=r"talk\.srt exists already"):
        TranscriptFile(path, "srt", False)
    assert path.read_text() == "an hour of work"


@pytest.mark.parametrize("path", ["no/such/folder/talk.txt", "."])
def test_place_that_cannot_be_written_is_said(path: str, tmp_path: Path) -> None:
    with pytest.raises((CommandFailed, UsageError), match="cannot write|exists already"):
        TranscriptFile(tmp_path / path, "txt", False)


@pytest.mark.parametrize("name", ["talk", "talk.doc", ".srt"])
def test_name_without_a_format_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError, match="txt, json, srt, vtt, or add --format"):
        chosen_extension(Path(name), None)
    assert chosen_extension(Path(name), "vtt") == "vtt" and chosen_extension(Path("a.SRT"), None) == "srt"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """How many more bytes there is room for; a write that does not fit is cut, and the next one fails."""
    room: list[int | None] = [None]
    pwrite = os.pwrite

    def limited(fd: int, data: bytes, offset: int) -> int:
        if room[0] is None:
            return pwrite(fd, data, offset)
        beyond = max(0, offset + len(data) - max(room[0], os.fstat(fd).st_size))
        if beyond == len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data[: len(data) - beyond], offset)

    monkeypatch.setattr(transcripts.os, "pwrite", limited)
    return lambda left: room.__setitem__(0, left)


@pytest.mark.parametrize("extension", list(LIVE_FORMATS))
def test_full_disk_is_said_once_and_nothing_is_missing_once_there_is_room(
    extension: str, tmp_path: Path, disk: Callable[[int | None], None]
) -> None:
    troubles: list[str] = []
    file = TranscriptFile(tmp_path / "talk", extension, False)
    file.on_problem = troubles.append
    spoken = words()
    file.add(spoken[:5])
    disk(60)
    for word in spoken[5:14]:
        file.add([word])
    assert len(troubles) == 1 and "No space left on device; captions continue" in troubles[0]
    disk(None)
    for word in spoken[14:]:
        file.add([word])
    file.close()
    assert troubles[1:] == [""]
    assert (tmp_path / "talk").read_text() == whole(extension, spoken, tmp_path / "reference")


def test_full_disk_to_the_end_fails_and_says_how_much_is_missing(
    tmp_path: Path, disk: Callable[[int | None], None], capsys: pytest.CaptureFixture[str]
) -> None:
    file = TranscriptFile(tmp_path / "talk.txt", "txt", False)
    disk(20)
    for word in words():
        file.add([word])
    with pytest.raises(CommandFailed, match=r"2 captions are missing at the end of .*talk\.txt"):
        file.close()
    assert (tmp_path / "talk.txt").read_text().startswith("One two three.\n")
    assert capsys.readouterr().err.count("cannot save to") == 1, "before captions are shown, troubles go to stderr"


def test_what_waits_for_room_is_bounded(
    tmp_path: Path, disk: Callable[[int | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcripts, "MAX_UNSAVED", 3)
    file = TranscriptFile(tmp_path / "talk.txt", "txt", False)
    disk(0)
    file.add(words("A. B. C. D. E."))
    with pytest.raises(CommandFailed, match="5 captions are missing"):
        file.close()


def whole(extension: str, spoken: list[TimedWord], path: Path) -> str:
    """The same words at once."""
    file = TranscriptFile(path, extension, False)
    file.add(spoken)
    file.close()
    return path.read_text()


@pytest.mark.parametrize("extension", list(LIVE_FORMATS))
@pytest.mark.parametrize("with_words", [False, True])
def test_every_word_is_on_the_disk_as_soon_as_it_was_given(extension: str, with_words: bool, tmp_path: Path) -> None:
    """A process that is killed loses nothing that was shown, and what it leaves can be read."""
    path = tmp_path / "talk"
    file = TranscriptFile(path, extension, with_words)
    for number, word in enumerate(words(), start=1):
        file.add([word])
        text = path.read_text()
        assert all(said.text in text for said in words()[:number])
        assert text.count(word.text) >= 1 and text.endswith("\n")
        if extension == "json":
            assert [json.loads(line) for line in text.splitlines()]
    file.close()
    assert path.read_text() == text


@pytest.mark.parametrize("extension", ["srt", "vtt"])
def test_subtitles_are_those_of_transcribe(extension: str, tmp_path: Path) -> None:
    transcript = FileTranscript(tmp_path / "x", "m", 16_000, TEXT, words())
    file = TranscriptFile(tmp_path / "talk", extension, False)
    for word in words():
        file.add([word])
    file.close()
    assert (tmp_path / "talk").read_text() == FORMATS[extension](transcript, False)


@pytest.mark.parametrize("extension", list(LIVE_FORMATS))
def test_words_that_are_not_final_are_on_the_disk_and_give_way_to_the_final_ones(
    extension: str, tmp_path: Path
) -> None:
    path = tmp_path / "talk"
    file = TranscriptFile(path, extension, False)
    final, streamed = words(), words(TEXT.replace("t", "streamed"))
    for count in range(1, 17):
        file.show(streamed[:count])
    assert "streamedwo" in path.read_text()
    file.add(final[:7])
    file.show(streamed[7:])
    file.show([])
    assert "streamed" not in path.read_text()
    file.add(final[7:])
    file.close()
    assert path.read_text() == whole(extension, final, tmp_path / "reference")


def test_words_that_never_became_final_are_kept(tmp_path: Path) -> None:
    file = TranscriptFile(tmp_path / "talk.txt", "txt", False)
    file.add(words("One two."))
    file.show(words("Three"))
    file.close()
    assert (tmp_path / "talk.txt").read_text().split() == ["One", "two.", "Three"]


def test_file_in_which_nothing_was_said_is_not_left_behind(tmp_path: Path) -> None:
    file = TranscriptFile(tmp_path / "talk.vtt", "vtt", False)
    assert (tmp_path / "talk.vtt").read_text() == "WEBVTT\n"
    file.close()
    assert not (tmp_path / "talk.vtt").exists()


@pytest.mark.parametrize(
    "extension,mark",
    [
        ("txt", "[no sound from 00:02.0 to 00:09.5]\n"),
        ("json", '{"gap": true, "start": 2.0, "end": 9.5}\n'),
        ("vtt", "\nNOTE [no sound from 00:02.0 to 00:09.5]\n"),
        ("srt", ""),
    ],
)
def test_gap_is_marked_in_every_format_that_can(extension: str, mark: str, tmp_path: Path) -> None:
    path = tmp_path / "talk"
    file = TranscriptFile(path, extension, False)
    file.add([TimedWord("Before", 0, 16_000)])
    file.add_gap(2.0, 9.5)
    file.add([TimedWord("after.", 160_000, 170_000)])
    file.close()
    text = path.read_text()
    assert mark in text and text.index("Before") <= text.index(mark or "Before") < text.index("after.")
    assert extension != "srt" or text.count(" --> ") == 2
