"""AITER's adapters against its source: every call fits, and gives AITER what it asks for.

The signatures in aiter_signatures.json are taken from AITER's source. Stand-ins of these functions
take exactly those arguments, and compute with the oracle what the real ones are documented to.
"""

from __future__ import annotations

import inspect
import json
import math
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dcp_lab.bench import gqa as bench
from dcp_lab.bench import protocol
from dcp_lab.peers import aiter as adapters
from dcp_lab.reference import eager_decode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(__file__).resolve().parents[1]
SIGNATURES = json.loads((Path(__file__).parent / "aiter_signatures.json").read_text())
SHAPE = bench.DecodeShape(3, 37, num_q_heads=4, num_kv_heads=2, head_dim=32, lengths="uneven")


def signature_of(name: str) -> inspect.Signature:
    """Return a function's signature as AITER's source has it."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature(
        [
            inspect.Parameter(p, kind, default=inspect.Parameter.empty if required else None)
            for p, required in SIGNATURES[name]["parameters"]
        ]
    )


def install(monkeypatch: pytest.MonkeyPatch, **behaviour: Callable) -> dict[str, list[dict]]:
    """Put a stand-in for AITER in place; return the arguments of each call, by function."""
    got: dict[str, list[dict]] = {}
    modules = {
        name: types.ModuleType(name)
        for name in ("aiter", "aiter.ops", "aiter.ops.attention", "aiter.ops.mha", "aiter.mla")
    }
    modules["aiter"].dtypes = types.SimpleNamespace(fp8=torch.float8_e4m3fn)
    for name, about in SIGNATURES.items():

        def stand_in(*args, _name=name, **kwargs):
            # A missing or an unknown argument is a TypeError here, as in AITER.
            bound = signature_of(_name).bind(*args, **kwargs).arguments
            got.setdefault(_name, []).append(bound)
            return behaviour[_name](**bound) if _name in behaviour else None

        module = about["file"].removesuffix(".py").replace("/", ".")
        setattr(modules[module], name, stand_in)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return got


def planned(batch_size, **_):
    """Return shapes and dtypes of a plan, as get_*_metadata_info_v1 do."""
    sizes = ((2,), (5,), (7, 8), (batch_size + 1,), (batch_size, 2), (9,))
    return tuple((size, torch.int32) for size in sizes)


def inputs(dtype: torch.dtype = torch.float32) -> bench.Layers:
    return bench.make_layers(SHAPE, dtype=dtype, device=DEVICE)


def test_paged_attention_v1_fits(monkeypatch):
    """It gets NHD caches and a workspace of the partitions' bytes, and writes the right layer."""

    def behaviour(out, query, key_cache, value_cache, block_tables, context_lens, scale, **rest):
        assert rest["kv_cache_layout"] == "NHD" and rest["partition_size"] == 256
        assert key_cache.is_contiguous() and value_cache.is_contiguous()
        partitions = math.ceil(rest["max_context_len"] / 256) * query.shape[0] * query.shape[1]
        assert rest["workspace_buffer"].numel() == partitions * (32 * out.element_size() + 8)
        state = eager_decode(
            query, key_cache, value_cache, block_tables, context_lens, softmax_scale=scale
        )
        out.copy_(state.out)
        return out

    install(monkeypatch, paged_attention_v1=behaviour)
    x = inputs()
    (make,) = adapters.PAGED_V1.calls(x).values()
    errors = protocol.check_variant(x, bench.peer_variant("aiter", "auto", make()))
    assert errors.out_error <= errors.error_budget and errors.lse_error is None


