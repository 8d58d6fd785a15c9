"""Forms: any division of the bytes gives the same fields, and memory use equals the counted bytes."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realtime.config import Config
from realtime.errors import Refusal
from realtime.http.upload_forms import (
    MAX_FIELD_BYTES,
    MAX_FIELDS,
    MAX_FORM_BYTES,
    MAX_FORMS_BYTES,
    MAX_PART_HEAD_BYTES,
    FormParser,
    Spool,
    Upload,
)
from tests.realtime.http.test_upload_forms import LIMITS

TYPE = "multipart/form-data; boundary=b"
END = b"--b--\r\n"


def part(name: str, value: bytes, extra: str = "") -> bytes:
    return f'--b\r\nContent-Disposition: form-data; name="{name}"{extra}\r\n\r\n'.encode() + value + b"\r\n"


FILE = part("file", b"the file's bytes\r\n--", '; filename="a.wav"')


def parsed(body: bytes, cuts: list[int] | None = None) -> tuple[FormParser, bytes]:
    parser = FormParser(TYPE, lambda size, reference: None)
    places = [0, *sorted(cut for cut in cuts or [] if cut < len(body)), len(body)]
    file = b"".join(parser.feed(body[start:end]) for start, end in zip(places, places[1:], strict=False))
    parser.finish()
    return parser, file


@settings(deadline=None)
@given(st.lists(st.integers(0, 300), max_size=20))
def test_a_form_is_the_same_however_it_is_cut(cuts: list[int]) -> None:
    body = part("model", b"m") + part("prompt", "Köln, 東京".encode()) + FILE + part("model", b"") + END
    parser, file = parsed(body, cuts)
    assert file == b"the file's bytes\r\n--" and parser.form.file_field == b"file"
    assert parser.form.texts("model", 10) == ["m", ""] and parser.form.texts("prompt", 10) == ["Köln, 東京"]
    assert parser.form.texts("other", 10) == []


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (part("a", b"x" * (MAX_FIELD_BYTES + 1)) + END, f"a field takes more than {MAX_FIELD_BYTES} bytes"),
        (part("a", b"x") * (MAX_FIELDS + 1) + END, f"more than {MAX_FIELDS} fields"),
        (FILE + FILE + END, "more than one file"),
        (b"--b\r\nX: " + b"x" * MAX_PART_HEAD_BYTES * 2, "cannot be read"),
        (b"--b\r\n" + b"X: y\r\n" * MAX_PART_HEAD_BYTES, "cannot be read"),
        (b"--b\r\nContent-Type: text/plain\r\n\r\nx\r\n" + END, "a part has no name"),
        (
            b"--b\r\nContent-Disposition: form-data; name=a" + b";" * 50 + b"\r\n\r\nx\r\n" + END,
            "a part has more than 32",
        ),
        (part("a", b"x")[:-3], "ends in the middle of a part"),
        (FILE[:-2], "ends in the middle of a part"),
        (b"garbage", "not multipart"),
    ],
)
def test_a_form_that_is_none_is_refused_with_the_reason(body: bytes, reason: str) -> None:
    with pytest.raises(Refusal, match=reason) as refused:
        parsed(body)
    assert (refused.value.status, refused.value.code) == (400, "invalid_form")


@pytest.mark.parametrize(
    "content_type",
    ["multipart/form-data", "multipart/form-data; boundary=", f"multipart/form-data; boundary={'b' * 2000}",
     "multipart/form-data; boundary=b; charset=punycode", f"multipart/form-data; boundary=b{';' * 15_800}"],
)  # fmt: skip
def test_a_type_that_cannot_be_read_is_refused(content_type: str) -> None:
    with pytest.raises(Refusal) as refused:
        FormParser(content_type, lambda size, reference: None)
    assert refused.value.code == "invalid_form"


def test_a_text_that_is_too_long_is_not_decoded() -> None:
    parser, _ = parsed(part("model", b"x" * 60_000) + part("name", "ü".encode() * 11) + END)
    for name in ("model", "name"):
        with pytest.raises(Refusal, match=f"'{name}' must be text of at most 10 characters") as refused:
            parser.form.texts(name, 10)
        assert refused.value.param == name


@pytest.mark.parametrize("letters", ["x" * 60_000, "x" * 60_000 + "😀", ""], ids=["plain", "emoji", "empty"])
def test_what_a_form_holds_is_what_it_counts(letters: str) -> None:
    """A single letter beyond U+FFFF makes a text four times as large; texts that are not used stay bytes."""
    counted = 0

    def hold(size: int, reference: bool) -> None:
        nonlocal counted
        counted += size
        if counted > MAX_FORM_BYTES:
            raise Refusal(413, "form_too_large", "")

    parser = FormParser(TYPE, hold)
    tracemalloc.start()
    try:
        with suppress(Refusal):
            for number in range(MAX_FIELDS):
                parser.feed(part(f"f{number}", letters.encode()))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # What is counted is refused before the next piece is taken, and bookkeeping of the allocator is not in it.
    assert counted > 50_000 and held <= 1.1 * counted + 16_384, (held, counted)


async def test_texts_of_one_form_and_of_all_forms_are_bounded_and_given_back() -> None:
    spool = Spool(Config(limits=LIMITS))
    upload = Upload(spool, 100, "a")
    with pytest.raises(Refusal, match=str(MAX_FORM_BYTES)) as refused:
        for _ in range(2):
            upload.hold_text(MAX_FORM_BYTES // 2 + 1)
    assert refused.value.status == 413 and spool.text_bytes == MAX_FORM_BYTES // 2 + 1
    await upload.release_file()
    assert (spool.text_bytes, spool.uploads) == (0, 1), "its answer is on its way"
    await upload.close()
    spool.reserve_text("b", MAX_FORMS_BYTES)
    other = Upload(spool, 100, "a")
    with pytest.raises(Refusal, match=str(MAX_FORMS_BYTES)) as refused:
        other.hold_text(1)
    assert refused.value.status == 503 and refused.value.retry_after_s
    await other.close()
    assert (spool.text_bytes, spool.uploads) == (MAX_FORMS_BYTES, 0)
