"""Exchanges in one launch: send to the peers' memory, wait for theirs, merge or gather.

Every rank owns a mailbox, memory that its peers write into:

    control   word 0: launches so far, in units of 2^16; word 16: the failure record, 0 = none
    regions   [parity 2][source rank][slot], one region a kind of payload

`_direct_reduce_kernel` sends every peer the rows of that peer's heads, out and fp32 LSE bits, and
merges what the peers sent with its own: slot [token][local head][head_dim] for out, [token][local
head] for the LSE. `_direct_gather_kernel` sends its q to every peer and puts the parts together.
Both go through three steps in one program: it stores its rows into the slots of the peers, it
polls its own slots until the same rows of every peer are there, and it uses them and marks the
slots unused. A payload word is 32 bits: two numbers of a 16-bit dtype where a row has an even
number of them, else one number of 16 or 32 bits.

**No flags.** A word of a slot that nobody wrote is all ones. A sender never writes that word (all
ones is a NaN; it sends another NaN for it), so a word that reads otherwise has arrived. Each word
vouches for itself, whatever the order in which words arrive, so the sender needs no fence and no
release, and the reader gets data and flag in one load. The reader puts the ones back.

**Why two parities are enough.** Call e uses the slots of parity e mod 2. Rank A writes a slot of B
for call e + 2 only when its own call e + 1 is complete, so it has merged what B sent in e + 1. B
sent that from its kernel e + 1, which started when its kernel e was complete: when B had read the
slot and put the ones back. So a rank is never two calls ahead of a peer, as long as
(1) every call takes something from every peer: a call of no tokens is not launched and not
counted, on any rank; (2) the calls of one mailbox follow each other on the device: a launch that
may overlap its predecessor waits for the end of it first (WAIT_LAUNCH); (3) a program that loops
over several tiles still belongs to one kernel, and (2) speaks of whole kernels.

**Why the wait ends.** A program sends all its rows before it polls, and there are never more
programs than the device holds at once (ExchangeConfig), so every program of every rank gets to
send. What does not come for `timeout_ns` is a failure: the program writes a record (who was
silent, who noticed, in which call) to its own control word, to those of all peers and to pinned
host memory, gives NaN, and the kernel ends. Whoever sees a record waits no more and sends no more.

**Counting calls.** The programs of a launch add 2^16 to word 0 between them, each its share when
it has read the word. So all of them read the same call number, word 0 >> 16, with no last program
to find, no reset, no host in between (a graph replays it), and no room to wrap in: 2^47 calls,
after which the parity still alternates.

Source: the self-flagging words are those of Lamport-style one-shot all-reduce in TensorRT-LLM
(communicationKernels/allReduceFusionKernels.cu: plain stores to peers, volatile loads, negative
zero for "not there"); parity slots by source rank are those of vLLM's direct DCP exchange. Written
here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from dcp_lab.kernels import interpreter_safe
from dcp_lab.kernels.launch import BoundCalls, Launch, call_key
from dcp_lab.kernels.merge import clean_lse, merged_lse
from dcp_lab.kernels.primitives import merge_step

CONTROL_BYTES = 256
# Words of 8 bytes: the count and the record lie in lines of their own.
FAILURE_WORD = tl.constexpr(16)
# A call adds 2^16 to the count.
COUNT_SHIFT = tl.constexpr(16)
CALL = tl.constexpr(1 << 16)
# A poll is under a microsecond; the clock and the record are looked at every so many.
POLLS_A_LOOK = tl.constexpr(64)
# What a poll counts where there is no clock, in ns: in the interpreter.
POLL_NS = tl.constexpr(1_000_000)
# A slot starts and ends at multiples of this: 16 of the largest word.
SLOT_ALIGNMENT = 64
# 8 programs of one warp fit a multiprocessor whatever they use: 8 x 32 x 255 registers.
PROGRAMS_PER_SM = 8
MAX_RANKS = 16
# What a warp holds of all ranks' tiles together, 32 registers a lane and some to work with.
MAX_TILE_WORDS = 2048
# Unrolled rows.
MAX_TILE_ROWS = 8


@triton.jit
def _any_lane(value, ARCH: tl.constexpr):
    """Return the bitwise or of all lanes' value, so that the whole warp takes one branch."""
    if ARCH == "cuda":
        value = tl.inline_asm_elementwise(
            "redux.sync.or.b32 $0, $1, 0xffffffff;",
            "=r,r",
            [value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return value


@triton.jit
def _now(polls, ARCH: tl.constexpr):
    """Return a clock in ns; in the interpreter, where a wait has no length, polls so far."""
    if ARCH == "cuda":
        now = tl.extra.cuda.globaltimer()
    elif ARCH == "hip":
        # 100 MHz. Triton's own memrealtime does not wait for lgkmcnt, where scalar memory counts.
        ticks = tl.inline_asm_elementwise(
            "s_memrealtime $0\ns_waitcnt lgkmcnt(0)",
            "=r",
            [],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
        now = ticks * 10
    else:
        now = polls.to(tl.int64) * POLL_NS
    return now


@triton.jit
def _store_through(pointers, value, mask, ARCH: tl.constexpr):
    """Store what other GPUs read or write next."""
    if ARCH == "hip":
        # Through every cache of this GPU (sc0 sc1): nothing else would push it out.
        tl.store(pointers, value, mask=mask, cache_modifier=".wt")
    else:
        tl.store(pointers, value, mask=mask)


@triton.jit
def _load_fresh(pointers, mask, other, ARCH: tl.constexpr):
    """Load what other GPUs may have written since: past the caches, and anew in every turn."""
    if ARCH == "hip":
        # sc0 sc1. Triton drops `volatile` on AMD.
        value = tl.load(pointers, mask=mask, other=other, cache_modifier=".cv")
    else:
        value = tl.load(pointers, mask=mask, other=other, volatile=True)
    return value


@triton.jit
def _wait_launch(WAIT_LAUNCH: tl.constexpr):
    """Wait for the end of the kernel before, and let the next one be launched meanwhile."""
    if WAIT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _enter(control_ptr, addresses_ptr, SIZE: tl.constexpr, ARCH: tl.constexpr):
    """Return (word 0, failure record, where every rank's mailbox lies)."""
    # Fresh: a program of the call before may have left the word in this multiprocessor's cache.
    count = _load_fresh(control_ptr, None, None, ARCH)
    record = _load_fresh(control_ptr + FAILURE_WORD, None, None, ARCH)
    addresses = ()
    for n in tl.static_range(SIZE):
        addresses = addresses + (tl.load(addresses_ptr + n),)
    return count, record, addresses


@triton.jit
def _leave(control_ptr):
    """Add this program's share: all shares of a launch are 2^16, all but the last are less."""
    # Every thread has read the count.
    tl.debug_barrier()
    others = tl.num_programs(0) - 1
    share = tl.where(tl.program_id(0) == 0, CALL - others, 1)
    tl.atomic_add(control_ptr, share.to(tl.int64), sem="relaxed", scope="gpu")


@triton.jit
def _sendable(bits):
    """Return bits with all ones, which say "not there", as another NaN."""
    return tl.where(bits == -1, (1 << (bits.dtype.primitive_bitwidth - 1)) - 1, bits)


@triton.jit
def _absent(parts, SIZE: tl.constexpr):
    """Return 1 when a word of any rank's part has not arrived, 0 when all have."""
    absent = parts[0] == -1
    for n in tl.static_range(1, SIZE):
        absent = absent | (parts[n] == -1)
    return tl.max(absent.to(tl.int32), 0)


@triton.jit
def _give_up(addresses, host_ptr, count, silent, record,
             RANK: tl.constexpr, SIZE: tl.constexpr, ARCH: tl.constexpr):  # fmt: skip
    """Tell this host and, if none did yet, all ranks; return the record, silent ranks' if 0."""
    if record == 0:
        call = (count >> COUNT_SHIFT) & ((1 << 38) - 1)
        record = (call << 24) | (RANK << 16) | silent
        for n in tl.static_range(SIZE):
            there = addresses[n].to(tl.pointer_type(tl.int64))
            _store_through(there + FAILURE_WORD, record, None, ARCH)
    tl.store(host_ptr, record)
    return record


@triton.jit
def _look(control_ptr, polls, since, timeout_ns, ARCH: tl.constexpr):
    """Return (when the first look was, whether the wait is over: 1 time is up, 2 a failure)."""
    now = _now(polls, ARCH)
    since = tl.where(since == 0, now, since)
    over = (now - since > timeout_ns).to(tl.int32)
    failed = _load_fresh(control_ptr + FAILURE_WORD, None, None, ARCH) != 0
    return since, _any_lane(over | (failed.to(tl.int32) << 1), ARCH)


@triton.jit
def _load_words(pointers, offset, mask, HALVES: tl.constexpr):
    """Return the words at these offsets; HALVES: of a pointer to 16 bits, each word from two."""
    if HALVES:
        low = tl.load(pointers + 2 * offset, mask=mask, other=0).to(tl.int32) & 0xFFFF
        high = tl.load(pointers + 2 * offset + 1, mask=mask, other=0).to(tl.int32) << 16
        words = high | low
    else:
        words = tl.load(pointers + offset, mask=mask, other=0)
    return words


@triton.jit
def _numbers(words, KIND: tl.constexpr):
    """Return what words [W] hold as fp32 [W, 2], or [W, 1] where a word is one number."""
    if KIND == "bf16x2":
        low, high = words << 16, words & -65536
        numbers = tl.join(low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True))
    elif KIND == "fp16x2":
        low, high = words.to(tl.int16), (words >> 16).to(tl.int16)
        numbers = tl.join(low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True))
        numbers = numbers.to(tl.float32)
    elif KIND == "bf16":
        numbers = (words.to(tl.int32) << 16).to(tl.float32, bitcast=True)[:, None]
    elif KIND == "fp16":
        numbers = words.to(tl.float16, bitcast=True).to(tl.float32)[:, None]
    else:
        numbers = words.to(tl.float32, bitcast=True)[:, None]
    return numbers


@triton.jit
def _load_rows(out_ptr, lse_ptr, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h,
               first, num_rows, FIRST_RANK: tl.constexpr, RANKS: tl.constexpr,
               NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
               BLOCK_W: tl.constexpr, HALVES: tl.constexpr, INDEX: tl.constexpr):  # fmt: skip
    """Return what this rank has for RANKS ranks: (outs, LSE bits), row by row, rank by rank.

    Sendable already: neither holds all ones. Rows past the last are 0, -inf.
    """
    offs_w = tl.arange(0, BLOCK_W)
    outs, lses = (), ()
    for i in tl.static_range(ROWS):
        row = first + i
        t, h = (row // NUM_HEADS).to(INDEX), (row % NUM_HEADS).to(INDEX)
        mask_w = offs_w < tl.where(row < num_rows, WIDTH, 0)
        for n in tl.static_range(RANKS):
            head = (FIRST_RANK + n) * NUM_HEADS + h
            start = out_ptr + (t * stride_out_t + head * stride_out_h)
            outs = outs + (_load_words(start, offs_w, mask_w, HALVES),)
            start = lse_ptr + (t * stride_lse_t + head * stride_lse_h)
            lses = lses + (tl.load(start, mask=row < num_rows, other=float("-inf")),)
    sendable_outs, sendable_lses = (), ()
    for i in tl.static_range(ROWS * RANKS):
        sendable_outs = sendable_outs + (_sendable(outs[i]),)
        # Clean, no LSE is NaN, so its bits are not all ones.
        lse = clean_lse(lses[i]).to(tl.int32, bitcast=True)
        sendable_lses = sendable_lses + (lse,)
    return sendable_outs, sendable_lses


@triton.jit
def _send_rows(outs, lses, addresses, offset_out, offset_lse, first, num_rows, word,
               RANK: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
               BLOCK_W: tl.constexpr, ARCH: tl.constexpr):  # fmt: skip
    """Store every peer's rows at these offsets in its mailbox, in words like `word`."""
    offs_w = tl.arange(0, BLOCK_W)
    for n in tl.static_range(SIZE):
        if n != RANK:
            far_out = tl.multiple_of(addresses[n].to(tl.pointer_type(word)), 16) + offset_out
            far_lse = tl.multiple_of(addresses[n].to(tl.pointer_type(tl.int32)), 16) + offset_lse
            for i in tl.static_range(ROWS):
                row = first + i
                mask_w = offs_w < tl.where(row < num_rows, WIDTH, 0)
                far_row = far_out + row.to(offset_out.dtype) * WIDTH + offs_w
                _store_through(far_row, outs[i * SIZE + n], mask_w, ARCH)
                _store_through(far_lse + row, lses[i * SIZE + n], row < num_rows, ARCH)


@triton.jit
def _load_slots(slots_out, slots_lse, stride_slot_out, stride_slot_lse, first, num_rows,
                my_outs, my_lses, RANK: tl.constexpr, SIZE: tl.constexpr,
                WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_W: tl.constexpr,
                ARCH: tl.constexpr):  # fmt: skip
    """Return what the slots hold now: (outs, LSE bits), row by row, rank by rank, own included."""
    offs_w = tl.arange(0, BLOCK_W)
    outs, lses = (), ()
    for i in tl.static_range(ROWS):
        row = first + i
        mask_w = offs_w < tl.where(row < num_rows, WIDTH, 0)
        out_ptrs = slots_out + row.to(stride_slot_out.dtype) * WIDTH + offs_w
        for n in tl.static_range(SIZE):
            if n == RANK:
                outs, lses = outs + (my_outs[i],), lses + (my_lses[i],)
            else:
                part = _load_fresh(out_ptrs + n * stride_slot_out, mask_w, 0, ARCH)
                lse_ptr = slots_lse + row + n * stride_slot_lse
                outs = outs + (part,)
                lses = lses + (_load_fresh(lse_ptr, row < num_rows, 0, ARCH),)
    return outs, lses


@triton.jit
def _absent_rows(outs, lses, COUNT: tl.constexpr):
    """Return 1 when a word of any of these parts has not arrived, 0 when all have."""
    absent = (lses[0] == -1).to(tl.int32)
    for i in tl.static_range(1, COUNT):
        absent = absent | (lses[i] == -1).to(tl.int32)
    return absent | _absent(outs, COUNT)


@triton.jit
def _merge_rows(my_outs, my_lses, merged_out_ptr, merged_lse_ptr, slots_out, slots_lse,
                stride_slot_out, stride_slot_lse, first, num_rows, control_ptr, addresses,
                host_ptr, count, record, timeout_ns, RANK: tl.constexpr, SIZE: tl.constexpr,
                WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_W: tl.constexpr,
                KIND: tl.constexpr, ARCH: tl.constexpr):  # fmt: skip
    """Wait for ROWS rows of every peer, merge them, give the slots back; return the record."""
    outs, lses = _load_slots(
        slots_out, slots_lse, stride_slot_out, stride_slot_lse, first, num_rows,
        my_outs, my_lses, RANK, SIZE, WIDTH, ROWS, BLOCK_W, ARCH,
    )  # fmt: skip
    absent = _any_lane(_absent_rows(outs, lses, ROWS * SIZE), ARCH)
    over = (record != 0).to(tl.int32)
    since = tl.full([], 0, tl.int64)
    polls = tl.full([], 0, tl.int32)
    while (absent != 0) & (over == 0):
        outs, lses = _load_slots(
            slots_out, slots_lse, stride_slot_out, stride_slot_lse, first, num_rows,
            my_outs, my_lses, RANK, SIZE, WIDTH, ROWS, BLOCK_W, ARCH,
        )  # fmt: skip
        absent = _any_lane(_absent_rows(outs, lses, ROWS * SIZE), ARCH)
        polls += 1
        if polls % POLLS_A_LOOK == 0:
            since, over = _look(control_ptr, polls, since, timeout_ns, ARCH)
    if (absent != 0) | (record != 0):
        record = _load_fresh(control_ptr + FAILURE_WORD, None, None, ARCH)
        silent = tl.full([], 0, tl.int32)
        for n in tl.static_range(SIZE):
            for i in tl.static_range(ROWS):
                part = (outs[i * SIZE + n],)
                silent = silent | (_absent_rows(part, (lses[i * SIZE + n],), 1) << n)
        silent = _any_lane(silent, ARCH)
        record = _give_up(addresses, host_ptr, count, silent, record, RANK, SIZE, ARCH)

    offs_w = tl.arange(0, BLOCK_W)
    ones = tl.full([BLOCK_W], -1, my_outs[0].dtype)
    # The numbers of a word lie side by side.
    per_word: tl.constexpr = _numbers(my_outs[0], KIND).shape[1]
    offs_d = tl.arange(0, BLOCK_W * per_word)
    for i in tl.static_range(ROWS):
        row = first + i
        start = row.to(stride_slot_out.dtype) * WIDTH
        mask_w = offs_w < tl.where(row < num_rows, WIDTH, 0)
        lse_max = tl.full([], float("-inf"), tl.float32)
        weight_sum = tl.full([], 0.0, tl.float32)
        acc = tl.zeros_like(_numbers(my_outs[i], KIND))
        for n in tl.static_range(SIZE):
            part_lse = lses[i * SIZE + n].to(tl.float32, bitcast=True)
            part_out = _numbers(outs[i * SIZE + n], KIND)
            part_out = tl.where(part_lse == float("-inf"), 0.0, part_out)
            weight, factor, lse_max, weight_sum = merge_step(
                part_lse, lse_max, weight_sum, BASE_2=False
            )
            # As in merge: the same bits.
            acc = tl.fma(acc, factor, part_out * weight)
            if n != RANK:
                slot = slots_out + n * stride_slot_out + start + offs_w
                _store_through(slot, ones, mask_w, ARCH)
                slot = slots_lse + n * stride_slot_lse + row
                _store_through(slot, -1, row < num_rows, ARCH)
        lse, divisor = merged_lse(lse_max, weight_sum)
        acc = tl.where(record != 0, float("nan"), acc / divisor)
        lse = tl.where(record != 0, float("nan"), lse)
        mask_d = offs_d < tl.where(row < num_rows, WIDTH * per_word, 0)
        merged = tl.reshape(acc, [BLOCK_W * per_word]).to(merged_out_ptr.dtype.element_ty)
        tl.store(merged_out_ptr + start * per_word + offs_d, merged, mask=mask_d)
        tl.store(merged_lse_ptr + row, lse, mask=row < num_rows)
    return record


@triton.jit(do_not_specialize=["num_rows", "timeout_ns"])
def _direct_reduce_kernel(
    out_ptr,
    lse_ptr,
    merged_out_ptr,
    merged_lse_ptr,
    own_out_ptr,
    own_lse_ptr,
    control_ptr,
    addresses_ptr,
    host_ptr,
    stride_out_t,
    stride_out_h,
    stride_lse_t,
    stride_lse_h,
    offset_out,
    offset_lse,
    stride_slot_out,
    stride_slot_lse,
    num_rows,
    timeout_ns,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    KIND: tl.constexpr,
    HALVES: tl.constexpr,
    INDEX: tl.constexpr,
    LOOP: tl.constexpr,
    ARCH: tl.constexpr,
    WAIT_LAUNCH: tl.constexpr,
    SEND: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Grid (any,): programs share the rows, ROWS at a time; a row is (token, local head).

    A row is WIDTH words. Rows are one-dimensional tiles, unrolled: their index arithmetic and
    their LSEs are the warp's, not each lane's. What comes from memory is asked for before any of
    it is used; the first store waits for one trip.

    INDEX counts words: int64 where int32 cannot. LOOP: there are more tiles than programs.
    """
    first = tl.program_id(0) * ROWS
    _wait_launch(WAIT_LAUNCH)
    count, record, addresses = _enter(control_ptr, addresses_ptr, SIZE, ARCH)
    outs, lses = _load_rows(
        out_ptr, lse_ptr, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h, first, num_rows,
        0, SIZE, NUM_HEADS, WIDTH, ROWS, BLOCK_W, HALVES, INDEX,
    )  # fmt: skip
    parity = ((count >> COUNT_SHIFT) & 1).to(INDEX)
    stride_slot_out, stride_slot_lse = stride_slot_out.to(INDEX), stride_slot_lse.to(INDEX)
    step = tl.num_programs(0) * ROWS

    if SEND:
        slot = parity * SIZE + RANK
        far_out = offset_out + slot * stride_slot_out
        far_lse = offset_lse + slot * stride_slot_lse
        # After a failure nobody is written to any more.
        rows_to_send = tl.where(record == 0, num_rows, 0)
        _send_rows(
            outs, lses, addresses, far_out, far_lse, first, rows_to_send,
            own_out_ptr.dtype.element_ty, RANK, SIZE, WIDTH, ROWS, BLOCK_W, ARCH,
        )  # fmt: skip
        if LOOP:
            later = first + step
            while later < num_rows:
                more_outs, more_lses = _load_rows(
                    out_ptr, lse_ptr, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h,
                    later, num_rows, 0, SIZE, NUM_HEADS, WIDTH, ROWS, BLOCK_W, HALVES, INDEX,
                )  # fmt: skip
                _send_rows(
                    more_outs, more_lses, addresses, far_out, far_lse, later, rows_to_send,
                    own_out_ptr.dtype.element_ty, RANK, SIZE, WIDTH, ROWS, BLOCK_W, ARCH,
                )  # fmt: skip
                later += step

    if MERGE:
        slots_out = own_out_ptr + offset_out + parity * SIZE * stride_slot_out
        slots_lse = own_lse_ptr + offset_lse + parity * SIZE * stride_slot_lse
        my_outs, my_lses = (), ()
        for i in tl.static_range(ROWS):
            my_outs = my_outs + (outs[i * SIZE + RANK],)
            my_lses = my_lses + (lses[i * SIZE + RANK],)
        record = _merge_rows(
            my_outs, my_lses, merged_out_ptr, merged_lse_ptr, slots_out, slots_lse,
            stride_slot_out, stride_slot_lse, first, num_rows, control_ptr, addresses, host_ptr,
            count, record, timeout_ns, RANK, SIZE, WIDTH, ROWS, BLOCK_W, KIND, ARCH,
        )  # fmt: skip
        if LOOP:
            later = first + step
            while later < num_rows:
                my_outs, my_lses = _load_rows(
                    out_ptr, lse_ptr, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h,
                    later, num_rows, RANK, 1, NUM_HEADS, WIDTH, ROWS, BLOCK_W, HALVES, INDEX,
                )  # fmt: skip
                record = _merge_rows(
                    my_outs, my_lses, merged_out_ptr, merged_lse_ptr, slots_out, slots_lse,
                    stride_slot_out, stride_slot_lse, later, num_rows, control_ptr, addresses,
                    host_ptr, count, record, timeout_ns, RANK, SIZE, WIDTH, ROWS, BLOCK_W, KIND,
                    ARCH,
                )  # fmt: skip
                later += step
        _leave(control_ptr)


@triton.jit
def _load_q(q_ptr, stride_q_t, stride_q_h, tile, num_tokens, WIDTH: tl.constexpr,
            HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr,
            DENSE: tl.constexpr, INDEX: tl.constexpr):  # fmt: skip
    """Return a tile of q's words, counted without gaps, all ones made sendable."""
    word = tile.to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    t, rest = word // WIDTH, word % WIDTH
    start, mask = q_ptr + t * stride_q_t, t < num_tokens
    if DENSE:
        words = _load_words(start, rest, mask, HALVES)
    elif HALVES:
        low, high = 2 * rest, 2 * rest + 1
        low = low // HEAD_DIM * stride_q_h + low % HEAD_DIM
        high = high // HEAD_DIM * stride_q_h + high % HEAD_DIM
        low = tl.load(start + low, mask=mask, other=0).to(tl.int32) & 0xFFFF
        words = (tl.load(start + high, mask=mask, other=0).to(tl.int32) << 16) | low
    else:
        # HEAD_DIM counts words here.
        within = rest // HEAD_DIM * stride_q_h + rest % HEAD_DIM
        words = tl.load(start + within, mask=mask, other=0)
    return _sendable(words)


@triton.jit
def _send_q(words, addresses, offset, tile, num_tokens,
            RANK: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
            ARCH: tl.constexpr, INDEX: tl.constexpr):  # fmt: skip
    """Store a tile at this offset in every peer's mailbox."""
    word = tile.to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    mask = word // WIDTH < num_tokens
    for n in tl.static_range(SIZE):
        if n != RANK:
            far = tl.multiple_of(addresses[n].to(tl.pointer_type(words.dtype)), 16) + offset
            _store_through(far + word, words, mask, ARCH)


@triton.jit
def _load_parts(slots, stride_slot, mask, mine,
                RANK: tl.constexpr, SIZE: tl.constexpr, ARCH: tl.constexpr):  # fmt: skip
    """Return what the slots hold now, a tensor a rank, own included."""
    parts = ()
    for n in tl.static_range(SIZE):
        if n == RANK:
            parts = parts + (mine,)
        else:
            parts = parts + (_load_fresh(slots + n * stride_slot, mask, 0, ARCH),)
    return parts


@triton.jit
def _collect_q(mine, gathered_ptr, slots, stride_slot, tile, num_tokens, control_ptr, addresses,
               host_ptr, count, record, timeout_ns, RANK: tl.constexpr, SIZE: tl.constexpr,
               WIDTH: tl.constexpr, BLOCK: tl.constexpr, ARCH: tl.constexpr,
               INDEX: tl.constexpr):  # fmt: skip
    """Wait for a tile of every peer, put all together, give the slots back; return the record."""
    word = tile.to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    t, rest = word // WIDTH, word % WIDTH
    mask = t < num_tokens
    slots += word
    parts = _load_parts(slots, stride_slot, mask, mine, RANK, SIZE, ARCH)
    absent = _any_lane(_absent(parts, SIZE), ARCH)
    over = (record != 0).to(tl.int32)
    since = tl.full([], 0, tl.int64)
    polls = tl.full([], 0, tl.int32)
    while (absent != 0) & (over == 0):
        parts = _load_parts(slots, stride_slot, mask, mine, RANK, SIZE, ARCH)
        absent = _any_lane(_absent(parts, SIZE), ARCH)
        polls += 1
        if polls % POLLS_A_LOOK == 0:
            since, over = _look(control_ptr, polls, since, timeout_ns, ARCH)
    if (absent != 0) | (record != 0):
        record = _load_fresh(control_ptr + FAILURE_WORD, None, None, ARCH)
        silent = tl.full([], 0, tl.int32)
        for n in tl.static_range(SIZE):
            silent = silent | (_absent((parts[n],), 1) << n)
        silent = _any_lane(silent, ARCH)
        record = _give_up(addresses, host_ptr, count, silent, record, RANK, SIZE, ARCH)

    ones = tl.full([BLOCK], -1, mine.dtype)
    gathered_ptrs = gathered_ptr + t * (SIZE * WIDTH) + rest
    for n in tl.static_range(SIZE):
        # All ones is NaN.
        part = tl.where(record != 0, ones, parts[n])
        tl.store(gathered_ptrs + n * WIDTH, part, mask=mask)
        if n != RANK:
            _store_through(slots + n * stride_slot, ones, mask, ARCH)
    return record


@triton.jit(do_not_specialize=["num_tokens", "num_tiles", "timeout_ns"])
def _direct_gather_kernel(
    q_ptr,
    gathered_ptr,
    own_ptr,
    control_ptr,
    addresses_ptr,
    host_ptr,
    stride_q_t,
    stride_q_h,
    offset,
    stride_slot,
    num_tokens,
    num_tiles,
    timeout_ns,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HALVES: tl.constexpr,
    DENSE: tl.constexpr,
    INDEX: tl.constexpr,
    LOOP: tl.constexpr,
    ARCH: tl.constexpr,
    WAIT_LAUNCH: tl.constexpr,
    SEND: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Grid (any,): programs share the tiles of BLOCK words of q, of which a token has WIDTH.

    INDEX counts words: int64 where int32 cannot. LOOP: there are more tiles than programs.
    """
    tile = tl.program_id(0)
    _wait_launch(WAIT_LAUNCH)
    count, record, addresses = _enter(control_ptr, addresses_ptr, SIZE, ARCH)
    words = _load_q(
        q_ptr, stride_q_t, stride_q_h, tile, num_tokens,
        WIDTH, HEAD_DIM, BLOCK, HALVES, DENSE, INDEX,
    )  # fmt: skip
    parity = ((count >> COUNT_SHIFT) & 1).to(INDEX)
    stride_slot = stride_slot.to(INDEX)

    if SEND:
        far = offset + (parity * SIZE + RANK) * stride_slot
        # After a failure nobody is written to any more.
        tokens_to_send = tl.where(record == 0, num_tokens, 0)
        _send_q(words, addresses, far, tile, tokens_to_send, RANK, SIZE, WIDTH, BLOCK, ARCH, INDEX)
        if LOOP:
            later = tile + tl.num_programs(0)
            while later < num_tiles:
                more = _load_q(
                    q_ptr, stride_q_t, stride_q_h, later, num_tokens,
                    WIDTH, HEAD_DIM, BLOCK, HALVES, DENSE, INDEX,
                )  # fmt: skip
                _send_q(
                    more, addresses, far, later, tokens_to_send,
                    RANK, SIZE, WIDTH, BLOCK, ARCH, INDEX,
                )  # fmt: skip
                later += tl.num_programs(0)

    if MERGE:
        slots = own_ptr + offset + parity * SIZE * stride_slot
        record = _collect_q(
            words, gathered_ptr, slots, stride_slot, tile, num_tokens, control_ptr, addresses,
            host_ptr, count, record, timeout_ns, RANK, SIZE, WIDTH, BLOCK, ARCH, INDEX,
        )  # fmt: skip
        if LOOP:
            later = tile + tl.num_programs(0)
            while later < num_tiles:
                words = _load_q(
                    q_ptr, stride_q_t, stride_q_h, later, num_tokens,
                    WIDTH, HEAD_DIM, BLOCK, HALVES, DENSE, INDEX,
                )  # fmt: skip
                record = _collect_q(
                    words, gathered_ptr, slots, stride_slot, later, num_tokens, control_ptr,
                    addresses, host_ptr, count, record, timeout_ns,
                    RANK, SIZE, WIDTH, BLOCK, ARCH, INDEX,
                )  # fmt: skip
                later += tl.num_programs(0)
        _leave(control_ptr)


@dataclasses.dataclass(frozen=True)
class Mailbox:
    """A rank's end of an exchange: its memory, the way to its peers', and what may fail.

    Attributes:
        rank, size: This rank and the ranks of the group, 2 to 16.
        memory: uint8, this rank's mailbox.
        addresses: int64 [size] beside it, where each rank's mailbox lies for this process.
        record: int64 [1] in memory of the host that the device can write: 0, or the failure.
        offsets: Of each region, in bytes from the mailbox's start.
        slot_bytes: Of a slot in each region.
        timeout_ns: How long a program waits for its peers.
        arch: "cuda", "hip" or "interpreter".
    """

    rank: int
    size: int
    memory: torch.Tensor
    addresses: torch.Tensor
    record: torch.Tensor
    offsets: tuple[int, ...]
    slot_bytes: tuple[int, ...]
    timeout_ns: int
    arch: str

    @staticmethod
    def layout(size: int, payload_bytes: Sequence[int]) -> tuple[list[int], list[int], int]:
        """Return (offsets, slot bytes, bytes of a mailbox) for slots that hold these payloads."""
        slots = [-(-payload // SLOT_ALIGNMENT) * SLOT_ALIGNMENT for payload in payload_bytes]
        offsets, end = [], CONTROL_BYTES
        for slot in slots:
            offsets.append(end)
            end += 2 * size * slot
        return offsets, slots, end

    @staticmethod
    def clear(memory: torch.Tensor) -> None:
        """Make a mailbox as before the first call. No peer may be writing into it."""
        memory[:CONTROL_BYTES].zero_()
        memory[CONTROL_BYTES:].fill_(255)

    @classmethod
    def in_one_process(
        cls,
        size: int,
        payload_bytes: Sequence[int],
        *,
        arch: str,
        timeout_ns: int = 10**9,
        device: torch.device | str = "cpu",
    ) -> list[Mailbox]:
        """Return the mailboxes of a group whose ranks all live here, to be launched in two phases.

        Kernels of such ranks run one after the other, so none may wait for another: send for all
        ranks (`merge=False`), then merge for all (`send=False`).
        """
        offsets, slots, total = cls.layout(size, payload_bytes)
        memories = [torch.empty(total, dtype=torch.uint8, device=device) for _ in range(size)]
        for memory in memories:
            cls.clear(memory)
        addresses = torch.tensor([memory.data_ptr() for memory in memories], device=device)
        return [
            cls(
                rank=rank,
                size=size,
                memory=memory,
                addresses=addresses,
                record=torch.zeros(1, dtype=torch.int64, device=device),
                offsets=tuple(offsets),
                slot_bytes=tuple(slots),
                timeout_ns=timeout_ns,
                arch=arch,
            )
            for rank, memory in enumerate(memories)
        ]

    @functools.cached_property
    def identity(self) -> tuple[object, ...]:
        """Return all that a launch depends on: addresses, layout, limits."""
        tensors = (self.memory, self.addresses, self.record)
        sizes = (self.rank, self.size, self.offsets, self.slot_bytes, self.timeout_ns, self.arch)
        return (*(tensor.data_ptr() for tensor in tensors), *sizes)

    @property
    def control(self) -> torch.Tensor:
        """Return the control words, int64."""
        return self.memory[:CONTROL_BYTES].view(torch.int64)

    def slots(self, region: int, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's slots of a region, [parity, source rank, words], as they are now."""
        start, slot = self.offsets[region], self.slot_bytes[region]
        region_bytes = self.memory[start : start + 2 * self.size * slot]
        return region_bytes.view(dtype).view(2, self.size, -1)


@dataclasses.dataclass(frozen=True)
class Failure:
    """What a failure record says.

    Attributes:
        silent: Ranks that something was missing of.
        noticed_by: The rank that waited.
        call: Number of the call, from 0, on which it waited.
    """

    silent: tuple[int, ...]
    noticed_by: int
    call: int

    @classmethod
    def decode(cls, record: int) -> Failure | None:
        """Return what the word says, None for 0."""
        if record == 0:
            return None
        silent = tuple(n for n in range(MAX_RANKS) if record >> n & 1)
        return cls(silent, record >> 16 & 0xFF, record >> 24)


@dataclasses.dataclass(frozen=True)
class ExchangeConfig:
    """Launch knobs of an exchange; none changes a bit of the result.

    Every program is one warp (a wave on AMD): it takes each branch as a whole, so a wait needs no
    barrier, and small programs start soonest.

    Attributes:
        tile_bytes: Of one rank's payload a program handles at a time, at least one row.
        max_programs: Most programs of a launch; the tiles beyond are looped over. Never more than
            the device holds at once, or a wait could starve what it waits for.
        wait_launch: Launch while the kernel before drains, and wait for its end inside
            (programmatic dependent launch, NVIDIA from compute capability 9.0).
    """

    tile_bytes: int
    max_programs: int
    wait_launch: bool = False

    @classmethod
    @functools.cache
    def from_payload(cls, payload_bytes: int, num_sms: int) -> ExchangeConfig:
        """Return the config for a payload of so many bytes a peer.

        One warp to each of a multiprocessor's four schedulers, as far as the payload goes; more of
        it makes larger tiles. Not over 1024 bytes: rows are unrolled, and a reduce of 2048 bytes
        takes ptxas 10.6 s to build (1024: 2.5 s, 512: 1.0 s; sm_90, Triton 3.9, n = 1), which an
        engine's first request would wait for.
        """
        tile_bytes = 256
        while payload_bytes > 4 * num_sms * tile_bytes and tile_bytes < 1024:
            tile_bytes *= 2
        return cls(tile_bytes=tile_bytes, max_programs=PROGRAMS_PER_SM * num_sms)

    def options(self) -> dict[str, object]:
        """Return Triton's launch options."""
        return {"num_warps": 1} | ({"launch_pdl": True} if self.wait_launch else {})


_CALLS = BoundCalls()


def _power_of_2_up_to(number: int) -> int:
    return 1 << number.bit_length() - 1


def _spans_int32(*tensors: torch.Tensor) -> bool:
    """Return whether every element's offset, and a little more, fits 32 bits."""
    spans = [
        sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
        for t in tensors
    ]
    return max(spans) < 2**31 - 2**16


def _in_words(tensor: torch.Tensor, pairs: bool) -> tuple[torch.Tensor, bool]:
    """Return (the tensor as integers, whether a word has to be put together from two of them).

    A word is 32 bits: a number, or with `pairs` two of 16 bits; else a number of 16 bits.
    """
    if tensor.element_size() == 4:
        return tensor.view(torch.int32), False
    even = [tensor.storage_offset() % 2, tensor.data_ptr() % 4 // 2]
    even += [stride % 2 for stride in tensor.stride()[:-1]]
    if pairs and not any(even) and tensor.stride(-1) == 1:
        return tensor.view(torch.int32), False
    return tensor.view(torch.int16), pairs


KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def launch_reduce(
    mailbox: Mailbox,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
    merged_out: torch.Tensor,
    merged_lse: torch.Tensor,
    config: ExchangeConfig,
    send: bool = True,
    merge: bool = True,
) -> None:
    """Exchange out [T, R * H, D], lse [T, R * H]; merge into merged_out [T, H, D], merged_lse.

    The mailbox's regions hold out and the LSE of max_tokens * H rows. One launch; only one of its
    phases without `send` or `merge`, for ranks of one process.
    """
    key = call_key(out, lse, merged_out, merged_lse, mailbox.identity, config, send, merge)
    if _CALLS.again(key):
        return
    num_tokens, num_heads, head_dim = merged_out.shape
    num_rows = num_tokens * num_heads
    # The same on all ranks: what a word is, not how a rank's tensors lie.
    pairs = out.element_size() == 2 and head_dim % 2 == 0
    word_bytes = 4 if pairs else out.element_size()
    width = head_dim * out.element_size() // word_bytes
    block_w = triton.next_power_of_2(width)
    words = min(config.tile_bytes // word_bytes, MAX_TILE_WORDS // mailbox.size)
    rows = _power_of_2_up_to(max(words // block_w, 1))
    rows = min(rows, MAX_TILE_ROWS, triton.next_power_of_2(num_rows))
    num_tiles = triton.cdiv(num_rows, rows)
    source, halves = _in_words(out, pairs)
    own = mailbox.memory.view(torch.int32 if word_bytes == 4 else torch.int16)
    rounded = interpreter_safe(merged_out)
    arguments = dict(  # noqa: C408 - read beside the kernel's keyword arguments
        out_ptr=source,
        lse_ptr=lse,
        merged_out_ptr=rounded,
        merged_lse_ptr=merged_lse,
        own_out_ptr=own,
        own_lse_ptr=mailbox.memory.view(torch.int32),
        control_ptr=mailbox.control,
        addresses_ptr=mailbox.addresses,
        host_ptr=mailbox.record,
        stride_out_t=source.stride(0),
        stride_out_h=source.stride(1),
        stride_lse_t=lse.stride(0),
        stride_lse_h=lse.stride(1),
        offset_out=mailbox.offsets[0] // word_bytes,
        offset_lse=mailbox.offsets[1] // 4,
        stride_slot_out=mailbox.slot_bytes[0] // word_bytes,
        stride_slot_lse=mailbox.slot_bytes[1] // 4,
        num_rows=num_rows,
        timeout_ns=mailbox.timeout_ns,
        RANK=mailbox.rank,
        SIZE=mailbox.size,
        NUM_HEADS=num_heads,
        WIDTH=width,
        ROWS=rows,
        BLOCK_W=block_w,
        KIND=KINDS[out.dtype] + ("x2" if pairs else ""),
        HALVES=halves,
        INDEX=tl.int32 if _spans_int32(source, lse, own) else tl.int64,
        LOOP=num_tiles > config.max_programs,
        ARCH=mailbox.arch,
        WAIT_LAUNCH=config.wait_launch,
        SEND=send,
        MERGE=merge,
    )
    launch = Launch(
        _direct_reduce_kernel, (min(num_tiles, config.max_programs),), arguments, config.options()
    )
    with torch.cuda.device_of(out):
        _CALLS.first(key, [launch])
    if rounded is not merged_out:
        merged_out.copy_(rounded)


def launch_gather(
    mailbox: Mailbox,
    *,
    q: torch.Tensor,
    gathered: torch.Tensor,
    config: ExchangeConfig,
    send: bool = True,
    merge: bool = True,
) -> None:
    """Put every rank's q [T, H, D] together as gathered [T, R * H, D], heads in rank order.

    The mailbox's one region holds max_tokens * H * D elements. One launch; only one of its phases
    without `send` or `merge`, for ranks of one process.
    """
    key = call_key(q, gathered, mailbox.identity, config, send, merge)
    if _CALLS.again(key):
        return
    num_tokens, num_heads, head_dim = q.shape
    # The same on all ranks: what a word is, not how a rank's tensors lie.
    pairs = q.element_size() == 2 and num_heads * head_dim % 2 == 0
    word_bytes = 4 if pairs else q.element_size()
    width = num_heads * head_dim * q.element_size() // word_bytes
    # One run a token: words cross from head to head, whatever head_dim is.
    dense = num_heads == 1 or q.stride(1) == head_dim
    # Pairs that cross a head's end lie together only where heads do.
    source, halves = _in_words(q.flatten(1) if dense else q, pairs)
    if not dense and pairs and head_dim % 2:
        source, halves = q.view(torch.int16), True
    block = min(config.tile_bytes // word_bytes, MAX_TILE_WORDS // mailbox.size)
    block = _power_of_2_up_to(block)
    num_tiles = triton.cdiv(num_tokens * width, block)
    own = mailbox.memory.view(torch.int32 if word_bytes == 4 else torch.int16)
    result = gathered.flatten(1).view(own.dtype)
    arguments = dict(  # noqa: C408 - read beside the kernel's keyword arguments
        q_ptr=source,
        gathered_ptr=result,
        own_ptr=own,
        control_ptr=mailbox.control,
        addresses_ptr=mailbox.addresses,
        host_ptr=mailbox.record,
        stride_q_t=source.stride(0),
        stride_q_h=0 if dense else source.stride(1),
        offset=mailbox.offsets[0] // word_bytes,
        stride_slot=mailbox.slot_bytes[0] // word_bytes,
        num_tokens=num_tokens,
        num_tiles=num_tiles,
        timeout_ns=mailbox.timeout_ns,
        RANK=mailbox.rank,
        SIZE=mailbox.size,
        WIDTH=width,
        HEAD_DIM=head_dim if halves else head_dim * q.element_size() // word_bytes,
        BLOCK=block,
        HALVES=halves,
        DENSE=dense,
        INDEX=tl.int32 if _spans_int32(source, result, own) else tl.int64,
        LOOP=num_tiles > config.max_programs,
        ARCH=mailbox.arch,
        WAIT_LAUNCH=config.wait_launch,
        SEND=send,
        MERGE=merge,
    )
    launch = Launch(
        _direct_gather_kernel, (min(num_tiles, config.max_programs),), arguments, config.options()
    )
    with torch.cuda.device_of(q):
        _CALLS.first(key, [launch])
