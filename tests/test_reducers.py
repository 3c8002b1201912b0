"""ag_rs and a2a on real gloo ranks against the whole-context float64 oracle."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reducer_ranks import NAMES, Case

from dcp_lab import AttnState, Shard, make_reducer, merge_states
from dcp_lab.kernels import INTERPRETED
from dcp_lab.ops.checks import check_tensor
from dcp_lab.reducers import base, make_query_gather, queries
from dcp_lab.reducers.local_group import run_ranks
from dcp_lab.reference import reference_decode, reference_merge
from dcp_lab.testing import PagedCase, assert_within_budget

SIZES = (2, 3, 4)
NUM_Q_HEADS = 12
# With interleave 1 and 4 ranks: local lengths [9,8,8,8], [1,0,0,0], none, [1,1,1,0], ...
LENS = [33, 1, 0, 3, 17, 64]


def eager_merge(states: list[AttnState]) -> AttnState:
    """Merge in out's own dtype with plain torch: the yardstick for rounding."""
    outs, lses = (torch.stack(parts) for parts in zip(*states, strict=True))
    lses = torch.where(lses < math.inf, lses, -math.inf)
    lse = torch.logsumexp(lses, 0)
    weight = torch.where(lses > -math.inf, torch.exp(lses - lse), 0.0).to(outs.dtype)
    parts = torch.where((lses > -math.inf)[..., None], outs, 0) * weight[..., None]
    return AttnState(parts.sum(0), lse)


def random_state(num_tokens: int, head_dim: int, dtype: torch.dtype, seed: int) -> AttnState:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(num_tokens, NUM_Q_HEADS, head_dim, generator=generator).to(dtype)
    return AttnState(out, 3 * torch.randn(num_tokens, NUM_Q_HEADS, generator=generator))


def sharded(size: int, head_dim: int, interleave_size: int, dtype: torch.dtype) -> Case:
    """Return what each rank's attention gives of the same requests, sharded over the ranks."""
    whole = PagedCase.build(LENS, num_q_heads=NUM_Q_HEADS, num_kv_heads=2, head_dim=head_dim)
    states = []
    for rank in range(size):
        part = whole.on_rank(Shard(rank, size, interleave_size))
        out, lse = reference_decode(*part.tensors, **part.reference_options())
        states.append(AttnState(out.to(dtype), lse.float()))
    name = f"D{head_dim}-S{interleave_size}-{str(dtype).removeprefix('torch.')}"
    return Case(name, states, max_tokens=len(LENS) + 3)


SHARDED = [
    (64, 1, torch.float32),
    (64, 1, torch.float16),
    (64, 1, torch.bfloat16),
    (80, 16, torch.float32),
    (128, 16, torch.bfloat16),
    (512, 64, torch.float16),
]
SHARDED_IDS = [f"D{d}-S{s}-{str(t).removeprefix('torch.')}" for d, s, t in SHARDED]


def one_empty(size: int, empty: int) -> Case:
    """Return states of which one rank's is empty, said in each of the three ways, its out NaN."""
    states = [random_state(3, 64, torch.bfloat16, seed) for seed in range(size)]
    states[empty].out.fill_(math.nan)
    states[empty].lse.copy_(torch.tensor([-math.inf, math.inf, math.nan])[:, None])
    return Case(f"empty{empty}", states, max_tokens=3)


def all_empty(size: int) -> Case:
    """Return states with a row that no rank saw a key of, between rows that all did."""
    states = [random_state(3, 64, torch.float16, seed) for seed in range(size)]
    for rank, state in enumerate(states):
        state.out[1] = math.nan
        state.lse[1] = (-math.inf, math.inf, math.nan)[rank % 3]
    return Case("all_empty", states, max_tokens=3)


@functools.cache
def cases_for(size: int) -> list[Case]:
    cases = [sharded(size, *parameters) for parameters in SHARDED]
    cases += [Case(f"{c.name}-strided", c.states, c.max_tokens, strided=True) for c in cases[1:4]]
    cases += [one_empty(size, empty) for empty in range(size)]
    cases.append(all_empty(size))
    # 5 x 12 / size rows of 1 half: no part of the exchange is a multiple of 16 bytes.
    odd = [random_state(5, 1, torch.float16, seed) for seed in range(size)]
    cases.append(Case("odd", odd, max_tokens=7))
    # More rows than one program takes in the interpreter.
    rows = [random_state(91, 16, torch.bfloat16, seed) for seed in range(size)]
    cases.append(Case("many_rows", rows, max_tokens=91, times=3))
    weights = [2.0**n for n in range(1, 2 * size, 2)]
    shape = (1, NUM_Q_HEADS)
    hand = [
        AttnState(torch.full((*shape, 1), float(n)), torch.full(shape, math.log(weight)))
        for n, weight in enumerate(weights)
    ]
    cases.append(Case("by_hand", hand, max_tokens=1))
    return cases


