"""The adapters' calls for fp8 and MLA, against stand-ins with the arguments that the peers take.

The stand-ins compute with plain torch what the peers are documented to; the arguments are those of
calls that ran on an H200 with vLLM 0.25.1 and FlashInfer 0.6.13. It says that every tensor arrives
where it belongs, not that the peers are right: the bench compares them before it times them.
"""

from __future__ import annotations

import sys
import types

import pytest
import torch

from dcp_lab.bench import gqa, mla, protocol
from dcp_lab.peers import fa3, flashinfer, flashmla, vllm_triton
from dcp_lab.reference import eager_decode, eager_mla_decode

FP8 = gqa.DecodeShape(3, 130, num_q_heads=4, num_kv_heads=2, head_dim=32, fp8=True)
MLA = mla.MlaShape(3, 150, 4, lengths="uneven")
BF16 = torch.bfloat16


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    """Put a stand-in for a module in place, its parents with it."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        parent = ".".join(parts[:i])
        if parent not in sys.modules or i == len(parts):
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    for member, value in members.items():
        setattr(sys.modules[name], member, value)


def attend(q, k, v, block_table, seq_lens, scale):
    """Return plain torch's state in bf16; of fp8 queries with fp8 weights."""
    if q.dtype == BF16:
        return eager_decode(q, k, v, block_table, seq_lens, softmax_scale=scale)
    states = [
        gqa.eager_fp8_weights(
            q[b : b + 1].to(BF16), k, v, block_table[b : b + 1], seq_lens[b : b + 1]
        )
        for b in range(len(q))
    ]
    return types.SimpleNamespace(
        out=torch.cat([s.out for s in states]), lse=torch.cat([s.lse for s in states])
    )


@pytest.fixture
def peers(monkeypatch):
    """Stand-ins for what vLLM's wheel and FlashInfer bring; what they were planned with."""
    planned: dict[str, dict] = {}

    def flash_attn_varlen_func(
        q,
        k,
        v,
        *,
        max_seqlen_q,
        cu_seqlens_q,
        max_seqlen_k,
        seqused_k,
        block_table,
        softmax_scale,
        causal,
        out,
        scheduler_metadata,
        num_splits,
        fa_version,
        return_softmax_lse,
        q_v=None,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    ):
        assert (max_seqlen_q, fa_version, return_softmax_lse) == (1, 3, True)
        assert max_seqlen_k == int(seqused_k.max()) and cu_seqlens_q.tolist() == [0, 1, 2, 3]
        if q_v is not None:
            q, k = torch.cat([q_v, q], -1), torch.cat([v, k], -1)
        for scale in (q_descale, k_descale, v_descale):
            assert (scale is None) == (q.dtype == BF16)
            assert scale is None or scale.shape == (len(q), k.shape[2])
        state = attend(q, k, v, block_table, seqused_k, softmax_scale)
        out.copy_(state.out)
        return out, state.lse.T

    def get_scheduler_metadata(**given):
        planned["fa3"] = given
        return "plan"

    def decode_attention_fwd(
        q,
        k_buffer,
        v_buffer,
        o,
        lse,
        req_to_token,
        b_seq_len,
        attn_logits,
        num_kv_splits,
        sm_scale,
        page_size,
        k_scale,
        v_scale,
        is_mla=False,
    ):
        assert k_buffer.shape[1] == page_size and k_scale.item() == v_scale.item() == 1
        assert attn_logits.shape == (*q.shape[:2], num_kv_splits, v_buffer.shape[-1] + 1)
        assert is_mla == (k_buffer.shape[-1] != v_buffer.shape[-1])
        state = attend(q, k_buffer, v_buffer, req_to_token, b_seq_len, sm_scale)
        o.copy_(state.out)
        lse.copy_(state.lse)

    def unified_attention(
        *, q, k, v, out, seqused_k, softmax_scale, block_table, q_descale, kv_quant_mode, **rest
    ):
        assert kv_quant_mode == "fp8 per tensor" and rest["k_descale"].shape == (3, 2)
        assert (q_descale is None) == (q.dtype == BF16)
        out.copy_(attend(q, k, v, block_table, seqused_k, softmax_scale).out)

    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, plan, *, softmax_scale, causal, out
    ):
        assert q.shape[1] == 1 and k_cache.shape[1:3] == (64, 1) and plan == "plan" and causal
        state = eager_mla_decode(
            q[:, 0], k_cache[:, :, 0], block_table, cache_seqlens, softmax_scale=softmax_scale
        )
        out[:, 0] = state.out
        return out, state.lse[:, :, None]

    class Wrapper:
        """FlashInfer's MLA: request by request through kv_indices."""

        def __init__(self, workspace, *, use_cuda_graph, backend, kv_indptr, **buffers):
            assert use_cuda_graph and backend == "fa3" and workspace.dtype == torch.uint8
            assert set(buffers) == {"qo_indptr", "kv_indices", "kv_len_arr"}

        def plan(
            self,
            qo_indptr,
            kv_indptr,
            kv_indices,
            kv_len_arr,
            num_heads,
            head_dim_ckv,
            head_dim_kpe,
            page_size,
            causal,
            sm_scale,
            q_data_type,
            kv_data_type,
        ):
            assert (num_heads, head_dim_ckv, head_dim_kpe, page_size) == (4, 512, 64, 64)
            assert not causal and q_data_type == kv_data_type == BF16
            self.plan_of = kv_indptr.tolist(), kv_indices, kv_len_arr, sm_scale

        def run(self, q, q_pe, ckv, kpe, *, out, lse, return_lse, return_lse_base_on_e):
            assert return_lse and return_lse_base_on_e
            starts, ids, lens, scale = self.plan_of
            for b in range(len(q)):
                rows = torch.cat([q, q_pe], -1)[b : b + 1]
                table = ids[starts[b] : starts[b + 1]][None]
                state = eager_mla_decode(
                    rows,
                    torch.cat([ckv, kpe], -1),
                    table,
                    lens[b : b + 1],
                    softmax_scale=scale,
                )
                out[b], lse[b] = state.out[0], state.lse[0]

    interface = {"flash_attn_varlen_func": flash_attn_varlen_func}
    interface["get_scheduler_metadata"] = get_scheduler_metadata
    module(monkeypatch, "vllm.vllm_flash_attn.flash_attn_interface", **interface)
    ops = "vllm.v1.attention.ops"
    decode = {"decode_attention_fwd": decode_attention_fwd}
    module(monkeypatch, f"{ops}.triton_decode_attention", **decode)
    module(monkeypatch, f"{ops}.triton_unified_attention", unified_attention=unified_attention)
    mode = types.SimpleNamespace(FP8_PER_TENSOR="fp8 per tensor")
    module(monkeypatch, "vllm.v1.kv_cache_interface", KVQuantMode=mode)
    module(
        monkeypatch,
        "vllm.third_party.flashmla.flash_mla_interface",
        flash_mla_with_kvcache=flash_mla_with_kvcache,
        get_mla_metadata=lambda: ("plan", None),
    )
    module(monkeypatch, "flashinfer.mla", BatchMLAPagedAttentionWrapper=Wrapper)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 64)
    facts = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    return planned


