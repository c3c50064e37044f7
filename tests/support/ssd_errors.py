"""How far results of the scan's kernels, run without a GPU, may be from the scan in float64."""

from __future__ import annotations

from ssd_machine import Launcher, Problem, Result

# Relative L2 errors. Rounding once to bfloat16 leaves 1.66e-3: that of B in states, which come in
# fp32 and, at the ends of sequences, rounded once more; in out those of weights, state and itself.
# Rounding to float16 leaves an eighth.
BOUNDS = {
    "bf16": {"out": 2.9e-3, "final": 2.0e-3, "ends": 2.6e-3},
    "f16": {"out": 3.7e-4, "final": 2.5e-4, "ends": 3.3e-4},
}


def errors(found: Result, wanted: Result) -> dict[str, float]:
    """Relative L2 errors; infinite where anything is not finite."""
    assert found.keys() == wanted.keys()
    result = {}
    for name, its in wanted.items():
        assert found[name].shape == its.shape
        apart = float((found[name].double() - its).norm() / its.norm().clamp(min=1e-9))
        result[name] = apart if apart == apart else float("inf")
    return result


def excess(found: Result, wanted: Result, dtype: str = "bf16") -> float:
    """The largest error, over what it may be."""
    return max(error / BOUNDS[dtype][name] for name, error in errors(found, wanted).items())


def check(launcher: Launcher, problem: Problem) -> Result:
    found = launcher.run(problem)
    for name, error in errors(found, problem.wanted()).items():
        assert error <= BOUNDS[problem.dtype][name], f"{name} is off by {error:.2e}"
    return found
