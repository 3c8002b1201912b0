"""The vLLM backend's own parts, without vLLM: options, reasons, cache views, the gate, a step."""

from __future__ import annotations

import enum
import logging
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_lab import AttnState, Shard
from dcp_lab.kernels import launch
from dcp_lab.kernels.exchange import ExchangeConfig
from dcp_lab.ops.gather import CountedLaunch
from dcp_lab.reference import reference_decode, reference_merge
from dcp_lab.testing import PagedCase
from dcp_lab.vllm_plugin import attention, gate
from dcp_lab.vllm_plugin.attention import (
    MAX_REDUCER_TOKENS,
    LayerShape,
    Limits,
    Planner,
    attend,
    scratch_pair,
)
from dcp_lab.vllm_plugin.options import VALUES, Options, read_options
from dcp_lab.vllm_plugin.reasons import configuration_reasons, explain
from dcp_lab.vllm_plugin.versions import kv_cache_shape, prefill_context, split_kv_cache

# ---- options --------------------------------------------------------------------------------


def test_nothing_given_gives_the_documented_defaults():
    """Without options the pages are read in place and vLLM's own choice of reducer holds."""
    assert read_options(None, {}) == Options("paged", "published", "auto", "auto", "off")
    assert [values[0] for values in VALUES.values()] == list(vars(Options()).values())


def test_the_command_line_goes_before_the_environment():
    """An option in --additional-config wins over the variable of the same name."""
    environ = {"DCP_LAB_REDUCER": "a2a", "DCP_LAB_ATTENTION_PATH": "gather"}
    options = read_options({"dcp_lab": {"reducer": "direct"}, "other": 1}, environ)
    assert (options.reducer, options.attention_path) == ("direct", "gather")


@pytest.mark.parametrize(
    ("config", "environ", "message"),
    [
        ({"dcp_lab": {"reducer": "nccl"}}, {}, "dcp_lab.reducer: expected auto or ag_rs or"),
        ({"dcp_lab": {"reduce": "a2a"}}, {}, "expected some of attention_path"),
        ({"dcp_lab": "a2a"}, {}, "expected options by name, got 'a2a'"),
        ({"dcp_lab": {1: 2, "x": 3}}, {}, "expected some of attention_path, .*, got 1"),
        ({"dcp_lab": {"gather": "per_page"}}, {}, "gather: expected attention_path=gather beside"),
        ({"dcp_lab": {"attention_path": "paged"}}, {"DCP_LAB_GATHER": "per_page"}, "_GATHER: exp"),
        ({"dcp-lab": {"reducer": "a2a"}}, {}, "expected 'dcp_lab', got 'dcp-lab'"),
        ({"reducer": "a2a"}, {}, "expected 'reducer' inside 'dcp_lab', got 'reducer' outside"),
        ({"attention-path": "gather"}, {}, "expected 'attention_path' inside 'dcp_lab'"),
        ({}, {"DCP_LAB_REDUCERS": "a2a"}, "expected DCP_LAB_REDUCER, got DCP_LAB_REDUCERS"),
        ({}, {"dcp_lab_reducer": "a2a"}, "expected DCP_LAB_REDUCER, got dcp_lab_reducer"),
        ({"dcp_lab": {}}, {"DCP_LAB_ATTENTION": "x"}, "expected DCP_LAB_ATTENTION_PATH"),
        ({}, {"DCP_LAB_ROCM_FULL_GRAPH_GATE": "on"}, "GATE: expected off or a2a or all, got 'on'"),
    ],
)
def test_a_wrong_option_is_named(config: Any, environ: dict[str, str], message: str):
    """A typo is an error that says where it stands and what there is, never a default."""
    with pytest.raises(ValueError, match=message):
        read_options(config, environ)


def test_the_labs_other_variables_are_no_near_misses():
    """Every variable of the lab that is no option's may be set beside the backend."""
    root = Path(__file__).resolve().parent.parent
    paths = [p for d in ("dcp_lab", "tools") for p in (root / d).rglob("*.py")] + [
        root / "Makefile"
    ]
    options = {f"DCP_LAB_{name.upper()}" for name in VALUES}
    others = {w for p in paths for w in re.findall(r"DCP_LAB_[A-Z_]+\b", p.read_text())} - options
    assert {"DCP_LAB_MACHINE", "DCP_LAB_SERVER"} <= others
    assert read_options({}, dict.fromkeys(others, "x")) == Options()