@pytest.mark.parametrize("gather", ["per_token", "per_page"])
def test_the_gathered_path_fits(monkeypatch, gather):
    """flash_attn_varlen_func gets gathered KV; its LSE [Hq, T] comes back as [T, Hq]."""

    def behaviour(q, k, v, cu_seqlens_q, cu_seqlens_k, out, softmax_scale, **rest):
        assert rest["return_lse"] and rest["max_seqlen_q"] == 1
        assert rest["max_seqlen_k"] == max(SHAPE.seq_lens())
        lses = []
        for b, (start, end) in enumerate(
            zip(cu_seqlens_k[:-1].tolist(), cu_seqlens_k[1:].tolist(), strict=True)
        ):
            table = torch.zeros(1, 1, dtype=torch.int32, device=q.device)
            lens = torch.tensor([end - start], dtype=torch.int32, device=q.device)
            rows = q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]]
            caches = (k[start:end][None], v[start:end][None])
            state = eager_decode(rows, *caches, table, lens, softmax_scale=softmax_scale)
            out[b] = state.out[0]
            lses.append(state.lse[0])
        return out, torch.stack(lses, 1)

    install(monkeypatch, flash_attn_varlen_func=behaviour)
    x = inputs()
    made = adapters.GATHERED.calls(x)[gather]()
    errors = protocol.check_variant(x, bench.peer_variant("aiter", gather, made))
    assert errors.lse_error <= errors.lse_error_budget


def test_pa_persistent_fits(monkeypatch):
    """It gets SHUFFLE fp8 caches, page ids of each request and a plan; bf16 caches are not its."""

    def behaviour(Q, K, V, output, kv_indptr, kv_indices, context_lens, **rest):
        assert K.dtype == V.dtype == torch.float8_e4m3fn
        pages, heads, _, page_size, x = K.shape
        assert (heads, page_size, x) == (2, 16, 16) and V.shape == (pages, 2, 1, 32, 16)
        assert rest["K_QScale"].shape == (pages, 2, 16)
        counts = [math.ceil(n / 16) for n in SHAPE.seq_lens()]
        assert kv_indptr.diff().tolist() == counts and len(kv_indices) == sum(counts)
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=Q.device)
        for b, (start, count) in enumerate(zip(kv_indptr.tolist(), counts, strict=False)):
            table[b, :count] = kv_indices[start : start + count]
        state = eager_decode(
            Q,
            K,
            V,
            table,
            context_lens,
            softmax_scale=rest["softmax_scale"],
            kv_layout="SHUFFLE",
            k_scale=1.0,
            v_scale=1.0,
        )
        output.copy_(state.out)
        return None, state.lse

    got = install(monkeypatch, pa_persistent_fwd=behaviour, get_pa_metadata_info_v1=planned)
    x = inputs(torch.bfloat16)
    assert adapters.PERSISTENT.calls(x) == {}
    x.kv = x.kv.to(torch.float8_e4m3fn)
    (make,) = adapters.PERSISTENT.calls(x).values()
    made = make()
    made.run(1)
    right = eager_decode(x.q[1], *x.caches(1), x.block_table, x.seq_lens, k_scale=1.0, v_scale=1.0)
    assert torch.equal(x.out[1], right.out) and torch.equal(made.lse(1), right.lse)
    assert got["get_pa_metadata_v1"][0]["context_lens"] is x.seq_lens


def mla_inputs() -> types.SimpleNamespace:
    random = torch.Generator().manual_seed(0)
    lens, heads, page_size = [3, 65, 130], 32, 64
    table = torch.tensor([[4, -1, -1], [0, 5, -1], [2, 1, 3]], dtype=torch.int32)
    return types.SimpleNamespace(
        q=torch.randn(2, 3, heads, 576, generator=random),
        kv=torch.randn(2, 6, page_size, 576, generator=random),
        block_table=table,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        out=torch.full((2, 3, heads, 512), torch.nan),
        lse=torch.full((2, 3, heads), torch.nan),
        lens=lens,
        softmax_scale=576**-0.5,
    )


