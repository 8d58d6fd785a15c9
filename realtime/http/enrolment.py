"""The names and reference recordings of speakers in an upload's form; `realtime/serving/enrolment.py` enrols them.

The fields are OpenAI's: `known_speaker_names[]`, and `known_speaker_references[]` with data URLs.
"""

from __future__ import annotations

from engine.options import check_names
from realtime.errors import Refusal
from realtime.http.upload_forms import MAX_REFERENCE_BYTES, Form
from realtime.serving.enrolment import REFERENCES, Reference, base64_of

NAMES = "known_speaker_names"


def read_references(form: Form) -> list[Reference]:
    """The names and recordings of a form; the recordings are not decoded. Raises Refusal."""
    names = form.texts(f"{NAMES}[]", MAX_REFERENCE_BYTES) + form.texts(NAMES, MAX_REFERENCE_BYTES)
    urls = form.texts(f"{REFERENCES}[]", MAX_REFERENCE_BYTES) + form.texts(REFERENCES, MAX_REFERENCE_BYTES)
    if len(names) != len(urls):
        text = f"'{NAMES}' has {len(names)} entries and '{REFERENCES}' {len(urls)}; send one recording for each name."
        raise _refused(text, NAMES)
    try:
        check_names(names)
    except ValueError as error:
        raise _refused(f"'{NAMES}': {error}.", NAMES) from None
    return [(name, base64_of(name, url)) for name, url in zip(names, urls, strict=True)]


def _refused(text: str, param: str) -> Refusal:
    return Refusal(400, "invalid_value", text, param=param)
