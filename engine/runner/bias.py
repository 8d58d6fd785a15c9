"""Keyword biasing: raises the scores of tokens with which an expected word may begin or continue (both runners use it).

The decoder of windowed models asks a `KeywordTree` token by token; `BiasTables` holds the trees of all streams on the
device of the frame-synchronous runner. The keywords of a stream are a tree of their letters. A token moves along the
tree by its letters, however the keyword is tokenised, so a model that spells a word in an unusual way still finds the
rest of it. A keyword is favoured as given, in lower case and with capital initials; all three lead to the same node.

A node's *worth* rises with the number of letters that lead to it. A token that continues a keyword as the tokeniser
would gets a bonus: the worth of the node that it leads to, less the worth of a whole keyword that was complete before
it. A token that leaves the keyword gets none. A short beginning is worth little, because many other words begin like
it. Tokens that occur only in an unusual tokenisation of a keyword get no bonus: models use the tokeniser's
pieces, so such a token is a sign of another word.

A token is favoured only if its logit with the bonus exceeds the log-sum-exp of all logits without one. Where a model
has no idea, a hundred tokens are nearly as likely as its best guess, and a keyword must not be forced then.

The state of a stream in its tree is a number that depends only on its tokens. So the text does not depend on load or on
how the audio was split, and a draft is checked exactly as it would be decoded.

A frame-synchronous model outputs a token for the start of a word before each word, and blanks between words. In blanks
no token gets a bonus, or words would come too early. While the model waits, its state is the bitwise complement (~) of
the number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.options import Keyword, read_keywords
from engine.runner.bpe import joined_pairs, single_bytes
from engine.spec import Vocabulary

# Worth of a whole keyword, as a log-probability, and the number of letters after which a beginning has all of it. More
# finds a few more keywords but spoils more other words.
FULL_WORTH = 4.0
FULL_LETTERS = 5

# Most edges of a stream's tree. Those of usual tokenisations are added first.
MAX_EDGES = 16_384
# Number of keyword lists whose trees are cached for later streams with the same list.
KEPT_TREES = 8

# States outside all keywords: a keyword may begin with the next letter, or only after a space.
AT_WORD, IN_WORD = 0, 1
# Effects of tokens without letters: end the wait for a word, or begin it.
STAY, WAIT = -1, -2


class Edge(NamedTuple):
    """The effect of a token in one state of the tree."""

    # Target state.
    node: int
    # Added to the token's logit.
    bonus: float


Edges = dict[int, Edge]


class Spelling:
    """The tokens of a vocabulary by their bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        # Of two tokens with the same bytes the first is a single byte, which models do not use.
        self._tokens = {piece: token for token, piece in enumerate(vocabulary.pieces) if piece}
        self.longest = max(map(len, self._tokens), default=0)
        # The state after each token if it is not part of a keyword, or STAY or WAIT.
        self.outside_states = [_state_outside(piece) if piece else STAY for piece in vocabulary.pieces]
        if vocabulary.word_marker is not None:
            for token in vocabulary.blanks:
                self.outside_states[token] = WAIT

    def beginnings(self, text: bytes) -> Iterator[tuple[int, int]]:
        """Every token that `text` begins with, and its length in bytes."""
        for length in range(1, min(len(text), self.longest) + 1):
            token = self._tokens.get(text[:length])
            if token is not None:
                yield token, length

    def has(self, text: bytes) -> bool:
        """Whether the text is a single token."""
        return text in self._tokens

    def cut(self, text: bytes) -> list[bytes]:
        """`text` as the tokeniser splits it: token numbers are the ranks of merges."""
        return joined_pairs(self._letters(text), self._tokens)

    def _letters(self, text: bytes) -> list[bytes]:
        """The letters of the text; letters that are not tokens as single bytes."""
        if text.isascii():
            return single_bytes(text)
        letters = [letter.encode(errors="surrogateescape") for letter in text.decode(errors="surrogateescape")]
        return [part for whole in letters for part in ([whole] if whole in self._tokens else single_bytes(whole))]


def _state_outside(piece: bytes) -> int:
    last = piece[-1:]
    # An apostrophe can be inside a word, and bytes beyond ASCII are parts of letters.
    return IN_WORD if last.isalnum() or last == b"'" or last >= b"\x80" else AT_WORD


