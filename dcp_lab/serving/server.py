"""Start `vllm serve`, wait until it answers, and leave nothing running.

    config = ServerConfig(model="Qwen/Qwen3-8B", tensor_parallel_size=2)
    with serve(config, log=Path("serve.log")) as server:
        print(server.url)

The command is a list, never a shell line. The server listens on this machine only unless another
host is asked for. It runs under `dcp_lab.serving.guard`, so that it ends when the block ends, on
an exception, on Ctrl-C, and when this process is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dcp_lab.files import why_unwritable
from dcp_lab.serving import guard

CUDAGRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
DCP_COMM_BACKENDS = ("ag_rs", "a2a")
# Addresses that mean every interface, and where a server that listens there is asked.
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}

POLL_S = 0.25
REQUEST_S = 5.0
# Lines of the log that an error shows when no known reason is in it.
TAIL_LINES = 20

# What vLLM says, and what to do about it. The first line of the log that fits one is quoted.
REASONS = (
    (
        r"is not valid for this configuration|Invalid attention backend|No valid attention backend"
        r"|Unknown attention backend|DCP requires|Context Parallelism is not supported",
        "vLLM refused the attention backend",
        "change what the reason names, or choose another --attention-backend",
    ),
    (
        r"larger than the number of available GPUs|No (?:CUDA|HIP) GPUs are available"
        r"|invalid device ordinal",
        "vLLM has too few GPUs",
        "lower tensor_parallel_size, or run where there are more",
    ),
    (
        r"Failed to infer device type",
        "vLLM found no GPU",
        "run on a machine with one; without a GPU use vLLM's CPU build and its setting, cpu",
    ),
    (
        r"out of memory|No available memory for the cache blocks|Free memory on device",
        "vLLM ran out of memory",
        "lower max_model_len, max_num_seqs or gpu_memory_utilization, or end what else runs there",
    ),
    (
        r"address already in use",
        "the port was taken while vLLM started",
        "take another port, or port 0 for any free one",
    ),
    (
        r"unrecognized arguments|invalid choice",
        "this vLLM does not know a flag",
        "README.md of dcp_lab/vllm_plugin says which vLLM versions were run",
    ),
)


class ServerError(RuntimeError):
    """The server cannot run, or has died; the message says why and what to do."""


def _is_word(value: object) -> bool:
    # A flag's value that begins with "-" would be read as the next flag.
    return (
        isinstance(value, str)
        and bool(value.strip())
        and value.isprintable()
        and not value.startswith("-")
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return isinstance(value, Mapping)


def _each(right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple | list) and all(map(right, value))


_WORD = "printable text, not empty, that does not begin with '-'"
# Names of fields, what is expected of each, and whether a value is that. Where a field's default
# is None, None is right too. The environment is checked by itself: its values are not shown.
_FIELDS: tuple[tuple[tuple[str, ...], str, Callable[[Any], bool]], ...] = (
    (("model",), f"a name or a folder: {_WORD}", _is_word),
    (("host",), f"an address: {_WORD}", _is_word),
    (
        ("executable", "attention_backend", "load_format", "dtype", "kv_cache_dtype"),
        _WORD,
        _is_word,
    ),
    (
        ("tensor_parallel_size", "decode_context_parallel_size")
        + ("block_size", "max_model_len", "max_num_seqs"),
        "an int >= 1",
        lambda value: _is_int(value) and value >= 1,
    ),
    (("port",), "an int from 0 to 65535", lambda value: _is_int(value) and 0 <= value <= 65535),
    # numpy's limit, whose generator vLLM seeds too.
    (("seed",), "an int from 0 to 2**32 - 1", lambda value: _is_int(value) and 0 <= value < 2**32),
    (
        ("gpu_memory_utilization",),
        "a number above 0 to 1",
        lambda value: _is_number(value) and 0 < value <= 1,
    ),
    (
        ("dcp_comm_backend",),
        f"one of {', '.join(DCP_COMM_BACKENDS)}",
        DCP_COMM_BACKENDS.__contains__,
    ),
    (("cudagraph_mode",), f"one of {', '.join(CUDAGRAPH_MODES)}", CUDAGRAPH_MODES.__contains__),
    (
        ("cudagraph_capture_sizes",),
        "a tuple of ints >= 1",
        _each(lambda value: _is_int(value) and value >= 1),
    ),
    (("cudagraph_metrics", "enforce_eager", "enable_prefix_caching"), "a bool", _is_bool),
    (("additional_config",), "a mapping that JSON can hold", _is_json),
    (
        ("extra_args",),
        "a tuple of text without NUL",
        _each(lambda value: isinstance(value, str) and "\0" not in value),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What `vllm serve` is started with. None leaves vLLM's own default.

    Attributes:
        model: A Hugging Face name or a folder. One that holds a path separator at its start
            (`/`, `./`, `../`) or exists here is taken as a folder.
        host: The address to listen on. Default: this machine only. All interfaces only by name,
            "0.0.0.0" or "::".
        port: 0 takes any free one.
        tensor_parallel_size: GPUs.
        decode_context_parallel_size: DCP group size, a divisor of tensor_parallel_size.
        dcp_comm_backend: "ag_rs" or "a2a"; vLLM's flag, for DCP only.
        attention_backend: vLLM's name; "CUSTOM" is this lab's.
        additional_config: vLLM's `--additional-config`; this lab's options are in it.
        cudagraph_mode: One of CUDAGRAPH_MODES.
        cudagraph_capture_sizes: Batch sizes to capture.
        cudagraph_metrics: Log how many steps ran in which graph mode.
        enforce_eager: No graphs, no compilation; no cudagraph_mode but "NONE" goes with it.
        load_format: "dummy" needs no weights.
        dtype: Of weights and activations.
        kv_cache_dtype: Of the cache.
        block_size: Tokens a page.
        max_model_len: Longest request, tokens.
        max_num_seqs: Most requests in a batch.
        gpu_memory_utilization: Share of each GPU's memory.
        enable_prefix_caching: Reuse equal prompts' KV.
        seed: Of the sampler, 0 to 2**32 - 1.
        extra_args: Further flags, as they are.
        environment: Variables on top of this process's.
        executable: The vLLM command, a name on PATH or a path.

    Raises:
        ValueError: A value is not what its field takes, or two exclude each other; the message
            names the field.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    tensor_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    dcp_comm_backend: str | None = None
    attention_backend: str | None = None
    additional_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    cudagraph_mode: str | None = None
    cudagraph_capture_sizes: tuple[int, ...] = ()
    cudagraph_metrics: bool = False
    enforce_eager: bool = False
    load_format: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float | None = None
    enable_prefix_caching: bool | None = None
    seed: int | None = None
    extra_args: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    executable: str = "vllm"

    def __post_init__(self) -> None:
        optional = {field.name for field in dataclasses.fields(self) if field.default is None}
        for names, expected, is_right in _FIELDS:
            for name in names:
                value = getattr(self, name)
                if not (is_right(value) or (value is None and name in optional)):
                    none = " or None" * (name in optional)
                    raise ValueError(f"{name}: expected {expected}{none}, got {value!r}")
        _check_environment(self.environment)
        for word in self.extra_args:
            if word.partition("=")[0] in ("--host", "--port"):
                raise ValueError(
                    f"extra_args: expected host and port in their own fields, got {word!r}"
                )
        if self.tensor_parallel_size % self.decode_context_parallel_size:
            raise ValueError(
                "decode_context_parallel_size: expected a divisor of tensor_parallel_size "
                f"{self.tensor_parallel_size}, got {self.decode_context_parallel_size}"
            )
        if self.dcp_comm_backend is not None and self.decode_context_parallel_size == 1:
            raise ValueError(
                f"dcp_comm_backend: expected None at decode_context_parallel_size 1, got "
                f"{self.dcp_comm_backend!r}"
            )
        if self.enforce_eager and self.cudagraph_mode not in (None, "NONE"):
            raise ValueError(
                "cudagraph_mode: expected None or 'NONE' where enforce_eager is True, got "
                f"{self.cudagraph_mode!r}"
            )

    @property
    def folder(self) -> Path | None:
        """The model's folder, None where model is a Hugging Face name."""
        if self.model.startswith(("/", "./", "../", "~")) or Path(self.model).exists():
            return Path(self.model).expanduser()
        return None

    @property
    def url(self) -> str:
        """Where clients on this machine reach it, http://HOST:PORT."""
        host = EVERYWHERE.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def command(self) -> list[str]:
        """Return the command, a word an item."""
        words = [self.executable, "serve", self.model]
        words += ["--host", self.host, "--port", str(self.port)]
        words += ["--tensor-parallel-size", str(self.tensor_parallel_size)]
        if self.decode_context_parallel_size > 1:
            words += ["--decode-context-parallel-size", str(self.decode_context_parallel_size)]
        for name in ("dcp_comm_backend", "attention_backend"):
            words += _flag(name, getattr(self, name))
        if self.additional_config:
            words += ["--additional-config", json.dumps(self.additional_config)]
        compilation: dict[str, Any] = {}
        if self.cudagraph_mode is not None:
            compilation["cudagraph_mode"] = self.cudagraph_mode
        if self.cudagraph_capture_sizes:
            compilation["cudagraph_capture_sizes"] = list(self.cudagraph_capture_sizes)
        if compilation:
            words += ["--compilation-config", json.dumps(compilation)]
        words += ["--cudagraph-metrics"] * self.cudagraph_metrics
        words += ["--enforce-eager"] * self.enforce_eager
        for name in (
            "load_format",
            "dtype",
            "kv_cache_dtype",
            "block_size",
            "max_model_len",
            "max_num_seqs",
            "gpu_memory_utilization",
            "seed",
        ):
            words += _flag(name, getattr(self, name))
        if self.enable_prefix_caching is not None:
            no = "" if self.enable_prefix_caching else "no-"
            words.append(f"--{no}enable-prefix-caching")
        return [*words, *self.extra_args]

    def shell_line(self) -> str:
        """Return the command with its variables, as one would type it."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.command())])


@dataclasses.dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        config: What it was started with; its port is the one in use.
        url: http://HOST:PORT.
        log: The file with everything it said.
        start_s: Seconds from its start until it answered.
        version: vLLM's.
        leader: The process that leads its session.
        token: What its processes carry in their environment.
    """

    config: ServerConfig
    url: str
    log: Path
    start_s: float
    version: str
    leader: int
    token: str

    def processes(self) -> list[int]:
        """Return the ids of its processes that are alive."""
        return guard.processes(self.leader, self.token)


