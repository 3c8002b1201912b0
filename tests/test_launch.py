"""Launches that are remembered: what is launched again, and what tells calls apart."""

from __future__ import annotations

import pytest
import torch

from dcp_lab import DecodeWorkspace, paged_decode
from dcp_lab.kernels import INTERPRETED, launch
from dcp_lab.kernels.launch import BoundCalls, call_key
from dcp_lab.testing import PagedCase


class Counted:
    """Stands for a Launch."""

    def __init__(self) -> None:
        self.runs = self.binds = 0

    def run(self) -> None:
        self.runs += 1

    def bind(self, *, keep: bool) -> object:
        assert not keep
        self.binds += 1
        return self.run


def test_a_known_call_only_launches() -> None:
    calls, one = BoundCalls(), Counted()
    assert not calls.again("key")
    calls.first("key", [one])
    assert calls.again("key") and calls.again("key")
    assert (one.binds, one.runs) == (1, 2)
    assert not calls.again("other")


def test_without_a_key_nothing_is_kept() -> None:
    calls, one = BoundCalls(), Counted()
    calls.first(None, [one])
    assert (one.binds, one.runs) == (0, 1) and not calls.again(None)
    # What no check has passed yet may not hash.
    assert not calls.again(([],))


def test_nothing_is_remembered_while_launches_are_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, one = BoundCalls(), Counted()
    calls.first("key", [one])
    monkeypatch.setattr(BoundCalls, "paused", True)
    assert not calls.again("key")
    calls.first("key", [one])
    assert (one.binds, one.runs) == (1, 1)


def test_what_is_kept_is_bounded() -> None:
    calls, one = BoundCalls(most=2), Counted()
    for key in "abc":
        calls.first(key, [one])
    assert not calls.again("a") and calls.again("c")


def test_keys_tell_types_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    keys = [call_key(value) for value in (1, True, 1.0, None, "1")]
    assert len(set(keys)) == len(keys)
    assert call_key(torch.zeros(1)) is None
    monkeypatch.setattr(launch, "INTERPRETED", True)
    assert call_key(1) is None


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA or ROCm GPU")
def test_repeated_decode_equals_the_first() -> None:
    """Contents changed in place show; another buffer, shape or option is another call."""
    case = PagedCase.build((40, 0, 130), device="cuda")
    workspace = DecodeWorkspace(3, 4, 2, 32, kv_dtype=torch.float32, device="cuda")
    workspace.prepare(case.seq_lens)
    out = torch.empty_like(case.q)
    lse = torch.empty(case.q.shape[:2], device="cuda")
    options = {"workspace": workspace, "out": out, "lse": lse}
    for _ in range(3):
        case.q.mul_(1.25)
        paged_decode(*case.tensors, **options)
        again = paged_decode(*case.tensors, workspace=workspace)
        assert torch.equal(out, again.out) and torch.equal(lse, again.lse)
    assert len(workspace.calls._calls) == 1
    paged_decode(*case.tensors, softmax_scale=0.5, **options)
    again = paged_decode(*case.tensors, softmax_scale=0.5, workspace=workspace)
    assert torch.equal(out, again.out) and len(workspace.calls._calls) == 2
    # An argument that breaks the contract is refused behind a good call too.
    with pytest.raises(ValueError, match="seq_lens"):
        paged_decode(*case.tensors[:4], case.seq_lens.long(), **options)
