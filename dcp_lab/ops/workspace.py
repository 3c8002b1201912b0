"""Launch configs of the decode kernels and the workspace that a captured graph can point to."""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton

from dcp_lab.kernels import INTERPRETED
from dcp_lab.kernels import decode as kernels
from dcp_lab.kernels.launch import BoundCalls, Launch, call_key
from dcp_lab.ops.arguments import (
    CACHE_DTYPES,
    MAX_HEAD_DIM,
    MAX_LORA_RANK,
    check_shard,
    check_sliding_window,
)
from dcp_lab.ops.checks import check_positive_int, check_tensor, fail
from dcp_lab.ops.device import Device, current_device, device_of
from dcp_lab.sharding import Shard


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Launch knobs of `_decode_kernel` and `_reduce_kernel`.

    Attributes:
        block_n: KV tokens a tile.
        num_warps, num_stages: Of the decode kernel; num_stages counts the software pipeline.
        slots_per_sm: Work items aimed at per multiprocessor (CU on AMD).
        min_split_tokens: No piece of a split request is shorter.
        reduce_splits: Partials the reduce kernel loads at once.
        reduce_columns, reduce_warps: Head-dim columns and warps of a reduce program.
        overlap_entry: Whether the decode kernel may be launched while the kernel before it drains
            (it waits before it reads anything). Only where the device has dependent launch.
    """

    block_n: int
    num_warps: int
    num_stages: int
    slots_per_sm: int = 2
    min_split_tokens: int = 64
    reduce_splits: int = 16
    reduce_columns: int = 64
    reduce_warps: int = 1
    overlap_entry: bool = False


def choose_config(
    *,
    head_dim: int,
    head_dim_v: int,
    itemsize: int,
    rows: int,
    num_programs: int,
    max_tokens: int,
    num_splits_hint: int,
    device: Device,
) -> DecodeConfig:
    """Return the launch config for a shape; it depends on nothing that was timed on this machine.

    Every threshold is from sweeps on one H200 (`python -m dcp_lab.bench.sweep`), shapes written as
    requests x tokens, 16 q heads and 1 KV head of 128 bf16 dims unless said.

    Args:
        head_dim, head_dim_v: Elements.
        itemsize: Bytes of a KV element in the kernel.
        rows: Of the query tile, from query_rows.
        num_programs: Requests x KV heads x row blocks: programs of an unsplit call.
        max_tokens: KV tokens x KV heads a call reads at most, all requests.
        num_splits_hint: Pieces a request is cut into when all requests are alike.
        device: Where it runs.
    """
    if head_dim > MAX_HEAD_DIM:
        return _choose_latent_config(itemsize, rows, max_tokens, num_splits_hint, device)
    width = triton.next_power_of_2(head_dim) + triton.next_power_of_2(head_dim_v)
    if device.arch == "cuda":
        return _choose_cuda_config(
            width=width,
            itemsize=itemsize,
            rows=rows,
            num_programs=num_programs,
            max_tokens=max_tokens,
            num_splits_hint=num_splits_hint,
            device=device,
        )
    reduce = _choose_reduce(num_splits_hint)
    block_n = 32 if num_programs > 2 * device.num_sms else 64
    block_n = _fitting_tile(block_n, width * itemsize)
    # CDNA has 64 KB (gfx942) or 160 KB (gfx950) of LDS a CU: two stages. A query tile over 16 rows
    # leaves registers for half the tokens (64 tokens: 4 to 8 scalar spills, 32: none; by
    # `dcp-lab amd-report`). Built, never run here.
    # So does fp8, whose unpacked copy takes the rest, but for narrow heads, of which half the
    # tokens would be loads of 8 bytes.
    if device.arch == "hip" and (rows > 16 or (itemsize == 1 and width > 128)):
        block_n = max(16, block_n // 2)
    # The interpreter runs programs one after the other: few large ones.
    slots_per_sm = 1 if device.arch == "interpreter" else 2
    return DecodeConfig(
        block_n=block_n, num_warps=4, num_stages=2, slots_per_sm=slots_per_sm, **reduce
    )


def _fitting_tile(tokens: int, token_bytes: int) -> int:
    """Return the tokens of a tile: as asked, fewer where they would take more than 512 B each.

    Narrower heads do not want more of them (32q/4kv d64, 16 x 2k: 13.8 us with 64 tokens, 15.3
    with 128).
    """
    fitting = triton.next_power_of_2(tokens * 512 // token_bytes + 1) // 2
    return max(16, min(tokens, fitting))


# Two programs with a fourth stage of 32 KB tiles take 2 x 105 KB, one of a latent up to 184 KB.
# What has less gets configs that were never timed on it.
_HOPPER_SHARED_BYTES = 227 << 10


def _choose_cuda_config(
    *,
    width: int,
    itemsize: int,
    rows: int,
    num_programs: int,
    max_tokens: int,
    num_splits_hint: int,
    device: Device,
) -> DecodeConfig:
    """Return the config of `_decode_kernel` on an NVIDIA GPU; times are us on an H200.

    width is the elements of K and V of a token and head; the rest as in choose_config.

    A program that starts while its predecessor drains (overlap_entry) saves up to 0.5 us, but
    lands where there is room: where three fit on a multiprocessor and two each are enough, some
    get three and others one (64 x 8k with 64 tokens and 3 stages: 81 to 86 against 70 to 73). So
    it is off for such tiles (the last branch, and fp8's of many tokens); on where programs are
    fewer, or small and more than run at once, where a fourth stage lets two fit, and for tiles
    of half the bytes.
    """
    num_sms = device.num_sms
    reduce = _choose_reduce(num_splits_hint)
    if num_splits_hint <= 4:
        # 64 x 8k: 71.5 against 72.1 with 64 columns; with 16 pieces (16 x 8k) 24.5 against 23.9.
        reduce["reduce_columns"] = 128
    few = num_programs <= num_sms
    if num_programs > 2 * num_sms:
        # More programs than slots want small tiles, so that all of them run at once: 16 x 2k with
        # 32 KV heads (512 programs) takes 125.8 with 32 tokens and 2 warps, 153 with 64.
        block_n, num_warps, num_stages, slots_per_sm, overlap_entry = 32, 2, 3, 3, True
    elif itemsize == 1 and width <= 256 and few and max_tokens <= 32768:
        # 16 x 2k: 9.2; 64 tokens and 4 warps 9.6, 32 and 2 9.6.
        block_n, num_warps, num_stages, slots_per_sm, overlap_entry = 128, 4, 3, 1, True
    elif itemsize == 1 and width <= 256:
        # 64 x 8k: 45.8; two programs a multiprocessor 51 and more, whatever the tile.
        block_n, num_warps, num_stages, slots_per_sm, overlap_entry = 64, 2, 3, 4, False
    elif few and max_tokens <= 98304 and (num_programs >= 16 or num_splits_hint > 128):
        # 16 x 1k 7.2, 16 x 2k 9.7, 1 x 64k 14.6; 64 tokens and 4 warps 7.5, 10.2, 15.5. Still
        # level with uneven lengths up to 4.9k (12.7 and 12.9), behind at 16 x 8k (24.7 and 23.9).
        block_n, num_warps, num_stages, slots_per_sm, overlap_entry = 32, 2, 3, 2, True
    elif few and max_tokens <= 32768:
        # 1 x 1k 4.7, 1 x 8k 7.0; 32 tokens and 2 warps 5.2 and 7.0.
        block_n, num_warps, num_stages, slots_per_sm, overlap_entry = 64, 4, 3, 1, True
    elif num_programs >= 64 and rows == 16 and device.shared_bytes >= _HOPPER_SHARED_BYTES:
        # 64 x 8k 71.5 to 72.1, 256 x 1k 38.4 to 38.7; three stages without overlap 72.1 to 72.8
        # and 39.3, but 23.9 against 24.2 at 16 x 8k. A tile of half the bytes (d64) needs no
        # fourth stage: 13.2 against 13.8 without overlap.
        num_stages = 4 if width * itemsize >= 512 else 3
        block_n, num_warps, slots_per_sm, overlap_entry = 64, 4, 2, True
    else:
        block_n, num_warps, num_stages, slots_per_sm, overlap_entry = 64, 4, 3, 2, False
    return DecodeConfig(
        block_n=_fitting_tile(block_n, width * itemsize),
        num_warps=num_warps,
        num_stages=num_stages,
        slots_per_sm=slots_per_sm,
        overlap_entry=overlap_entry,
        **reduce,
    )


def _choose_reduce(num_splits_hint: int) -> dict[str, int]:
    """Return the reduce kernel's knobs."""
    # Up to 128 pieces one warp won at every shape; beyond that all of them in one tile of 4 warps
    # (1 x 64k, 256 pieces: 15.8 us; 128 at a time 16.7; one warp 16.8).
    if num_splits_hint > 128:
        return {"reduce_splits": 256, "reduce_columns": 32, "reduce_warps": 4}
    if num_splits_hint > 16:
        return {"reduce_splits": 64, "reduce_columns": 32, "reduce_warps": 1}
    return {"reduce_splits": 16, "reduce_columns": 64, "reduce_warps": 1}


def _choose_latent_config(
    itemsize: int, rows: int, max_tokens: int, num_splits_hint: int, device: Device
) -> DecodeConfig:
    """Return the config of `_mla_decode_kernel` for a latent of up to 512 + 64 elements.

    Times are us on an H200, requests x tokens; with 16 heads in bf16 unless said.
    """
    reduce = _choose_reduce(num_splits_hint)
    if device.arch == "hip":
        # fp8 unpacked is as wide as bf16 and its 16-bit words are held too; fp32 is twice as wide.
        # With 32 tokens both spill (`dcp-lab amd-report`). Built, never run here.
        return DecodeConfig(
            block_n=32 if itemsize == 2 else 16, num_warps=4, num_stages=2, **reduce
        )
    if device.arch == "interpreter":
        # It runs programs one after the other: few large ones.
        reduce |= {"reduce_columns": 512}
        return DecodeConfig(block_n=32, num_warps=4, num_stages=2, **reduce)
    if itemsize == 4:
        # fp32 does without tensor cores: 94 registers with 16 tokens and 8 warps, 4 warps spill.
        return DecodeConfig(block_n=16, num_warps=8, num_stages=2, slots_per_sm=1, **reduce)
    if num_splits_hint <= 16:
        # Results are 512 wide: with 64 columns and one warp a program the reduce kernel has so
        # many that 64 x 1k takes 32.6 rather than 30.0, and 64 x 1k of fp8 36.5 rather than 33.7.
        reduce |= {"reduce_columns": 256, "reduce_warps": 2}
    if device.shared_bytes < _HOPPER_SHARED_BYTES:
        # 92 KB each. Never timed.
        block_n, num_warps, num_stages = (32, 4, 3) if rows == 16 else (16, 8, 2)
        return DecodeConfig(
            block_n=block_n, num_warps=num_warps, num_stages=num_stages, slots_per_sm=1, **reduce
        )
    if rows > 16:
        # 128 heads: 16 x 8k 160, 64 x 1k 85; 32 tokens and 3 stages 173 and 89. fp8 has 32 rows,
        # never timed.
        block_n, num_stages = (64, 2) if itemsize == 2 else (32, 3)
        return DecodeConfig(
            block_n=block_n, num_warps=8, num_stages=num_stages, slots_per_sm=1, **reduce
        )
    if max_tokens <= 32768:
        # 1 x 8k 10.3, 16 x 1k 12.5; 64 tokens and 8 warps 11.3 and 14.0. fp8 not timed.
        return DecodeConfig(
            block_n=32, num_warps=4, num_stages=3, slots_per_sm=1, overlap_entry=True, **reduce
        )
    if itemsize == 2 and max_tokens > 524288:
        # 16 x 64k: 289; 64 tokens and 8 warps 299.
        return DecodeConfig(block_n=32, num_warps=4, num_stages=3, slots_per_sm=2, **reduce)
    # 64 x 1k 29.8, 16 x 8k 46.5, of fp8 33.7 and 56.7; 32 tokens and 4 warps, two programs a
    # multiprocessor, 31.2, 48.5, 36.0 and 58.4. Of bf16 one program fills a multiprocessor, so
    # that one which starts early takes no room from another.
    return DecodeConfig(
        block_n=64,
        num_warps=8,
        num_stages=3,
        slots_per_sm=1,
        overlap_entry=itemsize == 2,
        **reduce,
    )


def query_rows(group: int, max_query_len: int, most: int = 64) -> int:
    """Return the rows of a query tile: a power of two from 16 to most."""
    return max(16, min(most, triton.next_power_of_2(group * max_query_len)))


def most_query_rows(head_dim: int, itemsize: int, device: Device) -> int:
    """Return the most rows a query tile may have.

    One read of a wide latent should serve as many heads as the registers hold: 64 on NVIDIA; 32 on
    AMD, where a program has 4 waves, and for fp8, whose unpacked copy takes the rest (with 64 rows
    it spills); 16 for fp32, without tensor cores.
    """
    if head_dim <= MAX_HEAD_DIM or device.arch == "interpreter":
        return 64
    if itemsize == 4:
        return 16
    return 64 if itemsize == 2 and device.arch == "cuda" else 32


@dataclasses.dataclass(frozen=True)
class PreparedDecode:
    """What a DecodeWorkspace is prepared for.

    A table of work cuts all that the first query token of a request sees. Without a window that is
    the whole of seq_lens; with one it depends on the rest, which is recorded then only.
    """

    num_requests: int
    sliding_window: int | None
    query_start_loc: bool = False
    global_seq_lens: bool = False
    shard: Shard | None = None

    @classmethod
    def of(
        cls,
        num_requests: int,
        sliding_window: int | None,
        query_start_loc: torch.Tensor | None,
        global_seq_lens: torch.Tensor | None,
        shard: Shard | None,
    ) -> PreparedDecode:
        """Return what a step with these arguments needs."""
        if sliding_window is None:
            return cls(num_requests, None)
        given = query_start_loc is not None, global_seq_lens is not None
        # A group of one rank holds whole requests.
        shard = shard if shard is not None and shard.size > 1 else None
        return cls(num_requests, sliding_window, *given, shard)

    def __str__(self) -> str:
        """Describe it in the words of prepare's arguments."""
        if self.sliding_window is None:
            return f"{self.num_requests} requests, sliding_window=None"
        tensors = " and ".join(
            f"{'with' if getattr(self, name) else 'without'} {name}"
            for name in ("query_start_loc", "global_seq_lens")
        )
        window = f"sliding_window={self.sliding_window}"
        return f"{self.num_requests} requests, {window}, shard={self.shard}, {tensors}"


class DecodeWorkspace:
    """Buffers and the work table of a decode, made once and shared by all layers.

    For paged_decode, or for mla_paged_decode with num_kv_heads 1, head_dim kv_lora_rank + rope and
    head_dim_v kv_lora_rank.

    Sized for the largest call; never grows, moves or allocates afterwards, so a captured graph may
    point to it. `prepare` cuts the requests into work items on the device: one launch a step, all
    layers use the same table.

    Args:
        max_requests: Most requests a call may have.
        num_q_heads, num_kv_heads, head_dim: Of the calls.
        head_dim_v: Default: head_dim.
        max_query_len: Most query tokens a request may have in a call. Default: 1.
        kv_dtype: Dtype of the cache, or fp32 for fp32 queries whatever the cache; one of as many
            bytes will do. Default: bf16.
        max_seq_len: Longest request expected; only picks tile shapes, a longer one stays correct.
            Default: 4096.
        max_items: Most work items of a step. Default: chosen from the device's multiprocessors.
        config: Launch knobs, for sweeps. Default: choose_config's for these sizes.
        device: Default: the current GPU, or the CPU under the interpreter.

    Raises:
        ValueError: A size is not an int >= 1, max_items < max_requests, or kv_dtype is no dtype
            that a cache may have.

    Notes:
        Graph capture: `prepare` and the decode call may both be captured; or prepare once a step
        before the replay. Contents are valid until the next prepare.
    """

    def __init__(
        self,
        max_requests: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        max_query_len: int = 1,
        kv_dtype: torch.dtype = torch.bfloat16,
        max_seq_len: int = 4096,
        max_items: int | None = None,
        config: DecodeConfig | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.max_requests = check_positive_int("max_requests", max_requests)
        self.num_q_heads = check_positive_int("num_q_heads", num_q_heads)
        self.num_kv_heads = check_positive_int("num_kv_heads", num_kv_heads)
        if num_q_heads % num_kv_heads:
            fail("num_q_heads", f"a multiple of num_kv_heads={num_kv_heads}", num_q_heads)
        most = MAX_LORA_RANK + MAX_HEAD_DIM if num_kv_heads == 1 else MAX_HEAD_DIM
        self.head_dim = check_positive_int("head_dim", head_dim, at_most=most)
        self.head_dim_v = check_positive_int(
            "head_dim_v", head_dim if head_dim_v is None else head_dim_v, at_most=most
        )
        self.max_query_len = check_positive_int("max_query_len", max_query_len)
        check_positive_int("max_seq_len", max_seq_len)
        if kv_dtype not in CACHE_DTYPES:
            fail("kv_dtype", "a dtype of a cache, such as torch.bfloat16", kv_dtype)
        self.kv_dtype = kv_dtype
        if device is None:
            device = "cpu" if INTERPRETED else torch.device("cuda", torch.cuda.current_device())
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        facts = device_of(self.device)
        itemsize = 4 if INTERPRETED else kv_dtype.itemsize
        most_rows = most_query_rows(head_dim, itemsize, facts)
        self.block_m = query_rows(num_q_heads // num_kv_heads, max_query_len, most_rows)
        self.row_blocks = triton.cdiv(num_q_heads // num_kv_heads * max_query_len, self.block_m)
        self.config = config or choose_config(
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            itemsize=itemsize,
            rows=self.block_m,
            num_programs=max_requests * num_kv_heads * self.row_blocks,
            max_tokens=max_requests * max_seq_len * num_kv_heads,
            num_splits_hint=min(
                self._slots(facts, 2) // max_requests, triton.cdiv(max_seq_len, 64)
            ),
            device=facts,
        )
        self._slots_target = self._slots(facts, self.config.slots_per_sm)
        if max_items is not None:
            check_positive_int("max_items", max_items)
            if max_items < max_requests:
                fail("max_items", f"an int >= max_requests={max_requests}", max_items)
        self._max_items = max_items
        self.max_items = self.items_for(max_requests)
        empty = functools.partial(torch.empty, device=self.device)
        self.items = empty(self.max_items, kernels.ITEM_FIELDS, dtype=torch.int32)
        self.split_requests = empty(self.max_requests, kernels.ITEM_FIELDS, dtype=torch.int32)
        rows = (self.max_items, self.max_query_len, self.num_q_heads)
        self.partial_out = empty(*rows, self.head_dim_v, dtype=torch.float32)
        self.partial_lse = empty(*rows, dtype=torch.float32)
        self.prepared: PreparedDecode | None = None
        self.calls = BoundCalls()
        self._prepares = BoundCalls()

    def _slots(self, facts: Device, slots_per_sm: int) -> int:
        return max(1, facts.num_sms * slots_per_sm // (self.num_kv_heads * self.row_blocks))

    def items_for(self, num_requests: int) -> int:
        """Return the items (grid size) of a call with this many requests.

        As many as there are slots; with more requests than that, one each and an eighth of the
        slots on top, so that one long request among many short ones can still be split.
        """
        if self._max_items is not None:
            return self._max_items
        return max(self._slots_target, num_requests + max(1, self._slots_target // 8))

    def split_requests_for(self, num_requests: int) -> int:
        """Return how many of so many requests can be split at most: each takes an item more."""
        return min(num_requests, self.items_for(num_requests) - num_requests)

    def memory_bytes(self) -> int:
        """Return the device memory this workspace holds."""
        tensors = (self.items, self.split_requests, self.partial_out, self.partial_lse)
        return sum(t.numel() * t.element_size() for t in tensors)

    def prepare(
        self,
        seq_lens: torch.Tensor,
        *,
        global_seq_lens: torch.Tensor | None = None,
        query_start_loc: torch.Tensor | None = None,
        sliding_window: int | None = None,
        shard: Shard | None = None,
    ) -> None:
        """Cut this step's requests into work items: one launch, for all layers.

        Args:
            seq_lens: int32 [B], tokens in this cache, B <= max_requests.
            global_seq_lens, query_start_loc, sliding_window, shard: As given to paged_decode; only
                a sliding window needs them, and a call with one is held to them.

        Raises:
            ValueError: An argument is not what paged_decode takes, is on another device, or
                B > max_requests.

        Notes:
            Safe under graph capture; no sync, no allocation. With the arguments of an earlier call
            (the same memory, shapes and options) nothing is checked and planned again.
        """
        key = call_key(seq_lens, global_seq_lens, query_start_loc, sliding_window, shard)
        if self._prepares.again(key):
            self.prepared = PreparedDecode.of(
                seq_lens.shape[0],
                check_sliding_window(sliding_window),
                query_start_loc,
                global_seq_lens,
                shard,
            )
            return
        check_tensor("seq_lens", seq_lens, dtypes=(torch.int32,), shape=("B",), device=self.device)
        num_requests = seq_lens.shape[0]
        if num_requests > self.max_requests:
            fail("seq_lens", f"at most max_requests={self.max_requests} requests", seq_lens)
        if not seq_lens.is_contiguous():
            fail("seq_lens", "a contiguous tensor", f"stride {seq_lens.stride()}")
        for name, tensor, shape in (
            ("global_seq_lens", global_seq_lens, ("B", num_requests)),
            ("query_start_loc", query_start_loc, ("B+1", num_requests + 1)),
        ):
            if tensor is not None:
                check_tensor(
                    name,
                    tensor,
                    dtypes=(torch.int32,),
                    shape=(shape,),
                    device=self.device,
                    last_contiguous=True,
                )
        sliding_window = check_sliding_window(sliding_window)
        check_shard(shard)
        step = PreparedDecode.of(
            num_requests, sliding_window, query_start_loc, global_seq_lens, shard
        )
        if step.shard is not None and global_seq_lens is None:
            fail("global_seq_lens", "int32 [B], needed by a sliding window under a shard", None)
        if num_requests == 0:
            self.prepared = step
            return
        block_b = triton.next_power_of_2(num_requests)
        window_shard = step.shard or Shard(0, 1)
        plan = dict(  # noqa: C408 - read beside the kernel's keyword arguments
            seq_lens_ptr=seq_lens,
            total_lens_ptr=seq_lens if global_seq_lens is None else global_seq_lens,
            query_start_loc_ptr=seq_lens if query_start_loc is None else query_start_loc,
            items_ptr=self.items,
            split_requests_ptr=self.split_requests,
            num_requests=num_requests,
            num_items=self.items_for(num_requests),
            num_split_requests=self.split_requests_for(num_requests),
            min_tiles=max(1, self.config.min_split_tokens // self.config.block_n),
            TILE=self.config.block_n,
            HAS_QUERY_START_LOC=query_start_loc is not None,
            WINDOW=sliding_window or 0,
            SHARD_RANK=window_shard.rank,
            SHARD_SIZE=window_shard.size,
            INTERLEAVE=window_shard.interleave_size,
            BLOCK_B=block_b,
            BLOCK_S=max(2, min(64, 1024 // block_b)),
            SEARCH_STEPS=24,
        )
        options = {"num_warps": 4 if block_b <= 256 else 8}
        with current_device(self.device):
            self._prepares.first(key, [Launch(kernels._plan_kernel, (1,), plan, options)])
        # Not before: a launch that fails leaves the table that was there.
        self.prepared = step
