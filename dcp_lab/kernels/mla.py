"""Split-KV paged decode attention over an MLA latent cache, with its LSE.

    latent[s] = (c[s], r[s]), kv_lora_rank and rope elements; all query heads share it
    score[t, h, s] = softmax_scale kv_scale (q_c[t, h] . c[s] + q_r[t, h] . r[s])
    out[t, h] = kv_scale sum_s softmax_s(score[t, h, s]) c[s]
    lse[t, h] = ln sum_s exp(score[t, h, s])

Value and key are the same c, so a tile of it is loaded once and used in both products. The work
table, the partials and the reduce kernel are those of dcp_lab/kernels/decode.py; the rows of a
tile are the query heads of one token, then those of the next.

An fp8 latent is read as 16-bit words of two neighbouring elements and unpacked in registers into
the even and the odd columns, in fp16 with the exponent too small by 8 (e4m3fn) or 7 (e4m3fnuz):
exact, whatever fp8 conversions the chip has, and without the 8-bit reads of shared memory that a
transposed fp8 operand costs. The missing power of two is put back where the scale is.

Source: the absorbed form of MLA (DeepSeek-V2, arXiv 2405.04434) with split KV. Written here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcp_lab.kernels.fp8 import unpack_fp8
from dcp_lab.kernels.primitives import (
    LN2,
    LOG2E,
    page_index,
    power_of_two,
    row_max,
    scaled_to_fp16,
    softmax_update,
    split_tiles,
    visible_end,
)
from dcp_lab.kernels.rows import move_rows


@triton.jit
def add_scores(q, k, scores):
    """Return scores [M, N] + q [M, D] times k [N, D] transposed, in fp32.

    No tensor core keeps fp32's digits, so an fp32 dot is one chain of multiply-adds a score, and
    each rounds by the size of the sum so far. Runs of 32 products are summed apart instead and
    then added: over the 512 + 64 elements of a latent the largest error of out falls from 2.3e-6
    to 0.5e-6 (both orders emulated on the inputs of test_dtypes_and_splits, where an H200 showed
    2.1e-6 to 2.3e-6 for the one chain).
    """
    if q.dtype == tl.float32:
        M: tl.constexpr = q.shape[0]
        N: tl.constexpr = k.shape[0]
        RUN: tl.constexpr = 32 if q.shape[1] > 32 else q.shape[1]
        RUNS: tl.constexpr = q.shape[1] // RUN
        # [RUNS, M, RUN] times [RUNS, RUN, N]
        q_runs = tl.permute(q.reshape(M, RUNS, RUN), (1, 0, 2))
        k_runs = tl.permute(k.reshape(N, RUNS, RUN), (1, 2, 0))
        scores += tl.sum(tl.dot(q_runs, k_runs, input_precision="ieee"), 0)
    else:
        scores = tl.dot(q, tl.trans(k), scores, input_precision="ieee")
    return scores


@triton.jit
def load_parts(
    rows, mask_row, LENGTH: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Load LENGTH elements behind the row pointers [M]: even and odd columns, or two halves."""
    HALF: tl.constexpr = BLOCK // 2
    M: tl.constexpr = rows.shape[0]
    if INTERLEAVED:
        offs = tl.arange(0, BLOCK)
        mask = mask_row[:, None] & (offs < LENGTH)[None, :]
        both = tl.load(rows[:, None] + offs[None, :], mask=mask, other=0.0)
        part0, part1 = tl.split(both.reshape(M, HALF, 2))
    else:
        offs = tl.arange(0, HALF)
        at = rows[:, None] + offs[None, :]
        mask = mask_row[:, None] & (offs < LENGTH)[None, :]
        part0 = tl.load(at, mask=mask, other=0.0)
        mask = mask_row[:, None] & (offs + HALF < LENGTH)[None, :]
        part1 = tl.load(at + HALF, mask=mask, other=0.0)
    return part0, part1


