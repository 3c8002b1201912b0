"""audit, record and the trace reader: planted faults, each named with its line.

Everything runs on the CPU, where a recording stands for the graph, and on a GPU with real graphs.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from dcp_lab import AttnState, DecodeWorkspace, make_reducer, paged_decode
from dcp_lab.graphs import (
    CaptureError,
    Cause,
    Report,
    audit,
    capture,
    count_launches,
    launches_in_trace,
    record,
)
from dcp_lab.graphs.watch import watching
from dcp_lab.reducers.local_group import run_ranks
from dcp_lab.testing import PagedCase

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HERE = str(Path(__file__).resolve())
pytestmark = pytest.mark.unpoisoned


def line_of(mark: str) -> int:
    """Return the line of this file that ends in a comment, the mark."""
    lines = Path(HERE).read_text().splitlines()
    found = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    assert len(found) == 1, (mark, found)
    return found[0]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


class World:
    """Inputs and outputs that stay where they are, and a change of the inputs in place."""

    def __init__(self) -> None:
        self.x, self.y, self.out = numbers(8, 4), numbers(8, 4), torch.empty(8, 4, device=DEVICE)
        self.lens = torch.tensor([3, 1, 4, 1, 5, 2, 6, 5], dtype=torch.int32, device=DEVICE)

    def mutate(self, round_: int) -> None:
        self.x.copy_(numbers(8, 4))
        self.lens.add_(1)

    def step(self) -> torch.Tensor:
        torch.add(self.x, self.y, out=self.out)
        return self.out.mul_(self.lens[:, None])


def check(report: Report, cause: Cause, mark: str, *others: Cause) -> None:
    """Assert that the cause is found at the marked line, and nothing but it and the others."""
    sites = [finding.site for finding in report.by(cause)]
    assert (HERE, line_of(mark)) in [(site.path, site.line) for site in sites if site], str(report)
    assert report.causes <= {cause, *others}, str(report)
    assert not report.ok and str(cause) in str(report) and mark in str(report)


# ---- clean steps ----------------------------------------------------------------------------


def test_a_clean_step_passes():
    """Reads in place, writes in place: nothing is found and nothing noted."""
    world = World()
    report = audit(world.step, world.mutate, forbid_allocations=True)
    assert report.ok and not report.notes, str(report)
    assert report.calls == 2 and report.rounds == 4
    assert report.replayed == ("graph" if DEVICE == "cuda" else "recording")
    assert "safe to capture: 2 calls a step" in str(report)


def decode_step(**options: object) -> tuple[Callable[[], AttnState], Callable[[int], None]]:
    """Return paged_decode as a server would capture it, and what changes between its steps."""
    lens = torch.tensor([[5, 33], [34, 0]], dtype=torch.int32, device=DEVICE)
    case = PagedCase.build((34,) * 4, num_kv_heads=1, head_dim=16, device=DEVICE)
    seq_lens, table, q = lens[0].clone(), case.block_table[:2].clone(), case.q[:2].clone()
    out, lse = torch.empty_like(q), torch.empty(2, 4, device=DEVICE)
    workspace = DecodeWorkspace(2, 4, 1, 16, kv_dtype=torch.float32, device=DEVICE)

    def mutate(round_: int) -> None:
        q.copy_(torch.randn_like(q))
        seq_lens.copy_(lens[round_ % 2])
        table.copy_(case.block_table[2:] if round_ % 2 else case.block_table[:2])

    def step() -> AttnState:
        workspace.prepare(seq_lens)
        given = {"workspace": workspace, "out": out, "lse": lse} | options
        return paged_decode(q, case.k_cache, case.v_cache, table, seq_lens, **given)

    return step, mutate


def test_paged_decode_is_safe():
    """With a prepared workspace, out and lse it allocates nothing and replays bit for bit."""
    step, mutate = decode_step()
    report = audit(step, mutate, rounds=2, warmup=1, forbid_allocations=True)
    assert report.ok, str(report)
    # The plan of the step, the decode, the reduce of split requests.
    assert report.calls == 3


def test_paged_decode_without_buffers_is_safe_and_says_what_it_takes():
    """out, lse and partials then come from the graph's pool: notes, with the op's lines."""
    step, mutate = decode_step(workspace=None, out=None, lse=None, num_splits=2)
    report = audit(step, mutate, rounds=2, warmup=1)
    assert report.ok, str(report)
    assert report.notes and {Path(note.site.path).parent.name for note in report.notes} == {"ops"}
    assert all(HERE in [site.path for site in note.where] for note in report.notes)


@pytest.fixture
def group(tmp_path: Path):
    """A process group of this process alone."""
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/r", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["a2a", "ag_rs"])
def test_reducers_are_safe(group, name):
    """A reducer of a group of one passes, also with rows that become empty."""
    reducer = make_reducer(
        name,
        group=group,
        max_tokens=4,
        num_q_heads=4,
        head_dim=32,
        dtype=torch.float32,
        device=DEVICE,
    )
    state = AttnState(numbers(4, 4, 32), numbers(4, 4))

    def mutate(round_: int) -> None:
        state.out.copy_(numbers(4, 4, 32))
        state.lse.copy_(numbers(4, 4))
        state.lse[round_ % 4] = -torch.inf

    report = audit(lambda: reducer(state), mutate, rounds=3, forbid_allocations=True)
    assert report.ok, str(report)


# ---- planted faults -------------------------------------------------------------------------


def test_host_sync():
    """A value read from the device is named where it is read."""
    world = World()

    def step() -> torch.Tensor:
        world.lens.sum().item()  # planted: sync
        return world.step()

    check(audit(step, world.mutate), Cause.HOST_SYNC, "planted: sync")


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda t: t.tolist(), id="tolist"),
        pytest.param(lambda t: t.cpu(), id="cpu"),
        pytest.param(lambda t: t.cpu().numpy(), id="numpy"),
        pytest.param(lambda t: bool(t.sum() > 0), id="bool"),
        pytest.param(lambda t: range(t[0]), id="index"),
        pytest.param(lambda t: t.nonzero(), id="nonzero"),
        pytest.param(lambda t: t[t > 0], id="mask"),
        pytest.param(lambda t: torch.equal(t, t), id="equal"),
        pytest.param(lambda t: t.unique(), id="unique"),
        pytest.param(lambda t: torch.repeat_interleave(t.abs()), id="repeat_interleave"),
    ],
)
def test_each_way_to_sync(read):
    """Whatever brings a value or a value's shape to the host is a sync."""
    world = World()

    def step() -> torch.Tensor:
        read(world.lens)
        return world.step()

    report = audit(step, lambda round_: world.x.copy_(numbers(8, 4)), rounds=2)
    assert Cause.HOST_SYNC in report.causes, str(report)


