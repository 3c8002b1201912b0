"""merge_states against the float64 oracle and hand-worked cases."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from dcp_lab import AttnState, merge_states
from dcp_lab.kernels import INTERPRETED
from dcp_lab.kernels.merge import MergeConfig, launch_pack, launch_rescale
from dcp_lab.ops import merge
from dcp_lab.ops.checks import check_tensor
from dcp_lab.reference import reference_merge
from dcp_lab.testing import assert_within_budget

# The same tests run compiled on a GPU, where one is.
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.float16, id="fp16"),
    pytest.param(torch.bfloat16, id="bf16"),
]
EMPTY_LSES = [
    pytest.param(-math.inf, id="minus_inf"),
    pytest.param(math.inf, id="plus_inf"),
    pytest.param(math.nan, id="nan"),
]


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    """Make new tensors on DEVICE."""
    with DEVICE:
        yield


def random_states(
    num_states: int,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outs [N, T, H, D] and lses [N, T, H] with LSEs some units apart."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_states, num_tokens, num_heads, head_dim)
    outs = torch.randn(shape, generator=generator, device="cpu")
    lses = 3 * torch.randn(shape[:3], generator=generator, device="cpu")
    return outs.to(DEVICE, dtype), lses.to(DEVICE)


def eager_merge(outs: torch.Tensor, lses: torch.Tensor) -> AttnState:
    """Merge in outs' own dtype with plain torch: the yardstick for rounding."""
    lses = torch.where(lses < math.inf, lses, -math.inf)
    lse = torch.logsumexp(lses, 0)
    weight = torch.where(lses > -math.inf, torch.exp(lses - lse), 0.0)
    parts = torch.where((lses > -math.inf)[..., None], outs, 0) * weight[..., None].to(outs.dtype)
    return AttnState(parts.sum(0), lse)


def assert_merged(name: str, got: AttnState, outs: torch.Tensor, lses: torch.Tensor) -> None:
    assert_within_budget(name, got, reference_merge(outs, lses), eager_merge(outs, lses))


def assert_same_bits(got: AttnState, expected: AttnState) -> None:
    for part, wanted in zip(got, expected, strict=True):
        assert part.dtype == wanted.dtype
        assert torch.equal(part.view(torch.uint8), wanted.contiguous().view(torch.uint8))


def test_lse_is_natural_log() -> None:
    """Weights 2 and 8 give 0.8; an LSE of the wrong base would give 0.7233 or 0.8808."""
    outs = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1)
    lses = torch.tensor([2.0, 8.0]).log().view(2, 1, 1)
    out, lse = merge_states(outs, lses)
    assert out.item() == pytest.approx(0.8, abs=1e-6)
    assert lse.item() == pytest.approx(2.302585, abs=1e-6)
    # A natural LSE taken as an exponent of 2, and a base-2 one taken as an exponent of e.
    read_as_base_2 = merge_states(outs, lses * math.log(2)).out.item()
    read_as_base_e = merge_states(outs, lses / math.log(2)).out.item()
    assert read_as_base_2 == pytest.approx(0.7233, abs=1e-4)
    assert read_as_base_e == pytest.approx(0.8808, abs=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        # T == H and T != H; one state, pairs, past the unrolled 8; widths of no power of two.
        pytest.param((1, 3, 2, 64), id="N1-T3-H2-D64"),
        pytest.param((2, 1, 1, 16), id="N2-T1-H1-D16"),
        pytest.param((2, 4, 4, 128), id="N2-T4-H4-D128"),
        pytest.param((3, 2, 5, 80), id="N3-T2-H5-D80"),
        pytest.param((4, 5, 3, 112), id="N4-T5-H3-D112"),
        pytest.param((8, 2, 2, 256), id="N8-T2-H2-D256"),
        pytest.param((17, 2, 3, 512), id="N17-T2-H3-D512"),
        pytest.param((2, 2, 3, 1), id="N2-T2-H3-D1"),
        # More rows than one program takes in the interpreter, with a rest.
        pytest.param((2, 300, 5, 16), id="N2-T300-H5-D16"),
    ],
)
def test_equals_oracle(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """The merge is the float64 merge within the error budget, for any N, T, H, D and dtype."""
    outs, lses = random_states(*shape, dtype)
    assert_merged("merge", merge_states(outs, lses), outs, lses)


@pytest.mark.parametrize("dtype", [DTYPES[1], DTYPES[2]])
def test_rounds_once(dtype: torch.dtype) -> None:
    """A 16-bit out is the exact merge rounded once: half a unit in the last place."""
    outs, lses = random_states(4, 8, 4, 64, dtype)
    exact = reference_merge(outs, lses).out
    error = (merge_states(outs, lses).out.double() - exact).abs()
    # fp32 accumulation may tip a value that lies between two neighbours.
    half_unit = exact.abs() * torch.finfo(dtype).eps / 2 + 1e-5
    assert (error <= half_unit).all()


@pytest.mark.parametrize("empty_lse", EMPTY_LSES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30], ids=["nan", "inf", "big"])
@pytest.mark.parametrize("empty", [0, 1, 2, 3])
def test_empty_state_counts_as_nothing(empty: int, garbage: float, empty_lse: float) -> None:
    """An LSE of -inf, +inf or NaN makes a state empty, wherever it is, whatever its out."""
    outs, lses = random_states(4, 3, 2, 16)
    others = [n for n in range(4) if n != empty]
    expected = merge_states(outs[others], lses[others])
    outs[empty], lses[empty] = garbage, empty_lse
    assert_same_bits(merge_states(outs, lses), expected)


