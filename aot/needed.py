"""Which variants a model's shapes need, and what a build of these alone consists of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..artifacts.arch import Arch
from ..artifacts.declaration import Variant
from ..artifacts.errors import BuildError
from ..artifacts.rules import Rule, first_match
from ..kernels import KernelSpec, builtin
from ..kernels.tables import default_variants, rules
from .shapes import Shapes

# What each launch of the scan may need beside the kernels that headdim and dstate decide.
_ALWAYS = ("ssd_copy", "ssd_pass")
# A row of x is read in vectors of this many elements, else by `gemv_any`.
_VECTOR = 8


@dataclass(frozen=True)
class Use:
    """One kernel that calls of a shape get, on an architecture; no variant: there is none.

    `call` says which call, such as `in_proj m=2`; `default` whether a build has the variant without
    being asked.
    """

    call: str
    arch: Arch
    kernel: str
    variant: Variant | None
    default: bool
    rule: Rule | None = None


@dataclass(frozen=True)
class Needed:
    """Variants by kernel and architecture, and the rules that choose among them."""

    uses: tuple[Use, ...]

    def kernels(self) -> tuple[KernelSpec, ...]:
        """The kernels that are needed, sorted by name."""
        return tuple(builtin()[name] for name in sorted({use.kernel for use in self.uses}))

    def variants(self, spec: KernelSpec, arch: Arch) -> tuple[Variant, ...]:
        """The variants of a kernel that are needed, in the order of the declaration."""
        wanted = [use.variant for use in self.uses if (use.kernel, use.arch) == (spec.name, arch)]
        return tuple(variant for variant in spec.variants if variant in wanted)

    def rules(self, spec: KernelSpec, arch: Arch) -> tuple[Rule, ...]:
        """The rules that are needed, in their order."""
        wanted = [use.rule for use in self.uses if (use.kernel, use.arch) == (spec.name, arch)]
        return tuple(rule for rule in rules(spec, arch) if rule in wanted)


def needed(shapes: Shapes, archs: Iterable[Arch]) -> Needed:
    """What calls of these shapes get on each architecture."""
    uses: list[Use] = []
    for arch in archs:
        uses += _gemv(shapes, arch)
        for scan in shapes.scans:
            uses += _scan(
                f"scan {scan.headdim}x{scan.dstate}", shapes, scan.headdim, scan.dstate, arch
            )
    return Needed(tuple(uses))


def require_all(found: Needed) -> None:
    """Refuse shapes for which there is no kernel.

    Raises:
        BuildError: naming each.
    """
    missing = [f"{use.call} ({use.arch})" for use in found.uses if use.variant is None]
    if missing:
        raise BuildError(
            f"no variant is declared for {', '.join(missing)}",
            remedy="take these shapes out of the list",
        )


def _gemv(shapes: Shapes, arch: Arch) -> Iterator[Use]:
    fast, general = builtin()["gemv"], builtin()["gemv_any"]
    every = rules(fast, arch)
    batches = sorted({int(variant["m"]) for variant in general.variants})
    whens: dict[tuple[tuple[str, int], ...], dict[str, int]] = {}
    for shape in shapes.gemv:
        for rows in shapes.rows:
            m = next(m for m in batches if m >= rows)
            call = f"{shape.name} m={rows}"
            if shape.k % _VECTOR:
                yield from _any(call, general, arch, shapes.dtype, m)
                continue
            found = False
            for constant in (0, 1):
                when = {"m": m, "constant": constant}
                rule = first_match(every, when, {"n": shape.n, "k": shape.k})
                if rule is not None:
                    found = True
                    whens[tuple(rule.when.items())] = rule.when
                    how = " bound" if constant else ""
                    yield _by_rule(f"{call}{how}", fast, arch, shapes.dtype, rule)
            if not found:
                yield Use(call, arch, fast.name, None, default=False)
    # Calls of other sizes find something too: the last rule of each kind takes every size.
    for when in whens.values():
        last = [rule for rule in every if rule.when == when][-1]
        yield _by_rule("other sizes", fast, arch, shapes.dtype, last)


def _by_rule(call: str, spec: KernelSpec, arch: Arch, dtype: str, rule: Rule) -> Use:
    wanted = {"dtype": dtype, **rule.variant}
    variant = {name: wanted[name] for name in spec.declaration.choices}
    return Use(call, arch, spec.name, variant, default=True, rule=rule)


def _any(call: str, spec: KernelSpec, arch: Arch, dtype: str, m: int) -> Iterator[Use]:
    for variant in spec.variants:
        if (variant["dtype"], variant["m"], variant["wide"]) == (dtype, m, 0):
            yield Use(call, arch, spec.name, variant, default=True)


def _scan(call: str, shapes: Shapes, headdim: int, dstate: int, arch: Arch) -> Iterator[Use]:
    scan, prepare = builtin()["ssd_scan"], builtin()["ssd_prepare"]
    wanted = {"dtype": shapes.dtype, "headdim": headdim, "dstate": dstate}
    found = [v for v in scan.variants if wanted.items() <= v.items() and scan.is_for(v, arch)]
    if not found:
        yield Use(call, arch, scan.name, None, default=False)
        return
    shipped = default_variants(scan, arch)
    for variant in found:
        yield Use(call, arch, scan.name, variant, default=variant in shipped)
    tiles = {variant["tile"] for variant in found}
    shipped = default_variants(prepare, arch)
    for variant in prepare.variants:
        same = (variant["dtype"], variant["dstate"]) == (shapes.dtype, dstate)
        if same and variant["tile"] in tiles and prepare.is_for(variant, arch):
            yield Use(call, arch, prepare.name, variant, default=variant in shipped)
    for name in _ALWAYS:
        for variant in builtin()[name].variants:
            yield Use(call, arch, name, variant, default=True)
