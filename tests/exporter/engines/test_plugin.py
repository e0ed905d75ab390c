"""`--conv plugin`: the graph keeps its nodes, NVIDIA's code makes plugins of them, the manifest says so."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

import real_tensorrt
from dflash_deploy.bundle.engines import PLUGIN
from dflash_deploy.bundle.errors import ProviderError
from dflash_deploy.bundle.gpu import Gpu
from dflash_deploy.bundle.manifest import manifest_from_bundle
from dflash_deploy.bundle.tensors import DRAFT, TARGET, DType
from dflash_deploy.exporter.engines import build, worker
from dflash_deploy.exporter.engines.build import build_engines
from dflash_deploy.exporter.engines.job import Done, Fault
from dflash_deploy.exporter.engines.options import BuildOptions, Conv
from dflash_deploy.exporter.engines.plan import BuildPlan, plan_engines
from dflash_deploy.plugins.grouped_dynamic_conv import DOMAIN, OP_TYPE

WITH_PLUGIN = BuildOptions(conv=Conv.PLUGIN)


def planned(bundle: Path, options: BuildOptions = WITH_PLUGIN, backend: str = "tensorrt") -> BuildPlan:
    return plan_engines(bundle, manifest_from_bundle(bundle), backend, (), (), options)


def conv_nodes(data: bytes) -> list[ir.Node]:
    model = ir.from_proto(onnx.load_from_string(data))
    assert not model.functions, "the parser would take a body before it takes a plugin"
    return [node for node in model.graph if (node.domain, node.op_type) == (DOMAIN, OP_TYPE)]


def test_the_draft_keeps_its_convolutions_and_nothing_else_changes(half):
    target, draft = planned(half).engines
    assert (target.source.plugin, draft.source.plugin) == (None, PLUGIN)
    with_bodies = planned(half, BuildOptions())
    assert target.source == with_bodies.engines[0].source
    assert with_bodies.engines[1].source.plugin is None
    assert conv_nodes(with_bodies.engines[1].source.data) == []
    assert len(conv_nodes(draft.source.data)) == 4, "around attention and MLP of one layer"
    assert f"  plugin             {PLUGIN}" in planned(half).lines(0)
    assert not any("plugin" in line for line in with_bodies.lines(0))


def test_a_draft_without_convolutions_needs_no_plugin(bundle_of):
    bundle = bundle_of(DType.BFLOAT16)
    assert [engine.source.plugin for engine in planned(bundle).engines] == [None, None]


@pytest.mark.skipif(bool(real_tensorrt.missing()), reason=real_tensorrt.missing())
def test_tensorrt_makes_plugins_of_the_nodes(half, tmp_path):
    draft = planned(half).engines[1]
    calls = []
    for node in conv_nodes(draft.source.data):
        shapes = [[s if isinstance(s, int) else str(s) for s in v.shape] for v in node.inputs]
        moving = {size: 1 for shape in shapes for size in shape if isinstance(size, str)}
        calls.append(
            {
                "op_type": node.op_type,
                "domain": node.domain,
                "attributes": {name: attribute.value for name, attribute in node.attributes.items()},
                "dtype": {ir.DataType.FLOAT: "float32", ir.DataType.FLOAT16: "float16"}[node.inputs[0].dtype],
                "shapes": shapes,
                "sizes": [moving],
            }
        )
    results = real_tensorrt.ask_plugin(calls, 90, tmp_path)["results"]
    for call, result in zip(calls, results, strict=True):
        for kernel in result["kernels"]:
            (launch,) = kernel["launches"]
            rows, length, block = launch["numbers"][:3]
            assert (rows, length, block) == (8, 8, call["attributes"]["block_size"])


def test_tensorrt_rtx_has_no_plugins_and_says_so(half):
    with pytest.raises(ProviderError, match=r"conv: got 'plugin', but tensorrt-rtx has no plugins.*--conv"):
        planned(half, backend="tensorrt-rtx")


def test_the_manifest_says_what_the_engine_was_built_with(half, monkeypatch):
    jobs = {}

    def engine_from_job(name, job, log, listen):
        jobs[name] = job
        Path(job.output).write_bytes(b"an engine")
        return Done("11.4.0.106", ())

    monkeypatch.setattr(build, "check_installed", lambda backend: None)
    monkeypatch.setattr(build, "engine_from_job", engine_from_job)
    manifest = build_engines(half, "tensorrt", options=WITH_PLUGIN)
    assert manifest_from_bundle(half) == manifest
    for graph, plugin in ((TARGET, None), (DRAFT, PLUGIN)):
        assert jobs[f"{graph}.tensorrt"].plugin == plugin
        assert manifest.engines[f"{graph}.tensorrt"].plugin == plugin


class TestRegistering:
    def test_the_kernels_are_for_the_gpu_at_hand(self, monkeypatch):
        asked = []
        monkeypatch.setattr(worker, "cuda_devices", lambda: ((Gpu("a GPU", "12.0", 1),), ""))
        monkeypatch.setattr(worker, "register_plugin", lambda *arguments: asked.append(arguments))
        worker.register(PLUGIN, asked.append)
        assert asked == [(120, asked.append)]

    def test_without_a_gpu_there_is_nothing_to_compile_for(self, monkeypatch):
        monkeypatch.setattr(worker, "cuda_devices", lambda: ((), "no NVIDIA driver"))
        with pytest.raises(worker._Refusal) as found:
            worker.register(PLUGIN, print)
        assert found.value.failed.fault is Fault.MACHINE
        assert "no NVIDIA driver" in found.value.failed.reasons[0]

    def test_without_triton_it_says_what_to_install(self, monkeypatch):
        def no_triton(capability, failed):
            raise ModuleNotFoundError("No module named 'triton'")

        monkeypatch.setattr(worker, "cuda_devices", lambda: ((Gpu("a GPU", "8.7", 1),), ""))
        monkeypatch.setattr(worker, "register_plugin", no_triton)
        with pytest.raises(worker._Refusal) as found:
            worker.register(PLUGIN, print)
        assert found.value.failed.fault is Fault.MACHINE
        assert "pip install triton, or use --conv function" in found.value.failed.reasons[0]
