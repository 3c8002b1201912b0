"""Launches that are remembered: what is launched again, and what tells calls apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dcp_lab import AttnState, DecodeWorkspace, Shard, gather_decode, paged_decode
from dcp_lab.graphs import audit
from dcp_lab.graphs.watch import watching
from dcp_lab.kernels import launch
from dcp_lab.kernels.launch import BoundCalls, call_key
from dcp_lab.ops import decode
from dcp_lab.ops import gather as ops
from dcp_lab.ops.gather import GatherWorkspace
from dcp_lab.testing import PagedCase

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Counted:
    """Stands for a Launch."""

    def __init__(self) -> None:
        self.runs = self.binds = 0

    def run(self) -> None:
        self.runs += 1

    def bind(self, *, keep: bool) -> object:
        assert not keep
        self.binds += 1
        return self.run


def test_a_known_call_only_launches() -> None:
    calls, one = BoundCalls(), Counted()
    assert not calls.again("key")
    calls.first("key", [one])
    assert calls.again("key") and calls.again("key")
    assert (one.binds, one.runs) == (1, 2)
    assert not calls.again("other")


def test_without_a_key_nothing_is_kept() -> None:
    calls, one = BoundCalls(), Counted()
    calls.first(None, [one])
    assert (one.binds, one.runs) == (0, 1) and not calls.again(None)
    # What no check has passed yet may not hash.
    assert not calls.again(([],))


def test_nothing_is_remembered_while_launches_are_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, one = BoundCalls(), Counted()
    calls.first("key", [one])
    monkeypatch.setattr(BoundCalls, "paused", True)
    assert not calls.again("key")
    calls.first("key", [one])
    assert (one.binds, one.runs) == (1, 1)


def test_what_is_kept_is_bounded() -> None:
    """The oldest call makes room for a new one; those between stay."""
    calls, one = BoundCalls(most=2), Counted()
    for key in "abc":
        calls.first(key, [one])
    assert not calls.again("a") and calls.again("b") and calls.again("c")


def test_keys_tell_types_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    keys = [call_key(value) for value in (1, True, 1.0, None, "1")]
    assert len(set(keys)) == len(keys)
    assert call_key(torch.zeros(1)) is None
    monkeypatch.setattr(launch, "INTERPRETED", True)
    assert call_key(1) is None


def test_repeated_decode_equals_the_first(
    remembered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contents changed in place show; another buffer, shape or option is another call."""
    checks: list[int] = []
    check = decode.check_decode_arguments
    monkeypatch.setattr(
        decode, "check_decode_arguments", lambda **given: (checks.append(1), check(**given))[1]
    )
    case = PagedCase.build((40, 60, 130), device=DEVICE)
    workspace = DecodeWorkspace(3, 4, 2, 32, kv_dtype=torch.float32, device=DEVICE)
    out = torch.empty_like(case.q)
    lse = torch.empty(case.q.shape[:2], device=DEVICE)
    options = {"workspace": workspace, "out": out, "lse": lse}
    for lens in ((40, 0, 130), (7, 60, 33), (0, 1, 128)):
        case.q.mul_(1.25)
        case.seq_lens.copy_(torch.tensor(lens))
        workspace.prepare(case.seq_lens)
        checks.clear()
        paged_decode(*case.tensors, **options)
        assert len(checks) == (lens == (40, 0, 130))
        again = paged_decode(*case.tensors, workspace=workspace)
        assert torch.equal(out, again.out) and torch.equal(lse, again.lse)
    assert len(workspace.calls._calls) == len(workspace._prepares._calls) == 1
    paged_decode(*case.tensors, softmax_scale=0.5, **options)
    again = paged_decode(*case.tensors, softmax_scale=0.5, workspace=workspace)
    assert torch.equal(out, again.out) and len(workspace.calls._calls) == 2
    # An argument that breaks the contract is refused behind a good call too.
    with pytest.raises(ValueError, match="seq_lens"):
        paged_decode(*case.tensors[:4], case.seq_lens.long(), **options)


