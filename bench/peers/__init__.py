"""Other programs that decode the same target, each in a process of its own.

One file a program, imported in that process only: whoever starts them imports none of it.
"""

from __future__ import annotations

import enum
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...bundle.errors import ProviderError, RequestError, field_error
from .checkpoint import is_gguf

ALL_INSTALLED = "all-installed"


class Takes(enum.Enum):
    """Which checkpoints a program reads."""

    GGUF = "a .gguf file"
    ANY = "a .gguf file or a Hugging Face folder"


class Cache(enum.Enum):
    """Whether a program needs a folder to keep a model of its own in."""

    NONE = "none"
    FOLDER = "folder"


@dataclass(frozen=True)
class PeerKind:
    """A program that may be timed beside a bundle.

    Attributes:
        module: its file in this package, with a function ``open_peer(OpenRequest) -> Peer``.
        needs: packages it imports.
        install: the line that installs them.
        takes: checkpoints it reads.
        cache: what it keeps.
        variant: handed to ``open_peer``, where one file has several.
    """

    module: str
    needs: tuple[str, ...]
    install: str
    takes: Takes = Takes.ANY
    cache: Cache = Cache.NONE
    variant: str = ""


_HF = ("torch", "transformers", "gguf")
_GENAI = ("onnxruntime_genai", *_HF, "onnx_ir")
_HF_INSTALL = "pip install 'dflash-deploy[export]'"
_GENAI_INSTALL = "pip install onnxruntime-genai==0.18.0 'dflash-deploy[export]'"

PEERS = {
    "transformers": PeerKind(".transformers_peer", _HF, _HF_INSTALL),
    "transformers-prompt-lookup": PeerKind(".transformers_peer", _HF, _HF_INSTALL, variant="prompt-lookup"),
    "onnxruntime-genai": PeerKind(".genai_peer", _GENAI, _GENAI_INSTALL, cache=Cache.FOLDER, variant="fp32"),
    "onnxruntime-genai-int4": PeerKind(
        ".genai_peer", _GENAI, _GENAI_INSTALL, cache=Cache.FOLDER, variant="int4"
    ),
    "llama.cpp": PeerKind(
        ".llama_cpp_peer", ("xllamacpp",), "pip install xllamacpp==2026.10.11549", takes=Takes.GGUF
    ),
}


def missing_packages(name: str) -> list[str]:
    """Packages that a program needs and that are not installed."""
    return [package for package in PEERS[name].needs if importlib.util.find_spec(package) is None]


def choose_peers(names: Sequence[str], target: Path | None, cache: Path | None) -> list[str]:
    """Check before anything is opened that the programs asked for can run.

    Args:
        names: keys of `PEERS`, or `ALL_INSTALLED`, which takes those that are installed and read the target.
        target: the target's checkpoint.
        cache: folder for models that programs build.

    Raises:
        RequestError: a name is unknown, or a program does not take the target, or a path is missing.
        ProviderError: a program asked for by name is not installed.
    """
    for name in names:
        if name not in PEERS and name != ALL_INSTALLED:
            raise field_error(RequestError, "peer", name, f"one of {', '.join(PEERS)}, or {ALL_INSTALLED}")
    chosen = [name for name in dict.fromkeys(names) if name != ALL_INSTALLED]
    for name in chosen:
        missing = missing_packages(name)
        if missing:
            raise ProviderError(f"peer {name}: {', '.join(missing)} not installed; {PEERS[name].install}")
    if not names:
        return []
    if target is None:
        raise RequestError(
            f"peer {names[0]}: --target is missing; other programs cannot read a bundle, so give them the "
            f"target's checkpoint, {Takes.ANY.value}, with --target PATH"
        )
    if not target.exists():
        raise field_error(
            RequestError,
            "target",
            str(target),
            f"a path that exists: the target's checkpoint, {Takes.ANY.value}, which other programs read",
            "give another --target",
        )
    if ALL_INSTALLED in names:
        installed = [name for name in PEERS if not missing_packages(name)]
        if not installed:
            raise ProviderError(
                f"peers: none of {', '.join(PEERS)} is installed; {PEERS['llama.cpp'].install}"
            )
        chosen += [name for name in installed if name not in chosen and not _misfit(name, target)]
        if not chosen:
            takes_most = max(installed, key=lambda name: PEERS[name].takes is Takes.ANY)
            raise RequestError(_misfit(takes_most, target))
    for name in chosen:
        if problem := _misfit(name, target):
            raise RequestError(problem)
        if PEERS[name].cache is Cache.FOLDER and cache is None:
            raise RequestError(
                f"peer {name}: builds a model of its own, expected a folder for it; give --peer-cache DIR"
            )
    return chosen


def _misfit(name: str, target: Path) -> str:
    """Why a program cannot read a target; empty if it can."""
    is_folder = (target / "config.json").is_file()
    takes = PEERS[name].takes
    if (target.is_file() and is_gguf(target)) or (is_folder and takes is Takes.ANY):
        return ""
    return f"peer {name}: got the target {str(target)!r}, expected {takes.value}; give another --target"
