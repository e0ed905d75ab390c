import enum
import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_deploy.bundle.errors import BundleError, CheckpointError
from dflash_deploy.bundle.records import record_from_dict, record_to_dict, record_to_json


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Leaf:
    number: int
    text: str
    axis: tuple[str | int, ...] = ()


@dataclass(frozen=True)
class Tree:
    leaf: Leaf
    colour: Colour
    share: float
    flag: bool
    maybe: Leaf | None = None
    pair: tuple[int, str] = (0, "")
    leaves: tuple[Leaf, ...] = ()
    named: dict[str, Leaf] = field(default_factory=dict)
    nested: dict[str, dict[str, tuple[tuple[int, ...], ...]]] = field(default_factory=dict)


leaves = st.builds(Leaf, st.integers(), st.text(), st.lists(st.integers() | st.text(), max_size=3).map(tuple))
ints = st.lists(st.integers(), max_size=3).map(tuple)
trees = st.builds(
    Tree,
    leaf=leaves,
    colour=st.sampled_from(Colour),
    share=st.floats(allow_nan=False, allow_infinity=False),
    flag=st.booleans(),
    maybe=st.none() | leaves,
    pair=st.tuples(st.integers(), st.text()),
    leaves=st.lists(leaves, max_size=3).map(tuple),
    named=st.dictionaries(st.text(), leaves, max_size=3),
    nested=st.dictionaries(
        st.text(), st.dictionaries(st.text(), st.lists(ints, max_size=2).map(tuple), max_size=2), max_size=2
    ),
)


@given(trees)
def test_a_record_survives_json(tree):
    text = record_to_json(tree)
    again = record_from_dict(Tree, json.loads(text), "tree")
    assert again == tree
    assert record_to_json(again) == text


@given(trees, st.data())
def test_a_key_more_or_less_is_named(tree, data):
    values = record_to_dict(tree)
    with pytest.raises(BundleError, match=r"tree\.bogus: got 1, expected one of the keys"):
        record_from_dict(Tree, {**values, "bogus": 1}, "tree")
    missing = data.draw(st.sampled_from(["leaf", "colour", "share", "flag"]))
    del values[missing]
    with pytest.raises(BundleError, match=rf"tree\.{missing}: missing"):
        record_from_dict(Tree, values, "tree")


GOOD = {"leaf": {"number": 1, "text": "x"}, "colour": "red", "share": 0.5, "flag": True}


@pytest.mark.parametrize(
    ("key", "value", "where"),
    [
        ("leaf", {"number": "1", "text": "x"}, r"tree\.leaf\.number: got '1', expected a value of type int"),
        (
            "leaf",
            {"number": True, "text": "x"},
            r"tree\.leaf\.number: got True, expected a value of type int",
        ),
        ("leaf", {"number": 1.0, "text": "x"}, r"tree\.leaf\.number: got 1\.0"),
        ("leaf", [1, "x"], r"tree\.leaf: .* expected an object"),
        ("leaf", {"number": 1, "text": "x", "axis": ["a", 2, None]}, r"axis\[2\]: got None"),
        ("colour", "green", r"tree\.colour: got 'green', expected one of 'red', 'blue'"),
        ("colour", ["red"], r"tree\.colour: got \['red'\]"),
        ("share", "0.5", r"tree\.share: got '0\.5', expected a value of type float"),
        ("flag", 1, r"tree\.flag: got 1, expected a value of type bool"),
        ("pair", [1], r"tree\.pair: got \[1\], expected a list of 2"),
        ("leaves", [{"number": 1}], r"tree\.leaves\[0\]\.text: missing"),
        ("named", {"a": 1}, r"tree\.named\.a: got 1, expected an object"),
        ("nested", {"a": {"b": [[1, "2"]]}}, r"tree\.nested\.a\.b\[0\]\[1\]: got '2'"),
    ],
)
def test_a_wrong_value_is_named_with_its_path(key, value, where):
    with pytest.raises(BundleError, match=where):
        record_from_dict(Tree, {**GOOD, key: value}, "tree")


def test_a_whole_number_is_a_float_too():
    assert record_from_dict(Tree, {**GOOD, "share": 1}, "tree").share == 1.0


def test_the_caller_chooses_the_error():
    with pytest.raises(CheckpointError):
        record_from_dict(Tree, {}, "config.json", CheckpointError)
