"""Why a DCP step was 4x slower: what the tables say, what a formula adds, what stays open.

Every function takes tables (dcp_lab.analysis.tables) and returns a table or a small record.
Nothing is fitted here. Each number keeps its kind:

- published: reported by a study, on that study's hardware;
- measured: on the machine that the row names, and only there;
- modelled: bytes over a bandwidth. A floor of the traffic, not a prediction of a run time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

from dcp_lab.bench import costs
from dcp_lab.bench.hardware import Accelerator

MEAN_TPOT = "Mean TPOT (ms)"
MEDIAN_ITL = "Median ITL (ms)"

# Study 2's model has 93 layers: 24 with MLA and 69 with linear attention that keeps no KV cache.
STUDY2_LAYERS = 93


@dataclasses.dataclass(frozen=True)
class Step:
    """One decode step as one rank of a DCP group sees it. The defaults are study 1's.

    Qwen3-235B-A22B has 94 layers, 64 query heads and 4 KV heads of 128: at TP 8 a rank has 8 query
    heads and 1 KV head (each KV head on two ranks, which is what DCP 2 shares out).

    Attributes:
        requests: Requests decoded together.
        ranks: DCP size; a rank holds 1 / ranks of each request's tokens.
        layers: Layers of the model.
        num_kv_heads: KV heads on this rank.
        num_q_heads: Query heads that attend on this rank: under DCP those of all its ranks.
        head_dim: Elements of a key and of a value.
        kv_itemsize: Bytes of one cached element.
    """

    requests: int = 16
    ranks: int = 2
    layers: int = 94
    num_kv_heads: int = 1
    num_q_heads: int = 16
    head_dim: int = 128
    kv_itemsize: int = 2

    def local_tokens(self, context_tokens: float) -> float:
        """Return the cached tokens on one rank, when each request holds context_tokens in all."""
        return self.requests * context_tokens / self.ranks

    def gather_bytes(self, context_tokens: float) -> float:
        """Return the bytes that gathering adds to a step: a copy written and read, each layer."""
        layer = costs.gather_bytes(
            self.local_tokens(context_tokens),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            out_itemsize=self.kv_itemsize,
        )
        return self.layers * layer


def mean_decode_context(input_len: float, output_len: float) -> float:
    """Return the mean number of tokens that a request's decode steps attend.

    mean = input_len + output_len / 2

    A request starts to decode with its prompt in the cache and ends with its output behind it;
    each step adds one token, so the mean is half-way. Exact to one token.
    """
    return input_len + output_len / 2


def metric(serve: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return one metric of study 1: a row a setting, a column a variant.

    Raises:
        ValueError: There is no such metric.
    """
    rows = serve[serve.metric == name]
    if rows.empty:
        known = ", ".join(sorted(serve.metric.unique()))
        raise ValueError(f"name: expected one of {known}, got {name!r}")
    return rows.pivot(index="setting", columns="variant", values="value")


def added_time(
    serve: pd.DataFrame, *, name: str = MEAN_TPOT, baseline: str = "dcp1_full"
) -> pd.DataFrame:
    """Return what DCP 2 adds per output token in each of study 1's settings.

    Args:
        serve: published_serve().
        name: The metric, in ms. Default: mean TPOT.
        baseline: The variant that DCP 2 is compared with. Default: DCP 1 under full graphs.

    Returns:
        Indexed by setting: context_tokens (mean, see mean_decode_context), base_ms, dcp_ms,
        added_ms, ratio.
    """
    wide = metric(serve, name)
    lengths = serve.groupby("setting")[["input_len", "output_len"]].first().astype(float)
    return pd.DataFrame(
        {
            "context_tokens": mean_decode_context(lengths.input_len, lengths.output_len),
            "base_ms": wide[baseline],
            "dcp_ms": wide["dcp2"],
            "added_ms": wide["dcp2"] - wide[baseline],
            "ratio": wide["dcp2"] / wide[baseline],
        }
    )


