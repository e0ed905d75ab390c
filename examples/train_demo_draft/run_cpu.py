"""Go on training a draft on a few CPU cores: one process per core, one command each.

    python3 run_cpu.py collect --data DIR --work DIR --part 0 --parts 2 --seconds 1500
    python3 run_cpu.py mark --data DIR --work DIR --init DRAFT
    python3 run_cpu.py train --data DIR --work DIR --part 0 --parts 2 --seconds 3000 --init DRAFT
    python3 run_cpu.py average --work DIR --parts 2 --out DIR
    python3 run_cpu.py evaluate --data DIR --work DIR --draft DIR

`--data` holds what prepare.py wrote. `collect` answers whole user turns; `train` may start once
the first answers are there and takes in later ones as they come. Both go on where they stopped.
`mark`, which may be left out, finds the tokens that the draft does not foresee yet: `train` starts
blocks there, and only at a share `--easy` of the others.
Each part trains its own weights on its share of the conversations; `average` is their mean.
Needs torch, safetensors and numpy only. The README names the allocator settings that matter.
`--dtype` is the one of matrix products: bf16 is several times faster with AMX, slower without.
"""

import argparse
import json
from pathlib import Path

import torch
from collect import CollectConfig, collect
from draft import grow, load_draft, save_weights
from evaluate import acceptance
from finetune import FinetuneConfig, finetune
from mark import mark
from stored import Stored
from target import Llama, read_blocks

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    steps = parser.add_subparsers(dest="step", required=True)
    gathering, fit = CollectConfig(), FinetuneConfig(seconds=0.0)
    for name in ("collect", "mark", "train", "average", "evaluate"):
        step = steps.add_parser(name)
        step.add_argument("--work", type=Path, required=True, help="stores and training state")
        step.add_argument("--threads", type=int, default=1)
        if name != "average":
            step.add_argument("--data", type=Path, required=True)
        if name not in ("mark", "evaluate"):
            step.add_argument("--parts", type=int, default=2, help="processes in all")
        if name in ("collect", "mark", "train"):
            step.add_argument("--dtype", choices=_DTYPES, required=True, help="of matrix products")
        if name in ("mark", "train"):
            step.add_argument("--init", type=Path, required=True, help="draft folder")
        if name in ("collect", "train"):
            step.add_argument("--part", type=int, required=True, help="this process, from 0")
            step.add_argument(
                "--seconds", type=float, required=True, help="of the clock; train: of the processor"
            )
        if name == "collect":
            step.add_argument("--rows", type=int, default=gathering.rows)
            step.add_argument("--slots", type=int, default=gathering.slots)
            step.add_argument("--taps", type=int, nargs="*", default=[1, 8, 14, 21, 27])
        if name == "train":
            step.add_argument("--layers", type=int, default=None, help="default: as many as --init has")
            step.add_argument("--sequences", type=int, default=fit.sequences)
            step.add_argument("--learning-rate", type=float, default=fit.learning_rate)
            step.add_argument("--anchors", type=int, default=fit.anchors, help="in a conversation")
            step.add_argument("--easy", type=float, default=fit.easy, help="share of blocks at easy tokens")
            step.add_argument("--gamma", type=float, default=fit.gamma)
            step.add_argument("--hard", type=float, default=fit.hard)
            step.add_argument("--checkpoint-s", type=float, default=fit.checkpoint_s)
        if name == "average":
            step.add_argument("--out", type=Path, required=True)
        if name == "evaluate":
            step.add_argument("--draft", type=Path, nargs="+", required=True)
            step.add_argument("--held-out", type=int, default=None, help="conversations [default: all]")
    return parser.parse_args()


def store_folders(work: Path) -> list[Path]:
    return sorted(path.parent for path in work.glob("store*/index.json"))


def run_collect(args: argparse.Namespace) -> None:
    tokens = json.loads((args.data / "tokens.json").read_text())
    shape, weights = read_blocks(args.data / "target_blocks.safetensors")
    target = Llama(shape, weights, "cpu", _DTYPES[args.dtype])
    config = CollectConfig(rows=args.rows, slots=args.slots, seed=100_000 * args.part)
    turns = tokens["turns"][args.part :: args.parts]
    collect(target, args.taps, turns, tokens, config, args.work / f"store{args.part}", args.seconds)


def run_mark(args: argparse.Namespace) -> None:
    _, weights = read_blocks(args.data / "target_blocks.safetensors")
    stored = Stored(store_folders(args.work))
    embedding = weights["model.embed_tokens.weight"].float()
    mark(load_draft(args.init), embedding, stored, _DTYPES[args.dtype], FinetuneConfig.frequent)


def run_train(args: argparse.Namespace) -> None:
    _, weights = read_blocks(args.data / "target_blocks.safetensors")
    embedding = weights["model.embed_tokens.weight"].float()
    draft = load_draft(args.init)
    draft = grow(draft, args.layers or len(draft.layers))
    out = args.work / f"draft{args.part}"
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(draft.config, indent=2))
    config = FinetuneConfig(
        seconds=args.seconds,
        sequences=args.sequences,
        learning_rate=args.learning_rate,
        anchors=args.anchors,
        easy=args.easy,
        gamma=args.gamma,
        hard=args.hard,
        dtype=_DTYPES[args.dtype],
        checkpoint_s=args.checkpoint_s,
        part=args.part,
        parts=args.parts,
    )

    def at_checkpoint(step: int, elapsed: float) -> None:
        save_weights(draft, out / "model.safetensors")
        print(f"saved {out} at step {step} after {elapsed:.0f}s", flush=True)

    torch.manual_seed(args.part)
    stored = Stored(store_folders(args.work))
    finetune(draft, embedding, stored, config, out / "state.pt", at_checkpoint)


def run_average(args: argparse.Namespace) -> None:
    """The mean of the parts' fp32 weights."""
    folders = [args.work / f"draft{part}" for part in range(args.parts)]
    draft = load_draft(folders[0])
    states = [torch.load(folder / "state.pt", weights_only=True)["draft"] for folder in folders]
    draft.load_state_dict({k: sum(s[k] for s in states) / len(states) for k in states[0]})
    args.out.mkdir(parents=True, exist_ok=True)
    save_weights(draft, args.out / "model.safetensors")
    (args.out / "config.json").write_text(json.dumps(draft.config, indent=2))


def run_evaluate(args: argparse.Namespace) -> None:
    """Acceptance along the test prompts' answers and along held-out conversations, in fp32."""
    shape, weights = read_blocks(args.data / "target_blocks.safetensors")
    target = Llama(shape, weights, "cpu", torch.float32)
    tests = json.loads((args.data / "tokens.json").read_text())["tests"]
    stored = Stored(store_folders(args.work))
    answers = {
        "tests": [(t["prompt_ids"] + t["greedy_ids"], len(t["prompt_ids"])) for t in tests],
        "held_out": [stored.one(index) for index in stored.held_out[: args.held_out]],
    }
    for folder in args.draft:
        draft = load_draft(folder)
        print(folder, {name: acceptance(draft, target, a) for name, a in answers.items()}, flush=True)


def main() -> None:
    args = parsed_arguments()
    torch.set_num_threads(args.threads)
    steps = {
        "collect": run_collect,
        "mark": run_mark,
        "train": run_train,
        "average": run_average,
        "evaluate": run_evaluate,
    }
    steps[args.step](args)


if __name__ == "__main__":
    main()
