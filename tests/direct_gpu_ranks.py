"""What each rank does for test_direct_gpu.py: one process a GPU, over peer memory."""

from __future__ import annotations

import gc
import math
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from reducer_gpu_ranks import (
    DTYPE,
    HEAD_DIM,
    NUM_Q_HEADS,
    SHAPES,
    capture,
    captured_buffers,
    copied,
    eager,
    launches,
    many_small_replays,
    past_the_captured_size,
    quiet_call,
    random_state,
    rows_that_come_and_go,
    to_cpu,
    write,
)
from torch.profiler import ProfilerActivity, profile

from dcp_lab import AttnState, make_reducer
from dcp_lab.reducers import make_query_gather
from dcp_lab.reducers.direct import DirectReducer
from dcp_lab.reducers.local_group import _result_path, _write
from dcp_lab.reducers.queries import DirectQueryGather

# (T, heads of a rank, D, dtype): decode batches; MLA's q; nothing a power of two.
Q_SHAPES = [
    (1, 8, 128, torch.bfloat16),
    (16, 8, 128, torch.bfloat16),
    (256, 8, 128, torch.bfloat16),
    (16, 2, 576, torch.bfloat16),
    (13, 3, 80, torch.float16),
    (7, 1, 64, torch.float32),
]
CALLS_AROUND = (2**31, 2**32, 2**47)
SHAPE = (5, NUM_Q_HEADS, HEAD_DIM, DTYPE)


def reducer(max_tokens: int, **options: Any) -> DirectReducer:
    arguments = {
        "group": None,
        "num_q_heads": NUM_Q_HEADS,
        "head_dim": HEAD_DIM,
        "dtype": DTYPE,
        "device": "cuda",
    }
    return DirectReducer(max_tokens=max_tokens, **arguments | options)


