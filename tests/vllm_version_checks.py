"""Drive the backend against the vLLM that is imported, without a GPU or an engine; print JSON.

    PYTHONPATH=<unpacked wheel> TRITON_INTERPRET=1 PYTHON tests/vllm_version_checks.py

Each check is a function; one that raises has failed. vLLM's own code does the selecting, splits
the batch, and holds the metadata; only its configuration is stood in for.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

# vLLM 0.23 imports it on the way; nothing here reads such a file.
if importlib.util.find_spec("gguf") is None:
    sys.modules |= {name: mock.MagicMock() for name in ("gguf", "gguf.constants", "gguf.quants")}

HEADS, KV_HEADS, HEAD_DIM, PAGE, PAGES = 4, 1, 32, 16, 40
# Decodes first: 40, 1 and 17 tokens; then chunks of 5 of 21 and of all 9.
SEQ_LENS, QUERY_LENS = [40, 1, 17, 21, 9], [1, 1, 1, 5, 9]


def vllm_config(**changes: Any) -> types.SimpleNamespace:
    """Return what the backend reads of a VllmConfig."""
    space = types.SimpleNamespace
    parallel = {
        "decode_context_parallel_size": 2,
        "prefill_context_parallel_size": 1,
        "dcp_comm_backend": "a2a",
        "cp_kv_cache_interleave_size": 1,
    }
    return space(
        cache_config=space(num_gpu_blocks=PAGES, num_gpu_blocks_override=None, block_size=PAGE),
        scheduler_config=space(max_num_seqs=8, max_num_batched_tokens=64),
        compilation_config=space(
            cudagraph_capture_sizes=[1, 2, 4], static_forward_context={}, cudagraph_mode=None
        ),
        model_config=space(dtype=torch.float32, max_model_len=128, is_mm_prefix_lm=False),
        parallel_config=space(**(parallel | changes.pop("parallel", {}))),
        speculative_config=None,
        additional_config=changes.pop("additional_config", {}),
    )


def rocm_platform() -> Any:
    """Return vLLM's own RocmPlatform, told that the GPU is a gfx950."""
    facts = types.SimpleNamespace(
        gcnArchName="gfx950", major=9, minor=5, multi_processor_count=256, warp_size=64
    )
    with mock.patch.object(torch.cuda, "get_device_properties", lambda *_: facts):
        import vllm.platforms.rocm as rocm
    from vllm.platforms.interface import DeviceCapability

    capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 5))
    rocm.RocmPlatform.get_device_capability = capability
    return rocm.RocmPlatform


def check_nothing_abstract_is_left() -> None:
    """vLLM can make the backend's builder and implementation."""
    from dcp_lab.vllm_plugin.backend import classes

    for made in vars(classes()).values():
        assert not made.__abstractmethods__, (made, made.__abstractmethods__)


def selector_config(**changes: Any) -> Any:
    """Return vLLM's question to a backend, of the fields that this version has."""
    from vllm.v1.attention.selector import AttentionSelectorConfig

    values = {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "has_sink": True,
        "has_sliding_window": True,
        "use_dcp": True,
    } | changes
    known = set(AttentionSelectorConfig._fields)
    return AttentionSelectorConfig(**{k: v for k, v in values.items() if k in known})


