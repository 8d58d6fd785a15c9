"""`ModelSpec`: facts about a model for all code without torch (time steps, windows, caches), vocabulary, language
codes.

The runner provides it when it has loaded a model; the engine sends it to every gateway in its greeting. A model's time
is counted in *positions* of `samples_per_position` samples. Scheduler and gateway know a model only by its `ModelSpec`,
never by the name of its family.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.options import Options


@dataclass(frozen=True, slots=True)
class KvGroup:
    """A stack of attention layers. Its keys and values are stored in pages; each stream has one ring table of pages."""

    name: str
    window_positions: int
    page_positions: int
    bytes_per_position: int

    @property
    def ring_pages(self) -> int:
        """Most pages of one stream: its window, and the page being written while the oldest one leaves the window."""
        return -(-self.window_positions // self.page_positions) + 1


@dataclass(frozen=True, slots=True)
class FeatureShape:
    """Shape of an item's log-mel features: `bins` rows, `context_frames + n * frames_per_position` columns."""

    bins: int
    frames_per_position: int
    context_frames: int = 0

    def of(self, positions: int) -> tuple[int, int]:
        return self.bins, self.context_frames + positions * self.frames_per_position


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The properties of a model that the scheduler, the item cutter and the engine loop depend on."""

    name: str
    sample_rate: int
    samples_per_position: int
    # Distinguishes weights with the same model name; empty if not determined.
    weights: str = ""
    look_back_samples: int = 0
    look_ahead_samples: int = 0
    # Positions of every stream before its first sample. They are computed once and copied into each stream.
    prefix_positions: int = 0
    # Positions of silence fed after the end of the audio until the last text is out, in addition to the stream's delay.
    flush_positions: int = 0
    default_delay_positions: int = 0
    max_delay_positions: int = 0
    # While more audio is expected, a stream takes part in a step once it has this many new positions.
    stride_positions: int = 1
    # Windowed (encoder-decoder) models read their whole window in every step, from its first item. Frame-synchronous
    # models read only positions that are not computed yet.
    rereads_window: bool = False
    # Windowed models: most positions in a window, for live streams and for uploads. An upload may have a longer one,
    # because the latency of its words does not matter.
    window_positions: int = 1
    file_window_positions: int = 1
    # Most new positions of one stream in one step; `replay_positions` while the tokens of a replay are forced.
    step_positions: int = 1
    replay_positions: int = 64
    # Positions kept before the last computed one, for word times and for computing positions again.
    history_positions: int = 64
    # Encoder-cache embeddings a live stream may reference at once; admission reserves them.
    embeds_per_stream: int = 16
    kv_groups: tuple[KvGroup, ...] = ()
    # Features that are accepted in place of an item's samples; None: the model takes samples only.
    features: FeatureShape | None = None
    # Options a stream may be opened with, in addition to its delay; all others are refused.
    options: Options = Options()

    @property
    def upload_positions(self) -> int:
        """Positions an upload to a windowed model waits for while more audio is expected: a window and one stride.

        With that much audio it is known where utterances end in the window, so windows do not depend on arrival times.
        """
        return self.window_for(live=False) + self.stride_positions

    def window_for(self, live: bool) -> int:
        """The longest window of a stream, in positions."""
        return self.window_positions if live else max(self.window_positions, self.file_window_positions)

    def embeds_for(self, live: bool) -> int:
        """Encoder-cache embeddings a stream may reference: a longer window adds its extra positions."""
        return self.embeds_per_stream + self.window_for(live) - self.window_positions

    def flush_positions_for(self, delay_positions: int) -> int:
        """Positions of silence to compute before the last word of a stream with this delay is out."""
        return self.flush_positions + delay_positions

    def said_positions_for(self, delay_positions: int) -> int:
        """Positions of silence to compute at a pause before its last word is out, unless the word is very long.

        Fewer than at the end of a stream, because more audio follows.
        """
        return self.flush_positions // 3 + delay_positions


# The vocabulary: loaded with the weights, read by runners and the core.


class Vocabulary:
    """The bytes of each token; b"" for tokens that are not text.

    `word_marker` is the token with which a model announces a word, if it has one. The word's time is the marker's time.
    """

    __slots__ = ("blanks", "pieces", "texts", "word_marker")

    def __init__(self, pieces: list[bytes], word_marker: int | None = None) -> None:
        self.pieces = pieces
        self.word_marker = word_marker
        # Text of the tokens that are valid UTF-8 on their own; the others must be joined as bytes.
        self.texts = [_whole_text(piece) for piece in pieces]
        # Tokens without text, except the word marker.
        self.blanks = frozenset(token for token, piece in enumerate(pieces) if not piece and token != word_marker)


def _whole_text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


# Languages: the codes that models take, and the names and other codes that clients write.

# In the order of Whisper's language tokens; only its largest models have the last one.
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

# Sizes of Whisper's English vocabulary. A multilingual one has one more text token, so the size tells which one it is.
ENGLISH_TEXT_TOKENS = 50_256
ENGLISH_VOCABULARY = 51_864
# Tokens that are neither text nor a language: start, translate, transcribe, ..., 1501 time stamps.
_SPECIALS_WITHOUT_LANGUAGES = 1_509

# Other codes and names of the same languages.
_ALSO = {
    "cmn": "zh", "mandarin": "zh", "iw": "he", "jv": "jw", "nb": "no", "bokmal": "no", "fil": "tl", "filipino": "tl",
    "castilian": "es", "valencian": "ca", "flemish": "nl", "moldavian": "ro", "moldovan": "ro", "farsi": "fa",
    "burmese": "my", "pushto": "ps", "panjabi": "pa", "sinhalese": "si", "haitian": "ht", "letzeburgesch": "lb",
}  # fmt: skip
_CODES = {**{name: code for code, name in NAMES.items()}, **_ALSO}
# Clients send these to have the language detected.
_ANY = frozenset({"auto", "multi", "detect"})


def whisper_language_tokens(vocabulary: int) -> int:
    """How many language tokens a Whisper model with a vocabulary of this size has; English models have them too."""
    text = ENGLISH_TEXT_TOKENS + int(vocabulary > ENGLISH_VOCABULARY)
    return vocabulary - text - _SPECIALS_WITHOUT_LANGUAGES


def whisper_languages(vocabulary: int) -> tuple[str, ...]:
    """Codes of the languages that a Whisper model with a vocabulary of this size can be set to."""
    return tuple(NAMES)[: whisper_language_tokens(vocabulary)] if vocabulary > ENGLISH_VOCABULARY else ("en",)


def language_code(written: str) -> str | None:
    """The code for a language written as a code, a code with a region, or a name; None for "detect the language".

    Raises ValueError if the language is unknown.
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
