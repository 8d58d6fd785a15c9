"""Languages, prompts and openings of Whisper's streams: set or detected, kept, and separate by stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.plan import DecodeTask, EncodeTask, OpenTask, StepPlan
from engine.models.whisper import Whisper, WhisperConfig
from engine.options import Options
from engine.runner.windowed.decoder import (
    GUESSED_TOKENS,
    LANGUAGE_POSITIONS,
    DecodedToken,
    DraftRest,
    GreedyDecoder,
    Judgement,
    LanguageState,
    Row,
    judge,
)
from engine.runner.windowed.encoders import SAMPLES_PER_POSITION, WindowEncoder
from engine.runner.windowed.runner import SECONDS_WITH_TEXT, PromptTokenizer, WindowedRunner, windowed_spec
from engine.runner.windowed.stability import Policy
from engine.runner.windowed.windows import HostWindows
from engine.spec import Vocabulary
from tests.realtime.gateway_doubles import ENGLISH, MULTILINGUAL

LANGUAGES = Options(("en", "de", "fr"), detects_language=True, translates=True, prompt=True)
SECOND = 16_000


def small(vocabulary: int = 51_865) -> Whisper:
    torch.manual_seed(5)
    model = Whisper(WhisperConfig(80, vocabulary, 1500, 16, 2, 1, 64, 2, 2)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    model.set_live_padding(full_padding=False)
    return model


@pytest.fixture(scope="module")
def model() -> Whisper:
    return small()


def language_state(given: dict[str, str] | None = None, options: Options = LANGUAGES) -> LanguageState:
    return LanguageState.of(options, given or {}, [])


# Bad input


def test_prompts_of_nothing_and_of_what_the_vocabulary_lacks() -> None:
    prompts = PromptTokenizer([b"a", b" ", b"b", b" a", b"ab"])
    assert prompts.tokens("") == prompts.tokens("  \n ") == []
    assert prompts.tokens("ab xyz") == [3, 2, 1] and len(prompts.tokens("a" * 100_000)) <= 2_000


def test_a_prompt_that_is_one_long_word_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All streams wait for the step in which a prompt is cut into tokens."""

    class Counted(dict[bytes, int]):
        looked_up = 0

        def get(self, piece: bytes, default: int | None = None) -> int | None:  # type: ignore[override]
            self.looked_up += 1
            return super().get(piece, default)

    pieces = [*(bytes([byte]) for byte in range(256)), b"\xf0\x90", b"\x90\x80", b"\xf0\x90\x90\x80"]
    prompts, counted = PromptTokenizer(pieces), Counted({piece: token for token, piece in enumerate(pieces)})
    monkeypatch.setattr(prompts, "_ranks", counted)
    letters = 2_000
    assert prompts.tokens("\U00010400" * letters) == [ord(" "), *[258] * letters]
    assert counted.looked_up <= 3 * 4 * letters


def test_a_doubtful_utterance_is_noise_where_nobody_speaks_and_a_translation_is_not() -> None:
    policy = Policy()
    heard = language_state({"language": "de"})
    # A model that does not say whether it hears speech: a long utterance is believed to be speech.
    assert heard.doubt(policy, to_end=True, is_long=False) == policy.doubt
    assert heard.doubt(policy, to_end=False, is_long=True) == policy.doubt
    assert heard.doubt(policy, to_end=True, is_long=True) < -1.1
    heard.update(Judgement(0.9, [1.0, 0.0, 0.0]), LANGUAGES, 60)
    assert heard.doubt(policy, to_end=True, is_long=True) == policy.sure and heard.language == "de"
    assert language_state({"task": "translate"}).doubt(policy, to_end=True, is_long=True) == float("-inf")


def test_doubtful_words_are_said_where_somebody_surely_speaks() -> None:
    """Short prompts in which whisper-tiny heard a speaker had -1.1, and nothing was said of them."""
    policy, heard = Policy(), language_state({"language": "de"})
    heard.update(Judgement(0.1, [1.0, 0.0, 0.0]), LANGUAGES, 20)
    short = False
    assert heard.doubt(policy, True, short) < -1.1 < heard.doubt(policy, False, short)
    heard.update(Judgement(0.5, [1.0, 0.0, 0.0]), LANGUAGES, 20)
    assert heard.doubt(policy, True, is_long=True) == policy.doubt