def test_what_needs_no_sync_is_none():
    """Writing by a mask or an index, and shapes, are no host syncs."""
    world = World()

    def step() -> torch.Tensor:
        result = world.step()
        result[result > 1e9] = 0.0
        result[0] = 1.0
        return result[: len(world.x)].view(world.x.shape)

    assert audit(step, world.mutate).ok


def test_branch_on_a_host_value():
    """A branch that the host takes by a value is found by where the runs part."""
    world, flag = World(), [False]

    def mutate(round_: int) -> None:
        world.mutate(round_)
        flag[0] = round_ % 2 == 1

    def step() -> torch.Tensor:
        if flag[0]:
            return torch.mul(world.x, world.y, out=world.out)  # planted: branch
        return torch.add(world.x, world.y, out=world.out)

    check(audit(step, mutate), Cause.HOST_VALUE, "planted: branch", Cause.DIFFERS_FROM_EAGER)


@pytest.mark.parametrize("kind", ["number", "written number", "shape", "extra call"])
def test_a_host_value_in_a_call(kind):
    """A number, a shape or the number of calls that follows the host is named at its call."""
    world, count = World(), [1]

    def mutate(round_: int) -> None:
        world.mutate(round_)
        count[0] = 1 + round_

    def step() -> torch.Tensor:
        world.out.zero_()
        if kind == "number":
            world.out.add_(world.x, alpha=count[0])  # planted: number
        elif kind == "written number":
            world.out[0] = float(count[0])  # planted: written number
        elif kind == "shape":
            world.out[: count[0]].add_(world.x[: count[0]])  # planted: shape
        else:
            for _ in range(count[0]):
                world.out.add_(world.x)  # planted: extra call
        return world.out

    report = audit(step, mutate)
    check(report, Cause.HOST_VALUE, f"planted: {kind}", Cause.DIFFERS_FROM_EAGER)
    assert Cause.DIFFERS_FROM_EAGER in report.causes


