"""Every figure has its finding as title, its source, units and letters large enough."""

from __future__ import annotations

import io

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image

matplotlib.use("Agg")

from figure_checks import cut_off

from dcp_lab import plots
from dcp_lab.analysis import attribution, tables
from dcp_lab.bench.hardware import H200, MI300X, MI355X

STEP = attribution.Step()


def build(name: str):
    """Draw one of the lab's figures from the tables."""
    serve, vllm = tables.published_serve(), tables.measured_vllm()
    added = attribution.added_time(serve)
    added_ms = added.added_ms.iloc[0]
    paths = attribution.peer_paths(tables.measured_peers())
    account = attribution.no_gather_account(vllm)
    floor = attribution.gather_floor(STEP, 2500, (MI355X, MI300X), added_ms=added_ms)
    cost = attribution.gather_cost(paths, STEP, 2500, H200)
    if name == "two_studies":
        tpot = attribution.metric(serve, attribution.MEAN_TPOT)
        return plots.two_studies(tpot, added.context_tokens, tables.published_graph_modes())
    if name == "added_against_context":
        return plots.added_against_context(added, attribution.context_growth(serve))
    if name == "gather_bytes":
        return plots.gather_bytes(floor, added_ms=added_ms, context_tokens=2500)
    if name == "engine_modes":
        return plots.engine_modes(attribution.engine_modes(vllm), account)
    if name == "attention_paths":
        rows = attribution.covering_shape(paths, STEP, 2500)
        return plots.attention_paths(
            rows, layers=94, added_ms=added_ms, source="peers_h200.csv", kernels="FA3"
        )
    stack = tables.measured("stack_h200")
    if name == "step_against_context":
        busy = attribution.step_gpu_time(stack, STEP)
        return plots.step_against_context(busy, layers=94, requests=16)
    if name == "step_modes":
        modes = attribution.step_modes(stack, block="base", requests=16, context_tokens=2500)
        return plots.step_modes(modes, layers=94, shape="16 x 2,500")
    published = attribution.published_gather(stack, STEP, 2500, H200)
    parts = attribution.waterfall(floor, cost, published, added_ms=added_ms)
    return plots.waterfall(parts, account, base_ms=added.base_ms.iloc[0], added_ms=added_ms)


FINDINGS = {
    "two_studies": "4.1x slower in study 1; full graphs made it 3.7x faster in study 2",
    "added_against_context": "does not grow with the context: 63.1 ms at 2,500 tokens, 62.8",
    "gather_bytes": "0.4 to 0.8 % of the added time",
    "engine_modes": "no gather at all, DCP 2 is still 3.7x slower under PIECEWISE",
    "attention_paths": "94 layers adds up to 3.8 ms a step at an H200's price, 6 % of study 1's",
    "step_against_context": "4x the paged step's GPU time at 1,024 tokens, 46x at 32,768",
    "step_modes": "the best gather adds 1.1 ms a step, the published one 38.7",
    "waterfall": (
        "A gather is at most 36 % of study 1's added time at H200 prices, all parts added"
    ),
}


@pytest.fixture(scope="module", params=FINDINGS)
def drawn(request):
    """A figure's name and the figure, laid out."""
    fig = build(request.param)
    FigureCanvasAgg(fig).draw()
    return request.param, fig


def said(text: str) -> str:
    """Text without its line breaks."""
    return " ".join(text.split())


def test_title_is_the_finding(drawn):
    """The title states what the figure shows, with the number from the tables."""
    name, fig = drawn
    assert FINDINGS[name] in said(fig.get_suptitle())


def test_source_says_kind_and_machine(drawn):
    """Below the figure: published, measured or modelled; an H200's number says so."""
    name, fig = drawn
    source = said(fig.get_supxlabel())
    assert any(word in source.lower() for word in ("published", "measured", "modelled"))
    if name in (
        "engine_modes",
        "attention_paths",
        "step_against_context",
        "step_modes",
        "waterfall",
    ):
        assert "H200" in source and "MI355X" in source


def test_axes_have_units(drawn):
    """Some axis of each figure is labelled with a quantity and its unit."""
    _, fig = drawn
    labels = [label for ax in fig.axes for label in (ax.get_xlabel(), ax.get_ylabel())]
    assert any("(ms" in label or "(us" in label for label in labels)


def test_letters_can_be_read_across_a_room(drawn):
    """No text is smaller than 14 points."""
    _, fig = drawn
    sizes = {text.get_fontsize() for text in fig.findobj(Text) if text.get_text().strip()}
    assert min(sizes) >= 14


def test_nothing_is_cut_off(drawn):
    """Every title, label, note and legend entry lies inside the figure."""
    _, fig = drawn
    assert not cut_off(fig)


def test_a_figure_is_shown_once(drawn):
    """pyplot keeps no figure, so a notebook shows only what a cell returns."""
    assert not plots.plt.get_fignums()


def test_log_axis_follows_the_bytes():
    """At a context of 131,072 tokens the bytes pass the default limits and are still drawn."""
    floor = attribution.gather_floor(STEP, 131_072, (MI355X, MI300X), added_ms=63.12)
    fig = plots.gather_bytes(floor, added_ms=63.12, context_tokens=131_072)
    low, high = fig.axes[0].get_xlim()
    assert low < floor.low_ms.min() and floor.high_ms.max() < high
    assert "131,072 tokens" in said(fig.get_suptitle())


@pytest.mark.parametrize(
    ("value", "places", "text"),
    [
        pytest.param(83.35, 1, "83.4", id="half goes up, as by hand"),
        pytest.param(-0.05, 1, "-0.1", id="away from zero"),
        pytest.param(12345.678, 2, "12,345.68", id="thousands"),
        pytest.param(7, 0, "7", id="whole"),
    ],
)
def test_number_rounds_as_by_hand(value, places, text):
    """What is printed is the table's decimal number rounded, not its binary neighbour."""
    assert plots.number(value, places) == text


def test_colors_are_fixed_and_unknown_ones_refused():
    """A variant has its colour; one without is an error."""
    assert plots.color("paged") == plots.GREEN
    with pytest.raises(ValueError, match="variant: expected one of dcp1_full, .*got 'red'"):
        plots.color("red")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(("dcp1_full", "dcp1_piecewise", "dcp2"), id="runs"),
        pytest.param(("paged", "per_token", "per_page", "contiguous", "read"), id="attention"),
        pytest.param(("ag_rs", "a2a", "direct"), id="reducers"),
        pytest.param(("dcp1_full", "gather", "open", "launches", "dcp2"), id="account"),
    ],
)
def test_variants_of_one_figure_differ(family):
    """Variants that share a figure have different colours."""
    assert len({plots.color(variant) for variant in family}) == len(family)


def test_png_is_small_and_right():
    """The notebook's PNG has the figure's size and few colours."""
    fig, ax = plots.figure(size=(4, 3))
    ax.plot([0, 1], [0, 1])
    plots.finding(fig, "A line rises", "Computed here.")
    image = Image.open(io.BytesIO(plots.png(fig)))
    assert image.size == (400, 300)
    assert image.mode == "P" and len(image.convert("RGB").getcolors()) <= plots.PNG_COLORS
