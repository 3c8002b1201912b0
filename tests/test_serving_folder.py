"""The model folder: what vLLM and its tokenizer will read, without either."""

from __future__ import annotations

import json

import pytest
import torch

from dcp_lab.serving import (
    LATENT_TWO_GPUS,
    STUDY1_TWO_GPUS,
    TINY,
    ModelShape,
    write_latent_folder,
    write_model_folder,
)
from dcp_lab.serving.model_folder import VOCAB_SIZE, encode


def load(folder):
    return torch.load(folder / "pytorch_model.bin", weights_only=True)


def test_a_folder_is_complete_and_its_weights_are_spread(tmp_path):
    """It has the weights that config.json promises, finite, and no two rows are alike."""
    folder = write_model_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    weights = load(folder)
    assert {name: tuple(w.shape) for name, w in weights.items()} == TINY.weight_shapes
    assert config["num_attention_heads"] == 4 and config["num_key_value_heads"] == 1
    embed = weights["model.embed_tokens.weight"]
    assert tuple(embed.shape) == (config["vocab_size"], config["hidden_size"])
    for name, weight in weights.items():
        assert weight.dtype == torch.float32 and weight.isfinite().all(), name
    assert embed.std() == pytest.approx(1.0, abs=0.05)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "pytorch_model.bin",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_the_same_seed_gives_the_same_weights(tmp_path):
    """Weights depend on the seed and on nothing else."""
    one, two, other = (
        load(write_model_folder(tmp_path / str(index), seed=seed))
        for index, seed in enumerate((3, 3, 4))
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_without_weights_a_folder_serves_dummy_ones(tmp_path):
    """Study 1's shapes take no disk; weights of an earlier call do not stay behind."""
    write_model_folder(tmp_path)
    folder = write_model_folder(tmp_path, STUDY1_TWO_GPUS, random_weights=False)
    assert not (folder / "pytorch_model.bin").exists()
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["num_hidden_layers"] == 94 and config["torch_dtype"] == "bfloat16"


def test_one_character_is_one_token(tmp_path):
    """The tokenizer holds every printable character and merges none."""
    tokenizer = json.loads((write_model_folder(tmp_path) / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(VOCAB_SIZE)) and len(vocab) == 99
    assert tokenizer["model"]["merges"] == []
    text = "A b~!"
    assert encode(text) == [vocab[letter.replace(" ", "\u0120")] for letter in text]
    with pytest.raises(ValueError, match="expected printable ASCII, got 'é'"):
        encode("café")


def test_weights_of_another_shape_are_refused(tmp_path):
    """A missing or misshapen weight is named, and no folder is left that looks complete."""
    with pytest.raises(ValueError, match="weights: expected those of the shape"):
        write_model_folder(tmp_path, weights={"lm_head.weight": torch.zeros(2, 2)})
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt"}, "model_type: expected one of llama, qwen3, got 'gpt'"),
        ({"dtype": "int8"}, "dtype: expected float32, float16, bfloat16, got 'int8'"),
        ({"vocab_size": 10}, "vocab_size: expected >= 99, got 10"),
        ({"num_q_heads": 6, "num_kv_heads": 4}, "num_q_heads: expected a multiple of"),
    ],
)
def test_a_bad_shape_is_refused(changes, message):
    """A shape that cannot be served names its field."""
    with pytest.raises(ValueError, match=message):
        ModelShape(**changes)


def test_a_latent_folder_has_latent_attention_and_no_experts(tmp_path):
    """An MLA model without weights; its cache is one head of latent and rotated key."""
    folder = write_latent_folder(tmp_path / "latent")
    config = json.loads((folder / "config.json").read_text())
    assert config["kv_lora_rank"] + config["qk_rope_head_dim"] == LATENT_TWO_GPUS.head_dim == 576
    assert config["n_routed_experts"] == 0
    assert config["first_k_dense_replace"] == config["num_hidden_layers"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
