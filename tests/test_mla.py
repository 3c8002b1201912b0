"""mla_paged_decode and write_mla_kv against the float64 oracle, on the CPU or on a GPU."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from dcp_lab import (
    AttnState,
    DecodeWorkspace,
    Shard,
    merge_states,
    mla_paged_decode,
    write_mla_kv,
)
from dcp_lab.kernels.launch import Launch
from dcp_lab.reference import eager_mla_decode, reference_mla_decode
from dcp_lab.testing import PagedCase, assert_within_budget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 16
# Around a page, around a tile, and long enough to be split.
LENS = (0, 1, PAGE - 1, PAGE, PAGE + 1, 150)
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
FP8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz]
SPLITS = [
    pytest.param(None, id="planned"),
    pytest.param(1, id="1split"),
    pytest.param(3, id="3splits"),
]


@dataclasses.dataclass
class Latents:
    """A PagedCase whose K cache is the latent cache, and the rank of its values."""

    case: PagedCase
    kv_cache: torch.Tensor
    kv_lora_rank: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.case.q, self.kv_cache, self.case.block_table, self.case.seq_lens

    @property
    def model(self) -> dict[str, object]:
        width = self.kv_cache.shape[-1]
        return {"kv_lora_rank": self.kv_lora_rank, "softmax_scale": width**-0.5}

    def reference_options(self) -> dict[str, object]:
        options = self.case.reference_options()
        del options["kv_layout"]
        return {**self.model, **options}

    def options(self) -> dict[str, object]:
        return {**self.reference_options(), "max_query_len": self.case.max_query_len}

    def on_rank(self, shard: Shard) -> Latents:
        case = self.case.on_rank(shard)
        return Latents(case, case.k_cache.squeeze(2), self.kv_lora_rank)


def build(lens=LENS, *, heads=4, rank=64, rope=16, fp8=None, **options) -> Latents:
    case = PagedCase.build(
        lens, num_q_heads=heads, num_kv_heads=1, head_dim=rank + rope, head_dim_v=1,
        device=DEVICE, **options,
    )  # fmt: skip
    kv_cache = case.k_cache.squeeze(2)
    return Latents(case, kv_cache if fp8 is None else kv_cache.to(fp8), rank)


def check(latents: Latents, *, name: str = "mla_paged_decode", **options) -> AttnState:
    """Run a case, hold it against the oracle within the budget, and return the result."""
    model = {k: options.pop(k) for k in ("kv_scale", "softmax_scale") if k in options}
    got = mla_paged_decode(*latents.tensors, **{**latents.options(), **model}, **options)
    known = {**latents.reference_options(), **model}
    truth = reference_mla_decode(*latents.tensors, **known)
    eager = eager_mla_decode(*latents.tensors, **known)
    assert got.out.dtype == latents.case.q.dtype and got.lse.dtype == torch.float32
    assert_within_budget(name, got, truth, eager)
    return got


@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dtypes_and_splits(dtype, num_splits):
    """At 512 + 64 each dtype is as right as plain torch in it, whole, split and planned."""
    check(build(heads=16, rank=512, rope=64, dtype=dtype), num_splits=num_splits)


@pytest.mark.parametrize("num_splits", SPLITS[:2])
@pytest.mark.parametrize("heads", [1, 8, 16, 24, 96, 128])
def test_heads(heads, num_splits):
    """Heads fewer than a tile's rows, as many, and several tiles of them."""
    check(build((0, 1, 65), heads=heads, rank=512, rope=64), num_splits=num_splits)


@pytest.mark.parametrize(
    ("rank", "rope"),
    [(16, 16), (48, 16), (80, 16), (80, 48), (128, 64), (256, 128), (496, 80), (512, 256)],
)
@pytest.mark.parametrize("fp8", [None, FP8[0]], ids=["same", "fp8"])
def test_widths(rank, rope, fp8):
    """Any multiple of 16 for rank and rope, powers of two or not."""
    check(build((1, 40), rank=rank, rope=rope, fp8=fp8))


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 1024])
@pytest.mark.parametrize("fp8", [None, FP8[0]], ids=["same", "fp8"])
def test_page_sizes(page_size, fp8):
    """Any page size reads the same tokens."""
    lens = (0, 1, max(1, page_size - 1), page_size, page_size + 1)
    check(build(lens, page_size=page_size, fp8=fp8))