def run_allowance(serve: pd.DataFrame) -> float:
    """Return the share by which two of study 1's runs of like work differ.

    The study has no repeats. Its two DCP 1 runs of a setting do the same work under two graph
    modes; the largest relative difference between them, over settings and over mean TPOT and
    median ITL, stands in for the spread between runs. An allowance, not a confidence level.
    """
    shares = []
    for name in (MEAN_TPOT, MEDIAN_ITL):
        wide = metric(serve, name)
        shares.append(((wide.dcp1_piecewise - wide.dcp1_full).abs() / wide.dcp1_full).max())
    return float(max(shares))


@dataclasses.dataclass(frozen=True)
class Growth:
    """How the added time changes from the shorter to the longer mean context.

    Attributes:
        change_ms: Added time at the longer context minus that at the shorter.
        allowance_ms: How far two runs may differ without a cause (run_allowance, four runs).
        proportional_ms: The change if all of the added time were proportional to the context.
        per_1000_ms: change_ms per 1,000 tokens.
        per_1000_allowance_ms: allowance_ms per 1,000 tokens.
        share_high: The largest share of the added time that may be proportional to the context.
    """

    change_ms: float
    allowance_ms: float
    proportional_ms: float
    per_1000_ms: float
    per_1000_allowance_ms: float
    share_high: float


def context_growth(
    serve: pd.DataFrame, *, name: str = MEAN_TPOT, spread: float | None = None
) -> Growth:
    """Return whether study 1's added time grows with the context.

    Suppose a share s of the added time is proportional to the context. Then the added time grows
    by s * added * (c2 / c1 - 1) from the shorter context c1 to the longer c2. The observed change
    plus the allowance bounds s from above. This bounds everything that costs time per cached token
    and is not hidden behind something longer: the gather's bytes, its kernel, attention over the
    copy.

    Args:
        serve: published_serve().
        name: The metric, in ms. Default: mean TPOT.
        spread: Share by which a run may differ from its repeat. Default: run_allowance(serve),
            which comes from DCP 1 runs; nobody repeated a DCP 2 run.

    Raises:
        ValueError: The table does not have two settings with different mean contexts.
    """
    added = added_time(serve, name=name).sort_values("context_tokens")
    contexts = added.context_tokens.tolist()
    if len(contexts) != 2 or contexts[0] == contexts[1]:
        raise ValueError(f"serve: expected two settings with different contexts, got {contexts}")
    short, long = added.iloc[0], added.iloc[1]
    change = float(long.added_ms - short.added_ms)
    runs = (short.base_ms, short.dcp_ms, long.base_ms, long.dcp_ms)
    spread = run_allowance(serve) if spread is None else spread
    allowance = spread * math.sqrt(sum(value**2 for value in runs))
    grows_by = long.context_tokens / short.context_tokens - 1
    proportional = float(short.added_ms * grows_by)
    thousands = (long.context_tokens - short.context_tokens) / 1000
    return Growth(
        change_ms=change,
        allowance_ms=float(allowance),
        proportional_ms=proportional,
        per_1000_ms=float(change / thousands),
        per_1000_allowance_ms=float(allowance / thousands),
        share_high=max(0.0, change + allowance) / proportional,
    )


def gather_floor(
    step: Step,
    context_tokens: float,
    accelerators: Sequence[Accelerator],
    *,
    added_ms: float,
) -> pd.DataFrame:
    """Return what the gather's bytes cost in one step, at each accelerator's bandwidths.

    Modelled: bytes over bandwidth, between the accelerator's fastest figure (the vendor's peak)
    and its slowest (a copy, or a tool's low value).

    Args:
        step: Whose bytes.
        context_tokens: Tokens of each request, over all ranks.
        accelerators: Which memories.
        added_ms: The added time to compare with.

    Returns:
        Indexed by accelerator: bytes (a step), gbps_high, gbps_low, low_ms, high_ms, low_share,
        high_share, sources.
    """
    moved = step.gather_bytes(context_tokens)
    rows = []
    for accelerator in accelerators:
        low, high = (
            costs.floor_us(moved, figure.gbps) / 1e3
            for figure in (accelerator.fastest, accelerator.slowest)
        )
        rows.append(
            {
                "accelerator": accelerator.name,
                "bytes": moved,
                "gbps_high": accelerator.fastest.gbps,
                "gbps_low": accelerator.slowest.gbps,
                "low_ms": low,
                "high_ms": high,
                "low_share": low / added_ms,
                "high_share": high / added_ms,
                "sources": f"{accelerator.fastest}; {accelerator.slowest}",
            }
        )
    return pd.DataFrame(rows).set_index("accelerator")