@pytest.mark.parametrize("empty_lse", EMPTY_LSES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_states", [1, 2, 5])
def test_all_empty(num_states: int, dtype: torch.dtype, empty_lse: float) -> None:
    """A row that no state saw a key of gives out 0 and lse -inf; the others stay right."""
    outs, lses = random_states(num_states, 4, 3, 32, dtype)
    outs[:, 1, 2], lses[:, 1, 2] = math.nan, empty_lse
    outs[:, 3], lses[:, 3] = math.nan, empty_lse
    got = merge_states(outs, lses)
    for row in ((1, 2), (3,)):
        assert (got.out[row] == 0).all()
        assert (got.lse[row] == -math.inf).all()
    assert_merged("rest", got, outs, lses)


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_permutation(order: tuple[int, ...]) -> None:
    """The order of the states changes nothing but rounding."""
    outs, lses = random_states(3, 4, 4, 64)
    assert_merged("permuted", merge_states(outs[list(order)], lses[list(order)]), outs, lses)


def test_association() -> None:
    """Merging in two steps is merging in one."""
    outs, lses = random_states(4, 4, 4, 64)
    left, right = merge_states(outs[:1], lses[:1]), merge_states(outs[1:], lses[1:])
    both = merge_states(torch.stack([left.out, right.out]), torch.stack([left.lse, right.lse]))
    assert_merged("two steps", both, outs, lses)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_identity(first: bool, dtype: torch.dtype) -> None:
    """One state alone, or beside an empty one, comes back with the same bits."""
    outs, lses = random_states(1, 5, 3, 80, dtype)
    state = AttnState(outs[0], lses[0])
    assert_same_bits(merge_states(outs, lses), state)
    nothing = torch.full_like(outs, math.nan), torch.full_like(lses, -math.inf)
    pairs = [(outs, lses), nothing]
    outs, lses = (torch.cat(p) for p in zip(*(pairs[::-1] if first else pairs), strict=True))
    assert_same_bits(merge_states(outs, lses), state)


def test_shift() -> None:
    """Adding a constant to every score shifts the lse by it and leaves out alone."""
    outs, lses = random_states(3, 4, 4, 32)
    lses = (lses * 8).round() / 8  # so that adding 64 is exact
    here, there = merge_states(outs, lses), merge_states(outs, lses + 64)
    assert torch.equal(there.out, here.out)
    assert (there.lse.double() - here.lse.double() - 64).abs().max() <= 64 * 2**-23


def test_extreme_lses() -> None:
    """LSEs far apart or near the end of fp32's range neither overflow nor give NaN."""
    big = 1e38
    lses = torch.tensor([[1e4, -1e4, big, -big], [-1e4, -1e4, -big, -big]]).view(2, 1, 4)
    outs = torch.stack([torch.full((1, 4, 16), 3.0), torch.full((1, 4, 16), 5.0)])
    got = merge_states(outs, lses)
    assert got.out[0, :, 0].tolist() == [3.0, 4.0, 3.0, 4.0]
    assert got.lse[0].tolist() == pytest.approx([1e4, -1e4 + math.log(2), big, -big])


@pytest.mark.parametrize("block_rows", [1, 4])
def test_config_changes_no_bit(block_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows a program (1 on a GPU, all in the interpreter) change no bit of a result."""
    outs, lses = random_states(3, 5, 6, 80)
    lses[1, 2] = math.nan

    def everything() -> list[torch.Tensor]:
        send_out, send_lse = torch.zeros(3, 5, 2, 80), torch.zeros(3, 5, 2)
        weighed, lse = torch.zeros(3, 5, 2, 80), torch.zeros(5, 2)
        launch_pack(out=outs[1], lse=lses[1], send_out=send_out, send_lse=send_lse)
        launch_rescale(rank=1, out=outs[1], lses=lses, send=weighed, lse=lse)
        return [*merge_states(outs, lses), send_out, send_lse, weighed, lse]

    expected = everything()
    monkeypatch.setattr(MergeConfig, "from_rows", lambda num_rows: MergeConfig(block_rows))
    for got, wanted in zip(everything(), expected, strict=True):
        assert torch.equal(got, wanted)


def test_deterministic() -> None:
    """The same inputs give the same bits."""
    outs, lses = random_states(5, 6, 4, 64, torch.bfloat16)
    assert_same_bits(merge_states(outs, lses), merge_states(outs, lses))


@pytest.mark.parametrize("dtype", DTYPES)
def test_given_buffers(dtype: torch.dtype) -> None:
    """Given out and lse, strided and full of NaN, are returned and wholly written."""
    outs, lses = random_states(3, 4, 6, 64, dtype)
    out_home = torch.full((4, 3, 6, 80), math.nan, dtype=dtype)
    lse_home = torch.full((6, 2, 4), math.nan)
    out, lse = out_home[:, 1, :, 8:72], lse_home[:, 1].T
    got = merge_states(outs, lses, out=out, lse=lse)
    assert got.out is out and got.lse is lse
    assert_same_bits(AttnState(out.contiguous(), lse.contiguous()), merge_states(outs, lses))
    assert int(out_home.isnan().sum()) == out_home.numel() - out.numel()
    assert int(lse_home.isnan().sum()) == lse_home.numel() - lse.numel()


def test_a_repeated_merge_is_not_checked_anew(
    remembered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same buffers are merged again by what they hold now; others are checked, and refused."""
    checked: list[str] = []

    def noting(name: str, *args: object, **options: object) -> torch.Tensor:
        checked.append(name)
        return check_tensor(name, *args, **options)

    monkeypatch.setattr(merge, "check_tensor", noting)
    outs, lses = random_states(3, 4, 6, 64)
    out, lse = torch.empty(4, 6, 64), torch.empty(4, 6)
    for turn in range(3):
        outs.mul_(1.5)
        lses[turn] = -math.inf
        for states in (3, 2):
            checked.clear()
            got = merge_states(outs[:states], lses[:states], out=out, lse=lse)
            assert bool(checked) == (turn == 0)
            assert got.out is out and got.lse is lse
            assert_same_bits(got, merge_states(outs[:states].clone(), lses[:states].clone()))
    for bad, message in (
        ({"outs": outs.half()}, "out: expected float16"),
        ({"lses": lses[:2]}, "lses: expected"),
        ({"lses": [1.0]}, "lses: expected"),
        ({"out": out[:3]}, "out: expected"),
        ({"lse": lse.half()}, "lse: expected"),
    ):
        given = {"outs": outs, "lses": lses, "out": out, "lse": lse}
        with pytest.raises(ValueError, match=message):
            merge_states(**{**given, **bad})


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs(dtype: torch.dtype) -> None:
    """Any strides with a contiguous last dim give what contiguous inputs give, and inputs stay."""
    outs, lses = random_states(3, 4, 6, 64, dtype)
    expected = merge_states(outs, lses)
    strided_outs = torch.full((6, 3, 4, 96), math.nan, dtype=dtype)[..., 16:80].permute(1, 2, 0, 3)
    strided_lses = torch.full((4, 6, 3, 2), math.nan)[..., 1].permute(2, 0, 1)
    strided_outs.copy_(outs)
    strided_lses.copy_(lses)
    assert_same_bits(merge_states(strided_outs, strided_lses), expected)
    assert torch.equal(strided_outs, outs) and torch.equal(strided_lses, lses)
    # One state shown three times: stride 0.
    same = merge_states(outs[:1].expand(3, -1, -1, -1), lses[:1].expand(3, -1, -1))
    assert_merged("expanded", same, outs[:1].repeat(3, 1, 1, 1), lses[:1].repeat(3, 1, 1))


@pytest.mark.parametrize("shape", [(2, 0, 3, 16), (2, 3, 0, 16)], ids=["T0", "H0"])
def test_nothing_to_merge(shape: tuple[int, int, int, int]) -> None:
    """No tokens or no heads give an empty state."""
    got = merge_states(*random_states(*shape))
    assert got.out.shape == shape[1:] and got.lse.shape == shape[1:3]


OUTS, LSES = torch.zeros(2, 3, 4, 16, device=DEVICE), torch.zeros(2, 3, 4, device=DEVICE)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"outs": [OUTS]}, r"outs: expected a tensor \[N, T, H, D\]"),
        ({"outs": OUTS[0]}, r"outs: expected .*\[N, T, H, D\], got float32 \[3, 4, 16\]"),
        ({"outs": OUTS.double()}, "outs: expected float32 or float16 or bfloat16"),
        ({"outs": OUTS.mT.contiguous().mT}, "outs: expected a contiguous last dimension"),
        ({"outs": OUTS[:0], "lses": LSES[:0]}, r"outs: expected at least one state"),
        ({"outs": OUTS[..., :0]}, "outs: expected head_dim >= 1, got 0"),
        ({"lses": None}, r"lses: expected a tensor \[N=2, T=3, H=4\], got None"),
        ({"lses": LSES.half()}, r"lses: expected float32 .*got float16"),
        ({"lses": LSES[:1]}, r"lses: expected float32 \[N=2, T=3, H=4\], got float32 \[1, 3, 4\]"),
        ({"lses": LSES[:, :2]}, r"lses: expected .*T=3.*got float32 \[2, 2, 4\]"),
        ({"lses": LSES.mT}, r"lses: expected .*got float32 \[2, 4, 3\]"),
        ({"lses": LSES.to("meta")}, "lses: expected a tensor on c"),
        ({"out": OUTS[0].half()}, r"out: expected float32 \[T=3, H=4, D=16\], got float16"),
        ({"out": OUTS[0, :2]}, r"out: expected .*got float32 \[2, 4, 16\]"),
        ({"out": OUTS[0].to("meta")}, "out: expected a tensor on c"),
        ({"out": OUTS[0].mT.contiguous().mT}, "out: expected a contiguous last dimension"),
        ({"lse": LSES[0].double()}, r"lse: expected float32 \[T=3, H=4\], got float64"),
        ({"lse": LSES[0].T}, r"lse: expected .*got float32 \[4, 3\]"),
        ({"lse": LSES[0].to("meta")}, "lse: expected a tensor on c"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:40],
)
def test_bad_argument(arguments: dict[str, object], message: str) -> None:
    """Bad input is a ValueError that names the argument, what was expected, what came."""
    with pytest.raises(ValueError, match=message):
        merge_states(**({"outs": OUTS, "lses": LSES} | arguments))


