"""An N-layer decode step with a model's real work on each rank: the lab's unit of experiment.

One step makes one token for every request. A layer is

    dense piece      norm, q and kv projection; after the attention its output projection and the
                     feed-forward block, each followed by the tensor-parallel all-reduce
    q gather         with DCP: the group's query heads, so that a rank attends its shard with all
    write_kv         the new token's K and V, on the rank that owns its position
    attention path   paged, or a gather of the pages and an attention over contiguous KV
    reducer          with DCP: partial states to this rank's own heads

and every combination of attention path, reducer and graph mode runs on the same weights, the same
cached tokens and the same buffers, so that two corners differ in nothing else. The tokens do not
depend on the corner: all ranks hold equal K and V (a KV head that tensor parallelism replicated),
so without DCP each rank has the whole cache and with DCP its share.

Modes mean what they mean in vLLM. "eager": every kernel is launched from Python. "piecewise": the
dense work between two attentions is one graph, and what lies between (q gather, write_kv,
attention, reducer, merge) is launched eagerly. "full": the whole step is one graph.

The same token is decoded in every step, so a step can be repeated and compared. Left out: rotary
embedding, sampling, the engine's own work on the host.

One process a rank under torchrun or dcp_lab.reducers.local_group.run_ranks; or all ranks in one
process, one after the other (`simulated_step`), without any process group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dcp_lab.graphs import record
from dcp_lab.graphs.watch import watching
from dcp_lab.kernels import INTERPRETED
from dcp_lab.ops.checks import check_positive_int, fail, unsupported
from dcp_lab.ops.decode import BoundDecode, paged_decode
from dcp_lab.ops.gather import GatherWorkspace, gather_decode
from dcp_lab.ops.kv_write import write_kv
from dcp_lab.ops.merge import merge_states
from dcp_lab.ops.mla import mla_paged_decode, write_mla_kv
from dcp_lab.ops.workspace import DecodeWorkspace
from dcp_lab.reducers import make_query_gather, make_reducer
from dcp_lab.reference import reference_attention
from dcp_lab.sharding import Shard
from dcp_lab.state import AttnState

MODES = ("eager", "piecewise", "full")
ATTENTIONS = ("paged", "published", "published_no_sync", "per_token", "per_page")
REDUCERS = ("ag_rs", "a2a", "direct")
DENSE = ("light", "heavy")
PUBLISHED = ("published", "published_no_sync")


@dataclasses.dataclass(frozen=True)
class StackModel:
    """A model as one rank sees it.

    Attributes:
        name: How rows name it.
        num_layers: Layers, those without a KV cache included.
        hidden: Width of the residual stream.
        num_q_heads: Query heads of this rank, before DCP gathers the group's.
        num_kv_heads: KV heads of this rank; 1 for a latent cache.
        head_dim: Of a query and key: kv_lora_rank + rope for a latent cache.
        head_dim_v: Of a value and of one head's output.
        intermediate: This rank's width of the light feed-forward block.
        experts, experts_per_token, expert_intermediate: Of the heavy one, a mixture of experts;
            expert_intermediate is this rank's.
        kv_every: Every kv_every-th layer and the last have a KV cache. Default: 1, all.
        latent: Whether the cache is MLA's latents: q is multiplied by the key up-projection before
            the attention, its result by the value up-projection after it.
        latent_head_dim: Of a latent model's head before and after that: query without rope, and
            value. Default: 128.
        softmax_scale: Default: head_dim ** -0.5.
    """

    name: str
    num_layers: int
    hidden: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    intermediate: int
    experts: int
    experts_per_token: int
    expert_intermediate: int
    kv_every: int = 1
    latent: bool = False
    latent_head_dim: int = 128
    softmax_scale: float | None = None

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Layers with a KV cache."""
        last = self.num_layers - 1
        return tuple(
            layer
            for layer in range(self.num_layers)
            if layer % self.kv_every == self.kv_every - 1 or layer == last
        )

    @property
    def out_dim(self) -> int:
        """Width of a head where the output projection reads it."""
        return self.latent_head_dim if self.latent else self.head_dim_v

    def experts_touched(self, tokens: int) -> int:
        """Return how many experts so many tokens touch, if each picks its own at random."""
        missed = (1 - self.experts_per_token / self.experts) ** tokens
        return max(1, round(self.experts * (1 - missed)))


# 64 query heads, 4 KV heads, 128 experts of 1,536, 8 a token, over TP 8, where each KV head is on
# two ranks. The light block is that of the engine run it is compared with (1,536 over TP 2).
QWEN3_235B = StackModel(
    name="qwen3_235b_tp8",
    num_layers=94,
    hidden=4096,
    num_q_heads=8,
    num_kv_heads=1,
    head_dim=128,
    head_dim_v=128,
    intermediate=768,
    experts=128,
    experts_per_token=8,
    expert_intermediate=192,
)

# 96 heads over TP 8, 24 latent layers of 93. The rest is assumed: hidden size and experts of the
# model before it (384 experts of 2,048, 8 a token), and for the layers without a KV cache a plain
# projection in the place of their linear attention.
KIMI_K3_LIKE = StackModel(
    name="kimi_k3_like_tp8",
    num_layers=93,
    hidden=7168,
    num_q_heads=12,
    num_kv_heads=1,
    head_dim=576,
    head_dim_v=512,
    intermediate=1024,
    experts=384,
    experts_per_token=8,
    expert_intermediate=256,
    kv_every=4,
    latent=True,
    softmax_scale=192**-0.5,
)

