"""The rows that load tests and evaluations leave in data/measured."""

from __future__ import annotations

import pandas as pd

from dcp_lab.bench import record
from dcp_lab.bench.record import above, at_least, real, rule, table, text, whole
from dcp_lab.serving.accuracy import Score
from dcp_lab.serving.clients import versions
from dcp_lab.serving.loadtest import METRICS, STATISTICS, LoadResult, LoadTest
from dcp_lab.serving.server import Server

_SERVER = {
    "setting": text(),
    "model": text(),
    "tensor_parallel": whole(at_least(1)),
    "dcp_size": whole(at_least(1)),
    "dcp_comm_backend": text(nullable=True),
    "attention_backend": text(nullable=True),
    "options": text(nullable=True),
    "cudagraph_mode": text(nullable=True),
    "start_s": real(above(0)),
}


def _in_order(frame: pd.DataFrame) -> pd.Series:
    ordered = pd.Series(True, index=frame.index)
    for metric in METRICS:
        median, p90, p99 = (frame[f"{name}_{metric}_ms"] for name in ("median", "p90", "p99"))
        ordered &= (median <= p90) & (p90 <= p99)
    return ordered


# ITL is 0 where tokens arrive together; the others are times of something.
SERVE = table(
    "serve",
    {
        **record.provenance_columns(),
        **_SERVER,
        "requests": whole(at_least(1)),
        "completed": whole(at_least(1)),
        "max_concurrency": whole(at_least(1)),
        "input_len": whole(at_least(1)),
        "output_len": whole(at_least(2)),
        "duration_s": real(above(0)),
        "output_tok_per_s": real(above(0)),
        **{
            f"{statistic}_{metric}_ms": real(at_least(0) if metric == "itl" else above(0))
            for metric in METRICS
            for statistic in STATISTICS
        },
    },
    rules=[
        rule(lambda frame: frame.completed == frame.requests, "every request answered"),
        rule(_in_order, "median <= p90 <= p99 of each metric"),
    ],
)

ACCURACY = table(
    "accuracy",
    {
        **record.provenance_columns(),
        **_SERVER,
        "lm_eval": text(nullable=True),
        "task": text(),
        "task_version": text(),
        "filter": text(),
        "metric": text(),
        "value": real(at_least(0)),
        "stderr": real(at_least(0), nullable=True),
        "questions": whole(at_least(1)),
    },
)


def _server_columns(server: Server, setting: str, command: str | None) -> dict[str, object]:
    config = server.config
    mode = "NONE" if config.enforce_eager else config.cudagraph_mode
    options = config.additional_config.get("dcp_lab", {})
    found = versions(config.executable)
    return {
        **record.provenance(command),
        # Those of the Python that served, which need not be this one.
        **{name: found[name] for name in ("torch", "triton", "python") if found[name]},
        "vllm": server.version,
        "setting": setting,
        "model": config.model if config.folder is None else config.folder.name,
        "tensor_parallel": config.tensor_parallel_size,
        "dcp_size": config.decode_context_parallel_size,
        "dcp_comm_backend": config.dcp_comm_backend,
        "attention_backend": config.attention_backend,
        "options": ", ".join(f"{name}={value}" for name, value in options.items()) or None,
        "cudagraph_mode": mode,
        "start_s": server.start_s,
    }


def serve_row(
    server: Server, load: LoadTest, result: LoadResult, *, setting: str, command: str | None = None
) -> dict[str, object]:
    """Return the row of a load test, for `record.write_rows(path, rows, SERVE)`.

    Args:
        server: What was loaded.
        load: How.
        result: What came of it.
        setting: Name of the parameter set.
        command: See `record.provenance`.
    """
    return {
        **_server_columns(server, setting, command),
        "requests": load.num_prompts,
        "completed": result.completed,
        "max_concurrency": load.max_concurrency,
        "input_len": load.input_len,
        "output_len": load.output_len,
        "duration_s": result.duration_s,
        "output_tok_per_s": result.output_tok_per_s,
        **{f"{statistic}_{metric}_ms": ms for (metric, statistic), ms in result.ms.items()},
    }


def accuracy_rows(
    server: Server, scores: list[Score], *, setting: str, command: str | None = None
) -> list[dict[str, object]]:
    """Return the rows of an evaluation, for `record.write_rows(path, rows, ACCURACY)`.

    Args:
        server: What was asked.
        scores: What came of it.
        setting: Name of the parameter set.
        command: See `record.provenance`.
    """
    columns = _server_columns(server, setting, command)
    lm_eval = versions(server.config.executable)["lm_eval"]
    return [
        {
            **columns,
            "lm_eval": lm_eval,
            "task": score.task,
            "task_version": score.version,
            "filter": score.filter,
            "metric": score.metric,
            "value": score.value,
            "stderr": score.stderr,
            "questions": score.questions,
        }
        for score in scores
    ]
