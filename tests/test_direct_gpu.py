"""direct over peer memory of GPUs: exchanges, graphs, late, silent and dead ranks."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from direct_gpu_ranks import CALLS_AROUND, Q_SHAPES, SHAPE
from reducer_gpu_ranks import DTYPE, HEAD_DIM, NUM_Q_HEADS, SHAPES, random_state
from test_reducers_gpu import assert_reduced, assert_same_bits, joined, shape_id

from dcp_lab.kernels import INTERPRETED
from dcp_lab.reducers.local_group import run_ranks

SIZE = 2
pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        INTERPRETED or torch.cuda.device_count() < SIZE, reason=f"needs {SIZE} GPUs"
    ),
]


@functools.cache
def results() -> list[dict[Any, Any]]:
    """Return what each rank got; the processes are started once."""
    return run_ranks("direct_gpu_ranks:run", SIZE, backend="nccl", timeout_s=500)


@functools.cache
def failed() -> list[dict[str, Any]]:
    return run_ranks("direct_gpu_ranks:silent", SIZE, backend="nccl", timeout_s=200)


def states_of(shape: tuple[int, int, int, torch.dtype], first_seed: int = 0) -> list[Any]:
    return [random_state(shape, first_seed + rank) for rank in range(SIZE)]


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_equals_oracle(shape: tuple[int, int, int, torch.dtype]) -> None:
    """The reduced state is the float64 merge within the error budget, heads in rank order."""
    found = [result["eager", shape] for result in results()]
    assert_reduced(joined([part["contiguous"] for part in found]), states_of(shape))
    for part in found:
        assert_same_bits(part["strided"], part["contiguous"])


def test_one_launch_without_allocation_or_sync() -> None:
    """A call is one kernel, asks the allocator for nothing and never waits for the device."""
    for result in results():
        assert result["quiet"] == 0
        for kind in ("contiguous", "transposed"):
            names = result["launches"][kind]
            assert len(names) == 1 and "_direct_reduce_kernel" in names[0], names


def test_captured_buffers_stay() -> None:
    """Graphs of two sizes replay right after a large eager call and allocator churn."""
    for turn, num_tokens in enumerate((8, 4, 8, 4)):
        for result in results():
            replayed, again = result["moved"][turn]
            assert len(replayed.out) == num_tokens
            assert_same_bits(replayed, again)
        shape = (num_tokens, NUM_Q_HEADS, HEAD_DIM, DTYPE)
        got = joined([result["moved"][turn][0] for result in results()])
        assert_reduced(got, states_of(shape, 100 + 10 * turn))


def test_rows_empty_between_replays() -> None:
    """A row that becomes empty or full in place is so in the next replay, bit-equal to eager."""
    for turn in range(4):
        for result in results():
            replayed, again = result["stale"][turn]
            assert_same_bits(replayed, again)
            assert (replayed.out[turn] == 0).all() and (replayed.lse[turn] == -math.inf).all()
            assert not replayed.out.isnan().any() and not replayed.lse.isnan().any()


def test_many_small_replays() -> None:
    """200 replays at T = 1 right behind the writer of the inputs equal 200 eager calls."""
    for result in results():
        replayed, again = result["small"]
        assert_same_bits(replayed, again)
        # The inputs changed with every replay, and so did the result.
        assert (replayed.lse[1:] > replayed.lse[:-1]).all()


def test_past_the_captured_size() -> None:
    """Between replays T up to max_tokens works, more is refused, and replays stay right."""
    found = [result["past"] for result in results()]
    for part in found:
        for replay in part["replays"]:
            assert_same_bits(replay, part["before"])
        assert "expected at most max_tokens=9 tokens" in part[10]
    shape = (9, NUM_Q_HEADS, HEAD_DIM, DTYPE)
    assert_reduced(joined([part[9] for part in found]), states_of(shape))


def test_ten_thousand_numbered_exchanges() -> None:
    """Of 10,000 exchanges back to back none takes the payload of another."""
    for result in results():
        # One to warm up, 100 replays of 100, 500 eager ones. Capture itself runs nothing.
        assert result["numbered"] == {"wrong": 0, "calls": 10_501}


@pytest.mark.parametrize("call", CALLS_AROUND, ids=["2^31", "2^32", "2^47"])
def test_calls_past_every_power(call: int) -> None:
    """Exchanges go on when the call number passes 2^31, 2^32 and the end of its word."""
    for turn in range(4):
        got = joined([result["around"][call][turn] for result in results()])
        assert_reduced(got, states_of(SHAPE, 300 + 10 * turn))


def test_a_rank_seconds_late_is_waited_for() -> None:
    """A rank that comes three seconds late costs three seconds and nothing else."""
    assert_reduced(joined([result["late"][0] for result in results()]), states_of(SHAPE))
    assert all(3 <= result["late"][1] < 10 for result in results())


def test_two_reducers_and_gathers_alive() -> None:
    """Exchanges that live at once, called in turn in one graph, do not touch each other."""
    found = [result["alive"] for result in results()]
    for i, num_tokens in enumerate((SHAPE[0], 9)):
        shape = (num_tokens, NUM_Q_HEADS, HEAD_DIM, DTYPE)
        assert_reduced(joined([part["reduced"][i] for part in found]), states_of(shape, 10 * i))
        expected = torch.cat([part["qs"][i] for part in found], 1)
        assert all(torch.equal(part["gathered"][i], expected) for part in found)


def test_offsets_past_two_to_the_31() -> None:
    """Slots behind a mailbox's 2^31st word are exchanged right."""
    shape = (2, NUM_Q_HEADS, 512, DTYPE)
    for turn in range(3):
        assert_reduced(joined([result["far"][turn] for result in results()]), states_of(shape))