def test_a_repeated_prepare_is_for_the_arguments_that_it_is_given(remembered: None) -> None:
    """Each of a workspace's earlier prepares may come again, with other contents."""
    case = PagedCase.build((40, 5, 130), device=DEVICE)
    lens = {n: case.seq_lens[:n] for n in (3, 2)}
    workspace = DecodeWorkspace(3, 4, 2, 32, kv_dtype=torch.float32, device=DEVICE)
    fresh = DecodeWorkspace(3, 4, 2, 32, kv_dtype=torch.float32, device=DEVICE)
    turns = [(3, None), (2, 16), (3, None), (2, 16), (2, None)]
    for requests, window in turns:
        case.seq_lens.copy_(case.seq_lens.roll(1))
        workspace.prepare(lens[requests], sliding_window=window)
        fresh._prepares = BoundCalls()
        fresh.prepare(lens[requests], sliding_window=window)
        assert workspace.prepared == fresh.prepared
        items = workspace.items_for(requests)
        assert torch.equal(workspace.items[:items], fresh.items[:items])
    assert len(workspace._prepares._calls) == 3
    with pytest.raises(ValueError, match="seq_lens: expected int32"):
        workspace.prepare(lens[2].long())
    with pytest.raises(ValueError, match="sliding_window: expected an int >= 1, got True"):
        workspace.prepare(lens[2], sliding_window=True)


def test_a_remembered_call_is_watched_like_any_other(remembered: None) -> None:
    """Whoever watches sees each launch and its tensors, also of a call that is remembered."""
    case = PagedCase.build((9, 20), device=DEVICE)
    workspace = DecodeWorkspace(2, 4, 2, 32, kv_dtype=torch.float32, device=DEVICE)
    state = paged_decode(*case.tensors)

    def step() -> AttnState:
        workspace.prepare(case.seq_lens)
        return paged_decode(*case.tensors, workspace=workspace, out=state.out, lse=state.lse)

    step()
    step()
    with watching(DEVICE) as trace:
        step()
    names = ["_plan_kernel", "_decode_kernel", "_reduce_kernel"]
    assert [call.name for call in trace.calls] == names
    assert case.seq_lens.data_ptr() in {o.address for o in trace.calls[0].operands}
    # As a graph would replay it, after contents have changed.
    mutate = [lambda: None, lambda: case.q.mul_(0.5), lambda: case.seq_lens.sub_(1)]
    report = audit(step, lambda n: mutate[n](), rounds=3, warmup=1, device=DEVICE)
    assert report.ok and report.calls == 3, str(report)


def every_argument() -> dict[str, Any]:
    """Return a call that has every argument: two requests, 3 query tokens, any page valid."""
    torch.manual_seed(0)
    cache = torch.randn(2, 6, 4, 1, 16).to(torch.float8_e4m3fn)
    given = {
        "q": torch.randn(3, 2, 16),
        "k_cache": cache[0],
        "v_cache": cache[1],
        "block_table": torch.tensor([[3, 0, 5], [1, 2, 4]], dtype=torch.int32),
        "seq_lens": torch.tensor([11, 6], dtype=torch.int32),
        "k_scale": torch.tensor([0.5]),
        "v_scale": torch.tensor([2.0]),
        "sinks": torch.tensor([0.5, -1.0]),
        "query_start_loc": torch.tensor([0, 2, 3], dtype=torch.int32),
        "global_seq_lens": torch.tensor([21, 12], dtype=torch.int32),
        "out": torch.full((3, 2, 16), torch.nan),
        "lse": torch.full((3, 2), torch.nan),
    }
    given = {name: tensor.to(DEVICE) for name, tensor in given.items()}
    rest = {"sliding_window": 9, "softcap": 2.0, "max_query_len": 2, "shard": Shard(0, 2)}
    return {**given, **rest, "num_splits": 2}


