"""What an export costs at real size: memory, seconds, bytes.

    python benchmarks/export_memory.py --shape qwen3-8b --dtype float16 --folder /some/disk

Makes a checkpoint of random weights (bfloat16, in shards as models are published) and a DFlash draft of five
layers for it, copies them, exports them, and deletes all of it. With --run it also lets the bundle decode a
few tokens on the CPU. Reading starts from the disk each time, as far as the kernel lets a process ask for
that, and what is written counts when it has reached the disk, for the copy and for the export. With --plan
it also prints what `dflash build-engine --dry-run` says.
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
BLOCK = 16
DRAFT_LAYERS = 5
PROMPT = list(range(100, 132))


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


def taps(shape: Shape) -> list[int]:
    """As z-lab spreads them: from the second layer to the third before the end."""
    return [1 + round(i * (shape.layers - 4) / (DRAFT_LAYERS - 1)) for i in range(DRAFT_LAYERS)]


def draft_tensors(shape: Shape) -> Tensors:
    h = shape.hidden
    tensors: Tensors = {"fc.weight": (h, DRAFT_LAYERS * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    return tensors | decoder_tensors(shape, DRAFT_LAYERS, shape.intermediate)


def make_draft(folder: Path, shape: Shape) -> int:
    """A z-lab draft with layers like the target's."""
    settings = config(
        shape,
        architectures=["DFlashDraftModel"],
        intermediate_size=shape.intermediate,
        num_hidden_layers=DRAFT_LAYERS,
        num_target_layers=shape.layers,
        block_size=BLOCK,
        layer_types=["full_attention"] * DRAFT_LAYERS,
        dflash_config={"mask_token_id": 151_669, "target_layer_ids": taps(shape)},
    )
    return write_checkpoint(folder, settings, draft_tensors(shape))


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
    settle(output)
    return time.perf_counter() - start


def settle(folder: Path) -> None:
    """Wait until the files are on the disk."""
    for path in folder.rglob("*"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def measured(*command: str) -> tuple[float, float, int]:
    """Seconds, seconds of CPU, and peak memory in bytes of a Python command, start of Python included."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[:3]} ended with exit code {process.returncode}")
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def exported_in(target: Path, draft: Path, output: Path, dtype: str) -> tuple[float, float, int]:
    """Seconds, seconds of CPU, and peak memory of `dflash export`."""
    forget(target, draft)
    sources = ["--target", str(target), "--draft", str(draft)]
    start = time.perf_counter()
    _, cpu_s, peak = measured(
        "-m", "dflash_deploy", "export", "--dtype", dtype, "--output", str(output), *sources
    )
    settle(output)
    return time.perf_counter() - start, cpu_s, peak


def check(bundle: Path) -> None:
    """Let onnx check the target's graph by its path; the weights stay on the disk."""
    import onnx

    onnx.checker.check_model(str(bundle / "target.onnx"))


def decode(bundle: Path) -> None:
    """Decode a few tokens both ways; runs in a process of its own."""
    from dflash_deploy.runtime.decoder import Decoder
    from dflash_deploy.runtime.stats import Mode

    with Decoder.open(bundle, provider="cpu") as decoder:
        ids = [decoder.generate(PROMPT, max_new_tokens=4, mode=mode).ids for mode in Mode]
    print(f"decoded {ids}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--folder", type=Path, help="on the disk to use [default: the temporary one]")
    parser.add_argument("--plan", action="store_true", help="say what building an RTX engine would need")
    parser.add_argument("--run", action="store_true", help="decode a few tokens on the CPU too")
    parser.add_argument("--decode", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.decode is not None:
        decode(arguments.decode)
        return
    shape = SHAPES[arguments.shape]
    growth = 2 if arguments.dtype == "float32" else 1
    with tempfile.TemporaryDirectory(prefix="dflash-export-", dir=arguments.folder) as name:
        folder = Path(name)
        target, draft, bundle, copy = (folder / part for part in ("target", "draft", "bundle", "copy"))
        copy.mkdir()
        # The checkpoint, then a copy of it, which is deleted before the bundle is written.
        need = (1.05 + growth) * sum(map(size_bytes, (target_tensors(shape) | draft_tensors(shape)).values()))
        free = shutil.disk_usage(folder).free
        if need > free:
            raise SystemExit(f"needs {need / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")
        unique = make_target(target, shape) + make_draft(draft, shape)
        copy_s = copied_in([target, draft], copy)
        shutil.rmtree(copy)
        export_s, cpu_s, peak = exported_in(target, draft, bundle, arguments.dtype)
        shutil.rmtree(target)
        check(bundle)
        size = sum(path.stat().st_size for path in bundle.rglob("*"))
        if arguments.plan:
            measured(
                "-m", "dflash_deploy", "build-engine", str(bundle), "--backend=tensorrt-rtx", "--dry-run"
            )
        decoded = {}
        if arguments.run:
            seconds, _, run_peak = measured(__file__, "--decode", str(bundle))
            decoded = {"run_s": round(seconds, 1), "run_peak_memory_gb": round(run_peak / 1e9, 2)}
    report = {
        "shape": arguments.shape,
        "dtype": arguments.dtype,
        "parameters_billion": round(unique / 2e9, 3),
        "checkpoints_gb": round(unique / 1e9, 2),
        "peak_memory_gb": round(peak / 1e9, 3),
        "export_s": round(export_s, 1),
        "export_cpu_s": round(cpu_s, 1),
        "copy_s": round(copy_s, 1),
        "export_over_copy": round(export_s / copy_s, 2),
        "bundle_over_parameters": round(size / (growth * unique), 4),
        **decoded,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
