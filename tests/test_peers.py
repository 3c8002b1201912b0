"""The peers' adapters on a machine without them: absent with a reason, and nothing imported."""

from __future__ import annotations

import pytest
import torch

from dcp_lab.bench import gqa as bench
from dcp_lab.bench import protocol
from dcp_lab.peers import DECODE_PEERS, MLA_PEERS
from dcp_lab.peers.base import Peer, PeerCall, module_missing, needs_hopper

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("peer", DECODE_PEERS + MLA_PEERS, ids=lambda peer: peer.name)
def test_an_absent_peer_says_why(peer):
    """Without a GPU every peer says what it needs; its adapter names the versions it knows."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: the peer may be too")
    assert "needs" in peer.why_absent()
    assert any(character.isdigit() for character in peer.package)


def test_a_missing_module_names_its_remedy():
    """What is not installed is said with the command that brings it; what is, is not missing."""
    assert module_missing("no_such_peer", "pip install it") == (
        "no_such_peer is not installed; pip install it"
    )
    assert "does not import" in module_missing("no_such.peer", "pip install it")
    assert module_missing("json", "never") is None


def test_other_gpus_are_refused(monkeypatch):
    """Hopper code says which capability it found."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert needs_hopper() == "it needs compute capability 9.0, this GPU has 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert needs_hopper() is None


def test_a_wrong_peer_is_left_out(capsys):
    """A peer whose result is off, or that fails, has no time; the others are kept."""
    shape = bench.DecodeShape(2, 32, num_q_heads=4, num_kv_heads=2, head_dim=32)
    x = bench.make_layers(shape, dtype=torch.float32, device=DEVICE)
    ours = bench.paged_variant(x)

    def wrong(layer: int) -> None:
        ours.call(layer)
        x.out[layer] += 1

    def fails() -> PeerCall:
        raise RuntimeError("no kernel image")

    peer = Peer(
        "made up",
        "none 0",
        lambda: None,
        lambda inputs: {
            "right": lambda: PeerCall(ours.call, lambda layer: inputs.lse[layer]),
            "base 2": lambda: PeerCall(ours.call, lambda layer: inputs.lse[layer] * 1.4427),
            "wrong": lambda: PeerCall(wrong, None),
            "broken": fails,
        },
    )
    absent = Peer("not here", "none 0", lambda: "it needs luck", lambda inputs: {})
    assert [v.variant for v in protocol.peer_variants(x, (absent, peer))] == ["right"]
    said = capsys.readouterr().err
    for words in ("not here: absent: it needs luck", "base 2: left out", "wrong: left out"):
        assert words in said
    assert "no kernel image" in said
