"""Loading an engine never gives None: whatever a library does, our error says what to do."""

from __future__ import annotations

import enum
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_deploy.bundle.errors import EngineError, ProviderError
from dflash_deploy.bundle.limits import ShapeLimits
from dflash_deploy.bundle.manifest import EngineInfo
from dflash_deploy.runtime.engine_load import engine_from_plan

INFO = EngineInfo(
    "draft",
    "tensorrt-rtx",
    "1.7",
    "engines/d.engine",
    "float16",
    ("8.9",),
    "0" * 64,
    {},
    ShapeLimits(9, 9, 9, 9),
)


class Validity(enum.IntEnum):
    VALID = 0
    SUBOPTIMAL = 1
    INVALID = 2


class Diagnostics(enum.IntFlag):
    VERSION_MISMATCH = 1
    UNSUPPORTED_CC = 2


class Runtime:
    """A library's Runtime that answers what a test says."""

    engine_header_size = 4

    def __init__(self, engine=None, error=None, validity=Validity.VALID, bits=0):
        self.engine, self.error, self.answer = engine, error, (validity, bits)
        self.asked, self.loaded = [], 0

    def get_engine_validity(self, head: Any) -> Any:
        self.asked.append(head)
        return self.answer

    def deserialize_cuda_engine(self, plan):
        self.loaded += 1
        if self.error is not None:
            raise self.error
        return self.engine


class OldRuntime(Runtime):
    """TensorRT's own has no validity check."""

    get_engine_validity: Any = None


def library(name="tensorrt_rtx"):
    return SimpleNamespace(
        __name__=name,
        __version__="1.7",
        EngineValidity=Validity,
        EngineInvalidityDiagnostics=Diagnostics,
    )


def test_a_good_engine_is_given_after_its_head_was_looked_at():
    runtime = Runtime(engine="engine")
    assert engine_from_plan(library(), runtime, b"headbody", INFO) == "engine"
    assert runtime.asked == [b"head"]


def test_none_becomes_an_error_with_the_librarys_reasons():
    with pytest.raises(
        EngineError, match=r"gives no engine for engines/d\.engine \(bad magic\).*build-engine"
    ) as found:
        engine_from_plan(library(), OldRuntime(), b"plan", INFO, ["bad magic", "bad magic"])
    assert "plugin" not in str(found.value)


def test_a_plugin_is_named():
    info = EngineInfo(**{**vars(INFO), "plugin": "dflash::GroupedDynamicConv 1"})
    expected = r"plugin 'GroupedDynamicConv', version '1', namespace 'dflash', is in it; .*--conv function"
    with pytest.raises(EngineError, match=expected):
        engine_from_plan(library("tensorrt"), OldRuntime(), b"plan", info)


def test_an_exception_of_the_library_becomes_ours():
    with pytest.raises(EngineError, match=r"no engine .*version tag does not match"):
        engine_from_plan(library(), OldRuntime(error=RuntimeError("version tag does not match")), b"", INFO)


@pytest.mark.parametrize(
    ("bits", "reason"), [(3, "version mismatch, unsupported cc"), (0, "it gives no reason; is there a GPU")]
)
def test_an_invalid_engine_is_refused_before_it_is_loaded(bits, reason):
    runtime = Runtime(engine="engine", validity=Validity.INVALID, bits=bits)
    with pytest.raises(ProviderError, match=rf"does not run here \({reason}"):
        engine_from_plan(library(), runtime, b"plan", INFO)
    assert runtime.loaded == 0


def test_an_engine_for_another_gpu_that_still_runs_is_loaded_with_a_warning(caplog):
    runtime = Runtime(engine="engine", validity=Validity.SUBOPTIMAL, bits=2)
    with caplog.at_level(logging.WARNING):
        assert engine_from_plan(library(), runtime, b"plan", INFO) == "engine"
    assert "was not built for this GPU" in caplog.text


def test_the_real_library_refuses_what_is_no_engine():
    trt = pytest.importorskip("tensorrt_rtx")
    runtime = trt.Runtime(trt.Logger(trt.Logger.INTERNAL_ERROR))
    with pytest.raises(ProviderError, match="malformed engine"):
        engine_from_plan(trt, runtime, b"x" * 4096, INFO)
