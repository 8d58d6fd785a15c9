"""Keyword biasing: raises the scores of tokens with which an expected word may begin or continue (both runners use it).

The decoder of windowed models asks a `KeywordTree` token by token. `BiasTables` has the trees of all streams on the
device of the frame-synchronous runner. The keywords of a stream are a trie; a node is a beginning of a keyword in lower
case, as UTF-8 bytes. A token moves along the trie by its bytes, however the keyword is tokenised, so a model that
spells a word in an unusual way still finds the rest of it. A keyword is favoured as given, in lower case and with
capital initials. In ASCII all three lead to the same node; a variant with a capital beyond ASCII has a branch of its
own.

A node's *worth* rises with the number of letters that lead to it. A token that continues a keyword as the tokeniser
would gets a bonus: the worth of the node that it leads to, minus the worth of a whole keyword that was complete before
it (after "New" of the keywords "New" and "New York", " York" gets the worth of "New York" minus that of "New"). A token
that leaves the keyword gets none. A short beginning is worth little, because many other words begin like it. Tokens
that occur only in an unusual tokenisation of a keyword get no bonus: models use the tokeniser's tokens, so such a token
is a sign of another word.

A token is favoured only if its logit with the bonus exceeds the log-sum-exp of all logits without a bonus. Where a
model has no idea, a hundred tokens are nearly as likely as its best guess, and a keyword must not be forced then.

The state of a stream in its trie is a number that depends only on its tokens. So the text does not depend on load or on
how the audio was split, and the tokens of a draft are checked with the same bias with which they would be decoded.

A frame-synchronous model outputs a token for the start of a word before each word, and blanks between words. After a
blank no token gets a bonus until the next word starts, or words would come too early. While the model waits for that
token, the state is the bitwise complement (~) of its number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cached_property, lru_cache, partial
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.options import Keyword, read_keywords
from engine.runner.device import upload
from engine.spec import Vocabulary

# Worth of a whole keyword, as a log-probability, and the number of letters from which on a beginning has all of it. A
# higher worth finds a few more keywords but spoils more other words.
FULL_WORTH = 4.0
FULL_LETTERS = 5

# Most edges of a stream's tree. Edges of usual tokenisations are added first.
MAX_EDGES = 16_384
# Number of keyword lists whose trees are cached for later streams with the same list.
KEPT_TREES = 8
# How long a step waits for keywords that are being prepared.
KEYWORDS_WAIT_S = 0.002

# States outside all keywords: a keyword may begin with the next letter, or only after a space.
AT_WORD, IN_WORD = 0, 1
# Effects of tokens without letters, which keep the node: end the wait for a word, or begin it.
END_WAIT, BEGIN_WAIT = -1, -2


class Edge(NamedTuple):
    """The effect of a token in one state of the tree."""

    # Target state.
    node: int
    # Added to the token's logit.
    bonus: float


Edges = dict[int, Edge]


class TokenIndex:
    """The tokens of a vocabulary by their bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        # Of two tokens with the same bytes the first is a single byte, which models do not use.
        self._tokens = {piece: token for token, piece in enumerate(vocabulary.pieces) if piece}
        self.longest = max(map(len, self._tokens), default=0)
        # The state after each token if it is not part of a keyword, or END_WAIT or BEGIN_WAIT.
        self.outside_states = [_state_outside(piece) if piece else END_WAIT for piece in vocabulary.pieces]
        if vocabulary.word_marker is not None:
            for token in vocabulary.blanks:
                self.outside_states[token] = BEGIN_WAIT

    def beginnings(self, text: bytes) -> Iterator[tuple[int, int]]:
        """Every token that `text` begins with, and its length in bytes."""
        for length in range(1, min(len(text), self.longest) + 1):
            token = self._tokens.get(text[:length])
            if token is not None:
                yield token, length

    def has(self, text: bytes) -> bool:
        """Whether the text is a single token."""
        return text in self._tokens

    def tokenise(self, text: bytes) -> list[bytes]:
        """`text` as the tokeniser splits it. The rank of a merge is the number of its token."""
        return bpe_merge(self._letters(text), self._tokens)

    def _letters(self, text: bytes) -> list[bytes]:
        """The letters of the text; letters that are not tokens as single bytes."""
        if text.isascii():
            return single_bytes(text)
        letters = [letter.encode(errors="surrogateescape") for letter in text.decode(errors="surrogateescape")]
        return [part for letter in letters for part in ([letter] if letter in self._tokens else single_bytes(letter))]


