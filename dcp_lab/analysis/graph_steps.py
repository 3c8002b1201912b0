"""Whole steps by graph mode, read: both queues of each, what a launch costs, what DCP adds.

Rows of `dcp-lab bench stack` (the lab's stack) and `dcp-lab bench serve` (vLLM engines). A step is
held against another of the same block or run; where none has both, the tables say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from dcp_lab.analysis import attribution
from dcp_lab.analysis import engines as engines_
from dcp_lab.bench import serve
from dcp_lab.bench.verdicts import Verdict
from dcp_lab.graphs import rule_of
from dcp_lab.graphs.policy import RULES
from dcp_lab.stack import KIMI_K3_LIKE

TABLE, ENGINES = "stack_h200x2", engines_.TABLE
NO_DCP = "no DCP"
MODES = ("eager", "piecewise", "full")
# Attention and reducer. The last waits for the device inside the step: it has no full graph.
PATHS = (NO_DCP, "paged + direct", "paged + a2a", "paged + ag_rs", "published + ag_rs")
WAITS = "published + ag_rs"
SHAPE = ["dense", "requests", "context_tokens"]
# The target: what a layer with DCP 2 and direct adds in full graphs, and below which context a
# step with DCP is to be the faster one.
LIMIT_US, AT_REQUESTS, AT_TOKENS, AIM_TOKENS = 6.0, 16, 2000, 8000
# Name -> rows of the engines' table, with DCP and without, and the exchange.
ENGINE_PAIRS = {
    "vLLM's a2a over vLLM": ("fa_a2a_full", "none_full", "a2a"),
    "the lab's direct over vLLM": ("ours_direct_full", "none_full", "direct"),
    "the lab's direct over the lab's kernel": ("ours_direct_full", "none_ours_full", "direct"),
}


def in_vllm(row: serve.Row) -> tuple[str, str]:
    """Return which path an engine runs in which mode, as the stack calls them."""
    mode = "full" if row.mode == serve.FULL else "piecewise"
    if row.dcp == 1:
        return NO_DCP, mode
    attention, reducer = row.options.get("gather", "paged"), row.options.get("reducer", row.comm)
    return f"{attention} + {reducer}", mode


def plain(table: pd.DataFrame, model: str = "qwen3_235b_tp8") -> pd.DataFrame:
    """Return a model's rows whose launches were not delayed and whose attention was not bound.

    Args:
        table: measured("stack_...").
        model: Of which the rows are.

    Returns:
        Rows with a column `path` more: NO_DCP for pages read in place without DCP, else attention
        and reducer.
    """
    rows = table[(table.model == model) & (table.launch_delay_us == 0) & ~table.bound.astype(bool)]
    path = rows.attention + " + " + rows.reducer.fillna("none")
    return rows.assign(path=path.mask(path == "paged + none", NO_DCP))


def queues(rows: pd.DataFrame, *, dense: str, requests: int, context_tokens: int) -> pd.DataFrame:
    """Return the steps of one shape: what the host launches, and how long each queue is.

    Args:
        rows: plain(...).
        dense, requests, context_tokens: The shape.

    Returns:
        Indexed by (path, mode) in the order of PATHS and MODES, each by its latest row: median_ms,
        p10_ms, p90_ms, samples, host_ms (until the last launch had returned), launches (kernels,
        graphs and copies), launch_us (host_ms by launch), host_syncs, work_ms (GPU time without
        its communication kernels), comm_ms (these on the rank where they ran least; a kernel that
        waits for its peer runs). One profiled step gives the counts and the GPU's times.
    """
    same = (
        (rows.dense == dense)
        & (rows.requests == requests)
        & (rows.context_tokens == context_tokens)
    )
    key = ["path", "mode"]
    latest = rows[same].sort_values("date_utc", kind="stable").drop_duplicates(key, keep="last")
    found = latest.set_index(key)
    result = found[["median_ms", "p10_ms", "p90_ms", "samples", "host_ms"]].copy()
    result["launches"] = found.kernel_launches + found.graph_launches + found.copies
    result["launch_us"] = 1e3 * found.host_ms / result.launches.astype(float)
    result["host_syncs"] = found.host_syncs
    result["work_ms"] = found.gpu_busy_ms - found.comm_ms
    result["comm_ms"] = found.comm_least_ms
    order = [(path, mode) for path in PATHS for mode in MODES if (path, mode) in result.index]
    return result.reindex(pd.MultiIndex.from_tuples(order, names=key))


def without_row(steps: pd.DataFrame) -> list[str]:
    """Return the paths and modes that queues(...) has no row of, but what cannot be."""
    there = {*steps.index, (WAITS, "full")}
    return [f"{p}, {m}" for p in PATHS for m in MODES if (p, m) not in there]


def between_pieces(steps: pd.DataFrame, layers: int) -> pd.Series:
    """Return the launches of a layer between two dense pieces, as the profiler saw them.

    Args:
        steps: queues(...). Of its PIECEWISE rows, with one graph more than layers; what is left
            over is launched once a step.
        layers: Of the step.
    """
    launches = steps.launches.xs("piecewise", level="mode")
    return (launches - layers - 1).astype(int) // layers


def beside_vllm(steps: pd.DataFrame, engines: pd.DataFrame, vllm: pd.DataFrame) -> pd.DataFrame:
    """Return the stack's steps beside those of vLLM engines of the same shapes, in ms.

    Args:
        steps: queues(...).
        engines: measured("engine_..."); its contexts of AT_TOKENS count.
        vllm: measured_vllm(), for what the former has not of vLLM's own kernel.

    Returns:
        Indexed by (path, mode, kernel), those of steps that an engine ran: stack_ms, vllm_ms, run
        ("earlier" of measured_vllm()), none_ms (no DCP in full graphs with vLLM's own kernel, of
        that run) and over_none. Engines of two runs compare by over_none alone.
    """
    own, lab = "vLLM's", "this lab's"
    found = {}
    for (name, context), line in engines_.chosen(engines).iterrows():
        row = serve.ROWS[name]
        if context != AT_TOKENS or row.latent:
            continue
        kernel = lab if row.backend == "CUSTOM" else own
        run = engines_.run_name(line.run)
        found[(*in_vllm(row), kernel)] = (line.median_ms, run, line.none_ms)
    once = attribution.engine_modes(vllm).tpot_ms
    modes = {"FULL_AND_PIECEWISE": "full", "PIECEWISE": "piecewise"}
    for (_, reducer, mode), ms in once.items():
        path = NO_DCP if reducer == "none" else f"paged + {reducer}"
        none_ms = once[1, "none", "FULL_AND_PIECEWISE"]
        found.setdefault((path, modes[mode], own), (ms, "earlier", none_ms))
    lines = {
        (*step, kernel): (steps.median_ms[step], *found[(*step, kernel)])
        for step in steps.index
        for kernel in (own, lab)
        if (*step, kernel) in found
    }
    index = pd.MultiIndex.from_tuples(lines, names=["path", "mode", "kernel"])
    columns = ["stack_ms", "vllm_ms", "run", "none_ms"]
    result = pd.DataFrame(list(lines.values()), index=index, columns=columns)
    return result.assign(over_none=result.vllm_ms / result.none_ms)


def launch_costs(
    steps: pd.DataFrame,
    vllm: pd.DataFrame,
    study2: pd.DataFrame,
    between: Mapping[str, int],
    layers: int,
) -> pd.DataFrame:
    """Return what PIECEWISE adds to a layer over full graphs, and what it launches for that.

    Args:
        steps: queues(...).
        vllm: measured_vllm().
        study2: published_graph_modes().
        between: Path -> launches of a layer between two pieces; the piece's graph comes on top.
        layers: Of the steps and of the vLLM engines.

    Returns:
        A row a case: added_us (a layer), launches (a layer), each_us, basis.
    """
    found = {}
    engine = attribution.engine_modes(vllm).tpot_ms
    for name, path, key in (
        ("vLLM, no DCP", NO_DCP, (1, "none")),
        ("vLLM, DCP 2, a2a", "paged + a2a", (2, "a2a")),
    ):
        added = engine[(*key, "PIECEWISE")] - engine[(*key, "FULL_AND_PIECEWISE")]
        found[name] = (1e3 * added / layers, between[path] + 1, "measured, vLLM")
    ms = steps.median_ms.unstack("mode").reindex(PATHS)
    for path, added in (ms.piecewise - ms.full).dropna().items():
        name = f"the lab's stack, {path.replace('paged + ', 'DCP 2, ')}"
        found[name] = (1e3 * added / layers, between[path] + 1, "measured, the lab's stack")
    mean = study2.set_index("cudagraph_mode").mean_tpot_ms
    added = 1e3 * (mean.PIECEWISE - mean.FULL_AND_PIECEWISE)
    with_kv, all_layers = len(KIMI_K3_LIKE.kv_layers), KIMI_K3_LIKE.num_layers
    for name, count in (
        (f"study 2, DCP 8, its {with_kv} layers with KV", with_kv),
        (f"study 2, if all {all_layers} launched as much", all_layers),
    ):
        found[name] = (added / count, between["paged + a2a"] + 1, "published, study 2")
    table = pd.DataFrame.from_dict(found, "index", columns=["added_us", "launches", "basis"])
    table.insert(2, "each_us", table.added_us / table.launches)
    return table


def releases() -> dict[str, str]:
    """Return the vLLM releases of each graph rule that were read, such as "0.13 to 0.25"."""
    minors: dict[str, list[int]] = {rule: [] for rule in RULES}
    for minor in range(100):
        try:
            minors[rule_of(f"0.{minor}")].append(minor)
        except ValueError:
            continue
    return {
        rule: f"0.{some[0]} to 0.{some[-1]}" if some else "in no release"
        for rule, some in minors.items()
    }


# ---- what DCP adds ---------------------------------------------------------------------------


def _difference(
    layers: int, alone_ms: float, dcp_ms: float, gap_ms: Sequence[float]
) -> dict[str, float | str]:
    """Return what DCP adds to a layer; gap_ms: the step with it less the other, low to high."""
    low, middle, high = (1e3 / layers * ms for ms in gap_ms)
    return {
        "alone_ms": alone_ms,
        "dcp_ms": dcp_ms,
        "us": middle,
        "low_us": low,
        "high_us": high,
        "step": "longer" if low > 0 else "shorter" if high < 0 else "level",
    }


_DIFFERENCE = ["alone_ms", "dcp_ms", "us", "low_us", "high_us", "step"]


def added(rows: pd.DataFrame) -> pd.DataFrame:
    """Return what DCP adds to a layer in full graphs, pages read in place.

    Both steps are of one block of one run; of each shape and reducer the latest run counts.

    Args:
        rows: plain(...).

    Returns:
        A row a dense, requests, reducer and context_tokens: run, layers, samples, alone_ms,
        dcp_ms, us (the difference of the medians by layer), low_us and high_us (10th percentile of
        one less 90th of the other), and step: "longer" or "shorter" with DCP where both lie on one
        side of 0, else "level".
    """
    full = rows[(rows["mode"] == "full") & (rows.attention == "paged")]
    alone = full.path == NO_DCP
    key = [*SHAPE, "date_utc", "block"]
    pairs = full[~alone].merge(full[alone], on=key, suffixes=("", "_alone"))
    found = [
        {name: getattr(pair, name) for name in [*SHAPE, "reducer"]}
        | {"run": pair.date_utc, "layers": pair.num_layers}
        | {"samples": min(pair.samples, pair.samples_alone)}
        | _difference(
            pair.num_layers,
            pair.median_ms_alone,
            pair.median_ms,
            (
                pair.p10_ms - pair.p90_ms_alone,
                pair.median_ms - pair.median_ms_alone,
                pair.p90_ms - pair.p10_ms_alone,
            ),
        )
        for pair in pairs.itertuples()
    ]
    columns = [*SHAPE, "reducer", "run", "layers", "samples", *_DIFFERENCE]
    table = pd.DataFrame(found, columns=columns)
    table = table.sort_values("run", kind="stable")
    table = table.drop_duplicates([*SHAPE, "reducer"], keep="last")
    order = ["dense", "requests", "reducer", "context_tokens"]
    # "light", what the target is of, first.
    return table.sort_values(order, ascending=[False, True, True, True], ignore_index=True)


def engine_added(table: pd.DataFrame) -> pd.DataFrame:
    """Return what DCP adds to a layer of a vLLM engine in full graphs, for each of ENGINE_PAIRS.

    Args:
        table: measured("engine_...").

    Returns:
        A row a pair and context: pair, reducer, context_tokens, requests, one_run (whether one run
        has both; where none has, each step is first held against its own run's no DCP), windows
        (fewest of the two), alone_none_ms and dcp_none_ms (that no DCP), alone_ms, dcp_ms, us,
        low_us and high_us (least of one less most of the other), step.
    """
    there, found = set(table.row[table.metric == "tpot"]), []
    for pair, (row, alone, reducer) in ENGINE_PAIRS.items():
        if not {row, alone} <= there:
            continue
        both = engines_.chosen(table, (row, alone))
        contexts = both.loc[row].index.intersection(both.loc[alone].index)
        for context in contexts.sort_values():
            one, other = both.loc[(row, context)], both.loc[(alone, context)]
            gap = engines_.gap(both, row, alone, context)
            # Two runs that share no engine cannot be held together.
            if np.isnan(gap).any():
                continue
            found.append(
                {
                    "pair": pair,
                    "reducer": reducer,
                    "context_tokens": int(context),
                    "requests": int(one.requests),
                    "one_run": not (one.apart or other.apart),
                    "windows": int(min(one.samples, other.samples)),
                    "alone_none_ms": other.none_ms,
                    "dcp_none_ms": one.none_ms,
                }
                | _difference(serve.LAYERS, other.median_ms, one.median_ms, gap)
            )
    columns = ["pair", "reducer", "context_tokens", "requests", "one_run", "windows"]
    columns += ["alone_none_ms", "dcp_none_ms"]
    return pd.DataFrame(found, columns=[*columns, *_DIFFERENCE])


def of_target(
    table: pd.DataFrame, *, dense: str = "light", reducer: str = "direct"
) -> pd.DataFrame:
    """Return the rows of added(...) with the target's requests, by context.

    Args:
        table: added(...).
        dense, reducer: Default: those of the target.
    """
    same = (table.dense == dense) & (table.reducer == reducer) & (table.requests == AT_REQUESTS)
    return table[same].set_index("context_tokens").sort_index()


def verdict(table: pd.DataFrame) -> Verdict:
    """Judge the target: a layer with DCP 2 and direct adds at most LIMIT_US, light dense part.

    Args:
        table: added(...). Only a row of AT_REQUESTS x AT_TOKENS itself holds or misses it.
    """
    rows = of_target(table)
    target = f"a layer with DCP adds, full graphs, direct, {AT_REQUESTS} x {AT_TOKENS:,}"
    value = float(rows.us[AT_TOKENS]) if AT_TOKENS in rows.index else None
    return Verdict(target, value, LIMIT_US)


def beside(table: pd.DataFrame) -> pd.Series:
    """Return the us a layer of the measured contexts nearest to AT_TOKENS, below and above it."""
    rows = of_target(table)
    below, above = rows.index[rows.index < AT_TOKENS], rows.index[rows.index > AT_TOKENS]
    return rows.us[[*below[-1:], *above[:1]]]


def crossing(steps: pd.Series) -> tuple[float, float]:
    """Return between which contexts a step with DCP becomes the shorter one, spreads apart.

    Args:
        steps: "longer", "level" or "shorter", by context.

    Returns:
        (largest context at which it is not shorter, smallest behind it at which it is); 0 and
        infinity where there is none.
    """
    contexts = steps.index
    last = max(contexts[steps != "shorter"], default=0)
    first = min(contexts[contexts > last], default=np.inf)
    return float(last), float(first)


# ---- sentences -------------------------------------------------------------------------------


def _span(values: pd.Series, form: str) -> str:
    """Return "least to most", or one number where both read the same."""
    low, high = format(values.min(), form), format(values.max(), form)
    return low if low == high else f"{low} to {high}"


def say_queues(steps: pd.DataFrame) -> str:
    """Return which queue each mode's steps are as long as, as far as measured."""
    said = []
    for mode in MODES:
        if mode not in steps.index.get_level_values("mode"):
            said.append(f"No {mode} step has a row.")
            continue
        rows = steps.xs(mode, level="mode")
        launches = _span(rows.launches, ",.0f")
        said.append(
            f"**{'PIECEWISE' if mode == 'piecewise' else mode.capitalize()}:** {launches} "
            f"launch{'' if launches == '1' else 'es'} a step, on which the host spends "
            f"{_span(100 * rows.host_ms / rows.median_ms, '.0f')} % of its "
            f"{_span(rows.median_ms, '.1f')} ms; the GPU's own work takes "
            f"{_span(rows.work_ms, '.1f')} ms."
        )
    return " ".join(said)


def say_launches(costs: pd.DataFrame) -> str:
    """Return what a launch would have to cost if launches were all that PIECEWISE adds."""
    said = []
    for basis, rows in costs.groupby("basis", sort=False):
        each = "; ".join(
            f"{name.partition(', ')[2]} {us:,.0f}" for name, us in rows.each_us.items()
        )
        said.append(f"{basis.capitalize()}, us a launch: {each}.".replace("vllm", "vLLM"))
    return " ".join(said)


def say_target(table: pd.DataFrame) -> str:
    """Return what a layer with DCP adds at the target's shape, or what is known beside it."""
    judged = verdict(table)
    subject = f"A layer with DCP and `direct`, {AT_REQUESTS} requests, light dense part"
    if judged.value is not None:
        row = of_target(table).loc[AT_TOKENS]
        word = "holds" if judged.state == "holds" else "misses"
        return (
            f"{subject}: it adds {judged.value:.1f} us at {AT_TOKENS:,} tokens "
            f"({row.low_us:.1f} to {row.high_us:.1f} by the spreads), which {word} the target of "
            f"{LIMIT_US:g}."
        )
    near = beside(table)
    text = f"{subject}: {AT_TOKENS:,} tokens have no row, so the target of {LIMIT_US:g} us is open"
    if near.empty:
        return f"{text}."
    within = near <= LIMIT_US
    where = "within it" if within.all() else "on both sides of it" if within.any() else "over it"
    found = " and ".join(f"{us:.1f} us at {context:,} tokens" for context, us in near.items())
    return f"{text}; measured beside it: {found}, {where}."


def say_grain(table: pd.DataFrame) -> str:
    """Return by how much the steps of the two nearest contexts differ."""
    rows = of_target(table)
    if len(rows) < 2:
        return "With fewer than two contexts nothing says how sure such differences are."
    contexts = rows.index.to_numpy()
    at = int(np.argmin(contexts[1:] / contexts[:-1]))
    near, far = rows.iloc[at], rows.iloc[at + 1]
    alone, shared = (
        1e3 * (far[column] - near[column]) / near.layers for column in ("alone_ms", "dcp_ms")
    )
    return (
        f"From {contexts[at]:,} to {contexts[at + 1]:,} tokens the step without DCP changes by "
        f"{alone:+.1f} us a layer and the one with DCP by {shared:+.1f}: a difference between the "
        "two is no surer than these agree."
    )


def say_engines(table: pd.DataFrame) -> str:
    """Return what DCP adds to a layer of an engine at the target's context."""
    rows = table[table.context_tokens == AT_TOKENS]
    if rows.empty:
        return f"No engine has a row at {AT_TOKENS:,} tokens."
    said = []
    for row in rows.itertuples():
        apart = (
            "; two runs, each step first held against vLLM's own without DCP of its run, "
            f"{row.dcp_none_ms:.2f} and {row.alone_none_ms:.2f} ms"
        )
        said.append(
            f"{row.us:+.1f} us for {row.pair} without DCP ({row.low_us:+.1f} to "
            f"{row.high_us:+.1f}, {row.windows} windows{'' if row.one_run else apart})"
        )
    return f"In vLLM at {AT_TOKENS:,} tokens DCP adds to a layer: {'; '.join(said)}."


def say_crossing(name: str, steps: pd.Series) -> str:
    """Return from which context a step with DCP is the shorter one, spreads apart."""
    if steps.empty:
        return f"{name}: no row."
    last, first = crossing(steps)
    contexts = sorted(steps.index)
    if np.isinf(first):
        return f"{name}: at no context from {contexts[0]:,} to {contexts[-1]:,} tokens."
    if last == 0:
        return f"{name}: at every measured context, from {contexts[0]:,} tokens on."
    return f"{name}: from {first:,.0f} tokens at the latest, {steps[int(last)]} at {last:,.0f}."
