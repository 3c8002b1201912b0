"""vllm serve, played by a script: it starts, answers and goes, and each failure has its reason."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from pathlib import Path

import pytest

from dcp_lab.serving import ServerConfig, ServerError, command, guard, serve, server, settings

# Enough for a Python to start on a busy machine; a wait that fails is never longer.
START_S = 30.0

FAKE = '''#!{python}
"""Stands in for the command vllm: VLLM_PLAYS says what happens."""
import http.server, json, os, signal, subprocess, sys, time

plays = os.environ["VLLM_PLAYS"]
args = sys.argv[1:]
print("args", json.dumps(args), flush=True)
host, port = args[args.index("--host") + 1], int(args[args.index("--port") + 1])

if plays == "refused":
    print("(EngineCore_0 pid=7) ERROR 11-29 12:00:00 [core.py:9] ValueError: Selected backend "
          "AttentionBackendEnum.CUSTOM is not valid for this configuration. "
          "Reason: ['sliding window needs page 16']", flush=True)
    print("RuntimeError: Engine core initialization failed.", flush=True)
    sys.exit(1)
if plays == "gpus":
    print("ValueError: World size (8) is larger than the number of available GPUs (2) in this "
          "node. If this is intentional and you are using:", flush=True)
    sys.exit(1)
if plays == "dies":
    print("loading\\nsomething nobody has seen before", flush=True)
    sys.exit(3)
if plays == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if plays == "silent":
    print("still compiling", flush=True)
    time.sleep(600)

# A worker that does not care about SIGTERM, and one that also left the session.
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
workers = []
if plays in ("deaf", "orphans"):
    workers = [subprocess.Popen([sys.executable, "-c", deaf]),
               subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)]
    time.sleep(0.5)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({{"version": "0.0.fake"}}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
        if plays == "orphans":
            os._exit(5)

    def log_message(self, *_):
        pass


signal.signal(signal.SIGTERM, lambda *_: (print("leaving", flush=True), os._exit(0)))
http.server.HTTPServer((host, port), Handler).serve_forever()
'''


@pytest.fixture
def fake(tmp_path):
    """A function that gives the configuration of a server that behaves in one way."""
    script = tmp_path / "vllm"
    script.write_text(FAKE.format(python=sys.executable))
    script.chmod(0o755)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")

    def config(plays: str, **changes) -> ServerConfig:
        return ServerConfig(
            **{
                "model": str(model),
                "port": 0,
                "executable": str(script),
                "environment": {"VLLM_PLAYS": plays},
                **changes,
            }
        )

    return config


@pytest.fixture
def log(tmp_path):
    return tmp_path / "logs" / "serve.log"


def started(config, log, **options):
    return serve(config, log=log, start_timeout_s=START_S, stop_timeout_s=5.0, **options)


def gone(pid: int) -> bool:
    """Return whether a process has ended: it is not there, or nobody has reaped it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


# ---- the good way ---------------------------------------------------------------------------


def test_a_server_answers_and_is_gone_afterwards(fake, log):
    """Inside the block it answers on this machine only; after it nothing of it is alive."""
    with started(fake("works"), log) as running:
        assert running.url == f"http://127.0.0.1:{running.config.port}" and running.config.port
        assert running.version == "0.0.fake"
        (pid,) = running.processes()
        with urllib.request.urlopen(f"{running.url}/health", timeout=5) as answer:
            assert answer.status == 200
    assert running.processes() == [] and gone(pid)
    assert "leaving" in log.read_text()


def test_an_exception_in_the_block_ends_the_server(fake, log):
    """What goes wrong in the block passes through, and the server ends all the same."""
    with pytest.raises(KeyError, match="mine"), started(fake("works"), log) as running:
        raise KeyError("mine")
    assert running.processes() == []


def test_workers_that_do_not_listen_are_killed(fake, log):
    """A worker that ignores SIGTERM goes, and so does one in a session of its own."""
    with serve(fake("deaf"), log=log, start_timeout_s=START_S, stop_timeout_s=0.5) as running:
        pids = running.processes()
        assert len(pids) == 3
    assert running.processes() == [] and all(map(gone, pids))
    assert "2 processes did not leave" in log.read_text()


def test_workers_of_a_server_that_died_are_ended(fake, log):
    """When the server itself dies, its workers go, before anybody leaves the block."""
    with contextlib.suppress(ServerError), started(fake("orphans"), log) as running:
        end = time.monotonic() + START_S
        while running.processes() and time.monotonic() < end:
            time.sleep(0.05)
        assert running.processes() == []


