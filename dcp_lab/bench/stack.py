"""Whole decode steps: attention path x reducer x graph mode, checked, then timed on every rank.

    dcp-lab bench stack [--seconds 140] [--layers 94] [--only BLOCK ...] [--ranks 1 | 2]
    torchrun --nproc-per-node 2 -m dcp_lab.bench.stack [...]

One GPU measures what the attention paths cost without any exchange, each in every mode.
Corners are measured in blocks, the ones that decide first. Of each block every corner is built,
checked and profiled, then all are timed in turn, and the block's rows are written. When the time
is over, the command ends with what it has.

Protocol: one process a GPU. Before any timing a corner's last attention is compared with the
float64 oracle, given the q, K and V of that step, and the residual stream after all layers with
float64 too; a corner that is off on any rank has no row. A sample is a few steps, each followed by
a synchronisation, as an engine that reads its token; the slowest rank counts, percentiles come
after. host_ms is the host's part of it: until the last launch has returned (a host sync inside a
step is in it). Launches, GPU-busy time and communication kernels are from torch.profiler, of one
step. Communication kernels that wait for a peer are busy: comm_least_ms, the smallest of the
ranks, holds less of that wait than comm_ms, the largest.

--traces FILE also keeps a few layers of each profiled step, for ui.perfetto.dev. With --only
traces nothing else is done: a few corners in each mode are checked and profiled, none is timed. On
one GPU those with DCP make every call that they make beside a peer, and there is no peer.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import gzip
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcp_lab.analysis.tables import measured_path
from dcp_lab.bench import costs, record, timing
from dcp_lab.bench.reduce import on_all_ranks
from dcp_lab.files import why_unwritable
from dcp_lab.graphs import launches_in_trace
from dcp_lab.kernels import INTERPRETED
from dcp_lab.reducers.local_group import RankError, run_ranks
from dcp_lab.stack import (
    ATTENTIONS,
    KIMI_K3_LIKE,
    MODELS,
    QWEN3_235B,
    REDUCERS,
    Corner,
    Stack,
    Step,
)
from dcp_lab.testing import assert_within_budget, error_and_budget

STEPS_A_SAMPLE = 3
# What is kept back for ending well, and how much longer than asked the processes may live.
RESERVE_S = 4.0
GRACE_S = 20.0
TRACED_LAYERS = 3
TRACES = "traces"
# Of a trace's events, what the GPU did; and how much of a name is kept.
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
MOST_NAME = 120
_WINDOW = "dcp_lab.bench.stack"
_COMMUNICATION = ("nccl", "_direct_")


@dataclasses.dataclass(frozen=True)
class Block:
    """Corners that are timed in turn, and what they run on.

    Attributes:
        name: For --only.
        corners: In the order of importance.
        model, dense, requests, context: As of Stack; context counts the token being decoded.
        delays_us: Host time added a launch; each is measured. Default: none.
        timed: Whether there are rows of it; else its steps are only checked and profiled.
    """

    name: str
    corners: tuple[Corner, ...]
    model: str = QWEN3_235B.name
    dense: str = "light"
    requests: int = 16
    context: int = 2500
    delays_us: tuple[float, ...] = (0.0,)
    timed: bool = True

    @property
    def stack(self) -> tuple[str, str, int]:
        """What needs other weights and buffers."""
        return self.model, self.dense, self.requests


def corner(attention: str, reducer: str, mode: str, **options: Any) -> Corner:
    """Return a corner with DCP."""
    return Corner(mode, attention=attention, reducer=reducer, **options)


def blocks() -> tuple[Block, ...]:
    """Return what is measured, what decides first."""
    from_no_dcp_to_published = (
        Corner.no_dcp("full"),
        Corner.no_dcp("piecewise"),
        corner("published", "ag_rs", "piecewise"),
        corner("published_no_sync", "ag_rs", "piecewise"),
        corner("paged", "ag_rs", "piecewise"),
    )
    to_full = (
        corner("paged", "a2a", "piecewise"),
        corner("paged", "a2a", "full"),
        corner("paged", "ag_rs", "full"),
        corner("paged", "direct", "full"),
    )
    gathers = (
        corner("per_token", "a2a", "full"),
        corner("per_page", "a2a", "full"),
        corner("published_no_sync", "ag_rs", "full"),
        corner("paged", "direct", "piecewise"),
    )
    eager = (
        Corner.no_dcp("eager"),
        corner("published", "ag_rs", "eager"),
        corner("paged", "ag_rs", "eager"),
        corner("paged", "a2a", "eager"),
        corner("paged", "direct", "eager"),
    )
    decisive = (
        Corner.no_dcp("full"),
        Corner.no_dcp("piecewise"),
        corner("published", "ag_rs", "piecewise"),
        corner("paged", "ag_rs", "piecewise"),
        corner("paged", "ag_rs", "full"),
        corner("paged", "direct", "full"),
    )
    bound = (
        Corner.no_dcp("piecewise", bound=True),
        corner("paged", "a2a", "piecewise", bound=True),
        corner("paged", "direct", "piecewise", bound=True),
    )
    seen = {*from_no_dcp_to_published, *to_full, *gathers, *eager}
    every = tuple(
        corner(attention, reducer, mode)
        for mode in ("piecewise", "full", "eager")
        for attention in ATTENTIONS
        for reducer in REDUCERS
        if (mode, attention) != ("full", "published")
    )
    rest = tuple(c for c in every if c not in seen)
    crossed = tuple(c for c in (*seen, *rest) if c not in decisive)
    parts = range(0, len(rest), 5)
    latent = (
        Corner.no_dcp("full"),
        Corner.no_dcp("piecewise"),
        corner("paged", "a2a", "piecewise"),
        corner("paged", "a2a", "full"),
        corner("paged", "direct", "full"),
    )
    delayed = (
        Corner.no_dcp("piecewise"),
        corner("published", "ag_rs", "piecewise"),
        corner("paged", "ag_rs", "piecewise"),
        corner("paged", "a2a", "full"),
    )
    return (
        Block("base", from_no_dcp_to_published),
        Block("base", to_full),
        Block("base", gathers),
        Block("eager", eager),
        Block("3000", (*from_no_dcp_to_published, *to_full), context=3000),
        Block("heavy", (*decisive, corner("paged", "a2a", "full")), dense="heavy"),
        Block("delay", delayed, delays_us=(10.0, 30.0)),
        *(Block("context", decisive, context=context) for context in (8192, 1024, 32768)),
        Block("bound", bound),
        *(Block("cross", rest[i : i + 5]) for i in parts),
        Block("latent", latent, model=KIMI_K3_LIKE.name, requests=8, context=8192),
        *(Block("batch", decisive, requests=requests) for requests in (1, 64)),
        *(Block("cross3000", crossed[i : i + 6], context=3000) for i in range(0, len(crossed), 6)),
    )


def blocks_alone() -> tuple[Block, ...]:
    """Return what one GPU measures: attention paths and modes, no exchange."""

    def alone(mode: str, *attentions: str) -> tuple[Corner, ...]:
        return tuple(Corner.no_dcp(mode, attention=attention) for attention in attentions)

    full = alone("full", *(a for a in ATTENTIONS if a != "published"))
    piecewise = alone("piecewise", *ATTENTIONS)
    eager = alone("eager", "paged", "published", "per_page")
    bound = (Corner.no_dcp("full", bound=True), Corner.no_dcp("piecewise", bound=True))
    decisive = (*alone("full", "paged", "per_page"), *alone("piecewise", "paged", "published"))
    latent = (Corner.no_dcp("full"), Corner.no_dcp("piecewise"))
    return (
        Block("base", full),
        Block("base", piecewise),
        Block("base", (*eager, *bound)),
        Block("3000", decisive, context=3000),
        Block("delay", piecewise[:2], delays_us=(10.0, 30.0)),
        *(Block("context", decisive, context=context) for context in (8192, 1024, 32768)),
        Block("heavy", decisive, dense="heavy"),
        Block("latent", latent, model=KIMI_K3_LIKE.name, requests=8, context=8192),
        *(Block("batch", decisive, requests=requests) for requests in (1, 64)),
    )


def blocks_traced(ranks: int) -> tuple[Block, ...]:
    """Return what --only traces profiles: each mode without and with DCP, and with a gather."""
    with_dcp = [corner("paged", "ag_rs", mode) for mode in ("full", "piecewise", "eager")]
    # Written to a peer's memory: not without one.
    direct = [corner("paged", "direct", mode) for mode in ("full", "piecewise")]
    corners = (
        *(Corner.no_dcp(mode) for mode in ("full", "piecewise", "eager")),
        *with_dcp,
        corner("published", "ag_rs", "piecewise"),
        *(direct if ranks > 1 else ()),
    )
    return (Block(TRACES, corners, timed=False),)


# ---- one corner ----------------------------------------------------------------------------


def _errors(
    name: str, got: torch.Tensor, truth: torch.Tensor, plain: torch.Tensor
) -> tuple[float, float]:
    """Return (error, budget) of a result that is within it; raise RuntimeError when it is not."""
    try:
        assert_within_budget(name, got, truth, plain)
    except AssertionError as wrong:
        raise RuntimeError(f"not timed, since its result is off: {wrong}") from None
    return error_and_budget(got, truth, plain)


def check(stack: Stack, name: str, hidden: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    """Return errors and budgets of what the last step left in the stack.

    Args:
        stack: After a step.
        name: Of the corner, for the message.
        hidden: The residual stream in float64 and in plain torch.

    Raises:
        RuntimeError: Something is over its budget.
    """
    truth, plain = stack.last_attention(), stack.last_attention(stack.dtype)
    try:
        assert_within_budget(name, stack.attn, truth, plain)
    except AssertionError as wrong:
        raise RuntimeError(f"not timed, since its attention is off: {wrong}") from None
    found: dict[str, float] = {}
    for prefix, part, least_scale in (("", "out", 0.0), ("lse_", "lse", 1.0)):
        parts = (getattr(s, part) for s in (stack.attn, truth, plain))
        error, budget = error_and_budget(*parts, least_scale=least_scale)
        found |= {f"{part}_error": error, f"{prefix}error_budget": budget}
    error, budget = _errors(f"{name}: hidden", stack.x, *hidden)
    return found | {"hidden_error": error, "hidden_error_budget": budget}


# Each error of check, with its budget.
ERRORS = {
    "out_error": "error_budget",
    "lse_error": "lse_error_budget",
    "hidden_error": "hidden_error_budget",
}


def worst_of(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest of all ranks of each error of check, each with its rank's budget."""
    found: dict[str, float] = {}
    for error, budget in ERRORS.items():
        worst = max(ranks, key=lambda rank: rank[error])
        found |= {error: worst[error], budget: worst[budget]}
    return found


