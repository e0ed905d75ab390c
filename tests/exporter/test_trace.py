"""A layer is traced once however many there are, and leaves no trace of it in the graph."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

from dflash_deploy.bundle.tensors import DType
from dflash_deploy.exporter.families import pair_from_sources
from dflash_deploy.exporter.plan import GraphPlan
from dflash_deploy.exporter.trace import graph_from_module
from originals import speculators_draft, tiny_target


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the modules that torch was asked to export."""
    real, names = torch.onnx.export, []

    def counted(module: Any, *args: Any, **options: Any) -> Any:
        names.append(type(module).__name__)
        # What a trace costs must not depend on how many layers there are.
        assert not any(name.startswith("layers.") for name, _ in module.named_parameters())
        return real(module, *args, **options)

    monkeypatch.setattr(torch.onnx, "export", counted)
    return names


def traced(plan: GraphPlan) -> ir.Model:
    return graph_from_module(
        plan.build, plan.io, caches=plan.caches, stages=plan.stages, kernel_size=plan.kernel_size
    )


def test_layers_of_a_kind_are_traced_once(tmp_path: Path, exports: list[str]) -> None:
    """SmolLM3's layers are of two kinds, with RoPE and without; the draft's convolutions call a function."""
    target = tiny_target(
        1,
        tmp_path / "target",
        "smollm3",
        num_hidden_layers=6,
        no_rope_layers=[1, 1, 0, 1, 1, 0],
        hidden_size=32,
        use_sliding_window=False,
        layer_types=None,
    )
    speculators_draft(
        1,
        tmp_path / "draft",
        target=target,
        dflash2=True,
        num_hidden_layers=3,
        aux_hidden_state_layer_ids=[1],
    )
    plans = pair_from_sources(str(tmp_path / "target"), str(tmp_path / "draft")).plan(DType.FLOAT32).graphs
    for plan, layers, expected in (
        (plans[0], 6, ["TargetModule", "LayerAlone", "LayerAlone"]),
        (plans[1], 3, ["DraftModule", "LayerAlone"]),
    ):
        exports.clear()
        model = traced(plan)
        assert exports == expected
        assert {node.domain for node in model.graph} <= {"", "dflash"}
        assert [f.domain for f in model.functions.values()] == (["dflash"] if plan is plans[1] else [])
        assert set(model.opset_imports) == {"", *(f.domain for f in model.functions.values())}
        operators = Counter(node.op_type for node in model.graph)
        assert operators["Attention"] == layers
        assert operators["TensorScatter"] == 2 * layers
        # The size of an axis is asked for once, of an input of the graph, and not in every layer.
        shapes = [node for node in model.graph if node.op_type == "Shape" and "end" in node.attributes]
        assert all(node.inputs[0] in model.graph.inputs for node in shapes)
        assert len(shapes) <= 4
        used = {value.name for node in model.graph for value in node.inputs if value is not None}
        assert {f"layers.{i}.mlp.down_proj.weight" for i in range(layers)} <= used
