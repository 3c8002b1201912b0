"""Targets for test_local_group.py, in a module because other processes import them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist


def facts(rank: int, size: int, payload: Any) -> dict[str, Any]:
    """Return what a rank knows about itself, after one collective."""
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    return {
        "rank": rank,
        "size": size,
        "group": (dist.get_rank(), dist.get_world_size(), dist.get_backend()),
        "total": int(total),
        "payload": payload,
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
    }


def one_raises(rank: int, size: int) -> None:
    """The last rank raises; the others wait for it."""
    if rank == size - 1:
        raise KeyError("the reason")
    dist.barrier()


def one_is_killed(rank: int, size: int) -> None:
    """The last rank dies without a word; the others wait for it."""
    print(f"rank {rank} says goodbye")
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleeps(rank: int, size: int) -> None:
    """Never comes back."""
    time.sleep(600)


def returns_a_function(rank: int, size: int) -> Any:
    """A result that cannot be pickled."""
    return lambda: rank
