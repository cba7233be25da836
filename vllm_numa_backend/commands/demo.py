"""numa-swizzle demo: serve a model through the backend, ask it something, show what ran."""

from __future__ import annotations

import json
import re
import signal
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from numa_attention.terminal import facts, print_table

from .. import NAME as BACKEND
from .. import settings
from . import UserError, installed
from .server import Server, ServerFailed, free_port

QUESTION = "What is gravity? Answer in two sentences."
EXAMPLE_MODEL = Path("models/smollm2-135m")
LOG_LINES_ON_FAILURE = 30
CAUSE_LINES = 8  # of an exception whose message is long
LONGEST_TIMEOUT_S = 24 * 3600
PHASES = ("prefill", "decode")
SERVED_NAME = "demo"
# "(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:100] message", of which only the message must be there
LOG_LINE = re.compile(
    r"(?P<process>\([^)]*pid=\d+\) ?)?(?:(?P<level>INFO|WARNING|ERROR|DEBUG) \S+ \S+ \[[^]]*\] ?)?(?P<message>.*)"
)
ERROR = re.compile(r"(?:[\w.]+\.)?(\w+(?:Error|Exception|Interrupt): .+)")
END_OF_MESSAGE = re.compile(
    r"Traceback |During handling|The above exception|\s*For further information|\[rank|\w+(\.\w+)*(Error|Exception): "
)
WORDS = re.compile(r"(?<!\S)[A-Za-z]{2,}(?![\w=])")
LONGEST_LINE = 160  # vLLM logs its whole configuration as one
HEARTBEAT_S = 15.0  # between signs of life where the output is not a terminal


def demo(
    model: Annotated[Path, typer.Argument(help="A Hugging Face model folder.")] = EXAMPLE_MODEL,
    question: Annotated[str, typer.Option(help="What to ask.")] = QUESTION,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")] = 96,
    backend: Annotated[str, typer.Option(help="The attention backend, to compare with another.")] = BACKEND,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the server.")] = 600.0,
) -> None:
    """Serve a model with vllm serve through NUMA_SWIZZLE, ask it something, and show what ran.

    The server ends with the command, also where that is interrupted or killed.
    """
    console = Console(highlight=False)
    check_timeout(timeout)
    check_model(model)
    if backend == BACKEND:
        check_settings()
    server = server_for(model, backend, free_port())
    # a plain kill must stop the server as well: make it an exception like Ctrl-C, which a background job may ignore
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup keeps its meaning
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        with server:
            try:
                start_s = wait(console, server, timeout)
                console.print(f"[green]ready[/] after {start_s:.0f} s")
                console.print(f"\n[bold]> {escape(question)}[/]", soft_wrap=True)
                report(console, server, backend, print_reply(console, server, question, max_tokens))
            except (ServerFailed, urllib.error.URLError, ConnectionError) as error:
                fail(server, str(error))
            except KeyboardInterrupt:
                console.print("\nstopping the server")
                raise
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def check_timeout(seconds: float) -> None:
    """Raise UserError unless it is a number of seconds that one can wait."""
    if not 1 <= seconds <= LONGEST_TIMEOUT_S:
        raise UserError(f"--timeout {seconds:g} is out of range: give 1 to {LONGEST_TIMEOUT_S:,} seconds.")


def check_model(model: Path) -> None:
    if (model / "config.json").is_file():
        return
    if model.is_file():
        what, folder = "a file, not a model folder", EXAMPLE_MODEL
    elif model.is_dir() and any(model.iterdir()):
        what, folder = "no model folder (it has no config.json)", EXAMPLE_MODEL
    else:
        what, folder = "no model folder (it has no config.json)", model
    raise UserError(f"{model} is {what}; make one with: numa-swizzle checkpoint {folder}")


def check_settings() -> None:
    """Refuse at once what the server would refuse after half a minute."""
    device_type = "cpu" if installed.vllm_is_cpu_build() else "cuda"
    try:
        reason = settings.why_unusable(settings.read(), device_type)
    except settings.SettingsError as error:
        reason = str(error)
    if reason:
        raise UserError(reason)


