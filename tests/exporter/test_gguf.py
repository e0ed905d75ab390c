"""GGUF files that are none, or not whole: what the user is told, without the library's own words."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest

from dflash_deploy.bundle.errors import CheckpointError, UnsupportedError
from dflash_deploy.exporter.checkpoint import checkpoint_from_source


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_tensor("token_embd.weight", np.zeros((32, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        checkpoint_from_source(str(path))
    return str(caught.value)


@pytest.mark.parametrize("share", [0.01, 0.02, 0.05, 0.3, 0.9, 0.999])
def test_a_file_that_ends_early_is_to_be_downloaded_again(whole: bytes, share: float, tmp_path: Path) -> None:
    size = int(len(whole) * share)
    message = refusal(tmp_path / "cut.gguf", whole[:size])
    assert re.fullmatch(
        r"cut\.gguf: is a damaged GGUF file, or ends before what its beginning announces "
        rf"\({size} bytes\); download it again",
        message,
    )


@pytest.mark.parametrize("content", [b"", b"GG", b"<!DOCTYPE html><html>", b"version https://git-lfs"])
def test_a_file_that_is_none_is_named(content: bytes, tmp_path: Path) -> None:
    message = refusal(tmp_path / "page.gguf", content)
    assert message == "page.gguf: is no GGUF file, which begins with GGUF; check what was downloaded"


def test_a_whole_file_that_lacks_metadata_says_which(whole: bytes, tmp_path: Path) -> None:
    assert "metadata 'llama." in refusal(tmp_path / "whole.gguf", whole)
    other = whole.replace(b"llama", b"mamba")
    (tmp_path / "other.gguf").write_bytes(other)
    with pytest.raises(UnsupportedError, match=r"general\.architecture: got 'mamba', expected one of llama"):
        checkpoint_from_source(str(tmp_path / "other.gguf"))
