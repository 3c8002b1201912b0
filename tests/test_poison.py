"""The suite's own trap works: memory that the lab allocates and does not write is poison."""

from __future__ import annotations

import functools

import conftest
import pytest
import torch

ALLOCATIONS = [
    pytest.param("torch.empty(3)", id="empty"),
    pytest.param("torch.empty_like(x)", id="empty_like"),
    pytest.param("torch.empty_strided((3,), (1,))", id="empty_strided"),
    pytest.param("x.new_empty(3)", id="new_empty"),
    pytest.param("functools.partial(torch.empty, dtype=torch.float16)(3)", id="partial"),
]


def run_inside(module: str, code: str) -> torch.Tensor:
    """Evaluate code as if it stood in that module."""
    scope = {"__name__": module, "torch": torch, "x": torch.zeros(3), "functools": functools}
    return eval(code, scope)


@pytest.mark.parametrize("code", ALLOCATIONS)
def test_what_the_lab_allocates_is_nan(code: str) -> None:
    """Inside dcp_lab an allocation is NaN until it is written."""
    assert run_inside("dcp_lab.ops.decode", code).isnan().all()


def test_what_others_allocate_is_left_alone() -> None:
    """Only callers inside dcp_lab meet poison: triton, torch and tests do not."""
    scope = {"allocate": conftest._poisoned(lambda: torch.zeros(3))}
    for name, poisoned in (("dcp_lab", True), ("dcp_labour", False), ("triton.runtime", False)):
        tensor = eval("allocate()", {**scope, "__name__": name})
        assert tensor.isnan().all() == poisoned


def test_integers_are_far_from_any_token() -> None:
    """An integer that nobody wrote is no length and no page; bytes are NaN-like noise."""
    assert run_inside("dcp_lab.ops", "torch.empty(2, dtype=torch.int32)").min() > 2**30
    assert run_inside("dcp_lab.ops", "torch.empty(2, dtype=torch.int16)").min() > 2**14
    assert run_inside("dcp_lab.ops", "torch.empty(2, dtype=torch.uint8)").min() > 100
    assert run_inside("dcp_lab.ops", "torch.empty(2, dtype=torch.bool)").shape == (2,)


@pytest.mark.unpoisoned
def test_the_marker_turns_it_off() -> None:
    """unpoisoned leaves torch's own functions in place."""
    assert torch.empty.__name__ == "empty" and torch.empty_like.__name__ == "empty_like"
