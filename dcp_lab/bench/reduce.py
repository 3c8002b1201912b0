"""Exchanges between ranks: each reducer and query gather, checked, then timed beside bare NCCL.

    dcp-lab bench reduce [--shape 16x16x128 ...] [--ranks 2] [--sweep] [--out rows.csv]
    dcp-lab bench reduce --gate [--out rows.csv]

Variants of one shape (tokens x query heads of the group x head_dim): the lab's reducers `direct`,
`a2a` and `ag_rs`; vLLM's functions of the same names, where vLLM is installed; the query gathers
`direct` and `nccl`; both `direct` forms one after the other, as in a layer; and the collectives
alone, without any pack or merge: `all_to_all`, `all_gather + reduce_scatter`, `all_gather` of q.

Protocol: one process a GPU. Out, LSE and gathered q are compared with float64 and with the very
bits, before any timing; when one is off, on any rank, nothing is timed and the command fails. In
a graph: 40 calls back to back, replays of the variants in turn; before each replay the ranks are
brought together on the device, with the replay already queued. Eager: 40 calls, host clock. Each
sample is the slowest rank's, percentiles come after. The link's bandwidth is a copy of 64 MiB into
the next rank's memory by all ranks at once, in the same run; bound_us is a rank's bytes over it.

--sweep also times `direct` in every launch config worth trying. --gate reads the table and says
which targets of the exchange are met.

Not measured: a wait for a rank that computes longer, several machines, AMD GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist

from dcp_lab.analysis.tables import measured_path
from dcp_lab.bench import costs, record, timing
from dcp_lab.bench.verdicts import Verdict, judge
from dcp_lab.kernels import INTERPRETED
from dcp_lab.kernels.exchange import PROGRAMS_PER_SM, ExchangeConfig
from dcp_lab.ops.device import device_of
from dcp_lab.reducers import make_query_gather, make_reducer
from dcp_lab.reducers.a2a import chunk_bytes
from dcp_lab.reducers.ag_rs import all_gather, reduce_scatter
from dcp_lab.reducers.direct import DirectReducer, symmetric_buffer
from dcp_lab.reducers.local_group import RankError, run_ranks
from dcp_lab.reducers.queries import DirectQueryGather
from dcp_lab.reference import reference_merge
from dcp_lab.state import AttnState
from dcp_lab.testing import assert_within_budget, error_and_budget

CALLS = 40
PROBE_BYTES = 64 << 20
# Long enough for the host to queue a replay behind it.
HEAD_START_CYCLES = 300_000
# Ranks that a run may take at most, seconds.
RUN_LIMIT_S = 540


@dataclasses.dataclass(frozen=True)
class ReduceShape:
    """One cell of the grid.

    Attributes:
        tokens: T.
        num_q_heads: Hq of the whole group.
        head_dim: D of out and of q.
    """

    tokens: int
    num_q_heads: int = 16
    head_dim: int = 128

    @property
    def name(self) -> str:
        """Return e.g. '16 tokens, 16 heads, d128'."""
        return f"{self.tokens} tokens, {self.num_q_heads} heads, d{self.head_dim}"


# Study 1's heads under DCP 2 of one KV head, and MLA's latent width.
DEFAULT_SHAPES = tuple(
    ReduceShape(tokens, head_dim=head_dim)
    for head_dim, tokens in itertools.product((128, 512), (1, 16, 64, 256))
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to do an exchange.

    Attributes:
        op: "reduce", "gather_queries", "gather_and_reduce", or "collective", which computes
            nothing that could be checked.
        variant: How rows name it.
        call: Does it once.
        sent_bytes: What one rank sends.
        result: Returns what one call of it on clean inputs gives: a state, gathered q, or both.
        profiled: Whether its launches are counted, which takes the profiler a while.
    """

    op: str
    variant: str
    call: Callable[[], object]
    sent_bytes: int
    result: Callable[[], tuple[AttnState | None, torch.Tensor | None]] | None = None
    profiled: bool = True


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What one rank has of one shape, and what it should get.

    Attributes:
        shape, size: The shape and the ranks.
        state: This rank's state over all heads.
        q: This rank's query heads [T, Hq / size, D].
        truth, eager: This rank's heads merged in float64, and in plain torch in out's dtype.
        gathered: All ranks' q [T, Hq, D].
    """

    shape: ReduceShape
    size: int
    state: AttnState
    q: torch.Tensor
    truth: AttnState
    eager: AttnState
    gathered: torch.Tensor


def make_inputs(
    shape: ReduceShape,
    rank: int,
    size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
) -> Inputs:
    """Return random inputs, the same in every process but for the rank."""
    states, qs = [], []
    for source in range(size):
        random = torch.Generator().manual_seed(source)
        heads = (shape.tokens, shape.num_q_heads)
        out = torch.randn(*heads, shape.head_dim, generator=random).to(device, dtype)
        lse = (3 * torch.randn(heads, generator=random)).to(device)
        states.append(AttnState(out, lse))
        local = (shape.tokens, shape.num_q_heads // size, shape.head_dim)
        qs.append(torch.randn(local, generator=random).to(device, dtype))
    own = shape.num_q_heads // size
    heads = slice(rank * own, (rank + 1) * own)
    mine = [AttnState(out[:, heads], lse[:, heads]) for out, lse in states]
    outs, lses = (torch.stack(parts) for parts in zip(*mine, strict=True))
    lse = torch.logsumexp(lses, 0)
    eager = (outs * torch.exp(lses - lse).to(dtype)[..., None]).sum(0)
    return Inputs(
        shape=shape,
        size=size,
        state=states[rank],
        q=qs[rank],
        truth=reference_merge(list(outs), list(lses)),
        eager=AttnState(eager, lse),
        gathered=torch.cat(qs, 1),
    )


def check(
    x: Inputs, name: str, state: AttnState | None, gathered: torch.Tensor | None
) -> dict[str, float | None]:
    """Return errors and budgets of a result.

    Raises:
        RuntimeError: The state is over its error budget, or q is not the same to the bit.
    """
    errors: dict[str, float | None] = dict.fromkeys(
        ("out_error", "lse_error", "error_budget", "lse_error_budget")
    )
    if gathered is not None:
        if not torch.equal(gathered, x.gathered):
            wrong = int((gathered != x.gathered).sum())
            raise RuntimeError(f"not timed, since q is off: {name}, {wrong} elements")
        errors |= {"out_error": 0.0, "error_budget": torch.finfo(gathered.dtype).eps}
    if state is not None:
        try:
            assert_within_budget(name, state, x.truth, x.eager)
        except AssertionError as wrong:
            raise RuntimeError(f"not timed, since its result is off: {wrong}") from None
        errors["out_error"], errors["error_budget"] = error_and_budget(
            state.out, x.truth.out, x.eager.out
        )
        errors["lse_error"], errors["lse_error_budget"] = error_and_budget(
            state.lse, x.truth.lse, x.eager.lse, least_scale=1.0
        )
    return errors


def lab_variants(x: Inputs) -> list[Variant]:
    """Return the lab's reducers and gathers and NCCL's collectives alone."""
    shape, size, state, q = x.shape, x.size, x.state, x.q
    dtype, device = q.dtype, q.device
    own = shape.num_q_heads // size
    sizes = {"num_q_heads": shape.num_q_heads, "head_dim": shape.head_dim}
    sent = {
        "a2a": costs.a2a_bytes(shape.tokens, **sizes, itemsize=dtype.itemsize, ranks=size),
        "ag_rs": costs.ag_rs_bytes(shape.tokens, **sizes, itemsize=dtype.itemsize, ranks=size),
        "q": costs.q_all_gather_bytes(shape.tokens, **sizes, itemsize=dtype.itemsize, ranks=size),
    }
    sent = {name: int(count) for name, count in sent.items()}
    sent["direct"] = sent["a2a"]
    common = {
        "group": None,
        "max_tokens": shape.tokens,
        "head_dim": shape.head_dim,
        "dtype": dtype,
        "device": device,
    }
    reducers = {
        name: make_reducer(name, num_q_heads=shape.num_q_heads, **common)
        for name in ("direct", "a2a", "ag_rs")
    }
    gathers = {
        name: make_query_gather(name, num_q_heads_local=own, **common)
        for name in ("direct", "nccl")
    }
    found = [
        Variant("reduce", name, lambda r=r: r(state), sent[name], lambda r=r: (r(state), None))
        for name, r in reducers.items()
    ]
    found += [
        Variant("gather_queries", name, lambda g=g: g(q), sent["q"], lambda g=g: (None, g(q)))
        for name, g in gathers.items()
    ]

    def both() -> tuple[AttnState, torch.Tensor]:
        gathered = gathers["direct"](q)
        return reducers["direct"](state), gathered

    found.append(Variant("gather_and_reduce", "direct", both, sent["q"] + sent["direct"], both))

    chunk = chunk_bytes(shape.tokens, own, shape.head_dim, dtype.itemsize)[1]
    packed, received = torch.zeros(2, size * chunk, dtype=torch.uint8, device=device)
    lses = torch.zeros(size * shape.tokens, shape.num_q_heads, device=device)
    weighed = torch.zeros(size * shape.tokens, own, shape.head_dim, dtype=dtype, device=device)
    scattered = torch.zeros(shape.tokens, own, shape.head_dim, dtype=dtype, device=device)
    gathered = torch.zeros(size * shape.tokens, own, shape.head_dim, dtype=dtype, device=device)

    def gather_and_scatter() -> None:
        all_gather(lses, state.lse)
        reduce_scatter(scattered, weighed)

    return [
        *found,
        Variant(
            "collective",
            "all_to_all",
            lambda: dist.all_to_all_single(received, packed),
            sent["a2a"],
        ),
        Variant("collective", "all_gather + reduce_scatter", gather_and_scatter, sent["ag_rs"]),
        Variant("collective", "all_gather of q", lambda: all_gather(gathered, q), sent["q"]),
    ]


def vllm_variants(
    x: Inputs, functions: Mapping[str, Callable[[AttnState], AttnState]], kind: str
) -> list[Variant]:
    """Return vLLM's functions on a state of their own, which one of them overwrites."""
    scratch = AttnState(*(part.clone() for part in x.state))

    def result(function: Callable[[AttnState], AttnState]) -> tuple[AttnState, None]:
        return function(AttnState(*(part.clone() for part in x.state))), None

    sizes = {"num_q_heads": x.shape.num_q_heads, "head_dim": x.shape.head_dim}
    sizes |= {"itemsize": x.q.dtype.itemsize, "ranks": x.size}
    sent = {"a2a": costs.a2a_bytes, "ag_rs": costs.ag_rs_bytes}
    return [
        Variant(
            "reduce",
            f"vllm {name} ({kind})",
            lambda f=f: f(scratch),
            int(sent[name](x.shape.tokens, **sizes)),
            lambda f=f: result(f),
        )
        for name, f in functions.items()
    ]


