"""Tiny random models as complete Hugging Face folders: configuration, weights, byte-level tokenizer for ChatML."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- endif -%}
"""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and the three special tokens of ChatML with ids 0, 1, 2; 259 tokens in all."""
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[byte] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<|im_start|>"
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "full_attention_interval": 2,
}


def make_tiny_model(
    folder: Path,
    *,
    architecture: str = "llama",
    tied: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **sizes: int,
) -> Path:
    """Write a random model (hidden 64, 2 layers, 4 heads of which 2 are key-value heads) into `folder`.

    `architecture` is "llama", "qwen3", "qwen3_moe" (8 experts of 32, top 2), "qwen3_5_text" (a gated delta net in the
    first layer) or "qwen3_5_moe_text" (that, the experts and a shared one); `sizes` are fields of its configuration
    that are to be otherwise. Returns `folder`.
    """
    shape = {
        "vocab_size": 259,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **sizes,
    }
    torch.manual_seed(seed)
    if architecture == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape))
    elif architecture == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    elif architecture == "qwen3_moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(EXPERTS | shape), norm_topk_prob=True))
    elif architecture == "qwen3_5_text":
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**(DELTA_NET | shape)))
    elif architecture == "qwen3_5_moe_text":
        mixture = {**EXPERTS, "shared_expert_intermediate_size": 32}
        model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**(mixture | DELTA_NET | shape)))
    else:
        known = "llama", "qwen3", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text"
        raise ValueError(f"architecture is {architecture!r}: one of {known}")
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    # Published mixtures of Qwen3.5 have stacked experts, as transformers' module has.
    model.to(dtype).save_pretrained(folder, save_original_format=architecture != "qwen3_5_moe_text")
    byte_tokenizer().save_pretrained(folder)
    return folder