MODELS = {model.name: model for model in (QWEN3_235B, KIMI_K3_LIKE)}


@dataclasses.dataclass(frozen=True)
class Corner:
    """One combination of what a step can be made of.

    Attributes:
        mode: "eager", "piecewise" or "full".
        dcp: Whether the group shares each request's KV. Without, each rank attends all of it, and
            there is no reducer: what a gather costs by itself.
        attention: "paged"; "published" (study 1's: host sync, gather, attention over contiguous
            KV, and the new token attended apart and merged after the reducer); "published_no_sync"
            (the same, with the total known to the host); "per_token" and "per_page" (the gathers
            of gather_decode, new token included).
        reducer: "ag_rs", "a2a" or "direct"; None without dcp.
        query_gather: "nccl" or "direct". Default: "direct" with the direct reducer, else "nccl".
        bound: Whether a paged attention is bound to its buffers once (BoundDecode) instead of
            being checked and prepared by each call, as all other operations are.

    Raises:
        ValueError: A value is none of these, or the combination cannot be: a reducer without dcp,
            a host sync in a full graph.
    """

    mode: str
    dcp: bool = True
    attention: str = "paged"
    reducer: str | None = "ag_rs"
    query_gather: str | None = None
    bound: bool = False

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, MODES)
        _one_of("attention", self.attention, ATTENTIONS)
        if self.dcp:
            _one_of("reducer", self.reducer, REDUCERS)
            if self.query_gather is None:
                gather = "direct" if self.reducer == "direct" else "nccl"
                object.__setattr__(self, "query_gather", gather)
            _one_of("query_gather", self.query_gather, ("nccl", "direct"))
        else:
            for name in ("reducer", "query_gather"):
                if getattr(self, name) is not None:
                    fail(name, "None without dcp", getattr(self, name))
        if self.bound and self.attention != "paged":
            fail("bound", "False unless attention is 'paged'", self.bound)
        if self.mode == "full" and self.attention == "published":
            fail(
                "mode",
                "'eager' or 'piecewise' with the published gather, whose host sync no graph can "
                "hold ('published_no_sync' is the same without it)",
                self.mode,
            )

    @classmethod
    def no_dcp(cls, mode: str, *, attention: str = "paged", bound: bool = False) -> Corner:
        """Return the corner without DCP."""
        return cls(mode, dcp=False, attention=attention, reducer=None, bound=bound)

    def __str__(self) -> str:
        bound = ", bound" if self.bound else ""
        if not self.dcp:
            attention = "" if self.attention == "paged" else f"{self.attention}, "
            return f"no DCP, {attention}{self.mode}{bound}"
        usual = "direct" if self.reducer == "direct" else "nccl"
        gather = "" if self.query_gather == usual else f", q by {self.query_gather}"
        return f"{self.attention} + {self.reducer}, {self.mode}{gather}{bound}"


