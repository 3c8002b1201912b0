"""Shard against counting token by token."""

from __future__ import annotations

import pytest
import torch

from dcp_lab import Shard

GROUPS = [
    pytest.param(size, interleave, id=f"R{size}-S{interleave}")
    for size in (1, 2, 3, 4, 8, 16)
    for interleave in (1, 3, 4, 16, 64)
]


def held_by(rank: int, size: int, interleave: int, length: int) -> list[int]:
    """Deal tokens 0 ... length - 1 out like cards, interleave at a time; return rank's hand."""
    hand = []
    for i in range(length):
        turn, _ = divmod(i, interleave)
        if turn % size == rank:
            hand.append(i)
    return hand


@pytest.mark.parametrize(("size", "interleave"), GROUPS)
def test_positions_equal_dealing_one_by_one(size: int, interleave: int) -> None:
    """Every token has one owner, one local position, and comes back from them."""
    length = 3 * size * interleave + interleave // 2 + 1
    seen = []
    for rank in range(size):
        shard = Shard(rank, size, interleave)
        hand = held_by(rank, size, interleave, length)
        seen += hand
        for local, position in enumerate(hand):
            assert shard.owner(position) == rank
            assert shard.local_position(position) == local
            assert shard.global_position(local) == position
        positions = torch.tensor(hand)
        assert shard.owner(positions).tolist() == [rank] * len(hand)
        assert shard.local_position(positions).tolist() == list(range(len(hand)))
        assert shard.global_position(torch.arange(len(hand))).tolist() == hand
    assert sorted(seen) == list(range(length))


@pytest.mark.parametrize(("size", "interleave"), GROUPS)
def test_local_lengths_equal_counting(size: int, interleave: int) -> None:
    """local_seq_lens counts each rank's tokens, for every length up to two cycles and more."""
    lens = torch.arange(2 * size * interleave + 2, dtype=torch.int32)
    total = torch.zeros_like(lens)
    for rank in range(size):
        local = Shard(rank, size, interleave).local_seq_lens(lens)
        assert local.dtype == torch.int32
        hand = torch.tensor(held_by(rank, size, interleave, len(lens)))
        assert torch.equal(local.long(), (hand[None, :] < lens[:, None]).sum(1))
        total += local
    assert torch.equal(total, lens)


def test_local_lengths_of_case_2() -> None:
    """Case 2: R=4, S=1, L=[3,1,0,33]; ranks may be empty."""
    lens = torch.tensor([3, 1, 0, 33])
    local = torch.stack([Shard(rank, 4).local_seq_lens(lens) for rank in range(4)], dim=1)
    assert local.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [9, 8, 8, 8]]


def test_visible_tokens_of_case_10() -> None:
    """Case 10: query rows that end at global lengths 6 ... 9 see these local tokens, R=4, S=1."""
    ends = torch.tensor([6, 7, 8, 9])
    visible = [Shard(rank, 4).local_seq_lens(ends).tolist() for rank in range(4)]
    assert visible == [[2, 2, 2, 3], [2, 2, 2, 2], [1, 2, 2, 2], [1, 1, 2, 2]]
    # Not what the last row sees minus the rows in between: local(G - k) != local(G) - k.
    assert visible[0][2] != visible[0][3] - 0 and visible[3][0] != visible[3][3] - 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param((0, 0), r"size: expected an int >= 1, got 0", id="size"),
        pytest.param((0, 2.0), r"size: expected an int >= 1, got 2.0", id="size-type"),
        pytest.param((2, 2), r"rank: expected an int in \[0, size=2\), got 2", id="rank"),
        pytest.param(
            (-1, 2), r"rank: expected an int in \[0, size=2\), got -1", id="rank-negative"
        ),
        pytest.param((0, 2, 0), r"interleave_size: expected an int >= 1, got 0", id="interleave"),
    ],
)
def test_bad_shards_are_refused(arguments: tuple, message: str) -> None:
    """A Shard that cannot be names the argument that is wrong."""
    with pytest.raises(ValueError, match=message):
        Shard(*arguments)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32], ids=str)
def test_narrow_integers_do_not_wrap(dtype: torch.dtype) -> None:
    """Tensors too narrow for a turn of the dealing give what int64 gives."""
    values = torch.tensor([0, 1, 63, 64, 127])
    for shard in (Shard(1, 4, 64), Shard(3, 8, 2**13), Shard(0, 2, 2**31)):
        narrow = values.to(dtype)
        assert torch.equal(shard.local_seq_lens(narrow), shard.local_seq_lens(values))
        for method in (shard.owner, shard.local_position, shard.global_position):
            assert torch.equal(method(narrow).long(), method(values))


@pytest.mark.parametrize(
    "value", [torch.ones(2), torch.ones(2, dtype=torch.bool), 1.0, None, True]
)
def test_what_is_no_integer_is_refused(value: object) -> None:
    """Positions and lengths are whole numbers; floats and bools are named, not rounded."""
    shard = Shard(0, 2)
    for method in (shard.owner, shard.local_position, shard.global_position):
        with pytest.raises(ValueError, match="position: expected an int"):
            method(value)
    with pytest.raises(ValueError, match="global_seq_lens: expected an integer tensor"):
        shard.local_seq_lens(value)
    with pytest.raises(ValueError, match="global_seq_lens: expected an integer tensor, got 3"):
        shard.local_seq_lens(3)
    with pytest.raises(ValueError, match="rank: expected an int"):
        Shard(True, 2)
