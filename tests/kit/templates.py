"""Chat templates of real models, each with a tokenizer that knows its control tokens."""

import json
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from relaxd.data.tokenizer import PromptTokenizer

FOLDER = Path(__file__).parent / "chat_templates"
TEMPLATES = sorted(file.stem for file in FOLDER.glob("*.jinja"))
SPECIAL = re.compile(
    r"<\|[^|<>\s{}'\"]+\|?>|<[^|<>\s{}'\"]+\|>|<\uff5c[^\uff5c<>{}]+\uff5c>|<[a-z]+_of_[a-z]+>|\[/?[A-Z]{3,}\]|<s>|</s>"
)
TAGS = re.compile(r"</?(?:think|tool_call|tool_response|tools)>")
NAMED = {
    "deepseek": ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    "gemma": ("<bos>", "<eos>"),
    "llama": ("<|begin_of_text|>", "<|eot_id|>"),
    "lfm": ("<|startoftext|>", "<|im_end|>"),
    "phi": ("<s>", "<|endoftext|>"),
}
"""Special tokens that templates have as variables, bos_token and eos_token, by the beginning of their names."""


@cache
def template_tokenizer(name: str) -> PromptTokenizer:
    """Return a template of the folder with a byte-level BPE of a few hundred merges and the template's control tokens.

    Its tokens are longer than a byte, so that a text that is encoded in another division has other tokens.
    """
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    begin, end = next((pair for start, pair in NAMED.items() if name.startswith(start)), ("<s>", "</s>"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([source, *Path(__file__).read_text().split("\n")], trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False) for text in sorted({begin, end, *SPECIAL.findall(source)})]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in sorted({*TAGS.findall(source)})])
    config = {"bos_token": begin, "eos_token": end, "chat_template": source, "added_tokens_decoder": {}}
    with TemporaryDirectory() as folder:
        tokenizer.save(f"{folder}/tokenizer.json")
        Path(folder, "tokenizer_config.json").write_text(json.dumps(config))
        return PromptTokenizer(Path(folder))
