"""The generations of vLLM's graph rule under context parallelism, against a table by hand."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from dcp_lab.graphs import resolve_cudagraph_mode, rule_of

# What becomes of a full mode: F, it stays; P, it becomes PIECEWISE.
EXPECTED = {
    #                              PCP 1              PCP 2
    #                         DCP 1   DCP 2      DCP 1   DCP 2
    # ag_rs, a2a:
    ("dcp_always", "cuda"): "F F    P P        F F     P P",
    ("dcp_always", "rocm"): "F F    P P        P P     P P",
    ("rocm_dcp", "cuda"): "  F F    F F        F F     F F",
    ("rocm_dcp", "rocm"): "  F F    P P        P P     P P",
    ("a2a_gate", "cuda"): "  F F    F F        F F     F F",
    ("a2a_gate", "rocm"): "  F F    P F        P P     P P",
    ("pcp_only", "cuda"): "  F F    F F        F F     F F",
    ("pcp_only", "rocm"): "  F F    F F        P P     P P",
}
FULL = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


@pytest.mark.parametrize("rule, platform", EXPECTED, ids="-".join)
@pytest.mark.parametrize("requested", ["NONE", "PIECEWISE", *FULL])
def test_every_cell(rule, platform, requested):
    """Each rule, platform, DCP and PCP size, exchange and mode ends where the table says."""
    columns = itertools.product((1, 2), (1, 2), ("ag_rs", "a2a"))
    cells = EXPECTED[rule, platform].split()
    assert len(cells) == 8
    for (pcp_size, dcp_size, backend), cell in zip(columns, cells, strict=True):
        mode, reason = resolve_cudagraph_mode(
            requested,
            platform=platform,
            dcp_size=dcp_size,
            dcp_comm_backend=backend,
            pcp_size=pcp_size,
            rule=rule,
        )
        lowered = cell == "P" and requested in FULL
        where = (pcp_size, dcp_size, backend)
        assert mode == ("PIECEWISE" if lowered else requested), where
        if lowered:
            assert f"rule {rule} lowers {requested} for" in reason
            assert ("dcp_size=2" in reason) or ("pcp_size=2" in reason)
        elif requested in FULL:
            assert f"rule {rule} leaves {requested}" in reason
        else:
            assert reason == f"{requested} was asked for and holds no full graph"


def test_defaults_are_vllms():
    """ag_rs and no prefill context parallelism, as vLLM has it: study 2's forced PIECEWISE."""
    mode, reason = resolve_cudagraph_mode("FULL", platform="rocm", dcp_size=8, rule="rocm_dcp")
    assert mode == "PIECEWISE"
    assert reason == "rule rocm_dcp lowers FULL for dcp_size=8 with ag_rs on rocm"
    resolved = resolve_cudagraph_mode(
        "FULL", platform="rocm", dcp_size=8, dcp_comm_backend="a2a", rule="a2a_gate"
    )
    assert resolved.mode == "FULL"


@pytest.mark.parametrize(
    "argument, message",
    [
        pytest.param(
            {"requested": "full"}, "requested: expected 'NONE' or .*, got 'full'", id="mode"
        ),
        pytest.param({"requested": None}, "requested: .*got None", id="no mode"),
        pytest.param(
            {"platform": "hip"}, "platform: expected 'cuda' or 'rocm', got 'hip'", id="hip"
        ),
        pytest.param({"dcp_size": 0}, "dcp_size: expected an int >= 1, got 0", id="dcp 0"),
        pytest.param(
            {"dcp_size": True}, "dcp_size: expected an int >= 1, got True", id="dcp bool"
        ),
        pytest.param({"pcp_size": 1.0}, "pcp_size: expected an int >= 1, got 1.0", id="pcp"),
        pytest.param(
            {"dcp_comm_backend": "direct"},
            "dcp_comm_backend: expected 'ag_rs' or 'a2a', got 'direct'",
            id="backend",
        ),
        pytest.param(
            {"rule": "0.25.1"}, "rule: expected 'dcp_always' or .*, got '0.25.1'", id="rule"
        ),
    ],
)
def test_refuses(argument, message):
    """A wrong argument is named, with what was expected."""
    given = {"requested": "FULL", "platform": "rocm", "dcp_size": 2, "rule": "rocm_dcp"} | argument
    with pytest.raises(ValueError, match=message):
        resolve_cudagraph_mode(given.pop("requested"), **given)


@pytest.mark.parametrize(
    "version, rule",
    [
        ("0.11.0", "dcp_always"),
        ("0.11.2", "dcp_always"),
        ("0.12.0", "dcp_always"),
        ("0.13.0", "rocm_dcp"),
        ("0.14.1", "rocm_dcp"),
        ("0.15.1", "rocm_dcp"),
        ("0.18.1+rocm700", "rocm_dcp"),
        ("v0.22.1", "rocm_dcp"),
        ("0.25.1", "rocm_dcp"),
        ("0.32.0", "pcp_only"),
        ("0.33", "pcp_only"),
        ("0.33.0rc1", "pcp_only"),
    ],
)
def test_rule_of_a_release(version, rule):
    """Releases that were read, and those between two that agree."""
    assert rule_of(version) == rule


@pytest.mark.parametrize("version", ["0.10.2", "0.26.0", "0.29.0", "0.31.1", "0.34.0", "1.0.0"])
def test_rule_of_an_unread_release(version):
    """A release that may have either rule is refused, with where to look."""
    with pytest.raises(ValueError, match=f"the rule of {version} was not read.*platforms/rocm.py"):
        rule_of(version)


@pytest.mark.parametrize("version", ["", "latest", "0", "0.x"])
def test_rule_of_no_release(version):
    """What is no version is refused as such."""
    with pytest.raises(
        ValueError, match=f"vllm_version: expected one like '0.25.1', got '{version}'"
    ):
        rule_of(version)


def test_the_rules_need_no_torch():
    """The module of the rules imports nothing but Python's own library."""
    code = """
import importlib.util, sys
sys.modules["torch"] = sys.modules["triton"] = None
spec = importlib.util.spec_from_file_location("policy", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.rule_of("0.25.1"))
"""
    path = sys.modules[resolve_cudagraph_mode.__module__].__file__
    done = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "rocm_dcp", done.stderr
