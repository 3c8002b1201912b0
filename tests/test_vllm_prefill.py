"""Prefills through FlashAttention: a stand-in of vLLM's function, held to its real signature."""

from __future__ import annotations

import ast
import inspect
import math
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from test_vllm_plugin import HEAD_DIM, NUM_Q_HEADS, check_step

from dcp_lab.testing import PagedCase
from dcp_lab.vllm_plugin.versions import (
    aligned,
    flash_attention,
    prefill_context,
    why_no_flash,
)

ROOT = Path(__file__).resolve().parents[1]


def flash_attn_varlen_func(
    q,
    k,
    v,
    max_seqlen_q,
    cu_seqlens_q,
    max_seqlen_k,
    cu_seqlens_k=None,
    seqused_k=None,
    q_v=None,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=None,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    return_softmax_lse=False,
    out=None,
    scheduler_metadata=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    num_splits=0,
    output_scale=None,
    fa_version=2,
    s_aux=None,
    cp_world_size=1,
    cp_rank=0,
    cp_tot_seqused_k=None,
    mask_mod=None,
    aux_tensors=None,
    dynamic_causal=None,
):
    """Do what vLLM's docstring says of these arguments, request by request, in float64."""
    assert fa_version == 3 and out is not None
    assert (cu_seqlens_k is None) != (seqused_k is None)
    assert (block_table is None) == (seqused_k is None)
    starts = cu_seqlens_q.tolist()
    lse = torch.empty(q.shape[1], q.shape[0])
    left, right = window_size
    for request in range(len(starts) - 1):
        rows = slice(starts[request], starts[request + 1])
        queries = rows.stop - rows.start
        assert queries <= max_seqlen_q
        if block_table is None:
            bounds = cu_seqlens_k.tolist()
            key, value = (x[bounds[request] : bounds[request + 1]] for x in (k, v))
        else:
            used, page = int(seqused_k[request]), k.shape[1]
            pages = block_table[request, : -(-used // page)].long()
            key, value = (x[pages].flatten(0, 1)[:used] for x in (k, v))
        assert len(key) <= max_seqlen_k
        groups = q.shape[1] // key.shape[1]
        key, value = (x.double().repeat_interleave(groups, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), key) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        # Aligned to the bottom right corner.
        ago = torch.arange(queries)[:, None] + len(key) - queries - torch.arange(len(key))
        seen = torch.ones_like(ago, dtype=torch.bool)
        if causal:
            seen &= ago >= 0
        if left >= 0:
            seen &= ago <= left
        if right >= 0:
            seen &= -ago <= right
        scores = scores.masked_fill(~seen, -math.inf)
        total = scores.logsumexp(-1)
        weights = torch.exp(scores - total[..., None]).nan_to_num(0.0)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, value).to(out.dtype)
        # FlashAttention 2 and some of 3 say +inf where there is no key.
        lse[:, rows] = total.masked_fill(total == -math.inf, math.inf).float()
    return (out, lse) if return_softmax_lse else out


# What vLLM 0.25.1 has, read in vllm/vllm_flash_attn/flash_attn_interface.py.
SIGNATURE = (
    "q k v max_seqlen_q cu_seqlens_q max_seqlen_k cu_seqlens_k seqused_k q_v dropout_p "
    "softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs "
    "block_table return_softmax_lse out scheduler_metadata q_descale k_descale v_descale "
    "num_splits output_scale fa_version s_aux cp_world_size cp_rank cp_tot_seqused_k mask_mod "
    "aux_tensors dynamic_causal"
)


def test_the_stand_in_has_the_real_signature():
    """Name for name, and against the release's own file where that is unpacked."""
    assert " ".join(inspect.signature(flash_attn_varlen_func).parameters) == SIGNATURE
    for path in (ROOT / "build").glob("**/0.25.1/vllm/vllm_flash_attn/flash_attn_interface.py"):
        (function,) = [
            node
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef) and node.name == "flash_attn_varlen_func"
        ]
        assert " ".join(argument.arg for argument in function.args.args) == SIGNATURE


