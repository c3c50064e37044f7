from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonata_aot.artifacts import schema
from sonata_aot.artifacts.errors import ManifestError
from sonata_aot.artifacts.schema import (
    Match,
    Range,
    canonical_json,
    decode,
    digest,
    encode,
    parse_json,
)


@dataclass(frozen=True)
class Inner:
    name: Annotated[str, Match(r"[a-z]+")]


@dataclass(frozen=True)
class Outer:
    number: Annotated[int, Range(1, 9)]
    flag: bool | None
    kind: Literal["one", "two"]
    mixed: Annotated[str, Match(r"x+")] | Annotated[int, Range(0, 3)]
    inner: Inner | None
    triple: tuple[int, int, int]
    many: tuple[Inner, ...]
    table: dict[Annotated[str, Match(r"[a-z]")], int]


@dataclass(frozen=True)
class Wide(Outer):
    numbers: dict[str, Annotated[int, Range(0, 9)] | Annotated[str, Match(r"x+")]]
    pairs: tuple[tuple[int, int], ...]


GOOD: dict[str, Any] = {
    "number": 9,
    "flag": True,
    "kind": "one",
    "mixed": "xx",
    "inner": {"name": "abc"},
    "triple": [1, 2, 3],
    "many": [{"name": "a"}, {"name": "b"}],
    "table": {"a": 1},
}


def test_good_data_is_read_and_written_back() -> None:
    value = decode(Outer, GOOD, "file")
    assert value == Outer(
        9, True, "one", "xx", Inner("abc"), (1, 2, 3), (Inner("a"), Inner("b")), {"a": 1}
    )
    assert encode(value) == GOOD
    assert list(encode(value)) == list(GOOD)


@pytest.mark.parametrize(
    "change", [{"flag": None}, {"inner": None}, {"mixed": 0}, {"mixed": 3}, {"many": []}]
)
def test_each_member_of_a_union_is_accepted(change: dict[str, Any]) -> None:
    data = {**GOOD, **change}
    assert encode(decode(Outer, data, "file")) == data


@pytest.mark.parametrize(
    ("key", "value", "place"),
    [
        ("number", 0, "file.number"),
        ("number", 10, "file.number"),
        ("number", True, "file.number"),
        ("number", "5", "file.number"),
        ("number", None, "file.number"),
        ("number", [5], "file.number"),
        ("flag", 1, "file.flag"),
        ("flag", 0, "file.flag"),
        ("flag", "true", "file.flag"),
        ("kind", "three", "file.kind"),
        ("kind", None, "file.kind"),
        ("mixed", "y", "file.mixed"),
        ("mixed", "xx\n", "file.mixed"),
        ("mixed", 4, "file.mixed"),
        ("mixed", True, "file.mixed"),
        ("mixed", None, "file.mixed"),
        ("inner", {}, "file.inner"),
        ("inner", {"name": "abc", "more": 1}, "file.inner"),
        ("inner", {"name": "abc\n"}, "file.inner.name"),
        ("inner", "abc", "file.inner"),
        ("triple", [1, 2], "file.triple"),
        ("triple", [1, 2, 3, 4], "file.triple"),
        ("triple", [1, True, 3], "file.triple[1]"),
        ("triple", {"0": 1}, "file.triple"),
        ("many", [{"name": "a"}, {"name": "B"}], "file.many[1].name"),
        ("many", {"name": "a"}, "file.many"),
        ("many", "ab", "file.many"),
        ("table", {"aa": 1}, "file.table key"),
        ("table", {"a": False}, "file.table.a"),
        ("table", [], "file.table"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(key: str, value: Any, place: str) -> None:
    with pytest.raises(ManifestError) as caught:
        decode(Outer, {**GOOD, key: value}, "file")
    assert caught.value.what.startswith(f"{place}:")


@pytest.mark.parametrize("key", GOOD)
def test_a_missing_key_is_named(key: str) -> None:
    data = {name: value for name, value in GOOD.items() if name != key}
    with pytest.raises(ManifestError, match=f"missing key '{key}'"):
        decode(Outer, data, "file")


@pytest.mark.parametrize("key", ["more", "Number", "", "number ", "__class__"])
def test_an_unknown_key_is_named(key: str) -> None:
    with pytest.raises(ManifestError, match=f"unknown key '{key}'"):
        decode(Outer, {**GOOD, key: 1}, "file")


@pytest.mark.parametrize("key", GOOD)
def test_keys_stand_in_the_order_of_the_fields(key: str) -> None:
    data = dict(GOOD)
    data[key] = data.pop(key)
    if list(data) == list(GOOD):
        decode(Outer, data, "file")
        return
    with pytest.raises(ManifestError, match="file: keys not in the order number, flag, kind"):
        decode(Outer, data, "file")


@pytest.mark.parametrize(
    "change",
    [
        {"triple": [True, 2, 3]},
        {"triple": [1, 2, 3.0]},
        {"triple": [1, 2, "3"]},
        {"table": {"a": True}},
        {"table": {"a": 1.0}},
        {"table": {"a": "1"}},
        {"numbers": {"a": True, "b": 2}},
        {"numbers": {"a": 1.0, "b": 2}},
        {"numbers": {"a": "1", "b": 2}},
        {"numbers": {"a": [1], "b": 2}},
        {"pairs": [[1, 2], [3, True]]},
        {"pairs": [[1, 2], [3, 4], [5]]},
        {"pairs": [1, 2, 3, 4]},
    ],
)
def test_a_value_that_was_accepted_lends_nothing_to_one_that_equals_it(
    change: dict[str, Any],
) -> None:
    wide = {**GOOD, "numbers": {"a": 1, "b": 2}, "pairs": [[1, 2], [3, 4]]}
    for _ in range(3):
        assert encode(decode(Wide, wide, "file")) == wide
        with pytest.raises(ManifestError):
            decode(Wide, {**wide, **change}, "file")


@dataclass(frozen=True)
class Many:
    items: tuple[Wide, ...]


_ITEM: dict[str, Any] = {**GOOD, "numbers": {"a": 1, "b": "x"}, "pairs": [[1, 2], [3, 4]]}


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(list(_ITEM)),
            st.recursive(
                st.sampled_from([None, True, False, 0, 1, 9, 10, "one", "x", "xx\n", "a", 1.0]),
                lambda inner: (
                    st.lists(inner, max_size=3)
                    | st.dictionaries(st.sampled_from(["a", "b", "name", "Z"]), inner, max_size=2)
                ),
                max_leaves=4,
            ),
        ),
        max_size=3,
    )
)
def test_columns_take_what_is_taken_one_by_one_and_nothing_else(
    changes: list[tuple[int, str, Any]],
) -> None:
    items = [dict(_ITEM) for _ in range(3)]
    for index, key, value in changes:
        items[index][key] = value
    taken = schema.column(Many)([{"items": items}])
    try:
        expected = schema._reader(Many)({"items": items})
    except schema._Wrong:
        assert taken is None
    else:
        assert taken is not None
        assert repr(taken[0]) == repr(expected)