@triton.jit
def store_parts(rows, part0, part1, mask_row, LENGTH: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Store what load_parts would load: two parts [M, HALF] behind the row pointers [M]."""
    HALF: tl.constexpr = part0.shape[1]
    M: tl.constexpr = part0.shape[0]
    if INTERLEAVED:
        offs = tl.arange(0, 2 * HALF)
        both = tl.join(part0, part1).reshape(M, 2 * HALF)
        mask = mask_row[:, None] & (offs < LENGTH)[None, :]
        tl.store(rows[:, None] + offs[None, :], both.to(rows.dtype.element_ty), mask=mask)
    else:
        offs = tl.arange(0, HALF)
        at = rows[:, None] + offs[None, :]
        mask = mask_row[:, None] & (offs < LENGTH)[None, :]
        tl.store(at, part0.to(rows.dtype.element_ty), mask=mask)
        mask = mask_row[:, None] & (offs + HALF < LENGTH)[None, :]
        tl.store(at + HALF, part1.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def _mla_decode_kernel(
    q_ptr,
    kv_ptr,
    kv_scale_ptr,
    block_table_ptr,
    seq_lens_ptr,
    total_lens_ptr,
    query_start_loc_ptr,
    items_ptr,
    out_ptr,
    lse_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    softmax_scale,
    kv_scale,
    num_requests,
    num_tokens,
    num_splits,
    row_blocks,
    partial_query_len,
    stride_q_t,
    stride_q_h,
    stride_kv_p,
    stride_kv_t,
    stride_bt,
    stride_out_t,
    stride_out_h,
    stride_lse_t,
    stride_lse_h,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FP8: tl.constexpr,
    SCALE_ON_DEVICE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_ITEMS: tl.constexpr,
    HAS_PARTIALS: tl.constexpr,
    HAS_QUERY_START_LOC: tl.constexpr,
    SHARD_RANK: tl.constexpr,
    SHARD_SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
    WAIT_LAUNCH: tl.constexpr,
    EARLY_LAUNCH: tl.constexpr,
):
    """Grid (items x row blocks,), row blocks fastest: a piece of a request's latents for its rows.

    Without items (a fixed num_splits) there is one item a request and split, requests faster.
    HEAD_DIM_V is kv_lora_rank. kv_ptr points to 16-bit words when FP8, and its strides count them.
    """
    if WAIT_LAUNCH:
        tl.extra.cuda.gdc_wait()
    if EARLY_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()
    row_block = tl.program_id(0) % row_blocks
    index = tl.program_id(0) // row_blocks
    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    # One token a request: its heads are the rows, and what follows from that is cheap to keep.
    j = row * 0
    head = row
    if HAS_QUERY_START_LOC:
        j = row // NUM_Q_HEADS
        head = row % NUM_Q_HEADS
    # c is handled in two parts of HALF columns each: its two halves, or its even and odd columns
    # when a 16-bit word holds two of them.
    HALF: tl.constexpr = BLOCK_C // 2
    STEP: tl.constexpr = 2 if FP8 else 1
    offs_h = tl.arange(0, HALF)
    offs_r = tl.arange(0, BLOCK_R // STEP)
    column0 = offs_h * STEP
    column1 = column0 + (1 if FP8 else HALF)
    mask_c0 = column0 < HEAD_DIM_V
    mask_c1 = column1 < HEAD_DIM_V
    mask_r = offs_r * STEP < ROPE_DIM

    if HAS_QUERY_START_LOC:
        # Rows of no request: out 0, lse -inf. All programs share them.
        used_tokens = tl.load(query_start_loc_ptr + num_requests)
        in_block = row < NUM_Q_HEADS
        offs_o = tl.arange(0, BLOCK_C)
        for t in range(used_tokens + index, num_tokens, tl.num_programs(0) // row_blocks):
            t64 = tl.cast(t, tl.int64)
            row64 = tl.cast(row, tl.int64)
            pad_out = out_ptr + t64 * stride_out_t + row64[:, None] * stride_out_h
            tl.store(
                pad_out + offs_o[None, :],
                tl.zeros([BLOCK_M, BLOCK_C], out_ptr.dtype.element_ty),
                mask=in_block[:, None] & (offs_o < HEAD_DIM_V)[None, :],
            )
            pad_lse = lse_ptr + t64 * stride_lse_t + row64 * stride_lse_h
            tl.store(pad_lse, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=in_block)

    if HAS_ITEMS:
        # All four before the branch, as in decode.py.
        request = tl.load(items_ptr + index * 4)
        begin = tl.load(items_ptr + index * 4 + 1)
        end = tl.load(items_ptr + index * 4 + 2)
        splits = tl.load(items_ptr + index * 4 + 3)
        if request < 0:
            return
        slot = index
    else:
        request = index % num_requests
        begin = 0
        end = 0
        splits = 1
        slot = 0

    query_start = request
    query_len = 1
    if HAS_QUERY_START_LOC:
        query_start = tl.load(query_start_loc_ptr + request)
        query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
        if row_block * BLOCK_M >= query_len * NUM_Q_HEADS:
            return
    seq_len = tl.load(seq_lens_ptr + request)

    if not HAS_ITEMS:
        split = index // num_requests
        tiles = tl.cdiv(seq_len, BLOCK_N)
        per = split_tiles(tiles, num_splits)
        splits = tl.maximum(tl.cdiv(tiles, per), 1)
        if split >= splits:
            return
        begin = split * per * BLOCK_N
        end = tl.minimum(begin + per * BLOCK_N, seq_len)
        slot = request * num_splits + split

    row_end = seq_len
    if CAUSAL:
        total_len = tl.load(total_lens_ptr + request)
        row_end = visible_end(seq_len, total_len, query_len, j, SHARD_RANK, SHARD_SIZE, INTERLEAVE)
        last_j = tl.minimum((row_block * BLOCK_M + BLOCK_M - 1) // NUM_Q_HEADS, query_len - 1)
        block_end = visible_end(
            seq_len, total_len, query_len, last_j, SHARD_RANK, SHARD_SIZE, INTERLEAVE
        )
        end = tl.minimum(end, block_end)

    mask_row = row < query_len * NUM_Q_HEADS
    token = tl.cast(query_start + j, tl.int64)
    head64 = tl.cast(head, tl.int64)
    q_row = q_ptr + token * stride_q_t + head64 * stride_q_h
    q_c0, q_c1 = load_parts(q_row, mask_row, LENGTH=HEAD_DIM_V, BLOCK=BLOCK_C, INTERLEAVED=FP8)
    if FP8:
        q_r0, q_r1 = load_parts(
            q_row + HEAD_DIM_V, mask_row, LENGTH=ROPE_DIM, BLOCK=BLOCK_R, INTERLEAVED=True
        )
    else:
        mask_q_r = mask_row[:, None] & mask_r[None, :]
        q_r0 = tl.load(q_row[:, None] + HEAD_DIM_V + offs_r[None, :], mask=mask_q_r, other=0.0)
    if SCALE_ON_DEVICE:
        kv_scale *= tl.load(kv_scale_ptr)
    row_scale = tl.full([BLOCK_M], LOG2E, tl.float32) * (softmax_scale * kv_scale)
    if FP8 and q_ptr.dtype.element_ty != tl.float32:
        # bf16 has a wider range than fp16: a power of two brings each row's largest value to
        # between 1 and 2, so that nothing overflows and what underflows is below 2 ** -24.
        q_max = tl.maximum(row_max(q_c0), row_max(q_c1))
        q_max = tl.maximum(q_max, tl.maximum(row_max(q_r0), row_max(q_r1)))
        down, up = power_of_two(q_max)
        q_c0 = scaled_to_fp16(q_c0, down)
        q_c1 = scaled_to_fp16(q_c1, down)
        q_r0 = scaled_to_fp16(q_r0, down)
        q_r1 = scaled_to_fp16(q_r1, down)
        row_scale *= up
    # fp16 probabilities from 2 ** -24 up: lifted so that small ones keep their digits.
    LIFT: tl.constexpr = 32768.0 if q_c0.dtype == tl.float16 else 1.0

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_tile = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc0 = tl.zeros([BLOCK_M, HALF], tl.float32)
    acc1 = tl.zeros([BLOCK_M, HALF], tl.float32)
    table = block_table_ptr + tl.cast(request, tl.int64) * stride_bt
    offs_n = tl.arange(0, BLOCK_N)
    # What of an address is the same in every tile stands in front of the loop, as in decode.py.
    ONE_PAGE: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
    FIXED_ROWS: tl.constexpr = ONE_PAGE or BLOCK_N % PAGE_SIZE == 0
    offs_p = tl.arange(0, 1) if ONE_PAGE else offs_n
    c_rows = kv_ptr + offs_h[None, :]
    r_rows = kv_ptr + HEAD_DIM_V // STEP + offs_r[None, :]
    if FIXED_ROWS:
        fixed = (tl.cast(offs_n % PAGE_SIZE, tl.int64) * stride_kv_t)[:, None]
        c_rows += fixed
        r_rows += fixed
    if begin < end:
        # Page ids run one tile ahead and are clamped to the last page in use, as in decode.py.
        page = tl.load(table + page_index(tl.minimum(begin + offs_p, end - 1), PAGE_SIZE))
        for n0 in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            next_page = tl.load(
                table + page_index(tl.minimum(n0 + BLOCK_N + offs_p, end - 1), PAGE_SIZE)
            )
            position = n0 + offs_n
            mask_n = position < end
            # Masked past the end so that whatever lies there, NaN too, weighs nothing.
            mask_l0 = mask_n[:, None]
            mask_l1 = mask_l0
            if BLOCK_C != HEAD_DIM_V:
                mask_l0 = mask_l0 & mask_c0[None, :]
                mask_l1 = mask_l1 & mask_c1[None, :]
            mask_lr = mask_n[:, None]
            if BLOCK_R != ROPE_DIM:
                mask_lr = mask_lr & mask_r[None, :]
            tokens = tl.cast(page, tl.int64) * stride_kv_p
            if ONE_PAGE:
                tokens += tl.cast(n0 % PAGE_SIZE, tl.int64) * stride_kv_t
            elif not FIXED_ROWS:
                tokens += tl.cast(position % PAGE_SIZE, tl.int64) * stride_kv_t
            latent_c = c_rows + tokens[:, None]
            latent_r = r_rows + tokens[:, None]
            if FP8:
                c0, c1 = unpack_fp8(tl.load(latent_c, mask=mask_l0, other=0), q_c0.dtype)
                r0, r1 = unpack_fp8(tl.load(latent_r, mask=mask_lr, other=0), q_c0.dtype)
                scores = add_scores(q_r0, r0, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
                scores = add_scores(q_r1, r1, scores)
            else:
                c0 = tl.load(latent_c, mask=mask_l0, other=0.0)
                c1 = tl.load(latent_c + HALF, mask=mask_l1, other=0.0)
                r0 = tl.load(latent_r, mask=mask_lr, other=0.0)
                scores = add_scores(q_r0, r0, tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            scores = add_scores(q_c0, c0, scores)
            scores = add_scores(q_c1, c1, scores)
            scores *= row_scale[:, None]
            visible = mask_n[None, :]
            if CAUSAL:
                visible = visible & (position[None, :] < row_end[:, None])
            scores = tl.where(visible, scores, float("-inf"))
            p, alpha, m_i, l_tile = softmax_update(scores, m_i, l_tile, MAY_BE_EMPTY=CAUSAL)
            p = (p * LIFT).to(c0.dtype)
            acc0 = tl.dot(p, c0, acc0 * alpha[:, None], input_precision="ieee")
            acc1 = tl.dot(p, c1, acc1 * alpha[:, None], input_precision="ieee")
            page = next_page

    l_i = tl.sum(l_tile, 1)
    seen = l_i > 0.0
    norm = tl.where(seen, kv_scale / LIFT / tl.where(seen, l_i, 1.0), 0.0)[:, None]
    lse2 = tl.where(seen, m_i + tl.log2(tl.where(seen, l_i, 1.0)), float("-inf"))
    if splits == 1:
        out = out_ptr + token * stride_out_t + head64 * stride_out_h
        store_parts(out, acc0 * norm, acc1 * norm, mask_row, LENGTH=HEAD_DIM_V, INTERLEAVED=FP8)
        tl.store(lse_ptr + token * stride_lse_t + head64 * stride_lse_h, lse2 * LN2, mask=mask_row)
    elif HAS_PARTIALS:
        if HAS_QUERY_START_LOC:
            # A request with more query tokens than max_query_len may not write into its neighbour.
            mask_row &= j < partial_query_len
        partial = (tl.cast(slot, tl.int64) * partial_query_len + j) * NUM_Q_HEADS + head
        part = partial_out_ptr + partial * HEAD_DIM_V
        store_parts(part, acc0 * norm, acc1 * norm, mask_row, LENGTH=HEAD_DIM_V, INTERLEAVED=FP8)
        tl.store(partial_lse_ptr + partial, lse2, mask=mask_row)


@triton.jit
def _write_mla_kv_kernel(
    latent_ptr,
    kv_ptr,
    kv_scale_ptr,
    slot_mapping_ptr,
    kv_scale,
    num_tokens,
    num_slots,
    stride_latent_t,
    stride_kv_p,
    stride_kv_t,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FP8_BIAS: tl.constexpr,
    SCALE_ON_DEVICE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (tokens / BLOCK_T,): put BLOCK_T latents into their slots.

    With FP8_BIAS (0: none) kv_ptr points to bytes, which get latent / kv_scale.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1)
    used = (slot >= 0) & (slot < num_slots)
    slot = tl.where(used, slot, 0)
    target = kv_ptr + slot // PAGE_SIZE * stride_kv_p + slot % PAGE_SIZE * stride_kv_t
    source = latent_ptr + token * stride_latent_t
    if SCALE_ON_DEVICE:
        kv_scale = tl.load(kv_scale_ptr)
    offs_d = tl.arange(0, BLOCK_D)
    move_rows(
        source,
        target,
        used,
        offs_d,
        offs_d,
        tl.zeros([BLOCK_T], tl.float32) + kv_scale,
        DECODE_BIAS=0,
        ENCODE_BIAS=FP8_BIAS,
        HEAD_DIM=HEAD_DIM,
    )
