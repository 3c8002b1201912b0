"""Notebook 03: which rows stand side by side, what is said of them and where there are none."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import matplotlib
import nbformat
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

matplotlib.use("Agg")

from dcp_lab import plots_gather
from dcp_lab.analysis import gather_readings, gathering, tables
from dcp_lab.bench import decode_targets

REPOSITORY = Path(__file__).resolve().parent.parent
NOTEBOOK = REPOSITORY / "notebooks" / "03_gather_vs_paged.ipynb"
EARLY, LATE = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"
KV_BYTES = 16 * 2048 * 2 * 128 * 2


def row(op: str, variant: str, us: float, **other: object) -> dict[str, object]:
    """A row of a decode table, as far as the analysis looks at it."""
    traffic = 3 if op == "gather_decode" else 1
    return {
        "date_utc": EARLY,
        "git_commit": "a" * 40,
        "op": op,
        "variant": variant,
        "num_q_heads": 16,
        "num_kv_heads": 1,
        "head_dim": 128,
        "page_size": 16,
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "requests": 16,
        "context_tokens": 2048,
        "lengths": "equal",
        "mode": "graph",
        "median_us": us,
        "p10_us": us,
        "p90_us": us,
        "host_us": np.nan,
        "launches": 3 if op == "gather_decode" else 2,
        "bytes": traffic * KV_BYTES,
        "bound_us": 6.0,
        "read_gbps": 2800.0,
    } | other


def frame(*rows: dict[str, object]) -> pd.DataFrame:
    return pd.DataFrame(list(rows))


def test_ways_of_a_shape_are_of_one_run():
    """The latest run with a gather counts, whole; a later one without any does not tear it up."""
    later = {"date_utc": LATE, "git_commit": "b" * 40}
    found = gathering.layer_rows(
        frame(
            row("paged_decode", "planned", 10.0),
            row("gather_decode", "per_page", 20.0),
            row("paged_decode", "planned", 5.0, **later),
        )
    )
    assert dict(zip(found.way, found.median_us, strict=True)) == {"paged": 10.0, "per_page": 20.0}
    assert found.of_read.round(2).tolist() == [0.6, 0.3]
    (cost,) = gathering.gather_costs(found).to_dict("records")
    assert (cost["extra_us"], cost["times"], cost["times_bytes"]) == (10.0, 2.0, 3.0)


def test_a_gather_of_an_earlier_attention_is_left_out():
    """A gather that launches as many kernels as none of the latest commit's is not compared."""
    later = {"date_utc": LATE, "git_commit": "b" * 40}
    decode = frame(
        row("paged_decode", "planned", 10.0, context_tokens=1024),
        row("gather_decode", "per_page", 99.0, context_tokens=1024, launches=2),
        row("paged_decode", "planned", 10.0, **later),
        row("gather_decode", "per_page", 20.0, **later),
    )
    found = gathering.layer_rows(decode)
    assert found[found.way == "per_page"].median_us.tolist() == [20.0]
    assert found[found.way == "paged"].context_tokens.tolist() == [1024, 2048]
    assert gathering.left_out(decode, found) == 1


def test_a_peer_is_compared_within_its_own_run():
    """Each peer's latest run counts, its fastest form there, over paged_decode of that run."""
    later = {"date_utc": LATE, "git_commit": "b" * 40}
    found = gathering.peer_rows(
        frame(
            row("paged_decode", "planned", 10.0),
            row("flashinfer", "tensor cores", 15.0),
            row("fa3", "auto", 11.0),
            row("paged_decode", "planned", 8.0, **later),
            row("fa3", "auto", 16.0, **later),
            row("fa3", "metadata", 12.0, **later),
        )
    ).set_index("peer")
    assert found.times.to_dict() == {"flashinfer": 1.5, "fa3": 1.5}
    assert found.variant["fa3"] == "metadata"
    assert gathering.best_peer(found.reset_index()).times.tolist() == [1.5]


def test_bytes_are_those_of_the_formulas():
    """Every committed gather row moves its pages once and its 16-bit copy twice."""
    costs = gathering.gather_costs(gathering.layer_rows(gathering.decode_tables("h200")))
    assert len(costs) > 0
    expected = costs.apply(gathering.expected_bytes, axis=1, kv_dtype="bfloat16")
    assert (expected == costs.bytes).all()
    fp8 = costs.iloc[0].copy()
    pages = fp8.kv_bytes / 2
    assert gathering.expected_bytes(fp8, "float8_e4m3fn") == 5 * pages


def step(attention: str, busy_ms: float, **other: object) -> dict[str, object]:
    """A row of a stack table, as far as the analysis looks at it."""
    return {
        "date_utc": EARLY,
        "model": "m",
        "num_layers": 100,
        "kv_layers": 100,
        "num_kv_heads": 1,
        "head_dim": 128,
        "dense": "light",
        "requests": 16,
        "context_tokens": 2048,
        "dcp_size": 1,
        "launch_delay_us": 0.0,
        "bound": False,
        "mode": "full",
        "attention": attention,
        "gpu_busy_ms": busy_ms,
    } | other