def engine_modes(vllm: pd.DataFrame) -> pd.DataFrame:
    """Return the H200 engine runs with what DCP 2 adds in each graph mode.

    Args:
        vllm: measured_vllm().

    Returns:
        One row a run, indexed by (dcp_size, reducer, cudagraph_mode), reducer "none" without DCP:
        tpot_ms, ratio and added_ms over DCP 1 in the same mode, added_us_per_layer, gathers_kv.
    """
    rows = vllm[vllm.metric == "tpot"].copy()
    rows["reducer"] = rows.dcp_comm_backend.fillna("none")
    base = rows[rows.dcp_size == 1].set_index("cudagraph_mode").value
    over = rows.cudagraph_mode.map(base).astype(float)
    rows["tpot_ms"] = rows.value
    rows["ratio"] = rows.value / over
    rows["added_ms"] = rows.value - over
    rows["added_us_per_layer"] = rows.added_ms * 1e3 / rows.num_layers.astype(float)
    columns = ["tpot_ms", "ratio", "added_ms", "added_us_per_layer", "gathers_kv"]
    return rows.set_index(["dcp_size", "reducer", "cudagraph_mode"])[columns].sort_index()


@dataclasses.dataclass(frozen=True)
class NoGather:
    """The H200 engine's added time under PIECEWISE, where nothing is gathered, in two parts.

    Attributes:
        added_ms: What DCP 2 adds under PIECEWISE.
        full_ms: What it still adds under full graphs: exchange, more kernels, waits.
        removed_ms: What full graphs remove: launches and eager collectives between graph pieces.
        removed_share: removed_ms / added_ms.
        ratio: TPOT of DCP 2 over DCP 1, both under PIECEWISE.
    """

    added_ms: float
    full_ms: float
    removed_ms: float
    removed_share: float
    ratio: float


def no_gather_account(vllm: pd.DataFrame, *, reducer: str = "a2a") -> NoGather:
    """Return how the added time splits on two H200s, where no backend gathers.

    Args:
        vllm: measured_vllm().
        reducer: A reducer that ran in both modes. Default: "a2a".

    Raises:
        ValueError: A run that gathers is in the table, or the reducer was not run in both modes.
    """
    modes = engine_modes(vllm)
    if set(modes.gathers_kv) != {"no"}:
        raise ValueError(
            f"vllm: expected runs without a gather, got {sorted(set(modes.gathers_kv))}"
        )
    try:
        piecewise = modes.loc[(2, reducer, "PIECEWISE")]
        full = modes.loc[(2, reducer, "FULL_AND_PIECEWISE")]
    except KeyError:
        raise ValueError(f"reducer: expected one run in both modes, got {reducer!r}") from None
    removed = piecewise.added_ms - full.added_ms
    return NoGather(
        added_ms=float(piecewise.added_ms),
        full_ms=float(full.added_ms),
        removed_ms=float(removed),
        removed_share=float(removed / piecewise.added_ms),
        ratio=float(piecewise.ratio),
    )


@dataclasses.dataclass(frozen=True)
class GraphGain:
    """What full graphs did in study 2.

    Attributes:
        ratio: TPOT under PIECEWISE over TPOT under full graphs.
        saved_ms: Their difference.
        saved_us_per_layer: The same for one of the model's 93 layers, of which 24 use DCP.
    """

    ratio: float
    saved_ms: float
    saved_us_per_layer: float


def graph_gain(modes: pd.DataFrame, *, layers: int = STUDY2_LAYERS) -> GraphGain:
    """Return what full graphs instead of PIECEWISE saved in study 2 (published_graph_modes())."""
    tpot = modes.set_index("cudagraph_mode").mean_tpot_ms
    saved = tpot["PIECEWISE"] - tpot["FULL_AND_PIECEWISE"]
    return GraphGain(
        ratio=float(tpot["PIECEWISE"] / tpot["FULL_AND_PIECEWISE"]),
        saved_ms=float(saved),
        saved_us_per_layer=float(saved * 1e3 / layers),
    )