# T of the calls that one reducer takes in turn, and then once more backwards.
SEQUENCE = (7, 7, 3, 0, 7, 1)


@functools.cache
def many_for(size: int) -> list[list[AttnState]]:
    return [
        [random_state(tokens, 80, torch.float16, 10 * turn + rank) for rank in range(size)]
        for turn, tokens in enumerate(SEQUENCE)
    ]


@functools.cache
def outcome_of(size: int) -> list[dict[Any, Any]] | Exception:
    """Start the ranks of a group of this size, once, also when they fail."""
    try:
        return run_ranks("reducer_ranks:run", size, args=(cases_for(size), many_for(size)))
    except Exception as error:
        return error


def results_of(size: int) -> list[dict[Any, Any]]:
    """Return what every rank of a group of this size got."""
    outcome = outcome_of(size)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def case_of(size: int, name: str) -> Case:
    return next(case for case in cases_for(size) if case.name == name)


def reduced(size: int, key: tuple[str, str], turn: int = 0) -> AttnState:
    """Return all heads, put together in rank order."""
    parts = [result[key][turn] for result in results_of(size)]
    for part in parts:
        assert part.out.shape[1] == part.lse.shape[1] == NUM_Q_HEADS // size
    return joined(parts)


def joined(parts: list[AttnState]) -> AttnState:
    return AttnState(
        torch.cat([part.out for part in parts], 1), torch.cat([part.lse for part in parts], 1)
    )


def merged(states: list[AttnState]) -> AttnState:
    outs, lses = (torch.stack(parts) for parts in zip(*states, strict=True))
    return merge_states(outs, lses)


def assert_same_bits(got: AttnState, expected: AttnState) -> None:
    for part, wanted in zip(got, expected, strict=True):
        assert part.dtype == wanted.dtype and part.shape == wanted.shape
        part, wanted = (tensor.contiguous().view(torch.uint8) for tensor in (part, wanted))
        assert torch.equal(part, wanted)


def assert_reduced(reducer: str, got: AttnState, states: list[AttnState]) -> None:
    """Assert the merge of all states: to the bit for a2a, within the error budget for ag_rs."""
    reference = reference_merge(*(list(parts) for parts in zip(*states, strict=True)))
    if states[0].out.numel():
        assert_within_budget(reducer, got, reference, eager_merge(states))
    if reducer == "a2a":
        assert_same_bits(got, merged(states))


pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not INTERPRETED,
        reason="needs TRITON_INTERPRET=1: these ranks use gloo and CPU tensors",
    ),
]
by_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: f"R{size}")
by_reducer = pytest.mark.parametrize("reducer", NAMES)


@by_size
@by_reducer
@pytest.mark.parametrize("parameters", SHARDED, ids=SHARDED_IDS)
def test_equals_whole_context(
    size: int, reducer: str, parameters: tuple[int, int, torch.dtype]
) -> None:
    """Sharded attention, reduced, is attention over the whole context, heads in order."""
    case = case_of(size, SHARDED_IDS[SHARDED.index(parameters)])
    whole = PagedCase.build(LENS, num_q_heads=NUM_Q_HEADS, num_kv_heads=2, head_dim=parameters[0])
    expected = reference_decode(*whole.tensors, **whole.reference_options())
    got = reduced(size, (case.name, reducer))
    assert_within_budget(f"{reducer} R={size}", got, expected, eager_merge(case.states))
    empty = torch.tensor(LENS) == 0
    assert (got.out[empty] == 0).all() and (got.lse[empty] == -math.inf).all()


@by_size
@pytest.mark.parametrize("name", [*SHARDED_IDS, "odd", "many_rows", "all_empty", "empty0"])
def test_a2a_is_merge_states(size: int, name: str) -> None:
    """a2a carries every bit of out and of the fp32 LSE: its result is that of one local merge."""
    states = case_of(size, name).states
    assert_same_bits(reduced(size, (name, "a2a")), merged(states))