def test_shares_of_steps_measured_and_modelled():
    """share = extra over gathered step; modelled: the step's rest is put to other layers."""
    steps = gathering.step_shares(
        frame(
            step("paged", 4.0),
            step("paged", 99.0, bound=True),
            step("paged", 99.0, launch_delay_us=10.0),
            step("paged", 99.0, dcp_size=2),
            step("per_page", 5.0),
        )
    )
    (measured,) = steps.to_dict("records")
    assert (measured["extra_ms"], measured["share"]) == (1.0, 0.2)

    longer = {"context_tokens": 4096, "bytes": 2 * KV_BYTES}
    layer = gathering.layer_rows(
        frame(
            row("paged_decode", "planned", 10.0),
            row("gather_decode", "per_page", 20.0),
            row("paged_decode", "planned", 20.0, **longer),
            row("gather_decode", "per_page", 60.0, **longer),
        )
    )
    costs = gathering.gather_costs(layer)
    (sums,) = gathering.layers_add_up(steps, costs).to_dict("records")
    assert (sums["step_ms"], sums["layers_ms"]) == (1.0, 1.0)
    shares = gathering.modelled_shares(steps, layer, costs).set_index("context_tokens")
    # A rest of 4 ms - 100 x 10 us, then 100 layers of 60 us of which 40 are the gather's.
    assert shares.rest_ms.tolist() == [3.0, 3.0]
    assert shares.share[2048] == pytest.approx(1 / 5)
    assert shares.share[4096] == pytest.approx(4 / 9)

    outside = gathering.step_shares(
        frame(step("paged", 4.0, context_tokens=512), step("per_page", 5.0, context_tokens=512))
    )
    assert gathering.modelled_shares(outside, layer, costs).empty


def whole_grid() -> pd.DataFrame:
    """Rows of the whole grid, every gather and peer, with times that follow the bytes."""
    rows = []
    for requests, context, q, kv, dim in decode_targets.grid():
        size = requests * context * kv * dim * 4
        read_us = 2.0 + size / 4.5e6
        shape = {
            "requests": requests,
            "context_tokens": context,
            "num_q_heads": q,
            "num_kv_heads": kv,
            "head_dim": dim,
            "bound_us": read_us,
        }
        ways = {
            ("read_pages", "floor"): read_us,
            ("paged_decode", "planned"): read_us + 3.5,
            ("paged_decode", "bound"): read_us + 3.5,
            ("gather_decode", "per_page"): 3 * read_us + 5,
            ("gather_decode", "per_token"): 7 * read_us + 5,
            ("gather_decode", "published"): 60 * read_us,
            ("gather_decode", "published_no_sync"): 50 * read_us,
        }
        scale = itertools.count(13)
        ways |= {(peer, "auto"): read_us * next(scale) / 10 for peer in decode_targets.PEERS}
        for (op, variant), us in ways.items():
            traffic = 3 if op == "gather_decode" else 1
            there = shape | {"bytes": traffic * size}
            if variant != "published":
                rows.append(row(op, variant, us, **there))
            rows.append(row(op, variant, us + 200, mode="eager", host_us=200.0, **there))
    return frame(*rows)


@pytest.fixture(scope="module", params=["committed", "whole grid"])
def rows(request) -> pd.DataFrame:
    """The committed rows, and as many as there will ever be."""
    if request.param == "committed":
        return gathering.decode_tables("h200")
    return whole_grid()


FIGURES = ("layer_time", "bandwidth_share", "peer_times", "step_share", "share_map")


def build(name: str, decode: pd.DataFrame):
    """Draw one of the notebook's figures."""
    layer = gathering.layer_rows(decode)
    source = "Measured: data/measured/decode_h200*.csv, NVIDIA H200"
    if name == "layer_time":
        return plots_gather.layer_time(layer, family=(16, 1, 128), source=source)
    if name == "bandwidth_share":
        return plots_gather.bandwidth_share(layer, probe_gbps=4696, probe="a read", source=source)
    if name == "peer_times":
        return plots_gather.peer_times(gathering.peer_rows(decode), source=source)
    steps = gathering.step_shares(tables.measured("stack_h200"))
    if name == "step_share":
        return plots_gather.step_share(steps[steps.dense == "light"], source=source)
    shares = gathering.modelled_shares(steps, layer, gathering.gather_costs(layer))
    return plots_gather.share_map(shares, gather="per_page", source=source)