def _state_outside(piece: bytes) -> int:
    """The state after a token that is not part of a keyword."""
    last = piece[-1:]
    # An apostrophe can be inside a word, and bytes beyond ASCII are parts of letters.
    return IN_WORD if last.isalnum() or last == b"'" or last >= b"\x80" else AT_WORD


class KeywordTree:
    """The keywords of one stream. Immutable."""

    def __init__(self, keywords: Sequence[Keyword], index: TokenIndex) -> None:
        self._outside_states = index.outside_states
        prefixes, first_tokens = _Prefixes(keywords), _FirstTokens(index)
        # Edges from every state: their tokens begin with a space.
        self.entries: Edges = {}
        # Edges from each state, by token.
        self.edges: list[Edges] = [{} for _ in range(len(prefixes.numbers) + 1)]
        self.edge_count = 0
        # Edges of unusual tokenisations have no bonus; they only keep the state right.
        unusual: list[tuple[Edges, int, Edge]] = []
        for edges, prefix, remainder, spaces in self._places(prefixes, index.longest):
            usual = first_tokens.length(remainder)
            for token, length in index.beginnings(remainder):
                end = prefix + remainder[spaces:length].lower()
                if length == usual > spaces:
                    self._add(edges, token, prefixes.edge(prefix, end, usual=True))
                elif length > spaces:
                    unusual.append((edges, token, prefixes.edge(prefix, end, usual=False)))
        for edges, token, edge in unusual:
            self._add(edges, token, edge)
        self._add_within_terms(prefixes.numbers)
        self._entry_tokens = np.array(list(self.entries), np.int64)
        self._entry_bonuses = np.array([edge.bonus for edge in self.entries.values()], np.float32)

    def _places(self, prefixes: _Prefixes, longest: int) -> Iterator[tuple[Edges, bytes, bytes, int]]:
        """The places where keywords begin or continue: (edges from there, prefix before it, remainder after it, number
        of leading spaces of the remainder). The order is deterministic, because it decides which edges there is room
        for."""
        done: set[tuple[int, bytes]] = set()
        for variant in sorted(prefixes.variants):
            lower = variant.lower()
            yield self.entries, b"", b" " + variant, 1
            for start in range(len(variant)):
                # Keywords may share a beginning, and variants in case may continue in the same way.
                number, following = prefixes.numbers[lower[:start]], variant[start : start + longest]
                if (number, following) not in done:
                    done.add((number, following))
                    yield self.edges[number], lower[:start], following, 0

    def _add_within_terms(self, numbers: Mapping[bytes, int]) -> None:
        """Within a keyword of several words another keyword may begin."""
        # After a space all keywords may begin, so these places come last.
        for prefix in sorted(numbers, key=lambda prefix: (prefix.endswith(b" "), prefix)):
            if self.edge_count == MAX_EDGES:
                return
            edges = self.edges[numbers[prefix]]
            for space in (index for index, byte in enumerate(prefix) if byte == ord(" ")):
                other = numbers.get(prefix[space + 1 :])
                for token, edge in self.edges[other].items() if other is not None else ():
                    if token not in edges:
                        self._add(edges, token, edge)

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
        node = max(state, ~state)  # without the complement of a waiting state
        edge = self.edges[node].get(token) or self.entries.get(token)
        if edge is not None:
            return edge.node
        outside = self._outside_states[token]
        return outside if outside >= 0 else node if outside == END_WAIT else ~node

    def state_after(self, tokens: Iterable[int]) -> int:
        """The state after a text."""
        state = AT_WORD
        for token in tokens:
            state = self.after(state, token)
        return state

    def choose(self, state: int, logits: NDArray[np.float32], best: int) -> int:
        """The token to use. `best`: the token with the highest logit."""
        if state < 0:
            return best
        highest = float(logits[best])
        favourite = best, highest
        if len(self._entry_tokens):
            values = logits[self._entry_tokens] + self._entry_bonuses
            first = int(values.argmax())
            if values[first] > favourite[1]:
                favourite = int(self._entry_tokens[first]), float(values[first])
        for token, edge in self.edges[state].items():
            value = float(logits[token]) + edge.bonus
            if value > favourite[1]:
                favourite = token, value
        if favourite[0] == best:
            return best
        log_sum_exp = highest + float(np.log(np.exp(logits - highest).sum()))
        return favourite[0] if favourite[1] > log_sum_exp else best


