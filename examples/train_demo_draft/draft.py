"""The DFlash2 draft as it is trained: many blocks of one sequence in a single forward.

Same tensor names, shapes and arithmetic as z-lab's DFlash2DraftModel (`check.py` compares them).

Shapes: B sequences, T context tokens, A anchors per sequence, N block size, Q = A * N block rows,
H hidden, V vocabulary, R selector rank, D head size.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from target import Llama, rotary_table, rotate
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # always fp32
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class GroupedConv(nn.Module):
    """Causal convolution over a block's rows, zeros before the first one.

    `prepare` and `finish` frame a sublayer; both kernels come from `prepare`'s input.
    """

    def __init__(self, hidden: int, taps: int, group_size: int):
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden))
        self.base_kernel.data[:, 0] = 1
        groups = hidden // group_size
        self.split = (2, taps, groups)
        spread = torch.eye(groups).repeat_interleave(group_size, 0)  # [H, groups] of 0 and 1
        self.register_buffer("spread", spread, persistent=False)
        self.kernel_projection = nn.Linear(hidden, 2 * taps * groups, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    @staticmethod
    def _convolve(x, kernels):  # x and every kernel [B, A, N, H]
        out = x * kernels[0]
        for back in range(1, len(kernels)):
            shifted = F.pad(x[:, :, : x.shape[2] - back], (0, 0, back, 0))
            out = out + shifted * kernels[back]
        return out

    def prepare(self, x):
        two, taps, groups = self.split
        dynamic = self.kernel_projection(x)
        x = x.to(dynamic.dtype)  # what follows reads it in that precision anyway
        # A product with `spread` gives every channel its group's value: exact, and much faster on
        # a CPU than broadcasting over 16 channels, forward and backward.
        parts = dynamic.unflatten(-1, (two * taps, groups)).unbind(-2)
        bases = self.base_kernel.flatten(0, 1)
        kernels = [
            F.linear(part.contiguous(), self.spread, base) for part, base in zip(parts, bases, strict=True)
        ]
        return self._convolve(x, kernels[:taps]), kernels[taps:]

    def finish(self, x, kernels):
        return self._convolve(x, kernels)


def attend_dense(q, k, v, bias):
    """One masked product of all rows; q [B, heads, Q, D], k and v [B, K, T + Q, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def attend_in_blocks(q, k, v, bias, block: int):
    """The same, for a bias [B, A, T] on the context: no row meets another block's rows.

    Without a fused kernel (on a CPU) this is a sixth of the work.
    """
    batch, kv_heads, _, size = k.shape
    count, length = bias.shape[1:]
    per_anchor = (q.shape[1] // kv_heads) * block  # query heads that share a kv head, rows
    q = q.view(batch, kv_heads, -1, count, block, size).transpose(2, 3)
    q = q.reshape(batch, kv_heads, count, per_anchor, size) * size**-0.5
    k, own_k = k.split([length, count * block], 2)
    v, own_v = v.split([length, count * block], 2)
    own_k, own_v = (t.reshape(batch, kv_heads, count, block, size) for t in (own_k, own_v))
    scores = (q.flatten(2, 3) @ k.mT).unflatten(2, (count, -1)) + bias[:, None, :, None]
    shares = torch.cat([scores, q @ own_k.mT], -1).softmax(-1)
    before, own = shares.split([length, block], -1)
    mixed = (before.flatten(2, 3) @ v).unflatten(2, (count, -1)) + own @ own_v
    mixed = mixed.unflatten(3, (-1, block)).transpose(2, 3)  # [B, K, group, A, N, D]
    return mixed.reshape(batch, -1, count * block, size)


class Attention(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            c["num_attention_heads"],
            c["num_key_value_heads"],
            c["head_dim"],
        )
        hidden, width = c["hidden_size"], self.heads * self.head_dim
        self.q_proj = nn.Linear(hidden, width, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(width, hidden, bias=False)
        self.q_norm = RMSNorm(self.head_dim, c["rms_norm_eps"])
        self.k_norm = RMSNorm(self.head_dim, c["rms_norm_eps"])

    def forward(self, x, context, block_angles, all_angles, bias, block):  # [B, Q, H] -> the same
        def heads(y):  # [B, rows, heads * D] -> [B, heads, rows, D]
            return y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        both = torch.cat([context, x], 1)
        q = rotate(self.q_norm(heads(self.q_proj(x))), *block_angles)
        k = rotate(self.k_norm(heads(self.k_proj(both))), *all_angles)
        q, k, v = (t.to(bias.dtype) for t in (q, k, heads(self.v_proj(both))))
        dense = bias.dim() == 4
        mixed = attend_dense(q, k, v, bias) if dense else attend_in_blocks(q, k, v, bias, block)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        d, hidden = c["dflash_config"], c["hidden_size"]
        self.self_attn = Attention(c)
        self.mlp = MLP(hidden, c["intermediate_size"])
        self.input_layernorm = RMSNorm(hidden, c["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(hidden, c["rms_norm_eps"])
        conv = (hidden, d["conv_kernel_size"], d["conv_group_size"])
        self.attention_conv = GroupedConv(*conv)
        self.mlp_conv = GroupedConv(*conv)

    def forward(self, x, context, block_angles, all_angles, bias, block):  # x [B, Q, H]
        split = (-1, block)
        h, kernel = self.attention_conv.prepare(self.input_layernorm(x).unflatten(1, split))
        h = self.self_attn(h.flatten(1, 2), context, block_angles, all_angles, bias, block)
        x = x + self.attention_conv.finish(h.unflatten(1, split), kernel).flatten(1, 2)
        h, kernel = self.mlp_conv.prepare(self.post_attention_layernorm(x).unflatten(1, split))
        return x + self.mlp_conv.finish(self.mlp(h), kernel).flatten(1, 2)


class Selector(nn.Module):
    def __init__(self, hidden: int, vocab: int, rank: int):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab, rank) * 0.02)
        self.successor_codebook = nn.Parameter(torch.randn(vocab, rank) * 0.02)
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def pair_scores(self, hidden, previous, candidates):
        """hidden [n, H], previous [n], candidates [n, k] -> what to add to the logits, [n, k]."""
        left = F.embedding(previous, self.predecessor_codebook) * self.hidden_projection(hidden)
        right = F.embedding(candidates, self.successor_codebook)
        return torch.einsum("nr,nkr->nk", left.to(right.dtype), right)


class Draft(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        d, hidden, eps = config["dflash_config"], config["hidden_size"], config["rms_norm_eps"]
        self.config = config
        self.block = config["block_size"]
        self.taps = d["target_layer_ids"]
        self.mask_id, self.top_k = d["mask_token_id"], d["selector_top_k"]
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(hidden, eps)
        self.fc = nn.Linear(len(self.taps) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.candidate_selector = Selector(hidden, config["vocab_size"], d["selector_rank"])

    def forward(self, features, ids, anchors, embedding, block=None):
        """features [B, T, taps * H], ids [B, T], anchors [B, A] -> hidden [B, A, N - 1, H] fp32.

        Block row i of anchor a stands at position a + i, and sees the context rows before a and
        its own block. Row 0 (the anchor itself) proposes nothing and is left out. `block` is another N.
        """
        c, n = self.config, block or self.block
        batch, length = ids.shape
        count = anchors.shape[1]
        device = ids.device
        tokens = torch.full((batch, count, n), self.mask_id, device=device)
        tokens[:, :, 0] = ids.gather(1, anchors)
        x = F.embedding(tokens.flatten(1), embedding)  # [B, Q, H]
        block_at = (anchors[:, :, None] + torch.arange(n, device=device)).flatten(1)  # [B, Q]
        context_at = torch.arange(length, device=device).expand(batch, -1)
        theta = c["rope_parameters"]["rope_theta"]

        def angles(positions):  # [B, 1, rows, D] each
            return tuple(t[:, None] for t in rotary_table(positions, c["head_dim"], theta))

        before = context_at[:, None] < anchors[:, :, None]  # [B, A, T]
        if device.type == "cuda":  # fused attention takes one mask for all: [B, 1, Q, T + Q]
            owner = torch.arange(count, device=device).repeat_interleave(n)
            own = (owner[:, None] == owner).expand(batch, -1, -1)  # [B, Q, Q]
            before = torch.cat([before.repeat_interleave(n, 1), own], 2)[:, None]
        dtype = torch.bfloat16 if torch.is_autocast_enabled(device.type) else torch.float32
        bias = torch.zeros(1, device=device, dtype=dtype).masked_fill(~before, float("-inf"))
        context = self.hidden_norm(self.fc(features))
        all_angles = angles(torch.cat([context_at, block_at], 1))
        for layer in self.layers:
            x = layer(x, context, angles(block_at), all_angles, bias, n)
        return self.norm(x).unflatten(1, (count, n))[:, :, 1:]


def start_from_target(draft: Draft, target: Llama) -> None:
    """First weights: the target's last layers, and `fc` as the mean of the taps."""
    s = target.shape
    width, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    with torch.no_grad():
        for layer, source in zip(draft.layers, target.layers[-len(draft.layers) :], strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            q, k, v = source["qkv"].split([width, kv, kv])
            gate, up = source["gate_up"].chunk(2)
            for linear, weight in (
                (attention.q_proj, q),
                (attention.k_proj, k),
                (attention.v_proj, v),
                (attention.o_proj, source["o"]),
                (mlp.gate_proj, gate),
                (mlp.up_proj, up),
                (mlp.down_proj, source["down"]),
            ):
                linear.weight.copy_(weight)
            layer.input_layernorm.weight.copy_(source["norm_in"])
            layer.post_attention_layernorm.weight.copy_(source["norm_mlp"])
        draft.norm.weight.copy_(target.final_norm)
        mean = torch.eye(s.hidden).repeat(1, len(draft.taps)) / len(draft.taps)
        draft.fc.weight.copy_(mean + 0.01 * torch.randn(mean.shape))


def load_draft(folder: Path) -> Draft:
    draft = Draft(json.loads((folder / "config.json").read_text()))
    draft.load_state_dict(load_file(folder / "model.safetensors"))
    return draft


def grow(draft: Draft, count: int) -> Draft:
    """The same function with `count` layers in all: each new one starts as the last one, adding nothing."""
    config = draft.config | {"num_hidden_layers": count, "layer_types": ["full_attention"] * count}
    grown, old, state = Draft(config), len(draft.layers), draft.state_dict()
    if count < old:
        raise ValueError(f"the draft has {old} layers, more than {count}")
    for name, value in list(state.items()):
        prefix = f"layers.{old - 1}."
        for index in range(old, count) if name.startswith(prefix) else ():
            adds_nothing = name.endswith(("o_proj.weight", "down_proj.weight"))
            new = name.replace(prefix, f"layers.{index}.")
            state[new] = torch.zeros_like(value) if adds_nothing else value.clone()
    grown.load_state_dict(state)
    return grown


def save_weights(draft: Draft, path: Path) -> None:
    tensors = {k: v.detach().to("cpu", torch.bfloat16) for k, v in draft.state_dict().items()}
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, metadata={"format": "pt"})
