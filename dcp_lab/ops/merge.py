"""merge_states: combine partial attention results by their LSE."""

from __future__ import annotations

import torch

from dcp_lab.kernels import INTERPRETED
from dcp_lab.kernels.merge import launch_merge, merge_again
from dcp_lab.ops.checks import FLOAT_DTYPES, check_tensor, fail, unsupported
from dcp_lab.ops.device import is_here
from dcp_lab.state import AttnState

# The merge kernels keep one row of D fp32 values in registers. 512 is MLA's latent width.
MAX_MERGE_HEAD_DIM = 512


def merge_states(
    outs: torch.Tensor,
    lses: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> AttnState:
    """Merge N partial attention states over disjoint keys into the state over all of them.

    lse[t, h] = ln sum_n exp(lses[n, t, h])
    out[t, h] = sum_n exp(lses[n, t, h] - lse[t, h]) outs[n, t, h]

    Args:
        outs: [N, T, H, D] fp32, fp16 or bf16, N >= 1, 1 <= D <= 512; last dim contiguous, any
            other strides.
        lses: fp32 [N, T, H], natural logarithm, any strides. -inf, NaN or +inf says that the state
            saw no key; whatever outs holds beside it, NaN too, counts as nothing.
        out: [T, H, D] in outs' dtype, last dim contiguous, written in place. Default: allocated.
        lse: fp32 [T, H], written in place. Default: allocated.

    Returns:
        AttnState(out, lse). A row that no state saw a key of gives out = 0 and lse = -inf; T = 0
        gives an empty state.

    Raises:
        ValueError: Shape, dtype, device or stride breaks the contract, or N = 0; the message names
            the argument, what was expected and what was given.
        NotImplementedError: D > 512.

    Notes:
        Accumulates in fp32 and rounds once. States are taken in order n = 0, 1, ..., so the same
        inputs give the same bits.
        Host: a call with the arguments of an earlier one (the same memory and shapes, out and lse
            given) is not checked and planned again.
        Graph capture: safe with out and lse given; one launch, no device sync. out and lse must
        not overlap outs and lses. Offsets are 64-bit. CPU: runs through Triton's interpreter;
        bf16 is computed in fp32 and rounded once.

    Source:
        Online softmax merge (arXiv 1805.02867), as in flash-decoding. Written here.
    """
    if out is not None and lse is not None and merge_again(outs, lses, out, lse):
        return AttnState(out, lse)
    check_tensor(
        "outs", outs, dtypes=FLOAT_DTYPES, shape=("N", "T", "H", "D"), last_contiguous=True
    )
    num_states, num_tokens, num_heads, head_dim = outs.shape
    check_tensor(
        "lses",
        lses,
        dtypes=(torch.float32,),
        shape=(("N", num_states), ("T", num_tokens), ("H", num_heads)),
        device=outs.device,
    )
    if num_states == 0:
        fail("outs", "at least one state to merge (N >= 1)", outs)
    check_merge_head_dim("outs", head_dim)
    check_merge_device("outs", outs.device)
    if out is None:
        out = torch.empty(num_tokens, num_heads, head_dim, dtype=outs.dtype, device=outs.device)
    else:
        check_tensor(
            "out",
            out,
            dtypes=(outs.dtype,),
            shape=(("T", num_tokens), ("H", num_heads), ("D", head_dim)),
            device=outs.device,
            last_contiguous=True,
            distinct=True,
        )
    if lse is None:
        lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=outs.device)
    else:
        check_tensor(
            "lse",
            lse,
            dtypes=(torch.float32,),
            shape=(("T", num_tokens), ("H", num_heads)),
            device=outs.device,
            distinct=True,
        )
    if lse.numel():
        launch_merge(outs=outs, lses=lses, out=out, lse=lse)
    return AttnState(out, lse)


def check_merge_head_dim(argument: str, head_dim: int) -> None:
    """Raise unless the merge kernels take this head_dim."""
    if head_dim < 1:
        fail(argument, "head_dim >= 1", head_dim)
    if head_dim > MAX_MERGE_HEAD_DIM:
        unsupported(
            f"{argument}: head_dim", head_dim, f"merge at most {MAX_MERGE_HEAD_DIM} columns"
        )


def check_merge_device(argument: str, device: torch.device) -> None:
    """Raise unless this process's kernels can run on the device."""
    if device.type == "cpu" and not INTERPRETED and is_here():
        fail(
            argument,
            "a GPU: this process compiles its kernels (for CPU tensors set TRITON_INTERPRET=1 "
            "before dcp_lab is imported)",
            str(device),
        )
