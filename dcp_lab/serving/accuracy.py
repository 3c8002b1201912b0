"""Ask a server questions with `lm_eval` and read the scores.

gsm8k is study 1's task and needs its data set from the Hugging Face hub, or from its cache. A task
of local files needs no network: `write_local_task` writes one from the lab's retrieval questions.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from dcp_lab.serving.clients import ClientError, beside, run_client
from dcp_lab.serving.server import Server, ServerConfig

LOCAL_TASK = "dcp_lab_retrieval"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccuracyTest:
    """One run of `lm_eval`.

    Attributes:
        task: lm_eval's name of it.
        num_fewshot: Examples in the prompt.
        batch_size: Requests in a batch. Default: study 1's.
        num_concurrent: Batches at once.
        limit: Only so many questions. Default: all.
        include_path: Folder with the YAML file of a local task.
        timeout_s: For all of it.
    """

    task: str = "gsm8k"
    num_fewshot: int = 5
    batch_size: int = 128
    num_concurrent: int = 1
    limit: int | None = None
    include_path: Path | None = None
    timeout_s: float = 3600.0

    def command(self, config: ServerConfig, url: str, folder: Path) -> list[str]:
        """Return the command, a word an item.

        Args:
            config: Of the server that is asked.
            url: Where it is.
            folder: For lm_eval's results.

        Raises:
            ValueError: The model's name has a comma or an equals sign, which lm_eval would take
                as the start of another argument.
        """
        if set(config.model) & set(",="):
            raise ValueError(
                f"model: expected a name without ',' and '=' for lm_eval, got {config.model!r}"
            )
        arguments = {
            "model": config.model,
            "base_url": f"{url}/v1/completions",
            "num_concurrent": self.num_concurrent,
            "tokenized_requests": False,
        }
        words = [beside(config.executable, "lm_eval"), "run", "--model", "local-completions"]
        words += ["--tasks", self.task, "--num_fewshot", str(self.num_fewshot)]
        words += ["--batch_size", str(self.batch_size), "--model_args"]
        words.append(",".join(f"{name}={value}" for name, value in arguments.items()))
        if self.limit is not None:
            words += ["--limit", str(self.limit)]
        if self.include_path is not None:
            words += ["--include_path", str(self.include_path)]
        return [*words, "--output_path", str(folder), "--log_samples"]


@dataclasses.dataclass(frozen=True)
class Score:
    """One number of an evaluation.

    Attributes:
        task: lm_eval's name of it.
        version: The task's.
        filter: How the answer is taken from the text.
        metric: Such as exact_match.
        value: Share, 0 to 1.
        stderr: Its standard error; None where lm_eval gives none.
        questions: How many were asked.
    """

    task: str
    version: str
    filter: str
    metric: str
    value: float
    stderr: float | None
    questions: int


def run_accuracy(server: Server, test: AccuracyTest, folder: Path) -> list[Score]:
    """Evaluate a running server.

    Args:
        server: It answers.
        test: How.
        folder: For lm_eval's results and lm_eval.log.

    Raises:
        ClientError: lm_eval failed, or left no score.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.rglob("results_*.json"))
    environment = dict(server.config.environment)
    if test.include_path is not None:
        # A task of local files needs nobody; data sets' cache goes where it can be written.
        environment |= {"HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    run_client(
        test.command(server.config, server.url, folder),
        log=folder / "lm_eval.log",
        timeout_s=test.timeout_s,
        environment=environment,
    )
    written = sorted(set(folder.rglob("results_*.json")) - before)
    if not written:
        raise ClientError("lm_eval: expected a results_*.json, found none; see lm_eval.log")
    return read_scores(written[-1])


def read_scores(path: Path) -> list[Score]:
    """Return the scores in a results file of lm_eval.

    Args:
        path: A results_*.json.

    Raises:
        ClientError: It is no such file, or has no score.
    """
    try:
        found = json.loads(path.read_text())
        results, questions = found["results"], found["n-samples"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ClientError(f"{path.name}: expected the results of lm_eval: {error!r}") from None
    scores = []
    for task, numbers in results.items():
        for key, value in numbers.items():
            metric, comma, filter_ = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = numbers.get(f"{metric}_stderr,{filter_}")
            scores.append(
                Score(
                    task=task,
                    version=str(found.get("versions", {}).get(task, "")),
                    filter=filter_,
                    metric=metric,
                    value=float(value),
                    stderr=stderr if isinstance(stderr, float) else None,
                    questions=int(questions[task]["effective"]),
                )
            )
    if not scores:
        raise ClientError(f"{path.name}: expected a score, found none")
    return scores


def write_local_task(folder: Path, questions: Sequence[tuple[str, str]], max_tokens: int) -> Path:
    """Write a task that lm_eval runs without a network.

    Args:
        folder: For LOCAL_TASK.yaml and the questions; made if it is missing.
        questions: Prompt and the text that has to follow it, to the last character.
        max_tokens: Tokens generated for each.

    Returns:
        The folder, for `AccuracyTest.include_path`; the task is LOCAL_TASK.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{LOCAL_TASK}.jsonl"
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in questions]
    data.write_text("\n".join(lines) + "\n")
    (folder / f"{LOCAL_TASK}.yaml").write_text(
        f"""task: {LOCAL_TASK}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {json.dumps(str(data.resolve()))}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: {max_tokens}
  temperature: 0
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""
    )
    return folder
