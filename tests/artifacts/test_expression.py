from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonata_aot.artifacts.errors import ArgumentError, ManifestError
from sonata_aot.artifacts.expression import Expression


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("n", 100),
        ("2 + 3 * 4", 14),
        ("(2 + 3) * 4", 20),
        ("10 - 3 - 2", 5),
        ("n-1", 99),
        ("ceildiv(n, 3)", 34),
        ("ceildiv(99, 3)", 33),
        ("ceildiv(0, 3)", 0),
        ("ceildiv(0 - 7, 2)", -3),
        ("min(n, 3, rows)", 3),
        ("max(n, 3, rows)", 100),
        ("ceildiv(max(n, 1) * 2, min(rows + 1, 8))", 40),
        ("  n\t*\n2 ", 200),
        ("9223372036854775807", 2**63 - 1),
        ("0 - 9223372036854775807 - 1", -(2**63)),
    ],
)
def test_value(text: str, value: int) -> None:
    assert Expression(text).evaluate({"n": 100, "rows": 4}) == value


def test_names_are_those_that_need_a_value() -> None:
    assert Expression("ceildiv(n, rows) * max(1, b2)").names == {"n", "rows", "b2"}
    assert Expression("3 * (4 + 1)").names == frozenset()


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "+", "1 +", "* 2", "-1", "1 2", "n m", "(1", "1)", "()", "n(1, 2)", "1, 2"),
        *("1 / 2", "2 ** 3", "1 // 2", "1 % 2", "1.5", "1e3", "0x10", "1 == 1", "~1", "1 & 2"),
        *("N", "_n", "n.real", "n[0]", "'a'", "1;2", "#", "1\0", "lambda: 1", "n if 1 else 2"),
        *("min()", "min(1)", "min(1,)", "min(1, 2", "min 1, 2)", "ceildiv(1)", "ceildiv(1, 2, 3)"),
        *("abs(1, 2)", "eval(1, 2)", "__import__('os')", "9223372036854775808", "1" * 20),
    ],
)
def test_what_is_not_in_the_grammar_is_refused(text: str) -> None:
    with pytest.raises(ManifestError, match="launch expression"):
        Expression(text)


# What str.strip() takes for space and the grammar does not, and what is no space to anybody.
ODD_SPACES = ["\u00a0", "\x1c", "\x1d", "\x1e", "\x1f", "\x85", "\u2003", "\u2028", "\u3000"]
CONTROLS = ["\0", "\x01", "\x08", "\x1b[2J", "\x7f", "\u200b", "\ufeff"]


@pytest.mark.parametrize("text", ["３ * n", "n * ٢", "ñ"])
def test_only_ascii_is_in_the_grammar(text: str) -> None:
    with pytest.raises(ManifestError):
        Expression(text)


@pytest.mark.parametrize("odd", ODD_SPACES + CONTROLS, ids=ascii)
@pytest.mark.parametrize("form", ["{}", "n{}", "{}n", "n {}+ 1", "n{}+ 1", "n +{}1", "min(n,{}1)"])
def test_odd_spaces_and_control_characters_are_refused(form: str, odd: str) -> None:
    with pytest.raises(ManifestError, match="launch expression") as caught:
        Expression(form.format(odd))
    assert str(caught.value).isprintable()


def test_a_functions_name_alone_is_a_name_like_any_other() -> None:
    assert Expression("min + 1").evaluate({"min": 2}) == 3


def test_length_and_nesting_are_bounded() -> None:
    assert Expression("+".join("1" * 128)).evaluate({}) == 128
    with pytest.raises(ManifestError, match="longer than 256"):
        Expression("+".join("1" * 130))
    assert Expression("(" * 31 + "1" + ")" * 31).evaluate({}) == 1
    with pytest.raises(ManifestError, match="nested deeper"):
        Expression("(" * 32 + "1" + ")" * 32)
    with pytest.raises(ManifestError, match="longer than 256"):
        Expression("(" * 100_000)


def test_neighbours_do_not_count_as_nesting() -> None:
    assert Expression("+".join(["(1)"] * 40)).evaluate({}) == 40


def test_a_missing_value_is_named() -> None:
    with pytest.raises(ArgumentError, match="no value for 'rows'"):
        Expression("n * rows").evaluate({"n": 1})


@pytest.mark.parametrize(
    "text", ["n * n", "9223372036854775807 + 1", "0 - n * 4 - n * 4 - 1", "n * n - n * n"]
)
def test_a_step_beyond_64_bits_is_refused_even_if_the_end_fits(text: str) -> None:
    with pytest.raises(ArgumentError, match="does not fit 64 bits"):
        Expression(text).evaluate({"n": 2**62})


@pytest.mark.parametrize("divisor", [0, -1])
def test_ceildiv_needs_a_positive_divisor(divisor: int) -> None:
    with pytest.raises(ArgumentError, match=f"ceildiv by {divisor}"):
        Expression("ceildiv(8, d)").evaluate({"d": divisor})


_ATOMS = st.one_of(
    st.integers(0, 2**40).map(lambda value: (str(value), value)),
    st.sampled_from([("n", 1234), ("rows", 4), ("zero", 0)]),
)


def _combine(children: st.SearchStrategy[tuple[str, int]]) -> st.SearchStrategy[tuple[str, int]]:
    def join(pair: tuple[str, tuple[str, int], tuple[str, int]]) -> tuple[str, int]:
        operator, (left, a), (right, b) = pair
        match operator:
            case "+":
                return f"({left} + {right})", a + b
            case "-":
                return f"({left}-{right})", a - b
            case "*":
                return f"{left} * {right}", a * b
            case "ceildiv":
                return f"ceildiv({left}, max({right}, 1))", -(-a // max(b, 1))
            case _:
                return f"{operator}({left}, {right})", (min if operator == "min" else max)(a, b)

    operators = st.sampled_from(["+", "-", "*", "ceildiv", "min", "max"])
    return st.tuples(operators, children, children).map(join)


@given(st.recursive(_ATOMS, _combine, max_leaves=6))
def test_value_agrees_with_arithmetic(case: tuple[str, int]) -> None:
    text, value = case
    if len(text) > 256:
        return
    try:
        found = Expression(text).evaluate({"n": 1234, "rows": 4, "zero": 0})
    except ArgumentError as error:
        problem = error.what
    else:
        assert found == value
        assert -(2**63) <= found < 2**63
        return
    assert "does not fit 64 bits" in problem


@given(st.text(alphabet="()+-*, 0123456789nmaxceildiv.$\0é", max_size=300))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        expression = Expression(text)
    except ManifestError:
        return
    try:
        expression.evaluate(dict.fromkeys(expression.names, 3))
    except ArgumentError:
        return
