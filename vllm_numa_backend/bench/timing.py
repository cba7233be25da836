"""Timing by graph replay over buffers that together exceed the L2."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

REPLAYS = 9
GRAPH_SECONDS = 0.01  # a graph long enough that its launch does not count


def time_calls(call: Callable[[int], None], copies: int) -> float:
    """Median seconds of one `call(copy)`; copies are used in turn, so that no call finds its data in the L2.

    The calls are captured in one graph, which is replayed REPLAYS times and timed with device events.
    """
    return time_in_turns([call], copies)[0]


def time_in_turns(calls: Sequence[Callable[[int], None]], copies: int) -> list[float]:
    """The same for several contestants, whose graphs are replayed in turns.

    A device that draws all the power it may slows its clock, for as long as a moment and whoever runs then: so each
    contestant is timed under the clocks that all of them together leave.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graphs = [_capture(call, copies, stream) for call in calls]
        for graph, _ in graphs:
            graph.replay()
        stream.synchronize()
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(REPLAYS):
            for (graph, count), own in zip(graphs, times, strict=True):
                own.append(_seconds(graph.replay) / count)
    return [statistics.median(own) for own in times]


def _capture(
    call: Callable[[int], None], copies: int, stream: torch.cuda.Stream
) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of calls that takes about GRAPH_SECONDS, and how many they are."""
    for copy in range(copies):
        call(copy)
    stream.synchronize()

    def once() -> None:
        for copy in range(copies):
            call(copy)

    rounds = max(1, min(50, round(GRAPH_SECONDS / max(_seconds(once), 1e-6))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            once()
    return graph, rounds * copies


def _seconds(work: Callable[[], object]) -> float:
    """Seconds that the device takes for some work."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def time_few(calls: Sequence[Callable[[], object]], seconds: float = 0.3, most: int = 20) -> list[float]:
    """Median seconds of a call of each contestant, for calls so long that their launch does not count.

    They take turns, as in `time_in_turns`, as often as `seconds` each have room for, but once at least.
    """
    if not calls:
        return []
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    torch.cuda.synchronize()
    while not times[0] or (len(times[0]) < most and max(sum(own) + own[-1] for own in times) <= seconds):
        for call, own in zip(calls, times, strict=True):
            own.append(_seconds(call))
    return [statistics.median(own) for own in times]
