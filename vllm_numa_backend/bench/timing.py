"""Timing by graph replay over buffers that together exceed the L2."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

REPLAYS = 9
GRAPH_SECONDS = 0.01  # a graph long enough that its launch does not count


def time_calls(call: Callable[[int], None], copies: int) -> float:
    """Median seconds of one `call(copy)`; copies are used in turn, so that no call finds its data in the L2.

    The calls are captured in one graph, which is replayed REPLAYS times and timed with device events.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for copy in range(copies):
            call(copy)
        stream.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for copy in range(copies):
            call(copy)
        end.record()
        end.synchronize()
        rounds = max(1, min(50, round(GRAPH_SECONDS * 1e3 / max(start.elapsed_time(end), 1e-3))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                for copy in range(copies):
                    call(copy)
        graph.replay()
        stream.synchronize()
        times = []
        for _ in range(REPLAYS):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / (rounds * copies))
    return statistics.median(times)


def time_few(call: Callable[[], None], seconds: float = 0.3, most: int = 20) -> float:
    """Median seconds of one call, for calls long enough that their launch does not count: at least one is timed.

    As many as `seconds` have room for, after one that warms up.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times: list[float] = []
    call()
    torch.cuda.synchronize()
    while not times or (len(times) < most and sum(times) + times[-1] <= seconds):
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
