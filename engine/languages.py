"""Names of languages: the codes that models are told, and what people write for them."""

from __future__ import annotations

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
