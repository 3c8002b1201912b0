"""Say what makes a step unsafe to capture, and where.

A graph repeats the calls of one run: the same launches, at the same addresses, with the host
values of that run. So a step is safe when it makes no call that a graph cannot hold, when its runs
differ in nothing but what tensors contain, and when a replay gives what an eager call gives. The
audit checks the three in this order:

1. one watched eager run a round: host syncs, impossible collectives, tensors made from host data;
2. these runs against the first of them, call by call: host values, addresses, memory kept;
3. replays against eager calls, bit by bit, with inputs that `mutate` changed in place.

On a CPU step 3 replays a recording (dcp_lab.graphs.record), which keeps addresses and host values
as a graph does; on a GPU it captures a graph.
"""

from __future__ import annotations

import dataclasses
import enum
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from dcp_lab.graphs.capture import (
    CapturedStep,
    CaptureError,
    RecordedStep,
    captured,
    device_type_of,
    record,
)
from dcp_lab.graphs.watch import Operand, Site, Trace, Trail, tensors_in, watching
from dcp_lab.ops.checks import check_positive_int, fail


class Cause(enum.StrEnum):
    """What makes a step unsafe to capture."""

    HOST_SYNC = "host_sync"
    """The host waits for the device, or reads from it: forbidden during capture."""
    HOST_VALUE = "host_value"
    """A branch, a number, a shape or a grid depends on a value that the host read: the graph keeps
    the one of the capture."""
    COLLECTIVE = "collective"
    """A collective that no graph can hold."""
    ALLOCATION = "allocation"
    """Memory outside the graph's pool; with forbid_allocations any memory."""
    GROWING_WORKSPACE = "growing_workspace"
    """A buffer that was replaced by a larger one, or memory that piles up call by call: the graph
    keeps the old address."""
    MOVED_BUFFER = "moved_buffer"
    """A buffer at another address than in the run before: the graph keeps the old one."""
    REBUILT_METADATA = "rebuilt_metadata"
    """Integers (lengths, tables, offsets) made anew instead of written in place."""
    CAPTURE_FAILED = "capture_failed"
    """The capture ended with an error that nothing above explains."""
    STALE_OUTPUT = "stale_output"
    """Two replays on the same inputs differ: the result depends on the calls before. A wait is
    skipped, or a buffer is read before it is written."""
    DIFFERS_FROM_EAGER = "differs_from_eager"
    """A replay gives something else than an eager call on the same inputs."""
    UNCHANGED_OUTPUT = "unchanged_output"
    """mutate changes nothing that the step reads, so the audit proves nothing."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        cause: Its kind.
        what: In words.
        where: The lines of Python that did it, the innermost first; empty where Python cannot
            tell.
    """

    cause: Cause
    what: str
    where: Trail = ()

    @property
    def site(self) -> Site | None:
        """The innermost of the lines."""
        return self.where[0] if self.where else None

    def __str__(self) -> str:
        lines = [f"{self.cause}: {self.what}"]
        for depth, site in enumerate(self.where):
            lines.append(f"    {'from ' if depth else 'at '}{site}: {site.code}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Report:
    """What an audit found.

    Attributes:
        findings: What makes the step unsafe to capture.
        notes: What is safe and worth knowing: memory that the step takes from the graph's pool.
        calls: Operations and launches of one run of the step.
        rounds: Times the inputs were changed.
        replayed: "graph", "recording", or "" when the capture failed.
    """

    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    calls: int
    rounds: int
    replayed: str

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def causes(self) -> set[Cause]:
        """The kinds of what was found."""
        return {finding.cause for finding in self.findings}

    def by(self, cause: Cause | str) -> list[Finding]:
        """Return the findings of one kind."""
        return [finding for finding in self.findings if finding.cause == Cause(cause)]

    def __str__(self) -> str:
        verdict = "safe to capture" if self.ok else f"{len(self.findings)} findings"
        by = f"replayed as a {self.replayed}" if self.replayed else "not replayed"
        head = f"{verdict}: {self.calls} calls a step, {self.rounds} rounds, {by}"
        notes = [f"note, {note}" for note in self.notes]
        return "\n".join([head, *map(str, self.findings), *notes])


def audit(
    step: Callable[[], Any],
    mutate: Callable[[int], None],
    *,
    rounds: int = 4,
    warmup: int = 2,
    forbid_allocations: bool = False,
    device: torch.device | str | None = None,
) -> Report:
    """Say what makes a step unsafe to capture, by kind and line of code.

    Args:
        step: Called without arguments, as it would be captured: reads its inputs in place and
            returns tensors, in any nest of tuples, lists and dicts (an AttnState). A function of
            its inputs: called twice on the same ones it returns the same bits.
        mutate: mutate(round) changes the inputs in place, 0 <= round < rounds. What happens
            between two steps of a server belongs here: new lengths, new block tables, a large
            eager call that shares the step's workspace.
        rounds: How often, >= 2. Default: 4.
        warmup: Calls before anything is judged. Default: 2.
        forbid_allocations: Whether memory that the step takes counts as a finding. Default: it is
            a note, since a graph has a pool for that.
        device: Where the step's tensors are. Default: the GPU, the CPU where there is none.

    Returns:
        Report; `report.ok` says whether nothing was found and str(report) shows everything.

    Raises:
        ValueError: step returns no tensor, rounds < 2, warmup < 1.

    Notes:
        On a CPU the step is judged as if its tensors lived on a GPU, so reading one is a host
        sync, and gloo's collectives are impossible ones.
        An exception of the step itself is passed on.
        Under a process group every rank calls audit with the same step and rounds; each makes the
        same number of calls, unless a capture fails on some of them.
        What it cannot see: kernels launched past torch and Triton. The comparison of replays with
        eager calls judges those too, without a line.

    Source:
        Written here.
    """
    if check_positive_int("rounds", rounds) < 2:
        fail("rounds", "an int >= 2", rounds)
    check_positive_int("warmup", warmup)
    device_type = device_type_of(device)
    mutate(0)
    for _ in range(warmup):
        result = step()
    if not tensors_in(result):
        fail("step", "a callable that returns tensors", result)
    del result

    runs, changes = [], []
    for round_ in range(rounds):
        with watching(device_type) as change:
            mutate(round_)
        with watching(device_type) as trace:
            result = step()
        returned = {t.untyped_storage()._cdata for t in tensors_in(result)}
        runs.append(_Run(trace, returned, trace.writer_of(result)))
        changes.append(change)
        del result
    findings = [
        *_impossible_calls(runs),
        *_differences(runs, changes),
        *_piling_up(runs),
    ]
    mutate(0)
    again, trouble = _replayable(step, device_type)
    findings += trouble
    if again is not None:
        findings += _replays_against_eager(step, mutate, rounds, again, runs[0].writer)
    if isinstance(again, CapturedStep):
        again.reset()
    notes = list(_allocations(runs[0].trace))
    if forbid_allocations:
        findings, notes = findings + notes, []
    return Report(
        findings=_distinct(findings),
        notes=_distinct(notes),
        calls=len(runs[0].trace.calls),
        rounds=rounds,
        replayed={CapturedStep: "graph", RecordedStep: "recording"}.get(type(again), ""),
    )


class _Run(NamedTuple):
    """One watched call of the step.

    Attributes:
        trace: What it did.
        returned: The memory of its result.
        writer: The lines of the last call that had that memory.
    """

    trace: Trace
    returned: set[int]
    writer: Trail

    def found(self, operand: Operand) -> bool:
        """Return whether this memory was there before the step."""
        return operand.storage not in self.trace.made


def _impossible_calls(runs: list[_Run]) -> Iterator[Finding]:
    """Find what one run is enough to see."""
    for run in runs:
        for event in run.trace.syncs:
            yield Finding(Cause.HOST_SYNC, event.what, event.where)
        for event in run.trace.collectives:
            yield Finding(Cause.COLLECTIVE, event.what, event.where)
        for event in run.trace.constants:
            what = f"{event.what}; a graph keeps the data of the capture"
            yield Finding(Cause.REBUILT_METADATA, what, event.where)


def _differences(runs: list[_Run], changes: list[Trace]) -> Iterator[Finding]:
    """Find what differs between the first run and a later one besides the contents of tensors."""
    first = runs[0]
    traces = [*changes, *(run.trace for run in runs)]
    makers = {storage: made.where for trace in traces for storage, made in trace.made.items()}
    for run in runs[1:]:
        calls, calls_before = run.trace.calls, first.trace.calls
        for before, call in zip(calls_before, calls, strict=False):
            if before.name != call.name:
                what = f"{call.name} is called where another run called {before.name}"
                yield Finding(Cause.HOST_VALUE, what, call.where)
                break
            for old, new in zip(before.host_values, call.host_values, strict=False):
                if old != new:
                    what = f"{call.name} is given {new}, in another run {old}"
                    yield Finding(Cause.HOST_VALUE, what, call.where)
            for old, new in zip(before.operands, call.operands, strict=False):
                # Memory that both runs allocated is the pool's in a graph.
                if old.address != new.address and (first.found(old) or run.found(new)):
                    yield _moved(call.name, old, new, makers.get(new.storage, call.where))
        else:
            if len(calls) != len(calls_before):
                longer = max(calls, calls_before, key=len)
                what = f"{len(calls)} calls, in another run {len(calls_before)}"
                extra = longer[min(len(calls), len(calls_before))]
                yield Finding(Cause.HOST_VALUE, what, extra.where)


def _moved(name: str, old: Operand, new: Operand, where: Trail) -> Finding:
    """Return the finding for a buffer at another address than in another run."""
    if new.nbytes > old.nbytes:
        what = f"{name} is given a buffer of {new.nbytes} bytes, in another run of {old.nbytes}"
        return Finding(Cause.GROWING_WORKSPACE, what, where)
    metadata = new.dtype in (torch.bool, torch.int16, torch.int32, torch.int64)
    cause = Cause.REBUILT_METADATA if metadata else Cause.MOVED_BUFFER
    kind = f"{str(new.dtype).removeprefix('torch.')} {list(new.view[0])}"
    return Finding(cause, f"{name} is given {kind} at another address than in another run", where)


def _piling_up(runs: list[_Run]) -> Iterator[Finding]:
    """Find memory that every run allocates and somebody keeps."""
    held_here = {storage for run in runs for storage in run.trace.external}

    def kept(run: _Run) -> dict[Trail, int]:
        return {
            made.where: made.nbytes
            for storage, made in run.trace.made.items()
            if storage not in held_here | run.returned and not made.alive.expired()
        }

    if any(map(kept, runs)):
        # Perhaps only a circle of dead objects holds it.
        gc.collect()
    sizes: dict[Trail, list[int]] = {}
    for run in runs:
        for where, nbytes in kept(run).items():
            sizes.setdefault(where, []).append(nbytes)
    for where, nbytes in sizes.items():
        if len(nbytes) > 1:
            what = f"{max(nbytes)} bytes are allocated at every call and kept"
            yield Finding(Cause.GROWING_WORKSPACE, what, where)


def _replayable(
    step: Callable[[], Any], device_type: str
) -> tuple[CapturedStep | RecordedStep | None, list[Finding]]:
    """Return the step in a form that can be replayed, and what stands against it."""
    if device_type == "cpu":
        return record(step, warmup=0, device="cpu"), []
    traces: list[Trace] = []

    def watched_step() -> Any:
        # Only the step: beginning a capture allocates the random generator's 8-byte state, which
        # is torch's own and lies outside the pool.
        with watching("cuda") as trace:
            traces.append(trace)
            return step()

    try:
        graph = captured(watched_step, pool=None, stream=torch.cuda.Stream(), keeps=())
    except CaptureError as error:
        return None, [Finding(Cause.CAPTURE_FAILED, str(error), error.where)]
    segments = [
        range(segment["address"], segment["address"] + segment["total_size"])
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) == tuple(graph.pool)
    ]
    return graph, [
        Finding(Cause.ALLOCATION, f"{made.nbytes} bytes outside the graph's pool", made.where)
        for made in traces[0].made.values()
        if made.device_type == "cuda"
        and made.nbytes
        and not any(made.address in segment for segment in segments)
    ]


