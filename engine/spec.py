"""Facts of a model that the torch-free parts of the engine need: its clock, its windows, its caches.

A model's clock ticks in *positions* of `samples_per_position` samples. Everything the scheduler knows about a model
family is in `ModelSpec`; it never asks for a family's name.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.options import Options


@dataclass(frozen=True, slots=True)
class KvGroup:
    """One stack of attention layers whose keys and values live in pages with one ring table per stream."""

    name: str
    window_positions: int
    page_positions: int
    bytes_per_position: int

    @property
    def ring_pages(self) -> int:
        """Pages one stream needs at most: its window, plus the page it is writing while the oldest slides out."""
        return -(-self.window_positions // self.page_positions) + 1


@dataclass(frozen=True, slots=True)
class FeatureShape:
    """Log-mel features of an item: `bins` rows; n positions have `context_frames + n * frames_per_position` columns."""

    bins: int
    frames_per_position: int
    context_frames: int = 0

    def of(self, positions: int) -> tuple[int, int]:
        return self.bins, self.context_frames + positions * self.frames_per_position


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the scheduler, the item cutter and the loop must know of a model."""

    name: str
    sample_rate: int
    samples_per_position: int
    # Tells weights of this name from others; empty if nobody looked.
    weights: str = ""
    look_back_samples: int = 0
    look_ahead_samples: int = 0
    # Positions every stream starts with, before its first sample (an opening that is computed once and copied).
    prefix_positions: int = 0
    # Positions of constant silence that push the last text out after audio ends, on top of the stream's delay.
    flush_positions: int = 0
    default_delay_positions: int = 0
    max_delay_positions: int = 0
    # New positions that make a step worth taking while audio keeps coming.
    stride_positions: int = 1
    # A step of a windowed (encoder-decoder) model reads its whole window again, from the window's first item;
    # a frame-synchronous model reads only positions it has not computed yet.
    rereads_window: bool = False
    # Most positions a step of a model that rereads its window may read; of backlog it may be more, for nobody waits for
    # its next word.
    window_positions: int = 1
    file_window_positions: int = 1
    # Most new positions of one stream in one step, and the same while tokens of a replayed stream are forced.
    step_positions: int = 1
    replay_positions: int = 64
    # Positions kept behind the last computed one: what word times and recomputation still look at.
    history_positions: int = 64
    # Encoder-cache embeddings a live stream may hold references to at once; admission sets them aside.
    embeds_per_stream: int = 16
    kv_groups: tuple[KvGroup, ...] = ()
    # Features that may come in place of an item's samples; None: the model takes samples only.
    features: FeatureShape | None = None
    # What a stream may be opened with beside a delay; the model refuses the rest.
    options: Options = Options()

    @property
    def upload_positions(self) -> int:
        """Audio that backlog of a windowed model waits for while more may come: a whole window, and a stride behind it.

        By then it is known where utterances end in that window, so that what is read does not depend on when.
        """
        return self.window_for(live=False) + self.stride_positions

    def window_for(self, live: bool) -> int:
        """The longest window of a stream."""
        return self.window_positions if live else max(self.window_positions, self.file_window_positions)

    def embeds_for(self, live: bool) -> int:
        """Encoder-cache embeddings a stream may hold: those of its window, and as many around it for every stream."""
        return self.embeds_per_stream + self.window_for(live) - self.window_positions

    def flush_positions_for(self, delay_positions: int) -> int:
        """Silent positions that must be computed before the last word of a stream with this delay is out."""
        return self.flush_positions + delay_positions

    def said_positions_for(self, delay_positions: int) -> int:
        """Positions behind a word after which it is out, unless it is a very long one: what a pause is given.

        The end of a stream is given more, for nothing follows it.
        """
        return self.flush_positions // 3 + delay_positions


# What the tokens of a model stand for. Weights bring it, runners and the core read it.


class Vocabulary:
    """The bytes each token stands for; b"" for tokens that are not text.

    `word_marker` is the token by which a model announces a word, if it has one: the word's time is the marker's.
    """

    __slots__ = ("blanks", "pieces", "texts", "word_marker")

    def __init__(self, pieces: list[bytes], word_marker: int | None = None) -> None:
        self.pieces = pieces
        self.word_marker = word_marker
        # Tokens that are whole characters by themselves need no byte handling at all.
        self.texts = [_whole_text(piece) for piece in pieces]
        # Tokens that say nothing at all.
        self.blanks = frozenset(token for token, piece in enumerate(pieces) if not piece and token != word_marker)


def _whole_text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


# Names of languages: the codes that models are told, and what people write for them.