def twice(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: {name: 2 * given[name].float()}


# What a later call is given instead.
OTHERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    **{name: twice(name) for name in ("q", "k_scale", "v_scale", "sinks")},
    "k_cache": lambda given: {"k_cache": given["v_cache"]},
    "v_cache": lambda given: {"v_cache": given["k_cache"]},
    "strides": lambda given: {"q": given["q"].flip(1).as_strided((3, 2, 16), (16, 48, 1))},
    "block_table": lambda given: {"block_table": given["block_table"].flip(0)},
    "seq_lens": lambda given: {"seq_lens": given["seq_lens"] - 1},
    "softmax_scale": lambda given: {"softmax_scale": 0.5},
    "a float k_scale": lambda given: {"k_scale": 0.25},
    "a float v_scale": lambda given: {"v_scale": 0.25},
    "sliding_window": lambda given: {"sliding_window": 5},
    "softcap": lambda given: {"softcap": 0.1},
    "no sinks": lambda given: {"sinks": None},
    "query_start_loc": lambda given: {"query_start_loc": given["query_start_loc"].clamp(max=2)},
    "max_query_len": lambda given: {"max_query_len": 3},
    "shard": lambda given: {"shard": Shard(1, 2)},
    "global_seq_lens": lambda given: {"global_seq_lens": given["global_seq_lens"] - 3},
    "num_splits": lambda given: {"num_splits": 3},
    "out": lambda given: {"out": torch.full_like(given["out"], torch.nan)},
    "lse": lambda given: {"lse": torch.full_like(given["lse"], torch.nan)},
    "nothing": lambda given: {},
}


@pytest.mark.parametrize("op", [paged_decode, gather_decode], ids=lambda op: op.__name__)
def test_any_other_argument_is_another_call(
    remembered: None, monkeypatch: pytest.MonkeyPatch, op: Callable[..., AttnState]
) -> None:
    """Behind a call that is remembered, one with one other argument is planned for itself."""
    planned: list[str] = []

    def bind(self: launch.Launch, *, keep: bool) -> Callable[[], None]:
        # What it would launch is known by the tensors and numbers that it was planned with.
        planned.append(self.kernel.__name__)
        return lambda: None

    monkeypatch.setattr(launch.Launch, "bind", bind)
    given = every_argument()
    workspace: DecodeWorkspace | GatherWorkspace
    if op is paged_decode:
        sizes = {"max_query_len": 3, "max_items": 6, "kv_dtype": torch.float32}
        workspace = DecodeWorkspace(2, 2, 1, 16, device=DEVICE, **sizes)
    else:
        workspace = GatherWorkspace(2, 20, 1, 16, 4, dtype=torch.float32, device=DEVICE)
        workspace.prepare(given["seq_lens"], max_pages=3)
    op(**given, workspace=workspace)
    for name, change in OTHERS.items():
        other = {**given, **change(given)}
        for known in (name == "nothing", True):
            planned.clear()
            got = op(**other, workspace=workspace)
            assert bool(planned) != known, name
            assert got.out is other["out"] and got.lse is other["lse"]
    assert len(workspace.calls._calls) == len(OTHERS)


def gathered(gather: str, **options: Any) -> tuple[GatherWorkspace, dict[str, Any]]:
    """Return a prepared workspace and a plain call's arguments."""
    given = every_argument()
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "out", "lse")
    given = {**{name: given[name] for name in names}, "gather": gather, **options}
    given |= {name: given[name][:2] for name in ("q", "out", "lse")}
    workspace = GatherWorkspace(2, 24, 1, 16, 4, dtype=torch.float32, gather=gather, device=DEVICE)
    workspace.prepare(given["seq_lens"], max_pages=3)
    return workspace, given


