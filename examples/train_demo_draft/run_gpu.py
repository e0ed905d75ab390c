"""Generate, train and evaluate in one go, on one GPU (or, slowly, on a CPU).

    python3 run_gpu.py --data DIR --work DIR --out DIR --generate-s 100 --train-s 380

`--data` holds what prepare.py wrote (the blocks may be in pieces). `--work` keeps conversations
and training state: run the same command again after a stop and it goes on. `--out` receives
log.json, held-out conversations and the weights in two pieces, at every checkpoint.
Needs torch, safetensors and numpy only.
"""

import argparse
import json
import time
from pathlib import Path

import pieces
import torch
from draft import Draft, load_draft, save_weights, start_from_target
from evaluate import acceptance
from generate import GenerateConfig, generate
from target import Llama, LlamaShape, random_weights, read_blocks
from train import Conversations, TrainConfig, train

_HERE = Path(__file__).parent
_PIECE_BYTES = 13 << 20  # the 24.5 MB of weights become two pieces


def parsed_arguments() -> argparse.Namespace:
    gen, fit = GenerateConfig(), TrainConfig()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--init", type=Path, help="draft folder; default: the target's layers")
    parser.add_argument("--generate-s", type=float, default=gen.budget_s)
    parser.add_argument("--train-s", type=float, default=fit.budget_s)
    parser.add_argument("--rows", type=int, default=gen.rows)
    parser.add_argument("--slots", type=int, default=gen.slots)
    parser.add_argument("--sequences", type=int, default=fit.sequences)
    parser.add_argument("--anchors", type=int, default=fit.anchors)
    parser.add_argument("--learning-rate", type=float, default=fit.learning_rate)
    parser.add_argument("--gamma", type=float, default=fit.gamma)
    parser.add_argument("--hard", type=float, default=fit.hard)
    parser.add_argument("--slice-rows", type=int, default=fit.slice_rows)
    parser.add_argument("--checkpoint-s", type=float, default=fit.checkpoint_s)
    parser.add_argument("--log-every", type=int, default=fit.log_every)
    parser.add_argument("--held-out", type=int, default=fit.held_out)
    parser.add_argument("--seed", type=int, default=gen.seed)
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's choice")
    parser.add_argument("--random-target", action="store_true", help="no weights: try the machine only")
    return parser.parse_args()


def target_for(args: argparse.Namespace) -> Llama:
    if args.random_target:
        shape = LlamaShape(30, 576, 9, 3, 64, 1536, 49152, 1e-5, 1e5)
        weights = random_weights(shape, args.device)
    else:
        path = pieces.join(args.data / "target_blocks.safetensors")
        shape, weights = read_blocks(path, args.device)
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    return Llama(shape, weights, args.device, dtype)


def main() -> None:
    args = parsed_arguments()
    began = time.time()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")  # logits in TF32: fp32 results at little cost
    torch.backends.cuda.enable_cudnn_sdp(False)  # its masks and graphs are picky about shapes
    if args.threads:
        torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)

    tokens = json.loads((args.data / "tokens.json").read_text())
    target = target_for(args)
    print(f"target ready after {time.time() - began:.0f}s on {args.device}", flush=True)

    summary: dict = {"arguments": {k: str(v) for k, v in vars(args).items()}}
    conversations, notes = args.work / "conversations.npz", args.work / "generate.json"
    if not conversations.exists():
        config = GenerateConfig(rows=args.rows, slots=args.slots, budget_s=args.generate_s, seed=args.seed)
        generated = generate(target, tokens, config, conversations)
        notes.write_text(json.dumps(generated))
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()
    summary["generate"] = json.loads(notes.read_text())
    print("generate", summary["generate"], flush=True)

    config = TrainConfig(
        budget_s=args.train_s,
        sequences=args.sequences,
        anchors=args.anchors,
        learning_rate=args.learning_rate,
        gamma=args.gamma,
        hard=args.hard,
        slice_rows=args.slice_rows,
        checkpoint_s=args.checkpoint_s,
        log_every=args.log_every,
        held_out=args.held_out,
    )
    data = Conversations(conversations, args.device, config.held_out)
    held_out = [data.one(index) for index in data.held_out]
    tests = [(t["prompt_ids"] + t["greedy_ids"], len(t["prompt_ids"])) for t in tokens["tests"]]
    (args.out / "held_out.json").write_text(json.dumps(held_out))

    if args.init:
        draft = load_draft(args.init)
    else:
        draft = Draft(json.loads((_HERE / "draft_config.json").read_text()))
    draft.to(args.device)
    if not args.init:
        start_from_target(draft, target)

    curves = {"losses": [], "evaluations": []}
    log_path, state_path = args.work / "log.json", args.work / "state.pt"
    if state_path.exists():
        log = json.loads(log_path.read_text())
        curves = {name: log[name] for name in curves}
    summary |= curves

    def at_checkpoint(step: int, elapsed: float) -> None:
        # Weights first: if the machine is taken during the evaluation, they are out already.
        weights = args.work / "model.safetensors"
        save_weights(draft, weights)
        for piece in pieces.split(weights, _PIECE_BYTES):
            (args.out / piece.name).write_bytes(piece.read_bytes())
        entry = {"step": step, "elapsed_s": round(elapsed, 1)}
        entry["tests"] = acceptance(draft, target, tests)
        entry["held_out"] = acceptance(draft, target, held_out)
        curves["evaluations"].append(entry)
        print("evaluate", entry, flush=True)
        if args.device.startswith("cuda"):
            summary["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        for path in (log_path, args.out / "log.json"):
            path.write_text(json.dumps(summary, indent=1))

    train(draft, target, data, config, state_path, at_checkpoint, curves["losses"])
    print(f"done after {time.time() - began:.0f}s, peak {summary.get('peak_gib')} GiB", flush=True)


if __name__ == "__main__":
    main()