_PEER_PATHS = {
    "fa3_paged": ("paged", "FA3, paged"),
    "fa3_paged_meta": ("paged", "FA3, paged, planned"),
    "fa3_paged_meta32": ("paged", "FA3, paged, planned, 32 splits"),
    "token_then_fa3": ("gather", "per_token gather, then FA3"),
    "page_then_fa3": ("gather", "per_page gather, then FA3"),
    "fa3_contig_cold": ("contiguous", "FA3 on contiguous KV"),
}

_DECODE_PATHS = {
    "paged_decode": ("paged", "paged_decode, {}"),
    "gather_decode": ("gather", "{} gather, then attend"),
    "sdpa": ("contiguous", "torch SDPA, {} KV"),
    "read_pages": ("read", "reading the pages in order"),
}

# What makes rows comparable: the same attention, started in the same way.
_SHAPE = [
    "requests",
    "context_tokens",
    "num_q_heads",
    "num_kv_heads",
    "head_dim",
    "page_size",
    "kv_dtype",
    "lengths",
]
_SHAPE_AND_MODE = [*_SHAPE, "mode"]


def peer_paths(peers: pd.DataFrame) -> pd.DataFrame:
    """Return the peers' gather group (measured_peers()) as ways to attend, side by side.

    The gather there feeds FlashAttention 3, so only FlashAttention 3 stands for the paged way.

    Returns:
        One row a shape, mode and way: path ("paged", "gather", "contiguous" or "read"), label,
        median_us, low_us and high_us (smallest and 90th percentile in a graph, the two passes
        where eager), host_us, launches, gpu; paged_us (the best paged row of the same shape and
        mode) and extra_us = median_us - paged_us.
    """
    rows = peers[(peers.group == "gather") & peers.peer.isin(_PEER_PATHS)].copy()
    rows["lengths"] = "equal"
    rows["path"] = rows.peer.map(lambda peer: _PEER_PATHS[peer][0])
    rows["label"] = rows.peer.map(lambda peer: _PEER_PATHS[peer][1])
    passes = rows[["median_us", "again_us"]]
    rows["low_us"] = rows.min_us.fillna(passes.min(axis=1))
    rows["high_us"] = rows.p90_us.fillna(passes.max(axis=1))
    return _extra(rows)


def decode_paths(decode: pd.DataFrame) -> pd.DataFrame:
    """Return the lab's own bench (measured("decode_...")) as ways to attend, side by side.

    Returns:
        As peer_paths; low_us and high_us are the 10th and the 90th percentile.
    """
    rows = decode[decode.op.isin(_DECODE_PATHS)].copy()
    # A bound call saves host time that a bound gather would save too: like against like.
    rows = rows[(rows.op != "paged_decode") | (rows.variant != "bound")]
    rows["path"] = rows.op.map(lambda op: _DECODE_PATHS[op][0])
    labels = zip(rows.op, rows.variant, strict=True)
    rows["label"] = [_DECODE_PATHS[op][1].format(variant) for op, variant in labels]
    rows["low_us"], rows["high_us"] = rows.p10_us, rows.p90_us
    return _extra(rows)


def _extra(rows: pd.DataFrame) -> pd.DataFrame:
    """Add how much longer each row takes than the best paged row of its shape and mode."""
    # A bench that ran twice has two rows of a kind: the later one stands.
    rows = rows.sort_values("date_utc", kind="stable")
    rows = rows.drop_duplicates([*_SHAPE_AND_MODE, "path", "label"], keep="last")
    paged = rows[rows.path == "paged"].groupby(_SHAPE_AND_MODE).median_us.min().rename("paged_us")
    rows = rows.join(paged, on=_SHAPE_AND_MODE)
    rows["extra_us"] = rows.median_us - rows.paged_us
    columns = ["path", "label", "median_us", "low_us", "high_us", "host_us", "launches"]
    rows = rows[[*_SHAPE_AND_MODE, *columns, "paged_us", "extra_us", "gpu"]]
    return rows.sort_values([*_SHAPE_AND_MODE, "path", "label"]).reset_index(drop=True)