# Rules


def test_what_models_take_is_what_the_doubles_take() -> None:
    assert small().options == MULTILINGUAL
    assert small(51_864).options == Options(ENGLISH.languages, prompt=True)
    assert len(small(51_866).options.languages) == 100 and small(51_866).options.languages[-1] == "yue"


def test_texts_begin_as_whisper_was_trained(model: Whisper) -> None:
    start, german, translate, transcribe, previous, no_timestamps = 50258, 50261, 50358, 50359, 50361, 50363
    assert model.prompt_tokens("de", "", []) == [start, german, transcribe, no_timestamps]
    assert model.prompt_tokens("", "translate", []) == [start, start + 1, translate, no_timestamps]
    told = model.prompt_tokens("de", "", [7, 8, 9])
    assert told == [previous, 7, 8, 9, start, german, transcribe, no_timestamps]
    assert model.prompt_tokens("de", "", range(1000))[:32] == [previous, *range(969, 1000)]
    assert small(51_864).prompt_tokens("", "", []) == [50257, 50362]


def test_symbols_that_nobody_speaks_are_barred_and_notes_are_not() -> None:
    model = small()
    before = len(model.suppressed)
    model.suppress_symbols([b" (", b"word", b"]", b"\xe2\x99\xaa", b" --", b",", b""])
    assert model.suppressed[before:] == [0, 2, 4]


def test_a_language_is_found_out_once_and_stays() -> None:
    heard = language_state()
    assert heard.waits(LANGUAGE_POSITIONS - 1) and not heard.waits(LANGUAGE_POSITIONS)
    heard.update(Judgement(0.1, [0.1, 0.9, 0.0]), LANGUAGES, LANGUAGE_POSITIONS - 1)
    assert (heard.language, heard.settled) == ("de", False), "a short utterance decides for itself alone"
    heard.update(Judgement(0.1, [0.4, 0.3, 0.3]), LANGUAGES, LANGUAGE_POSITIONS)
    assert (heard.language, heard.settled) == ("en", False), "so does one that the model is not sure of"
    heard.update(Judgement(0.1, [0.2, 0.2, 0.6]), LANGUAGES, LANGUAGE_POSITIONS)
    assert (heard.language, heard.settled) == ("fr", True)
    heard.update(Judgement(0.3, [1.0, 0.0, 0.0]), LANGUAGES, 100)
    assert (heard.language, heard.no_speech) == ("fr", 0.3) and not heard.waits(1)


def test_only_languages_that_may_be_spoken_are_found() -> None:
    heard = language_state({"languages": "de,fr"})
    heard.update(Judgement(0.1, [0.8, 0.15, 0.05]), LANGUAGES, LANGUAGE_POSITIONS)
    assert (heard.language, heard.settled) == ("de", True)


def test_what_was_found_out_is_saved() -> None:
    heard, rebuilt = language_state(), language_state()
    heard.update(Judgement(0.1, [0.0, 0.0, 1.0]), LANGUAGES, LANGUAGE_POSITIONS)
    rebuilt.resume(heard.save())
    assert rebuilt == heard


# Streams in a batch


def decoded(model: Whisper, audio: Sequence[torch.Tensor], openings: Sequence[list[int]]) -> list[Row]:
    lengths = [len(row) for row in audio]
    padded = torch.nn.utils.rnn.pad_sequence(list(audio), batch_first=True)
    with torch.inference_mode():
        encoded = model.encode(padded, lengths)
        rows = [
            Row([], [], 6, None, frames, start_tokens=opening)
            for frames, opening in zip(encoded.audio, openings, strict=True)
        ]
        GreedyDecoder(model).run(rows, encoded)
    return rows


