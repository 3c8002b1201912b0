"""Private seams of vLLM 0.32's CPU platform, so that tests run dcp_lab's backend without a GPU.

With DCP_LAB_CPU_SEAMS=1 in the environment of vLLM:

    CPU_ATTN is dcp_lab's backend: the CPU platform ignores --attention-backend and asks for that.
    Slots are counted under DCP: the platform's own C++ refuses.

and TRITON_INTERPRET=1 makes the kernels that ship run through Triton's interpreter. Nothing here
belongs on a machine with a GPU, where `--attention-backend CUSTOM` is enough.
"""

from __future__ import annotations

import os
from typing import Any


def register() -> None:
    """Put the seams in place, where DCP_LAB_CPU_SEAMS=1 asks for it."""
    if os.environ.get("DCP_LAB_CPU_SEAMS") != "1":
        return
    import vllm.utils.cpu_triton_utils as overrides
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from dcp_lab.vllm_plugin import BACKEND

    if not current_platform.is_cpu():
        return
    register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    # Read by the platform after the plugins have loaded (worker_base.py of 0.32).
    overrides._compute_slot_mapping_kernel_impl = slot_mapping_under_cp


def slot_mapping_under_cp(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: Any,
    positions: Any,
    block_table: Any,
    block_table_stride: int,
    slot_mapping: Any,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int = 1,
    TOTAL_CP_RANK: int = 0,
    CP_KV_CACHE_INTERLEAVE_SIZE: int = 1,
    PAD_ID: int = -1,
    BLOCK_SIZE: int = 1024,
) -> None:
    """Write each token's slot on this rank, PAD_ID for another rank's tokens; vLLM's arguments."""
    page, size, interleave = KV_CACHE_BLOCK_SIZE, TOTAL_CP_WORLD_SIZE, CP_KV_CACHE_INTERLEAVE_SIZE
    slot_mapping[num_tokens:max_num_tokens] = PAD_ID
    table = block_table.view(-1, block_table_stride)
    starts = query_start_loc.tolist()
    for request, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        if end > num_tokens:
            break
        position = positions[start:end]
        inside = position % (page * size)
        mine = inside // interleave % size == TOTAL_CP_RANK
        local = inside // (size * interleave) * interleave + inside % interleave
        pages = table[request][position // (page * size)].long()
        slot_mapping[start:end] = (pages * page + local).where(mine, PAD_ID)
