"""The process that compiles: reads one JSON task a line, answers one JSON line each.

It runs in an empty folder of its own, sees no GPU, and is the only part of the tool that imports
the compiler. Its standard output belongs to the protocol; what the compiler prints goes to the log.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback

_PR_SET_PDEATHSIG = 1


def environment_for_worker(environ: dict[str, str], scratch: str) -> dict[str, str]:
    """This process's environment without what could change the output or reach a GPU."""
    clean = {name: value for name, value in environ.items() if not name.startswith("CUTE_DSL_")}
    clean["CUDA_VISIBLE_DEVICES"] = ""
    # The compiler's own caches would answer for sources that have changed.
    clean["CUTE_DSL_NO_CACHE"] = "1"
    clean["CUTE_DSL_CACHE_DIR"] = scratch
    return clean


def _where(error: BaseException, module: str) -> str:
    """The innermost line of the kernel's own file that the failure passed through."""
    source = getattr(sys.modules.get(module), "__file__", None)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == source]
    return f"{source}:{frames[-1].lineno}: " if frames else ""


def main() -> None:
    """Serve tasks until standard input ends."""
    # Die with the parent, even if it is killed; a compile must not outlive its build.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from .recipe import compile_task

    for line in sys.stdin:
        task = json.loads(line)
        try:
            answer = {"ok": True, **compile_task(task)}
        except Exception as error:
            traceback.print_exc()
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            answer = {"ok": False, "error": _where(error, task["module"]) + first}
        sys.stderr.flush()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