def test_mla_decode_fits(monkeypatch):
    """It gets the latent cache as pages of one token, and its LSE comes back by head."""

    def behaviour(q, kv_buffer, o, kv_indptr, kv_indices, sm_scale, **rest):
        assert kv_buffer.shape[1:] == (1, 1, 576) and rest["work_meta_data"] is not None
        lse = torch.empty(q.shape[0] * q.shape[1] // 16, 16)
        for b in range(q.shape[0]):
            rows = kv_buffer[kv_indices[kv_indptr[b] : kv_indptr[b + 1]].long(), 0, 0]
            scores = sm_scale * q[b] @ rows.T
            o[b] = scores.softmax(-1) @ rows[:, :512]
            lse.view(q.shape[0], -1)[b] = scores.logsumexp(-1)
        return None, lse

    install(monkeypatch, mla_decode_fwd=behaviour, get_mla_metadata_info_v1=planned)
    x = mla_inputs()
    made = adapters.mla_call(x)
    made.run(1)
    for b, n in enumerate(x.lens):
        rows = x.kv[1][x.block_table[b, : math.ceil(n / 64)].long()].flatten(0, 1)[:n]
        scores = x.softmax_scale * x.q[1, b] @ rows.T
        torch.testing.assert_close(x.out[1, b], scores.softmax(-1) @ rows[:, :512])
        torch.testing.assert_close(made.lse(1)[b], scores.logsumexp(-1))


def test_a_changed_signature_is_noticed(monkeypatch):
    """A parameter that AITER renames or adds without a default breaks the call, as it should."""
    for change in (["context_lens", True, "seq_lens"], ["", True, "new_one"]):
        old, required, new = change
        parameters = [
            [new if name == old else name, must]
            for name, must in SIGNATURES["paged_attention_v1"]["parameters"]
        ]
        parameters = parameters if old else [[new, required], *parameters]
        about = SIGNATURES["paged_attention_v1"] | {"parameters": parameters}
        monkeypatch.setitem(SIGNATURES, "paged_attention_v1", about)
        install(monkeypatch)
        (make,) = adapters.PAGED_V1.calls(inputs()).values()
        with pytest.raises(TypeError, match=new):
            make().run(0)
        monkeypatch.undo()


@pytest.mark.parametrize(
    "peer", [adapters.PAGED_V1, adapters.GATHERED, adapters.PERSISTENT, adapters.MLA]
)
def test_absent_aiter_says_why(monkeypatch, peer):
    """No AMD GPU, no AITER, PyPI's impostor and an AITER without the function are told apart."""
    monkeypatch.setattr(torch.version, "hip", None)
    assert peer.why_absent() == "it needs an AMD GPU"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "aiter", None)
    assert "never pip install aiter" in peer.why_absent()
    monkeypatch.setitem(sys.modules, "aiter", types.ModuleType("aiter"))
    assert "does not import here" in peer.why_absent()
    install(monkeypatch)
    for name in SIGNATURES:
        module = SIGNATURES[name]["file"].removesuffix(".py").replace("/", ".")
        sys.modules[module].__spec__ = types.SimpleNamespace()
    assert peer.why_absent() is None
    for name in SIGNATURES:
        module = SIGNATURES[name]["file"].removesuffix(".py").replace("/", ".")
        delattr(sys.modules[module], name)
    assert "this AITER has no" in peer.why_absent()


def test_signatures_say_where_they_are_from():
    """Each signature names its source, its version or commit, and its file."""
    for about in SIGNATURES.values():
        assert about["source"].startswith(("amd-aiter 0.1.7", "ROCm/aiter"))
        assert about["file"].startswith("aiter/") and about["parameters"]


def test_the_tool_reads_a_source_without_importing_it(tmp_path):
    """The signatures come from parsing the files; what raises on import does no harm."""
    tool = ROOT / "tools" / "aiter_signatures.py"
    copied = tmp_path / "tools" / tool.name
    (tmp_path / "tests").mkdir()
    copied.parent.mkdir()
    copied.write_text(tool.read_text())
    for name, about in SIGNATURES.items():
        file = tmp_path / "source" / about["file"]
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as text:
            text.write(
                f"raise ImportError\ndef {name}(first, second=1, *, third, fourth=None): ...\n"
            )
    command = [sys.executable, copied, tmp_path / "source", "ROCm/aiter abc"]
    subprocess.run(command, check=True, timeout=60)
    found = json.loads((tmp_path / "tests" / "aiter_signatures.json").read_text())
    assert set(found) == set(SIGNATURES)
    expected = [["first", True], ["second", False], ["third", True], ["fourth", False]]
    assert all(about["parameters"] == expected for about in found.values())
    assert subprocess.run([sys.executable, copied], capture_output=True).returncode == 2