def covering_shape(paths: pd.DataFrame, step: Step, context_tokens: float) -> pd.DataFrame:
    """Return the rows of the smallest measured shape with as many tokens as this step's rank.

    A rank attends context_tokens / ranks tokens of each request. Only shapes with equal lengths
    and the step's KV heads, head_dim and kv_itemsize are looked at. Where none is large enough,
    the largest stands in for it. Of shapes with as many tokens in all, the one with the nearest
    number of requests is taken, then the one with the nearest number of query heads.

    Raises:
        ValueError: There is no such shape.
    """
    fits = paths[
        (paths.lengths == "equal")
        & (paths.num_kv_heads == step.num_kv_heads)
        & (paths.head_dim == step.head_dim)
        & paths.kv_dtype.map(lambda name: getattr(torch, name).itemsize == step.kv_itemsize)
    ]
    if fits.empty:
        raise ValueError(
            f"paths: expected rows with equal lengths, num_kv_heads={step.num_kv_heads}, "
            f"head_dim={step.head_dim} and {step.kv_itemsize}-byte KV, got none"
        )
    shapes = fits[_SHAPE].drop_duplicates()
    tokens = shapes.requests * shapes.context_tokens
    large_enough = tokens[tokens >= step.local_tokens(context_tokens)]
    total = large_enough.min() if len(large_enough) else tokens.max()
    candidates = shapes[tokens == total]
    distance = pd.DataFrame(
        {
            "requests": (candidates.requests - step.requests).abs().astype(float),
            "heads": (candidates.num_q_heads - step.num_q_heads).abs().astype(float),
        }
    )
    nearest = distance.sort_values(["requests", "heads"], kind="stable").index[0]
    return fits.merge(candidates.loc[[nearest]], on=_SHAPE)


@dataclasses.dataclass(frozen=True)
class GatherCost:
    """What a gather in every layer adds to a step on the machine that was measured.

    Attributes:
        graph_low_ms, graph_high_ms: GPU time, from the best to the worst gather, in a graph.
        eager_low_ms, eager_high_ms: Wall time when each kernel is launched from the host.
        bytes_low_ms, bytes_high_ms: Of the GPU time, the traffic, at the machine's fastest and
            slowest bandwidth figure.
        gpu: The machine.
        shape: requests x tokens on the rank.
        covers: Whether that is at least what the step's rank attends.
    """

    graph_low_ms: float
    graph_high_ms: float
    eager_low_ms: float
    eager_high_ms: float
    bytes_low_ms: float
    bytes_high_ms: float
    gpu: str
    shape: str
    covers: bool


def attend_of(paths: pd.DataFrame) -> str:
    """Return 'unsplit' or 'split': how the rows' gather_decode attends its copy, by its launches.

    One launch gathers and one attends; a split attend needs one more, which merges its parts.
    """
    launches = paths[(paths.path == "gather") & paths.launches.notna()].launches
    if launches.empty:
        raise ValueError("paths: expected gather rows with their launches, got none")
    return "unsplit" if launches.max() <= 2 else "split"


def gather_cost(
    paths: pd.DataFrame, step: Step, context_tokens: float, accelerator: Accelerator
) -> GatherCost:
    """Return what gathering in every layer adds to a step, from measured rows.

    Args:
        paths: peer_paths(...) or decode_paths(...): paged and gather rows, in a graph and eager.
        step: Whose step; its layers multiply the rows, which are of one layer.
        context_tokens: Tokens of each request over all ranks; picks the shape (covering_shape).
        accelerator: The machine of the rows.

    Raises:
        ValueError: There is no shape, or a mode has no gather row or no paged row.
    """
    rows = covering_shape(paths, step, context_tokens)
    extra = {}
    for mode in ("graph", "eager"):
        gather = rows[(rows.path == "gather") & (rows["mode"] == mode)]
        if gather.empty or gather.extra_us.isna().any():
            raise ValueError(f"paths: expected paged and gather rows in mode {mode}, got none")
        extra[mode] = [costs.step_ms(max(0.0, us), step.layers) for us in gather.extra_us]
    first = rows.iloc[0]
    tokens = int(first.requests * first.context_tokens)
    moved = step.layers * costs.gather_bytes(
        tokens,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        out_itemsize=step.kv_itemsize,
    )
    return GatherCost(
        graph_low_ms=min(extra["graph"]),
        graph_high_ms=max(extra["graph"]),
        eager_low_ms=min(extra["eager"]),
        eager_high_ms=max(extra["eager"]),
        bytes_low_ms=costs.floor_us(moved, accelerator.fastest.gbps) / 1e3,
        bytes_high_ms=costs.floor_us(moved, accelerator.slowest.gbps) / 1e3,
        gpu=first.gpu,
        shape=f"{first.requests} x {first.context_tokens}",
        covers=tokens >= step.local_tokens(context_tokens),
    )