def check_rocm_selects_it() -> None:
    """--attention-backend CUSTOM gives this backend on ROCm, windows, sinks and DCP included."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from dcp_lab.vllm_plugin import BACKEND, register

    register()
    register()
    platform = rocm_platform()
    for dtype in (None, "auto", "bfloat16", "fp8"):
        path = platform.get_attn_backend_cls(
            AttentionBackendEnum.CUSTOM, selector_config(kv_cache_dtype=dtype), num_heads=8
        )
        assert path == BACKEND, path
    assert AttentionBackendEnum.CUSTOM.get_class().get_name() == "CUSTOM"


def check_rocm_refuses_with_a_way_out() -> None:
    """What is not supported is refused when the backend is selected, and says what to do."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from dcp_lab.vllm_plugin import versions

    def refused(config: Any = None, **changes: Any) -> str:
        with mock.patch.object(versions, "current_config", lambda: config):
            try:
                rocm_platform().get_attn_backend_cls(
                    AttentionBackendEnum.CUSTOM, selector_config(**changes), num_heads=8
                )
            except ValueError as error:
                return str(error)
        raise AssertionError(f"accepted: {changes}")

    assert "head_size=72): multiples of 16" in refused(head_size=72)
    assert "block_size=24): use --block-size" in refused(block_size=24)
    assert "kv_cache_dtype=fp8_e5m2): use --kv-cache-dtype" in refused(kv_cache_dtype="fp8_e5m2")
    assert "MLA models keep vLLM's own backend" in refused(use_mla=True)
    assert "expected auto or ag_rs" in refused(
        vllm_config(additional_config={"dcp_lab": {"reducer": "nccl"}})
    )
    assert "--prefill-context-parallel-size at 1" in refused(
        vllm_config(parallel={"prefill_context_parallel_size": 2})
    )


def cache_of(backend: Any, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return K and V [P, page, Hkv, D] in the tensor that this vLLM hands to a layer."""
    import vllm.v1.attention.backend as interface

    if hasattr(interface.AttentionBackend, "get_kv_cache_shape"):
        shape = backend.get_kv_cache_shape(len(k), PAGE, KV_HEADS, HEAD_DIM)
        cache = torch.full(shape, torch.nan)
        assert cache.shape[1] == 2
        cache[:, 0], cache[:, 1] = k, v
        return cache
    return torch.cat([k, v], dim=-1).transpose(1, 2).contiguous()


def metadata(table: torch.Tensor, local: torch.Tensor | None) -> Any:
    """Return a mixed batch as this vLLM describes it."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *itertools.accumulate(QUERY_LENS)], dtype=torch.int32)
    values = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": torch.tensor(SEQ_LENS, dtype=torch.int32),
        "num_reqs": len(SEQ_LENS),
        "num_actual_tokens": sum(QUERY_LENS),
        "max_query_len": max(QUERY_LENS),
        "max_seq_len": max(SEQ_LENS),
        "block_table_tensor": table,
        "slot_mapping": torch.zeros(sum(QUERY_LENS), dtype=torch.int64),
        "causal": True,
        "dcp_local_seq_lens": local,
    }
    known = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    assert set(values) <= known, set(values) - known
    return CommonAttentionMetadata(**values)


