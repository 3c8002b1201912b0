"""Bytes that a decode step moves, the least time they take, and a step as a timeline.

Every formula lives here, once.

A floor is bytes / bandwidth: no launch, no latency, nothing but the traffic. It answers "can this
traffic be the reason?", never "how long will it take?".

The timeline (second part) answers how long: a host queue that launches, a GPU queue that runs what
was launched, points where the host waits for the GPU, and exchanges that start when all ranks have
come. A step takes the longer of the two queues: launches that hide behind GPU work cost nothing.

GB = 1e9 bytes. Times are in us for one layer and in ms for one step (one token for every request
through all layers).
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

LSE_BYTES = 4


def _positive(argument: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not value > 0:
        raise ValueError(f"{argument}: expected a number > 0, got {value!r}")
    return value


def _count(argument: str, value: int) -> int:
    """Counts may be fractional (a mean over a run) but not negative."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not value >= 0:
        raise ValueError(f"{argument}: expected a number >= 0, got {value!r}")
    return value


def kv_bytes(
    tokens: float,
    *,
    num_kv_heads: int,
    head_dim: int,
    kv_itemsize: int,
    head_dim_v: int | None = None,
) -> float:
    """Return the bytes of the keys and values of so many cached tokens, one layer, one rank.

    bytes = tokens * num_kv_heads * (head_dim + head_dim_v) * kv_itemsize

    Args:
        tokens: Cached tokens on this rank, summed over requests.
        num_kv_heads: KV heads on this rank.
        head_dim: Elements of one key.
        kv_itemsize: Bytes of one cached element: 2 for bf16, 1 for fp8.
        head_dim_v: Elements of one value; 0 where the value lies inside the key (MLA).
            Default: head_dim.

    Raises:
        ValueError: A count is negative or a size not positive.
    """
    if head_dim_v is None:
        head_dim_v = head_dim
    _count("tokens", tokens)
    _positive("num_kv_heads", num_kv_heads)
    _positive("head_dim", head_dim)
    _count("head_dim_v", head_dim_v)
    _positive("kv_itemsize", kv_itemsize)
    return tokens * num_kv_heads * (head_dim + head_dim_v) * kv_itemsize


def decode_bytes(
    tokens: float,
    *,
    query_tokens: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    kv_itemsize: int | None = None,
    head_dim_v: int | None = None,
) -> float:
    """Return the least bytes that decode attention moves for one layer on one rank.

    bytes = kv_bytes + query_tokens * num_q_heads * ((head_dim + head_dim_v) * itemsize + 4)

    Each key and value is read once, q is read once, out and the fp32 LSE are written once. Page
    tables, lengths and the partial results of splits are not counted.

    Args:
        tokens: Cached tokens on this rank, summed over requests.
        query_tokens: Query tokens in the batch (the requests, at one token each).
        num_q_heads: Query heads that attend on this rank.
        num_kv_heads: KV heads on this rank.
        head_dim: Elements of one query and key.
        itemsize: Bytes of one element of q and out.
        kv_itemsize: Bytes of one cached element. Default: itemsize.
        head_dim_v: Elements of one value and of one output row. Default: head_dim.

    Raises:
        ValueError: A count is negative or a size not positive.
    """
    if kv_itemsize is None:
        kv_itemsize = itemsize
    if head_dim_v is None:
        head_dim_v = head_dim
    _count("query_tokens", query_tokens)
    _positive("num_q_heads", num_q_heads)
    _positive("itemsize", itemsize)
    kv = kv_bytes(
        tokens,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_itemsize=kv_itemsize,
        head_dim_v=head_dim_v,
    )
    rows = query_tokens * num_q_heads
    return kv + rows * ((head_dim + head_dim_v) * itemsize + LSE_BYTES)


