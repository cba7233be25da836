"""The benchmark shapes and the tensors of one: paged KV in random page order, several copies beyond the L2."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from numa_attention.schedule import StepBatch
from numa_attention.shapes import LayerShape

MAX_DECODE_QUERY = 8  # a case with more new tokens a request is a prefill
# more than four times the L2 of the largest NVIDIA GPU, and the 256 MB that MI300X and MI355X have behind theirs
ROTATION_BYTES = (1 << 30) if torch.version.hip else (256 << 20)


@dataclass(frozen=True)
class Case:
    """One step: `batch` requests of `query_len` new tokens each, `length` cached tokens with them.

    packed: values beside keys and a page of each KV head in one run, as vLLM 0.32 and later lay a cache out.
    """

    batch: int
    length: int
    q_heads: int
    kv_heads: int
    page_size: int
    query_len: int
    kv_dtype: torch.dtype = torch.bfloat16
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    window: int = -1
    packed: bool = False

    @property
    def name(self) -> str:
        return f"{self.batch}, {self.length}, {self.q_heads}/{self.kv_heads}, {self.page_size}"

    @property
    def shape(self) -> LayerShape:
        return LayerShape(
            self.q_heads,
            self.kv_heads,
            self.head_dim,
            self.head_dim,
            self.dtype,
            self.kv_dtype,
            self.page_size,
            self.window,
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that one call must read."""
        tokens = self.length if self.window < 0 else min(self.length, self.window + self.query_len)
        return 2 * self.batch * tokens * self.kv_heads * self.head_dim * self.kv_dtype.itemsize

    @property
    def flops(self) -> float:
        """Floating-point operations of one causal call: 4 x head_dim x visible (query, key) pairs x query heads."""
        sight = self.length if self.window < 0 else min(self.window + 1, self.length)
        growing = max(0, sight - (self.length - self.query_len))  # queries that see everything before them
        growing = min(growing, self.query_len)
        first = self.length - self.query_len + 1
        pairs = growing * (2 * first + growing - 1) / 2 + (self.query_len - growing) * sight
        return 4.0 * self.head_dim * pairs * self.q_heads * self.batch


def decode_cases(kv_dtype: torch.dtype, query_len: int = 1) -> list[Case]:
    """One new token a request: from wide batches to a single long request."""
    rows = (
        (64, 4096, 64, 8, 16),
        (64, 16384, 64, 8, 16),
        (64, 4096, 64, 1, 64),
        (64, 65536, 64, 1, 64),
        (64, 65536, 64, 2, 64),
        (8, 16384, 64, 8, 16),
        (1, 131072, 8, 1, 64),
        (1, 131072, 64, 8, 64),
        (128, 2048, 32, 8, 16),
        (4, 8192, 128, 128, 16),
    )
    return [Case(*row, query_len, kv_dtype) for row in rows]


def prefill_cases(kv_dtype: torch.dtype) -> list[Case]:
    """Whole prompts, causal."""
    rows = ((1, 16384, 64, 8, 16), (1, 32768, 64, 8, 64), (4, 4096, 32, 8, 16), (1, 16384, 128, 128, 64))
    return [Case(*row, query_len=row[1], kv_dtype=kv_dtype) for row in rows]


def article_cases(kv_dtype: torch.dtype) -> list[Case]:
    """The ten shapes of AMD's article on decode on the MI450, in pages long enough for clusters of workgroups."""
    return [
        Case(64, 4096 << doubling, 64, kv_heads, 512, 1, kv_dtype, packed=True)
        for kv_heads in (1, 2)
        for doubling in range(5)
    ]


@dataclass(frozen=True)
class Tensors:
    """q and out [tokens, q_heads, head_dim] and kv [pages, 2, page, kv_heads, head_dim] a copy, a view where the case
    is packed; one step for all."""

    case: Case
    q: list[torch.Tensor]
    kv: list[torch.Tensor]
    out: torch.Tensor
    step: StepBatch
    scales: torch.Tensor


def empty_cache(case: Case, pages: int, device: torch.device) -> torch.Tensor:
    """[pages, 2, page, kv_heads, head_dim] in the case's layout."""
    if case.packed:
        size = (pages, case.kv_heads, case.page_size, 2, case.head_dim)
        return torch.empty(size, device=device, dtype=case.kv_dtype).permute(0, 3, 2, 1, 4)
    size = (pages, 2, case.page_size, case.kv_heads, case.head_dim)
    return torch.empty(size, device=device, dtype=case.kv_dtype)


def make_tensors(case: Case, seed: int = 0, device: torch.device | str = "cuda") -> Tensors:
    """Random tensors of one case; pages lie in random order. On a CPU one copy, as no cache is to be left cold."""
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)
    rotate = case.query_len <= MAX_DECODE_QUERY and device.type != "cpu"
    copies = max(1, -(-ROTATION_BYTES // case.kv_bytes)) if rotate else 1
    pages = -(-case.length // case.page_size)
    total = case.batch * pages
    tokens = case.batch * case.query_len

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=case.dtype)

    order = torch.randperm(total, generator=generator, device=device, dtype=torch.int32)
    starts = torch.arange(case.batch + 1, dtype=torch.int32) * case.query_len
    decoding = case.query_len <= MAX_DECODE_QUERY
    step = StepBatch(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=torch.full((case.batch,), case.length, dtype=torch.int32, device=device),
        block_table=order.view(case.batch, pages),
        num_decodes=case.batch if decoding else 0,
        num_decode_tokens=tokens if decoding else 0,
        max_query_len=case.query_len,
        max_seq_len=case.length,
    )
    kv = []
    for _ in range(copies):
        pages_kv = empty_cache(case, total, device)
        # page ranges at a time: random numbers of a large cache would not fit beside it
        for part in pages_kv.split(max(1, (64 << 20) // pages_kv[0].numel())):
            part.copy_(random(*part.shape))
        kv.append(pages_kv)
    return Tensors(
        case,
        q=[random(tokens, case.q_heads, case.head_dim) for _ in range(copies)],
        kv=kv,
        out=torch.empty(tokens, case.q_heads, case.head_dim, device=device, dtype=case.dtype),
        step=step,
        scales=torch.ones(1, device=device),
    )
