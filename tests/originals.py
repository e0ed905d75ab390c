"""Tiny random originals for the tests: drafts of both packages, and targets of transformers.

Every model is built by the package that defines it, filled with random weights (norms and convolution
kernels too, so that no term can hide behind a one or a zero), saved in its own format, and returned.
The same seed gives the same model. An option that the caller does not force is drawn from the seed.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

FULL, SLIDING = "full_attention", "sliding_attention"

# Keys that z-lab's own code reads from dflash_config before the top level.
ZLAB_DRAFT_KEYS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
)


def randomise(module: nn.Module, seed: int) -> None:
    """Fill every parameter: matrices so that activations keep their size, norms in 0.5..1.5."""
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("base_kernel"):  # (2, kernel, hidden): identity plus noise
                parameter.normal_(0, 0.3, generator=gen)
                parameter[:, 0] += 1.0
            elif name.endswith("kernel_projection.weight"):
                parameter.normal_(0, 0.3 / math.sqrt(parameter.shape[-1]), generator=gen)
            elif "codebook" in name:
                parameter.normal_(0, 0.8, generator=gen)
            elif name.endswith("embed_tokens.weight"):
                parameter.normal_(0, 1.0, generator=gen)
            elif parameter.dim() >= 2:
                parameter.normal_(0, 1.0 / math.sqrt(parameter.shape[-1]), generator=gen)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.2, generator=gen)
            else:
                parameter.uniform_(0.5, 1.5, generator=gen)


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters alone: ``Module.to`` would round the rotary frequencies, which loading does not."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    module.eval()


def rope_parameters(rng: random.Random, kind: str | None = None) -> dict[str, Any]:
    """Draw a RoPE in the words of transformers 5 (``rope_parameters``)."""
    kind = kind or rng.choice(["default", "default", "linear", "llama3", "yarn"])
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": rng.choice([10000.0, 500000.0, 1000000.0])}
    if kind == "linear":
        rope["factor"] = rng.choice([2.0, 4.0])
    if kind == "llama3":
        rope |= {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    if kind == "yarn":
        rope |= {"factor": rng.choice([2.0, 4.0]), "original_max_position_embeddings": 128}
        if rng.random() < 0.5:
            rope |= {"beta_fast": 16, "beta_slow": 2}
        if rng.random() < 0.3:
            rope["attention_factor"] = 1.25
    return rope


def tiny_target(seed: int, folder: Path | str, family: str = "llama", **forced: Any) -> PreTrainedModel:
    """Build and save a tiny random causal language model of transformers.

    Args:
        seed: decides everything that `forced` leaves open.
        folder: where it is saved (config.json, model.safetensors).
        family: a model_type of transformers (``llama``, ``qwen2``, ``qwen3``, ``mistral``, ...).
        forced: config keys; None deletes a key. `dtype` (a torch dtype) is the dtype of the saved weights.

    Returns:
        The live model, in eval mode, in the dtype it was saved in.
    """
    rng = random.Random(f"target {seed}")
    heads = rng.choice([2, 4])
    head_dim = rng.choice([8, 16])
    config: dict[str, Any] = {
        "vocab_size": rng.choice([101, 160, 257]),
        "hidden_size": rng.choice([32, 48, 64]),
        "intermediate_size": rng.choice([64, 96]),
        "num_hidden_layers": rng.randint(3, 6),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([1, heads // 2, heads]),
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "rms_norm_eps": rng.choice([1e-5, 1e-6]),
        "tie_word_embeddings": rng.random() < 0.5,
        "rope_parameters": rope_parameters(rng, rng.choice(["default", "llama3", "yarn", "linear"])),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    dtype = forced.pop("dtype", torch.float32)
    config |= forced
    if family == "qwen2":  # has no head_dim: hidden / heads
        config.pop("head_dim")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
    randomise(model, seed)
    model.tie_weights()
    _cast(model, dtype)
    model.save_pretrained(folder)
    return model


def zlab_options(rng: random.Random, target: PretrainedConfig | None = None) -> dict[str, Any]:
    """Draw all options of a z-lab draft, flat; ``dflash2`` and the ``style_*`` keys are not config keys."""
    hidden = target.hidden_size if target is not None else rng.choice([32, 48, 64])
    depth = target.num_hidden_layers if target is not None else rng.randint(3, 6)
    vocab = target.vocab_size if target is not None else rng.choice([101, 160, 257])
    layers = rng.randint(1, 4)
    heads = rng.choice([2, 4])
    # The last layer is left out: there the original feeds the state after the final norm.
    taps = rng.sample(range(depth - 1), rng.randint(1, depth - 1))
    sliding = rng.random() < 0.6
    options: dict[str, Any] = {
        "dflash2": rng.random() < 0.5,
        "style_flat_rope": rng.random() < 0.5,
        "style_nested": rng.random() < 0.7,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": rng.choice([48, 80]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([1, heads // 2, heads]),
        "head_dim": rng.choice([8, 12, 16]),
        "hidden_act": rng.choice(["silu", "silu", "gelu_pytorch_tanh"]),
        "max_position_embeddings": 512,
        "rms_norm_eps": rng.choice([1e-5, 1e-6]),
        "attention_bias": rng.random() < 0.3,
        "rope_parameters": rope_parameters(rng),
        "layer_types": [rng.choice([FULL, SLIDING]) if sliding else FULL for _ in range(layers)],
        "use_sliding_window": sliding,
        "sliding_window": rng.choice([3, 8, 20]) if sliding else None,
        "is_causal": rng.choice([None, None, True, False]),
        "num_target_layers": depth,
        "target_layer_ids": taps,
        "block_size": rng.choice([2, 4, 7, 8, 16]),
        "mask_token_id": rng.randrange(vocab),
        "input_embedding_scale": rng.choice([None, 1.0, 2.5, 0.25]),
        "output_multiplier": rng.choice([None, 0.196, 1.7]),
        "final_logit_softcapping": rng.choice([None, None, 20.0, 5.0, 0.0]),
    }
    if options["dflash2"]:
        options |= {
            "conv_kernel_size": rng.randint(1, 3),
            "conv_group_size": rng.choice([4, 8, 16]),
            "selector_rank": rng.choice([4, 8]),
            "selector_top_k": rng.choice([1, 4, 16]),
        }
        options["conv_kernel_size"] = min(options["conv_kernel_size"], options["block_size"])
    return options


def zlab_draft(
    seed: int, folder: Path | str, *, target: PretrainedConfig | None = None, **forced: Any
) -> PreTrainedModel:
    """Build and save a tiny random draft of the `dflash` package.

    Args:
        seed: decides everything that `forced` leaves open.
        folder: where it is saved; codebooks under their published names.
        target: config of the target it has to fit (hidden size, depth, vocabulary).
        forced: config keys wherever they belong (`ZLAB_DRAFT_KEYS` go where ``style_nested`` says), and
            dflash2 (bool): which of the two models;
            style_flat_rope (bool): write ``rope_theta`` + ``rope_scaling`` instead of ``rope_parameters``;
            style_nested (bool): draft keys in ``dflash_config`` instead of the top level;
            style_own_codebooks (bool): keep the names that save_pretrained gives the codebooks;
            dtype (a torch dtype): of the saved weights;
            max_shard_size (str): as in save_pretrained, to get several shards.

    Returns:
        The live original, in eval mode, in the dtype it was saved in.
    """
    from dflash.model import DFlash2DraftModel, DFlashDraftModel
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

    dtype = forced.pop("dtype", torch.float32)
    shard = {"max_shard_size": forced.pop("max_shard_size")} if "max_shard_size" in forced else {}
    own_codebooks = forced.pop("style_own_codebooks", False)
    rng = random.Random(f"zlab {seed}")
    options = zlab_options(rng, target)
    if forced.get("dflash2") and not options["dflash2"]:
        options |= {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 4}
    options |= forced
    if "layer_types" not in forced and len(options["layer_types"]) != options["num_hidden_layers"]:
        options["layer_types"] = (options["layer_types"] * 9)[: options["num_hidden_layers"]]
    if not options.pop("dflash2"):
        for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            options.pop(key, None)
        kind: type[PreTrainedModel] = DFlashDraftModel
    else:
        kind = DFlash2DraftModel
    flat_rope = options.pop("style_flat_rope")
    nested = options.pop("style_nested")
    draft = {k: options.pop(k) for k in ZLAB_DRAFT_KEYS if k in options}
    draft = {k: v for k, v in draft.items() if v is not None}
    if options["is_causal"] is None:
        options.pop("is_causal")
    if nested:
        options["dflash_config"] = draft
    else:
        options |= draft
    model = kind(Qwen3Config(**options))
    randomise(model, seed)
    _cast(model, dtype)
    model.save_pretrained(folder, **shard)
    _publish_zlab(Path(folder), flat_rope, own_codebooks)
    return model


def _publish_zlab(folder: Path, flat_rope: bool, own_codebooks: bool) -> None:
    """Turn what save_pretrained wrote into what is published: codebook names, older RoPE keys."""
    from safetensors.torch import load_file, save_file

    if flat_rope:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
        path.write_text(json.dumps(config, indent=2))
    if own_codebooks:
        return
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        named = {name.replace("_codebook.weight", "_codebook"): t for name, t in tensors.items()}
        if named.keys() != tensors.keys():
            save_file(named, file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        index.write_text(index.read_text().replace("_codebook.weight", "_codebook"))


def speculators_options(rng: random.Random, target: PretrainedConfig | None = None) -> dict[str, Any]:
    """Draw all options of a speculators draft, flat, as `zlab_options` does for a z-lab one."""
    hidden = target.hidden_size if target is not None else rng.choice([32, 48, 64])
    depth = target.num_hidden_layers if target is not None else rng.randint(3, 6)
    vocab = target.vocab_size if target is not None else rng.choice([101, 160, 257])
    layers = rng.randint(1, 4)
    heads = rng.choice([2, 4])
    sliding = rng.random() < 0.6
    reduced = rng.random() < 0.5
    from_anchor = rng.random() < 0.4
    options: dict[str, Any] = {
        "dflash2": rng.random() < 0.5,
        "style_shuffled_map": rng.random() < 0.3,
        "style_nested_rope": rng.random() < 0.2,
        "style_borrowed": rng.random() < 0.3,
        "model_type": rng.choice(["qwen3", "qwen3", "llama"]),
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": rng.choice([48, 80]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([1, heads // 2, heads]),
        "head_dim": rng.choice([8, 12, 16]),
        "hidden_act": rng.choice(["silu", "silu", "gelu_pytorch_tanh"]),
        "max_position_embeddings": 512,
        "rms_norm_eps": rng.choice([1e-5, 1e-6]),
        "attention_bias": rng.random() < 0.3,
        "rope_parameters": rope_parameters(rng),
        "layer_types": [rng.choice([FULL, SLIDING]) if sliding else FULL for _ in range(layers)],
        "use_sliding_window": sliding,
        "sliding_window": rng.choice([3, 8, 20]) if sliding else None,
        # Ids, not taps: id i is what enters layer i. The last one, the depth, is the final hidden state.
        "aux_hidden_state_layer_ids": rng.sample(range(1, depth + 1), rng.randint(1, depth)),
        "block_size": rng.choice([1, 2, 4, 7, 8] if from_anchor else [2, 4, 7, 8, 16]),
        "mask_token_id": rng.randrange(vocab),
        "sample_from_anchor": from_anchor,
        "sliding_window_non_causal": rng.choice([None, True, False]),
        "draft_vocab_size": rng.choice([40, vocab // 2]) if reduced else vocab,
    }
    if options["dflash2"]:
        options["draft_vocab_size"] = vocab
        options |= {
            "conv_kernel_size": min(rng.randint(1, 3), options["block_size"]),
            "conv_group_size": rng.choice([4, 8, 16]),
            "selector_rank": rng.choice([4, 8]),
            "selector_top_k": rng.choice([1, 4, 16]),
        }
    return options


SPECULATORS_DRAFT_KEYS = (
    "aux_hidden_state_layer_ids",
    "block_size",
    "conv_group_size",
    "conv_kernel_size",
    "draft_vocab_size",
    "mask_token_id",
    "sample_from_anchor",
    "selector_rank",
    "selector_top_k",
    "sliding_window_non_causal",
    "target_hidden_size",
)


def speculators_draft(
    seed: int, folder: Path | str, *, target: PreTrainedModel | PretrainedConfig | None = None, **forced: Any
) -> PreTrainedModel:
    """Build and save a tiny random draft of the `speculators` package.

    Args:
        seed: decides everything that `forced` leaves open.
        folder: where it is saved.
        target: what it has to fit; a live model also gives the original its embedding, head and final norm,
            without which they are NaN, as in a loaded checkpoint whose verifier is unknown.
        forced: config keys (`SPECULATORS_DRAFT_KEYS` at the top level, others of transformer_layer_config),
            and
            dflash2 (bool): which of the two models;
            model_type: ``qwen3`` or ``llama``, the class of transformer_layer_config;
            style_shuffled_map (bool): draft ids in another order than their target ids;
            style_nested_rope (bool): RoPE parameters per layer type, of which the original takes the
            sliding ones for all layers;
            style_borrowed (bool): also save what is borrowed from the target, as older versions did;
            dtype (a torch dtype): of the saved weights;
            max_shard_size (str): as in save_pretrained.

    Returns:
        The live original, in eval mode, with eager attention, in the dtype it was saved in.
    """
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    dtype = forced.pop("dtype", torch.float32)
    shard = {"max_shard_size": forced.pop("max_shard_size")} if "max_shard_size" in forced else {}
    rng = random.Random(f"speculators {seed}")
    options = speculators_options(rng, getattr(target, "config", target))
    if forced.get("dflash2") and not options["dflash2"]:
        options |= {"conv_kernel_size": 1, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 4}
        options["draft_vocab_size"] = options["vocab_size"]
    options |= forced
    if "layer_types" not in forced and len(options["layer_types"]) != options["num_hidden_layers"]:
        options["layer_types"] = (options["layer_types"] * 9)[: options["num_hidden_layers"]]
    styles = {key: options.pop(key) for key in tuple(options) if key.startswith("style_")}
    second = options.pop("dflash2")
    if not second:
        for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            options.pop(key, None)
    own = {key: options.pop(key) for key in SPECULATORS_DRAFT_KEYS if options.get(key) is not None}
    options.pop("sliding_window_non_causal", None)
    if styles["style_nested_rope"]:
        options["rope_parameters"] = {
            SLIDING: options["rope_parameters"],
            FULL: {"rope_type": "default", "rope_theta": 77.0},
        }
    proposals = own["block_size"] - (0 if own.get("sample_from_anchor") else 1)
    body = AutoConfig.for_model(**options)
    body._attn_implementation = "eager"
    kind = DFlash2DraftModel if second else DFlashDraftModel
    config_kind = DFlash2SpeculatorConfig if second else DFlashSpeculatorConfig
    config = config_kind(
        transformer_layer_config=body,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash2" if second else "dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=proposals)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **own,
    )
    model = kind(config)
    randomise(model, seed)
    if model.use_draft_vocab:
        _draw_vocabulary(model, rng, styles["style_shuffled_map"])
    _borrow(model, target)
    _cast(model, dtype)
    model.save_pretrained(folder, **shard)
    if styles["style_borrowed"]:
        _save_borrowed(model, Path(folder))
    return model


def _draw_vocabulary(model: Any, rng: random.Random, shuffled: bool) -> None:
    """Choose which target ids the draft knows: d2t as offsets, t2d as marks."""
    drawn = rng.sample(range(model.verifier_vocab_size), model.draft_vocab_size)
    ids = torch.tensor(drawn if shuffled else sorted(drawn))
    marks = torch.zeros(model.verifier_vocab_size, dtype=torch.bool)
    marks[ids] = True
    model.load_vocab_mappings(marks, ids - torch.arange(len(ids)))


def _borrow(model: Any, target: Any) -> None:
    """Give a speculators draft the tensors of the target that its own loading would give it."""
    borrowed = (model.embed_tokens, model.verifier_lm_head, model.verifier_norm)
    with torch.no_grad():
        if not isinstance(target, PreTrainedModel):
            for module in (*borrowed, *(() if model.use_draft_vocab else (model.lm_head,))):
                module.weight.fill_(torch.nan)
            return
        head = target.get_output_embeddings().weight
        model.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        model.verifier_lm_head.weight.copy_(head[model.t2d] if model.use_draft_vocab else head)
        model.verifier_norm.weight.copy_(target.model.norm.weight)
        if not model.use_draft_vocab:
            model.lm_head.weight.copy_(head)


def _save_borrowed(model: Any, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    names = ["embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"]
    if not model.use_draft_vocab:
        names.append("lm_head.weight")
    path = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(path) | {name: model.state_dict()[name].clone() for name in names}
    save_file(tensors, path, metadata={"format": "pt"})


@torch.no_grad()
def speculators_block(
    model: Any, features: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one block of a speculators draft as its own training forward does, at the end of a sequence.

    Args:
        model: from `speculators_draft`, with a live target.
        features: [L, taps * H], the target's tapped states of the committed rows 0..L-1.
        token_ids: [L + 1], the committed tokens and the anchor, token L.

    Returns:
        hidden [B, H], the final norm's output of the block's rows, and their logits [B, draft vocabulary].
    """
    anchor, block = len(token_ids) - 1, model.block_size
    length = anchor + block + 1  # the original wants the whole block to lie inside the sequence
    padded = torch.zeros(1, length, features.shape[-1], dtype=features.dtype)
    padded[0, :anchor] = features
    ids = torch.zeros(1, length, dtype=torch.long)
    ids[0, : anchor + 1] = token_ids
    anchors = torch.tensor([anchor])

    def masks(loss_mask: Any, max_anchors: Any, document_ids: torch.Tensor, device: Any) -> Any:
        def mask(window: int | None, non_causal: bool = False) -> Any:
            return model._create_attention_mask(document_ids, length, anchors, device, window, non_causal)

        full = mask(None) if model.uses_full_attn else None
        window = None
        if model.uses_sliding_window_attn:
            window = mask(model.sliding_window, model.sliding_window_non_causal)
        return full, window, anchors, torch.tensor([True])

    model._build_attention_mask = masks  # the original draws anchors at random
    try:
        hidden, logits, *_ = model._backbone_forward(
            padded,
            ids,
            torch.ones(1, length, dtype=torch.long),
            torch.zeros(1, length, model.hidden_size, dtype=features.dtype),
            torch.zeros(1, length, dtype=torch.long),
            max_anchors=1,
        )
    finally:
        del model._build_attention_mask
    return hidden[0], logits[0]
