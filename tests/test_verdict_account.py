"""The account of the 4x: its numbers are the rows', and its figures draw them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import matplotlib
import pandas as pd
import pytest
import yaml

matplotlib.use("Agg")

from figure_checks import cut_off, letters
from matplotlib.backends.backend_agg import FigureCanvasAgg
from test_verdict import trace

from dcp_lab import plots_verdict
from dcp_lab.analysis import (
    engines,
    tables,
    verdict_account,
    verdict_fit,
    verdict_gain,
    verdict_study,
    verdict_traces,
)
from dcp_lab.notebooks import read_parameters
from dcp_lab.serving.settings import find_setting

ROOT = Path(__file__).resolve().parents[1]
STACK = tables.measured(verdict_fit.TABLE)


@pytest.fixture(scope="module")
def account() -> verdict_account.Account:
    """The account, computed once."""
    return verdict_account.account()


def test_steps_are_the_rows(account):
    """Medians of the base block; study 1's two observed steps come back from the model."""
    steps = account.steps.set_index("name")
    assert steps.ms.tolist() == [7.4323, 146.9493, 61.8405, 31.9961, 11.3663, 8.2068]
    assert steps.low_ms.iloc[0] == pytest.approx(20.23, rel=2e-3)
    assert steps.high_ms.iloc[1] == pytest.approx(83.35, rel=1e-3)
    assert (steps.low_ms <= steps.high_ms).all()
    with pytest.raises(ValueError, match="corner: expected one that was measured"):
        verdict_account.measured_step(STACK, {"mode": "full"}, context_tokens=7)


def test_removed_is_by_hand(account):
    """Of 139.5 ms the pages in place remove 85.1; for study 1 the model gives an interval."""
    low, high = account.removed(verdict_account.PAGED, measured=True)
    assert low == high == pytest.approx((146.9493 - 61.8405) / (146.9493 - 7.4323))
    low, high = account.removed(verdict_account.PAGED, measured=False)
    row = account.steps.set_index("name").loc[verdict_account.PAGED]
    assert low == pytest.approx((83.35 - row.high_ms) / 63.12)
    assert high == pytest.approx((83.35 - row.low_ms) / 63.12)


def test_what_hides_is_measured(account):
    """PIECEWISE without DCP: 4.5 ms on a light dense part, 1.1 on a heavy one; 50 with it."""
    alone = account.hidden.alone_ms
    assert alone.iloc[0] == pytest.approx(11.9499 - 7.4323)
    assert alone.iloc[1] == pytest.approx(18.8367 - 17.7832)
    assert alone.iloc[2] == pytest.approx(19.26 - 6.21)
    assert alone.iloc[3] == pytest.approx(20.11 - 20.23)
    shared = account.hidden.iloc[1]
    assert shared.shared_ms == pytest.approx(66.0898 - 20.7916)
    assert shared.shared_low == pytest.approx(54.5731 - 20.8381)
    assert shared.shared_high == pytest.approx(72.2552 - 20.7131)
    assert account.hidden.shared_ms.min() > 10 * alone.iloc[1]


def test_study_1s_graph_mode_is_alone_without_a_gather(account):
    """Both its steps with DCP read the pages in place: of the 63 ms the gather's is left out."""
    row = account.hidden.iloc[3]
    paged = {**verdict_study.AS_PUBLISHED, "attention": "paged"}
    added = [s.ms(**paged) - s.ms(**{**paged, "mode": "full"}) for s in account.solved]
    assert (row.shared_low, row.shared_high) == pytest.approx((min(added), max(added)))
    assert row.basis == "modelled" and row.shared_high < 0.6 * account.added_ms


def test_a_host_whose_calls_cost_the_same(account):
    """Every call at one cost, and study 1's step with DCP as observed."""
    for study in account.alike:
        assert study.ms(**verdict_study.AS_PUBLISHED) == pytest.approx(account.shared_ms)
        c = study.constants
        assert c.launch_us == pytest.approx(c.collective_launch_us) == pytest.approx(c.sync_us)
    assert account.lab_ms > account.library_ms > account.steps.ms[2]


