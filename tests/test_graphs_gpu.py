"""Graphs on one GPU: paged_decode and a reducer captured, failed captures, launches, audits.

    pytest tests/test_graphs_gpu.py tests/test_graphs.py

Cases 4, 5, 6 and 13 are faults that users of other engines met: buffers that a larger call
replaced, lengths that a graph did not read again, small batches, launches that crept in.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dcp_lab import AttnState, BoundDecode, DecodeWorkspace, make_reducer, paged_decode
from dcp_lab.graphs import CaptureError, Cause, audit, capture, count_launches
from dcp_lab.kernels import INTERPRETED
from dcp_lab.reducers.local_group import run_ranks
from dcp_lab.testing import PagedCase

HERE = str(Path(__file__).resolve())
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.unpoisoned,
    pytest.mark.skipif(
        INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU"
    ),
]
HQ, HKV, DIM, DTYPE = 16, 1, 128, torch.bfloat16


def line_of(mark: str) -> int:
    """Return the line of this file that ends in a comment, the mark."""
    lines = Path(HERE).read_text().splitlines()
    (found,) = (i for i, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))
    return found


def workspace(max_requests: int) -> DecodeWorkspace:
    return DecodeWorkspace(max_requests, HQ, HKV, DIM, kv_dtype=DTYPE)


def copied(state: AttnState) -> AttnState:
    return AttnState(state.out.clone(), state.lse.clone())


def assert_same_bits(got: AttnState, expected: AttnState) -> None:
    for part, wanted in zip(got, expected, strict=True):
        assert part.shape == wanted.shape
        assert torch.equal(part.view(torch.uint8), wanted.view(torch.uint8))


class Batch:
    """One token each of some requests, in buffers that stay where they are.

    Two sets of pages hold the requests' tokens, so that a block table can change in place.
    """

    def __init__(self, space: DecodeWorkspace, lens: list[int], *, seed: int = 0) -> None:
        count = len(lens)
        self.case = PagedCase.build(
            [max(lens)] * (2 * count),
            num_q_heads=HQ,
            num_kv_heads=HKV,
            head_dim=DIM,
            dtype=DTYPE,
            device="cuda",
            seed=seed,
        )
        self.space = space
        self.q = self.case.q[:count].clone()
        self.block_table = self.case.block_table[:count].clone()
        self.seq_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(count, HQ, device="cuda")

    def change(self, lens: list[int], seed: int) -> None:
        """Change queries, lengths and tables in place."""
        generator = torch.Generator("cuda").manual_seed(seed)
        self.q.normal_(generator=generator)
        self.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        half = len(lens) if seed % 2 else 0
        self.block_table.copy_(self.case.block_table[half : half + len(lens)])

    def decode(self, **options: object) -> AttnState:
        given = {"workspace": self.space, "out": self.out, "lse": self.lse} | options
        caches = (self.case.k_cache, self.case.v_cache)
        return paged_decode(self.q, *caches, self.block_table, self.seq_lens, **given)

    def step(self) -> AttnState:
        self.space.prepare(self.seq_lens)
        return self.decode()


# ---- paged_decode in a graph ----------------------------------------------------------------


def test_captured_buffers_stay():
    """Case 4: graphs of T=8 and 4 stay right after an eager T=4096 and allocator churn."""
    space = workspace(4096)
    batches = {8: Batch(space, [600] * 8), 4: Batch(space, [600] * 4), 4096: None}
    batches[4096] = Batch(space, [17] * 4096)
    graphs = {count: capture(batches[count].step) for count in (8, 4)}
    batches[4096].step()
    sizes = [space.partial_out.nbytes, space.partial_lse.nbytes, space.items.nbytes]
    sizes += [t.nbytes for batch in batches.values() for t in (batch.q, batch.lse)]
    for _ in range(3):
        blocks = [torch.full((n // 4,), torch.nan, device="cuda") for n in sizes for _ in range(4)]
        del blocks
    before = None
    for turn, count in enumerate((8, 4, 8, 4)):
        lens = [1 + (97 * (turn + 1) * (b + 1)) % 600 for b in range(count)]
        batches[count].change(lens, seed=turn)
        replayed = copied(graphs[count].replay())
        assert_same_bits(replayed, copied(batches[count].step()))
        assert not replayed.out.isnan().any() and replayed.lse.isfinite().all()
        assert before is None or not torch.equal(replayed.lse[:4], before)
        before = replayed.lse[:4]


def test_lengths_and_tables_change_in_place():
    """Case 5: seq_lens [5,9,33,64], then [6,1,0,63] with other rows: replay equals eager."""
    batch = Batch(workspace(4), [5, 9, 33, 64])
    graph = capture(batch.step)
    batch.change([6, 1, 0, 63], seed=1)
    replayed = copied(graph.replay())
    assert_same_bits(replayed, copied(batch.step()))
    assert (replayed.out[2] == 0).all() and (replayed.lse[2] == -torch.inf).all()
    assert replayed.lse[[0, 1, 3]].isfinite().all()
    batch.change([5, 9, 33, 64], seed=2)
    replayed = copied(graph.replay())
    assert_same_bits(replayed, copied(batch.step()))
    assert replayed.lse.isfinite().all()


def test_small_batch_behind_a_producer():
    """Case 6: T=1, 200 replays, the queries written right before: equal to 200 eager calls."""
    batch = Batch(workspace(1), [500])
    base, count = batch.q.clone(), torch.zeros(1, device="cuda")

    def step() -> AttnState:
        count.add_(1)
        torch.add(base, count.to(DTYPE) / 64, out=batch.q)
        return batch.step()

    graph = capture(step)
    histories = []
    for call in (graph.replay, step):
        count.zero_()
        histories.append([copied(call()) for _ in range(200)])
    for replayed, eager in zip(*histories, strict=True):
        assert_same_bits(replayed, eager)
    lses = torch.stack([state.lse for state in histories[0]])
    assert (lses[1:] != lses[:-1]).any(-1).all()


def test_launches():
    """Case 13: 2 launches a call with a prepared workspace, 1 with num_splits=1, no sync."""
    batch = Batch(workspace(4), [5, 9, 33, 600])
    batch.step()
    for options, expected in (
        ({}, 2),
        ({"num_splits": 1}, 1),
        ({"num_splits": 4, "workspace": None}, 2),
        ({"num_splits": 1, "workspace": None, "out": None, "lse": None}, 1),
    ):
        found = count_launches(lambda options=options: batch.decode(**options))
        assert (found.kernel_launches, found.device_kernels) == (expected, expected), found
        assert (found.graph_launches, found.copies, found.host_syncs) == (0, 0, 0), found
    assert found.kernels == ("_decode_kernel",)
    bound = BoundDecode(
        batch.q,
        batch.case.k_cache,
        batch.case.v_cache,
        batch.block_table,
        batch.seq_lens,
        workspace=batch.space,
        out=batch.out,
        lse=batch.lse,
    )
    assert count_launches(bound).kernel_launches == 2


def test_launches_of_a_graph():
    """A replay is one launch on the host; the device still runs plan, decode and reduce."""
    batch = Batch(workspace(4), [5, 9, 33, 600])
    graph = capture(batch.step)
    found = count_launches(graph.replay)
    assert (found.kernel_launches, found.graph_launches, found.host_syncs) == (0, 1, 0), found
    assert found.kernels == ("_plan_kernel", "_decode_kernel", "_reduce_kernel")


def test_launches_see_a_sync():
    """A value read on the host is a copy and a sync."""
    x = torch.ones(4, device="cuda")
    found = count_launches(lambda: x.sum().item())
    assert (found.kernel_launches, found.copies, found.host_syncs) == (1, 1, 1), found


def test_a_step_takes_no_memory():
    """Neither an eager step nor its capture asks the allocator for anything."""
    batch = Batch(workspace(4), [5, 9, 33, 600])
    batch.step()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    batch.step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = capture(batch.step)
    segments = [s for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] == graph.pool]
    assert segments == []


def test_audit_of_decode():
    """The audit passes paged_decode over many lengths, empty requests among them."""
    batch = Batch(workspace(4), [5, 9, 33, 600])
    lens = [[5, 9, 33, 600], [6, 1, 0, 63], [600, 600, 600, 600], [0, 0, 0, 1]]
    report = audit(
        batch.step,
        lambda round_: batch.change(lens[round_], seed=round_),
        forbid_allocations=True,
    )
    assert report.ok and report.replayed == "graph" and report.calls == 3, str(report)


# ---- a reducer in a graph -------------------------------------------------------------------


@pytest.fixture
def group(tmp_path: Path):
    """A process group of this process alone."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/r", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_reducer_behind_a_producer(group):
    """Case 6 for a2a of one rank: 200 replays, out and lse written right before the reduce."""
    reducer = make_reducer(
        "a2a",
        group=group,
        max_tokens=1,
        num_q_heads=HQ,
        head_dim=DIM,
        dtype=DTYPE,
        device="cuda",
    )
    base = AttnState(
        torch.randn(1, HQ, DIM, device="cuda", dtype=DTYPE), torch.randn(1, HQ, device="cuda")
    )
    state, count = copied(base), torch.zeros(1, device="cuda")

    def step() -> AttnState:
        count.add_(1)
        torch.add(base.lse, count, out=state.lse)
        torch.add(base.out, count.to(DTYPE), out=state.out)
        return reducer(state)

    graph = capture(step)
    histories = []
    for call in (graph.replay, step):
        count.zero_()
        histories.append([copied(call()) for _ in range(200)])
    for replayed, eager in zip(*histories, strict=True):
        assert_same_bits(replayed, eager)
    lses = torch.stack([state.lse for state in histories[0]])
    assert (lses[1:] > lses[:-1]).all()


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_reducers_of_two_ranks():
    """Over NCCL or RCCL both reducers are safe to capture: nothing found, nothing allocated."""
    for found in run_ranks("graph_ranks:audit_reducers", 2, args=("cuda",), backend="nccl"):
        for name, (causes, report) in found.items():
            assert causes == [], (name, report)