class LazyTree:
    """A tree that a thread builds when it is first needed, because not every opened stream has speech."""

    def __init__(self, begin: Callable[[], Future[KeywordTree]]) -> None:
        self._begin = begin

    @cached_property
    def future(self) -> Future[KeywordTree]:
        return self._begin()

    @property
    def tree(self) -> KeywordTree:
        """The tree; waits for it."""
        return self.future.result()


def wait_briefly(trees: Collection[Future[KeywordTree]]) -> None:
    """Wait until a tree is ready: short lists are at once. Streams with a longer list wait alone for theirs."""
    if trees:
        wait(trees, KEYWORDS_WAIT_S, FIRST_COMPLETED)


class KeywordTrees:
    """The keyword trees of one vocabulary, by the text of the `keywords` option.

    A thread builds them: for the frame-synchronous runner when a stream is opened (`tree_in_background`), for the
    windowed runner and the second pass when there is a window to decode (`lazy_tree`).
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.index = TokenIndex(vocabulary)
        self._tree = lru_cache(KEPT_TREES)(lambda option: KeywordTree(read_keywords(option), self.index))
        self._check = lru_cache(KEPT_TREES)(_check_option)
        self._thread = ThreadPoolExecutor(1, "keywords")
        self._future = lru_cache(KEPT_TREES)(lambda option: self._thread.submit(self._tree, option))

    def check(self, options: Mapping[str, str]) -> None:
        """Raises ValueError if the keywords cannot be used. Much faster than building their tree."""
        if "keywords" in options:
            self._check(options["keywords"])

    def lazy_tree(self, options: Mapping[str, str]) -> LazyTree | None:
        """A tree to build later, from options that were checked; None without keywords."""
        return LazyTree(partial(self._future, options["keywords"])) if "keywords" in options else None

    def tree_in_background(self, options: Mapping[str, str]) -> Future[KeywordTree] | None:
        """A tree that another thread builds, once for all streams with this list, from options that were checked. None
        without keywords."""
        return self._future(options["keywords"]) if "keywords" in options else None

    def close(self) -> None:
        """Cancel the trees that are still to be built."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def tree(self, options: Mapping[str, str]) -> KeywordTree | None:
        """The tree; None without keywords. Raises ValueError if the keywords cannot be used."""
        return self._tree(options["keywords"]) if "keywords" in options else None


class _FirstTokens:
    """The first token of the rest of a keyword, as the tokeniser splits it; cached."""

    def __init__(self, index: TokenIndex) -> None:
        self._index = index
        self._lengths: dict[bytes, int] = {}

    def length(self, rest: bytes) -> int:
        """Length in bytes of the first token."""
        # No token reaches into the next word.
        end = rest.find(b" ", 1)
        rest = rest if end < 0 else rest[:end]
        if rest not in self._lengths:
            # What follows a token is split in the same way if it stands alone.
            start = 0
            for part in self._index.tokenise(rest):
                self._lengths[rest[start:]] = self._usual(rest[start:], part)
                start += len(part)
        return self._lengths[rest]

    def _usual(self, rest: bytes, part: bytes) -> int:
        if self._index.has(part):
            return len(part)
        # A vocabulary without single letters cannot merge them: the longest token is used.
        return max((length for _, length in self._index.beginnings(rest)), default=0)


