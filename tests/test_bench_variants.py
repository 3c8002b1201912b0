"""What bench decode measures besides: fp8, MLA, copies, study 1's gather; and its rows."""

from __future__ import annotations

import dataclasses

import pandas as pd
import pytest
import torch
from test_record import ROW

from dcp_lab.bench import copies, decode, gqa, mla, protocol, record, timing
from dcp_lab.bench.protocol import Variant, check_variant
from dcp_lab.ops.kv_write import write_kv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP8 = gqa.DecodeShape(2, 20, num_q_heads=4, num_kv_heads=2, head_dim=32, fp8=True)
TINY = gqa.DecodeShape(2, 16, num_q_heads=2, num_kv_heads=1, head_dim=16)
COPY = copies.CopyShape(3, 21, 4, 2, 32, lengths="uneven")


def replay_of(x: protocol.Inputs, variant: Variant):
    """Return what stands for a graph's replay: the variant's calls, one layer after the other."""
    return lambda: [variant.call(layer) for layer in range(x.layers)]


@pytest.fixture
def no_graphs(monkeypatch):
    """Calls stand for graphs, and times are made up: eager ones are ten times as long."""

    class Graph:
        def __init__(self, call, layers):
            self.call, self.layers = call, layers
            self.replay()

        def replay(self):
            for layer in range(self.layers):
                self.call(layer)

    def graph_times(graphs, *, layers, samples):
        return {name: [1.0 + i for i in range(samples)] for name in graphs}

    def eager_times(calls, *, layers, samples):
        for call in calls.values():
            call(0)
        wall = {name: [10.0 + i for i in range(samples)] for name in calls}
        return wall, {name: [5.0 + i for i in range(samples)] for name in calls}

    monkeypatch.setattr(timing, "capture_layers", Graph)
    monkeypatch.setattr(timing, "graph_times", graph_times)
    monkeypatch.setattr(timing, "eager_times", eager_times)
    monkeypatch.setattr(timing, "kernel_launches", lambda call: 2)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)


def kept(rows: list[dict[str, object]]) -> pd.DataFrame:
    """Return the rows as a table that keeps the schema."""
    source = {name: ROW[name] for name in record.provenance_columns() if name in ROW}
    frame = pd.DataFrame([{**source, **row} for row in rows])
    for name in record.DECODE.columns:
        if name not in frame:
            frame[name] = None
    return record.validate(frame[list(record.DECODE.columns)], record.DECODE, "rows")


@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16])
def test_fp8_cells_are_checked(q_dtype):
    """Each way to attend an fp8 cache is right on the inputs that would be timed."""
    x = gqa.make_layers(FP8, dtype=q_dtype, device=DEVICE)
    assert x.kv.dtype == protocol.fp8_dtype() and x.columns()["kv_dtype"].startswith("float8")
    assert x.kv_bytes == 2 * 20 * 2 * 2 * 32
    variants = [gqa.paged_variant(x), gqa.bound_variant(x), *gqa.sdpa_variants(x)]
    variants += [gqa.gather_variant(x, gather) for gather in ("per_page", "published")]
    for variant in variants:
        errors = check_variant(x, variant)
        assert errors.out_error <= errors.error_budget
    assert all(v.op != "sdpa" for v in variants)
    assert variants[-1].kv_traffic == 1 + 2 * q_dtype.itemsize


def test_gathers_share_their_buffers():
    """The four gathers of a cell take the room of one: the largest cells have no more."""
    x = gqa.make_layers(TINY, dtype=torch.float32, device=DEVICE)
    for variant in [gqa.gather_variant(x, gather) for gather in gqa.GATHERS]:
        for part in x.gathered:
            part.fill_(torch.nan)
        check_variant(x, variant)
        assert all(part.isfinite().all() for part in x.gathered)


