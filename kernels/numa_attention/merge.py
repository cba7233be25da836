"""The algebra of partial attention: results over disjoint sets of keys combine into the result over their union."""

from __future__ import annotations

import torch


def merge_states(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of S sets of keys, from the attention over each.

    outs [S, ..., D]: normalised outputs. lses [S, ...]: natural logarithms of the sums of exponentials,
    -inf where a part saw no key; such a part has weight 0, whatever its output holds. Returns out [..., D]
    and lse [...] in float32, or in float64 if either argument is; where all parts are empty they are 0 and
    -inf.

    The operation is associative and commutative. LSEs must be finite or -inf.
    """
    dtype = torch.float64 if torch.float64 in (outs.dtype, lses.dtype) else torch.float32
    outs, lses = outs.to(dtype), lses.to(dtype)
    largest = lses.amax(0)
    # -inf - -inf is NaN: subtract 0 where every part is empty
    shift = torch.where(largest == -torch.inf, 0.0, largest)
    weights = torch.exp(lses - shift)
    total = weights.sum(0)
    weights = weights / torch.where(total > 0, total, 1.0)
    out = torch.where(weights[..., None] > 0, weights[..., None] * outs, 0.0).sum(0)
    return out, shift + torch.log(total)
