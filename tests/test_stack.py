"""The stack: every corner computes the same step, and what cannot be a corner is refused."""

from __future__ import annotations

import contextlib
import time
import types

import pytest
import torch
from stack_ranks import TINY, TINY_LATENT, judge, run_corners, tiny

from dcp_lab.reducers.local_group import run_ranks
from dcp_lab.stack import (
    KIMI_K3_LIKE,
    QWEN3_235B,
    Corner,
    Step,
    count_on_rank,
    simulated_step,
)

BUDGET_S = 150


def corner(attention: str, reducer: str, mode: str) -> Corner:
    return Corner(mode, attention=attention, reducer=reducer)


@pytest.mark.parametrize("dense", ["light", "heavy"])
def test_a_rank_alone(dense: str) -> None:
    """Without DCP each mode gives the oracle's attention and residual stream."""
    corners = tuple(Corner.no_dcp(mode) for mode in ("eager", "piecewise", "full"))
    streams = run_corners(0, 1, TINY, corners, {"dense": dense})
    assert all(torch.equal(x, streams[0]) for x in streams)


def test_gathers_without_dcp() -> None:
    """A gather of the whole cache, the study's own with it, gives what the pages give."""
    corners = (
        Corner.no_dcp("eager"),
        Corner.no_dcp("piecewise", attention="published"),
        Corner.no_dcp("full", attention="published_no_sync"),
        Corner.no_dcp("full", attention="per_token"),
        Corner.no_dcp("piecewise", attention="per_page"),
    )
    first, *others = run_corners(0, 1, TINY, corners, {})
    for x in others:
        torch.testing.assert_close(x, first, atol=1e-5, rtol=1e-5)


def test_16_bits() -> None:
    """In bf16 attention and residual stream stay within their budgets."""
    run_corners(0, 1, TINY, (Corner.no_dcp("piecewise"),), {"dtype": torch.bfloat16})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")
def test_bound_gives_the_same_bits() -> None:
    """A bound attention is the same launch: on the CPU it is paged_decode itself."""
    corners = (Corner.no_dcp("piecewise"), Corner.no_dcp("piecewise", bound=True))
    options = {"dtype": torch.bfloat16, "device": "cuda", "page_size": 16}
    one, other = run_corners(0, 1, TINY, corners, options)
    assert torch.equal(one, other)


def test_two_ranks() -> None:
    """Attention paths, reducers and modes agree on two ranks, with and without DCP."""
    corners = (
        Corner.no_dcp("eager"),
        corner("published", "ag_rs", "piecewise"),
        corner("published_no_sync", "a2a", "full"),
        corner("per_token", "a2a", "piecewise"),
        corner("per_page", "ag_rs", "full"),
        corner("paged", "ag_rs", "eager"),
        corner("paged", "a2a", "full"),
    )
    ranks = run_ranks(run_corners, 2, args=(TINY, corners, {}), timeout_s=BUDGET_S)
    first = ranks[0][0]
    for streams in ranks:
        for x in streams:
            torch.testing.assert_close(x, first, atol=1e-5, rtol=1e-5)


def test_a_group_in_one_process() -> None:
    """Three simulated ranks are right too, and equal to one rank that holds all heads' sum."""
    stacks = [tiny(rank=rank, size=3, simulated=True) for rank in range(3)]
    for attention in ("paged", "per_page"):
        simulated_step(stacks, attention)
        assert all(torch.equal(stack.x, stacks[0].x) for stack in stacks)
        for stack in stacks:
            truth = stack.last_attention()
            torch.testing.assert_close(stack.attn.out.double(), truth.out, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(stack.attn.lse.double(), truth.lse, atol=1e-5, rtol=1e-5)


def test_latent_caches_and_layers_without_one() -> None:
    """A model with latents in two layers of three is right in full and piecewise."""
    assert TINY_LATENT.kv_layers == (1, 2)
    run_corners(0, 1, TINY_LATENT, (Corner.no_dcp("full"), Corner.no_dcp("piecewise")), {})


@pytest.mark.parametrize("fault", ["new token", "cached token", "other rank's head"])
def test_a_wrong_step_is_noticed(fault: str) -> None:
    """Judging finds a step whose attention missed or mixed up something."""
    stack = tiny()
    step = stack.step(Corner.no_dcp("eager"))
    if fault == "new token":
        stack.pages[False].seq_lens.sub_(1)
    elif fault == "cached token":
        stack.pages[False].v[-1].nan_to_num_()[:, 0].mul_(1.01)
    step()
    if fault == "other rank's head":
        stack.attn.out.copy_(stack.attn.out.roll(1, 1))
    with pytest.raises(AssertionError):
        judge(stack, fault)


def test_models_have_the_work_they_stand_for() -> None:
    """94 layers, and 16 tokens touch 82 of 128 experts: 389 MB a layer; 24 of 93 layers latent."""
    assert len(QWEN3_235B.kv_layers) == 94
    touched = QWEN3_235B.experts_touched(16)
    assert touched == 82
    one = 3 * QWEN3_235B.hidden * QWEN3_235B.expert_intermediate * 2
    assert touched * one == pytest.approx(389e6, rel=0.01)
    assert len(KIMI_K3_LIKE.kv_layers) == 24 and KIMI_K3_LIKE.num_layers == 93


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"mode": "graph"}, "mode"),
        ({"mode": "eager", "attention": "gather"}, "attention"),
        ({"mode": "eager", "reducer": "nccl"}, "reducer"),
        ({"mode": "eager", "dcp": False}, "reducer"),
        ({"mode": "eager", "dcp": False, "reducer": None, "query_gather": "nccl"}, "query_gather"),
        ({"mode": "full", "attention": "published"}, "mode"),
        ({"mode": "full", "attention": "per_page", "bound": True}, "bound"),
        ({"mode": "eager", "query_gather": "gloo"}, "query_gather"),
    ],
)
def test_no_such_corner(arguments: dict, named: str) -> None:
    """An impossible corner is refused with the argument's name."""
    with pytest.raises(ValueError, match=f"^{named}: expected"):
        Corner(**arguments)


