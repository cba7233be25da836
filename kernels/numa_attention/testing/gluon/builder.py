"""The emulating builder: computes at once what the compiler's builder would write down."""

from __future__ import annotations

from numa_attention.testing.gluon.arithmetic import Arithmetic
from numa_attention.testing.gluon.barriers import BarrierOperations
from numa_attention.testing.gluon.faults import GluonFault, Race
from numa_attention.testing.gluon.matrix_products import MatrixProducts
from numa_attention.testing.gluon.scheduler import Partition
from numa_attention.testing.gluon.values import Type, Value


class EmulatingBuilder(Arithmetic, BarrierOperations, MatrixProducts):
    """All operations, and the regions in which a reduction's combine function is called."""

    def check_nothing_outstanding(self, partition: Partition) -> None:
        """At the end of a partition; raises GluonFault."""
        for operation in partition.outstanding():
            raise Race(f"{operation.what} at {operation.where} is never waited for")
        if partition.cluster_arrival is not None:
            raise GluonFault(f"the cluster arrive at {partition.cluster_arrival_at} has no wait after it")

    def create_block_with_parent(self, region: Region, types: list[Type]) -> Region:
        region.types = types
        return region

    def create_reduce_ret(self, *results: Value) -> None:
        self._region.results = [result.data for result in results]

    create_scan_ret = create_reduce_ret

    def open_region(self, operands: list) -> Region:
        self._region = Region(operands)
        return self._region


class Region:
    """One call of a combine function, which is written for scalars, on whole tensors of them.

    It plays the compiler's reduce operation, that operation's region and the region's block.
    """

    def __init__(self, operands: list) -> None:
        self._operands = operands  # torch tensors: all left ones, then all right ones
        self.types: list[Type] = []
        self.results: list = []

    def get_region(self, index: int) -> Region:
        return self

    def arg(self, index: int) -> Value:
        return Value(self._operands[index], self.types[index])
