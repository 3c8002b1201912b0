"""Every test starts from one seed, and no op may read memory that it has not written.

Also what several files' tests ask for.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

# What an integer holds that nobody wrote: far from any length, page or token.
_POISON_INT = 0x7B7B7B7B
_POISON_NARROW = {1: 0x7B, 2: 0x7B7B}


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker of this file's fixtures; pyproject.toml has the others."""
    config.addinivalue_line(
        "markers", "unpoisoned: leave uninitialised memory as it is, e.g. to count launches"
    )


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Seed every source of random numbers."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with NaN, or with a number far from any that makes sense."""
    if tensor.dtype.is_floating_point:
        return tensor.fill_(torch.nan)
    if tensor.dtype == torch.bool:
        return tensor
    return tensor.fill_(_POISON_NARROW.get(tensor.dtype.itemsize, _POISON_INT))


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return allocate with its result poisoned when the lab itself calls it."""

    def allocate_poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return _poison(tensor) if caller.split(".")[0] == "dcp_lab" else tensor

    return allocate_poisoned


class _OnGpu(torch.Tensor):
    """A tensor that says it lives on a GPU."""

    is_cuda = True


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember calls on a CPU too, by the keys that they have on a GPU; not for bf16.

    What is remembered is launched again by the interpreter.
    """
    from dcp_lab.kernels import INTERPRETED, launch

    if not INTERPRETED:
        return
    real = launch.call_key

    def call_key(*arguments: object) -> object:
        seen = [x.as_subclass(_OnGpu) if isinstance(x, torch.Tensor) else x for x in arguments]
        with monkeypatch.context() as patch:
            patch.setattr(launch, "INTERPRETED", False)
            return real(*seen)

    for name, module in list(sys.modules.items()):
        if name.startswith("dcp_lab.") and getattr(module, "call_key", None) is real:
            monkeypatch.setattr(module, "call_key", call_key)


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_poison(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Make torch.empty and its kin return NaN inside dcp_lab: a read before a write shows."""
    if request.node.get_closest_marker("unpoisoned") is None:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
            (torch.Tensor, "new_empty_strided"),
        ):
            monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))
    yield