@pytest.mark.parametrize("attend", ["prefill", "split"])
@pytest.mark.parametrize("gather", ["per_token", "per_page", "published"])
def test_a_repeated_gather_is_only_launched(
    remembered: None, monkeypatch: pytest.MonkeyPatch, gather: str, attend: str
) -> None:
    """A step after the first is neither checked nor planned, and reads what changed in place."""
    workspace, given = gathered(gather, attend=attend)
    planned: list[str] = []

    def noting(made: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: (planned.append(made.__name__), made(*args, **options))[1]

    for name in ("check_decode_arguments", "_plan_attention", "check_tensor"):
        monkeypatch.setattr(ops, name, noting(getattr(ops, name)))
    # Without a token too, as a rank may be; the published gather's grid follows.
    for step, lens in enumerate([(11, 6), (0, 0), (3, 0), (10, 12)]):
        given["seq_lens"].copy_(torch.tensor(lens))
        given["q"].mul_(1.5)
        planned.clear()
        workspace.prepare(given["seq_lens"], max_pages=3)
        got = gather_decode(**given, workspace=workspace)
        assert bool(planned) == (step == 0)
        alone = gather_decode(**{**given, "out": None, "lse": None})
        assert torch.equal(got.out, alone.out) and torch.equal(got.lse, alone.lse)
    assert len(workspace.calls._calls) == 1


def test_a_repeated_gather_keeps_its_refusals(remembered: None) -> None:
    """What breaks the contract is refused behind a good call, and the good call goes on."""
    workspace, given = gathered("published", total_tokens=20)
    first = gather_decode(**given, workspace=workspace).out.clone()
    for changed, message in (
        ({"gather": "per_page"}, "total_tokens: expected None with workspace"),
        ({"gather": "fast"}, "gather: expected one of"),
        ({"attend": True}, "attend: expected"),
        ({"total_tokens": 25}, "total_tokens: expected at most the workspace's 24"),
        ({"total_tokens": True}, "total_tokens: expected an int"),
        ({"q": given["q"].half()}, "k_cache|out: expected float16"),
        ({"block_table": given["block_table"][:, :2]}, "prepared for this call: .* max_pages=2"),
        ({"softmax_scale": [1.0]}, "softmax_scale"),
    ):
        with pytest.raises(ValueError, match=message):
            gather_decode(**{**given, **changed}, workspace=workspace)
    with pytest.raises(ValueError, match="max_pages: expected an int from 0"):
        workspace.prepare(given["seq_lens"], max_pages=True)
    starts = torch.zeros_like(given["seq_lens"])
    for lens, options in (
        (given["seq_lens"][:1], {}),
        (given["seq_lens"], {"seq_starts": starts}),
    ):
        # Twice: a prepare that is remembered tells what it is for, too.
        for _ in range(2):
            workspace.prepare(lens, max_pages=3, **options)
            with pytest.raises(ValueError, match="prepared for this call: 2 requests"):
                gather_decode(**given, workspace=workspace)
            workspace.prepare(given["seq_lens"], max_pages=3)
            assert torch.equal(gather_decode(**given, workspace=workspace).out, first)


@pytest.mark.parametrize("told", [12, 20, 0])
def test_a_told_total_is_part_of_the_call(remembered: None, told: int) -> None:
    """So many tokens are copied, also behind a call of more."""
    workspace, given = gathered("published")
    for total in (None, 20, told, None):
        workspace.k.fill_(1000.0)
        gather_decode(**given, workspace=workspace, total_tokens=total)
        # The requests have 17 tokens.
        rows = 17 if total is None else min(17, total)
        assert (workspace.k[:rows] != 1000).all() and (workspace.k[rows:] == 1000).all()


def test_workspaces_do_not_share_calls(remembered: None) -> None:
    """A call with another workspace, or with another one's K and V, goes through those."""
    (one, given), (two, _) = gathered("per_page"), gathered("per_page")
    gather_decode(**given, workspace=one)
    two.k.fill_(torch.nan)
    gather_decode(**given, workspace=two)
    assert not two.k[:17].isnan().any()
    one.k, one.v = torch.full_like(one.k, torch.nan), torch.full_like(one.v, torch.nan)
    got = gather_decode(**given, workspace=one)
    assert not one.k[:17].isnan().any() and not got.out.isnan().any()


def test_partials_stay_where_they_are(remembered: None) -> None:
    """More splits take another buffer; the first one's stays, and all are counted."""
    workspace, given = gathered("per_page", attend="split")
    sizes, partials = [workspace.memory_bytes()], []
    for num_splits in (2, 3, 9, 2, 3):
        got = gather_decode(**given, num_splits=num_splits, workspace=workspace)
        assert not got.out.isnan().any()
        # Of 2 requests, 1 query token, 2 heads.
        out, lse = workspace.partials(2 * num_splits, 1, 2, 16)
        assert out.shape == (2 * num_splits, 1, 2, 16) and lse.shape == (2 * num_splits, 1, 2)
        partials.append((num_splits, out.data_ptr(), lse.data_ptr()))
        assert lse.data_ptr() >= out.data_ptr() + out.nbytes
        sizes.append(workspace.memory_bytes())
    assert partials[3:] == partials[:2]
    largest = 2 * 9 * 2 * (16 + 1) * 4
    assert sizes == sorted(sizes) and sizes[3:] == [sizes[-1]] * 3
    assert sizes[-1] - sizes[0] <= 4 * largest
    with watching(DEVICE) as trace:
        gather_decode(**given, num_splits=9, workspace=workspace)
    assert [call.name for call in trace.calls] == [
        "_gather_per_page_kernel",
        "_varlen_kernel",
        "_reduce_kernel",
    ]
    assert not trace.made


def test_a_counted_launch_is_bound_to_all_but_its_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound, it asks for the number anew, in its place among the arguments, and sizes the grid."""
    launched: list[tuple[object, ...]] = []

    class Compiled:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments: launched.append((*grid, *arguments))

    class Kernel:
        arg_names = ("k_ptr", "num_tokens", "stride")

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
            def run(**given: object) -> Compiled:
                launched.append((*grid, given["num_tokens"]))
                return Compiled()

            return run

    monkeypatch.setattr(ops, "INTERPRETED", False)
    monkeypatch.setattr(ops.kernels, "_gather_tokens_kernel", Kernel())
    count = torch.zeros((), dtype=torch.int32)
    counted = ops.CountedLaunch(count, {"stride": 7, "k_ptr": "k"}, most_programs=4)
    # Without a token nothing is launched, but to bind it.
    assert counted.run() is None and launched == []
    launch = counted.bind(keep=False)
    assert launched == [(1, 1, 0)]
    for tokens, grid in ((3, 3), (0, None), (9, 4)):
        launched.clear()
        count.fill_(tokens)
        launch()
        assert launched == ([(grid, 1, 1, "k", tokens, 7)] if tokens else [])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="graph capture needs a GPU")
@pytest.mark.parametrize("gather", ["per_token", "per_page"])
def test_a_first_call_inside_a_capture_is_remembered(gather: str) -> None:
    """Its partials outlive the graph; the same call then runs eagerly, and other graphs too."""
    workspace, given = gathered(gather, attend="split", num_splits=2)
    # Compiled before.
    gather_decode(**{**given, "out": None, "lse": None})
    workspace._prepares = BoundCalls()
    expected = gather_decode(**{**given, "out": None, "lse": None})
    graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    for graph in graphs:
        with torch.cuda.graph(graph):
            workspace.prepare(given["seq_lens"], max_pages=3)
            gather_decode(**given, workspace=workspace)
    for run in (graphs[0].replay, graphs[1].replay):
        given["out"].fill_(torch.nan)
        run()
        assert torch.equal(given["out"], expected.out)
    del graphs, graph, run
    torch.cuda.empty_cache()
    # What the graph's pool held must not be anybody else's now.
    others = [torch.full((1 << 16,), torch.nan, device=DEVICE) for _ in range(64)]
    for _ in range(2):
        given["out"].fill_(torch.nan)
        gather_decode(**given, workspace=workspace)
        assert torch.equal(given["out"], expected.out)
    assert all(other.isnan().all() for other in others)
    assert len(workspace.calls._calls) == 1


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="graph capture needs a GPU")
def test_a_remembered_published_gather_is_refused_inside_a_capture() -> None:
    """It would have to wait, bound or not; told the total it is captured."""
    workspace, given = gathered("published")
    expected = gather_decode(**given, workspace=workspace).out.clone()
    gather_decode(**given, workspace=workspace, total_tokens=17)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="total_tokens: expected an int under graph capture"):
            gather_decode(**given, workspace=workspace)
        gather_decode(**given, workspace=workspace, total_tokens=17)
    given["out"].fill_(torch.nan)
    graph.replay()
    assert torch.equal(given["out"], expected)
    assert torch.equal(gather_decode(**given, workspace=workspace).out, expected)