def test_tables_that_were_read_are_not_shared() -> None:
    first, second = decode(Outer, GOOD, "file"), decode(Outer, GOOD, "file")
    assert first.table == second.table == GOOD["table"]
    first.table["b"] = 2
    assert second.table == GOOD["table"] == {"a": 1}


def test_no_amount_of_values_makes_a_reader_forget_its_rules() -> None:
    for number in range(3000):
        data = {**GOOD, "table": {"a": number}, "triple": [number, 1, 2]}
        assert encode(decode(Outer, data, "file")) == data
    for key, value in (("table", {"a": "x"}), ("triple", [2999, 1, "2"])):
        with pytest.raises(ManifestError):
            decode(Outer, {**GOOD, key: value}, "file")


def test_messages_stay_short_whatever_the_data() -> None:
    for data in ({**GOOD, "kind": "k" * 10**6}, {**GOOD, "n" * 10**6: 1}, {**GOOD, "number": "x"}):
        with pytest.raises(ManifestError) as caught:
            decode(Outer, data, "file")
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a": 1} x', "not valid JSON"),
        (b'{"a": 1, "a": 1}', "'a' stands twice"),
        (b'{"b": [{"a": 1, "c": 2, "a": 3}]}', "'a' stands twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": Infinity}', "Infinity"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1.0}', "1.0 is not an integer"),
        (b'{"a": 1e5}', "1e5 is not an integer"),
        (b'{"a": 1e999999}', "is not an integer"),
        (b'{"a": -0.0}', "is not an integer"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a": 1.' + b"9" * 10**6 + b"}", "is not an integer"),
        (b'{"a": 01}', "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b'\xff\xfe{\x00"\x00', "not valid JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "not valid JSON"),
        (b'{"a": "\xed\xa0\x80"}', "not valid JSON"),
        (b'{"a": "\n"}', "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
        (b'{"a": 1,}', "not valid JSON"),
        (b'{"a": 1 /* no */}', "not valid JSON"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deep"),
    ],
    ids=lambda value: None if isinstance(value, str) else repr(value[:24]),
)
def test_json_beyond_the_strict_form_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_json(data, "the file")
    assert caught.value.what.startswith("the file: ")
    assert problem in caught.value.what
    assert len(str(caught.value)) < 300


def test_plain_json_is_read() -> None:
    assert parse_json(b' {"a": [1, -2, null, true, "\\u00e9"]} ', "f") == {
        "a": [1, -2, None, True, "é"]
    }


def test_digest_is_that_of_the_one_canonical_text() -> None:
    data = {"b": 1, "a": [True, None, "é"]}
    assert canonical_json(data) == b'{"b":1,"a":[true,null,"\\u00e9"]}'
    assert digest(data) == hashlib.sha256(canonical_json(data)).hexdigest()
    assert digest({"a": 1, "b": 2}) != digest({"b": 2, "a": 1})


def test_nan_has_no_canonical_text() -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"a": float("nan")})


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@given(_JSON)
def test_canonical_text_is_read_back_as_it_was(data: Any) -> None:
    assert parse_json(canonical_json(data), "f") == data


@given(_JSON)
def test_no_data_breaks_the_decoder(data: Any) -> None:
    with pytest.raises(ManifestError):
        decode(Outer, data, "file")


@given(st.binary(max_size=64) | st.text(alphabet='{}[]",:0123456789.eNatrufls-', max_size=64))
def test_no_bytes_break_the_parser(data: bytes | str) -> None:
    problem = "f: "
    try:
        parse_json(data if isinstance(data, bytes) else data.encode(), "f")
    except ManifestError as error:
        problem = error.what
    assert problem.startswith("f: ")
