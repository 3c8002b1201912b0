"""ag_rs and a2a on two GPUs over NCCL or RCCL: eager, in graphs, and how many launches a call."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from reducer_gpu_ranks import DTYPE, HEAD_DIM, NAMES, NUM_Q_HEADS, SHAPES, random_state

from dcp_lab import AttnState
from dcp_lab.kernels import INTERPRETED
from dcp_lab.reducers.local_group import run_ranks
from dcp_lab.reference import reference_merge
from dcp_lab.testing import assert_within_budget

SIZE = 2
Results = list[dict[Any, Any]]
pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        INTERPRETED or torch.cuda.device_count() < SIZE, reason=f"needs {SIZE} GPUs"
    ),
]
by_reducer = pytest.mark.parametrize("reducer", NAMES)


@pytest.fixture(scope="module")
def results() -> Results:
    """What each rank got; the processes are started once, also when they fail."""
    return run_ranks("reducer_gpu_ranks:run", SIZE, backend="nccl", timeout_s=500)


def joined(parts: list[AttnState]) -> AttnState:
    """Return all heads, put together in rank order."""
    return AttnState(
        torch.cat([part.out for part in parts], 1), torch.cat([part.lse for part in parts], 1)
    )


def eager_merge(states: list[AttnState]) -> AttnState:
    """Merge in out's own dtype with plain torch: the yardstick for rounding."""
    outs, lses = (torch.stack(parts) for parts in zip(*states, strict=True))
    lse = torch.logsumexp(lses, 0)
    weight = torch.where(lses > -math.inf, torch.exp(lses - lse), 0.0).to(outs.dtype)
    parts = torch.where((lses > -math.inf)[..., None], outs, 0) * weight[..., None]
    return AttnState(parts.sum(0), lse)


def assert_same_bits(got: AttnState, expected: AttnState) -> None:
    for part, wanted in zip(got, expected, strict=True):
        assert part.dtype == wanted.dtype and part.shape == wanted.shape
        part, wanted = (tensor.contiguous().view(torch.uint8) for tensor in (part, wanted))
        assert torch.equal(part, wanted)


def assert_reduced(got: AttnState, states: list[AttnState]) -> None:
    reference = reference_merge(*(list(parts) for parts in zip(*states, strict=True)))
    assert_within_budget("reduced", got, reference, eager_merge(states))


def shape_id(shape: tuple[int, int, int, torch.dtype]) -> str:
    return f"T{shape[0]}-Hq{shape[1]}-D{shape[2]}-{str(shape[3]).removeprefix('torch.')}"


@by_reducer
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_equals_oracle(
    results: Results, reducer: str, shape: tuple[int, int, int, torch.dtype]
) -> None:
    """The reduced state is the float64 merge within the error budget, heads in rank order."""
    found = [result["eager", reducer, shape] for result in results]
    states = [random_state(shape, rank) for rank in range(SIZE)]
    assert_reduced(joined([part["contiguous"] for part in found]), states)
    for part in found:
        assert_same_bits(part["strided"], part["contiguous"])
        if reducer == "a2a":
            assert_same_bits(part["contiguous"], part["merged"])


@by_reducer
def test_call_neither_allocates_nor_syncs(results: Results, reducer: str) -> None:
    """A call asks the allocator for nothing and never waits for the device."""
    assert [result["quiet", reducer] for result in results] == [0] * SIZE


@pytest.mark.parametrize(
    "reducer, kind, count",
    [
        ("a2a", "contiguous", 3),
        ("a2a", "transposed", 3),
        ("ag_rs", "contiguous", 3),
        ("ag_rs", "transposed", 4),
    ],
)
def test_launches(results: Results, reducer: str, kind: str, count: int) -> None:
    """a2a costs 3 launches a call, ag_rs 3, and 4 where the lse is not contiguous."""
    for result in results:
        names = result["launches", reducer][kind]
        assert len(names) == count, names


@by_reducer
def test_captured_buffers_stay(results: Results, reducer: str) -> None:
    """Graphs of two sizes replay right after a large eager call and allocator churn."""
    for result in results:
        pairs = result["moved", reducer]
        assert [len(replayed.out) for replayed, _ in pairs] == [8, 4, 8, 4]
        for replayed, eager in pairs:
            assert_same_bits(replayed, eager)
    for turn, num_tokens in enumerate((8, 4, 8, 4)):
        shape = (num_tokens, NUM_Q_HEADS, HEAD_DIM, DTYPE)
        states = [random_state(shape, 100 + 10 * turn + rank) for rank in range(SIZE)]
        assert_reduced(joined([result["moved", reducer][turn][0] for result in results]), states)


@by_reducer
def test_rows_empty_between_replays(results: Results, reducer: str) -> None:
    """A row that becomes empty or full in place is so in the next replay too."""
    for turn in range(4):
        for result in results:
            replayed, eager = result["stale", reducer][turn]
            assert_same_bits(replayed, eager)
            assert (replayed.out[turn] == 0).all() and (replayed.lse[turn] == -math.inf).all()
            assert not replayed.out.isnan().any() and not replayed.lse.isnan().any()


@by_reducer
def test_many_small_replays(results: Results, reducer: str) -> None:
    """200 replays at T = 1, right behind the writer of the inputs, equal 200 eager calls."""
    for result in results:
        replayed, eager = result["small", reducer]
        assert_same_bits(replayed, eager)
        # The inputs changed with every replay, and so did the result.
        assert (replayed.lse[1:] > replayed.lse[:-1]).all()


@by_reducer
def test_past_the_captured_size(results: Results, reducer: str) -> None:
    """Between replays T up to max_tokens works, more is refused, and replays stay right."""
    found = [result["past", reducer] for result in results]
    for part in found:
        for replay in part["replays"]:
            assert_same_bits(replay, part["before"])
        assert "expected at most max_tokens=9 tokens" in part[10]
    shape = (9, NUM_Q_HEADS, HEAD_DIM, DTYPE)
    states = [random_state(shape, rank) for rank in range(SIZE)]
    assert_reduced(joined([part[9] for part in found]), states)