class KeywordTree:
    """The keywords of one stream. Immutable."""

    def __init__(self, keywords: Sequence[Keyword], spelling: Spelling) -> None:
        self._outside_states = spelling.outside_states
        tree, cuts = _Letters(keywords), _Cuts(spelling)
        # Edges from every state: their tokens begin with a space.
        self.entries: Edges = {}
        # Edges from each state, by token.
        self.edges: list[Edges] = [{} for _ in range(len(tree.numbers) + 1)]
        self.edge_count = 0
        # Edges of unusual tokenisations have no bonus; they only keep the state right.
        unusual: list[tuple[Edges, int, Edge]] = []
        for here, said, rest, spaces in self._places(tree, spelling.longest):
            usual = cuts.first_of(rest)
            for token, length in spelling.beginnings(rest):
                if length == usual > spaces:
                    self._add(here, token, tree.edge(said, said + rest[spaces:length].lower(), usual=True))
                elif length > spaces:
                    unusual.append((here, token, tree.edge(said, said + rest[spaces:length].lower(), usual=False)))
        for here, token, edge in unusual:
            self._add(here, token, edge)
        self._add_within_terms(tree.numbers)
        self._entry_tokens = np.array(list(self.entries), np.int64)
        self._entry_bonuses = np.array([edge.bonus for edge in self.entries.values()], np.float32)

    def _places(self, tree: _Letters, longest: int) -> Iterator[tuple[Edges, bytes, bytes, int]]:
        """The places where keywords begin or continue: (edges there, part already said, part that follows, number of
        its leading spaces). The order is deterministic, because it decides which edges there is room for."""
        done: set[tuple[int, bytes]] = set()
        for variant in sorted(tree.variants):
            small = variant.lower()
            yield self.entries, b"", b" " + variant, 1
            for start in range(len(variant)):
                # Keywords may share a beginning, and variants in case may continue in the same way.
                number, following = tree.numbers[small[:start]], variant[start : start + longest]
                if (number, following) not in done:
                    done.add((number, following))
                    yield self.edges[number], small[:start], following, 0

    def _add_within_terms(self, numbers: Mapping[bytes, int]) -> None:
        """Within a keyword of several words another keyword may begin."""
        # After a space all keywords may begin, so these places come last.
        for prefix in sorted(numbers, key=lambda prefix: (prefix.endswith(b" "), prefix)):
            if self.edge_count == MAX_EDGES:
                return
            here = self.edges[numbers[prefix]]
            for at in (index for index, byte in enumerate(prefix) if byte == ord(" ")):
                other = numbers.get(prefix[at + 1 :])
                for token, edge in self.edges[other].items() if other is not None else ():
                    if token not in here:
                        self._add(here, token, edge)

    def _add(self, edges: Edges, token: int, edge: Edge) -> None:
        """Add an edge if there is room, or raise the bonus of an existing one."""
        if token not in edges:
            if self.edge_count == MAX_EDGES:
                return
            self.edge_count += 1
            edges[token] = edge
        elif edges[token].bonus < edge.bonus:
            # A token that is usual in two keywords may be worth more in one of them.
            edges[token] = edge

    def after(self, state: int, token: int) -> int:
        """The state after one more token."""
        node = max(state, ~state)
        edge = self.edges[node].get(token) or self.entries.get(token)
        if edge is not None:
            return edge.node
        outside = self._outside_states[token]
        return outside if outside >= 0 else node if outside == STAY else ~node

    def state_after(self, tokens: Iterable[int]) -> int:
        """The state after a text."""
        state = AT_WORD
        for token in tokens:
            state = self.after(state, token)
        return state

    def choose(self, state: int, logits: NDArray[np.float32], best: int) -> int:
        """The token to use; `best` is the model's own choice."""
        if state < 0:
            return best
        highest = float(logits[best])
        found = best, highest
        if len(self._entry_tokens):
            values = logits[self._entry_tokens] + self._entry_bonuses
            first = int(values.argmax())
            if values[first] > found[1]:
                found = int(self._entry_tokens[first]), float(values[first])
        for token, edge in self.edges[state].items():
            value = float(logits[token]) + edge.bonus
            if value > found[1]:
                found = token, value
        if found[0] == best:
            return best
        everything = highest + float(np.log(np.exp(logits - highest).sum()))
        return found[0] if found[1] > everything else best


class LazyTree:
    """A tree that is built at first use: not every opened stream has speech."""

    def __init__(self, make: Callable[[], KeywordTree]) -> None:
        self._make = make

    @cached_property
    def tree(self) -> KeywordTree:
        return self._make()


