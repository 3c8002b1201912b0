"""direct on ranks that share this process: slots, parities, calls counted past 2^31, failures.

The kernels wait for other ranks, and programs of one process run one after the other; so each
exchange here is launched twice: every rank sends, then every rank takes what came.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_lab import AttnState, make_reducer, merge_states
from dcp_lab.kernels import INTERPRETED, exchange
from dcp_lab.kernels.exchange import (
    CONTROL_BYTES,
    PROGRAMS_PER_SM,
    ExchangeConfig,
    Failure,
    Mailbox,
    launch_gather,
    launch_reduce,
)
from dcp_lab.reducers import direct, make_query_gather
from dcp_lab.reducers.direct import DirectReducer, Link
from dcp_lab.reducers.queries import DirectQueryGather
from dcp_lab.reference import reference_merge
from dcp_lab.testing import assert_within_budget

pytestmark = pytest.mark.skipif(
    not INTERPRETED, reason="needs TRITON_INTERPRET=1: these ranks are CPU tensors"
)
# Named in the mmap module from Python 3.13 on.
MAP_NORESERVE = 0x4000
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Tiles of one or few rows and more tiles than programs: every loop turns more than once.
SMALL = ExchangeConfig(tile_bytes=64, max_programs=2)
WHOLE = ExchangeConfig(tile_bytes=1 << 10, max_programs=64)
dtype_id = {"ids": lambda dtype: str(dtype).removeprefix("torch.")}


@dataclasses.dataclass
class Ranks:
    """A group in one process that reduces out [T, size * H, D]."""

    mailboxes: list[Mailbox]
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    config: ExchangeConfig = WHOLE

    @classmethod
    def make(
        cls,
        size: int,
        max_tokens: int,
        num_heads: int = 3,
        head_dim: int = 16,
        dtype: torch.dtype = torch.float32,
        config: ExchangeConfig = WHOLE,
        timeout_ns: int = 10**8,
    ) -> Ranks:
        rows = max_tokens * num_heads
        mailboxes = Mailbox.in_one_process(
            size,
            (rows * head_dim * dtype.itemsize, rows * 4),
            arch="interpreter",
            timeout_ns=timeout_ns,
        )
        return cls(mailboxes, num_heads, head_dim, dtype, config)

    @property
    def size(self) -> int:
        return len(self.mailboxes)

    def random(self, num_tokens: int, seed: int) -> list[AttnState]:
        """Return a state a rank over all heads; some rows are empty, their out NaN."""
        random = torch.Generator().manual_seed(seed)
        states = []
        for _ in range(self.size):
            shape = (num_tokens, self.size * self.num_heads)
            out = torch.randn(*shape, self.head_dim, generator=random).to(self.dtype)
            lse = 3 * torch.randn(shape, generator=random)
            empty = torch.rand(shape, generator=random) < 0.2
            out[empty], lse[empty] = math.nan, -math.inf
            states.append(AttnState(out, lse))
        return states

    def launch(self, rank: int, state: AttnState, merged: AttnState | None, **phase: bool) -> None:
        """Send a rank's state, or merge what was sent to it into merged."""
        if merged is None:
            merged = self.empty_result(len(state.out))
        launch_reduce(
            self.mailboxes[rank],
            out=state.out,
            lse=state.lse,
            merged_out=merged.out,
            merged_lse=merged.lse,
            config=self.config,
            **phase,
        )

    def empty_result(self, num_tokens: int) -> AttnState:
        out = torch.full((num_tokens, self.num_heads, self.head_dim), 7.0, dtype=self.dtype)
        return AttnState(out, torch.full((num_tokens, self.num_heads), 7.0))

    def send(self, rank: int, state: AttnState) -> None:
        self.launch(rank, state, None, merge=False)

    def merge(self, rank: int, state: AttnState) -> AttnState:
        merged = self.empty_result(len(state.out))
        self.launch(rank, state, merged, send=False)
        return merged

    def reduce(self, states: list[AttnState]) -> AttnState:
        """Exchange; return all heads, put together in rank order."""
        for rank, state in enumerate(states):
            self.send(rank, state)
        return joined([self.merge(rank, state) for rank, state in enumerate(states)])

    def calls(self) -> list[int]:
        return [mailbox.control[0].item() >> 16 for mailbox in self.mailboxes]

    def preset(self, call: int) -> None:
        """Make the next call number `call`, on every rank."""
        for mailbox in self.mailboxes:
            mailbox.control[0] = call << 16 if call < 2**47 else (call - 2**48) << 16


