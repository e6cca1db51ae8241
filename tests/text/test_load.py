"""From settings to a renderer, and models without a family of their own."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from tokenizers import AddedToken

from tests.text.models import small_hf
from tests.text.test_brought import FOLLOWING, HISTORIES
from tests.text.test_incremental import TOOLS
from tokentape_core.text.errors import NotAppendable, TokenizerError
from tokentape_core.text.load import load_renderer, load_tokenizer, renderer_of
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.settings import TextSettings
from tokentape_core.text.tokenizer import Tokenizer
from tokentape_engine.tokenizer import chat_template, small_tokenizer

GEMMA_4 = ("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5")
_GEMMA_TOKENS = (
    *("<bos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    *("<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>", "<|think|>"),
)


@pytest.fixture
def directory(tmp_path: Path) -> str:
    """A saved tokenizer with a template."""
    small_hf("qwen3_training", "qwen3").save_pretrained(str(tmp_path))
    return str(tmp_path)


def test_each_setting_that_changes_ids_changes_the_fingerprint(directory: str, tmp_path: Path) -> None:
    """The fingerprint covers every setting, as it did before where it is the default."""
    template = tmp_path / "other.jinja"
    template.write_text(chat_template("qwen3"))
    plain = TextSettings(tokenizer=directory)
    others = [
        replace(plain, chat_template=template),
        replace(plain, family="qwen3"),
        replace(plain, chat_template_kwargs={"enable_thinking": False}),
        replace(plain, tools_form="sglang-0.5.16"),
        replace(plain, tools_form="sglang-0.5.23"),
        replace(plain, end_tokens=("<|im_end|>", "<|endoftext|>")),
        replace(plain, end_tokens=("<|im_end|>",)),
        replace(plain, special_tokens_in_text="as-text"),
    ]

    prints = [load_renderer(settings).fingerprint for settings in (plain, *others)]

    assert len(set(prints)) == len(prints)
    assert prints[0] == load_renderer(plain).fingerprint
    changed = {field.name for field in fields(plain) for other in others if _differ(plain, other, field.name)}
    assert changed == {field.name for field in fields(plain)} - {"tokenizer"}


def _differ(one: TextSettings, other: TextSettings, name: str) -> bool:
    return bool(getattr(one, name) != getattr(other, name))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {
            "chat_template": Path("/x.jinja"),
            "family": "default",
            "chat_template_kwargs": {"a": [1, None]},
            "tools_form": "sglang-0.5.23",
            "end_tokens": ("<a>", "<b>"),
            "special_tokens_in_text": "as-text",
        },
        {"family": "qwen3"},
    ],
)
def test_settings_reach_another_process_whole(given: dict[str, Any]) -> None:
    """What goes over as JSON is what arrives."""
    settings = TextSettings(tokenizer="t", **given)

    assert TextSettings.from_json(orjson.loads(orjson.dumps(settings.to_json()))) == settings


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (
            {"tools_form": "sglang"},
            "tools_form must be one of as-sent, sglang-0.5.16, sglang-0.5.23, not 'sglang'",
        ),
        ({"special_tokens_in_text": "x"}, "special_tokens_in_text must be one of as-template, as-text"),
        ({"family": "qwen3", "end_tokens": ("<x>",)}, "qwen3 has its own. Use family default"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given: dict[str, Any], complaint: str) -> None:
    """With what would do."""
    with pytest.raises(ValueError, match=complaint):
        TextSettings(tokenizer="t", **given)


def test_a_renderer_that_cannot_be_made_is_the_operators(directory: str, tmp_path: Path) -> None:
    """Reserved template arguments and unknown end tokens end a process at the start."""
    plain = TextSettings(tokenizer=directory)
    with pytest.raises(TokenizerError, match="may not be named messages"):
        load_renderer(replace(plain, chat_template_kwargs={"messages": 1}))
    with pytest.raises(TokenizerError, match="end with <x>, which this tokenizer does not know"):
        load_renderer(replace(plain, end_tokens=("<x>",)))
    small_tokenizer().save_pretrained(str(tmp_path / "bare"))
    bare = TextSettings(tokenizer=str(tmp_path / "bare"))
    assert not load_tokenizer(bare).has_template
    with pytest.raises(TokenizerError, match="no chat template"):
        load_renderer(bare)


def _gemma(template: str, *end_tokens: str) -> ChatRenderer:
    tokenizer = small_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in _GEMMA_TOKENS])
    tokenizer.bos_token, tokenizer.chat_template = "<bos>", chat_template(template)
    return renderer_of(Tokenizer(tokenizer), TextSettings(tokenizer="", end_tokens=end_tokens))


@pytest.mark.parametrize("template", GEMMA_4)
def test_end_tokens_make_up_for_a_family(template: str) -> None:
    """Gemma 4: every message that can follow a turn comes out as in a rendering of the whole."""
    renderer = _gemma(template, "<turn|>", "<|tool_response>")
    refused = set()
    cases = FOLLOWING | {
        "result": (FOLLOWING["after a result"][0], FOLLOWING["after a result"][1][:1]),
        "user": (FOLLOWING["alone"][0], [{"role": "user", "content": "So?"}]),
    }
    for history in HISTORIES.values():
        for name, (turn, new) in cases.items():
            whole = renderer.render([*history, turn, *new], tools=TOOLS)
            try:
                prompt = renderer.extend(np.array([1]), turn, new, tools=TOOLS)
            except NotAppendable:
                refused.add(name)
                continue
            np.testing.assert_array_equal(prompt.suffix, whole[-len(prompt.suffix) :], err_msg=name)
            text = renderer.tokenizer.decode(prompt.suffix)
            assert all(message["content"] in text for message in new)
    # The newest template writes answers in a row as one turn, so none can follow a recorded one directly.
    directly = {"alone", "reasoned", "before a user", "two", "calling", "instead of a result"}
    assert refused <= (directly if template == "gemma4_v5" else set())
    assert ("alone" in refused) == (template == "gemma4_v5")


def test_a_result_inside_the_turn_is_never_lost() -> None:
    """Gemma 4 writes results before the end of the turn: they are refused unless a token opens them."""
    renderer = _gemma("gemma4_v5", "<turn|>")
    turn, (result, *_) = FOLLOWING["after a result"]
    user = {"role": "user", "content": "So?"}

    for new in ([result], [result, user]):
        with pytest.raises(NotAppendable, match="before the end of the turn"):
            renderer.extend(np.array([1]), turn, new)

    suffix = renderer.extend(np.array([1]), {"role": "assistant", "content": "Yes."}, [user]).suffix
    assert renderer.tokenizer.decode(suffix) == "<turn|>\n<|turn>user\nSo?<turn|>\n<|turn>model\n"
