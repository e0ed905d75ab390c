"""What a graph's file says of itself: written and read, and what is refused."""

import pytest

from dflash_deploy.bundle.errors import BundleError
from dflash_deploy.bundle.labels import NAME, PASSES, check_labels, labels
from dflash_deploy.bundle.manifest import GraphInfo
from dflash_deploy.bundle.tensors import GraphIO


def info(name: str, *passes: str) -> GraphInfo:
    return GraphInfo(f"{name}.onnx", 24, 11, GraphIO((), ()), passes=passes)


@pytest.mark.parametrize("passes", [(), ("int8",), ("smooth", "int8", "whole-cache")])
@pytest.mark.parametrize("name", ["draft", "target.cpu-batch"])
def test_the_labels_of_a_graph_pass(name, passes):
    check_labels(info(name, *passes), labels(name, passes))


@pytest.mark.parametrize("found", [{}, {NAME: "target"}, {PASSES: ""}, {"framework": "pytorch"}])
def test_a_file_without_labels_is_to_be_exported_again(found):
    with pytest.raises(BundleError, match=r"^target.onnx: its metadata does not say .*; export again"):
        check_labels(info("target"), found)


@pytest.mark.parametrize(("name", "place"), [("draft", "graphs.draft"), ("target.cpu", "tuned.target.cpu")])
def test_the_field_that_differs_is_named(name, place):
    with pytest.raises(BundleError) as other:
        check_labels(info(name), labels("conv"))
    assert str(other.value) == (
        f"manifest.json: {place}.file: got '{name}.onnx', expected a file with the graph {name}, and in this "
        "one is conv; copy the bundle whole or export again"
    )
    with pytest.raises(BundleError) as more:
        check_labels(info(name, "int8"), labels(name, ("smooth", "int8")))
    assert str(more.value) == (
        f"manifest.json: {place}.passes: got ['int8'], expected ['smooth', 'int8'], what was done to "
        f"{name}.onnx; copy the bundle whole or export again"
    )
