"""vLLM's three classes: the backend that is selected, the builder of a step, a layer's attention.

vLLM is imported inside `classes` only, so that this module loads, and is checked, without it.
"""

from __future__ import annotations

import functools
import types
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from dcp_lab.sharding import Shard
from dcp_lab.vllm_plugin import versions
from dcp_lab.vllm_plugin.attention import (
    Exchange,
    LayerShape,
    Limits,
    Planner,
    Step,
    attend,
    scratch_lse,
    scratch_pair,
)
from dcp_lab.vllm_plugin.options import Options, read_options
from dcp_lab.vllm_plugin.reasons import configuration_reasons, explain

if TYPE_CHECKING:
    DcpLabBackend: type

# (coordinator of the DCP group) -> (reducer, shape, max_tokens) -> Exchange
_EXCHANGES: weakref.WeakKeyDictionary[Any, dict[tuple, Exchange]] = weakref.WeakKeyDictionary()

KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3")


def __getattr__(name: str) -> type:
    """Give DcpLabBackend, made when vLLM first asks for it."""
    if name == "DcpLabBackend":
        return classes().backend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def exchange_of(
    reducer: str, shape: LayerShape, max_tokens: int, device: torch.device
) -> Exchange | None:
    """Return the exchange that all layers of this shape share, None without DCP."""
    coordinator = versions.dcp_group()
    if coordinator.world_size == 1:
        return None
    made = _EXCHANGES.setdefault(coordinator, {})
    # A window changes no byte that is exchanged.
    key = (reducer, shape.num_q_heads, shape.head_dim, shape.q_dtype, max_tokens)
    if key not in made:
        # vLLM builds models under a default device and dtype of its own.
        with torch.device("cpu"):
            made[key] = Exchange(coordinator.device_group, reducer, shape, max_tokens, device)
    return made[key]


def max_step_tokens(vllm_config: Any) -> int:
    """Return the most query tokens that a step may have, padding to graph sizes included."""
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes or [0]
    return max(vllm_config.scheduler_config.max_num_batched_tokens, *sizes)


def options_of(vllm_config: Any) -> Options:
    """Return the options of a VllmConfig and the environment."""
    return read_options(getattr(vllm_config, "additional_config", None))