@contextlib.contextmanager
def serve(
    config: ServerConfig,
    *,
    log: Path,
    start_timeout_s: float = 1800.0,
    stop_timeout_s: float = 30.0,
) -> Iterator[Server]:
    """Start `vllm serve`, yield once it answers, stop it when the block ends in whatever way.

    Args:
        config: What to start.
        log: File for everything the server says; replaced.
        start_timeout_s: Until /health has to answer: weights, compilation, graph capture.
        stop_timeout_s: From SIGTERM to SIGKILL, at most.

    Yields:
        The server.

    Raises:
        ValueError: A timeout is no finite number (start_timeout_s above 0, stop_timeout_s from 0
            up), host is no address of this machine, or log cannot be written.
        ServerError: Before anything starts: no such command, no such model folder, a busy port,
            fewer GPUs than tensor_parallel_size. Later: it died or did not answer in time; the
            message quotes vLLM's own reason where the log has one that is known, else the end of
            the log. On leaving: it could not be stopped.

    Notes:
        SIGTERM to this process is taken as Ctrl-C inside the block (in the main thread). What a
        terminal shows while it waits is the time and the last line of the log.
    """
    check_timeout("start_timeout_s", start_timeout_s)
    if not (_is_number(stop_timeout_s) and 0 <= stop_timeout_s < math.inf):
        raise ValueError(f"stop_timeout_s: expected finite seconds >= 0, got {stop_timeout_s!r}")
    check_log(log)
    check(config)
    if config.port == 0:
        config = dataclasses.replace(config, port=free_port(config.host))
    token = new_token()
    environment = {**os.environ, **config.environment, guard.VARIABLE: token}
    environment.setdefault("PYTHONUNBUFFERED", "1")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_terminate_as_interrupt())
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(log.open("wb"))
        except OSError as error:
            raise _no_log(log, error.strerror) from None
        start = time.monotonic()
        watch = subprocess.Popen(
            [sys.executable, "-I", guard.__file__, str(stop_timeout_s), token, *config.command()],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        stack.callback(_stop, watch, token, stop_timeout_s, log)
        _wait_for_health(config, watch, log, start, start_timeout_s)
        yield Server(
            config=config,
            url=config.url,
            log=log,
            start_s=time.monotonic() - start,
            version=str(_get_json(f"{config.url}/version").get("version", "unknown")),
            leader=watch.pid,
            token=token,
        )


def check_timeout(name: str, value: object) -> None:
    """Raise ValueError unless a wait has an end.

    Args:
        name: Of the argument.
        value: Expected: a finite number of seconds above 0.
    """
    if not (_is_number(value) and 0 < value < math.inf):  # type: ignore[operator]
        raise ValueError(f"{name}: expected finite seconds above 0, got {value!r}")


def check_log(log: Path) -> None:
    """Raise ValueError unless a log can be written; make and change nothing.

    Args:
        log: Its path. Folders that are missing above it can be made later.
    """
    if why := why_unwritable(log):
        raise _no_log(log, why)


def _no_log(log: Path, why: str | None) -> ValueError:
    return ValueError(
        f"log: expected a file that can be written, got {log} ({why}): give another path"
    )


def check(config: ServerConfig) -> None:
    """Raise for what can be known to fail before a server is started.

    Args:
        config: See `serve`, whose list of reasons this is.
    """
    # Bound and let go again; port 0 shows whether the address is this machine's.
    free_port(config.host, config.port)
    if shutil.which(config.executable) is None:
        raise ServerError(
            f"executable: expected the vLLM command, found no {config.executable!r}: install vLLM "
            "(dcp-lab doctor says how), or give its path"
        )
    folder = config.folder
    if folder is not None and not (folder / "config.json").is_file():
        raise ServerError(
            f"model: expected a folder with a config.json, got {config.model!r}: make one with "
            "dcp_lab.serving.write_model_folder, or name a model of the Hugging Face hub"
        )
    there = visible_gpus()
    if there is not None and there < config.tensor_parallel_size:
        raise ServerError(
            f"tensor_parallel_size: expected at most the {there} GPUs that torch sees here, got "
            f"{config.tensor_parallel_size}"
        )


def visible_gpus() -> int | None:
    """Return the GPUs that torch can use, None where this torch is built for CPUs only."""
    import torch

    if not (torch.version.cuda or torch.version.hip):
        return None
    return torch.cuda.device_count()


def new_token() -> str:
    """Return a word that no other server's processes carry."""
    return uuid.uuid4().hex


def free_port(host: str = "127.0.0.1", port: int = 0) -> int:
    """Return a port of an address on which nothing listens now.

    Args:
        host: An address or a name of this machine.
        port: This one; 0: any.

    Raises:
        ServerError: Something listens on that port, or this user may not.
        ValueError: host is no address of this machine, or all of them under another spelling.
    """
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            # As servers do: an old connection that is only winding down does not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            address, free = probe.getsockname()[:2]
    except (OSError, UnicodeError) as error:
        number = getattr(error, "errno", None)
        if number == errno.EADDRINUSE:
            raise ServerError(
                f"port: expected a free one on {host}, got {port}, where something listens "
                "already: end that, take another, or 0 for any free one"
            ) from None
        if number == errno.EACCES:
            raise ServerError(
                f"port: expected one on which this user may listen, got {port}: take another, or "
                "0 for any free one"
            ) from None
        why = getattr(error, "strerror", None) or error
        raise ValueError(
            f"host: expected an address of this machine, got {host!r} ({why}): leave it away for "
            "127.0.0.1"
        ) from None
    # "0" and other spellings of it would do that unseen.
    if address in EVERYWHERE and host not in EVERYWHERE:
        raise ValueError(f"host: expected {address!r} to listen on all interfaces, got {host!r}")
    return free


def why_it_died(text: str) -> tuple[str, str, str] | None:
    """Return vLLM's own reason from its log.

    Args:
        text: The log.

    Returns:
        What happened, the line that says so, and what to do; None where no known reason is there.
    """
    for line in text.splitlines():
        for pattern, what, remedy in REASONS:
            if re.search(pattern, line, flags=re.IGNORECASE):
                return what, _without_prefix(line), remedy
    return None


def _without_prefix(line: str) -> str:
    """Cut what vLLM's processes and logger put before a message."""
    line = re.sub(r"\x1b\[[0-9;]*m", "", line)
    line = re.sub(r"^\s*\([\w :.=-]+\)\s*", "", line)
    return re.sub(
        r"^(?:ERROR|WARNING|INFO)\s+[\d-]+\s+[\d:.]+\s+(?:\[[^\]]*\]\s*)*", "", line
    ).strip()


def _check_environment(environment: object) -> None:
    """Raise unless it is variables by name. Values may be secrets and are not shown."""
    if not isinstance(environment, Mapping):
        raise ValueError(
            f"environment: expected a mapping of names to text, got {type(environment).__name__}"
        )
    for name, value in environment.items():
        if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)):
            raise ValueError(
                f"environment: expected names of letters, digits and '_', got {name!r}"
            )
        if not isinstance(value, str) or "\0" in value:
            got = "text with NUL" if isinstance(value, str) else type(value).__name__
            raise ValueError(f"environment: {name}: expected text without NUL, got {got}")


