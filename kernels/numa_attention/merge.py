"""The algebra of partial attention: results over disjoint sets of keys combine into the result over their union."""

from __future__ import annotations

from collections.abc import Callable

import torch

from numa_attention.ranks import Ranks


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
    weights, lse = _weights(lses)
    return _weighted(outs, weights).sum(0), lse


def _weights(lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight [S, ...] of each part in the whole, 0 for empty ones, and the LSE [...] of the whole."""
    largest = lses.amax(0)
    # -inf - -inf is NaN: subtract 0 where every part is empty
    shift = torch.where(largest == -torch.inf, 0.0, largest)
    weights = torch.exp(lses - shift)
    total = weights.sum(0)
    return weights / torch.where(total > 0, total, 1.0), shift + torch.log(total)


def _weighted(outs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """outs [..., D] times weights [...]; 0 where the weight is, whatever the output holds."""
    return torch.where(weights[..., None] > 0, weights[..., None] * outs, 0.0)


def fold_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [..., heads, D] and lse [..., heads] with a sink for each head: a score [heads] that has no value.

    Ranks that share a sequence attend without sinks, of which there is one for all their keys together.
    """
    with_sink = torch.logaddexp(lse, sinks.to(lse.dtype))
    shift = torch.where(with_sink == -torch.inf, 0.0, with_sink)
    return out * torch.exp(lse - shift)[..., None], with_sink


def weigh(out: torch.Tensor, lses: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank `rank`'s part of the whole, as it is summed over ranks, and the LSE of the whole for its own heads.

    out float32 [tokens, heads of all ranks, D]: of this rank. lses float32 [ranks, tokens, heads of all ranks]. Both
    contiguous. Returns [ranks, tokens, heads of a rank, D], by the rank that has the heads, and [tokens, heads of a
    rank].
    """
    if out.device.type != "cpu":
        # imported here so that this file works where Triton is not installed
        from numa_attention import merge_device

        return merge_device.weigh(out, lses, rank)
    ranks, heads = len(lses), out.shape[1] // len(lses)
    weights, lse = _weights(lses)
    weighted = _weighted(out, weights[rank]).unflatten(1, (ranks, heads)).movedim(1, 0)
    return weighted, lse[:, rank * heads : (rank + 1) * heads]


def merge_packed(parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_states` of parts float32 [ranks, tokens, heads, D + 1], contiguous, whose last number is the LSE."""
    if parts.device.type != "cpu":
        from numa_attention import merge_device

        return merge_device.merge_packed(parts)
    return merge_states(parts[..., :-1], parts[..., -1])


def _gather_and_scatter(
    out: torch.Tensor, lse: torch.Tensor, ranks: Ranks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every rank learns all LSEs and weighs its own part; the weighted parts are summed on their way."""
    weighted, lse = weigh(out.contiguous(), ranks.all_gather(lse), ranks.rank)
    return ranks.reduce_scatter(weighted), lse


def _exchange_all(out: torch.Tensor, lse: torch.Tensor, ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
    """Every rank gets all parts of its own heads, each with its LSE beside it, and merges them."""
    by_rank = out.unflatten(1, (ranks.size, -1)).movedim(1, 0)
    packed = out.new_empty(*by_rank.shape[:-1], out.shape[2] + 1)
    packed[..., :-1] = by_rank
    packed[..., -1] = lse.unflatten(1, (ranks.size, -1)).movedim(1, 0)
    return merge_packed(ranks.all_to_all(packed))


# how partial results may travel between ranks; vLLM's --dcp-comm-backend has the same names
EXCHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor, Ranks], tuple[torch.Tensor, torch.Tensor]]] = {
    "ag_rs": _gather_and_scatter,
    "a2a": _exchange_all,
}


def merge_across_ranks(
    out: torch.Tensor, lse: torch.Tensor, ranks: Ranks, exchange: str = "ag_rs"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole result for this rank's heads, from what every rank computed for all heads over its own keys.

    out float32 [tokens, heads of all ranks, D], heads of rank 0 first; lse float32 [tokens, heads of all ranks],
    natural logarithms, -inf where the rank's shard holds no key that the token sees. Returns out [tokens, heads of this
    rank, D] and lse [tokens, heads of this rank]. exchange: of EXCHANGES. "ag_rs" gathers the LSEs and reduce-scatters
    the outputs, "a2a" sends both in one all-to-all. Both move as many bytes of output.

    Raises ValueError for another exchange or heads that do not divide, LostRank where a rank does not take part.
    """
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange={exchange!r} is unknown: choose one of {', '.join(EXCHANGES)}")
    if out.shape[1] % ranks.size:
        raise ValueError(f"{out.shape[1]} heads do not divide over {ranks.size} ranks")
    return EXCHANGES[exchange](out, lse, ranks)