def test_stack_and_engine_stand_beside_each_other():
    """Each corner's own rows, nothing where there is none, each run with its own no DCP."""
    served = engines.chosen(tables.measured(engines.TABLE), verdict_account.ENGINES)
    found = verdict_account.beside(STACK, served, tables.measured_vllm())
    near = ["stack, 2,500", "vLLM, 2,000", "x no DCP, 2,000"]
    assert list(found.columns) == [*near, "stack, 8,192", "vLLM, 8,000", "x no DCP, 8,000"]
    names = engines.NAMES
    runs = found.groupby("run", sort=False)
    first, second, earlier = (part.droplevel("run") for _, part in runs)
    gathered = second.loc[names["gather_ag_rs_piecewise"]]
    assert list(gathered.round(1)) == [146.9, 100.0, 15.6, 131.4, 102.7, 13.4]
    # FLASH_ATTN is not in the stack, and nobody ran a2a there at 8,192 tokens.
    assert first.isna().loc[names["fa_a2a_full"]].tolist() == [1, 0, 0, 1, 0, 0]
    assert first.isna().loc[names["ours_a2a_full"]].tolist() == [0, 0, 0, 1, 0, 0]
    once = earlier.loc[names["fa_a2a_piecewise"]]
    assert list(once.iloc[:3]) == pytest.approx([58.6092, 72.1, 72.1 / 6.21])
    for part, none_ms in ((first, 6.36), (second, 6.43), (earlier, 6.21)):
        line = part.loc[names["none_full"]]
        assert round(line["vLLM, 2,000"], 2) == none_ms and line["x no DCP, 2,000"] == 1


def test_without_dcp_study_1s_host_is_the_shorter_queue(account):
    """Hidden without DCP, the longer queue with it: why PIECEWISE costs nothing there alone."""
    spans = verdict_account.host_spans(account.solved)
    assert spans.host_high["no DCP"] < spans.gpu_low["no DCP"]
    assert spans.host_low["pages in place"] > spans.gpu_high["pages in place"]
    assert spans.host_low["study 1's gather"] > spans.gpu_high["study 1's gather"]


def test_the_three_accounts_are_the_numbers(account):
    """Cells are the account's shares and the published bounds, each once with its unit."""
    floor = pd.DataFrame({"low_share": [0.004, 0.006], "high_share": [0.005, 0.0078]})
    said = verdict_account.three_ways(account, STACK, floor=floor)
    assert said["removed by pages in place alone"][:2] == ("61 %", "40 to 77 %")
    assert said["from 2,500 to 3,000 tokens"][0].startswith("+16 ms")
    assert said["PIECEWISE without DCP"][2] == "-0.1 ms"
    assert said["the gather's bytes"][2] == "0.4 to 0.8 % if nothing hid them"


def test_parts_and_gather_agree(account):
    """The gather's interval lies within those of its parts, and the parts within what is added."""
    names = [verdict_study.CALLS, verdict_study.WAIT, verdict_study.BYTES, verdict_study.KERNELS]
    low, high = account.gather
    assert account.parts.low[names].sum() <= low < high <= account.parts.high[names].sum()
    assert account.parts.low.sum() < account.added_ms < account.parts.high.sum()


def test_the_published_step_is_flat_until_the_gpu_is_the_longer_queue():
    """By the model, and so measured: no growth to 8,192 tokens, the GPU's time at 32,768."""
    lines = verdict_account.queue_lines([1024, 8192, 32768])
    assert lines.step_ms[8192] == pytest.approx(lines.step_ms[1024], rel=0.01)
    assert lines.gpu_ms[8192] > 4 * lines.gpu_ms[1024]
    assert lines.step_ms[32768] == pytest.approx(lines.gpu_ms[32768], rel=0.01)


def test_the_engine_is_predicted_without_its_rows(account):
    """All five steps within 28 %, those with DCP within 18 %, from the stack's constants."""
    rows = verdict_account.engine_check(account.fit)
    assert rows.error.abs().max() < 0.28 and rows[rows.dcp_size > 1].error.abs().max() < 0.18