def gather_bytes(
    tokens: float,
    *,
    num_kv_heads: int,
    head_dim: int,
    out_itemsize: int,
    head_dim_v: int | None = None,
) -> float:
    """Return the bytes that gathering adds to a decode that reads the pages itself, one layer.

    bytes = 2 * kv_bytes(at out_itemsize)

    A gather reads the pages (the paged decode reads them too: not counted), writes the contiguous
    copy, and the attention reads the copy back. Both are taken to reach HBM; a copy that stays in
    a cache costs less, so this is the larger figure.

    Args:
        tokens: Cached tokens on this rank, summed over requests.
        num_kv_heads: KV heads on this rank.
        head_dim: Elements of one key.
        out_itemsize: Bytes of one element of the contiguous copy.
        head_dim_v: Elements of one value; 0 where the value lies inside the key (MLA).
            Default: head_dim.

    Raises:
        ValueError: A count is negative or a size not positive.
    """
    return 2 * kv_bytes(
        tokens,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_itemsize=out_itemsize,
        head_dim_v=head_dim_v,
    )


def _exchange(query_tokens: int, num_q_heads: int, ranks: int) -> None:
    _count("query_tokens", query_tokens)
    _positive("num_q_heads", num_q_heads)
    _positive("ranks", ranks)
    if num_q_heads % ranks:
        raise ValueError(f"num_q_heads: expected a multiple of ranks={ranks}, got {num_q_heads}")


