"""What of a device the launch plans depend on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import torch

from dcp_lab.kernels import INTERPRETED


@dataclasses.dataclass(frozen=True)
class Device:
    """Facts of a device that choose a launch.

    Attributes:
        arch: 'cuda', 'hip' or 'interpreter'.
        num_sms: Multiprocessors (CUs on AMD).
        dependent_launch: Whether a kernel may be launched while its predecessor drains (NVIDIA's
            programmatic dependent launch, compute capability 9.0 and up).
        chip: 'gfx942', 'gfx950', ... on AMD, else empty.
        shared_bytes: Shared memory that a program may have on an NVIDIA GPU: 227 KB of compute
            capability 9.0 and 10.0, 99 KB of 8.6, 8.9 and 12.0. Default: that of the smaller ones.
    """

    arch: str
    num_sms: int
    dependent_launch: bool = False
    chip: str = ""
    shared_bytes: int = 99 << 10


_planned: Device | None = None


@contextlib.contextmanager
def planning_for(device: Device) -> Iterator[None]:
    """Make every plan as for this device, which need not be here: to build kernels for it."""
    global _planned
    before, _planned = _planned, device
    try:
        yield
    finally:
        _planned = before


def is_here() -> bool:
    """Return whether launches are planned for the device that tensors live on."""
    return _planned is None


def device_of(device: torch.device) -> Device:
    """Return the facts of the device that tensors live on."""
    return _planned if _planned is not None else _facts(device)


def current_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Make launches go to the device that the tensors live on, if it is not the current one.

    Triton launches on the current device, on its current stream.
    """
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _NOTHING
    return torch.cuda.device(device)


_NOTHING = contextlib.nullcontext()


@functools.cache
def _facts(device: torch.device) -> Device:
    if INTERPRETED:
        # Few slots: the interpreter runs programs one after the other.
        return Device("interpreter", 4)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        chip = properties.gcnArchName.partition(":")[0]
        return Device("hip", properties.multi_processor_count, chip=chip)
    return Device(
        "cuda",
        properties.multi_processor_count,
        dependent_launch=properties.major >= 9,
        shared_bytes=properties.shared_memory_per_block_optin,
    )
