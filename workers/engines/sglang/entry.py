"""Starts SGLang in its own environment, with its key out of the environment instead of the command line.

Run by the interpreter that SGLang is installed for, as a file: standard library only, and nothing of this
product. SGLang takes its key by a flag, and command lines can be read by everyone on the machine; this one
grows by it inside the process only.
"""

from __future__ import annotations

import os
import runpy
import sys

_KEY = "EXAOPS_ENGINE_API_KEY"

if __name__ == "__main__":
    key = os.environ.pop(_KEY, "")
    if key:
        sys.argv += ["--api-key", key]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
