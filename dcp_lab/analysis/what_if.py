"""What a decode step would take on another machine, model, group or graph mode: the cost model.

All of it is modelled: dcp_lab.bench.costs.predict_step, with bytes from public model
configurations and bandwidths from dcp_lab.bench.hardware. Times of launches, kernels and
exchanges are two H200s', fitted to whole steps (verdict_fit); no public figure was found for an
MI3xx, so ask how the answer moves with them.
"""

from __future__ import annotations

import dataclasses

import pandas as pd

from dcp_lab.analysis import verdict_fit
from dcp_lab.bench import costs
from dcp_lab.bench.hardware import H200, MI300X, MI355X, Accelerator

MACHINES = {"H200": H200, "MI355X": MI355X, "MI300X": MI300X}
MODES = ("eager", "piecewise", "full")
REDUCERS = ("ag_rs", "a2a", "direct")
ATTENTIONS = ("paged", "published", "published_no_sync", "per_token", "per_page")
PARTS = ("weights", "all-reduce", "attention", "gather", "exchange", "once a step", "waits")


@dataclasses.dataclass(frozen=True)
class Model:
    """A whole model, before it is cut over tensor parallel ranks.

    Attributes:
        name: Its name.
        layers: All attend and have a KV cache.
        hidden: Width of the residual stream.
        q_heads, kv_heads: Of the model; 1 KV head for a latent (MLA) cache.
        kv_dim: Cached elements of a token, a layer and a KV head, keys and values together.
        attention_weights: Elements of a layer's attention projections.
        intermediate: Width of the feed-forward block, of one expert where there are several.
        experts, experts_per_token: 1 and 1 for a dense model. A shared expert counts for each.
    """

    name: str
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    kv_dim: int
    attention_weights: int
    intermediate: int
    experts: int = 1
    experts_per_token: int = 1

    def layer_weights(self, tokens: int) -> float:
        """Return the weights that a layer reads for so many tokens.

        Of the experts those that are touched, if each token picks its own at random.
        """
        missed = (1 - self.experts_per_token / self.experts) ** tokens
        touched = self.experts * (1 - missed)
        return self.attention_weights + touched * 3 * self.hidden * self.intermediate


def _gqa_weights(hidden: int, q_heads: int, kv_heads: int, head_dim: int = 128) -> int:
    return 2 * hidden * head_dim * (q_heads + kv_heads)


