"""Keyword trees: which tokens get a bonus, when it is lost, and that the state depends on the text alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import exp, log1p
from random import Random
from string import ascii_lowercase

import numpy as np
import pytest

from engine.options import Keyword, check_keywords, keywords_text
from engine.runner import bias
from engine.runner.bias import AT_WORD, FULL_WORTH, IN_WORD, KeywordTree, KeywordTrees, TokenIndex
from engine.spec import Vocabulary

PIECES = [
    *("", " K", " Kit", " k", "it", "t", "il", "ila", "a", "K", "Kit", " the", ".", "-", "n", "s"),
    *(" An", "na", " Van", " van", " der", " Der", " Ber", "by", "ber", "g", "Ber", " ", "'", "i", "l"),
    *(" L", "ó", "d", "ź", "ł", " l", "L"),
    # What the longer ones are joined from.
    *(" A", " V", " v", "an", " d", " D", "er", " B", "b", "y"),
]
TOKENS = {piece: token for token, piece in enumerate(PIECES)}
PLAIN = Vocabulary([piece.encode() for piece in PIECES])
MARKER = len(PIECES)
# The first piece is its blank.
ANNOUNCING = Vocabulary([*PLAIN.pieces, b""], word_marker=MARKER)


def tree(*words: str | Keyword, vocabulary: Vocabulary = PLAIN) -> KeywordTree:
    keywords = [word if isinstance(word, Keyword) else Keyword(word) for word in words]
    return KeywordTree(keywords, TokenIndex(vocabulary))


def favours(keywords: KeywordTree, *said: str) -> dict[str, float]:
    """What each favoured piece gets behind a text."""
    state = keywords.state_after(TOKENS[piece] for piece in said)
    return favours_in(keywords, state)


def favours_in(keywords: KeywordTree, state: int) -> dict[str, float]:
    """By trying: a piece gets so much that it is said although another one leads, and both together weigh just less."""
    found = {}
    for token, piece in enumerate(PIECES):
        low, high = 0.0, 100.0
        while high - low > 1e-3:
            middle = (low + high) / 2
            logits = np.full(len(PIECES) + 2, -200.0, np.float32)
            logits[len(PIECES) + 1] = middle
            logits[token] = 0.0
            low, high = (middle, high) if keywords.choose(state, logits, len(PIECES) + 1) == token else (low, middle)
        if high > 1e-2:
            found[piece] = round(log1p(exp(low)), 2)
    return found


def letters(count: int) -> float:
    return FULL_WORTH * min(1.0, count / 5)


def test_a_tokeniser_joins_first_what_was_learned_first() -> None:
    index = TokenIndex(
        Vocabulary([piece.encode() for piece in ("", "a", "b", "c", "bc", "ab", "abab", "ó", " ", " b")])
    )
    assert index.tokenise(b"abc") == [b"a", b"bc"]
    assert index.tokenise(b"ababc") == [b"ab", b"a", b"bc"]
    assert index.tokenise("bóx bc".encode()) == [b"b", "ó".encode(), b"x", b" ", b"bc"]
    # A letter without a token is cut into its bytes, and so is one that was torn.
    assert index.tokenise("łó".encode()[:-1]) == [b"\xc5", b"\x82", b"\xc3"]


def test_only_the_usual_cut_of_a_keyword_is_favoured_and_every_cut_leads_on_in_it() -> None:
    keywords = tree("Kittila")
    assert favours(keywords) == {" Kit": letters(3), " k": letters(1), "Kit": letters(3)}
    expected = {"t": letters(4)}
    for said in ([" Kit"], [" K", "it"], [" k", "it"], [" ", "Kit"], [" the", " K", "i", "t"], ["-", "Kit"]):
        inside = {piece: bonus for piece, bonus in favours(keywords, *said).items() if not piece.startswith(" ")}
        assert inside == expected, said
    # Without single letters nothing can be joined: the longest token is the usual one.
    words = Vocabulary([b"", b" Ki", b" Kitt", b"ila"])
    entries = KeywordTree([Keyword("Kittila")], TokenIndex(words)).entries
    assert {token: edge.bonus for token, edge in entries.items()} == {1: 0.0, 2: letters(4)}
    # What is usual in one keyword is favoured, whether or not another one has it too.
    assert favours(tree("Kittila", "K"))[" K"] == letters(1)


def test_what_the_beginning_got_is_given_back_when_the_word_breaks_off() -> None:
    """Behind four letters the fifth has the worth of all five against anything else; behind the word all is even."""
    keywords = tree("Kittila")
    assert favours(keywords, " Kit", "t")["ila"] == letters(7)
    assert favours(keywords, " Kit", "t", "il")["a"] == letters(7)
    behind = favours(keywords, " Kit", "t", "ila")
    assert behind == favours(keywords, " the") == {" Kit": letters(3), " k": letters(1)}
    assert favours(keywords, " Kit", "n") == behind


def test_a_word_begins_where_a_word_can_begin() -> None:
    keywords = tree("Kittila")
    assert keywords.state_after([TOKENS[" the"]]) == keywords.state_after([TOKENS["'"]]) == IN_WORD
    assert (
        keywords.state_after([TOKENS["-"]])
        == keywords.state_after([TOKENS["."]])
        == keywords.state_after([])
        == AT_WORD
    )
    assert "K" not in favours(keywords, " the")


def test_a_keyword_that_another_one_begins_with_keeps_what_it_got() -> None:
    keywords = tree("An", "Anna")
    assert favours(keywords, " An")["na"] == pytest.approx(letters(4) - letters(2), abs=0.01)
    assert favours(tree("Anna"), " An")["na"] == letters(4)


def test_terms_of_several_words_and_keywords_within_them() -> None:
    keywords = tree("van der Berg", "Derby")
    assert favours(keywords, " van")[" der"] == letters(7)
    assert favours(keywords, " Van", " der")[" Ber"] == letters(11)
    # The second word of the term may begin another keyword.
    assert favours(keywords, " van", " der")["by"] == letters(5)
    assert "Ber" not in favours(keywords, " van", " ")
    assert favours(keywords, " Van", " Der", " Ber")["g"] == letters(12)


def test_letters_of_several_bytes() -> None:
    keywords = tree("Łódź")
    assert favours(keywords, " ", "ł") == {"ó": letters(2)}
    assert favours(keywords, " ", "ł", "ó", "d") == {"ź": letters(4)}


def test_a_boost_scales_the_worth() -> None:
    assert favours(tree(Keyword("Kittila", 0.5)), " Kit")["t"] == letters(4) / 2
    # A keyword that shares its beginning with a louder one is not held back by what that one got.
    assert favours(tree(Keyword("An", 10.0), "Anna"), " An").get("na", 0.0) == 0.0


def test_a_model_that_has_no_idea_is_not_talked_into_a_keyword() -> None:
    """The keyword lacks as much to the best guess in both cases; in one of them the rest is as likely together."""
    keywords, first = tree("Kittila"), TOKENS[" Kit"]
    sure, unsure = np.full((2, 200), -30.0, np.float32)
    unsure[len(PIECES) :] = -0.1
    for logits, said in ((sure, first), (unsure, 199)):
        logits[199], logits[first] = 0.0, 0.5 - letters(3)
        assert keywords.choose(AT_WORD, logits, 199) == said


def test_tokens_without_letters_change_nothing() -> None:
    keywords = tree("Kittila")
    assert favours(keywords, " Kit", "")["t"] == letters(4)


def test_a_model_that_announces_words_is_not_hurried() -> None:
    keywords = tree("Kittila", "van der Berg", vocabulary=ANNOUNCING)
    blank = TOKENS[""]
    waiting = keywords.state_after([blank])
    assert waiting < 0 and favours_in(keywords, waiting) == {}
    announced = keywords.after(waiting, MARKER)
    assert favours_in(keywords, announced)[" Kit"] == letters(3)
    # A term goes on behind the wait for its second word.
    state = announced
    for token in (TOKENS[" van"], blank, blank):
        state = keywords.after(state, token)
    assert favours_in(keywords, state) == {}
    assert favours_in(keywords, keywords.after(state, MARKER))[" der"] == letters(7)


def test_the_same_list_is_one_tree_and_a_longer_one_is_refused() -> None:
    trees = KeywordTrees(PLAIN)
    option = {"keywords": keywords_text([Keyword("Kittila")])}
    assert trees.tree({}) is None and trees.tree(option) is trees.tree(dict(option))
    repeated = [Keyword(f"{number:03d}" + "it" * 30) for number in range(400)]
    with pytest.raises(ValueError, match="too long together"):
        trees.tree({"keywords": keywords_text(repeated)})


BYTES = Vocabulary([bytes([byte]) for byte in range(256)])


@pytest.mark.parametrize(
    "words",
    [
        [f"{number:03d}" + " x" * 30 for number in range(500)],
        [f"{number:03d}" + "it" * 30 for number in range(500)],
        [f"{number:03d}" + "\U00010428" * 61 for number in range(500)],
    ],
    ids=["terms of many words", "long words", "letters of four bytes"],
)
def test_a_list_that_is_too_long_is_not_built_first(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """All streams wait for the engine to do that."""
    sizes = [0]
    check = bias._check_size

    def note(pieces: int) -> None:
        sizes.append(pieces)
        check(pieces)

    monkeypatch.setattr(bias, "_check_size", note)
    with pytest.raises(ValueError, match="too long together"):
        tree(*words, vocabulary=BYTES)
    assert max(sizes) <= bias.MAX_EDGES + 1_000


def test_as_many_names_as_may_be_given_are_all_favoured() -> None:
    """A few may not be followed where one begins within another; none is refused, and none is left out."""
    some = Random(1)
    names = ["".join(some.choices(ascii_lowercase, k=12)).title() for _ in range(500)]
    names = [f"{name[:6]} {name[6:].title()}" for name in names]
    check_keywords([Keyword(name) for name in names])
    keywords = tree(*names, vocabulary=BYTES)
    assert keywords.edge_count == bias.MAX_EDGES
    for name in names:
        for text in (name, name.lower()):
            state = AT_WORD
            for byte in text.encode():
                edge = keywords.edges[state][byte]
                assert edge.bonus, text
                state = edge.node


def test_a_tree_is_made_when_it_is_first_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All streams wait for that, and many that are opened never speak."""
    trees, option = KeywordTrees(PLAIN), {"keywords": keywords_text([Keyword("Kittila")])}
    with monkeypatch.context() as patch:
        patch.setattr(TokenIndex, "beginnings", None)
        trees.check(option)
        late = trees.lazy_tree(option)
    assert late is not None and late.tree is late.tree is trees.tree(option) and trees.lazy_tree({}) is None
    with pytest.raises(ValueError, match="too long together"):
        trees.check({"keywords": keywords_text([Keyword(f"{number:03d}" + "it" * 30) for number in range(400)])})


