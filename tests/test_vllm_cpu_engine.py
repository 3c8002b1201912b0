"""A real vLLM engine with this backend: TP 2 and DCP 2 on a CPU against stock vLLM at TP 1.

The kernels that ship run through Triton's interpreter, the reducers over gloo. vLLM lives in an
environment of its own, made by `python3 tools/cpu_engine.py`; without it these tests are skipped,
with DCP_LAB_CPU_ENGINE=1 they make it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import types
from pathlib import Path
from typing import Any

import pytest

from dcp_lab.serving.clients import ClientError, run_client

ROOT = Path(__file__).resolve().parents[1]
# A start and its requests take 30 to 80 s on two idle cores.
ENGINE_SECONDS = 480
LOGPROB_TOLERANCE = 1e-3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def cpu_engine_tool() -> types.ModuleType:
    """Return tools/cpu_engine.py as a module."""
    path = ROOT / "tools" / "cpu_engine.py"
    spec = importlib.util.spec_from_file_location("cpu_engine", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def python() -> Path:
    """Return the Python that has vLLM."""
    tool = cpu_engine_tool()
    if os.environ.get("DCP_LAB_CPU_ENGINE") != "1" and not tool.stamp_of(tool.PLACE):
        pytest.skip("no CPU engine here: python3 tools/cpu_engine.py makes it (1 GB, minutes)")
    return tool.ensure()


def run_engine(python: Path, logs: Path, name: str, *, seams: bool, **wanted: Any) -> Any:
    """Return what tests/vllm_cpu_engine.py printed; nothing of it is left running."""
    environ = {key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR") if key in os.environ}
    environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # one list of cores a worker; "auto" wants a NUMA node for each
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores(wanted["tp"]))),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # collective_rpc with a function of the test
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    if seams:
        environ |= {"DCP_LAB_CPU_SEAMS": "1", "TRITON_INTERPRET": "1"}
    wanted["model"] = str(logs / "model")
    command = [str(python), str(ROOT / "tests" / "vllm_cpu_engine.py"), json.dumps(wanted)]
    log = logs / f"{name}.log"
    why = None
    try:
        run_client(
            command,
            log=log,
            timeout_s=ENGINE_SECONDS,
            environment=environ,
            inherit=False,
            folder=logs,
        )
    except ClientError as error:
        why = str(error).splitlines()[0]
    text = log.read_text(errors="replace")
    if why or "\nRESULT\n" not in text:
        errors = [line for line in text.splitlines() if "Error" in line]
        end = "\n".join((errors or text.splitlines())[-15:])
        pytest.fail(f"engine {name}: {why or 'it printed no result:'}\n{end}")
    return json.loads(text.split("\nRESULT\n", 1)[1].splitlines()[0])


def cores(workers: int) -> list[int]:
    """Return a core for each worker."""
    usable = sorted(os.sched_getaffinity(0))
    return [usable[worker % len(usable)] for worker in range(workers)]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def stock(python: Path, logs: Path) -> Any:
    """Return what vLLM's own CPU attention gives at TP 1."""
    return run_engine(python, logs, "stock", seams=False, tp=1, dcp=1)


@pytest.fixture(scope="module")
def a2a(python: Path, logs: Path, stock: Any) -> Any:
    """Return what the lab's backend gives with the a2a reducer, and with its LSE broken."""
    return run_engine(python, logs, "a2a", seams=True, tp=2, dcp=2, comm="a2a", break_the_lse=True)


@pytest.fixture(scope="module")
def ag_rs(python: Path, logs: Path, stock: Any) -> Any:
    """Return the same with ag_rs, the tokens dealt to ranks by 16 at a time."""
    return run_engine(python, logs, "ag_rs", seams=True, tp=2, dcp=2, comm="ag_rs", interleave=16)


def differences(rows: list[Any], expected: list[Any]) -> list[str]:
    """Return in words where two generations differ."""
    found = []
    for row, want in zip(rows, expected, strict=True):
        name = f"prompt of {want['prompt']}"
        if row["tokens"] != want["tokens"]:
            found.append(f"{name}: tokens {row['tokens']}, expected {want['tokens']}")
            continue
        pairs = zip(row["logprobs"], want["logprobs"], strict=True)
        off = max(abs(ours - theirs) for ours, theirs in pairs)
        if not off <= LOGPROB_TOLERANCE:
            found.append(f"{name}: log-probabilities are off by {off:.2g}")
    return found


def test_the_stock_engine_is_vllms_own(stock: Any):
    """The yardstick shares no attention with the lab, and its prompts have the lengths wanted."""
    assert [row["prompt"] for row in stock["first"]] == [1, 15, 16, 17, 200]
    (attention,) = stock["attention"]
    assert all(name.startswith("vllm.") for name in attention)


@pytest.mark.parametrize("engine", ["a2a", "ag_rs"])
def test_both_ranks_run_the_labs_attention(engine: str, request: pytest.FixtureRequest):
    """Each rank attends its own shard with the lab's kernels and the reducer asked for."""
    interleave = {"a2a": 1, "ag_rs": 16}[engine]
    result = request.getfixturevalue(engine)
    assert result["attention"] == [
        [
            f"dcp_lab.vllm_plugin.backend.DcpLabImpl {engine} "
            f"Shard(rank={rank}, size=2, interleave_size={interleave}) interpreted=True"
        ]
        for rank in (0, 1)
    ]


@pytest.mark.parametrize("engine", ["a2a", "ag_rs"])
@pytest.mark.parametrize("run", ["first", "again"])
def test_dcp_generates_what_one_rank_does(
    engine: str, run: str, stock: Any, request: pytest.FixtureRequest
):
    """Same greedy tokens, log-probabilities within 1e-3; `again` starts from cached prefixes."""
    result = request.getfixturevalue(engine)
    assert differences(result[run], stock["first"]) == []
    # 200 tokens fill three blocks of 32 on each of two ranks.
    cached = [row["cached"] for row in result[run]]
    assert cached == ([0, 0, 0, 0, 192] if run == "again" else [0] * 5)


def test_without_the_lse_the_merge_is_seen_to_be_wrong(a2a: Any, stock: Any):
    """Merged as if every rank's LSE were the same, each prompt's tokens are others."""
    assert a2a["broken_exchanges"] == [1, 1]
    wrong = differences(a2a["broken"], stock["first"])
    assert len(wrong) == len(stock["first"])
