"""run_ranks: ranks in processes of their own, whose end is always known."""

from __future__ import annotations

import os
import time

import pytest
import torch
from rank_targets import facts

from dcp_lab import AttnState, Shard
from dcp_lab.reducers.local_group import RankError, run_ranks
from dcp_lab.reference import eager_decode, reference_decode
from dcp_lab.testing import PagedCase, assert_within_budget


def test_results_in_rank_order() -> None:
    """Every rank runs the target in its own process and group, and results come in rank order."""
    payload = torch.tensor([0.1, float("nan")], dtype=torch.bfloat16)
    results = run_ranks(facts, 2, args=(payload,))
    assert [result["rank"] for result in results] == [0, 1]
    assert [result["group"] for result in results] == [(0, 2, "gloo"), (1, 2, "gloo")]
    assert {result["size"] for result in results} == {2}
    assert {result["total"] for result in results} == {3}
    assert {result["threads"] for result in results} == {1}
    assert len({result["pid"] for result in results} | {os.getpid()}) == 3
    for result in results:
        assert torch.equal(result["payload"].view(torch.int16), payload.view(torch.int16))


def test_traceback_of_the_rank_that_failed() -> None:
    """A rank's exception comes back with its traceback, not that of a rank it left waiting."""
    with pytest.raises(
        RankError, match="rank 1 of 2 failed(?s:.)*in one_raises(?s:.)*the reason"
    ) as e:
        run_ranks("rank_targets:one_raises", 2)
    assert e.value.rank == 1


def test_rank_that_is_killed() -> None:
    """A rank that dies without a word is named with its signal and the end of what it printed."""
    with pytest.raises(
        RankError, match="rank 1 of 2 failed\nended by signal 9\nrank 1 says goodbye"
    ):
        run_ranks("rank_targets:one_is_killed", 2)


def test_timeout() -> None:
    """Time up stops every rank; the error shows where each of them was."""
    start = time.monotonic()
    with pytest.raises(
        TimeoutError, match=r"ranks \[0\] of 1 not done after 15 s(?s:.)*in sleeps"
    ):
        run_ranks("rank_targets:sleeps", 1, timeout_s=15)
    assert time.monotonic() - start < 40


def test_result_that_cannot_travel() -> None:
    """A result that cannot be pickled is the rank's error."""
    with pytest.raises(RankError, match="(?i)pickle"):
        run_ranks("rank_targets:returns_a_function", 1)


def test_no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt in the waiting process ends the ranks before it leaves."""
    from dcp_lab.reducers import local_group

    processes = []

    def interrupted(started: list, *_: object) -> None:
        processes.extend(started)
        raise KeyboardInterrupt

    monkeypatch.setattr(local_group, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_ranks("rank_targets:sleeps", 1)
    assert [process.returncode for process in processes] == [-9]


def defined_here() -> None:
    """Looks as if it came from a notebook, in the test below."""


@pytest.mark.parametrize(
    "target",
    ["function", "module:", ":function", "__main__:function", "m:a.b", defined_here, lambda: 0],
)
def test_target_that_cannot_be_imported(target: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that another process cannot import is refused before any process starts."""
    monkeypatch.setattr(defined_here, "__module__", "__main__")
    with pytest.raises(
        ValueError, match="target: expected a function at the top level of an importable"
    ):
        run_ranks(target, 2)


@pytest.mark.parametrize("size", [0, -1, 1.0, True, None])
def test_bad_size(size: object) -> None:
    """The number of ranks is an int from 1 on."""
    with pytest.raises(ValueError, match="size: expected an int >= 1, got"):
        run_ranks(facts, size)


def test_demo_decodes_and_reduces() -> None:
    """The notebook's ranks attend their shards with the kernel and reduce to the whole context."""
    case = PagedCase.build([0, 1, 30], num_q_heads=4, num_kv_heads=2, head_dim=32)
    parts = [case.on_rank(Shard(rank, 2)) for rank in range(2)]
    calls = [[(part.tensors, part.options()) for part in parts]]
    found = [
        one for (one,) in run_ranks("dcp_lab.reducers.demo:decode_and_reduce", 2, args=(calls,))
    ]
    for part, result in zip(parts, found, strict=True):
        local = [
            run(*part.tensors, **part.reference_options())
            for run in (reference_decode, eager_decode)
        ]
        assert_within_budget("partial", result.partial, *local)
        assert all(held > 0 for held in result.memory_bytes.values())
    whole = [
        run(*case.tensors, **case.reference_options()) for run in (reference_decode, eager_decode)
    ]
    for name in ("ag_rs", "a2a"):
        pieces = [result.reduced[name] for result in found]
        joined = AttnState(*(torch.cat(part, dim=1) for part in zip(*pieces, strict=True)))
        assert_within_budget(name, joined, *whole)
