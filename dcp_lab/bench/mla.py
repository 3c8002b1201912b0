"""MLA decode over a paged latent cache: one cell's inputs, and the ways to attend them.

Variants: `mla_paged_decode` on a prepared workspace, a page-ordered read of the same latents
(`read_pages`), and the work table alone (`plan`). The sizes are DeepSeek's: a latent of 512 and 64
rotary elements, pages of 64 tokens (the only size that FlashMLA takes), scores scaled by
(128 + 64) ** -0.5. The absorbed form: q has been multiplied by the key up-projection before.
"""

from __future__ import annotations

import dataclasses

import torch

from dcp_lab.bench import protocol
from dcp_lab.bench.gqa import parse_tags
from dcp_lab.bench.protocol import Variant, peer_variants, read_variant
from dcp_lab.ops.checks import FP8_DTYPES
from dcp_lab.ops.mla import mla_paged_decode
from dcp_lab.ops.workspace import DecodeConfig, DecodeWorkspace
from dcp_lab.peers import MLA_PEERS
from dcp_lab.reference import eager_mla_decode, reference_mla_decode
from dcp_lab.state import AttnState

KV_LORA_RANK = 512
HEAD_DIM = 576
PAGE_SIZE = 64
SOFTMAX_SCALE = 192**-0.5


@dataclasses.dataclass(frozen=True)
class MlaShape:
    """One cell of the grid.

    Attributes:
        requests: B, one query token each.
        context_tokens: Latents of a request; of 'uneven' lengths, their mean.
        num_q_heads: Of the layer, all on one latent.
        lengths: 'equal', 'uneven' or 'one_long', see protocol.lengths_of.
        fp8: Whether the cache is fp8. Default: it has q's dtype.
    """

    requests: int
    context_tokens: int
    num_q_heads: int = 16
    lengths: str = "equal"
    fp8: bool = False

    @property
    def name(self) -> str:
        """Return e.g. 'mla 16x8192 16q'."""
        tail = "" if self.lengths == "equal" else f" {self.lengths}"
        tail += " fp8" if self.fp8 else ""
        return f"mla {self.requests}x{self.context_tokens} {self.num_q_heads}q{tail}"

    def seq_lens(self) -> list[int]:
        """Return the requests' lengths."""
        return protocol.lengths_of(self.lengths, self.requests, self.context_tokens)

    def columns(self) -> dict[str, object]:
        """Return the columns of a row that name the shape."""
        names = ("num_q_heads", "requests", "context_tokens", "lengths")
        sizes = {"num_kv_heads": 1, "head_dim": HEAD_DIM, "page_size": PAGE_SIZE}
        return {**{name: getattr(self, name) for name in names}, **sizes}


@dataclasses.dataclass
class MlaLayers:
    """Inputs of `layers` layers of one shape: distinct latents, shared lengths and block table."""

    shape: MlaShape
    layers: int
    q: torch.Tensor
    kv: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    softmax_scale: float = SOFTMAX_SCALE

    @property
    def lens(self) -> list[int]:
        """Return seq_lens as the host knows them."""
        return self.shape.seq_lens()

    @property
    def kv_bytes(self) -> float:
        """Return the bytes of latents that a layer has to read."""
        return float(sum(self.lens) * HEAD_DIM * self.kv.element_size())

    @property
    def l2(self) -> str:
        """Return 'cold' if the bytes that one replay touches push one another out, else 'warm'."""
        return protocol.l2_state(self.layers * self.kv_bytes)

    def columns(self) -> dict[str, object]:
        """Return the columns of a row that name the shape and its dtypes."""
        dtypes = {"dtype": self.q.dtype, "kv_dtype": self.kv.dtype}
        names = {column: protocol.dtype_name(dtype) for column, dtype in dtypes.items()}
        return {**self.shape.columns(), **names}

    def expected(self, variant: Variant, layer: int, request: int) -> tuple[AttnState, AttnState]:
        """Return (float64's result, plain torch's in the same dtype) of one request."""
        one = slice(request, request + 1)
        inputs = (self.q[layer][one], self.kv[layer], self.block_table[one], self.seq_lens[one])
        options = {"softmax_scale": self.softmax_scale, "kv_lora_rank": KV_LORA_RANK}
        return reference_mla_decode(*inputs, **options), eager_mla_decode(*inputs, **options)


