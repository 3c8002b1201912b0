"""The result every attention op and every reducer returns: (out, lse)."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttnState(NamedTuple):
    """Attention output together with the log-sum-exp that makes it mergeable.

    out[t, h] = sum_s softmax_s(score[t, h, s]) v[s, h]
    lse[t, h] = ln sum_s exp(score[t, h, s]),  score scaled (and soft-capped, masked)

    A row that saw no key holds out = 0 and lse = -inf.

    Attributes:
        out: [T, Hq, Dv] in q's dtype.
        lse: [T, Hq] fp32, natural logarithm.
    """

    out: torch.Tensor
    lse: torch.Tensor
