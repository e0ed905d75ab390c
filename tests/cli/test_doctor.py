import ctypes
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dflash_deploy.bundle import gpu
from dflash_deploy.bundle.gpu import Gpu
from dflash_deploy.cli import cli
from dflash_deploy.runtime import doctor
from dflash_deploy.runtime.doctor import Report, Status, examine_machine, script_finding


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "dflash"


def _finding(script: Path, text: str, *owners: str):
    script.write_text(text)
    return script_finding(lambda: dict.fromkeys(owners, "x:main"), lambda _: str(script))


def test_our_own_script(script):
    finding = _finding(script, "from dflash_deploy.cli import main", "dflash-deploy")
    assert finding.status is Status.GOOD
    assert finding.text.endswith("is ours")


def test_the_script_of_another_package(script):
    """z-lab's dflash was installed after us: say whose it is and what to type."""
    finding = _finding(script, "from dflash.cli import main", "dflash", "dflash_deploy")
    assert finding.status is Status.BAD
    assert (
        "belongs to the package dflash; type `dflash-deploy` or `python -m dflash_deploy` instead"
        in finding.text
    )
    assert "pip install --force-reinstall --no-deps dflash-deploy" in finding.text


def test_another_package_that_only_claims_the_name(script):
    finding = _finding(script, "from dflash_deploy.cli import main", "dflash", "dflash-deploy")
    assert finding.status is Status.GOOD
    assert "is ours; dflash claims the name too" in finding.text


def test_a_script_that_nobody_owns(script):
    assert "belongs to another program" in _finding(script, "#!/bin/sh", "dflash-deploy").text


def test_no_script_at_all():
    finding = script_finding(dict, lambda _: None)
    assert finding.status is Status.ABSENT
    assert "type `python -m dflash_deploy` instead" in finding.text


def test_an_unreadable_script(script):
    finding = script_finding(dict, lambda _: str(script / "gone"))
    assert finding.status is Status.BAD
    assert "cannot be read" in finding.text


def test_the_real_claims_name_this_distribution():
    assert doctor.script_claims()["dflash-deploy"] == "dflash_deploy.cli:main"


def test_the_tiny_model_is_a_model():
    np, ort = pytest.importorskip("numpy"), pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(doctor._TINY_MODEL, providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": np.array([1.5], np.float32)})[0].tolist() == [3.0]


def test_a_provider_that_is_listed_and_does_not_start(monkeypatch):
    """ONNX Runtime falls back to the CPU in silence; the doctor must not."""
    ort = pytest.importorskip("onnxruntime")
    found = doctor._provider_finding(
        "cuda", "CUDAExecutionProvider", "get a GPU", ort.get_available_providers()
    )
    assert found.status is Status.ABSENT

    class Session:
        def __init__(self, *args: object, **kwargs: object) -> None:
            pass

        def get_providers(self) -> list[str]:
            return ["CPUExecutionProvider"]

    monkeypatch.setattr(ort, "InferenceSession", Session)
    found = doctor._provider_finding("cuda", "CUDAExecutionProvider", "get a GPU", ["CUDAExecutionProvider"])
    assert found.status is Status.BAD
    assert "does not start here; get a GPU" in found.text


def test_two_onnxruntimes_are_found_out(monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(doctor, "_version", lambda name: "1.0")
    assert doctor._onnxruntime_findings()[0].status is Status.BAD


def test_a_tensorrt_that_crashes_is_reported(monkeypatch, tmp_path):
    """A library that takes the process down must not take the doctor down."""
    (tmp_path / "crashing_trt.py").write_text("import os\nos.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    found = doctor._trt_finding("tensorrt", "crashing_trt", "tensorrt", False)
    assert found.status is Status.BAD
    assert "does not start" in found.text


class Driver:
    """libcuda.so.1 with one device, as seen through ctypes."""

    def __init__(self, status: int = 0, devices: int = 1) -> None:
        self.cuInit = lambda flags: status
        self.cuDeviceGetCount = lambda count: setattr(count._obj, "value", devices)
        self.cuDriverGetVersion = lambda version: setattr(version._obj, "value", 13010)
        self.cuDeviceGet = lambda device, index: setattr(device._obj, "value", index)
        self.cuDeviceGetName = lambda name, size, device: setattr(name, "value", b"Card 9000")
        self.cuDeviceTotalMem_v2 = lambda memory, device: setattr(memory._obj, "value", 24 * 10**9)
        self.cuDeviceGetAttribute = lambda value, attribute, device: setattr(
            value._obj, "value", {75: 8, 76: 9}[attribute]
        )


def test_the_driver_is_asked_for_its_devices(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    gpus, text = gpu.cuda_devices()
    assert gpus == (Gpu("Card 9000", "8.9", 24 * 10**9),)
    assert text == "Card 9000 (compute capability 8.9, 24 GB); driver for CUDA 13.1"
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(status=999))
    assert gpu.cuda_devices() == ((), "the NVIDIA driver does not start (cuInit gives 999)")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(devices=0))
    assert gpu.cuda_devices() == ((), "the NVIDIA driver sees no device")


@pytest.fixture(scope="module")
def report() -> Report:
    return examine_machine()


def test_the_report_names_everything(report):
    names = [finding.name for finding in report.findings]
    assert {"command dflash", "gpu", "onnxruntime", "tensorrt", "tensorrt-rtx", "export", "originals"} <= {
        *names
    }
    assert len(names) == len(set(names))
    assert json.loads(json.dumps(report.to_dict()))["python"]["status"] == "good"


def test_the_command_prints_the_report(report, monkeypatch):
    monkeypatch.setattr(doctor, "examine_machine", lambda: report)
    table = CliRunner().invoke(cli, ["doctor"])
    assert table.exit_code == 0
    assert all(finding.name in table.output for finding in report.findings)
    as_json = CliRunner().invoke(cli, ["doctor", "--json"])
    assert json.loads(as_json.output) == report.to_dict()


@pytest.mark.parametrize(
    ("setting", "status", "text"),
    [
        ("0", doctor.Status.GOOD, "exact, weights as they are"),
        ("1", doctor.Status.GOOD, "exact, weights made unsigned"),
        (None, doctor.Status.BAD, "wrong on this processor"),
    ],
)
def test_whether_int8_sums_are_exact(setting, status, text):
    finding = doctor._sums_finding(setting)
    assert finding.status is status
    assert text in finding.text


def test_what_onnxruntimes_telemetry_is_set_to_is_said(monkeypatch):
    for value, text in {"1": "off, no device id is stored", "0": "left to onnxruntime"}.items():
        monkeypatch.setenv("ORT_DISABLE_TELEMETRY", value)
        found = {finding.name: finding for finding in examine_machine().findings}["telemetry"]
        assert found.status is Status.GOOD
        assert found.text == f"{text} (ORT_DISABLE_TELEMETRY={value})"