@by_size
@by_reducer
def test_heads_in_rank_order(size: int, reducer: str) -> None:
    """Rank r gets heads [r Hq/size, (r+1) Hq/size), not every size-th one."""
    for rank, result in enumerate(results_of(size)):
        got = result["odd", reducer][0]
        per_rank = NUM_Q_HEADS // size
        mine = [
            AttnState(*(part[:, rank * per_rank : (rank + 1) * per_rank] for part in state))
            for state in case_of(size, "odd").states
        ]
        expected = reference_merge(*(list(parts) for parts in zip(*mine, strict=True)))
        assert_within_budget(f"rank {rank}", got, expected, eager_merge(mine))


@by_size
@by_reducer
@pytest.mark.parametrize("name", ["odd", "many_rows"])
def test_uneven_sizes(size: int, name: str, reducer: str) -> None:
    """Sizes that fill no vector, padding unit or block of rows give the merge too."""
    assert_reduced(reducer, reduced(size, (name, reducer)), case_of(size, name).states)


@by_size
@by_reducer
def test_lse_is_natural_log(size: int, reducer: str) -> None:
    """Outs 0, 1, ... of weights 2, 8, 32, ... give their weighted mean and ln of the sum."""
    weights = torch.tensor([2.0**n for n in range(1, 2 * size, 2)])
    mean = (weights * torch.arange(size)).sum() / weights.sum()
    got = reduced(size, ("by_hand", reducer))
    assert got.out.flatten().tolist() == pytest.approx([mean.item()] * NUM_Q_HEADS, rel=1e-6)
    assert got.lse.flatten().tolist() == pytest.approx([weights.sum().log().item()] * 12, rel=1e-6)
    if size == 2:
        assert got.out[0, 0, 0].item() == pytest.approx(0.8, abs=1e-6)
        assert got.lse[0, 0].item() == pytest.approx(2.302585, abs=1e-6)


@by_reducer
@pytest.mark.parametrize(
    "size, empty", [(size, empty) for size in SIZES for empty in range(size)], ids=str
)
def test_empty_rank_anywhere(size: int, empty: int, reducer: str) -> None:
    """A rank whose LSE is -inf, +inf or NaN counts as nothing, wherever it stands, its out NaN."""
    others = [s for r, s in enumerate(case_of(size, f"empty{empty}").states) if r != empty]
    got = reduced(size, (f"empty{empty}", reducer))
    reference = reference_merge(*(list(parts) for parts in zip(*others, strict=True)))
    assert_within_budget(reducer, got, reference, eager_merge(others))


@by_size
@by_reducer
def test_all_ranks_empty(size: int, reducer: str) -> None:
    """A row that no rank saw a key of gives out 0 and lse -inf; the rows beside it are right."""
    got = reduced(size, ("all_empty", reducer))
    assert (got.out[1] == 0).all() and (got.lse[1] == -math.inf).all()
    assert_reduced(reducer, got, case_of(size, "all_empty").states)


@by_size
@by_reducer
@pytest.mark.parametrize("name", SHARDED_IDS[1:4])
def test_strided_inputs(size: int, name: str, reducer: str) -> None:
    """Strided out and lse give the bits that contiguous ones give, and no input is changed."""
    assert_same_bits(reduced(size, (f"{name}-strided", reducer)), reduced(size, (name, reducer)))
    for result in results_of(size):
        for key in (name, f"{name}-strided"):
            before, after = result[key, "inputs"]
            assert_same_bits(after, before)


@by_size
@by_reducer
def test_deterministic(size: int, reducer: str) -> None:
    """Calls with the same inputs give the same bits."""
    first, *others = (reduced(size, ("many_rows", reducer), turn) for turn in range(3))
    for other in others:
        assert_same_bits(other, first)


@by_size
@by_reducer
def test_any_number_of_tokens(size: int, reducer: str) -> None:
    """One reducer takes any T from 0 to max_tokens in any order, and no call leaves a trace."""
    many = many_for(size)
    for turn, states in enumerate(many + many[::-1]):
        got = joined([result["sequence", reducer][turn] for result in results_of(size)])
        assert len(got.out) == len(got.lse) == len(states[0].out)
        assert_reduced(reducer, got, states)


