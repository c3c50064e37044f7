"""How the one-pass scan's warps that own tokens multiply out by silu(z)."""

# The DSL ships no types, and its `.pth` file hides it from type checkers.
# pyright: reportMissingImports=false

import math

from cutlass import Float32, Int64

from ..scalars import load_two
from ..tensor_core import at_least, exp2, pack, reciprocal, transpose_matrix, unpack
from .prepare import LOG2_E
from .scan_output import pair_up

LEAST_Z = -21.0
"""Below it silu(z) counts as silu(LEAST_Z), -1.6e-8: 1 + exp(21) to the power of 4 is finite."""


def load_z(words, rows, left, halves, t):
    """Load z of the tokens of some halves, as out is stored; if given, only what is `left`."""
    for half in halves:
        address = rows[half] + Int64(t // 2 * 8 + t % 2 * 16)
        for m in range(words.shape[2]):
            words[0, half, m], words[1, half, m] = load_two(
                address, left is None or left > 8 * half, 32 * m
            )


def gate(y, loaded, t, element):
    """Multiply by silu(z), which `load_z` has loaded, each no smaller than `LEAST_Z`."""
    _, halves, tiles = y.shape
    least = pack(Float32(LEAST_Z), Float32(LEAST_Z), element)
    for half in range(halves):
        for first in range(0, tiles, 2):
            # By token: 2t, and 2t + 1. So a NaN stays with its own.
            places, numbers = ([], []), ([], [])
            for m in range(first, min(first + 2, tiles)):
                for row, word in enumerate(pair_up(loaded[0, half, m], loaded[1, half, m], t)):
                    word = transpose_matrix(at_least(word, least, element))
                    for i, number in enumerate(unpack(word, element)):
                        places[i].append((2 * row + i, half, m))
                        numbers[i].append(number)
            for i in (0, 1):
                for place, number, factor in zip(
                    places[i], numbers[i], sigmoids(numbers[i]), strict=True
                ):
                    y[place] = y[place] * number * factor


def sigmoids(numbers):
    """1 / (1 + exp(-number)) of 2 or 4 numbers, by one reciprocal: products take less time.

    The product of the denominators has to be finite.
    """
    powers = [exp2(number * -LOG2_E) for number in numbers]
    firsts = [1.0 + power for power in powers[::2]]
    pairs = [first * power + first for first, power in zip(firsts, powers[1::2], strict=True)]
    rests = [reciprocal(math.prod(pairs))]
    if len(pairs) > 1:
        rests = [rests[0] * pairs[1], rests[0] * pairs[0]]
    found = []
    for rest, first, power in zip(rests, firsts, powers[1::2], strict=True):
        found += [rest * power + rest, rest * first]
    return found
