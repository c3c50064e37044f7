"""Launch expressions: a closed grammar over run-time sizes and compile-time choices.

    expression := term (("+" | "-") term)*
    term       := factor ("*" factor)*
    factor     := integer | name | "(" expression ")" | call
    call       := function "(" expression ("," expression)+ ")"
    function   := "ceildiv" (two arguments) | "min" | "max"

Python's `eval` is never used: an expression comes out of a manifest, and a manifest is data.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping

from .errors import ArgumentError, ManifestError

_TOKEN = re.compile(
    r"\s*(?:(?P<integer>\d{1,19})|(?P<name>[a-z][a-z0-9_]*)|(?P<mark>[-+*(),]))", re.ASCII
)
_SPACES = " \t\n\r\f\v"
_FUNCTIONS = ("ceildiv", "min", "max")
_MAX_LENGTH = 256
_MAX_DEPTH = 32
_LIMIT = 2**63

# A node is an integer, a name, or (operator, operands).
Node = int | str | tuple[str, tuple["Node", ...]]


class Expression:
    """A parsed expression; `names` are those it needs a value for."""

    __slots__ = ("_evaluate", "_root", "names", "text")

    def __init__(self, text: str) -> None:
        """Parse `text`.

        Raises:
            ManifestError: the text is not in the grammar, or is longer or deeper than sane.
        """
        self.text = text
        parser = _Parser(text)
        self._root = parser.parse()
        self.names = frozenset(parser.names)
        # Made when it is needed: a loader reads expressions that only a build evaluates.
        self._evaluate: Callable[[Mapping[str, int]], int] | None = None

    def evaluate(self, values: Mapping[str, int]) -> int:
        """The value, given an integer for every name.

        Raises:
            ArgumentError: a name has no value, a step leaves the signed 64-bit range, or
                `ceildiv` divides by something below 1.
        """
        if self._evaluate is None:
            self._evaluate = _evaluator(self._root, self.text)
        return self._evaluate(values)

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"


class _Parser:
    def __init__(self, text: str) -> None:
        if len(text) > _MAX_LENGTH:
            raise self._error(text[:40] + "...", f"longer than {_MAX_LENGTH} characters")
        self._text = text
        self.names: set[str] = set()
        self._tokens: list[str] = []
        position, end = 0, len(text.rstrip(_SPACES))
        while position < end:
            match = _TOKEN.match(text, position)
            if match is None:
                unread = text[position:].lstrip(_SPACES)
                raise self._error(text, f"unexpected {unread[0]!r}")
            self._tokens.append(match[match.lastindex or 0])
            position = match.end()
        self._tokens.append("")  # the end
        self._at = 0
        self._depth = 0

    @staticmethod
    def _error(text: str, problem: str) -> ManifestError:
        return ManifestError(
            f"launch expression {text!r}: {problem}",
            remedy="use integers, names, + - *, ceildiv(a, b), min(...) and max(...)",
        )

    def parse(self) -> Node:
        root = self._sum()
        if self._tokens[self._at]:
            raise self._error(self._text, f"unexpected {self._tokens[self._at]!r}")
        return root

    def _take(self, expected: str = "") -> str:
        token = self._tokens[self._at]
        if not token or (expected and token != expected):
            found = repr(token) if token else "the end"
            raise self._error(self._text, f"expected {expected or 'a value'!r}, found {found}")
        self._at += 1
        return token

    def _sum(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(self._text, f"nested deeper than {_MAX_DEPTH}")
        node = self._product()
        while self._tokens[self._at] in ("+", "-"):
            node = (self._take(), (node, self._product()))
        self._depth -= 1
        return node

    def _product(self) -> Node:
        node = self._factor()
        while self._tokens[self._at] == "*":
            node = (self._take(), (node, self._factor()))
        return node

    def _factor(self) -> Node:
        token = self._take()
        if token.isdigit():
            if int(token) >= _LIMIT:
                raise self._error(self._text, f"{token} does not fit 64 bits")
            return int(token)
        if token == "(":
            node = self._sum()
            self._take(")")
            return node
        if not token[0].isalpha():
            raise self._error(self._text, f"unexpected {token!r}")
        if self._tokens[self._at] != "(":
            self.names.add(token)
            return token
        if token not in _FUNCTIONS:
            raise self._error(self._text, f"unknown function {token!r}")
        self._take("(")
        arguments = [self._sum()]
        while self._tokens[self._at] == ",":
            self._take()
            arguments.append(self._sum())
        self._take(")")
        if len(arguments) < 2 or (token == "ceildiv" and len(arguments) > 2):
            raise self._error(self._text, f"{token} got {len(arguments)} argument(s)")
        return (token, tuple(arguments))


def _ceildiv(number: int, divisor: int) -> int:
    if divisor < 1:
        raise ZeroDivisionError
    return -(-number // divisor)


_OPERATIONS: dict[str, Callable[..., int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "min": min,
    "max": max,
    "ceildiv": _ceildiv,
}


def _evaluator(node: Node, text: str) -> Callable[[Mapping[str, int]], int]:
    if isinstance(node, int):
        return lambda _: node
    if isinstance(node, str):

        def look_up(values: Mapping[str, int]) -> int:
            if node not in values:
                raise ArgumentError(
                    f"launch expression {text!r}: no value for {node!r}",
                    remedy="use a run-time integer parameter or an integer choice of the kernel",
                )
            return values[node]

        return look_up
    operate = _OPERATIONS[node[0]]
    operands = [_evaluator(operand, text) for operand in node[1]]

    def compute(values: Mapping[str, int]) -> int:
        numbers = [operand(values) for operand in operands]
        try:
            result = operate(*numbers)
        except ZeroDivisionError:
            raise ArgumentError(
                f"launch expression {text!r}: ceildiv by {numbers[1]}",
                remedy="pass a size that keeps the divisor at 1 or more",
            ) from None
        if -_LIMIT <= result < _LIMIT:
            return result
        raise ArgumentError(
            f"launch expression {text!r}: {result} does not fit 64 bits",
            remedy="pass smaller sizes",
        )

    return compute