def q_all_gather_bytes(
    query_tokens: int, *, num_q_heads: int, head_dim: int, itemsize: int, ranks: int
) -> float:
    """Return the bytes that one rank sends when the group gathers its queries, one layer.

    bytes = (ranks - 1) * query_tokens * num_q_heads / ranks * head_dim * itemsize

    Args:
        query_tokens: Query tokens in the batch.
        num_q_heads: Query heads of the whole group; each rank starts with num_q_heads / ranks.
        head_dim: Elements of one query.
        itemsize: Bytes of one element.
        ranks: Ranks in the group.

    Raises:
        ValueError: A count is negative, or num_q_heads is not a multiple of ranks.
    """
    _exchange(query_tokens, num_q_heads, ranks)
    return (ranks - 1) * query_tokens * (num_q_heads // ranks) * head_dim * itemsize


def a2a_bytes(
    query_tokens: int, *, num_q_heads: int, head_dim: int, itemsize: int, ranks: int
) -> float:
    """Return the bytes that one rank sends in the a2a reducer, one layer.

    bytes = (ranks - 1) * query_tokens * num_q_heads / ranks * (head_dim * itemsize + 4)

    Each peer gets its own heads' partial output and fp32 LSE.

    Args:
        query_tokens: Query tokens in the batch.
        num_q_heads: Query heads of the whole group.
        head_dim: Elements of one output row.
        itemsize: Bytes of one element of the output.
        ranks: Ranks in the group.

    Raises:
        ValueError: A count is negative, or num_q_heads is not a multiple of ranks.
    """
    _exchange(query_tokens, num_q_heads, ranks)
    per_peer = query_tokens * (num_q_heads // ranks) * (head_dim * itemsize + LSE_BYTES)
    return (ranks - 1) * per_peer


def ag_rs_bytes(
    query_tokens: int, *, num_q_heads: int, head_dim: int, itemsize: int, ranks: int
) -> float:
    """Return the bytes that one rank sends in the ag_rs reducer, one layer.

    lse bytes = (ranks - 1) * query_tokens * num_q_heads * 4
    out bytes = (ranks - 1) * query_tokens * num_q_heads / ranks * head_dim * itemsize

    An all-gather of every head's fp32 LSE, then a reduce-scatter of the rescaled output. A ring
    and a direct exchange send the same total.

    Args:
        query_tokens: Query tokens in the batch.
        num_q_heads: Query heads of the whole group.
        head_dim: Elements of one output row.
        itemsize: Bytes of one element of the output.
        ranks: Ranks in the group.

    Raises:
        ValueError: A count is negative, or num_q_heads is not a multiple of ranks.
    """
    _exchange(query_tokens, num_q_heads, ranks)
    gathered = query_tokens * num_q_heads * LSE_BYTES
    scattered = query_tokens * (num_q_heads // ranks) * head_dim * itemsize
    return (ranks - 1) * (gathered + scattered)


def floor_us(moved_bytes: float, gbps: float) -> float:
    """Return the least time in us that moving so many bytes takes at gbps GB/s.

    Raises:
        ValueError: moved_bytes is negative or gbps is not positive.
    """
    return _count("moved_bytes", moved_bytes) / _positive("gbps", gbps) / 1e3


def step_ms(layer_us: float, layers: int) -> float:
    """Return the ms of one step whose every layer takes layer_us.

    Raises:
        ValueError: layer_us is negative or layers is not positive.
    """
    return _count("layer_us", layer_us) * _positive("layers", layers) / 1e3


def gbps_needed(moved_bytes: float, ms: float) -> float:
    """Return the bandwidth in GB/s at which moving so many bytes takes ms.

    Raises:
        ValueError: moved_bytes is negative or ms is not positive.
    """
    return _count("moved_bytes", moved_bytes) / _positive("ms", ms) / 1e6


# ---- a step as a timeline ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Work:
    """One call of the host and what it puts into the GPU's queue.

    Attributes:
        host_us: Host time until the call returns, waiting not counted.
        gpu_us: GPU time of what it queues; 0 queues nothing.
        sync: Whether the host then waits until the GPU's queue is empty.
        barrier: Whether the GPU work starts only when all ranks have reached theirs.
    """

    host_us: float
    gpu_us: float = 0.0
    sync: bool = False
    barrier: bool = False


@dataclasses.dataclass(frozen=True)
class Timeline:
    """How a step went.

    Attributes:
        step_us: Until both queues of every rank are done.
        host_us: Host time of the slowest rank's calls, waiting not counted.
        gpu_us: GPU time of one rank's work, waiting not counted.
    """

    step_us: float
    host_us: float
    gpu_us: float

    @property
    def idle_us(self) -> float:
        """GPU time without work: for launches, the host, or a peer."""
        return self.step_us - self.gpu_us


# A step's layers are alike: after this many its pace has settled.
SETTLED_LAYERS = 8


def timeline(
    layer: Sequence[Work],
    layers: int,
    *,
    before: Sequence[Work] = (),
    host_scales: Sequence[float] = (1.0,),
) -> Timeline:
    """Return how a step of so many equal layers goes on each rank's host and GPU queue.

    A call takes the host host_us; its GPU work starts when the call has returned, the work before
    it is done and, at a barrier, all ranks have come that far. Nothing else is waited for, so a
    host that is ahead costs nothing, and neither does a GPU that waits for nobody.

    Args:
        layer: One layer's calls, the same on all ranks.
        layers: Layers of the step. All are played up to SETTLED_LAYERS, then the pace is kept.
        before: Calls before the first layer.
        host_scales: One rank each: how much longer its host takes for every call. Default: one.

    Raises:
        ValueError: layers or a host scale is not positive.
    """
    _positive("layers", layers)
    for scale in host_scales:
        _positive("host_scales", scale)
    hosts, gpus = [0.0] * len(host_scales), [0.0] * len(host_scales)

    def play(calls: Sequence[Work]) -> float:
        for call in calls:
            for rank, scale in enumerate(host_scales):
                hosts[rank] += call.host_us * scale
            if call.gpu_us:
                starts = [max(pair) for pair in zip(hosts, gpus, strict=True)]
                if call.barrier:
                    starts = [max(starts)] * len(starts)
                gpus[:] = [start + call.gpu_us for start in starts]
            if call.sync:
                hosts[:] = [max(pair) for pair in zip(hosts, gpus, strict=True)]
        return max(*hosts, *gpus)

    ends = [play(before)]
    played = min(layers, SETTLED_LAYERS)
    ends += [play(layer) for _ in range(played)]
    step_us = ends[-1] + (layers - played) * (ends[-1] - ends[-2])
    host = sum(w.host_us for w in before) + layers * sum(w.host_us for w in layer)
    gpu = sum(w.gpu_us for w in before) + layers * sum(w.gpu_us for w in layer)
    return Timeline(step_us=step_us, host_us=host * max(host_scales), gpu_us=gpu)


def queue_spans(layer: Sequence[Work], layers: int) -> tuple[list[tuple[float, float]], ...]:
    """Return (begin, end) in us of each call on the host, and of its work on the GPU.

    By the rules of timeline, one rank. The host's spans leave out what it waits.

    Args:
        layer: One layer's calls.
        layers: How often.
    """
    host = gpu = 0.0
    host_spans, gpu_spans = [], []
    for call in [*layer] * layers:
        host_spans.append((host, host + call.host_us))
        host += call.host_us
        if call.gpu_us:
            start = max(host, gpu)
            gpu = start + call.gpu_us
            gpu_spans.append((start, gpu))
        if call.sync:
            host = max(host, gpu)
    return host_spans, gpu_spans


@dataclasses.dataclass(frozen=True)
class StepConstants:
    """What a machine's launches, kernels and exchanges cost; all but the bandwidths in us.

    Attributes:
        launch_us: Host time of a torch operation, or of a call of this lab's that was made before
            (BoundCalls). Further kernels of one call come with it.
        op_us: Host time of an operation that checks and plans anew in every call: here a gather
            with its attention. A library's compiled operation takes about launch_us.
        collective_launch_us: Host time of a collective.
        graph_launch_us: Host time of launching one graph.
        sync_us: Host time of a wait for the device, the wait itself not counted.
        kernel_us: GPU time of a small kernel, and of a large one besides its bytes.
        collective_us: GPU time of a collective of decode size, all ranks there.
        direct_us: The same of an exchange through peer memory.
        memory_gbps: GB/s at which weights and pages are read, and whole pages copied.
        published_gbps: GB/s of the published gather and the prefill attention behind it: read and
            write of the copy and the attention's read. (They never come apart, so steps cannot
            tell the rates of the two kernels.)
        gather_gbps: GB/s at which the per_token gather copies.
    """

    launch_us: float
    op_us: float
    collective_launch_us: float
    graph_launch_us: float
    sync_us: float
    kernel_us: float
    collective_us: float
    direct_us: float
    memory_gbps: float
    published_gbps: float
    gather_gbps: float


# Whatever a slower or faster host scales.
HOST_CONSTANTS = ("launch_us", "op_us", "collective_launch_us", "graph_launch_us", "sync_us")

# Where a fit starts: orders of magnitude, not results. The published path's rate is an H200's: 94
# layers at 16 x 2,500 in a full graph keep its GPU busy for 43.8 ms, paged for 5.7, and move 61.4
# MB a layer (data/measured/stack_h200.csv). Its copy is a loop of one program a compute unit, so
# the rate says nothing of the memory. per_token's is an H200's too: at 16 x 2,048 its copy takes
# 18.0 us longer than whole pages do (data/measured/decode_h200_split_gather.csv).
START = StepConstants(
    launch_us=20.0,
    op_us=100.0,
    collective_launch_us=30.0,
    graph_launch_us=15.0,
    sync_us=10.0,
    kernel_us=3.0,
    collective_us=11.0,
    direct_us=4.0,
    memory_gbps=4000.0,
    published_gbps=151.0,
    gather_gbps=1300.0,
)


@dataclasses.dataclass(frozen=True)
class StepCase:
    """One corner, as the timeline sees it.

    Attributes:
        mode: "eager", "piecewise" or "full".
        attention: "paged", "published", "published_no_sync", "per_token" or "per_page".
        reducer: "ag_rs", "a2a", "direct", or None without DCP.
        layers: Layers of the step.
        kv_bytes: Keys and values that one rank's attention reads in a layer.
        dense_bytes: Weights that one rank reads in a layer.
        dense_kernels: Kernels of a layer's dense piece, its collectives not counted.
        all_reduces: Collectives of a layer's dense piece.
        query_gather: "nccl" or "direct". Default: "direct" with the direct reducer, else "nccl".
        launch_delay_us: Host time added to every launch.
    """

    mode: str
    attention: str
    reducer: str | None
    layers: int
    kv_bytes: float
    dense_bytes: float
    dense_kernels: int = 11
    all_reduces: int = 2
    query_gather: str | None = None
    launch_delay_us: float = 0.0


class Call(NamedTuple):
    """One kernel of a layer: what the GPU does for it and what the host does.

    Attributes:
        kind: On the GPU: "kernel", "published" (the published gather and the attention behind
            it), "gather" (the per_token copy), "collective", "direct" or "sync".
        moved: Its bytes, where they count.
        host: "launch", "op", "op and sync", "collective", or "with" where the call before
            launches it too.
    """

    kind: str
    moved: float = 0.0
    host: str = "launch"


def layer_calls(case: StepCase) -> list[Call]:
    """Return what lies between two dense pieces, in order: the calls of dcp_lab.stack."""
    kv = case.kv_bytes
    small, more = Call("kernel"), Call("kernel", host="with")
    collective, direct = Call("collective", host="collective"), Call("direct")
    # write_kv.
    calls = [small]
    if case.reducer is not None:
        gather = case.query_gather or ("direct" if case.reducer == "direct" else "nccl")
        calls += [direct] if gather == "direct" else [collective, small]
    if case.attention == "paged":
        # The attention, and the merge of its splits.
        calls += [Call("kernel", kv), more]
    elif case.attention.startswith("published"):
        # It checks and plans, waits for the total, and only then launches its copy.
        waits = case.attention == "published"
        calls += [Call("sync", host="op and sync")] if waits else []
        calls += [Call("published", 2 * kv, "with" if waits else "op")]
        calls += [Call("published", kv, "with")]
    else:
        kind = "gather" if case.attention == "per_token" else "kernel"
        calls += [Call(kind, 2 * kv, "op"), Call("kernel", kv, "with"), more]
    calls += {
        None: [],
        "ag_rs": [collective, small, collective],
        "a2a": [small, collective, small],
        "direct": [direct],
    }[case.reducer]
    if case.attention.startswith("published"):
        # The new token's attention and the merge with it.
        calls += [small, small]
    return calls


def step_work(case: StepCase, constants: StepConstants) -> list[Work]:
    """Return one layer's calls on a machine with these constants.

    In a full graph nothing is launched in a layer. Piecewise, a dense piece is one graph launch.
    """
    c = constants
    rates = {"gather": c.gather_gbps, "published": c.published_gbps}
    exchange_us = {"collective": c.collective_us, "direct": c.direct_us}
    host_us = {
        "launch": c.launch_us,
        "op": c.op_us,
        "collective": c.collective_launch_us,
        "op and sync": c.op_us + c.sync_us,
        "with": 0.0,
    }

    def work(call: Call) -> Work:
        # A sync is a copy of four bytes.
        gpu = exchange_us.get(call.kind)
        if gpu is None:
            gpu = c.kernel_us + floor_us(call.moved, rates.get(call.kind, c.memory_gbps))
        host = 0.0 if case.mode == "full" else host_us[call.host] + case.launch_delay_us
        return Work(host, gpu, sync=call.kind == "sync", barrier=call.kind in exchange_us)

    kernel = Call("kernel", case.dense_bytes / case.dense_kernels)
    dense = [work(Call("collective", host="collective"))] * case.all_reduces
    dense += [work(kernel)] * case.dense_kernels
    if case.mode != "eager":
        launch = c.graph_launch_us + case.launch_delay_us if case.mode == "piecewise" else 0.0
        dense = [Work(launch, sum(w.gpu_us for w in dense), barrier=case.all_reduces > 0)]
    return dense + [work(call) for call in layer_calls(case)]


def predict_step(
    case: StepCase, constants: StepConstants, *, host_scales: Sequence[float] = (1.0,)
) -> Timeline:
    """Return the timeline of one corner.

    Args:
        case: The corner.
        constants: Of the machine.
        host_scales: As of timeline.
    """
    # A full graph is launched once; the plan before the layers once a step in every mode.
    once = constants.graph_launch_us if case.mode == "full" else constants.launch_us
    return timeline(
        step_work(case, constants),
        case.layers,
        before=[Work(once + case.launch_delay_us, constants.kernel_us)],
        host_scales=host_scales,
    )


def predict_ms(case: StepCase, constants: StepConstants) -> float:
    """Return the ms of a step."""
    return predict_step(case, constants).step_us / 1e3


def fit_constants(
    cases: Sequence[StepCase],
    measured_ms: Sequence[float],
    *,
    start: StepConstants = START,
    fixed: Mapping[str, float] | None = None,
    rounds: int = 60,
    prior: float = 0.02,
) -> StepConstants:
    """Fit a machine's constants to measured steps, by least squares of the logarithms.

    Minimises sum (ln predicted - ln measured)^2 + sum (prior ln(constant / start))^2 by
    Levenberg-Marquardt, so every constant stays positive. What the cases say nothing about (a
    launch that is hidden in all of them) stays at start: see which by fitting from another start.

    Args:
        cases: Corners.
        measured_ms: Of each.
        start: Where the fit begins. Default: START.
        fixed: Constants that are known, by name; they are not fitted.
        rounds: Most rounds.
        prior: Weight of staying at start, small: it decides only what the cases leave open.

    Raises:
        ValueError: The lengths differ, no case is given, a time is not positive, or fixed names
            no constant.
    """
    if len(cases) != len(measured_ms) or not cases:
        raise ValueError(
            f"measured_ms: expected one a case, at least one, got {len(measured_ms)} for "
            f"{len(cases)} cases"
        )
    for ms in measured_ms:
        _positive("measured_ms", ms)
    fixed = dict(fixed or {})
    names = [field.name for field in dataclasses.fields(StepConstants)]
    for name in fixed:
        if name not in names:
            raise ValueError(f"fixed: expected names out of {', '.join(names)}, got {name!r}")
    start = dataclasses.replace(start, **fixed)
    free = [name for name in names if name not in fixed]
    target = np.log(np.asarray(measured_ms, dtype=float))

    def constants(x: np.ndarray) -> StepConstants:
        scaled = {n: getattr(start, n) * math.exp(v) for n, v in zip(free, x, strict=True)}
        return dataclasses.replace(start, **scaled)

    def residuals(x: np.ndarray) -> np.ndarray:
        found = constants(x)
        predicted = np.log([predict_ms(case, found) for case in cases])
        return np.concatenate([predicted - target, prior * x])

    return constants(_least_squares(residuals, np.zeros(len(free)), rounds))


def _least_squares(
    residuals: Callable[[np.ndarray], np.ndarray], x: np.ndarray, rounds: int
) -> np.ndarray:
    """Return a minimum of the sum of squares near x, by Levenberg-Marquardt."""
    damping, step = 1e-2, 1e-4
    now = residuals(x)
    for _ in range(rounds):
        slopes = np.stack(
            [(residuals(x + step * unit) - now) / step for unit in np.eye(len(x))], axis=1
        )
        normal = slopes.T @ slopes
        improved = False
        while damping < 1e6 and not improved:
            move = np.linalg.solve(normal + damping * np.eye(len(x)), -slopes.T @ now)
            # At most a factor e^0.5 at once: the slopes change where another queue takes over.
            move *= min(1.0, 0.5 / max(1e-12, np.abs(move).max()))
            then = residuals(x + move)
            improved = then @ then < now @ now
            damping = damping / 3 if improved else damping * 4
        if not improved:
            break
        gained = now @ now - then @ then
        x, now = x + move, then
        damping = max(damping, 1e-6)
        if gained < 1e-10 * (now @ now) + 1e-16:
            break
    return x