def test_cpu_tensors_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors in a process that compiles its kernels are refused, with what to do."""
    monkeypatch.setattr("dcp_lab.ops.merge.INTERPRETED", False)
    with pytest.raises(ValueError, match="outs: expected a GPU: .*TRITON_INTERPRET=1"):
        merge_states(OUTS.cpu(), LSES.cpu())


def test_head_dim_too_wide() -> None:
    """More than 512 columns are refused by name."""
    with pytest.raises(NotImplementedError, match="head_dim=513"):
        merge_states(torch.zeros(1, 1, 1, 513), torch.zeros(1, 1, 1))


# More than 2^30, so that a third step passes 2^31, and no multiple that would wrap onto itself.
FAR = 1_200_000_000
MIDDLE = 2**31


def sparse(path: Path, dtype: type[np.floating]) -> torch.Tensor:
    """Return a huge array of zeros: a file that takes no room where nothing was written."""
    size = MIDDLE + 2 * FAR + 2**20
    if DEVICE.type == "cpu":
        return torch.from_numpy(np.memmap(path, dtype, "w+", shape=(size,)))
    return torch.zeros(size, dtype=torch.from_numpy(np.zeros(1, dtype)).dtype)


def far_view(
    home: torch.Tensor, shape: tuple[int, ...], far_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a view with stride FAR in far_dim, and what a 32-bit offset would hit."""
    stride = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        stride[dim] = stride[dim + 1] * shape[dim + 1]
    stride[far_dim] = FAR
    last = (shape[far_dim] - 1) * FAR
    assert last > 2**31
    view = home.as_strided(shape, stride, MIDDLE)
    return view, home[MIDDLE + last - 2**32 :][:4096]


