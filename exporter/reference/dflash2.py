"""What DFlash2 adds to DFlash, eagerly: local convolutions, and the candidate selector.

Counterpart of ``speculators.models.dflash2.model_definitions``; `grouped_dynamic_conv` is in
`plugins.torch_op`. Parameters have the originals' names, so that their state dicts load. The convolution
has no gradient.
Shapes: B batch, Q block rows, H hidden size, T taps, G = H / group_size groups, k candidates, r rank,
V vocabulary, ``...`` any leading axes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...bundle.errors import OpError, field_error
from ...plugins.grouped_dynamic_conv import ConvSpec
from ...plugins.torch_op import grouped_dynamic_conv
from .dflash import DFlashDecoderLayer, Rope

__all__ = ["CandidateSelector", "DFlash2DecoderLayer", "GroupedDynamicCausalConv", "grouped_dynamic_conv"]


class GroupedDynamicCausalConv(nn.Module):
    """The pair of convolutions around one sublayer; both kernels come from the sublayer's input.

    Counterpart of the original's class of this name.
    """

    def __init__(self, hidden_size: int, *, block_size: int, kernel_size: int, group_size: int):
        """Make both convolutions identities.

        Raises:
            OpError: (a ValueError) `hidden_size` is no multiple of `group_size`, or `kernel_size` exceeds
                `block_size`.
        """
        super().__init__()
        self.spec = ConvSpec(hidden_size, kernel_size, block_size, group_size)
        self.base_kernel = nn.Parameter(torch.empty(2, kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * kernel_size * self.spec.groups, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Make both convolutions identities: the first tap is one, the others and all deltas are zero."""
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1.0
        self.kernel_projection.weight.zero_()

    def prepare(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve what enters the sublayer.

        Args:
            hidden_states: [..., H].

        Returns:
            The convolved rows [..., H], and the kernel deltas that `finish` needs [..., T, G].
        """
        deltas = self.kernel_projection(hidden_states)
        deltas = deltas.view(*hidden_states.shape[:-1], 2, self.spec.kernel_size, self.spec.groups)
        return self._convolve(hidden_states, deltas[..., 0, :, :], 0), deltas[..., 1, :, :]

    def finish(self, hidden_states: Tensor, delta_kernel: Tensor) -> Tensor:
        """Convolve what leaves the sublayer, [..., H], with deltas [..., T, G] from `prepare`.

        Raises:
            OpError: (a ValueError) the deltas are not those of as many rows.
        """
        return self._convolve(hidden_states, delta_kernel, 1)

    def _convolve(self, hidden: Tensor, delta: Tensor, which: int) -> Tensor:
        return grouped_dynamic_conv(
            hidden,
            delta,
            self.base_kernel[which],
            block_size=self.spec.block_size,
            group_size=self.spec.group_size,
        )


class DFlash2DecoderLayer(DFlashDecoderLayer):
    """A DFlash layer with convolutions around attention and MLP. Counterpart of `Qwen3DFlash2DecoderLayer`.

    A new layer computes what a DFlash layer of the same weights computes, until its convolutions get
    weights of their own.
    """

    def __init__(self, config: Any, *, block_size: int, conv_kernel_size: int, conv_group_size: int):
        """Make a layer for blocks of `block_size` rows; `config` as in `DFlashDecoderLayer`.

        Raises:
            OpError: see `GroupedDynamicCausalConv`.
        """
        super().__init__(config)
        sizes = {"block_size": block_size, "kernel_size": conv_kernel_size, "group_size": conv_group_size}
        self.attention_conv = GroupedDynamicCausalConv(config.hidden_size, **sizes)
        self.mlp_conv = GroupedDynamicCausalConv(config.hidden_size, **sizes)

    def reset_convolutions(self) -> None:
        """Make all convolutions identities, so that the layer is a DFlash layer."""
        self.attention_conv.reset_parameters()
        self.mlp_conv.reset_parameters()

    def _attend(self, x: Tensor, target_hidden: Tensor, rope: Rope, mask: Tensor | None) -> Tensor:
        x, delta = self.attention_conv.prepare(x)
        return self.attention_conv.finish(super()._attend(x, target_hidden, rope, mask), delta)

    def _feed_forward(self, x: Tensor) -> Tensor:
        x, delta = self.mlp_conv.prepare(x)
        return self.mlp_conv.finish(super()._feed_forward(x), delta)


class CandidateSelector(nn.Module):
    """Scores each of a row's top candidates by its predecessor and the row's hidden state.

    Counterpart of the original's class of this name. `modules.selector.Selector` computes the same for all
    predecessors at once and walks the path.
    """

    def __init__(
        self, *, vocab_size: int, hidden_size: int, rank: int, top_k: int, initializer_range: float = 0.02
    ):
        """Draw all parameters from a normal distribution of width `initializer_range`.

        Raises:
            OpError: (a ValueError) `top_k` exceeds `vocab_size`.
        """
        super().__init__()
        self.top_k = _checked_top_k(top_k, vocab_size)
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        for weight in (self.predecessor_codebook, self.successor_codebook, self.hidden_projection.weight):
            nn.init.normal_(weight, std=initializer_range)

    def context(self, hidden_states: Tensor, predecessor_ids: Tensor) -> Tensor:
        """Product of a predecessor's row and the projected hidden state: [..., H], [...] -> [..., r]."""
        predecessor = self.predecessor_codebook[predecessor_ids.long()]
        return predecessor * self.hidden_projection(hidden_states).to(predecessor.dtype)

    def transition_scores(
        self, hidden_states: Tensor, predecessor_ids: Tensor, candidate_ids: Tensor
    ) -> Tensor:
        """What each candidate gains behind its predecessor: [..., H], [...], [..., k] -> [..., k]."""
        successors = self.successor_codebook[candidate_ids.long()]  # [..., k, r]
        return (self.context(hidden_states, predecessor_ids)[..., None, :] * successors).sum(-1)

    def score_candidates(
        self, unary_logits: Tensor, hidden_states: Tensor, predecessor_ids: Tensor, candidate_ids: Tensor
    ) -> Tensor:
        """Add that to the candidates' own logits: [..., V], [..., H], [...], [..., k] -> [..., k]."""
        unary = unary_logits.gather(-1, candidate_ids)
        return unary + self.transition_scores(hidden_states, predecessor_ids, candidate_ids).to(unary.dtype)

    def select(
        self,
        unary_logits: Tensor,
        hidden_states: Tensor,
        predecessor_ids: Tensor,
        top_k: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Take the candidates with the largest logits, and score them.

        Args:
            unary_logits: [..., V].
            hidden_states: [..., H].
            predecessor_ids: [...].
            top_k: how many; None: as many as the selector was made for.

        Returns:
            Their ids and scores, both [..., k], in the order of the logits.

        Raises:
            OpError: (a ValueError) `top_k` is not within 1..V.
        """
        count = self.top_k if top_k is None else _checked_top_k(top_k, unary_logits.shape[-1])
        candidates = unary_logits.topk(count, dim=-1).indices
        return candidates, self.score_candidates(unary_logits, hidden_states, predecessor_ids, candidates)


def _checked_top_k(top_k: int, vocab_size: int) -> int:
    if not 1 <= top_k <= vocab_size:
        raise field_error(
            OpError, "top_k", top_k, f"1 <= top_k <= {vocab_size}, the vocab_size", "give the draft's top_k"
        )
    return top_k