@settings(max_examples=4, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["en", "de", "ja"]),
            st.sampled_from(["", "translate"]),
            st.lists(st.integers(300, 5000), max_size=5),
            st.integers(1600, SECOND),
        ),
        min_size=2,
        max_size=4,
    )
)
def test_streams_with_other_languages_and_prompts_do_not_change_a_text(
    model: Whisper, streams: list[tuple[str, str, list[int], int]]
) -> None:
    audio = [torch.randn(length, generator=torch.Generator().manual_seed(length)) for *_, length in streams]
    openings = [model.prompt_tokens(language, task, before) for language, task, before, _ in streams]
    together = decoded(model, audio, openings)
    for sound, opening, row in zip(audio, openings, together, strict=True):
        (alone,) = decoded(model, [sound], [opening])
        assert alone.tokens == row.tokens
        assert alone.log_probabilities == pytest.approx(row.log_probabilities, abs=1e-3)


def test_a_window_is_judged_alone_as_among_others(model: Whisper) -> None:
    audio = [torch.randn(length) for length in (SECOND, SECOND // 3)]
    padded = torch.nn.utils.rnn.pad_sequence(audio, batch_first=True)
    with torch.inference_mode():
        together = judge(model, model.encode(padded, [len(row) for row in audio]))
        for row, judgement in zip(audio, together, strict=True):
            (alone,) = judge(model, model.encode(row[None], [len(row)]))
            assert alone.no_speech == pytest.approx(judgement.no_speech, abs=1e-5)
            assert alone.languages == pytest.approx(judgement.languages, abs=1e-4)
            assert sum(alone.languages) == pytest.approx(1.0, abs=1e-4) and len(alone.languages) == 99


# The runner


def runner_of(model: Whisper, sure: float = Policy().sure) -> WindowedRunner:
    pieces = [b" w%d" % token for token in range(model.config.vocabulary)]
    spec = windowed_spec("small", 100, 10)
    spec = replace(spec, options=model.options)
    stream_encoders = WindowEncoder(model, pieces, Policy()), WindowEncoder(model, pieces, Policy())
    return WindowedRunner(
        model, Vocabulary(pieces), spec, Policy(doubt=-1000.0, sure=sure), HostWindows(model, *stream_encoders, 200)
    )


def read(runner: WindowedRunner, positions: int, final: bool = False) -> list[int]:
    rows = list(range(1, positions + 1))
    task = DecodeTask(0, "s", 0, 0, positions, rows, [], final)
    (result,) = runner.execute(StepPlan(1, decode=[task], live=1))
    return [timed.token for timed in result.timed]


def hearing(model: Whisper, opened: OpenTask, positions: int, sure: float = Policy().sure) -> WindowedRunner:
    runner = runner_of(model, sure)
    samples = torch.randn(positions * SAMPLES_PER_POSITION, generator=torch.Generator().manual_seed(1)).numpy()
    runner.execute(StepPlan(0, opened=[opened], encode=[EncodeTask("s", samples, None, list(range(1, positions + 1)))]))
    return runner


def test_a_stream_waits_for_its_language_and_goes_on_in_it_after_a_death(model: Whisper) -> None:
    runner = hearing(model, OpenTask(0, "s", 0, {}, []), LANGUAGE_POSITIONS)
    assert read(runner, LANGUAGE_POSITIONS - 1) == [] and runner.judgement(0) == ("", None)
    read(runner, LANGUAGE_POSITIONS)
    language, nobody = runner.judgement(0)
    assert language in model.options.languages and nobody is not None
    saved, _ = runner.save(0, 0, LANGUAGE_POSITIONS)
    rebuilt = runner_of(model)
    rebuilt.execute(StepPlan(0, opened=[OpenTask(0, "s", 0, {}, [], saved=saved)]))
    assert rebuilt.judgement(0) == (language, nobody)


def test_an_utterance_of_seconds_does_not_end_with_its_first_token(
    model: Whisper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moonshine may choose the end token first although there are 15 s of speech."""
    opened, plain = OpenTask(0, "s", 0, {"language": "en"}, []), model.logits

    def ends_at_once(hidden: torch.Tensor) -> torch.Tensor:
        logits = plain(hidden)
        logits[..., model.end_token] = logits.amax() + 3.0
        return logits

    monkeypatch.setattr(model, "logits", ends_at_once)
    long, short = int(SECONDS_WITH_TEXT * SECOND) // SAMPLES_PER_POSITION + 1, 20

    def text(positions: int, final: bool = True, sure: float = -1000.0, spoken: bool = False) -> list[int]:
        runner = hearing(model, opened, positions, sure)
        runner.slots[0].spoken = spoken
        return read(runner, positions, final)

    assert len(text(long)) == 1, "the best other token, and then the end"
    assert text(long, final=False) == [], "a window that grows may have no text yet"
    assert text(short) == [], "a noise"
    assert text(long, spoken=True) == [], "the utterance has a text already"
    assert text(long, sure=0.0) == [], "a text of which the model is not sure"
    runner = hearing(model, opened, long, -1000.0)
    task = DecodeTask(0, "s", 0, 0, long, list(range(1, long + 1)), [], False, True)
    runner.execute(StepPlan(1, decode=[task], live=1))
    assert len(read(runner, long, final=True)) == 1, "a pause in which there was no text is read again"


def test_the_token_instead_of_the_end_is_the_next_best_one(model: Whisper) -> None:
    logits = torch.tensor([0.0, 2.0, 5.0, 1.0])
    answer = DecodedToken(2, -0.1, 7)
    assert Row([], [], 6, None, 10).first_token(answer, logits, 2) is answer
    row = Row([], [], 6, None, 10, has_text=True)
    assert row.first_token(answer, logits, 3) is answer
    assert row.first_token(answer, logits, 2) == DecodedToken(1, pytest.approx(-3.1), 7)


def test_a_language_that_was_told_is_not_asked_for(model: Whisper) -> None:
    runner = hearing(model, OpenTask(0, "s", 0, {"language": "ja"}, []), 20)
    read(runner, 20, final=True)
    assert runner.judgement(0)[0] == "ja"


# The rest of a draft


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=30),
    st.lists(st.tuples(st.integers(0, 29), st.integers(0, 2), st.integers(0, 6)), max_size=6),
)
def test_a_guess_is_a_piece_of_the_draft_and_the_same_text_is_met_again(
    draft: list[int], edits: list[tuple[int, int, int]]
) -> None:
    text = list(draft)
    for at, kind, token in edits:
        text[at : at + (kind > 0)] = [token] if kind < 2 else []
    rest = DraftRest(draft)
    for token in text:
        guess = rest.guess()
        assert len(guess) <= GUESSED_TOKENS and any(draft[at:][: len(guess)] == guess for at in range(len(draft) + 1))
        rest.add_token(token)
    alike = DraftRest(draft)
    for at, token in enumerate(draft):
        assert alike.guess()[:1] == [token] and alike.guess() == draft[at : at + GUESSED_TOKENS]
        alike.add_token(token)
    assert alike.guess() == []


@pytest.mark.parametrize("said", [0, 3])
def test_the_rest_of_a_draft_is_tried_again_and_changes_no_token(said: int) -> None:
    model = small(vocabulary=51_865)
    decoder = GreedyDecoder(model)
    passes: list[int] = []
    real = model.decode

    def counted(tokens: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        passes.append(tokens.shape[1])
        return real(tokens, *others)

    decoder._decode = counted
    sound = torch.randn(1, 3 * SECOND, generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        encoded = model.encode(sound, [3 * SECOND])

        def read(draft: list[int], retries_draft: bool) -> Row:
            passes.clear()
            row = Row([7] * said, draft, 24, None, encoded.audio[0], retries_draft=retries_draft)
            decoder.run([row], encoded)
            return row

        plain = read([], False)
        one_by_one = len(passes)
        wrong = 40_000
        drafts = [
            plain.tokens,
            [wrong, *plain.tokens[1:]],
            [*plain.tokens[:4], wrong, wrong, *plain.tokens[4:]],
            [*plain.tokens[:2], *plain.tokens[5:]],
            [wrong] * 40,
        ]
        for draft in drafts:
            row = read(draft[:24], True)
            assert (row.tokens, row.peaks, row.ended) == (plain.tokens, plain.peaks, plain.ended)
            assert row.log_probabilities == pytest.approx(plain.log_probabilities, abs=1e-4)
            assert len(passes) <= one_by_one
        changed = next(at for at, token in enumerate(plain.tokens) if token not in plain.tokens[at + 1 :])
        read([*plain.tokens[:changed], wrong, *plain.tokens[changed + 1 :]], True)
        assert len(passes) < one_by_one / 2
