"""A trained model small enough to commit, and a task that it only solves with exact attention.

A random model says whether two attentions agree, not whether an error matters. This one was
trained (tools/train_retrieval.py, minutes on a CPU) to find and copy: the prompt is a row of
letters and digits, none twice, and then one of them again; the model continues as the row does.

    prompt  qW7Rk2...Zb4mT...9u4      answer  mT...

Each copied character is one decode step: its query has to find one token among all, and under
decode context parallelism (DCP) only one rank holds it. Llama's architecture, one KV head (MQA),
78,528 weights in fp16, so that vLLM serves it from `write_model_folder(weights=load())`.
"""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dcp_lab.ops.decode import paged_decode
from dcp_lab.ops.kv_write import write_kv
from dcp_lab.reducers import make_reducer
from dcp_lab.reducers.local_group import run_ranks
from dcp_lab.serving.model_folder import ModelShape, encode
from dcp_lab.sharding import Shard
from dcp_lab.state import AttnState

SHAPE = ModelShape(hidden_size=64, intermediate_size=64, head_dim=32, dtype="float16")
NORM_EPS = 1e-5
SYMBOLS = string.ascii_letters + string.digits
# Characters that an answer has.
ANSWER = 7
PAGE_SIZE = 16

# Ways to be wrong, for showing that the task notices.
FAULTS = ("none", "off_by_one", "lse_base")

Weights = Mapping[str, torch.Tensor]
# attend(layer, q [T, Hq, D], k [T, Hkv, D], v) -> [T, Hq, D], for whichever tokens are at hand.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Item:
    """One question: a prompt, and the characters that have to follow."""

    prompt: str
    answer: str


def make_items(count: int, *, row: int = 56, seed: int = 0) -> list[Item]:
    """Return questions.

    Args:
        count: How many.
        row: Characters in the row, ANSWER + 1 to 62.
        seed: Of the choice.

    Raises:
        ValueError: row is too short for an answer, or longer than there are symbols.
    """
    if not ANSWER < row <= len(SYMBOLS):
        raise ValueError(f"row: expected {ANSWER + 1} to {len(SYMBOLS)}, got {row}")
    generator = torch.Generator().manual_seed(seed)
    items = []
    for _ in range(count):
        order = torch.randperm(len(SYMBOLS), generator=generator)[:row].tolist()
        text = "".join(SYMBOLS[index] for index in order)
        start = int(torch.randint(row - ANSWER, (1,), generator=generator))
        items.append(Item(text + text[start], text[start + 1 : start + 1 + ANSWER]))
    return items


def load(path: Path | None = None) -> dict[str, torch.Tensor]:
    """Return the trained weights, as Hugging Face names them.

    Args:
        path: Default: data/trained/retrieval_mqa.pt.

    Raises:
        FileNotFoundError: They are not there; the message says how to make them.
    """
    if path is None:
        from dcp_lab.analysis.tables import data_dir

        path = data_dir() / "trained" / "retrieval_mqa.pt"
    if not path.exists():
        raise FileNotFoundError(f"{path.name}: not there: python tools/train_retrieval.py")
    return torch.load(path, weights_only=True)