def make_layers(
    shape: MlaShape,
    *,
    dtype: torch.dtype,
    device: str = "cuda",
    seed: int = 0,
    layers: int | None = None,
) -> MlaLayers:
    """Return random inputs; pages lie in random order. Default layers: enough for a cold run."""
    torch.manual_seed(seed)
    lens = shape.seq_lens()
    kv_dtype = protocol.fp8_dtype() if shape.fp8 else dtype
    if layers is None:
        layers = protocol.num_layers(lens, PAGE_SIZE, HEAD_DIM * kv_dtype.itemsize, device)
    kv, table = protocol.make_pages(
        layers, lens, (PAGE_SIZE, HEAD_DIM), PAGE_SIZE, dtype=kv_dtype, device=device
    )
    heads = (layers, shape.requests, shape.num_q_heads)
    return MlaLayers(
        shape=shape,
        layers=layers,
        q=torch.randn(*heads, HEAD_DIM, dtype=dtype, device=device),
        kv=kv,
        block_table=table,
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        out=torch.empty(*heads, KV_LORA_RANK, dtype=dtype, device=device),
        lse=torch.empty(*heads, dtype=torch.float32, device=device),
    )


def make_workspace(x: MlaLayers, config: DecodeConfig | None = None) -> DecodeWorkspace:
    """Return a workspace prepared for these lengths."""
    workspace = DecodeWorkspace(
        x.shape.requests,
        x.shape.num_q_heads,
        1,
        HEAD_DIM,
        head_dim_v=KV_LORA_RANK,
        # fp32 queries are multiplied as fp32 whatever the cache is.
        kv_dtype=x.q.dtype if x.q.dtype == torch.float32 else x.kv.dtype,
        max_seq_len=x.block_table.shape[1] * PAGE_SIZE,
        config=config,
        device=x.kv.device,
    )
    workspace.prepare(x.seq_lens)
    return workspace


def paged_variant(
    x: MlaLayers, name: str = "planned", config: DecodeConfig | None = None
) -> Variant:
    """Return mla_paged_decode on a prepared workspace."""
    workspace = make_workspace(x, config)
    one = torch.ones(1, device=x.kv.device)
    scale = {"kv_scale": one} if x.kv.dtype in FP8_DTYPES else {}

    def call(layer: int) -> AttnState:
        return mla_paged_decode(
            x.q[layer],
            x.kv[layer],
            x.block_table,
            x.seq_lens,
            softmax_scale=x.softmax_scale,
            kv_lora_rank=KV_LORA_RANK,
            workspace=workspace,
            out=x.out[layer],
            lse=x.lse[layer],
            **scale,
        )

    return Variant("mla_paged_decode", name, call)


def plan_variant(x: MlaLayers) -> Variant:
    """Return the once-a-step work table, timed alone."""
    workspace = make_workspace(x)
    return Variant(
        "plan",
        "planned",
        lambda layer: workspace.prepare(x.seq_lens),
        has_lse=False,
        checked=False,
        kv_traffic=0.0,
    )


def variants_of(x: MlaLayers) -> list[Variant]:
    """Return every variant of the lab's."""
    return [paged_variant(x), read_variant(x), plan_variant(x)]


def measure_mla(
    shape: MlaShape,
    *,
    dtype: torch.dtype = torch.bfloat16,
    samples: int = 25,
    peers: bool = False,
) -> list[dict[str, object]]:
    """Check and time every variant of one shape; return one row a variant and mode.

    Args:
        shape: What to attend.
        dtype: Of q, and of a cache that is not fp8.
        samples: Graph replays of each variant.
        peers: Whether to measure the peers that are here too. Default: no.

    Raises:
        RuntimeError: A variant's result is off; nothing was timed.
    """
    x = make_layers(shape, dtype=dtype)
    found = variants_of(x) + (peer_variants(x, MLA_PEERS) if peers else [])
    return protocol.measure(x, found, samples=samples)


def parse_mla(text: str) -> MlaShape:
    """Return the shape of '16x8192', '16x8192x128' (q heads) or '...:uneven:fp8'.

    Raises:
        ValueError: It is none of these.
    """
    sizes, *tags = text.split(":")
    numbers = sizes.split("x")
    if len(numbers) not in (2, 3) or not all(n.isdecimal() and int(n) for n in numbers):
        raise ValueError(
            f"shape: expected mla:REQUESTSxTOKENS or mla:REQUESTSxTOKENSxQHEADS, got 'mla:{text}'"
        )
    return MlaShape(*map(int, numbers), **parse_tags(tags))