# ---- capture --------------------------------------------------------------------------------


def test_what_a_graph_reads_is_kept():
    """Memory that the step's owner lets go of is not given to anybody else."""
    owner = {"x": torch.full((1 << 20,), 3.0, device="cuda")}
    graph = capture(lambda: owner["x"] * 2.0)
    del owner["x"]
    taken = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(4)]
    assert (graph.replay() == 6.0).all()
    assert len(taken) == 4


def test_graphs_share_a_pool():
    """A second graph may allocate from the first one's pool; each replays its own."""
    x = torch.ones(8, device="cuda")
    first = capture(lambda: x + 1)
    second = capture(lambda: x + 2, pool=first.pool, stream=torch.cuda.Stream())
    assert second.pool == first.pool
    x.fill_(5.0)
    assert first.replay().tolist() == [6.0] * 8
    assert second.replay().tolist() == [7.0] * 8


def sync_by_item(x: torch.Tensor) -> None:
    x.sum().item()  # fails: item


def sync_by_copy(x: torch.Tensor) -> None:
    x.cpu()  # fails: cpu


def sync_by_shape(x: torch.Tensor) -> None:
    x.nonzero()  # fails: nonzero


def sync_of_device(x: torch.Tensor) -> None:
    torch.cuda.synchronize()  # fails: synchronize


