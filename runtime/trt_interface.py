"""Whether a loaded engine has the tensors, types and profiles that the manifest promises."""

from __future__ import annotations

from typing import Any

from ..bundle.engines import engine_name
from ..bundle.errors import ProviderError
from ..bundle.manifest import EngineInfo
from ..bundle.profiles import input_shapes
from ..bundle.tensors import DType, GraphIO, present

_DTYPES = {DType.FLOAT32: "FLOAT", DType.FLOAT16: "HALF", DType.BFLOAT16: "BF16", DType.INT64: "INT64"}


def check_interface(engine: Any, module: Any, io: GraphIO, built: EngineInfo) -> tuple[str, ...]:
    """Compare an engine's tensors with the manifest.

    Args:
        engine: the library's.
        module: the library.
        io: the graph's interface.
        built: what the manifest says of the engine.

    Returns:
        The inputs whose shape has to be said before a pass.

    Raises:
        ProviderError: something differs, or a cache is not updated in place.
    """
    name = engine_name(built.graph, built.backend)

    def same(what: str, got: object, expected: object) -> None:
        if got != expected:
            raise ProviderError(
                f"engine {name}: {what}: got {got}, expected {expected} by the manifest; "
                f"run `dflash build-engine` with --backend {built.backend}"
            )

    mode, place = module.TensorIOMode, module.TensorLocation
    tensors = {t.name: (t, mode.INPUT) for t in io.inputs} | {t.name: (t, mode.OUTPUT) for t in io.outputs}
    found = sorted(engine.get_tensor_name(index) for index in range(engine.num_io_tensors))
    same("tensors", found, sorted(tensors))
    same("number of profiles", engine.num_optimization_profiles, len(built.profiles))
    for tensor, side in tensors.values():
        same(f"{tensor.name}: mode", engine.get_tensor_mode(tensor.name), side)
        same(f"{tensor.name}: memory", engine.get_tensor_location(tensor.name), place.DEVICE)
        dtype = getattr(module.DataType, _DTYPES[tensor.dtype])
        same(f"{tensor.name}: dtype", engine.get_tensor_dtype(tensor.name), dtype)
    moving = tuple(t.name for t in io.inputs if -1 in tuple(engine.get_tensor_shape(t.name)))
    for index, (profile, ranges) in enumerate(built.profiles.items()):
        planned = input_shapes(io, ranges)
        for moved in moving:
            shapes = tuple(tuple(shape) for shape in engine.get_tensor_profile_shape(moved, index))
            same(f"{moved}: shapes of profile {profile!r}", shapes, planned[moved])
    for past in (t.name for t in io.inputs if present(t.name) != t.name):
        # The output will be bound to the memory of the input, which is right only if the engine knows it.
        same(f"{present(past)}: updates", engine.get_aliased_input_tensor(present(past)), past)
    return moving
