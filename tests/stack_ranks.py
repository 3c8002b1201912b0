"""What each rank does for test_stack.py: every corner of a tiny stack, judged where it ran."""

from __future__ import annotations

import dataclasses

import torch

from dcp_lab.stack import (
    KIMI_K3_LIKE,
    QWEN3_235B,
    Corner,
    Stack,
    StackModel,
    count_on_rank,
)
from dcp_lab.testing import assert_within_budget

TINY = dataclasses.replace(
    QWEN3_235B,
    num_layers=2,
    hidden=64,
    num_q_heads=2,
    head_dim=16,
    head_dim_v=16,
    intermediate=16,
    experts=8,
    experts_per_token=2,
    expert_intermediate=16,
)
TINY_LATENT = dataclasses.replace(
    KIMI_K3_LIKE,
    num_layers=3,
    hidden=64,
    num_q_heads=2,
    head_dim=48,
    head_dim_v=32,
    latent_head_dim=16,
    intermediate=16,
    kv_every=2,
)


def tiny(model: StackModel = TINY, **options: object) -> Stack:
    """Return a loaded tiny stack in fp32 on the CPU."""
    options = {"dtype": torch.float32, "device": "cpu", "page_size": 4, **options}
    stack = Stack(model, 3, **options)
    stack.load(11)
    return stack


def judge(stack: Stack, name: str) -> None:
    """Assert that what the last step left behind is right."""
    assert_within_budget(
        name, stack.attn, stack.last_attention(), stack.last_attention(stack.dtype)
    )
    (x, _), (plain, _) = stack.reference(), stack.reference(stack.dtype)
    assert_within_budget(f"{name}: hidden", stack.x, x, plain)


def run_corners(
    rank: int, size: int, model: StackModel, corners: tuple[Corner, ...], options: dict
) -> list[torch.Tensor]:
    """Run each corner's step and judge it; return the residual streams."""
    stack = tiny(model, **options)
    found = []
    for corner in corners:
        step = stack.step(corner)
        stack.x.fill_(torch.nan)
        stack.attn.out.fill_(torch.nan)
        step()
        judge(stack, str(corner))
        found.append(stack.x.clone())
    return found


def count_without_peer(rank: int, size: int, corners: tuple[Corner, ...]) -> list[dict[str, int]]:
    """Return the calls of each corner in a group of one, its steps judged first."""
    run_corners(rank, size, TINY, corners, {"without_peer": True})
    return count_on_rank(rank, size, corners, 2, without_peer=True)
