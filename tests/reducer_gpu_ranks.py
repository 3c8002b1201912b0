"""What each rank does for test_reducers_gpu.py: one process a GPU, over NCCL or RCCL."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from dcp_lab import AttnState, make_reducer, merge_states
from dcp_lab.reducers import Reducer

NAMES = ("ag_rs", "a2a")
# (T, Hq, D, dtype): decode batches; MLA's latent width; sizes that are no power of two.
SHAPES = [
    (1, 16, 128, torch.bfloat16),
    (16, 16, 128, torch.bfloat16),
    (256, 16, 128, torch.bfloat16),
    (16, 16, 512, torch.bfloat16),
    (13, 24, 80, torch.float16),
    (7, 8, 64, torch.float32),
]
NUM_Q_HEADS, HEAD_DIM, DTYPE = 16, 128, torch.bfloat16


def random_state(
    shape: tuple[int, int, int, torch.dtype], seed: int, device: str = "cpu"
) -> AttnState:
    """Return a state, the same in every process; some rows are empty, their out NaN."""
    num_tokens, num_heads, head_dim, dtype = shape
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(dtype)
    lse = 3 * torch.randn(num_tokens, num_heads, generator=generator)
    empty = torch.rand(num_tokens, num_heads, generator=generator) < 0.2
    out[empty] = torch.nan
    lse[empty] = -torch.inf
    return AttnState(out.to(device), lse.to(device))


def reducer_for(name: str, shape: tuple[int, int, int, torch.dtype], max_tokens: int) -> Reducer:
    _, num_q_heads, head_dim, dtype = shape
    reducer = make_reducer(
        name,
        group=None,
        max_tokens=max_tokens,
        num_q_heads=num_q_heads,
        head_dim=head_dim,
        dtype=dtype,
        device="cuda",
    )
    for buffer in reducer._buffers:
        # All ones is NaN in every float.
        buffer.view(torch.uint8).fill_(255)
    return reducer


def copied(state: AttnState) -> AttnState:
    return AttnState(state.out.clone(), state.lse.clone())


def to_cpu(state: AttnState) -> AttnState:
    return AttnState(state.out.cpu(), state.lse.cpu())


def write(state: AttnState, values: AttnState) -> None:
    """Change a state in place."""
    state.out.copy_(values.out)
    state.lse.copy_(values.lse)


def capture(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return (graph, what the captured call returned); the call was warmed up before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    torch.cuda.synchronize()
    return graph, result


def run(rank: int, size: int) -> dict[Any, Any]:
    """Return what this rank got in each scenario, on the CPU."""
    results: dict[Any, Any] = {}
    for name in NAMES:
        for shape in SHAPES:
            results["eager", name, shape] = eager(name, shape, rank, size)
        results["quiet", name] = quiet_call(name, rank)
        results["launches", name] = launches(name, rank)
        results["moved", name] = captured_buffers(name, rank)
        results["stale", name] = rows_that_come_and_go(name, rank)
        results["small", name] = many_small_replays(name, rank)
        results["past", name] = past_the_captured_size(name, rank)
    torch.cuda.synchronize()
    dist.barrier()
    return results


def eager(
    name: str, shape: tuple[int, int, int, torch.dtype], rank: int, size: int
) -> dict[str, AttnState]:
    """One call with contiguous and one with strided inputs, and a local merge of all states."""
    state = random_state(shape, rank, "cuda")
    reducer = reducer_for(name, shape, shape[0] + 3)
    contiguous = to_cpu(reducer(state))
    home = torch.full((shape[1], shape[0], shape[2] + 16), torch.nan, device="cuda").to(shape[3])
    strided = AttnState(home[..., 8:-8].transpose(0, 1), torch.empty_like(state.lse.T).T)
    write(strided, state)
    heads = slice(rank * reducer.heads_per_rank, (rank + 1) * reducer.heads_per_rank)
    states = [random_state(shape, r, "cuda") for r in range(size)]
    merged = merge_states(*(torch.stack(parts) for parts in zip(*states, strict=True)))
    return {
        "contiguous": contiguous,
        "strided": to_cpu(reducer(strided)),
        "merged": to_cpu(AttnState(merged.out[:, heads], merged.lse[:, heads])),
    }


def quiet_call(name: str, rank: int) -> int:
    """One eager call with host syncs forbidden; return how often the allocator was asked."""
    state = random_state((16, NUM_Q_HEADS, HEAD_DIM, DTYPE), rank, "cuda")
    reducer = reducer_for(name, (16, NUM_Q_HEADS, HEAD_DIM, DTYPE), 16)
    reducer(state)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        reducer(state)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.synchronize()
    return after - before


def launches(name: str, rank: int) -> dict[str, list[str]]:
    """Return what one eager call put on the GPU, for a contiguous and a transposed lse."""
    state = random_state((16, NUM_Q_HEADS, HEAD_DIM, DTYPE), rank, "cuda")
    reducer = reducer_for(name, (16, NUM_Q_HEADS, HEAD_DIM, DTYPE), 16)
    transposed = AttnState(state.out, state.lse.T.contiguous().T)
    found = {}
    for kind, given in (("contiguous", state), ("transposed", transposed)):
        reducer(given)
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            reducer(given)
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text())["traceEvents"]
        on_gpu = ("kernel", "gpu_memcpy", "gpu_memset")
        found[kind] = [event["name"] for event in events if event.get("cat") in on_gpu]
    return found


def captured_buffers(name: str, rank: int) -> list[tuple[AttnState, AttnState]]:
    """Capture T=8, then 4, call T=4096, churn the allocator, replay: (replayed, eager) pairs."""
    reducer = reducer_for(name, (8, NUM_Q_HEADS, HEAD_DIM, DTYPE), 4096)
    inputs, graphs = {}, {}
    for num_tokens in (8, 4):
        shape = (num_tokens, NUM_Q_HEADS, HEAD_DIM, DTYPE)
        state = inputs[num_tokens] = random_state(shape, rank, "cuda")
        reducer(state)
        graphs[num_tokens] = capture(lambda state=state: reducer(state))
    reducer(random_state((4096, NUM_Q_HEADS, HEAD_DIM, DTYPE), rank, "cuda"))
    sizes = [buffer.nbytes for buffer in reducer._buffers]
    sizes += [part.nbytes for state in inputs.values() for part in state]
    for _ in range(3):
        blocks = [torch.full((n // 4,), torch.nan, device="cuda") for n in sizes for _ in range(4)]
        del blocks
    pairs = []
    for turn, num_tokens in enumerate((8, 4, 8, 4)):
        shape = (num_tokens, NUM_Q_HEADS, HEAD_DIM, DTYPE)
        write(inputs[num_tokens], random_state(shape, 100 + 10 * turn + rank, "cuda"))
        graph, result = graphs[num_tokens]
        graph.replay()
        replayed = to_cpu(result)
        pairs.append((replayed, to_cpu(reducer(copied(inputs[num_tokens])))))
    torch.cuda.synchronize()
    for graph, _ in graphs.values():
        graph.reset()
    return pairs


def rows_that_come_and_go(name: str, rank: int) -> list[tuple[AttnState, AttnState]]:
    """Rows that become empty and full again in place between replays: (replayed, eager) pairs."""
    shape = (5, NUM_Q_HEADS, HEAD_DIM, DTYPE)
    reducer, state = reducer_for(name, shape, 5), random_state(shape, rank, "cuda")
    reducer(state)
    graph, result = capture(lambda: reducer(state))
    pairs = []
    for turn in range(4):
        write(state, random_state(shape, 200 + 10 * turn + rank, "cuda"))
        # One row empty on every rank, one on all but one.
        for row, holds in ((turn, False), ((turn + 1) % 5, rank == turn % 2)):
            if not holds:
                state.out[row] = torch.nan
                state.lse[row] = (-torch.inf, torch.inf, torch.nan, -torch.inf)[turn]
        graph.replay()
        replayed = to_cpu(result)
        pairs.append((replayed, to_cpu(reducer(copied(state)))))
    torch.cuda.synchronize()
    graph.reset()
    return pairs


def many_small_replays(name: str, rank: int) -> tuple[AttnState, AttnState]:
    """200 replays at T=1, out and lse written right before the reduce, and 200 eager calls."""
    shape = (1, NUM_Q_HEADS, HEAD_DIM, DTYPE)
    reducer, base = reducer_for(name, shape, 1), random_state(shape, rank, "cuda")
    base = AttnState(torch.nan_to_num(base.out), torch.nan_to_num(base.lse, neginf=0.0))
    state, count = copied(base), torch.zeros(1, device="cuda")

    def step() -> AttnState:
        count.add_(1)
        torch.add(base.lse, count * (0.01 * (rank + 1)), out=state.lse)
        state.out.copy_(base.out + count)
        return reducer(state)

    step()
    graph, result = capture(step)
    histories = []
    for call in (graph.replay, step):
        count.zero_()
        history = AttnState(*(part.new_empty(200, *part.shape) for part in result))
        for i in range(200):
            call()
            history.out[i] = result.out
            history.lse[i] = result.lse
        histories.append(to_cpu(history))
    torch.cuda.synchronize()
    graph.reset()
    return histories[0], histories[1]


def past_the_captured_size(name: str, rank: int) -> dict[str, Any]:
    """Capture T=8; between replays call T=9, which fits max_tokens, and T=10, which does not."""
    shape = (8, NUM_Q_HEADS, HEAD_DIM, DTYPE)
    reducer, state = reducer_for(name, shape, 9), random_state(shape, rank, "cuda")
    before = to_cpu(reducer(state))
    graph, result = capture(lambda: reducer(state))
    found: dict[str, Any] = {"before": before, "replays": []}
    for num_tokens in (9, 10):
        graph.replay()
        found["replays"].append(to_cpu(result))
        larger = random_state((num_tokens, *shape[1:]), rank, "cuda")
        try:
            found[num_tokens] = to_cpu(reducer(larger))
        except ValueError as error:
            found[num_tokens] = str(error)
        graph.replay()
        found["replays"].append(to_cpu(result))
    torch.cuda.synchronize()
    graph.reset()
    return found
