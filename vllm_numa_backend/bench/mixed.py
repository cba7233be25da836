"""Mixed steps, as a server's: requests with many and with few new tokens on cached prefixes of all lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from numa_attention.schedule import StepBatch
from vllm_numa_backend.bench.cases import Case, Tensors

REQUESTS = 32
MOST_NEW, MOST_CACHED = 4096, 65536
DRAWS = 20


@dataclass(frozen=True)
class MixedCase(Case):
    """A step of requests of unlike lengths; `length` and `query_len` are the largest.

    query_lens, seq_lens: of each request, those with a single new token first; seq_lens count the new tokens too.
    """

    query_lens: tuple[int, ...] = ()
    seq_lens: tuple[int, ...] = ()
    draw: int = field(default=0, kw_only=True)

    @property
    def name(self) -> str:
        return (
            f"draw {self.draw}: {self.batch} requests, {sum(self.query_lens)} new tokens on "
            f"{sum(self.seq_lens) - sum(self.query_lens)}, {self.q_heads}/{self.kv_heads}, {self.page_size}"
        )

    @property
    def decodes(self) -> int:
        """Leading requests with a single new token."""
        return sum(length == 1 for length in self.query_lens)

    def alone(self) -> list[Case]:
        """Each request as a case of its own."""
        heads = self.q_heads, self.kv_heads, self.page_size
        kinds = self.kv_dtype, self.dtype, self.head_dim, self.window
        return [
            Case(1, length, *heads, new, *kinds)
            for new, length in zip(self.query_lens, self.seq_lens, strict=True)
        ]

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one call must read."""
        return sum(case.kv_bytes for case in self.alone())

    @property
    def flops(self) -> float:
        """Floating-point operations of one causal call."""
        return sum(case.flops for case in self.alone())


def mixed_cases(
    kv_dtype: torch.dtype,
    *,
    draws: int = DRAWS,
    requests: int = REQUESTS,
    most_new: int = MOST_NEW,
    most_cached: int = MOST_CACHED,
    q_heads: int = 32,
    kv_heads: int = 8,
    page_size: int = 16,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> list[MixedCase]:
    """Random steps, always the same ones: new tokens from 1 and cached ones from 0, all orders of magnitude alike."""
    random = torch.Generator().manual_seed(0)
    cases = []
    for draw in range(draws):
        new = _log_uniform(requests, most_new, random)
        cached = _log_uniform(requests, most_cached + 1, random) - 1
        new, order = new.sort(stable=True)
        lengths = new + cached[order]
        cases.append(
            MixedCase(
                requests, int(lengths.max()), q_heads, kv_heads, page_size, int(new.max()), kv_dtype, dtype, head_dim,
                query_lens=tuple(new.tolist()), seq_lens=tuple(lengths.tolist()), draw=draw,
            )
        )  # fmt: skip
    return cases


def _log_uniform(count: int, most: int, random: torch.Generator) -> torch.Tensor:
    """Whole numbers from 1 to `most`, int64 [count], whose logarithms are evenly spread."""
    exponents = torch.rand(count, generator=random) * math.log(most + 1)
    return exponents.exp().floor().long().clamp(1, most)


def make_mixed_tensors(case: MixedCase, seed: int = 0, device: torch.device | str = "cuda") -> Tensors:
    """Random tensors of one step; the pages of all requests lie in random order."""
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=case.dtype)

    pages = [-(-length // case.page_size) for length in case.seq_lens]
    order = iter(torch.randperm(sum(pages), generator=torch.Generator().manual_seed(seed)).tolist())
    block_table = torch.zeros(case.batch, max(pages), dtype=torch.int32)
    for request, count in enumerate(pages):
        block_table[request, :count] = torch.tensor([next(order) for _ in range(count)], dtype=torch.int32)
    starts = torch.tensor([0, *case.query_lens]).cumsum(0).int()
    tokens = int(starts[-1])
    kv = torch.empty(
        sum(pages), 2, case.page_size, case.kv_heads, case.head_dim, device=device, dtype=case.kv_dtype
    )
    # page ranges at a time: random numbers of a large cache would not fit beside it
    for part in kv.split(max(1, (64 << 20) // kv[0].numel())):
        part.copy_(random(*part.shape))
    step = StepBatch(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
        block_table=block_table.to(device),
        num_decodes=case.decodes,
        num_decode_tokens=case.decodes,
        max_query_len=case.query_len,
        max_seq_len=case.length,
    )
    return Tensors(
        case,
        q=[random(tokens, case.q_heads, case.head_dim)],
        kv=[kv],
        out=torch.empty(tokens, case.q_heads, case.head_dim, device=device, dtype=case.dtype),
        step=step,
        scales=torch.ones(1, device=device),
    )
