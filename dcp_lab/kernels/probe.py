"""Probes: kernels that only read, to show what the memory could give."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _read_pages_kernel(
    source_ptr,
    table_ptr,
    sink_ptr,
    stride_page,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Grid (pages,): read the page that the table names, as int32, and store one word of it."""
    index = tl.program_id(0)
    page = tl.load(table_ptr + index).to(tl.int64)
    seen = tl.zeros([BLOCK], tl.int32)
    for step in tl.static_range(STEPS):
        seen = seen ^ tl.load(source_ptr + page * stride_page + step * BLOCK + tl.arange(0, BLOCK))
    tl.store(sink_ptr + index, tl.xor_sum(seen, 0))
