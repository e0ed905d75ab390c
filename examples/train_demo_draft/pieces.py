"""Cut a file into pieces that fit a size limit, and put such pieces together again.

python3 pieces.py split FILE MIB    writes FILE.part0, FILE.part1, ...
python3 pieces.py join FILE         reads FILE.part0, ... and writes FILE
"""

import sys
from pathlib import Path


def split(path: Path, piece_bytes: int) -> list[Path]:
    """Write `path` as even pieces of at most `piece_bytes` each."""
    content = path.read_bytes()
    count = max(1, -(-len(content) // piece_bytes))
    step = -(-len(content) // count)
    pieces = []
    for index in range(count):
        piece = path.with_name(f"{path.name}.part{index}")
        piece.write_bytes(content[index * step : (index + 1) * step])
        pieces.append(piece)
    return pieces


def pieces_of(path: Path) -> list[Path]:
    """The pieces of `path` that lie beside it, in order."""
    found = path.parent.glob(f"{path.name}.part*")
    return sorted(found, key=lambda piece: int(piece.name.rsplit(".part", 1)[1]))


def join(path: Path) -> Path:
    """Put the pieces of `path` together, unless the whole file is there already."""
    if not path.exists():
        pieces = pieces_of(path)
        if not pieces:
            raise FileNotFoundError(f"neither {path} nor {path.name}.part0 is there")
        path.write_bytes(b"".join(piece.read_bytes() for piece in pieces))
    return path


if __name__ == "__main__":
    if sys.argv[1] == "split":
        print(*split(Path(sys.argv[2]), int(sys.argv[3]) << 20), sep="\n")
    else:
        print(join(Path(sys.argv[2])))
