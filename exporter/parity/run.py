"""`parity_report`: a bundle beside its originals, from sources to verdict."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

from ...bundle.errors import RequestError, UnsupportedError, field_error
from ...bundle.manifest import DRAFT_VOCABULARY, manifest_from_bundle
from ...bundle.tensors import DRAFT, TARGET
from ..bundle_graphs import PROVIDER, DraftGraph, TargetGraph, check_dtype
from ..progress import NullProgress, Progress
from ..simple.spec import FAMILY
from .generation import BundleLoop, GenerationStages
from .inputs import sample_from_prompt
from .originals import TargetOriginal, draft_original, reference_precision, versions
from .prompts import prompt_ids
from .report import ParityReport
from .round import RoundStages
from .sources import sources_from_manifest
from .stages import DraftStages, TargetStages, compare_settings
from .tuned import TunedStages

NEW_TOKENS = 48
MOST_PROMPTS = 4
"""Of the prompts given, the first few are enough: every one is compared in hundreds of places."""


def parity_report(
    bundle: Path,
    target: str | None,
    draft: str | None,
    prompts: Sequence[str],
    progress: Progress | None = None,
    *,
    new_tokens: int = NEW_TOKENS,
    most_prompts: int = MOST_PROMPTS,
) -> ParityReport:
    """Compare a bundle with the PyTorch originals it was exported from.

    Args:
        bundle: the bundle; it is only read.
        target: the target's checkpoint (folder, .gguf file or hub id); None: where the bundle says.
        draft: the draft's checkpoint, likewise.
        prompts: texts.
        progress: is told about stages.
        new_tokens: tokens generated for each prompt.
        most_prompts: prompts used, from the first.

    Raises:
        BundleError: the bundle is damaged.
        ProviderError: the provider cannot compute it, or a package of the originals is missing.
        CheckpointError, PairError, UserError: the sources are missing, or are not the bundle's.
        RequestError: no prompt, or nothing to generate.
        EngineError: the engine failed.
    """
    progress = progress or NullProgress()
    if new_tokens < 2:
        raise field_error(RequestError, "new_tokens", new_tokens, ">= 2")
    directory = Path(bundle)
    with progress.stage("check files and sources"):
        manifest = manifest_from_bundle(directory)
        if manifest.is_rounded():
            whose, hint = "draft's weights", "its target is that bundle's, as it was"
            if manifest.is_rounded(TARGET):
                whose, hint = "weights", "`dflash inspect` shows what the rounding did"
            raise UnsupportedError(
                f"parity: this bundle's {whose} are rounded to integers, and the originals' are not; check "
                f"the float32 bundle that it was made from; {hint}"
            )
        if DRAFT_VOCABULARY in manifest.graphs[DRAFT].passes:
            raise UnsupportedError(
                f"parity: this bundle's draft proposes among {manifest.draft.draft_vocab_size} tokens, and "
                "its original among all; check the bundle that it was made from"
            )
        check_dtype(manifest.dtype)
        if manifest.draft.family == FAMILY:
            raise UnsupportedError(
                f"{manifest.name}: is of the family {FAMILY}, which has no PyTorch original to compare with; "
                "the project's tests compare it with the program that defines it"
            )
        target_checkpoint, draft_checkpoint = sources_from_manifest(manifest, target, draft)
    new_tokens = min(new_tokens, manifest.max_length - 1)
    ids = prompt_ids(directory, manifest, prompts[:most_prompts], manifest.max_length - new_tokens)
    with reference_precision():
        with progress.stage("load the originals"):
            target_original = TargetOriginal(target_checkpoint)
            draft_model = draft_original(draft_checkpoint, target_original)
        with progress.stage("load the bundle"):
            target_graph, draft_graph = TargetGraph(directory, manifest), DraftGraph(directory, manifest)
        tuned = TunedStages(directory, manifest, target_graph, draft_graph)
        rounds = RoundStages(directory, manifest, target_graph, draft_graph)
        targets = TargetStages(manifest, target_graph, draft_model.taps)
        drafts = DraftStages(directory, manifest, draft_graph, draft_model)
        loop = BundleLoop(manifest, target_graph, draft_graph, draft_model.shortest_block)
        generations = GenerationStages(manifest, loop, target_original, draft_model)
        for index, prompt in enumerate(ids):
            name = f"prompt {index + 1}"
            with progress.stage(f"{name}: original target"):
                sample = sample_from_prompt(name, prompt, new_tokens, target_original, draft_model.taps)
            with progress.stage(f"{name}: target stages"):
                targets.add(sample)
            with progress.stage(f"{name}: tuned graphs"):
                tuned.add(sample)
                rounds.add(sample)
            with progress.stage(f"{name}: draft stages"):
                drafts.add(sample)
            with progress.stage(f"{name}: whole generations"):
                generations.add(sample, new_tokens)
    stages = (
        compare_settings(manifest, draft_model),
        *targets.reports(),
        *tuned.reports(TARGET),
        *drafts.reports(),
        *tuned.reports(DRAFT),
        *rounds.reports(),
        *generations.reports(),
    )
    return ParityReport(
        bundle=manifest.name,
        dtype=manifest.dtype.value,
        engine=f"onnxruntime {importlib.metadata.version('onnxruntime')}",
        provider=PROVIDER,
        originals=versions(draft_model.package, "transformers", "torch"),
        prompts=len(ids),
        new_tokens=new_tokens,
        stages=stages,
        remarks=tuple(generations.remarks()),
    )
