"""Runs a command and ends its process group when whoever started this ends, in whatever way.

    python guard.py PATIENCE COMMAND...     with a pipe as standard input, which the starter holds open

The end of the pipe is the end of the starter, also where that was killed without a word. The group, of which this is
the leader, is then asked to end, and after PATIENCE seconds killed: vLLM ignores the request while it loads a model.
Standard library only: a script that starts in no time.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

POLL_S = 0.1


def main(patience_s: float, command: list[str]) -> int:
    """Returns the command's exit code, 128 and the signal's number where a signal ended it."""
    # not SIG_IGN, which the command would inherit: a request to the group is for the others
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while process.poll() is None:
        starter_ended, _, _ = select.select([sys.stdin], [], [], POLL_S)
        if starter_ended:
            end_group(process, patience_s)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def end_group(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """Ask, then insist. Does not return: this process is in the group."""
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
