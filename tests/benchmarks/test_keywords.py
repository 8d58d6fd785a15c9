"""Which words count as rare, found, wrong and unspoken."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.keywords import COUNTED, Table, Words, measure, reference, total, wrong_keywords

TABLE = Table(
    frozenset({"the", "over", "mine", "color", "they"}), frozenset({"the", "over", "mine", "color", "tailings"})
)


def normalise(text: str) -> Words:
    """Spellings are made alike, and contractions are two words."""
    words = "".join(letter for letter in text.lower() if letter.isalpha() or letter in " '")
    return words.replace("colour", "color").replace("greyish", "grayish").replace("they're", "they are").split()


def test_rare_words_are_given_as_written_and_known_by_their_normalised_form() -> None:
    said = reference("The mine over Kittila, they're a colour: greyish! X1 ash.", TABLE, normalise)
    assert said.rare == {"kittila": "Kittila", "grayish": "greyish"}


def test_wrong_keywords_are_never_said_in_the_clip() -> None:
    clips = [reference(text, TABLE, normalise) for text in ("Kittila tailings", "Gyula tailings", "the mine")]
    wrong = wrong_keywords(clips, 100)
    assert [sorted(words) for words in wrong] == [["Gyula"], ["Kittila"], ["Gyula", "Kittila", "tailings"]]
    assert wrong_keywords(clips, 1) == wrong_keywords(clips, 1) and len(wrong_keywords(clips, 1)[2]) == 1


def test_what_is_found_what_suffers_and_what_is_made_up() -> None:
    texts = ["the mine over Kittila", "the tailings over Gyula"]
    clips = [reference(text, TABLE, normalise) for text in texts]

    def transcribe(lists: Sequence[Words]) -> list[str]:
        if not any(lists):
            return ["the mine over Kitila", "the tailings over you"]
        if "Kittila" in lists[0]:
            return ["the mine over Kittila", "the tailings Gyula"]
        return ["the Gyula over Kitila", "the tailings over you"]

    def counted(keywords: str, *clips: int) -> list[int]:
        chosen = [figures[keywords][clip] for clip in clips] or figures[keywords]
        return [total(chosen)[name] for name in COUNTED]

    figures = measure(clips, transcribe, wrong_keywords(clips, 100), TABLE, normalise)
    assert counted("without") == [3, 1, 2, 0, 0, 0, 5, 0, 8, 0]
    assert counted("own") == [3, 3, 2, 2, 2, 0, 5, 1, 7, 0]
    assert counted("wrong") == [3, 1, 2, 0, 0, 0, 5, 1, 8, 1]
    assert counted("own", 0) == [1, 1, 1, 1, 1, 0, 3, 0, 4, 0]
