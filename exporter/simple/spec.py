"""What a simple target and a simple draft compute.

H hidden size, V vocabulary, Q block size. Matrices are applied from the right, ``x @ W``: [inputs, outputs].

    target    token_embed [V, H], layers.{i} [H, H], lm_head [H, V]
    draft     W_proj [H, H], W_block [2 * H, H], W_mix [Q, Q], pos_embed [Q, H], lm_head [H, V],
              token_embed [V, H]
"""

from __future__ import annotations

from dataclasses import dataclass

FAMILY = "simple"
FORMAT = "dflash-deploy"

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class SimpleTargetSpec:
    """Everything that decides what a simple target computes.

    Its layers are matrices with a ReLU between them. A row sees no other row: the law of the next token
    depends on the last one alone.

    Attributes:
        max_position_embeddings: longest sequence in tokens; nothing is computed from positions.
        tensors: checkpoint tensor for each canonical parameter name.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
    stop_token_ids: tuple[int, ...]
    bos_token_id: int | None
    checkpoint_dtype: str
    tensors: tuple[tuple[str, str], ...]

    def shapes(self) -> Shapes:
        """Shape of every parameter."""
        h, v = self.hidden_size, self.vocab_size
        layers = {f"layers.{i}": (h, h) for i in range(self.num_layers)}
        return {"token_embed": (v, h), **layers, "lm_head": (h, v)}


@dataclass(frozen=True)
class SimpleDraftSpec:
    """Everything that decides what a simple draft computes.

    Attributes:
        block_size: tokens proposed a round; every row of the block proposes one.
        num_denoise_steps: most forwards for a block.
        mask_token_id: what a position holds before its token is chosen.
        tensors: checkpoint tensor for each canonical parameter name.
    """

    vocab_size: int
    hidden_size: int
    block_size: int
    num_denoise_steps: int
    mask_token_id: int
    checkpoint_dtype: str
    tensors: tuple[tuple[str, str], ...]

    @property
    def unmask_counts(self) -> tuple[int, ...]:
        """How many tokens each denoising step chooses."""
        return unmask_counts(self.block_size, self.num_denoise_steps)

    def shapes(self) -> Shapes:
        """Shape of every parameter."""
        h, v, q = self.hidden_size, self.vocab_size, self.block_size
        return {
            "W_proj": (h, h),
            "W_block": (2 * h, h),
            "W_mix": (q, q),
            "pos_embed": (q, h),
            "lm_head": (h, v),
            "token_embed": (v, h),
        }


def unmask_counts(block_size: int, steps: int) -> tuple[int, ...]:
    """Spread a block over denoising steps: each takes its share of what is left, rounded down, at least one.

    The last step takes the rest. There are fewer steps than asked for if nothing is left for them.
    """
    counts = []
    left = block_size
    for step in range(steps):
        if left == 0:
            break
        counts.append(max(1, left // (steps - step)))
        left -= counts[-1]
    return tuple(counts)
