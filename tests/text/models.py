"""Small tokenizers of several families, with real chat templates."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from tokentape_core.text.families import get_family
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.tokenizer import Tokenizer
from tokentape_engine.tokenizer import chat_template, small_tokenizer

_DEEPSEEK = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    *(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
    *(f"<｜tool▁{name}｜>" for name in ("outputs▁begin", "outputs▁end", "output▁begin", "output▁end")),
)
_KIMI = tuple(f"<|im_{name}|>" for name in ("user", "assistant", "system", "middle"))

_SPECIAL_TOKENS = {
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    "glm4": ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "deepseek-v3": _DEEPSEEK,
    "deepseek-v4": _DEEPSEEK,
    "minimax-m2": ("]~!b[", "]~b]", "[e~["),
    "kimi-k2": _KIMI,
    "gpt-oss": tuple(f"<|{name}|>" for name in ("start", "message", "channel", "end", "call", "return")),
}

STAND_INS = {
    # Qwen3-Thinking-2507: Qwen3's template, with a generation prompt that opens the think block.
    "qwen3_thinking": chat_template("qwen3").replace(
        "{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n' }}"
    ),
    # The first V3: the same, with a generation prompt that opens no think block.
    "deepseekv3_plain": chat_template("deepseekv3").replace("<think>\\n", ""),
    "deepseekv3_training_plain": chat_template("deepseekv3_training").replace("<think>\\n", ""),
    # The rules of MiniMax-M2 and Kimi-K2 as far as they matter here, in our own words.
    "minimax_like": "{% for m in messages %}{% if m.role == 'system' %}{{ ']~!b[]~b]system\n' + m.content }}"
    "{% elif m.role == 'user' %}{{ ']~b]user\n' + m.content }}"
    "{% elif m.role == 'tool' %}{{ ']~b]tool\n<response>' + m.content + '</response>' }}"
    "{% else %}{{ ']~b]ai\n<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' + c.function.name + (c.function.arguments | tojson) }}"
    "{% endfor %}{% endif %}{{ '[e~[\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ ']~b]ai\n<think>\n' }}{% endif %}",
    "kimi_like": "{% for m in messages %}"
    "{% set side = m.role if m.role in ('user', 'assistant') else 'system' %}"
    "{{ '<|im_' + side + '|>' + m.role + '<|im_middle|>' }}"
    "{% if m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id + '\n' }}{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.id + (c.function.arguments | tojson) }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}",
    # A template that numbers the calls of the whole conversation.
    "counting": "{% set ns = namespace(n=0) %}{% for m in messages %}{{ m.role + ' ' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}"
    "{% if m.role == 'tool' %}{{ 'result ' ~ ns.n }}{% endif %}{{ '<|im_end|>' }}{% endfor %}",
}


@cache
def small_hf(template: str, family: str) -> PreTrainedTokenizerFast:
    """The small Qwen vocabulary with the family's special tokens, and trl's template or a stand-in."""
    tokenizer = small_tokenizer()
    extra = _SPECIAL_TOKENS.get(family, ())
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in extra])
    if family == "llama3":
        tokenizer.bos_token, tokenizer.eos_token = "<|begin_of_text|>", "<|eot_id|>"
    if family.startswith("deepseek"):
        tokenizer.bos_token, tokenizer.eos_token = _DEEPSEEK[:2]
    tokenizer.chat_template = STAND_INS.get(template) or chat_template(template)
    return tokenizer


@cache
def small_renderer(
    template: str = "qwen3_training", family: str = "qwen3", **template_kwargs: object
) -> ChatRenderer:
    """A renderer over `small_hf`."""
    return ChatRenderer(Tokenizer(small_hf(template, family)), get_family(family), template_kwargs)


SENTENCEPIECE = ("llama-2", "mistral", "metaspace", "gemma")
"""How tokenizer.json spells a SentencePiece vocabulary, by a model that does so."""

_WORDS = ["the", "cat", "sat", "on", "Hello", "Find", "it", "user", "assistant", "Yes", "No"]
_INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)


@cache
def sentencepiece(style: str) -> PreTrainedTokenizerFast:
    """A small vocabulary with a word's space in its token and bytes for all else, and a chat template.

    The styles differ in where a space is put before a first word: before every text between special tokens
    (`llama-2`, `metaspace`), at the start of a text only (`mistral`), or nowhere (`gemma`).
    """
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    tokens += sorted(set("".join(_WORDS)) | set("[]/INST<>"))
    merges = []
    for word in _WORDS:
        start = "▁"
        for character in word:
            if (start, character) not in merges:
                merges.append((start, character))
                tokens.append(start + character)
            start += character
    model = models.BPE(
        {token: i for i, token in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True
    )
    backend = Backend(model)
    stripping = [decoders.Strip(" ", 1, 0)]
    if style == "llama-2":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif style == "mistral":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif style == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        backend.normalizer, stripping = normalizers.Replace(" ", "▁"), []
    spaces: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = (
        decoders.Metaspace() if style == "metaspace" else decoders.Sequence([*spaces, *stripping])
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=_INST,
    )
