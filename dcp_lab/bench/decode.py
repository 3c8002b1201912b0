"""Decode attention on one GPU: paged, gathered and contiguous, checked, then timed.

    dcp-lab bench decode [--shape 16x2048 ... | --grid] [--peers] [--out rows.csv]
    dcp-lab bench decode --gate [--out rows.csv]

Variants of one shape: `paged_decode` (reads the pages in place), `gather_decode` with either
gather (copies the pages into contiguous buffers, then attends those), torch's SDPA on KV that lies
contiguous already (what no paged cache offers, without an LSE), and `read_pages`, which only reads
the same pages in their order, one page a program: a measured reference in the same run, not a hard
bound. With --peers, the peers of dcp_lab/peers that can run here.

Protocol: each variant runs once on each of several layers of distinct KV, more than three times
the last-level cache together where the shape allows it (column l2: cold; else warm); in a graph
and eagerly; variants take turns; every sample of a variant is kept until the percentiles are made.
Out and LSE are compared with float64 on the very inputs that are timed, on the first and the last
request of the first and the last layer: of eager calls and of a replay of the very graph that is
timed, into outputs that were filled with NaN, before any timing and again after it. A variant that
is off is not timed and the command fails.

--gate measures nothing: it recomputes the speed targets from the table's rows and says of each
whether it holds, by how much it is missed, or that it is not measured.

The work table (`plan`) is prepared once a step for all layers and timed as a row of its own; the
rows of paged_decode do not hold it.

Not measured: the rest of a layer, several ranks, MI3xx GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from dcp_lab.analysis.tables import measured_path
from dcp_lab.bench import costs, decode_targets, record, timing
from dcp_lab.kernels import INTERPRETED
from dcp_lab.ops.decode import BoundDecode, paged_decode
from dcp_lab.ops.gather import GatherWorkspace, gather_decode
from dcp_lab.ops.workspace import DecodeConfig, DecodeWorkspace
from dcp_lab.peers import DECODE_PEERS, SDPA, PeerCall
from dcp_lab.reference import eager_decode, reference_decode
from dcp_lab.state import AttnState
from dcp_lab.testing import assert_within_budget, error_and_budget

# Distinct KV of a run: three times the last cache before memory, and at least 8 layers where they
# fit. AMD's CDNA3 and CDNA4 have 256 MB of Infinity Cache behind an L2 (CDNA 3 white paper);
# NVIDIA's last cache is the L2, 60 MB on an H200.
CACHE_MULTIPLE = 3
MIN_COLD_BYTES = 200_000_000
INFINITY_CACHE_BYTES = 256 << 20
MIN_LAYERS = 8
MAX_LAYERS = 512
# All layers of a shape together: what an H200 holds beside two gathers' copies of one layer.
MAX_KV_BYTES = 40_000_000_000


def cold_bytes() -> int:
    """Return how many distinct bytes have to go by before a replay finds nothing in a cache."""
    if not torch.cuda.is_available():
        return MIN_COLD_BYTES
    cache = INFINITY_CACHE_BYTES
    if not torch.version.hip:
        cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(MIN_COLD_BYTES, CACHE_MULTIPLE * cache)


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """One cell of the grid: what a rank attends in one layer.

    Attributes:
        requests: B, one query token each.
        context_tokens: KV tokens of a request; of 'uneven' lengths, their mean.
        num_q_heads, num_kv_heads, head_dim, page_size: Of the layer.
        lengths: 'equal'; 'uneven' (evenly spread from 0.4 to 1.6 of the mean); or 'one_long' (one
            request 16 times as long as the others, same total).
    """

    requests: int
    context_tokens: int
    num_q_heads: int = 16
    num_kv_heads: int = 1
    head_dim: int = 128
    page_size: int = 16
    lengths: str = "equal"

    @property
    def name(self) -> str:
        """Return e.g. '16x2048 16q/1kv d128'."""
        tail = "" if self.lengths == "equal" else f" {self.lengths}"
        heads = f"{self.num_q_heads}q/{self.num_kv_heads}kv d{self.head_dim}"
        return f"{self.requests}x{self.context_tokens} {heads}{tail}"

    def seq_lens(self) -> list[int]:
        """Return the requests' lengths."""
        total = self.requests * self.context_tokens
        if self.lengths == "equal" or self.requests == 1:
            return [self.context_tokens] * self.requests
        if self.lengths == "uneven":
            step = 1.2 / (self.requests - 1)
            return [int(self.context_tokens * (0.4 + step * i)) for i in range(self.requests)]
        if self.lengths == "one_long":
            short = total // (self.requests + 15)
            return [total - short * (self.requests - 1)] + [short] * (self.requests - 1)
        raise ValueError(
            f"lengths: expected 'equal', 'uneven' or 'one_long', got {self.lengths!r}"
        )