PARENT = """
import os, sys
from pathlib import Path
from dcp_lab.serving import ServerConfig, serve
config = ServerConfig(model={model!r}, port=0, executable={executable!r})
with serve(config, log=Path({log!r}), start_timeout_s=30, stop_timeout_s=5) as server:
    print(server.leader, *server.processes(), flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_parent_goes(fake, log, how):
    """Ctrl-C, SIGTERM and even SIGKILL to whoever started the server end it."""
    config = fake("works")
    code = PARENT.format(model=config.model, executable=config.executable, log=str(log))
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "VLLM_PLAYS": "works"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.send_signal(how)
        parent.wait(timeout=START_S)
        end = time.monotonic() + START_S
        while not all(map(gone, pids)) and time.monotonic() < end:
            time.sleep(0.05)
        assert all(map(gone, pids))
    finally:
        parent.kill()
        parent.wait()
        parent.stdin.close()
        parent.stdout.close()


# ---- what can go wrong ----------------------------------------------------------------------


@pytest.fixture
def token(monkeypatch):
    """What the processes of the next server will carry."""
    monkeypatch.setattr(server, "new_token", lambda: "told-by-this-test")
    return "told-by-this-test"


def refusal(config, log, **options) -> str:
    """Return why a server does not start."""
    with pytest.raises(ServerError) as caught, started(config, log, **options):
        pass
    return str(caught.value)


def test_a_busy_port_is_named_before_anything_starts(fake, log):
    """A port on which something listens is refused, and the log is not touched."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        message = refusal(fake("works", port=port), log)
    assert f"port: expected a free one on 127.0.0.1, got {port}" in message
    assert not log.exists()


def test_a_missing_model_folder_is_named(fake, log, tmp_path):
    """A folder without config.json is no model; a name of the hub is not looked up here."""
    message = refusal(fake("works", model=str(tmp_path / "nothing")), log)
    assert "model: expected a folder with a config.json" in message and "nothing" in message
    assert ServerConfig(model="Qwen/Qwen3-8B").folder is None


def test_a_missing_command_is_named(fake, log):
    """Without vLLM the message says how to get it."""
    message = refusal(fake("works", executable="no-such-vllm"), log)
    assert "found no 'no-such-vllm': install vLLM" in message


def test_too_few_gpus_are_named_before_anything_starts(fake, log, monkeypatch):
    """Where torch counts GPUs, more ranks than that are refused at once."""
    monkeypatch.setattr(server, "visible_gpus", lambda: 2)
    message = refusal(fake("works", tensor_parallel_size=8), log)
    assert "expected at most the 2 GPUs that torch sees here, got 8" in message
    assert not log.exists()


@pytest.mark.parametrize(
    ("plays", "parts"),
    [
        (
            "refused",
            (
                "vLLM refused the attention backend and died (status 1)",
                "\nValueError: Selected backend AttentionBackendEnum.CUSTOM is not valid for this "
                "configuration. Reason: ['sliding window needs page 16']",
            ),
        ),
        ("gpus", ("vLLM has too few GPUs", "World size (8) is larger", "tensor_parallel_size")),
        ("dies", ("died before it answered (status 3)", "something nobody has seen before")),
        ("killed", ("died before it answered (signal 9)",)),
    ],
)
def test_a_server_that_dies_says_why(fake, log, token, plays, parts):
    """vLLM's own reason is quoted where it is known, else the end of the log is shown."""
    message = refusal(fake(plays), log)
    for part in parts:
        assert part in message
    assert "serve.log" in message and "initialization failed" not in message
    assert guard.processes(-1, token) == []


def test_a_server_that_never_answers_is_given_up(fake, log, token):
    """The wait ends, shows what the server said last, and leaves nothing running."""
    before = time.monotonic()
    waiting = serve(fake("silent"), log=log, start_timeout_s=2.0, stop_timeout_s=5.0)
    with pytest.raises(ServerError, match="did not answer in 2 s") as caught, waiting:
        pass
    assert "still compiling" in str(caught.value)
    assert time.monotonic() - before < START_S
    assert guard.processes(-1, token) == []


# ---- the command ----------------------------------------------------------------------------