@pytest.mark.parametrize("name", FIGURES)
def test_figures_can_be_read_across_a_room(rows, name):
    """Title with a number, source, large letters, nothing cut off, no legend on the title."""
    fig = build(name, rows)
    FigureCanvasAgg(fig).draw()
    renderer = fig.canvas.get_renderer()
    assert any(letter.isdigit() for letter in fig.get_suptitle())
    assert "H200" in fig.get_supxlabel()
    texts = [t for t in fig.findobj(Text) if t.get_text().strip() and t.get_visible()]
    assert min(text.get_fontsize() for text in texts) >= 14
    width, height = fig.get_size_inches() * fig.dpi
    for text in (fig._suptitle, fig._supxlabel, *(t for g in fig.legends for t in g.texts)):
        box = text.get_window_extent(renderer)
        assert box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height, text
    for legend in fig.legends:
        box = legend.get_window_extent(renderer)
        assert not box.overlaps(fig._suptitle.get_window_extent(renderer))
        assert not any(box.overlaps(ax.get_window_extent(renderer)) for ax in fig.axes)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_of_nothing_is_refused(name):
    """No row, no empty axes: the error says what was expected."""
    empty = gathering.layer_rows(gathering.decode_tables("none"))
    options = {"source": "Measured: nothing"}
    if name == "layer_time":
        options["family"] = (16, 1, 128)
    elif name == "bandwidth_share":
        options |= {"probe_gbps": 1.0, "probe": "none"}
    elif name == "share_map":
        options["gather"] = "per_page"
        empty = empty.assign(gather=empty.way)
    with pytest.raises(ValueError, match="expected at least one row to draw, got none"):
        getattr(plots_gather, name)(empty, **options)


def test_readings_follow_the_rows():
    """The same sentence, other rows, another number; a peer that is ahead is said to be."""
    slower = frame(row("paged_decode", "planned", 10.0), row("fa3", "auto", 15.0))
    faster = frame(row("paged_decode", "planned", 10.0), row("fa3", "auto", 9.0))
    said = [gather_readings.against_peers(gathering.peer_rows(rows)) for rows in (slower, faster)]
    assert "1.50x the time" in said[0] and "faster in none of them" in said[0]
    assert "0.90x the time" in said[1] and "faster in 1 of them" in said[1]


def run_notebook(monkeypatch, capsys, **parameters: object) -> str:
    """Run the notebook's code cells with these parameters; return what they print and say."""
    monkeypatch.chdir(NOTEBOOK.parent)
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    namespace: dict[str, object] = {}
    said = []
    for number, cell in enumerate(c for c in cells if c.cell_type == "code"):
        *_, last = cell.source.rstrip().splitlines()
        shown = last.startswith("Markdown(")
        source = cell.source.rsplit("\n", 1)[0] if shown and "\n" in cell.source else cell.source
        if shown and "\n" not in cell.source.strip():
            source = ""
        exec(compile(source, NOTEBOOK.name, "exec"), namespace)
        if shown:
            said.append(eval(last.removeprefix("Markdown"), namespace))
        if number == 0:
            namespace.update(parameters)
    return capsys.readouterr().out + "\n".join(said)


def test_missing_rows_are_named_and_nothing_fails(monkeypatch, capsys, tmp_path):
    """Without a single row of a machine, each section says what was not measured."""
    shutil.copytree(tables.data_dir() / "published", tmp_path / "published")
    (tmp_path / "measured").mkdir()
    monkeypatch.setenv("DCP_LAB_DATA", os.fspath(tmp_path))
    out = run_notebook(monkeypatch, capsys, machine="none")
    for what in ("a gather in a graph", "16 q heads, 1 KV head", "any peer", "whole steps"):
        assert f"**Reading.** Not measured: {what}" in out
        assert out.count(f"Not measured: {what}") > 1


def test_half_the_rows_are_enough(monkeypatch, capsys, tmp_path):
    """With layers and no whole steps, layers are read and the steps are said to be missing."""
    shutil.copytree(tables.data_dir() / "published", tmp_path / "published")
    (tmp_path / "measured").mkdir()
    table = "decode_h200_split_gather.csv"
    shutil.copy(tables.data_dir() / "measured" / table, tmp_path / "measured" / "decode_x.csv")
    monkeypatch.setenv("DCP_LAB_DATA", os.fspath(tmp_path))
    out = run_notebook(monkeypatch, capsys, machine="x")
    assert "Every gather moves 3x the bytes" in out
    assert "Not measured: whole steps" in out


def test_measuring_without_a_gpu_says_so(monkeypatch, capsys):
    """An explicit wish to measure never falls back to the committed rows."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RuntimeError, match="measure: bench decode ended with status 2"):
        run_notebook(monkeypatch, capsys, measure=True)
    assert "expected a GPU, found none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shapes", "grid"), [("few", []), ("gqa", ["--grid", "gqa"]), ("all", ["--grid"])]
)
def test_measuring_asks_the_bench(monkeypatch, capsys, shapes, grid):
    """measure calls the lab's own bench with the shapes asked for, and peers."""
    asked = []

    def main(args):
        asked.append(args)
        return 1

    monkeypatch.setattr("dcp_lab.bench.decode.main", main)
    with pytest.raises(RuntimeError):
        run_notebook(monkeypatch, capsys, measure=True, shapes=shapes, samples=7)
    assert asked == [[*grid, "--peers", "--samples", "7"]]