def test_steps_that_cannot_be_made() -> None:
    """DCP in a group of one, gathers of latents, no tokens yet: each says so."""
    with pytest.raises(ValueError, match="corner: expected one without DCP"):
        tiny().step(Corner("eager"))
    stack = tiny()
    stack.context = None
    with pytest.raises(RuntimeError, match="load"):
        stack.step(Corner.no_dcp("eager"))
    latent = tiny(TINY_LATENT, rank=0, size=2, simulated=True)
    with pytest.raises(NotImplementedError, match="attention"):
        latent.step(corner("per_page", "a2a", "eager"))
    with pytest.raises(ValueError, match="size: expected 1 without a process group"):
        tiny(rank=0, size=2)


def test_the_host_can_be_slowed() -> None:
    """Added host time grows with the launches that wait: pieces and what lies between."""
    stack = tiny()
    step = stack.step(Corner.no_dcp("piecewise"))
    step.launch_delay_us, step.launches_per_layer = 5.0, 3.0
    assert step.added_launches == 3 + 2 * 3
    full = stack.step(Corner.no_dcp("full"))
    assert full.added_launches == 1


@pytest.mark.parametrize(("mode", "launches"), [("piecewise", 3 + 2 * 2), ("full", 3)])
def test_added_host_time_is_spent(mode: str, launches: int) -> None:
    """A delayed step takes launch_delay_us for each added launch: no less, and not twice."""

    def nothing(*_: object) -> None:
        pass

    step = Step(Corner.no_dcp(mode), nothing, nothing, [nothing] * 3, full=mode == "full")
    step.launches_per_layer = 2.0 if mode == "piecewise" else 0.0
    assert step.added_launches == launches

    def seconds(delay_us: float) -> float:
        step.launch_delay_us = delay_us
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    added = 0.02 * launches
    assert min(seconds(0.0) for _ in range(3)) < 0.1 * added
    assert added <= min(seconds(20_000.0) for _ in range(3)) < 1.6 * added


def test_a_capture_fails_by_its_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call raised while it was captured is not hidden by the capture's own end."""
    ended = []

    class Graph:
        def capture_begin(self, **_: object) -> None:
            pass

        def capture_end(self) -> None:
            ended.append(self)
            raise RuntimeError("operation failed due to a previous error during capture")

    stack = tiny()
    stack.device = types.SimpleNamespace(type="cuda")
    monkeypatch.setattr(stack, "_capture_stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)

    def call() -> None:
        raise ValueError("the call's own")

    with pytest.raises(ValueError, match="^the call's own$"):
        stack._captured([call])
    assert len(ended) == 1
    with pytest.raises(RuntimeError, match="during capture"):
        stack._captured([lambda: None])


def test_calls_are_counted() -> None:
    """The published path makes 11 calls a layer, one of them a wait, paged + a2a 8, no DCP 3."""
    corners = (
        Corner.no_dcp("piecewise"),
        corner("published", "ag_rs", "piecewise"),
        corner("paged", "a2a", "full"),
    )
    found = run_ranks(count_on_rank, 2, args=(corners, 94), timeout_s=BUDGET_S)[0]
    alone, published, full = found
    assert alone["between"] == 94 * 3 + 1 and alone["graphs"] == 95
    assert published["host_syncs"] == 94 and published["collectives"] == 94 * 3
    assert published["between"] == 94 * 11 + 1
    assert full["between"] == 94 * 8 + 1 and full["launches"] == 1
    assert alone["launches"] == alone["between"] + 95
