"""The process that compiles: reads one JSON task a line, answers one JSON line each.

It runs in an empty folder of its own, sees no GPU, and is the only part of the tool that imports
the compiler. Its standard input and output belong to the protocol: kernels read nothing from there,
and what the compiler prints goes to the log.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1
# Characters of a reason; all of it is in the log.
_MOST = 200


def environment_for_worker(
    environ: dict[str, str], scratch: str, path: Iterable[str] = ()
) -> dict[str, str]:
    """This process's environment without what could change the output or reach a GPU.

    `path` is where the worker looks for modules, before where it would look anyway: given this
    process's own, it compiles the very files that the cache key was made from.
    """
    clean = {name: value for name, value in environ.items() if not name.startswith("CUTE_DSL_")}
    clean["CUDA_VISIBLE_DEVICES"] = ""
    if absolute := absolute_entries(path):
        clean["PYTHONPATH"] = os.pathsep.join(absolute)
    # The compiler's own caches would answer for sources that have changed.
    clean["CUTE_DSL_NO_CACHE"] = "1"
    # It names its files in an option, which must be UTF-8 and without quotes; the folder need not.
    clean["CUTE_DSL_DUMP_DIR"] = os.curdir
    clean["CUTE_DSL_CACHE_DIR"] = scratch
    return clean


def absolute_entries(path: Iterable[str]) -> list[str]:
    """Entries of a module search path, for a process with another working directory."""
    return [os.path.abspath(entry) for entry in path]


def describe(error: BaseException, module: str) -> dict[str, str]:
    """A failed compile in one line, where in the kernel's own file and why, and that source line.

    The compiler wraps an error of the kernel's code in one of its own, whose first line says in
    colour what it was doing.
    """
    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) and inner not in chain:
        chain.append(inner)
    source = getattr(sys.modules.get(module), "__file__", None)
    frames = [
        frame
        for item in chain
        for frame in traceback.extract_tb(item.__traceback__)
        if frame.filename == source
    ]
    outer, reason = _first_line(error), _first_line(chain[-1])
    shown = outer if reason in outer else f"{outer} ({reason})"
    if not frames:
        return {"error": shown}
    line = frames[-1].line or ""
    return {"error": f"{source}:{frames[-1].lineno}: {shown}", "source": line}


def _first_line(error: BaseException) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    line = (text or type(error).__name__).splitlines()[0].removeprefix("error: ")
    return line if len(line) <= _MOST else f"{line[:_MOST].rstrip()}..."


def main() -> None:
    """Serve tasks until standard input ends.

    Arguments are where to look for modules: as PYTHONPATH, which cannot hold a colon.
    """
    import ctypes  # not for the build, which imports this module too

    # Die with the parent, even if it is killed; a compile must not outlive its build.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.path[:0] = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    tasks = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)
    from .device_check import check_task
    from .recipe import compile_task

    for line in tasks:
        task = json.loads(line)
        try:
            check_task(task)
            answer = {"ok": True, **compile_task(task)}
        except Exception as error:
            traceback.print_exc()
            answer = {"ok": False, **describe(error, task["module"])}
        sys.stderr.flush()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
