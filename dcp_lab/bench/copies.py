"""Writes into the paged cache and gathers out of it, each beside a plain copy of its bytes.

Variants: `write_kv` of a decode step (one token a request: its last) and of a prefill (all
tokens); `gather_kv` as it is called (a plan and a copy, results allocated), per token and per
page, and per_page_planned, the copy alone on a workspace that was prepared once for all layers.
Beside each that is judged stands `copy`: torch's copy of as many bytes, from memory as cold,
contiguous on both sides. A result has to be the copied numbers, bit for bit, and nothing else of
the cache may change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from dcp_lab.bench import gqa, protocol
from dcp_lab.bench.protocol import Errors, Variant
from dcp_lab.ops.arguments import check_kv_cache
from dcp_lab.ops.gather import GatherWorkspace, gather_kv
from dcp_lab.ops.kv_write import write_kv

WRITES = ("step", "prefill")


@dataclasses.dataclass(frozen=True)
class CopyShape(gqa.DecodeShape):
    """One cell: as of a decode; num_q_heads plays no part."""

    @property
    def name(self) -> str:
        """Return e.g. 'copies 16x2048 16q/1kv d128'."""
        return f"copies {super().name}"


@dataclasses.dataclass
class Copies:
    """Inputs of a cell.

    Attributes:
        pages: The layers' caches, block table and lengths.
        rows: [layers, 2, T, Hkv, D], K and V of all tokens, which the writes put into the cache.
        gathered: By gather, what its last call gave: k and v [T, Hkv, D].
    """

    pages: gqa.Layers
    rows: torch.Tensor
    gathered: dict[str, tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(
        default_factory=dict
    )

    @property
    def shape(self) -> gqa.DecodeShape:
        """Return the cell's shape."""
        return self.pages.shape

    @property
    def layers(self) -> int:
        """Return the number of layers."""
        return self.pages.layers

    @property
    def kv_bytes(self) -> float:
        """Return the K and V bytes of all tokens of a layer."""
        return self.pages.kv_bytes

    @property
    def l2(self) -> str:
        """Return 'cold' if the KV of all layers pushes one another out, else 'warm'."""
        return self.pages.l2

    def columns(self) -> dict[str, object]:
        """Return the columns of a row that name the shape and its dtypes."""
        return self.pages.columns()

    def slots(self, form: str) -> torch.Tensor:
        """Return int64 slots of each request's last token ('step') or of all ('prefill')."""
        page = self.shape.page_size
        found = []
        for table, tokens in zip(self.pages.block_table, self.pages.lens, strict=True):
            first = tokens - 1 if form == "step" else 0
            i = torch.arange(first, tokens, device=table.device)
            found.append(table[i // page].long() * page + i % page)
        return torch.cat(found)


def make_copies(
    shape: CopyShape, *, dtype: torch.dtype = torch.bfloat16, device: str = "cuda"
) -> Copies:
    """Return random inputs.

    Raises:
        ValueError: The shape is fp8: a gather out of it and a write into it convert, and a copy
            does not.
    """
    if shape.fp8:
        raise ValueError(f"shape: expected copies at 16 bits, got {shape.name!r}")
    pages = gqa.make_layers(shape, dtype=dtype, device=device)
    size = (pages.layers, 2, pages.total_tokens, shape.num_kv_heads, shape.head_dim)
    return Copies(pages, torch.randn(size, dtype=dtype, device=device))


def write_variant(x: Copies, form: str) -> Variant:
    """Return write_kv of a 'step' or of a 'prefill'."""
    slots = x.slots(form)
    tokens = slots.numel()

    def call(layer: int) -> None:
        key, value = x.rows[layer][:, :tokens]
        write_kv(key, value, *x.pages.caches(layer), slots)

    return Variant(
        "write_kv",
        form,
        call,
        has_lse=False,
        kv_traffic=2.0 * tokens / x.pages.total_tokens,
        bound=f"copy write_kv {form}",
    )


def gather_variant(x: Copies, name: str) -> Variant:
    """Return gather_kv 'per_token' or 'per_page', or the copy of 'per_page_planned'."""
    pages = x.pages
    total = pages.total_tokens
    gather = name.removesuffix("_planned")

    def call(layer: int) -> None:
        k, v, _ = gather_kv(
            *pages.caches(layer),
            pages.block_table,
            pages.seq_lens,
            total_tokens=total,
            gather=gather,
        )
        x.gathered[name] = k, v

    if name != gather:
        shape = x.shape
        workspace = GatherWorkspace(
            shape.requests,
            total,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            dtype=pages.kv.dtype,
            gather=gather,
            device=pages.kv.device,
        )
        workspace.prepare(pages.seq_lens, max_pages=pages.block_table.shape[1])

        def call(layer: int) -> None:
            k_cache, v_cache = pages.caches(layer)
            cache = check_kv_cache(k_cache, v_cache, kv_layout="NHD", k_scale=None, v_scale=None)
            workspace.copy(cache, pages.block_table)
            x.gathered[name] = workspace.k, workspace.v

    return Variant(
        "gather_kv", name, call, has_lse=False, kv_traffic=2.0, bound="copy gather_kv per_page"
    )


def copy_variant(x: Copies, of: Variant) -> Variant:
    """Return torch's copy of as many bytes as a variant moves, contiguous on both sides."""
    elements = round(x.rows[0].numel() * of.kv_traffic / 2)
    into_cache = of.op == "write_kv"
    # A gather's results are reused from layer to layer, by two in turns.
    spare = x.rows.new_empty(0 if into_cache else 2, elements)

    def call(layer: int) -> None:
        cache = x.pages.kv[layer].view(-1)[:elements]
        if into_cache:
            cache.copy_(x.rows[layer].view(-1)[:elements])
        else:
            spare[layer % 2].copy_(cache)

    return Variant(
        "copy",
        of.key,
        call,
        has_lse=False,
        checked=False,
        kv_traffic=of.kv_traffic,
        bound=f"copy {of.key}",
    )


def check_copies(
    x: Copies, variant: Variant, replay: Callable[[], object] | None = None
) -> Errors:
    """Compare what a variant copied with what it should have, bit for bit.

    Of the first and the last layer; a replay of a gather leaves its last layer's alone. What is to
    be written is NaN before, and so is what was gathered.

    Raises:
        RuntimeError: A number differs.
    """
    if not variant.checked:
        return Errors()
    both = sorted({0, x.layers - 1})
    if variant.op == "gather_kv":
        checks = [_check_gather(x, variant, layer, None) for layer in both if replay is None]
        if replay is not None:
            checks = [_check_gather(x, variant, x.layers - 1, replay)]
    else:
        checks = _check_write(x, variant, both, replay)
    for what, got, wanted in checks:
        if not torch.equal(got, wanted):
            wrong = int((got != wanted).sum())
            how = "eager" if replay is None else "replayed"
            raise RuntimeError(
                f"not timed, since its result is off: {variant.key}, {x.shape.name}, {how}, "
                f"{what}: {wrong} of {got.numel()} numbers differ"
            )
    return Errors(out_error=0.0, error_budget=0.0)


Checks = list[tuple[str, torch.Tensor, torch.Tensor]]


def _check_gather(
    x: Copies, variant: Variant, layer: int, replay: Callable[[], object] | None
) -> tuple[str, torch.Tensor, torch.Tensor]:
    for part in x.gathered.get(variant.variant, ()):
        part.fill_(torch.nan)
    if replay is None:
        variant.call(layer)
    else:
        replay()
    wanted = []
    for table, tokens in zip(x.pages.block_table, x.pages.lens, strict=True):
        # [pages, 2, page, Hkv, D] -> [2, tokens, Hkv, D]
        used = x.pages.kv[layer][table[: -(-tokens // x.shape.page_size)].long()]
        wanted.append(used.transpose(0, 1).flatten(1, 2)[:, :tokens])
    return f"layer {layer}", torch.stack(x.gathered[variant.variant]), torch.cat(wanted, dim=1)


def _check_write(
    x: Copies, variant: Variant, layers: list[int], replay: Callable[[], object] | None
) -> Checks:
    slots = x.slots(variant.variant)
    page, place = slots // x.shape.page_size, slots % x.shape.page_size
    checks = []
    for layer in layers:
        cache = x.pages.kv[layer]
        wanted = cache.clone()
        wanted[page, :, place] = x.rows[layer][:, : slots.numel()].transpose(0, 1)
        cache[page, :, place] = torch.nan
        checks.append((f"layer {layer}", cache, wanted))
    if replay is not None:
        replay()
    else:
        for layer in layers:
            variant.call(layer)
    return checks


def variants_of(x: Copies) -> list[Variant]:
    """Return the writes, the gathers and the copies that they are held against."""
    writes = [write_variant(x, form) for form in WRITES]
    names = ("per_page", "per_page_planned", "per_token")
    gathers = [gather_variant(x, name) for name in names]
    copies = [copy_variant(x, of) for of in (*writes, gathers[0])]
    return [*writes, *gathers, *copies]


def measure_copies(shape: CopyShape, *, samples: int = 25) -> list[dict[str, object]]:
    """Check and time every variant of one shape; return one row a variant and mode.

    Args:
        shape: What to copy.
        samples: Graph replays of each variant.

    Raises:
        RuntimeError: A variant's result is off; nothing was timed.
        ValueError: The shape is fp8.
    """
    x = make_copies(shape)
    return protocol.measure(x, variants_of(x), samples=samples, check=check_copies)


def parse_copies(text: str) -> CopyShape:
    """Return the shape of what parse_shape of a decode takes, at 16 bits.

    Raises:
        ValueError: It is none.
    """
    shape = gqa.parse_shape(text)
    if shape.fp8:
        raise ValueError(f"shape: expected copies at 16 bits, got 'copies:{text}'")
    return CopyShape(**dataclasses.asdict(shape))
