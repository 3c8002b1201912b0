"""Drive the backend against releases of vLLM on this machine and record what became of it.

    python3 tools/check_vllm_versions.py               checks 0.23.0, 0.25.1 and 0.33.0
    python3 tools/check_vllm_versions.py 0.33.0        that one
    python3 tools/check_vllm_versions.py --record      and writes dcp_lab/vllm_plugin/versions.json

Needs no GPU: each release's wheel (250 to 340 MB) is downloaded, its Python files are unpacked
into build/vllm-sources/<version> and the wheel is thrown away; then tests/vllm_version_checks.py
runs on them with the torch of the CPU engine (tools/cpu_engine.py). Such a release counts as
checked. One counts as run when an engine of it has served a model; `run` entries of the record
are kept as they are.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cpu_engine

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "build" / "vllm-sources"
RECORD = ROOT / "dcp_lab" / "vllm_plugin" / "versions.json"
VERSIONS = ("0.23.0", "0.25.1", "0.33.0")
# Any Python and platform that a release has a wheel for: only its Python files are used.
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_35_x86_64")
DOWNLOAD_SECONDS, CHECK_SECONDS = 900, 400


class CheckError(Exception):
    """A release could not be checked; the message says why."""


def sources_of(version: str) -> Path:
    """Return the folder with a release's Python files, downloading its wheel when it is missing.

    Raises:
        CheckError: The wheel cannot be had.
    """
    place = SOURCES / version
    if place.exists():
        return place
    SOURCES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SOURCES) as scratch:
        command = [str(cpu_engine.PLACE / "bin" / "python"), "-m", "pip", "download"]
        command += ["--no-deps", "--only-binary", ":all:", "--progress-bar=off", "--dest", scratch]
        command += ["--python-version", "3.12", *(f"--platform={name}" for name in PLATFORMS)]
        command += [f"vllm=={version}"]
        print(f"downloading vllm {version}", flush=True)
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-5:])
            raise CheckError(f"pip could not download vllm {version}:\n{tail}")
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheels[0]) as wheel:
            wanted = [n for n in wheel.namelist() if n.endswith(".py") or ".dist-info/" in n]
            wheel.extractall(unpacked, wanted)
        os.replace(unpacked, place)
    return place


def check(version: str) -> dict[str, str]:
    """Return check -> 'ok' or what went wrong, of one release.

    Raises:
        CheckError: The checks did not come to an end.
    """
    python = cpu_engine.ensure()
    environ = {key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR") if key in os.environ}
    environ |= {"PYTHONPATH": str(sources_of(version)), "TRITON_INTERPRET": "1"}
    environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    command = [str(python), str(ROOT / "tests" / "vllm_version_checks.py")]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=CHECK_SECONDS
    )
    lines = done.stdout.splitlines()
    try:
        found = json.loads(lines[-1])
    except (IndexError, ValueError):
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise CheckError(f"vllm {version}: no result, status {done.returncode}:\n{tail}") from None
    if found["version"] != version:
        raise CheckError(f"checked vllm {found['version']}, expected {version}")
    return found["checks"]


def record(version: str, checks: dict[str, str]) -> None:
    """Write a release's checks into versions.json, beside what is there."""
    entries = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    entry = entries.setdefault(version, {})
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    entry["checked"] = {"date": today, "checks": sorted(checks)}
    beside = RECORD.with_suffix(".json.new")
    ordered = dict(sorted(entries.items(), key=lambda item: list(map(int, item[0].split(".")))))
    beside.write_text(json.dumps(ordered, indent=2) + "\n")
    os.replace(beside, RECORD)


def main() -> int:
    """Check each release; 0 when all checks of all of them passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("versions", nargs="*", default=list(VERSIONS))
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    arguments = parser.parse_args()
    if shutil.disk_usage(ROOT).free < 3e9:
        print("needs 3 GB of free disk", file=sys.stderr)
        return 1
    wrong = 0
    for version in arguments.versions:
        try:
            checks = check(version)
        except (CheckError, cpu_engine.EngineError, subprocess.TimeoutExpired) as error:
            print(error, file=sys.stderr)
            wrong += 1
            continue
        for name, result in checks.items():
            print(f"{version}  {name.replace('_', ' ')}: {result}")
        failed = [name for name, result in checks.items() if result != "ok"]
        wrong += len(failed)
        if arguments.record and not failed:
            record(version, checks)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
