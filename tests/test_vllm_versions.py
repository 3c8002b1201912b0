"""The backend against releases of vLLM whose engine cannot run here: their own Python files.

tests/vllm_version_checks.py has the checks. Needs the CPU engine's environment and the unpacked
wheels (`python3 tools/check_vllm_versions.py`); skipped without, made with DCP_LAB_CPU_ENGINE=1.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORD = json.loads((ROOT / "dcp_lab" / "vllm_plugin" / "versions.json").read_text())


@pytest.fixture(scope="module")
def tool() -> types.ModuleType:
    """Return tools/check_vllm_versions.py as a module."""
    path = ROOT / "tools" / "check_vllm_versions.py"
    spec = importlib.util.spec_from_file_location("check_vllm_versions", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", ["0.25.1", "0.33.0"])
def test_the_backend_fits_this_release(version: str, tool: types.ModuleType):
    """Selected, refused, planned, attended and gated by this release's own code."""
    engine = tool.cpu_engine
    ready = engine.stamp_of(engine.PLACE) and (tool.SOURCES / version).exists()
    if not ready and os.environ.get("DCP_LAB_CPU_ENGINE") != "1":
        pytest.skip(f"no unpacked vllm {version}: python3 tools/check_vllm_versions.py")
    checks = tool.check(version)
    assert len(checks) >= 6
    assert {name: result for name, result in checks.items() if result != "ok"} == {}


def test_the_record_names_the_checks_that_there_are():
    """What versions.json calls checked passed today's checks, not fewer."""
    source = (ROOT / "tests" / "vllm_version_checks.py").read_text()
    names = sorted(re.findall(r"^def check_(\w+)", source, re.M))
    checked = {
        version: entry["checked"] for version, entry in RECORD.items() if "checked" in entry
    }
    assert {"0.23.0", "0.25.1", "0.33.0"} <= set(checked)
    assert all(entry["checks"] == names for entry in checked.values())
