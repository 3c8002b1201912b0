"""write_kv puts each token where the slot mapping says, and nothing anywhere else."""

from __future__ import annotations

import pytest
import torch

from dcp_lab import Shard, write_kv
from dcp_lab.testing import PagedCase, _to_layout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LENS = [0, 1, 15, 16, 17, 40]


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors hold the same values, NaN being equal to NaN."""
    return got.shape == expected.shape and bool(
        ((got == expected) | (got.isnan() & expected.isnan())).all()
    )


def empty_caches(case: PagedCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Return caches laid out in memory like the case's, NaN everywhere."""
    caches = []
    for cache in (case.k_cache, case.v_cache):
        base = cache._base if cache._base is not None else cache
        storage = torch.full_like(base, torch.nan)
        caches.append(storage.as_strided(cache.shape, cache.stride(), cache.storage_offset()))
    return caches[0], caches[1]


def held(case: PagedCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of every token of the case's cache, in the order of its slot mapping."""
    keys = [k[p] for k, p in zip(case.keys, case.positions, strict=True)]
    values = [v[p] for v, p in zip(case.values, case.positions, strict=True)]
    return torch.cat(keys), torch.cat(values)


@pytest.mark.parametrize("fused", [None, "pages", "dims"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writes_every_token_and_nothing_else(
    dtype: torch.dtype, layout: str, fused: str | None
) -> None:
    """A written cache equals the one built token by token, bit for bit, NaN where nothing is."""
    case = PagedCase.build(
        LENS, dtype=dtype, kv_layout=layout, fused=fused, head_dim=80, head_dim_v=48, device=DEVICE
    )
    k_cache, v_cache = empty_caches(case)
    assert k_cache.stride() == case.k_cache.stride()
    write_kv(*held(case), k_cache, v_cache, case.slot_mapping(), kv_layout=layout)
    assert same(k_cache, case.k_cache) and same(v_cache, case.v_cache)


@pytest.mark.parametrize("fused", [None, "pages"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writes_shuffled_caches(dtype: torch.dtype, fused: str | None) -> None:
    """AITER's SHUFFLE layout too, bit for bit, NaN where nothing is."""
    case = PagedCase.build(
        LENS,
        dtype=dtype,
        kv_layout="SHUFFLE",
        fused=fused,
        head_dim=80,
        head_dim_v=48,
        device=DEVICE,
    )
    k_cache, v_cache = empty_caches(case)
    write_kv(*held(case), k_cache, v_cache, case.slot_mapping(), kv_layout="SHUFFLE")
    assert same(k_cache, case.k_cache) and same(v_cache, case.v_cache)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(None, id="none"),
        pytest.param(0.37, id="float"),
        pytest.param((0.37,), id="tensor"),
        pytest.param((0.37, 2.5), id="per-head"),
    ],
)
@pytest.mark.parametrize("layout", ["NHD", "HND", "SHUFFLE"])
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_fp8_caches(fp8: torch.dtype, layout: str, given: float | tuple | None) -> None:
    """An fp8 cache gets new / scale, rounded to nearest even and held within its range."""
    largest = torch.finfo(fp8).max
    scale = torch.tensor(given, device=DEVICE) if isinstance(given, tuple) else given
    factor = scale.reshape(-1, 1) if isinstance(scale, torch.Tensor) else scale or 1.0
    for dtype in DTYPES:
        key, value = (torch.randn(2, 40, 2, 16, device=DEVICE) * 30).to(dtype).unbind()
        key[0] = 1e4
        value[1] = -1e-4
        key[2, 0, 0] = torch.nan
        stored = torch.full((2, 32, 2, 16), torch.nan, device=DEVICE).to(fp8)
        caches = [c.clone() for c in _to_layout(stored, stored, layout)]
        write_kv(
            key,
            value,
            *caches,
            torch.arange(40, device=DEVICE),
            kv_layout=layout,
            k_scale=scale,
            v_scale=scale,
        )
        expected = []
        for new in (key, value):
            rows = stored.clone().flatten(0, 1).float()
            rows[:40] = (new.float() / factor).clamp(-largest, largest)
            expected.append(rows.to(fp8).view(2, 32, 2, 16))
        for got, wanted in zip(caches, _to_layout(*expected, layout), strict=True):
            assert same(got.float(), wanted.float())


@pytest.mark.parametrize("page_size", [1, 3, 64, 1024])
def test_page_sizes(page_size: int) -> None:
    """Any page size up to 1,024 works."""
    case = PagedCase.build([0, 5, 70], page_size=page_size, device=DEVICE)
    k_cache, v_cache = empty_caches(case)
    write_kv(*held(case), k_cache, v_cache, case.slot_mapping())
    assert same(k_cache, case.k_cache) and same(v_cache, case.v_cache)


@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_casts_to_the_cache_dtype(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Another dtype is rounded as torch rounds it."""
    key, value = torch.randn(2, 40, 2, 16, device=DEVICE).to(dtype).unbind()
    k_cache = torch.full((3, 16, 2, 16), torch.nan, device=DEVICE, dtype=cache_dtype)
    v_cache = k_cache.clone()
    write_kv(key, value, k_cache, v_cache, torch.arange(40, device=DEVICE))
    assert torch.equal(k_cache.flatten(0, 1)[:40], key.to(cache_dtype))
    assert torch.equal(v_cache.flatten(0, 1)[:40], value.to(cache_dtype))


def test_skipped_tokens_leave_the_cache_alone() -> None:
    """-1 skips a token, and its NaN reaches no slot; slot 0 is written when it is meant."""
    key, value = torch.randn(2, 6, 2, 16, device=DEVICE).unbind()
    slots = torch.tensor([-1, 3, -1, 0, 7, -1], device=DEVICE)
    key[slots < 0] = torch.nan
    k_cache = torch.zeros(2, 4, 2, 16, device=DEVICE)
    v_cache = torch.zeros(2, 4, 2, 16, device=DEVICE)
    write_kv(key, value, k_cache, v_cache, slots)
    for cache, new in ((k_cache, key), (v_cache, value)):
        rows = cache.flatten(0, 1)
        assert torch.equal(rows[slots[slots >= 0]], new[slots >= 0])
        rest = [i for i in range(8) if i not in (3, 0, 7)]
        assert (rows[rest] == 0).all()


def test_slots_outside_the_cache_write_nothing() -> None:
    """A slot past the cache, here inside a larger allocation, damages nothing behind it."""
    memory = torch.zeros(5, 4, 2, 16, device=DEVICE)
    key = torch.ones(3, 2, 16, device=DEVICE)
    slots = torch.tensor([8, -5, 2**40], device=DEVICE)
    write_kv(key, key, memory[1:3], memory[1:3].clone(), slots)
    assert (memory == 0).all()


def test_strided_key_and_value() -> None:
    """K and V may be slices of a fused QKV projection."""
    qkv = torch.randn(5, 8, 16, device=DEVICE)
    key, value = qkv[:, 4:6], qkv[:, 6:8]
    k_cache, v_cache = torch.zeros(2, 2, 4, 2, 16, device=DEVICE).unbind()
    write_kv(key, value, k_cache, v_cache, torch.arange(5, device=DEVICE))
    assert torch.equal(k_cache.flatten(0, 1)[:5], key)
    assert torch.equal(v_cache.flatten(0, 1)[:5], value)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("interleave", [1, 4, 16, "page"])
def test_interleave_against_pages(size: int, page_size: int, interleave: int | str) -> None:
    """Case 7: over all ranks each token lies in one slot, on rank (i // S) % R, in order."""
    interleave = page_size if interleave == "page" else interleave
    length = 2 * size * interleave + page_size // 2 + 1
    index = torch.arange(length, device=DEVICE)
    # fp32 holds every index exactly; V holds its negative.
    key = index.float().reshape(-1, 1, 1).expand(-1, 1, 16).contiguous()
    pages = -(-length // page_size)
    counts = []
    for rank in range(size):
        shard = Shard(rank, size, interleave)
        # Pages in reverse order, so that a slot is not its position.
        local = shard.local_position(index)
        slots = (pages - 1 - local // page_size) * page_size + local % page_size
        slots = torch.where(shard.owner(index) == rank, slots, -1)
        k_cache = torch.full((pages, page_size, 1, 16), torch.nan, device=DEVICE)
        v_cache = k_cache.clone()
        write_kv(key, -key, k_cache, v_cache, slots)
        assert same(v_cache, -k_cache)
        stored = k_cache.flip(0).flatten()[::16]
        written = stored[~stored.isnan()].long()
        expected = [i for i in range(length) if (i // interleave) % size == rank]
        assert written.tolist() == expected
        assert stored[: len(expected)].long().tolist() == expected
        counts.append(shard.local_seq_lens(torch.tensor([length])).item())
        assert counts[-1] == len(expected)
    assert sum(counts) == length


def test_no_tokens() -> None:
    """Nothing to write is fine."""
    cache = torch.zeros(2, 4, 2, 16, device=DEVICE)
    none = torch.zeros(0, 2, 16, device=DEVICE)
    write_kv(none, none, cache, cache.clone(), torch.zeros(0, dtype=torch.int64, device=DEVICE))
    assert (cache == 0).all()


def arguments() -> dict:
    """Return arguments that are all right."""
    return {
        "key": torch.zeros(3, 2, 16),
        "value": torch.zeros(3, 2, 32),
        "k_cache": torch.zeros(4, 8, 2, 16),
        "v_cache": torch.zeros(4, 8, 2, 32),
        "slot_mapping": torch.arange(3),
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("key", torch.zeros(3, 1, 16), r"key: .* \[T, Hkv=2, D=16\], got float32 \[3, 1, 16\]"),
        ("key", torch.zeros(3, 2, 16).int(), r"key: expected float32 or .*, got int32"),
        ("key", torch.zeros(3, 16, 2).mT, r"key: expected a contiguous last dimension"),
        ("key", None, r"key: expected a tensor \[T, Hkv=2, D=16\], got None"),
        ("value", torch.zeros(2, 2, 32), r"value: .* \[T=3, Hkv=2, Dv=32\], got"),
        ("value", torch.zeros(3, 2, 32).half(), r"value: expected float32 .*, got float16"),
        ("slot_mapping", torch.arange(3).int(), r"slot_mapping: expected int64 .*, got int32"),
        ("slot_mapping", torch.arange(4), r"slot_mapping: .* \[T=3\], got int64 \[4\]"),
        ("k_cache", torch.zeros(4, 8, 2), r"k_cache: .* \[P, page, Hkv, D\], got float32"),
        ("k_cache", torch.zeros(4, 8, 2, 16).int(), r"k_cache: expected float32 or .*, got int32"),
        ("k_cache", torch.zeros(4, 8, 16, 2).mT, r"k_cache: expected a contiguous last dim"),
        ("k_cache", torch.zeros(4, 2000, 2, 16), r"page_size .*an int >= 1 and <= 1024, got 2000"),
        ("k_cache", torch.zeros(4, 8, 0, 16), r"num_kv_heads .*: expected an int >= 1, got 0"),
        ("k_cache", torch.zeros(4, 8, 2, 300), r"head_dim \(of k_cache\): .* <= 256, got 300"),
        ("v_cache", torch.zeros(4, 8, 2, 300), r"head_dim \(of v_cache\): .* <= 256, got 300"),
        ("v_cache", torch.zeros(4, 9, 2, 32), r"v_cache: .* \[P=4, page=8, Hkv=2, Dv\], got"),
        ("v_cache", torch.zeros(4, 8, 2, 32).half(), r"v_cache: expected float32 .*, got float16"),
        ("kv_layout", "NDH", r"kv_layout: expected one of 'NHD', 'HND', 'SHUFFLE', got 'NDH'"),
    ],
)
def test_bad_arguments_are_refused(name: str, value: object, message: str) -> None:
    """A bad argument is named, with what was expected and what was given."""
    with pytest.raises(ValueError, match=message):
        write_kv(**{**arguments(), name: value})
