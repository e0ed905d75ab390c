"""How much a draft that knows nothing costs: speculative against plain decoding, when no proposal stands.

    python benchmarks/blind_draft.py BUNDLE --prompts demo/prompts.txt

BUNDLE is copied beside itself, with the order of the draft's weights changed at random in the copy's weight
file, wherever the target has no part in them. The draft's passes cost what they cost, and it proposes
nonsense. Each prompt is decoded both ways in turn, so that a slow minute of the machine hits both.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from dflash_deploy.bundle.manifest import file_info, manifest_from_bundle, manifest_to_file
from dflash_deploy.bundle.tensors import DRAFT, TARGET
from dflash_deploy.runtime.decoder import Decoder
from dflash_deploy.runtime.stats import GenerationStats, Mode


def blind(bundle: Path, copy: Path) -> int:
    """Copy a bundle and shuffle what only its draft uses; how many weights that were."""
    shutil.copytree(bundle, copy)
    manifest = manifest_from_bundle(copy)
    draft, target = (ir.load(copy / manifest.graphs[name].file).graph for name in (DRAFT, TARGET))
    shuffled, random = 0, np.random.default_rng(0)
    for name, value in draft.initializers.items():
        tensor = value.const_value
        if (
            isinstance(tensor, ir.ExternalTensor)
            and name not in target.initializers
            and tensor.offset is not None
        ):
            numbers = np.memmap(tensor.path, tensor.numpy().dtype, "r+", tensor.offset, shape=(tensor.size,))
            random.shuffle(numbers)
            numbers.flush()
            shuffled += 1
    files = {name: file_info(copy / name) for name in manifest.files}
    manifest_to_file(replace(manifest, files=files), copy)
    return shuffled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="one a line")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    prompts = [line for line in arguments.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    with tempfile.TemporaryDirectory(prefix="blind-", dir=arguments.bundle.parent) as folder:
        copy = Path(folder) / "bundle"
        shuffled = blind(arguments.bundle, copy)
        stats: dict[Mode, list[GenerationStats]] = {mode: [] for mode in Mode}
        with Decoder.open(copy) as decoder:
            chat = decoder.codec is not None and decoder.codec.has_chat_template
            for turn in range(arguments.repeats):
                for index, prompt in enumerate(prompts):
                    answers = {}
                    for mode in [*Mode][:: 1 if (index + turn) % 2 else -1]:
                        answers[mode] = decoder.generate(
                            prompt, arguments.max_new_tokens, mode=mode, chat=chat
                        )
                        stats[mode].append(answers[mode].stats)
                    if answers[Mode.PLAIN].ids != answers[Mode.SPECULATIVE].ids:
                        raise SystemExit(f"{prompt!r}: plain and speculative tokens differ")
    ms = {
        mode: sum(s.decode_ms for s in of) / sum(s.new_tokens - 1 for s in of) for mode, of in stats.items()
    }
    lengths = [length for s in stats[Mode.SPECULATIVE] for length in s.acceptance_lengths]
    report = {
        "weights_shuffled": shuffled,
        "plain_ms_a_token": round(ms[Mode.PLAIN], 3),
        "speculative_ms_a_token": round(ms[Mode.SPECULATIVE], 3),
        "speculative_over_plain": round(ms[Mode.SPECULATIVE] / ms[Mode.PLAIN], 4),
        "tokens_a_round": round(sum(lengths) / len(lengths), 3),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
