"""Load vLLM and install the backend into it, in a process of its own; the last line of output is the result as JSON.

Importing vLLM logs freely and may fail in ways that end a process: doctor wants neither in its own.
"""

from __future__ import annotations

import json

from vllm_numa_backend import compat, selection, settings


def main() -> None:
    selection.install()
    try:
        selection.require_usable()
        problem = None
    except (ValueError, settings.SettingsError) as error:
        problem = str(error)
    release = compat.release()
    print(json.dumps({"release": release, "untested": compat.untested_release(release), "problem": problem}))


if __name__ == "__main__":
    main()
