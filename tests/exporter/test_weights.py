"""Weights in pieces: the same bytes whatever the piece, and memory that does not grow with the tensor."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from dflash_deploy.bundle.errors import CheckpointError
from dflash_deploy.bundle.manifest import WEIGHT_FILE
from dflash_deploy.exporter import pieces as pieces_module
from dflash_deploy.exporter.checkpoint import SafetensorsCheckpoint, checkpoint_from_source
from dflash_deploy.exporter.pieces import pieces
from dflash_deploy.exporter.weights import WeightWriter

NAME = "embed"
SOURCE = "folder: a.weight"


def checkpoint(folder: Path, **tensors: torch.Tensor) -> SafetensorsCheckpoint:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    return SafetensorsCheckpoint(folder)


def written(folder: Path, parts: Iterator[torch.Tensor], dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    folder.mkdir(exist_ok=True)
    counted: list[int] = []
    with WeightWriter(folder) as writer:
        placed = writer.add("target.a", dtype, shape, parts, SOURCE)
        again = writer.add("target.a", dtype, shape, iter(()), SOURCE)
        writer.finish(counted.append)
    data = (folder / WEIGHT_FILE).read_bytes()
    assert again == placed and sum(counted) == placed.bytes
    assert (writer.bytes, writer.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    return data[placed.offset : placed.offset + placed.bytes]


@pytest.mark.parametrize("piece_bytes", [1, 4 * 6 * 5, 1 << 25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pieces_give_the_whole(
    piece_bytes: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces_module, "PIECE_BYTES", piece_bytes)
    for shape in ((33, 6), (7,), (2, 3, 4), ()):
        tensor = torch.randn(shape).to(torch.bfloat16)
        parts = list(pieces(checkpoint(tmp_path / "c", **{NAME: tensor}), NAME))
        assert len(parts) > 1 or piece_bytes > 1 or not shape
        data = written(tmp_path / "w", iter(parts), dtype, shape)
        assert data == tensor.to(dtype).reshape(-1).view(torch.uint8).numpy().tobytes()


def test_pieces_of_a_gguf_file_cut_through_heads(demo_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "PIECE_BYTES", 4 * 576 * 50)  # 50 rows; heads have 64
    gguf = checkpoint_from_source(str(demo_target))
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "input_layernorm"):
        stored = f"model.layers.3.{name}.weight"
        assert torch.equal(torch.cat(list(pieces(gguf, stored))), gguf.read(stored)), name


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([torch.zeros(2, 3)], "got 2 rows, expected shape"),
        ([torch.zeros(4, 2)], "got rows of shape"),
        ([torch.zeros(3, 3), torch.full((1, 3), torch.nan)], "holds NaN or infinity"),
        ([torch.zeros(3, 3), torch.full((1, 3), 7e4)], "got values up to 7e.04, which float16 cannot hold"),
    ],
)
def test_wrong_pieces_are_refused(parts: list[torch.Tensor], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{SOURCE}: {message}"), WeightWriter(tmp_path) as writer:
        writer.add("target.a", torch.float16, (4, 3), iter(parts), SOURCE)


def test_what_another_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    most = torch.full((2, 3), torch.finfo(torch.float32).max)
    with (
        pytest.raises(CheckpointError, match=r"up to 3.403e\+38, which bfloat16 cannot hold .*float32$"),
        WeightWriter(tmp_path) as writer,
    ):
        writer.add("target.a", torch.bfloat16, (2, 3), iter([most]), SOURCE)


def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    """A bfloat16 tensor of 197 MB, written as 393 MB of float32."""
    shape = (24_000, 4096)
    source = checkpoint(tmp_path / "c", **{NAME: torch.zeros(shape, dtype=torch.bfloat16)})
    process = psutil.Process()
    before, most = process.memory_info().rss, [0]

    def looked_at() -> Iterator[torch.Tensor]:
        for piece in pieces(source, NAME):
            yield piece
            del piece
            most[0] = max(most[0], process.memory_info().rss)

    with WeightWriter(tmp_path) as writer:
        placed = writer.add("target.a", torch.float32, shape, looked_at(), SOURCE)
    assert placed.bytes == 4 * shape[0] * shape[1]
    assert most[0] - before < 150 * 10**6  # a piece in a few forms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 1, 500, 4095])
def test_one_bad_number_is_found_anywhere(dtype: torch.dtype, bad: float, place: int, tmp_path: Path) -> None:
    tensor = torch.randn(64, 64).to(dtype)
    tensor.view(-1)[place] = bad
    with pytest.raises(CheckpointError, match="holds NaN or infinity"), WeightWriter(tmp_path) as writer:
        writer.add("target.a", dtype, (64, 64), iter([tensor]), SOURCE)


def test_a_refused_weight_stops_what_comes_behind_it(tmp_path: Path) -> None:
    """Who traces graphs for minutes can ask before each; no more is read than the piece that is next."""
    read, go_on = [], threading.Event()

    def bad() -> Iterator[torch.Tensor]:
        assert go_on.wait(30)
        yield torch.full((1,), torch.nan)

    def parts() -> Iterator[torch.Tensor]:
        for _ in range(100):
            read.append(1)
            yield torch.zeros(1)

    def write() -> None:
        with WeightWriter(tmp_path) as writer:
            writer.add("target.a", torch.float32, (1,), bad(), SOURCE)
            writer.add("target.b", torch.float32, (100,), parts(), SOURCE)
            writer.check()
            go_on.set()
            with pytest.raises(CheckpointError, match=f"{SOURCE}: holds NaN"):
                writer.finish()
            writer.check()
            pytest.fail("it was not said again")

    with pytest.raises(CheckpointError, match="holds NaN"):
        write()
    assert len(read) <= 1


def test_weights_are_written_while_their_user_goes_on(tmp_path: Path) -> None:
    traced = threading.Event()

    def waiting() -> Iterator[torch.Tensor]:
        assert traced.wait(30)
        yield torch.ones(100, 4)

    with WeightWriter(tmp_path) as writer:
        first = writer.add("target.a", torch.float32, (100, 4), waiting(), SOURCE)
        second = writer.add("target.b", torch.float32, (4,), iter([torch.ones(4)]), SOURCE)
        assert (first.offset, second.offset, writer.bytes) == (0, 1600, 1616)
        traced.set()
    assert (tmp_path / WEIGHT_FILE).stat().st_size == 1616


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()])
def test_threads_take_short_turns_only_meanwhile(tmp_path: Path, error: BaseException | None) -> None:
    before = sys.getswitchinterval()
    with contextlib.suppress(KeyboardInterrupt), WeightWriter(tmp_path) as writer:
        writer.add("target.a", torch.float32, (4,), iter([torch.ones(4)]), SOURCE)
        assert sys.getswitchinterval() < before
        if error is not None:
            raise error
    assert sys.getswitchinterval() == before


def test_the_last_of_several_exports_makes_turns_long_again(tmp_path: Path) -> None:
    before = sys.getswitchinterval()
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    first, second = map(WeightWriter, folders)
    first.__enter__()
    second.__enter__()
    short = sys.getswitchinterval()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == short < before
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == before


def test_threads_made_later_compute_with_as_many_as_before(tmp_path: Path) -> None:
    def in_new_thread() -> int:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return found[0]

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with WeightWriter(tmp_path) as writer:
            writer.add("target.a", torch.float32, (4,), iter([torch.ones(4)]), SOURCE)
        assert torch.get_num_threads() == in_new_thread() == 3
    finally:
        torch.set_num_threads(before)


def test_an_error_while_reading_is_the_writers(tmp_path: Path) -> None:
    def broken() -> Iterator[torch.Tensor]:
        yield torch.ones(1, 4)
        raise CheckpointError("a.safetensors: cannot be read")

    with (
        pytest.raises(CheckpointError, match=r"^a\.safetensors: cannot be read$"),
        WeightWriter(tmp_path) as writer,
    ):
        writer.add("target.a", torch.float32, (2, 4), broken(), SOURCE)


@pytest.mark.parametrize(
    ("stored", "dtype"), [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)]
)
def test_every_number_is_converted_as_torch_does(
    stored: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    """All finite numbers of 16 bits that the other dtype can hold, the smallest among them, several times."""
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(stored)
    numbers = numbers[numbers.to(dtype).isfinite()].repeat(40)
    data = written(tmp_path, iter([numbers]), dtype, tuple(numbers.shape))
    assert data == numbers.to(dtype).view(torch.uint8).numpy().tobytes()


def test_an_error_of_the_user_ends_the_writing(tmp_path: Path) -> None:
    written = []

    def endless() -> Iterator[torch.Tensor]:
        while True:
            written.append(1)
            yield torch.ones(1, 4)

    def interrupted() -> None:
        with WeightWriter(tmp_path) as writer:
            writer.add("target.a", torch.float32, (100, 4), endless(), SOURCE)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    count = len(written)
    time.sleep(0.01)
    assert len(written) == count
