"""A vLLM server in a process group of its own that ends with the command that started it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from . import guard

STOP_PATIENCE_S = 15.0


class ServerFailed(Exception):
    """The server stopped by itself or did not become ready in time; the message says which."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """One server process. Use as a context manager: leaving it, in whatever way, stops the whole process group.

    The log is removed with it, unless an error leaves the context: not an interrupt. Where this process
    is killed without a word, guard.py ends the group.
    """

    def __init__(self, command: list[str], environment: dict[str, str], port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = command
        self._environment = environment
        self._log, path = tempfile.mkstemp(prefix="numa-swizzle-", suffix=".log")
        self.log_path = Path(path)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self._process = subprocess.Popen(
            [sys.executable, guard.__file__, str(STOP_PATIENCE_S), *self._command],
            env=os.environ | self._environment,
            stdin=subprocess.PIPE,  # its end tells the guard that this process ended
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop()
        os.close(self._log)
        if kind is None or not issubclass(kind, Exception):
            self.log_path.unlink(missing_ok=True)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def log_lines(self) -> list[str]:
        return [line for line in self.log().splitlines() if line.strip()]

    def wait_until_ready(self, timeout_s: float, on_wait: Callable[[float], None]) -> float:
        """Poll /health until it answers; calls on_wait(elapsed seconds) meanwhile. Returns the seconds it took.

        Raises ServerFailed when the process ends or the time is up.
        """
        assert self._process is not None, "the server is started by entering it"
        started = time.monotonic()
        while True:
            elapsed = time.monotonic() - started
            if (code := self._process.poll()) is not None:
                raise ServerFailed(f"vllm serve ended with exit code {code} before it was ready")
            if self._healthy():
                return elapsed
            if elapsed > timeout_s:
                raise ServerFailed(f"vllm serve was not ready after {timeout_s:.0f} s")
            on_wait(elapsed)
            time.sleep(0.2)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def stop(self) -> None:
        """Ask the process group to end, then insist."""
        process = self._process
        if process is None:
            return
        # the workers are in the server's group: they are ended with it even if it died first
        for wish, patience in ((signal.SIGTERM, STOP_PATIENCE_S), (signal.SIGKILL, STOP_PATIENCE_S)):
            try:
                os.killpg(process.pid, wish)
            except ProcessLookupError:
                break
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline and self._group_alive(process):
                time.sleep(0.1)
        process.wait()
        process.stdin.close()

    @staticmethod
    def _group_alive(process: subprocess.Popen[bytes]) -> bool:
        process.poll()  # reap the leader, or a zombie keeps the group
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return False
        return True
