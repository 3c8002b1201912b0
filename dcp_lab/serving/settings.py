"""Named parameter sets: both studies' servers and load tests, and small ones for other machines.

The studies' flags are those they published (data/README.md); what they do not state, such as the
longest request, is left to vLLM. `cpu` needs vLLM's CPU build, `python3 tools/cpu_engine.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from dcp_lab.serving.accuracy import AccuracyTest
from dcp_lab.serving.loadtest import LoadTest
from dcp_lab.serving.server import ServerConfig

# Models in folders that are made on the spot.
MADE = "./build/models"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One experiment with a server.

    Attributes:
        name: What to call it.
        about: What it is, in a sentence.
        machine: What it is for.
        server: What to start.
        loads: Load tests, one after the other.
        accuracy: What to ask; None: the lab's local task.
        made: What to put into server.model, a folder: "trained" (the lab's retrieval model),
            "dummy" (study 1's shapes on two GPUs, no weights); None: a model of the hub.
    """

    name: str
    about: str
    machine: str
    server: ServerConfig
    loads: tuple[LoadTest, ...]
    accuracy: AccuracyTest | None = None
    made: str | None = None


# ---- study 1: Qwen3-235B, TP 8, DCP 1 or 2 ---------------------------------------------------

STUDY1_LOADS = tuple(
    LoadTest(num_prompts=160, max_concurrency=16, input_len=i, output_len=o, timeout_s=4 * 3600)
    for i, o in ((2000, 1000), (1000, 4000))
)
STUDY1_SERVER = ServerConfig(
    model="Qwen/Qwen3-235B-A22B-Instruct-2507",
    port=9099,
    tensor_parallel_size=8,
    cudagraph_metrics=True,
    environment={"VLLM_ROCM_USE_AITER": "1"},
)


def _dcp(server: ServerConfig, comm: str, mode: str, **options: Any) -> ServerConfig:
    """Return a server with DCP 2 through this lab's backend."""
    return dataclasses.replace(
        server,
        decode_context_parallel_size=2,
        dcp_comm_backend=comm,
        attention_backend="CUSTOM",
        additional_config={"dcp_lab": options},
        cudagraph_mode=mode,
    )


def _study1(name: str, about: str, server: ServerConfig) -> Setting:
    return Setting(
        name=f"study1_{name}",
        about=about,
        machine="8 MI355X",
        server=server,
        loads=STUDY1_LOADS,
        accuracy=AccuracyTest(),
    )


# ---- study 2: Kimi-K3 (MLA), TP 8, DCP 8 -----------------------------------------------------

STUDY2_SERVER = ServerConfig(
    # The study gives the model's name, not where its weights are: --model for another place.
    model="moonshotai/Kimi-K3",
    tensor_parallel_size=8,
    decode_context_parallel_size=8,
    dcp_comm_backend="a2a",
    attention_backend="TRITON_MLA",
    kv_cache_dtype="fp8",
    cudagraph_metrics=True,
    extra_args=("--trust-remote-code",),
    environment={"VLLM_USE_DIRECT_DCP_A2A": "0"},
)
STUDY2_LOADS = (
    LoadTest(
        num_prompts=40, max_concurrency=8, input_len=8192, output_len=1024, timeout_s=4 * 3600
    ),
)


def _study2(name: str, about: str, server: ServerConfig) -> Setting:
    return Setting(
        name=f"study2_{name}", about=about, machine="8 MI355X", server=server, loads=STUDY2_LOADS
    )


# ---- one GPU, two GPUs, none -----------------------------------------------------------------

