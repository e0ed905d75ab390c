"""The CUDA devices of this machine, from the NVIDIA driver alone."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """One CUDA device."""

    name: str
    compute_capability: str
    memory_bytes: int


def cuda_devices() -> tuple[tuple[Gpu, ...], str]:
    """Ask the NVIDIA driver itself.

    Returns:
        The devices, and one line about them or about why there are none.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return (), "no NVIDIA driver (libcuda.so.1 is not there)"
    status = cuda.cuInit(0)
    if status:
        return (), f"the NVIDIA driver does not start (cuInit gives {status})"
    count, version = ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    cuda.cuDriverGetVersion(ctypes.byref(version))
    gpus = tuple(_device(cuda, index) for index in range(count.value))
    if not gpus:
        return (), "the NVIDIA driver sees no device"
    driver = f"driver for CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    names = ", ".join(
        f"{gpu.name} (compute capability {gpu.compute_capability}, {gpu.memory_bytes / 1e9:.0f} GB)"
        for gpu in gpus
    )
    return gpus, f"{names}; {driver}"


def _device(cuda: Any, index: int) -> Gpu:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name, memory = ctypes.create_string_buffer(128), ctypes.c_size_t()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
    cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    return Gpu(name.value.decode("utf-8", "replace"), f"{major.value}.{minor.value}", memory.value)
