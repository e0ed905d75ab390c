"""A checkpoint's tokenizer and chat template, written into a bundle.

transformers reads them, because it knows where the formats keep what; no code that came with a checkpoint
is run. The bundle gets one self-contained tokenizer.json and the template's source.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..bundle.errors import CheckpointError, field_error
from ..bundle.manifest import TokenizerInfo
from .checkpoint import Checkpoint

_TOKENIZER = "tokenizer.json"
_TEMPLATE = "chat_template.jinja"
_GGUF = "gguf"


def tokenizer_to_bundle(source: Checkpoint, directory: Path) -> TokenizerInfo:
    """Write the tokenizer of `source` into `directory`; the same checkpoint gives the same bytes.

    A checkpoint without a tokenizer gives a bundle without one: it takes and returns token ids.

    Raises:
        CheckpointError: the tokenizer's files do not hold.
    """
    loaded = _load(source)
    if loaded is None:
        return TokenizerInfo(bos_token_id=source.config.get("bos_token_id"))
    backend = loaded.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    (directory / _TOKENIZER).write_text(backend.to_str(), encoding="utf-8")
    special = {key: str(value) for key, value in loaded.special_tokens_map.items() if isinstance(value, str)}
    ids = {"bos": loaded.bos_token_id, "eos": loaded.eos_token_id}
    if source.format == _GGUF:
        # transformers 5.15 takes the beginning token for the end token here (and reads the metadata of
        # some families crossed over): the file's own numbers count.
        for name in ids:
            stated = source.config.get(f"{name}_token_id")
            if stated is not None:
                ids[name], special[f"{name}_token"] = stated, _token(source, backend, name, stated)
    template = _template(loaded.chat_template)
    if template is not None:
        (directory / _TEMPLATE).write_text(template, encoding="utf-8")
    return TokenizerInfo(
        file=_TOKENIZER,
        chat_template=None if template is None else _TEMPLATE,
        special=dict(sorted(special.items())),
        bos_token_id=ids["bos"],
    )


def _load(source: Checkpoint) -> Any:
    folder, options = source.tokenizer_folder(), {}
    if source.format == _GGUF:
        file = source.files()[0]
        folder, options = file.parent, {"gguf_file": file.name}
    if folder is None:
        return None
    import transformers
    from transformers import PreTrainedTokenizerFast

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        return PreTrainedTokenizerFast.from_pretrained(
            str(folder.absolute()), local_files_only=True, **options
        )
    except Exception as cause:  # damaged files make it raise anything
        raise CheckpointError(
            f"{source.name}: its tokenizer cannot be read ({cause}); download {_TOKENIZER} again"
        ) from cause
    finally:
        transformers.logging.set_verbosity(level)


def _token(source: Checkpoint, backend: Any, name: str, token_id: int) -> str:
    token = backend.id_to_token(token_id)
    if token is None:
        raise field_error(
            CheckpointError,
            f"{source.name}: {name}_token_id",
            token_id,
            f"an id below {backend.get_vocab_size()} (tokens of the tokenizer)",
        )
    return str(token)


def _template(template: str | dict[str, str] | None) -> str | None:
    """The template for ordinary chats; some models bring more, by name."""
    return template.get("default") if isinstance(template, dict) else template
