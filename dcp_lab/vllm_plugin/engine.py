"""One vLLM engine of one configuration, timed: what `dcp_lab.bench.serve` starts for each row.

    python -m dcp_lab.vllm_plugin.engine '{"model": DIR, "results": FILE, "dcp": 2, ...}'

Appends JSON lines to FILE as it goes: the engine, tokens, then each context when it is measured. A
process of its own, because an engine does not give all of its memory back, and because vLLM spawns
its workers from the module that was started.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import sys
import time
from typing import Any

from dcp_lab.vllm_plugin import register

# Tokens that every request has before the first window, and steps of a window.
SKIP, WINDOW = 8, 64
# Tokens of each request that are compared between engines, after a prompt of this many.
COMPARED_TOKENS, COMPARED_CONTEXT = 32, 2000

_names = map("timed-{}".format, itertools.count())


def same_code(config: Any) -> Any:
    """Return a VllmConfig without what vLLM's compiled code does not depend on, for its hash.

    Attention backend, DCP, the lab's options and the graph mode: torch.compile cuts the model at
    its attention, which it calls by name, and vLLM wraps the compiled pieces in graphs when they
    are loaded, as the mode says then.
    """
    config = copy.copy(config)
    config.additional_config = {}
    config.attention_config = copy.copy(config.attention_config)
    config.attention_config.backend = None
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.decode_context_parallel_size = 1
    config.parallel_config.dcp_comm_backend = "ag_rs"
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.cudagraph_mode = None
    return config


def share_compiled_code() -> None:
    """Let this process's vLLM find the code that an engine with another attention compiled."""
    from vllm.config import VllmConfig

    plain = VllmConfig.compute_hash
    if not getattr(plain, "dcp_lab_shared", False):

        def compute_hash(self: Any) -> str:
            return plain(same_code(self))

        compute_hash.dcp_lab_shared = True
        VllmConfig.compute_hash = compute_hash


def prepare(arguments: list[str]) -> dict[str, Any]:
    """Do in this process, be it a worker, what the engine's description asks; return that."""
    wanted = json.loads(arguments[1])
    register()
    if wanted["share_compiled"]:
        share_compiled_code()
    return wanted


if __name__ == "__mp_main__":
    # A worker: prepare here too, so that the package need not be installed, only importable.
    prepare(sys.argv)


