"""The lab as a vLLM attention backend: `vllm serve MODEL --attention-backend CUSTOM`.

vLLM calls `register` in every process that it starts, through the entry point group
`vllm.general_plugins`. README.md beside this file has the options and the versions.
"""

from __future__ import annotations

BACKEND = "dcp_lab.vllm_plugin.backend.DcpLabBackend"


def register() -> None:
    """Name the lab's backend as vLLM's CUSTOM one; nothing of it is loaded until it is selected.

    Safe to call any number of times. On ROCm it also puts the gate of rocm_full_graph_gate in
    place, which does nothing unless that option is set.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    if current_platform.is_rocm():
        from dcp_lab.vllm_plugin.gate import install

        install(type(current_platform))
