from hypothesis import given
from hypothesis import strategies as st

from engine.core.stream import MAX_WORD_CHARACTERS, Detokenizer, WordBuilder
from engine.messages import Word
from engine.spec import Vocabulary

BYTES = Vocabulary([bytes([value]) for value in range(256)] + [b""])
BLANK = 256


@given(st.text(max_size=40), st.lists(st.integers(0, 40), max_size=5))
def test_bytes_become_the_text_they_spell_whatever_lies_between(text: str, blanks: list[int]) -> None:
    tokens = list(text.encode())
    for place in blanks:
        tokens.insert(min(place, len(tokens)), BLANK)
    detokenizer = Detokenizer(BYTES)
    assert "".join(map(detokenizer.push, tokens)) + detokenizer.flush() == text


def test_invalid_bytes_become_replacement_characters_and_nothing_sticks() -> None:
    detokenizer = Detokenizer(BYTES)
    text = "".join(map(detokenizer.push, b"a\xff\xfeb\xc3"))
    assert text == "a��b"
    assert detokenizer.flush() == "�"
    assert detokenizer.flush() == ""
    assert detokenizer.push(ord("c")) == "c"


def test_the_tail_is_bounded() -> None:
    detokenizer = Detokenizer(BYTES)
    for token in b"\xf0\x9f\x98\x80" * 1000 + b"\xf0\x9f\x98":
        detokenizer.push(token)
        assert len(detokenizer.tail) <= 3


def test_words_begin_at_spaces() -> None:
    builder = WordBuilder()
    done = [builder.push(" he", 0, 80), builder.push("llo", 80, 160), builder.push(" world", 160, 320)]
    assert [word for word in done if word] == [Word("hello", 0, 160)]
    assert builder.flush() == Word("world", 160, 320)
    assert builder.flush() is None


def test_a_marker_gives_the_word_its_time() -> None:
    builder = WordBuilder()
    assert builder.mark(1000) is None
    assert builder.push(" hi", 2000, 2080) is None
    assert builder.mark(3000) == Word("hi", 1000, 2080)


def test_punctuation_stays_with_its_word() -> None:
    builder = WordBuilder()
    builder.push(" yes", 0, 80)
    assert builder.push(",", 80, 90) is None
    assert builder.push(" but", 200, 280) == Word("yes,", 0, 80)


def test_a_word_brings_the_chances_of_its_tokens() -> None:
    builder = WordBuilder()
    builder.push(" yes", 0, 80)
    builder.note_log_probability(b" yes", -0.5)
    builder.push(",", 80, 90)
    builder.note_log_probability(b",", -2.0)
    twin = WordBuilder()
    twin.resume(*builder.unfinished)
    for each in (builder, twin):
        assert each.push(" but", 200, 280) == Word("yes,", 0, 80, [(b" yes", -0.5), (b",", -2.0)])
        each.note_log_probability(b" but", -0.1)
        assert each.flush() == Word("but", 200, 280, [(b" but", -0.1)])


def test_a_word_ends_with_its_letters_and_not_with_its_marks() -> None:
    """The model looks at the silence behind a sentence when it says its full stop."""
    builder = WordBuilder()
    for text, start, end in (
        (" you", 0, 80),
        (".", 80, 1000),
        (" $", 1100, 1110),
        ("5", 1110, 1200),
        (" \u266a", 2000, 2100),
    ):
        builder.push(text, start, end)
        if text == ".":
            assert builder.flush() == Word("you.", 0, 80)
        if text == "5":
            assert builder.flush() == Word("$5", 1100, 1200)
    assert builder.flush() == Word("\u266a", 2000, 2100), "it has no letters"


def test_a_lone_space_is_not_a_word() -> None:
    builder = WordBuilder()
    assert builder.push(" ", 0, 80) is None
    assert builder.push("a", 80, 160) is None
    assert builder.flush() == Word("a", 80, 160)


def test_text_without_spaces_is_cut_into_bounded_words() -> None:
    builder = WordBuilder()
    longest = 0
    for _ in range(1_000):
        word = builder.push("漢字", 0, 80)
        longest = max(longest, len(word.text) if word else 0)
    assert 0 < longest <= MAX_WORD_CHARACTERS + 2