def _replays_against_eager(
    step: Callable[[], Any],
    mutate: Callable[[int], None],
    rounds: int,
    again: CapturedStep | RecordedStep,
    writer: Trail,
) -> Iterator[Finding]:
    """Compare replays with eager calls after each change of the inputs."""
    eager_results = []
    # Round 0 is what was captured, so it comes last.
    for round_ in (*range(1, rounds), 0):
        mutate(round_)
        replayed = _bits(again.replay())
        eager = _bits(step())
        replayed_again = _bits(again.replay())
        eager_results.append(eager)
        if not _same(replayed, replayed_again):
            what = "two replays on the same inputs differ: a wait is skipped, or a buffer is read "
            what += "before it is written. The result was last written here"
            yield Finding(Cause.STALE_OUTPUT, what, writer)
        elif not _same(replayed, eager):
            what = "a replay and an eager call on the same inputs differ. The result was last "
            yield Finding(Cause.DIFFERS_FROM_EAGER, what + "written here", writer)
    if all(_same(eager_results[0], later) for later in eager_results[1:]):
        yield Finding(Cause.UNCHANGED_OUTPUT, "the result was the same in every round")


def _bits(result: object) -> list[torch.Tensor]:
    """Return copies of the tensors as bytes, so that NaN equals NaN."""
    tensors = tensors_in(result)
    return [t.detach().clone().contiguous().reshape(-1).view(torch.uint8) for t in tensors]


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def _allocations(trace: Trace) -> Iterator[Finding]:
    """Note what the step allocates, line by line."""
    sizes: dict[Trail, list[int]] = {}
    for made in trace.made.values():
        if made.nbytes and not made.from_host and made.device_type == trace.device_type:
            sizes.setdefault(made.where, []).append(made.nbytes)
    for where, nbytes in sizes.items():
        what = f"{sum(nbytes)} bytes in {len(nbytes)} allocations, in a graph from its pool"
        yield Finding(Cause.ALLOCATION, what, where)


def _distinct(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the first finding of each cause and line; a failed capture only if unexplained."""
    found: dict[object, Finding] = {}
    for finding in findings:
        found.setdefault((finding.cause, finding.site or finding.what), finding)
    explained = {f.site for f in found.values() if f.cause in (Cause.HOST_SYNC, Cause.COLLECTIVE)}
    return tuple(
        finding
        for finding in found.values()
        if finding.cause != Cause.CAPTURE_FAILED or finding.site not in explained
    )