def test_group_of_one() -> None:
    """A rank alone gets its state back, empty rows cleaned."""
    for result in results():
        state, got = result["alone"]
        empty = state.lse == -math.inf
        assert (got.out[empty] == 0).all() and empty.any()
        assert torch.equal(got.out[~empty], state.out[~empty])
        assert torch.equal(got.lse, state.lse)


def test_memory_is_what_is_said() -> None:
    """memory_bytes is what the device's free memory went down by, up to a few pages."""
    for result in results():
        for said, taken in result["memory"].values():
            assert said <= taken + 2**20
            assert taken <= said + 64 * 2**20


def test_ranks_that_disagree_are_refused() -> None:
    """Arguments that differ between ranks are an error on all of them, before anything waits."""
    for result in results():
        assert result["disagree"] == (
            "ValueError: max_tokens: expected the same on all ranks, got [4, 5]"
        )


@pytest.mark.parametrize("shape", Q_SHAPES, ids=shape_id)
@pytest.mark.parametrize("name, count", [("nccl", 2), ("direct", 1)])
def test_gather_is_cat(name: str, count: int, shape: tuple[int, int, int, torch.dtype]) -> None:
    """Every rank gets all heads bit for bit, eager, strided and replayed, in 1 or 2 launches."""
    found = [result["gather", name, shape] for result in results()]
    expected = torch.cat([part["q"] for part in found], 1)
    for part in found:
        assert torch.equal(part["eager"], expected)
        assert torch.equal(part["strided"], expected)
        assert torch.equal(part["replayed"], 2 * expected)
        assert part["empty"] == [0, *expected.shape[1:]]
        assert len(part["launches"]) == count, part["launches"]


def test_a_silent_rank_ends_the_wait() -> None:
    """After timeout_s the call ends in NaN and its rank names the silent one; nobody hangs."""
    first, last = failed()
    launched, waited = first["waited"]
    assert launched < 1 and 1.5 <= waited < 5
    assert first["result"].out.isnan().all() and first["result"].lse.isnan().all()
    said = "RuntimeError: direct: rank 1 of 2 sent nothing, or not all, for 1.5 s in call "
    assert first["check"].startswith(said) and "(this is rank 0)" in first["check"]
    assert first["next"] == first["check"]
    # The silent rank hears of it with its next call, which does not wait either.
    assert last["check"] == "no error"
    assert last["result"].out.isnan().all()
    assert last["next"].startswith(said) and "(this is rank 1)" in last["next"]


def test_replays_after_a_failure_do_not_wait() -> None:
    """94 replays of a failed reducer end at once, in NaN."""
    first, _ = failed()
    assert first["replays"] < 1
    assert first["replayed"].out.isnan().all()


def test_a_failure_stays_in_its_reducer() -> None:
    """Exchanges before the failure were right, and another reducer goes on being right."""
    for key in ("before", "other"):
        assert_reduced(joined([result[key] for result in failed()]), states_of(SHAPE))
    assert all(result["other check"] == "no error" for result in failed())


def test_a_call_of_fewer_tokens_is_a_silent_rank() -> None:
    """A rank with T = 0, or with fewer tokens than its peers, is named by them."""
    ends, _ = run_ranks("direct_gpu_ranks:fewer", SIZE, backend="nccl", timeout_s=200)
    for end in ends:
        assert end.startswith("RuntimeError: direct: rank 1 of 2 sent nothing, or not all, for 1")


def test_a_dead_rank_ends_the_wait() -> None:
    """A rank whose process is gone is silent: no hang, no trap, and the device stays usable."""
    found, died = run_ranks("direct_gpu_ranks:dies", SIZE, backend="nccl", timeout_s=200)
    assert died == "died"
    for name in ("reduce", "gather"):
        waited, end = found[name]
        assert 2 <= waited < 6
        assert end.startswith("RuntimeError: direct: rank 1 of 2 sent nothing")
    assert found["device"] == 1000


def test_all_gpus_of_the_machine() -> None:
    """Any number of ranks gives what a2a gives."""
    size = torch.cuda.device_count()
    found = run_ranks("direct_gpu_ranks:reduces_like_a2a", size, backend="nccl", timeout_s=300)
    for pairs in found:
        for direct, a2a in pairs:
            torch.testing.assert_close(direct.lse, a2a.lse, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(direct.out, a2a.out, rtol=2**-7, atol=2**-9)
