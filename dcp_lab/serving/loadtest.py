"""Load a server with `vllm bench serve` and read what it wrote."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from dcp_lab.serving.clients import ClientError, run_client
from dcp_lab.serving.server import Server, ServerConfig

METRICS = ("ttft", "tpot", "itl", "e2el")
STATISTICS = ("mean", "median", "p90", "p99")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadTest:
    """One run of `vllm bench serve` on random prompts, all of one length.

    Attributes:
        num_prompts: Requests sent.
        max_concurrency: Most of them at once.
        input_len: Tokens of a prompt.
        output_len: Tokens generated for each, never fewer.
        num_warmups: Requests before that count for nothing.
        seed: Of the prompts.
        timeout_s: For all of it.
    """

    num_prompts: int
    max_concurrency: int
    input_len: int
    output_len: int
    num_warmups: int = 0
    seed: int = 0
    timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        for name, least in (
            ("num_prompts", 1),
            ("max_concurrency", 1),
            ("input_len", 1),
            ("output_len", 2),
            ("num_warmups", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: expected an int >= {least}, got {value!r}")

    def command(self, config: ServerConfig, url: str, result: Path) -> list[str]:
        """Return the command, a word an item.

        Args:
            config: Of the server that is asked.
            url: Where it is.
            result: The JSON file to write.
        """
        words = [config.executable, "bench", "serve", "--backend", "vllm"]
        words += ["--base-url", url, "--endpoint", "/v1/completions", "--model", config.model]
        words += ["--num-prompts", str(self.num_prompts)]
        words += ["--max-concurrency", str(self.max_concurrency)]
        words += ["--dataset-name", "random", "--random-input-len", str(self.input_len)]
        words += ["--random-output-len", str(self.output_len), "--random-range-ratio", "0"]
        words += ["--num-warmups", str(self.num_warmups), "--seed", str(self.seed)]
        # Without it each request samples by the server's default.
        words += ["--temperature", "0"]
        words += ["--percentile-metrics", ",".join(METRICS), "--metric-percentiles", "50,90,99"]
        words += ["--save-result", "--result-dir", str(result.parent)]
        return [*words, "--result-filename", result.name, "--disable-tqdm"]


@dataclasses.dataclass(frozen=True)
class LoadResult:
    """What `vllm bench serve` found.

    Attributes:
        completed: Requests answered.
        failed: Requests not answered.
        duration_s: Wall time of all requests.
        input_tokens: Of all prompts.
        output_tokens: Generated.
        output_tok_per_s: Tokens generated a second.
        ms: (metric, statistic) to milliseconds, over METRICS and STATISTICS.
    """

    completed: int
    failed: int
    duration_s: float
    input_tokens: int
    output_tokens: int
    output_tok_per_s: float
    ms: dict[tuple[str, str], float]


def run_loadtest(server: Server, load: LoadTest, folder: Path) -> LoadResult:
    """Load a running server.

    Args:
        server: It answers.
        load: How.
        folder: For loadtest.json and loadtest.log.

    Raises:
        ClientError: The command failed, or a request did, or fewer tokens came than were asked
            for: times of such a run mean nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "loadtest.json"
    path.unlink(missing_ok=True)
    run_client(
        load.command(server.config, server.url, path),
        log=folder / "loadtest.log",
        timeout_s=load.timeout_s,
        environment=server.config.environment,
    )
    result = read_result(path)
    if result.failed or result.completed != load.num_prompts:
        raise ClientError(
            f"vllm bench serve: expected {load.num_prompts} answers, got {result.completed}, "
            f"{result.failed} failed; {server.log.name} may say why"
        )
    wanted = load.num_prompts * load.output_len
    if result.output_tokens != wanted:
        raise ClientError(
            f"vllm bench serve: expected {wanted} output tokens, got {result.output_tokens}"
        )
    return result


def read_result(path: Path) -> LoadResult:
    """Return what a JSON file of `vllm bench serve --save-result` holds.

    Args:
        path: The file.

    Raises:
        ClientError: It is not there, no JSON, or lacks a number.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ClientError(f"{path.name}: expected the JSON of vllm bench serve: {error}") from None

    def number(name: str) -> float:
        value = found.get(name)
        usable = isinstance(value, int | float) and math.isfinite(value)
        if not usable or isinstance(value, bool):
            raise ClientError(f"{path.name}: {name}: expected a finite number, got {value!r}")
        return value

    completed = int(number("completed"))
    return LoadResult(
        completed=completed,
        # Releases before it was counted give only what was sent.
        failed=int(number("failed" if "failed" in found else "num_prompts"))
        - (0 if "failed" in found else completed),
        duration_s=number("duration"),
        input_tokens=int(number("total_input_tokens")),
        output_tokens=int(number("total_output_tokens")),
        output_tok_per_s=number("output_throughput"),
        ms={
            (metric, statistic): number(f"{statistic}_{metric}_ms")
            for metric in METRICS
            for statistic in STATISTICS
        },
    )
