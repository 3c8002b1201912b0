"""Triton kernels: no checks and no policy in here, only what runs on the device.

Without a GPU the kernels run in Triton's interpreter. Triton reads TRITON_INTERPRET when a
function is decorated, its own library included, so it is decided here, before triton is imported.
With TRITON_INTERPRET=0 in the environment the compiler stays, which is how kernels are built for a
GPU that is not there.
"""

from __future__ import annotations

import os
import sys

import torch

if "TRITON_INTERPRET" not in os.environ and not torch.cuda.is_available():
    if "triton.language" in sys.modules:
        raise RuntimeError(
            "triton was imported before dcp_lab on a machine without a GPU; its interpreter can "
            "no longer be switched on: import dcp_lab.kernels first, or set TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def interpreter_safe(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor a kernel may compute with: under the interpreter bf16 becomes fp32.

    The interpreter's bf16 arithmetic is wrong (dots off by 1e10, casts truncate; seen with Triton
    3.6 to 3.9), so bf16 is computed in fp32 there and rounded once, by torch, when the result is
    stored.
    """
    if INTERPRETED and tensor.dtype == torch.bfloat16:
        return tensor.float()
    return tensor
