"""Why a configuration is refused when the backend is selected, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcp_lab.vllm_plugin.options import Options, read_options

ANOTHER = "leave --attention-backend CUSTOM away"

# What vLLM's own check says -> what would help. The value that was given is added by `explain`.
WAYS_OUT = {
    "head_size": "multiples of 16 up to 256 are",
    "dtype": "use --dtype bfloat16, float16 or float32",
    "kv_cache_dtype": "use --kv-cache-dtype auto, bfloat16, float16 or fp8",
    "block_size": "use --block-size 16, 32, 64, 128 or another multiple of 16",
    "MLA": "MLA models keep vLLM's own backend, with DCP: leave --attention-backend CUSTOM away",
    "partial multimodal token full attention": ANOTHER,
    "sparse": ANOTHER,
    "per-head quant scales": "use a checkpoint with one scale a layer, or --kv-cache-dtype auto",
    "attention type": "only decoder attention is",
    "non-causal attention": ANOTHER,
    "batch invariance": "unset VLLM_BATCH_INVARIANT",
    "PCP": "leave --prefill-context-parallel-size at 1",
    "R-SWA": ANOTHER,
}


def explain(reason: str, given: Mapping[str, Any]) -> str:
    """Return vLLM's reason with the value that was given and what to do.

    Args:
        reason: Like 'head_size not supported'.
        given: What validate_configuration was called with.
    """
    for name, way_out in WAYS_OUT.items():
        if reason.startswith(name):
            value = f" ({name}={given[name]})" if name in given else ""
            return f"{reason}{value}: {way_out}"
    return f"{reason}: {ANOTHER}"


def configuration_reasons(config: Any) -> list[str]:
    """Return what vLLM's own check does not ask: options, and what they exclude.

    Args:
        config: The VllmConfig, None where there is none.
    """
    try:
        options = read_options(getattr(config, "additional_config", None))
    except ValueError as error:
        return [str(error)]
    reasons = []
    parallel = getattr(config, "parallel_config", None)
    if parallel is not None:
        reasons += _parallel_reasons(parallel, options)
    return reasons


def _parallel_reasons(parallel: Any, options: Options) -> list[str]:
    reasons = []
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        reasons.append(f"PCP not supported: {WAYS_OUT['PCP']}")
    dcp = getattr(parallel, "decode_context_parallel_size", 1)
    reducer = options.reducer_name(getattr(parallel, "dcp_comm_backend", None))
    if dcp > 16 and reducer == "direct":
        reasons.append(f"reducer=direct takes at most 16 ranks, not {dcp}: use reducer=a2a")
    microbatches = getattr(parallel, "use_ubatching", False) or getattr(
        parallel, "enable_dbo", False
    )
    if dcp > 1 and microbatches:
        reasons.append(
            "dual batch overlap runs two batches at once, which would share the exchange's "
            "buffers: leave --enable-dbo away"
        )
    return reasons