def checked(x: protocol.Inputs, peer, names: set[str]) -> None:
    """Check every call of a peer; compare their names."""
    calls = peer.calls(x)
    assert set(calls) == names
    for name, make in calls.items():
        variant = protocol.peer_variant(peer.name, name, make())
        errors = protocol.check_variant(x, variant)
        assert errors.out_error <= errors.error_budget and variant.peer


def layers_of(shape, make) -> protocol.Inputs:
    """Return two layers of bf16 inputs."""
    return make.make_layers(shape, dtype=BF16, device="cpu")


def test_fp8_caches_fit(peers):
    """FA3 attends fp8 queries with a scale a request and KV head; vLLM's Triton either kind."""
    x = layers_of(FP8, gqa)
    splits = {f"{n} splits" for n in (1, 4, 16)}
    checked(x, fa3.PEER, {"auto", "metadata", "metadata max 32 splits"} | splits)
    assert peers["fa3"]["qkv_dtype"] == x.kv.dtype and peers["fa3"]["headdim"] == 32
    checked(x, vllm_triton.UNIFIED, {"auto", "fp8 queries"})
    checked(x, vllm_triton.DECODE, {"1 splits", "2 splits"})
    assert flashinfer.PEER.calls(x) == {}


def test_mla_fits(peers):
    """Each MLA peer gets the latent and the rotary part where it takes them."""
    x = layers_of(MLA, mla)
    checked(x, fa3.MLA, {"auto", "metadata", "metadata max 32 splits"})
    plan = peers["fa3"]
    assert (plan["headdim"], plan["headdim_v"], plan["page_size"]) == (64, 512, 64)
    checked(x, flashmla.PEER, {"auto"})
    checked(x, flashinfer.MLA, {"fa3"})
    checked(x, vllm_triton.MLA, {"1 splits", "2 splits"})


def test_an_fp8_latent_cache_is_asked_of_vllms_triton_alone(peers):
    """The peers whose MLA knows 16 bits alone have no call for it."""
    x = layers_of(mla.MlaShape(3, 64, 4, fp8=True), mla)
    for peer in (fa3.MLA, flashmla.PEER, flashinfer.MLA):
        assert peer.calls(x) == {}
    checked(x, vllm_triton.MLA, {"1 splits"})


def test_a_peer_that_is_called_wrongly_is_refused(peers):
    """The check sees parts of a query that change places, and a logarithm of base 2."""
    x = layers_of(MLA, mla)
    made = flashinfer.MLA.calls(x)["fa3"]()
    base_two = protocol.Variant("p", "v", made.run, lse=lambda i: made.lse(i) * 1.442695)
    queries = x.q.clone()

    def swapped(layer: int) -> None:
        x.q.copy_(queries.roll(64, -1))
        made.run(layer)
        x.q.copy_(queries)

    for wrong in (base_two, protocol.Variant("p", "v", swapped, lse=made.lse)):
        with pytest.raises(RuntimeError, match="not timed"):
            protocol.check_variant(x, wrong)