def figures(account: verdict_account.Account) -> dict[str, object]:
    """Return every figure of notebook 06 that is not in dcp_lab.plots."""
    said = {"title": "A finding", "source": "Measured."}
    contexts = [1024, 8192, 32768]
    published = STACK[(STACK.block == "context") & (STACK.attention == "published")]
    return {
        "removal": plots_verdict.removal(account.steps, **said),
        "hidden": plots_verdict.hidden(account.hidden, **said),
        "against_context": plots_verdict.against_context(
            published, verdict_account.queue_lines(contexts), **said
        ),
        "predicted": plots_verdict.predicted(account.fit, source="Measured."),
        "delays": plots_verdict.delays(STACK, verdict_fit.slopes(STACK), **said),
        "shares": plots_verdict.shares(account.shares, **said),
        "study_parts": plots_verdict.study_parts(account.parts, added_ms=63.12, **said),
        "gain": plots_verdict.gain(
            verdict_gain.full_steps(STACK),
            engines.chosen(tables.measured(engines.TABLE), verdict_account.ENGINES),
            **said,
        ),
        "traces": plots_verdict.traces(
            verdict_traces.shown(dict.fromkeys(verdict_traces.SHOWN, trace())), source="made up"
        ),
    }


def test_figures_are_legible_and_whole(account):
    """No letter under 14 points, none cut off by the figure's edge."""
    for name, fig in figures(account).items():
        assert not cut_off(fig), name
        small = [text.get_text() for text in letters(fig) if text.get_fontsize() < 14]
        assert not small, name


def test_no_bar_crosses_the_digits_of_the_shares(account):
    """The digits lie below the axes, where no error bar reaches."""
    fig = plots_verdict.shares(account.shares, title="A finding", source="Measured.")
    FigureCanvasAgg(fig).draw()
    ax = fig.axes[0]
    bottom = ax.get_window_extent().y0
    digits = [text for text in ax.texts if text.get_text() in ("1", "2", "3")]
    assert len(digits) == 12
    assert all(text.get_window_extent().y1 <= bottom for text in digits)


def test_a_span_of_one_number_is_one_number(account):
    """No "2 to 2 %": where both ends are written alike there is one."""
    fig = plots_verdict.study_parts(account.parts, added_ms=63.12, title="A", source="B")
    said = [text.get_text() for text in fig.axes[0].texts]
    assert "1.2 to 1.4 ms: 2 %" in said
    for text in said:
        for low, high in re.findall(r"([\d.]+) to ([\d.]+)", text):
            assert low != high


def test_the_miss_is_written_into_its_figure(account):
    """The figure of predictions says by how much, and names the corner that misses."""
    fig = plots_verdict.predicted(account.fit, source="Measured.")
    assert "26.0 % at worst: the worst misses its target" in " ".join(
        fig.get_suptitle().split()
    ).replace("\N{NO-BREAK SPACE}", " ")
    said = [text.get_text() for text in fig.axes[0].texts]
    assert said == ["paged + ag_rs, 32,768: +26 %"]
    swapped = plots_verdict.predicted(account.swapped, source="Measured.")
    assert "both targets met" in " ".join(swapped.get_suptitle().split())
    assert isinstance(account.fit.missed(), pd.DataFrame) and len(account.fit.missed()) == 1


def test_the_experiment_is_a_parameter_set_that_runs():
    """Notebook 05 takes each parameter; the setting is study 1 with its attention path changed."""
    asked = yaml.safe_load((ROOT / "notebooks/parameters/mi355_verdict.yaml").read_text())
    known = read_parameters(ROOT / "notebooks" / "05_serve_vllm.ipynb")
    assert set(asked) <= set(known) and asked["save_rows"] is True
    for name, value in asked.items():
        known[name].check(value)
    wanted = find_setting(asked["setting"])
    gathered = find_setting("study1_gather")
    options = {**gathered.server.additional_config["dcp_lab"], "attention_path": "paged"}
    same = dataclasses.replace(gathered.server, additional_config={"dcp_lab": options})
    assert wanted.server == same and wanted.loads == gathered.loads