@pytest.mark.parametrize(
    ("reducer", "comm", "expected"),
    [("auto", "a2a", "a2a"), ("auto", None, "ag_rs"), ("direct", "ag_rs", "direct")],
)
def test_the_reducer_follows_vllm_unless_told_otherwise(reducer: str, comm: Any, expected: str):
    """'auto' is --dcp-comm-backend; None there is vLLM's default."""
    assert Options(reducer=reducer).reducer_name(comm) == expected


# ---- refusals -------------------------------------------------------------------------------


def test_a_refusal_says_the_value_and_the_way_out():
    """vLLM's bare reason gets what was given and what to do."""
    said = explain("head_size not supported", {"head_size": 72})
    assert said == "head_size not supported (head_size=72): multiples of 16 up to 256 are"
    assert "leave --attention-backend CUSTOM away" in explain("moons not supported", {})


@pytest.mark.parametrize(
    ("parallel", "options", "message"),
    [
        ({"prefill_context_parallel_size": 2}, {}, "--prefill-context-parallel-size at 1"),
        ({"decode_context_parallel_size": 32}, {"reducer": "direct"}, "at most 16 ranks, not 32"),
        ({"decode_context_parallel_size": 2, "enable_dbo": True}, {}, "--enable-dbo"),
        ({"decode_context_parallel_size": 1, "enable_dbo": True}, {}, None),
        ({"decode_context_parallel_size": 2}, {"reducer": "direct"}, None),
    ],
)
def test_parallel_settings_that_cannot_be_are_refused(
    parallel: dict[str, Any], options: dict[str, str], message: str | None
):
    """Before weights load, with the flag to change."""
    config = types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(**parallel), additional_config={"dcp_lab": options}
    )
    reasons = configuration_reasons(config)
    assert len(reasons) == (message is not None)
    assert message is None or message in reasons[0]


# ---- the cache ------------------------------------------------------------------------------


def test_both_generations_cache_tensors_are_views_of_k_and_v():
    """K and V side by side (to 0.25) and packed per head (from 0.32) give [P, page, Hkv, D]."""
    pages, page, heads, dim = 3, 16, 2, 32
    old = torch.zeros(kv_cache_shape(pages, page, heads, dim))
    new = torch.zeros(pages, heads, page, 2 * dim)
    for cache in (old, new):
        k, v = split_kv_cache(cache, dim, torch.float32)
        assert k.shape == v.shape == (pages, page, heads, dim)
        k[1, 2, 1, 3], v[1, 2, 1, 3] = 1, 2
        assert cache.sum() == 3
    assert new[1, 1, 2, 3] == 1 and new[1, 1, 2, dim + 3] == 2


def test_bytes_become_fp8_and_another_shape_is_refused():
    """vLLM hands an fp8 cache as bytes; a cache that is neither form is named."""
    k, _ = split_kv_cache(torch.zeros(2, 1, 16, 64, dtype=torch.uint8), 32, torch.float8_e4m3fn)
    assert k.dtype == torch.float8_e4m3fn
    with pytest.raises(ValueError, match="kv_cache: expected .blocks, 2"):
        split_kv_cache(torch.zeros(2, 1, 16, 96), 32, torch.float32)


# ---- the gate -------------------------------------------------------------------------------

