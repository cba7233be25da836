"""Counters of the L2 and of memory, as NVIDIA's Nsight Compute (ncu) reports them."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
from collections.abc import Sequence

METRICS = {
    "lts__t_sectors.sum": "sectors",
    "lts__t_sectors_lookup_hit.sum": "sector_hits",
    "lts__t_sectors_lookup_miss.sum": "sector_misses",
    "lts__t_sectors_srcunit_tex.sum": "sm_sectors",
    "lts__t_sectors_srcunit_tex_lookup_hit.sum": "sm_sector_hits",
    "lts__t_sectors_srcunit_tex_lookup_miss.sum": "sm_sector_misses",
    "dram__bytes_read.sum": "hbm_bytes",
    "dram__bytes_write.sum": "hbm_write_bytes",
    "gpu__time_duration.sum": "seconds",
}
# requests that one partition of the L2 makes of the other; not every chip counts them
BETWEEN_PARTITIONS = {"lts__t_sectors_srcunit_ltcfabric.sum": "partition_sectors"}
SECTOR_BYTES = 32
UNITS = {
    "": 1.0,
    "sector": 1.0,
    "byte": 1.0,
    "Kbyte": 1e3,
    "Mbyte": 1e6,
    "Gbyte": 1e9,
    "Tbyte": 1e12,
    "ns": 1e-9,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "nsecond": 1e-9,
    "usecond": 1e-6,
    "msecond": 1e-3,
    "second": 1.0,
}


class NoCounters(RuntimeError):
    """ncu gave no counters; the message says why, as far as it is known."""


def find_ncu() -> str:
    """The path of ncu. Raises NoCounters where there is none."""
    found = shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")
    if found is None:
        raise NoCounters("ncu is not installed: it comes with NVIDIA Nsight Compute.")
    return found


def watch(
    command: Sequence[str],
    kernel: str,
    launches: int,
    *,
    metrics: dict[str, str] = METRICS,
    timeout: float | None = None,
) -> list[dict[str, float]]:
    """Run a command under ncu: the counters of its first `launches` launches of a kernel, in their order.

    kernel: a regular expression. timeout: seconds. Raises NoCounters.
    """
    line = [find_ncu(), "--csv", "--page", "raw", "--print-units", "base", "--kernel-name", f"regex:{kernel}"]
    line += ["--launch-count", str(launches), "--metrics", ",".join(metrics), *command]
    try:
        done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise NoCounters(f"ncu took longer than {timeout:.0f} s.") from None
    rows = [row for row in done.stdout.splitlines() if row.startswith('"')]
    if done.returncode or len(rows) < 3:
        raise NoCounters(f"ncu gave no counters (exit code {done.returncode}).\n{done.stdout}\n{done.stderr}")
    found = parse(rows, metrics)
    if len(found) != launches:
        raise NoCounters(f"ncu saw {len(found)} of {launches} launches.\n{done.stdout}\n{done.stderr}")
    return found


def parse(rows: list[str], metrics: dict[str, str] = METRICS) -> list[dict[str, float]]:
    """Counters from ncu's raw page: a line of names, a line of units, a line of values for each launch.

    Raises NoCounters where one is missing.
    """
    names, units, *launches = csv.reader(io.StringIO("\n".join(rows)))
    counted = []
    for values in launches:
        found = {}
        for name, unit, value in zip(names, units, values, strict=True):
            if name in metrics and value not in ("", "n/a"):
                found[metrics[name]] = float(value.replace(",", "")) * UNITS[unit]
        missing = [name for name, short in metrics.items() if short not in found]
        if missing:
            raise NoCounters(f"ncu did not report {', '.join(missing)}.")
        counted.append(found)
    return counted


def rates(found: dict[str, float]) -> dict[str, float]:
    """hit_rate: of what the SMs ask for. hit_rate_all: with the requests between the two partitions."""
    return found | {
        "hit_rate": found["sm_sector_hits"] / (found["sm_sector_hits"] + found["sm_sector_misses"]),
        "hit_rate_all": found["sector_hits"] / (found["sector_hits"] + found["sector_misses"]),
    }
