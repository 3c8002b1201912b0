"""Real vLLM engines, read: TPOT, TTFT, memory and start of each configuration, and the targets.

Rows of `dcp-lab bench serve`. An engine is held against another only where one run has both under
the same settings (`times`, `engines`). Where a reading names engines of several runs, `chosen`
says of each which run it is of, whether that is another than the others', and what no DCP takes in
that very run: only what each is over its own run's no DCP may be held together then.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from dcp_lab.analysis import attribution, tables
from dcp_lab.bench import serve

TABLE = "engine_h200x2"
# What a figure or a table calls a row of dcp_lab.bench.serve.ROWS.
NAMES = {
    "none_full": "no DCP: vLLM's FLASH_ATTN",
    "none_ours_full": "no DCP: this lab's backend",
    "fa_a2a_full": "DCP 2: vLLM's FLASH_ATTN, a2a",
    "ours_a2a_full": "DCP 2: this lab's backend, a2a",
    "ours_direct_full": "DCP 2: this lab's backend, direct",
    "gather_ag_rs_piecewise": "DCP 2: study 1's gather, ag_rs, PIECEWISE",
    "none_piecewise": "no DCP: vLLM's FLASH_ATTN, PIECEWISE",
    "fa_a2a_piecewise": "DCP 2: vLLM's FLASH_ATTN, a2a, PIECEWISE",
    "ours_a2a_piecewise": "DCP 2: this lab's backend, a2a, PIECEWISE",
    "mla_a2a_full": "DCP 2: MLA model, vLLM's TRITON_MLA, a2a",
    "mla_a2a_piecewise": "DCP 2: MLA model, vLLM's TRITON_MLA, a2a, PIECEWISE",
}
NO_DCP, THEIRS = "none_full", "fa_a2a_full"
# Those of full graphs and GQA: what a figure over context shows.
IN_FULL_GRAPHS = tuple(
    name for name in NAMES if not (r := serve.ROWS[name]).latent and r.mode == serve.FULL
)
TOKEN_METRICS = {"tokens_same": "same", "tokens_tied": "tied", "tokens_other": "other"}
# One number of an engine each: metric -> column.
SINGLE = {
    "start": "start_s",
    "compile": "compile_s",
    "capture": "capture_s",
    "graph_memory": "graph_gib",
    "kv_cache_capacity": "kv_tokens",
    "exchange": "exchange_mb",
}


def _kept(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of whole models; shorter ones are development runs."""
    latent = [name for name, row in serve.ROWS.items() if row.latent]
    return table[(table.num_layers == serve.LAYERS) | table.row.isin(latent)]


def _ordered(found: pd.DataFrame) -> pd.DataFrame:
    """Return the table with its runs in time and, inside, its rows in the order of NAMES."""
    place = {name: number for number, name in enumerate(NAMES)}
    return found.sort_index(key=lambda level: level.map(place) if level.name == "row" else level)