def test_growing_workspace():
    """A buffer that a larger call replaced leaves the graph with the old one."""
    world, workspace = World(), [torch.zeros(32, device=DEVICE)]

    def scratch(size: int) -> torch.Tensor:
        if workspace[0].numel() < size:
            workspace[0] = torch.zeros(size, device=DEVICE)  # planted: growth
        return workspace[0][:size]

    def mutate(round_: int) -> None:
        world.mutate(round_)
        # An eager call of another size shares the workspace.
        scratch(32 * (round_ + 1)).add_(1)

    def step() -> torch.Tensor:
        buffer = scratch(32).view(8, 4)
        torch.add(world.x, world.y, out=buffer)
        return world.out.copy_(buffer)

    check(audit(step, mutate), Cause.GROWING_WORKSPACE, "planted: growth")


def test_memory_that_piles_up():
    """What every call allocates and somebody keeps is a leak in eager and in a graph."""
    world, kept = World(), []

    def step() -> torch.Tensor:
        kept.append(world.x + world.y)  # planted: pile
        return world.step()

    report = audit(step, world.mutate)
    check(report, Cause.GROWING_WORKSPACE, "planted: pile")
    assert "128 bytes are allocated at every call and kept" in str(report)


def test_rebuilt_metadata():
    """Lengths made anew between steps are at another address: the line that made them."""
    world = World()

    def mutate(round_: int) -> None:
        world.x.copy_(numbers(8, 4))
        world.lens = world.lens + 1  # planted: rebuilt

    report = audit(world.step, mutate)
    check(report, Cause.REBUILT_METADATA, "planted: rebuilt", Cause.DIFFERS_FROM_EAGER)
    assert Cause.DIFFERS_FROM_EAGER in report.causes


def test_metadata_from_host_data():
    """A tensor made from a list inside the step keeps the list of the capture."""
    world = World()

    def step() -> torch.Tensor:
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0], device=DEVICE)  # planted: list
        return world.step().mul_(scale)

    on_gpu = (Cause.HOST_SYNC,)
    check(audit(step, world.mutate), Cause.REBUILT_METADATA, "planted: list", *on_gpu)


def test_moved_buffer():
    """A buffer replaced by one of the same size is at another address."""
    world = World()

    def mutate(round_: int) -> None:
        world.x = numbers(8, 4)  # planted: moved

    def step() -> torch.Tensor:
        return torch.add(world.x, world.y, out=world.out)

    report = audit(step, mutate)
    # The line is that of numbers(), the marked one called it.
    (finding,) = report.by(Cause.MOVED_BUFFER)
    assert finding.where[1].line == line_of("planted: moved"), str(report)
    assert report.causes == {Cause.MOVED_BUFFER, Cause.DIFFERS_FROM_EAGER}


def test_moved_buffer_that_nobody_saw_being_made():
    """Buffers that alternate are found by their address, at the call that got them."""
    world, pair, calls = World(), (numbers(8, 4), numbers(8, 4)), [0]

    def step() -> torch.Tensor:
        calls[0] += 1
        buffer = pair[calls[0] % 2]
        torch.add(world.x, world.y, out=buffer)  # planted: parity
        return world.out.copy_(buffer)

    check(audit(step, world.mutate), Cause.MOVED_BUFFER, "planted: parity")


def test_allocation():
    """Memory taken in the step is a note with its line, and a finding where it is forbidden."""
    world = World()

    def step() -> torch.Tensor:
        doubled = world.x * 2.0  # planted: allocation
        return world.out.copy_(doubled)

    report = audit(step, world.mutate)
    assert report.ok and [note.site.line for note in report.notes] == [
        line_of("planted: allocation")
    ]
    assert "128 bytes in 1 allocations" in str(report)
    forbidden = audit(step, world.mutate, forbid_allocations=True)
    check(forbidden, Cause.ALLOCATION, "planted: allocation")


