from __future__ import annotations

from benchmarks.scoring import TimedWord
from benchmarks.seams import SeamErrors, compare, seams_of

WHOLE = "And so, ask not what your country can do. Ask what you can do."


def test_the_same_text_has_no_errors() -> None:
    assert compare(WHOLE, WHOLE.split(), {3, 9}) == SeamErrors(seams=2, elsewhere=11)


def test_a_pause_taken_for_the_end_of_a_sentence() -> None:
    words = WHOLE.replace("not what", "not. What").split()
    assert compare(WHOLE, words, {4}) == SeamErrors(1, 1, 1, 12)
    assert compare(WHOLE, words, {5}) == SeamErrors(1, 0, 0, 12, 1, 1)


def test_words_that_were_heard_otherwise_are_not_compared() -> None:
    words = WHOLE.replace("ask not what", "asked. Not which").split()
    assert compare(WHOLE, words, {3}).elsewhere == 9


def test_faults_that_need_no_comparison() -> None:
    found = compare("", "In short,, it was before us. we had. Well ... no, U.S. law".split(), ())
    assert (found.doubled_marks, found.small_letters_behind_sentences) == (1, 1)


def test_a_seam_lies_where_one_utterance_ends_and_the_next_begins() -> None:
    words = [TimedWord("a", 0.1, 0.4), TimedWord("b", 0.5, 0.9), TimedWord("c", 2.0, 2.2), TimedWord("d", 2.3, 2.4)]
    assert seams_of(words, [(0.0, 1.0), (1.9, 2.5)]) == {2}
    assert seams_of(words, [(0.0, 2.5)]) == set()