def sweep_configs(num_sms: int, dependent_launch: bool) -> dict[str, ExchangeConfig]:
    """Return launch configs of `direct` by name."""
    found = {}
    programs = (num_sms, PROGRAMS_PER_SM * num_sms)
    waits = (False, True) if dependent_launch else (False,)
    for tile, most, wait in itertools.product((256, 512, 1024, 2048, 4096), programs, waits):
        name = f"direct tile {tile}, {most} programs" + (", early launch" if wait else "")
        found[name] = ExchangeConfig(tile_bytes=tile, max_programs=most, wait_launch=wait)
    return found


def sweep_variants(x: Inputs) -> list[Variant]:
    """Return `direct` in every config, as a reducer and as a gather."""
    shape, state, q = x.shape, x.state, x.q
    device = device_of(q.device)
    common = {
        "group": None,
        "max_tokens": shape.tokens,
        "head_dim": shape.head_dim,
        "dtype": q.dtype,
        "device": q.device,
    }
    reducer = DirectReducer(num_q_heads=shape.num_q_heads, **common)
    gather = DirectQueryGather(num_q_heads_local=q.shape[1], **common)
    found = []
    for name, config in sweep_configs(device.num_sms, device.dependent_launch).items():

        def reduce(config: ExchangeConfig = config) -> AttnState:
            reducer.config = config
            return reducer(state)

        def collect(config: ExchangeConfig = config) -> torch.Tensor:
            gather.config = config
            return gather(q)

        sizes = {"num_q_heads": shape.num_q_heads, "head_dim": shape.head_dim}
        sizes |= {"itemsize": q.dtype.itemsize, "ranks": x.size}
        sent = int(costs.a2a_bytes(shape.tokens, **sizes))
        found.append(Variant("reduce", name, reduce, sent, lambda r=reduce: (r(), None), False))
        sent = int(costs.q_all_gather_bytes(shape.tokens, **sizes))
        found.append(
            Variant("gather_queries", name, collect, sent, lambda c=collect: (None, c()), False)
        )
    return found


