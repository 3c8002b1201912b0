"""The readings of notebook 03 in words, computed from the rows that they read.

Each returns Markdown. Rows are added to the tables by every run, so no sentence here may hold a
number or a direction of its own; what was not measured is said to be so.
"""

from __future__ import annotations

import pandas as pd

from dcp_lab.analysis.gathering import (
    HEADS,
    SHAPE,
    best_peer,
    families,
    family_name,
    geometric_mean,
)

LARGE_BYTES = 512e6
SMALL_BYTES = 70e6


def shape_of(row: pd.Series) -> str:
    """Return e.g. '16 x 2,048 tokens'."""
    return f"{row.requests} x {row.context_tokens:,} tokens"


def per_gather(costs: pd.DataFrame) -> pd.DataFrame:
    """Return bytes, launches and time of each gather over the paged kernel, in a graph.

    Args:
        costs: gathering.gather_costs(...).

    Returns:
        Indexed by gather: shapes, times_bytes, paged_launches, gather_launches, and the smallest,
        mean (geometric) and largest of times.
    """
    return (
        costs[costs["mode"] == "graph"]
        .groupby("gather")
        .agg(
            shapes=("times", "size"),
            times_bytes=("times_bytes", "median"),
            paged_launches=("paged_launches", "max"),
            gather_launches=("gather_launches", "max"),
            times_least=("times", "min"),
            times_mean=("times", geometric_mean),
            times_most=("times", "max"),
        )
    )


def bytes_and_launches(account: pd.DataFrame) -> str:
    """Read the account of per_gather(...)."""
    if account.empty:
        return "**Reading.** Not measured: a gather in a graph."
    fast, slow = account.loc[account.times_mean.idxmin()], account.loc[account.times_mean.idxmax()]
    text = (
        f"**Reading.** Every gather moves {fast.times_bytes:g}x the bytes. The fastest "
        f"(`{fast.name}`) takes {fast.times_least:.1f} to {fast.times_most:.1f}x the paged "
        "kernel's time in a graph"
    )
    if len(account) > 1:
        text += f", the slowest (`{slow.name}`) {slow.times_least:.1f} to {slow.times_most:.1f}x"
    beyond = [f"`{name}`" for name, row in account.iterrows() if row.times_most > row.times_bytes]
    text += ". "
    if beyond:
        text += f"Slower than that in some shape: {', '.join(beyond)}. "
    if len(beyond) < len(account):
        text += (
            "Where one costs less than its bytes say, the paged kernel is not bound by its bytes "
            "either, or the copy stays in a cache. "
        )
    launches = f"{int(fast.gather_launches)} a layer against {int(fast.paged_launches)}"
    return text + f"Launches: {launches}, plans made once a step not counted."


def one_layer(rows: pd.DataFrame, costs: pd.DataFrame, what: str) -> str:
    """Read one family's layers.

    Args:
        rows: gathering.layer_rows(...) of the family.
        costs: gathering.gather_costs(...) of these rows.
        what: The family in words.
    """
    paged = rows[(rows["mode"] == "graph") & (rows.way == "paged")]
    if paged.empty:
        return f"**Reading.** Not measured: {what}, in a graph."
    above = paged.median_us - paged.read_us
    text = (
        f"**Reading.** In a graph the paged kernel stands {above.min():.1f} to "
        f"{above.max():.1f} us above the bound, over {len(paged)} shapes. "
    )
    graph = costs[costs["mode"] == "graph"]
    if graph.empty:
        text += "Not measured: a gather of this family in a graph. "
    else:
        fastest = graph.loc[graph.groupby(SHAPE).times.idxmin()]
        least, most = (
            fastest.loc[i] for i in (fastest.extra_us.idxmin(), fastest.extra_us.idxmax())
        )
        text += (
            f"The fastest gather adds {least.extra_us:,.1f} us at {shape_of(least)} and "
            f"{most.extra_us:,.1f} at {shape_of(most)}. A gather was the faster way in "
            f"{int((graph.times < 1).sum()) or 'none'} of {len(graph)} rows. "
        )
    eager = rows[(rows["mode"] == "eager") & rows.host_us.notna()]
    if eager.empty:
        return text + "Not measured: this family, launched eagerly."
    waits = (eager.host_us > 0.8 * eager.median_us).mean()
    said = ", ".join(
        f"{us:.0f} us (`{way}`)" for way, us in eager.groupby("way").host_us.median().items()
    )
    return text + (
        "Launched eagerly, the host is busy for more than four fifths of the time in "
        f"{waits:.0%} of the rows; those show the host, not the kernels. Its median call takes "
        f"{said}. No gather has a bound form, so eager gathers compare with `paged`, not with "
        "`paged_bound`."
    )


