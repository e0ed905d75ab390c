"""Learned masks: a side file, a row in a copy of the embedding, and what is refused."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_deploy.bundle.errors import CheckpointError, UnsupportedError
from dflash_deploy.exporter.checkpoint import SafetensorsCheckpoint
from dflash_deploy.exporter.drafts.formats import draft_from_checkpoint
from dflash_deploy.exporter.drafts.mask_row import check_embedding_copy, mask_row_from_checkpoint
from originals import tiny_target, zlab_draft
from shape_checkpoint import ShapeCheckpoint

HIDDEN, VOCAB, MASK = 32, 101, 99
EMBEDDING = "model.embed_tokens.weight"


def holding(embedding):
    target = ShapeCheckpoint({}, {})
    target.put(EMBEDDING, embedding)
    return target


@pytest.fixture
def folder(tmp_path):
    zlab_draft(
        0,
        tmp_path,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        mask_token_id=MASK,
        input_embedding_scale=None,
        dtype=torch.bfloat16,
    )
    return tmp_path


def add(folder, name, tensor, file="model.safetensors"):
    path = folder / file
    tensors = load_file(path) if path.is_file() else {}
    save_file(tensors | {name: tensor}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("shape", [(HIDDEN,), (1, HIDDEN)])
def test_side_file(folder, shape):
    row = torch.randn(shape).to(torch.bfloat16)
    add(folder, "mask_embedding", row, "mask_embedding.safetensors")
    checkpoint = SafetensorsCheckpoint(folder)
    spec = draft_from_checkpoint(checkpoint)
    assert spec.learned_mask is True
    assert dict(spec.tensors)["mask_embedding"] == "mask_embedding"
    assert torch.equal(mask_row_from_checkpoint(checkpoint, spec), row.reshape(HIDDEN))


def test_row_of_the_embedding(folder, tmp_path):
    target = tiny_target(0, tmp_path / "target", hidden_size=HIDDEN, vocab_size=VOCAB)
    embedding = target.get_input_embeddings().weight.detach()
    copy = embedding.to(torch.bfloat16).clone()
    copy[MASK] = 7.0
    add(folder, "embed_tokens.weight", copy)
    checkpoint = SafetensorsCheckpoint(folder)
    spec = draft_from_checkpoint(checkpoint)
    assert spec.learned_mask is True
    assert torch.equal(mask_row_from_checkpoint(checkpoint, spec), copy[MASK])
    check_embedding_copy(checkpoint, spec, holding(embedding), EMBEDDING)
    other = embedding.clone()
    other[40] += 1
    with pytest.raises(
        UnsupportedError, match=r"got another row 40 than the target's embedding.*mask's row 99"
    ):
        check_embedding_copy(checkpoint, spec, holding(other), EMBEDDING)


def test_none(folder):
    checkpoint = SafetensorsCheckpoint(folder)
    spec = draft_from_checkpoint(checkpoint)
    assert spec.learned_mask is False
    check_embedding_copy(checkpoint, spec, holding(torch.zeros(VOCAB, HIDDEN)), EMBEDDING)


def test_pickled_side_file_is_refused(folder):
    (folder / "mask_embedding.pt").write_bytes(b"\x80")
    with pytest.raises(UnsupportedError, match=r"mask_embedding.pt: is pickled.*vector of 32 numbers"):
        draft_from_checkpoint(SafetensorsCheckpoint(folder))
    # ... until the vector is beside it in safetensors.
    add(folder, "mask_embedding", torch.zeros(HIDDEN), "mask_embedding.safetensors")
    assert draft_from_checkpoint(SafetensorsCheckpoint(folder)).learned_mask is True


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        (
            {"mask_embedding": (HIDDEN + 1,)},
            CheckpointError,
            r"'mask_embedding' shape: got \(33,\), expected \(32,\)",
        ),
        ({"mask_embedding": (2, HIDDEN)}, CheckpointError, r"got \(2, 32\), expected \(1, 32\)"),
        (
            {"embed_tokens.weight": (MASK, HIDDEN)},
            CheckpointError,
            "mask_token_id: got 99, expected < 99, the rows",
        ),
        ({"embed_tokens.weight": (VOCAB, 8)}, CheckpointError, r"got \(101, 8\), expected \(101, 32\)"),
        (
            {"mask_embedding": (HIDDEN,), "embed_tokens.weight": (VOCAB, HIDDEN)},
            CheckpointError,
            "'mask_embedding': got 'embed_tokens.weight' too, expected one of them",
        ),
    ],
)
def test_refusals(folder, tensors, error, message):
    for name, shape in tensors.items():
        add(folder, name, torch.zeros(shape))
    with pytest.raises(error, match=message):
        draft_from_checkpoint(SafetensorsCheckpoint(folder))


def test_with_an_embedding_scale_is_refused(tmp_path):
    zlab_draft(0, tmp_path, hidden_size=HIDDEN, input_embedding_scale=2.0)
    add(tmp_path, "mask_embedding", torch.zeros(HIDDEN))
    with pytest.raises(
        UnsupportedError, match=r"input_embedding_scale: got 2.0, expected 1.0 beside the learned mask"
    ):
        draft_from_checkpoint(SafetensorsCheckpoint(tmp_path))
