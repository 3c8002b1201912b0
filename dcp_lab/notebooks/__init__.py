"""Find, check and run the lab's notebooks, collect their headline numbers, write the report.

A notebook says what it is in its metadata, `{"dcp_lab": {"kind": "teach"}}`, and under `needs`
(a list of gpu, multigpu, vllm, aiter) what it needs beyond that:

    teach     explains; under a minute on a CPU
    measure   needs a GPU; writes data/measured
    analyse   reads data/ only; runs anywhere

Its last code cell calls `headline` once for each number worth remembering. A cell whose printed
numbers may differ from run to run or machine to machine carries the tag `varies`.
"""

from __future__ import annotations

from dcp_lab.notebooks.books import KINDS, NEEDS, Notebook, available, find, find_root, resolve
from dcp_lab.notebooks.execute import Failure, Listener, Result, gpu_present, run
from dcp_lab.notebooks.exercises import check_answer
from dcp_lab.notebooks.headlines import Headline, headline, machine_line
from dcp_lab.notebooks.parameters import NotebookError, Parameter, read_parameters

__all__ = [
    "KINDS",
    "NEEDS",
    "Failure",
    "Headline",
    "Listener",
    "Notebook",
    "NotebookError",
    "Parameter",
    "Result",
    "available",
    "check_answer",
    "find",
    "find_root",
    "gpu_present",
    "headline",
    "machine_line",
    "read_parameters",
    "resolve",
    "run",
]
