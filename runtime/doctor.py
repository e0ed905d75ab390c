"""What this machine really has: every engine is started, not only looked up.

Libraries that may crash while loading (TensorRT without a driver) are imported in a process of their own.
"""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bundle.gpu import cuda_devices
from ..bundle.ort_exact import AS_IT_IS, exact_setting

DISTRIBUTION = "dflash-deploy"
SCRIPT = "dflash"
_MODULE = "dflash_deploy"

# y = x + x, opset 13, IR 7: the least that makes a provider start.
_TINY_MODEL = bytes.fromhex(
    "080712003a350a0e0a01780a017812017922034164641201675a0f0a0178120a0a08080112040a020801"
    "620f0a0179120a0a08080112040a02080142040a00100d"
)
_IMPORT_SECONDS = 60
_TELEMETRY = "ORT_DISABLE_TELEMETRY"  # read by onnxruntime; the package sets it unless it is set
_EXPORT_PACKAGES = (
    "torch",
    "transformers",
    "onnx",
    "onnxscript",
    "onnx-ir",
    "safetensors",
    "gguf",
    "huggingface_hub",
)
_ORIGINALS = ("dflash", "speculators")


class Status(enum.Enum):
    """How a finding stands."""

    GOOD = "good"
    ABSENT = "absent"
    BAD = "bad"

    @property
    def mark(self) -> str:
        """One word for a table."""
        return {"good": "ok", "absent": "-", "bad": "!!"}[self.value]


@dataclass(frozen=True)
class Finding:
    """One thing looked at. BAD is something that is there and does not work."""

    name: str
    status: Status
    text: str


