"""A few layers of each step as the profiler saw them: read, cut to one layer, for Perfetto.

`dcp-lab bench stack --traces FILE` keeps them: corner -> events of TRACED_LAYERS layers. Committed
small as data/measured/NAME.json.xz.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dcp_lab.analysis import tables
from dcp_lab.bench.stack import TRACED_LAYERS

NAME = "traces_h200x2"
SHAPE = "qwen3_235b_tp8, light, 16 x 2500: "
# What the account is about; a corner's name as dcp_lab.stack.Corner says it.
SHOWN = (
    "no DCP, full",
    "no DCP, piecewise",
    "published + ag_rs, piecewise",
    "paged + ag_rs, piecewise",
    "paged + direct, full",
)
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_EXCHANGE = ("nccl", "_direct_")


def path() -> Path:
    """Return where the traces lie, whether they are there or not."""
    return tables.data_dir() / "measured" / f"{NAME}.json.xz"


def read(file: Path | None = None) -> dict[str, list[dict[str, Any]]]:
    """Return corner -> events, of the shape that the notebook shows; empty without a file.

    Args:
        file: Default: path().

    Raises:
        ValueError: The file is there and holds something else.
    """
    file = path() if file is None else file
    if not file.exists():
        return {}
    with lzma.open(file, "rt", encoding="utf-8") as opened:
        traces = json.load(opened)
    right = isinstance(traces, dict) and all(isinstance(t, list) for t in traces.values())
    if not right:
        raise ValueError(
            f"file: expected what bench stack --traces writes, name -> events, got {file.name}"
        )
    return {name.removeprefix(SHAPE): t for name, t in traces.items() if name.startswith(SHAPE)}


def one_layer(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the middle layer: what the GPU ran, and what the host launched meanwhile.

    A layer is as many kernels as the trace holds over TRACED_LAYERS.

    Returns:
        Events with row ("host", "GPU", or "exchange" on the GPU), name, begin, end: us from the
        layer's first kernel, cut at its ends.

    Raises:
        ValueError: There is no kernel.
    """
    kernels = sorted((e for e in events if e["cat"] in _DEVICE), key=lambda e: e["ts"])
    if len(kernels) < TRACED_LAYERS:
        raise ValueError(f"events: expected kernels of {TRACED_LAYERS} layers, got {len(kernels)}")
    count = len(kernels) // TRACED_LAYERS
    first = (len(kernels) - count) // 2
    begin = float(kernels[first]["ts"])
    after = kernels[first + count : first + count + 1]
    last = kernels[first + count - 1]
    end = float(after[0]["ts"]) if after else float(last["ts"]) + float(last["dur"])
    found = []
    for event in events:
        start, stop = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        if stop <= begin or start >= end:
            continue
        if event["cat"] not in _DEVICE:
            row = "host"
        else:
            row = "exchange" if any(w in event["name"].lower() for w in _EXCHANGE) else "GPU"
        found.append(
            {
                "row": row,
                "name": event["name"],
                "begin": max(start, begin) - begin,
                "end": min(stop, end) - begin,
            }
        )
    return found


def shown(traces: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Return one layer of each corner of SHOWN that was traced."""
    return {name: one_layer(traces[name]) for name in SHOWN if name in traces}


def perfetto(layers: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return layers as one trace for ui.perfetto.dev: a process a corner, a thread a row."""
    events: list[dict[str, Any]] = []
    for pid, (name, layer) in enumerate(layers.items()):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        for tid, row in enumerate(("host", "GPU")):
            events.append(
                {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": row}}
            )
        events += [
            {
                "ph": "X",
                "name": event["name"],
                "pid": pid,
                "tid": 0 if event["row"] == "host" else 1,
                "ts": event["begin"],
                "dur": event["end"] - event["begin"],
            }
            for event in layer
        ]
    return {"traceEvents": events}
