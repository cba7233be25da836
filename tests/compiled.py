"""Reports of scripts that compile kernels, which a process that interprets kernels cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from numa_attention.jit import SETTING


def reports_of(
    script: Path, cache: Path, *arguments: str, key: str = "name", timeout: int = 600
) -> dict[str, dict]:
    """What a script prints, a report as JSON a line, by the report's `key`. cache: an empty folder for Triton."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", SETTING)
    }
    environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return {report[key]: report for report in map(json.loads, done.stdout.splitlines())}
