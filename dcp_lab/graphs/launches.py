"""Count what a call costs the host: launches, graph launches, copies, waits; by the profiler."""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

# Runtime and driver calls of CUDA and HIP, which torch's profiler records under these names:
# cudaLaunchKernel, cudaLaunchKernelExC, cuLaunchKernelEx (Triton), hipModuleLaunchKernel, ...
_KERNEL_LAUNCH = re.compile(r"(cuda|cu|hip)(Module|Ext|ExtModule|Drv)?Launch(Cooperative)?Kernel")
_GRAPH_LAUNCH = re.compile(r"(cuda|cu|hip)GraphLaunch")
_COPY = re.compile(r"(cuda|cu|hip)Mem(cpy|set)")
# hipMemcpyWithStream is how torch on ROCm makes a blocking copy.
_SYNC = re.compile(
    r"(cuda|cu|hip)((Device|Stream|Event|Ctx)Synchronize|Memcpy(DtoH|HtoD)?(_v\d+)?$|MemcpyWithStream)"
)
_WINDOW = "dcp_lab.count_launches"


@dataclasses.dataclass(frozen=True)
class Launches:
    """What a call did.

    Attributes:
        kernel_launches: Kernels that the host launched one by one.
        graph_launches: Graphs that the host launched.
        copies: Copies and fills (memcpy, memset) that the host asked for.
        host_syncs: Calls that make the host wait for the device.
        kernels: Names of the kernels that the device ran, in its order, those of graphs included.
        device_copies: Copies and fills that the device ran, those of graphs included.
    """

    kernel_launches: int
    graph_launches: int
    copies: int
    host_syncs: int
    kernels: tuple[str, ...]
    device_copies: int

    @property
    def device_kernels(self) -> int:
        """Kernels that the device ran, those of graphs included."""
        return len(self.kernels)

    def __str__(self) -> str:
        return (
            f"host: {self.kernel_launches} kernel launches, {self.graph_launches} graph launches, "
            f"{self.copies} copies, {self.host_syncs} syncs; "
            f"device: {self.device_kernels} kernels, {self.device_copies} copies"
        )


def count_launches(fn: Callable[[], object], *, warmup: int = 1) -> Launches:
    """Count the launches and waits of one call of fn.

    Args:
        fn: Called without arguments.
        warmup: Calls before the one that counts, so that nothing is compiled in it. Default: 1.

    Returns:
        Launches.

    Raises:
        RuntimeError: There is no GPU. (A recorded trace can be read anywhere:
            launches_in_trace.)

    Notes:
        Waits for the device before and after; that is not counted.
        ROCm: HIP's names are counted alike. How ROCm's profiler shows the kernels inside a
        replayed graph was not checked.

    Source:
        Written here, over torch.profiler.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    if not torch.cuda.is_available():
        raise RuntimeError(
            "count_launches: needs a CUDA or ROCm GPU, and torch sees none; "
            "launches_in_trace reads a recorded trace anywhere"
        )
    for _ in range(warmup):
        fn()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function(_WINDOW):
            fn()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return launches_in_trace(json.loads(path.read_text())["traceEvents"], window=_WINDOW)


def launches_in_trace(
    events: Iterable[Mapping[str, Any]], *, window: str | None = None
) -> Launches:
    """Count the launches and waits in a trace of torch.profiler.

    Args:
        events: The `traceEvents` of an exported Chrome trace.
        window: Count what the host did inside this record_function. Everything on the device is
            counted. Default: the whole trace.

    Returns:
        Launches.

    Raises:
        ValueError: The window is not in the trace.
    """
    events = [event for event in events if event.get("ph") == "X"]
    begin, end = float("-inf"), float("inf")
    if window is not None:
        spans = [e for e in events if e["name"] == window and e.get("cat") == "user_annotation"]
        if not spans:
            raise ValueError(f"window: expected a record_function of the trace, got {window!r}")
        begin, end = float(spans[0]["ts"]), float(spans[0]["ts"]) + float(spans[0]["dur"])
    host = [
        event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and begin <= float(event["ts"]) <= end
    ]
    device = sorted(
        (event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")),
        key=lambda event: float(event["ts"]),
    )

    def calls(pattern: re.Pattern[str]) -> int:
        # A runtime call that shows up again as the driver call it makes has the same correlation.
        found = (event for event in host if pattern.match(event["name"]))
        return len({event.get("args", {}).get("correlation", id(event)) for event in found})

    return Launches(
        kernel_launches=calls(_KERNEL_LAUNCH),
        graph_launches=calls(_GRAPH_LAUNCH),
        copies=calls(_COPY),
        host_syncs=calls(_SYNC),
        kernels=tuple(event["name"] for event in device if event["cat"] == "kernel"),
        device_copies=sum(event["cat"] != "kernel" for event in device),
    )
