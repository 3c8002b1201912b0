"""Exchanges in one launch: send to the peers' memory, wait for theirs, merge or gather.

Every rank owns a mailbox, memory that its peers write into:

    control   word 0: launches so far, in units of 2^16; word 16: the failure record, 0 = none
    regions   [parity 2][source rank][slot], one region a kind of payload

`_reduce_kernel` sends every peer the rows of that peer's heads, out and fp32 LSE bits, and merges
what the peers sent with its own: slot [token][local head][head_dim] for out, [token][local head]
for the LSE. `_gather_kernel` sends its q to every peer and puts the parts together. Both go
through three steps in one program: it stores its rows into the slots of the peers, it polls its
own slots until the same rows of every peer are there, and it uses them and marks the slots unused.

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
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from dcp_lab.kernels import INTERPRETED, interpreter_safe
from dcp_lab.kernels.merge import clean_lse, merge_step, merged_lse

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
def _enter(control_ptr, ARCH: tl.constexpr, WAIT_LAUNCH: tl.constexpr):
    """Return (call number's parity, word 0, failure record)."""
    if WAIT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    count = tl.load(control_ptr)
    record = _load_fresh(control_ptr + FAILURE_WORD, None, None, ARCH)
    return (count >> COUNT_SHIFT) & 1, count, record


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
def _load_parts(pointers, stride_slot, mask, own,
                RANK: tl.constexpr, SIZE: tl.constexpr, ARCH: tl.constexpr):  # fmt: skip
    """Return what the slots hold now, a tensor a rank; own is this rank's."""
    parts = ()
    for n in tl.static_range(SIZE):
        if n == RANK:
            parts = parts + (own,)
        else:
            part = _load_fresh(pointers + n * stride_slot, mask, 0, ARCH)
            parts = parts + (part,)
    return parts


@triton.jit
def _any(flags):
    """Return 1 when any element is true, else 0."""
    flags = flags.to(tl.int32)
    if len(flags.shape) == 2:
        flags = tl.max(flags, 1)
    return tl.max(flags, 0)


@triton.jit
def _absent(parts, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Return 1 when a word of a peer has not arrived, 0 when all have."""
    # A rank's own part is never all ones.
    absent = parts[RANK] == -1
    for n in tl.static_range(SIZE):
        if n != RANK:
            absent = absent | (parts[n] == -1)
    return _any(absent)


@triton.jit
def _silent(parts, SIZE: tl.constexpr):
    """Return a bit for each rank of which a word has not arrived."""
    silent = tl.full([], 0, tl.int32)
    for n in tl.static_range(SIZE):
        silent = silent | (_any(parts[n] == -1) << n)
    return silent


@triton.jit
def _give_up(addresses_ptr, host_ptr, count, silent, record,
             RANK: tl.constexpr, SIZE: tl.constexpr, ARCH: tl.constexpr):  # fmt: skip
    """Tell this host and, if none did yet, all ranks; return the record, silent ranks' if 0."""
    if record == 0:
        call = (count >> COUNT_SHIFT) & ((1 << 38) - 1)
        record = (call << 24) | (RANK << 16) | silent
        for n in tl.static_range(SIZE):
            there = tl.load(addresses_ptr + n).to(tl.pointer_type(tl.int64))
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
def _elements(tile, BLOCK: tl.constexpr):
    """Return the numbers of a tile's elements, int64."""
    # Added to a tensor, since the interpreter counts loops in plain ints.
    return (tl.zeros([BLOCK], tl.int64) + tile) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _to_fp32(bits, KIND: tl.constexpr):
    """Return the numbers that bits stand for."""
    if KIND == "bf16":
        numbers = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == "fp16":
        numbers = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        numbers = bits.to(tl.float32, bitcast=True)
    return numbers


@triton.jit(do_not_specialize=["num_rows", "timeout_ns"])
def _reduce_kernel(
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
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KIND: tl.constexpr,
    ARCH: tl.constexpr,
    WAIT_LAUNCH: tl.constexpr,
    SEND: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Grid (any,): programs share the tiles of BLOCK_ROWS rows, a row is (token, local head)."""
    parity, count, record = _enter(control_ptr, ARCH, WAIT_LAUNCH)
    offs_d = tl.arange(0, BLOCK_D)
    num_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    # int64: past 2^31 elements too.
    stride_slot_out, stride_slot_lse = stride_slot_out.to(tl.int64), stride_slot_lse.to(tl.int64)

    if SEND:
        # After a failure nobody is written to any more.
        rows_to_send = tl.where(record == 0, num_rows, 0)
        for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
            row = _elements(tile, BLOCK_ROWS)
            t, h = row // NUM_HEADS, row % NUM_HEADS
            mask_row = row < num_rows
            mask = mask_row[:, None] & (offs_d < HEAD_DIM)[None, :]
            # All loads before the first store and none behind the record, so that they are in
            # flight together; this rank's own heads too, which the merge finds in cache.
            outs, lses = (), ()
            for n in tl.static_range(SIZE):
                head = n * NUM_HEADS + h
                out_ptrs = out_ptr + (t * stride_out_t + head * stride_out_h)[:, None]
                outs = outs + (tl.load(out_ptrs + offs_d[None, :], mask=mask, other=0),)
                lse_ptrs = lse_ptr + t * stride_lse_t + head * stride_lse_h
                lses = lses + (tl.load(lse_ptrs, mask=mask_row, other=float("-inf")),)
            mask_row = row < rows_to_send
            mask = mask_row[:, None] & (offs_d < HEAD_DIM)[None, :]
            slot = parity * SIZE + RANK
            for n in tl.static_range(SIZE):
                if n != RANK:
                    address = tl.load(addresses_ptr + n)
                    far_out = address.to(tl.pointer_type(out_ptr.dtype.element_ty))
                    far_lse = address.to(tl.pointer_type(tl.int32))
                    far_out = tl.multiple_of(far_out, 16) + offset_out + slot * stride_slot_out
                    far_lse = tl.multiple_of(far_lse, 16) + offset_lse + slot * stride_slot_lse
                    far_rows = far_out + (row * HEAD_DIM)[:, None] + offs_d[None, :]
                    _store_through(far_rows, _sendable(outs[n]), mask, ARCH)
                    # Clean, no LSE is NaN, so its bits are not all ones.
                    lse = clean_lse(lses[n]).to(tl.int32, bitcast=True)
                    _store_through(far_lse + row, lse, mask_row, ARCH)

    if MERGE:
        own_out = own_out_ptr + offset_out + parity * SIZE * stride_slot_out
        own_lse = own_lse_ptr + offset_lse + parity * SIZE * stride_slot_lse
        for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
            row = _elements(tile, BLOCK_ROWS)
            t, h = row // NUM_HEADS, RANK * NUM_HEADS + row % NUM_HEADS
            mask_row = row < num_rows
            mask = mask_row[:, None] & (offs_d < HEAD_DIM)[None, :]
            # This rank's own part, on its way while the peers' are waited for.
            out_ptrs = out_ptr + (t * stride_out_t + h * stride_out_h)[:, None] + offs_d[None, :]
            my_out = _sendable(tl.load(out_ptrs, mask=mask, other=0))
            lse_ptrs = lse_ptr + t * stride_lse_t + h * stride_lse_h
            my_lse = clean_lse(tl.load(lse_ptrs, mask=mask_row, other=float("-inf")))
            my_lse = my_lse.to(tl.int32, bitcast=True)

            slots_out = own_out + (row * HEAD_DIM)[:, None] + offs_d[None, :]
            slots_lse = own_lse + row
            outs = _load_parts(slots_out, stride_slot_out, mask, my_out, RANK, SIZE, ARCH)
            lses = _load_parts(slots_lse, stride_slot_lse, mask_row, my_lse, RANK, SIZE, ARCH)
            absent = _any_lane(_absent(outs, RANK, SIZE) | _absent(lses, RANK, SIZE), ARCH)
            over = (record != 0).to(tl.int32)
            since = tl.full([], 0, tl.int64)
            polls = tl.full([], 0, tl.int32)
            while (absent != 0) & (over == 0):
                outs = _load_parts(slots_out, stride_slot_out, mask, my_out, RANK, SIZE, ARCH)
                lses = _load_parts(slots_lse, stride_slot_lse, mask_row, my_lse, RANK, SIZE, ARCH)
                absent = _any_lane(_absent(outs, RANK, SIZE) | _absent(lses, RANK, SIZE), ARCH)
                polls += 1
                if polls % POLLS_A_LOOK == 0:
                    since, over = _look(control_ptr, polls, since, timeout_ns, ARCH)
            if (absent != 0) | (record != 0):
                record = _load_fresh(control_ptr + FAILURE_WORD, None, None, ARCH)
                silent = _any_lane(_silent(outs, SIZE) | _silent(lses, SIZE), ARCH)
                record = _give_up(addresses_ptr, host_ptr, count, silent, record, RANK, SIZE, ARCH)

            lse_max = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
            weight_sum = tl.zeros([BLOCK_ROWS], tl.float32)
            acc = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
            ones = tl.full([BLOCK_ROWS, BLOCK_D], -1, out_ptr.dtype.element_ty)
            for n in tl.static_range(SIZE):
                part_lse = lses[n].to(tl.float32, bitcast=True)
                part_out = _to_fp32(outs[n], KIND)
                part_out = tl.where((part_lse == float("-inf"))[:, None], 0.0, part_out)
                weight, factor, lse_max, weight_sum = merge_step(part_lse, lse_max, weight_sum)
                acc = acc * factor[:, None] + part_out * weight[:, None]
                if n != RANK:
                    _store_through(slots_out + n * stride_slot_out, ones, mask, ARCH)
                    _store_through(slots_lse + n * stride_slot_lse, -1, mask_row, ARCH)
            lse, divisor = merged_lse(lse_max, weight_sum)
            acc = acc / divisor[:, None]
            acc = tl.where(record != 0, float("nan"), acc)
            lse = tl.where(record != 0, float("nan"), lse)
            merged_ptrs = merged_out_ptr + (row * HEAD_DIM)[:, None] + offs_d[None, :]
            tl.store(merged_ptrs, acc.to(merged_out_ptr.dtype.element_ty), mask=mask)
            tl.store(merged_lse_ptr + row, lse, mask=mask_row)
        _leave(control_ptr)


@triton.jit
def _within_token(rest, stride_q_h, HEAD_DIM: tl.constexpr, DENSE: tl.constexpr):
    """Return where the rest-th element of a token lies behind its first one."""
    offset = rest
    if not DENSE:
        offset = rest // HEAD_DIM * stride_q_h + rest % HEAD_DIM
    return offset


@triton.jit(do_not_specialize=["num_tokens", "num_tiles", "timeout_ns"])
def _gather_kernel(
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
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DENSE: tl.constexpr,
    ARCH: tl.constexpr,
    WAIT_LAUNCH: tl.constexpr,
    SEND: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Grid (any,): programs share the tiles of BLOCK elements of q [T, NUM_HEADS, HEAD_DIM]."""
    parity, count, record = _enter(control_ptr, ARCH, WAIT_LAUNCH)
    row_width: tl.constexpr = NUM_HEADS * HEAD_DIM
    # int64: past 2^31 elements too.
    stride_slot = stride_slot.to(tl.int64)

    if SEND:
        # After a failure nobody is written to any more.
        tokens_to_send = tl.where(record == 0, num_tokens, 0)
        for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
            element = _elements(tile, BLOCK)
            t, rest = element // row_width, element % row_width
            within = _within_token(rest, stride_q_h, HEAD_DIM, DENSE)
            bits = tl.load(q_ptr + t * stride_q_t + within, mask=t < num_tokens, other=0)
            bits, mask = _sendable(bits), t < tokens_to_send
            for n in tl.static_range(SIZE):
                if n != RANK:
                    far = tl.load(addresses_ptr + n).to(tl.pointer_type(q_ptr.dtype.element_ty))
                    far = tl.multiple_of(far, 16) + offset + (parity * SIZE + RANK) * stride_slot
                    _store_through(far + element, bits, mask, ARCH)

    if MERGE:
        own = own_ptr + offset + parity * SIZE * stride_slot
        for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
            element = _elements(tile, BLOCK)
            t, rest = element // row_width, element % row_width
            within = _within_token(rest, stride_q_h, HEAD_DIM, DENSE)
            mask = t < num_tokens
            mine = _sendable(tl.load(q_ptr + t * stride_q_t + within, mask=mask, other=0))

            slots = own + element
            parts = _load_parts(slots, stride_slot, mask, mine, RANK, SIZE, ARCH)
            absent = _any_lane(_absent(parts, RANK, SIZE), ARCH)
            over = (record != 0).to(tl.int32)
            since = tl.full([], 0, tl.int64)
            polls = tl.full([], 0, tl.int32)
            while (absent != 0) & (over == 0):
                parts = _load_parts(slots, stride_slot, mask, mine, RANK, SIZE, ARCH)
                absent = _any_lane(_absent(parts, RANK, SIZE), ARCH)
                polls += 1
                if polls % POLLS_A_LOOK == 0:
                    since, over = _look(control_ptr, polls, since, timeout_ns, ARCH)
            if (absent != 0) | (record != 0):
                record = _load_fresh(control_ptr + FAILURE_WORD, None, None, ARCH)
                silent = _any_lane(_silent(parts, SIZE), ARCH)
                record = _give_up(addresses_ptr, host_ptr, count, silent, record, RANK, SIZE, ARCH)

            ones = tl.full([BLOCK], -1, q_ptr.dtype.element_ty)
            gathered_ptrs = gathered_ptr + t * (SIZE * row_width) + rest
            for n in tl.static_range(SIZE):
                # All ones is NaN.
                part = tl.where(record != 0, ones, parts[n])
                tl.store(gathered_ptrs + n * row_width, part, mask=mask)
                if n != RANK:
                    _store_through(slots + n * stride_slot, ones, mask, ARCH)
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
    def from_payload(cls, payload_bytes: int, num_sms: int) -> ExchangeConfig:
        """Return the config for a payload of so many bytes a peer.

        512 bytes fill a warp with one 16-byte load a lane. Twice as much while there are more than
        2 programs a multiprocessor: they start later than the bytes take.
        """
        if INTERPRETED:
            # The interpreter pays by the program, not by what it holds.
            return cls(tile_bytes=1 << 16, max_programs=4)
        tile_bytes = 512
        while payload_bytes > 2 * num_sms * tile_bytes and tile_bytes < 2048:
            tile_bytes *= 2
        return cls(tile_bytes=tile_bytes, max_programs=PROGRAMS_PER_SM * num_sms)


def _power_of_2_up_to(number: int) -> int:
    return 1 << number.bit_length() - 1


def _bits_of(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype.itemsize == 4 else torch.int16


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
    num_tokens, num_heads, head_dim = merged_out.shape
    num_rows = num_tokens * num_heads
    bits = _bits_of(out.dtype)
    block_d = triton.next_power_of_2(head_dim)
    # At most what the registers of a warp hold of every rank's tile.
    words = min(config.tile_bytes // out.element_size(), 4096 // mailbox.size)
    block_rows = _power_of_2_up_to(max(words // block_d, 1))
    rounded = interpreter_safe(merged_out)
    with torch.cuda.device_of(out):
        _reduce_kernel[(min(triton.cdiv(num_rows, block_rows), config.max_programs),)](
            out_ptr=out.view(bits),
            lse_ptr=lse,
            merged_out_ptr=rounded,
            merged_lse_ptr=merged_lse,
            own_out_ptr=mailbox.memory.view(bits),
            own_lse_ptr=mailbox.memory.view(torch.int32),
            control_ptr=mailbox.control,
            addresses_ptr=mailbox.addresses,
            host_ptr=mailbox.record,
            stride_out_t=out.stride(0),
            stride_out_h=out.stride(1),
            stride_lse_t=lse.stride(0),
            stride_lse_h=lse.stride(1),
            offset_out=mailbox.offsets[0] // bits.itemsize,
            offset_lse=mailbox.offsets[1] // 4,
            stride_slot_out=mailbox.slot_bytes[0] // bits.itemsize,
            stride_slot_lse=mailbox.slot_bytes[1] // 4,
            num_rows=num_rows,
            timeout_ns=mailbox.timeout_ns,
            RANK=mailbox.rank,
            SIZE=mailbox.size,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_ROWS=block_rows,
            BLOCK_D=block_d,
            KIND=KINDS[out.dtype],
            ARCH=mailbox.arch,
            WAIT_LAUNCH=config.wait_launch,
            SEND=send,
            MERGE=merge,
            num_warps=1,
            **({"launch_pdl": True} if config.wait_launch else {}),
        )
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
    num_tokens, num_heads, head_dim = q.shape
    bits = _bits_of(q.dtype)
    block = _power_of_2_up_to(min(config.tile_bytes // q.element_size(), 4096 // mailbox.size))
    num_tiles = triton.cdiv(q.numel(), block)
    with torch.cuda.device_of(q):
        _gather_kernel[(min(num_tiles, config.max_programs),)](
            q_ptr=q.view(bits),
            gathered_ptr=gathered.view(bits),
            own_ptr=mailbox.memory.view(bits),
            control_ptr=mailbox.control,
            addresses_ptr=mailbox.addresses,
            host_ptr=mailbox.record,
            stride_q_t=q.stride(0),
            stride_q_h=q.stride(1),
            offset=mailbox.offsets[0] // bits.itemsize,
            stride_slot=mailbox.slot_bytes[0] // bits.itemsize,
            num_tokens=num_tokens,
            num_tiles=num_tiles,
            timeout_ns=mailbox.timeout_ns,
            RANK=mailbox.rank,
            SIZE=mailbox.size,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK=block,
            # One run a token: vectors cross from head to head, whatever head_dim is.
            DENSE=num_heads == 1 or q.stride(1) == head_dim,
            ARCH=mailbox.arch,
            WAIT_LAUNCH=config.wait_launch,
            SEND=send,
            MERGE=merge,
            num_warps=1,
            **({"launch_pdl": True} if config.wait_launch else {}),
        )
