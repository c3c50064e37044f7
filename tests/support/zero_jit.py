"""Prefill and decode of a small Mamba2 model of transformers; what was compiled meanwhile, as JSON.

    python zero_jit.py [--patch] [--mamba-ssm] [--stop]

Run from a fresh process. With --mamba-ssm its Triton kernels are there for transformers to bind,
without it they are hidden. With --stop it ends at the first thing that is compiled.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

PROMPT, DECODED, BATCH = 40, 4, 2
# What shows in /proc/self/maps if the driver or a library compiles.
COMPILERS = ("ptxjitcompiler", "nvrtc", "nvJitLink", "libLLVM")


class Stopped(BaseException):
    """Something was compiled, and --stop was given; no handler of errors may hide it."""


class Watch:
    """What was compiled, tuned or started since this object was made."""

    def __init__(self, stop: bool) -> None:
        """Hook Triton, if it is installed, and the start of other processes."""
        self.compiled: list[str] = []
        self.tuned: list[str] = []
        self.processes: list[str] = []
        self._stop = stop
        self._libraries = self._mapped()
        sys.addaudithook(self._audit)
        if importlib.util.find_spec("triton") is not None:
            self._hook_triton()

    def data(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "compiled": self.compiled,
            "tuned": sorted(set(self.tuned)),
            "processes": self.processes,
            "libraries": sorted(self._mapped() - self._libraries),
        }

    def _hook_triton(self) -> None:
        tuner_class = importlib.import_module("triton.runtime.autotuner").Autotuner
        function_class = importlib.import_module("triton.runtime.jit").JITFunction
        compile_one, bench = function_class._do_compile, tuner_class._bench

        def do_compile(function: Any, *arguments: Any, **named: Any) -> Any:
            self._note(self.compiled, f"{function.fn.__module__}.{function.fn.__name__}")
            return compile_one(function, *arguments, **named)

        def do_bench(tuner: Any, *arguments: Any, **named: Any) -> Any:
            function = tuner.base_fn
            self._note(self.tuned, f"{function.__module__}.{function.__name__}")
            return bench(tuner, *arguments, **named)

        function_class._do_compile = do_compile
        tuner_class._bench = do_bench

    def _note(self, seen: list[str], name: str) -> None:
        seen.append(name)
        if self._stop:
            raise Stopped

    def _audit(self, event: str, arguments: Any) -> None:
        if event in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system"):
            self.processes.append(" ".join(map(str, arguments[1] if arguments[1:] else arguments)))

    @staticmethod
    def _mapped() -> set[str]:
        files = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
        names = {Path(file).name for file in files}
        return {name for name in names if any(word in name for word in COMPILERS)}


def main() -> None:
    """Run it, and print one line of JSON last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--patch", action="store_true")
    parser.add_argument("--mamba-ssm", action="store_true")
    parser.add_argument("--stop", action="store_true")
    options = parser.parse_args()
    import torch

    # The context and cuBLAS are the process's own; what they load is not counted.
    x = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    torch.mm(x, x).cpu()
    watch = Watch(options.stop)
    if options.mamba_ssm:
        from sonata_aot.aot.measure import mamba_opponent

        mamba_opponent.load()
    else:
        sys.modules["mamba_ssm"] = None  # pyright: ignore[reportArgumentType]
    from small_models import generate, make, tokens

    model = make("mamba2", 64, 128, hidden=256).cuda()
    entries: list[dict[str, Any]] = []
    try:
        if options.patch:
            from sonata_aot import loader

            loader.load(strict=True)
            report = loader.patch(model)
        generate(model, tokens(BATCH, PROMPT, "cuda"), DECODED)
        torch.cuda.synchronize()
        if options.patch:
            print(report)  # pyright: ignore[reportPossiblyUnboundVariable]
            entries = [
                {
                    "module": entry.module,
                    "kernel": entry.kernel,
                    "calls": entry.calls,
                    "left": dict(entry.original_calls),
                }
                for entry in report  # pyright: ignore[reportPossiblyUnboundVariable]
            ]
    except Stopped:
        pass
    print(json.dumps({**watch.data(), "entries": entries}))


if __name__ == "__main__":
    main()
