"""What a peer is: a kernel of somebody else's, called as its own engine calls it."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

import torch


class DecodeInputs(Protocol):
    """The inputs of a measurement that adapters read (dcp_lab.bench.gqa.Layers has them).

    q, out [layers, B, Hq, D], lse [layers, B, Hq], kv [layers, P, 2, page, Hkv, D] (K, then V in
    each page; q's dtype, or fp8 with scales of 1), block_table int32 [B, max_pages], seq_lens
    int32 [B]; lens are the same on the host.
    """

    q: torch.Tensor
    kv: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    lens: list[int]

    def caches(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a layer, [P, page, Hkv, D], as views."""
        ...


class MlaInputs(Protocol):
    """The inputs of an MLA decode that adapters read.

    q [layers, B, Hq, 576], out [layers, B, Hq, 512], lse [layers, B, Hq], kv the latent cache
    [layers, P, page, 576] in q's dtype, or fp8 with a scale of 1, block_table int32
    [B, max_pages], seq_lens int32 [B]; lens are the same on the host.
    """

    q: torch.Tensor
    kv: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    lens: list[int]
    softmax_scale: float


@dataclasses.dataclass(frozen=True)
class PeerCall:
    """A peer planned for its inputs.

    Attributes:
        run: Attends layer i; out[i] holds the result.
        lse: Natural-log LSE [B, Hq] of layer i after run, or None where the peer gives none.
        contiguous: K and V [B, tokens, Hkv, D] of layer i that it attends instead of the pages.
        queries: The queries [B, Hq, D] of layer i that it attends, where they are fp8 of q:
            rounded before, which is not in its time.
        fp8_weights: Whether it rounds the softmax's weights to fp8.
    """

    run: Callable[[int], object]
    lse: Callable[[int], torch.Tensor] | None
    contiguous: Callable[[int], tuple[torch.Tensor, torch.Tensor]] | None = None
    queries: Callable[[int], torch.Tensor] | None = None
    fp8_weights: bool = False


@dataclasses.dataclass(frozen=True)
class Peer:
    """One peer.

    Attributes:
        name: How rows name it.
        package: Distribution it comes from and the versions that the adapter knows.
        why_absent: Returns None when it can run here, else why not and how to get it.
        calls: Returns its variants (split counts, planners) by name, for these DecodeInputs or
            MlaInputs; none where it knows no such inputs.
    """

    name: str
    package: str
    why_absent: Callable[[], str | None]
    calls: Callable[[Any], dict[str, Callable[[], PeerCall]]]


def is_fp8(x: DecodeInputs | MlaInputs) -> bool:
    """Return whether the cache is fp8."""
    return x.kv.element_size() == 1


def module_missing(module: str, install: str) -> str | None:
    """Return why a module cannot be imported, None when it can be found; imports its parents."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, OSError, RuntimeError) as reason:
        return f"{module} does not import here ({reason}); {install}"
    return None if found else f"{module} is not installed; {install}"


def needs_hopper() -> str | None:
    """Return why code for NVIDIA's compute capability 9.0 cannot run here."""
    if torch.version.hip or not torch.cuda.is_available():
        return "it needs an NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability()
    return None if major == 9 else f"it needs compute capability 9.0, this GPU has {major}.{minor}"
