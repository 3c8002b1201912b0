"""The protocol of `bench decode`: what is checked and timed, and in which order.

A cell is one shape. Each of its variants runs once on each of several layers of distinct KV. First
the results of eager calls and of a replay of the very graph that is timed are compared with
float64, then the variants are timed in turns, then the results are compared again. A variant of
the lab that is off ends the run; a peer that is off, or fails, is left out with its reason.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from dcp_lab.bench import timing
from dcp_lab.peers import Peer, PeerCall
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
# Pages that are filled at once, so that 8-bit KV needs no second copy of a layer at 16 bits.
FILL_PAGES = 1 << 16
FLOOR = "read_pages floor"


def cold_bytes() -> int:
    """Return how many distinct bytes have to go by before a replay finds nothing in a cache."""
    if not torch.cuda.is_available():
        return MIN_COLD_BYTES
    cache = INFINITY_CACHE_BYTES
    if not torch.version.hip:
        cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(MIN_COLD_BYTES, CACHE_MULTIPLE * cache)


def l2_state(touched_bytes: float) -> str:
    """Return 'cold' if the bytes that one replay touches push one another out, else 'warm'."""
    return "cold" if touched_bytes >= cold_bytes() else "warm"


def fp8_dtype() -> torch.dtype:
    """Return the e4m3 of this machine: e4m3fnuz on gfx942 (MI300X), e4m3fn everywhere else."""
    arch = ""
    if torch.version.hip and torch.cuda.is_available():
        arch = torch.cuda.get_device_properties(0).gcnArchName
    return torch.float8_e4m3fnuz if arch.startswith("gfx942") else torch.float8_e4m3fn


def dtype_name(dtype: torch.dtype) -> str:
    """Return e.g. 'bfloat16'."""
    return str(dtype).removeprefix("torch.")


def lengths_of(lengths: str, requests: int, context_tokens: int) -> list[int]:
    """Return the requests' lengths.

    Args:
        lengths: 'equal'; 'uneven' (evenly spread from 0.4 to 1.6 of the mean); or 'one_long' (one
            request 16 times as long as the others, same total).
        requests: B.
        context_tokens: Tokens of a request, or their mean.

    Raises:
        ValueError: lengths is none of these.
    """
    total = requests * context_tokens
    if lengths not in ("equal", "uneven", "one_long"):
        raise ValueError(f"lengths: expected 'equal', 'uneven' or 'one_long', got {lengths!r}")
    if lengths == "equal" or requests == 1:
        return [context_tokens] * requests
    if lengths == "uneven":
        step = 1.2 / (requests - 1)
        return [int(context_tokens * (0.4 + step * i)) for i in range(requests)]
    short = total // (requests + 15)
    return [total - short * (requests - 1)] + [short] * (requests - 1)


def num_layers(lens: Sequence[int], page_size: int, token_bytes: int, device: str) -> int:
    """Return how many layers of distinct KV make a cold run and fit; 2 without a GPU."""
    layer_bytes = sum(math.ceil(n / page_size) for n in lens) * page_size * token_bytes
    # A page's unused slots take room and are not read.
    touched = sum(lens) * token_bytes
    layers = max(MIN_LAYERS, math.ceil(cold_bytes() / touched)) if device == "cuda" else 2
    return max(1, min(layers, MAX_LAYERS, int(MAX_KV_BYTES / layer_bytes)))


def make_pages(
    layers: int, lens: Sequence[int], page_shape: Sequence[int], page_size: int, **tensor: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (random pages [layers, P, *page_shape], block_table int32 [B, max_pages]).

    Pages of a request lie in random order; the layers share the table.
    """
    pages = [math.ceil(n / page_size) for n in lens]
    kv = torch.empty(layers, sum(pages), *page_shape, **tensor)
    for layer in range(layers):
        if kv.dtype.itemsize > 1:
            kv[layer].normal_()
            continue
        for part in kv[layer].split(FILL_PAGES):
            part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device=kv.device))
    table = torch.zeros(len(lens), max(pages), dtype=torch.int32, device=kv.device)
    order = torch.randperm(sum(pages), device=kv.device).to(torch.int32)
    start = 0
    for request, count in enumerate(pages):
        table[request, :count] = order[start : start + count]
        start += count
    return kv, table


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to do the work of a layer.

    Attributes:
        op, variant: How rows name it.
        call: Does it for layer i, writing out[i] and, where has_lse, lse[i].
        has_lse: Whether lse[i] is written.
        checked: Whether its result is attention at all (`read_pages` only reads).
        kv_traffic: KV bytes moved, as a multiple of the cell's kv_bytes.
        contiguous: K and V [B, tokens, Hkv, D] of layer i that it attends instead of the pages.
        lse: Where layer i's natural LSE [B, Hq] is after a call. Default: lse[i].
        queries: The queries of layer i that it attends, where they are not the cell's: fp8 of
            them. They are what its result is compared for.
        fp8_weights: Whether it rounds the softmax's weights to fp8: plain torch does so too then,
            as it does in the dtype of every other variant.
        in_graph: Whether it can be captured; if not it is timed eagerly alone.
        bound: Variant of the same cell, by its key, whose time is this one's bound.
        peer: Whether it is somebody else's: it is left out where it is off.
    """

    op: str
    variant: str
    call: Callable[[int], object]
    has_lse: bool = True
    checked: bool = True
    kv_traffic: float = 1.0
    contiguous: Callable[[int], tuple[torch.Tensor, torch.Tensor]] | None = None
    lse: Callable[[int], torch.Tensor] | None = None
    queries: Callable[[int], torch.Tensor] | None = None
    fp8_weights: bool = False
    in_graph: bool = True
    bound: str = FLOOR
    peer: bool = False

    @property
    def key(self) -> str:
        """Return e.g. 'paged_decode planned'."""
        return f"{self.op} {self.variant}"


class Shape(Protocol):
    """What the protocol asks of a cell."""

    requests: int

    @property
    def name(self) -> str:
        """Return how messages name it."""
        ...


class Inputs(Protocol):
    """The inputs of a cell: `layers` layers of distinct KV, and where the results go."""

    shape: Shape
    layers: int
    kv: torch.Tensor
    block_table: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    lens: list[int]
    kv_bytes: float
    l2: str

    def expected(self, variant: Variant, layer: int, request: int) -> tuple[AttnState, AttnState]:
        """Return (float64's result, plain torch's in the same dtype) of one request."""
        ...

    def columns(self) -> dict[str, object]:
        """Return the row's columns that name the shape."""
        ...


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


