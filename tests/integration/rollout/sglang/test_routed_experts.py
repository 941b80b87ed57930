"""Which experts each token of a mixture-of-experts model was sent to, as SGLang tells it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, Qwen3MoeConfig, Qwen3MoeForCausalLM

from relaxd.data.vision import read_vision
from relaxd.engines import ENGINES
from relaxd.v1 import rollout_pb2
from services.rollout.engines.request_types import Version
from tests.kit.engines import EngineRunner, receive_request
from tests.kit.models import byte_tokenizer
from tests.kit.vision import (
    EXPERTS,
    Item,
    clip,
    image_logprobs,
    make_vision_model,
    picture,
    prompt_with_media,
    with_published_experts,
    without_media,
)

PROMPT = [5, 9, 17, 200, 33]
NEW = 8


def start_recording(start: Callable[..., EngineRunner], folder: Path, monkeypatch: pytest.MonkeyPatch) -> EngineRunner:
    """Start an engine that records experts, and have it serve the weights of its folder."""
    monkeypatch.setitem(ENGINES, "sglang", replace(ENGINES["sglang"], process="benchmarks.engine_process"))
    # On a CPU SGLang's copy of a step's experts is no copy: with overlap the next step would overwrite it. The second
    # option is also the size of its buffer for a step's tokens.
    options = {"disable_overlap_schedule": True, "chunked_prefill_size": 2048}
    runner = start(folder, sglang=options, return_routed_experts=True)
    runner.pause()
    runner.run(runner.engine.join(rollout_pb2.JoinWeightGroupRequest(group={"name": "none", "timeout_seconds": 10})))
    runner.run(runner.engine.receive(receive_request("none", Version(1, 0), 10)))
    runner.resume()
    return runner


def test_they_are_those_of_transformers(
    start: Callable[..., EngineRunner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    reference = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts, **tokens, tie_word_embeddings=False))
    reference.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    runner = start_recording(start, tmp_path, monkeypatch)
    answers = runner.generate(PROMPT, 2, max_new_tokens=NEW, temperature=1.0, ignore_eos=True)
    assert answers[0].tokens != answers[1].tokens
    for answer in answers:
        assert answer.last is not None
        chosen = answer.last.routed_experts
        assert chosen is not None
        assert (chosen.dtype, chosen.shape) == (np.uint8, (len(PROMPT) + NEW - 1, 2, 2))
        with torch.inference_mode():
            output = reference(torch.tensor([[*PROMPT, *answer.tokens]]), output_router_logits=True)
        expected = torch.stack([logits.topk(2).indices for logits in output.router_logits], dim=1)[:-1]
        np.testing.assert_array_equal(np.sort(chosen, -1), np.sort(expected.numpy(), -1))


@pytest.mark.night  # a further model
def test_those_of_a_mixture_that_sees(
    start: Callable[..., EngineRunner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = EXPERTS | {"moe_intermediate_size": 128}
    with_published_experts(make_vision_model(tmp_path, tied=False, model_type="qwen3_vl_moe", **experts))
    runner = start_recording(start, tmp_path, monkeypatch)
    reference = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    chosen_there: list[torch.Tensor] = []
    for layer in reference.model.language_model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, inputs, outputs: chosen_there.append(outputs[-1]))
    vision = read_vision(tmp_path)
    cases: list[list[Item]] = [[], [picture(100, 60), clip(4, 96, 64, 7)]]
    for items in cases:
        prompt, media = prompt_with_media(vision, items)
        for answer in runner.generate(prompt, 2, media=media, max_new_tokens=NEW, temperature=1.0, ignore_eos=True):
            assert answer.last is not None
            chosen = answer.last.routed_experts
            assert chosen is not None
            assert chosen.shape == (len(prompt) + NEW - 1, 4, 2)
            tokens = without_media(answer.tokens, vision)
            chosen_there.clear()
            image_logprobs(reference, prompt, tokens, items)
            expected = torch.stack([one.reshape(-1, 2) for one in chosen_there], 1)[:-1]
            np.testing.assert_array_equal(np.sort(chosen[: len(expected)], -1), np.sort(expected.numpy(), -1))