def _medians(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return a line an engine and context: settings, times, and what they are held against."""
    rows = _kept(table)
    rows = rows[rows.metric == metric]
    key = [*serve.SETTINGS, "row", "context_tokens"]
    found = rows.groupby(key, dropna=False, as_index=False).agg(
        median_ms=("value", "median"), least_ms=("value", "min"), most_ms=("value", "max"),
        samples=("value", "size"),
    )  # fmt: skip
    same = [*serve.SETTINGS, "context_tokens"]
    for column, other in (("none", NO_DCP), ("theirs", THEIRS)):
        base = found.loc[found.row == other, [*same, "median_ms"]]
        both = found[same].merge(base, on=same, how="left")
        found[f"{column}_ms"] = both.median_ms.to_numpy()
        found[f"over_{column}"] = found.median_ms / found[f"{column}_ms"]
    return found.astype({"context_tokens": int})


def times(table: pd.DataFrame, metric: str = "tpot") -> pd.DataFrame:
    """Return every engine's time at each context, beside the others of its run.

    Args:
        table: measured("engine_...").
        metric: "tpot" or "ttft".

    Returns:
        Indexed by (run, row, context_tokens): median_ms, least_ms, most_ms, samples; over_none and
        over_theirs, the median over that without DCP and over FLASH_ATTN's DCP 2 in full graphs,
        NaN where the run has none under the same settings.
    """
    columns = ["median_ms", "least_ms", "most_ms", "samples", "over_none", "over_theirs"]
    found = _medians(table, metric)
    return _ordered(found.set_index(["run", "row", "context_tokens"])[columns])


def chosen(table: pd.DataFrame, names: Sequence[str] | None = None) -> pd.DataFrame:
    """Return TPOTs of several engines, of one run as far as it has them.

    That is the run with most of the engines, then with most contexts, then the latest. An engine
    that it lacks is of the run with most of that engine's contexts and is `apart`: its times stand
    beside the others' with none_ms beside them, and are held against them by over_none alone.

    Args:
        table: measured("engine_...").
        names: Keys of NAMES. Default: those that the table has.

    Returns:
        Indexed by (row, context_tokens), in the order of names: run, requests, apart, median_ms,
        least_ms, most_ms, samples, none_ms (no DCP of that run, NaN where it has none),
        none_least_ms, none_most_ms, over_none.

    Raises:
        ValueError: An engine of names has no row.
    """
    found = _medians(table, "tpot")
    there = set(found.row)
    names = [name for name in NAMES if name in there] if names is None else list(names)
    missing = [name for name in names if name not in there]
    if missing:
        raise ValueError(f"table: expected rows of {', '.join(names)}, none of {missing}")
    # Two settings in one run are as far apart as two runs.
    settings = list(serve.SETTINGS)
    found["one"] = found.groupby(settings, dropna=False).ngroup()
    base = found[found.row == NO_DCP].set_index(["one", "context_tokens"])
    own = pd.MultiIndex.from_frame(found[["one", "context_tokens"]])
    for end in ("least", "most"):
        found[f"none_{end}_ms"] = base[f"{end}_ms"].reindex(own).to_numpy()
    found = found[found.row.isin(names)]
    # Beside its own run's no DCP a time says more than any number of times without.
    found["held"] = found.over_none.notna()
    taken = []
    main = _fullest(found) if names else None
    for name in names:
        rows = found[found.row == name]
        apart = main not in set(rows.one)
        one = _fullest(rows) if apart else main
        taken.append(rows[rows.one == one].assign(apart=apart))
    columns = ["run", "requests", "apart", "median_ms", "least_ms", "most_ms", "samples"]
    columns += ["none_ms", "none_least_ms", "none_most_ms", "over_none"]
    whole = pd.concat(taken) if taken else found.assign(apart=False)
    return whole.set_index(["row", "context_tokens"])[columns]


def _fullest(found: pd.DataFrame) -> int:
    """Return which has most engines, then most medians that are held, then is the latest."""
    by = found.groupby("one").agg(
        engines=("row", "nunique"), held=("held", "sum"), medians=("row", "size"),
        run=("run", "first"),
    )  # fmt: skip
    return int(by.sort_values(["engines", "held", "medians", "run"], kind="stable").index[-1])


def gap(found: pd.DataFrame, name: str, other: str, context_tokens: int) -> tuple[float, ...]:
    """Return by how much a step is longer than another, in ms: low, middle, high.

    Of two runs each is held against its own run's no DCP first, so that what differs between the
    runs falls out.

    Args:
        found: chosen(...).
        name, other: Keys of NAMES that are in it.
        context_tokens: At which.
    """
    one, base = found.loc[(name, context_tokens)], found.loc[(other, context_tokens)]
    middle = one.median_ms - base.median_ms
    low, high = one.least_ms - base.most_ms, one.most_ms - base.least_ms
    if one.apart == base.apart and one.run == base.run:
        return low, middle, high
    return (
        low + base.none_least_ms - one.none_most_ms,
        middle + base.none_ms - one.none_ms,
        high + base.none_most_ms - one.none_least_ms,
    )


def by_context(found: pd.DataFrame, column: str, places: int = 2) -> pd.DataFrame:
    """Return one column of times(...) for a reader: a line an engine, a column a context.

    Args:
        found: times(...).
        column: Which.
        places: Digits behind the point.
    """
    wide = found[column].unstack("context_tokens").dropna(how="all")
    wide.columns = [f"{context:,}" for context in wide.columns]
    return _named(_ordered(wide)).map(lambda value: _text(value, places))


def _text(value: float, places: int) -> str:
    return "" if pd.isna(value) else f"{value:,.{places}f}"


def _named(found: pd.DataFrame) -> pd.DataFrame:
    """Return the table with engines in words and runs by their time of day."""
    return found.rename(index=run_name, level="run").rename(index=NAMES, level="row")


def run_name(run: str) -> str:
    """Return what a table calls a run: its time of day."""
    return run[11:16]


def widest_run(found: pd.DataFrame) -> str:
    """Return the run with the most medians that stand beside one without DCP.

    Args:
        found: times(...).

    Raises:
        ValueError: No run has an engine without DCP.
    """
    counts = found.over_none.dropna().groupby("run").size()
    if counts.empty:
        raise ValueError(f"found: expected a run with {NO_DCP!r} in it, got none")
    # Of several the latest.
    return str(counts[counts == counts.max()].index.max())


def engines(table: pd.DataFrame) -> pd.DataFrame:
    """Return what an engine takes before it answers, and what memory it leaves for the KV.

    Args:
        table: measured("engine_...").

    Returns:
        Indexed by (run, row): place (1: the first of its run, whose start has in it what is made
        once for all of them, compiled code above all), start_s (compile_s is part of it),
        compile_s, capture_s, graph_gib, kv_tokens (of all ranks), exchange_mb (this lab's buffers
        on a rank), kv_over_none and kv_over_theirs (as in times).
    """
    rows = _kept(table)
    single = rows[rows.metric.isin(SINGLE)]
    found = single.pivot_table(index=["run", "row"], columns="metric", values="value")
    found = found.rename(columns=SINGLE)[list(SINGLE.values())]
    found["exchange_mb"] /= 1e6
    ended = rows.groupby(["run", "row"]).date_utc.min()
    found.insert(0, "place", ended.groupby("run").rank().astype(int))
    for column, other in (("kv_over_none", NO_DCP), ("kv_over_theirs", THEIRS)):
        base = found.kv_tokens.xs(other, level="row") if other in found.index.levels[1] else {}
        found[column] = found.kv_tokens / found.index.get_level_values("run").map(base)
    return _ordered(found)


def engines_in_words(found: pd.DataFrame) -> pd.DataFrame:
    """Return engines(...) for a reader, rounded; empty where a run has no other to compare."""
    columns = {
        "place": ("place in the run", 0),
        "start_s": ("start (s)", 1),
        "compile_s": ("of it compiling (s)", 1),
        "capture_s": ("graphs (s)", 0),
        "graph_gib": ("graphs (GiB)", 2),
        "kv_tokens": ("KV (tokens)", 0),
        "kv_over_none": ("over no DCP", 2),
        "kv_over_theirs": ("over FLASH_ATTN's DCP 2", 3),
        "exchange_mb": ("exchange (MB)", 0),
    }
    shown = {
        words: found[column].map(lambda value, n=places: _text(value, n))
        for column, (words, places) in columns.items()
    }
    return _named(pd.DataFrame(shown))


def tokens(table: pd.DataFrame) -> pd.DataFrame:
    """Return how many greedy tokens of each engine are those of the engine without DCP.

    Args:
        table: measured("engine_...").

    Returns:
        Indexed by (run, row), empty where nothing was compared: dtype, same, tied, other (counts
        of positions, each request until its first difference), same_share.
    """
    rows = _kept(table)
    rows = rows[rows.metric.isin(TOKEN_METRICS)]
    if rows.empty:
        return pd.DataFrame(columns=["dtype", "same", "tied", "other", "same_share"])
    found = rows.pivot_table(index=["run", "row", "dtype"], columns="metric", values="value")
    found = found.rename(columns=TOKEN_METRICS)[list(TOKEN_METRICS.values())].astype(int)
    found["same_share"] = found.same / found.sum(axis=1)
    return _ordered(found.reset_index("dtype"))


def tokens_in_words(found: pd.DataFrame) -> pd.DataFrame:
    """Return tokens(...) for a reader: counts of positions, and the share that is the same."""
    shown = _named(found).rename(columns={"tied": "other, a tie", "other": "other, no tie"})
    share = shown.pop("same_share").map(lambda value: f"{100 * value:.1f} %")
    return shown.rename_axis(columns=None).assign(**{"share the same": share})


def judged(table: pd.DataFrame) -> pd.DataFrame:
    """Return the gate's verdicts: a line a target, as `dcp-lab bench serve --gate` counts them."""
    found = []
    for verdict in serve.verdicts(table):
        unit = "x" if verdict.unit == "x" else f" {verdict.unit}"
        side = "at most" if verdict.better == "low" else "at least"
        value = "" if verdict.value is None else f"{verdict.value:.2f}{unit}"
        rest = f"{verdict.missing} contexts not measured" if verdict.missing and value else ""
        found.append(
            {
                "verdict": verdict.state,
                "target": verdict.target,
                "measured": value,
                "limit": "" if verdict.limit is None else f"{side} {verdict.limit:.2f}{unit}",
                "worst at": "; ".join(part for part in (verdict.where, rest) if part),
            }
        )
    return pd.DataFrame(found)


def not_measured(table: pd.DataFrame) -> list[str]:
    """Return in words which configurations and contexts of `bench serve` have no row."""
    found = []
    rows = _kept(table)
    tpot = rows[rows.metric == "tpot"]
    for name in NAMES:
        there = set(tpot.context_tokens[tpot.row == name].astype(int))
        missing = sorted(set(serve.CONTEXTS) - there)
        if not there:
            found.append(f"{NAMES[name]}: at no context")
        elif missing:
            contexts = ", ".join(f"{context:,}" for context in missing)
            found.append(f"{NAMES[name]}: not at {contexts} tokens")
    compared = tokens(table)
    for name in serve.TOKENS_OF:
        row = (
            compared.xs(name, level="row") if name in compared.index.get_level_values(-1) else None
        )
        if row is None or "float16" not in set(row.dtype):
            found.append(f"{NAMES[name]}: tokens in float16")
    return found


def expected(numbers: list[dict]) -> pd.DataFrame:
    """Return what the studies report and notebook 06 predicts of the sets for eight MI355X.

    Args:
        numbers: tables.headline_numbers().

    Returns:
        Indexed by parameter set, for the first load test of each: published_ms and modelled_ms,
        TPOT in words, empty where nobody says.
    """
    study1 = attribution.metric(tables.published_serve(), attribution.MEAN_TPOT).iloc[0]
    study2 = tables.published_graph_modes().set_index("cudagraph_mode").mean_tpot_ms
    value_of = {line["name"]: line["value"] for line in numbers}
    pages = "study 1 with pages read in place"
    least, most = (value_of[f"{pages}, PIECEWISE: {end}"] for end in ("least", "most"))
    rows = {
        "study1_dcp1": (f"{study1.dcp1_full:g}", ""),
        "study1_gather": (f"{study1.dcp2:g}", ""),
        "study1_piecewise": ("", f"{least:.0f} to {most:.0f}"),
        "study1_paged": ("", f"at most {value_of[f'{pages}, full graphs: most']:.0f}"),
        "study2_piecewise": (f"{study2['PIECEWISE']:g}", ""),
        "study2_full": (f"{study2['FULL_AND_PIECEWISE']:g}", ""),
    }
    found = pd.DataFrame(rows, index=["published_ms", "modelled_ms"]).T
    return found.rename_axis("parameter set")


def as_markdown(shown: pd.DataFrame) -> str:
    """Return a table of words as Markdown, a line a row, its index in front."""
    if shown.index.names != [None]:
        shown = shown.reset_index()
    lines = [list(shown.columns), ["---"] * shown.shape[1], *shown.astype(str).to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