def with_launches_of(kernels: GatherCost, launches: GatherCost) -> GatherCost:
    """Return one cost of two tables: GPU time between both, launches from the second.

    What an eager row takes from the host depends on who launches. The lab's calls check their
    arguments in Python, which costs more than the launches that are compared; rows of a library
    whose calls are compiled show what a launch costs.

    Args:
        kernels: gather_cost(...) of rows whose graph times count.
        launches: gather_cost(...) of rows whose graph and eager times count.
    """
    return dataclasses.replace(
        launches,
        graph_low_ms=min(kernels.graph_low_ms, launches.graph_low_ms),
        graph_high_ms=max(kernels.graph_high_ms, launches.graph_high_ms),
        covers=kernels.covers and launches.covers,
    )


def step_gpu_time(stack: pd.DataFrame, step: Step) -> pd.DataFrame:
    """Return the GPU time of a whole decode step without DCP, by context and attention path.

    Only rows with the step's layers, KV heads, head_dim and requests, the light dense part, no
    DCP, no launch delay and calls that are not bound. Where a path was timed in several graph
    modes, the median of them: the same kernels run, so they differ by a percent or two.

    Args:
        stack: measured("stack_...").
        step: Whose shapes. Its query heads are not asked for: the gather does not depend on them.

    Returns:
        Indexed by context_tokens, a column an attention path, in ms; NaN where not measured.

    Raises:
        ValueError: There is no such row.
    """
    rows = stack[
        (stack.num_layers == step.layers)
        & (stack.kv_layers == step.layers)
        & (stack.num_kv_heads == step.num_kv_heads)
        & (stack.head_dim == step.head_dim)
        & (stack.requests == step.requests)
        & (stack.dense == "light")
        & (stack.dcp_size == 1)
        & (stack.launch_delay_us == 0)
        & ~stack.bound.astype(bool)
    ]
    rows = rows[rows.gpu_busy_ms.notna()]
    if rows.empty:
        raise ValueError(
            f"stack: expected profiled rows without DCP of {step.layers} layers, "
            f"{step.requests} requests, num_kv_heads={step.num_kv_heads} and "
            f"head_dim={step.head_dim}, got none"
        )
    groups = rows.groupby(["context_tokens", "attention"]).gpu_busy_ms
    return groups.median().astype(float).unstack()


def step_modes(
    stack: pd.DataFrame, *, block: str, requests: int, context_tokens: int
) -> pd.DataFrame:
    """Return one block's steps at one shape, unbound: a row a graph mode and attention path.

    Returns:
        Indexed by (mode, attention): median_ms, p10_ms, p90_ms, host_ms, gpu_busy_ms,
        kernel_launches, host_syncs.

    Raises:
        ValueError: There is no such row.
    """
    rows = stack[
        (stack.block == block)
        & (stack.requests == requests)
        & (stack.context_tokens == context_tokens)
        & (stack.dcp_size == 1)
        & ~stack.bound.astype(bool)
    ]
    if rows.empty:
        raise ValueError(
            f"stack: expected rows of block {block!r} with {requests} requests of "
            f"{context_tokens} tokens, got none"
        )
    columns = ["median_ms", "p10_ms", "p90_ms", "host_ms", "gpu_busy_ms"]
    columns += ["kernel_launches", "host_syncs"]
    return rows.set_index(["mode", "attention"])[columns]


