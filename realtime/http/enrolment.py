"""The names and reference recordings of speakers in an upload's form; `realtime/serving/enrolment.py` enrols them.

The fields are OpenAI's: `known_speaker_names[]`, and `known_speaker_references[]` with data URLs.
"""

from __future__ import annotations

from realtime.http.upload_forms import MAX_REFERENCE_BYTES, Form
from realtime.serving.enrolment import REFERENCES, Reference, base64_of, check_speaker_names, refused

NAMES = "known_speaker_names"


def read_references(form: Form) -> list[Reference]:
    """The names and recordings of a form; the recordings are not decoded. Raises Refusal."""
    names = form.texts(f"{NAMES}[]", MAX_REFERENCE_BYTES) + form.texts(NAMES, MAX_REFERENCE_BYTES)
    urls = form.texts(f"{REFERENCES}[]", MAX_REFERENCE_BYTES) + form.texts(REFERENCES, MAX_REFERENCE_BYTES)
    if len(names) != len(urls):
        text = f"'{NAMES}' has {len(names)} entries and '{REFERENCES}' {len(urls)}; send one recording for each name."
        raise refused(text, NAMES)
    check_speaker_names(names, NAMES)
    return [(name, base64_of(name, url)) for name, url in zip(names, urls, strict=True)]