# In the order of Whisper's tokens; the last one is known to its largest models only.
NAMES = {
    "en": "english", "zh": "chinese", "de": "german", "es": "spanish", "ru": "russian", "ko": "korean",
    "fr": "french", "ja": "japanese", "pt": "portuguese", "tr": "turkish", "pl": "polish", "ca": "catalan",
    "nl": "dutch", "ar": "arabic", "sv": "swedish", "it": "italian", "id": "indonesian", "hi": "hindi",
    "fi": "finnish", "vi": "vietnamese", "he": "hebrew", "uk": "ukrainian", "el": "greek", "ms": "malay",
    "cs": "czech", "ro": "romanian", "da": "danish", "hu": "hungarian", "ta": "tamil", "no": "norwegian",
    "th": "thai", "ur": "urdu", "hr": "croatian", "bg": "bulgarian", "lt": "lithuanian", "la": "latin",
    "mi": "maori", "ml": "malayalam", "cy": "welsh", "sk": "slovak", "te": "telugu", "fa": "persian",
    "lv": "latvian", "bn": "bengali", "sr": "serbian", "az": "azerbaijani", "sl": "slovenian", "kn": "kannada",
    "et": "estonian", "mk": "macedonian", "br": "breton", "eu": "basque", "is": "icelandic", "hy": "armenian",
    "ne": "nepali", "mn": "mongolian", "bs": "bosnian", "kk": "kazakh", "sq": "albanian", "sw": "swahili",
    "gl": "galician", "mr": "marathi", "pa": "punjabi", "si": "sinhala", "km": "khmer", "sn": "shona",
    "yo": "yoruba", "so": "somali", "af": "afrikaans", "oc": "occitan", "ka": "georgian", "be": "belarusian",
    "tg": "tajik", "sd": "sindhi", "gu": "gujarati", "am": "amharic", "yi": "yiddish", "lo": "lao",
    "uz": "uzbek", "fo": "faroese", "ht": "haitian creole", "ps": "pashto", "tk": "turkmen", "nn": "nynorsk",
    "mt": "maltese", "sa": "sanskrit", "lb": "luxembourgish", "my": "myanmar", "bo": "tibetan", "tl": "tagalog",
    "mg": "malagasy", "as": "assamese", "tt": "tatar", "haw": "hawaiian", "ln": "lingala", "ha": "hausa",
    "ba": "bashkir", "jw": "javanese", "su": "sundanese", "yue": "cantonese",
}  # fmt: skip

# Text tokens of Whisper's two vocabularies; a multilingual one has one token more, so its size gives it away.
ENGLISH_TEXT_TOKENS = 50_256
ENGLISH_VOCABULARY = 51_864
# Tokens that are neither text nor a language: start, translate, transcribe, ..., 1501 time stamps.
_SPECIALS_WITHOUT_LANGUAGES = 1_509

# Other codes and names of the same.
_ALSO = {
    "cmn": "zh", "mandarin": "zh", "iw": "he", "jv": "jw", "nb": "no", "bokmal": "no", "fil": "tl", "filipino": "tl",
    "castilian": "es", "valencian": "ca", "flemish": "nl", "moldavian": "ro", "moldovan": "ro", "farsi": "fa",
    "burmese": "my", "pushto": "ps", "panjabi": "pa", "sinhalese": "si", "haitian": "ht", "letzeburgesch": "lb",
}  # fmt: skip
_CODES = {**{name: code for code, name in NAMES.items()}, **_ALSO}
# What clients send for "find out yourself".
_ANY = frozenset({"auto", "multi", "detect"})


def whisper_language_tokens(vocabulary: int) -> int:
    """Languages that a Whisper model with so many tokens was trained on; each has a token, also in the English ones."""
    text = ENGLISH_TEXT_TOKENS + int(vocabulary > ENGLISH_VOCABULARY)
    return vocabulary - text - _SPECIALS_WITHOUT_LANGUAGES


def whisper_languages(vocabulary: int) -> tuple[str, ...]:
    """Codes of the languages that a Whisper model with so many tokens can be told."""
    return tuple(NAMES)[: whisper_language_tokens(vocabulary)] if vocabulary > ENGLISH_VOCABULARY else ("en",)


def language_code(written: str) -> str | None:
    """The code of a language that is written as a code, with a region behind it, or by name; None for any language.

    Raises ValueError if there is no such language.
    """
    plain = written.strip().lower().replace("_", "-")
    if plain in _ANY:
        return None
    for name in (plain, plain.split("-")[0]):
        if name in NAMES:
            return name
        if name in _CODES:
            return _CODES[name]
    raise ValueError(f"{written[:40]!r} is not a language; write a code such as en or de, or a name")