def server_for(model: Path, backend: str, port: int) -> Server:
    vllm = installed.command("vllm")
    if vllm is None or installed.vllm_distribution() is None:
        raise UserError("vLLM is not installed in this environment; README.md shows how to install it.")
    command = [vllm, "serve", str(model), "--served-model-name", SERVED_NAME, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--max-model-len", "2048", "--max-num-seqs", "4"]
    # on two CPU cores compiling takes longer than everything else here together
    command += ["--enforce-eager"] if installed.vllm_is_cpu_build() else ["--gpu-memory-utilization", "0.5"]
    environment = {
        "VLLM_ATTENTION_BACKEND": backend,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "NO_COLOR": "1",
    }
    if backend != BACKEND:
        # only our plugin reads the variable; vLLM itself takes an option
        del environment["VLLM_ATTENTION_BACKEND"]
        command += ["--attention-backend", backend]
    return Server(command, environment, port)


def wait(console: Console, server: Server, timeout: float) -> float:
    """Show the time and the server's last words until it is ready. Returns the seconds it took."""
    console.print(f"starting vllm serve (log: {server.log_path})", soft_wrap=True)
    next_line = HEARTBEAT_S

    def show(elapsed: float) -> None:
        nonlocal next_line
        text = f"{elapsed:4.0f} s  {last_message(server.log_lines())}"
        if console.is_terminal:
            status.update(f"[dim]{escape(shorten(text, console.width - 4))}[/]")
        elif elapsed >= next_line:
            console.print(shorten(text, LONGEST_LINE), markup=False, soft_wrap=True)
            next_line += HEARTBEAT_S

    with console.status("") as status:
        return server.wait_until_ready(timeout, show)


def shorten(text: str, width: int) -> str:
    """The text in one line of `width` characters, cut between words."""
    return textwrap.shorten(text, max(width, 20), placeholder=" ...")


def last_message(lines: list[str]) -> str:
    """The last line of vLLM's log that says something, without process, level, time and place."""
    for line in reversed(lines):
        if (
            (found := LOG_LINE.match(line))
            and found["level"] == "INFO"
            and len(WORDS.findall(found["message"])) > 2
        ):
            return found["message"].strip()
    return "loading vLLM"


@dataclass
class Reply:
    tokens: int
    first_token_s: float
    total_s: float

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first one."""
        return (self.tokens - 1) / max(self.total_s - self.first_token_s, 1e-9)


def print_reply(console: Console, server: Server, question: str, max_tokens: int) -> Reply:
    """Ask the question and print the answer as it comes."""
    started = time.monotonic()
    first_token_s = 0.0
    tokens = 0
    for event in chat(server.url, question, max_tokens):
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                first_token_s = first_token_s or time.monotonic() - started
                console.print(text, end="", markup=False, soft_wrap=True)
        if usage := event.get("usage"):
            tokens = usage["completion_tokens"]
    console.print("\n")
    if not tokens:
        raise ServerFailed("the server's answer was empty")
    return Reply(tokens, first_token_s, time.monotonic() - started)


def chat(url: str, question: str, max_tokens: int) -> Iterator[dict]:
    """The events of one streamed chat completion."""
    body = {
        "model": SERVED_NAME,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            data = line.decode().removeprefix("data: ").strip()
            if data and data != "[DONE]":
                yield json.loads(data)


def what_ran(log: str) -> dict[str, str]:
    """{"prefill": ..., "decode": ...}: the kernel variants the plugin says it launched."""
    return dict(re.findall(rf"{BACKEND} ({'|'.join(PHASES)}) of [^:]*: (.+)", log))


def report(console: Console, server: Server, backend: str, reply: Reply) -> None:
    """Print the figures, and insist that our kernels ran if they were asked for."""
    ran = what_ran(server.log())
    table = facts()
    table.add_row("backend", backend)
    for phase in PHASES:
        if phase in ran:
            table.add_row(phase, escape(ran[phase]))
    table.add_row("tokens", f"{reply.tokens}, first after {reply.first_token_s:.2f} s")
    table.add_row("decode", f"{reply.decode_rate:.1f} tokens/s")
    print_table(console, table)
    missing = [phase for phase in PHASES if phase not in ran]
    if backend == BACKEND and missing:
        fail(server, f"the server answered, but its log shows no {BACKEND} {' and no '.join(missing)}")


def fail(server: Server, message: str) -> NoReturn:
    """End with a sentence that names the cause, or where none is found after the end of the server's log."""
    lines = server.log_lines()
    cause = first_error(lines)
    where = f"The server's log is {server.log_path}"
    if cause:
        raise UserError(f"{message}: {cause.rstrip('.')}. {where}")
    if lines:
        errors = Console(stderr=True, highlight=False)
        errors.print("\n".join(lines[-LOG_LINES_ON_FAILURE:]), markup=False, style="dim", soft_wrap=True)
        where = f"The end of the server's log is above, all of it is {server.log_path}"
    raise UserError(f"{message}. {where}")


def first_error(lines: list[str]) -> str | None:
    """The first exception of a server's log, which is the cause of the later ones: its message, in one line."""
    parsed = [LOG_LINE.match(line) for line in lines]
    for number, found in enumerate(parsed):
        if not (error := ERROR.match(found["message"])):
            continue
        cause = [error[1]]
        for after in parsed[number + 1 : number + CAUSE_LINES]:
            # a record of its own, or the next part of a traceback
            if (after["process"], after["level"]) != (found["process"], found["level"]):
                break
            if not found["level"] and after["level"] or END_OF_MESSAGE.match(after["message"]):
                break
            cause.append(after["message"].strip())
        return " ".join(cause)
    return None
