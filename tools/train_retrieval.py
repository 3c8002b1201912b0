"""Train the retrieval model of dcp_lab/serving/retrieval.py; writes data/trained/retrieval_mqa.pt.

    python tools/train_retrieval.py [--steps 800] [--seed 0] [--out FILE]

Minutes on one CPU core. Sequences are a row of distinct symbols and four stretches of it, each of
which starts anywhere; the loss counts what follows a stretch's first symbol. Rows grow longer
while training, since short ones teach the trick and long ones make it sharp.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from dcp_lab.serving import retrieval
from dcp_lab.serving.model_folder import encode

ROOT = Path(__file__).resolve().parents[1]
BATCH, STRETCHES = 64, 4
SHORTEST, LONGEST = 10, 56
LEARNING_RATE = 3e-3


def batch(row: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [BATCH, T] and which of them have to be predicted."""
    symbols = torch.tensor(encode(retrieval.SYMBOLS))
    order = torch.rand(BATCH, len(symbols), generator=generator).argsort(1)[:, :row]
    rows = symbols[order]
    length = retrieval.ANSWER + 1
    starts = torch.randint(row - length + 1, (BATCH, STRETCHES, 1), generator=generator)
    stretches = rows.gather(1, (starts + torch.arange(length)).flatten(1))
    wanted = torch.zeros(BATCH, row + STRETCHES * length, dtype=torch.bool)
    wanted[:, row:] = (torch.arange(STRETCHES * length) % length) > 0
    return torch.cat([rows, stretches], 1), wanted


def start(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return weights to begin with: normal, 1 / sqrt(columns); the embedding 1, norms 1."""
    weights = {}
    for name, size in retrieval.SHAPE.weight_shapes.items():
        weight = torch.ones(size)
        if len(size) == 2:
            std = 1.0 if "embed" in name else size[1] ** -0.5
            weight = std * torch.randn(size, generator=generator)
        weights[name] = weight.requires_grad_()
    return weights


def train(steps: int, seed: int) -> dict[str, torch.Tensor]:
    """Return trained weights in the shape's dtype."""
    generator = torch.Generator().manual_seed(seed)
    weights = start(generator)
    optimizer = torch.optim.AdamW(
        weights.values(), lr=LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.98)
    )
    begin = time.monotonic()
    for step in range(steps):
        warm, cool = min(1, (step + 1) / 100), max(0.02, 1 - step / steps)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * warm * cool
        grown = min(1, max(0, step / steps - 0.3) / 0.4)
        longest = 18 + int((LONGEST - 18) * grown)
        row = int(torch.randint(SHORTEST, longest + 1, (1,), generator=generator))
        tokens, wanted = batch(row, generator)
        positions = torch.arange(tokens.shape[1] - 1)
        logits = retrieval.forward(weights, tokens[:, :-1], positions, retrieval.causal_attention)
        loss = F.cross_entropy(logits[wanted[:, 1:]], tokens[:, 1:][wanted[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            seconds = time.monotonic() - begin
            line = f"step {step}, rows to {longest}: loss {loss.item():.4f}, {seconds:.0f} s"
            print(line, flush=True)
    dtype = getattr(torch, retrieval.SHAPE.dtype)
    return {name: weight.detach().to(dtype) for name, weight in weights.items()}


def main() -> int:
    """Parse the command line, train, write the weights."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    # One thread: on shared cores more of them wait for each other at every small product.
    torch.set_num_threads(1)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    default = ROOT / "data" / "trained" / "retrieval_mqa.pt"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()
    weights = train(options.steps, options.seed)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    part = options.out.with_suffix(".part")
    torch.save(weights, part)
    os.replace(part, options.out)
    print(f"{options.out.name}: {options.out.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
