"""A GGUF file as a checkpoint: metadata as a config, tensors dequantised to float32 one at a time.

The names follow the gguf library's own name map, so a file reads like the Hugging Face folder it was made
from. Llama files store q and k projections with rotated halves interleaved; reading undoes that.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from ..bundle.errors import CheckpointError, UnsupportedError, field_error
from .checkpoint import TensorEntry
from .source_files import SourceFiles

# GGUF architecture -> model_type. `llama` files interleave q and k.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_INTERLEAVED = {"llama"}
_MAGIC = b"GGUF"
_CONFIG_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class GgufCheckpoint:
    """One GGUF file."""

    format = "gguf"

    def __init__(self, path: Path) -> None:
        """Open `path` without reading weights.

        Raises:
            CheckpointError: not a whole GGUF file, or metadata is missing.
            UnsupportedError: another architecture, or RoPE factors that the config cannot state.
        """
        import gguf

        self.path = Path(path)
        self.name = self.path.name
        self.source = SourceFiles((self.path,))
        self.generation_config: dict[str, Any] = {}
        with open(self.path, "rb") as file:
            magic = file.read(len(_MAGIC))
        if magic != _MAGIC:
            raise CheckpointError(
                f"{self.name}: is no GGUF file, which begins with GGUF; check what was downloaded"
            )
        try:
            self._reader = gguf.GGUFReader(str(self.path))
        except Exception as cause:  # the library raises bare ValueError, IndexError, struct.error
            raise CheckpointError(
                f"{self.name}: is a damaged GGUF file, or ends before what its beginning announces "
                f"({self.path.stat().st_size} bytes); download it again"
            ) from cause
        self._architecture = str(self._meta("general.architecture"))
        if self._architecture not in ARCHITECTURES:
            raise field_error(
                UnsupportedError,
                f"{self.name}: general.architecture",
                self._architecture,
                "one of " + ", ".join(sorted(ARCHITECTURES)),
            )
        self._stored = {self._rename(t.name): t for t in self._reader.tensors}
        self.tensors = {
            name: TensorEntry(name, "float32", tuple(int(n) for n in reversed(t.shape)))
            for name, t in self._stored.items()
        }
        self.config = self._make_config()
        self.quantisation = ", ".join(sorted({t.tensor_type.name for t in self._reader.tensors}))

    def _meta(self, key: str, default: Any = None) -> Any:
        field = self._reader.fields.get(key)
        if field is None:
            if default is None:
                raise CheckpointError(f"{self.name}: metadata {key!r} is missing")
            return default
        return field.contents()

    def _rename(self, name: str) -> str:
        if name in _TOP:
            return _TOP[name]
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if match and match[2] in _BLOCK:
            return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.{match[3]}"
        raise UnsupportedError(
            f"{self.name}: tensor {name!r} is not one that {self._architecture} files are read for"
        )

    def _make_config(self) -> dict[str, Any]:
        arch = self._architecture
        config: dict[str, Any] = {"model_type": ARCHITECTURES[arch], "hidden_act": "silu"}
        for key, stored in _CONFIG_KEYS.items():
            config[key] = self._meta(f"{arch}.{stored}")
        heads = config["num_attention_heads"]
        dim = self._meta(f"{arch}.attention.key_length", config["hidden_size"] // heads)
        if self._meta(f"{arch}.rope.dimension_count", dim) != dim:
            raise field_error(
                UnsupportedError,
                f"{self.name}: {arch}.rope.dimension_count",
                self._meta(f"{arch}.rope.dimension_count"),
                f"the head size {dim}",
            )
        scaling = self._meta(f"{arch}.rope.scaling.type", "none")
        if scaling not in ("none", ""):
            raise field_error(UnsupportedError, f"{self.name}: {arch}.rope.scaling.type", scaling, "none")
        config["head_dim"] = dim
        config["rope_theta"] = float(self._meta(f"{arch}.rope.freq_base"))
        config["vocab_size"] = self.tensors["model.embed_tokens.weight"].shape[0]
        config["tie_word_embeddings"] = "lm_head.weight" not in self.tensors
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in self.tensors and arch != "qwen2"
        for key in ("bos", "eos"):
            field = self._reader.fields.get(f"tokenizer.ggml.{key}_token_id")
            if field is not None:
                config[f"{key}_token_id"] = int(field.contents())
        return config

    def read(self, name: str) -> torch.Tensor:
        """Dequantise one tensor to float32, rows in Hugging Face order."""
        shape = self.tensors[name].shape
        return self._rows(name, 0, shape[0] if shape else 1).reshape(shape)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Dequantise some rows of one tensor."""
        heads = self._interleaved_heads(name)
        if heads is None:
            return self._rows(name, start, stop)
        size = self.tensors[name].shape[0] // heads  # rows change places within their head
        first, last = start // size, -(-stop // size)
        return self._rows(name, first * size, last * size)[start - first * size : stop - first * size]

    def _rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows of whole heads, where heads are interleaved."""
        import gguf

        stored, shape = self._stored[name], self.tensors[name].shape
        row_bytes = int(stored.n_bytes) // (shape[0] if shape else 1)
        first_byte = int(stored.data_offset) + start * row_bytes
        data = self.source.read(self.path, first_byte, (stop - start) * row_bytes).numpy()
        rows = data.view(stored.data.dtype).reshape(stop - start, *stored.data.shape[1:])
        tensor = torch.from_numpy(gguf.quants.dequantize(rows, stored.tensor_type)).reshape(-1, *shape[1:])
        heads = self._interleaved_heads(name)
        if heads is not None:
            columns = tensor.shape[1]
            half = shape[0] // heads // 2
            tensor = tensor.reshape(-1, half, 2, columns).transpose(1, 2).reshape(-1, columns)
        return tensor

    def _interleaved_heads(self, name: str) -> int | None:
        """How many heads have rotated halves interleaved; None for tensors in Hugging Face order."""
        if self._architecture not in _INTERLEAVED or not re.search(r"\.(q|k)_proj\.weight$", name):
            return None
        key = "num_attention_heads" if ".q_proj" in name else "num_key_value_heads"
        return int(self.config[key])

    def position(self, name: str) -> tuple[Path, int]:
        """See `Checkpoint`."""
        return self.path, int(self._stored[name].data_offset)

    def files(self) -> tuple[Path, ...]:
        """The file."""
        return self.source.paths

    def tokenizer_folder(self) -> Path | None:
        """None: the tokenizer is inside the file."""
        return None
