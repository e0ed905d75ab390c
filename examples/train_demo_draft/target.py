"""The target (SmolLM2, a Llama) in plain torch: unpack its 4-bit blocks, run it.

Shapes: B sequences, T tokens, S cache slots, H hidden, V vocabulary, K kv heads,
G query heads per kv head, D head size.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open


@dataclass(frozen=True)
class LlamaShape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float
    theta: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))


# The quantised blocks start with their fp16 scale (Q4_1: also an fp16 minimum). Multiply and add
# stay two operations, so that the result has the same bits as the reference implementation.
def _unpack_q4_1(blocks: torch.Tensor) -> torch.Tensor:  # [n, 20] uint8 -> [n, 32]
    scale = blocks[:, 0:2].contiguous().view(torch.float16).float()
    minimum = blocks[:, 2:4].contiguous().view(torch.float16).float()
    codes = blocks[:, 4:]
    return scale * torch.cat([codes & 15, codes >> 4], 1).float() + minimum


def _unpack_q8_0(blocks: torch.Tensor) -> torch.Tensor:  # [n, 34] uint8 -> [n, 32]
    scale = blocks[:, 0:2].contiguous().view(torch.float16).float()
    return blocks[:, 2:].contiguous().view(torch.int8).float() * scale


_UNPACK = {"Q4_1": (20, _unpack_q4_1), "Q8_0": (34, _unpack_q8_0)}


def read_blocks(path: Path, device: str = "cpu") -> tuple[LlamaShape, dict[str, torch.Tensor]]:
    """Dequantise the file that `prepare.py` wrote: Hugging Face names, fp32 tensors."""
    weights = {}
    with safe_open(path, "pt", device=device) as file:
        shape = LlamaShape(**json.loads(file.metadata()["shape"]))
        for key in file.keys():  # noqa: SIM118  (not a dict)
            tensor = file.get_tensor(key)
            name, _, kind = key.partition("|")
            if kind in _UNPACK:
                block_bytes, unpack = _UNPACK[kind]
                tensor = unpack(tensor.view(-1, block_bytes)).view(tensor.shape[0], -1)
            weights[name] = tensor
    return shape, weights


def random_weights(shape: LlamaShape, device: str) -> dict[str, torch.Tensor]:
    """Weights of the right shapes and no meaning: enough to try every kernel."""
    s = shape
    width, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    linear = {
        "self_attn.q_proj": (width, s.hidden),
        "self_attn.k_proj": (kv, s.hidden),
        "self_attn.v_proj": (kv, s.hidden),
        "self_attn.o_proj": (s.hidden, width),
        "mlp.gate_proj": (s.intermediate, s.hidden),
        "mlp.up_proj": (s.intermediate, s.hidden),
        "mlp.down_proj": (s.hidden, s.intermediate),
    }
    weights = {
        "model.embed_tokens.weight": torch.randn(s.vocab, s.hidden, device=device) * 0.1,
        "model.norm.weight": torch.ones(s.hidden, device=device),
    }
    for index in range(s.layers):
        prefix = f"model.layers.{index}."
        for name, size in linear.items():
            weights[f"{prefix}{name}.weight"] = torch.randn(size, device=device) * 0.03
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(s.hidden, device=device)
    return weights


def rotary_table(positions: torch.Tensor, head_dim: int, theta: float) -> tuple:
    """(cos, sin), each [*positions.shape, D]."""
    step = torch.arange(0, head_dim, 2, dtype=torch.int64, device=positions.device).float()
    angles = positions[..., None].float() * (1.0 / (theta ** (step / head_dim)))
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class KVCache:
    """One slot per position, so that a captured graph always sees the same addresses."""

    def __init__(self, shape: LlamaShape, rows: int, slots: int, device: str, dtype: torch.dtype):
        size = (shape.layers, rows, shape.kv_heads, slots, shape.head_dim)  # [layers, B, K, S, D]
        self.keys = torch.zeros(size, device=device, dtype=dtype)
        self.values = torch.zeros(size, device=device, dtype=dtype)
        self.slots = torch.arange(slots, device=device)
        self.rows = torch.arange(rows, device=device)
        self.cos, self.sin = rotary_table(self.slots, shape.head_dim, shape.theta)  # [S, D]


# Two ways to attend from a few query rows to all slots; which is faster is the device's affair.
def _attend_fused(q, k, v, bias):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _attend_by_products(q, k, v, bias):
    scores = q @ k.mT * q.shape[-1] ** -0.5 + bias
    return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


class Llama:
    """Matrix products in `dtype`; the residual, the norms and the logits stay in fp32."""

    def __init__(self, shape: LlamaShape, weights: dict, device: str, dtype: torch.dtype):
        self.shape, self.device, self.dtype = shape, device, dtype
        self.embedding = weights["model.embed_tokens.weight"].to(device).float()  # [V, H], tied
        self.final_norm = weights["model.norm.weight"].to(device).float()
        self.attend = _attend_fused
        self.layers = []
        for index in range(shape.layers):
            part = {
                name.split(".", 3)[3].removesuffix(".weight"): value.to(device)
                for name, value in weights.items()
                if name.startswith(f"model.layers.{index}.")
            }
            qkv = [part[f"self_attn.{x}_proj"] for x in "qkv"]
            gate_up = [part["mlp.gate_proj"], part["mlp.up_proj"]]
            layer = {
                "qkv": torch.cat(qkv).to(dtype),
                "o": part["self_attn.o_proj"].to(dtype),
                "gate_up": torch.cat(gate_up).to(dtype),
                "down": part["mlp.down_proj"].to(dtype),
                "norm_in": part["input_layernorm"].float(),
                "norm_mlp": part["post_attention_layernorm"].float(),
            }
            self.layers.append(layer)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.shape.hidden,), weight, self.shape.eps)

    def _mlp(self, x: torch.Tensor, layer: dict) -> torch.Tensor:
        hidden = self._norm(x, layer["norm_mlp"]).to(self.dtype)
        gate, up = F.linear(hidden, layer["gate_up"]).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, layer["down"])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H] after the final norm -> [..., V] fp32 (bf16 logits would tie too often)."""
        return F.linear(hidden, self.embedding)

    @torch.no_grad()
    def forward(self, ids: torch.Tensor, taps: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Whole sequences [B, T]: (tapped layer outputs [B, T, taps * H], final hidden [B, T, H]).

        Right padding is harmless: attention is causal.
        """
        s = self.shape
        batch, length = ids.shape
        cos, sin = rotary_table(torch.arange(length, device=ids.device), s.head_dim, s.theta)
        x = self.embedding[ids]
        tapped = {}
        for index, layer in enumerate(self.layers):
            hidden = self._norm(x, layer["norm_in"]).to(self.dtype)
            qkv = F.linear(hidden, layer["qkv"]).view(batch, length, -1, s.head_dim).transpose(1, 2)
            q, k, v = qkv.split([s.heads, s.kv_heads, s.kv_heads], 1)  # [B, heads, T, D]
            q, k = (rotate(t.float(), cos, sin).to(self.dtype) for t in (q, k))
            k, v = (t.repeat_interleave(s.heads // s.kv_heads, 1) for t in (k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.linear(mixed.transpose(1, 2).reshape(batch, length, -1), layer["o"])
            x = self._mlp(x, layer)
            if index in taps:
                tapped[index] = x.to(self.dtype)
        return torch.cat([tapped[i] for i in taps], -1), self._norm(x, self.final_norm)

    @torch.no_grad()
    def decode(self, ids: torch.Tensor, positions: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """One token per row at the row's own position, both [B] -> logits [B, V]."""
        s = self.shape
        groups = s.heads // s.kv_heads
        rows = ids.shape[0]
        cos, sin = cache.cos[positions][:, None], cache.sin[positions][:, None]  # [B, 1, D]
        future = cache.slots > positions[:, None]  # [B, S]
        bias = torch.zeros(future.shape, device=ids.device, dtype=self.dtype)
        bias = bias.masked_fill(future, float("-inf"))[:, None, None]
        bias = bias.expand(rows, s.kv_heads, groups, -1)
        x = self.embedding[ids]
        for index, layer in enumerate(self.layers):
            hidden = self._norm(x, layer["norm_in"]).to(self.dtype)
            qkv = F.linear(hidden, layer["qkv"]).view(rows, -1, s.head_dim)
            q, k, v = qkv.split([s.heads, s.kv_heads, s.kv_heads], 1)  # [B, heads, D]
            q, k = (rotate(t.float(), cos, sin).to(self.dtype) for t in (q, k))
            cache.keys[index][cache.rows, :, positions] = k
            cache.values[index][cache.rows, :, positions] = v
            # The query heads that share a kv head stand in for a longer query: no key is copied.
            q = q.view(rows, s.kv_heads, groups, s.head_dim)
            mixed = self.attend(q, cache.keys[index], cache.values[index], bias)
            x = x + F.linear(mixed.reshape(rows, -1), layer["o"])
            x = self._mlp(x, layer)
        return self.logits(self._norm(x, self.final_norm))

    def pick_attention(self, cache: KVCache) -> str:
        """Keep the faster way to attend for `decode` with this cache; returns its name."""
        ids = torch.zeros_like(cache.rows)
        seconds = {}
        for attend in (_attend_fused, _attend_by_products):
            self.attend = attend
            for _ in range(2):  # the first round loads kernels
                torch.cuda.synchronize()
                began = time.perf_counter()
                self.decode(ids, ids, cache)
                torch.cuda.synchronize()
                seconds[attend] = time.perf_counter() - began
        self.attend = min(seconds, key=seconds.get)
        return f"{self.attend.__name__} of {[f'{s * 1e3:.1f} ms' for s in seconds.values()]}"
