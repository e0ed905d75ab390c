"""Whole user turns from rules: `turns.txt` says what kinds there are and what fills their slots.

    python3 turns.py --count 20

prints some, to see what they are like.
"""

import argparse
import random
import re
from pathlib import Path

_RULES = Path(__file__).with_name("turns.txt")
_SLOT = re.compile(r"\{(\w+)\}")


def read_rules(path: Path = _RULES) -> tuple[dict[str, float], dict[str, list[str]]]:
    """(weight of each kind, lines of each section); kinds are sections too."""
    weights: dict[str, float] = {}
    sections: dict[str, list[str]] = {}
    section: list[str] = []
    for line in path.read_text().splitlines():
        if line.startswith("["):
            kind, name, weight = ([*line.strip("[]").split(), "", ""])[:3]
            if weight:
                weights[name] = float(weight)
            section = sections.setdefault(name or kind, [])
        elif line and not line.startswith("#"):
            section.append(line.replace("\\n", "\n"))
    return weights, sections


def fill(line: str, sections: dict[str, list[str]], chance: random.Random) -> str:
    """`line` with every slot that names a section filled; other braces stay."""

    def chosen(slot: re.Match) -> str:
        return chance.choice(sections[slot[1]]) if slot[1] in sections else slot[0]

    text = _SLOT.sub(chosen, line)
    return text[:1].upper() + text[1:] if text[:4] != "def " and text[:5] != "from " else text


def make_turns(count: int, seed: int = 0) -> list[str]:
    """`count` different turns, the kinds in their proportions."""
    weights, sections = read_rules()
    chance = random.Random(seed)  # noqa: S311  (no secret)
    turns: dict[str, None] = {}
    for _ in range(100 * count):
        kind = chance.choices(list(weights), list(weights.values()))[0]
        turns[fill(chance.choice(sections[kind]), sections, chance)] = None
        if len(turns) == count:
            return list(turns)
    raise ValueError(f"the rules give only about {len(turns)} different turns, {count} were asked for")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print("\n\n".join(make_turns(args.count, args.seed)))


if __name__ == "__main__":
    main()
