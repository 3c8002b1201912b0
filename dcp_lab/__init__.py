"""dcp_lab: paged decode attention with its LSE, reducers and measurements for decode context
parallelism.

Importing the package is cheap: it loads neither triton nor vllm. Each public name below loads its
room when it is first used.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOMES = {
    "AttnState": "dcp_lab.state",
    "Shard": "dcp_lab.sharding",
    "DecodeWorkspace": "dcp_lab.ops.workspace",
    "paged_decode": "dcp_lab.ops.decode",
    "BoundDecode": "dcp_lab.ops.decode",
    "gather_decode": "dcp_lab.ops.gather",
    "gather_kv": "dcp_lab.ops.gather",
    "GatherWorkspace": "dcp_lab.ops.gather",
    "mla_paged_decode": "dcp_lab.ops.mla",
    "write_kv": "dcp_lab.ops.kv_write",
    "write_mla_kv": "dcp_lab.ops.mla",
    "merge_states": "dcp_lab.ops.merge",
    "make_reducer": "dcp_lab.reducers",
    "capture": "dcp_lab.graphs.capture",
    "audit": "dcp_lab.graphs.audit",
    "count_launches": "dcp_lab.graphs.launches",
    "resolve_cudagraph_mode": "dcp_lab.graphs.policy",
}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use."""
    if name not in _HOMES:
        raise AttributeError(
            f"module 'dcp_lab' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
