"""What tests, benchmarks and notebooks share: paged cases full of traps, and the error budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from dcp_lab.sharding import Shard
from dcp_lab.state import AttnState

# What a block-table entry past the pages in use may hold.
_GARBAGE = (2**31 - 1, -(2**31), -1, 1_000_000)


@dataclasses.dataclass(frozen=True)
class PagedCase:
    """Requests with random K and V in a paged cache that punishes every wrong read.

    Physical pages are shuffled. Every cache slot that holds no token is NaN, in pages in use and
    in spare ones; every block-table entry past the pages in use is garbage (huge, negative);
    query rows of no request are NaN. The numbers depend on the seed, the lengths and the head
    sizes only: cases that differ in page size, layout or shard hold the same tokens.

    Attributes:
        q: [T, Hq, D].
        k_cache: NHD [P, page, Hkv, D], HND or SHUFFLE (dcp_lab.reference has the shapes).
        v_cache: The same with Dv.
        block_table: int32 [B, max_pages].
        seq_lens: int32 [B], tokens in this cache.
        kv_layout: "NHD", "HND" or "SHUFFLE".
        page_size: Tokens a page.
        query_start_loc: int32 [B+1], or None for one token a request.
        max_query_len: Largest number of query tokens of a request, at least 1.
        shard: Which tokens this cache holds, or None for all.
        global_seq_lens: int32 [B], tokens of each whole request.
        keys: Per request [G, Hkv, D], the whole request's keys, sharded or not.
        values: Per request [G, Hkv, Dv].
        positions: Per request int64 [seq_len], global positions of the tokens in this cache.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    kv_layout: str
    page_size: int
    query_start_loc: torch.Tensor | None
    max_query_len: int
    shard: Shard | None
    global_seq_lens: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    positions: list[torch.Tensor]
    _recipe: dict[str, Any] = dataclasses.field(repr=False)

    @classmethod
    def build(
        cls,
        lens: Sequence[int],
        *,
        num_q_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 32,
        head_dim_v: int | None = None,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        kv_layout: str = "NHD",
        query_lens: Sequence[int] | None = None,
        padding_rows: int = 0,
        shard: Shard | None = None,
        fused: str | None = None,
        spare_pages: int = 3,
        spare_columns: int = 2,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> PagedCase:
        """Build a case.

        Args:
            lens: Tokens of each whole request, those being decoded included.
            num_q_heads: Hq.
            num_kv_heads: Hkv.
            head_dim: D.
            head_dim_v: Dv. Default: head_dim.
            page_size: Tokens a page.
            dtype: Of q.
            kv_dtype: Of the caches, fp8 too; keys and values stay dtype. Default: dtype.
            kv_layout: "NHD", "HND" or "SHUFFLE".
            query_lens: Query tokens of each request, 0 allowed. Default: one a request, and no
                query_start_loc.
            padding_rows: Rows of q behind the last request's; needs query_lens.
            shard: Keep this rank's tokens only. Default: all.
            fused: "pages": K and V are views of one tensor whose pages hold K, then V; "dims":
                views of one whose last dimension is D + Dv. Default: two tensors.
            spare_pages: Physical pages that no request owns.
            spare_columns: Columns of block_table behind those of the longest request.
            device: Where the tensors live.
            seed: Of everything random.

        Raises:
            ValueError: padding_rows without query_lens, or an unknown fused or kv_layout.
        """
        recipe = {name: value for name, value in locals().items() if name not in ("cls", "lens")}
        if padding_rows and query_lens is None:
            raise ValueError(f"query_lens: expected with padding_rows={padding_rows}, got None")
        if kv_layout not in ("NHD", "HND", "SHUFFLE"):
            raise ValueError(f"kv_layout: expected 'NHD', 'HND' or 'SHUFFLE', got {kv_layout!r}")
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        random = torch.Generator().manual_seed(seed)

        # The whole requests come first, so that shard, pages and layout leave them as they are.
        queries = [1] * len(lens) if query_lens is None else list(query_lens)
        q = torch.randn(sum(queries), num_q_heads, head_dim, generator=random)
        stored = dtype if kv_dtype is None else kv_dtype
        keys, values = (
            [
                torch.randn(n, num_kv_heads, dim, generator=random).to(stored).to(dtype)
                for n in lens
            ]
            for dim in (head_dim, head_dim_v)
        )
        q = torch.cat([q, torch.full((padding_rows, num_q_heads, head_dim), torch.nan)]).to(dtype)

        rank = Shard(0, 1) if shard is None else shard
        positions = [torch.arange(n) for n in lens]
        positions = [p[(p // rank.interleave_size) % rank.size == rank.rank] for p in positions]
        pages_used = [-(-len(p) // page_size) for p in positions]
        num_pages = sum(pages_used) + spare_pages
        order = torch.randperm(num_pages, generator=random)
        max_pages = max(pages_used, default=0) + spare_columns
        garbage = torch.tensor(_GARBAGE, dtype=torch.int32)
        block_table = garbage[torch.arange(len(lens) * max_pages) % len(garbage)]
        block_table = block_table.reshape(len(lens), max_pages)
        k_cache = torch.full((num_pages, page_size, num_kv_heads, head_dim), torch.nan).to(dtype)
        v_cache = torch.full((num_pages, page_size, num_kv_heads, head_dim_v), torch.nan).to(dtype)
        taken = 0
        for b, held in enumerate(positions):
            pages = order[taken : taken + pages_used[b]]
            taken += pages_used[b]
            block_table[b, : len(pages)] = pages.int()
            i = torch.arange(len(held))
            k_cache[pages[i // page_size], i % page_size] = keys[b][held]
            v_cache[pages[i // page_size], i % page_size] = values[b][held]

        k_cache, v_cache = _to_layout(k_cache.to(stored), v_cache.to(stored), kv_layout)
        k_cache, v_cache = _fuse(k_cache.to(device), v_cache.to(device), fused)
        query_start_loc = None
        if query_lens is not None:
            ends = torch.tensor([0, *queries]).cumsum(0)
            query_start_loc = ends.to(device=device, dtype=torch.int32)
        seq_lens = torch.tensor([len(p) for p in positions], dtype=torch.int32, device=device)
        return cls(
            q=q.to(device),
            k_cache=k_cache,
            v_cache=v_cache,
            block_table=block_table.to(device),
            seq_lens=seq_lens,
            kv_layout=kv_layout,
            page_size=page_size,
            query_start_loc=query_start_loc,
            max_query_len=max(queries, default=1) or 1,
            shard=shard,
            global_seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
            keys=[k.to(device) for k in keys],
            values=[v.to(device) for v in values],
            positions=[p.to(device) for p in positions],
            _recipe=recipe,
        )

    def on_rank(self, shard: Shard) -> PagedCase:
        """Return the same requests as one rank of a group holds them."""
        return PagedCase.build(self.global_seq_lens.tolist(), **{**self._recipe, "shard": shard})

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Positional arguments of a decode: q, k_cache, v_cache, block_table, seq_lens."""
        return self.q, self.k_cache, self.v_cache, self.block_table, self.seq_lens

    def reference_options(self) -> dict[str, Any]:
        """Keyword arguments of reference_decode and eager_decode that describe the case."""
        options: dict[str, Any] = {"kv_layout": self.kv_layout}
        if self.query_start_loc is not None:
            options["query_start_loc"] = self.query_start_loc
        if self.shard is not None:
            options.update(shard=self.shard, global_seq_lens=self.global_seq_lens)
        return options

    def options(self) -> dict[str, Any]:
        """Keyword arguments of paged_decode and gather_decode that describe the case."""
        return {**self.reference_options(), "max_query_len": self.max_query_len}

    def slot_mapping(self) -> torch.Tensor:
        """Return int64 [sum of seq_lens], the slot of every token, request by request."""
        slots = [torch.zeros(0, dtype=torch.int64, device=self.q.device)]
        for b, held in enumerate(self.positions):
            i = torch.arange(len(held), device=held.device)
            pages = self.block_table[b, i // self.page_size].long()
            slots.append(pages * self.page_size + i % self.page_size)
        return torch.cat(slots)


def _to_layout(
    k_cache: torch.Tensor, v_cache: torch.Tensor, kv_layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return contiguous copies of NHD caches in another layout."""
    if kv_layout == "NHD":
        return k_cache, v_cache
    if kv_layout == "HND":
        return k_cache.transpose(1, 2).contiguous(), v_cache.transpose(1, 2).contiguous()
    x = 16 // k_cache.element_size()
    # K [P, page, Hkv, D/x, x] -> [P, Hkv, D/x, page, x]
    # V [P, page/x, x, Hkv, Dv] -> [P, Hkv, page/x, Dv, x]
    k_cache = k_cache.unflatten(3, (-1, x)).permute(0, 2, 3, 1, 4)
    v_cache = v_cache.unflatten(1, (-1, x)).permute(0, 3, 1, 4, 2)
    return k_cache.contiguous(), v_cache.contiguous()


def _fuse(
    k_cache: torch.Tensor, v_cache: torch.Tensor, fused: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the caches as strided views of one tensor."""
    if fused is None:
        return k_cache, v_cache
    if fused == "pages":
        both = torch.cat([k_cache.flatten(1), v_cache.flatten(1)], dim=1)
        k_part, v_part = both.split([k_cache[0].numel(), v_cache[0].numel()], dim=1)
        return k_part.unflatten(1, k_cache.shape[1:]), v_part.unflatten(1, v_cache.shape[1:])
    if fused == "dims":
        both = torch.cat([k_cache, v_cache], dim=-1)
        return both[..., : k_cache.shape[-1]], both[..., k_cache.shape[-1] :]
    raise ValueError(f"fused: expected 'pages', 'dims' or None, got {fused!r}")


def error_and_budget(
    got: torch.Tensor,
    reference: torch.Tensor,
    eager: torch.Tensor,
    *,
    eps: float | None = None,
    least_scale: float = 0.0,
) -> tuple[float, float]:
    """Return the largest error of a result, and what it may be: the lab's one error budget.

    error = max |got - reference|,  budget = 2 (max |eager - reference| + eps max |reference|)

    Elements where the reference is infinite are left out.

    Args:
        got: What is tested.
        reference: The float64 oracle's result.
        eager: The same in got's dtype by plain torch.
        eps: One rounding step. Default: that of got's dtype.
        least_scale: What max |reference| counts as at least; 1 for an LSE, whose error is a
            relative error of the weight exp(lse), however near 0 it is. Default: 0.
    """
    eps = torch.finfo(got.dtype).eps if eps is None else eps
    error, eager_error, scale = _errors(got, reference, eager, least_scale)
    return error.max().item(), 2 * (eager_error + eps * scale)


def _errors(
    got: torch.Tensor, reference: torch.Tensor, eager: torch.Tensor, least_scale: float
) -> tuple[torch.Tensor, float, float]:
    """Return |got - reference|, the largest |eager - reference|, and the scale of a step."""
    got, reference, eager = got.double(), reference.double(), eager.double()
    infinite = reference.isinf()
    zero = torch.zeros((), dtype=torch.float64, device=reference.device)
    error = torch.where(infinite, zero, got - reference).abs()
    eager_error = torch.where(infinite, zero, eager - reference).abs().max().item()
    scale = torch.where(infinite, zero, reference).abs().max().item()
    return error, eager_error, max(least_scale, scale)


def assert_within_budget(
    name: str,
    got: torch.Tensor | AttnState,
    reference: torch.Tensor | AttnState,
    eager: torch.Tensor | AttnState,
) -> None:
    """Assert that a result is as right as plain torch in the same dtype, within a factor of two.

    err(got) <= 2 (err(eager) + eps(got.dtype) max |reference|),  err(x) = max |x - reference|

    (error_and_budget gives the two sides as numbers.)

    Infinities have to stand exactly where the reference has them, and NaN nowhere. An AttnState is
    checked part by part. Its out at 16 bits is also checked with each row divided by its largest
    value, so that short requests, with values of order 1, do not hide errors in the small values
    of long ones. For its lse max |reference| counts as 1 at least: an error in lse is a relative
    error of the weight exp(lse), however near 0 lse is.

    Args:
        name: Opens the message of a failure.
        got: What is tested.
        reference: The float64 oracle's result.
        eager: The same in got's dtype by plain torch.

    Raises:
        AssertionError: It is not.
    """
    if isinstance(got, AttnState):
        _assert_budget(f"{name}: out", got.out, reference.out, eager.out)
        if got.out.dtype.itemsize == 2:
            eps = torch.finfo(got.out.dtype).eps
            largest = reference.out.abs().amax(-1, keepdim=True)
            # Rows that saw nothing have to be 0, not merely small.
            largest = largest.clamp_min(torch.finfo(torch.float16).tiny)
            rows = [x.double() / largest for x in (got.out, reference.out, eager.out)]
            _assert_budget(f"{name}: rows of out", *rows, eps=eps)
        _assert_budget(f"{name}: lse", got.lse, reference.lse, eager.lse, least_scale=1.0)
    else:
        _assert_budget(name, got, reference, eager)


def _assert_budget(
    name: str,
    got: torch.Tensor,
    reference: torch.Tensor,
    eager: torch.Tensor,
    eps: float | None = None,
    least_scale: float = 0.0,
) -> None:
    eps = torch.finfo(got.dtype).eps if eps is None else eps
    assert got.shape == reference.shape == eager.shape, (
        f"{name}: shape {list(got.shape)}, reference {list(reference.shape)}, "
        f"eager {list(eager.shape)}"
    )
    assert got.dtype == eager.dtype, f"{name}: {got.dtype}, eager is {eager.dtype}"
    got, reference, eager = got.double(), reference.double(), eager.double()
    assert not reference.isnan().any(), f"{name}: the reference holds NaN"
    assert not got.isnan().any(), f"{name}: {int(got.isnan().sum())} of {got.numel()} are NaN"
    infinite = reference.isinf()
    for who, values in (("eager", eager), ("got", got)):
        wrong = torch.where(infinite, values != reference, ~values.isfinite())
        assert not wrong.any(), f"{name}: {who}: {int(wrong.sum())} infinities not as in reference"
    if infinite.all():
        return
    error, eager_error, scale = _errors(got, reference, eager, least_scale)
    worst, budget = error_and_budget(got, reference, eager, eps=eps, least_scale=least_scale)
    where = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
    assert worst <= budget, (
        f"{name}: error {worst:.3g} at {where} (got {got[tuple(where)].item():.6g}, reference "
        f"{reference[tuple(where)].item():.6g}), budget {budget:.3g} = 2 x (eager's error "
        f"{eager_error:.3g} + eps {eps:.3g} x largest value {scale:.3g})"
    )