def rounding_variant(x: gqa.Layers, *, weights: bool, queries: bool = True) -> Variant:
    """Return plain torch in float64 on fp8 queries, its weights rounded to fp8 or not."""
    q8 = x.q.to(x.kv.dtype)

    def call(layer: int) -> None:
        for b in range(x.shape.requests):
            n = x.lens[b]
            pages = x.block_table[b, : -(-n // x.shape.page_size)].long()
            k, v = (c[pages].flatten(0, 1)[:n].double() for c in x.caches(layer))
            group = x.shape.num_q_heads // x.shape.num_kv_heads
            k, v = (t.repeat_interleave(group, 1) for t in (k, v))
            scores = torch.einsum("hd,shd->hs", q8[layer, b].double(), k) * x.q.shape[-1] ** -0.5
            share = (scores - scores.amax(-1, keepdim=True)).exp()
            used = share.to(torch.float32).to(x.kv.dtype).double() if weights else share
            out = torch.einsum("hs,shd->hd", used, v) / share.sum(-1, keepdim=True)
            x.out[layer, b], x.lse[layer, b] = out, scores.logsumexp(-1)

    given = {"queries": lambda layer: q8[layer]} if queries else {}
    return Variant("peer", "fp8", call, fp8_weights=weights, **given)


def test_fp8_queries_and_weights_have_their_own_yardstick():
    """Rounded queries are what the result is compared for; rounded weights widen the budget to
    what plain torch loses by the same rounding, and to nothing beyond."""
    longer = dataclasses.replace(FP8, context_tokens=400)
    x = gqa.make_layers(longer, dtype=torch.float32, device=DEVICE)
    exact = check_variant(x, rounding_variant(x, weights=False))
    rounded = check_variant(x, rounding_variant(x, weights=True))
    assert exact.error_budget < rounded.out_error <= rounded.error_budget
    with pytest.raises(RuntimeError, match="not timed"):
        check_variant(x, rounding_variant(x, weights=True, queries=False))
    held_to_exact = dataclasses.replace(rounding_variant(x, weights=True), fp8_weights=False)
    with pytest.raises(RuntimeError, match="not timed"):
        check_variant(x, held_to_exact)
    right = rounding_variant(x, weights=True)

    def off(layer: int) -> None:
        right.call(layer)
        x.out[layer] *= 1.2

    with pytest.raises(RuntimeError, match="not timed"):
        check_variant(x, dataclasses.replace(right, call=off))


@pytest.mark.parametrize("fp8", [False, True])
def test_mla_is_checked(fp8):
    """MLA is right on the inputs that would be timed, called and replayed; a base-2 LSE is not."""
    x = mla.make_layers(mla.MlaShape(2, 70, 4, fp8=fp8), dtype=torch.float32, device=DEVICE)
    ours = mla.paged_variant(x)
    errors = check_variant(x, ours, replay_of(x, ours))
    assert errors.out_error <= errors.error_budget and errors.lse_error is not None
    assert x.kv_bytes == 2 * 70 * 576 * (1 if fp8 else 4)

    def base_two(layer: int) -> None:
        ours.call(layer)
        x.lse[layer] *= 1.442695

    with pytest.raises(RuntimeError, match="not timed.*mla 2x70 4q"):
        check_variant(x, Variant("peer", "base 2", base_two))


def copy_inputs() -> copies.Copies:
    return copies.make_copies(COPY, dtype=torch.float32, device=DEVICE)


def test_copies_are_exact():
    """Writes and gathers copy bit for bit, called eagerly and replayed."""
    x = copy_inputs()
    for variant in copies.variants_of(x):
        # The interpreter takes long for one program a token.
        replays = (None,) if variant.variant == "per_token" else (None, replay_of(x, variant))
        for replay in replays:
            errors = copies.check_copies(x, variant, replay)
            assert errors.out_error == (0.0 if variant.checked else None)


@pytest.mark.parametrize("fault", ["nothing", "one number", "a slot too many", "another layer's"])
@pytest.mark.parametrize("replayed", [False, True])
def test_a_wrong_copy_is_not_timed(fault, replayed):
    """A number that is off, a slot that was not to be written, or a call that does nothing."""
    x = copy_inputs()
    right = copies.write_variant(x, "step")

    def call(layer: int) -> None:
        if fault == "nothing":
            return
        right.call(layer)
        if fault == "another layer's":
            rows = x.rows[1 - layer][:, : COPY.requests]
            write_kv(*rows, *x.pages.caches(layer), x.slots("step"))
        if fault == "one number":
            page, place = divmod(int(x.slots("step")[-1]), x.shape.page_size)
            x.pages.kv[layer, page, 1, place, 0, 0] += 1
        if fault == "a slot too many":
            page, place = divmod(int(x.slots("prefill")[0]), x.shape.page_size)
            x.pages.kv[layer, page, 0, place] = 7.0

    # What an earlier call left in the slots does not pass for this one's.
    replay_of(x, right)()
    wrong = dataclasses.replace(right, call=call)
    with pytest.raises(RuntimeError, match="not timed.*write_kv step, copies 3x21"):
        copies.check_copies(x, wrong, replay_of(x, wrong) if replayed else None)


def test_a_wrong_gather_is_not_timed():
    """A gather that leaves an earlier call's result, or mixes up tokens, is refused."""
    x = copy_inputs()
    right = copies.gather_variant(x, "per_page_planned")
    right.call(0)
    with pytest.raises(RuntimeError, match="numbers differ"):
        copies.check_copies(x, dataclasses.replace(right, call=lambda layer: None))

    def shuffled(layer: int) -> None:
        right.call(layer)
        for part in x.gathered[right.variant]:
            part.copy_(part.roll(1, 0))

    with pytest.raises(RuntimeError, match="numbers differ"):
        copies.check_copies(x, dataclasses.replace(right, call=shuffled))


def test_a_copy_moves_the_bytes_of_what_it_stands_beside():
    """Each judged variant has its copy, of as many bytes, and that is its bound."""
    x = copy_inputs()
    by_key = {v.key: v for v in copies.variants_of(x)}
    for key in ("write_kv step", "write_kv prefill", "gather_kv per_page"):
        copy = by_key[by_key[key].bound]
        assert copy.key == f"copy {key}" and copy.kv_traffic == by_key[key].kv_traffic
    x.pages.kv.zero_()
    by_key["copy write_kv step"].call(0)
    assert int((x.pages.kv[0] != 0).sum()) == 2 * COPY.requests * 2 * 32
    assert by_key["write_kv step"].kv_traffic * x.kv_bytes == 2 * COPY.requests * 2 * 2 * 32 * 4


def test_rows_keep_the_schema(no_graphs):
    """Rows of every kind of cell are complete; study 1's gather with its sync has no graph row,
    an eager row has the spread of its host time, and a copy is the bound of what it stands for."""
    x = gqa.make_layers(TINY, dtype=torch.float32, device=DEVICE)
    x.layers = 1
    variants = [gqa.paged_variant(x), protocol.read_variant(x), gqa.plan_variant(x)]
    variants += [gqa.gather_variant(x, name) for name in ("published", "published_no_sync")]
    rows = protocol.measure(x, variants, samples=5)
    table = kept(rows)
    modes = table[table.op == "gather_decode"].groupby("variant")["mode"].apply(set)
    assert modes["published"] == {"eager"} and modes["published_no_sync"] == {"eager", "graph"}
    eager = table[table["mode"] == "eager"]
    assert (eager.host_us == 7.0).all() and (eager.host_p10_us == 5.4).all()
    assert (eager.host_p90_us == 8.6).all()
    assert table[table["mode"] == "graph"].host_p10_us.isna().all()
    assert (table[table.op == "plan"].bytes == 0).all()
    assert "published" in decode.show(TINY.name, rows)

    copied = copies.make_copies(
        copies.CopyShape(2, 16, 2, 1, 16), dtype=torch.float32, device=DEVICE
    )
    copied.pages.layers = 1
    found = [v for v in copies.variants_of(copied) if v.variant != "per_token"]
    table = kept(protocol.measure(copied, found, samples=5, check=copies.check_copies))
    assert set(table.op) == {"write_kv", "gather_kv", "copy"}
    assert (table.bound_us == 3.0).all()
    assert (table[table.op != "copy"].error_budget == 0).all()


def test_mla_rows_are_what_the_gate_looks_for(no_graphs):
    """A cell's rows bear the names, page size and head_dim that the targets are judged by."""
    x = mla.make_layers(mla.MlaShape(1, 64, 16, fp8=True), dtype=torch.bfloat16, device=DEVICE)
    table = kept(protocol.measure(x, mla.variants_of(x), samples=5))
    row = table[table.op == "mla_paged_decode"].iloc[0]
    assert (row.head_dim, row.page_size, row.num_kv_heads) == (576, 64, 1)
    assert (row["dtype"], row["kv_dtype"]) == ("bfloat16", "float8_e4m3fn")


def test_a_peer_that_cannot_be_captured_is_left_out(no_graphs, monkeypatch, capsys):
    """A peer whose capture fails has no row; one of the lab's own ends the run."""
    x = gqa.make_layers(TINY, dtype=torch.float32, device=DEVICE)
    ours = gqa.paged_variant(x)
    peer = dataclasses.replace(ours, op="fa3", variant="auto", call=lambda i: ours.call(i))
    captured = timing.capture_layers

    def capture(call, layers):
        if call is peer.call:
            raise RuntimeError("operation not permitted when stream is capturing")
        return captured(call, layers)

    monkeypatch.setattr(timing, "capture_layers", capture)
    variants = [ours, dataclasses.replace(peer, peer=True), protocol.read_variant(x)]
    rows = protocol.measure(x, variants, samples=5)
    assert {row["op"] for row in rows} == {"paged_decode", "read_pages"}
    assert "peer fa3 auto: left out: operation not permitted" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="not permitted"):
        protocol.measure(x, [ours, peer, protocol.read_variant(x)], samples=5)


def test_no_sample_holds_a_layers_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer of every variant is called before the clock first starts."""
    events: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("sync"))
    calls = {name: lambda layer, name=name: events.append((name, layer)) for name in "ab"}
    wall, host = timing.eager_times(calls, layers=2, samples=1)
    layers = [(name, layer) for name in "ab" for layer in range(2)]
    assert events[:5] == [*layers, "sync"]
    assert [len(wall[name]) for name in "ab"] == [len(host[name]) for name in "ab"] == [1, 1]