@pytest.mark.parametrize("fp8", [None, FP8[0]], ids=["same", "fp8"])
def test_strided_cache(fp8):
    """The cache may be a view of all layers' latents, or of wider rows."""
    whole = build(fp8=fp8)
    pages, page, width = whole.kv_cache.shape
    wide = torch.full((pages, 3, page, width + 48), math.nan, device=DEVICE).to(
        whole.kv_cache.dtype
    )
    view = wide[:, 1, :, 16 : 16 + width]
    view.copy_(whole.kv_cache)
    expected = check(whole)
    strided = check(dataclasses.replace(whole, kv_cache=view))
    assert torch.equal(strided.out, expected.out) and torch.equal(strided.lse, expected.lse)


@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize("heads", [3, 16])
def test_query_tokens(heads, num_splits):
    """Several query tokens a request see a causal triangle; rows of no request are padding."""
    latents = build(
        (4, 40, 0, 150, 2), heads=heads, query_lens=(3, 1, 0, 4, 2), padding_rows=3
    )  # fmt: skip
    got = check(latents, num_splits=num_splits)
    assert (got.out[-3:] == 0).all() and (got.lse[-3:] == -math.inf).all()


def test_query_tokens_of_128_heads():
    """Rows of several tokens fill several tiles, and a tile may hold two tokens' heads."""
    check(build((70, 3), heads=96, rank=512, rope=64, query_lens=(3, 2), padding_rows=1))


@pytest.mark.parametrize("num_splits", SPLITS[:2])
@pytest.mark.parametrize(("size", "interleave_size"), [(2, 1), (3, 16), (4, 4)])
def test_shards_merge_to_the_whole(size, interleave_size, num_splits):
    """Every rank is right about its shard, and the merged ranks about the whole context."""
    whole = build((1, 5, 40, 130), rank=512, rope=64, query_lens=(1, 2, 3, 4), padding_rows=1)
    parts = []
    for rank in range(size):
        part = whole.on_rank(Shard(rank, size, interleave_size))
        parts.append(check(part, name=f"rank {rank}", num_splits=num_splits))
    merged = merge_states(torch.stack([p.out for p in parts]), torch.stack([p.lse for p in parts]))
    truth = reference_mla_decode(*whole.tensors, **whole.reference_options())
    eager = eager_mla_decode(*whole.tensors, **whole.reference_options())
    assert_within_budget("merged", merged, truth, eager)


def test_one_token_needs_no_global_lengths():
    """A decode step of one token a request attends all of its shard: local lengths say it all."""
    part = build((1, 5, 40)).on_rank(Shard(1, 4))
    with_lengths = mla_paged_decode(*part.tensors, **part.options())
    without = mla_paged_decode(*part.tensors, **part.model, shard=part.case.shard)
    assert torch.equal(with_lengths.out, without.out)
    assert torch.equal(with_lengths.lse, without.lse)


@pytest.mark.parametrize("rank", range(4))
def test_multi_token_bound_under_interleave(rank):
    """Rows that end at global lengths 6, 7, 8, 9 see the rank's tokens of them."""
    visible = [[2, 2, 2, 3], [2, 2, 2, 2], [1, 2, 2, 2], [1, 1, 2, 2]][rank]
    part = build((9,), heads=1, query_lens=(4,), shard=Shard(rank, 4))
    part.case.q.zero_()
    got = mla_paged_decode(*part.tensors, **part.options())
    expected = torch.tensor(visible, dtype=torch.float32, device=DEVICE).log()[:, None]
    torch.testing.assert_close(got.lse, expected)


