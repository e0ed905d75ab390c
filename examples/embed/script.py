"""A bundle in a plain script: open it, show the answer as it comes, say how it went.

python script.py BUNDLE "Why is the sky blue?"
"""

import argparse
import sys
from pathlib import Path

from dflash_deploy.bundle.errors import DflashError
from dflash_deploy.runtime.decoder import Decoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("prompt")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    arguments = parser.parse_args()

    with Decoder.open(arguments.bundle, provider="cpu") as decoder:
        with decoder.stream(arguments.prompt, arguments.max_new_tokens) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        result = stream.result
    stats = result.stats
    print()
    print(f"{len(result.ids)} tokens, ended by {result.finish_reason.value}")
    print(f"{stats.tokens_per_s:.0f} tokens/s, {stats.acceptance_length:.2f} tokens a round")
    print("draft right, by place:", " ".join(f"{share:.0%}" for share in stats.acceptance_by_position))


if __name__ == "__main__":
    try:
        main()
    except DflashError as error:  # says what to do; a bug keeps its traceback
        sys.exit(f"{Path(__file__).name}: {error}")
