"""The example in the documentation runs, and prints what the documentation says."""

import re
import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "gluon-interpreter.md"


def test_the_example_runs(tmp_path):
    text = DOCUMENT.read_text()
    example = tmp_path / "example.py"
    example.write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1))
    run = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    promised = " ".join(line.removeprefix("> ") for line in text.splitlines() if line.startswith("> "))
    assert promised in run.stdout
