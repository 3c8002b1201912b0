"""Decode attention with query and KV heads: one cell's inputs, and the ways to attend them.

Variants: `paged_decode` (reads the pages in place), called plainly and bound once to its buffers;
`gather_decode` (copies the pages into contiguous buffers, then attends those) with each gather,
study 1's ('published') with its host sync, which no graph can hold, and without; torch's SDPA on
KV that lies contiguous already (what no paged cache offers, without an LSE); and `read_pages`,
which only reads the same pages in their order, one page a program: a measured reference in the
same run, not a hard bound. The work table (`plan`) is prepared once a step for all layers and
timed as a row of its own; the rows of paged_decode do not hold it.

An fp8 cache has scales of 1 in tensors on the device, as an engine has them.
"""

from __future__ import annotations

import dataclasses

import torch

from dcp_lab.bench import costs, protocol
from dcp_lab.bench.protocol import Variant, peer_variant, peer_variants, read_variant
from dcp_lab.ops.checks import FP8_DTYPES
from dcp_lab.ops.decode import BoundDecode, paged_decode
from dcp_lab.ops.gather import GatherWorkspace, gather_decode
from dcp_lab.ops.workspace import DecodeConfig, DecodeWorkspace
from dcp_lab.peers import DECODE_PEERS, SDPA
from dcp_lab.reference import eager_decode, reference_decode
from dcp_lab.state import AttnState


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """One cell of the grid: what a rank attends in one layer.

    Attributes:
        requests: B, one query token each.
        context_tokens: KV tokens of a request; of 'uneven' lengths, their mean.
        num_q_heads, num_kv_heads, head_dim, page_size: Of the layer.
        lengths: 'equal', 'uneven' or 'one_long', see protocol.lengths_of.
        fp8: Whether the cache is fp8. Default: it has q's dtype.
    """

    requests: int
    context_tokens: int
    num_q_heads: int = 16
    num_kv_heads: int = 1
    head_dim: int = 128
    page_size: int = 16
    lengths: str = "equal"
    fp8: bool = False

    @property
    def name(self) -> str:
        """Return e.g. '16x2048 16q/1kv d128'."""
        tail = "" if self.lengths == "equal" else f" {self.lengths}"
        tail += " fp8" if self.fp8 else ""
        heads = f"{self.num_q_heads}q/{self.num_kv_heads}kv d{self.head_dim}"
        return f"{self.requests}x{self.context_tokens} {heads}{tail}"

    def seq_lens(self) -> list[int]:
        """Return the requests' lengths."""
        return protocol.lengths_of(self.lengths, self.requests, self.context_tokens)

    def columns(self) -> dict[str, object]:
        """Return the columns of a row that name the shape."""
        names = ("num_q_heads", "num_kv_heads", "head_dim", "page_size")
        names += ("requests", "context_tokens", "lengths")
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass
class Layers:
    """Inputs of `layers` layers of one shape: distinct KV, shared lengths and block table.

    gathered: contiguous K and V of one layer, which all gathers share once the first has made it;
    the grid's largest cells leave no room for one each.
    """

    shape: DecodeShape
    layers: int
    q: torch.Tensor
    kv: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    gathered: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def lens(self) -> list[int]:
        """Return seq_lens as the host knows them."""
        return self.shape.seq_lens()

    @property
    def total_tokens(self) -> int:
        """Return the KV tokens of a layer."""
        return sum(self.lens)

    @property
    def kv_bytes(self) -> float:
        """Return the K and V bytes that a layer has to read."""
        shape = self.shape
        return costs.kv_bytes(
            self.total_tokens,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            kv_itemsize=self.kv.element_size(),
        )

    @property
    def l2(self) -> str:
        """Return 'cold' if the bytes that one replay touches push one another out, else 'warm'."""
        return protocol.l2_state(self.layers * self.kv_bytes)

    def caches(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a layer as views of its pages."""
        return self.kv[layer][:, 0], self.kv[layer][:, 1]

    def scales(self) -> dict[str, torch.Tensor]:
        """Return k_scale and v_scale of an fp8 cache, on the device; nothing of another one."""
        if self.kv.dtype not in FP8_DTYPES:
            return {}
        one = torch.ones(1, device=self.kv.device)
        return {"k_scale": one, "v_scale": one}

    def columns(self) -> dict[str, object]:
        """Return the columns of a row that name the shape and its dtypes."""
        dtypes = {"dtype": self.q.dtype, "kv_dtype": self.kv.dtype}
        names = {column: protocol.dtype_name(dtype) for column, dtype in dtypes.items()}
        return {**self.shape.columns(), **names}

    def expected(self, variant: Variant, layer: int, request: int) -> tuple[AttnState, AttnState]:
        """Return (float64's result, plain torch's in the same dtype) of one request."""
        one = slice(request, request + 1)
        q = self.q[layer] if variant.queries is None else variant.queries(layer)
        # An fp8 query is a number of q's dtype too.
        q = q[one].to(self.q.dtype)
        inputs = (*self.caches(layer), self.block_table[one], self.seq_lens[one])
        if variant.contiguous is not None:
            table = torch.zeros(1, 1, dtype=torch.int32, device=self.kv.device)
            k, v = variant.contiguous(layer)
            inputs = (k[one], v[one], table, self.seq_lens[one])
        eager = eager_fp8_weights if variant.fp8_weights else eager_decode
        return reference_decode(q, *inputs), eager(q, *inputs)


def eager_fp8_weights(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
) -> AttnState:
    """Attend one request as eager_decode does, with the softmax's weights rounded to the cache's
    fp8: the yardstick of a kernel whose second product has fp8 on both sides.

    The weights are rounded as shares of their row's largest, which is 1; their sum is not.

    Args:
        q: [1, Hq, D].
        k_cache, v_cache: [P, page, Hkv, D], fp8 with scales of 1.
        block_table: Integer [1, max_pages].
        seq_lens: Integer [1].
    """
    page_size, num_kv_heads = k_cache.shape[1:3]
    tokens = int(seq_lens[0])
    pages = block_table[0, : -(-tokens // page_size)].long()
    # [S, Hkv, D]
    k, v = (cache[pages].flatten(0, 1)[:tokens].to(q.dtype) for cache in (k_cache, v_cache))
    # [Hkv, G, D]
    grouped = q[0].unflatten(0, (num_kv_heads, -1))
    scores = (torch.einsum("kgd,skd->kgs", grouped, k) * q.shape[-1] ** -0.5).float()
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    rounded = weights.to(k_cache.dtype).to(q.dtype)
    out = torch.einsum("kgs,skd->kgd", rounded, v).float() / weights.sum(-1, keepdim=True)
    lse = torch.logsumexp(scores, dim=-1)
    return AttnState(out.to(q.dtype).flatten(0, 1)[None], lse.flatten()[None])


def make_layers(
    shape: DecodeShape,
    *,
    dtype: torch.dtype,
    device: str = "cuda",
    seed: int = 0,
    layers: int | None = None,
) -> Layers:
    """Return random inputs: each page holds its K, then its V; pages lie in random order.

    Default layers: enough for a cold run.
    """
    torch.manual_seed(seed)
    lens = shape.seq_lens()
    kv_dtype = protocol.fp8_dtype() if shape.fp8 else dtype
    token_bytes = 2 * shape.num_kv_heads * shape.head_dim * kv_dtype.itemsize
    if layers is None:
        layers = protocol.num_layers(lens, shape.page_size, token_bytes, device)
    page = (2, shape.page_size, shape.num_kv_heads, shape.head_dim)
    kv, table = protocol.make_pages(
        layers, lens, page, shape.page_size, dtype=kv_dtype, device=device
    )
    heads = (layers, shape.requests, shape.num_q_heads)
    return Layers(
        shape=shape,
        layers=layers,
        q=torch.randn(*heads, shape.head_dim, dtype=dtype, device=device),
        kv=kv,
        block_table=table,
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        out=torch.empty(*heads, shape.head_dim, dtype=dtype, device=device),
        lse=torch.empty(*heads, dtype=torch.float32, device=device),
    )


def make_workspace(x: Layers, config: DecodeConfig | None = None) -> DecodeWorkspace:
    """Return a workspace prepared for these lengths."""
    shape = x.shape
    workspace = DecodeWorkspace(
        shape.requests,
        shape.num_q_heads,
        shape.num_kv_heads,
        shape.head_dim,
        # fp32 queries are multiplied as fp32 whatever the cache is.
        kv_dtype=x.q.dtype if x.q.dtype == torch.float32 else x.kv.dtype,
        max_seq_len=x.block_table.shape[1] * shape.page_size,
        config=config,
        device=x.kv.device,
    )
    workspace.prepare(x.seq_lens)
    return workspace


def paged_variant(x: Layers, name: str = "planned", config: DecodeConfig | None = None) -> Variant:
    """Return paged_decode on a prepared workspace."""
    workspace, scales = make_workspace(x, config), x.scales()

    def call(layer: int) -> AttnState:
        k_cache, v_cache = x.caches(layer)
        return paged_decode(
            x.q[layer],
            k_cache,
            v_cache,
            x.block_table,
            x.seq_lens,
            workspace=workspace,
            out=x.out[layer],
            lse=x.lse[layer],
            **scales,
        )

    return Variant("paged_decode", name, call)


def bound_variant(x: Layers) -> Variant:
    """Return paged_decode bound once to each layer's buffers: the same kernels, less host time."""
    workspace, scales = make_workspace(x), x.scales()
    layers = [
        BoundDecode(
            x.q[layer],
            *x.caches(layer),
            x.block_table,
            x.seq_lens,
            workspace=workspace,
            out=x.out[layer],
            lse=x.lse[layer],
            **scales,
        )
        for layer in range(x.layers)
    ]
    return Variant("paged_decode", "bound", lambda layer: layers[layer]())


def gather_variant(x: Layers, gather: str) -> Variant:
    """Return gather_decode on a prepared workspace of just the step's tokens.

    Args:
        x: The inputs.
        gather: 'per_token', 'per_page', 'published' or 'published_no_sync'. 'published' reads the
            number of tokens from the device in every call, so no graph can hold it;
            'published_no_sync' is told it.
    """
    shape, scales = x.shape, x.scales()
    options: dict[str, object] = {"gather": gather.removesuffix("_no_sync")}
    workspace = GatherWorkspace(
        shape.requests,
        x.total_tokens,
        shape.num_kv_heads,
        shape.head_dim,
        shape.page_size,
        dtype=x.q.dtype,
        device=x.kv.device,
        **options,
    )
    if x.gathered is None:
        x.gathered = workspace.k, workspace.v
    workspace.k, workspace.v = x.gathered
    workspace.prepare(x.seq_lens, max_pages=x.block_table.shape[1])
    if gather == "published_no_sync":
        options["total_tokens"] = x.total_tokens

    def call(layer: int) -> AttnState:
        k_cache, v_cache = x.caches(layer)
        return gather_decode(
            x.q[layer],
            k_cache,
            v_cache,
            x.block_table,
            x.seq_lens,
            workspace=workspace,
            out=x.out[layer],
            lse=x.lse[layer],
            **options,
            **scales,
        )

    # Read once as stored, written and read again in q's dtype.
    traffic = 1.0 + 2.0 * x.q.element_size() / x.kv.element_size()
    return Variant(
        "gather_decode", gather, call, kv_traffic=traffic, in_graph=gather != "published"
    )


GATHERS = ("per_token", "per_page", "published", "published_no_sync")


def sdpa_variants(x: Layers) -> list[Variant]:
    """Return torch's SDPA on contiguous KV, where the shape allows it."""
    variants = [peer_variant(SDPA.name, name, make()) for name, make in SDPA.calls(x).items()]
    # A part of torch, which is always here: where it is off, the inputs are.
    return [dataclasses.replace(variant, peer=False) for variant in variants]


def plan_variant(x: Layers) -> Variant:
    """Return the once-a-step work table of paged_decode, timed alone."""
    workspace = make_workspace(x)
    return Variant(
        "plan",
        "planned",
        lambda layer: workspace.prepare(x.seq_lens),
        has_lse=False,
        checked=False,
        kv_traffic=0.0,
    )


def variants_of(x: Layers) -> list[Variant]:
    """Return every variant of the lab's and of torch's that fits the shape."""
    found = [paged_variant(x), bound_variant(x)]
    found += [gather_variant(x, gather) for gather in GATHERS]
    return [*found, *sdpa_variants(x), read_variant(x), plan_variant(x)]


def measure_shape(
    shape: DecodeShape,
    *,
    dtype: torch.dtype = torch.bfloat16,
    samples: int = 25,
    peers: bool = False,
) -> list[dict[str, object]]:
    """Check and time every variant of one shape; return one row a variant and mode.

    Args:
        shape: What to attend.
        dtype: Of q, and of a KV that is not fp8.
        samples: Graph replays of each variant.
        peers: Whether to measure the peers that are here too. Default: no.

    Raises:
        RuntimeError: A variant's result is off; nothing was timed.
    """
    x = make_layers(shape, dtype=dtype)
    found = variants_of(x) + (peer_variants(x, DECODE_PEERS) if peers else [])
    return protocol.measure(x, found, samples=samples)


def parse_shape(text: str) -> DecodeShape:
    """Return the shape of '16x2048', '16x2048x64x8x128' (q, KV heads, dim), '...:uneven:fp8'.

    Raises:
        ValueError: It is none of these.
    """
    sizes, *tags = text.split(":")
    numbers = sizes.split("x")
    if len(numbers) not in (2, 5) or not all(n.isdecimal() and int(n) for n in numbers):
        raise ValueError(
            f"shape: expected REQUESTSxTOKENS or REQUESTSxTOKENSxQHEADSxKVHEADSxDIM, got {text!r}"
        )
    return DecodeShape(*map(int, numbers), **parse_tags(tags))


def parse_tags(tags: list[str]) -> dict[str, object]:
    """Return the shape's options that stand behind colons: lengths, and fp8.

    Raises:
        ValueError: A tag is neither, or lengths stand there twice.
    """
    found: dict[str, object] = {}
    for tag in tags:
        option = {"fp8": True} if tag == "fp8" else {"lengths": tag}
        if found.keys() & option.keys():
            raise ValueError(f"shape: expected fp8 and one kind of lengths, got {tags}")
        found |= option
    protocol.lengths_of(found.get("lengths", "equal"), 1, 1)
    return found
