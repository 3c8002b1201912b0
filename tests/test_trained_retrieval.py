"""A trained model: exact under DCP 1 and 2, not when the shard or the LSE is wrong."""

from __future__ import annotations

import pytest
import torch

from dcp_lab.serving import retrieval

ITEMS = retrieval.make_items(3, seed=1)
# fp32 rounding on logits of some 20.
EXACT = 1e-4

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def weights():
    return retrieval.load()


@pytest.fixture(scope="module")
def whole(weights):
    """Whole requests on one device, torch's own attention: no page, no shard, no exchange."""
    texts = torch.tensor([retrieval.encode(item.prompt + item.answer) for item in ITEMS])
    wide = {name: weight.float() for name, weight in weights.items()}
    positions = torch.arange(texts.shape[1])
    logits = retrieval.forward(wide, texts, positions, retrieval.causal_attention)
    return logits[:, -retrieval.ANSWER - 1 : -1]


def apart(answers, whole) -> float:
    """Return the largest difference of a logit; inf where one is not a number."""
    return (answers.logits - whole).abs().nan_to_num(torch.inf).max().item()


def test_the_model_solves_the_task(weights):
    """Trained: it is right on nearly all of 200 rows that it has not seen, and small enough."""
    items = retrieval.make_items(200, seed=2)
    texts = torch.tensor([retrieval.encode(item.prompt + item.answer) for item in items])
    wide = {name: weight.float() for name, weight in weights.items()}
    positions = torch.arange(texts.shape[1])
    logits = retrieval.forward(wide, texts, positions, retrieval.causal_attention)
    found = logits[:, -retrieval.ANSWER - 1 : -1].argmax(-1)
    right = (found == texts[:, -retrieval.ANSWER :]).all(-1).float().mean().item()
    assert right >= 0.97
    assert {n: tuple(w.shape) for n, w in weights.items()} == retrieval.SHAPE.weight_shapes


@pytest.fixture(scope="module")
def broken(weights):
    """DCP 2 by a2a: as it should be, and with each fault."""
    return retrieval.answer(weights, ITEMS, ranks=2, faults=retrieval.FAULTS)


@pytest.mark.parametrize(("ranks", "reducer"), [(1, "a2a"), (2, "a2a"), (2, "ag_rs")])
def test_paged_decode_on_shards_is_exact(weights, whole, broken, ranks, reducer):
    """Every answer is right, and each logit that of attention over the whole request."""
    answers = broken if (ranks, reducer) == (2, "a2a") else None
    if answers is None:
        answers = retrieval.answer(weights, ITEMS, ranks=ranks, reducer=reducer)
    assert apart(answers["none"], whole) < EXACT
    assert answers["none"].exact == 1.0


def test_a_shard_that_is_off_by_one_fails(broken, whole):
    """One token too many on a rank: answers are wrong."""
    assert apart(broken["off_by_one"], whole) > 1000 * EXACT
    assert broken["off_by_one"].exact < 1.0


def test_a_wrong_base_of_the_lse_fails(broken, whole):
    """Natural LSEs merged as base 2: the logits are no longer those of the model."""
    assert apart(broken["lse_base"], whole) > 1000 * EXACT


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: retrieval.answer(w, ITEMS, faults=["other"]), "faults: expected some of none"),
        (
            lambda w: retrieval.answer(w, [ITEMS[0], *retrieval.make_items(1, row=20)]),
            "items: expected prompts of one length",
        ),
        (lambda w: retrieval.make_items(1, row=7), "row: expected 8 to 62, got 7"),
        (lambda w: retrieval.load(retrieval.Path("no.pt")), "tools/train_retrieval.py"),
    ],
)
def test_bad_arguments_are_refused(weights, call, message):
    """Each names the argument and what was expected."""
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        call(weights)