@pytest.fixture
def host_group(tmp_path: Path):
    """A process group of this process alone, over gloo on any machine."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/r", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_collective_on_the_host(host_group):
    """gloo runs on the host: no graph holds its collectives."""
    world, on_host = World(), torch.zeros(4)

    def step() -> torch.Tensor:
        dist.all_reduce(on_host)  # planted: gloo
        return world.step()

    check(audit(step, world.mutate), Cause.COLLECTIVE, "planted: gloo")


def test_barrier(host_group):
    """A barrier makes the host wait."""
    world = World()

    def step() -> torch.Tensor:
        dist.barrier()  # planted: barrier
        return world.step()

    check(audit(step, world.mutate), Cause.COLLECTIVE, "planted: barrier")


def test_reducers_of_two_ranks():
    """Over gloo nothing but gloo itself stands against a2a in a graph."""
    for found in run_ranks("graph_ranks:audit_reducers", 2, args=("cpu",)):
        causes, report = found["a2a"]
        assert causes == ["collective"], report
        # gloo's reduce-scatter copies out of memory of its own, which no recording brings up to
        # date.
        causes, report = found["ag_rs"]
        assert "collective" in causes, report


class LateReducer:
    """Hands on what the last exchange brought instead of waiting for this one."""

    def __init__(self) -> None:
        self.received = torch.zeros(8, 4, device=DEVICE)

    def __call__(self, sent: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out.copy_(self.received)  # planted: late
        self.received.copy_(sent)
        return out


def test_reducer_that_skips_a_wait():
    """Stale data shows as a result that depends on the call before."""
    world, reducer = World(), LateReducer()
    report = audit(lambda: reducer(world.x, world.out), world.mutate)
    check(report, Cause.STALE_OUTPUT, "planted: late")


def test_differs_from_eager():
    """What the watch cannot see shows where a replay is held against an eager call."""
    world = World()

    def step() -> torch.Tensor:
        torch.add(world.x, world.y, out=world.out)  # planted: unseen
        with torch.utils._python_dispatch._disable_current_modes():
            world.out.mul_(2.0)
        return world.out

    if DEVICE == "cuda":
        pytest.skip("a graph holds the hidden call, a recording does not")
    check(audit(step, world.mutate), Cause.DIFFERS_FROM_EAGER, "planted: unseen")


def test_a_mutate_that_changes_nothing():
    """An audit whose inputs never change proves nothing and says so."""
    world = World()
    report = audit(world.step, lambda round_: None)
    assert report.causes == {Cause.UNCHANGED_OUTPUT}
    check_line = "the result was the same in every round"
    assert check_line in str(report)


@pytest.mark.parametrize(
    "argument, message",
    [
        pytest.param({"rounds": 1}, "rounds: expected an int >= 2, got 1", id="rounds"),
        pytest.param({"rounds": 0}, "rounds: expected an int >= 1, got 0", id="no rounds"),
        pytest.param({"warmup": 0}, "warmup: expected an int >= 1, got 0", id="warmup"),
        pytest.param({"device": "meta"}, "device: expected a CUDA or ROCm device", id="device"),
    ],
)
def test_audit_refuses(argument, message):
    """Arguments are checked by name."""
    world = World()
    with pytest.raises(ValueError, match=message):
        audit(world.step, world.mutate, **argument)


def test_a_step_has_to_return_tensors():
    """A step without a result cannot be compared."""
    with pytest.raises(ValueError, match="step: expected a callable that returns tensors, got No"):
        audit(lambda: None, lambda round_: None)


def test_an_error_of_the_step_is_its_own():
    """Watching changes nothing about exceptions, and ends with them."""
    world = World()

    def step() -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        audit(step, world.mutate)
    calls = []

    def failing_later() -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("watched")
        return world.step()

    with pytest.raises(KeyError, match="watched"):
        audit(failing_later, world.mutate)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert audit(world.step, world.mutate).ok


# ---- record ---------------------------------------------------------------------------------


def test_record_replays_on_new_inputs():
    """A recording reads its inputs in place: new lengths, new tables, bit-equal to eager."""
    step, mutate = decode_step()
    recorded = record(step)
    for round_ in (1, 0):
        mutate(round_)
        replayed = AttnState(*(part.clone() for part in recorded.replay()))
        expected = step()
        assert torch.equal(replayed.out, expected.out) and torch.equal(replayed.lse, expected.lse)
    assert [call.name for call in recorded.trace.calls][-2:] == [
        "_decode_kernel",
        "_reduce_kernel",
    ]


def test_record_keeps_host_values():
    """As in a graph, a number read on the host stays that of the recording."""
    x, out = torch.zeros(3, device=DEVICE), torch.zeros(3, device=DEVICE)
    scale = [2.0]
    recorded = record(lambda: torch.add(x, 1.0, out=out).mul_(scale[0]))
    scale[0] = 5.0
    assert recorded.replay().tolist() == [2.0, 2.0, 2.0]
    x.fill_(9.0)
    assert recorded.replay().tolist() == [20.0, 20.0, 20.0]


def test_record_keeps_memory_alive():
    """What the step read stays, also when its owner lets go of it."""
    owner = {"x": torch.full((4,), 3.0, device=DEVICE)}
    recorded = record(lambda: owner["x"] * 2.0)
    del owner["x"]
    assert recorded.replay().tolist() == [6.0] * 4


def test_record_replays_views_factories_and_lists():
    """Views, fresh tensors, operations with several results and in-place writes play back."""
    x = torch.arange(6.0, device=DEVICE)

    def step() -> dict[str, torch.Tensor]:
        low, high = x.view(2, 3).unbind(0)
        values, order = torch.sort(torch.stack([high, low]), dim=0)
        ones = torch.ones(3, device=DEVICE)
        values[0] += ones
        return {"values": values, "order": order}

    recorded = record(step, warmup=0)
    x.neg_()
    replayed, expected = recorded.replay(), step()
    for name, tensor in expected.items():
        assert torch.equal(replayed[name], tensor)


def test_record_refuses():
    """Arguments are checked by name."""
    with pytest.raises(ValueError, match="warmup: expected an int >= 0, got -1"):
        record(lambda: None, warmup=-1)


def test_launches_of_paged_decode_are_seen():
    """Case 13: two launches a call with a prepared workspace, one with num_splits=1."""
    case = PagedCase.build((5, 33), num_q_heads=4, num_kv_heads=1, device=DEVICE)
    out, lse = torch.empty_like(case.q), torch.empty(2, 4, device=DEVICE)
    workspace = DecodeWorkspace(2, 4, 1, 32, kv_dtype=torch.float32, device=DEVICE)
    workspace.prepare(case.seq_lens)
    with watching(DEVICE) as trace:
        paged_decode(*case.tensors, workspace=workspace, out=out, lse=lse)
    assert [call.name for call in trace.calls] == ["_decode_kernel", "_reduce_kernel"]
    assert not trace.made and not trace.syncs
    with watching(DEVICE) as trace:
        paged_decode(*case.tensors, num_splits=1, out=out, lse=lse)
    assert [call.name for call in trace.calls] == ["_decode_kernel"]
    assert not trace.made and not trace.syncs


# ---- capture, as far as it goes without a GPU -----------------------------------------------


def test_capture_and_count_launches_say_that_they_need_a_gpu(monkeypatch):
    """Neither falls back to something else; each names its stand-in."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"capture: needs a CUDA or ROCm GPU.*graphs\.record"):
        capture(lambda: None)
    with pytest.raises(RuntimeError, match="count_launches: needs a .* GPU.*launches_in_trace"):
        count_launches(lambda: None)
    with pytest.raises(ValueError, match="warmup: expected an int >= 1, got 0"):
        capture(lambda: None, warmup=0)