def test_a_list_that_many_streams_have_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an engine was lost, all of them come to another at once."""
    trees, option = KeywordTrees(PLAIN), {"keywords": keywords_text([Keyword("Kittila")])}
    trees.check(option)
    monkeypatch.setattr(bias, "_check_size", None)
    trees.check(option)


@pytest.mark.parametrize(("limit", "refused"), [(200, True), (5000, False)])
@pytest.mark.parametrize("seed", range(5))
def test_a_list_is_refused_when_it_is_opened_if_its_tree_could_not_be_built(
    seed: int, limit: int, refused: bool
) -> None:
    """The check only counts, because the thread of all streams does it."""
    some = Random(seed)
    words = ["".join(some.choices("aBcÄß\U00010428 ", k=some.randint(1, 12))).strip() or "x" for _ in range(60)]
    keywords = [Keyword(" ".join(word.split())) for word in words]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bias, "MAX_EDGES", limit)
        trees = KeywordTrees(PLAIN)
        assert refuses(trees.check, keywords) == refuses(trees.tree, keywords) == refused


def refuses(take: Callable[[dict[str, str]], object], keywords: list[Keyword]) -> bool:
    try:
        take({"keywords": keywords_text(keywords)})
    except ValueError:
        return True
    return False


def test_what_keywords_begin_with_in_common_is_spelled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spelled, beginnings = [], TokenIndex.beginnings

    def note(self: TokenIndex, text: bytes) -> Iterator[tuple[int, int]]:
        spelled.append(text)
        return beginnings(self, text)

    monkeypatch.setattr(TokenIndex, "beginnings", note)
    tree(*(f"{'a' * 50}{number:03d}" for number in range(300)), vocabulary=BYTES)
    # With and without a capital, once behind a space and once for each of the four letters that differ.
    assert len(spelled) <= 2 * 300 * 5 + 60