REFUSALS = [
    r"state.out: expected at most max_tokens=7 tokens .*larger max_tokens\), got .*\[8, 12, 80\]",
    r"state.out: expected float16 \[T, 12, 80\], got float64",
    r"state.out: expected float16 \[T, 12, 80\], got float16 \[7, 11, 80\]",
    r"state.out: expected float16 \[T, 12, 80\], got float16 \[7, 12, 79\]",
    r"state.out: expected a contiguous last dimension",
    r"state.out: expected a tensor on cpu",
    r"state.lse: expected float32 \[T=7, 12\], got float32 \[6, 12\]",
    r"state.lse: expected float32 \[T=7, 12\], got float16",
    r"state.lse: expected a tensor on cpu",
    r"state: expected AttnState\(out, lse\), got float16 \[7, 12, 80\]",
]


@by_size
@by_reducer
def test_bad_state_is_refused(size: int, reducer: str) -> None:
    """A state that does not fit (T > max_tokens too) is a ValueError and changes nothing."""
    for result in results_of(size):
        before, messages, after = result["refused", reducer]
        assert len(messages) == len(REFUSALS)
        for message, pattern in zip(messages, REFUSALS, strict=True):
            with pytest.raises(ValueError, match=pattern):
                raise ValueError(message)
        assert_same_bits(after, before)


@by_size
def test_two_reducers_alive(size: int) -> None:
    """A result stays as it is while other reducers are called, in any order."""
    many = many_for(size)
    for i, name in enumerate(name for name in NAMES for _ in range(2)):
        then, later = (
            joined([result["alive"][i][when] for result in results_of(size)]) for when in (0, 1)
        )
        assert_same_bits(later, then)
        assert_reduced(name, then, many[i % 2])


@by_size
@by_reducer
def test_groups(size: int, reducer: str) -> None:
    """A group need not be the world: ranks count inside it, and one alone gets all heads back."""
    states = many_for(size)[0]
    results = [result["groups"] for result in results_of(size)]
    for state, result in zip(states, results, strict=True):
        assert_same_bits(result["alone", reducer], state)
    outer = joined([results[rank]["outer", reducer] for rank in (0, size - 1)])
    assert_reduced(reducer, outer, [states[0], states[-1]])
    for rank in range(1, size - 1):
        with pytest.raises(ValueError, match="group: expected .* process group that this rank"):
            raise ValueError(results[rank]["outer", reducer])


def test_bad_rank_ends_the_wait() -> None:
    """A silent rank ends the others' call in an error after the timeout, a dead one at once."""
    *others, last = run_ranks("reducer_ranks:with_a_bad_rank", 3, timeout_s=100)
    assert last == []
    for ends in others:
        assert [name for name, _, _ in ends] == list(NAMES * 2)
        for _, elapsed, end in ends[:2]:
            assert "imed out" in end or "onnection closed" in end
            assert elapsed < 5
        for _, elapsed, end in ends[2:]:
            assert "onnection" in end
            # The silent rank sleeps 6 s, then ends; the groups' own timeout is 60 s.
            assert elapsed < 20


@pytest.fixture
def lone_group(tmp_path: Path) -> Iterator[None]:
    """A default group of this process alone."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


ARGUMENTS: dict[str, Any] = {
    "name": "a2a",
    "group": None,
    "max_tokens": 4,
    "num_q_heads": 6,
    "head_dim": 64,
    "dtype": torch.float32,
    "device": "cpu",
}


@by_reducer
@pytest.mark.usefixtures("lone_group")
def test_group_of_one(reducer: str) -> None:
    """A group of one gives the same type, its own copy, and cleans an empty row."""
    state = AttnState(torch.randn(3, 6, 64), torch.randn(3, 6))
    state.out[1], state.lse[1] = math.nan, math.inf
    got = make_reducer(**ARGUMENTS | {"name": reducer})(state)
    assert isinstance(got, AttnState)
    assert got.out.data_ptr() != state.out.data_ptr()
    assert (got.out[1] == 0).all() and (got.lse[1] == -math.inf).all()
    for row in (0, 2):
        assert torch.equal(got.out[row], state.out[row])
        assert torch.equal(got.lse[row], state.lse[row])


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that reducers and gathers have checked."""
    found: list[str] = []

    def noting(name: str, *args: Any, **options: Any) -> torch.Tensor:
        found.append(name)
        return check_tensor(name, *args, **options)

    for module in (base, queries):
        monkeypatch.setattr(module, "check_tensor", noting)
    return found


