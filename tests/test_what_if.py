"""Notebook 07's questions: what is refused, what has to hold, and that the sliders work."""

from __future__ import annotations

import dataclasses
import itertools
import math

import nbformat
import pytest

from dcp_lab import notebooks, plots_what_if
from dcp_lab.analysis import tables, verdict_fit, what_if
from dcp_lab.analysis.what_if import Question, answer
from dcp_lab.bench import costs


@pytest.mark.parametrize(
    ("mode", "attention"),
    sorted(set(itertools.product(what_if.MODES, what_if.ATTENTIONS)) - {("full", "published")}),
)
def test_parts_sum_to_the_step(mode, attention):
    """Nothing of a step is lost or counted twice, and the step is the timeline's."""
    question = Question(mode=mode, attention=attention, reducer="ag_rs")
    said = answer(question)
    assert set(said.parts_ms) == set(what_if.PARTS)
    assert sum(said.parts_ms.values()) == pytest.approx(said.tpot_ms)
    assert min(said.parts_ms.values()) > -1e-9
    case, constants = what_if.case_of(question), what_if.constants_of("H200")
    assert said.tpot_ms == costs.predict_ms(case, constants)
    assert (said.parts_ms["gather"] > 0) == (attention != "paged")


def test_bytes_by_hand():
    """Qwen3-235B at TP 8 and DCP 2: 16 x 2,500 tokens of one KV head, half of them on a rank."""
    case = what_if.case_of(Question())
    assert case.kv_bytes == 16 * 2500 / 2 * 256 * 2
    assert answer(Question()).kv_gb == pytest.approx(94 * case.kv_bytes / 1e9)
    # One token touches its 8 experts of 3 x 4,096 x 1,536, beside q, k, v and output projections.
    one = what_if.MODELS["Qwen3-235B-A22B"].layer_weights(1)
    assert one == pytest.approx(2 * 4096 * 128 * (64 + 4) + 8 * 3 * 4096 * 1536)
    # 94 such layers are the model's 22 billion active parameters, embeddings left out.
    assert 94 * one == pytest.approx(22e9, rel=0.06)
    deepseek = what_if.MODELS["DeepSeek-V3 (MLA)"]
    assert 61 * deepseek.layer_weights(1) == pytest.approx(37e9, rel=0.2)
    latent = what_if.case_of(Question(model=deepseek.name, dcp=8, kv_itemsize=1))
    assert latent.kv_bytes == 16 * 2500 / 8 * 576


def test_the_published_path_costs_what_was_measured():
    """Fitted to two H200s, its kernels add what one H200 measured; compute units share them."""
    rows = tables.measured("stack_h200").query("block == 'base' and mode == 'full' and not bound")
    rows = rows[rows.requests == 16].set_index("attention")
    added = rows.gpu_busy_ms["published_no_sync"] - rows.gpu_busy_ms["paged"]
    one = Question(tp=8, dcp=1, mode="full")
    gpu = {
        attention: answer(dataclasses.replace(one, attention=attention)).tpot_ms
        for attention in ("published_no_sync", "paged")
    }
    assert gpu["published_no_sync"] - gpu["paged"] == pytest.approx(added, rel=0.15)
    rates = {name: what_if.constants_of(name).published_gbps for name in what_if.MACHINES}
    assert rates["MI355X"] / rates["H200"] == pytest.approx(256 / 132)


def test_constants_are_the_fitted_ones():
    """The H200's are the fit's; launch_us scales the host's; a library gathers in two launches."""
    fitted = verdict_fit.h200().constants
    own = what_if.constants_of("H200", library=False)
    assert dataclasses.asdict(own) == pytest.approx(dataclasses.asdict(fitted))
    slow = what_if.constants_of("H200", 2 * fitted.launch_us, library=False)
    ratio = {name: getattr(slow, name) / getattr(fitted, name) for name in vars(fitted)}
    assert ratio == pytest.approx(
        {name: 2.0 if name in costs.HOST_CONSTANTS else 1.0 for name in vars(fitted)}
    )
    library = what_if.constants_of("H200", 30.0)
    assert library.op_us == what_if.LIBRARY_CALLS * 30.0
    assert what_if.constants_of("MI355X").memory_gbps == pytest.approx(
        fitted.memory_gbps * 6914 / 4696
    )
    assert Question().launch_us == fitted.launch_us


