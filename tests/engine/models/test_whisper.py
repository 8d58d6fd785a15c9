"""Whisper against transformers, from both kinds of checkpoint, alone and in ragged batches."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad
from transformers import WhisperConfig as ReferenceConfig
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from engine.models.whisper import Whisper, WhisperConfig, without_single_frame_peaks
from engine.weights.checkpoint import BadCheckpoint, load_speech_model

OPENAI_NAMES = [
    ("model.", ""),
    (".layers.", ".blocks."),
    ("self_attn_layer_norm", "attn_ln"),
    ("encoder_attn_layer_norm", "cross_attn_ln"),
    ("final_layer_norm", "mlp_ln"),
    ("encoder.layer_norm", "encoder.ln_post"),
    ("decoder.layer_norm", "decoder.ln"),
    ("self_attn", "attn"),
    ("encoder_attn", "cross_attn"),
    ("q_proj", "query"),
    ("k_proj", "key"),
    ("v_proj", "value"),
    ("out_proj", "out"),
    ("fc1", "mlp.0"),
    ("fc2", "mlp.2"),
    ("embed_positions.weight", "positional_embedding"),
    ("embed_tokens", "token_embedding"),
]


@pytest.fixture(scope="module")
def reference() -> WhisperForConditionalGeneration:
    torch.manual_seed(2)
    config = ReferenceConfig(
        vocab_size=130,
        num_mel_bins=80,
        encoder_layers=2,
        decoder_layers=2,
        d_model=32,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return WhisperForConditionalGeneration(config).eval()


@pytest.fixture(scope="module")
def model(reference: WhisperForConditionalGeneration) -> Whisper:
    return Whisper.load(WhisperConfig.from_json(reference.config.to_dict()), reference.state_dict())


def say(model: Whisper, audio: Tensor, lengths: list[int], tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        encoded = model.encode(audio, lengths)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        hidden, _ = model.decode(tokens, positions, model.new_state(len(tokens), 16), encoded)
        return model.logits(hidden)


# Bad input


@pytest.mark.parametrize(
    "content", [b"", b"not a checkpoint at all", b"PK\x03\x04 half a zip", b"a", b"root:x:0:0:root", b"RIFF....WAVE"]
)
def test_damaged_openai_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(BadCheckpoint, match=r"model\.pt|checkpoint"):
        load_speech_model(tmp_path)


@pytest.mark.parametrize("config", ["[]", "5", '{"model_type": ["whisper"]}', '{"model_type": "whisper"}'])
def test_config_that_describes_no_model(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint):
        load_speech_model(tmp_path)


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="config.json"):
        load_speech_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(BadCheckpoint, match="no model.safetensors"):
        load_speech_model(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match="'bert'"):
        load_speech_model(tmp_path)


def test_checkpoint_without_vocabulary_says_which_file_is_missing(
    tmp_path: Path, reference: WhisperForConditionalGeneration
) -> None:
    reference.save_pretrained(tmp_path)
    with pytest.raises(BadCheckpoint, match="tokenizer.json"):
        load_speech_model(tmp_path)


def test_vocabulary_of_another_model(tmp_path: Path, reference: WhisperForConditionalGeneration) -> None:
    reference.save_pretrained(tmp_path)
    lines = [base64.b64encode(b"%d" % rank) + b" %d" % rank for rank in range(131)]
    (tmp_path / "vocabulary.tiktoken").write_bytes(b"\n".join(lines))
    with pytest.raises(BadCheckpoint, match="131 tokens, the model has 130"):
        load_speech_model(tmp_path)


# Parity


def test_same_logits_as_transformers(model: Whisper, reference: WhisperForConditionalGeneration) -> None:
    audio = torch.randn(1, 32_000) * 0.1
    tokens = torch.tensor([[1, 40, 7, 99]])
    features = WhisperFeatureExtractor()(audio[0].numpy(), sampling_rate=16_000, return_tensors="pt").input_features
    torch.testing.assert_close(model.log_mel(pad(audio, (0, 448_000))), features, atol=1e-4, rtol=1e-4)
    with torch.inference_mode():
        expected = reference(input_features=features, decoder_input_ids=tokens).logits
    torch.testing.assert_close(say(model, audio, [32_000], tokens), expected, atol=1e-4, rtol=1e-4)


def test_openai_file_gives_the_same_model(
    tmp_path: Path, model: Whisper, reference: WhisperForConditionalGeneration
) -> None:
    tensors = {}
    for name, value in reference.state_dict().items():
        if name != "proj_out.weight":
            for ours, theirs in OPENAI_NAMES:
                name = name.replace(ours, theirs)
            tensors[name] = value
    dims = {"n_mels": 80, "n_vocab": 130, "n_audio_ctx": 1500, "n_audio_state": 32, "n_audio_head": 4}
    dims |= {"n_audio_layer": 2, "n_text_ctx": 64, "n_text_head": 4, "n_text_layer": 2, "n_text_state": 32}
    torch.save({"dims": dims, "model_state_dict": tensors}, tmp_path / "own.pt")
    (tmp_path / "vocabulary.tiktoken").write_bytes(base64.b64encode(b" hello") + b" 0\n")
    loaded, pieces = load_speech_model(tmp_path / "own.pt")
    assert isinstance(loaded, Whisper)
    assert pieces == [b" hello"] + [b""] * 129
    audio, tokens = torch.randn(1, 8_000) * 0.1, torch.tensor([[1, 4, 5]])
    assert torch.equal(say(loaded, audio, [8_000], tokens), say(model, audio, [8_000], tokens))


@pytest.mark.parametrize("shorter", [Whisper.min_samples, 7_000, 19_999])
def test_ragged_batch_is_each_row_alone(model: Whisper, monkeypatch: pytest.MonkeyPatch, shorter: int) -> None:
    monkeypatch.setattr(model, "context_slack_seconds", 1.0)
    long, short = torch.randn(20_000) * 0.1, torch.randn(shorter) * 0.1
    tokens = torch.tensor([[1, 5, 6], [1, 8, 9]])
    together = say(model, torch.stack([long, pad(short, (0, 20_000 - shorter))]), [20_000, shorter], tokens)
    for row, audio in enumerate((long, short)):
        alone = say(model, audio[None], [len(audio)], tokens[row : row + 1])
        torch.testing.assert_close(together[row], alone[0], atol=1e-4, rtol=1e-4)


def test_attention_to_a_lone_frame_does_not_count() -> None:
    first_frame_and_a_word = torch.tensor([0.5, 0.02, 0.02, 0.1, 0.2, 0.1, 0.02, 0.04])
    counted = without_single_frame_peaks(torch.stack([first_frame_and_a_word, first_frame_and_a_word.flip(0)]))
    assert torch.equal(counted[0], torch.tensor([0.02, 0.02, 0.02, 0.1, 0.1, 0.1, 0.02, 0.02]))
    assert torch.equal(counted[1], counted[0].flip(0))


def test_special_tokens_follow_from_the_vocabulary_size() -> None:
    def config(vocabulary: int) -> WhisperConfig:
        return WhisperConfig(80, vocabulary, 1500, 384, 6, 4, 448, 6, 4)

    english, multilingual, newest = config(51_864), config(51_865), config(51_866)
    assert (english.end_token, english.start_tokens(0)) == (50_256, [50_257, 50_362])
    assert (multilingual.end_token, multilingual.start_tokens(0)) == (50_257, [50_258, 50_259, 50_359, 50_363])
    assert (newest.languages, newest.start_tokens(2)) == (100, [50_258, 50_261, 50_360, 50_364])
