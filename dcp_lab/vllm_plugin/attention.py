"""What the backend does, without vLLM: plan a step once, attend and exchange once a layer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from dcp_lab.ops.decode import paged_decode
from dcp_lab.ops.gather import GatherWorkspace, gather_decode
from dcp_lab.ops.merge import merge_states
from dcp_lab.ops.workspace import DecodeWorkspace
from dcp_lab.reducers import make_query_gather, make_reducer
from dcp_lab.sharding import Shard
from dcp_lab.state import AttnState

# A prefill may bring many thousand tokens; they go through the reducer in pieces, so that its
# buffers stay small. A decode step never has more.
MAX_REDUCER_TOKENS = 2048

# A workspace's tiles are chosen for the most requests it takes, so small steps have their own.
WORKSPACE_REQUESTS = (16, 64, 256)


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """What a layer's decode workspace and exchange depend on.

    Attributes:
        num_q_heads: Query heads of this rank.
        num_kv_heads: KV heads of this rank's cache.
        head_dim: Elements.
        sliding_window: Last keys seen, None for all.
        q_dtype, kv_dtype: Of the queries and of the cache.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None
    q_dtype: torch.dtype
    kv_dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Limits:
    """The largest step that there can be.

    Attributes:
        max_requests: Requests.
        max_tokens: Query tokens of all requests.
        decode_query_len: Query tokens of a request that counts as a decode: 1, or 1 and the
            drafts of speculative decoding.
        max_seq_len: Tokens of a whole request.
        max_cache_tokens: Tokens that this rank's cache holds, of all requests.
        page_size: Of the cache, as the kernels see it.
    """

    max_requests: int
    max_tokens: int
    decode_query_len: int
    max_seq_len: int
    max_cache_tokens: int
    page_size: int


@dataclasses.dataclass(frozen=True)
class Context:
    """What the cache held before a step, for a part that attends that and its own tokens apart.

    Attributes:
        seq_lens: int32 [B], tokens of it in this rank's cache.
        there: False when the host knows that no request has any; the same on all ranks.
        own_table, own_lens: int32 [B, max_query_len] and [B], the step's keys as a cache whose
            pages hold one token. None where a kernel attends them by query_start_loc.
    """

    seq_lens: torch.Tensor
    there: bool
    own_table: torch.Tensor | None = None
    own_lens: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Part:
    """Requests of one step that are attended by one call, decodes or prefills.

    Attributes:
        tokens: Which rows of q are theirs.
        block_table: int32 [B, max_pages].
        seq_lens: int32 [B], tokens in this rank's cache, this step's included.
        global_seq_lens: int32 [B], tokens of the whole requests.
        query_start_loc: int32 [B + 1] from 0, None for one token a request.
        max_query_len: Most query tokens of a request.
        workspaces: LayerShape -> prepared workspace, of the kind that the attention path takes;
            None for prefills, whose rows are work enough.
        flash: Whether FlashAttention attends it.
        max_seq_len: Most tokens of a request in this rank's cache, or more; for FlashAttention.
        context: Where the part attends that apart, in two calls whose results are merged. Default:
            all in one call.
    """

    tokens: slice
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    global_seq_lens: torch.Tensor
    query_start_loc: torch.Tensor | None
    max_query_len: int
    workspaces: dict[LayerShape, DecodeWorkspace | GatherWorkspace] | None
    flash: bool = False
    max_seq_len: int = 0
    context: Context | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """One step's plan, shared by all layers of a KV cache group: vLLM's attention metadata.

    Attributes:
        num_actual_tokens: Query tokens; rows of q past them are padding.
        parts: Decodes, prefills, or both.
    """

    num_actual_tokens: int
    parts: tuple[Part, ...]


