"""Merging the partial results of several GPUs in one launch, each GPU getting the heads that it owns, and gathering.

Every rank attends all query heads over its own part of the context and calls `merge` with outputs and LSEs. Rank r of R
owns heads r * H / R and on. The partials travel by stores into the owner's memory; there is no collective and nothing
on the host, so that the launch can be captured in a graph. See docs/merge-across-devices.md.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist

from numa_attention import peer_memory
from numa_attention.jit import Launcher, pointer_traits
from numa_attention.peer_memory import PeerMemory
from numa_attention.portable_launch import block_dim
from numa_attention.ranks import LostRank

BUFFERS = 2  # generations of partials that are kept apart
GONE = -1  # the flag of a rank that gave up
# of a workspace's `state`: whether this rank gave up, ticks that it waits, then the epoch of each workgroup
STATE_STOPPED, STATE_PATIENCE, STATE_EPOCHS = 0, 1, 2
# seconds that a rank waits for the others: longer than any of them takes to compile its kernels
PATIENCE = 60.0
# all of them fit on a device at a time, so that none waits for one that has no place yet; together they keep a link
# full of stores
WORKGROUPS = 64
BLOCK_ROWS = 4
NUM_WARPS = 4
ALIGNMENT = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# ticks a second of the clocks in clock_device.py: nanoseconds on NVIDIA; AMD's counter runs at 100 MHz on every CDNA so
# far; interpreted, a tick is one look at a flag, of which some ten thousand fit into a second
NVIDIA_RATE, AMD_RATE, INTERPRETED_RATE = 1_000_000_000, 100_000_000, 10_000


class Workspace:
    """The memory through which the ranks of one group exchange partials, for all layers of one shape.

    max_tokens: query tokens of the largest step. q_heads: of all ranks together. head_dim_v: columns of an output row.
    dtype: of the partials: float32, or a model's own to move half the bytes (and round each partial to it).
    patience: seconds that a launch waits for the other ranks before it gives up.

    All launches of a workspace run on one stream, in the same order and with the same number of tokens on every rank.
    """

    def __init__(
        self,
        memory: PeerMemory,
        *,
        max_tokens: int,
        q_heads: int,
        head_dim_v: int,
        dtype: torch.dtype = torch.float32,
        patience: float = PATIENCE,
        workgroups: int = WORKGROUPS,
    ) -> None:
        """memory: at least `bytes_needed` zeroed bytes a rank; `allocate` gets it. workgroups: at most WORKGROUPS."""
        self.rank, self.world = memory.rank, memory.world
        needed = bytes_needed(self.world, max_tokens, q_heads, head_dim_v, dtype)
        if memory.own.nbytes < needed:
            raise ValueError(f"the workspace needs {needed} bytes a rank; there are {memory.own.nbytes}")
        if patience <= 0:
            raise ValueError(f"patience is {patience}: give seconds above 0")
        device = memory.own.device
        self.max_tokens, self.heads, self.head_dim_v = max_tokens, q_heads // self.world, head_dim_v
        self.dtype, self.device, self.patience = dtype, device, patience
        self.memory, self.workgroups = memory, workgroups
        self.addresses = torch.tensor(memory.addresses, dtype=torch.int64, device=device)
        self.state = torch.zeros(STATE_EPOCHS + workgroups, dtype=torch.int64, device=device)
        self.state[STATE_PATIENCE] = round(patience * _ticks_per_second(device))
        # in the host's memory, where `check` reads it without waiting for the device
        self._missing = torch.zeros(self.world, dtype=torch.int64, pin_memory=device.type == "cuda")
        lse_bytes, partial_bytes = _offsets(self.world, max_tokens * self.heads)
        self._constants = dict(
            WORLD=self.world,
            HEADS=self.heads,
            HEAD_DIM_V=head_dim_v,
            BLOCK_DV=block_dim(head_dim_v),
            BLOCK_ROWS=BLOCK_ROWS,
            ROWS=max_tokens * self.heads,
            BUFFERS=BUFFERS,
            LSE_BYTES=lse_bytes,
            PARTIAL_BYTES=partial_bytes,
        )
        # layouts of calls that have passed `_check` -> strides, and constants of the kernel
        self._fitting: dict[tuple, tuple[tuple, dict]] = {}

    def check(self) -> None:
        """Raise `ranks.LostRank` if a rank was missed in a launch that has run. Costs no synchronisation.

        Call it once a step, when the step's results are on the host and before they are used.
        """
        missed = [(rank, epoch) for rank, epoch in enumerate(self._missing.tolist()) if epoch]
        if not missed:
            return
        told = [
            f"rank {rank} gave up waiting in or before launch {-epoch}"
            if epoch < 0
            else f"rank {rank} did not deliver launch {epoch} within {self.patience:g} s"
            for rank, epoch in missed
        ]
        raise LostRank(
            f"merging across devices failed on rank {self.rank}: {'; '.join(told)}. A rank that is missing died or "
            "stalled: look into its log, and restart all ranks. Outputs since then are NaN."
        )

    def bytes_sent(self, tokens: int) -> int:
        """Bytes that one rank stores into other ranks' memory in a launch of `tokens` query tokens, flags included."""
        rows = tokens * self.heads
        flags = min(self.workgroups, -(-rows // BLOCK_ROWS)) * 8
        return (self.world - 1) * (rows * (self.head_dim_v * self.dtype.itemsize + 4) + flags)


def bytes_needed(world: int, max_tokens: int, q_heads: int, head_dim_v: int, dtype: torch.dtype) -> int:
    """Bytes of memory a rank for a `Workspace`. Raises ValueError where the numbers do not go together."""
    for name, value in (("max_tokens", max_tokens), ("q_heads", q_heads)):
        if value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1")
    if world < 2 or q_heads % world:
        raise ValueError(
            f"{q_heads} query heads do not divide over {world} ranks: it takes two ranks or more"
        )
    if head_dim_v < 8 or head_dim_v % 8:
        raise ValueError(f"head_dim_v is {head_dim_v}: it must be a multiple of 8")
    if dtype not in DTYPES:
        raise ValueError(f"partials cannot be {dtype}: choose one of {', '.join(map(str, DTYPES))}")
    rows = max_tokens * q_heads // world
    return _offsets(world, rows)[1] + BUFFERS * world * rows * head_dim_v * dtype.itemsize


def _offsets(world: int, rows: int) -> tuple[int, int]:
    """Where LSEs and partials begin in a rank's memory."""
    lse_bytes = _aligned(WORKGROUPS * world * 8)
    return lse_bytes, lse_bytes + _aligned(BUFFERS * world * rows * 4)


def _ticks_per_second(device: torch.device) -> int:
    if device.type == "cpu":
        return INTERPRETED_RATE
    return AMD_RATE if torch.version.hip is not None else NVIDIA_RATE


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def allocate(
    group: dist.ProcessGroup,
    device: torch.device | str,
    *,
    max_tokens: int,
    q_heads: int,
    head_dim_v: int,
    dtype: torch.dtype = torch.float32,
    patience: float = PATIENCE,
) -> Workspace:
    """The workspace of this rank; every rank of `group` calls this, and gets one that has been tried out.

    Raises Unreachable on every rank where the GPUs cannot write into each other's memory, and says why: merge through
    collectives there. Raises ValueError as `bytes_needed`.
    """
    device = torch.device(device)
    size = bytes_needed(group.size(), max_tokens, q_heads, head_dim_v, dtype)
    memory = peer_memory.allocate(group, device, size)
    workspace = Workspace(
        memory, max_tokens=max_tokens, q_heads=q_heads, head_dim_v=head_dim_v, dtype=dtype, patience=patience
    )
    peer_memory.agree(group, try_out(workspace))
    return workspace


def try_out(workspace: Workspace) -> str:
    """What goes wrong in a few merges whose results are known, "" if nothing. Every rank calls this."""
    world, device = workspace.world, workspace.device
    heads, columns = workspace.heads, workspace.head_dim_v
    tokens = min(workspace.max_tokens, 3)
    column = torch.arange(columns, device=device) % 7
    for launch in range(world + BUFFERS):
        # one rank after the other has all the weight, in the end all have the same
        favoured = launch if launch < world else None
        values = [(column + rank + launch).to(workspace.dtype) for rank in range(world)]
        out = values[workspace.rank].expand(tokens, world * heads, columns).contiguous()
        lse = torch.zeros(tokens, world * heads, device=device)
        if favoured not in (None, workspace.rank):
            lse.fill_(-torch.inf)
        merged = torch.full((tokens, heads, columns), torch.nan, device=device)
        merge(out, lse, workspace, merged)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        try:
            workspace.check()
        except LostRank as error:
            return f"the first merges failed: {error}"
        expected = torch.stack(values).float().mean(0) if favoured is None else values[favoured].float()
        if not torch.allclose(merged, expected.expand_as(merged), rtol=1e-5, atol=1e-5):
            return f"merge number {launch + 1} of known numbers came out wrong"
    return ""


def merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: Workspace,
    merged: torch.Tensor,
    merged_lse: torch.Tensor | None = None,
) -> None:
    """Merge the ranks' attention over their parts of the context; each rank gets its own heads.

    out [tokens, q_heads, head_dim_v] of the workspace's dtype, lse float32 [tokens, q_heads], any strides: this rank's
    normalised outputs and natural LSEs of all heads, -inf where it saw no key. merged [tokens, own heads, head_dim_v],
    of any float type: the attention over all parts, 0 where none saw a key; merged_lse float32 [tokens, own heads]: its
    LSE. The last dimensions of out and merged are contiguous. merged may be this rank's own heads of `out`.

    The parts are merged in the order of the ranks, whoever came first. Where a rank is missing, merged and merged_lse
    become NaN and `Workspace.check` raises `ranks.LostRank`. Raises ValueError where the tensors do not fit.
    """
    _exchange(out, lse, workspace, merged, merged_lse, merges=True)


def gather(rows: torch.Tensor, workspace: Workspace, gathered: torch.Tensor) -> None:
    """Bring every rank's rows to all ranks, as queries are needed before all heads can be attended.

    rows [tokens, own heads, head_dim_v] of the workspace's dtype: this rank's. gathered [tokens, q_heads, head_dim_v]
    likewise: those of all ranks, rank 0 first. The last dimensions are contiguous. A workspace serves this and `merge`.

    Where a rank is missing, gathered becomes NaN and `Workspace.check` raises `ranks.LostRank`. Raises ValueError where
    the tensors do not fit.
    """
    _exchange(rows, None, workspace, gathered, None, merges=False)


def _exchange(out, lse, workspace: Workspace, merged, merged_lse, merges: bool) -> None:
    layout = (
        out.dtype, out.shape, out.stride(), None if lse is None else (lse.dtype, lse.shape, lse.stride()),
        merged.dtype, merged.shape, merged.stride(),
        None if merged_lse is None else (merged_lse.dtype, merged_lse.shape, merged_lse.stride()), out.device, merges,
    )  # fmt: skip
    p_lse = out if lse is None else lse
    p_merged_lse = p_lse if merged_lse is None else merged_lse
    fitting = workspace._fitting.get(layout)
    if fitting is None:
        _check(out, lse, workspace, merged, merged_lse, merges)
        strides = tuple(
            stride for tensor in (out, p_lse, merged, p_merged_lse) for stride in tensor.stride()[:2]
        )
        switches = {"HAS_LSE": merged_lse is not None, "MERGES": merges}
        fitting = strides, workspace._constants | switches
        workspace._fitting[layout] = fitting
    strides, constants = fitting
    tokens = out.shape[0]
    if not tokens:
        # without a row nobody waits for anybody, and a launch that counts but does not wait would lose the order
        return
    key = (
        out.get_device(), out.dtype, p_lse.dtype, merged.dtype, strides,
        pointer_traits(out, p_lse, merged, p_merged_lse), *constants.values(),
    )  # fmt: skip
    arguments = (
        out, p_lse, merged, p_merged_lse, workspace.addresses, workspace.state, workspace._missing, tokens,
        workspace.rank, *strides,
    )  # fmt: skip
    _launch(key, (workspace.workgroups, 1, 1), arguments, constants, {"num_warps": NUM_WARPS})


@cache
def _launcher() -> Launcher:
    # where everything is merged by collectives, Triton need not be there
    from numa_attention.across_devices_kernel import merge_across_kernel

    return Launcher(merge_across_kernel)


def _launch(key, grid, arguments, constants, options) -> None:
    _launcher()(key, grid, arguments, constants, options)


def _check(out, lse, workspace: Workspace, merged, merged_lse, merges: bool) -> None:
    tokens, heads = out.shape[0], workspace.heads
    if tokens > workspace.max_tokens:
        raise ValueError(
            f"a step of {tokens} tokens exceeds the workspace's max_tokens={workspace.max_tokens}"
        )
    everyone, columns, own = heads * workspace.world, workspace.head_dim_v, (workspace.dtype,)
    if merges:
        wanted = (
            ("out", out, own, (tokens, everyone, columns)),
            ("lse", lse, (torch.float32,), (tokens, everyone)),
            ("merged", merged, DTYPES, (tokens, heads, columns)),
            ("merged_lse", merged_lse, (torch.float32,), (tokens, heads)),
        )
    else:
        wanted = (
            ("rows", out, own, (tokens, heads, columns)),
            ("gathered", merged, own, (tokens, everyone, columns)),
        )
    for name, tensor, dtypes, shape in wanted:
        if tensor is None:
            continue
        if tensor.dtype not in dtypes or tensor.shape != shape:
            known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(f"{name} must be {known} {list(shape)}; got {tensor.dtype} {list(tensor.shape)}")
        if len(shape) == 3 and tensor.stride(-1) != 1:
            raise ValueError(
                f"the last dimension of {name} must be contiguous; its stride is {tensor.stride(-1)}"
            )
        if tensor.device != workspace.device:
            raise ValueError(f"{name} is on {tensor.device}, the workspace on {workspace.device}")