class OneRank:
    """An exchange that gives the queries of all ranks and merges with the other ranks' states.

    Args:
        q: Of all ranks, [T, Hq, D].
        rank: This one.
        others: What each other rank handed in, a state a reduce; empty: nothing is merged.
    """

    def __init__(self, q: torch.Tensor, rank: int, others: list[list[Any]]) -> None:
        self.q, self.rank, self.others, self.kept = q, rank, others, []

    def check(self) -> None:
        pass

    def mine(self, rows: torch.Tensor, heads: int) -> torch.Tensor:
        return rows[:, self.rank * heads : (self.rank + 1) * heads]

    def gather(self, q: torch.Tensor) -> torch.Tensor:
        for start in range(len(self.q) - len(q) + 1):
            rows = self.q[start : start + len(q)]
            if torch.equal(self.mine(rows, q.shape[1]), q):
                return rows
        raise AssertionError("queries of no rank's step")

    def state(self, num_tokens: int) -> Any:
        from dcp_lab.state import AttnState

        out = torch.full((num_tokens, *self.q.shape[1:]), torch.nan)
        return AttnState(out, torch.full(out.shape[:2], torch.nan))

    def reduce(self, state: Any, output: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        from dcp_lab.ops.merge import merge_states

        self.kept.append(type(state)(*(part.clone() for part in state)))
        if not self.others:
            return
        states = [state, *(other[len(self.kept) - 1] for other in self.others)]
        merged = merge_states(*(torch.stack(parts) for parts in zip(*states, strict=True)))
        output.copy_(self.mine(merged.out, output.shape[1]))
        if lse is not None:
            lse.copy_(self.mine(merged.lse, lse.shape[1]))


def run_rank(
    rank: int,
    size: int,
    interleave: int,
    window: int | None,
    gather: str | None,
    inputs: Any,
    others: list[list[Any]],
) -> tuple[torch.Tensor, list[Any]]:
    """Return one rank's output and states, written, planned and attended by the plugin."""
    from dcp_lab.sharding import Shard
    from dcp_lab.vllm_plugin import versions
    from dcp_lab.vllm_plugin.backend import classes

    made = classes()
    shard = Shard(rank, size, interleave)
    q, keys, values = inputs
    generator = torch.Generator().manual_seed(rank)
    order = torch.randperm(PAGES, generator=generator, dtype=torch.int32)
    table = order.view(len(SEQ_LENS), -1).contiguous()
    nothing = torch.full((PAGES, PAGE, KV_HEADS, HEAD_DIM), torch.nan)
    options = {"attention_path": "gather", "gather": gather} if gather else {}
    config = vllm_config(
        parallel={"decode_context_parallel_size": size}, additional_config={"dcp_lab": options}
    )
    with mock.patch.object(versions, "current_config", lambda: config):
        impl = made.impl(HEADS // size, HEAD_DIM, 0.3, KV_HEADS, None, window, "auto", None)
        impl.shard = Shard(0, 1)
        impl.process_weights_after_loading(torch.float32)
    impl.shard = shard
    exchange = OneRank(q, rank, others)
    impl.exchange = exchange if size > 1 else None
    layer = types.SimpleNamespace(impl=impl)
    config.compilation_config.static_forward_context["layer"] = layer
    spec = types.SimpleNamespace(block_size=PAGE)
    builder = made.builder(spec, ["layer"], config, torch.device("cpu"))
    cache = cache_of(made.backend, nothing, nothing)
    for request, length in enumerate(SEQ_LENS):
        position = torch.arange(length)
        local = shard.local_position(position)
        slots = table[request][local // PAGE].long() * PAGE + local % PAGE
        slots = slots.where(shard.owner(position) == rank, -1)
        impl.do_kv_cache_update(layer, keys[request], values[request], cache, slots)
    lengths = shard.local_seq_lens(torch.tensor(SEQ_LENS)) if size > 1 else None
    step = builder.build(0, metadata(table, lengths))
    assert len(step.parts) == 2 and step.parts[0].tokens == slice(0, 3)
    first = rank * HEADS // size
    output = torch.full((len(q) + 3, HEADS // size, HEAD_DIM), torch.nan)
    own = q[:, first : first + HEADS // size]
    new = [
        torch.cat([rows[-count:] for rows, count in zip(kept, QUERY_LENS, strict=True)])
        for kept in (keys, values)
    ]
    impl.forward(layer, torch.cat([own, own[:3]]), *new, cache, step, output)
    assert output[len(q) :].isnan().all()
    return output[: len(q)], exchange.kept


def expected(inputs: Any, window: int | None) -> torch.Tensor:
    """Return float64 attention of every query token, request by request, without pages."""
    q, keys, values = inputs
    rows, start = [], 0
    for request, (length, new) in enumerate(zip(SEQ_LENS, QUERY_LENS, strict=True)):
        k, v = keys[request][:, 0].double(), values[request][:, 0].double()
        for row in range(new):
            last = length - new + row
            first = 0 if window is None else max(0, last + 1 - window)
            scores = 0.3 * q[start + row].double() @ k[first : last + 1].T
            rows.append(scores.softmax(-1) @ v[first : last + 1])
        start += new
    return torch.stack(rows)


def random_inputs() -> Any:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    kv = [[normal(length, KV_HEADS, HEAD_DIM) for length in SEQ_LENS] for _ in range(2)]
    return normal(sum(QUERY_LENS), HEADS, HEAD_DIM), *kv


def check_a_mixed_batch_is_right() -> None:
    """Built and attended as this vLLM hands it over, over 1 and 2 ranks, with a window and not."""
    inputs = random_inputs()
    for size, interleave, window, gather in (
        (1, 1, None, None),
        (1, 1, 6, None),
        (2, 1, None, None),
        (2, 16, 6, None),
        (2, 1, None, "published"),
        (2, 16, None, "per_page"),
    ):
        case = (size, interleave, window, gather, inputs)
        states = [run_rank(rank, *case, [])[1] for rank in range(size)]
        outs = [
            run_rank(rank, *case, states[:rank] + states[rank + 1 :])[0] for rank in range(size)
        ]
        out = torch.cat(outs, dim=1)
        error = (out.double() - expected(inputs, window)).abs().max().item()
        assert error < 1e-5, (size, interleave, window, gather, error)


def check_full_graphs_are_offered() -> None:
    """Decodes of one length may be captured, but for a gather that waits for the device."""
    from vllm.v1.attention.backend import AttentionCGSupport

    from dcp_lab.vllm_plugin.backend import classes

    builder = classes().builder
    assert builder.get_cudagraph_support(vllm_config(), None) == AttentionCGSupport.UNIFORM_BATCH
    waits = vllm_config(additional_config={"dcp_lab": {"attention_path": "gather"}})
    assert builder.get_cudagraph_support(waits, None) == AttentionCGSupport.NEVER


def mode_on_rocm(requested: str, gate: str, parallel: dict[str, Any]) -> str:
    """Return the graph mode that vLLM's own ROCm check leaves, the gate being in place."""
    from vllm.config.compilation import CUDAGraphMode

    from dcp_lab.vllm_plugin import gate as gates

    platform = rocm_platform()
    gates.install(platform)
    gates.install(platform)
    options = {"dcp_lab": {"rocm_full_graph_gate": gate}}
    config = vllm_config(parallel={"worker_cls": "x"} | parallel, additional_config=options)
    config.compilation_config.cudagraph_mode = CUDAGraphMode[requested]
    platform.check_and_update_config(config)
    return config.compilation_config.cudagraph_mode.name


def check_the_gate() -> None:
    """Study 2's rule: a2a keeps its full graphs; ag_rs only with 'all'; PCP never."""
    version = tuple(map(int, installed().split(".")[:2]))
    lowers = version < (0, 32)
    a2a, ag_rs = {"dcp_comm_backend": "a2a"}, {"dcp_comm_backend": "ag_rs"}
    for full in ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"):
        low = "PIECEWISE" if lowers else full
        table = [
            ("off", a2a, low),
            ("off", ag_rs, low),
            ("a2a", a2a, full),
            ("a2a", ag_rs, low),
            ("all", ag_rs, full),
            ("all", a2a | {"prefill_context_parallel_size": 2}, "PIECEWISE"),
            ("all", a2a | {"decode_context_parallel_size": 1}, full),
        ]
        for gate, parallel, want in table:
            got = mode_on_rocm(full, gate, parallel)
            assert got == want, (full, gate, parallel, got, want)
    for mode in ("NONE", "PIECEWISE"):
        assert mode_on_rocm(mode, "all", ag_rs) == mode


def installed() -> str:
    import importlib.metadata

    return importlib.metadata.version("vllm")


def main() -> int:
    """Run every check; print version and results as the last line."""
    checks: dict[str, Callable[[], None]] = {
        name.removeprefix("check_"): check
        for name, check in globals().items()
        if name.startswith("check_")
    }
    results = {}
    for name, check in checks.items():
        try:
            check()
            results[name] = "ok"
        except Exception as error:
            traceback.print_exc()
            results[name] = f"{type(error).__name__}: {error}"[:500]
    print(json.dumps({"version": installed(), "checks": results}))
    return int(any(result != "ok" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
