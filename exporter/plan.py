"""What `export_bundle` needs to know about a pair, whatever family it is of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..bundle.manifest import DraftInfo, TargetInfo
from ..bundle.tensors import DType, GraphIO
from .checkpoint import Checkpoint
from .pieces import pieces
from .progress import Progress

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# Prefixes of weight keys: whose parameter it is.
TARGET_PREFIX = "target."
DRAFT_PREFIX = "draft."


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints, parsed.

    Attributes:
        checkpoint: opened; weights are read from it one at a time.
        tensors: checkpoint tensor for each canonical parameter name.
        dtype: what its weights are stored in, for provenance.
        loads: how to make those parameters that are not a stored tensor as it is, by canonical name; they
            are small.
    """

    checkpoint: Checkpoint
    tensors: Mapping[str, str]
    dtype: str
    loads: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)

    def place(self, canonical: str) -> str:
        """Checkpoint and tensor of a parameter, for messages."""
        return f"{self.checkpoint.name}: {self.tensors[canonical]}"

    def position(self, canonical: str) -> tuple[Path, int]:
        """Where a parameter is stored; see `Checkpoint.position`."""
        return self.checkpoint.position(self.tensors[canonical])

    def pieces(self, canonical: str) -> Iterator[Tensor]:
        """Read a parameter piece by piece, in the order of its rows; nothing is read before the first."""
        if canonical in self.loads:
            yield self.loads[canonical]()
        else:
            yield from pieces(self.checkpoint, self.tensors[canonical])


@dataclass(frozen=True)
class GraphPlan:
    """How one graph is made: its module, its interface, and where its parameters come from.

    Attributes:
        name: of the graph in the bundle.
        build: makes the module, on fake tensors.
        io: the interface.
        caches: how many of the inputs are KV caches.
        stages: see `graph_from_module`.
        kernel_size: see `graph_from_module`.
        constants: parameters whose values are known here and stay inside the graph.
        prefix: what the names of the module's parameters lack to be weight keys; parameters under
            ``target.`` are keys already.
    """

    name: str
    build: Callable[[], nn.Module]
    io: GraphIO
    caches: int = 0
    stages: tuple[str, ...] = ()
    kernel_size: int | None = None
    constants: tuple[tuple[str, np.ndarray], ...] = ()
    prefix: str = DRAFT_PREFIX

    @cached_property
    def parameters(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of the module's parameters by name."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            return {name: (p.dtype, tuple(p.shape)) for name, p in self.build().named_parameters()}


@dataclass(frozen=True)
class ExportPlan:
    """All of a bundle that depends on the family and the dtype. `float32_parts` are for the reader."""

    target: TargetInfo
    draft: DraftInfo
    graphs: tuple[GraphPlan, ...]
    float32_parts: tuple[str, ...]


class Pair(Protocol):
    """A target and its draft, parsed and found to belong together; no weights were read.

    One class a family, made by the family's ``pair_from_checkpoints(target, draft)``.
    """

    @property
    def target(self) -> Side:
        """The target's side."""

    @property
    def draft(self) -> Side:
        """The draft's side."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is legal but costs acceptance."""

    @property
    def max_length(self) -> int:
        """Longest sequence the target can have, in tokens."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation."""

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, if there is one."""

    def check_weights(self, progress: Progress) -> None:
        """Check what only the weights can tell; called before anything is written.

        Raises:
            CheckpointError, UnsupportedError: the weights of the two do not fit each other.
        """

    def plan(self, dtype: DType) -> ExportPlan:
        """Plan the bundle. `dtype` is that of weights and caches."""
