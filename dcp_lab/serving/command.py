"""`dcp-lab serve`: start vLLM with one of the lab's parameter sets and keep it until Ctrl-C."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import time
from pathlib import Path

from dcp_lab.serving import experiment
from dcp_lab.serving.clients import ClientError
from dcp_lab.serving.server import ServerError, check_log, check_timeout, serve
from dcp_lab.serving.settings import SETTINGS, Setting, find_setting

ROOT = Path(__file__).resolve().parents[2]
PORT_IN_USE = 8000


def commands(setting: Setting, **changes: object) -> list[str]:
    """Return what to type for a parameter set: the server, each load test, the evaluation.

    Args:
        setting: Which.
        changes: Fields of ServerConfig to set otherwise.

    Raises:
        ValueError: A change is not what its field takes.
    """
    config = dataclasses.replace(setting.server, **changes)
    # A line to be typed has a port in it; 0 would be any.
    config = dataclasses.replace(config, port=config.port or PORT_IN_USE)
    url = config.url
    lines = [config.shell_line()]
    for index, load in enumerate(setting.loads):
        result = Path("build") / "serving" / f"{setting.name}_{index}.json"
        lines.append(shlex.join(load.command(config, url, result)))
    if setting.accuracy is not None:
        folder = Path("build") / "serving" / setting.name
        lines.append(shlex.join(setting.accuracy.command(config, url, folder)))
    return lines


def main(args: list[str] | None = None) -> int:
    """Start a server, or say what would be started; 1: it cannot run, 2: a wrong argument."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"parameter sets:\n{_listed(indent='  ')}",
    )
    parser.add_argument("setting", nargs="?", help="name of a parameter set, below")
    parser.add_argument("--list", action="store_true", help="print the parameter sets and stop")
    parser.add_argument("--model", help="another model or folder of the same kind")
    parser.add_argument(
        "--port", type=int, help=f"0 takes any free one ({PORT_IN_USE} in --dry-run)"
    )
    parser.add_argument("--host", help="address to listen on (default: this machine only)")
    parser.add_argument("--vllm", help="the vLLM command (default: on PATH, else the CPU engine)")
    parser.add_argument("--log", type=Path, help="default: build/serving/SETTING.log")
    parser.add_argument(
        "--timeout", type=float, default=1800.0, help="seconds until it has to answer"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands of the experiment and stop"
    )
    options = parser.parse_args(args)
    if options.list:
        print(_listed())
        return 0
    given = {"model": options.model, "port": options.port, "host": options.host}
    changes = {name: value for name, value in given.items() if value is not None}
    changes["executable"] = options.vllm
    if options.vllm is None:
        changes["executable"] = experiment.find_engine(ROOT) or "vllm"
    try:
        setting = find_setting(options.setting)
        check_timeout("timeout", options.timeout)
        log = options.log or ROOT / "build" / "serving" / f"{setting.name}.log"
        check_log(log)
        if options.dry_run:
            print("\n".join(commands(setting, **changes)))
            return 0
        config = experiment.ready(setting, ROOT, **changes)
        print(config.shell_line(), flush=True)
        with serve(config, log=log, start_timeout_s=options.timeout) as server:
            print(f"vLLM {server.version} answers at {server.url} after {server.start_s:.0f} s")
            print("Ctrl-C ends it.", flush=True)
            while server.processes():
                time.sleep(1.0)
            print(f"dcp-lab serve: the server has ended; see {log.name}", file=sys.stderr)
            return 1
    except KeyboardInterrupt:
        print("stopped")
        return 0
    except (ServerError, ClientError) as wrong:
        print(f"dcp-lab serve: {wrong}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as wrong:
        print(f"dcp-lab serve: {wrong}", file=sys.stderr)
        return 2


def _listed(indent: str = "") -> str:
    """Return a line for each parameter set: its name, the machine it is for, what it is."""
    return "\n".join(f"{indent}{s.name:16} {s.machine:9} {s.about}" for s in SETTINGS.values())


if __name__ == "__main__":
    sys.exit(main())
