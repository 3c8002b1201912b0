"""What each rank does for test_reducers.py: run_ranks starts these in processes of their own."""

from __future__ import annotations

import dataclasses
import datetime
import time
from typing import Any

import torch
import torch.distributed as dist

from dcp_lab import AttnState, make_reducer
from dcp_lab.reducers import Reducer

NAMES = ("ag_rs", "a2a")


@dataclasses.dataclass(frozen=True)
class Case:
    """One state a rank, reduced with every reducer, so many times."""

    name: str
    states: list[AttnState]
    max_tokens: int
    strided: bool = False
    times: int = 1


def reducer_for(
    name: str, state: AttnState, max_tokens: int, group: dist.ProcessGroup | None = None
) -> Reducer:
    """Return a reducer for states like this one, its buffers full of poison."""
    _, num_q_heads, head_dim = state.out.shape
    reducer = make_reducer(
        name,
        group=group,
        max_tokens=max_tokens,
        num_q_heads=num_q_heads,
        head_dim=head_dim,
        dtype=state.out.dtype,
        device="cpu",
    )
    for buffer in reducer._buffers:
        # All ones is NaN in every float.
        buffer.view(torch.uint8).fill_(255)
    return reducer


def copied(state: AttnState) -> AttnState:
    return AttnState(state.out.clone(), state.lse.clone())


def strided(state: AttnState) -> AttnState:
    """Return the same numbers with heads outermost, gaps between rows, a transposed lse."""
    num_tokens, num_heads, head_dim = state.out.shape
    home = torch.full((num_heads, num_tokens, head_dim + 8), torch.nan).to(state.out.dtype)
    out = home[..., 4 : 4 + head_dim].transpose(0, 1)
    lse = torch.full((num_heads, num_tokens), torch.nan).T
    out.copy_(state.out)
    lse.copy_(state.lse)
    return AttnState(out, lse)


def run(rank: int, size: int, cases: list[Case], many: list[list[AttnState]]) -> dict[str, Any]:
    """Return what this rank got of each case and of each scenario below.

    Args:
        rank: This rank.
        size: Ranks in the group.
        cases: Reduced with each reducer, each case with reducers of its own.
        many: States of different T, per rank, for one reducer to take in turn.
    """
    results: dict[str, Any] = {}
    for case in cases:
        state = case.states[rank]
        state = strided(state) if case.strided else state
        before = copied(state)
        for name in NAMES:
            reducer = reducer_for(name, state, case.max_tokens)
            results[case.name, name] = [copied(reducer(state)) for _ in range(case.times)]
        results[case.name, "inputs"] = [before, copied(state)]
    for name in NAMES:
        results["sequence", name] = sequence(name, [states[rank] for states in many])
        results["refused", name] = refused(name, many[0][rank])
    results["alive"] = alive(many[0][rank], many[1][rank])
    results["groups"] = groups(rank, size, many[0][rank])
    return results


def sequence(name: str, states: list[AttnState]) -> list[AttnState]:
    """One reducer takes calls of different T, forwards, then a new one backwards."""
    max_tokens = max(len(state.out) for state in states)
    results = []
    for order in (states, states[::-1]):
        reducer = reducer_for(name, states[0], max_tokens)
        results += [copied(reducer(state)) for state in order]
    return results


def refused(name: str, state: AttnState) -> tuple[AttnState, list[str], AttnState]:
    """Bad calls between two good ones of one reducer, as between two replays of a graph."""
    reducer = reducer_for(name, state, len(state.out))
    out, lse = state
    before = copied(reducer(state))
    longer = AttnState(torch.cat([out, out[:1]]), torch.cat([lse, lse[:1]]))
    messages = []
    for bad in (
        longer,
        AttnState(out.double(), lse),
        AttnState(out[:, 1:], lse),
        AttnState(out[..., 1:], lse),
        AttnState(out.mT.contiguous().mT, lse),
        AttnState(out.to("meta"), lse),
        AttnState(out, lse[1:]),
        AttnState(out, lse.half()),
        AttnState(out, lse.to("meta")),
        out,
    ):
        try:
            reducer(bad)
            messages.append("not refused")
        except ValueError as error:
            messages.append(str(error))
    return before, messages, copied(reducer(state))


def alive(first: AttnState, second: AttnState) -> list[tuple[AttnState, AttnState]]:
    """Reducers that live at once: what each returned, then and after the others' calls."""
    reducers = [(reducer_for(n, s, len(s.out)), s) for n in NAMES for s in (first, second)]
    results = [reducer(state) for reducer, state in reducers]
    then = [copied(result) for result in results]
    for turn in (1, 3, 0, 2):
        reducer, state = reducers[turn]
        results[turn] = reducer(state)
    return list(zip(then, map(copied, results), strict=True))


def groups(rank: int, size: int, state: AttnState) -> dict[str, Any]:
    """Groups that are not the whole world: the outer two ranks, and each rank alone."""
    outer = dist.new_group([0, size - 1])
    alone = [dist.new_group([r]) for r in range(size)][rank]
    results: dict[str, Any] = {}
    for name in NAMES:
        results["alone", name] = copied(reducer_for(name, state, len(state.out), alone)(state))
        try:
            results["outer", name] = copied(reducer_for(name, state, len(state.out), outer)(state))
        except ValueError as error:
            results["outer", name] = str(error)
    return results


def with_a_bad_rank(rank: int, size: int) -> list[tuple[str, float, str]]:
    """The last rank stays silent in two calls, then ends; return how each call ended elsewhere."""
    state = AttnState(torch.zeros(2, 6, 16), torch.zeros(2, 6))
    patience = datetime.timedelta(seconds=2)
    silent = [dist.new_group(timeout=patience) for _ in NAMES]
    dead = [dist.new_group(timeout=datetime.timedelta(seconds=60)) for _ in NAMES]
    reducers = [reducer_for(n, state, 2, g) for n, g in zip(NAMES * 2, silent + dead, strict=True)]
    dist.barrier()
    if rank == size - 1:
        time.sleep(6)
        return []
    ends = []
    for reducer in reducers:
        start = time.monotonic()
        try:
            reducer(state)
            end = "no error"
        except RuntimeError as error:
            end = str(error)
        ends.append((reducer.name, time.monotonic() - start, end))
    return ends
