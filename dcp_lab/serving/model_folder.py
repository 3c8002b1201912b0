"""A model folder that vLLM serves without a network: random or given weights, and a tokenizer.

The tokenizer knows the 95 printable characters of ASCII, one token each, so that a prompt of N
tokens is N characters. `vllm bench serve` needs that for exact lengths: with a tokenizer that
merges, N random tokens are a text of another length.

config.json and tokenizer.json are written as such and the weights by torch, so that a folder can
be made where transformers, tokenizers and safetensors are not installed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SPECIAL = ("<s>", "</s>", "<pad>", "<unk>")
CHARACTERS = tuple(map(chr, range(32, 127)))
VOCAB_SIZE = len(SPECIAL) + len(CHARACTERS)
MODEL_TYPES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a dense decoder model with grouped-query attention.

    Attributes:
        model_type: "llama", or "qwen3" (which norms q and k of each head).
        hidden_size: Elements of a token between layers.
        intermediate_size: Elements inside the MLP.
        num_layers: Layers.
        num_q_heads: Query heads.
        num_kv_heads: KV heads. DCP needs fewer of them than tensor-parallel ranks.
        head_dim: Elements of a query, key and value.
        vocab_size: At least VOCAB_SIZE; tokens above have weights and no text.
        max_position_embeddings: Longest request.
        rope_theta: Base of the rotary embedding.
        dtype: Of the weights, as torch names it.
    """

    model_type: str = "llama"
    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 2
    num_q_heads: int = 4
    num_kv_heads: int = 1
    head_dim: int = 32
    vocab_size: int = VOCAB_SIZE
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.model_type not in MODEL_TYPES:
            expected = ", ".join(MODEL_TYPES)
            raise ValueError(f"model_type: expected one of {expected}, got {self.model_type!r}")
        if self.dtype not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"dtype: expected float32, float16, bfloat16, got {self.dtype!r}")
        if self.vocab_size < VOCAB_SIZE:
            raise ValueError(f"vocab_size: expected >= {VOCAB_SIZE}, got {self.vocab_size}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads: expected a multiple of num_kv_heads {self.num_kv_heads}, got "
                f"{self.num_q_heads}"
            )

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name to shape of every weight, as Hugging Face names them."""
        q, kv = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden)
        }
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            shapes |= {
                f"{prefix}input_layernorm.weight": (hidden,),
                f"{prefix}self_attn.q_proj.weight": (q, hidden),
                f"{prefix}self_attn.k_proj.weight": (kv, hidden),
                f"{prefix}self_attn.v_proj.weight": (kv, hidden),
                f"{prefix}self_attn.o_proj.weight": (hidden, q),
                f"{prefix}post_attention_layernorm.weight": (hidden,),
                f"{prefix}mlp.gate_proj.weight": (inner, hidden),
                f"{prefix}mlp.up_proj.weight": (inner, hidden),
                f"{prefix}mlp.down_proj.weight": (hidden, inner),
            }
            if self.model_type == "qwen3":
                shapes[f"{prefix}self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[f"{prefix}self_attn.k_norm.weight"] = (self.head_dim,)
        shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (self.vocab_size, hidden)}
        return shapes


# Four query heads on one KV head: the smallest that TP 2 with DCP 2 can serve. 350,000 weights.
TINY = ModelShape()

# Study 1's attention on each of its 8 ranks (64 query heads on 4 KV heads over TP 8 leave 8 on 1),
# for two GPUs; a light dense part in place of the experts, as in data/measured/vllm_h200_dcp.csv.
STUDY1_TWO_GPUS = ModelShape(
    model_type="qwen3",
    hidden_size=4096,
    intermediate_size=1536,
    num_layers=94,
    num_q_heads=16,
    num_kv_heads=1,
    head_dim=128,
    vocab_size=32000,
    max_position_embeddings=40960,
    rope_theta=1e6,
    dtype="bfloat16",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentShape:
    """The sizes of a dense decoder model with latent attention (MLA), for dummy weights.

    Attributes:
        hidden_size, intermediate_size, num_layers, num_q_heads, vocab_size,
        max_position_embeddings, rope_theta, dtype: As of ModelShape.
        latent_dim: Elements of the latent that the cache holds of a token.
        rope_dim: Elements of the rotated key beside it.
        nope_dim: Elements of a query and key that are not rotated.
        value_dim: Elements of a value.
    """

    hidden_size: int = 2048
    intermediate_size: int = 2048
    num_layers: int = 61
    num_q_heads: int = 32
    latent_dim: int = 512
    rope_dim: int = 64
    nope_dim: int = 128
    value_dim: int = 128
    vocab_size: int = 32000
    max_position_embeddings: int = 40960
    rope_theta: float = 10000.0
    dtype: str = "bfloat16"

    @property
    def num_kv_heads(self) -> int:
        """Heads of the cache: the latent is one."""
        return 1

    @property
    def head_dim(self) -> int:
        """Elements of the cache a token and layer."""
        return self.latent_dim + self.rope_dim


# 16 query heads a rank on two GPUs, as many layers as DeepSeek-V3 and Kimi-K2 have.
LATENT_TWO_GPUS = LatentShape()


def write_latent_folder(
    folder: str | os.PathLike[str], shape: LatentShape = LATENT_TWO_GPUS
) -> Path:
    """Write a folder that vLLM takes as an MLA model with `load_format="dummy"`.

    Args:
        folder: Made if it is missing; files of an earlier call are replaced.
        shape: The model's sizes.

    Returns:
        The folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write_texts(folder, shape, _latent_config(shape))
    return folder


