"""direct's kernels on one GPU: ranks are streams, which wait for each other for real."""

from __future__ import annotations

import dataclasses
import math
import time

import pytest
import torch

from dcp_lab import AttnState, merge_states
from dcp_lab.kernels import INTERPRETED
from dcp_lab.kernels.exchange import (
    CONTROL_BYTES,
    ExchangeConfig,
    Failure,
    Mailbox,
    launch_gather,
    launch_reduce,
)
from dcp_lab.ops.device import device_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.unpoisoned,
    pytest.mark.timeout(300),
    pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU"),
]
HEADS, DIM = 4, 128
# One program a tile, and few that loop.
CONFIGS = {
    "flat": ExchangeConfig(tile_bytes=256, max_programs=256),
    "loops": ExchangeConfig(tile_bytes=1024, max_programs=3),
}


@dataclasses.dataclass
class Streams:
    """A group of ranks on one GPU, a stream each."""

    mailboxes: list[Mailbox]
    streams: list[torch.cuda.Stream]
    states: list[AttnState]
    merged: list[AttnState]
    config: ExchangeConfig

    @classmethod
    def make(
        cls,
        size: int,
        num_tokens: int,
        config: ExchangeConfig,
        dtype: torch.dtype = torch.bfloat16,
        timeout_s: float = 20.0,
    ) -> Streams:
        rows = num_tokens * HEADS
        mailboxes = Mailbox.in_one_process(
            size,
            (rows * DIM * dtype.itemsize, rows * 4),
            arch=device_of(torch.device("cuda", 0)).arch,
            timeout_ns=int(timeout_s * 1e9),
            device="cuda",
        )
        states = [
            AttnState(
                torch.randn(num_tokens, size * HEADS, DIM, device="cuda").to(dtype),
                3 * torch.randn(num_tokens, size * HEADS, device="cuda"),
            )
            for _ in range(size)
        ]
        merged = [
            AttnState(
                torch.empty(num_tokens, HEADS, DIM, dtype=dtype, device="cuda"),
                torch.empty(num_tokens, HEADS, device="cuda"),
            )
            for _ in range(size)
        ]
        streams = [torch.cuda.Stream() for _ in range(size)]
        found = cls(mailboxes, streams, states, merged, config)
        found.warm_up()
        return found

    def warm_up(self) -> None:
        """Load the kernels while nobody waits: a module may load only when the GPU is idle."""
        for rank in range(len(self.mailboxes)):
            self.launch(rank, merge=False)
        torch.cuda.synchronize()
        for rank in range(len(self.mailboxes)):
            self.launch(rank)
            torch.cuda.synchronize()
        for mailbox in self.mailboxes:
            assert mailbox.record.item() == 0
            Mailbox.clear(mailbox.memory)
        torch.cuda.synchronize()

    def launch(self, rank: int, **phase: bool) -> None:
        with torch.cuda.stream(self.streams[rank]):
            launch_reduce(
                self.mailboxes[rank],
                out=self.states[rank].out,
                lse=self.states[rank].lse,
                merged_out=self.merged[rank].out,
                merged_lse=self.merged[rank].lse,
                config=self.config,
                **phase,
            )

    def assert_merged(self) -> None:
        outs, lses = (torch.stack(parts) for parts in zip(*self.states, strict=True))
        expected = merge_states(outs, lses)
        got = AttnState(*(torch.cat(parts, 1) for parts in zip(*self.merged, strict=True)))
        torch.testing.assert_close(got.lse, expected.lse, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(got.out, expected.out, rtol=2**-7, atol=2**-9)
        for mailbox in self.mailboxes:
            assert (mailbox.memory[CONTROL_BYTES:] == 255).all()
            assert mailbox.record.item() == 0


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    "size, dtype", [(2, torch.bfloat16), (2, torch.float32), (3, torch.float16)], ids=str
)
def test_exchange(size: int, config: ExchangeConfig, dtype: torch.dtype) -> None:
    """Ranks that run at once, first one, then another launched first, merge each other's rows."""
    ranks = Streams.make(size, 9, config, dtype)
    for turn in range(2 * size):
        for state in ranks.states:
            state.out.normal_()
            state.lse.normal_()
            state.lse[turn % 9] = -math.inf if turn % 2 else math.nan
        torch.cuda.synchronize()
        for rank in range(size):
            ranks.launch((rank + turn) % size)
        torch.cuda.synchronize()
        ranks.assert_merged()
    assert [m.control[0].item() >> 16 for m in ranks.mailboxes] == [2 * size] * size


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_many_replays_with_ranks_out_of_step(config: ExchangeConfig) -> None:
    """2,000 numbered exchanges in graphs, a rank held up now and then, mix no two calls up."""
    ranks = Streams.make(2, 5, config, torch.float32)
    counts = [torch.zeros(1, device="cuda") for _ in range(2)]
    wrong = [torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2)]
    graphs = []
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    for rank in range(2):
        ranks.states[rank].lse.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            for _ in range(20):
                counts[rank].add_(1)
                ranks.states[rank].out.copy_((counts[rank] + rank).expand(5, 2 * HEADS, DIM))
                ranks.launch(rank)
                difference = ranks.merged[rank].out - (counts[rank] + 0.5)
                wrong[rank].add_((difference.abs() > 0.25).sum())
        graphs.append(graph)
    # Every kernel of the graphs is loaded before anyone waits.
    torch.cuda.synchronize()
    for turn in range(100):
        for rank in (turn % 2, 1 - turn % 2):
            with torch.cuda.stream(ranks.streams[rank]):
                if (turn + rank) % 3 == 0:
                    torch.cuda._sleep(100_000)
                graphs[rank].replay()
    torch.cuda.synchronize()
    assert [count.item() for count in counts] == [2000, 2000]
    assert [bad.item() for bad in wrong] == [0, 0]
    assert all(mailbox.record.item() == 0 for mailbox in ranks.mailboxes)
    for graph in graphs:
        graph.reset()