def busy_ms(events: Iterable[Mapping[str, Any]]) -> float:
    """Return how long at least one of these device events ran, ms."""
    spans = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events)
    total, end = 0.0, float("-inf")
    for begin, stop in spans:
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total / 1e3


def read_profile(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return what one step cost, from the events of its trace."""
    launches = launches_in_trace(events, window=_WINDOW)
    device = [
        e for e in events if e.get("ph") == "X" and e.get("cat") in DEVICE
    ]  # fmt: skip
    talking = [e for e in device if any(word in e["name"].lower() for word in _COMMUNICATION)]
    return {
        "kernel_launches": launches.kernel_launches,
        "graph_launches": launches.graph_launches,
        "copies": launches.copies,
        # The profiler's own wait at the end lies outside the window.
        "host_syncs": launches.host_syncs,
        "device_kernels": launches.device_kernels,
        "gpu_busy_ms": busy_ms(device),
        "comm_ms": sum(float(e["dur"]) for e in talking) / 1e3,
    }


def profiled(step: Step) -> list[dict[str, Any]]:
    """Return the trace of one step."""
    from torch.profiler import ProfilerActivity, profile, record_function

    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function(_WINDOW):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def middle(events: Sequence[Mapping[str, Any]], layers: int) -> list[dict[str, Any]]:
    """Return the launches and kernels of a few layers in the middle of a step's trace."""
    kept = [
        {key: e[key] for key in ("name", "cat", "ts", "dur", "pid", "tid", "ph")}
        | {"args": {"correlation": e.get("args", {}).get("correlation")}}
        for e in events
        if e.get("ph") == "X" and e.get("cat") in (*DEVICE, "cuda_runtime", "cuda_driver")
    ]
    device = sorted((e for e in kept if e["cat"] in ("kernel", "gpu_memcpy")), key=_start)
    if not device:
        return []
    count = max(1, len(device) * TRACED_LAYERS // layers)
    first = (len(device) - count) // 2
    begin, end = _start(device[first]), _start(device[first + count - 1])
    shown = {e["args"]["correlation"] for e in device[first : first + count]}
    return [e for e in kept if begin <= _start(e) <= end or e["args"]["correlation"] in shown]


def _start(event: Mapping[str, Any]) -> float:
    return float(event["ts"])


def timed(step: Step, steps: int, device: torch.device) -> tuple[float, float]:
    """Return (ms of a step, ms of it until its last launch returned) of this rank."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    if dist.is_initialized():
        dist.barrier()
    wait()
    host = 0.0
    begin = time.perf_counter()
    for _ in range(steps):
        called = time.perf_counter()
        step()
        host += time.perf_counter() - called
        wait()
    return (time.perf_counter() - begin) * 1e3 / steps, host * 1e3 / steps


def from_all(value: Any) -> list[Any]:
    """Return every rank's value."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


# ---- blocks --------------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """What all blocks of a run share on one rank.

    Attributes:
        deadline: When it has to be over, time.time().
        layers: Layers of a stack, None for the model's.
        repeats: Samples of each corner.
        out: Table that rank 0 writes.
        source: Provenance.
        traces: Where rank 0 keeps traces, or None.
        models: By name.
        options: More arguments of Stack.
    """

    deadline: float
    layers: int | None
    repeats: int
    out: Path
    source: Mapping[str, object]
    traces: Path | None = None
    models: Mapping[str, Any] = dataclasses.field(default_factory=lambda: MODELS)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    said: list[str] = dataclasses.field(default_factory=list)
    rows: int = 0
    _profiles: dict[object, dict[str, float]] = dataclasses.field(default_factory=dict)
    _kept: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    _stack: Stack | None = None
    _stack_of: object = None
    _tp_group: dist.ProcessGroup | None = None
    _hidden: tuple[torch.Tensor, torch.Tensor] | None = None
    _hidden_of: object = None
    _slowest_build: float = 0.0

    def out_of_time(self, needed: float = 0.0) -> bool:
        """Return, the same on all ranks, whether less time is left than is needed."""
        return from_all(time.time() + needed + RESERVE_S > self.deadline)[0]

    def say(self, line: str) -> None:
        """Print on rank 0, and keep it for the report: a rank's output may go to a file."""
        self.said.append(line)
        if self._stack is None or self._stack.rank == 0:
            print(line, flush=True)

    def prepare(self, block: Block) -> Stack:
        """Return the block's stack with its tokens loaded and its right results computed."""
        if self._stack_of != block.stack:
            self._stack = self._hidden = None
            self._stack_of = self._hidden_of = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            if self._tp_group is None:
                self._tp_group = dist.new_group()
            self._stack = Stack(
                self.models[block.model],
                block.requests,
                dense=block.dense,
                num_layers=self.layers,
                tp_group=self._tp_group,
                **self.options,
            )
            self._stack_of = block.stack
        stack = self._stack
        if self._hidden_of != (block.stack, block.context):
            stack.load(block.context)
            self._hidden = (stack.reference()[0], stack.reference(stack.dtype)[0])
            self._hidden_of = (block.stack, block.context)
        return stack

    def measure(self, block: Block) -> None:
        """Measure a block; rank 0 writes its rows."""
        begin = time.time()
        stack = self.prepare(block)
        self.say(
            f"-- {block.name} {block.stack} {block.context}: ready {time.time() - begin:.1f} s"
        )
        steps, errors, profiles = {}, {}, {}
        for wanted in block.corners:
            if self.out_of_time(self._slowest_build):
                break
            began = time.time()
            found = self._build(stack, wanted, profile=block)
            if found is not None:
                steps[wanted], errors[wanted], profiles[wanted] = found
            # The first block also compiles.
            if self.rows:
                self._slowest_build = max(self._slowest_build, time.time() - began)
        if not steps or not block.timed:
            return
        for delay in block.delays_us:
            samples = self._samples(stack, steps, profiles, delay)
            if samples:
                self._write(block, stack, steps, errors, profiles, samples, delay)
        for step in steps.values():
            step.launch_delay_us = 0.0
        self.say(f"   {len(steps)} corners, {time.time() - begin:.1f} s")

    def _build(
        self, stack: Stack, wanted: Corner, *, profile: Block
    ) -> tuple[Step, dict[str, float], dict[str, float]] | None:
        """Return (step, errors, profile); None where it cannot be made or its result is off."""
        problem, step, errors = None, None, {}
        try:
            step = stack.step(wanted)
            step()
            errors = check(stack, str(wanted), self._hidden)
        except Exception as wrong:
            problem = f"{wanted}: {type(wrong).__name__}: {str(wrong).splitlines()[0][:300]}"
        problems = [p for p in from_all(problem) if p]
        if problems:
            self.problems.append(problems[0])
            self.say(f"   LEFT OUT {problems[0]}")
            return None
        return step, worst_of(from_all(errors)), self._profile(stack, step, profile)

    def _profile(self, stack: Stack, step: Step, block: Block) -> dict[str, float]:
        """Return launches and GPU time of a step, the largest of all ranks."""
        if stack.device.type != "cuda":
            return {}
        # What a step launches does not depend on the context; its GPU time does.
        key = (block.stack, block.context, step.corner)
        if key in self._profiles:
            return self._profiles[key]
        events = profiled(step)
        ranks = from_all(read_profile(events))
        found = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
        found["comm_least_ms"] = min(rank["comm_ms"] for rank in ranks)
        self._profiles[key] = found
        if stack.rank == 0 and self.traces is not None:
            name = f"{block.model}, {block.dense}, {block.requests} x {block.context}: "
            self._kept[name + str(step.corner)] = middle(events, stack.model.num_layers)
            write_traces(self.traces, self._kept, self.source)
        return found

    def _samples(
        self,
        stack: Stack,
        steps: Mapping[Corner, Step],
        profiles: Mapping[Corner, Mapping[str, float]],
        delay: float,
    ) -> dict[Corner, list[tuple[float, float]]]:
        """Return (ms, host ms) of each corner, the slowest rank's, corners in turn."""
        gaps = max(1, len(stack.model.kv_layers))
        names = [c for c in steps if not (delay and c.mode == "eager")]
        for name in names:
            seen = profiles[name]
            step = steps[name]
            step.launch_delay_us = delay
            launches = seen.get("kernel_launches", 0) + seen.get("copies", 0)
            step.launches_per_layer = launches / gaps
        mine: dict[Corner, list[tuple[float, float]]] = {name: [] for name in names}
        for name in names:
            steps[name]()
        for round_ in range(self.repeats):
            if round_ >= 5 and self.out_of_time():
                break
            turn = round_ % len(names)
            for name in names[turn:] + names[:turn]:
                mine[name].append(timed(steps[name], STEPS_A_SAMPLE, stack.device))
        ranks = from_all([mine[name] for name in names])
        return {
            name: [
                tuple(max(values) for values in zip(*sample, strict=True))
                for sample in zip(*(rank[i] for rank in ranks), strict=True)
            ]
            for i, name in enumerate(names)
        }

    def _write(
        self,
        block: Block,
        stack: Stack,
        steps: Mapping[Corner, Step],
        errors: Mapping[Corner, Mapping[str, float]],
        profiles: Mapping[Corner, Mapping[str, float]],
        samples: Mapping[Corner, Sequence[tuple[float, float]]],
        delay: float,
    ) -> None:
        """Check once more, then write the rows of what is still right."""
        rows = []
        m = stack.model
        for name, found in samples.items():
            problem = None
            steps[name]()
            try:
                _errors(f"{name}: hidden after the timing", stack.x, *self._hidden)
            except RuntimeError as wrong:
                problem = str(wrong)
            problems = [p for p in from_all(problem) if p]
            if problems:
                self.problems.append(problems[0])
                self.say(f"   LEFT OUT {problems[0]}")
                continue
            median, p10, p90 = timing.percentiles([ms for ms, _ in found])
            host = timing.percentiles([ms for _, ms in found])[0]
            pages = stack.pages[name.dcp]
            kv = costs.kv_bytes(
                pages.tokens,
                num_kv_heads=m.num_kv_heads,
                head_dim=m.head_dim,
                head_dim_v=0 if m.latent else m.head_dim_v,
                kv_itemsize=stack.dtype.itemsize,
            )
            rows.append(
                {
                    "block": block.name,
                    "model": m.name,
                    "num_layers": m.num_layers,
                    "kv_layers": len(m.kv_layers),
                    "dense": stack.dense,
                    "requests": stack.requests,
                    "context_tokens": stack.context,
                    "page_size": stack.page_size,
                    "num_q_heads": m.num_q_heads,
                    "num_kv_heads": m.num_kv_heads,
                    "head_dim": m.head_dim,
                    "dtype": str(stack.dtype).removeprefix("torch."),
                    "ranks": stack.size,
                    "dcp_size": stack.size if name.dcp else 1,
                    "mode": name.mode,
                    "attention": name.attention,
                    "reducer": name.reducer,
                    "query_gather": name.query_gather,
                    "bound": name.bound,
                    "launch_delay_us": delay,
                    "delayed_launches": round(steps[name].added_launches, 1) if delay else 0.0,
                    "steps": STEPS_A_SAMPLE,
                    "samples": len(found),
                    "median_ms": round(median, 4),
                    "p10_ms": round(p10, 4),
                    "p90_ms": round(p90, 4),
                    "host_ms": round(host, 4),
                    **{key: _rounded(value) for key, value in profiles[name].items()},
                    "weight_bytes": stack.weight_bytes(),
                    "kv_bytes": int(kv) * len(m.kv_layers),
                    **errors[name],
                    "method": "host clock, synchronised after each step",
                }
            )
        self.rows += len(rows)
        if rows and stack.rank == 0:
            record.write_rows(self.out, [{**self.source, **row} for row in rows], record.STACK)
        for row in rows:
            busy = row.get("gpu_busy_ms")
            self.say(
                f"   {_name_of(row):48} {row['median_ms']:8.2f} ms [{row['p10_ms']:.2f}, "
                f"{row['p90_ms']:.2f}]  host {row['host_ms']:7.2f}  GPU {busy or 0:7.2f}  "
                f"launches {row.get('kernel_launches', '')} + {row.get('graph_launches', '')}"
                + (f"  +{delay:g} us a launch" if delay else "")
            )


def _name_of(row: Mapping[str, Any]) -> str:
    names = ("mode", "attention", "reducer", "query_gather", "bound")
    return str(Corner(dcp=row["dcp_size"] > 1, **{name: row[name] for name in names}))


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else round(value, 4)


def step_case(row: Mapping[str, Any]) -> costs.StepCase:
    """Return a row's corner as the timeline sees it.

    Args:
        row: Of the stack's table, of a model all of whose layers have a KV cache.

    Raises:
        ValueError: The model has layers without one: their work is another.
    """
    if row["kv_layers"] != row["num_layers"]:
        raise ValueError(
            f"row: expected a KV cache in each of {row['num_layers']} layers, got "
            f"{row['kv_layers']}"
        )
    layers = int(row["num_layers"])
    return costs.StepCase(
        mode=row["mode"],
        attention=row["attention"],
        reducer=None if row["dcp_size"] == 1 else row["reducer"],
        layers=layers,
        kv_bytes=row["kv_bytes"] / layers,
        dense_bytes=row["weight_bytes"] / layers,
        # Two norms, two additions, five matrix products, silu and its product; experts are
        # gathered, dealt back and averaged besides, in two batched products.
        dense_kernels=11 if row["dense"] == "light" else 14,
        all_reduces=2 if row["ranks"] > 1 else 0,
        query_gather=None if row["dcp_size"] == 1 else row["query_gather"],
        launch_delay_us=float(row["launch_delay_us"]),
    )


def write_traces(
    path: Path,
    traces: Mapping[str, Sequence[Mapping[str, Any]]],
    source: Mapping[str, object],
) -> None:
    """Write a file for ui.perfetto.dev, whole or not at all: a process a corner, times from 0.

    Args:
        path: Compressed if it ends in .gz.
        traces: Name of a corner -> its events, see middle.
        source: Provenance.
    """
    events: list[dict[str, Any]] = []
    for pid, (name, kept) in enumerate(traces.items()):
        begin = min(map(_start, kept), default=0.0)
        rows: dict[tuple[bool, object], int] = {}
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        for event in sorted(kept, key=_start):
            on_gpu = event["cat"] in DEVICE
            tid = rows.setdefault((on_gpu, event["tid"]), len(rows))
            found = {"ts": round(_start(event) - begin, 3), "pid": pid, "tid": tid}
            events.append({**event, **found, "name": event["name"][:MOST_NAME]})
        for (on_gpu, _), tid in rows.items():
            row = {"name": "GPU" if on_gpu else "host"}
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": row})
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"otherData": dict(source), "traceEvents": events}
    text = json.dumps(whole, separators=(",", ":")).encode()
    beside = path.with_suffix(".part")
    # No time of writing in it: equal traces are equal files.
    beside.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    os.replace(beside, path)


def measure_rank(
    rank: int, size: int, plan: Sequence[Block], settings: Mapping[str, Any]
) -> tuple[int, list[str], list[str]]:
    """Measure every block as one rank; return (rows, what was left out and why, what was said)."""
    run = Run(**settings)
    run.say(f"{size} ranks started, {run.deadline - time.time():.0f} s left")
    for block in plan:
        if run.out_of_time(run._slowest_build):
            run.say(f"-- out of time before {block.name} {block.stack} {block.context}")
            break
        with torch.inference_mode(False), torch.no_grad():
            run.measure(block)
    run._stack = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    on_all_ranks(None)
    run.say(f"ended with {run.deadline - time.time():.0f} s left")
    return run.rows, run.problems, run.said


def main(args: list[str] | None = None) -> int:
    """Measure and append rows; 1 when a corner was left out or nothing was measured."""
    begin = time.time()
    every = (*blocks(), *blocks_alone(), *blocks_traced(2))
    names = list(dict.fromkeys(block.name for block in every))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600, help="time for everything")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs, one rank each (default: 2)")
    parser.add_argument("--layers", type=int, help="layers of a stack (default: the model's)")
    parser.add_argument("--repeats", type=int, default=7, help="samples of a corner (>= 5)")
    parser.add_argument("--only", action="append", choices=names, help="blocks to measure")
    parser.add_argument("--out", type=Path, help="CSV (default: in data/measured)")
    parser.add_argument("--traces", type=Path, help="JSON, or .json.gz, of a few layers a step")
    parser.add_argument("--dry-run", action="store_true", help="print the corners and stop")
    options = parser.parse_args(args)
    for name, least in (("ranks", 1), ("repeats", 5), ("seconds", 1), ("layers", 1)):
        given = getattr(options, name)
        # Not NaN either, which is not less than anything.
        if given is not None and not given >= least:
            print(f"--{name}: expected at least {least}, got {given}", file=sys.stderr)
            return 2
    only_traces = options.only == [TRACES]
    if TRACES in (options.only or []) and not (
        only_traces and (options.traces or options.dry_run)
    ):
        print(
            "--only traces: expected no other --only, and --traces FILE, got "
            f"{', '.join(options.only)} and {options.traces}",
            file=sys.stderr,
        )
        return 2
    every = blocks() if options.ranks > 1 else blocks_alone()
    if only_traces:
        every = blocks_traced(options.ranks)
    here = list(dict.fromkeys(block.name for block in every))
    if others := [name for name in options.only or () if name not in here]:
        print(
            f"--only: expected some of {', '.join(here)} with --ranks {options.ranks}, got "
            f"{others[0]}",
            file=sys.stderr,
        )
        return 2
    plan = [block for block in every if not options.only or block.name in options.only]
    if options.dry_run:
        for block in plan:
            print(
                f"{block.name}: {block.model}, {block.dense}, {block.requests} x {block.context}"
            )
            print("\n".join(f"    {wanted}" for wanted in block.corners))
        return 0
    if INTERPRETED or torch.cuda.device_count() < options.ranks:
        print(
            f"bench stack: expected {options.ranks} GPUs, found "
            f"{0 if INTERPRETED else torch.cuda.device_count()}; --dry-run shows the corners",
            file=sys.stderr,
        )
        return 2
    source = record.provenance()
    if reason := record.why_not_kept(source):
        print(f"bench stack: {reason}", file=sys.stderr)
        return 2
    machine = record.machine_name(str(source["gpu"]), options.ranks)
    out = options.out or measured_path(f"stack_{machine}")
    if reason := record.why_not_appended(out, record.STACK):
        print(f"--out: {reason}", file=sys.stderr)
        return 2
    if options.traces and (reason := why_unwritable(options.traces)):
        print(
            f"--traces: expected a file that can be written, got {options.traces} ({reason})",
            file=sys.stderr,
        )
        return 2
    # Those of an earlier run are none of this one's.
    traced_before = _written_at(options.traces)
    settings = {
        "deadline": begin + options.seconds,
        "layers": options.layers,
        "repeats": options.repeats,
        "out": out,
        "source": source,
        "traces": options.traces,
        "options": {"without_peer": True} if only_traces and options.ranks == 1 else {},
    }
    if "LOCAL_RANK" in os.environ:
        results = [_under_torchrun(plan, settings)]
    else:
        try:
            results = run_ranks(
                "dcp_lab.bench.stack:measure_rank",
                options.ranks,
                args=(tuple(plan), settings),
                backend="nccl",
                timeout_s=options.seconds + GRACE_S,
            )
        except (RankError, TimeoutError) as wrong:
            print(wrong, file=sys.stderr)
            return 1
    rows, problems, said = results[0]
    if "LOCAL_RANK" not in os.environ:
        print(*said, sep="\n")
    print(f"{rows} rows; {len(problems)} corners left out", *problems, sep="\n")
    nothing = not rows
    if only_traces:
        nothing = _written_at(options.traces) == traced_before
    return 1 if problems or nothing else 0


def _written_at(path: Path | None) -> int | None:
    """Return when a file was written, in ns; None where there is none."""
    return path.stat().st_mtime_ns if path is not None and path.exists() else None


def _under_torchrun(
    plan: Sequence[Block], settings: dict[str, Any]
) -> tuple[int, list[str], list[str]]:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    try:
        # All ranks stop at the same moment.
        settings["deadline"] = from_all(settings["deadline"])[0]
        return measure_rank(dist.get_rank(), dist.get_world_size(), plan, settings)
    finally:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


if __name__ == "__main__":
    # By its name: other processes cannot load what __main__ defines.
    sys.exit(importlib.import_module("dcp_lab.bench.stack").main())