def torch_dtype_of_cache(kv_cache_dtype: str, q_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the cache's elements for vLLM's name of it."""
    if kv_cache_dtype.startswith("fp8"):
        from vllm.platforms import current_platform

        return current_platform.fp8_dtype()
    return q_dtype if kv_cache_dtype == "auto" else getattr(torch, kv_cache_dtype)


@functools.cache
def classes() -> types.SimpleNamespace:
    """Return the classes `backend`, `builder` and `impl`, of which vLLM's own are the bases."""
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionCGSupport,
        AttentionImpl,
        AttentionMetadataBuilder,
        AttentionType,
        MultipleOf,
    )

    class DcpLabBackend(AttentionBackend):
        """Paged decode that returns its LSE, one exchange a layer: DCP for GQA, MQA and MHA."""

        supported_dtypes: ClassVar[list] = [torch.float16, torch.bfloat16, torch.float32]
        supported_kv_cache_dtypes: ClassVar[list] = list(KV_CACHE_DTYPES)
        # The cache is written by do_kv_cache_update, an operation of its own before forward.
        forward_includes_kv_cache_update: bool = False
        accept_output_buffer: bool = True

        @staticmethod
        def get_name() -> str:
            # A layer looks its backend's name up in an enumeration that has no other place for us.
            return "CUSTOM"

        @staticmethod
        def get_impl_cls() -> type:
            return DcpLabImpl

        @staticmethod
        def get_builder_cls() -> type:
            return DcpLabBuilder

        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list:
            return [MultipleOf(16)]

        @classmethod
        def supports_block_size(cls, block_size: int | None) -> bool:
            return block_size is None or block_size % 16 == 0

        @staticmethod
        def get_kv_cache_shape(
            num_blocks: int,
            block_size: int,
            num_kv_heads: int,
            head_size: int,
            cache_dtype_str: str = "auto",
        ) -> tuple[int, ...]:
            return versions.kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)

        @classmethod
        def supports_head_size(cls, head_size: int) -> bool:
            return head_size % 16 == 0 and 16 <= head_size <= 256

        @classmethod
        def supports_sink(cls) -> bool:
            return True

        @classmethod
        def supports_sliding_window(cls) -> bool:
            return True

        @classmethod
        def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
            """Return why this configuration cannot run, each with what to do; [] when it can."""
            reasons = [
                explain(reason, kwargs)
                for reason in super().validate_configuration(*args, **kwargs)
            ]
            return reasons + configuration_reasons(versions.current_config())

    class DcpLabBuilder(AttentionMetadataBuilder):
        """Makes a step's plan, once for all layers of a KV cache group."""

        # Decodes of one length may be captured as one graph, with drafts or without.
        _cudagraph_support: ClassVar = AttentionCGSupport.UNIFORM_BATCH

        def __init__(
            self,
            kv_cache_spec: Any,
            layer_names: list[str],
            vllm_config: Any,
            device: torch.device,
        ) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            self._init_reorder_batch_threshold(
                1, supports_spec_as_decode=True, supports_dcp_with_varlen=True
            )
            self._impls = [layer.impl for layer in versions.layers_of(vllm_config, layer_names)]
            scheduler = vllm_config.scheduler_config
            self._speculative = vllm_config.speculative_config is not None
            self._planner = Planner(
                [impl.shape_for(vllm_config.model_config.dtype) for impl in self._impls],
                Limits(
                    max_requests=max(
                        scheduler.max_num_seqs,
                        *(vllm_config.compilation_config.cudagraph_capture_sizes or [0]),
                    ),
                    max_tokens=max_step_tokens(vllm_config),
                    decode_query_len=self.reorder_batch_threshold,
                    max_seq_len=vllm_config.model_config.max_model_len,
                    max_cache_tokens=versions.cache_tokens(vllm_config),
                    page_size=kv_cache_spec.block_size,
                ),
                self._impls[0].shard,
                device,
                gather=options_of(vllm_config).gather_form,
                flash=all(impl.flash is not None for impl in self._impls),
            )

        @classmethod
        def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
            """Return which steps may be captured: decodes, but for a gather that waits."""
            if options_of(vllm_config).gather_form == "published":
                return AttentionCGSupport.NEVER
            return cls._cudagraph_support

        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
        ) -> Step:
            common = common_attn_metadata
            if common.causal is not True:
                raise NotImplementedError(
                    "causal: only causal attention is supported; use another --attention-backend"
                )
            exchange = self._impls[0].exchange
            if exchange is not None:
                exchange.check()
            num_decodes, num_decode_tokens = versions.decode_split(
                common, self.reorder_batch_threshold
            )
            return self._planner.plan(
                num_tokens=common.num_actual_tokens,
                num_decodes=num_decodes,
                num_decode_tokens=num_decode_tokens,
                max_query_len=common.max_query_len,
                query_start_loc=common.query_start_loc,
                seq_lens=common.seq_lens,
                # With drafts vLLM's own count takes all of them for accepted.
                local_seq_lens=None if self._speculative else common.dcp_local_seq_lens,
                block_table=common.block_table_tensor,
                max_seq_len=common.max_seq_len,
                prefill_context=versions.prefill_context(common, num_decodes),
            )

    class DcpLabImpl(AttentionImpl):
        """One layer's attention."""

        can_return_lse_for_decode: bool = True
        supports_dcp: bool = True
        supports_mtp_with_cp_non_trivial_interleave_size: bool = True

        def __init__(
            self,
            num_heads: int,
            head_size: int,
            scale: float,
            num_kv_heads: int | None = None,
            alibi_slopes: list[float] | None = None,
            sliding_window: int | None = None,
            kv_cache_dtype: str = "auto",
            logits_soft_cap: float | None = None,
            attn_type: str = AttentionType.DECODER,
            kv_sharing_target_layer_name: str | None = None,
            sinks: torch.Tensor | None = None,
            **others: Any,
        ) -> None:
            given = {name: value for name, value in others.items() if value}
            if alibi_slopes is not None:
                given["alibi_slopes"] = alibi_slopes
            if attn_type != AttentionType.DECODER:
                given["attn_type"] = attn_type
            if given:
                raise NotImplementedError(
                    f"{', '.join(sorted(given))}: not supported by dcp_lab's attention; "
                    "leave --attention-backend CUSTOM away"
                )
            self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
            self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
            self.sliding_window = sliding_window
            self.kv_cache_dtype = kv_cache_dtype
            self.softcap = logits_soft_cap or None
            self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
            self.sinks = sinks
            config = versions.current_config()
            options = options_of(config)
            parallel = config.parallel_config
            self.reducer = options.reducer_name(parallel.dcp_comm_backend)
            self.shard = Shard(
                self.dcp_rank, self.dcp_world_size, parallel.cp_kv_cache_interleave_size
            )
            self.max_tokens = max_step_tokens(config)
            self.flash = self._flash_attention(options.prefill, config.model_config.dtype)
            if options.gather_form == "published" and kv_sharing_target_layer_name is not None:
                raise NotImplementedError(
                    "gather=published: a layer that reads another one's cache has no keys of its "
                    "own to attend apart; use gather=per_token or per_page"
                )
            # Who attends the context and the step's own tokens apart needs room for both.
            self.apart = options.gather_form == "published" or (
                self.flash is not None and self.shard.size > 1
            )
            self.shape: LayerShape | None = None
            self.exchange: Exchange | None = None

        def _flash_attention(self, prefill: str, q_dtype: torch.dtype) -> Any | None:
            """Return what attends this layer's prefills if that is FlashAttention, else None."""
            if prefill == "paged":
                return None
            shape = self.shape_for(q_dtype)
            reason = versions.why_no_flash(
                head_dim=shape.head_dim,
                q_dtype=shape.q_dtype,
                kv_dtype=shape.kv_dtype,
                sliding_window=shape.sliding_window,
                sinks=self.sinks is not None,
                shares_cache=self.kv_sharing_target_layer_name is not None,
                dcp_size=self.shard.size,
            )
            function = versions.flash_attention_3() if reason is None else None
            if function is not None:
                return versions.flash_attention(function)
            if prefill == "flash":
                raise ValueError(
                    "prefill=flash: FlashAttention 3 cannot attend this model's prefills: "
                    f"{reason or 'this vLLM has none for this device'}; use prefill=auto or paged"
                )
            return None

        def shape_for(self, q_dtype: torch.dtype) -> LayerShape:
            return LayerShape(
                num_q_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_size,
                sliding_window=self.sliding_window,
                q_dtype=q_dtype,
                kv_dtype=torch_dtype_of_cache(self.kv_cache_dtype, q_dtype),
            )

        def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
            """Make what is shared with other layers, before memory is measured."""
            device = versions.model_device()
            self.shape = self.shape_for(act_dtype)
            if self.shard.size > 1:
                self.exchange = exchange_of(self.reducer, self.shape, self.max_tokens, device)
            self.lse = scratch_lse(self.max_tokens, self.num_heads, device)
            self.pair = None
            if self.apart:
                sizes = (self.max_tokens, self.num_heads, self.head_size)
                self.pair = scratch_pair(*sizes, act_dtype, device)
            if self.sinks is not None:
                sinks = self.sinks.detach().to(torch.float32)
                if self.shard.size > 1:
                    sinks = versions.dcp_group().all_gather(sinks.contiguous(), dim=0)
                self.all_sinks = sinks
            else:
                self.all_sinks = None

        def do_kv_cache_update(
            self,
            layer: torch.nn.Module,
            key: torch.Tensor,
            value: torch.Tensor,
            kv_cache: torch.Tensor,
            slot_mapping: torch.Tensor,
        ) -> None:
            """Write the new tokens; another rank's and padding have slot -1 and are skipped."""
            from dcp_lab.ops.kv_write import write_kv

            k_cache, v_cache = self._caches(kv_cache)
            rows = min(len(key), len(slot_mapping))
            k_scale, v_scale = self._scales(layer)
            write_kv(
                key[:rows],
                value[:rows],
                k_cache,
                v_cache,
                slot_mapping[:rows],
                k_scale=k_scale,
                v_scale=v_scale,
            )

        def forward(
            self,
            layer: torch.nn.Module,
            query: torch.Tensor,
            key: torch.Tensor | None,
            value: torch.Tensor | None,
            kv_cache: torch.Tensor,
            attn_metadata: Step | None,
            output: torch.Tensor,
            output_scale: torch.Tensor | None = None,
            output_block_scale: torch.Tensor | None = None,
        ) -> torch.Tensor:
            """Attend to the cache, which holds this step's tokens, and write output."""
            if output_scale is not None or output_block_scale is not None:
                raise NotImplementedError(
                    "output_scale: fused output quantisation is not supported; turn the fusion "
                    "off: -cc.pass_config.fuse_attn_quant=False"
                )
            if attn_metadata is None:
                # Profiling: there is no cache yet.
                return output.fill_(0)
            k_cache, v_cache = self._caches(kv_cache)
            k_scale, v_scale = self._scales(layer)
            attend(
                query,
                k_cache,
                v_cache,
                attn_metadata,
                output.view(query.shape),
                lse=self.lse,
                shape=self.shape,
                shard=self.shard,
                exchange=self.exchange,
                softmax_scale=self.scale,
                softcap=self.softcap,
                sinks=self.all_sinks,
                k_scale=k_scale,
                v_scale=v_scale,
                key=key,
                value=value,
                pair=self.pair,
                flash=self.flash,
            )
            return output

        def _caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return versions.split_kv_cache(kv_cache, self.head_size, self.shape.kv_dtype)

        def _scales(self, layer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
            if not self.kv_cache_dtype.startswith("fp8"):
                return None, None
            return layer._k_scale, layer._v_scale

    for made in (DcpLabBackend, DcpLabBuilder, DcpLabImpl):
        made.__qualname__ = made.__name__
    return types.SimpleNamespace(backend=DcpLabBackend, builder=DcpLabBuilder, impl=DcpLabImpl)
