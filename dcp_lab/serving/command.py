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
from dcp_lab.serving.server import ServerError, serve
from dcp_lab.serving.settings import SETTINGS, Setting, find_setting

ROOT = Path(__file__).resolve().parents[2]
PORT_IN_USE = 8000


def commands(setting: Setting, executable: str = "vllm", model: str | None = None) -> list[str]:
    """Return what to type for a parameter set: the server, each load test, the evaluation.

    Args:
        setting: Which.
        executable: The vLLM command.
        model: Instead of the setting's.
    """
    changes = {"executable": executable, "model": model or setting.server.model}
    # A line to be typed has a port in it; 0 would be any.
    changes["port"] = setting.server.port or PORT_IN_USE
    config = dataclasses.replace(setting.server, **changes)
    url = f"http://{config.host}:{config.port}"
    lines = [config.shell_line()]
    for index, load in enumerate(setting.loads):
        result = Path("build") / "serving" / f"{setting.name}_{index}.json"
        lines.append(shlex.join(load.command(config, url, result)))
    if setting.accuracy is not None:
        folder = Path("build") / "serving" / setting.name
        lines.append(shlex.join(setting.accuracy.command(config, url, folder)))
    return lines


def main(args: list[str] | None = None) -> int:
    """Start a server, or say what would be started; 1 when it cannot run."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="parameter sets:\n"
        + "\n".join(f"  {s.name:16} {s.machine:9} {s.about}" for s in SETTINGS.values()),
    )
    parser.add_argument("setting", help="name of a parameter set, below")
    parser.add_argument("--model", help="another model or folder of the same kind")
    parser.add_argument("--port", type=int, help="0 takes any free one")
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
    try:
        setting = find_setting(options.setting)
        if options.dry_run:
            print("\n".join(commands(setting, options.vllm or "vllm", options.model)))
            return 0
        given = {"model": options.model, "port": options.port, "host": options.host}
        changes = {name: value for name, value in given.items() if value is not None}
        changes["executable"] = options.vllm or experiment.find_engine(ROOT) or "vllm"
        config = experiment.ready(setting, ROOT, **changes)
    except (ValueError, OSError) as wrong:
        print(f"dcp-lab serve: {wrong}", file=sys.stderr)
        return 2
    log = options.log or ROOT / "build" / "serving" / f"{setting.name}.log"
    print(config.shell_line())
    try:
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


if __name__ == "__main__":
    sys.exit(main())
