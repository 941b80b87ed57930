"""Random models with long-tailed answer lengths, for timing whole runs without a real model.

`python -m benchmarks.long_tail FOLDER --shape 0.6b --mean 256` writes one. After each token the answer ends with the
same probability, 1 / mean, whatever the context: lengths are geometric, and the longest of n answers is about ln(n)
times the mean.

Method: one hidden dimension is the same for every token, no layer writes to it, and it is so large that the norm of the
hidden state is nearly the same everywhere. Of the output matrix, the end token's row sees that dimension alone.
"""

import argparse
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.gpu_models import SHAPES
from tests.kit.models import byte_tokenizer

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
LONG_TAIL_SHAPES = {
    "tiny": TINY | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 259},
    "0.2b": SHAPES["0.2b"] | {"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936},
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "1.7b": SHAPES["1.7b"] | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
}
CONSTANT = 0
"""The hidden dimension that is the same everywhere."""
SIZE = 1.0
"""Its value; all other dimensions together are a few percent of it."""
OUTPUT = 0.2
"""Its value after the last norm, small enough for the logits' precision in bfloat16."""
END = 2
"""The end token of the byte-level tokenizer."""


def make_long_tail_model(folder: Path, shape: str, mean: float, *, dtype: torch.dtype, device: str = "cpu") -> float:
    """Write a Qwen3 of this shape, with a tokenizer; return the end token's measured probability.

    Raises RuntimeError if that differs from 1 / mean by more than a tenth.
    """
    config = Qwen3Config(
        **LONG_TAIL_SHAPES[shape],
        tie_word_embeddings=True,
        max_position_embeddings=40960,
        rope_theta=1e6,
        bos_token_id=1,
        eos_token_id=END,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        body = model.model
        embeddings = body.embed_tokens.weight
        # The rest of the hidden state is an eighth of the constant in total, whatever its width.
        embeddings.normal_(std=SIZE / 8 / config.hidden_size**0.5)
        embeddings[:, CONSTANT] = SIZE
        for layer in body.layers:
            for output in (layer.self_attn.o_proj, layer.mlp.down_proj):
                output.weight.mul_(0.02 * min(1.0, 1024 / config.hidden_size))  # wide layers add up to more
                output.weight[CONSTANT] = 0
        body.norm.weight[CONSTANT] = OUTPUT / config.hidden_size**0.5
        embeddings[END] = 0
        embeddings[END, CONSTANT] = SIZE
        model.to(dtype)
        tokens = torch.randint(3, config.vocab_size, (4, 64), device=device)
        for _ in range(12):  # the end token's logit is nearly linear in its embedding
            probability = _end_probability(model, tokens)
            wanted, found = torch.tensor(1 / mean).logit(), torch.tensor(probability).logit()
            body.embed_tokens.weight[END, CONSTANT] += float(wanted - found) / OUTPUT
        probability = _end_probability(model, tokens)
    if not 0.9 < probability * mean < 1.1:
        raise RuntimeError(f"the end token has probability {probability:.4g}, not 1 / {mean}")
    model.generation_config.eos_token_id = END
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return probability


@torch.no_grad()
def _end_probability(model: Qwen3ForCausalLM, tokens: torch.Tensor) -> float:
    """Return the end token's mean probability after random tokens [batch, length]."""
    logits = model(tokens).logits.float()
    return float(logits.softmax(-1)[..., END].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="0.6b", choices=LONG_TAIL_SHAPES)
    parser.add_argument("--mean", type=float, default=256.0)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    probability = make_long_tail_model(options.folder, options.shape, options.mean, dtype=dtype, device=device)
    print(f"{options.folder}: an answer ends after each token with probability 1 / {1 / probability:.1f}")


if __name__ == "__main__":
    main()