def test_the_wait_is_bounded() -> None:
    """Without its peers a launch ends in NaN after timeout_s, and the next one at once."""
    ranks = Streams.make(3, 9, CONFIGS["flat"], timeout_s=0.5)
    for rank in (0, 1):
        start = time.monotonic()
        ranks.launch(rank)
        torch.cuda.synchronize()
        waited = time.monotonic() - start
        # Rank 1 finds the record of rank 0 and does not wait.
        assert 0.5 <= waited < 5 if rank == 0 else waited < 0.25
        assert ranks.merged[rank].out.isnan().all() and ranks.merged[rank].lse.isnan().all()
    found = Failure.decode(ranks.mailboxes[0].record.item())
    assert found == Failure((1, 2), noticed_by=0, call=0)
    assert Failure.decode(ranks.mailboxes[1].record.item()) == found
    assert Failure.decode(ranks.mailboxes[2].control[16].item()) == found


def test_a_late_rank() -> None:
    """A rank that comes half a second late is waited for."""
    ranks = Streams.make(2, 9, CONFIGS["flat"])
    ranks.launch(0)
    time.sleep(0.5)
    assert not ranks.streams[0].query()
    ranks.launch(1)
    torch.cuda.synchronize()
    ranks.assert_merged()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("heads, dim", [(8, 128), (2, 33)])
def test_gather(heads: int, dim: int, config: ExchangeConfig) -> None:
    """Queries of ranks that run at once arrive whole, in rank order, dense or with gaps."""
    size, num_tokens = 2, 9
    payload = num_tokens * heads * dim * 2
    arch = device_of(torch.device("cuda", 0)).arch
    streams = [torch.cuda.Stream() for _ in range(size)]
    for gap in (0, 7):
        mailboxes = Mailbox.in_one_process(size, (payload,), arch=arch, device="cuda")
        wide = torch.randn(size, num_tokens, heads, dim + gap, device="cuda").bfloat16()
        qs = [wide[rank, :, :, gap:] for rank in range(size)]
        results = [
            torch.zeros(num_tokens, size * heads, dim, device="cuda").bfloat16() for _ in qs
        ]

        def launch(
            rank: int,
            mailboxes: list[Mailbox] = mailboxes,
            qs: list[torch.Tensor] = qs,
            results: list[torch.Tensor] = results,
            **phase: bool,
        ) -> None:
            with torch.cuda.stream(streams[rank]):
                launch_gather(
                    mailboxes[rank], q=qs[rank], gathered=results[rank], config=config, **phase
                )

        torch.cuda.synchronize()
        for rank in range(size):
            launch(rank, merge=False)
        torch.cuda.synchronize()
        for rank in range(size):
            launch(rank)
            torch.cuda.synchronize()
        for mailbox in mailboxes:
            Mailbox.clear(mailbox.memory)
        torch.cuda.synchronize()
        for _ in range(5):
            for rank in range(size):
                results[rank].zero_()
            torch.cuda.synchronize()
            for rank in range(size):
                launch(rank)
            torch.cuda.synchronize()
            for result in results:
                assert torch.equal(result, torch.cat(qs, 1))
