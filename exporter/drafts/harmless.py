"""Config keys that cannot change what a draft computes, each with the reason.

A key that is neither read by a loader nor listed here is refused by name.
"""

from __future__ import annotations

_BOOKKEEPING = "bookkeeping of transformers"
_TRAINING = "read in training only"
_GENERATION = "generation settings; the runtime has its own"
_TARGET = "the draft has neither embedding nor head of its own to apply it to"
_RETURNS = "decides what a PyTorch forward returns, not what it computes"
_TOKENS = "a token id of the target, read from the target"

# Any transformers config may hold these.
TRANSFORMERS_KEYS: dict[str, str] = {
    "_attn_implementation": "another kernel for the same attention",
    "_attn_implementation_autoset": "another kernel for the same attention",
    "_commit_hash": _BOOKKEEPING,
    "_name_or_path": _BOOKKEEPING,
    "add_cross_attention": _BOOKKEEPING,
    "architectures": "read by the recognition of formats",
    "attention_dropout": _TRAINING,
    "attn_implementation": "another kernel for the same attention",
    "auto_map": _BOOKKEEPING,
    "bad_words_ids": _GENERATION,
    "begin_suppress_tokens": _GENERATION,
    "bos_token_id": _TOKENS,
    "chunk_size_feed_forward": "a memory setting of BERT-like models",
    "cross_attention_hidden_size": _BOOKKEEPING,
    "decoder_start_token_id": _TOKENS,
    "diversity_penalty": _GENERATION,
    "do_sample": _GENERATION,
    "dtype": "the tensors' own dtype decides",
    "early_stopping": _GENERATION,
    "encoder_no_repeat_ngram_size": _GENERATION,
    "eos_token_id": _TOKENS,
    "exponential_decay_length_penalty": _GENERATION,
    "finetuning_task": _BOOKKEEPING,
    "forced_bos_token_id": _GENERATION,
    "forced_eos_token_id": _GENERATION,
    "id2label": _BOOKKEEPING,
    "initializer_range": _TRAINING,
    "is_decoder": _BOOKKEEPING,
    "is_encoder_decoder": _BOOKKEEPING,
    "label2id": _BOOKKEEPING,
    "length_penalty": _GENERATION,
    "max_length": _GENERATION,
    "min_length": _GENERATION,
    "name_or_path": _BOOKKEEPING,
    "no_repeat_ngram_size": _GENERATION,
    "num_beam_groups": _GENERATION,
    "num_beams": _GENERATION,
    "num_labels": _BOOKKEEPING,
    "num_return_sequences": _GENERATION,
    "output_attentions": _RETURNS,
    "output_hidden_states": _RETURNS,
    "output_scores": _RETURNS,
    "pretraining_tp": "splits a product for training reproducibility; the original's layers ignore it",
    "prefix": _BOOKKEEPING,
    "problem_type": _BOOKKEEPING,
    "pruned_heads": _BOOKKEEPING,
    "remove_invalid_values": _GENERATION,
    "repetition_penalty": _GENERATION,
    "return_dict": _RETURNS,
    "return_dict_in_generate": _RETURNS,
    "sep_token_id": _TOKENS,
    "suppress_tokens": _GENERATION,
    "task_specific_params": _BOOKKEEPING,
    "temperature": _GENERATION,
    "tf_legacy_loss": _BOOKKEEPING,
    "tie_encoder_decoder": _BOOKKEEPING,
    "tie_word_embeddings": _TARGET,
    "tokenizer_class": _BOOKKEEPING,
    "top_k": _GENERATION,
    "top_p": _GENERATION,
    "torch_dtype": "the tensors' own dtype decides",
    "torchscript": _BOOKKEEPING,
    "transformers_version": _BOOKKEEPING,
    "typical_p": _GENERATION,
    "unk_token_id": _TOKENS,
    "use_bfloat16": _BOOKKEEPING,
    "use_cache": "the runtime always keeps the context's keys and values",
}

# The top level of a speculators config.
SPECULATORS_KEYS: dict[str, str] = {
    **TRANSFORMERS_KEYS,
    "dpace_alpha": _TRAINING,
    "loss_config": _TRAINING,
    "max_anchors": _TRAINING,
    "speculators_config": "names the verifier and its settings; proposals come from block_size",
    "speculators_model_type": "read by the recognition of formats",
    "speculators_version": _BOOKKEEPING,
}