def test_what_moves_a_step():
    """A launch costs where the host is the longer queue, and nothing where it hides."""
    at = {
        (mode, dcp, us): answer(Question(mode=mode, dcp=dcp, launch_us=us)).tpot_ms
        for mode in ("piecewise", "full")
        for dcp in (1, 2)
        for us in (5.0, 100.0)
    }
    assert at["piecewise", 1, 5.0] == pytest.approx(at["full", 1, 5.0], rel=0.01)
    assert at["piecewise", 2, 100.0] > 2 * at["piecewise", 1, 100.0]
    for dcp in (1, 2):
        assert at["full", dcp, 100.0] == pytest.approx(at["full", dcp, 5.0], rel=0.01)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"machine": "H100"}, "machine: expected one of H200"),
        ({"model": "gpt-2"}, "model: expected one of Qwen3"),
        ({"mode": "FULL"}, "mode: expected one of eager"),
        ({"dcp": 4}, "dcp: expected a divisor of 2, the ranks that hold the same KV head"),
        ({"tp": 3}, "tp: expected a divisor of 64 q heads, got 3"),
        ({"requests": 0}, "requests: expected a number > 0, got 0"),
        ({"launch_us": math.nan}, "launch_us: expected a number > 0"),
        ({"mode": "full", "attention": "published"}, "host sync no graph can hold"),
    ],
)
def test_what_is_refused(asked, said):
    """A question that no machine or group could answer is refused, and says what was expected."""
    with pytest.raises(ValueError, match=said):
        Question(**asked)


def test_grid_leaves_out_what_cannot_be():
    """One row a mode and reducer; no reducers without DCP, no full graph with a host sync."""
    assert len(what_if.grid(Question())) == 12
    assert len(what_if.grid(Question(dcp=1))) == 3
    synced = what_if.grid(Question(attention="published"))
    assert set(synced["mode"]) == {"eager", "piecewise"} and len(synced) == 8
    fig = plots_what_if.step_parts(what_if.grid(Question()), title="t", source="s")
    assert len(fig.axes[0].get_yticklabels()) == 12


def test_sliders_move_the_figure():
    """With sliders the notebook shows widgets, and a moved one draws anew."""
    root = notebooks.find_root()
    nb = nbformat.read(root / "notebooks" / "07_what_if.ipynb", as_version=4)
    code = [cell.source for cell in nb.cells if cell.cell_type == "code"]
    parameters = next(c for c in nb.cells if "parameters" in c.metadata.get("tags", []))
    defaults = {}
    exec(parameters.source, defaults)
    cell = next(source for source in code if "ipywidgets" in source)
    shown = []
    question = Question(
        **{
            "machine" if name == "hardware" else name: value
            for name, value in defaults.items()
            if name in {f.name for f in dataclasses.fields(Question)} | {"hardware"}
        }
    )
    scope = defaults | {
        "sliders": "yes",
        "question": question,
        "what_if": what_if,
        "plots_what_if": plots_what_if,
        "display": shown.append,
    }
    exec(cell, scope)
    controls = scope["controls"]
    assert set(controls) == {field.name for field in dataclasses.fields(Question)} - {
        "kv_itemsize"
    }
    box, fig = next(s for s in shown if hasattr(s, "children")), scope["show"]
    assert len(box.children) == len(controls) + 1
    before = len(shown)
    fig(**{name: control.value for name, control in controls.items()})
    assert len(shown) == before + 1 and shown[-1].axes
    fig(**{name: control.value for name, control in controls.items()} | {"dcp": 16})
    assert len(shown) == before + 1
