"""`ModelSpec`: what code without torch knows about a model (time steps, windows, options); vocabulary and languages.

The runner provides the spec when it has loaded a model; the engine sends it to every gateway in its greeting. A model's
time is counted in *positions* of `samples_per_position` samples. Scheduler and gateway know a model only by its
`ModelSpec`, never by the name of its family. `Vocabulary` is loaded with the weights. The languages are the codes that
models take and the names that clients write for them.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.options import Options


@dataclass(frozen=True, slots=True)
class KvGroup:
    """A group of attention layers with the same window. Its keys and values are stored in pages; each stream has one
    ring table of pages (`engine/core/caches.py`) for it."""

    name: str
    window_positions: int
    page_positions: int
    bytes_per_position: int

    @property
    def ring_pages(self) -> int:
        """Most pages of one stream: those of its window, and the page being written while the oldest one still is in
        the window."""
        return -(-self.window_positions // self.page_positions) + 1


@dataclass(frozen=True, slots=True)
class FeatureShape:
    """Shape of an item's log-mel features: `bins` rows, `context_frames + n * frames_per_position` columns."""

    bins: int
    frames_per_position: int
    context_frames: int = 0

    def of(self, positions: int) -> tuple[int, int]:
        """The shape for an item of this many positions."""
        return self.bins, self.context_frames + positions * self.frames_per_position


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The properties of a model that the scheduler, the item cutter and the engine loop depend on."""

    name: str
    sample_rate: int
    samples_per_position: int
    # Fingerprint of the weights: distinguishes weights with the same model name; empty if not determined.
    weights: str = ""
    # Samples before and after a position's own samples that are encoded together with them.
    look_back_samples: int = 0
    look_ahead_samples: int = 0
    # Positions of every stream before its first sample. They are computed once and copied into each stream.
    prefix_positions: int = 0
    # Positions of silence computed after the end of the audio for the last text, in addition to the stream's delay.
    flush_positions: int = 0
    # Delay: positions between audio and the token for it.
    default_delay_positions: int = 0
    max_delay_positions: int = 0
    # While more audio is expected, a stream takes part in a step once it has this many new positions.
    stride_positions: int = 1
    # Windowed (encoder-decoder) models read their whole window in every step, from its first item. Frame-synchronous
    # models read only positions that are not computed yet.
    rereads_window: bool = False
    # Windowed models: most positions in a window, for live streams and for uploads. An upload may have a longer window,
    # because the latency of its words does not matter.
    window_positions: int = 1
    file_window_positions: int = 1
    # Most new positions of one stream in one step, and while the tokens of a replay are forced.
    step_positions: int = 1
    replay_positions: int = 64
    # Positions before the window whose items and sample times are still kept, for word times.
    history_positions: int = 64
    # Rows of the encoder cache that a live stream may reference at once; admission reserves them.
    embeds_per_stream: int = 16
    kv_groups: tuple[KvGroup, ...] = ()
    # Features that are accepted in place of an item's samples; None: the model takes samples only.
    features: FeatureShape | None = None
    # Options a stream may be opened with, in addition to its delay; all others are refused.
    options: Options = Options()

    @property
    def replay_part(self) -> int:
        """Rebuilds compute multiples of so many positions; fewer are less efficient."""
        return max(1, self.replay_positions // 4)

    @property
    def upload_positions(self) -> int:
        """Positions that an upload to a windowed model must have for a step while more audio is expected: a window and
        one stride. With that much audio it is known where utterances end in the window, so windows do not depend on
        arrival times."""
        return self.window_for(live=False) + self.stride_positions

    def window_for(self, live: bool) -> int:
        """The longest window of a stream, in positions."""
        return self.window_positions if live else max(self.window_positions, self.file_window_positions)

    def embeds_for(self, live: bool) -> int:
        """Rows of the encoder cache that a stream may reference: a longer window adds its extra positions. Of an upload
        the next window may be in the cache too."""
        rows = self.embeds_per_stream + self.window_for(live) - self.window_positions
        return rows if live or not self.rereads_window else rows + self.window_for(live)

    def flush_positions_for(self, delay_positions: int) -> int:
        """Positions of silence to compute after the end of a stream with this delay until the last word is complete."""
        return self.flush_positions + delay_positions

    def pause_positions_for(self, delay_positions: int) -> int:
        """Positions to compute after the last speech before a pause until its last word is complete, unless the word is
        very long. Fewer than at the end of a stream, because more audio follows."""
        return self.flush_positions // 3 + delay_positions


class Vocabulary:
    """The bytes of each token (`pieces`); b"" for tokens that are not text.

    `word_marker` is the token with which a model announces a word, if it has one. The word's time is the marker's time.
    """

    __slots__ = ("blanks", "pieces", "texts", "word_marker")

    def __init__(self, pieces: list[bytes], word_marker: int | None = None) -> None:
        self.pieces = pieces
        self.word_marker = word_marker
        # Text of each token that is valid UTF-8 on its own; None for the others, whose bytes must be joined.
        self.texts = [_text_of(piece) for piece in pieces]
        # Tokens without text, except the word marker.
        self.blanks = frozenset(token for token, piece in enumerate(pieces) if not piece and token != word_marker)


def _text_of(piece: bytes) -> str | None:
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

# Sizes of Whisper's English vocabulary. A multilingual one has one more text token, so it is recognised by its size.
ENGLISH_TEXT_TOKENS = 50_256
ENGLISH_VOCABULARY = 51_864
# Tokens of Whisper that are neither text nor a language: start, translate, transcribe, ..., 1501 time stamps.
_SPECIALS_WITHOUT_LANGUAGES = 1_509

# Other codes and names of the same languages.
_ALIASES = {
    "cmn": "zh", "mandarin": "zh", "iw": "he", "jv": "jw", "nb": "no", "bokmal": "no", "fil": "tl", "filipino": "tl",
    "castilian": "es", "valencian": "ca", "flemish": "nl", "moldavian": "ro", "moldovan": "ro", "farsi": "fa",
    "burmese": "my", "pushto": "ps", "panjabi": "pa", "sinhalese": "si", "haitian": "ht", "letzeburgesch": "lb",
}  # fmt: skip
_CODES = {**{name: code for code, name in NAMES.items()}, **_ALIASES}
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