@dataclass(frozen=True)
class Report:
    """All findings."""

    findings: tuple[Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: name to status and text."""
        return {f.name: {"status": f.status.value, "text": f.text} for f in self.findings}


def examine_machine() -> Report:
    """Look at everything. Takes a few seconds: engines are started."""
    gpus, driver = cuda_devices()
    findings = [
        Finding(
            "python", Status.GOOD, f"{platform.python_version()} on {platform.system()} {platform.machine()}"
        ),
        script_finding(),
        Finding("gpu", Status.GOOD if gpus else Status.ABSENT, driver),
        *_onnxruntime_findings(),
        _trt_finding("tensorrt", "tensorrt", "tensorrt", bool(gpus)),
        _trt_finding("tensorrt-rtx", "tensorrt_rtx", "rtx", bool(gpus)),
        _packages_finding(
            "polygraphy", ("polygraphy",), "build engines", f"pip install '{DISTRIBUTION}[rtx]'"
        ),
        _packages_finding("export", _EXPORT_PACKAGES, "export", f"pip install '{DISTRIBUTION}[export]'"),
        _packages_finding(
            "originals",
            _ORIGINALS,
            "prove parity",
            f"pip install --no-deps dflash==0.1.0 speculators==0.9.0, then reinstall {DISTRIBUTION}",
        ),
    ]
    return Report(tuple(findings))


def _onnxruntime_findings() -> list[Finding]:
    from .ort_engine import PROVIDERS

    both = [name for name in ("onnxruntime", "onnxruntime-gpu") if _version(name)]
    try:
        import onnxruntime
    except ImportError as cause:
        status = Status.BAD if both else Status.ABSENT
        text = f"cannot be imported ({cause}); pip install '{DISTRIBUTION}[cpu]' or '{DISTRIBUTION}[cuda]'"
        return [Finding("onnxruntime", status, text)]
    if len(both) > 1:
        version = Finding(
            "onnxruntime",
            Status.BAD,
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other; uninstall both, "
            f"then pip install '{DISTRIBUTION}[cuda]'",
        )
    else:
        version = Finding(
            "onnxruntime", Status.GOOD, f"{onnxruntime.__version__} ({', '.join(both) or 'own build'})"
        )
    available = onnxruntime.get_available_providers()
    return [
        version,
        _telemetry_finding(os.environ.get(_TELEMETRY, "")),
        _sums_finding(exact_setting(onnxruntime)),
        *(_provider_finding(name, p.providers[0], p.remedy, available) for name, p in PROVIDERS.items()),
    ]


def _telemetry_finding(setting: str) -> Finding:
    off = "off, no device id is stored" if setting == "1" else "left to onnxruntime"
    return Finding("telemetry", Status.GOOD, f"{off} ({_TELEMETRY}={setting})")


def _sums_finding(setting: str | None) -> Finding:
    if setting is None:
        return Finding(
            "int8", Status.BAD, "sums of products are wrong on this processor; use float32 bundles"
        )
    how = "as they are" if setting == AS_IT_IS else "made unsigned when a bundle is opened"
    return Finding("int8", Status.GOOD, f"sums of products are exact, weights {how}")


def _provider_finding(name: str, provider: str, remedy: str, available: list[str]) -> Finding:
    """Start a session on the provider alone: ONNX Runtime quietly takes the CPU if one does not start."""
    import numpy as np
    import onnxruntime

    title = f"provider {name}"
    if provider not in available:
        return Finding(title, Status.ABSENT, f"not in this onnxruntime; {remedy}")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(_TINY_MODEL, options, providers=[provider])
        if session.get_providers()[0] != provider:
            return Finding(title, Status.BAD, f"{provider} is installed but does not start here; {remedy}")
        session.run(None, {"x": np.ones(1, np.float32)})
    except Exception as cause:  # onnxruntime has a class for each failure, with no common base
        return Finding(title, Status.BAD, f"{provider} fails: {_first_line(cause)}")
    return Finding(title, Status.GOOD, f"{provider} runs")


def _trt_finding(name: str, module: str, extra: str, has_gpu: bool) -> Finding:
    if importlib.util.find_spec(module) is None:
        return Finding(name, Status.ABSENT, f"not installed; pip install '{DISTRIBUTION}[{extra}]'")
    code = f"import {module} as t; t.Builder(t.Logger(t.Logger.ERROR)); print(t.__version__)"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(name, Status.BAD, f"does not load within {_IMPORT_SECONDS} s")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"])[-1]
        return Finding(name, Status.BAD, f"installed, but does not start: {reason}")
    does = "builds and runs engines" if has_gpu else "builds engines; running them needs a GPU"
    if has_gpu and _version("cuda-bindings") is None:
        does = f"builds engines; to run them, pip install '{DISTRIBUTION}[{extra}]' again, for cuda-bindings"
    return Finding(name, Status.GOOD, f"{done.stdout.strip().splitlines()[-1]}, {does}")


def _packages_finding(name: str, packages: Iterable[str], purpose: str, remedy: str) -> Finding:
    versions = {package: _version(package) for package in packages}
    missing = [package for package, version in versions.items() if version is None]
    if missing:
        return Finding(name, Status.ABSENT, f"cannot {purpose}: {', '.join(missing)} not installed; {remedy}")
    return Finding(
        name, Status.GOOD, ", ".join(f"{package} {version}" for package, version in versions.items())
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def script_claims() -> Mapping[str, str]:
    """Distributions that install a console script of our name, with what the script calls."""
    points = importlib.metadata.entry_points(group="console_scripts", name=SCRIPT)
    return {point.dist.name if point.dist else "?": point.value for point in points}


def script_finding(
    claims: Callable[[], Mapping[str, str]] = script_claims, which: Callable[[str], str | None] = shutil.which
) -> Finding:
    """Find out whose `dflash` the shell runs: z-lab's package has a script of that name too.

    Args:
        claims: gives the distributions that own a script `dflash`.
        which: finds a command on the PATH.
    """
    name = f"command {SCRIPT}"
    instead = f"type `{DISTRIBUTION}` or `python -m {_MODULE}` instead"
    path = which(SCRIPT)
    if path is None:
        return Finding(name, Status.ABSENT, f"not on the PATH; type `python -m {_MODULE}` instead")
    others = sorted(dist for dist in claims() if _normal(dist) != DISTRIBUTION)
    try:
        ours = _MODULE.encode() in Path(path).read_bytes()
    except OSError as cause:
        return Finding(name, Status.BAD, f"{path} cannot be read ({cause.strerror}); {instead}")
    if not ours:
        owner = f"the package {' or '.join(others)}" if others else "another program"
        return Finding(
            name,
            Status.BAD,
            f"{path} belongs to {owner}; {instead}, or take the name back with "
            f"`pip install --force-reinstall --no-deps {DISTRIBUTION}`",
        )
    if others:
        return Finding(
            name,
            Status.GOOD,
            f"{path} is ours; {', '.join(others)} claims the name too and takes it when it is installed anew",
        )
    return Finding(name, Status.GOOD, f"{path} is ours")


def _normal(distribution: str) -> str:
    return distribution.lower().replace("_", "-")


def _first_line(cause: BaseException) -> str:
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]
