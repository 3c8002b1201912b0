"""One vLLM engine of one configuration, timed: what `dcp_lab.bench.serve` starts for each row.

    python -m dcp_lab.vllm_plugin.engine '{"model": DIR, "dcp": 2, "backend": "CUSTOM", ...}'

Prints RESULT and one line of JSON last. A process of its own, because an engine does not give all
of its memory back, and because vLLM spawns its workers from the module that was started.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

from dcp_lab.vllm_plugin import register

if __name__ == "__mp_main__":
    # A worker: register here too, so that the package need not be installed, only importable.
    register()

# A window is the steps between two runs that differ in length only.
SHORT, LONG = 8, 72


def prompts(requests: int, length: int, vocabulary: int, seed: int) -> list[dict[str, list[int]]]:
    """Return random prompts, the same on every call."""
    import random

    draw = random.Random(seed)
    return [
        {"prompt_token_ids": [draw.randrange(10, vocabulary) for _ in range(length)]}
        for _ in range(requests)
    ]


def facts_of(worker: Any) -> dict[str, Any]:
    """Return what a worker ended up with: graph mode, attention, exchange, memory."""
    import torch

    config = worker.model_runner.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    impls = [layer.impl for layer in layers if hasattr(layer, "impl")]
    exchange = getattr(impls[0], "exchange", None)
    return {
        "cudagraph_mode": config.compilation_config.cudagraph_mode.name,
        "attention": f"{type(impls[0]).__module__}.{type(impls[0]).__name__}",
        "reducer": exchange.reducer.name if exchange else None,
        "exchange_bytes": exchange.memory_bytes() if exchange else 0,
        "kv_blocks": config.cache_config.num_gpu_blocks,
        "block_size": config.cache_config.block_size,
        "memory_reserved_bytes": torch.cuda.memory_reserved() if torch.cuda.is_available() else 0,
    }


def timed(llm: Any, batch: list[dict[str, list[int]]], tokens: int, logprobs: int | None) -> Any:
    """Return (seconds, outputs) of one batch, greedy, of exactly so many new tokens."""
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
    )
    start = time.perf_counter()
    outputs = llm.generate(batch, greedy, use_tqdm=False)
    return time.perf_counter() - start, outputs


def measure(llm: Any, wanted: dict[str, Any], context: int) -> dict[str, Any]:
    """Return TPOT and TTFT at one context, a sample a repeat.

    TPOT is the time of LONG - SHORT steps over their number: of two runs that differ in length
    only, so that prefill and start-up cancel. TTFT is the time of all requests' first token.
    """
    batch = prompts(wanted["requests"], context, wanted["vocabulary"], seed=context)
    timed(llm, batch, 2, None)
    tpot, ttft = [], []
    for _ in range(wanted["repeats"]):
        first, _ = timed(llm, batch, 1, None)
        short, _ = timed(llm, batch, SHORT, None)
        long, _ = timed(llm, batch, LONG, None)
        ttft.append(first * 1e3)
        tpot.append((long - short) / (LONG - SHORT) * 1e3)
    return {
        "context": context,
        "tpot_ms": tpot,
        "tpot_median_ms": statistics.median(tpot),
        "ttft_ms": ttft,
        "ttft_median_ms": statistics.median(ttft),
    }


def greedy_tokens(llm: Any, wanted: dict[str, Any], context: int) -> list[dict[str, Any]]:
    """Return tokens and the two likeliest log-probabilities of each position, to be compared."""
    batch = prompts(wanted["requests"], context, wanted["vocabulary"], seed=context)
    _, outputs = timed(llm, batch, 32, 2)
    rows = []
    for output in outputs:
        (completion,) = output.outputs
        best = [
            sorted((entry.logprob for entry in position.values()), reverse=True)[:2]
            for position in completion.logprobs
        ]
        rows.append({"tokens": list(completion.token_ids), "logprobs": best})
    return rows


def main() -> None:
    """Start the engine that argv[1] describes, measure every context, print the result."""
    wanted = json.loads(sys.argv[1])
    register()
    from vllm import LLM

    parallel: dict[str, Any] = {"tensor_parallel_size": wanted["tp"]}
    if wanted["dcp"] > 1:
        parallel["decode_context_parallel_size"] = wanted["dcp"]
        parallel["dcp_comm_backend"] = wanted["comm"]
    if wanted.get("options"):
        parallel["additional_config"] = {"dcp_lab": wanted["options"]}
    if wanted["random_weights"]:
        parallel["load_format"] = "auto"
    else:
        parallel["load_format"] = "dummy"
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= wanted["requests"]]
    start = time.perf_counter()
    llm = LLM(
        wanted["model"],
        skip_tokenizer_init=True,
        attention_backend=wanted["backend"],
        max_model_len=max(wanted["contexts"]) + 128,
        max_num_seqs=wanted["requests"],
        gpu_memory_utilization=wanted["memory"],
        enable_prefix_caching=False,
        seed=0,
        disable_log_stats=True,
        compilation_config={
            "cudagraph_mode": wanted["mode"],
            "cudagraph_capture_sizes": sizes,
        },
        **parallel,
    )
    result: dict[str, Any] = {
        "wanted": wanted,
        "start_s": time.perf_counter() - start,
        "workers": llm.collective_rpc(facts_of),
        "times": [measure(llm, wanted, context) for context in wanted["contexts"]],
    }
    if wanted["random_weights"]:
        result["greedy"] = {str(c): greedy_tokens(llm, wanted, c) for c in wanted["contexts"]}
    print("RESULT", flush=True)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