@by_reducer
@pytest.mark.parametrize("alone", [False, True], ids=["merges", "exchanges"])
@pytest.mark.usefixtures("lone_group", "remembered")
def test_a_repeated_call_is_not_checked_anew(reducer: str, alone: bool, checks: list[str]) -> None:
    """The same buffers are known by their place; any other argument is checked, and refused."""
    call = make_reducer(**ARGUMENTS | {"name": reducer})
    if alone:
        call.exchange_alone()
    # The LSE is copied on the way, so that every branch of a call comes twice.
    state = AttnState(torch.randn(3, 6, 64), torch.randn(6, 3).T)
    shorter, output = AttnState(*(part[:2] for part in state)), torch.empty(3, 6, 64)
    for turn in range(3):
        state.out.mul_(1.5)
        state.lse[turn] = -math.inf
        for given, out in ((state, None), (shorter, None), (state, output)):
            checks.clear()
            got = call(given, out=out)
            assert bool(checks) == (turn == 0)
            seen = given.lse > -math.inf
            assert torch.equal(got.lse, given.lse)
            assert torch.equal(got.out, torch.where(seen[..., None], given.out, 0))
            assert out is None or got.out is out
    # Another tensor at another place, though with the same contents, is checked.
    checks.clear()
    assert torch.equal(call(AttnState(state.out.clone(), state.lse)).out, output)
    assert checks == ["state.out", "state.lse"]
    longer = AttnState(torch.zeros(5, 6, 64), torch.zeros(5, 6))
    for bad, out, message in (
        (longer, None, "state.out: expected at most max_tokens=4"),
        (AttnState(state.out.half(), state.lse), None, "state.out: expected float32"),
        (AttnState(state.out.view(torch.int32), state.lse), None, "state.out: expected float32"),
        (AttnState(state.out, state.lse[:2]), None, "state.lse: expected"),
        (AttnState(state.out.mT.contiguous().mT, state.lse), None, "state.out: .*contiguous"),
        (AttnState([1.0], state.lse), None, "state.out: expected a tensor"),
        (state.out, None, "state: expected AttnState"),
        (state, output[:2], "out: expected"),
        (state, output.mT.contiguous().mT, "out: expected a contiguous tensor"),
        (shorter, output, "out: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            call(bad, out=out)
    # What was known of where results go is forgotten with write_to.
    out, lse = torch.full((4, 6, 64), math.nan), torch.full((4, 6), math.nan)
    call.write_to(out, lse)
    call(state)
    assert torch.equal(out[:3], output) and torch.equal(lse[:3], state.lse)


@pytest.mark.parametrize("alone", [False, True], ids=["copies", "exchanges"])
@pytest.mark.usefixtures("lone_group", "remembered")
def test_a_repeated_gather_of_queries_is_not_checked_anew(alone: bool, checks: list[str]) -> None:
    """As of a reducer; q that is not contiguous is copied on the way."""
    sizes = {"max_tokens": 4, "num_q_heads_local": 2, "head_dim": 16, "dtype": torch.float32}
    gather = make_query_gather("nccl", group=None, device="cpu", **sizes)
    if alone:
        gather.exchange_alone()
    memory = torch.randn(4, 2, 48)
    slices = (memory[..., :16], memory[:3, :, 16:32], memory[:3, :, 16:32].contiguous())
    for turn in range(3):
        for q in slices:
            q.mul_(1.5)
            checks.clear()
            assert torch.equal(gather(q), q)
            assert bool(checks) == (turn == 0)
    q = slices[0]
    for bad, message in (
        (torch.zeros(5, 2, 16), "q: expected at most max_tokens=4"),
        (q.half(), "q: expected float32"),
        (q[:, :1], "q: expected float32"),
        (memory[..., ::3], "q: expected a contiguous last dimension"),
        ([1.0], r"q: expected a tensor \[T, 2, 16\]"),
    ):
        with pytest.raises(ValueError, match=message):
            gather(bad)


@by_reducer
@pytest.mark.usefixtures("lone_group")
def test_a_reducer_writes_where_it_is_told(reducer: str) -> None:
    """out= for one call, write_to for all later ones: at no copy, and odd tensors are refused."""
    call = make_reducer(**ARGUMENTS | {"name": reducer})
    held = call.memory_bytes()
    state = AttnState(torch.randn(3, 6, 64), torch.randn(3, 6))
    output = torch.full((5, 6, 64), math.nan)
    merged = call(state, out=output[1:4])
    assert merged.out.data_ptr() == output[1].data_ptr()
    assert torch.equal(output[1:4], state.out) and output[[0, 4]].isnan().all()
    with pytest.raises(ValueError, match="out: expected"):
        call(state, out=output[:2])
    with pytest.raises(ValueError, match="out: expected a contiguous tensor"):
        call(state, out=torch.empty(3, 6, 128)[..., :64])
    out, lse = torch.full((4, 6, 64), math.nan), torch.full((4, 6), math.nan)
    call.write_to(out, lse)
    call(state)
    assert torch.equal(out[:3], state.out) and torch.equal(lse[:3], state.lse)
    assert out[3].isnan().all() and lse[3].isnan().all()
    assert call.memory_bytes() == held
    with pytest.raises(ValueError, match="^out: expected"):
        call.write_to(out[:1], lse)
    with pytest.raises(ValueError, match="^lse: expected a contiguous tensor"):
        call.write_to(out, torch.empty(6, 4).t())


@pytest.mark.usefixtures("lone_group")
@pytest.mark.parametrize("reducer", NAMES)
def test_result_lives_until_the_next_call(reducer: str) -> None:
    """A call writes into the buffers of the one before: nothing is allocated a call."""
    call = make_reducer(**ARGUMENTS | {"name": reducer})
    first = call(AttnState(torch.randn(3, 6, 64), torch.randn(3, 6)))
    second = call(AttnState(torch.randn(2, 6, 64), torch.randn(2, 6)))
    assert second.out.data_ptr() == first.out.data_ptr()
    assert second.lse.data_ptr() == first.lse.data_ptr()


@pytest.mark.usefixtures("lone_group")
@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"name": "nccl"}, ValueError, "name: expected 'ag_rs' or 'a2a' or 'direct', got 'nccl'"),
        ({"name": "direct"}, NotImplementedError, "direct"),
        ({"group": 7}, ValueError, "group: expected a torch.distributed process group .*got 7"),
        ({"max_tokens": 0}, ValueError, "max_tokens: expected an int >= 1, got 0"),
        ({"num_q_heads": 0}, ValueError, "num_q_heads: expected an int >= 1, got 0"),
        ({"head_dim": 0}, ValueError, "head_dim: expected an int >= 1, got 0"),
        ({"head_dim": 576}, NotImplementedError, "head_dim=576 is not supported"),
        (
            {"dtype": torch.float64},
            ValueError,
            r"dtype: expected torch.float32 or .*got torch.float64",
        ),
        (
            {"device": "meta"},
            ValueError,
            "device: expected a type that the group's backend serves",
        ),
    ],
    ids=lambda value: (
        "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else ""
    ),
)
def test_bad_argument(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """make_reducer refuses what it cannot do and says what it can."""
    with pytest.raises(error, match=message):
        make_reducer(**ARGUMENTS | arguments)


def test_heads_that_do_not_divide(monkeypatch: pytest.MonkeyPatch, lone_group: None) -> None:
    """Heads that do not divide by the ranks are refused with both numbers."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    with pytest.raises(
        ValueError, match="num_q_heads: expected a multiple of the group's 4 ranks"
    ):
        make_reducer(**ARGUMENTS)


def test_no_group_at_all() -> None:
    """Without torch.distributed the default group is not guessed: the error says what to call."""
    with pytest.raises(ValueError, match="group: .*init_process_group first, got None"):
        make_reducer(**ARGUMENTS)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_memory_bytes(size: int, monkeypatch: pytest.MonkeyPatch, lone_group: None) -> None:
    """memory_bytes is the result's bytes plus the exchange buffers', worked out by hand."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: size)
    arguments = ARGUMENTS | {"num_q_heads": 16, "dtype": torch.bfloat16, "max_tokens": 5}
    heads = 16 // size
    result = 5 * heads * (64 * 2 + 4)
    # Out and LSE of 5 tokens for each rank, each padded to 16 bytes, sent and received.
    chunk = 5 * heads * 64 * 2 + -(-5 * heads * 4 // 16) * 16
    a2a = 2 * size * chunk
    # Own LSE, gathered LSEs, weighed out.
    ag_rs = 5 * 16 * 4 * (1 + size) + 5 * 16 * 64 * 2
    for name, exchange in (("a2a", a2a), ("ag_rs", ag_rs)):
        expected = result + (exchange if size > 1 else 0)
        assert make_reducer(**arguments | {"name": name}).memory_bytes() == expected
