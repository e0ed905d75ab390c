"""A target's config.json, read key by key: a key that the family did not read and nobody knows is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...bundle.errors import CheckpointError, UnsupportedError, field_error
from ..checkpoint import Checkpoint
from ..modules.activations import ACTIVATION_NAMES
from ..rope import RopeSpec, rope_from_config
from .spec import TargetLayer, TargetSpec

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FULL, SLIDING = "full_attention", "sliding_attention"

# Keys that decide nothing in inference, or are read elsewhere.
_HARMLESS = {
    "architectures", "attention_dropout", "attn_pdrop", "auto_map", "bos_token_id", "cache_implementation",
    "chunk_size_feed_forward", "dtype", "embd_pdrop", "eos_token_id", "id2label", "initializer_range",
    "is_encoder_decoder", "is_llama_config", "label2id", "max_window_layers", "mlp_dropout", "model_type",
    "_name_or_path", "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp",
    "problem_type", "resid_pdrop", "return_dict", "torch_dtype", "transformers.js_config",
    "transformers_version", "unk_token_id", "use_cache",
}  # fmt: skip
# Keys that ask for nothing while they are null or false, whatever the family.
_OFF = {
    "attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "layer_types", "mlp_bias",
    "rope_interleaved", "sliding_window", "use_bidirectional_attention", "use_sliding_window",
}  # fmt: skip
# Read by `rope_from_config`.
_ROPE = {
    "head_dim", "max_position_embeddings", "original_max_position_embeddings", "partial_rotary_factor",
    "rope_parameters", "rope_scaling", "rope_theta",
}  # fmt: skip


class TargetConfig:
    """The config of a target's checkpoint; remembers which keys were read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Wrap the config of `checkpoint`."""
        self.checkpoint = checkpoint
        self.where = f"{checkpoint.name}/config.json"
        self._values = checkpoint.config
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """A value, or the default where it is missing or null."""
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number >= 1; a default of None: it must be there."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise field_error(
                CheckpointError, f"{self.where}: {key}", self._values.get(key), "a whole number >= 1"
            )
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A number > 0; a default of None: it must be there."""
        value = self.get(key, default)
        number = isinstance(value, float | int) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise field_error(CheckpointError, f"{self.where}: {key}", self._values.get(key), "a number > 0")
        return float(value)

    def softcap(self, key: str, missing: float | None) -> float | None:
        """A number > 0; None where the key says null; `missing` where it is not there."""
        if key not in self._values:
            return missing
        return None if self.get(key) is None else self.positive(key)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise field_error(CheckpointError, f"{self.where}: {key}", value, "true or false")
        return value

    def activation(self, key: str) -> str:
        """Name of an activation that is implemented."""
        value = self.get(key, "silu")
        if value not in ACTIVATION_NAMES:
            raise field_error(
                UnsupportedError, f"{self.where}: {key}", value, f"one of {', '.join(ACTIVATION_NAMES)}"
            )
        return str(value)

    def rope(self, layer_type: str | None = None) -> RopeSpec:
        """The RoPE, of one layer type or of all."""
        self._read |= _ROPE
        return rope_from_config(self._values, self.where, layer_type)

    def rope_of(self, theta_key: str) -> RopeSpec:
        """The plain RoPE whose theta has a key of its own."""
        self._read |= _ROPE
        theta = self.positive(theta_key)
        plain = {k: v for k, v in self._values.items() if k not in ("rope_parameters", "rope_scaling")}
        return rope_from_config({**plain, "rope_theta": theta}, self.where)

    @property
    def depth(self) -> int:
        """Number of layers."""
        return self.whole("num_hidden_layers")

    def layer_types(self, default: Sequence[str]) -> list[str]:
        """What each layer sees: `FULL` or `SLIDING`; ``sliding_window`` then counts as read, used or not."""
        self._read.add("sliding_window")
        kinds = self.get("layer_types", list(default))
        if not isinstance(kinds, list) or len(kinds) != self.depth:
            raise field_error(
                CheckpointError, f"{self.where}: layer_types", kinds, f"a list of {self.depth} entries"
            )
        for kind in kinds:
            if kind not in (FULL, SLIDING):
                raise field_error(
                    UnsupportedError, f"{self.where}: layer_types", kind, f"{FULL!r} or {SLIDING!r}"
                )
        return kinds

    def window(self, layer_type: str) -> int | None:
        """How far a layer of that type sees."""
        return self.whole("sliding_window") if layer_type == SLIDING else None

    def same_layers(self) -> tuple[TargetLayer, ...]:
        """Layers that are alike: one RoPE, and the whole past."""
        return (TargetLayer(self.rope()),) * self.depth

    def windowed_layers(self) -> tuple[TargetLayer, ...]:
        """Layers with one RoPE, of which ``use_sliding_window`` gives the later ones a window."""
        last = [FULL] * self.depth
        if self.flag("use_sliding_window", default=False) and self.get("sliding_window") is not None:
            first = int(self.get("max_window_layers", 28))  # the default of transformers
            last = [SLIDING if index >= first else FULL for index in range(self.depth)]
        kinds = self.layer_types(last)
        if SLIDING in kinds and not self.flag("use_sliding_window", default=False):
            raise field_error(
                CheckpointError,
                f"{self.where}: use_sliding_window",
                False,
                "true, since layer_types has sliding_attention",
            )
        return tuple(TargetLayer(self.rope(), self.window(kind)) for kind in kinds)

    def decoder(
        self, layers: tuple[TargetLayer, ...], activation_key: str = "hidden_act", tied: bool = False
    ) -> TargetSpec:
        """What all families share; the rest as in Llama.

        Args:
            layers: of the family.
            activation_key: where it keeps the activation.
            tied: whether the head is the embedding where the config does not say.
        """
        hidden, heads = self.whole("hidden_size"), self.whole("num_attention_heads")
        kv_heads = self.whole("num_key_value_heads", heads)
        if heads % kv_heads:
            raise field_error(
                CheckpointError, f"{self.where}: num_key_value_heads", kv_heads, f"a divisor of {heads}"
            )
        head_dim = self.whole("head_dim", hidden // heads)
        tensors = self.checkpoint.tensors
        return TargetSpec(
            family=str(self._values["model_type"]),
            hidden_size=hidden,
            intermediate_size=self.whole("intermediate_size"),
            layers=layers,
            num_layers=self.depth,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=self.positive("rms_norm_eps"),
            hidden_act=self.activation(activation_key),
            vocab_size=self.whole("vocab_size"),
            embedding_rows=self.whole("vocab_size"),
            tied=self._tied(tied),
            max_position_embeddings=self.whole("max_position_embeddings"),
            checkpoint_dtype=tensors[EMBEDDING].dtype if EMBEDDING in tensors else "unknown",
            stop_token_ids=self._stop_ids(),
            bos_token_id=self.get("bos_token_id"),
            attention_scale=1.0 / math.sqrt(head_dim),
        )

    def _tied(self, default: bool) -> bool:
        tied = self.flag("tie_word_embeddings", default)
        if not tied and HEAD not in self.checkpoint.tensors:
            raise CheckpointError(
                f"{self.checkpoint.name}: tensor {HEAD!r} is missing and tie_word_embeddings is false; "
                "expected one of the two"
            )
        return tied

    def _stop_ids(self) -> tuple[int, ...]:
        """The eos ids of generation_config.json, else of config.json; a number or a list, order kept."""
        for config in (self.checkpoint.generation_config, self._values):
            value: Any = config.get("eos_token_id")
            if value is not None:
                ids = value if isinstance(value, list) else [value]
                return tuple(dict.fromkeys(int(i) for i in ids))
        return ()

    def check_all_read(self) -> None:
        """Refuse keys that nobody read.

        Raises:
            UnsupportedError: names the first, in alphabetical order.
        """
        for key in sorted(set(self._values) - self._read - _HARMLESS):
            value = self._values[key]
            if value is None or (key in _OFF and (value is False or value == [FULL] * self.depth)):
                continue
            raise field_error(
                UnsupportedError, f"{self.where}: {key}", value, "no key that is not implemented"
            )