@dataclasses.dataclass(frozen=True)
class PublishedGather:
    """What the published path's kernels add to a step's GPU time on one rank.

    The path copies with min(tokens, compute units) programs, each of which loops token by token,
    and attends the copy with a kernel built for prefill.

    Attributes:
        extra_ms: GPU time beyond the paged path's, at the measured machine's price.
        bytes_low_ms: Of it, the gather's traffic at that machine's fastest bandwidth figure.
        rank_tokens: Tokens of a request on the rank.
        accelerator: The measured machine.
    """

    extra_ms: float
    bytes_low_ms: float
    rank_tokens: float
    accelerator: Accelerator

    def scaled_ms(self, accelerator: Accelerator) -> float:
        """Return extra_ms were it all a loop that the compute units share out.

        extra_ms * (compute units measured / compute units of the other)

        Modelled: a turn of the loop is assumed to take as long on both.
        """
        return self.extra_ms * self.accelerator.compute_units / accelerator.compute_units


def published_gather(
    stack: pd.DataFrame, step: Step, context_tokens: float, accelerator: Accelerator
) -> PublishedGather:
    """Return what the published path's kernels add, on a rank with context_tokens / ranks.

    The GPU time of "published" minus that of "paged" (step_gpu_time), linear between the two
    measured contexts around the rank's.

    Args:
        stack: measured("stack_...").
        step: Whose rank.
        context_tokens: Tokens of each request over all ranks.
        accelerator: The machine of the rows.

    Raises:
        ValueError: A path was not measured, or the rank's tokens lie outside the measured
            contexts: nothing is extrapolated.
    """
    busy = step_gpu_time(stack, step)
    if missing := {"paged", "published"} - set(busy.columns):
        raise ValueError(f"stack: expected rows of paged and published, got no {missing.pop()}")
    extra = (busy.published - busy.paged).dropna().sort_index()
    tokens = context_tokens / step.ranks
    if extra.empty or not extra.index[0] <= tokens <= extra.index[-1]:
        raise ValueError(
            f"context_tokens: expected {step.ranks} x a measured context "
            f"({', '.join(map(str, extra.index))}) or between two, got {context_tokens:g}"
        )
    moved = step.gather_bytes(context_tokens)
    return PublishedGather(
        extra_ms=float(np.interp(tokens, extra.index.astype(float), extra)),
        bytes_low_ms=costs.floor_us(moved, accelerator.fastest.gbps) / 1e3,
        rank_tokens=tokens,
        accelerator=accelerator,
    )


def waterfall(
    floor: pd.DataFrame,
    gather: GatherCost,
    published: PublishedGather | None = None,
    *,
    added_ms: float,
) -> pd.DataFrame:
    """Return study 1's added time as parts with an interval each: explained, and the open rest.

    The gather's parts are added as if none hid behind another: the most a gather can come to.

    - its bytes: modelled, between the fastest and the slowest of the given accelerators;
    - its kernels' GPU time beyond their bytes: from the best gather to the published path's (the
      worst measured one, should that be more), measured on another machine, carried over as it is;
    - its launches from the host: wall time, eager, on that machine, carried over as it is.

    What is left is open. Nobody measured on study 1's machine how long its launches, collectives
    and waits take; the host sync that its gather needs in each layer is in there too.

    Args:
        floor: gather_floor(...) of the accelerators that study 1 may have run on.
        gather: gather_cost(...).
        published: published_gather(...). Default: None, one of the gathers of gather_cost alone.
        added_ms: Study 1's added time.

    Returns:
        Indexed by part: low_ms, high_ms, state ("explained" or "open"), basis, hardware.
    """
    names = " to ".join(name.removeprefix("AMD Instinct ") for name in floor.index)
    explained = {
        "gather: its bytes": (floor.low_ms.min(), floor.high_ms.max(), "modelled", names),
        "gather: its kernels beyond the bytes": (
            max(0.0, gather.graph_low_ms - gather.bytes_high_ms),
            max(
                0.0,
                gather.graph_high_ms - gather.bytes_low_ms,
                0.0 if published is None else published.extra_ms - published.bytes_low_ms,
            ),
            "measured",
            gather.gpu,
        ),
        "gather: its launches": (
            gather.eager_low_ms,
            gather.eager_high_ms,
            "measured",
            gather.gpu,
        ),
    }
    table = pd.DataFrame.from_dict(
        explained, orient="index", columns=["low_ms", "high_ms", "basis", "hardware"]
    )
    table["state"] = "explained"
    rest = added_ms - table[["high_ms", "low_ms"]].sum().to_numpy()
    table.loc["open"] = [*rest, "published", "AMD, not stated", "open"]
    return table.rename_axis("part")