def write_model_folder(
    folder: str | os.PathLike[str],
    shape: ModelShape = TINY,
    *,
    weights: Mapping[str, Any] | None = None,
    random_weights: bool = True,
    seed: int = 0,
) -> Path:
    """Write a folder that `vllm serve` takes as a model.

    Args:
        folder: Made if it is missing; files of an earlier call are replaced.
        shape: The model's sizes.
        weights: Name to tensor, as `ModelShape.weight_shapes` has them. Default: random ones.
        random_weights: False writes none: serve with `load_format="dummy"`, which is enough for
            times. Dummy weights give nearly constant logits, random ones spread them, so that a
            wrong reduction changes tokens.
        seed: Of the random weights.

    Returns:
        The folder.

    Raises:
        ValueError: weights are not those of the shape.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if weights is None and random_weights:
        weights = make_random_weights(shape, seed)
    path = folder / "pytorch_model.bin"
    if weights is None:
        path.unlink(missing_ok=True)
    else:
        import torch

        found = {name: tuple(weight.shape) for name, weight in weights.items()}
        if found != shape.weight_shapes:
            wrong = sorted(set(found.items()) ^ set(shape.weight_shapes.items()))
            raise ValueError(f"weights: expected those of the shape, differing at {wrong[0]}")
        dtype = getattr(torch, shape.dtype)
        tensors = {name: weight.to(dtype).contiguous() for name, weight in weights.items()}
        with _beside(path) as part:
            torch.save(tensors, part)
    _write_texts(folder, shape, _config(shape))
    return folder


def _write_texts(folder: Path, shape: ModelShape | LatentShape, config: Mapping[str, Any]) -> None:
    for name, content in (
        ("tokenizer.json", _tokenizer()),
        ("tokenizer_config.json", _tokenizer_config(shape)),
        # Last: a folder counts as a model once it has one.
        ("config.json", config),
    ):
        with _beside(folder / name) as part:
            part.write_text(json.dumps(content, indent=1) + "\n")


def make_random_weights(shape: ModelShape, seed: int = 0) -> dict[str, Any]:
    """Return random weights on the CPU, wide enough apart that the likeliest token is clear.

    Args:
        shape: The model's sizes.
        seed: The same seed gives the same weights.

    Returns:
        Name to tensor of shape.dtype. Norms are 1; a matrix is normal with standard deviation
        1 / sqrt(columns), queries and keys twice that, so that attention is neither flat nor on
        one token; the embedding 1, the output 3 / sqrt(columns).
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    gain = {"q_proj": 2.0, "k_proj": 2.0, "lm_head": 3.0}
    weights = {}
    for name, size in shape.weight_shapes.items():
        if len(size) == 1:
            weights[name] = torch.ones(size)
        else:
            kind = name.split(".")[-2]
            std = 1.0 if kind == "embed_tokens" else gain.get(kind, 1.0) * size[1] ** -0.5
            weights[name] = torch.randn(size, generator=generator) * std
        weights[name] = weights[name].to(getattr(torch, shape.dtype))
    return weights


def encode(text: str) -> list[int]:
    """Return the token ids of a text, as the folder's tokenizer gives them.

    Raises:
        ValueError: A character is not a printable one of ASCII.
    """
    for character in text:
        if character not in CHARACTERS:
            raise ValueError(f"text: expected printable ASCII, got {character!r}")
    return [len(SPECIAL) + ord(character) - 32 for character in text]


class _beside:
    """A path to write to, moved to its place when the block ends well."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Path:
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        os.close(handle)
        self.part = Path(name)
        return self.part

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.part.chmod(0o644)
            os.replace(self.part, self.path)
        else:
            self.part.unlink()


def _config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": [MODEL_TYPES[shape.model_type]],
        "model_type": shape.model_type,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_q_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "torch_dtype": shape.dtype,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


def _latent_config(shape: LatentShape) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_q_heads,
        "num_key_value_heads": shape.num_q_heads,
        "q_lora_rank": None,
        "kv_lora_rank": shape.latent_dim,
        "qk_rope_head_dim": shape.rope_dim,
        "qk_nope_head_dim": shape.nope_dim,
        "v_head_dim": shape.value_dim,
        # No layer has experts.
        "n_routed_experts": 0,
        "first_k_dense_replace": shape.num_layers,
        "moe_layer_freq": 1,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "torch_dtype": shape.dtype,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


def _tokenizer() -> dict[str, Any]:
    # Byte-level BPE writes a space as this letter.
    letters = ["\u0120" if character == " " else character for character in CHARACTERS]
    vocab = {token: index for index, token in enumerate([*SPECIAL, *letters])}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, token in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }


def _tokenizer_config(shape: ModelShape | LatentShape) -> dict[str, Any]:
    bos, eos, pad, unk = SPECIAL
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "unk_token": unk,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_position_embeddings,
    }
