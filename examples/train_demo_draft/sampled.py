"""Acceptance length of drawn answers, by the package's own runtime on an exported bundle.

    python3 sampled.py --bundle ../../demo-output/bundle --prompts ../../demo/prompts.txt --temperature 0.8

Temperature 0 is greedy decoding. Every round verifies the whole block.
"""

import argparse
from pathlib import Path

from dflash_deploy.bundle.manifest import manifest_from_bundle
from dflash_deploy.runtime.decoder import Decoder
from dflash_deploy.runtime.sampling import Sampling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="one prompt a line")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    args = parser.parse_args()
    chosen = {"sampling": Sampling(temperature=args.temperature, seed=args.seed)} if args.temperature else {}
    lengths: list[int] = []
    block = manifest_from_bundle(args.bundle).draft.block_size
    with Decoder.open(args.bundle, verify_rows=block) as decoder:
        for prompt in args.prompts.read_text().splitlines():
            lengths += decoder.generate(prompt, args.max_new_tokens, **chosen).stats.acceptance_lengths
    print({"acceptance_length": sum(lengths) / len(lengths), "rounds": len(lengths)})


if __name__ == "__main__":
    main()
