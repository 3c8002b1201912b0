"""CUDA and HIP graphs of a step: capture it, count its launches, say why it cannot be captured."""

from __future__ import annotations

from dcp_lab.graphs.audit import Cause, Finding, Report, audit
from dcp_lab.graphs.capture import CapturedStep, CaptureError, RecordedStep, capture, record
from dcp_lab.graphs.launches import Launches, count_launches, launches_in_trace
from dcp_lab.graphs.policy import ResolvedMode, resolve_cudagraph_mode, rule_of

# The functions audit and capture stand before the modules of the same name: import from here.
__all__ = [
    "CaptureError",
    "CapturedStep",
    "Cause",
    "Finding",
    "Launches",
    "RecordedStep",
    "Report",
    "ResolvedMode",
    "audit",
    "capture",
    "count_launches",
    "launches_in_trace",
    "record",
    "resolve_cudagraph_mode",
    "rule_of",
]
