"""The byte count of docs/engines.md comes from its script, and the script counts the demo's draft right."""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
from math import prod
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("conv_bytes", ROOT / "benchmarks" / "conv_bytes.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_table(script):
    assert "\n".join(script.table()) in (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")


def test_the_demos_draft_has_as_many_bytes(script):
    demo = script.DRAFTS[-1]
    data = (ROOT / "demo" / "draft" / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    shapes = {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    # A pass reads some rows of the selector's tables, and norms are too small to count.
    counted = [shape for name, shape in shapes.items() if len(shape) > 1 and "selector" not in name]
    head = demo.vocabulary * demo.hidden  # the target's
    assert script.weight_bytes(demo) == 2 * (sum(map(prod, counted)) + head)


def test_what_is_saved_is_part_of_what_is_moved(script):
    for draft in script.DRAFTS:
        moved = draft.layers * 2 * (9 * draft.hidden + 4 * draft.delta)
        for batch in script.BATCHES:
            rows = batch * draft.block * script.ROW_BYTES
            saved = script.saved_by_projection(draft, batch) + script.saved_by_norm(draft, batch)
            assert 0 < saved < rows * moved < script.pass_bytes(draft, batch)
