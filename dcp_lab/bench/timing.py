"""How the lab times GPU work.

A measured step calls each variant once on each of several layers: distinct KV caches, more than
three times L2 together, so that every layer reads cold memory, as in a model. Variants take turns
inside one process, and every replay is a sample. triton.testing.do_bench and
    do_bench_cudagraph repeat one call on one buffer, which reads a warm L2 in a graph and adds
    launch gaps outside one; they serve where a single call on one buffer is the question.

What is not measured here: the gap between a layer's attention and the dense work around it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from dcp_lab.graphs import count_launches

Call = Callable[[int], object]


def capture_layers(call: Call, layers: int) -> torch.cuda.CUDAGraph:
    """Return a graph that calls `call(layer)` once for each layer, warmed up before."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for layer in range(layers):
            call(layer)
    torch.cuda.synchronize()
    return graph


def graph_times(
    graphs: Mapping[str, torch.cuda.CUDAGraph], *, layers: int, samples: int
) -> dict[str, list[float]]:
    """Return samples of us a layer for each variant's graph; the order rotates by the round."""
    names = list(graphs)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in names}
    for name in names:
        graphs[name].replay()
        graphs[name].replay()
    for round_ in range(samples):
        turn = round_ % len(names)
        for name in names[turn:] + names[:turn]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[name].replay()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: [start.elapsed_time(end) * 1e3 / layers for start, end in pairs]
        for name, pairs in events.items()
    }


def eager_times(
    calls: Mapping[str, Call], *, layers: int, samples: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return samples of us a layer for each variant launched eagerly: (wall clock, host only).

    Host only is the time until the last call has returned; the device may still be busy.
    """
    wall: dict[str, list[float]] = {name: [] for name in calls}
    host: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        # A layer's first call is checked and planned, as no later step's is.
        for layer in range(layers):
            call(layer)
    names = list(calls)
    for round_ in range(samples):
        turn = round_ % len(names)
        for name in names[turn:] + names[:turn]:
            call = calls[name]
            torch.cuda.synchronize()
            start = time.perf_counter()
            for layer in range(layers):
                call(layer)
            launched = time.perf_counter()
            torch.cuda.synchronize()
            done = time.perf_counter()
            wall[name].append((done - start) * 1e6 / layers)
            host[name].append((launched - start) * 1e6 / layers)
    return wall, host


def percentiles(samples: list[float]) -> tuple[float, float, float]:
    """Return (median, p10, p90)."""
    if len(samples) < 2:
        return samples[0], samples[0], samples[0]
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return statistics.median(samples), tenths[0], tenths[-1]


def kernel_launches(call: Call) -> int:
    """Return how many device kernels one call runs, its copies and fills included."""
    found = count_launches(lambda: call(0))
    return found.device_kernels + found.device_copies
