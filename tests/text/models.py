"""Small tokenizers of several families, with real chat templates."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tokentape_core.text import ChatRenderer, Tokenizer, get_family
from tokentape_engine.tokenizer import chat_template, small_tokenizer

_SPECIAL_TOKENS = {
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    "glm4": ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
}


@cache
def small_hf(template: str, family: str) -> PreTrainedTokenizerFast:
    """The small Qwen vocabulary with the family's special tokens and one of trl's templates."""
    tokenizer = small_tokenizer()
    extra = _SPECIAL_TOKENS.get(family, ())
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in extra])
    if family == "llama3":
        tokenizer.bos_token, tokenizer.eos_token = "<|begin_of_text|>", "<|eot_id|>"
    tokenizer.chat_template = chat_template(template)
    return tokenizer


@cache
def small_renderer(template: str = "qwen3_training", family: str = "qwen3") -> ChatRenderer:
    """A renderer over `small_hf`."""
    return ChatRenderer(Tokenizer(small_hf(template, family)), get_family(family))
