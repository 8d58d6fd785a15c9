"""Parses multipart forms as they arrive.

`FormParser` returns the bytes of the file in each piece of a body, and collects the text fields in a `Form`. Text
fields are kept as bytes and counted while they grow; a text is decoded only when it is needed and not too long, so a
client cannot make the server use much more memory than it sends.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from realtime.errors import Refusal

# The parser logs each invalid form; the client gets the error instead.
logging.getLogger("python_multipart.multipart").setLevel(logging.CRITICAL)

# Enough for all keywords that a stream may have, and all other fields.
MAX_FIELDS = 600
MAX_FIELD_BYTES = 64 * 1024
# A field with the recording of a speaker: ten seconds at 48 kHz in stereo, as base64.
REFERENCE_FIELDS = frozenset({b"known_speaker_references", b"known_speaker_references[]"})
MAX_REFERENCE_BYTES = 2_600_000
# The longest boundary. RFC 2046 allows 70 bytes.
MAX_BOUNDARY_BYTES = 200
# The longest headers of one part, in bytes.
MAX_PART_HEAD_BYTES = 8 * 1024
# Parameters of a header, and semicolons in their values. The time to parse a header grows with them.
MAX_PARAMETERS = 32
# Accepted charsets. Some other codecs of Python take quadratic time.
CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1", "latin-1"})
# Bytes of the longest character.
LETTER_BYTES = 4


@dataclass(slots=True)
class Form:
    """The text fields of a form in order, and the name of the file's field (None if there is no file)."""

    charset: str = "utf-8"
    fields: list[tuple[bytes, bytearray]] = field(default_factory=list)
    file_field: bytes | None = None

    def texts(self, name: str, most: int) -> list[str]:
        """The texts of all fields with this name. Raises Refusal for a text of more than `most` characters."""
        found = [value for known, value in self.fields if known == name.encode()]
        texts = [self._decode(value) for value in found if len(value) <= LETTER_BYTES * most]
        if len(texts) < len(found) or any(len(text) > most for text in texts):
            raise Refusal(400, "invalid_value", f"'{name}' must be text of at most {most} characters.", param=name)
        return texts

    def _decode(self, value: bytearray) -> str:
        try:
            return value.decode(self.charset)
        except UnicodeDecodeError:
            return value.decode("latin-1")


class FormParser:
    """Parses a multipart body into a `Form`, piece by piece."""

    def __init__(self, content_type: str, hold: Callable[[int, bool], None]) -> None:
        """`hold` is called with each number of bytes that the form takes in memory, and whether they belong to a
        speaker's recording; it may raise Refusal. Raises Refusal."""
        if content_type.count(";") > MAX_PARAMETERS:
            raise bad_form(f"its Content-Type has more than {MAX_PARAMETERS} parameters")
        _, parameters = parse_options_header(content_type)
        charset = parameters.get(b"charset", b"utf-8").decode("latin-1").lower()
        if charset not in CHARSETS:
            raise Refusal(400, "invalid_form", "Send the texts of the form as UTF-8.")
        boundary = parameters.get(b"boundary", b"")
        if not 0 < len(boundary) <= MAX_BOUNDARY_BYTES:
            raise bad_form(f"its Content-Type must name a boundary of at most {MAX_BOUNDARY_BYTES} bytes")
        self.form = Form(charset)
        self._hold = hold
        # The header of the current part.
        self._head_bytes = 0
        self._name, self._value, self._disposition = bytearray(), bytearray(), b""
        # The current part is a text (`_text`) or the file (`_in_file`); between two parts and in a header it is
        # neither.
        self._text: bytearray | None = None
        self._in_reference = False
        self._in_file = False
        self._file_bytes: list[bytes] = []
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part,
                "on_header_field": self._on_header_name,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_head,
                "on_part_data": self._on_data,
                "on_part_end": self._on_part_end,
            },
        )

    def feed(self, data: bytes) -> bytes:
        """Parse a piece of the body; returns the bytes of the file in it. Raises Refusal."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise bad_form("it is not multipart/form-data") from error
        found, self._file_bytes = self._file_bytes, []
        return found[0] if len(found) == 1 else b"".join(found)

    def finish(self) -> None:
        """Called at the end of the body. Raises Refusal if the form is incomplete."""
        if self._text is not None or self._in_file:
            raise bad_form("it ends in the middle of a part")

    def close(self) -> None:
        """Release the parser, whose callbacks refer to this object: otherwise both, and the form, would stay in memory
        until a garbage collection."""
        del self._parser

    def _on_part(self) -> None:
        self._disposition, self._head_bytes = b"", 0
        self._name, self._value = bytearray(), bytearray()

    def _on_header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += self._of_head(data, start, end)

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += self._of_head(data, start, end)

    def _of_head(self, data: bytes, start: int, end: int) -> bytes:
        self._head_bytes += end - start
        if self._head_bytes > MAX_PART_HEAD_BYTES:
            raise bad_form(f"the headers of a part take more than {MAX_PART_HEAD_BYTES} bytes")
        return data[start:end]

    def _on_header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._name, self._value = bytearray(), bytearray()

    def _on_head(self) -> None:
        if self._disposition.count(b";") > MAX_PARAMETERS:
            raise bad_form(f"the header of a part has more than {MAX_PARAMETERS} parameters")
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name")
        if name is None:
            raise bad_form("a part has no name")
        self._in_file = b"filename" in options
        if self._in_file:
            if self.form.file_field is not None:
                raise bad_form("it has more than one file")
            self.form.file_field = name
            return
        if len(self.form.fields) == MAX_FIELDS:
            raise bad_form(f"it has more than {MAX_FIELDS} fields")
        self._text = bytearray()
        self._in_reference = name in REFERENCE_FIELDS
        entry = (name, self._text)
        self._hold(sum(map(sys.getsizeof, (entry, *entry))), False)
        self.form.fields.append(entry)

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._file_bytes.append(data[start:end])
            return
        text = self._text
        assert text is not None, "data comes after a header"
        most = MAX_REFERENCE_BYTES if self._in_reference else MAX_FIELD_BYTES
        if len(text) + end - start > most:
            raise bad_form(f"a field takes more than {most} bytes")
        before = sys.getsizeof(text)
        text += data[start:end]
        self._hold(sys.getsizeof(text) - before, self._in_reference)

    def _on_part_end(self) -> None:
        self._text, self._in_file = None, False


def bad_form(reason: str) -> Refusal:
    return Refusal(400, "invalid_form", f"The form cannot be read: {reason}.")
