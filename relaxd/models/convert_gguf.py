"""Convert a Llama GGUF file to a Hugging Face folder: `python -m relaxd.models.convert_gguf FILE.gguf FOLDER`.

It runs as a separate process, so that the command line needs no torch and the memory is freed.
"""

import functools
import sys
from pathlib import Path


def convert(gguf: Path, folder: Path) -> None:
    """Write the model in float32, its tokenizer and its chat template into `folder`."""
    import gguf as library
    import torch

    # transformers reads the file three times and asks for the names of each layer's tensors again and again.
    library.GGUFReader = functools.cache(library.GGUFReader)
    library.get_tensor_name_map = functools.cache(library.get_tensor_name_map)
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers 5.12, which SGLang requires, guesses the special tokens and gets the end token wrong.
    fields = library.GGUFReader(str(gguf)).fields
    for name, key in {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}.items():
        if field := fields.get(f"tokenizer.ggml.{key}_token_id"):
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(int(field.contents())))
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers marks a model that came from GGUF as quantized and refuses to save it: rebuild it without the mark.
    settings = quantized.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version"):
        settings.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    weights = {name: tensor.float() for name, tensor in quantized.state_dict().items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    model.tie_weights()
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"the weights don't fit the configuration: missing {missing}, unexpected {unexpected}")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.generation_config, name, getattr(tokenizer, name))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