Replay = Callable[[], object]
Check = Callable[[Any, Variant, Replay | None], Errors]


def check_variant(x: Inputs, variant: Variant, replay: Replay | None = None) -> Errors:
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
                f"not timed, since its result is off: {variant.key}, "
                f"{x.shape.name}, replayed: NaN in layers {unwritten[:5]}"
            )
    for layer in sorted({0, x.layers - 1}):
        if replay is None:
            variant.call(layer)
        for request in sorted({0, x.shape.requests - 1}):
            one = slice(request, request + 1)
            truth, eager = x.expected(variant, layer, request)
            lse = x.lse[layer] if variant.lse is None else variant.lse(layer)
            got = AttnState(x.out[layer][one], lse[one])
            compared = (got, truth, eager) if variant.has_lse else (got.out, truth.out, eager.out)
            where = f"{variant.key}, {x.shape.name}, {how}, layer {layer}"
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


def read_variant(x: Inputs) -> Variant:
    """Return the page-ordered read of the same bytes, one page a program: a reference."""
    from dcp_lab.kernels.probe import _read_pages_kernel

    table = x.block_table.flatten()
    if len(set(x.lens)) > 1:
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


def peer_variant(op: str, name: str, made: PeerCall) -> Variant:
    """Return a peer's call as a variant."""
    return Variant(
        op,
        name,
        made.run,
        has_lse=made.lse is not None,
        contiguous=made.contiguous,
        lse=made.lse,
        queries=made.queries,
        fp8_weights=made.fp8_weights,
        peer=True,
    )


def left_out(name: str, why: object) -> None:
    """Say which peer has no row, and why."""
    print(f"peer {name}: left out: {why}"[:300], file=sys.stderr)


def peer_variants(x: Inputs, peers: Iterable[Peer]) -> list[Variant]:
    """Return every peer that can run here, and say why the others are absent.

    A peer that fails or is wrong on these inputs is left out with its reason: its time is not ours
    to report.
    """
    found = []
    for peer in peers:
        reason = peer.why_absent()
        if reason:
            print(f"peer {peer.name}: absent: {reason}", file=sys.stderr)
            continue
        for name, make in peer.calls(x).items():
            try:
                variant = peer_variant(peer.name, name, make())
                check_variant(x, variant)
            except Exception as wrong:
                left_out(f"{peer.name} {name}", wrong)
                continue
            found.append(variant)
    return found