# What study 1's rank holds under DCP 2 (16 q heads after the gather of q, 1 KV head), shorter and
# longer; one request; a whole model's 8 KV heads.
DEFAULT_SHAPES = (
    DecodeShape(1, 8192),
    DecodeShape(16, 1024),
    DecodeShape(16, 2048),
    DecodeShape(16, 3072, lengths="uneven"),
    DecodeShape(16, 8192),
    DecodeShape(64, 8192),
    DecodeShape(16, 2048, num_q_heads=64, num_kv_heads=8),
)


@dataclasses.dataclass
class Layers:
    """Inputs of `layers` layers of one shape: distinct KV, shared lengths and block table."""

    shape: DecodeShape
    layers: int
    q: torch.Tensor
    kv: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

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
        return "cold" if self.layers * self.kv_bytes >= cold_bytes() else "warm"

    def caches(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a layer as views of its pages."""
        return self.kv[layer][:, 0], self.kv[layer][:, 1]


def make_layers(
    shape: DecodeShape, *, dtype: torch.dtype, device: str = "cuda", seed: int = 0
) -> Layers:
    """Return random inputs: each page holds its K, then its V; pages lie in random order."""
    torch.manual_seed(seed)
    lens = shape.seq_lens()
    pages = [math.ceil(n / shape.page_size) for n in lens]
    per_page = 2 * shape.page_size * shape.num_kv_heads * shape.head_dim
    layer_bytes = sum(pages) * per_page * dtype.itemsize
    # A page's unused slots take room and are not read.
    touched = sum(lens) * per_page * dtype.itemsize / shape.page_size
    layers = max(MIN_LAYERS, math.ceil(cold_bytes() / touched)) if device == "cuda" else 2
    layers = max(1, min(layers, MAX_LAYERS, int(MAX_KV_BYTES / layer_bytes)))
    kv = torch.empty(
        layers,
        sum(pages),
        2,
        shape.page_size,
        shape.num_kv_heads,
        shape.head_dim,
        dtype=dtype,
        device=device,
    )
    for layer in range(layers):
        kv[layer].normal_()
    table = torch.zeros(shape.requests, max(pages), dtype=torch.int32, device=device)
    order = torch.randperm(sum(pages), device=device).to(torch.int32)
    start = 0
    for request, count in enumerate(pages):
        table[request, :count] = order[start : start + count]
        start += count
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


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to do the work of a layer.

    Attributes:
        op, variant: How rows name it.
        call: Does it for layer i, writing out[i] and, where has_lse, lse[i].
        has_lse: Whether lse[i] is written.
        checked: Whether its result is attention at all (`read_pages` only reads).
        kv_traffic: KV bytes moved, as a multiple of those that must be read.
        contiguous: K and V [B, tokens, Hkv, D] of layer i that it attends instead of the pages.
        lse: Where layer i's natural LSE [B, Hq] is after a call. Default: lse[i].
    """

    op: str
    variant: str
    call: Callable[[int], object]
    has_lse: bool = True
    checked: bool = True
    kv_traffic: float = 1.0
    contiguous: Callable[[int], tuple[torch.Tensor, torch.Tensor]] | None = None
    lse: Callable[[int], torch.Tensor] | None = None


def make_workspace(x: Layers, config: DecodeConfig | None = None) -> DecodeWorkspace:
    """Return a workspace prepared for these lengths."""
    shape = x.shape
    workspace = DecodeWorkspace(
        shape.requests,
        shape.num_q_heads,
        shape.num_kv_heads,
        shape.head_dim,
        kv_dtype=x.kv.dtype,
        max_seq_len=x.block_table.shape[1] * shape.page_size,
        config=config,
        device=x.kv.device,
    )
    workspace.prepare(x.seq_lens)
    return workspace


def paged_variant(x: Layers, name: str = "planned", config: DecodeConfig | None = None) -> Variant:
    """Return paged_decode on a prepared workspace."""
    workspace = make_workspace(x, config)

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
        )

    return Variant("paged_decode", name, call)