class Asked(list):
    """What was asked, and the errors that the next ends of a capture raise."""

    failing: list[str]


class FakeStream:
    device, device_index = "cpu", 0

    def wait_stream(self, other: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture
def fake_cuda(monkeypatch) -> Asked:
    """torch.cuda on a machine without one: what capture asks of it, in order."""
    asked, failing = Asked(), []

    class FakeGraph:
        def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
            asked.append(f"begin {pool} {capture_error_mode}")

        def capture_end(self) -> None:
            asked.append("end")
            if failing:
                raise RuntimeError(failing.pop())

        def replay(self) -> None:
            asked.append("replay")

        def reset(self) -> None:
            asked.append("reset")

    def note(name: str, result: object = None) -> Callable[..., object]:
        def noted(*args: object) -> object:
            asked.append(" ".join(map(str, (name, *args))))
            return result

        return noted

    for name, value in {
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "current_stream": FakeStream,
        "Stream": FakeStream,
        "stream": lambda stream: contextlib.nullcontext(),
        "graph_pool_handle": lambda: (0, 7),
        "CUDAGraph": FakeGraph,
        "synchronize": note("synchronize"),
        "empty_cache": note("empty_cache"),
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": note("syncs"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, note(name), raising=False)
    asked.failing = failing
    return asked


def test_what_capture_asks_of_torch(fake_cuda):
    """Warm-up is watched once, syncs are refused during the capture only, a reset is final."""
    calls = []

    def step() -> torch.Tensor:
        calls.append(1)
        return torch.ones(4)

    graph = capture(step, warmup=3)
    assert len(calls) == 4
    assert fake_cuda == [
        "syncs warn",
        "syncs 0",
        "synchronize",
        "empty_cache",
        "begin (0, 7) thread_local",
        "syncs error",
        "syncs 0",
        "end",
    ]
    assert graph.replay() is graph.result and fake_cuda[-1] == "replay"
    graph.reset()
    assert fake_cuda[-2:] == ["synchronize", "reset"]
    with pytest.raises(RuntimeError, match="replay: the graph was reset"):
        graph.replay()


def test_what_a_graph_reads_is_kept(fake_cuda, monkeypatch):
    """Memory that the step's owner lets go of stays until the graph is reset."""
    module = sys.modules[capture.__module__]
    monkeypatch.setattr(module, "watching", lambda device_type: watching("cpu"))
    owner = {"x": torch.ones(4)}
    graph = capture(lambda: owner["x"] * 2.0)
    alive = StorageWeakRef(owner["x"].untyped_storage())
    del owner["x"]
    assert not alive.expired()
    graph.reset()
    assert alive.expired()


def test_a_capture_that_fails(fake_cuda):
    """The error names the line, and the capture is ended as any other."""
    warm = []

    def step() -> None:
        warm.append(1)
        if len(warm) > 3:
            raise RuntimeError("called a synchronizing CUDA operation")  # planted: refused

    with pytest.raises(CaptureError, match="the host waits for the device here") as caught:
        capture(step)
    assert caught.value.where[0].line == line_of("planted: refused")
    assert f"at {HERE}:{line_of('planted: refused')}: raise RuntimeError" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert fake_cuda[-2:] == ["syncs 0", "end"]


def test_a_capture_that_the_driver_ends(fake_cuda):
    """The allocator is told that the capture is over, and a healthy capture follows."""
    fake_cuda.failing.append("CUDA error: capturing stream has unjoined work\nmore")
    with pytest.raises(CaptureError, match="unjoined work .*a side stream without") as caught:
        capture(lambda: torch.ones(1))
    assert "more" not in str(caught.value)
    assert fake_cuda[-6:] == [
        "syncs 0",
        "end",
        "_cuda_endAllocateToPool 0 (0, 7)",
        "_cuda_releasePool 0 (0, 7)",
        "begin None thread_local",
        "end",
    ]


def test_a_capture_that_leaves_cuda_broken(fake_cuda):
    """When not even a healthy capture works, the error says to start over."""
    fake_cuda.failing[:] = ["second", "CUDA error: first"]
    with pytest.raises(CaptureError, match="first") as caught:
        capture(lambda: torch.ones(1))
    assert caught.value.__cause__.__notes__ == [
        "CUDA did not recover from the failed capture: restart the process"
    ]


def test_an_interrupt_is_no_capture_error(fake_cuda):
    """KeyboardInterrupt passes through, after the capture was ended."""
    warm = []

    def step() -> None:
        warm.append(1)
        if len(warm) > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(step)
    assert fake_cuda[-1] == "end"


def test_syncs_that_torch_warns_of(fake_cuda):
    """A warning of torch's sync debug mode becomes an event; other warnings stay warnings."""
    with pytest.warns(UserWarning, match="mine"), watching("cuda") as trace:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)  # planted: warned
        warnings.warn("mine", stacklevel=1)
        torch.cuda.synchronize()  # planted: explicit
    assert [event.where[0].line for event in trace.syncs] == [
        line_of("planted: warned"),
        line_of("planted: explicit"),
    ]
    assert trace.syncs[1].what == "torch.cuda.synchronize() waits for the device"
    assert fake_cuda == ["syncs warn", "synchronize", "syncs 0"]


# ---- traces ---------------------------------------------------------------------------------


def event(name: str, cat: str, ts: float, correlation: int | None = None, dur: float = 1.0):
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "args": args}