class KeywordTrees:
    """The keyword trees of one vocabulary, by the text of the `keywords` option."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.spelling = Spelling(vocabulary)
        self._tree = lru_cache(KEPT_TREES)(lambda option: KeywordTree(read_keywords(option), self.spelling))
        self._check = lru_cache(KEPT_TREES)(_check_option)
        self._thread = ThreadPoolExecutor(1, "keywords")
        self._future = lru_cache(KEPT_TREES)(lambda option: self._thread.submit(self._tree, option))

    def check(self, options: Mapping[str, str]) -> None:
        """Raises ValueError if the keywords cannot be used. Much cheaper than building their tree."""
        if "keywords" in options:
            self._check(options["keywords"])

    def lazy_tree(self, options: Mapping[str, str]) -> LazyTree | None:
        """A tree to build later, from options that were checked; None without keywords."""
        return LazyTree(partial(self._tree, options["keywords"])) if "keywords" in options else None

    def tree_in_background(self, options: Mapping[str, str]) -> Future[KeywordTree] | None:
        """Of options that were checked: the tree is made by another thread, once for all streams with this list."""
        return self._future(options["keywords"]) if "keywords" in options else None

    def close(self) -> None:
        """Cancel the trees that are still to be built."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def tree(self, options: Mapping[str, str]) -> KeywordTree | None:
        """The tree; None without keywords. Raises ValueError if the keywords cannot be used."""
        return self._tree(options["keywords"]) if "keywords" in options else None


class _Cuts:
    """The tokeniser's split of the rest of a keyword, cached."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._lengths: dict[bytes, int] = {}

    def first_of(self, rest: bytes) -> int:
        """Length in bytes of the first token."""
        # No token reaches into the next word.
        end = rest.find(b" ", 1)
        rest = rest if end < 0 else rest[:end]
        if rest not in self._lengths:
            # After a token, the rest is split in the same way as within the whole.
            at = 0
            for part in self._spelling.cut(rest):
                self._lengths[rest[at:]] = self._usual(rest[at:], part)
                at += len(part)
        return self._lengths[rest]

    def _usual(self, rest: bytes, part: bytes) -> int:
        if self._spelling.has(part):
            return len(part)
        # A vocabulary without single letters cannot join them: take the longest token there.
        return max((length for _, length in self._spelling.beginnings(rest)), default=0)


class _Letters:
    """All beginnings of keywords, numbered, and the worth of each."""

    def __init__(self, keywords: Iterable[Keyword]) -> None:
        self.variants: set[bytes] = set()
        self.numbers = {b"": AT_WORD}
        self._worths: dict[bytes, float] = {b"": 0.0}
        whole: set[bytes] = set()
        for keyword in keywords:
            initials = " ".join(word[:1].upper() + word[1:] for word in keyword.text.split(" "))
            for text in {keyword.text, keyword.text.lower(), initials}:
                variant = text.encode()
                self.variants.add(variant)
                whole.add(variant.lower())
                for length in range(1, len(variant) + 1):
                    self._add(variant[:length].lower(), keyword.boost)
                # Each beginning takes as much memory as an edge.
                _check_size(len(self.numbers))
        # Worth that is kept after leaving: that of the longest whole keyword within each beginning.
        self._kept: dict[bytes, float] = {}
        for prefix in sorted(self.numbers, key=len):
            kept = self._kept[prefix[:-1]] if prefix else 0.0
            self._kept[prefix] = self._worths[prefix] if prefix in whole else kept

    def _add(self, prefix: bytes, boost: float) -> None:
        # The number after AT_WORD is IN_WORD.
        self.numbers.setdefault(prefix, len(self.numbers) + 1)
        # Letters beyond FULL_LETTERS do not count; a letter has at most four bytes.
        letters = len(prefix[: 4 * FULL_LETTERS].decode(errors="ignore"))
        worth = boost * FULL_WORTH * min(1.0, letters / FULL_LETTERS)
        self._worths[prefix] = max(worth, self._worths.get(prefix, 0.0))

    def edge(self, start: bytes, end: bytes, usual: bool) -> Edge:
        return Edge(self.numbers[end], max(0.0, self._worths[end] - self._kept[start]) if usual else 0.0)


def _check_option(option: str) -> None:
    _Letters(read_keywords(option))


def _check_size(pieces: int) -> None:
    if pieces > MAX_EDGES:
        raise ValueError(f"these keywords are too long together: they take more than {MAX_EDGES} pieces")