def test_empty_shards():
    """Rows of empty shards are out 0 and lse -inf on each rank, and merge to the exact whole."""
    whole = build((3, 1, 0, 33), query_lens=(1, 1, 0, 1), padding_rows=3)
    local = [[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [9, 8, 8, 8]]
    parts = []
    for rank in range(4):
        part = whole.on_rank(Shard(rank, 4))
        assert part.case.seq_lens.tolist() == [row[rank] for row in local]
        got = check(part, name=f"rank {rank}")
        for row, request in ((0, 0), (1, 1), (2, 3)):
            if local[request][rank] == 0:
                assert (got.out[row] == 0).all() and (got.lse[row] == -math.inf).all()
        parts.append(got)
    merged = merge_states(torch.stack([p.out for p in parts]), torch.stack([p.lse for p in parts]))
    truth = reference_mla_decode(*whole.tensors, **whole.reference_options())
    eager = eager_mla_decode(*whole.tensors, **whole.reference_options())
    assert_within_budget("merged", merged, truth, eager)


@pytest.mark.parametrize("num_splits", [1, 2, 8])
def test_natural_logarithm_and_unused_splits(num_splits):
    """Equal scores give ln of their number, also when there are fewer keys than splits."""
    latents = build((2, 8, 1, 5))
    latents.case.q.zero_()
    out = torch.full((4, 4, 64), math.nan, device=DEVICE)
    lse = torch.full((4, 4), math.nan, device=DEVICE)
    got = check(latents, num_splits=num_splits, out=out, lse=lse)
    assert got.out is out and got.lse is lse
    expected = torch.tensor([2.0, 8.0, 1.0, 5.0], device=DEVICE).log()[:, None].expand(4, 4)
    torch.testing.assert_close(lse, expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("fp8", FP8, ids=str)
def test_fp8(fp8, dtype):
    """An fp8 latent is as right as the same latent in q's dtype, at 512 + 64."""
    latents = build((0, 1, 17, 150), heads=16, rank=512, rope=64, fp8=fp8, dtype=dtype)
    check(latents, kv_scale=0.25)
    check(latents, num_splits=3, kv_scale=0.25)


def test_fp8_of_128_heads():
    """The larger query tiles of many heads read fp8 too."""
    latents = build((0, 70), heads=128, rank=512, rope=64, fp8=FP8[0], dtype=torch.bfloat16)
    check(latents, kv_scale=0.25)


@pytest.mark.parametrize("num_splits", SPLITS[:2])
def test_fp8_scale(num_splits):
    """The scale is in the LSE, by the key, and in out, by the value; a tensor says the same."""
    latents = build((40, 9), fp8=FP8[0], query_lens=(3, 1))
    said = {}
    for scale in (None, 1.0, 2.0, 0.37):
        said[scale] = check(latents, num_splits=num_splits, kv_scale=scale)
    for shape in ((), (1,), (1, 1)):
        scale = torch.full(shape, 0.37, device=DEVICE)
        got = check(latents, num_splits=num_splits, kv_scale=scale)
        torch.testing.assert_close(got, said[0.37], rtol=1e-6, atol=1e-6)
    assert torch.equal(said[None].out, said[1.0].out)
    # Equal scores: out only moves with the value.
    latents.case.q.zero_()
    one, two = (
        mla_paged_decode(*latents.tensors, **latents.options(), kv_scale=s) for s in (1.0, 2.0)
    )
    assert torch.equal(one.lse, two.lse)
    torch.testing.assert_close(two.out, 2 * one.out)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("fp8", FP8, ids=str)
def test_every_fp8_value(fp8, dtype):
    """A request of one token returns its latent: every finite fp8 code comes out exactly."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    values = codes.view(fp8).float()
    values = torch.where(values.isnan(), 0.0, values)
    # A second token in reverse order: both elements of a 16-bit word take every value.
    rows = torch.stack([values, values.flip(0)]).unsqueeze(1)
    kv_cache = torch.cat([rows, torch.zeros(2, 1, 16, device=DEVICE)], -1).to(fp8)
    q = torch.zeros(2, 1, 272, dtype=dtype, device=DEVICE)
    table = torch.tensor([[0], [1]], dtype=torch.int32, device=DEVICE)
    lens = torch.ones(2, dtype=torch.int32, device=DEVICE)
    got = mla_paged_decode(q, kv_cache, table, lens, softmax_scale=1.0, kv_lora_rank=256)
    assert torch.equal(got.out.float(), rows)
    assert (got.lse == 0).all()


@pytest.mark.parametrize(("dtype", "power"), [(torch.float16, 6), (torch.bfloat16, 40)], ids=str)
@pytest.mark.parametrize("down", [False, True], ids=["large", "small"])
def test_fp8_query_range(dtype, power, down):
    """q beyond fp16's range gives what the same q near 1 gives, for the scale takes it back."""
    latents = build((40, 9), fp8=FP8[0], dtype=dtype)
    # Few bits, so that no power of two takes fp16 below its smallest number.
    latents.case.q.copy_((latents.case.q * 16).round() / 16)
    expected = check(latents)
    factor = 2.0 ** (-power if down else power)
    q = latents.case.q * factor
    assert torch.equal(q / factor, latents.case.q)
    options = {**latents.options(), "softmax_scale": latents.model["softmax_scale"] / factor}
    got = mla_paged_decode(q, *latents.tensors[1:], **options)
    assert torch.equal(got.out, expected.out)
    torch.testing.assert_close(got.lse, expected.lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fp8", [None, FP8[0]], ids=["same", "fp8"])
def test_small_probabilities_keep_their_digits(fp8):
    """Keys of probability 1e-7 add up to what they weigh, though fp16 has no such numbers."""
    kv_cache = torch.zeros(257, 1, 80, device=DEVICE)
    # One key far ahead with value 0, 256 behind it by 16 with a large value.
    kv_cache[0, 0, 64] = 16.0
    kv_cache[1:, 0, :64] = 448.0
    kv_cache = kv_cache.to(fp8 or torch.float16)
    q = torch.zeros(1, 4, 80, dtype=torch.float16, device=DEVICE)
    q[..., 64] = 1.0
    table = torch.arange(257, dtype=torch.int32, device=DEVICE)[None]
    lens = torch.full((1,), 257, dtype=torch.int32, device=DEVICE)
    got = mla_paged_decode(q, kv_cache, table, lens, softmax_scale=1.0, kv_lora_rank=64)
    weight = 256 * math.exp(-16)
    expected = torch.full_like(got.out, 448 * weight / (1 + weight))
    torch.testing.assert_close(got.out, expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize("max_items", [4, 9, 64])
def test_workspace_is_shared_by_layers_and_steps(max_items):
    """One workspace serves layers and steps of fewer requests, several tokens; it never moves."""
    workspace = DecodeWorkspace(
        4,
        4,
        1,
        576,
        head_dim_v=512,
        max_query_len=3,
        kv_dtype=torch.float32,
        max_items=max_items,
        device=DEVICE,
    )
    before = workspace.partial_out.data_ptr(), workspace.items.data_ptr()
    for lens, query_lens in (((200, 3), None), ((1, 0, 90, 64), (1, 0, 3, 2))):
        latents = build(lens, rank=512, rope=64, query_lens=query_lens)
        workspace.prepare(latents.case.seq_lens)
        for layer in range(2):
            check(latents, name=f"layer {layer}", workspace=workspace)
    assert before == (workspace.partial_out.data_ptr(), workspace.items.data_ptr())


def test_launches(monkeypatch):
    """A call launches 1 kernel unsplit, 2 split, 2 with a prepared workspace."""
    names: list[str] = []
    run = Launch.run
    # What run returns is what a bound call launches again.
    monkeypatch.setattr(Launch, "run", lambda launch: names.append(launch.kernel) or run(launch))
    latents = build((40, 150))
    workspace = DecodeWorkspace(2, 4, 1, 80, head_dim_v=64, kv_dtype=torch.float32, device=DEVICE)
    workspace.prepare(latents.case.seq_lens)
    for options, most in (
        ({"num_splits": 1}, 1),
        ({"num_splits": 4}, 2),
        ({"workspace": workspace}, 2),
    ):
        names.clear()
        check(latents, **options)
        assert len(names) == most


def test_same_inputs_same_bits():
    """Two calls give the same bits, and the inputs stay as they were."""
    latents = build(query_lens=(0, 1, 2, 3, 1, 2))
    before = [t.clone() for t in latents.tensors]
    first, second = (mla_paged_decode(*latents.tensors, **latents.options()) for _ in range(2))
    assert torch.equal(first.out, second.out) and torch.equal(first.lse, second.lse)
    for old, now in zip(before, latents.tensors, strict=True):
        assert torch.equal(old.nan_to_num(), now.nan_to_num())


def test_scale_and_strided_queries():
    """softmax_scale multiplies the scores; q, out and lse may be strided."""
    latents = build((40, 7))
    q = torch.randn(2, 4, 3, 80, device=DEVICE)[:, :, 1]
    strided = dataclasses.replace(latents, case=dataclasses.replace(latents.case, q=q))
    out = torch.zeros(2, 8, 64, device=DEVICE)[:, ::2]
    lse = torch.zeros(4, 2, device=DEVICE).T
    check(strided, softmax_scale=0.3, out=out, lse=lse)
    check(strided, softmax_scale=0.3, num_splits=3, out=out, lse=lse)


PAGE_STRIDE = 1_039_680


@pytest.mark.parametrize("dtype", [torch.float16, FP8[0]], ids=str)
def test_offsets_past_int32(dtype):
    """Pages behind 2 ** 31 elements are read and written, nothing where a wrapped offset lands."""
    page, width, pages = 4, 80, 2071
    # fp8 is read as 16-bit words: 2 ** 31 of them.
    stride = PAGE_STRIDE * (2 if dtype.itemsize == 1 else 1)
    storage = torch.empty(pages * stride, dtype=dtype, device=DEVICE)
    kv_cache = storage.as_strided((pages, page, width), (stride, width, 1))
    used = [2064, 2066, 2070]
    for p in used:
        if p * PAGE_STRIDE >= 2**31:
            start = (p * PAGE_STRIDE - 2**31) * (stride // PAGE_STRIDE)
            storage[start : start + page * width] = math.nan
    latent = torch.randn(12, width, device=DEVICE, dtype=torch.float16)
    slots = torch.tensor([p * page + i for p in used for i in range(page)], device=DEVICE)
    write_mla_kv(latent, kv_cache, slots)
    q = torch.randn(1, 4, width, device=DEVICE, dtype=torch.float16)
    table = torch.tensor([used], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([12], dtype=torch.int32, device=DEVICE)
    model = {"softmax_scale": 0.1, "kv_lora_rank": 64}
    got = mla_paged_decode(q, kv_cache, table, lens, **model)
    near = latent.to(dtype).reshape(3, page, width)
    table = torch.arange(3, dtype=torch.int32, device=DEVICE)[None]
    truth = reference_mla_decode(q, near, table, lens, **model)
    assert_within_budget("far pages", got, truth, eager_mla_decode(q, near, table, lens, **model))


def test_nothing_to_do():
    """No tokens gives empty results; no requests gives padding only."""
    latents = build((3,), query_lens=(0,))
    got = mla_paged_decode(*latents.tensors, **latents.options())
    assert got.out.shape == (0, 4, 64) and got.lse.shape == (0, 4)
    q = torch.randn(2, 4, 80, device=DEVICE)
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    start = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    table = torch.zeros(0, 1, dtype=torch.int32, device=DEVICE)
    got = mla_paged_decode(
        q, latents.kv_cache, table, none, **latents.model, query_start_loc=start
    )
    assert (got.out == 0).all() and (got.lse == -math.inf).all()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.unpoisoned
@pytest.mark.parametrize("fp8", [None, FP8[0]], ids=["same", "fp8"])
def test_graph_replay(fp8):
    """A captured call follows seq_lens, block_table and q that change in place, bit for bit."""
    options = {"heads": 16, "rank": 512, "rope": 64, "dtype": torch.bfloat16, "fp8": fp8}
    latents = build((5, 900, 33, 64), **options)
    q, kv_cache, table, lens = latents.tensors
    scale = torch.full((1,), 0.5, device=DEVICE) if fp8 else None
    workspace = DecodeWorkspace(
        4, 16, 1, 576, head_dim_v=512, kv_dtype=kv_cache.dtype, device=DEVICE
    )
    out = torch.empty(4, 16, 512, dtype=q.dtype, device=DEVICE)
    lse = torch.empty(4, 16, device=DEVICE)

    def step() -> None:
        workspace.prepare(lens)
        mla_paged_decode(
            q, kv_cache, table, lens, **latents.model, kv_scale=scale, workspace=workspace,
            out=out, lse=lse,
        )  # fmt: skip

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for new_lens in ([6, 1, 0, 63], [5, 900, 33, 64]):
        q.copy_(torch.randn_like(q))
        lens.copy_(torch.tensor(new_lens))
        table[:3, :1] = table[:3, :1].flip(0)
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graph.replay()
        replayed = out.clone(), lse.clone()
        step()
        assert torch.equal(out, replayed[0]) and torch.equal(lse, replayed[1])
        assert (lse[torch.tensor(new_lens, device=DEVICE) == 0] == -math.inf).all()


def test_refusals():
    """Bad input is refused with the argument's name, before any launch."""
    latents = build((5, 40))
    q, kv_cache, table, lens = latents.tensors

    def call(*tensors: torch.Tensor, **more: object) -> AttnState:
        tensors = (*tensors, *latents.tensors[len(tensors) :])
        return mla_paged_decode(*tensors, **{**latents.model, **more})

    with pytest.raises(ValueError, match=r"q: expected float32 or float16 or bfloat16 \[T, Hq"):
        call(q.double())
    with pytest.raises(ValueError, match="kv_lora_rank: expected an int >= 1"):
        call(kv_lora_rank=0)
    with pytest.raises(ValueError, match="kv_lora_rank: expected a multiple of 16 up to 512"):
        call(kv_lora_rank=40)
    with pytest.raises(ValueError, match=r"q: expected a last dimension of kv_lora_rank=80 \+"):
        call(kv_lora_rank=80)
    with pytest.raises(ValueError, match="kv_cache: expected .*kv_lora_rank"):
        call(q, kv_cache[..., :64])
    with pytest.raises(ValueError, match="kv_cache: expected q's dtype float32 or fp8"):
        call(q, kv_cache.half())
    with pytest.raises(ValueError, match="page_size .of kv_cache.: expected an int >= 1 and <="):
        call(q, torch.zeros(1, 1025, 80, device=DEVICE))
    with pytest.raises(ValueError, match="kv_cache: expected a contiguous last dimension"):
        call(q, kv_cache.transpose(1, 2).contiguous().transpose(1, 2))
    odd = torch.zeros(7, 16, 81, device=DEVICE).to(FP8[0])[..., :80]
    with pytest.raises(NotImplementedError, match=r"kv_cache=float8_e4m3fn.*even strides"):
        call(q, odd)
    with pytest.raises(ValueError, match="kv_scale: expected None with a float32 cache, got 0.5"):
        call(kv_scale=0.5)
    quantised = kv_cache.to(FP8[0])
    with pytest.raises(ValueError, match="kv_scale: expected a finite number > 0"):
        call(q, quantised, kv_scale=-1.0)
    with pytest.raises(ValueError, match="kv_scale: expected a float or a tensor of 1 element"):
        call(q, quantised, kv_scale=torch.ones(2, device=DEVICE))
    with pytest.raises(ValueError, match="kv_scale: expected float32"):
        call(q, quantised, kv_scale=torch.ones(1, device=DEVICE).double())
    with pytest.raises(ValueError, match="softmax_scale: expected a finite number"):
        call(softmax_scale=math.inf)
    with pytest.raises(ValueError, match=r"seq_lens: expected int32 \[B=2\]"):
        call(q, kv_cache, table, lens.long())
    with pytest.raises(ValueError, match="query_start_loc: expected"):
        call(max_query_len=2)
    with pytest.raises(ValueError, match="global_seq_lens: expected"):
        start = torch.arange(3, dtype=torch.int32, device=DEVICE)
        call(query_start_loc=start, max_query_len=2, shard=Shard(0, 2))
    with pytest.raises(ValueError, match="num_splits: expected an int >= 1"):
        call(num_splits=0)
    with pytest.raises(ValueError, match=r"out: expected float32 \[T=2, Hq=4, Dv=64\]"):
        call(out=torch.zeros(2, 4, 80, device=DEVICE))


def test_workspace_refusals():
    """A workspace of other sizes, or not prepared for this step, is refused."""
    latents = build((5, 40))
    call = lambda workspace: mla_paged_decode(  # noqa: E731
        *latents.tensors, **latents.options(), workspace=workspace
    )
    make = lambda *sizes, **more: DecodeWorkspace(  # noqa: E731
        *sizes, **{"kv_dtype": torch.float32, "device": DEVICE, **more}
    )
    with pytest.raises(ValueError, match="workspace: expected one made for num_kv_heads=1"):
        call(make(2, 4, 2, 80, head_dim_v=64))
    with pytest.raises(ValueError, match="workspace: expected one made for head_dim_v=64"):
        call(make(2, 4, 1, 80))
    with pytest.raises(ValueError, match="workspace: expected a prepared one"):
        call(make(2, 4, 1, 80, head_dim_v=64))
    with pytest.raises(ValueError, match="head_dim: expected an int >= 1 and <= 256, got 576"):
        make(2, 4, 2, 576)
    with pytest.raises(ValueError, match="head_dim: expected an int >= 1 and <= 768"):
        make(2, 4, 1, 1024)


def written(latents: Latents) -> torch.Tensor:
    """Return the latent of every token of the cache, in the order of its slot mapping."""
    case = latents.case
    return torch.cat([k[p, 0] for k, p in zip(case.keys, case.positions, strict=True)])


@pytest.mark.parametrize("page_size", [1, 16, 1024])
@pytest.mark.parametrize("fp8", [None, *FP8], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_write_every_token_and_nothing_else(dtype, fp8, page_size):
    """A written cache equals the one built token by token, bit for bit, NaN where nothing is."""
    latents = build(rank=512, rope=64, dtype=dtype, fp8=fp8, page_size=page_size)
    kv_cache = torch.full_like(latents.kv_cache.float(), math.nan).to(latents.kv_cache.dtype)
    write_mla_kv(written(latents), kv_cache, latents.case.slot_mapping())
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[kv_cache.dtype.itemsize]
    same = kv_cache.view(bits) == latents.kv_cache.view(bits)
    assert (same | (kv_cache.float().isnan() & latents.kv_cache.float().isnan())).all()


@pytest.mark.parametrize("cache_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_write_casts(dtype, cache_dtype):
    """Another dtype is rounded as torch rounds it."""
    latent = torch.randn(40, 80, device=DEVICE).to(dtype)
    kv_cache = torch.full((3, 16, 80), math.nan, device=DEVICE, dtype=cache_dtype)
    write_mla_kv(latent, kv_cache, torch.arange(40, device=DEVICE))
    assert torch.equal(kv_cache.flatten(0, 1)[:40], latent.to(cache_dtype))


@pytest.mark.parametrize("fp8", FP8, ids=str)
def test_write_fp8_rounds_as_torch_and_saturates(fp8):
    """Every fp8 value, every midpoint and both its neighbours round as in torch; the rest caps."""
    values = torch.arange(256, dtype=torch.uint8).view(fp8).float()
    values = values[values.isfinite()].unique()
    middle = (values[1:] + values[:-1]) / 2
    up = torch.full_like(middle, math.inf)
    inside = torch.cat([values, middle, middle.nextafter(up), middle.nextafter(-up)])
    inside = torch.cat([inside, torch.randn(4096 - len(inside)) * 3]).reshape(-1, 64).to(DEVICE)
    kv_cache = torch.zeros(len(inside), 1, 64, device=DEVICE).to(fp8)
    write_mla_kv(inside, kv_cache, torch.arange(len(inside), device=DEVICE))
    expected = inside.to(fp8)
    assert torch.equal(kv_cache[:, 0].view(torch.uint8), expected.view(torch.uint8))
    largest = torch.finfo(fp8).max
    beyond = torch.tensor([largest * 1.01, 1e9, math.inf, -math.inf, -1e5, math.nan, -0.0, 1e-9])
    write_mla_kv(beyond.repeat(8)[None].to(DEVICE), kv_cache, torch.tensor([0], device=DEVICE))
    got = kv_cache[0, 0, :8].float().cpu()
    assert got[:5].tolist() == [largest, largest, largest, -largest, -largest]
    assert got[5].isnan() and got[6:].tolist() == [0.0, 0.0]


def test_write_fp8_scale():
    """Stored is latent / kv_scale, rounded once; a tensor says the same; read, it is latent."""
    latent = torch.randn(48, 80, device=DEVICE) * 700
    stored = {}
    for scale in (3.7, torch.full((1,), 3.7, device=DEVICE)):
        kv_cache = torch.zeros(3, 16, 80, device=DEVICE).to(FP8[0])
        write_mla_kv(latent, kv_cache, torch.arange(48, device=DEVICE), kv_scale=scale)
        stored[type(scale)] = kv_cache.view(torch.uint8)
    expected = (latent / torch.tensor(3.7, device=DEVICE)).clamp(-448, 448).to(FP8[0])
    assert torch.equal(stored[float].flatten(0, 1), expected.view(torch.uint8))
    assert torch.equal(stored[float], stored[torch.Tensor])
    q = torch.zeros(48, 1, 80, device=DEVICE)
    pages = stored[float].view(FP8[0]).reshape(48, 1, 80)
    table = torch.arange(48, dtype=torch.int32, device=DEVICE)[:, None]
    lens = torch.ones(48, dtype=torch.int32, device=DEVICE)
    options = {"softmax_scale": 1.0, "kv_lora_rank": 64, "kv_scale": 3.7}
    got = mla_paged_decode(q, pages, table, lens, **options)
    near = latent[:, :64].clamp(-448 * 3.7, 448 * 3.7)
    torch.testing.assert_close(got.out[:, 0], near, rtol=2**-4 + 1e-6, atol=3.7 * 2**-10)


def test_write_skips():
    """-1 and slots outside the cache write nothing; slot 0 is written when it is meant."""
    latent = torch.randn(6, 80, device=DEVICE)
    kv_cache = torch.full((2, 4, 80), math.nan, device=DEVICE)
    slots = torch.tensor([-1, 3, 8, 0, 7, -(2**40)], device=DEVICE)
    write_mla_kv(latent, kv_cache, slots)
    rows = kv_cache.flatten(0, 1)
    assert torch.equal(rows[[3, 0, 7]], latent[[1, 3, 4]])
    assert rows[[1, 2, 4, 5, 6]].isnan().all()
    write_mla_kv(latent[:0], kv_cache, slots[:0])


def test_write_then_read():
    """A cache written in place, strided, feeds the decode that follows."""
    latents = build((40, 7), fp8=FP8[0])
    wide = torch.zeros(*latents.kv_cache.shape[:2], 128, device=DEVICE).to(FP8[0])
    view = wide[..., 32:112]
    write_mla_kv(written(latents), view, latents.case.slot_mapping())
    check(dataclasses.replace(latents, kv_cache=view))
    assert (wide[..., :32].float() == 0).all() and (wide[..., 112:].float() == 0).all()


def test_write_refusals():
    """Bad input is refused with the argument's name, before any launch."""
    latent = torch.randn(6, 80, device=DEVICE)
    kv_cache = torch.zeros(2, 4, 80, device=DEVICE)
    slots = torch.zeros(6, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"latent: expected .* \[T, kv_lora_rank\+rope\]"):
        write_mla_kv(latent[None], kv_cache, slots)
    with pytest.raises(ValueError, match="latent: expected at least one element"):
        write_mla_kv(latent[:, :0], kv_cache[..., :0], slots)
    with pytest.raises(ValueError, match=r"kv_cache: expected .*kv_lora_rank\+rope"):
        write_mla_kv(latent[:, :64], kv_cache, slots)
    with pytest.raises(ValueError, match=r"slot_mapping: expected int64 \[T=6\]"):
        write_mla_kv(latent, kv_cache, slots.int())
    with pytest.raises(ValueError, match="kv_scale: expected None with a float32 cache"):
        write_mla_kv(latent, kv_cache, slots, kv_scale=1.0)
    odd = torch.zeros(2, 4, 81, device=DEVICE).to(FP8[0])[..., 1:]
    with pytest.raises(NotImplementedError, match="kv_cache=float8_e4m3fn.*even offset"):
        write_mla_kv(latent, odd, slots)