CUDA_TRACE = [
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
    event("window", "user_annotation", 10.0, dur=80.0),
    event("window", "gpu_user_annotation", 10.0, dur=80.0),
    event("aten::add", "cpu_op", 11.0),
    event("cudaLaunchKernel", "cuda_runtime", 12.0, 1),
    # The runtime call and the driver call underneath it are one launch.
    event("cudaLaunchKernelExC", "cuda_runtime", 14.0, 2),
    event("cuLaunchKernelEx", "cuda_driver", 14.5, 2),
    event("cuLaunchKernelEx", "cuda_driver", 16.0, 3),
    event("cudaLaunchCooperativeKernel", "cuda_runtime", 17.0, 4),
    event("cudaGraphLaunch", "cuda_runtime", 20.0, 5),
    event("cudaMemcpyAsync", "cuda_runtime", 30.0, 6),
    event("cudaMemsetAsync", "cuda_runtime", 31.0, 7),
    event("cudaStreamSynchronize", "cuda_runtime", 32.0, 8),
    event("cudaEventSynchronize", "cuda_runtime", 33.0, 9),
    event("cudaStreamWaitEvent", "cuda_runtime", 34.0, 10),
    event("cudaEventRecord", "cuda_runtime", 35.0, 11),
    event("cudaDeviceSynchronize", "cuda_runtime", 95.0, 12),
    event("cudaLaunchKernel", "cuda_runtime", 5.0, 13),
    event("second", "kernel", 42.0, 5),
    event("first", "kernel", 41.0, 5),
    event("Memcpy DtoH", "gpu_memcpy", 43.0, 6),
    event("Memset", "gpu_memset", 44.0, 7),
]