def bound_variant(x: Layers) -> Variant:
    """Return paged_decode bound once to each layer's buffers: the same kernels, less host time."""
    workspace = make_workspace(x)
    layers = [
        BoundDecode(
            x.q[layer],
            *x.caches(layer),
            x.block_table,
            x.seq_lens,
            workspace=workspace,
            out=x.out[layer],
            lse=x.lse[layer],
        )
        for layer in range(x.layers)
    ]
    return Variant("paged_decode", "bound", lambda layer: layers[layer]())


def gather_variant(x: Layers, gather: str) -> Variant:
    """Return gather_decode on a prepared workspace of just the step's tokens: no sync, no plan."""
    shape = x.shape
    workspace = GatherWorkspace(
        shape.requests,
        x.total_tokens,
        shape.num_kv_heads,
        shape.head_dim,
        shape.page_size,
        dtype=x.kv.dtype,
        gather=gather,
        device=x.kv.device,
    )
    workspace.prepare(x.seq_lens, max_pages=x.block_table.shape[1])

    def call(layer: int) -> AttnState:
        k_cache, v_cache = x.caches(layer)
        return gather_decode(
            x.q[layer],
            k_cache,
            v_cache,
            x.block_table,
            x.seq_lens,
            workspace=workspace,
            gather=gather,
            out=x.out[layer],
            lse=x.lse[layer],
        )

    return Variant("gather_decode", gather, call, kv_traffic=3.0)


def peer_variant(op: str, name: str, made: PeerCall) -> Variant:
    """Return a peer's call as a variant."""
    has_lse = made.lse is not None
    return Variant(op, name, made.run, has_lse, contiguous=made.contiguous, lse=made.lse)


def sdpa_variants(x: Layers) -> list[Variant]:
    """Return torch's SDPA on contiguous KV, where the shape allows it."""
    return [peer_variant(SDPA.name, name, make()) for name, make in SDPA.calls(x).items()]


def read_variant(x: Layers) -> Variant:
    """Return the page-ordered read of the same bytes, one page a program: a reference."""
    from dcp_lab.kernels.probe import _read_pages_kernel

    pages = x.block_table.shape[1] * x.shape.requests
    table = x.block_table.flatten()
    if x.shape.lengths != "equal":
        table = torch.arange(x.kv.shape[1], dtype=torch.int32, device=x.kv.device)
        pages = table.numel()
    ints = x.kv.view(x.layers, x.kv.shape[1], -1).view(torch.int32)
    per_page = ints.shape[2]
    block = min(4096, per_page & -per_page)
    sink = torch.empty(pages, dtype=torch.int32, device=x.kv.device)

    def call(layer: int) -> None:
        _read_pages_kernel[(pages,)](
            source_ptr=ints[layer],
            table_ptr=table,
            sink_ptr=sink,
            stride_page=per_page,
            BLOCK=block,
            STEPS=per_page // block,
        )

    return Variant("read_pages", "floor", call, has_lse=False, checked=False)


def plan_variant(x: Layers) -> Variant:
    """Return the once-a-step work table of paged_decode, timed alone."""
    workspace = make_workspace(x)
    return Variant(
        "plan",
        "planned",
        lambda layer: workspace.prepare(x.seq_lens),
        has_lse=False,
        checked=False,
    )


