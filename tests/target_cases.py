"""Tiny random targets of every family, and their graphs without a draft."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from dflash_deploy.bundle import tensors as t
from dflash_deploy.bundle.tensors import DType
from dflash_deploy.exporter.bundle_graphs import TargetGraph
from dflash_deploy.exporter.checkpoint import checkpoint_from_source
from dflash_deploy.exporter.export import graph_to_bundle
from dflash_deploy.exporter.parity.originals import TargetOriginal, TargetRun
from dflash_deploy.exporter.progress import NullProgress
from dflash_deploy.exporter.targets.families import target_from_checkpoint
from dflash_deploy.exporter.targets.spec import TargetSpec
from dflash_deploy.exporter.transformer_pair import target_graph, target_side
from dflash_deploy.exporter.weights import WeightWriter
from originals import FULL, SLIDING, rope_parameters, tiny_target

CAPACITY = 40


def options(family: str, seed: int, layers: int | None = None) -> dict[str, Any]:
    """Draw the options of a family; two or three layers, or as many as asked for."""
    rng = random.Random(f"{family} {seed}")
    drawn_layers = rng.choice([2, 3])
    layers = layers or drawn_layers
    window = rng.choice([3, 8, 20])
    drawn: dict[str, Any] = {"num_hidden_layers": layers, "vocab_size": rng.choice([101, 160])}

    def kinds() -> list[str]:
        return [rng.choice([FULL, SLIDING]) for _ in range(layers)]

    if family in ("llama", "smollm3"):
        drawn |= {"mlp_bias": rng.random() < 0.3}
    if family not in ("qwen2", "mistral"):
        drawn |= {"attention_bias": rng.random() < 0.3}
    if family in ("qwen2", "qwen3", "smollm3") and rng.random() < 0.6:
        drawn |= {"use_sliding_window": True, "sliding_window": window}
        # Without layer_types the family's own rule decides.
        drawn |= rng.choice([{"layer_types": kinds()}, {"max_window_layers": 1}])
    if family == "mistral":
        drawn |= {"sliding_window": rng.choice([None, window]), "head_dim": rng.choice([None, 8, 16])}
    if family == "smollm3":
        drawn |= rng.choice(
            [
                {"no_rope_layers": [rng.randint(0, 1) for _ in range(layers)]},
                {"no_rope_layers": None, "no_rope_layer_interval": 2},
            ]
        )
    if family.startswith("gemma"):
        drawn |= {
            "hidden_activation": rng.choice(["gelu_pytorch_tanh", "gelu_pytorch_tanh", "silu"]),
            "query_pre_attn_scalar": rng.choice([8, 16, 24]),
            "sliding_window": window,
            "layer_types": kinds() if rng.random() < 0.5 else None,
            # Random logits reach 40: a lower cap would make ties of the best of them.
            "final_logit_softcapping": rng.choice([None, 30.0, 20.0]),
            "hidden_size": rng.choice([32, 64]),
        }
    if family == "gemma2":
        drawn |= {"attn_logit_softcapping": rng.choice([None, 50.0, 2.0])}
    if family == "gemma3_text":
        per_type = {SLIDING: rope_parameters(rng, "default"), FULL: rope_parameters(rng)}
        drawn |= {"rope_parameters": per_type, "sliding_window_pattern": rng.choice([2, 3])}
    return drawn


@dataclass
class TargetCase:
    """A target's graph beside its original, and two sequences that differ.

    Every layer is tapped.
    """

    spec: TargetSpec
    graph: TargetGraph
    original: TargetOriginal
    ids: np.ndarray  # [2, S]
    runs: list[TargetRun]

    def features(self, b: int) -> np.ndarray:
        """[S, layers * H] by the original."""
        return self.runs[b].features(range(self.spec.num_layers))

    def greedy(self, prompt: np.ndarray, new_tokens: int) -> list[int]:
        """Greedy decoding by the graph: the prompt in one pass, then a token a pass."""
        self.graph.reset(len(prompt) + new_tokens)
        out = self.graph.run(prompt[None], 0, [len(prompt) - 1])
        tokens = [int(out[t.GREEDY_IDS][0, 0])]
        while len(tokens) < new_tokens:
            out = self.graph.run(np.array([tokens[-1:]]), len(prompt) + len(tokens) - 1)
            tokens.append(int(out[t.GREEDY_IDS][0, 0]))
        return tokens


def target_case(
    folder: Path, family: str, seed: int, dtype: DType = DType.FLOAT32, **forced: Any
) -> TargetCase:
    """Make a target of a family with the options of a seed, and its graph."""
    drawn = options(family, seed, forced.get("num_hidden_layers"))
    tiny_target(seed, folder / "target", family, **(drawn | forced))
    return case_from_folder(folder / "target", folder / "graph", dtype)


def case_from_folder(target: Path, output: Path, dtype: DType = DType.FLOAT32) -> TargetCase:
    """Export the target's graph alone, and load it beside its original."""
    checkpoint = checkpoint_from_source(str(target))
    spec, graph = graph_alone(target, output, dtype)
    original = TargetOriginal(checkpoint)
    ids = np.random.default_rng(5).integers(0, spec.vocab_size, (2, CAPACITY - 8))
    return TargetCase(spec, graph, original, ids, [original.run(row.tolist()) for row in ids])


def graph_alone(target: Path, output: Path, dtype: DType = DType.FLOAT32) -> tuple[TargetSpec, TargetGraph]:
    """Export a target's graph, with all layers tapped and no draft."""
    checkpoint = checkpoint_from_source(str(target))
    spec = target_from_checkpoint(checkpoint)
    side = target_side(checkpoint, spec)
    plan = target_graph(spec, tuple(range(spec.num_layers)), dtype)
    output.mkdir(parents=True)
    with WeightWriter(output) as writer:
        pair: Any = SimpleNamespace(target=side, draft=side)
        info = graph_to_bundle(plan, pair, output, writer, NullProgress())
    cache = t.CacheShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype)
    manifest: Any = SimpleNamespace(graphs={t.TARGET: info}, target=SimpleNamespace(cache=cache))
    return spec, TargetGraph(output, manifest)


def edit_config(folder: Path, **values: Any) -> None:
    """Change keys of a saved config; a value of `...` removes the key."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