def test_the_command_has_what_was_asked_for_and_nothing_else():
    """Each field becomes its flag; what is None or empty leaves vLLM's default."""
    plain = "vllm serve m --host 127.0.0.1 --port 8000 --tensor-parallel-size 1"
    assert ServerConfig(model="m").shell_line() == plain
    config = ServerConfig(
        model="m",
        tensor_parallel_size=8,
        decode_context_parallel_size=2,
        dcp_comm_backend="a2a",
        attention_backend="CUSTOM",
        additional_config={"a": {"b": "c d"}},
        cudagraph_mode="PIECEWISE",
        cudagraph_capture_sizes=(1, 16),
        cudagraph_metrics=True,
        max_num_seqs=16,
        enable_prefix_caching=False,
        extra_args=("--trust-remote-code",),
        environment={"X": "1 2"},
    )
    words = config.command()
    for flag, value in {
        "--decode-context-parallel-size": "2",
        "--dcp-comm-backend": "a2a",
        "--attention-backend": "CUSTOM",
        "--additional-config": '{"a": {"b": "c d"}}',
        "--compilation-config": (
            '{"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [1, 16]}'
        ),
        "--max-num-seqs": "16",
    }.items():
        assert words[words.index(flag) + 1] == value
    assert {"--cudagraph-metrics", "--no-enable-prefix-caching"} <= set(words)
    assert words[-1] == "--trust-remote-code" and "--enforce-eager" not in words
    assert config.shell_line().startswith("X='1 2' vllm serve m ")
    assert '--additional-config \'{"a": {"b": "c d"}}\'' in config.shell_line()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ""}, "model: expected a name or a folder"),
        ({"port": 70000}, "port: expected an int from 0 to 65535, got 70000"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: expected an int >= 1, got 0"),
        ({"max_num_seqs": 0}, "max_num_seqs: expected an int >= 1 or None, got 0"),
        (
            {"tensor_parallel_size": 4, "decode_context_parallel_size": 3},
            "decode_context_parallel_size: expected a divisor of tensor_parallel_size 4, got 3",
        ),
        ({"cudagraph_mode": "FAST"}, "cudagraph_mode: expected one of NONE, .*, got 'FAST'"),
        ({"dcp_comm_backend": "direct"}, "dcp_comm_backend: expected one of ag_rs, a2a"),
        ({"dcp_comm_backend": "a2a"}, "expected None at decode_context_parallel_size 1"),
        ({"model": Path("m")}, r"model: expected a name or a folder.*got Posix"),
        ({"model": "--trust-remote-code"}, "model: .*not begin with '-', got '--trust"),
        ({"model": "a\0b"}, r"model: expected .*got 'a.x00b'"),
        ({"host": ""}, "host: expected an address.*got ''"),
        ({"host": None}, "host: expected an address.*got None"),
        ({"executable": ""}, "executable: expected printable text, not empty"),
        ({"dtype": ""}, "dtype: expected printable text.* or None, got ''"),
        ({"attention_backend": ""}, "attention_backend: expected printable text"),
        ({"kv_cache_dtype": 8}, "kv_cache_dtype: expected printable text.*got 8"),
        ({"port": True}, "port: expected an int from 0 to 65535, got True"),
        ({"port": 8000.5}, "port: expected an int from 0 to 65535, got 8000.5"),
        ({"port": "8000"}, "port: expected an int from 0 to 65535, got '8000'"),
        ({"seed": 1.5}, "seed: expected an int from 0 to .* or None, got 1.5"),
        ({"seed": -1}, "seed: expected an int from 0"),
        ({"enforce_eager": 1}, "enforce_eager: expected a bool, got 1"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching: expected a bool or None"),
        ({"enforce_eager": True, "cudagraph_mode": "FULL"}, "cudagraph_mode: expected None or 'N"),
        ({"cudagraph_capture_sizes": 4}, "cudagraph_capture_sizes: expected a tuple of ints"),
        ({"cudagraph_capture_sizes": (4, 0)}, "cudagraph_capture_sizes: .*got .4, 0"),
        ({"gpu_memory_utilization": "0.5"}, "gpu_memory_utilization: expected a number above 0"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization: .*got nan"),
        ({"additional_config": "x"}, "additional_config: expected a mapping that JSON can hold"),
        ({"additional_config": {"a": {1}}}, "additional_config: expected a mapping that JSON"),
        ({"extra_args": "--flag"}, "extra_args: expected a tuple of text.*got '--flag'"),
        ({"extra_args": (1,)}, "extra_args: expected a tuple of text"),
        ({"extra_args": ("--host=0.0.0.0",)}, "extra_args: expected host and port in their own"),
        ({"environment": []}, "environment: expected a mapping of names to text, got list"),
        ({"environment": {"A=B": "1"}}, "environment: expected names of letters.*got 'A=B'"),
        ({"environment": {"A": 1}}, "environment: A: expected text without NUL, got int"),
        ({"environment": {"A": "\0"}}, "environment: A: expected text without NUL, got text"),
        (
            {"gpu_memory_utilization": 1.5},
            "gpu_memory_utilization: expected a number above 0 to 1",
        ),
    ],
)
def test_a_bad_configuration_is_refused(changes, message):
    """A value that cannot be right names its field when the configuration is made."""
    with pytest.raises(ValueError, match=message):
        ServerConfig(**{"model": "m", **changes})


def test_every_field_of_a_configuration_is_checked():
    """A field added later needs a line in the table of checks."""
    checked = [name for names, *_ in server._FIELDS for name in names] + ["environment"]
    assert sorted(checked) == sorted(f.name for f in dataclasses.fields(ServerConfig))


@pytest.mark.parametrize(
    "changes",
    [
        {"start_timeout_s": float("nan")},
        {"start_timeout_s": float("inf")},
        {"start_timeout_s": 0},
        {"start_timeout_s": "60"},
        {"stop_timeout_s": -1.0},
        {"stop_timeout_s": float("nan")},
    ],
)
def test_a_wait_without_an_end_is_refused(fake, log, changes):
    """Every wait is a finite number of seconds; nothing starts otherwise."""
    (name,) = changes
    with pytest.raises(ValueError, match=f"{name}: expected finite seconds"):
        serve(fake("works"), log=log, **changes).__enter__()
    assert not log.exists()


def test_a_configuration_cannot_change():
    """It is what a row of results will be said to have run with."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        ServerConfig(model="m").port = 1


def test_it_is_quoted_without_what_a_logger_puts_before_it():
    """The quoted line is vLLM's sentence, whichever process and colour it came from."""
    line = (
        "\x1b[0;36m(EngineCore pid=12)\x1b[0m ERROR 11-30 06:59:00 [core.py:1] "
        "AssertionError: DCP requires attention implementations to return the softmax LSE"
    )
    what, quoted, _ = server.why_it_died(f"fine\n{line}\nTraceback")
    assert what == "vLLM refused the attention backend"
    assert quoted.startswith("AssertionError: DCP requires")
    assert server.why_it_died(textwrap.dedent("all well")) is None


# ---- dcp-lab serve ------------------------------------------------------------------------


def test_the_dry_run_takes_host_and_port_as_a_start_does(capsys, monkeypatch):
    """What is printed is what would run, and every client asks the same address."""
    monkeypatch.setattr(command.experiment, "find_engine", lambda root: "/engines/vllm")
    args = ["two_gpus_paged", "--dry-run", "--host", "::", "--port", "9123"]
    assert command.main(args) == 0
    serves, loads = capsys.readouterr().out.splitlines()
    assert "/engines/vllm serve ./build" in serves and " --host :: --port 9123 " in serves
    assert loads.startswith("/engines/vllm bench serve ")
    assert "--base-url 'http://[::1]:9123'" in loads


def test_the_list_names_every_parameter_set(capsys):
    """`dcp-lab serve --list` prints them, a line each."""
    assert command.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(settings.SETTINGS)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--timeout", "nan"], "timeout: expected finite seconds above 0, got nan"),
        (["--timeout", "-5"], "timeout: expected finite seconds above 0, got -5.0"),
        (["--dry-run", "--timeout", "inf"], "timeout: expected finite seconds above 0, got inf"),
        (["--dry-run", "--port", "70000"], "port: expected an int from 0 to 65535, got 70000"),
        (["--dry-run", "--host", ""], "host: expected an address"),
        (["--dry-run", "--model", ""], "model: expected a name or a folder"),
        (["--vllm", "sh", "--host", "203.0.113.9"], "host: expected an address of this machine"),
        (["--vllm", "sh", "--host", "203.0.113.9", "--port", "0"], "got '203.0.113.9' (Cannot"),
        (
            ["--vllm", "sh", "--host", "0"],
            "expected '0.0.0.0' to listen on all interfaces, got '0'",
        ),
        (["--vllm", "sh", "--host", "a" * 64 + ".invalid"], "host: expected an address of this"),
        (["--vllm", "sh", "--log", "."], "log: expected a file that can be written, got . (Is a"),
        (["--vllm", "sh", "--log", "/proc/nope/x"], "log: expected a file that can be written"),
        # A wrong argument is told before a missing vLLM, which is status 1.
        (["--vllm", "no-such-vllm", "--log", "."], "log: expected a file that can be written"),
        (
            ["--vllm", "no-such-vllm", "--log", f"{__file__}/x"],
            "test_serving_server.py is no folder",
        ),
    ],
)
def test_a_wrong_argument_is_one_line_and_status_2(capsys, monkeypatch, args, message):
    """Nothing starts, and there is no traceback."""
    monkeypatch.setattr(server, "visible_gpus", lambda: None)
    if "--port" not in args:
        args = [*args, "--port", str(server.free_port())]
    assert command.main(["study1_dcp1", *args]) == 2
    said = capsys.readouterr().err
    assert said.startswith("dcp-lab serve: ") and message in said
    assert len(said.splitlines()) == 1


def test_no_parameter_set_is_an_error_that_lists_them(capsys):
    """Without a name and without --list."""
    assert command.main([]) == 2
    assert "expected one of study1_dcp1" in capsys.readouterr().err
