"""Requests for the tokens of a text or of messages, in vLLM's form."""

from typing import Any

from services.agent.chat_requests import BadRequest, ChatRequest, shown
from services.agent.protocols.chat_completions import read_request
from services.agent.protocols.protocol import Supported, check_supported
from services.agent.session_media import SessionMedia
from services.agent.stored_messages import StoredMessages

SUPPORTED: Supported = {
    "add_generation_prompt": ((True,), "messages are tokenised as the model gets them"),
    "continue_final_message": ((False,), "messages are tokenised as the model gets them"),
    "return_token_strs": ((False,), "use the model's tokenizer"),
    "chat_template": ((), "model.chat_template of the run is used"),
}


def read_tokenize_request(asked: dict[str, Any], media: SessionMedia) -> ChatRequest | str:
    """Read a request: messages and tools, or a text. Raises BadRequest."""
    check_supported(asked, SUPPORTED)
    if "prompt" not in asked:
        return read_request(asked, StoredMessages(), media)
    if not isinstance(asked["prompt"], str):
        raise BadRequest(f"prompt = {shown(asked['prompt'])} must be a text", "prompt")
    return asked["prompt"]
