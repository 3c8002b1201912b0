"""Kernels compiled by many processes at once, before one process times them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import io
import multiprocessing
from collections.abc import Callable, Iterable

import torch


def compile_side_by_side(
    build: Callable[..., None], work: Iterable[tuple[object, ...]], workers: int
) -> int:
    """Call build(*item) for each item in processes of their own; return how many of them failed.

    What they compile stays in Triton's cache, which the caller's process reads. Nothing is
    printed and no failure is raised: each shows where it is timed, with its reason.

    Args:
        build: Of a module, so that another process can import it; launches what it compiles.
        work: Arguments that pickle.
        workers: Processes, each with its own context on the GPU.
    """
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        return sum(not done for done in pool.map(functools.partial(_built, build), work))


def _built(build: Callable[..., None], item: tuple[object, ...]) -> bool:
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            build(*item)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    except Exception:
        return False
    return True