SMALL_SERVER = ServerConfig(
    model=f"{MADE}/trained",
    max_model_len=4096,
    max_num_seqs=16,
    dtype="float16",
    gpu_memory_utilization=0.4,
    attention_backend="CUSTOM",
    cudagraph_metrics=True,
)
TWO_GPU_SERVER = ServerConfig(
    model=f"{MADE}/study1_two_gpus",
    load_format="dummy",
    tensor_parallel_size=2,
    max_model_len=8192,
    max_num_seqs=16,
    gpu_memory_utilization=0.4,
    enable_prefix_caching=False,
    cudagraph_mode="FULL_AND_PIECEWISE",
    cudagraph_capture_sizes=(1, 2, 4, 8, 16),
    cudagraph_metrics=True,
)
SMALL_LOAD = LoadTest(
    num_prompts=32, max_concurrency=16, input_len=512, output_len=128, num_warmups=4
)
TWO_GPU_LOAD = LoadTest(
    num_prompts=32, max_concurrency=16, input_len=2000, output_len=1000, num_warmups=16
)
CPU_SERVER = ServerConfig(
    model=f"{MADE}/trained",
    port=0,
    dtype="float32",
    max_model_len=512,
    max_num_seqs=4,
    block_size=32,
    enforce_eager=True,
    environment={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"},
)
CPU_LOAD = LoadTest(num_prompts=4, max_concurrency=2, input_len=64, output_len=8, timeout_s=600)
# One list of cores a worker, no attention backend but the platform's own without the seams of
# tests/vllm_cpu_plugin, and this lab's kernels in Triton's interpreter.
CPU_DCP2_SERVER = dataclasses.replace(
    CPU_SERVER,
    tensor_parallel_size=2,
    decode_context_parallel_size=2,
    dcp_comm_backend="a2a",
    environment={
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "DCP_LAB_CPU_SEAMS": "1",
        "TRITON_INTERPRET": "1",
    },
)


def _small(name: str, about: str, machine: str, server: ServerConfig, load: LoadTest) -> Setting:
    return Setting(
        name=name,
        about=about,
        machine=machine,
        server=server,
        loads=(load,),
        made="dummy" if server.load_format == "dummy" else "trained",
    )


_ALL = (
    _study1("dcp1", "The baseline: no DCP, AMD's own attention.", STUDY1_SERVER),
    _study1(
        "paged",
        "DCP 2 with this lab's paged kernel and a2a in full graphs.",
        _dcp(
            STUDY1_SERVER,
            "a2a",
            "FULL_AND_PIECEWISE",
            attention_path="paged",
            reducer="a2a",
            rocm_full_graph_gate="a2a",
        ),
    ),
    _study1(
        "gather",
        "DCP 2 as published: gather, then attend; ag_rs, PIECEWISE.",
        _dcp(STUDY1_SERVER, "ag_rs", "PIECEWISE", attention_path="gather", reducer="ag_rs"),
    ),
    _study1(
        "piecewise",
        "The same with the pages read in place: what only the gather adds.",
        _dcp(STUDY1_SERVER, "ag_rs", "PIECEWISE", attention_path="paged", reducer="ag_rs"),
    ),
    _study2(
        "piecewise",
        "The baseline: what vLLM forces on ROCm when DCP > 1.",
        dataclasses.replace(STUDY2_SERVER, cudagraph_mode="PIECEWISE"),
    ),
    _study2(
        "full",
        "Full graphs, by study 2's gate: only for the a2a exchange.",
        dataclasses.replace(
            STUDY2_SERVER,
            cudagraph_mode="FULL_AND_PIECEWISE",
            additional_config={"dcp_lab": {"rocm_full_graph_gate": "a2a"}},
        ),
    ),
    _small(
        "two_gpus_dcp1",
        "Study 1's attention of one rank, no DCP, vLLM's own attention.",
        "2 GPUs",
        TWO_GPU_SERVER,
        TWO_GPU_LOAD,
    ),
    _small(
        "two_gpus_paged",
        "The same with DCP 2, paged, direct exchange, full graphs.",
        "2 GPUs",
        _dcp(
            TWO_GPU_SERVER, "a2a", "FULL_AND_PIECEWISE", attention_path="paged", reducer="direct"
        ),
        TWO_GPU_LOAD,
    ),
    _small(
        "two_gpus_a2a",
        "The same with a2a, which ROCm's full-graph gate lets through: the first try on AMD.",
        "2 GPUs",
        _dcp(
            TWO_GPU_SERVER,
            "a2a",
            "FULL_AND_PIECEWISE",
            attention_path="paged",
            reducer="a2a",
            rocm_full_graph_gate="a2a",
        ),
        TWO_GPU_LOAD,
    ),
    _small(
        "two_gpus_gather",
        "The same with DCP 2 as published: gather, ag_rs, PIECEWISE.",
        "2 GPUs",
        _dcp(TWO_GPU_SERVER, "ag_rs", "PIECEWISE", attention_path="gather", reducer="ag_rs"),
        TWO_GPU_LOAD,
    ),
    _small(
        "one_gpu",
        "The trained retrieval model through this lab's backend.",
        "1 GPU",
        SMALL_SERVER,
        SMALL_LOAD,
    ),
    _small(
        "cpu",
        "The trained retrieval model, vLLM's own CPU attention.",
        "no GPU",
        CPU_SERVER,
        CPU_LOAD,
    ),
    _small(
        "cpu_dcp2",
        "TP 2 and DCP 2 through this lab's backend, in Triton's interpreter.",
        "no GPU",
        CPU_DCP2_SERVER,
        CPU_LOAD,
    ),
)
SETTINGS = {setting.name: setting for setting in _ALL}


def find_setting(name: str | None) -> Setting:
    """Return a parameter set by name.

    Raises:
        ValueError: There is none of this name; the message lists them.
    """
    if name not in SETTINGS:
        got = "none" if name is None else repr(name)
        raise ValueError(f"setting: expected one of {', '.join(SETTINGS)}, got {got}")
    return SETTINGS[name]