def _flag(name: str, value: object) -> list[str]:
    return [] if value is None else [f"--{name.replace('_', '-')}", str(value)]


# Whatever proxy the environment names, this machine is asked directly.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _answers(url: str) -> bool:
    try:
        with _DIRECT.open(url, timeout=REQUEST_S) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False


def _get_json(url: str) -> dict[str, Any]:
    try:
        with _DIRECT.open(url, timeout=REQUEST_S) as answer:
            found = json.load(answer)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _wait_for_health(
    config: ServerConfig,
    watch: subprocess.Popen[bytes],
    log: Path,
    start: float,
    timeout_s: float,
) -> None:
    """Return when /health answers; raise when the server died or time is up."""
    url = f"{config.url}/health"
    with _progress() as show:
        while True:
            status = watch.poll()
            if status is not None:
                raise ServerError(_death(status, log))
            if _answers(url):
                return
            waited = time.monotonic() - start
            if waited > timeout_s:
                raise ServerError(
                    f"vllm serve did not answer in {timeout_s:g} s: give start_timeout_s more, or "
                    f"see why; the end of {log.name}:\n{_tail(log)}"
                )
            show(waited, log)
            time.sleep(POLL_S)


def _death(status: int, log: Path) -> str:
    ended = f"signal {status - 128}" if status > 128 else f"status {status}"
    reason = why_it_died(log.read_text(errors="replace"))
    if reason is None:
        return (
            f"vllm serve died before it answered ({ended}); the end of {log.name}:\n{_tail(log)}"
        )
    what, line, remedy = reason
    return f"{what} and died ({ended}): {remedy}. vLLM says ({log.name}):\n{line}"


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-TAIL_LINES:]) or "(it said nothing)"


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """Yield a function that shows the time and the log's last line, on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda waited, log: None
        return
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    with console.status("vllm serve starts") as status:

        def show(waited: float, log: Path) -> None:
            lines = log.read_text(errors="replace").splitlines()[-1:]
            last = escape(_without_prefix(lines[0])[:80]) if lines else ""
            status.update(f"vllm serve starts, {waited:.0f} s  [dim]{last}[/]")

        yield show


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, where this thread may say what signals do."""

    def interrupt(signum: int, frame: types.FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:
        # Not the main thread. The guard still notices when this process is gone.
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(watch: subprocess.Popen[bytes], token: str, timeout_s: float, log: Path) -> None:
    """Close the pipe, which makes the guard stop everything; see to it that it did."""
    assert watch.stdin is not None
    watch.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        watch.wait(timeout=timeout_s + guard.KILL_S + REQUEST_S)
    left = guard.processes(watch.pid, token)
    if watch.poll() is None or left:
        # The guard itself was killed, or did not come to its end.
        guard.stop(watch.pid, token, 0.0)
        watch.kill()
        watch.wait(timeout=REQUEST_S)
        left = guard.processes(watch.pid, token)
    if left:
        raise ServerError(
            f"processes {left} of vllm serve cannot be ended (a GPU driver may hold them); what "
            f"they said is in {log.name}"
        )