def joined(parts: list[AttnState]) -> AttnState:
    return AttnState(*(torch.cat(tensors, 1) for tensors in zip(*parts, strict=True)))


def merged(states: list[AttnState]) -> AttnState:
    return merge_states(*(torch.stack(parts) for parts in zip(*states, strict=True)))


def same_bits(got: AttnState, expected: AttnState) -> bool:
    pairs = zip(got, expected, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def all_ones(tensor: torch.Tensor) -> bool:
    return bool((tensor.contiguous().view(torch.uint8) == 255).all())


@pytest.mark.parametrize("dtype", DTYPES, **dtype_id)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_reduce_is_merge_states(size: int, dtype: torch.dtype) -> None:
    """The exchange carries every bit: its result is that of one local merge, heads in order."""
    ranks = Ranks.make(size, 5, num_heads=2, head_dim=80, dtype=dtype)
    for call, num_tokens in enumerate((5, 1)):
        states = ranks.random(num_tokens, seed=call)
        assert same_bits(ranks.reduce(states), merged(states))


@pytest.mark.parametrize("head_dim", [1, 16, 96, 512])
def test_head_dims(head_dim: int) -> None:
    """Rows that fill no vector, several, or a whole tile are reduced right."""
    ranks = Ranks.make(2, 3, head_dim=head_dim, dtype=torch.float16, config=SMALL)
    states = ranks.random(3, seed=head_dim)
    assert same_bits(ranks.reduce(states), merged(states))


@pytest.mark.parametrize("size", [8, 16])
def test_large_groups(size: int) -> None:
    """Groups of 8 and 16 merge in rank order, the last rank's bit included."""
    ranks = Ranks.make(size, 1, num_heads=1, dtype=torch.bfloat16)
    states = ranks.random(1, seed=size)
    assert same_bits(ranks.reduce(states), merged(states))


def test_equals_oracle() -> None:
    """The result is the float64 merge within the error budget; a row nobody saw is 0, -inf."""
    ranks = Ranks.make(3, 5, dtype=torch.float16)
    states = ranks.random(5, seed=1)
    for rank, state in enumerate(states):
        state.lse[2] = (-math.inf, math.inf, math.nan)[rank]
        state.out[2] = math.nan
    got = ranks.reduce(states)
    reference = reference_merge(*(list(parts) for parts in zip(*states, strict=True)))
    outs, lses = (torch.stack(parts) for parts in zip(*states, strict=True))
    lses = torch.where(lses < math.inf, lses, -math.inf)
    lse = torch.logsumexp(lses, 0)
    weight = torch.where(lses > -math.inf, torch.exp(lses - lse), 0.0).to(outs.dtype)
    out = (torch.where((lses > -math.inf)[..., None], outs, 0) * weight[..., None]).sum(0)
    assert_within_budget("direct", got, reference, AttnState(out, lse))
    assert (got.out[2] == 0).all() and (got.lse[2] == -math.inf).all()


@pytest.mark.parametrize("gap", [8, 7], ids=["even", "odd"])
@pytest.mark.parametrize("head_dim", [64, 17])
def test_strided_inputs_stay(head_dim: int, gap: int) -> None:
    """Heads outermost, gaps between rows and a transposed lse give the same bits, unchanged.

    Odd strides: the two numbers of a 32-bit word lie across two words.
    """
    ranks = Ranks.make(2, 3, num_heads=1, head_dim=head_dim, dtype=torch.bfloat16, config=SMALL)
    dense = ranks.random(3, seed=3)
    strided = []
    for state in dense:
        home = torch.full((2, 3, head_dim + gap), math.nan, dtype=torch.bfloat16)
        view = AttnState(home[..., gap - 4 : -4].transpose(0, 1), torch.empty(2, 3).T)
        view.out.copy_(state.out)
        view.lse.copy_(state.lse)
        strided.append(view)
    # One rank's tensors may lie otherwise than another's.
    assert same_bits(ranks.reduce([strided[0], dense[1]]), merged(dense))
    assert same_bits(ranks.reduce(strided), merged(dense))
    for view, state in zip(strided, dense, strict=True):
        assert same_bits(AttnState(*(part.contiguous() for part in view)), state)


@pytest.mark.parametrize("config", [WHOLE, SMALL], ids=["whole", "loops"])
def test_any_number_of_tokens(config: ExchangeConfig) -> None:
    """T may change from call to call, and whatever the programs of a launch, it counts as one."""
    ranks = Ranks.make(2, 20, num_heads=2, dtype=torch.float16, head_dim=32, config=config)
    for call, num_tokens in enumerate((20, 1, 5, 20, 2, 1, 17)):
        states = ranks.random(num_tokens, seed=call)
        assert ranks.calls() == [call, call]
        assert same_bits(ranks.reduce(states), merged(states))
        for mailbox in ranks.mailboxes:
            # Every slot was given back, and only the count was left behind.
            assert all_ones(mailbox.memory[CONTROL_BYTES:])
            assert not mailbox.control[1:].any()
            assert mailbox.record.item() == 0


def test_slot_layout() -> None:
    """A payload lies at [parity][source rank][token][local head][D], its LSE bits at the same."""
    size, num_heads, head_dim, num_tokens = 3, 2, 16, 4
    ranks = Ranks.make(size, 6, num_heads, head_dim)
    # Every element says where it came from: rank, token, head, column.
    count = num_tokens * size * num_heads * head_dim
    states = []
    for rank in range(size):
        out = (rank * count + torch.arange(count)).float()
        out = out.view(num_tokens, size * num_heads, head_dim)
        states.append(AttnState(out, -out[..., 0] - 1))
    for call in (0, 1):
        for rank, state in enumerate(states):
            ranks.send(rank, state)
        for rank, mailbox in enumerate(ranks.mailboxes):
            heads = slice(rank * num_heads, (rank + 1) * num_heads)
            for region, part in enumerate(("out", "lse")):
                slots = mailbox.slots(region, torch.float32)
                for source in range(size):
                    got = slots[call % 2, source]
                    sent = getattr(states[source], part)[:, heads].flatten()
                    if source == rank:
                        sent = sent[:0]
                    assert torch.equal(got[: len(sent)], sent)
                    assert all_ones(got[len(sent) :])
                assert all_ones(slots[1 - call % 2])
        for rank, state in enumerate(states):
            ranks.merge(rank, state)


def test_a_peer_may_be_one_call_ahead() -> None:
    """What a fast rank sends for the next call leaves the slots of this one alone."""
    ranks = Ranks.make(3, 4)
    first, second = ranks.random(4, seed=1), ranks.random(4, seed=2)
    for rank, state in enumerate(first):
        ranks.send(rank, state)
    # Rank 2 is done with the first call and has sent its second before the others merge.
    last = ranks.merge(2, first[2])
    ranks.send(2, second[2])
    got = joined([ranks.merge(rank, first[rank]) for rank in (0, 1)] + [last])
    assert same_bits(got, merged(first))
    for rank in (0, 1):
        ranks.send(rank, second[rank])
    got = joined([ranks.merge(rank, state) for rank, state in enumerate(second)])
    assert same_bits(got, merged(second))


@pytest.mark.parametrize(
    "call", [2**15, 2**31, 2**32, 2**47], ids=["2^15", "2^31", "2^32", "2^47"]
)
def test_calls_past_every_power(call: int) -> None:
    """Calls around 2^31, 2^32 and the word's own end exchange right, the parity in turn."""
    ranks = Ranks.make(2, 3, num_heads=1, config=SMALL)
    ranks.preset(call - 2)
    for turn in range(5):
        states = ranks.random(3, seed=turn)
        for rank, state in enumerate(states):
            ranks.send(rank, state)
        parity = turn % 2
        for mailbox in ranks.mailboxes:
            assert all_ones(mailbox.slots(0, torch.float32)[1 - parity])
            assert not all_ones(mailbox.slots(0, torch.float32)[parity])
        got = joined([ranks.merge(rank, state) for rank, state in enumerate(states)])
        assert same_bits(got, merged(states))
        expected = call - 2 + turn + 1
        assert ranks.calls() == [expected if expected < 2**47 else expected - 2**48] * 2


@pytest.mark.parametrize("dtype", DTYPES, **dtype_id)
def test_all_ones_are_a_nan(dtype: torch.dtype) -> None:
    """A payload of all ones, which says "not there" in a slot, arrives as the NaN that it is."""
    ranks = Ranks.make(2, 2, dtype=dtype)
    states = [AttnState(state.out, torch.zeros(2, 6)) for state in ranks.random(2, seed=0)]
    for state in states:
        state.out.nan_to_num_()
    states[1].out[0, 0].view(torch.uint8).fill_(255)
    states[0].out[1, 5].view(torch.uint8).fill_(255)
    # An LSE of all ones is NaN: an empty shard.
    states[1].lse[1, 1:2].view(torch.uint8).fill_(255)
    got = ranks.reduce(states)
    nan = torch.zeros(2, 6, dtype=torch.bool)
    nan[0, 0] = nan[1, 5] = True
    assert torch.equal(got.out.isnan().all(-1), nan)
    assert torch.equal(got.out.isnan().any(-1), nan)
    assert got.lse[1, 1] == 0.0 and not got.lse.isnan().any()
    for mailbox in ranks.mailboxes:
        assert mailbox.record.item() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that is taken when touched")
def test_offsets_past_two_to_the_31() -> None:
    """Slots behind the 2^31st word of a mailbox are the ones that are used."""
    size, num_heads, head_dim, dtype = 2, 1, 512, torch.float16
    # Words of 32 bits.
    max_tokens = 2**31 // (head_dim // 2) // 3 + 1
    payloads = (max_tokens * head_dim * 2, max_tokens * 4)
    offsets, slots, total = Mailbox.layout(size, payloads)
    # Only what is touched takes memory.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    maps = [mmap.mmap(-1, total, flags) for _ in range(size)]
    memories = [torch.frombuffer(memory, dtype=torch.uint8) for memory in maps]
    addresses = torch.tensor([memory.data_ptr() for memory in memories])
    mailboxes = [
        Mailbox(
            rank=rank,
            size=size,
            memory=memory,
            addresses=addresses,
            record=torch.zeros(1, dtype=torch.int64),
            offsets=tuple(offsets),
            slot_bytes=tuple(slots),
            timeout_ns=10**8,
            arch="interpreter",
        )
        for rank, memory in enumerate(memories)
    ]
    ranks = Ranks(mailboxes, num_heads, head_dim, dtype)
    # Parity 1, so that rank 1's slot at rank 0 is number 3 of 4.
    ranks.preset(1)
    states = [AttnState(s.out.nan_to_num(), s.lse) for s in ranks.random(2, seed=0)]
    for mailbox in mailboxes:
        for region, words in ((0, torch.float16), (1, torch.float32)):
            mailbox.slots(region, words)[1, :, : 2 * head_dim].view(torch.uint8).fill_(255)
    assert 3 * slots[0] // 4 > 2**31
    assert same_bits(ranks.reduce(states), merged(states))
    # The same memory as a gather's, its one region as large as both.
    mailboxes = [
        dataclasses.replace(mailbox, offsets=(offsets[0],), slot_bytes=(slots[0],))
        for mailbox in mailboxes
    ]
    ranks.preset(1)
    for mailbox in mailboxes:
        mailbox.slots(0, torch.float16)[1, :, : 2 * head_dim].view(torch.uint8).fill_(255)
    qs = [torch.randn(2, 1, head_dim).half() for _ in range(size)]
    for gathered in gather_in_process(mailboxes, qs, WHOLE):
        assert torch.equal(gathered, torch.cat(qs, 1))


# ---------------------------------------------------------------------------- failures


def fail_link(mailbox: Mailbox) -> Link:
    """Return a mailbox as a reducer holds it."""
    return Link(mailbox, None, mailbox.timeout_ns / 1e9, mailbox.record.numpy())


@pytest.mark.parametrize("missing", ["all", "out", "lse"])
@pytest.mark.parametrize("silent", [0, 2])
def test_a_silent_rank_is_named(silent: int, missing: str) -> None:
    """The wait ends: NaN for the caller, the silent rank and the call in everybody's record."""
    ranks = Ranks.make(3, 2, num_heads=1)
    ranks.reduce(ranks.random(2, seed=0))
    states = ranks.random(2, seed=1)
    for rank, state in enumerate(states):
        if rank != silent:
            ranks.send(rank, state)
    waiting = 1
    if missing != "all":
        # One word of what it sent has not come.
        ranks.send(silent, states[silent])
        region = ("out", "lse").index(missing)
        slot = ranks.mailboxes[waiting].slots(region, torch.float32)[1, silent]
        slot[1:2].view(torch.uint8).fill_(255)
    got = ranks.merge(waiting, states[waiting])
    assert got.out.isnan().all() and got.lse.isnan().all()
    failure = Failure((silent,), noticed_by=waiting, call=1)
    assert Failure.decode(ranks.mailboxes[waiting].record.item()) == failure
    for mailbox in ranks.mailboxes:
        assert Failure.decode(mailbox.control[16].item()) == failure
    with pytest.raises(
        RuntimeError,
        match=rf"direct: rank {silent} of 3 sent nothing, or not all, for 0.1 s in call 1, on "
        rf"which rank 1 waited \(this is rank 1\).*make the reducer anew",
    ):
        fail_link(ranks.mailboxes[waiting]).check()


def test_only_the_missing_rows_are_nan_and_only_once_waited_for() -> None:
    """Several silent ranks are all named; a failed mailbox waits no more and sends no more."""
    ranks = Ranks.make(4, 1, num_heads=1)
    states = ranks.random(1, seed=0)
    ranks.send(0, states[0])
    ranks.send(2, states[2])
    ranks.merge(0, states[0])
    assert Failure.decode(ranks.mailboxes[0].record.item()) == Failure((1, 3), 0, 0)
    # Rank 2 finds the record in its control word: it names the same ranks, without a wait of its
    # own, and writes to nobody.
    untouched = [mailbox.memory.clone() for mailbox in ranks.mailboxes]
    ranks.send(2, states[2])
    for mailbox, memory in zip(ranks.mailboxes, untouched, strict=True):
        assert torch.equal(mailbox.memory, memory)
    assert ranks.mailboxes[2].record.item() == 0
    fail_link(ranks.mailboxes[2]).check()
    got = ranks.merge(2, states[2])
    assert got.out.isnan().all() and got.lse.isnan().all()
    with pytest.raises(RuntimeError, match="rank 1, rank 3 of 4 .*rank 0 waited .this is rank 2"):
        fail_link(ranks.mailboxes[2]).check()
    # The silent rank itself learns it from its first call after.
    ranks.send(1, states[1])
    assert ranks.merge(1, states[1]).lse.isnan().all()
    with pytest.raises(RuntimeError, match="rank 1, rank 3 of 4 .*this is rank 1"):
        fail_link(ranks.mailboxes[1]).check()


def test_a_failed_mailbox_gives_nan_without_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call on a failed mailbox looks at its slots once, gives NaN even if all came, and says so.

    Its host may not know yet: it was a peer that failed.
    """
    ranks = Ranks.make(2, 2)
    states = ranks.random(2, seed=0)
    for rank, state in enumerate(states):
        ranks.send(rank, state)
    ranks.mailboxes[0].control[16] = 1 << 24 | 1 << 16 | 1
    got = ranks.merge(0, states[0])
    assert got.out.isnan().all() and got.lse.isnan().all()
    assert Failure.decode(ranks.mailboxes[0].record.item()) == Failure((0,), 1, 1)
    looks = []
    load_slots = exchange._load_slots
    monkeypatch.setattr(exchange, "_load_slots", lambda *a: looks.append(1) or load_slots(*a))
    # Nothing came this time; the timeout is 100 polls.
    assert ranks.merge(0, states[0]).lse.isnan().all()
    tiles = 2 * 3 / exchange.MAX_TILE_ROWS
    assert len(looks) == math.ceil(tiles)


def test_a_call_of_fewer_tokens_is_a_silent_rank() -> None:
    """A rank whose T is smaller, 0 included, is named by the rank that wanted more of it."""
    for tokens in (0, 2):
        ranks = Ranks.make(2, 3, num_heads=1, config=SMALL)
        states = ranks.random(3, seed=0)
        if tokens:
            ranks.send(1, AttnState(states[1].out[:tokens], states[1].lse[:tokens]))
        got = ranks.merge(0, states[0])
        assert got.lse[tokens:].isnan().all()
        assert Failure.decode(ranks.mailboxes[0].record.item()) == Failure((1,), 0, 0)


def test_a_late_rank_is_no_failure() -> None:
    """A wait that goes on through many polls ends well when the peer's words come at last."""
    ranks = Ranks.make(2, 2, timeout_ns=60 * 10**9)
    states = ranks.random(2, seed=0)
    for rank, state in enumerate(states):
        ranks.send(rank, state)
    late = ranks.mailboxes[0].memory
    arrived = late[CONTROL_BYTES:].clone()
    late[CONTROL_BYTES:].fill_(255)
    # The words come a few at a time, out of order.
    pieces = torch.randperm(len(arrived) // 4).split(29)

    def deliver() -> None:
        words, source = late[CONTROL_BYTES:].view(torch.int32), arrived.view(torch.int32)
        for piece in pieces:
            time.sleep(0.01)
            words[piece] = source[piece]

    thread = threading.Thread(target=deliver)
    start = time.monotonic()
    thread.start()
    first = ranks.merge(0, states[0])
    assert time.monotonic() - start > 0.01 * len(pieces)
    thread.join()
    assert same_bits(joined([first, ranks.merge(1, states[1])]), merged(states))
    assert all(mailbox.record.item() == 0 for mailbox in ranks.mailboxes)
    fail_link(ranks.mailboxes[0]).check()


def test_failure_record_round_trip() -> None:
    """A record holds up to 16 silent ranks, who noticed, and the call."""
    assert Failure.decode(0) is None
    assert Failure.decode(1 | 15 << 16 | 0 << 24) == Failure((0,), 15, 0)
    assert Failure.decode(0xFFFF | (2**38 - 1) << 24) == Failure(tuple(range(16)), 0, 2**38 - 1)


# ---------------------------------------------------------------------------- queries


def gather_in_process(
    mailboxes: list[Mailbox], qs: list[torch.Tensor], config: ExchangeConfig
) -> list[torch.Tensor]:
    num_tokens, num_heads, head_dim = qs[0].shape
    shape = (num_tokens, len(qs) * num_heads, head_dim)
    results = [torch.full(shape, 7.0, dtype=qs[0].dtype) for _ in qs]
    for phase in ({"merge": False}, {"send": False}):
        for mailbox, q, gathered in zip(mailboxes, qs, results, strict=True):
            launch_gather(mailbox, q=q, gathered=gathered, config=config, **phase)
    return results


@pytest.mark.parametrize("dtype", DTYPES, **dtype_id)
@pytest.mark.parametrize(
    "size, num_heads, head_dim", [(2, 3, 16), (3, 1, 576), (5, 2, 1)], ids=["R2", "R3", "R5"]
)
def test_gather_is_cat(size: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Every rank gets all heads bit for bit, in rank order, whatever T and the programs."""
    payload = 5 * num_heads * head_dim * dtype.itemsize
    mailboxes = Mailbox.in_one_process(size, (payload,), arch="interpreter")
    for call, num_tokens in enumerate((5, 2, 5, 1)):
        qs = [torch.randn(num_tokens, num_heads, head_dim).to(dtype) for _ in range(size)]
        tile = ExchangeConfig(tile_bytes=256, max_programs=2)
        for gathered in gather_in_process(mailboxes, qs, tile if call < 2 else WHOLE):
            assert torch.equal(gathered, torch.cat(qs, 1))
        for mailbox in mailboxes:
            assert mailbox.control[0].item() == (call + 1) << 16
            assert all_ones(mailbox.memory[CONTROL_BYTES:])


@pytest.mark.parametrize("num_heads, head_dim", [(2, 32), (2, 17), (1, 18), (3, 5)])
@pytest.mark.parametrize("gap", [8, 7], ids=["even", "odd"])
def test_gather_takes_strides_and_nan(num_heads: int, head_dim: int, gap: int) -> None:
    """A q cut from a wider tensor is gathered like its copy, and all ones arrive as NaN."""
    payload = 5 * num_heads * head_dim * 2
    mailboxes = Mailbox.in_one_process(2, (payload,), arch="interpreter")
    wide = [torch.randn(num_heads, 5, head_dim + gap).half() for _ in range(2)]
    qs = [w.transpose(0, 1)[..., gap - 4 : -4] for w in wide]
    # Tokens apart, heads together.
    tokens = torch.randn(5, num_heads * head_dim + gap).half()
    qs[0] = tokens[:, gap:].unflatten(1, (num_heads, head_dim))
    qs[1][3, -1].fill_(1).view(torch.int16).fill_(-1)
    expected = torch.cat(qs, 1)
    for gathered in gather_in_process(mailboxes, qs, SMALL):
        assert torch.equal(gathered.isnan(), expected.isnan()) and expected.isnan().any()
        assert torch.equal(gathered.nan_to_num(), expected.nan_to_num())
    for mailbox in mailboxes:
        assert mailbox.record.item() == 0


def test_gather_names_a_silent_rank() -> None:
    """A gather whose peer sends nothing ends too, gives NaN and names it."""
    mailboxes = Mailbox.in_one_process(3, (4 * 16 * 4,), arch="interpreter", timeout_ns=10**8)
    q, gathered = torch.randn(4, 1, 16), torch.zeros(4, 3, 16)
    for rank in (0, 1):
        launch_gather(mailboxes[rank], q=q, gathered=gathered, config=WHOLE, merge=False)
    launch_gather(mailboxes[0], q=q, gathered=gathered, config=WHOLE, send=False)
    assert gathered.isnan().all()
    assert Failure.decode(mailboxes[0].record.item()) == Failure((2,), 0, 0)
    with pytest.raises(RuntimeError, match="rank 2 of 3 sent nothing"):
        fail_link(mailboxes[0]).check()
    # Who has failed writes to nobody.
    untouched = [mailbox.memory.clone() for mailbox in mailboxes]
    launch_gather(mailboxes[1], q=q, gathered=gathered, config=WHOLE, merge=False)
    for mailbox, memory in zip(mailboxes, untouched, strict=True):
        assert torch.equal(mailbox.memory, memory)


def test_nccl_gather_on_gloo_ranks() -> None:
    """The collective gather gives torch.cat on real ranks, for any T, strides and dtype."""
    from dcp_lab.reducers.local_group import run_ranks

    for size in (2, 3):
        results = run_ranks("direct_ranks:gather_queries", size)
        for name in results[0]:
            parts = [result[name] for result in results]
            expected = torch.cat([q for q, _ in parts], 1)
            for _, gathered in parts:
                assert torch.equal(gathered, expected), name


# ---------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("payload", [16, 32 << 10, 128 << 10, 512 << 10, 8 << 20])
def test_config_keeps_all_programs_resident(payload: int) -> None:
    """No launch has more programs than an otherwise empty device holds at once."""
    config = ExchangeConfig.from_payload(payload, num_sms=132)
    assert config.max_programs <= PROGRAMS_PER_SM * 132
    assert 256 <= config.tile_bytes <= 1024
    # Registers: 64 K a multiprocessor, 255 at most a lane, in steps of 8 a warp of 32.
    assert PROGRAMS_PER_SM * 32 * 256 <= 65536


ARGUMENTS: dict[str, Any] = {
    "group": None,
    "max_tokens": 4,
    "head_dim": 64,
    "dtype": torch.float32,
    "device": "cpu",
}


@pytest.fixture
def lone_group(tmp_path: Path):
    """A default group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def test_too_many_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure record has room for 16 ranks; more are refused before anything is made."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 17)
    with pytest.raises(ValueError, match="group: expected at most 16 ranks, got '17 ranks'"):
        Link.connect(None, torch.device("cuda", 0), [16], timeout_s=1.0, agreed={})


def test_ranks_that_disagree_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments that differ between ranks are named with what every rank was given."""
    theirs = [{"max_tokens": 8, "dtype": "a"}, {"max_tokens": 16, "dtype": "a"}]
    monkeypatch.setattr(direct, "_everybody", lambda group, size, value: theirs)
    with pytest.raises(ValueError, match=r"max_tokens: expected the same on all ranks.*\[8, 16\]"):
        direct._check_agreed(theirs[0], None, 2)


class Handle:
    """torch's handle of symmetric memory, with the addresses that it was made with."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self.buffers = buffers

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.buffers[rank]


class Group:
    group_name = "0"


MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def test_no_symmetric_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch says where peers cannot be reached comes with what to do."""

    before = os.environ.get(MULTICAST)

    def refuse(*size: object, **options: object) -> None:
        assert os.environ[MULTICAST] == "1"
        raise RuntimeError("no peer access")

    monkeypatch.setattr("torch.distributed._symmetric_memory.empty", refuse)
    with pytest.raises(RuntimeError, match="no symmetric memory .* use 'a2a'.*: no peer access"):
        direct.symmetric_buffer(16, torch.device("cuda", 0), Group())
    assert os.environ.get(MULTICAST) == before


def test_strange_symmetric_memory_is_refused() -> None:
    """An own buffer at an address that is not its own stops before anyone writes there."""
    buffers = [torch.zeros(8, dtype=torch.uint8) for _ in range(2)]
    found = direct._addresses(Handle(buffers), 2, buffers[1], 1)
    assert found == [buffer.data_ptr() for buffer in buffers]
    with pytest.raises(RuntimeError, match="another address for this rank's own buffer"):
        direct._addresses(Handle(buffers), 2, buffers[1], 0)


def test_direct_needs_a_gpu() -> None:
    """On a CPU the direct forms are refused by name, with what to take instead."""
    message = "name='direct' is not supported: .* device is cpu; use 'a2a' or 'ag_rs'"
    with pytest.raises(NotImplementedError, match=message):
        make_reducer("direct", **ARGUMENTS, num_q_heads=6)
    with pytest.raises(NotImplementedError, match=message):
        make_query_gather("direct", **ARGUMENTS, num_q_heads_local=6)


@pytest.mark.parametrize("timeout_s", [0, -1.0, 3601, math.nan, "20", True], ids=str)
@pytest.mark.parametrize("kind", [DirectReducer, DirectQueryGather])
def test_bad_timeout_is_refused(kind: type, timeout_s: object) -> None:
    """A wait takes more than 0 and at most 3600 seconds."""
    heads = "num_q_heads" if kind is DirectReducer else "num_q_heads_local"
    arguments = ARGUMENTS | {heads: 2, "device": "cuda:0"}
    with pytest.raises(ValueError, match="timeout_s: expected seconds, more than 0 and at most"):
        kind(**arguments, timeout_s=timeout_s)


@pytest.mark.usefixtures("lone_group")
@pytest.mark.parametrize(
    "change, message",
    [
        ({"name": "gloo"}, "name: expected 'nccl' or 'direct', got 'gloo'"),
        ({"max_tokens": 0}, "max_tokens: expected an int >= 1, got 0"),
        ({"num_q_heads_local": 1.5}, "num_q_heads_local: expected an int >= 1, got 1.5"),
        ({"head_dim": -1}, "head_dim: expected an int >= 1, got -1"),
        ({"dtype": torch.int32}, "dtype: expected torch.float32 or .*got torch.int32"),
        ({"group": 3}, "group: expected a torch.distributed process group .*got 3"),
        ({"device": "meta"}, "device: expected a type that the group's backend serves"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_gather_is_refused(change: dict[str, Any], message: str) -> None:
    """A query gather names the argument, what was expected and what was given."""
    arguments = {"name": "nccl", "num_q_heads_local": 2} | ARGUMENTS | change
    with pytest.raises(ValueError, match=message):
        make_query_gather(**arguments)


@pytest.mark.usefixtures("lone_group")
def test_gather_of_one_and_bad_q() -> None:
    """A group of one gets its own copy of q; a q that does not fit is refused."""
    gather = make_query_gather("nccl", **ARGUMENTS, num_q_heads_local=2)
    q = torch.randn(3, 2, 64)
    gathered = gather(q)
    assert torch.equal(gathered, q) and gathered.data_ptr() != q.data_ptr()
    assert gather(q[:0]).shape == (0, 2, 64)
    assert gather.memory_bytes() == 4 * 2 * 64 * 4
    for bad, message in (
        (torch.randn(5, 2, 64), "q: expected at most max_tokens=4 tokens .*larger max_tokens"),
        (torch.randn(3, 1, 64), r"q: expected float32 \[T, 2, 64\], got float32 \[3, 1, 64\]"),
        (q.half(), r"q: expected float32 \[T, 2, 64\], got float16"),
        (torch.randn(3, 64, 2).mT, "q: expected a contiguous last dimension"),
    ):
        with pytest.raises(ValueError, match=message):
            gather(bad)
    assert torch.equal(gather(q), q)
