"""Capture a step into a CUDA or HIP graph, or record it on the CPU, and replay it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from dcp_lab.graphs.watch import Trace, Trail, sync_debug, trail_of, watching
from dcp_lab.ops.checks import check_positive_int, fail

T = TypeVar("T")

# Failed graphs: torch's allocators may still call into them, so they must not go away.
_ABANDONED: list[torch.cuda.CUDAGraph] = []
# What part of a message means, the first that matches.
_HINTS = {
    "called a synchronizing": "the host waits for the device here: keep the value on the device, "
    "or read it before the step",
    "CPU and CUDA tensors during": "the host waits for the device here: keep the value on the "
    "device, or read it before the step",
    "unjoined": "work that the step started on another stream was not waited for: a collective or "
    "a side stream without its wait",
    "is capturing": "this call is forbidden during capture: move it out of the step",
    "capturing stream": "this call is forbidden during capture: move it out of the step",
}


class CaptureError(RuntimeError):
    """A step that cannot be captured.

    Attributes:
        where: The lines of Python that led to the failing call, the innermost first; empty where
            Python cannot tell.
    """

    def __init__(self, message: str, where: Trail = ()) -> None:
        super().__init__(message)
        self.where = where


class CapturedStep(Generic[T]):
    """A step in a graph.

    Attributes:
        result: What the step returned while it was captured: every replay writes these tensors.
        pool: The graph's memory pool, for the next capture that may share it. Graphs that share a
            pool may overwrite each other's results.
    """

    def __init__(
        self, graph: torch.cuda.CUDAGraph, result: T, pool: Any, keeps: tuple[object, ...]
    ) -> None:
        self.result = result
        self.pool = pool
        self._graph: torch.cuda.CUDAGraph | None = graph
        # A graph holds addresses, not tensors. Freed memory would go to other tensors, and the
        # replays would read and overwrite those.
        self._keeps = keeps

    def replay(self) -> T:
        """Launch the graph on the current stream and return `result`. Does not wait for it."""
        if self._graph is None:
            raise RuntimeError("replay: the graph was reset; capture the step again")
        self._graph.replay()
        return self.result

    def reset(self) -> None:
        """Give the graph up. One with collectives has to go before its process group does."""
        if self._graph is not None:
            torch.cuda.synchronize()
            self._graph.reset()
        self._graph, self._keeps = None, ()


class RecordedStep(Generic[T]):
    """A step as a list of calls, replayed one by one: a graph's semantics without a GPU.

    Attributes:
        result: What the step returned while it was recorded: every replay writes these tensors.
        trace: The calls, see dcp_lab.graphs.watch.
    """

    def __init__(self, result: T, trace: Trace) -> None:
        self.result = result
        self.trace = trace

    def replay(self) -> T:
        """Make the recorded calls again, on the same tensors, and return `result`."""
        for call in self.trace.calls:
            call.again()
        return self.result


def capture(
    step: Callable[[], T],
    *,
    warmup: int = 3,
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
) -> CapturedStep[T]:
    """Capture a step into a graph.

    Args:
        step: Called without arguments; reads and writes tensors that stay where they are.
        warmup: Calls before the capture, >= 1, so that kernels are compiled and buffers made. The
            last is watched: what it reads and writes is kept alive as long as the graph.
        pool: Memory pool to allocate from: a CapturedStep's `pool`, or
            torch.cuda.graph_pool_handle(). Default: a new one.
        stream: Stream to warm up and capture on, not the default stream. Default: a new one.

    Returns:
        CapturedStep with replay() and `result`.

    Raises:
        CaptureError: The step does something that no graph can hold; the message has the line of
            code where Python can tell. CUDA stays usable: eager calls and further captures work.
        RuntimeError: There is no GPU (`record` is the stand-in for the CPU), or a capture is under
            way.
        ValueError: warmup < 1, or stream is the default stream.

    Notes:
        Kept alive: step, its result, and every tensor that its torch operations and Triton
        launches used. Not what an extension reached by raw pointers: keep that yourself.
        An exception of the step during warm-up is passed on as it is.
        ROCm: the same calls; hipGraph underneath.

    Source:
        Written here, over torch.cuda.CUDAGraph.
    """
    check_positive_int("warmup", warmup)
    if not torch.cuda.is_available():
        raise RuntimeError(
            "capture: needs a CUDA or ROCm GPU, and torch sees none; on a CPU, "
            "dcp_lab.graphs.record records the step's calls and replays them the same way"
        )
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("capture: a capture is under way on this stream; finish it first")
    if stream is not None and stream == torch.cuda.default_stream(stream.device):
        fail("stream", "a stream other than the default one", stream)
    stream = torch.cuda.Stream() if stream is None else stream
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(warmup - 1):
            step()
        with watching("cuda") as trace:
            step()
    current.wait_stream(stream)
    return captured(step, pool=pool, stream=stream, keeps=(trace.external,))


def captured(
    step: Callable[[], T], *, pool: Any, stream: torch.cuda.Stream, keeps: tuple[object, ...]
) -> CapturedStep[T]:
    """Capture a step that is warm; arguments as in capture."""
    # Always a pool whose name is known, so that a failed capture can be taken off the allocator.
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    graph = torch.cuda.CUDAGraph()
    result, failure = None, None
    # A graph or a group that the collector frees during a capture would break it.
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    with torch.cuda.stream(stream):
        # Other threads, as a process group's watchdog, may do what they like meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            # torch then refuses a sync before it reaches the driver, which would end the capture.
            with sync_debug("error"):
                result = step()
        except BaseException as error:
            failure = error
        try:
            graph.capture_end()
        except RuntimeError as error:
            failure = failure or error
            _abandon(graph, pool, stream, failure)
    if failure is not None:
        if not isinstance(failure, Exception):
            raise failure
        raise _explained(failure) from failure
    return CapturedStep(graph, result, pool, (step, *keeps))


def record(
    step: Callable[[], T], *, warmup: int = 1, device: torch.device | str | None = None
) -> RecordedStep[T]:
    """Record the calls that a step makes, to be made again by replay().

    What a replay does is what a graph does: the same calls, on the memory and with the host values
    of the recording. So a step that cannot be captured goes wrong here in the same way. It costs
    as much as the calls do: no launch is saved.

    Args:
        step: Called without arguments; reads and writes tensors that stay where they are.
        warmup: Calls before the recording, >= 0. Default: 1.
        device: Where the step's tensors are. Default: the GPU, the CPU where there is none.

    Returns:
        RecordedStep with replay() and `result`.

    Raises:
        ValueError: warmup is no int >= 0.

    Notes:
        For teaching and for tests on machines without a GPU; runs on a GPU too.

    Source:
        Written here.
    """
    if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0:
        fail("warmup", "an int >= 0", warmup)
    for _ in range(warmup):
        step()
    with watching(device_type_of(device), keep=True) as trace:
        result = step()
    return RecordedStep(result, trace)


def device_type_of(device: torch.device | str | None) -> str:
    """Return "cuda" or "cpu", by what there is for None."""
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    device_type = torch.device(device).type
    if device_type not in ("cuda", "cpu"):
        fail("device", "a CUDA or ROCm device or the CPU", str(device))
    return device_type


def _abandon(
    graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream, failure: BaseException
) -> None:
    """Bring torch's state in order after a capture that the driver ended with an error.

    Up to torch 2.11 capture_end then stops half-way (pytorch#180395): the allocator still believes
    in the capture, and the next empty_cache ends the process. The random number generator may too.
    """
    _ABANDONED.append(graph)
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        torch._C._cuda_releasePool(stream.device_index, pool)
    # A capture that succeeds ends the generator's, and shows that the device still works.
    healthy = torch.cuda.CUDAGraph()
    try:
        healthy.capture_begin(capture_error_mode="thread_local")
        filled = torch.zeros(1, device=stream.device)
        healthy.capture_end()
        del filled
    except RuntimeError:
        failure.add_note("CUDA did not recover from the failed capture: restart the process")


def _explained(error: Exception) -> CaptureError:
    """Return the error with the line of code and what to do."""
    where = trail_of(error)
    first_line = str(error).strip().split("\n")[0]
    hint = next((text for part, text in _HINTS.items() if part in first_line), None)
    at = f" at {where[0]}: {where[0].code}" if where else ""
    advice = f" ({hint})" if hint else ""
    return CaptureError(f"the step cannot be captured{at}: {first_line}{advice}", where)
