"""A seeded mutator of artifact sets: bytes that no reader may take for the real ones."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from artifact_sets import Made, leaves, put, seal, unsealed


class Mutant(NamedTuple):
    """What was done, and the files afterwards.

    `sealed` is true where the manifest is sound and has the right digest, so that only a
    comparison with the files can tell.
    """

    done: str
    manifest: bytes
    objects: dict[str, bytes]
    sealed: bool = False


Mutator = Callable[[random.Random, Made], Mutant]


def mutate(seed: int, made: Made) -> Mutant:
    """The mutant of a seed; never equal to the original."""
    rng = random.Random(seed)
    original = (made.manifest.to_bytes(), made.objects)
    while True:
        mutant = rng.choices(*zip(*_MUTATORS, strict=True))[0](rng, made)
        if (mutant.manifest, mutant.objects) != original:
            return mutant


def _edited(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    at = rng.randrange(len(data))
    end = min(len(data), at + rng.choice((1, 2, 4, 16, 256)))
    match rng.randrange(7):
        case 0:
            bit = 1 << rng.randrange(8)
            return f"bit {bit} of byte {at}", data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
        case 1:
            return f"cut at {at}", data[:at]
        case 2:
            return f"without {at}..{end}", data[:at] + data[end:]
        case 3:
            return f"random {at}..{end}", data[:at] + rng.randbytes(end - at) + data[end:]
        case 4:
            return f"{at}..{end} twice", data[:end] + data[at:end] + data[end:]
        case 5:
            return f"zeros {at}..{end}", data[:at] + bytes(end - at) + data[end:]
        case _:
            return "longer", data + rng.choice((b"\0", b"\n", b" ", data, rng.randbytes(64)))


def _edit_manifest(rng: random.Random, made: Made) -> Mutant:
    done, data = _edited(rng, made.manifest.to_bytes())
    return Mutant(f"manifest: {done}", data, made.objects)


def _edit_object(rng: random.Random, made: Made) -> Mutant:
    name = rng.choice(sorted(made.objects))
    done, data = _edited(rng, made.objects[name])
    return Mutant(
        f"{name}: {done}", made.manifest.to_bytes(), {**made.objects, name: data}, sealed=True
    )


def _move_objects(rng: random.Random, made: Made) -> Mutant:
    one, other = rng.sample(sorted(made.objects), 2)
    objects = dict(made.objects)
    match rng.randrange(4):
        case 0:
            done = f"{one} and {other} swapped"
            objects[one], objects[other] = objects[other], objects[one]
        case 1:
            done = f"{one} in place of {other}"
            objects[other] = objects[one]
        case 2:
            done = f"no {one}"
            del objects[one]
        case _:
            done = f"{one} emptied"
            objects[one] = b""
    return Mutant(done, made.manifest.to_bytes(), objects, sealed=True)


_TOKENS = (
    *(b"9" * 5000, b"9" * 4000, b"-1", b"1e999", b"NaN", b"1.5", b"0x10"),
    *(b"true", b"null", b'""', b"{}", b"// x", b"\0"),
    *(b"[" * 100_000, b'{"a":' * 100_000, b"[" * 900 + b"]" * 900),
    *(b'"\xff"', b'"\\ud800"', b'"' + b"x" * 10**6 + b'"', b'"../../../etc/passwd"'),
)


def _insert_token(rng: random.Random, made: Made) -> Mutant:
    data = made.manifest.to_bytes()
    value = rng.choice(list(re.finditer(rb'(?<=":)(?:"[^"]*"|\d+|null|true|false|[{[])', data)))
    token = rng.choice(_TOKENS)
    data = data[: value.start()] + token + data[value.end() :]
    return Mutant(f"{token[:12]!r} at {value.start()}", data, made.objects)


def _move_lines(rng: random.Random, made: Made) -> Mutant:
    mark = rng.choice((b"\n", b","))
    lines = made.manifest.to_bytes().split(mark)
    one, other = rng.sample(range(len(lines)), 2)
    match rng.randrange(3):
        case 0:
            lines.insert(other, lines[one])
        case 1:
            lines[one], lines[other] = lines[other], lines[one]
        case _:
            del lines[one]
    return Mutant(f"{mark!r}: {one} and {other}", mark.join(lines), made.objects)


# Facts about the files, which a manifest with a fitting digest cannot change unseen.
_FACTS = (
    "registers",
    "stack_bytes",
    "spills",
    "static_shared_bytes",
    "size",
    "min_cuda",
    "isa",
    "sha256",
)


def _seal_another(rng: random.Random, made: Made) -> Mutant:
    content = made.content()
    facts = [
        (way, old) for way, old in leaves(content) if way[-1] in _FACTS and "budget" not in way
    ]
    way, old = rng.choice(facts)
    new: Any = old
    if isinstance(old, int):
        new = rng.choice((0, old + 1, old - 1, rng.randrange(2**20), rng.randrange(256)))
    elif way[-1] == "sha256":
        new = rng.choice(
            [value for at, value in facts if at[-1] == "sha256"] + [rng.randbytes(32).hex()]
        )
    elif old is not None:
        new = rng.choice(("7.0", "8.7", "9.9", "11.8", "12.8", "13.0"))
    put(content, way, new)
    return Mutant(f"sealed {way}: {new}", seal(content), made.objects, sealed=True)


def _seal_other_files(rng: random.Random, made: Made) -> Mutant:
    """The files of one binary in the record of another, digests and sizes fitting."""
    content = made.content()
    one, other = rng.sample(content["binaries"], 2)
    kind = rng.choice(("cubin", "ptx"))
    one[kind], other[kind] = other[kind], one[kind]
    return Mutant(f"sealed: {kind} exchanged", seal(content), made.objects, sealed=True)


def _seal_unsound_rules(rng: random.Random, made: Made) -> Mutant:
    """Rules that no longer fit one another or the binaries, under a digest that fits."""
    content = made.content()
    rules = content["rules"]
    rule = rng.choice(rules)
    last = [r for r in rules if r["sizes"]["first"][0] <= 1]
    match rng.randrange(9):
        case 0:
            done = "without a last rule"
            rules.remove(last[0])  # of the two for its `when`, the one that takes every size
        case 1:
            done = "a rule twice"
            rules.insert(rng.randrange(len(rules) + 1), rule)
        case 2:
            done = "a rule that is never used"
            unused = copy.deepcopy(rng.choice(last))
            unused["sizes"]["first"] = [rng.randrange(1, 10), rng.randrange(10, 99)]
            rules.append(unused)
        case 3:
            done = "no such variant"
            rule["variant"]["slots"] = rng.choice((0, 15, 32, "slots"))
        case 4:
            done = "no such kernel or arch"
            rule.update(rng.choice(({"kernel": "even"}, {"arch": "sm80"}, {"arch": "sm90"})))
        case 5:
            done = "a hole in a last rule"
            sizes = rng.choice(last)["sizes"]
            sizes[rng.choice(sorted(sizes))][:] = rng.choice(([2, 2**31 - 1], [1, 2**31 - 2]))
        case 6:
            done = "an empty range"
            rule["sizes"][rng.choice(sorted(rule["sizes"]))] = [9, 8]
        case 7:
            done = "another name"
            part = rule[rng.choice(("when", "sizes", "variant", "launch"))]
            name, value = part.popitem()
            part[rng.choice((name + "x", "scale", "source"))] = value
        case _:
            done = "a name more"
            part = rng.choice(("when", "variant", "launch"))
            rule[part][rng.choice(("dtype", "more"))] = rng.choice((0, 16))
    return Mutant(f"sealed rules: {done}", seal(content), made.objects)


def _retype(rng: random.Random, made: Made) -> Mutant:
    content = made.content()
    way, old = rng.choice(
        [leaf for leaf in leaves(content) if leaf[0][-1] not in ("dirty", "commit")]
    )
    new = rng.choice(([old], {"x": old}, -1, 2**64, "", "\ud800", "a\n", not old))
    if type(new) is type(old) and new == old:
        new = [old]
    put(content, way, new)
    data = unsealed(content) if rng.random() < 0.3 else seal(content)
    return Mutant(f"{way}: {new!r:.40}", data, made.objects)


_MUTATORS: list[tuple[Mutator, int]] = [
    (_edit_manifest, 5),
    (_edit_object, 5),
    (_move_objects, 2),
    (_insert_token, 3),
    (_move_lines, 2),
    (_seal_another, 4),
    (_seal_other_files, 1),
    (_seal_unsound_rules, 4),
    (_retype, 3),
]
