"""On which releases of vLLM the backend was run, and on which only checked: versions.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("versions.json")


def releases() -> dict[str, dict[str, Any]]:
    """Return release -> what is on record of it, oldest first.

    'run' lists engines that served a model with this backend (date, machine, what, and of a GPU
    the table under data/measured that has its rows), entered by hand once
    tests/test_vllm_cpu_engine.py has passed or the rows are there; 'checked' the checks that the
    release's own code passed without an engine (date, checks), which tools/check_vllm_versions.py
    enters.
    """
    return json.loads(RECORD.read_text())


def status_of(vllm_version: str) -> str:
    """Return in a few words what is known of a release.

    Args:
        vllm_version: Like '0.25.1' or '0.32.0+cpu'.
    """
    found = re.match(r"\d+\.\d+\.\d+", vllm_version)
    entry = releases().get(found.group() if found else "", {})
    if "run" in entry:
        last = entry["run"][-1]
        return f"run {last['date']} on {last['machine']}"
    if "checked" in entry:
        return f"checked {entry['checked']['date']} against its code, never run"
    return f"neither run nor checked; {', '.join(releases())} were"