def link_gbps(rank: int, size: int, device: torch.device) -> float:
    """Return GB/s of a 64 MiB copy into the next rank's memory, all ranks at once; the slowest."""
    _, handle = buffer = symmetric_buffer(PROBE_BYTES, device, dist.group.WORLD)
    there = handle.get_buffer((rank + 1) % size, (PROBE_BYTES,), torch.uint8)
    source = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=device)
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        meet()
        start.record()
        there.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    mine = PROBE_BYTES / 1e6 / sorted(times)[len(times) // 2]
    found: list[float] = [0.0] * size
    dist.all_gather_object(found, mine)
    dist.barrier()
    # The peers have written into it until here.
    del buffer
    return min(found)


def meet() -> None:
    """Let all ranks' devices start what is queued next together, and the host queue it first."""
    torch.cuda._sleep(HEAD_START_CYCLES)
    dist.all_reduce(torch.zeros(1, device="cuda"))


def replay_times(
    graphs: Mapping[str, torch.cuda.CUDAGraph], samples: int
) -> dict[str, list[float]]:
    """Return this rank's us a call of each graph's replays, variants in turn."""
    names = list(graphs)
    found: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        graphs[name].replay()
    for round_ in range(samples):
        turn = round_ % len(names)
        for name in names[turn:] + names[:turn]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            meet()
            start.record()
            graphs[name].replay()
            end.record()
            torch.cuda.synchronize()
            found[name].append(start.elapsed_time(end) * 1e3 / CALLS)
    return found


def eager_times(
    calls: Mapping[str, Callable[[], object]], samples: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return this rank's us a call of eager calls, variants in turn: (wall clock, host only)."""
    names = list(calls)
    wall: dict[str, list[float]] = {name: [] for name in names}
    host: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(samples):
        turn = round_ % len(names)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                calls[name]()
            launched = time.perf_counter()
            torch.cuda.synchronize()
            wall[name].append((time.perf_counter() - start) * 1e6 / CALLS)
            host[name].append((launched - start) * 1e6 / CALLS)
    return wall, host


def slowest(mine: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return, sample by sample, the largest of all ranks."""
    everybody: list[dict[str, list[float]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, mine)
    return {
        name: [max(samples) for samples in zip(*(rank[name] for rank in everybody), strict=True)]
        for name in mine
    }


def on_all_ranks(problem: str | None) -> None:
    """Raise RuntimeError on every rank when any rank has a problem."""
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    found = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
    if found:
        raise RuntimeError("; ".join(found))


def checked(x: Inputs, variants: Sequence[Variant]) -> dict[str, dict[str, float | None]]:
    """Return each variant's errors; raise on all ranks when one is off on any."""
    errors, problem = {}, None
    for v in variants:
        key = f"{v.op} {v.variant}"
        result = (None, None) if v.result is None else v.result()
        torch.cuda.synchronize()
        try:
            errors[key] = check(x, f"{key}, {x.shape.name}", *result)
        except RuntimeError as wrong:
            problem = problem or str(wrong)
    on_all_ranks(problem)
    return errors


def measure_shape(
    x: Inputs, variants: Sequence[Variant], *, gbps: float, samples: int
) -> list[dict[str, object]]:
    """Check and time variants of one shape on this rank; return rows, the same on all ranks.

    Raises:
        RuntimeError: A variant's result is off on some rank; nothing was timed.
    """
    errors = checked(x, variants)
    calls = {f"{v.op} {v.variant}": v.call for v in variants}
    launches: dict[str, int | None] = {}
    for v in variants:
        key = f"{v.op} {v.variant}"
        v.call()
        dist.barrier()
        launches[key] = timing.kernel_launches(lambda _, v=v: v.call()) if v.profiled else None
    graphs = {
        key: timing.capture_layers(lambda _, call=call: call(), CALLS)
        for key, call in calls.items()
    }
    in_graph = slowest(replay_times(graphs, samples))
    wall, host = (slowest(found) for found in eager_times(calls, max(5, samples // 3)))
    # Still right after all the replays.
    checked(x, variants)
    for graph in graphs.values():
        graph.reset()
    rows = []
    for v in variants:
        key = f"{v.op} {v.variant}"
        for mode, found in (("graph", in_graph[key]), ("eager", wall[key])):
            median, p10, p90 = timing.percentiles(found)
            host_us = timing.percentiles(host[key])[0] if mode == "eager" else None
            rows.append(
                {
                    "op": v.op,
                    "variant": v.variant,
                    "ranks": x.size,
                    "tokens": x.shape.tokens,
                    "num_q_heads": x.shape.num_q_heads,
                    "head_dim": x.shape.head_dim,
                    "dtype": str(x.q.dtype).removeprefix("torch."),
                    "mode": mode,
                    "calls": CALLS,
                    "samples": len(found),
                    "median_us": round(median, 3),
                    "p10_us": round(p10, 3),
                    "p90_us": round(p90, 3),
                    "host_us": None if host_us is None else round(host_us, 3),
                    "launches": launches[key],
                    "bytes": v.sent_bytes,
                    "link_gbps": round(gbps, 1),
                    "bound_us": round(max(costs.floor_us(v.sent_bytes, gbps), 1e-3), 3),
                    **errors[key],
                    "method": "graph replay" if mode == "graph" else "host clock, synchronised",
                }
            )
    return rows


def measure_rank(
    rank: int, size: int, shapes: Sequence[ReduceShape], samples: int, sweep: bool
) -> tuple[list[dict[str, object]], str | None]:
    """Measure every shape as one rank; return (rows, why vLLM is absent), of rank 0."""
    from dcp_lab.peers import vllm_reducers

    device = torch.device("cuda", rank)
    gbps = link_gbps(rank, size, device)
    reasons: list[str | None] = [None] * size
    dist.all_gather_object(reasons, vllm_reducers.absent())
    why_absent = next((reason for reason in reasons if reason), None)
    functions: dict[str, Any] = {}
    kind = ""
    if why_absent is None:
        functions, kind = vllm_reducers.make(dist.group.WORLD, device)
    rows = []
    for shape in shapes:
        x = make_inputs(shape, rank, size)
        variants = lab_variants(x) + vllm_variants(x, functions, kind)
        if sweep:
            variants += sweep_variants(x)
        rows += measure_shape(x, variants, gbps=gbps, samples=samples)
        torch.cuda.empty_cache()
        if rank == 0:
            print(show(rows, shape), flush=True)
    torch.cuda.synchronize()
    dist.barrier()
    return (rows if rank == 0 else []), why_absent


# ---- targets -------------------------------------------------------------------------------


DIRECT_LIMITS_US = {1: 4.0, 16: 4.0, 64: 6.0, 256: 8.0}
OVER_COLLECTIVE_US = 4.0
BOTH_LIMIT_US = 7.5
COLLECTIVE_OF = {"a2a": "all_to_all", "ag_rs": "all_gather + reduce_scatter"}


def verdicts(table: pd.DataFrame) -> list[Verdict]:
    """Return every target's verdict for two ranks, each cell by its latest run.

    In a graph, 16 heads, bf16: `direct` within DIRECT_LIMITS_US at 128 dims; a2a and ag_rs within
    4 us of the collectives alone, and faster than vLLM's function of the same name, eager too;
    `direct` gather and reduce together within 7.5 us at 16 tokens.
    """
    cells = table[(table.ranks == 2) & (table.num_q_heads == 16) & (table.dtype == "bfloat16")]
    found = []
    for head_dim, tokens in itertools.product((128, 512), (1, 16, 64, 256)):
        cell = cells[(cells.head_dim == head_dim) & (cells.tokens == tokens)]
        cell = cell[cell.date_utc == cell.date_utc.max()]

        def us(op: str, variant: str, mode: str = "graph", cell: pd.DataFrame = cell):
            rows = cell[(cell.op == op) & (cell["mode"] == mode)]
            rows = rows[[re.fullmatch(variant, name) is not None for name in rows.variant]]
            return None if rows.empty else float(rows.median_us.min())

        where = f"{tokens} tokens, d{head_dim}"
        if head_dim == 128:
            limit = DIRECT_LIMITS_US[tokens]
            found.append(Verdict(f"direct in a graph, {where}", us("reduce", "direct"), limit))
        for name, collective in COLLECTIVE_OF.items():
            alone = us("collective", collective.replace("+", r"\+"))
            limit = None if alone is None else alone + OVER_COLLECTIVE_US
            found.append(
                Verdict(f"{name} against {collective} + 4, {where}", us("reduce", name), limit)
            )
            for mode in ("graph", "eager"):
                found.append(
                    Verdict(
                        f"{name} against vLLM's, {mode}, {where}",
                        us("reduce", name, mode),
                        us("reduce", rf"vllm {name} \(\w+\)", mode),
                    )
                )
        if (tokens, head_dim) == (16, 128):
            value = us("gather_and_reduce", "direct")
            found.append(Verdict(f"direct gather and reduce, {where}", value, BOTH_LIMIT_US))
    return found


# ---- command -------------------------------------------------------------------------------


def parse_shape(text: str) -> ReduceShape:
    """Return the shape of '16', '16x16x128' (tokens, query heads of the group, head_dim).

    Raises:
        ValueError: It is neither.
    """
    numbers = text.split("x")
    if len(numbers) not in (1, 3) or not all(n.isdecimal() and int(n) for n in numbers):
        raise ValueError(f"shape: expected TOKENS or TOKENSxQHEADSxDIM, got {text!r}")
    return ReduceShape(*map(int, numbers))


def show(rows: Sequence[Mapping[str, object]], shape: ReduceShape) -> str:
    """Return the rows of one shape as a small table for a terminal."""
    lines = [f"{shape.name}, us a call   {'graph':>26} {'eager':>8} {'host':>8} {'launches':>9}"]
    by_name: dict[str, dict[str, Mapping[str, object]]] = {}
    size = (shape.tokens, shape.num_q_heads, shape.head_dim)
    for row in rows:
        if (row["tokens"], row["num_q_heads"], row["head_dim"]) == size:
            by_name.setdefault(f"{row['op']} {row['variant']}", {})[str(row["mode"])] = row
    for name, modes in by_name.items():
        graph, eager = modes["graph"], modes["eager"]
        lines.append(
            f"  {name:50} {graph['median_us']:8.2f} {eager['median_us']:8.1f} "
            f"{eager['host_us']:8.1f} {graph['launches'] or '':9}"
        )
    return "\n".join(lines)


def main(args: list[str] | None = None) -> int:
    """Measure and append rows, or judge them; 1 when a result is off or a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", action="append", help="as 16 or 16x16x128; repeatable")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs, one rank each (default: 2)")
    parser.add_argument("--samples", type=int, default=30, help="graph replays of each variant")
    parser.add_argument("--sweep", action="store_true", help="also time launch configs of direct")
    parser.add_argument("--gate", action="store_true", help="measure nothing: judge the table")
    parser.add_argument(
        "--out",
        type=Path,
        help="CSV (default: data/measured/reduce_GPUxRANKS.csv of this machine's GPU; with "
        "--gate, reduce_h200x2.csv)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the grid and stop")
    options = parser.parse_args(args)
    if options.gate:
        table = options.out or measured_path("reduce_h200x2")
        return judge(table, record.REDUCE, verdicts, command="dcp-lab bench reduce")
    try:
        shapes = [parse_shape(s) for s in options.shape] if options.shape else DEFAULT_SHAPES
    except ValueError as wrong:
        print(wrong, file=sys.stderr)
        return 2
    for name, least in (("ranks", 2), ("samples", 5)):
        if getattr(options, name) < least:
            given = getattr(options, name)
            print(f"--{name}: expected at least {least}, got {given}", file=sys.stderr)
            return 2
    odd = [shape.name for shape in shapes if shape.num_q_heads % options.ranks]
    if odd:
        shared = f"heads that {options.ranks} ranks can share"
        print(f"--shape: expected {shared}, got {odd[0]}", file=sys.stderr)
        return 2
    if options.dry_run:
        print("\n".join(shape.name for shape in shapes))
        return 0
    if INTERPRETED or torch.cuda.device_count() < options.ranks:
        print(
            f"bench reduce: expected {options.ranks} GPUs, found "
            f"{0 if INTERPRETED else torch.cuda.device_count()}; --dry-run shows the grid",
            file=sys.stderr,
        )
        return 2
    source = record.provenance()
    if reason := record.why_not_kept(source):
        print(f"bench reduce: {reason}", file=sys.stderr)
        return 2
    machine = record.machine_name(str(source["gpu"]), options.ranks)
    out = options.out or measured_path(f"reduce_{machine}")
    if reason := record.why_not_appended(out, record.REDUCE):
        print(f"--out: {reason}", file=sys.stderr)
        return 2
    try:
        results = run_ranks(
            "dcp_lab.bench.reduce:measure_rank",
            options.ranks,
            args=(tuple(shapes), options.samples, options.sweep),
            backend="nccl",
            timeout_s=RUN_LIMIT_S,
        )
    except (RankError, TimeoutError) as wrong:
        print(wrong, file=sys.stderr)
        return 1
    rows, why_absent = results[0]
    if why_absent is not None:
        print(f"vLLM's exchanges: absent, {why_absent}")
    record.write_rows(out, [{**source, **row} for row in rows], record.REDUCE)
    for shape in shapes:
        print(show(rows, shape))
    return 0


if __name__ == "__main__":
    # The ranks unpickle shapes of the module by its name.
    from dcp_lab.bench import reduce

    sys.exit(reduce.main())