def memory_speed(rows: pd.DataFrame) -> str:
    """Read gathering.layer_rows(...): what of the bound's speed is reached."""
    graph = rows[rows["mode"] == "graph"]
    paged = graph[graph.way == "paged"]
    if paged.empty:
        return "**Reading.** Not measured: the paged kernel in a graph."
    text = (
        f"**Reading.** Over {len(paged)} shapes the paged kernel reaches "
        f"{paged.of_read.min():.0%} to {paged.of_read.max():.0%} of the bound's speed"
    )
    large = paged[paged.kv_bytes >= LARGE_BYTES]
    if len(large):
        text += (
            f", at least {large.of_read.min():.0%} where a layer has 512 MB or more ({len(large)})"
        )
    small, big = (paged.loc[i] for i in (paged.kv_bytes.idxmin(), paged.kv_bytes.idxmax()))
    text += (
        f". From the smallest layer to the largest the bytes grow "
        f"{big.kv_bytes / small.kv_bytes:,.0f}-fold, and the distance to the bound goes from "
        f"{small.median_us - small.read_us:+.1f} to {big.median_us - big.read_us:+.1f} us."
    )
    gathered = families(graph[graph.way.isin(["per_page", "per_token"])])
    absent = [family_name(*heads) for heads in HEADS if heads not in gathered]
    if absent:
        text += f" **Not measured:** a gather, as it is now, with {'; '.join(absent)}."
    return text


def against_peers(peers: pd.DataFrame) -> str:
    """Read gathering.peer_rows(...)."""
    if peers.empty:
        return "**Reading.** Not measured: any peer in a graph."
    best = best_peer(peers)
    closest = best.loc[best.times.idxmin()]
    text = (
        f"**Reading.** Over {len(best)} shapes the best peer takes "
        f"{geometric_mean(best.times):.2f}x the time of `paged_decode` (geometric mean)"
    )
    small = best[(best.num_kv_heads == 1) & (best.kv_bytes < SMALL_BYTES)]
    if len(small):
        mean = geometric_mean(small.times)
        text += f"; {mean:.2f}x over the {len(small)} with 1 KV head and less than 70 MB"
    ahead = best[best.times < 1]
    heads = family_name(closest.num_q_heads, closest.num_kv_heads, closest.head_dim)
    text += (
        f". A peer is faster in {len(ahead) or 'none'} of them; the best showing is "
        f"{closest.peer}'s at {shape_of(closest)}, {heads}: {closest.times:.2f}x. "
    )
    mixed = int((peers.groupby(SHAPE).date_utc.nunique() > 1).sum())
    if mixed:
        text += (
            f"In {mixed} shapes the peers come from more than one run, each compared with its own "
            "run's `paged_decode`. "
        )
    return text + "`dcp-lab bench decode --gate` says which speed targets hold."


def share_of_step(steps: pd.DataFrame, shares: pd.DataFrame, sums: pd.DataFrame) -> str:
    """Read what a gather is of a step.

    Args:
        steps: gathering.step_shares(...).
        shares: gathering.modelled_shares(...) of one gather.
        sums: gathering.layers_add_up(...).
    """
    if steps.empty:
        return "**Reading.** Not measured: whole steps on this machine."
    text = "**Reading.** "
    names = {"per_page": "the `per_page` gather", "published": "the published one"}
    for dense, of_dense in steps.groupby("dense", sort=False):
        for gather, said in names.items():
            mine = of_dense[of_dense.gather == gather]
            if mine.empty:
                continue
            low, high = mine.loc[mine.share.idxmin()], mine.loc[mine.share.idxmax()]
            text += f"With a {dense} dense part {said} is {low.share:.0%} of the step at "
            text += shape_of(low)
            text += f", {high.share:.0%} at {shape_of(high)}. " if len(mine) > 1 else ". "
    if len(sums):
        apart = (sums.layers_ms / sums.step_ms - 1).abs().max()
        text += f"Layers and steps agree within {apart:.0%} ({len(sums)} shapes). "
    if len(shares):
        text += (
            f"By the map (modelled) that gather stays under a tenth of the step in "
            f"{int((shares.share < 0.1).sum())} of {len(shares)} shapes."
        )
    else:
        text += "Not measured: what the map needs, a layer and a step with as many requests."
    return text
