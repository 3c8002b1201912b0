"""Run one vLLM engine in the CPU engine's environment and print what it generated, as JSON.

    PYTHON tests/vllm_cpu_engine.py '{"model": DIR, "tp": 2, "dcp": 2, "comm": "a2a"}'

A program of its own, because vLLM lives in an environment of its own and spawns its workers from
the file that started it. Every line but the one after RESULT is vLLM's.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

PROMPT_LENGTHS = (1, 15, 16, 17, 200)
NUM_LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 2, 128, 4, 1, 32
VOCABULARY = 260
NEW_TOKENS = 12


def make_model(place: Path) -> None:
    """Write a Llama of two layers with random weights, spread enough that no two tokens tie."""
    import torch
    from safetensors.torch import save_file

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_act": "silu",
    }
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        return std * torch.randn(rows, columns, generator=generator)

    weights = {
        "model.embed_tokens.weight": normal(VOCABULARY, HIDDEN, 1.0),
        "lm_head.weight": normal(VOCABULARY, HIDDEN, 0.3),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(NUM_LAYERS):
        name = f"model.layers.{layer}"
        for part, rows, columns in (
            ("q_proj", HEADS * HEAD_DIM, HIDDEN),
            ("k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            ("o_proj", HIDDEN, HEADS * HEAD_DIM),
        ):
            weights[f"{name}.self_attn.{part}.weight"] = normal(rows, columns, 0.2)
        for part, rows, columns in (
            ("gate_proj", 2 * HIDDEN, HIDDEN),
            ("up_proj", 2 * HIDDEN, HIDDEN),
            ("down_proj", HIDDEN, 2 * HIDDEN),
        ):
            weights[f"{name}.mlp.{part}.weight"] = normal(rows, columns, 0.1)
        weights[f"{name}.input_layernorm.weight"] = torch.ones(HIDDEN)
        weights[f"{name}.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})


def prompts() -> list[dict[str, list[int]]]:
    """Return one prompt of each length, of tokens that repeat nowhere."""
    import random

    draw = random.Random(0)
    return [
        {"prompt_token_ids": [draw.randrange(4, VOCABULARY) for _ in range(length)]}
        for length in PROMPT_LENGTHS
    ]


def break_the_lse(worker: Any) -> int:
    """Make every exchange of a worker merge as if all ranks' LSE were equal; return how many."""
    import torch

    from dcp_lab.state import AttnState

    layers = worker.model_runner.vllm_config.compilation_config.static_forward_context.values()
    exchanges = {id(layer.impl.exchange): layer.impl.exchange for layer in layers}
    for exchange in exchanges.values():
        reduce = exchange.reduce
        exchange.reduce = lambda state, output, reduce=reduce: reduce(
            AttnState(state.out, torch.zeros_like(state.lse)), output
        )
    return len(exchanges)


def attention_of(worker: Any) -> list[str]:
    """Return what attends in a worker: implementation, reducer, shard and kernel mode."""
    layers = worker.model_runner.vllm_config.compilation_config.static_forward_context.values()
    found = set()
    for layer in layers:
        impl = layer.impl
        name = f"{type(impl).__module__}.{type(impl).__name__}"
        if name.startswith("dcp_lab."):
            from dcp_lab.kernels import INTERPRETED

            reducer = impl.exchange.reducer.name if impl.exchange else "none"
            name += f" {reducer} {impl.shard} interpreted={INTERPRETED}"
        found.add(name)
    return sorted(found)


def generate(llm: Any) -> list[dict[str, Any]]:
    """Return tokens, log-probabilities and cached prompt tokens of every prompt, greedy."""
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, detokenize=False
    )
    outputs = llm.generate(prompts(), greedy, use_tqdm=False)
    rows = []
    for output in outputs:
        (completion,) = output.outputs
        chosen = zip(completion.token_ids, completion.logprobs, strict=True)
        rows.append(
            {
                "prompt": len(output.prompt_token_ids),
                "tokens": list(completion.token_ids),
                "logprobs": [logprobs[token].logprob for token, logprobs in chosen],
                "cached": output.num_cached_tokens,
            }
        )
    return rows


def main() -> None:
    """Start the engine that argv[1] describes and generate: once, again, and with broken LSE."""
    wanted = json.loads(sys.argv[1])
    model = Path(wanted["model"])
    if not (model / "model.safetensors").exists():
        make_model(model)
    from vllm import LLM

    start = time.monotonic()
    parallel = {"tensor_parallel_size": wanted["tp"]}
    if wanted["dcp"] > 1:
        parallel["decode_context_parallel_size"] = wanted["dcp"]
        parallel["dcp_comm_backend"] = wanted["comm"]
        parallel["cp_kv_cache_interleave_size"] = wanted.get("interleave", 1)
    llm = LLM(
        str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        # A prompt of 200 tokens comes in pieces, beside the decodes of the short ones.
        max_num_batched_tokens=64,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        enforce_eager=True,
        max_num_seqs=8,
        # The stock CPU attention takes multiples of 32 only.
        block_size=32,
        seed=0,
        disable_log_stats=True,
        **parallel,
    )
    started = time.monotonic()
    result = {
        "attention": llm.collective_rpc(attention_of),
        "first": generate(llm),
        "again": generate(llm),
    }
    if wanted.get("break_the_lse"):
        result["broken_exchanges"] = llm.collective_rpc(break_the_lse)
        llm.reset_prefix_cache()
        result["broken"] = generate(llm)
    result["start_s"] = started - start
    result["run_s"] = time.monotonic() - started
    print("RESULT", flush=True)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
