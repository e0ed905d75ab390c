"""What may be chosen about an engine build."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from pathlib import Path

from ...bundle.errors import ProviderError, RequestError, field_error
from ...bundle.limits import PREFILL_ROWS, ShapeLimits, round_up
from ...bundle.manifest import EngineFlag, Manifest
from ...bundle.profiles import ProfileSet
from .backends import TENSORRT, Backend

SLOTS_MULTIPLE = 16
"""An engine's caches have a multiple of this many slots. TensorRT wants the memory of a tensor to begin at a
multiple of 256 bytes, and a pass over some lanes of a cache begins at a lane. So many slots take a multiple
of 256 bytes for every head size that is a multiple of 8."""


class Verbosity(enum.Enum):
    """What the user sees of TensorRT's own messages."""

    QUIET = "quiet"
    INFO = "info"
    VERBOSE = "verbose"


class Weights(enum.Enum):
    """Where an engine's weights are: in the engine, or in the bundle alone, from where it is refitted."""

    EMBEDDED = "embedded"
    STRIPPED = "stripped"


class Residence(enum.Enum):
    """Where weights are while the engine runs: on the GPU, or partly in host memory and streamed."""

    DEVICE = "device"
    STREAMED = "streamed"


class Conv(enum.Enum):
    """What ``dflash::GroupedDynamicConv`` becomes: nodes of its ONNX function, or a plugin of ours."""

    FUNCTION = "function"
    PLUGIN = "plugin"


@dataclass(frozen=True)
class BuildOptions:
    """All options of a build.

    Attributes:
        max_batch: most requests in one pass.
        max_prompt: most rows of a prompt in one pass; a longer prompt goes in parts.
        max_context: longest sequence in tokens, prompt and output; None takes the bundle's.
        workspace_bytes: most scratch memory a layer may use; None leaves it to the library.
        weights: where the weights are.
        residence: where they are while it runs.
        profile_set: how many profiles; None takes what suits the backend.
        timing_cache: file with what earlier builds measured; made if it is not there.
        verbosity: what is shown of the library's messages.
        conv: what the draft's convolutions become.
    """

    max_batch: int = 1
    max_prompt: int = PREFILL_ROWS
    max_context: int | None = None
    workspace_bytes: int | None = None
    weights: Weights = Weights.EMBEDDED
    residence: Residence = Residence.DEVICE
    profile_set: ProfileSet | None = None
    timing_cache: Path | None = None
    verbosity: Verbosity = Verbosity.QUIET
    conv: Conv = Conv.FUNCTION

    def check(self, backend: Backend) -> None:
        """Check what does not depend on the bundle.

        Raises:
            RequestError: a number is out of range.
            ProviderError: the backend does not know the option.
        """
        for name, value in (("max_batch", self.max_batch), ("max_prompt", self.max_prompt)):
            if value < 1:
                raise field_error(RequestError, name, value, ">= 1")
        if self.workspace_bytes is not None and self.workspace_bytes < 1:
            raise field_error(RequestError, "workspace", self.workspace_bytes, ">= 1 byte")
        if self.timing_cache is not None and not backend.timing_cache:
            raise ProviderError(
                f"timing cache: got {str(self.timing_cache)!r}, but {backend.name} measures nothing while "
                "building; leave the option out"
            )

        if self.conv is Conv.PLUGIN and not backend.plugins:
            raise ProviderError(
                f"conv: got {self.conv.value!r}, but {backend.name} has no plugins: its API cannot register "
                f"one; use --conv {Conv.FUNCTION.value}, or --backend {TENSORRT}"
            )

    def limits(self, manifest: Manifest) -> ShapeLimits:
        """The limits of the engines.

        Raises:
            RequestError: `max_context` is not within the bundle's.
        """
        longest = manifest.max_length if self.max_context is None else self.max_context
        if not 2 <= longest <= manifest.max_length:
            raise field_error(
                RequestError,
                "max_context",
                longest,
                f"2 to {manifest.max_length}, the bundle's max_length",
                "export again with a larger --max-length",
            )
        limits = ShapeLimits.from_manifest(manifest, longest, self.max_prompt, self.max_batch)
        return replace(limits, capacity=round_up(limits.capacity, SLOTS_MULTIPLE))

    def profiles(self, backend: Backend) -> ProfileSet:
        """How many profiles to plan."""
        if self.profile_set is not None:
            return self.profile_set
        return ProfileSet.ONE if backend.one_profile else ProfileSet.PHASES

    def flags(self) -> tuple[EngineFlag, ...]:
        """What the options alone say about the engine."""
        flags = []
        if self.weights is Weights.STRIPPED:
            flags.append(EngineFlag.STRIPPED)
        if self.residence is Residence.STREAMED:
            flags.append(EngineFlag.WEIGHT_STREAMING)
        return tuple(flags)