class _Prefixes:
    """All beginnings of keywords in lower case, with a number and a worth for each."""

    def __init__(self, keywords: Iterable[Keyword]) -> None:
        # The keywords as they may be written.
        self.variants: set[bytes] = set()
        self.numbers = {b"": AT_WORD}
        self._worths: dict[bytes, float] = {b"": 0.0}
        whole: set[bytes] = set()
        for keyword in keywords:
            for variant in _variants(keyword.text):
                self.variants.add(variant)
                whole.add(variant.lower())
                for length in range(1, len(variant) + 1):
                    self._add(variant[:length].lower(), keyword.boost)
                # Each beginning takes as much memory as an edge.
                _check_size(len(self.numbers))
        # Worth of the longest whole keyword with which each beginning begins.
        self._whole_worths: dict[bytes, float] = {}
        for prefix in sorted(self.numbers, key=len):
            shorter = self._whole_worths[prefix[:-1]] if prefix else 0.0
            self._whole_worths[prefix] = self._worths[prefix] if prefix in whole else shorter

    def _add(self, prefix: bytes, boost: float) -> None:
        # The number after AT_WORD is IN_WORD.
        self.numbers.setdefault(prefix, len(self.numbers) + 1)
        # Letters beyond FULL_LETTERS do not count; a letter has at most four bytes.
        letters = len(prefix[: 4 * FULL_LETTERS].decode(errors="ignore"))
        worth = boost * FULL_WORTH * min(1.0, letters / FULL_LETTERS)
        self._worths[prefix] = max(worth, self._worths.get(prefix, 0.0))

    def edge(self, start: bytes, end: bytes, usual: bool) -> Edge:
        """The edge between two beginnings. `usual`: of a token of the tokeniser's split, which has a bonus."""
        return Edge(self.numbers[end], max(0.0, self._worths[end] - self._whole_worths[start]) if usual else 0.0)


def _check_option(option: str) -> None:
    """Raises ValueError if the keywords have too many beginnings; only counts them."""
    prefixes: set[bytes] = set()
    for keyword in read_keywords(option):
        for variant in {variant.lower() for variant in _variants(keyword.text)}:
            prefixes.update(variant[:length] for length in range(len(variant) + 1))
        _check_size(len(prefixes))


def _variants(text: str) -> set[bytes]:
    """A keyword as it may be written: as given, in lower case, with capital initials."""
    initials = " ".join(word[:1].upper() + word[1:] for word in text.split(" "))
    return {text.encode(), text.lower().encode(), initials.encode()}


def _check_size(prefixes: int) -> None:
    if prefixes > MAX_EDGES:
        raise ValueError(f"these keywords are too long together: they have more than {MAX_EDGES} different beginnings")


# Byte-pair encoding: how a tokeniser splits text into tokens, for keywords and prompts.


def bpe_merge(letters: Sequence[bytes], ranks: Mapping[bytes, int]) -> list[bytes]:
    """Tokenise by byte-pair merges: of all neighbours that can be merged, first those with the lowest rank, then the
    leftmost. `ranks`: token -> its rank. A heap finds the next pair, because a client may send one very long word, and
    the step of all streams may wait for this."""
    parts, count = list(letters), len(letters)
    before, after = list(range(-1, count - 1)), list(range(1, count + 1))
    pairs: list[tuple[int, int, bytes]] = []

    def add_pair(left: int) -> None:
        """Add the pair of the part at `left` and the part after it, if their merge is a token."""
        if left >= 0 and after[left] < count:
            merged = parts[left] + parts[after[left]]
            rank = ranks.get(merged)
            if rank is not None:
                heappush(pairs, (rank, left, merged))

    for left in range(count):
        add_pair(left)
    while pairs:
        _, left, merged = heappop(pairs)
        right = after[left]
        # One of the two may have been merged with another part since.
        if not parts[left] or right == count or parts[left] + parts[right] != merged:
            continue
        parts[left], parts[right], after[left] = merged, b"", after[right]
        if after[left] < count:
            before[after[left]] = left
        add_pair(before[left])
        add_pair(left)
    return [part for part in parts if part]


def single_bytes(text: bytes) -> list[bytes]:
    """Each byte of the text."""
    return [text[index : index + 1] for index in range(len(text))]


