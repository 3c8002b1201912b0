"""Load tests and evaluations: what is run, what is read, which rows are refused."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from dcp_lab.bench import record
from dcp_lab.cli import main
from dcp_lab.serving import ServerConfig, command, experiment, settings
from dcp_lab.serving.accuracy import AccuracyTest, read_scores, write_local_task
from dcp_lab.serving.clients import ClientError, run_client, versions
from dcp_lab.serving.loadtest import METRICS, LoadTest, read_result, run_loadtest
from dcp_lab.serving.rows import ACCURACY, SERVE, accuracy_rows, serve_row
from dcp_lab.serving.server import Server
from dcp_lab.vllm_plugin.options import read_options

LOAD = LoadTest(num_prompts=4, max_concurrency=2, input_len=8, output_len=5)

FAKE = """#!{python}
import json, os, sys
from pathlib import Path

args = sys.argv[1:]
if args[0] == "bench":
    value = lambda name: args[args.index(name) + 1]
    sent, length = int(value("--num-prompts")), int(value("--random-output-len"))
    failed = int(os.environ.get("FAILED", "0"))
    found = dict(num_prompts=sent, completed=sent - failed, failed=failed, duration=2.0,
                 total_input_tokens=sent * 8, total_output_tokens=(sent - failed) * length,
                 output_throughput=10.0)
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for order, name in enumerate(("mean", "median", "p90", "p99")):
            found[f"{{name}}_{{metric}}_ms"] = 1.0 + order
    path = Path(value("--result-dir")) / value("--result-filename")
    path.write_text(json.dumps(found))
    print("done")
else:
    print("this went wrong")
    sys.exit(7)
"""


@pytest.fixture
def server(tmp_path):
    """A server that is said to run; the commands are played by a script."""
    script = tmp_path / "vllm"
    script.write_text(FAKE.format(python=sys.executable))
    script.chmod(0o755)
    config = ServerConfig(
        model="m/x", executable=str(script), additional_config={"dcp_lab": {"reducer": "a2a"}}
    )
    return Server(config, "http://127.0.0.1:1", tmp_path / "log", 3.0, "0.0.fake", -1, "none")


def fixed(rows, git="0" * 40):
    """Rows as of a clean commit, which a test has not."""
    return [{**row, "git_commit": git, "git_dirty": False} for row in rows]


def test_a_load_test_becomes_a_row(server, tmp_path):
    """What vllm bench serve wrote stands in the row, which the lab's writer takes."""
    result = run_loadtest(server, LOAD, tmp_path / "load")
    row = serve_row(server, LOAD, result, setting="mine", command="test")
    assert row["requests"] == row["completed"] == 4
    assert [row[f"{s}_tpot_ms"] for s in ("mean", "median", "p90", "p99")] == [1, 2, 3, 4]
    assert (row["vllm"], row["model"], row["options"]) == ("0.0.fake", "m/x", "reducer=a2a")
    path = tmp_path / "serve_here.csv"
    assert record.write_rows(path, fixed([row]), SERVE) == 1
    assert record.read_table(path, SERVE).mean_ttft_ms.item() == 1.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"completed": 3}, "every request answered"),
        ({"p90_tpot_ms": 1.0}, "median <= p90 <= p99"),
        ({"mean_ttft_ms": 0.0}, "mean_ttft_ms: expected > 0"),
    ],
)
def test_a_row_of_a_bad_run_is_refused(server, tmp_path, wrong, message):
    """Times of requests that failed, or that cannot be times, are not kept."""
    result = run_loadtest(server, LOAD, tmp_path / "load")
    row = {**serve_row(server, LOAD, result, setting="mine", command="test"), **wrong}
    with pytest.raises(ValueError, match=message):
        record.write_rows(tmp_path / "serve_here.csv", fixed([row]), SERVE)


def test_failed_requests_fail_the_load_test(server, tmp_path, monkeypatch):
    """vllm bench serve ends well when requests fail; here that is an error."""
    monkeypatch.setenv("FAILED", "1")
    with pytest.raises(ClientError, match="expected 4 answers, got 3, 1 failed"):
        run_loadtest(server, LOAD, tmp_path / "load")


def test_a_result_without_a_number_is_refused(tmp_path):
    """A metric that is missing, as without a tokenizer, is named."""
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"completed": 1, "failed": 0, "duration": float("nan")}))
    with pytest.raises(ClientError, match="duration: expected a finite number, got nan"):
        read_result(path)
    path.write_text("{")
    with pytest.raises(ClientError, match="expected the JSON of vllm bench serve"):
        read_result(path)


def test_a_client_that_fails_or_hangs_says_so(server, tmp_path):
    """The end of what it said is in the message; one that hangs is ended."""
    log = tmp_path / "x.log"
    with pytest.raises(ClientError, match="(?s)failed with status 7.*this went wrong"):
        run_client([server.config.executable, "other"], log=log, timeout_s=30)
    hang = [sys.executable, "-c", "import time; print('waiting', flush=True); time.sleep(60)"]
    with pytest.raises(ClientError, match="(?s)not done in 2 s.*waiting"):
        run_client(hang, log=log, timeout_s=2)
    with pytest.raises(ClientError, match="no-such-program: not found"):
        run_client(["no-such-program", "x"], log=log, timeout_s=1)