Mode = enum.Enum("Mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])


def test_the_gate_is_put_in_place_once():
    """register runs many times in a process; the platform's own check runs once a call."""
    calls = []

    class Platform:
        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            calls.append(cls)

    gate.install(Platform)
    first = Platform.check_and_update_config.__func__
    gate.install(Platform)
    assert Platform.check_and_update_config.__func__ is first
    config = types.SimpleNamespace(
        compilation_config=types.SimpleNamespace(cudagraph_mode=Mode.PIECEWISE),
        parallel_config=types.SimpleNamespace(),
    )
    Platform.check_and_update_config(config)
    assert calls == [Platform]


@pytest.mark.parametrize(("dcp", "kept"), [(1, False), (2, True)])
def test_the_gate_leaves_alone_what_dcp_did_not_lower(
    dcp: int, kept: bool, monkeypatch: pytest.MonkeyPatch
):
    """Without DCP vLLM had another reason for PIECEWISE, which the gate does not undo."""
    logger = types.SimpleNamespace(init_logger=lambda name: logging.getLogger(name))
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.logger", logger)
    config = types.SimpleNamespace(
        compilation_config=types.SimpleNamespace(cudagraph_mode=Mode.PIECEWISE),
        parallel_config=types.SimpleNamespace(
            decode_context_parallel_size=dcp, dcp_comm_backend="a2a"
        ),
        additional_config={"dcp_lab": {"rocm_full_graph_gate": "a2a"}},
    )
    gate.keep_full_graphs(config, Mode.FULL_AND_PIECEWISE)
    full = config.compilation_config.cudagraph_mode == Mode.FULL_AND_PIECEWISE
    assert full == kept


# ---- a step ---------------------------------------------------------------------------------

NUM_Q_HEADS, HEAD_DIM = 4, 64


class OneRank:
    """An exchange that hands on the queries of all ranks and merges with the other ranks' states.

    Args:
        q: Queries of all ranks, [T, Hq, D].
        others: States that the other ranks handed in, one a reduce, in the same order.
        rank: Of these heads.
    """

    def __init__(self, q: torch.Tensor, rank: int, others: list[Any]) -> None:
        self.q, self.rank, self.others, self.kept = q, rank, others, []

    def gather(self, q: torch.Tensor) -> torch.Tensor:
        heads = q.shape[1]
        (start,) = [
            start
            for start in range(len(self.q) - len(q) + 1)
            if torch.equal(
                self.q[start : start + len(q), heads * self.rank : heads * (self.rank + 1)], q
            )
        ]
        return self.q[start : start + len(q)]

    def state(self, num_tokens: int) -> Any:
        out = torch.full((num_tokens, *self.q.shape[1:]), torch.nan)
        return AttnState(out, torch.full(out.shape[:2], torch.nan))

    def reduce(self, state: Any, output: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        self.kept.append(AttnState(*(part.clone() for part in state)))
        if not self.others:
            return
        pairs = zip(state, self.others[len(self.kept) - 1], strict=True)
        merged = reference_merge(*(torch.stack(pair) for pair in pairs))
        heads = output.shape[1]
        mine = slice(heads * self.rank, heads * (self.rank + 1))
        output.copy_(merged.out[:, mine])
        if lse is not None:
            lse.copy_(merged.lse[:, mine])


def rank_step(
    whole: PagedCase,
    shard: Shard,
    others: list[Any],
    *,
    num_decodes: int,
    gather: str | None = None,
    flash: Any = None,
    drafts: int = 1,
    softcap: float | None = None,
    window: int | None = None,
) -> tuple[torch.Tensor, list[Any]]:
    """Return (output, states handed to the exchange) of one rank, as the plugin plans and attends.

    Args:
        whole: The step, decodes first.
        shard: Of the rank.
        others: The other rank's states; empty: output is not whole.
        num_decodes: Requests of the step that are decodes.
        gather, flash: The plan's and the layer's.
        drafts: Most query tokens of a decode.
        softcap, window: The layer's.
    """
    case = whole.on_rank(shard)
    q, k_cache, v_cache, table, _ = case.tensors
    lens, starts = whole.tensors[4], whole.query_start_loc
    if starts is None:
        starts = torch.arange(len(lens) + 1, dtype=torch.int32)
    heads = NUM_Q_HEADS // shard.size
    shape = LayerShape(heads, 1, HEAD_DIM, window, torch.float32, torch.float32)
    planner = Planner(
        [shape],
        Limits(40, len(q), drafts, 256, 1 << 20, k_cache.shape[1]),
        shard,
        torch.device("cpu"),
        gather=gather,
        flash=flash is not None,
    )
    queries = starts.diff()
    common = types.SimpleNamespace(
        num_reqs=len(lens), query_start_loc_cpu=starts, seq_lens_cpu_upper_bound=lens
    )
    step = planner.plan(
        num_tokens=len(q),
        num_decodes=num_decodes,
        num_decode_tokens=int(starts[num_decodes]),
        max_query_len=int(queries.max()),
        query_start_loc=starts,
        seq_lens=lens,
        local_seq_lens=None,
        block_table=table,
        max_seq_len=int(lens.max()),
        prefill_context=prefill_context(common, num_decodes),
    )
    # The step's own keys; a padded request has none.
    own_k, own_v = (torch.zeros(len(q), 1, HEAD_DIM) for _ in range(2))
    for request, count in enumerate(queries.tolist()):
        if lens[request]:
            rows = slice(int(starts[request]), int(starts[request]) + count)
            own_k[rows] = whole.keys[request][-count:]
            own_v[rows] = whole.values[request][-count:]
    mine = slice(heads * shard.rank, heads * (shard.rank + 1))
    exchange = OneRank(q, shard.rank, others) if shard.size > 1 else None
    output = torch.full((len(q), heads, HEAD_DIM), torch.nan)
    attend(
        q[:, mine],
        k_cache,
        v_cache,
        step,
        output,
        lse=torch.empty(len(q), heads),
        shape=shape,
        shard=shard,
        exchange=exchange,
        softmax_scale=HEAD_DIM**-0.5,
        softcap=softcap,
        key=own_k,
        value=own_v,
        pair=scratch_pair(len(q), heads, HEAD_DIM, torch.float32, torch.device("cpu")),
        flash=flash,
    )
    return output, exchange.kept if exchange else []


def check_step(whole: PagedCase, interleave: int, ranks: int = 2, **options: Any) -> list[Any]:
    """Hold a step of all ranks against the oracle over whole requests; return rank 0's states."""
    shards = [Shard(rank, ranks, interleave) for rank in range(ranks)]
    states = [rank_step(whole, shard, [], **options)[1] for shard in shards]
    outs = [
        rank_step(whole, shard, states[1 - shard.rank] if ranks == 2 else [], **options)[0]
        for shard in shards
    ]
    wanted = whole.reference_options()
    wanted |= {"softcap": options.get("softcap"), "sliding_window": options.get("window")}
    expected = reference_decode(*whole.tensors, **wanted)
    out = torch.cat(outs, dim=1)
    torch.testing.assert_close(out.double(), expected.out, atol=1e-5, rtol=1e-5)
    return states[0]


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("gather", [None, "per_page", "published"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_decode_step_is_exact(ranks: int, gather: str | None, tokens: int):
    """Planned once, attended on each rank's shard, merged: the oracle over whole requests.

    tokens: Query tokens of each request, a token and its drafts.
    """
    whole = PagedCase.build(
        [33, tokens, 0 if tokens == 1 and gather != "published" else 5, 17, 64],
        num_q_heads=NUM_Q_HEADS,
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        query_lens=None if tokens == 1 else [tokens] * 5,
    )
    states = check_step(
        whole, 16, ranks, num_decodes=5, gather=gather, drafts=tokens, softcap=20.0
    )
    # One exchange, whatever else is attended.
    assert len(states) == ranks - 1


def test_the_published_path_attends_the_new_token_apart(monkeypatch: pytest.MonkeyPatch):
    """As study 1: queries, gather of the context alone, exchange, own token, merge."""
    calls = []

    def seen(name: str, op: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, args, kwargs))
            return op(*args, **kwargs)

        return call

    for name in ("gather_decode", "paged_decode", "merge_states"):
        monkeypatch.setattr(attention, name, seen(name, getattr(attention, name)))
    for name in ("gather", "reduce"):
        monkeypatch.setattr(OneRank, name, seen(name, getattr(OneRank, name)))
    whole = PagedCase.build([33, 1, 20], num_q_heads=NUM_Q_HEADS, num_kv_heads=1, head_dim=64)
    rank_step(whole, Shard(0, 2), [], num_decodes=3, gather="published")
    names = [name for name, *_ in calls]
    assert names == ["gather", "gather_decode", "reduce", "paged_decode", "merge_states"]
    (_, gathered, options), (_, own, _) = calls[1], calls[3]
    # Tokens of this rank's half, the new one left out; the host waits for their number.
    assert gathered[4].tolist() == [16, 0, 10]
    assert options["gather"] == "published" and "total_tokens" not in options
    assert own[0].shape[1] == NUM_Q_HEADS // 2 and own[4].tolist() == [1, 1, 1]


class SamePlaces:
    """An exchange of two ranks without a peer: its buffers are where they are in every step."""

    def __init__(self, q: torch.Tensor) -> None:
        self.q = torch.cat([q, q], dim=1)
        self.own = AttnState(torch.empty_like(self.q), torch.empty(self.q.shape[:2]))

    def gather(self, q: torch.Tensor) -> torch.Tensor:
        return self.q[: len(q)]

    def state(self, num_tokens: int) -> AttnState:
        return AttnState(*(part[:num_tokens] for part in self.own))

    def reduce(self, state: AttnState, output: torch.Tensor, lse: Any = None) -> None:
        pass


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("gather", [None, "per_page", "published"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_layers_call_is_known_in_the_next_step(
    remembered: None, monkeypatch: pytest.MonkeyPatch, ranks: int, gather: str | None, tokens: int
):
    """Each step after the first of so many decodes launches only: nothing is planned anew."""
    planned: list[str] = []

    def bind(call: Any, *, keep: bool) -> Any:
        planned.append(type(call).__name__)
        return lambda: None

    for kind in (launch.Launch, CountedLaunch):
        monkeypatch.setattr(kind, "bind", bind)
    requests, layers = 3, 2
    shard = Shard(ranks - 1, ranks, 16)
    shape = LayerShape(2, 1, 64, None, torch.float32, torch.float32)
    cpu = torch.device("cpu")
    limits = Limits(4, 4 * tokens, tokens, 256, 1 << 12, 16)
    planner = Planner([shape], limits, shard, cpu, gather=gather)
    # What vLLM keeps where it is: its input batch, caches, and what pieces of a model return.
    rows = requests * tokens
    q = torch.randn(rows, 2, 64)
    caches = torch.randn(layers, 12, 2, 16, 1, 64)
    new, output = torch.randn(2, rows, 1, 64), torch.empty(rows, 2, 64)
    starts = torch.arange(0, rows + 1, tokens, dtype=torch.int32)
    seq_lens = torch.tensor([33, 5, 20], dtype=torch.int32)
    table = torch.arange(12, dtype=torch.int32).view(requests, 4)
    exchange = SamePlaces(q) if ranks > 1 else None
    pair, lse = scratch_pair(rows, 2, 64, torch.float32, cpu), torch.empty(rows, 2)
    # vLLM may keep a step's plan until it has made the next one.
    steps = []
    for turn in range(3):
        planned.clear()
        steps.append(
            planner.plan(
                num_tokens=rows,
                num_decodes=requests,
                num_decode_tokens=rows,
                max_query_len=tokens,
                query_start_loc=starts,
                seq_lens=seq_lens,
                local_seq_lens=None,
                block_table=table,
                max_seq_len=64,
            )
        )
        for cache in caches:
            attend(
                q,
                *split_kv_cache(cache, 64, torch.float32),
                steps[-1],
                output,
                lse=lse,
                shape=shape,
                shard=shard,
                exchange=exchange,
                softmax_scale=0.125,
                key=new[0],
                value=new[1],
                pair=pair,
            )
        assert bool(planned) == (turn == 0)
        seq_lens += tokens


def test_a_small_step_has_tiles_of_its_own():
    """Steps of 16 and of 300 requests use different workspaces, each large enough."""
    shape = LayerShape(4, 1, 64, None, torch.float32, torch.float32)
    limits = Limits(300, 300, 1, 256, 1 << 20, 16)
    planner = Planner([shape], limits, Shard(0, 1), torch.device("cpu"))
    used = {}
    for requests in (1, 16, 17, 300):
        step = planner.plan(
            num_tokens=requests,
            num_decodes=requests,
            num_decode_tokens=requests,
            max_query_len=1,
            query_start_loc=torch.arange(requests + 1, dtype=torch.int32),
            seq_lens=torch.ones(requests, dtype=torch.int32),
            local_seq_lens=None,
            block_table=torch.zeros(requests, 16, dtype=torch.int32),
        )
        used[requests] = step.parts[0].workspaces[shape].max_requests
    assert used == {1: 16, 16: 16, 17: 64, 300: 300}


def test_the_sizes_gather_into_one_buffer():
    """Steps of 16, 64 and 300 requests share K and V, which hold what the largest may gather."""
    shape = LayerShape(4, 1, 64, None, torch.float32, torch.float32)
    limits = Limits(300, 300, 1, 256, 1 << 20, 16)
    planner = Planner([shape], limits, Shard(0, 1), torch.device("cpu"), gather="per_page")
    made = [workspaces[shape] for _, workspaces in planner._workspaces]
    assert [workspace.max_requests for workspace in made] == [16, 64, 256, 300]
    for side in ("k", "v"):
        buffers = [getattr(workspace, side) for workspace in made]
        assert len({buffer.data_ptr() for buffer in buffers}) == 1
        assert [len(buffer) for buffer in buffers] == [workspace.max_tokens for workspace in made]


def test_an_exchanges_state_is_at_one_place_for_any_number_of_tokens():
    """Every step's attention goes to the first rows of the same buffers."""
    from dcp_lab.vllm_plugin.attention import Exchange

    exchange = Exchange.__new__(Exchange)
    exchange._state = AttnState(torch.empty(5, 4, 8), torch.empty(5, 4))
    exchange._out, exchange._lse = exchange._state
    for tokens in (5, 2, 2, 3, 0, 5):
        state = exchange.state(tokens)
        assert state.out.shape == (tokens, 4, 8) and state.lse.shape == (tokens, 4)
        if tokens:
            assert state.out.data_ptr() == exchange._out.data_ptr()
            assert state.lse.data_ptr() == exchange._lse.data_ptr()


def test_long_prefills_go_through_the_reducer_in_pieces():
    """No piece is larger than the reducer's buffers, and the pieces are all of the tokens."""
    from dcp_lab.vllm_plugin.attention import Exchange

    class Reducer:
        max_tokens = MAX_REDUCER_TOKENS
        seen: list[int] = []

        def __call__(self, state: Any, *, out: torch.Tensor) -> None:
            self.seen.append(len(state.out))
            out.copy_(state.out[:, :2] + 1)

    exchange = Exchange.__new__(Exchange)
    exchange.reducer = Reducer()
    tokens = 2 * MAX_REDUCER_TOKENS + 5
    state = AttnState(torch.arange(tokens * 4.0).view(tokens, 4, 1), torch.zeros(tokens, 4))
    output = torch.empty(tokens, 2, 1)
    exchange.reduce(state, output)
    assert Reducer.seen == [MAX_REDUCER_TOKENS, MAX_REDUCER_TOKENS, 5]
    assert torch.equal(output, state.out[:, :2] + 1)


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("0.32.0+cpu", r"run \S+ on 2 CPU cores"),
        ("0.25.1", r"run \S+ on two H200s"),
        ("0.33.0", r"checked \S+ against its code, never run"),
        ("0.23.0", r"checked \S+ against its code, never run"),
        ("0.29.0", "neither run nor checked; 0.23.0, 0.25.1"),
        ("main", "neither run nor checked"),
    ],
)
def test_what_was_run_is_told_from_what_was_checked(version: str, status: str):
    """A release that nobody ran is never called run."""
    import re

    from dcp_lab.vllm_plugin.record import status_of

    assert re.match(status, status_of(version))


def test_what_was_run_on_a_gpu_has_its_rows():
    """A release is called run on a GPU where a table has rows of it with this backend."""
    from dcp_lab.analysis import tables
    from dcp_lab.vllm_plugin.record import releases

    runs = [(v, run) for v, entry in releases().items() for run in entry.get("run", [])]
    on_gpus = [(version, run) for version, run in runs if "CPU" not in run["machine"]]
    assert on_gpus
    for version, run in on_gpus:
        rows = tables.measured(run["rows"])
        ours = rows[(rows.attention_backend == "CUSTOM") & (rows.vllm == version)]
        words = run["what"]
        named = {word for word in ("direct", "a2a", "ag_rs") if word in words}
        assert named and named <= set(ours.reducer.dropna())
        assert run["date"] in set(ours.date_utc.str[:10])
        assert f"{ours.num_layers.max()} layers" in words
    # And the table of the plugin's README says the same of each release.
    package = Path(__file__).resolve().parents[1] / "dcp_lab"
    readme = (package / "vllm_plugin" / "README.md").read_text()
    for version, entry in releases().items():
        (line,) = re.findall(rf"^\| {re.escape(version)} \| (.*) \|$", readme, re.M)
        assert line.startswith("run" if "run" in entry else "checked")


@pytest.mark.parametrize("token_bytes", [16 * 128 * 2, 8 * 128 * 2, 2 * 64 * 2, 96 * 512 * 2, 1])
@pytest.mark.parametrize("num_sms", [132, 84, 256])
@pytest.mark.parametrize("max_tokens", [1, 3, 100, 1024, 4097])
def test_every_form_of_an_exchange_is_built_before_a_request(max_tokens, num_sms, token_bytes):
    """Whatever a step's tokens, its exchange has a form that was launched at the start."""
    forms = {
        tokens: ExchangeConfig.from_payload(tokens * token_bytes, num_sms).tile_bytes
        for tokens in range(1, max_tokens + 1)
    }
    sizes = attention.sizes_of_each_form(max_tokens)
    assert sizes[-1] == max_tokens and len(sizes) <= 14
    assert {forms[tokens] for tokens in sizes} == set(forms.values())