@dataclasses.dataclass
class Errors:
    """Largest absolute difference from float64 and what was allowed; None where not compared."""

    out_error: float | None = None
    lse_error: float | None = None
    error_budget: float | None = None
    lse_error_budget: float | None = None

    def keep_worst(self, name: str, budget_name: str, error: float, budget: float) -> None:
        """Take one more comparison into the largest error and the largest budget."""
        setattr(self, name, max(getattr(self, name) or 0.0, error))
        setattr(self, budget_name, max(getattr(self, budget_name) or 0.0, budget))


def check_variant(
    x: Layers, variant: Variant, replay: Callable[[], object] | None = None
) -> Errors:
    """Compare a variant with float64 on the inputs that will be timed.

    The first and the last request of the first and the last layer; allowed is
    2 * (error of plain torch in the same dtype + one rounding step), see dcp_lab.testing. All
    outputs are NaN before.

    Args:
        x: The inputs and where the outputs go.
        variant: What is checked.
        replay: Does all layers at once, as a graph that was captured from the variant; then its
            outputs are compared, and no element of any layer may be NaN. Default: eager calls.

    Raises:
        RuntimeError: An error is over its budget, or the result is not finite.
    """
    errors = Errors()
    if not variant.checked:
        return errors
    how = "eager" if replay is None else "replayed"
    nan = float("nan")
    x.out.fill_(nan)
    x.lse.fill_(nan)
    if replay is not None:
        if variant.lse is not None:
            for layer in range(x.layers):
                variant.lse(layer).fill_(nan)
        replay()
        unwritten = [layer for layer in range(x.layers) if x.out[layer].isnan().any()]
        if unwritten:
            raise RuntimeError(
                f"not timed, since its result is off: {variant.op} {variant.variant}, "
                f"{x.shape.name}, replayed: NaN in layers {unwritten[:5]}"
            )
    for layer in sorted({0, x.layers - 1}):
        if replay is None:
            variant.call(layer)
        for request in sorted({0, x.shape.requests - 1}):
            one = slice(request, request + 1)
            inputs = (*x.caches(layer), x.block_table[one], x.seq_lens[one])
            if variant.contiguous is not None:
                table = torch.zeros(1, 1, dtype=torch.int32, device=x.kv.device)
                k, v = variant.contiguous(layer)
                inputs = (k[one], v[one], table, x.seq_lens[one])
            truth, eager = (f(x.q[layer][one], *inputs) for f in (reference_decode, eager_decode))
            lse = x.lse[layer] if variant.lse is None else variant.lse(layer)
            got = AttnState(x.out[layer][one], lse[one])
            compared = (got, truth, eager) if variant.has_lse else (got.out, truth.out, eager.out)
            where = f"{variant.op} {variant.variant}, {x.shape.name}, {how}, layer {layer}"
            try:
                assert_within_budget(f"{where}, request {request}", *compared)
            except AssertionError as wrong:
                raise RuntimeError(f"not timed, since its result is off: {wrong}") from None
            found = error_and_budget(got.out, truth.out, eager.out)
            errors.keep_worst("out_error", "error_budget", *found)
            if variant.has_lse:
                found = error_and_budget(got.lse, truth.lse, eager.lse, least_scale=1.0)
                errors.keep_worst("lse_error", "lse_error_budget", *found)
    return errors


def variants_of(x: Layers) -> list[Variant]:
    """Return every variant that fits the shape."""
    found = [paged_variant(x), bound_variant(x)]
    found += [gather_variant(x, gather) for gather in ("per_token", "per_page")]
    return [*found, *sdpa_variants(x), read_variant(x), plan_variant(x)]


def peer_variants(x: Layers) -> list[Variant]:
    """Return every peer that can run here, and say why the others are absent.

    A peer that fails or is wrong on these inputs is left out with its reason: its time is not ours
    to report.
    """
    found = []
    for peer in DECODE_PEERS:
        reason = peer.why_absent()
        if reason:
            print(f"peer {peer.name}: absent: {reason}", file=sys.stderr)
            continue
        for name, make in peer.calls(x).items():
            try:
                made = make()
                variant = peer_variant(peer.name, name, made)
                check_variant(x, variant)
            except Exception as wrong:
                print(f"peer {peer.name} {name}: left out: {wrong}"[:300], file=sys.stderr)
                continue
            found.append(variant)
    return found