def token_capacity(requests: int, context: int, windows: int, batched_tokens: int) -> int:
    """Return the new tokens a request may have to make so that all run in every window.

    The first of them decode while the last are prefilled, a chunk a step.
    """
    return SKIP + windows * WINDOW + -(-requests * context // batched_tokens) + 8


def prompts(requests: int, length: int, vocabulary: int, seed: int) -> list[dict[str, Any]]:
    """Return random prompts, the same on every call."""
    draw = random.Random(seed)
    return [
        {
            "type": "token",
            "prompt_token_ids": [draw.randrange(10, vocabulary) for _ in range(length)],
        }
        for _ in range(requests)
    ]


def facts_of(worker: Any) -> dict[str, Any]:
    """Return what a worker ended up with: graph mode, attention, exchange, memory."""
    import torch

    config = worker.model_runner.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    impls = [layer.impl for layer in layers if hasattr(layer, "impl")]
    exchange = getattr(impls[0], "exchange", None)
    runner = type(worker.model_runner)
    return {
        "cudagraph_mode": config.compilation_config.cudagraph_mode.name,
        "attention": f"{type(impls[0]).__module__}.{type(impls[0]).__name__}",
        "runner": f"{runner.__module__}.{runner.__name__}",
        "reducer": exchange.reducer.name if exchange else None,
        "exchange_bytes": exchange.memory_bytes() if exchange else 0,
        "kv_blocks": config.cache_config.num_gpu_blocks,
        "block_size": config.cache_config.block_size,
        "capture_sizes": list(config.compilation_config.cudagraph_capture_sizes or []),
        "batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "compile_s": config.compilation_config.compilation_time,
        "reserved_bytes": torch.cuda.memory_reserved() if torch.cuda.is_available() else 0,
    }


def spread_weights(worker: Any) -> int:
    """Give a dense model weights whose logits lie apart, the same in every engine of this TP.

    vLLM's dummy weights are so small that every token is as likely; whether attention is right
    shows in no token. These make attention look at few keys and the layers' outputs add up to
    about what the embedding is.

    Returns:
        The weights written, of this rank.
    """
    import torch
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    config = worker.model_runner.vllm_config.model_config.hf_config
    written = 0

    def normal(weight: Any, std: float, seed: int) -> None:
        generator = torch.Generator(device=weight.device).manual_seed(seed)
        weight.normal_(0.0, std, generator=generator)

    with torch.no_grad():
        for index, (name, weight) in enumerate(worker.get_model().named_parameters()):
            written += weight.numel()
            kind = name.split(".")[-2]
            if weight.dim() == 1:
                # Scores of queries and keys then have a standard deviation of 4.
                weight.fill_(2.0 if kind in ("q_norm", "k_norm") else 1.0)
                continue
            columns = weight.shape[1]
            own, everybody = 64 * index + 1 + rank, 64 * index
            if kind == "embed_tokens":
                normal(weight, 1.0, own)
            elif kind == "lm_head":
                normal(weight, 3.0 * columns**-0.5, own)
            elif kind in ("o_proj", "down_proj"):
                # Cut along its columns.
                std = (size * columns * 2 * config.num_hidden_layers) ** -0.5
                normal(weight, std, own)
            elif kind == "qkv_proj":
                # Fewer KV heads than ranks: each rank has the same ones.
                rows = config.num_attention_heads // size * config.head_dim
                shared = everybody if config.num_key_value_heads < size else own + 32
                normal(weight[:rows], columns**-0.5, own)
                normal(weight[rows:], columns**-0.5, shared)
            else:
                normal(weight, columns**-0.5, own)
    return written


def follow(
    llm: Any, batch: list[dict[str, Any]], most: int, windows: int, limit_s: float
) -> list[float]:
    """Return when every request of a batch had 1, 2, ... tokens, in seconds from its start.

    Args:
        llm: The engine.
        batch: Its requests, all given at once.
        most: Tokens after which a request ends by itself.
        windows: Windows to wait for; 0: none, until each request ends.
        limit_s: No further window begins when so many seconds have gone since the first token.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    greedy = SamplingParams(
        temperature=0,
        max_tokens=most,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    made = dict.fromkeys(itertools.islice(_names, len(batch)), 0)
    start = time.perf_counter()
    internal = [
        engine.add_request(name, prompt, greedy) for name, prompt in zip(made, batch, strict=True)
    ]
    times: list[float] = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            if output.request_id in made:
                made[output.request_id] += sum(len(one.token_ids) for one in output.outputs)
        fewest = min(made.values())
        times += [now] * (fewest - len(times))
        whole = (fewest - SKIP) // WINDOW
        if windows and (whole >= windows or (whole >= 1 and now - times[0] > limit_s)):
            break
    engine.abort_request(internal, internal=True)
    # The step that was under way must not be part of what comes next.
    time.sleep(0.1)
    return times


def measure(llm: Any, wanted: dict[str, Any], context: int) -> dict[str, Any]:
    """Return TPOT and TTFT at one context.

    TTFT, a sample a run: from giving all requests until each has its first token; those that have
    one decode meanwhile. TPOT, a sample a window: WINDOW steps of all requests, over their number,
    from SKIP tokens after the context on.
    """
    batch = prompts(wanted["requests"], context, wanted["vocabulary"], seed=context)
    repeats = wanted["repeats"]
    most = token_capacity(len(batch), context, repeats, wanted["batched_tokens"])
    # Warm-up: as many requests as make a step of both prefill and decode.
    few = -(-wanted["batched_tokens"] // context) + 2
    follow(llm, batch[:few], SKIP, 0, 0.0)
    runs = repeats - 1 if context in wanted["ttft_contexts"] else 0
    ttft = [follow(llm, batch, SKIP, 0, 0.0)[0] for _ in range(runs)]
    times = follow(llm, batch, most, repeats, wanted["window_s"])
    ends = range(SKIP + WINDOW, len(times) + 1, WINDOW)
    return {
        "context": context,
        "tpot_ms": [(times[end - 1] - times[end - WINDOW - 1]) / WINDOW * 1e3 for end in ends],
        "ttft_ms": [value * 1e3 for value in (*ttft, times[0])],
    }


def greedy_tokens(llm: Any, wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """Return tokens and the two likeliest log-probabilities of each position, to be compared."""
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0, max_tokens=COMPARED_TOKENS, ignore_eos=True, detokenize=False, logprobs=2
    )
    batch = prompts(wanted["requests"], COMPARED_CONTEXT, wanted["vocabulary"], COMPARED_CONTEXT)
    asked = [{"prompt_token_ids": prompt["prompt_token_ids"]} for prompt in batch]
    rows = []
    for output in llm.generate(asked, greedy, use_tqdm=False):
        (completion,) = output.outputs
        best = [
            sorted((entry.logprob for entry in position.values()), reverse=True)[:2]
            for position in completion.logprobs
        ]
        rows.append({"tokens": list(completion.token_ids), "logprobs": best})
    return rows


def main() -> None:
    """Start the engine that argv[1] describes, measure every context, write what was found."""
    wanted = prepare(sys.argv)
    from vllm import LLM

    def write(result: dict[str, Any]) -> None:
        with open(wanted["results"], "a") as file:
            file.write(json.dumps(result) + "\n")

    parallel: dict[str, Any] = {"tensor_parallel_size": wanted["tp"]}
    if wanted["dcp"] > 1:
        parallel["decode_context_parallel_size"] = wanted["dcp"]
        parallel["dcp_comm_backend"] = wanted["comm"]
    if wanted.get("options"):
        parallel["additional_config"] = {"dcp_lab": wanted["options"]}
    start = time.perf_counter()
    llm = LLM(
        wanted["model"],
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=wanted["dtype"],
        attention_backend=wanted["backend"],
        max_model_len=wanted["max_model_len"],
        max_num_seqs=wanted["requests"],
        max_num_batched_tokens=wanted["batched_tokens"],
        gpu_memory_utilization=wanted["memory"],
        enable_prefix_caching=False,
        seed=0,
        disable_log_stats=True,
        compilation_config={
            "cudagraph_mode": wanted["mode"],
            "cudagraph_capture_sizes": wanted["capture_sizes"],
        },
        # FlashInfer attends in none of the rows.
        kernel_config={"enable_flashinfer_autotune": False},
        **parallel,
    )
    start_s = time.perf_counter() - start
    if wanted["weights"] == "spread":
        llm.collective_rpc(spread_weights)
    write({"start_s": start_s, "workers": llm.collective_rpc(facts_of)})
    for context in wanted["contexts"]:
        write(measure(llm, wanted, context))
    if wanted["compare_tokens"]:
        write({"greedy": greedy_tokens(llm, wanted)})


if __name__ == "__main__":
    main()
