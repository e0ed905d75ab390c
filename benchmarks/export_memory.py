"""What an export costs at real size: memory, seconds, bytes.

    python benchmarks/export_memory.py --shape qwen3-4b --folder /some/disk

Makes a checkpoint of random weights (bfloat16, in shards as models are published) and a small draft that
fits it, copies them, exports them, and deletes all of it. Needs three times the checkpoint's size on the
disk. Reading starts from the disk each time, as far as the kernel lets a process ask for that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

SHARD_BYTES = 5 * 10**9
CHUNK_BYTES = 1 << 24
COPIES = 3  # the checkpoint, and a bundle in float32; the plain copy is deleted before
TAPS = (1, 5)
BLOCK = 16


@dataclass(frozen=True)
class Shape:
    """A Qwen3's sizes."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    tied: bool
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 151_936


SHAPES = {
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, tied=True),
    "1b": Shape(2048, 6144, 14, 16, tied=True),  # half of the next one's layers
    "qwen3-1.7b": Shape(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": Shape(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": Shape(4096, 12288, 36, 32, tied=False),
}

Tensors = dict[str, tuple[int, ...]]


def decoder_tensors(shape: Shape, layers: int, intermediate: int) -> Tensors:
    """Names and shapes of decoder layers."""
    h, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        f"layers.{i}.{name}.weight": size
        for i in range(layers)
        for name, size in {
            "input_layernorm": (h,),
            "self_attn.q_proj": (q, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, q),
            "self_attn.q_norm": (shape.head_dim,),
            "self_attn.k_norm": (shape.head_dim,),
            "post_attention_layernorm": (h,),
            "mlp.gate_proj": (intermediate, h),
            "mlp.up_proj": (intermediate, h),
            "mlp.down_proj": (h, intermediate),
        }.items()
    }


def config(shape: Shape, **others: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "vocab_size": shape.vocabulary,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        **others,
    }


def target_tensors(shape: Shape) -> Tensors:
    tensors = {"embed_tokens.weight": (shape.vocabulary, shape.hidden), "norm.weight": (shape.hidden,)}
    tensors |= decoder_tensors(shape, shape.layers, shape.intermediate)
    named: Tensors = {f"model.{name}": size for name, size in tensors.items()}
    if not shape.tied:
        named["lm_head.weight"] = (shape.vocabulary, shape.hidden)
    return named


def make_target(folder: Path, shape: Shape) -> int:
    """Write it; give the bytes of its parameters."""
    settings = config(
        shape,
        architectures=["Qwen3ForCausalLM"],
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        tie_word_embeddings=shape.tied,
    )
    return write_checkpoint(folder, settings, target_tensors(shape))


def make_draft(folder: Path, shape: Shape) -> int:
    """A z-lab draft of one thin layer."""
    h, intermediate = shape.hidden, 512
    tensors: Tensors = {"fc.weight": (h, len(TAPS) * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    tensors |= decoder_tensors(shape, 1, intermediate)
    settings = config(
        shape,
        architectures=["DFlashDraftModel"],
        intermediate_size=intermediate,
        num_hidden_layers=1,
        num_target_layers=shape.layers,
        block_size=BLOCK,
        layer_types=["full_attention"],
        dflash_config={"mask_token_id": 151_669, "target_layer_ids": list(TAPS)},
    )
    return write_checkpoint(folder, settings, tensors)


def write_checkpoint(folder: Path, settings: dict[str, Any], tensors: Tensors) -> int:
    """Write config.json and shards, never holding more than a chunk."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings, indent=2))
    chunk = random_chunk()
    shards = list(in_shards(tensors))
    owner: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        owner |= dict.fromkeys(shard, name)
        with open(folder / name, "wb") as file:
            write_shard(file, shard, chunk)
    total = sum(map(size_bytes, tensors.values()))
    index = {"metadata": {"total_size": total}, "weight_map": owner}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def in_shards(tensors: Tensors) -> Iterator[Tensors]:
    shard: Tensors = {}
    for name, shape in tensors.items():
        if shard and sum(map(size_bytes, shard.values())) + size_bytes(shape) > SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = shape
    yield shard


def size_bytes(shape: tuple[int, ...]) -> int:
    return 2 * math.prod(shape)


def random_chunk() -> bytes:
    """Normal numbers of the size of weights, as bfloat16: the upper half of a float32."""
    numbers = np.random.default_rng(0).normal(0, 0.02, CHUNK_BYTES // 2).astype(np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def write_shard(file: BinaryIO, tensors: Tensors, chunk: bytes) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors.items():
        end = offset + size_bytes(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    left = offset
    while left:
        left -= file.write(chunk[:left])


def forget(*folders: Path) -> None:
    """Ask the kernel to drop what it keeps of the files in memory."""
    os.sync()
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def copied_in(sources: list[Path], output: Path) -> float:
    """Seconds of copying the files."""
    forget(*sources)
    start = time.perf_counter()
    for source in sources:
        for path in source.iterdir():
            with open(path, "rb") as one, open(output / f"{source.name}-{path.name}", "wb") as other:
                shutil.copyfileobj(one, other, 1 << 22)
    return time.perf_counter() - start


def exported_in(target: Path, draft: Path, output: Path, dtype: str) -> tuple[float, int]:
    """Seconds and peak memory in bytes of `dflash export`, start of Python included."""
    forget(target, draft)
    command = [sys.executable, "-m", "dflash_deploy", "export", "--dtype", dtype, "--output", str(output)]
    start = time.perf_counter()
    process = subprocess.Popen([*command, "--target", str(target), "--draft", str(draft)])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"the export ended with exit code {process.returncode}")
    return time.perf_counter() - start, usage.ru_maxrss * 1024


def check(bundle: Path) -> None:
    """Let onnx check the target's graph by its path; the weights stay on the disk."""
    import onnx

    onnx.checker.check_model(str(bundle / "target.onnx"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--folder", type=Path, help="on the disk to use [default: the temporary one]")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    with tempfile.TemporaryDirectory(prefix="dflash-export-", dir=arguments.folder) as name:
        folder = Path(name)
        target, draft, bundle, copy = (folder / part for part in ("target", "draft", "bundle", "copy"))
        copy.mkdir()
        need = COPIES * sum(map(size_bytes, target_tensors(shape).values()))
        free = shutil.disk_usage(folder).free
        if need > free:
            raise SystemExit(f"needs {need / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")
        unique = make_target(target, shape) + make_draft(draft, shape)
        copy_s = copied_in([target, draft], copy)
        shutil.rmtree(copy)
        export_s, peak = exported_in(target, draft, bundle, arguments.dtype)
        check(bundle)
        size = sum(path.stat().st_size for path in bundle.rglob("*"))
    at_dtype = unique * (2 if arguments.dtype == "float32" else 1)
    report = {
        "shape": arguments.shape,
        "dtype": arguments.dtype,
        "parameters_billion": round(unique / 2e9, 3),
        "checkpoint_gb": round(unique / 1e9, 2),
        "peak_memory_gb": round(peak / 1e9, 3),
        "export_s": round(export_s, 1),
        "copy_s": round(copy_s, 1),
        "export_over_copy": round(export_s / copy_s, 2),
        "bundle_over_parameters": round(size / at_dtype, 4),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