def sync_of_event(x: torch.Tensor) -> None:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()  # fails: event


def host_data(x: torch.Tensor) -> None:
    torch.tensor([1.0, 2.0], device="cuda")  # fails: tensor


def own_error(x: torch.Tensor) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise KeyError("only in a capture")  # fails: own


def never_joined(x: torch.Tensor) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(0.0)


@pytest.mark.parametrize(
    "fault, mark, hint",
    [
        pytest.param(sync_by_item, "fails: item", "the host waits for the device", id="item"),
        pytest.param(sync_by_copy, "fails: cpu", "the host waits for the device", id="cpu"),
        pytest.param(sync_by_shape, "fails: nonzero", "the host waits", id="nonzero"),
        pytest.param(sync_of_device, "fails: synchronize", "", id="synchronize"),
        pytest.param(sync_of_event, "fails: event", "", id="event"),
        pytest.param(host_data, "fails: tensor", "the host waits", id="tensor"),
        pytest.param(own_error, "fails: own", "only in a capture", id="own"),
        pytest.param(never_joined, None, "another stream was not waited for", id="unjoined"),
    ],
)
def test_a_failed_capture_names_the_line_and_leaves_cuda_usable(fault, mark, hint):
    """The error has the line; eager calls, random numbers, memory and captures still work."""
    x = torch.ones(64, device="cuda")

    def step() -> torch.Tensor:
        fault(x)
        return x * 2.0

    with pytest.raises(CaptureError, match="the step cannot be captured") as caught:
        capture(step)
    assert hint in str(caught.value), str(caught.value)
    if mark is None:
        assert caught.value.where == ()
    else:
        site = caught.value.where[0]
        assert (site.path, site.line) == (HERE, line_of(mark)), str(caught.value)
        assert site.code in str(caught.value)

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.cuda.get_sync_debug_mode() == 0
    assert torch.rand(8, device="cuda").sum().item() > 0
    graph = capture(lambda: x + torch.rand(64, device="cuda") * 0.0)
    x.fill_(7.0)
    assert (graph.replay() == 7.0).all()


