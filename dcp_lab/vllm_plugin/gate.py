"""Keeps full graphs where vLLM lowers them to PIECEWISE because of DCP on ROCm: study 2's rule.

vLLM 0.13 to some release before 0.32 lowers every full graph mode on ROCm when DCP > 1, in
RocmPlatform.check_and_update_config; later ones do not, and there the gate finds nothing to do.
"""

from __future__ import annotations

import functools
from typing import Any

from dcp_lab.graphs.policy import resolve_cudagraph_mode
from dcp_lab.vllm_plugin.options import read_options

# Option rocm_full_graph_gate -> the rule of dcp_lab.graphs.policy that then holds.
RULES = {"a2a": "a2a_gate", "all": "pcp_only"}


def install(platform: Any) -> None:
    """Let a ROCm platform class ask the gate after it has lowered a mode; once, however often.

    Args:
        platform: vLLM's RocmPlatform class.
    """
    lower = platform.check_and_update_config
    if getattr(lower, "dcp_lab_gate", False):
        return

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        requested = vllm_config.compilation_config.cudagraph_mode
        lower(vllm_config)
        keep_full_graphs(vllm_config, requested)

    functools.update_wrapper(check_and_update_config, lower.__func__)
    check_and_update_config.dcp_lab_gate = True
    platform.check_and_update_config = classmethod(check_and_update_config)


def keep_full_graphs(vllm_config: Any, requested: Any) -> None:
    """Put the requested mode back where the option and the rule say that it is safe to.

    Args:
        vllm_config: After the platform has changed it.
        requested: The CUDAGraphMode before.
    """
    compilation, parallel = vllm_config.compilation_config, vllm_config.parallel_config
    lowered = compilation.cudagraph_mode
    if requested is None or lowered == requested or lowered.name != "PIECEWISE":
        return
    # Without DCP it was lowered for a reason that the gate knows nothing of.
    if parallel.decode_context_parallel_size <= 1:
        return
    options = read_options(getattr(vllm_config, "additional_config", None))
    rule = RULES.get(options.rocm_full_graph_gate)
    if rule is None:
        return
    # The lab's reducer and the one of vLLM's own layers (MLA): both have to be the safe one.
    theirs = parallel.dcp_comm_backend or "ag_rs"
    exchange = theirs if options.reducer_name(theirs) == theirs else "ag_rs"
    resolved = resolve_cudagraph_mode(
        requested.name,
        platform="rocm",
        dcp_size=parallel.decode_context_parallel_size,
        dcp_comm_backend=exchange,
        pcp_size=getattr(parallel, "prefill_context_parallel_size", 1),
        rule=rule,
    )
    from vllm.logger import init_logger

    # vLLM shows what its own names log.
    logger = init_logger("vllm.dcp_lab")
    if resolved.mode == requested.name:
        compilation.cudagraph_mode = requested
        unsafe = " UNSAFE: nobody has shown that this exchange may be captured on ROCm."
        logger.warning(
            "dcp_lab: rocm_full_graph_gate=%s keeps cudagraph_mode %s under DCP.%s",
            options.rocm_full_graph_gate,
            requested.name,
            unsafe if exchange != "a2a" else "",
        )
    else:
        logger.warning(
            "dcp_lab: rocm_full_graph_gate=%s leaves cudagraph_mode at PIECEWISE: %s",
            options.rocm_full_graph_gate,
            resolved.reason,
        )
