"""Run a parameter set: make its model, serve it, load it, ask it, and see that nothing is left."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from dcp_lab.serving import accuracy, retrieval
from dcp_lab.serving.accuracy import AccuracyTest, Score, run_accuracy, write_local_task
from dcp_lab.serving.clients import check_program
from dcp_lab.serving.loadtest import LoadResult, LoadTest, run_loadtest
from dcp_lab.serving.model_folder import STUDY1_TWO_GPUS, write_model_folder
from dcp_lab.serving.server import Server, ServerConfig, serve
from dcp_lab.serving.settings import Setting

# vLLM's CPU build, where tools/cpu_engine.py puts it.
CPU_ENGINE = Path("build") / "cpu-engine" / "bin" / "vllm"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one server.

    Attributes:
        server: It; not running any more.
        loads: Each load test and its result.
        scores: Of the evaluation; empty where none was asked for.
        processes_while_up: How many processes it had.
        processes_left: Ids of those alive after it was stopped: has to be empty.
    """

    server: Server
    loads: tuple[tuple[LoadTest, LoadResult], ...]
    scores: tuple[Score, ...]
    processes_while_up: int
    processes_left: tuple[int, ...]


def find_engine(root: Path) -> str | None:
    """Return the vLLM command of this machine: on PATH, else the CPU engine of a checkout.

    Args:
        root: The checkout.
    """
    if shutil.which("vllm"):
        return "vllm"
    return str(root / CPU_ENGINE) if (root / CPU_ENGINE).is_file() else None


def ready(setting: Setting, root: Path, **changes: object) -> ServerConfig:
    """Make the setting's model, if it has to be made; return the server's configuration.

    Args:
        setting: Which.
        root: Where ./build/models is.
        changes: Fields of ServerConfig to set otherwise.
    """
    config = dataclasses.replace(setting.server, **changes)
    if setting.made is None or config.model != setting.server.model:
        return config
    folder = root / config.model
    if setting.made == "trained":
        write_model_folder(folder, retrieval.SHAPE, weights=retrieval.load())
    else:
        write_model_folder(folder, STUDY1_TWO_GPUS, random_weights=False)
    return dataclasses.replace(config, model=str(folder))


def local_test(folder: Path, questions: int) -> AccuracyTest:
    """Write the lab's retrieval task; return the test that asks it.

    Args:
        folder: For the task's files.
        questions: How many.
    """
    items = retrieval.make_items(questions)
    path = write_local_task(
        folder, [(item.prompt, item.answer) for item in items], retrieval.ANSWER
    )
    return AccuracyTest(
        task=accuracy.LOCAL_TASK, num_fewshot=0, batch_size=8, include_path=path, timeout_s=900
    )


def run_setting(
    config: ServerConfig,
    loads: tuple[LoadTest, ...],
    test: AccuracyTest | None,
    folder: Path,
    *,
    start_timeout_s: float = 1800.0,
) -> Outcome:
    """Serve, load, ask, stop.

    Args:
        config: See `ready`.
        loads: Load tests, in this order.
        test: What to ask; None: nothing.
        folder: For logs and results.
        start_timeout_s: See `serve`.

    Raises:
        ServerError, ClientError: As `serve`, `run_loadtest` and `run_accuracy` do; a missing
            lm_eval before anything starts.
    """
    if test is not None:
        # Before hours of load tests, not after them.
        check_program(test.command(config, config.url, folder)[0])
    with serve(config, log=folder / "serve.log", start_timeout_s=start_timeout_s) as server:
        up = len(server.processes())
        results = tuple(
            (load, run_loadtest(server, load, folder / f"load_{index}"))
            for index, load in enumerate(loads)
        )
        scores = tuple(run_accuracy(server, test, folder / "lm_eval")) if test else ()
    return Outcome(server, results, scores, up, tuple(server.processes()))