def _one_of(argument: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        fail(argument, " or ".join(map(repr, allowed)), value)


@dataclasses.dataclass(frozen=True)
class Pages:
    """The cached tokens of all KV layers as one rank holds them, paged.

    Unused slots, the new token's until it is written too, are NaN. Every entry of
    block_table is a page of the cache: the requests are equally long.

    Attributes:
        k, v: One cache a KV layer; of a latent cache both are the same tensor.
        block_table, seq_lens: As of paged_decode, the new token counted.
        cached_lens: int32 [B], without the new token.
        slot_mapping: int64 [B], the new token's slot; -1 where another rank owns it.
        cached_tokens, tokens: Sums of cached_lens and seq_lens, known to the host.
    """

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cached_lens: torch.Tensor
    slot_mapping: torch.Tensor
    cached_tokens: int
    tokens: int


class Stack:
    """A model's weights and buffers on one rank, and the steps that can be made of them.

    Args:
        model: What a rank computes.
        requests: T = B, one token each.
        dense: "light" (a small dense feed-forward block) or "heavy" (experts: the weights of those
            that so many tokens touch are read each layer). Default: "light".
        num_layers: Default: the model's.
        rank, size: Place in the group. Default: of the default process group; 0 of 1 without one.
        group: Process group of the exchange; None is the default one.
        tp_group: Of the all-reduce in the dense pieces, as servers give each its own communicator.
            Default: group.
        dtype: Of everything. Default: bf16.
        page_size: Default: 16.
        expert_sets: Distinct sets of experts, used in turn by the layers, so that they fit and are
            still read from memory. Default: 8.
        device: Default: the current GPU, the CPU under the interpreter.
        simulated: The group is in this process, see simulated_step: no collective is made.
        without_peer: A group of one makes the corners with DCP too, and every collective, by the
            backend's own calls. The host does what it does beside a peer; the GPU attends all
            tokens with one rank's heads, and nothing arrives from elsewhere. For traces on one
            GPU: no time of it is a time of DCP.

    Notes:
        Weights and tokens are random, the same in every process but for the rank's own part.
    """

    def __init__(
        self,
        model: StackModel,
        requests: int,
        *,
        dense: str = "light",
        num_layers: int | None = None,
        rank: int | None = None,
        size: int | None = None,
        group: dist.ProcessGroup | None = None,
        tp_group: dist.ProcessGroup | None = None,
        dtype: torch.dtype = torch.bfloat16,
        page_size: int = 16,
        expert_sets: int = 8,
        device: torch.device | str | None = None,
        simulated: bool = False,
        without_peer: bool = False,
    ) -> None:
        check_positive_int("requests", requests)
        _one_of("dense", dense, DENSE)
        if num_layers is not None:
            model = dataclasses.replace(
                model, num_layers=check_positive_int("num_layers", num_layers)
            )
        grouped = dist.is_available() and dist.is_initialized() and not simulated
        self.model, self.requests, self.dense = model, requests, dense
        self.rank = rank if rank is not None else dist.get_rank(group) if grouped else 0
        self.size = size if size is not None else dist.get_world_size(group) if grouped else 1
        if self.size > 1 and not grouped and not simulated:
            fail("size", "1 without a process group, or simulated=True", self.size)
        if without_peer and not (grouped and self.size == 1):
            fail("without_peer", "False unless in a process group of one", without_peer)
        self.group, self.simulated, self.without_peer = group, simulated, without_peer
        self._shared = self.size > 1 or without_peer
        self.tp_group = group if tp_group is None else tp_group
        self.dtype, self.page_size = dtype, check_positive_int("page_size", page_size)
        if device is None:
            device = "cpu" if INTERPRETED else torch.device("cuda", torch.cuda.current_device())
        self.device = torch.device(device)
        self.expert_sets = check_positive_int("expert_sets", expert_sets)
        self._make_weights()
        self._make_buffers()
        self.context: int | None = None
        self._parts: dict[object, object] = {}
        self._sections: list[Callable[[], object]] | None = None
        self._stream: torch.cuda.Stream | None = None

    # ---- what a rank has -------------------------------------------------------------------

    def _random(self, *key: int) -> torch.Generator:
        seed = functools.reduce(lambda so_far, part: so_far * 1009 + part + 1, key, 7)
        return torch.Generator(self.device).manual_seed(seed % 2**62)

    def _weight(self, rows: int, columns: int, *key: int, many: int = 0) -> torch.Tensor:
        """Return [rows, columns], or that many of it, which keeps a unit variance."""
        shape = (many, rows, columns) if many else (rows, columns)
        weight = torch.randn(
            shape, generator=self._random(*key), dtype=self.dtype, device=self.device
        )
        return weight.mul_(columns**-0.5)

    def _make_weights(self) -> None:
        m, mine = self.model, self.rank + 1
        heads, width = m.num_q_heads, m.hidden
        rope = m.head_dim - m.head_dim_v
        q_dim = m.latent_head_dim + rope if m.latent else m.head_dim
        kv_width = m.head_dim if m.latent else m.num_kv_heads * (m.head_dim + m.head_dim_v)
        self._w: list[dict[str, torch.Tensor]] = []
        kv_layers = set(m.kv_layers)
        for layer in range(m.num_layers):
            w = {"out": self._weight(width, heads * m.out_dim, 1, layer, mine)}
            if layer in kv_layers:
                w["q"] = self._weight(heads * q_dim, width, 2, layer, mine)
                # All ranks make the same K and V.
                w["kv"] = self._weight(kv_width, width, 3, layer)
            else:
                w["mix"] = self._weight(heads * m.out_dim, width, 2, layer, mine)
            if m.latent and layer in kv_layers:
                shape = (m.head_dim_v, m.latent_head_dim)
                w["k_up"] = self._weight(*shape, 10, layer, mine, many=heads)
                w["v_up"] = self._weight(*shape[::-1], 11, layer, mine, many=heads)
            if self.dense == "light":
                w["up"] = self._weight(2 * m.intermediate, width, 4, layer, mine)
                w["down"] = self._weight(width, m.intermediate, 5, layer, mine)
            self._w.append(w)
        if self.dense == "heavy":
            self._make_experts()

    def _make_experts(self) -> None:
        """Deal the tokens' picks out to the touched experts in turn: the same for every layer.

        A real router picks by value; then a rounding could change what is computed, and two
        corners could not be compared.
        """
        m, mine = self.model, self.rank + 1
        touched = m.experts_touched(self.requests)
        picks = self.requests * m.experts_per_token
        per_expert = -(-picks // touched)
        pick = torch.arange(picks, device=self.device)
        slot = pick % touched * per_expert + pick // touched
        self._slot_of_pick = slot
        self._token_of_slot = torch.zeros(
            touched * per_expert, dtype=torch.int64, device=self.device
        ).index_put_((slot,), pick // m.experts_per_token)
        self._experts = [
            (
                self._weight(2 * m.expert_intermediate, m.hidden, 6, i, mine, many=touched),
                self._weight(m.hidden, m.expert_intermediate, 7, i, mine, many=touched),
            )
            for i in range(min(self.expert_sets, m.num_layers))
        ]

    def weight_bytes(self) -> int:
        """Return the bytes of weights that a step reads."""
        every = sum(w.nbytes for layer in self._w for w in layer.values())
        if self.dense == "heavy":
            sets = [sum(w.nbytes for w in experts) for experts in self._experts]
            every += sum(sets[layer % len(sets)] for layer in range(self.model.num_layers))
        return every

    def _make_buffers(self) -> None:
        m, rows = self.model, self.requests
        empty = functools.partial(torch.empty, dtype=self.dtype, device=self.device)
        self.x0 = torch.randn(
            rows, m.hidden, generator=self._random(0), dtype=self.dtype, device=self.device
        )
        # What lies between two pieces stays where it is: the graphs of all corners share it.
        self.x = torch.zeros_like(self.x0)
        self.q = empty(rows, m.num_q_heads, m.head_dim)
        width = m.head_dim if m.latent else m.num_kv_heads * (m.head_dim + m.head_dim_v)
        self._kv = empty(rows, width)
        self.key, self.value = self._split_kv(self._kv)
        # [1] is the new token's state where it is attended apart, [0] the rest's.
        self._pair = AttnState(
            empty(2, rows, m.num_q_heads, m.head_dim_v),
            torch.empty(2, rows, m.num_q_heads, dtype=torch.float32, device=self.device),
        )
        self.attn = AttnState(
            empty(rows, m.num_q_heads, m.head_dim_v),
            torch.empty(rows, m.num_q_heads, dtype=torch.float32, device=self.device),
        )
        self._own_table = torch.arange(rows, dtype=torch.int32, device=self.device)[:, None]
        self._ones = torch.ones(rows, dtype=torch.int32, device=self.device)

    def _split_kv(self, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        m, rows = self.model, kv.shape[0]
        if m.latent:
            latent = kv.view(rows, 1, m.head_dim)
            return latent, latent[..., : m.head_dim_v]
        key, value = kv.split([m.num_kv_heads * m.head_dim, m.num_kv_heads * m.head_dim_v], 1)
        return key.unflatten(1, (m.num_kv_heads, -1)), value.unflatten(1, (m.num_kv_heads, -1))

    # ---- the cached tokens -----------------------------------------------------------------

    def tokens(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V [B, context - 1, Hkv, D] that are cached in the index-th KV layer."""
        m = self.model
        shape = (self.requests, self.context - 1, m.num_kv_heads)
        random = self._random(8, index)
        options = {"generator": random, "dtype": self.dtype, "device": self.device}
        key = torch.randn(*shape, m.head_dim, **options)
        if m.latent:
            return key, key[..., : m.head_dim_v]
        return key, torch.randn(*shape, m.head_dim_v, **options)

    def load(self, context: int) -> None:
        """Fill the caches with context - 1 tokens a request; the step adds one to each.

        Steps that were made before are spent: their caches are gone.
        """
        self.context = check_positive_int("context", context)
        for part in list(self._parts):
            if part[0] in ("decode", "gather", "bound"):
                del self._parts[part]
        self.pages: dict[bool, Pages] = {}
        layouts = {False: self._lay_out(Shard(0, 1))}
        if self._shared:
            layouts[True] = self._lay_out(Shard(self.rank, self.size))
        for index in range(len(self.model.kv_layers)):
            key, value = self.tokens(index)
            for dcp, (pages, slots, held) in layouts.items():
                shapes = (pages.k, key), (pages.v, value)
                for caches, tokens in shapes[:1] if self.model.latent else shapes:
                    cache = torch.full(
                        (pages.block_table.numel() + 1, self.page_size, *tokens.shape[2:]),
                        torch.nan,
                        dtype=self.dtype,
                        device=self.device,
                    )
                    cache.flatten(0, 1)[slots.flatten()] = tokens[:, held].flatten(0, 1)
                    caches.append(cache.squeeze(2) if self.model.latent else cache)
                self.pages[dcp] = pages

    def _lay_out(self, shard: Shard) -> tuple[Pages, torch.Tensor, torch.Tensor]:
        """Return empty pages, the slots [B, n] of the cached tokens, and their positions [n]."""
        rows, page, device = self.requests, self.page_size, self.device
        positions = torch.arange(self.context, device=device)
        owned = shard.owner(positions) == shard.rank
        held = positions[owned & (positions < self.context - 1)]
        total, cached = int(owned.sum()), len(held)
        used = max(1, -(-total // page))
        order = torch.randperm(rows * used, generator=self._random(9), device=device)
        block_table = order.int().view(rows, used)
        i = torch.arange(total, device=device)
        slots = block_table[:, i // page].long() * page + i % page
        newest = slots[:, -1] if total > cached else torch.full((rows,), -1, device=device)
        lens = torch.full((rows,), self.context, dtype=torch.int32, device=device)
        pages = Pages(
            k=[],
            v=[],
            block_table=block_table,
            seq_lens=shard.local_seq_lens(lens),
            cached_lens=shard.local_seq_lens(lens - 1),
            slot_mapping=newest.contiguous(),
            cached_tokens=rows * cached,
            tokens=rows * total,
        )
        return pages, slots[:, :cached], held

    # ---- the dense work --------------------------------------------------------------------

    def _all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        if self._shared and not self.simulated:
            dist.all_reduce(partial, group=self.tp_group)
        return partial

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.model.hidden,), eps=1e-6)

    def _linear(self, layer: int, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._w[layer][name].to(x.dtype))

    def _project(self, layer: int) -> None:
        """Write q and the new token's K and V."""
        hidden = self._norm(self.x)
        w = self._w[layer]
        torch.mm(hidden, w["kv"].t(), out=self._kv)
        if self.model.latent:
            self.q.copy_(self._query(layer, hidden))
        else:
            torch.mm(hidden, w["q"].t(), out=self.q.view(self.requests, -1))

    def _query(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return q [T, Hq, D] as the attention takes it."""
        m = self.model
        q = self._linear(layer, "q", hidden).unflatten(1, (m.num_q_heads, -1))
        if not m.latent:
            return q
        plain, rope = q.split([m.latent_head_dim, m.head_dim - m.head_dim_v], -1)
        k_up = self._w[layer]["k_up"].to(q.dtype)
        absorbed = torch.bmm(plain.transpose(0, 1), k_up.transpose(1, 2)).transpose(0, 1)
        return torch.cat([absorbed, rope], -1)

    def _mix(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a layer without a KV cache, in the attention's place."""
        return self._linear(layer, "out", F.silu(self._linear(layer, "mix", self._norm(x))))

    def _output(self, layer: int, out: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the output projection."""
        if self.model.latent:
            v_up = self._w[layer]["v_up"].to(out.dtype)
            out = torch.bmm(out.transpose(0, 1), v_up.transpose(1, 2)).transpose(0, 1)
        return self._linear(layer, "out", out.flatten(1))

    def _feed_forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the feed-forward block."""
        hidden = self._norm(x)
        if self.dense == "light":
            gate, up = self._linear(layer, "up", hidden).chunk(2, -1)
            return self._linear(layer, "down", F.silu(gate) * up)
        up_weight, down_weight = (w.to(x.dtype) for w in self._experts[layer % len(self._experts)])
        touched = len(up_weight)
        rows = hidden[self._token_of_slot].unflatten(0, (touched, -1))
        gate, up = torch.bmm(rows, up_weight.transpose(1, 2)).chunk(2, -1)
        results = torch.bmm(F.silu(gate) * up, down_weight.transpose(1, 2)).flatten(0, 1)
        return results[self._slot_of_pick].unflatten(0, (len(x), -1)).mean(1)

    def _close(self, layer: int) -> None:
        """Add the attention's output and the feed-forward block to the residual stream."""
        self.x += self._all_reduce(self._output(layer, self.attn.out))
        self.x += self._all_reduce(self._feed_forward(layer, self.x))

    def _section(self, index: int) -> None:
        """Do the dense work before the index-th attention; behind the last there is one more."""
        layers = self.model.kv_layers
        begin = 0
        if index == 0:
            self.x.copy_(self.x0)
        else:
            begin = layers[index - 1] + 1
            self._close(begin - 1)
        end = layers[index] if index < len(layers) else self.model.num_layers
        for layer in range(begin, end):
            self.x += self._all_reduce(self._mix(layer, self.x))
            self.x += self._all_reduce(self._feed_forward(layer, self.x))
        if index < len(layers):
            self._project(end)

    # ---- the attention ---------------------------------------------------------------------

    def _part(self, *key: object, make: Callable[[], object]) -> object:
        """Return what is made once and shared by the corners that need it."""
        if key not in self._parts:
            self._parts[key] = make()
        return self._parts[key]

    def _attention(self, corner: Corner) -> tuple[Callable[[], None], Callable[[int], None]]:
        """Return (prepare, attend): once a step, and once a KV layer; attend writes self.attn."""
        if corner.dcp and not self._shared:
            fail("corner", "one without DCP in a group of 1", str(corner))
        if self.context is None:
            raise RuntimeError("step: no cached tokens yet; call load(context) first")
        if self.model.latent and corner.attention != "paged":
            unsupported("attention", corner.attention, "a latent cache is attended 'paged'")
        prepare, attend = self._local_attention(corner)
        published = corner.attention in PUBLISHED
        if not corner.dcp and not published:
            return prepare, lambda index: attend(index, self.q)
        if not corner.dcp:

            def attend_alone(index: int) -> None:
                attend(index, self.q)
                self._merge_new_token()

            return prepare, attend_alone
        m = self.model
        common = {
            "group": self.group,
            "max_tokens": self.requests,
            "dtype": self.dtype,
            "device": self.device,
        }
        gather = self._part(
            "q",
            corner.query_gather,
            make=lambda: make_query_gather(
                corner.query_gather,
                num_q_heads_local=m.num_q_heads,
                head_dim=m.head_dim,
                **common,
            ),
        )
        reducer = self._part(
            "reducer",
            corner.reducer,
            published,
            make=lambda: make_reducer(
                corner.reducer,
                num_q_heads=m.num_q_heads * self.size,
                head_dim=m.head_dim_v,
                **common,
            ),
        )
        if self.without_peer:
            gather.exchange_alone()
            reducer.exchange_alone()
        # Straight to where the next piece, or the merge, reads it.
        reducer.write_to(*(AttnState(*(p[0] for p in self._pair)) if published else self.attn))
        if not published:
            return prepare, lambda index: reducer(attend(index, gather(self.q)))

        def attend_published(index: int) -> None:
            reducer(attend(index, gather(self.q)))
            self._merge_new_token()

        return prepare, attend_published

    def _merge_new_token(self) -> None:
        """Attend this step's own token alone, a cache of one token a page, and merge it in."""
        paged_decode(
            self.q,
            self.key[:, None],
            self.value[:, None],
            self._own_table,
            self._ones,
            softmax_scale=self.model.softmax_scale,
            num_splits=1,
            out=self._pair.out[1],
            lse=self._pair.lse[1],
        )
        merge_states(*self._pair, out=self.attn.out, lse=self.attn.lse)

    def _local_attention(
        self, corner: Corner
    ) -> tuple[Callable[[], None], Callable[[int, torch.Tensor], AttnState]]:
        """Return (prepare, attend(index, q)): write the new token, attend what this rank holds."""
        m, pages = self.model, self.pages[corner.dcp]
        heads = m.num_q_heads * (self.size if corner.dcp else 1)
        published = corner.attention in PUBLISHED
        state = self.attn
        if corner.dcp:
            state = self._part("state", make=lambda: self._new_state(heads))
        elif published:
            state = AttnState(*(part[0] for part in self._pair))

        def write(index: int) -> None:
            if m.latent:
                write_mla_kv(self.key[:, 0], pages.k[index], pages.slot_mapping)
            else:
                write_kv(self.key, self.value, pages.k[index], pages.v[index], pages.slot_mapping)

        if corner.attention == "paged":
            return self._paged(corner, write, state, heads)
        lens = pages.cached_lens if published else pages.seq_lens
        gather = "published" if published else corner.attention
        # Study 1's path waits in every layer to learn on the host how much there is to gather.
        known = {"total_tokens": pages.cached_tokens} if gather != corner.attention else {}
        workspace = self._part(
            "gather",
            corner.dcp,
            gather,
            published,
            make=lambda: GatherWorkspace(
                self.requests,
                pages.cached_tokens if published else pages.tokens,
                m.num_kv_heads,
                m.head_dim,
                self.page_size,
                head_dim_v=m.head_dim_v,
                dtype=self.dtype,
                gather=gather,
                device=self.device,
            ),
        )

        def attend_gathered(index: int, q: torch.Tensor) -> AttnState:
            write(index)
            return gather_decode(
                q,
                pages.k[index],
                pages.v[index],
                pages.block_table,
                lens,
                softmax_scale=m.softmax_scale,
                gather=gather,
                **known,
                workspace=workspace,
                out=state.out,
                lse=state.lse,
            )

        width = pages.block_table.shape[1]
        return (lambda: workspace.prepare(lens, max_pages=width)), attend_gathered

    def _paged(
        self, corner: Corner, write: Callable[[int], None], state: AttnState, heads: int
    ) -> tuple[Callable[[], None], Callable[[int, torch.Tensor], AttnState]]:
        m, pages = self.model, self.pages[corner.dcp]
        workspace = self._part(
            "decode",
            corner.dcp,
            make=lambda: DecodeWorkspace(
                self.requests,
                heads,
                m.num_kv_heads,
                m.head_dim,
                head_dim_v=m.head_dim_v,
                kv_dtype=self.dtype,
                max_seq_len=max(1, pages.tokens // self.requests),
                device=self.device,
            ),
        )
        options = {
            "softmax_scale": m.softmax_scale,
            "workspace": workspace,
            "out": state.out,
            "lse": state.lse,
        }

        def prepare() -> None:
            workspace.prepare(pages.seq_lens)

        def attend(index: int, q: torch.Tensor) -> AttnState:
            write(index)
            table = (pages.block_table, pages.seq_lens)
            if m.latent:
                return mla_paged_decode(
                    q, pages.k[index], *table, kv_lora_rank=m.head_dim_v, **options
                )
            return paged_decode(q, pages.k[index], pages.v[index], *table, **options)

        if not corner.bound:
            return prepare, attend
        if m.latent:
            unsupported("bound", True, "a latent cache is attended by mla_paged_decode")
        prepare()
        bound: dict[int, BoundDecode] = self._part("bound", corner, make=dict)

        def attend_bound(index: int, q: torch.Tensor) -> AttnState:
            write(index)
            if index not in bound:
                bound[index] = BoundDecode(
                    q,
                    pages.k[index],
                    pages.v[index],
                    pages.block_table,
                    pages.seq_lens,
                    **options,
                )
            return bound[index]()

        return prepare, attend_bound

    def _new_state(self, heads: int) -> AttnState:
        rows, m = self.requests, self.model
        return AttnState(
            torch.empty(rows, heads, m.head_dim_v, dtype=self.dtype, device=self.device),
            torch.empty(rows, heads, dtype=torch.float32, device=self.device),
        )

    # ---- steps -----------------------------------------------------------------------------

    def step(self, corner: Corner) -> Step:
        """Return a step of this corner, warmed up, its graphs captured.

        Collective: all ranks make the same steps in the same order. A step leaves the residual
        stream in x and the last layer's attention in attn.

        Raises:
            ValueError, NotImplementedError: The corner cannot be made here.
            RuntimeError: load was not called.
        """
        prepare, attend = self._attention(corner)
        count = len(self.model.kv_layers)
        sections = [functools.partial(self._section, index) for index in range(count + 1)]
        eager = Step(corner, prepare, attend, sections)
        # Twice: a graph must find every kernel compiled and every buffer made, and on its stream.
        with self._capture_stream():
            eager()
            if corner.mode != "eager":
                eager()
        if corner.mode == "eager":
            return eager
        if corner.mode == "full":
            (graph,) = self._captured([eager])
            return Step(corner, lambda: None, None, [graph], full=True)
        if self._sections is None:
            self._sections = self._captured(sections)
        return Step(corner, prepare, attend, self._sections)

    @contextlib.contextmanager
    def _capture_stream(self) -> Iterator[None]:
        if self.device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def _captured(self, calls: Sequence[Callable[[], object]]) -> list[Callable[[], object]]:
        """Return what replays each call: a graph, on the CPU a recording.

        Not graphs.capture, which watches the step and collects garbage for each graph: 95 of them
        would take longer than the measurement. The graphs of a step share a pool: they run one
        after the other, and nothing but the stack's own buffers lives from one to the next. The
        next step gets its own: torch refuses a pool whose graphs are all gone.
        """
        if self.device.type != "cuda":
            return [record(call, warmup=0, device=self.device).replay for call in calls]
        gc.collect()
        torch.cuda.synchronize()
        found, pool = [], torch.cuda.graph_pool_handle()
        with self._capture_stream():
            for call in calls:
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    call()
                except BaseException:
                    # The stream must not stay in capture; what ends it may fail too, and says
                    # less than the first error.
                    with contextlib.suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
                found.append(graph.replay)
        torch.cuda.synchronize()
        return found

    def count_calls(self, corner: Corner) -> dict[str, int]:
        """Return what the host calls in a step of this corner, by kind.

        Counted by watching one eager step, so it needs no GPU: torch operations, Triton launches,
        collectives, each of which is a launch on a GPU, and waits for the device.

        Returns:
            "pieces": calls inside the dense pieces. "between": all other calls; of them
            "collectives" and "host_syncs". "graphs": graphs that the corner's mode launches.
            "launches": what the host launches in that mode.
        """
        prepare, attend = self._attention(corner)
        count = len(self.model.kv_layers)
        kind = self.device.type
        prepare()
        with watching(kind) as pieces:
            for index in range(count + 1):
                self._section(index)
        attend(0)
        with watching(kind) as between:
            prepare()
            for index in range(count):
                attend(index)
        names = [call.name for call in between.calls]
        if self.device.type == "cpu":
            # gloo's reduce-scatter ends with a copy of its own.
            pairs = zip(names, names[1:], strict=False)
            extra = sum("reduce_scatter" in one and "copy_" in two for one, two in pairs)
        else:
            extra = 0
        found = {
            "pieces": len(pieces.calls),
            "between": len(names) - extra,
            "collectives": sum(name.startswith("c10d") for name in names),
            "host_syncs": len(between.syncs),
            "graphs": {"eager": 0, "piecewise": count + 1, "full": 1}[corner.mode],
        }
        launched = {
            "eager": found["pieces"] + found["between"],
            "piecewise": found["graphs"] + found["between"],
            "full": 1,
        }
        return found | {"launches": launched[corner.mode]}

    # ---- what it should give ---------------------------------------------------------------

    def reference(self, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, AttnState]:
        """Return the residual stream after a step, and the last attention, in plain torch.

        No page, no shard, no graph: every rank attends its own heads over whole requests. In
        float64 by the oracle; in the stack's dtype it is the yardstick for rounding.

        Args:
            dtype: To compute in. Default: float64.

        Returns:
            (x [T, hidden], AttnState of this rank's heads), both in dtype (lse fp32 or float64).
        """
        m, index = self.model, 0
        x = self.x0.to(dtype)
        state = None
        kv_layers = set(m.kv_layers)
        for layer in range(m.num_layers):
            if layer in kv_layers:
                hidden = self._norm(x)
                q = self._query(layer, hidden)
                new_key, new_value = self._split_kv(self._linear(layer, "kv", hidden))
                state = self._reference_attention(index, q, new_key, new_value)
                x = x + self._all_reduce(self._output(layer, state.out))
                index += 1
            else:
                x = x + self._all_reduce(self._mix(layer, x))
            x = x + self._all_reduce(self._feed_forward(layer, x))
        return x, state

    def last_attention(self, dtype: torch.dtype = torch.float64) -> AttnState:
        """Return what the last KV layer's attention should be, given the q, K and V of this step.

        Args:
            dtype: To compute in. Default: float64, by the oracle.
        """
        index = len(self.model.kv_layers) - 1
        parts = (part.to(dtype) for part in (self.q, self.key, self.value))
        return self._reference_attention(index, *parts)

    def _reference_attention(
        self, index: int, q: torch.Tensor, new_key: torch.Tensor, new_value: torch.Tensor
    ) -> AttnState:
        keys, values = (tokens.to(q.dtype) for tokens in self.tokens(index))
        scale = self.model.softmax_scale
        states = []
        for b in range(self.requests):
            k = torch.cat([keys[b], new_key[b : b + 1]])
            v = torch.cat([values[b], new_value[b : b + 1]])
            attend = reference_attention if q.dtype == torch.float64 else _plain_attention
            states.append(attend(q[b : b + 1], k, v, softmax_scale=scale))
        return AttnState(*(torch.cat(parts) for parts in zip(*states, strict=True)))


def _plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float | None
) -> AttnState:
    """Attend one row to all keys, products in q's dtype, softmax in fp32."""
    group = q.shape[1] // k.shape[1]
    k, v = (tokens.repeat_interleave(group, 1).transpose(0, 1) for tokens in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = (q.transpose(0, 1) @ k.transpose(1, 2)).float() * scale
    out = scores.softmax(-1).to(q.dtype) @ v
    return AttnState(out.transpose(0, 1), scores.logsumexp(-1).transpose(0, 1))


class Step:
    """One decode step; call it to run it.

    Attributes:
        corner: What it is made of.
        launch_delay_us: Host time added for every launch, to stand for a slower host. Only with
            graphs: an eager dense piece is launched by torch itself. Default: 0.
        launches_per_layer: Launches between two pieces, as counted; needed with launch_delay_us.
    """

    def __init__(
        self,
        corner: Corner,
        prepare: Callable[[], object],
        attend: Callable[[int], object] | None,
        sections: Sequence[Callable[[], object]],
        *,
        full: bool = False,
    ) -> None:
        self.corner = corner
        self._prepare, self._attend, self._sections = prepare, attend, sections
        self._full = full
        self.launch_delay_us = 0.0
        self.launches_per_layer = 0.0

    @property
    def added_launches(self) -> float:
        """Return how many launches of a step wait launch_delay_us each."""
        graphs = len(self._sections)
        return graphs if self._full else graphs + (graphs - 1) * self.launches_per_layer

    def __call__(self) -> None:
        delay = self.launch_delay_us
        self._prepare()
        for index, section in enumerate(self._sections):
            if index:
                if delay:
                    _keep_host_busy(delay * self.launches_per_layer)
                self._attend(index - 1)
            if delay:
                _keep_host_busy(delay)
            section()


def _keep_host_busy(us: float) -> None:
    end = time.perf_counter_ns() + int(us * 1e3)
    while time.perf_counter_ns() < end:
        pass


def simulated_step(stacks: Sequence[Stack], attention: str = "paged") -> None:
    """Run one eager DCP step of all ranks of a group in this process, layer by layer.

    The group's exchanges are tensor operations: heads are put side by side, partial sums added,
    states merged by merge_states. For tests and for reading: no time of it means anything.

    Args:
        stacks: Rank 0, 1, ... of the group, each made with simulated=True and loaded.
        attention: As of Corner; not the published ones, whose merge is another.
    """
    corner = Corner("eager", attention=attention, reducer="ag_rs")
    if attention in PUBLISHED:
        fail("attention", "'paged', 'per_token' or 'per_page'", attention)
    local = [stack._local_attention(corner) for stack in stacks]
    # Each rank its own: _part would give the same to none.
    for stack, (prepare, _) in zip(stacks, local, strict=True):
        stack.x.copy_(stack.x0)
        prepare()
    index = 0
    model = stacks[0].model
    kv_layers = set(model.kv_layers)

    def add(parts: list[torch.Tensor]) -> None:
        total = torch.stack(parts).sum(0)
        for stack in stacks:
            stack.x += total

    for layer in range(model.num_layers):
        if layer in kv_layers:
            for stack in stacks:
                stack._project(layer)
            q = torch.cat([stack.q for stack in stacks], 1)
            states = [AttnState(*(p.clone() for p in attend(index, q))) for _, attend in local]
            outs, lses = (torch.stack(parts) for parts in zip(*states, strict=True))
            merged = merge_states(outs, lses)
            for rank, stack in enumerate(stacks):
                own = slice(rank * model.num_q_heads, (rank + 1) * model.num_q_heads)
                stack.attn.out.copy_(merged.out[:, own])
                stack.attn.lse.copy_(merged.lse[:, own])
            add([stack._output(layer, stack.attn.out) for stack in stacks])
            index += 1
        else:
            add([stack._mix(layer, stack.x) for stack in stacks])
        add([stack._feed_forward(layer, stack.x) for stack in stacks])


# A model with the calls of the real one and next to no arithmetic.
COUNTED = dataclasses.replace(
    QWEN3_235B,
    name="counted",
    num_layers=2,
    hidden=32,
    num_q_heads=1,
    head_dim=16,
    head_dim_v=16,
    intermediate=16,
)


def count_on_rank(
    rank: int, size: int, corners: Sequence[Corner], layers: int, **options: object
) -> list[dict[str, int]]:
    """Return count_calls of each corner for a step of so many layers, as one rank.

    Two small models are counted, of one layer and of two; the difference is a layer. For
    dcp_lab.reducers.local_group.run_ranks.

    Args:
        rank, size: Of the group.
        corners: What to count; not the direct reducer on a CPU.
        layers: Of the step.
        options: More arguments of Stack.
    """
    counts = []
    for few in (1, 2):
        stack = Stack(COUNTED, 2, num_layers=few, dtype=torch.float32, **options)
        stack.load(4)
        counts.append([stack.count_calls(corner) for corner in corners])
    return [
        {kind: one[kind] + (layers - 1) * (two[kind] - one[kind]) for kind in one}
        for one, two in zip(*counts, strict=True)
    ]
