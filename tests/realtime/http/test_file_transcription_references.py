"""References of speakers: nothing is decoded while the form is read, and what cannot be stored is refused by name."""

from __future__ import annotations

import errno
from base64 import b64encode
from typing import Any

import numpy as np
import pytest

from realtime.errors import Refusal
from realtime.http.file_transcription import read_references, read_request
from realtime.http.upload_forms import Form
from realtime.serving import enrolment
from realtime.serving.enrolment import enrolled
from tests.realtime.gateway_doubles import SPEC, FakeEngine


def form_of(*fields: tuple[str, str]) -> Form:
    return Form(fields=[(name.encode(), bytearray(value.encode())) for name, value in fields])


def reference(encoded: str, name: str = "Ada") -> Form:
    url = f"data:audio/wav;base64,{encoded}"
    return form_of(("known_speaker_names[]", name), ("known_speaker_references[]", url))


def test_form_is_read_without_decoding_the_recordings() -> None:
    assert read_references(reference("not base64!")) == [("Ada", "not base64!")]


@pytest.mark.parametrize("url", ["https://example.org/a.wav", "data:audio/wav,abc", "data:audio/wav;base64", ""])
def test_reference_that_is_no_data_url_is_refused(url: str) -> None:
    form = form_of(("known_speaker_names[]", "Ada"), ("known_speaker_references[]", url))
    with pytest.raises(Refusal, match="'Ada' must be a data URL"):
        read_references(form)


def test_model_without_labels_is_refused_before_the_references_are_read() -> None:
    with pytest.raises(Refusal) as refused:
        read_request(form_of(("known_speaker_references[]", "no data URL")), SPEC, None)
    assert "tickertape pull speakers" in refused.value.message


@pytest.mark.parametrize("place", [0, 1, 2, 3])
async def test_padding_is_allowed_at_the_end_only(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrolment, "PIECE_CHARACTERS", 8)
    pieces = ["QUJDREVG"] * 4
    pieces[place] = "QUJDREU="
    if place == 3:
        with pytest.raises(Refusal, match="cannot be read"):  # it is decoded, and is no audio
            await enrolled(FakeEngine(), [("Ada", "".join(pieces))])
    else:
        with pytest.raises(Refusal, match="'Ada' is not valid base64"):
            await enrolled(FakeEngine(), [("Ada", "".join(pieces))])


@pytest.mark.parametrize("encoded", ["A", "AB=", "****", "QUJD\n", "ä"])
async def test_recording_that_is_no_base64_is_refused(encoded: str) -> None:
    with pytest.raises(Refusal, match="'Ada' is not valid base64"):
        await enrolled(FakeEngine(), [("Ada", encoded)])


@pytest.mark.parametrize(
    ("number", "status", "code"),
    [(errno.ENOSPC, 507, "disk_full"), (errno.EMFILE, 503, "too_many_open_files"), (errno.EIO, 507, "storage_failed")],
)
async def test_recording_that_cannot_be_stored_is_refused(
    number: int, status: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> Any:
        raise OSError(number, "no")

    monkeypatch.setattr(enrolment, "TemporaryFile", fails)
    encoded = b64encode(np.zeros(100, np.int16).tobytes()).decode()
    with pytest.raises(Refusal) as refused:
        await enrolled(FakeEngine(), [("Ada", encoded)])
    assert (refused.value.status, refused.value.code) == (status, code)