def right_ones(
    x: Layers,
    variants: Sequence[Variant],
    replays: Mapping[str, Callable[[], object]] | None = None,
) -> list[Variant]:
    """Return the variants whose results are right, and say which peers are left out.

    Args:
        x: The inputs.
        variants: What to check, see check_variant.
        replays: By op + variant, the graphs to check. Default: eager calls.

    Raises:
        RuntimeError: One of the lab's own variants is off.
    """
    peers = {peer.name for peer in DECODE_PEERS}
    kept = []
    for v in variants:
        try:
            check_variant(x, v, None if replays is None else replays[v.op + v.variant])
        except RuntimeError as wrong:
            if v.op not in peers:
                raise
            print(f"peer {v.op} {v.variant}: left out: {wrong}"[:300], file=sys.stderr)
            continue
        kept.append(v)
    return kept


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
        dtype: Of q and KV.
        samples: Graph replays of each variant.
        peers: Whether to measure the peers that are here too. Default: no.

    Raises:
        RuntimeError: A variant's result is off; nothing was timed.
    """
    x = make_layers(shape, dtype=dtype)
    found = variants_of(x) + (peer_variants(x) if peers else [])
    errors = {v.op + v.variant: check_variant(x, v) for v in found}
    calls = {v.op + v.variant: v.call for v in found}
    for call in calls.values():
        call(0)
    launches = {key: timing.kernel_launches(call) for key, call in calls.items()}
    graphs = {key: timing.capture_layers(call, x.layers) for key, call in calls.items()}

    replays = {key: graph.replay for key, graph in graphs.items()}
    found = right_ones(x, found, replays)
    graphs = {v.op + v.variant: graphs[v.op + v.variant] for v in found}
    in_graph = timing.graph_times(graphs, layers=x.layers, samples=samples)
    # Before any eager call, which gives a peer that allocates its LSE another one.
    found = right_ones(x, found, replays)
    calls = {v.op + v.variant: v.call for v in found}
    wall, host = timing.eager_times(calls, layers=x.layers, samples=max(5, samples // 2))
    found = right_ones(x, found)
    floor_us = timing.percentiles(in_graph["read_pagesfloor"])[0]
    rows = []
    for v in found:
        key = v.op + v.variant
        for mode, samples_us in (("graph", in_graph[key]), ("eager", wall[key])):
            median, p10, p90 = timing.percentiles(samples_us)
            rows.append(
                {
                    "op": v.op,
                    "variant": v.variant,
                    "num_q_heads": shape.num_q_heads,
                    "num_kv_heads": shape.num_kv_heads,
                    "head_dim": shape.head_dim,
                    "page_size": shape.page_size,
                    "dtype": str(dtype).removeprefix("torch."),
                    "kv_dtype": str(x.kv.dtype).removeprefix("torch."),
                    "requests": shape.requests,
                    "context_tokens": shape.context_tokens,
                    "lengths": shape.lengths,
                    "mode": mode,
                    "l2": x.l2,
                    "layers": x.layers,
                    "samples": len(samples_us),
                    "median_us": round(median, 3),
                    "p10_us": round(p10, 3),
                    "p90_us": round(p90, 3),
                    "host_us": (
                        round(timing.percentiles(host[key])[0], 3) if mode == "eager" else None
                    ),
                    "launches": launches[key],
                    "bytes": 0 if v.op == "plan" else int(x.kv_bytes * v.kv_traffic),
                    "bound_us": round(floor_us, 3),
                    "read_gbps": round(x.kv_bytes / floor_us / 1e3, 1),
                    **dataclasses.asdict(errors[key]),
                    "method": "graph replay" if mode == "graph" else "host clock, synchronised",
                }
            )
    return rows


def parse_shape(text: str) -> DecodeShape:
    """Return the shape of '16x2048', '16x2048x64x8x128' (q, KV heads, dim) or '...:uneven'.

    Raises:
        ValueError: It is none of these.
    """
    sizes, _, lengths = text.partition(":")
    numbers = sizes.split("x")
    if len(numbers) not in (2, 5) or not all(n.isdigit() and int(n) for n in numbers):
        raise ValueError(
            f"shape: expected REQUESTSxTOKENS or REQUESTSxTOKENSxQHEADSxKVHEADSxDIM, got {text!r}"
        )
    shape = DecodeShape(*map(int, numbers), lengths=lengths or "equal")
    shape.seq_lens()
    return shape


def show(rows: list[dict[str, object]]) -> str:
    """Return the rows of one shape as a small table for a terminal."""
    first = rows[0]
    head = f"{first['requests']}x{first['context_tokens']} {first['num_q_heads']}q/"
    head += f"{first['num_kv_heads']}kv d{first['head_dim']} {first['lengths']}, us a layer"
    lines = [f"{head:45} {'graph':>8} {'eager':>8} {'host':>8} {'launches':>9}"]
    by_name: dict[str, dict[str, dict[str, object]]] = {}
    for row in rows:
        by_name.setdefault(f"{row['op']} {row['variant']}", {})[str(row["mode"])] = row
    for name, modes in by_name.items():
        graph, eager = modes["graph"], modes["eager"]
        lines.append(
            f"  {name:43} {graph['median_us']:8.2f} {eager['median_us']:8.1f} "
            f"{eager['host_us']:8.1f} {graph['launches']:9}"
        )
    return "\n".join(lines)


def main(args: list[str] | None = None) -> int:
    """Measure and append rows; return the exit status: 1 when a result is off, 2 on bad input."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", action="append", help="as 16x2048, 16x2048x64x8x128, 16x3072:uneven; repeatable"
    )
    parser.add_argument("--samples", type=int, default=25, help="graph replays of each variant")
    parser.add_argument(
        "--out",
        type=Path,
        help="CSV to append to, or to judge (default: data/measured/decode_GPU.csv of this "
        "machine's GPU; with --gate, of an H200)",
    )
    parser.add_argument("--grid", action="store_true", help="every cell that --gate judges")
    parser.add_argument("--gate", action="store_true", help="measure nothing: judge the table")
    parser.add_argument("--peers", action="store_true", help="measure the peers that are here too")
    parser.add_argument("--dry-run", action="store_true", help="print the grid and stop")
    options = parser.parse_args(args)
    if options.gate:
        return decode_targets.gate(options.out or measured_path("decode_h200"))
    if options.grid and options.shape:
        print("--grid: expected without --shape", file=sys.stderr)
        return 2
    try:
        shapes = [parse_shape(s) for s in options.shape] if options.shape else DEFAULT_SHAPES
        if options.grid:
            shapes = [DecodeShape(*cell) for cell in decode_targets.grid()]
            for *cell, lengths in decode_targets.uneven_grid():
                shapes.append(DecodeShape(*cell, lengths=lengths))
    except ValueError as wrong:
        print(wrong, file=sys.stderr)
        return 2
    if options.samples < 5:
        print(f"--samples: expected at least 5, got {options.samples}", file=sys.stderr)
        return 2
    if options.dry_run:
        print("\n".join(shape.name for shape in shapes))
        return 0
    if INTERPRETED or not torch.cuda.is_available():
        print(
            "bench decode: expected a GPU, found none; --dry-run shows the grid", file=sys.stderr
        )
        return 2
    source = record.provenance()
    if reason := record.why_not_kept(source):
        print(f"bench decode: {reason}", file=sys.stderr)
        return 2
    out = options.out or measured_path(f"decode_{record.machine_name(str(source['gpu']))}")
    for shape in tqdm(shapes, desc="shapes", file=sys.stderr):
        try:
            rows = measure_shape(shape, samples=options.samples, peers=options.peers)
            record.write_rows(out, [{**source, **row} for row in rows], record.DECODE)
        except (ValueError, NotImplementedError, OSError) as wrong:
            print(f"{shape.name}: {wrong}", file=sys.stderr)
            return 2
        except RuntimeError as wrong:
            print(f"{shape.name}: {wrong}", file=sys.stderr)
            return 1
        print(show(rows), flush=True)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