MODELS = {
    model.name: model
    for model in (
        Model("Qwen3-235B-A22B", 94, 4096, 64, 4, 256, _gqa_weights(4096, 64, 4), 1536, 128, 8),
        # The shapes of the engine runs in data/measured/vllm_h200_dcp.csv, at TP 2.
        Model("study 1's attention, light", 94, 4096, 16, 1, 256, _gqa_weights(4096, 16, 1), 1536),
        Model("Llama-3.1-70B", 80, 8192, 64, 8, 256, _gqa_weights(8192, 64, 8), 28672),
        # A latent of 512 and 64 rope dimensions. All layers as its mixture of experts.
        Model(
            "DeepSeek-V3 (MLA)",
            61,
            7168,
            128,
            1,
            576,
            7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168,
            2048,
            256,
            8,
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class Question:
    """What is asked: one decode step.

    Attributes:
        machine: One of MACHINES.
        model: One of MODELS.
        tp: Tensor parallel ranks.
        dcp: Of them, how many share each request's KV: 1 is without DCP.
        requests: Requests decoded together, a token each.
        context_tokens: Cached tokens of a request.
        launch_us: Host time of a kernel launch. The host's other calls take as many times as long
            as on the H200s' host. Default: what was fitted there.
        reducer: One of REDUCERS; without DCP there is none.
        mode: One of MODES.
        attention: One of ATTENTIONS: paged reads the pages in place, the others gather first.
        kv_itemsize: Bytes of a cached element. Default: 2, bf16; 1 is fp8.

    Raises:
        ValueError: A value is none of these, or the group cannot be: dcp has to divide the ranks
            that hold the same KV head, tp / kv_heads; a host sync in a full graph.
    """

    machine: str = "H200"
    model: str = "Qwen3-235B-A22B"
    tp: int = 8
    dcp: int = 2
    requests: int = 16
    context_tokens: int = 2500
    launch_us: float | None = None
    reducer: str = "a2a"
    mode: str = "piecewise"
    attention: str = "paged"
    kv_itemsize: int = 2

    def __post_init__(self) -> None:
        if self.launch_us is None:
            object.__setattr__(self, "launch_us", verdict_fit.h200().constants.launch_us)
        for name, allowed in (
            ("machine", MACHINES),
            ("model", MODELS),
            ("reducer", REDUCERS),
            ("mode", MODES),
            ("attention", ATTENTIONS),
            ("kv_itemsize", (1, 2)),
        ):
            if getattr(self, name) not in allowed:
                expected = ", ".join(map(str, allowed))
                raise ValueError(
                    f"{name}: expected one of {expected}, got {getattr(self, name)!r}"
                )
        for name in ("tp", "dcp", "requests", "context_tokens", "launch_us"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected a number > 0, got {getattr(self, name)!r}")
        model = MODELS[self.model]
        if model.q_heads % self.tp:
            raise ValueError(f"tp: expected a divisor of {model.q_heads} q heads, got {self.tp}")
        same = max(1, self.tp // model.kv_heads)
        if same % self.dcp:
            raise ValueError(
                f"dcp: expected a divisor of {same}, the ranks that hold the same KV head of "
                f"{self.model} at TP {self.tp}, got {self.dcp}"
            )
        if self.mode == "full" and self.attention == "published":
            raise ValueError(
                "mode: expected eager or piecewise with the published gather, whose host sync no "
                "graph can hold, got 'full'"
            )


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the model says.

    Attributes:
        tpot_ms: The step, ms: a token of each request.
        host_ms: Host time of its calls, ms, waiting not counted.
        parts_ms: GPU time by part, ms, and "waits", in which the GPU has nothing to do: for the
            host's launches or a sync. Sums to tpot_ms. Keys: PARTS.
        kv_gb: KV cache of these requests on one rank, GB.
    """

    tpot_ms: float
    host_ms: float
    parts_ms: dict[str, float]
    kv_gb: float


# A gather and its attention as a serving engine calls them: two operations of a library. This
# lab's own checks and plans in every call, which costs many times as much (StepConstants.op_us).
LIBRARY_CALLS = 2


def paced(constants: costs.StepConstants, pace: float) -> costs.StepConstants:
    """Return constants of a host whose every call takes pace times as long."""
    host = {name: pace * getattr(constants, name) for name in costs.HOST_CONSTANTS}
    return dataclasses.replace(constants, **host)


def constants_of(
    machine: str,
    launch_us: float | None = None,
    *,
    fitted: costs.StepConstants | None = None,
    library: bool = True,
) -> costs.StepConstants:
    """Return the constants assumed of a machine.

    Fitted to two H200s. Its memory reaches the share of its best measured or published figure that
    the H200's reached; the published path's rate is scaled by compute units, not by memory: they
    share its loop out. What a kernel and an exchange cost besides their bytes stays an H200's.

    Args:
        machine: One of MACHINES.
        launch_us: Host time of a launch; the host's other constants are scaled with it. Default:
            the H200s' host.
        fitted: Of two H200s. Default: verdict_fit.h200().
        library: Whether a gather is LIBRARY_CALLS launches; else as this lab calls it.
    """
    fitted = fitted or verdict_fit.h200().constants
    best = {name: _best_gbps(accelerator) for name, accelerator in MACHINES.items()}
    memory = best[machine] / best["H200"]
    units = MACHINES[machine].compute_units / H200.compute_units
    found = paced(fitted, 1.0 if launch_us is None else launch_us / fitted.launch_us)
    return dataclasses.replace(
        found,
        op_us=LIBRARY_CALLS * found.launch_us if library else found.op_us,
        memory_gbps=fitted.memory_gbps * memory,
        published_gbps=fitted.published_gbps * units,
        gather_gbps=fitted.gather_gbps * memory,
    )


def _best_gbps(accelerator: Accelerator) -> float:
    return max(figure.gbps for figure in accelerator.memory if figure.kind != "vendor")


def case_of(question: Question) -> costs.StepCase:
    """Return the question as the timeline's case: what one rank reads and launches."""
    q, model = question, MODELS[question.model]
    tokens = q.requests * q.context_tokens / q.dcp
    return costs.StepCase(
        mode=q.mode,
        attention=q.attention,
        reducer=q.reducer if q.dcp > 1 else None,
        layers=model.layers,
        kv_bytes=costs.kv_bytes(
            tokens,
            # Of ranks that hold the same KV head each has a copy, or under DCP its tokens.
            num_kv_heads=max(1, model.kv_heads // q.tp),
            head_dim=model.kv_dim,
            head_dim_v=0,
            kv_itemsize=q.kv_itemsize,
        ),
        dense_bytes=2 * model.layer_weights(q.requests) / q.tp,
        all_reduces=2 if q.tp > 1 else 0,
    )


def answer(question: Question, constants: costs.StepConstants | None = None) -> Answer:
    """Return what a step takes, and of what.

    Args:
        question: What is asked.
        constants: Of the machine. Default: constants_of the question's machine and launch_us.
    """
    case = case_of(question)
    constants = constants or constants_of(question.machine, question.launch_us)
    timeline = costs.predict_step(case, constants)
    work, calls = costs.step_work(case, constants), costs.layer_calls(case)
    between = work[len(work) - len(calls) :]
    reduce_us = case.all_reduces * constants.collective_us
    layer_us = dict.fromkeys(PARTS, 0.0)
    layer_us["all-reduce"] = reduce_us
    layer_us["weights"] = sum(w.gpu_us for w in work[: len(work) - len(calls)]) - reduce_us
    part_of = {
        "kernel": "attention",
        "published": "gather",
        "gather": "gather",
        "sync": "gather",
        "collective": "exchange",
        "direct": "exchange",
    }
    for call, done in zip(calls, between, strict=True):
        # Pages are copied by a kernel as fast as any; only a gather plans anew in every call.
        part = "gather" if call.host == "op" else part_of[call.kind]
        layer_us[part] += done.gpu_us
    parts = {name: case.layers * us / 1e3 for name, us in layer_us.items()}
    parts["once a step"] = constants.kernel_us / 1e3
    parts["waits"] = timeline.idle_us / 1e3
    return Answer(
        tpot_ms=timeline.step_us / 1e3,
        host_ms=timeline.host_us / 1e3,
        parts_ms=parts,
        kv_gb=case.layers * case.kv_bytes / 1e9,
    )


def grid(question: Question) -> pd.DataFrame:
    """Return the answer in each mode without DCP and with each reducer, all else as asked.

    Columns: mode, reducer ("no DCP" or its name), tpot_ms, host_ms, and PARTS in ms. Where the
    asked attention cannot be captured ("published" in a full graph), that mode is left out.
    """
    rows = []
    for mode in MODES:
        if mode == "full" and question.attention == "published":
            continue
        for reducer in (None, *REDUCERS):
            asked = {"mode": mode}
            asked |= {"dcp": 1, "attention": "paged"} if reducer is None else {"reducer": reducer}
            if reducer is not None and question.dcp == 1:
                continue
            said = answer(dataclasses.replace(question, **asked))
            row = {"mode": mode, "reducer": reducer or "no DCP", "tpot_ms": said.tpot_ms}
            rows.append(row | {"host_ms": said.host_ms} | said.parts_ms)
    return pd.DataFrame(rows)