def test_an_interrupt_passes():
    """KeyboardInterrupt is nobody's capture error, and the capture is over."""

    def step() -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise KeyboardInterrupt
        return torch.zeros(1, device="cuda")

    with pytest.raises(KeyboardInterrupt):
        capture(step)
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.empty_cache()


def test_capture_refuses():
    """A capture inside a capture, and the default stream, are refused before anything happens."""
    x = torch.ones(4, device="cuda")
    with pytest.raises(ValueError, match="stream: expected a stream other than the default one"):
        capture(lambda: x + 1, stream=torch.cuda.default_stream())

    def nested() -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            capture(lambda: x + 1)
        return x + 1

    with pytest.raises(CaptureError, match="a capture is under way on this stream"):
        capture(nested)


def test_a_reset_graph_is_gone():
    """After reset() a replay is refused, not undefined."""
    x = torch.ones(4, device="cuda")
    graph = capture(lambda: x + 1)
    graph.reset()
    graph.reset()
    with pytest.raises(RuntimeError, match="replay: the graph was reset"):
        graph.replay()


# ---- audit: faults that only a GPU has ------------------------------------------------------


def in_place(x: torch.Tensor) -> Callable[[int], None]:
    return lambda round_: x.copy_(torch.randn_like(x))


def test_memory_outside_the_pool():
    """Memory taken on a stream that is not captured is not the graph's: named with its line."""
    x, out = torch.ones(1024, device="cuda"), torch.ones(1024, device="cuda")
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        # Without it the allocator would have to ask the driver, which ends the capture at once.
        held = torch.empty(1024, device="cuda")

    def step() -> torch.Tensor:
        with torch.cuda.stream(other):
            scratch = torch.empty(1024, device="cuda")  # planted: outside
        torch.mul(x, 2.0, out=scratch)
        return out.copy_(scratch)

    report = audit(step, in_place(x))
    assert [f.site.line for f in report.by(Cause.ALLOCATION)] == [line_of("planted: outside")]
    assert "outside the graph's pool" in str(report)
    assert held.numel() == 1024


def test_a_wait_that_comes_too_late():
    """Data read before the stream that brings it was waited for is stale."""
    x, received, out = (torch.zeros(1024, device="cuda") for _ in range(3))
    side = torch.cuda.Stream()

    def step() -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            received.copy_(x)
        out.copy_(received)  # planted: early read
        torch.cuda.current_stream().wait_stream(side)
        return out

    report = audit(step, in_place(x))
    assert report.causes == {Cause.STALE_OUTPUT}, str(report)
    assert report.findings[0].site.line == line_of("planted: early read")


def test_a_wait_that_never_comes():
    """A stream that is never joined cannot be captured; the audit says why."""
    x = torch.zeros(1024, device="cuda")

    def step() -> torch.Tensor:
        never_joined(x)
        return x * 2.0

    report = audit(step, in_place(x))
    assert Cause.CAPTURE_FAILED in report.causes and report.replayed == "", str(report)
    assert "another stream was not waited for" in str(report)
    assert audit(lambda: x * 2.0, in_place(x)).ok


def test_explicit_waits():
    """synchronize() of device, stream and event are host syncs, each at its line."""
    x = torch.zeros(8, device="cuda")
    for fault, mark in ((sync_of_device, "fails: synchronize"), (sync_of_event, "fails: event")):

        def step(fault: Callable[[torch.Tensor], None] = fault) -> torch.Tensor:
            fault(x)
            return x * 2.0

        report = audit(step, in_place(x))
        assert report.causes == {Cause.HOST_SYNC}, str(report)
        assert [f.site.line for f in report.findings] == [line_of(mark)]