def right_ones(
    x: Inputs,
    variants: Sequence[Variant],
    replays: Mapping[str, Replay] | None = None,
    check: Check = check_variant,
) -> list[Variant]:
    """Return the variants whose results are right, and say which peers are left out.

    Args:
        x: The inputs.
        variants: What to check.
        replays: By key, the graphs to check; a variant without one is not checked here. Default:
            eager calls.
        check: Compares one variant. Default: check_variant.

    Raises:
        RuntimeError: One of the lab's own variants is off.
    """
    kept = []
    for v in variants:
        replay = None if replays is None else replays.get(v.key)
        try:
            if replays is None or replay is not None:
                check(x, v, replay)
        except RuntimeError as wrong:
            if not v.peer:
                raise
            left_out(v.key, wrong)
            continue
        kept.append(v)
    return kept


def _capture(
    x: Inputs, variants: Sequence[Variant]
) -> tuple[list[Variant], dict[str, torch.cuda.CUDAGraph]]:
    """Return (the variants without the peers that cannot be captured, graphs by key)."""
    kept, graphs = [], {}
    stream = torch.cuda.current_stream()
    for v in variants:
        if v.in_graph:
            try:
                graphs[v.key] = timing.capture_layers(v.call, x.layers)
            except Exception as wrong:
                if not v.peer:
                    raise
                # A capture that fails at its end leaves its own stream behind.
                torch.cuda.set_stream(stream)
                left_out(v.key, wrong)
                continue
        kept.append(v)
    return kept, graphs


def measure(
    x: Inputs, variants: Sequence[Variant], *, samples: int, check: Check = check_variant
) -> list[dict[str, object]]:
    """Check and time every variant of one cell; return one row a variant and mode.

    Args:
        x: The inputs.
        variants: What is timed, the bounds of all among them.
        samples: Graph replays of each variant.
        check: Compares one variant. Default: check_variant.

    Raises:
        RuntimeError: A variant of the lab's is off; no row is returned.
    """
    errors = {v.key: check(x, v, None) for v in variants}
    for v in variants:
        v.call(0)
    launches = {v.key: timing.kernel_launches(v.call) for v in variants}
    found, graphs = _capture(x, variants)
    replays = {key: graph.replay for key, graph in graphs.items()}
    found = right_ones(x, found, replays, check)
    graphs = {v.key: graphs[v.key] for v in found if v.in_graph}
    in_graph = timing.graph_times(graphs, layers=x.layers, samples=samples)
    # Before any eager call, which gives a variant that allocates its result another one.
    found = right_ones(x, found, replays, check)
    calls = {v.key: v.call for v in found}
    wall, host = timing.eager_times(calls, layers=x.layers, samples=max(5, samples // 2))
    found = right_ones(x, found, check=check)
    times = {"graph": in_graph, "eager": wall}
    return rows_of(x, found, times, host, launches=launches, errors=errors)


def rows_of(
    x: Inputs,
    variants: Sequence[Variant],
    times: Mapping[str, Mapping[str, list[float]]],
    host: Mapping[str, list[float]],
    *,
    launches: Mapping[str, int],
    errors: Mapping[str, Errors],
) -> list[dict[str, object]]:
    """Return one row a variant and mode that it was timed in.

    Args:
        x: The inputs.
        variants: What was timed.
        times: By mode ('graph', 'eager') and key, samples in us a call.
        host: By key, samples in us until the host had launched a call.
        launches: By key, device kernels of a call.
        errors: By key, what the comparison found.
    """
    by_key = {v.key: v for v in variants}
    rows = []
    for v in variants:
        bound_us = timing.percentiles(times["graph"][v.bound])[0]
        bound_bytes = x.kv_bytes * by_key[v.bound].kv_traffic
        for mode, samples in times.items():
            if v.key not in samples:
                continue
            median, p10, p90 = timing.percentiles(samples[v.key])
            on_host = timing.percentiles(host[v.key]) if mode == "eager" else (None,) * 3
            names = ("host_us", "host_p10_us", "host_p90_us")
            rows.append(
                {
                    "op": v.op,
                    "variant": v.variant,
                    **x.columns(),
                    "mode": mode,
                    "l2": x.l2,
                    "layers": x.layers,
                    "samples": len(samples[v.key]),
                    "median_us": round(median, 3),
                    "p10_us": round(p10, 3),
                    "p90_us": round(p90, 3),
                    **{
                        name: None if us is None else round(us, 3)
                        for name, us in zip(names, on_host, strict=True)
                    },
                    "launches": launches[v.key],
                    "bytes": round(x.kv_bytes * v.kv_traffic),
                    "bound_us": round(bound_us, 3),
                    "read_gbps": round(bound_bytes / bound_us / 1e3, 1),
                    **dataclasses.asdict(errors[v.key]),
                    "method": "graph replay" if mode == "graph" else "host clock, synchronised",
                }
            )
    return rows