# Keyword trees of many streams on a device: chooses tokens and advances states there, without the host.
#
# A step is launched before the host knows the tokens of the step before, so the states are on the device, too. Every
# slot has a table of edges of the same size: from state, token, to state, bonus. Each step reads all of it, at fixed
# addresses, so that a step can be recorded as a CUDA graph.

# "From" values of edges that do not start at one state: edges from every state, and unused ones.
_ANYWHERE, _NOWHERE = -1, -2
_EDGE_FIELDS = 4
# Bytes of a slot's table, and bytes that a row of a step needs besides: a copy, 8-byte token numbers, values and masks.
BYTES_PER_SLOT = _EDGE_FIELDS * MAX_EDGES * 4
BYTES_PER_ROW = BYTES_PER_SLOT + 16 * MAX_EDGES


class BiasTables:
    """The states and edge tables of all slots on a device."""

    def __init__(self, slots: int, index: TokenIndex, device: torch.device, edges: int = MAX_EDGES) -> None:
        self._states = torch.full((slots,), AT_WORD, dtype=torch.int64, device=device)
        # By slot: from, token, to, and the bits of the float bonus.
        self._edges = torch.full((slots, _EDGE_FIELDS, edges), _NOWHERE, dtype=torch.int32, device=device)
        self._outside_states = torch.tensor(index.outside_states, device=device)
        self._filled: set[int] = set()

    @property
    def in_use(self) -> bool:
        """Whether any stream has keywords."""
        return bool(self._filled)

    def set_tree(self, slot: int, tree: KeywordTree | None) -> None:
        """Set the keywords of a slot's new stream, which has no text yet."""
        if slot in self._filled:
            self._edges[slot, 0] = _NOWHERE
            self._filled.remove(slot)
        if tree is not None:
            self._filled.add(slot)
            rows = _edge_table(tree)
            self._edges[slot, :, : rows.shape[1]] = upload(rows, self._edges.device)
            self.set_state(slot, AT_WORD)

    def set_state(self, slot: int, state: int) -> None:
        """Set the state of a slot, as of `KeywordTree`."""
        self._states[slot] = state

    def choose(self, slots: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
        """The tokens to use in place of the best `tokens` [rows]; logits [rows, vocabulary]."""
        states = self._states[slots][:, None]
        origins, choices, _, bonuses = self._edges[slots].unbind(dim=1)
        open_edges = (states >= 0) & ((origins == states) | (origins == _ANYWHERE))
        favoured = logits.gather(1, choices.clamp(min=0).long()) + bonuses.view(torch.float32)
        best, edges = favoured.masked_fill(~open_edges, float("-inf")).max(dim=1, keepdim=True)
        return torch.where(best[:, 0] > logits.logsumexp(dim=1), choices.gather(1, edges)[:, 0].long(), tokens)

    def advance(self, slots: Tensor, tokens: Tensor) -> None:
        """Advance the state of each row by its token."""
        states = self._states[slots]
        nodes = torch.maximum(states, ~states)
        origins, choices, targets, _ = self._edges[slots].unbind(dim=1)
        matches = choices == tokens[:, None]
        # An edge of the state itself takes precedence over one from every state.
        fits = matches * (2 * (origins == nodes[:, None]).byte() + (origins == _ANYWHERE).byte())
        found, edges = fits.max(dim=1, keepdim=True)
        fallback = self._outside_states[tokens]
        outside = torch.where(fallback >= 0, fallback, torch.where(fallback == END_WAIT, nodes, ~nodes))
        self._states[slots] = torch.where(found[:, 0] > 0, targets.gather(1, edges)[:, 0].long(), outside)


def _edge_table(tree: KeywordTree) -> np.ndarray:
    """[4, edges] int32: from, token, to, bits of the bonus."""
    edges = [(_ANYWHERE, token, edge.node, edge.bonus) for token, edge in tree.entries.items()]
    for state, leading in enumerate(tree.edges):
        edges += [(state, token, edge.node, edge.bonus) for token, edge in leading.items()]
    origins, tokens, nodes, bonuses = zip(*edges, strict=True)
    numbers = np.array([origins, tokens, nodes], np.int32)
    return np.vstack((numbers, np.array(bonuses, np.float32).view(np.int32)))