HIP_TRACE = [
    event("hipLaunchKernel", "cuda_runtime", 1.0, 1),
    event("hipModuleLaunchKernel", "cuda_runtime", 2.0, 2),
    event("hipExtModuleLaunchKernel", "cuda_runtime", 3.0, 3),
    event("hipExtLaunchKernel", "cuda_runtime", 4.0, 4),
    event("hipLaunchCooperativeKernel", "cuda_runtime", 5.0, 5),
    event("hipGraphLaunch", "cuda_runtime", 6.0, 6),
    event("hipMemcpyWithStream", "cuda_runtime", 7.0, 7),
    event("hipMemcpyAsync", "cuda_runtime", 8.0, 8),
    event("hipMemcpy", "cuda_runtime", 9.0, 9),
    event("hipStreamSynchronize", "cuda_runtime", 10.0, 10),
    event("hipGetDevice", "cuda_runtime", 11.0, 11),
]


def test_cuda_trace():
    """Launches are counted once each, inside the window only; graphs' kernels on the device."""
    found = launches_in_trace(CUDA_TRACE, window="window")
    assert (found.kernel_launches, found.graph_launches, found.copies) == (4, 1, 2)
    assert found.host_syncs == 2
    assert found.kernels == ("first", "second") and found.device_kernels == 2
    assert found.device_copies == 2
    assert str(found) == (
        "host: 4 kernel launches, 1 graph launches, 2 copies, 2 syncs; device: 2 kernels, 2 copies"
    )
    whole = launches_in_trace(CUDA_TRACE)
    assert (whole.kernel_launches, whole.host_syncs) == (5, 3)


def test_hip_trace():
    """HIP's names count alike; its blocking copies are copies and syncs."""
    found = launches_in_trace(HIP_TRACE)
    assert (found.kernel_launches, found.graph_launches, found.copies) == (5, 1, 3)
    assert found.host_syncs == 3


def test_a_window_has_to_be_in_the_trace():
    """A wrong name is refused, not counted as nothing."""
    with pytest.raises(
        ValueError, match="window: expected a record_function of the trace, got 'a'"
    ):
        launches_in_trace(CUDA_TRACE, window="a")