class Counted:
    """The stand-in as the plugin calls it, counting."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.attend = flash_attention(self.count)

    def count(self, **options: Any) -> Any:
        self.calls.append(options)
        return flash_attn_varlen_func(**options)

    def __call__(self, *args: Any, **options: Any) -> None:
        self.attend(*args, **options)


def step(lens: list[int], queries: list[int]) -> PagedCase:
    return PagedCase.build(
        lens, num_q_heads=NUM_Q_HEADS, num_kv_heads=1, head_dim=HEAD_DIM, query_lens=queries
    )


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize(
    ("lens", "queries", "decodes"),
    [
        # New prompts, chunks of longer ones, a chunk of one token, contexts on one rank alone.
        ([20, 7, 33], [20, 7, 33], 0),
        ([50, 20, 34, 3, 40], [10, 20, 1, 2, 39], 0),
        ([33, 1, 50, 9], [1, 1, 30, 9], 2),
    ],
    ids=["new", "chunks", "mixed"],
)
def test_prefills_over_two_ranks_are_exact(
    lens: list[int], queries: list[int], decodes: int, softcap: float | None, interleave: int
):
    """Context without a mask, own tokens with it, merged: the oracle over whole requests."""
    whole = step(lens, queries)
    check_step(whole, interleave, num_decodes=decodes, flash=Counted(), softcap=softcap)


@pytest.mark.parametrize("window", [None, 5])
def test_prefills_of_one_rank_read_the_pages_once(window: int | None):
    """Without DCP one call a layer attends context and own tokens, on the pages, with no LSE."""
    flash = Counted()
    whole = step([50, 20, 33], [10, 20, 1])
    check_step(whole, 1, 1, num_decodes=0, flash=flash, window=window)
    assert len(flash.calls) == 2 and not any(c["return_softmax_lse"] for c in flash.calls)
    assert all(call["causal"] and call["block_table"] is not None for call in flash.calls)


def test_prefills_without_context_need_no_exchange():
    """New prompts are whole on every rank: one call, no queries gathered, nothing reduced."""
    flash = Counted()
    assert check_step(step([20, 7], [20, 7]), 1, num_decodes=0, flash=flash) == []
    assert all(call["cu_seqlens_k"] is not None for call in flash.calls)
    flash = Counted()
    assert len(check_step(step([20, 9], [20, 7]), 1, num_decodes=0, flash=flash)) == 1
    # Two ranks, each once alone and once with the other's states: context, then own tokens.
    assert [call["causal"] for call in flash.calls] == [False, True] * 4
    assert all(call["max_seqlen_k"] == 10 for call in flash.calls[::2])


def test_a_mixed_step_exchanges_decodes_and_context():
    """Decodes go through the paged kernel as ever; the prefill's context is one more exchange."""
    flash = Counted()
    states = check_step(step([33, 50], [1, 30]), 16, num_decodes=1, flash=flash)
    assert [len(state.out) for state in states] == [1, 30]


def test_the_host_knows_whether_prefills_have_context():
    """From vLLM's bound, of the prefills alone; without one there may be some."""
    common = types.SimpleNamespace(
        num_reqs=3,
        query_start_loc_cpu=torch.tensor([0, 1, 9, 12, 12]),
        seq_lens_cpu_upper_bound=torch.tensor([50, 8, 3, 0]),
    )
    assert prefill_context(common, 0)
    assert not prefill_context(common, 1)
    common.seq_lens_cpu_upper_bound = torch.tensor([50, 8, 4, 0])
    assert prefill_context(common, 1)
    common.seq_lens_cpu_upper_bound = None
    assert prefill_context(common, 1)


GOOD = {
    "head_dim": 128,
    "q_dtype": torch.bfloat16,
    "kv_dtype": torch.bfloat16,
    "sliding_window": None,
    "sinks": False,
    "shares_cache": False,
    "dcp_size": 2,
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"sliding_window": 128, "dcp_size": 1}, None),
        ({"shares_cache": True, "dcp_size": 1}, None),
        ({"q_dtype": torch.float32, "kv_dtype": torch.float32}, "not torch.float32"),
        ({"kv_dtype": torch.float8_e4m3fn}, "the cache is torch.float8_e4m3fn"),
        ({"head_dim": 272}, "up to 256, not 272"),
        ({"sinks": True}, "sinks"),
        ({"sliding_window": 128}, "sliding window"),
        ({"shares_cache": True}, "no keys of its own"),
    ],
)
def test_what_flash_attention_does_not_take_is_named(change: dict[str, Any], said: str | None):
    """Such a layer's prefills are attended by the paged kernel, or refused if flash was asked."""
    reason = why_no_flash(**{**GOOD, **change})
    assert (reason is None) == (said is None) and (said or "") in (reason or "")


def test_strides_of_single_heads_are_those_of_a_dense_tensor():
    """One KV head out of a fused projection has a stride that TMA would refuse; same elements."""
    tensor = torch.arange(64.0).view(4, 16)[:, None, :8].transpose(1, 2).as_strided
    odd = tensor((4, 1, 8), (16, 1, 1))
    fixed = aligned(odd)
    assert fixed.stride() == (16, 8, 1) and torch.equal(fixed, odd)
    pages = torch.zeros(3, 2, 16, 1, 8).unbind(1)[0]
    assert aligned(pages) is pages