@pytest.mark.parametrize("far_dim", [0, 1, 2], ids=["N", "T", "H"])
def test_offsets_past_2_31(far_dim: int, tmp_path: Path) -> None:
    """Offsets past 2^31 are right in all four tensors; NaN lies where they would wrap to."""
    shape = [2, 2, 2, 16]
    shape[far_dim] = 3
    outs, lses = random_states(*shape, torch.float16)
    expected = merge_states(outs, lses)
    far_outs, wrapped_outs = far_view(sparse(tmp_path / "outs", np.float16), (*shape,), far_dim)
    far_lses, wrapped_lses = far_view(
        sparse(tmp_path / "lses", np.float32), (*shape[:3],), far_dim
    )
    wrapped_outs.fill_(math.nan)
    wrapped_lses.fill_(math.nan)
    far_outs.copy_(outs)
    far_lses.copy_(lses)
    out, lse = torch.empty_like(expected.out), torch.empty_like(expected.lse)
    untouched = []
    if far_dim > 0:
        out_home, lse_home = (
            sparse(tmp_path / "out", np.float16),
            sparse(tmp_path / "lse", np.float32),
        )
        out, wrapped_out = far_view(out_home, (*shape[1:],), far_dim - 1)
        lse, wrapped_lse = far_view(lse_home, (*shape[1:3],), far_dim - 1)
        untouched = [wrapped_out, wrapped_lse]
    merge_states(far_outs, far_lses, out=out, lse=lse)
    assert_same_bits(AttnState(out.contiguous(), lse.contiguous()), expected)
    assert all((part == 0).all() for part in untouched)