def together() -> None:
    """Wait for the device and for all ranks."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def run(rank: int, size: int) -> dict[Any, Any]:
    """Return what this rank got in each scenario in which every rank does its part."""
    results: dict[Any, Any] = {}
    for shape in SHAPES:
        results["eager", shape] = eager("direct", shape, rank, size)
    results["quiet"] = quiet_call("direct", rank)
    results["launches"] = launches("direct", rank)
    results["moved"] = captured_buffers("direct", rank)
    results["stale"] = rows_that_come_and_go("direct", rank)
    results["small"] = many_small_replays("direct", rank)
    results["past"] = past_the_captured_size("direct", rank)
    results["numbered"] = numbered(rank, size)
    results["around"] = {call: around(call, rank, size) for call in CALLS_AROUND}
    results["late"] = late(rank)
    results["alive"] = alive(rank, size)
    results["far"] = far(rank)
    results["alone"] = alone(rank)
    results["memory"] = memory(rank)
    results["disagree"] = raised(lambda: reducer(4 + rank))
    for shape in Q_SHAPES:
        for name in ("nccl", "direct"):
            results["gather", name, shape] = gather(name, shape, rank)
    together()
    return results


def numbered(rank: int, size: int) -> dict[str, int]:
    """10,000 exchanges in graphs, back to back, each payload a number of its own; and eagerly."""
    shape = (3, NUM_Q_HEADS, 64)
    exchange = reducer(3, head_dim=64, dtype=torch.float32)
    state = AttnState(torch.zeros(shape, device="cuda"), torch.zeros(shape[:2], device="cuda"))
    count = torch.zeros(1, device="cuda")
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    mean, lse = (size - 1) / 2, math.log(size)

    def step() -> None:
        count.add_(1)
        state.out.copy_((count + rank).expand(shape))
        out, merged_lse = exchange(state)
        # Of a call off by one it is 1.
        wrong.add_(((out - (count + mean)).abs() > 0.25).sum())
        wrong.add_(((merged_lse - lse).abs() > 1e-5).sum())

    step()
    graph, _ = capture(lambda: [step() for _ in range(100)])
    for _ in range(100):
        graph.replay()
    for _ in range(500):
        step()
    torch.cuda.synchronize()
    exchange.check()
    graph.reset()
    return {"wrong": int(wrong.item()), "calls": int(count.item())}


def around(call: int, rank: int, size: int) -> list[AttnState]:
    """Four exchanges, two of them in a graph, from call number `call` - 2 on."""
    exchange = reducer(5)
    state = random_state(SHAPE, rank, "cuda")
    exchange(state)
    graph, result = capture(lambda: exchange(state))
    together()
    exchange._link.mailbox.control[0] = (call - 2) << 16
    together()
    results = []
    for turn in range(4):
        write(state, random_state(SHAPE, 300 + 10 * turn + rank, "cuda"))
        if turn % 2:
            graph.replay()
        else:
            result = exchange(state)
        results.append(to_cpu(result))
    torch.cuda.synchronize()
    exchange.check()
    graph.reset()
    return results


def late(rank: int) -> tuple[AttnState, float]:
    """The odd ranks come three seconds later than the even ones."""
    exchange, state = reducer(5), random_state(SHAPE, rank, "cuda")
    exchange(state)
    together()
    start = time.monotonic()
    if rank % 2:
        time.sleep(3)
    result = to_cpu(exchange(state))
    exchange.check()
    return result, time.monotonic() - start


def alive(rank: int, size: int) -> dict[str, Any]:
    """Two reducers and two gathers in one graph, each call's result taken at the end."""
    shapes = [SHAPE, (9, NUM_Q_HEADS, HEAD_DIM, DTYPE)]
    reducers = [reducer(shape[0]) for shape in shapes]
    states = [random_state(shape, 10 * i + rank, "cuda") for i, shape in enumerate(shapes)]
    qs = [state.out[:, : NUM_Q_HEADS // size].nan_to_num() for state in states]
    gathers = [
        make_query_gather(
            "direct",
            group=None,
            max_tokens=len(q),
            num_q_heads_local=q.shape[1],
            head_dim=HEAD_DIM,
            dtype=DTYPE,
            device="cuda",
        )
        for q in qs
    ]

    def step() -> tuple[list[torch.Tensor], list[AttnState]]:
        first = [call(q) for call, q in zip(gathers, qs, strict=True)]
        return first, [call(state) for call, state in zip(reducers, states, strict=True)]

    step()
    graph, (gathered, reduced) = capture(step)
    for _ in range(25):
        graph.replay()
    torch.cuda.synchronize()
    found = {
        "qs": [q.cpu() for q in qs],
        "gathered": [q.cpu() for q in gathered],
        "reduced": [to_cpu(state) for state in reduced],
    }
    graph.reset()
    return found


def far(rank: int) -> list[AttnState]:
    """Calls on slots that lie past the mailbox's 2^31st word of 32 bits, in both parities."""
    shape = (2, NUM_Q_HEADS, 512, DTYPE)
    max_tokens = 2**31 // (NUM_Q_HEADS // 2 * 256) // 3 + 1
    exchange, state = reducer(max_tokens, head_dim=512), random_state(shape, rank, "cuda")
    return [to_cpu(exchange(state)) for _ in range(3)]


def alone(rank: int) -> tuple[AttnState, AttnState]:
    """Groups of one rank each: (the state, what came back)."""
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    state = random_state(SHAPE, rank, "cuda")
    result = reducer(5, group=groups[rank])(state)
    return to_cpu(state), to_cpu(result)


def memory(rank: int) -> dict[str, tuple[int, int]]:
    """Return (memory_bytes, what the device's free memory went down by) of large exchanges."""
    found = {}
    for name in ("reducer", "gather"):
        gc.collect()
        torch.cuda.empty_cache()
        together()
        before = torch.cuda.mem_get_info()[0]
        if name == "reducer":
            exchange = reducer(65536)
        else:
            exchange = DirectQueryGather(
                group=None,
                max_tokens=65536,
                num_q_heads_local=8,
                head_dim=128,
                dtype=DTYPE,
                device="cuda",
            )
        together()
        found[name] = (exchange.memory_bytes(), before - torch.cuda.mem_get_info()[0])
        del exchange
    return found


def gather(name: str, shape: tuple[int, int, int, torch.dtype], rank: int) -> dict[str, Any]:
    """One gather: eager, strided, replayed, and what a call put on the GPU."""
    num_tokens, num_heads, head_dim, dtype = shape
    random = torch.Generator().manual_seed(rank)
    q = torch.randn(num_tokens, num_heads, head_dim, generator=random).to("cuda", dtype)
    call = make_query_gather(
        name,
        group=None,
        max_tokens=num_tokens + 3,
        num_q_heads_local=num_heads,
        head_dim=head_dim,
        dtype=dtype,
        device="cuda",
    )
    found: dict[str, Any] = {"q": q.cpu(), "eager": call(q).cpu()}
    home = torch.full((num_heads, num_tokens, head_dim + 16), math.nan, device="cuda").to(dtype)
    strided = home[..., 8:-8].transpose(0, 1)
    strided.copy_(q)
    found["strided"] = call(strided).cpu()
    found["empty"] = list(call(q[:0]).shape)
    graph, result = capture(lambda: call(q))
    q.mul_(2)
    for _ in range(50):
        graph.replay()
    found["replayed"] = result.cpu()
    graph.reset()
    together()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call(q)
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    # "nccl:..." is torch's note on the device's timeline that a collective runs, no launch.
    found["launches"] = [
        e.name
        for e in profiler.events()
        if e.device_type == on_device and not e.name.startswith("nccl:")
    ]
    return found


def silent(rank: int, size: int) -> dict[str, Any]:
    """The last rank makes no call; then all use another reducer, and the last its failed one."""
    exchange, other = reducer(5, timeout_s=1.5), reducer(5)
    state = random_state(SHAPE, rank, "cuda")
    before = to_cpu(exchange(state))
    other(state)
    graph, replayed = capture(lambda: exchange(state))
    together()
    found: dict[str, Any] = {"before": before}
    if rank < size - 1:
        start = time.monotonic()
        result = exchange(state)
        launched = time.monotonic() - start
        torch.cuda.synchronize()
        found["waited"] = (launched, time.monotonic() - start)
        found["result"] = to_cpu(result)
        found["check"] = raised(exchange.check)
        found["next"] = raised(lambda: exchange(state))
        # A step of many layers must not wait anew in each.
        start = time.monotonic()
        for _ in range(94):
            graph.replay()
        torch.cuda.synchronize()
        found["replays"] = time.monotonic() - start
        found["replayed"] = to_cpu(replayed)
    together()
    found["other"] = to_cpu(other(state))
    found["other check"] = raised(other.check)
    if rank == size - 1:
        found["check"] = raised(exchange.check)
        found["result"] = to_cpu(exchange(state))
        found["next"] = raised(lambda: exchange(state))
    together()
    graph.reset()
    return found


def fewer(rank: int, size: int) -> list[str]:
    """The last rank makes a call of no tokens, then of fewer than the others."""
    found = []
    for tokens in (0, 2):
        exchange, state = reducer(5, timeout_s=1.0), random_state(SHAPE, rank, "cuda")
        if rank == size - 1:
            state = AttnState(state.out[:tokens], state.lse[:tokens])
        exchange(state)
        torch.cuda.synchronize()
        found.append(raised(exchange.check))
        together()
    return found


def leave(rank: int, result: object) -> NoReturn:
    """Leave a result, then die as if killed: nothing is closed, freed or told."""
    _write(_result_path(Path(sys.argv[1]), rank), pickle.dumps(result))
    os._exit(0)


def dies(rank: int, size: int) -> NoReturn:
    """The last rank dies after some exchanges; return how the next call of the others ended."""
    exchange = reducer(5, timeout_s=2.0)
    gather_q = DirectQueryGather(
        group=None,
        max_tokens=5,
        num_q_heads_local=NUM_Q_HEADS // size,
        head_dim=HEAD_DIM,
        dtype=DTYPE,
        device="cuda",
        timeout_s=2.0,
    )
    state = random_state(SHAPE, rank, "cuda")
    q = copied(state).out[:, : NUM_Q_HEADS // size]
    for _ in range(3):
        exchange(state)
        gather_q(q)
    together()
    if rank == size - 1:
        leave(rank, "died")
    time.sleep(1)
    found: dict[str, Any] = {}
    for name, call, given in (("reduce", exchange, state), ("gather", gather_q, q)):
        start = time.monotonic()
        call(given)
        torch.cuda.synchronize()
        found[name] = (time.monotonic() - start, raised(call.check))
    # The process and its device are as good as before.
    found["device"] = torch.ones(1000, device="cuda").cumsum(0)[-1].item()
    leave(rank, found)


def reduces_like_a2a(rank: int, size: int) -> list[tuple[AttnState, AttnState]]:
    """Return (direct, a2a) results of one state after another, for any number of GPUs."""
    pairs = []
    arguments = {
        "group": None,
        "max_tokens": 33,
        "num_q_heads": 2 * size,
        "head_dim": 128,
        "dtype": torch.bfloat16,
        "device": "cuda",
    }
    reducers = [make_reducer(name, **arguments) for name in ("direct", "a2a")]
    for turn, num_tokens in enumerate((33, 1, 33, 7)):
        state = random_state((num_tokens, 2 * size, 128, torch.bfloat16), 20 * turn + rank, "cuda")
        pairs.append(tuple(to_cpu(call(state)) for call in reducers))
    together()
    return pairs