class Planner:
    """Makes the Step: splits decodes from prefills and prepares the decode workspaces.

    Args:
        shapes: Of the layers that the plan is for.
        limits: The largest step.
        shard: This rank's share of the tokens.
        device: Where the model runs.
        gather: Decodes gather their pages in this form first. Default: they read them in place.
        flash: Whether prefills go through FlashAttention. Default: through the paged kernel.

    Notes:
        What a captured graph reads keeps its address: the workspaces and seq_lens are made here,
        once. block_table and global_seq_lens are vLLM's own persistent tensors. So a layer makes
        the same call in every step of so many decodes, which the ops then only launch.
    """

    def __init__(
        self,
        shapes: Iterable[LayerShape],
        limits: Limits,
        shard: Shard,
        device: torch.device,
        *,
        gather: str | None = None,
        flash: bool = False,
    ) -> None:
        self.limits, self.shard, self.device = limits, shard, device
        self._published, self._flash = gather == "published", flash
        make = self._decode_workspace
        if gather is not None:
            make = functools.partial(self._gather_workspace, gather=gather)
        most = limits.max_requests
        # (Most requests, its workspaces), ascending: the first that is large enough is used, so
        # that a step of so many requests has the same one in every graph and replay.
        self._workspaces = [
            (requests, {shape: make(shape, requests) for shape in set(shapes)})
            for requests in (*(size for size in WORKSPACE_REQUESTS if size < most), most)
        ]
        if gather is not None:
            self._share_gathered()
        # (Tokens of this rank, tokens before the step, the step's own), of each request.
        self._local, self._before, self._own_lens = torch.zeros(
            3, most, dtype=torch.int32, device=device
        )
        own_table = (most, limits.decode_query_len) if self._published else (0, 0)
        self._own_table = torch.zeros(own_table, dtype=torch.int32, device=device)

    def _decode_workspace(self, shape: LayerShape, requests: int) -> DecodeWorkspace:
        return DecodeWorkspace(
            requests,
            shape.num_q_heads * self.shard.size,
            shape.num_kv_heads,
            shape.head_dim,
            max_query_len=self.limits.decode_query_len,
            kv_dtype=torch.float32 if shape.q_dtype == torch.float32 else shape.kv_dtype,
            max_seq_len=-(-self.limits.max_seq_len // self.shard.size),
            device=self.device,
        )

    def _gather_workspace(self, shape: LayerShape, requests: int, gather: str) -> GatherWorkspace:
        # The ranks' shares differ by less than one turn of the dealing.
        longest = self.limits.max_seq_len // self.shard.size + self.shard.interleave_size
        return GatherWorkspace(
            requests,
            min(requests * longest, self.limits.max_cache_tokens),
            shape.num_kv_heads,
            shape.head_dim,
            self.limits.page_size,
            dtype=shape.q_dtype,
            gather=gather,
            device=self.device,
        )

    def _share_gathered(self) -> None:
        """Let a shape's workspaces gather into the largest one's K and V: a step uses only one."""
        *smaller, (_, largest) = self._workspaces
        for _, workspaces in smaller:
            for shape, workspace in workspaces.items():
                rows = slice(workspace.max_tokens)
                workspace.k, workspace.v = largest[shape].k[rows], largest[shape].v[rows]

    def _prepare(self, part: Part) -> None:
        for shape, workspace in part.workspaces.items():
            if isinstance(workspace, GatherWorkspace):
                lens = part.seq_lens if part.context is None else part.context.seq_lens
                workspace.prepare(lens, max_pages=part.block_table.shape[1])
                continue
            workspace.prepare(
                part.seq_lens,
                global_seq_lens=part.global_seq_lens,
                query_start_loc=part.query_start_loc,
                sliding_window=shape.sliding_window,
                shard=self.shard,
            )

    def _context(self, part: Part, *, there: bool) -> Context:
        """Return the context of a part whose own tokens are attended apart."""
        starts = part.query_start_loc
        if starts is None:
            starts = torch.arange(len(part.seq_lens) + 1, dtype=torch.int32, device=self.device)
        own = starts.diff()
        # A padded request has no token, not even the one that it counts for.
        seq_lens = self.shard.local_seq_lens((part.global_seq_lens - own).clamp(min=0))
        if part.flash:
            return Context(seq_lens, there)
        most = torch.arange(part.max_query_len, dtype=torch.int32, device=self.device)
        return Context(
            _fill(self._before, seq_lens),
            there,
            _fill(self._own_table, starts[:-1, None] + most),
            _fill(self._own_lens, own),
        )

    def plan(
        self,
        *,
        num_tokens: int,
        num_decodes: int,
        num_decode_tokens: int,
        max_query_len: int,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        local_seq_lens: torch.Tensor | None,
        block_table: torch.Tensor,
        max_seq_len: int = 0,
        prefill_context: bool = True,
    ) -> Step:
        """Return the step's plan; decodes are its first requests.

        Args:
            num_tokens: Query tokens of the step.
            num_decodes: Requests with at most decode_query_len query tokens, at the front.
            num_decode_tokens: Query tokens of those.
            max_query_len: Most query tokens of any request.
            query_start_loc: int32 [B + 1] on the device.
            seq_lens: int32 [B], tokens of the whole requests, this step's included.
            local_seq_lens: int32 [B], this rank's tokens. None: counted here, on the device.
            block_table: int32 [B, max_pages].
            max_seq_len: Tokens of the longest whole request, or more; for FlashAttention.
            prefill_context: False when no prefill of the step has tokens from before it.

        Notes:
            Nothing is read on the host. One or two launches a workspace.
        """
        num_requests = seq_lens.shape[0]
        if self.shard.size == 1:
            local = seq_lens
        else:
            local = self._local[:num_requests]
            if local_seq_lens is None:
                local_seq_lens = self.shard.local_seq_lens(seq_lens)
            local.copy_(local_seq_lens)
        parts = []
        if num_decodes:
            uniform = num_decode_tokens == num_decodes
            part = Part(
                tokens=slice(0, num_decode_tokens),
                block_table=block_table[:num_decodes],
                seq_lens=local[:num_decodes],
                global_seq_lens=seq_lens[:num_decodes],
                query_start_loc=None if uniform else query_start_loc[: num_decodes + 1],
                max_query_len=1 if uniform else min(max_query_len, self.limits.decode_query_len),
                workspaces=next(
                    made for requests, made in self._workspaces if num_decodes <= requests
                ),
            )
            if self._published:
                part = dataclasses.replace(part, context=self._context(part, there=True))
            self._prepare(part)
            parts.append(part)
        if num_decodes < num_requests:
            starts = query_start_loc[num_decodes : num_requests + 1]
            cycle = self.shard.size * self.shard.interleave_size
            part = Part(
                tokens=slice(num_decode_tokens, num_tokens),
                block_table=block_table[num_decodes:num_requests],
                seq_lens=local[num_decodes:],
                global_seq_lens=seq_lens[num_decodes:],
                query_start_loc=starts - num_decode_tokens if num_decodes else starts,
                max_query_len=max_query_len,
                workspaces=None,
                flash=self._flash,
                max_seq_len=-(-max_seq_len // cycle) * self.shard.interleave_size,
            )
            if self._flash and self.shard.size > 1:
                # FlashAttention's causal mask knows nothing of tokens that are dealt out.
                context = self._context(part, there=prefill_context)
                part = dataclasses.replace(part, context=context)
            parts.append(part)
        return Step(num_tokens, tuple(parts))


def _fill(buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return value at the start of a buffer, where it lies in every step."""
    return buffer[tuple(map(slice, value.shape))].copy_(value)


class Exchange:
    """The DCP group's query gather and reducer for one shape, shared by all its layers.

    Args:
        group: Process group of the ranks, in shard order.
        reducer: 'ag_rs', 'a2a' or 'direct'.
        shape: Of the layers.
        max_tokens: Most query tokens of a step.
        device: Where the model runs.

    Notes:
        Making one is collective: every rank of the group makes the same ones in the same order.
    """

    def __init__(
        self,
        group: Any,
        reducer: str,
        shape: LayerShape,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        common = {"group": group, "device": device, "head_dim": shape.head_dim}
        self.gather = make_query_gather(
            "direct" if reducer == "direct" else "nccl",
            max_tokens=max_tokens,
            num_q_heads_local=shape.num_q_heads,
            dtype=shape.q_dtype,
            **common,
        )
        num_q_heads = self.gather.size * shape.num_q_heads
        self.reducer = make_reducer(
            reducer,
            max_tokens=min(max_tokens, MAX_REDUCER_TOKENS),
            num_q_heads=num_q_heads,
            dtype=shape.q_dtype,
            **common,
        )
        rows = (max_tokens, num_q_heads)
        self._out = torch.empty(*rows, shape.head_dim, dtype=shape.q_dtype, device=device)
        self._lse = torch.empty(rows, dtype=torch.float32, device=device)
        self._state = AttnState(self._out, self._lse)
        # The first calls connect the ranks and compile, which must not happen inside a capture nor
        # while a request waits. On a CPU nothing is compiled, and large ones take seconds.
        self._out.zero_()
        self._lse.zero_()
        for tokens in sizes_of_each_form(max_tokens if torch.device(device).type == "cuda" else 1):
            q = torch.zeros(
                tokens, shape.num_q_heads, shape.head_dim, dtype=shape.q_dtype, device=device
            )
            self.gather(q)
            self.reduce(self.state(tokens), q)

    def state(self, num_tokens: int) -> AttnState:
        """Return where this rank's attention of all heads goes."""
        if len(self._state.out) != num_tokens:
            self._state = AttnState(self._out[:num_tokens], self._lse[:num_tokens])
        return self._state

    def reduce(
        self, state: AttnState, output: torch.Tensor, lse: torch.Tensor | None = None
    ) -> None:
        """Merge the ranks' states into this rank's heads of output, and of lse where given."""
        most = self.reducer.max_tokens
        if len(output) > most:
            for start in range(0, len(output), most):
                rows = slice(start, start + most)
                piece = AttnState(state.out[rows], state.lse[rows])
                self.reduce(piece, output[rows], None if lse is None else lse[rows])
            return
        merged = self.reducer(state, out=output)
        if lse is not None:
            lse.copy_(merged.lse)

    def memory_bytes(self) -> int:
        """Return the bytes of device memory that gather, reducer and the state hold."""
        own = self._out.nbytes + self._lse.nbytes
        return own + self.gather.memory_bytes() + self.reducer.memory_bytes()

    def check(self) -> None:
        """Raise RuntimeError when a peer was silent ('direct' only). No sync."""
        for part in (self.gather, self.reducer):
            check = getattr(part, "check", None)
            if check is not None:
                check()


def sizes_of_each_form(max_tokens: int) -> list[int]:
    """Return token counts up to max_tokens that between them launch an exchange's every form.

    A form is of payloads up to twice the last one's (ExchangeConfig.from_payload), so that each
    has a power of two of tokens, or starts beyond the last of these.
    """
    return sorted({2**power for power in range(max_tokens.bit_length())} | {max_tokens})


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    step: Step,
    output: torch.Tensor,
    *,
    lse: torch.Tensor,
    shape: LayerShape,
    shard: Shard,
    exchange: Exchange | None,
    softmax_scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    pair: AttnState | None = None,
    flash: Callable[..., Any] | None = None,
) -> None:
    """Attend a step's tokens to the cache, which holds them already, and write output.

    Under DCP: gather the queries of all ranks, attend this rank's tokens with all heads, reduce
    once. Decodes are split over the device by the prepared workspace, or gather their pages first
    where it is one for that; prefills read the pages and are split by their rows.

    Two kinds of parts attend what the cache held before apart from the step's own tokens, and
    merge: the published gather, as study 1 did, and FlashAttention under DCP. Every rank has all
    the step's keys, so these need no exchange; prefills without context need none at all.

    Args:
        q: [T, Hq, D], this rank's heads.
        k_cache, v_cache: Pages [P, page, Hkv, D].
        step: The plan; rows of q and output past its tokens are padding and stay as they are.
        output: [T, Hq, D], written.
        lse: fp32 [max_tokens, Hq], scratch; used without an exchange and by a merge.
        shape: Of this layer; the plan has a workspace for it.
        shard: This rank's share of the tokens.
        exchange: The group's, None where it has one rank.
        softmax_scale, softcap, k_scale, v_scale: As paged_decode.
        sinks: fp32, of the heads of all ranks.
        key, value: [T, Hkv, D], the step's own; for parts that attend them apart.
        pair: Scratch for those, out [2, max_tokens, Hq, D] and lse fp32 [2, max_tokens, Hq].
        flash: flash_attention of dcp_lab.vllm_plugin.versions, where the plan's parts ask for it.
    """
    layer = _Layer(
        k_cache,
        v_cache,
        shape,
        shard,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        flash=flash,
    )
    if once := [part for part in step.parts if part.context is None]:
        # One exchange for all of them.
        first, end = once[0].tokens.start, once[-1].tokens.stop
        rows = slice(first, end)
        if exchange is None:
            heads, state = q[rows], AttnState(output[rows], lse[rows])
        else:
            heads, state = exchange.gather(q[rows]), exchange.state(end - first)
        for part in once:
            if len(once) == 1:
                # A view costs the host a microsecond, in each layer.
                layer.attend(part, heads, state)
                continue
            own = slice(part.tokens.start - first, part.tokens.stop - first)
            layer.attend(part, heads[own], AttnState(state.out[own], state.lse[own]))
        if exchange is not None:
            exchange.reduce(state, output[rows])
    for part in step.parts:
        if part.context is None:
            continue
        rows = part.tokens
        before, own = (
            AttnState(out[: rows.stop - rows.start], part_lse[: rows.stop - rows.start])
            for out, part_lse in zip(*pair, strict=True)
        )
        if not part.context.there:
            alone = AttnState(output[rows], None)
            layer.attend_own(part, q[rows], key[rows], value[rows], alone)
            continue
        if exchange is None:
            layer.attend(part, q[rows], before)
        else:
            state = exchange.state(rows.stop - rows.start)
            layer.attend(part, exchange.gather(q[rows]), state)
            exchange.reduce(state, *before)
        layer.attend_own(part, q[rows], key[rows], value[rows], own)
        count = rows.stop - rows.start
        merge_states(pair.out[:, :count], pair.lse[:, :count], out=output[rows], lse=lse[rows])


class _Layer:
    """What the calls of one layer have in common, see attend."""

    def __init__(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        shape: LayerShape,
        shard: Shard,
        *,
        flash: Callable[..., Any] | None,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        sinks: torch.Tensor | None,
        **options: Any,
    ) -> None:
        self.k_cache, self.v_cache, self.shape, self.shard = k_cache, v_cache, shape, shard
        self.flash, self.scales, self.sinks = flash, (k_scale, v_scale), sinks
        self.options = {**options, "sliding_window": shape.sliding_window}

    def attend(self, part: Part, q: torch.Tensor, state: AttnState) -> None:
        """Attend a part's queries to the cache, or to the part's context alone, into state."""
        context = part.context
        seq_lens = part.seq_lens if context is None else context.seq_lens
        if part.flash:
            self.flash(
                q,
                self.k_cache,
                self.v_cache,
                # Nothing is merged where the whole cache is here.
                state if context is not None else AttnState(state.out, None),
                query_start_loc=part.query_start_loc,
                max_query_len=part.max_query_len,
                seq_lens=seq_lens,
                max_seq_len=part.max_seq_len,
                block_table=part.block_table,
                causal=context is None,
                **self.options,
            )
            return
        op, options = paged_decode, {}
        if part.workspaces is None:
            options["num_splits"] = 1
        else:
            options["workspace"] = workspace = part.workspaces[self.shape]
            if isinstance(workspace, GatherWorkspace):
                op = gather_decode
                options["gather"] = workspace.gather
        k_scale, v_scale = self.scales
        op(
            q,
            self.k_cache,
            self.v_cache,
            part.block_table,
            seq_lens,
            k_scale=k_scale,
            v_scale=v_scale,
            sinks=self.sinks,
            query_start_loc=part.query_start_loc,
            max_query_len=part.max_query_len,
            shard=self.shard,
            global_seq_lens=part.global_seq_lens,
            out=state.out,
            lse=state.lse,
            **self.options,
            **options,
        )

    def attend_own(
        self, part: Part, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, state: AttnState
    ) -> None:
        """Attend a part's queries to the step's own keys, with this rank's heads, into state."""
        if part.flash:
            self.flash(
                q,
                key,
                value,
                state,
                query_start_loc=part.query_start_loc,
                max_query_len=part.max_query_len,
                **self.options,
            )
            return
        context = part.context
        paged_decode(
            q,
            key[:, None],
            value[:, None],
            context.own_table,
            context.own_lens,
            query_start_loc=part.query_start_loc,
            max_query_len=part.max_query_len,
            num_splits=1,
            out=state.out,
            lse=state.lse,
            **self.options,
        )


@functools.cache
def scratch_lse(max_tokens: int, num_q_heads: int, device: torch.device) -> torch.Tensor:
    """Return fp32 [max_tokens, Hq] that all layers of these sizes write and nobody reads."""
    return torch.empty(max_tokens, num_q_heads, dtype=torch.float32, device=device)


@functools.cache
def scratch_pair(
    max_tokens: int, num_q_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> AttnState:
    """Return two states that all layers of these sizes write and merge at once."""
    rows = (2, max_tokens, num_q_heads)
    return AttnState(
        torch.empty(*rows, head_dim, dtype=dtype, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
    )