@pytest.mark.parametrize("kernel", ["pack", "rescale"])
@pytest.mark.parametrize("far_dim", [0, 1], ids=["rank", "T"])
def test_reducer_offsets_past_2_31(far_dim: int, kernel: str, tmp_path: Path) -> None:
    """What the reducers write and read lands right in buffers of more than 2^31 elements."""
    shape = [2, 2, 2, 16]
    shape[far_dim] = 3
    num_ranks, num_tokens, heads_per_rank, head_dim = shape
    num_heads = num_ranks * heads_per_rank
    outs, lses = random_states(num_ranks, num_tokens, num_heads, head_dim, torch.float16)
    send, wrapped = far_view(sparse(tmp_path / "send", np.float16), (*shape,), far_dim)
    lse_home = sparse(tmp_path / "lse", np.float32)
    # [ranks, T, heads], as send has it.
    expected = outs[1].unflatten(1, (num_ranks, heads_per_rank)).transpose(0, 1)
    expected_lse = lses[1].unflatten(1, (num_ranks, heads_per_rank)).transpose(0, 1)
    if kernel == "pack":
        send_lse, wrapped_lse = far_view(lse_home, (*shape[:3],), far_dim)
        launch_pack(out=outs[1], lse=lses[1], send_out=send, send_lse=send_lse)
        assert torch.equal(send_lse, expected_lse)
        assert (wrapped_lse == 0).all()
        assert torch.equal(send, expected)
    else:
        far_lses, wrapped_lses = far_view(lse_home, (num_ranks, num_tokens, num_heads), far_dim)
        wrapped_lses.fill_(math.nan)
        far_lses.copy_(lses)
        lse = torch.empty(num_tokens, heads_per_rank)
        launch_rescale(rank=1, out=outs[1], lses=far_lses, send=send, lse=lse)
        near = torch.empty(*shape, dtype=torch.float16)
        launch_rescale(rank=1, out=outs[1], lses=lses, send=near, lse=torch.empty_like(lse))
        assert torch.equal(send, near)
        merged = reference_merge(outs, lses).lse[:, heads_per_rank : 2 * heads_per_rank]
        torch.testing.assert_close(lse.double(), merged, atol=1e-6, rtol=0)
    assert (wrapped == 0).all()