@pytest.mark.parametrize("status", [0, 1])
def test_a_client_leaves_no_children(status, tmp_path):
    """What a program started ends with it, also when the program itself ended well or badly."""
    child = "import time; time.sleep(60)"
    code = (
        "import subprocess, sys\n"
        f"print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True)\n"
        f"sys.exit({status})"
    )
    log = tmp_path / "x.log"
    with contextlib.suppress(ClientError):
        run_client([sys.executable, "-c", code], log=log, timeout_s=30)
    pid = int(log.read_text())
    deadline = time.monotonic() + 10
    while running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    left = running(pid)
    if left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def running(pid):
    """Whether a process lives; one that only waits for its parent to notice does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_versions_are_those_of_the_python_that_serves(server):
    """They come from the environment of the command, not of this process."""
    import torch

    assert versions(server.config.executable)["torch"] == torch.__version__
    assert set(versions("no-such-program").values()) == {None}


def test_scores_are_read_and_become_rows(server, tmp_path):
    """lm_eval's file gives a score for each filter and metric."""
    path = tmp_path / "results_1.json"
    numbers = {
        "alias": "t",
        "exact_match,none": 0.75,
        "exact_match_stderr,none": 0.25,
        "sample_len": 4,
    }
    found = {
        "results": {"t": numbers},
        "versions": {"t": 1.0},
        "n-samples": {"t": {"original": 4, "effective": 4}},
    }
    path.write_text(json.dumps(found))
    (score,) = read_scores(path)
    assert (score.value, score.stderr, score.filter, score.questions) == (0.75, 0.25, "none", 4)
    rows = accuracy_rows(server, [score], setting="mine", command="test")
    assert record.write_rows(tmp_path / "accuracy_here.csv", fixed(rows), ACCURACY) == 1
    path.write_text(json.dumps({**found, "results": {}}))
    with pytest.raises(ClientError, match="expected a score, found none"):
        read_scores(path)


def test_a_local_task_needs_no_network(tmp_path):
    """Its questions lie beside it, one a line."""
    yaml = pytest.importorskip("yaml")
    folder = write_local_task(tmp_path / "task", [("ab", "c"), ('d"', "e")], 1)
    task = yaml.safe_load((folder / "dcp_lab_retrieval.yaml").read_text())
    (data,) = task["dataset_kwargs"]["data_files"].values()
    with open(data) as file:
        assert [json.loads(line)["answer"] for line in file] == ["c", "e"]
    assert task["doc_to_text"] == "{{prompt}}" and task["generation_kwargs"]["max_gen_toks"] == 1


def test_a_name_that_lm_eval_would_cut_is_refused(tmp_path):
    """A comma in the model's name would start another argument."""
    with pytest.raises(ValueError, match="without ',' and '='"):
        AccuracyTest().command(ServerConfig(model="a,b=c"), "http://x", tmp_path)


# ---- parameter sets --------------------------------------------------------------------------


def test_study_1_is_loaded_as_it_was_published():
    """Lengths, prompts, concurrency and gsm8k are those of data/published."""
    from dcp_lab.analysis import tables

    published = tables.published_serve()
    lengths = set(zip(published.input_len, published.output_len, strict=True))
    assert {(load.input_len, load.output_len) for load in settings.STUDY1_LOADS} == lengths
    assert {(load.num_prompts, load.max_concurrency) for load in settings.STUDY1_LOADS} == {
        (160, 16)
    }
    gsm8k = tables.published_gsm8k()
    test = settings.find_setting("study1_paged").accuracy
    assert test.task == gsm8k.task.unique().item()
    assert test.num_fewshot == gsm8k.num_fewshot.unique().item()


@pytest.mark.parametrize("setting", settings.SETTINGS.values(), ids=lambda s: s.name)
def test_every_parameter_set_is_complete(setting):
    """Its options are those that the backend knows, and it listens on this machine only."""
    read_options(setting.server.additional_config, {})
    assert setting.server.host == "127.0.0.1" and setting.loads
    lines = command.commands(setting)
    assert " serve " in lines[0] and " bench serve " in lines[1]
    if setting.server.max_model_len:
        longest = max(load.input_len + load.output_len for load in setting.loads)
        assert longest <= setting.server.max_model_len


def test_the_dry_run_prints_what_would_run(capsys):
    """`dcp-lab serve NAME --dry-run` gives the exact commands and starts nothing."""
    with pytest.raises(SystemExit) as ended:
        main(["serve", "study1_gather", "--dry-run"])
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and '"attention_path": "gather"' in lines[0]
    assert "--tasks gsm8k --num_fewshot 5 --batch_size 128" in lines[3]


def test_an_unknown_parameter_set_is_named(capsys):
    """The message lists those there are."""
    assert command.main(["study3"]) == 2
    assert "expected one of study1_dcp1" in capsys.readouterr().err


def test_a_server_that_cannot_start_is_an_error_not_a_traceback(capsys, tmp_path):
    """`dcp-lab serve` without vLLM says what is missing."""
    args = ["study1_dcp1", "--vllm", "no-such-vllm", "--log", str(tmp_path / "x.log")]
    assert command.main(args) == 1
    assert "found no 'no-such-vllm'" in capsys.readouterr().err


def test_every_metric_has_its_statistics():
    """The table has the columns that a load test gives."""
    assert {f"p99_{metric}_ms" for metric in METRICS} <= set(SERVE.columns)


def test_a_missing_lm_eval_is_told_before_the_server_starts(tmp_path, monkeypatch):
    """Nobody waits for load tests whose evaluation cannot be asked."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(experiment, "serve", lambda *_, **__: pytest.fail("a server started"))
    setting = settings.find_setting("study1_paged")
    with pytest.raises(ClientError, match="lm_eval: not found: pip install"):
        experiment.run_setting(setting.server, setting.loads, setting.accuracy, tmp_path)