def forward(
    weights: Weights, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
) -> torch.Tensor:
    """Return the logits of Llama's architecture, with attention left to the caller.

    Args:
        weights: Name to tensor; computed in their dtype.
        tokens: [..., T] int64.
        positions: [..., T] of each token in its request, or [T] for all.
        attend: attend(layer, q, k, v), rotated q [..., T, Hq, D] and k [..., T, Hkv, D].

    Returns:
        [..., T, vocab_size].
    """
    x = weights["model.embed_tokens.weight"][tokens]
    half = SHAPE.head_dim // 2
    frequency = SHAPE.rope_theta ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = positions.to(x.dtype)[..., None, None] * frequency
    cos, sin = angle.cos(), angle.sin()

    def rotate(heads: torch.Tensor) -> torch.Tensor:
        first, second = heads[..., :half], heads[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def norm(values: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(values, values.shape[-1:], weights[f"{name}.weight"], NORM_EPS)

    for layer in range(SHAPE.num_layers):
        prefix = f"model.layers.{layer}"

        def linear(values: torch.Tensor, name: str, prefix: str = prefix) -> torch.Tensor:
            return F.linear(values, weights[f"{prefix}.{name}.weight"])

        h = norm(x, f"{prefix}.input_layernorm")
        q, k, v = (
            linear(h, f"self_attn.{name}_proj").unflatten(-1, (-1, SHAPE.head_dim))
            for name in "qkv"
        )
        out = attend(layer, rotate(q), rotate(k), v)
        x = x + linear(out.flatten(-2), "self_attn.o_proj")
        h = norm(x, f"{prefix}.post_attention_layernorm")
        x = x + linear(
            F.silu(linear(h, "mlp.gate_proj")) * linear(h, "mlp.up_proj"), "mlp.down_proj"
        )
    return F.linear(norm(x, "model.norm"), weights["lm_head.weight"])


def causal_attention(
    layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Whole requests, each token seeing those before it: torch's own attention.

    Args:
        layer: Not used.
        q: [..., T, Hq, D].
        k: [..., T, 1, D].
        v: [..., T, 1, D].

    Returns:
        [..., T, Hq, D].
    """
    q, k, v = (part.transpose(-2, -3) for part in (q, k, v))
    k, v = k.expand_as(q), v.expand_as(q)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3)


@dataclasses.dataclass(frozen=True)
class Answers:
    """What a model continued a batch of prompts with.

    Attributes:
        tokens: [items, ANSWER] int64, the likeliest token at each step.
        logits: [items, ANSWER, vocab_size] fp32, with the right answer's tokens fed in.
        exact: Share of the items whose answer is right to the last character.
        mean_logprob: Of the right tokens, natural logarithm.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    exact: float
    mean_logprob: float


def answer(
    weights: Weights,
    items: Sequence[Item],
    *,
    ranks: int = 1,
    reducer: str = "a2a",
    faults: Sequence[str] = ("none",),
    timeout_s: float = 240.0,
) -> dict[str, Answers]:
    """Answer questions with the lab's paged decode on a simulated DCP group.

    The prompt is attended whole and its KV written into each rank's pages; each further token is a
    decode step: KV written first, `paged_decode` over the rank's own tokens, one exchange.

    Args:
        weights: See `load`; computed in fp32.
        items: The questions, all of one length.
        ranks: DCP group size, a divisor of the 4 query heads.
        reducer: "ag_rs" or "a2a".
        faults: What to do wrong, one after the other. "none"; "off_by_one": each rank counts
            ceil(length / ranks) tokens as its own, so all but the first read a slot that was never
            written when the length does not divide (it holds NaN here, which the merge takes for
            an empty shard, so that all of the rank's tokens vanish); "lse_base": the merge takes
            natural LSEs for base-2 ones.
        timeout_s: For all ranks.

    Returns:
        For each fault the answers, which are equal on all ranks.

    Raises:
        ValueError: A fault is unknown, or prompts differ in length.
    """
    for fault in faults:
        if fault not in FAULTS:
            raise ValueError(f"faults: expected some of {', '.join(FAULTS)}, got {fault!r}")
    if len({len(item.prompt) for item in items}) != 1:
        raise ValueError("items: expected prompts of one length")
    texts = torch.tensor([encode(item.prompt + item.answer) for item in items])
    found = run_ranks(
        decode_all,
        ranks,
        args=(dict(weights), texts, reducer, tuple(faults)),
        timeout_s=timeout_s,
    )[0]
    right = texts[:, -ANSWER:]
    answers = {}
    for fault, logits in zip(faults, found, strict=True):
        tokens = logits.argmax(-1)
        logprobs = logits.log_softmax(-1).gather(-1, right[..., None])
        answers[fault] = Answers(
            tokens=tokens,
            logits=logits,
            exact=(tokens == right).all(-1).float().mean().item(),
            mean_logprob=logprobs.mean().item(),
        )
    return answers


def decode_all(
    rank: int,
    size: int,
    weights: Weights,
    texts: torch.Tensor,
    reducer_name: str,
    faults: Sequence[str],
) -> list[torch.Tensor]:
    """Be one rank of `answer`: `decode_rank` for each fault.

    Args:
        rank: This rank.
        size: Ranks.
        weights: See `forward`.
        texts: [items, T] prompts with the right answers behind them.
        reducer_name: See `answer`.
        faults: See `answer`.
    """
    return [decode_rank(rank, size, weights, texts, reducer_name, fault) for fault in faults]


def decode_rank(
    rank: int, size: int, weights: Weights, texts: torch.Tensor, reducer_name: str, fault: str
) -> torch.Tensor:
    """Decode every item's answer on one rank: return the logits of its tokens.

    Args:
        rank: This rank.
        size: Ranks.
        weights: See `forward`.
        texts: [items, T] prompts with the right answers behind them.
        reducer_name: See `answer`.
        fault: See `answer`.

    Returns:
        [items, ANSWER, vocab_size] fp32.
    """
    weights = {name: weight.float() for name, weight in weights.items()}
    shard = Shard(rank, size)
    count, length = texts.shape
    prompt = length - ANSWER
    pages = -(-length // PAGE_SIZE)
    block_table = torch.arange(count * pages, dtype=torch.int32).reshape(count, pages)
    cache = torch.full(
        (SHAPE.num_layers, 2, count * pages, PAGE_SIZE, 1, SHAPE.head_dim), torch.nan
    )
    reducer = make_reducer(
        reducer_name,
        group=None,
        max_tokens=count,
        num_q_heads=SHAPE.num_q_heads,
        head_dim=SHAPE.head_dim,
        dtype=torch.float32,
        device="cpu",
    )

    def write(layer: int, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> None:
        local = shard.local_position(positions)
        slots = block_table.long()[:, local // PAGE_SIZE] * PAGE_SIZE + local % PAGE_SIZE
        slots = torch.where(shard.owner(positions) == rank, slots, -1)
        write_kv(k.flatten(0, 1), v.flatten(0, 1), *cache[layer], slots.flatten())

    def prefill(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        write(layer, k, v, torch.arange(prompt))
        return causal_attention(layer, q, k, v)

    def decode(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        write(layer, k, v, torch.tensor([position]))
        lengths = torch.full((count,), position + 1, dtype=torch.int32)
        own = shard.local_seq_lens(lengths)
        if fault == "off_by_one":
            own = -(-lengths // size)
        state = paged_decode(q[:, 0].contiguous(), *cache[layer], block_table, own, num_splits=1)
        if fault == "lse_base":
            state = AttnState(state.out, state.lse * math.log(2))
        merged = reducer(state).out
        # The model's dense part is whole on every rank here, so each needs all heads again.
        heads = [torch.empty_like(merged) for _ in range(size)]
        dist.all_gather(heads, merged.contiguous())
        return torch.cat(heads, dim=1)[:, None]

    found = [forward(weights, texts[:, :prompt], torch.arange(prompt), prefill)[:, -1]]
    for position in range(prompt, length - 1):
        token = texts[:, position : position + 1]
        found.append(forward(weights, token, torch.tensor([position]), decode)[:, 0])
    return torch.stack(found, dim=1)
