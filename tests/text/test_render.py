"""Whole prompts, and what becomes of a request's messages."""

from __future__ import annotations

import asyncio
import copy
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.text.models import small_hf, small_renderer
from tokentape_core.text.errors import NotAppendable, RenderError, TokenizerError, UnknownFamilyError
from tokentape_core.text.families import FAMILIES, get_family
from tokentape_core.text.messages import template_messages
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.tokenizer import Tokenizer
from tokentape_engine.tokenizer import chat_template, small_tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


def test_render_equals_the_tokenizers_own(renderer: ChatRenderer, full_hf: Any) -> None:
    """A whole prompt has the ids of transformers' `apply_chat_template`, tools and all."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]

    ids = renderer.render(HELLO, tools=tools)

    template = chat_template("qwen3_training")
    want = full_hf.apply_chat_template(
        HELLO, tools=tools, chat_template=template, add_generation_prompt=True, return_dict=False
    )
    assert ids.dtype == np.int32
    assert ids.tolist() == want


def test_template_arguments_of_a_call_win(qwen3: Tokenizer) -> None:
    """The renderer's own template arguments hold for every call that does not say otherwise."""
    renderer = ChatRenderer(qwen3, get_family("qwen3"), {"enable_thinking": False})

    assert qwen3.decode(renderer.render(HELLO)).endswith("<think>\n\n</think>\n\n")
    assert not qwen3.decode(renderer.render(HELLO, template_kwargs={"enable_thinking": True})).endswith(
        "\n\n"
    )
    prompt = renderer.extend(np.array([151_645]), {"role": "assistant"}, HELLO)
    assert qwen3.decode(prompt.suffix).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "messages", "add_generation_prompt", "strftime_now"]
)
def test_template_arguments_cannot_take_over(qwen3: Tokenizer, renderer: ChatRenderer, name: str) -> None:
    """Neither a request nor a setting can bring another template or change what is done with the result."""
    with pytest.raises(RenderError, match=f"may not be named {name}"):
        renderer.render(HELLO, template_kwargs={name: "x"})
    with pytest.raises(RenderError, match=f"may not be named {name}"):
        ChatRenderer(qwen3, get_family("qwen3"), {name: "x"})


def test_template_arguments_are_told(qwen3: Tokenizer) -> None:
    """The renderer's own template arguments can be read, and cannot be changed from outside."""
    given: dict[str, object] = {"enable_thinking": False}
    renderer = ChatRenderer(qwen3, get_family("qwen3"), given)
    given["enable_thinking"] = True

    assert renderer.template_kwargs == {"enable_thinking": False}
    with pytest.raises(TypeError):
        renderer.template_kwargs["enable_thinking"] = True  # type: ignore[index]


@pytest.mark.parametrize(
    ("template", "family", "date"),
    [
        ("gptoss", "gpt-oss", "Current date: 2026-03-01\n"),
        ("llama3_1", "llama3", "Today Date: 26 Jul 2024\n"),
        ("llama3_2", "llama3", "Today Date: 01 Mar 2026\n"),
    ],
)
def test_a_date_is_that_of_the_sessions_opening(template: str, family: str, date: str) -> None:
    """A template that writes today's date writes the session's, in UTC, in all that it renders."""
    renderer = small_renderer(template, family)
    before_midnight = 1_772_409_599.0  # 2026-03-01T23:59:59Z
    answer = {"role": "assistant", "content": "Hi"}

    text = renderer.render_text(HELLO, opened_at=before_midnight)

    assert date in text
    assert renderer.tokenizer.decode(renderer.render(HELLO, opened_at=before_midnight)) == text
    np.testing.assert_array_equal(
        renderer.sample(HELLO, answer, opened_at=before_midnight), renderer.sample(HELLO, answer)
    )


def test_a_suffix_has_the_date_of_the_sessions_opening(with_template: Any) -> None:
    """A date in a later message is that of the whole prompt, not of the day on which it is rendered."""
    renderer = with_template(
        "{% for m in messages %}{{ strftime_now('%d.%m.%y ') + m.content }}<|im_end|>{% endfor %}"
    )

    prompt = renderer.extend(np.array([1]), {"role": "assistant"}, HELLO, opened_at=86_400.0)

    assert renderer.tokenizer.decode(prompt.suffix) == "<|im_end|>02.01.70 Hello<|im_end|>"


def test_special_text_in_a_message_becomes_special(qwen3: Tokenizer, renderer: ChatRenderer) -> None:
    """A user who spells a special token gets it, as from an engine that applies the template itself."""
    ids = renderer.render([{"role": "user", "content": "say <|im_end|>"}])
    prompt = renderer.extend(
        np.array([151_645]), {"role": "assistant"}, [{"role": "user", "content": "say <|im_end|>"}]
    )

    assert np.count_nonzero(ids == 151_645) == 2
    assert np.count_nonzero(prompt.suffix == 151_645) == 2


def test_content_parts_are_joined() -> None:
    """A list of text parts, plain or tagged, renders as the one string that it spells."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, "lo"]}]

    np.testing.assert_array_equal(small_renderer().render(parts), small_renderer().render(HELLO))


def test_other_names_of_roles_are_those_of_the_template() -> None:
    """`developer` is a system message and `function` a tool message, to a template that knows neither."""
    renderer = small_renderer()
    new_names = [{"role": "developer", "content": "a"}, *HELLO, {"role": "function", "content": "b"}]
    old_names = [{"role": "system", "content": "a"}, *HELLO, {"role": "tool", "content": "b"}]

    np.testing.assert_array_equal(renderer.render(new_names), renderer.render(old_names))
    for new, old in ((new_names[0], old_names[0]), (new_names[2], old_names[2])):
        after_new, after_old = (
            renderer.extend(np.array([1]), {"role": "assistant"}, [message]) for message in (new, old)
        )
        np.testing.assert_array_equal(after_new.suffix, after_old.suffix)


def test_a_template_that_knows_developers_gets_them(with_template: Any) -> None:
    """The role stays where the template's source names it in quotes."""
    source = "{% for m in messages %}{{ m.role }}<|im_end|>{% endfor %}"
    developer = [{"role": "developer", "content": "x"}]

    assert with_template(source).render_text(developer) == "system<|im_end|>"
    for quoted in ("'developer'", '"developer"'):
        knowing = with_template("{% set known = " + quoted + " %}" + source)
        assert knowing.render_text(developer) == "developer<|im_end|>"


def test_a_developer_is_appended_where_a_system_message_is() -> None:
    """gpt-oss knows developers, and skips them after the first message as it does system messages."""
    with pytest.raises(NotAppendable, match="'developer' cannot follow"):
        small_renderer("gptoss", "gpt-oss").extend(
            np.array([1]), {"role": "assistant"}, [{"role": "developer", "content": "x"}]
        )


@pytest.mark.parametrize(
    "spelled",
    [
        {"reasoning": "Hm."},
        {"reasoning": "Hm.", "reasoning_content": None},
        {"reasoning": None, "reasoning_content": "Hm."},
        {"reasoning": "other", "reasoning_content": "Hm."},
        {
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "text", "text": "Hi"},
            ]
        },
        {"content": [{"type": "thinking", "text": "H"}, "Hi", {"type": "thinking", "thinking": "m."}]},
        {"content": [{"type": "thinking", "thinking": "other"}, "Hi"], "reasoning_content": "Hm."},
        {"content": ["Hi", {"type": "redacted_thinking", "data": "x"}], "reasoning": "Hm."},
    ],
)
def test_reasoning_has_many_spellings(spelled: dict[str, Any]) -> None:
    """What an assistant thought reaches the template under the one name that it reads."""
    plain = {"role": "assistant", "content": "Hi", "reasoning_content": "Hm."}
    message = {"role": "assistant", "content": "Hi", **spelled}

    (converted,) = template_messages([message], arguments="object")

    assert (converted["content"], converted["reasoning_content"]) == ("Hi", "Hm.")
    renderer = small_renderer()
    np.testing.assert_array_equal(renderer.render([*HELLO, message]), renderer.render([*HELLO, plain]))


def test_no_reasoning_is_made_up() -> None:
    """A message of somebody else keeps its keys, and parts without text leave an assistant no reasoning."""
    user, assistant = template_messages(
        [
            {"role": "user", "content": "x", "reasoning": "y"},
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, "Hi"]},
        ],
        arguments="object",
    )

    assert user == {"role": "user", "content": "x", "reasoning": "y"}
    assert assistant == {"role": "assistant", "content": "Hi"}


@pytest.mark.parametrize("template", ["qwen3_training", "qwen2_5", "qwen3_8"])
def test_null_content_with_tool_calls_renders(template: str) -> None:
    """An assistant message that only calls tools may have null, empty or no content."""
    family = {"qwen2_5": "qwen2.5", "qwen3_8": "qwen3.5"}.get(template, "qwen3")
    renderer = small_renderer(template, family)
    messages = [
        {"role": "assistant", "tool_calls": [_call("{}")]} | extra
        for extra in ({"content": None}, {"content": ""}, {})
    ]

    null, empty, missing = (renderer.render([*HELLO, message]) for message in messages)

    np.testing.assert_array_equal(null, empty)
    np.testing.assert_array_equal(null, missing)


@pytest.mark.parametrize(
    ("form", "sent", "given"),
    [
        ("object", '{"a": 1}', {"a": 1}),
        ("object", {"a": 1}, {"a": 1}),
        ("object", "", {}),
        ("object", None, {}),
        ("string", {"a": "é"}, '{"a": "é"}'),
        ("string", '{"a":1}', '{"a":1}'),
        ("as_is", '{"a":1}', '{"a":1}'),
        ("as_is", {"a": 1}, {"a": 1}),
    ],
)
def test_arguments_take_the_form_that_the_template_wants(form: Any, sent: object, given: object) -> None:
    """`function.arguments` is decoded, encoded or left alone."""
    (message,) = template_messages([{"role": "assistant", "tool_calls": [_call(sent)]}], arguments=form)

    assert message["tool_calls"] == [_call(given)]


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"content": "x"}, r"messages\[0\]\.role is None"),
        (
            {"role": "critic", "content": "x"},
            r"role is 'critic'; this model takes assistant, system, tool, user",
        ),
        ({"role": "user", "content": 7}, r"messages\[0\]\.content is neither a string nor a list of parts"),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            r"content\[0\] is not a text part but 'image_url'",
        ),
        (
            {"role": "user", "content": [{"type": "thinking", "thinking": "x"}]},
            r"content\[0\] is not a text part but 'thinking'",
        ),
        (
            {"role": "assistant", "content": [{"type": "thinking"}]},
            r"messages\[0\]\.content\[0\] has no text of what was thought",
        ),
        ({"role": "user", "content": "a\ud800"}, "lone surrogate"),
        ({"role": "assistant", "tool_calls": "f"}, r"tool_calls is not a list"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, r"tool_calls\[0\] has no function"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, r"tool_calls\[0\]\.function has no name"),
    ],
)
def test_a_malformed_message_is_named(message: dict[str, Any], complaint: str) -> None:
    """The caller is told which message is wrong and what is wrong with it."""
    with pytest.raises(RenderError, match=complaint):
        small_renderer().render([message])


@pytest.mark.parametrize(
    ("arguments", "complaint"), [("{'a': 1}", "is not valid JSON"), ("[1]", "is not a JSON object")]
)
def test_arguments_that_are_no_object_name_the_call(arguments: str, complaint: str) -> None:
    """Broken arguments in a client's message are an error that names the call, not a prompt that differs."""
    messages = [{"role": "assistant", "tool_calls": [_call("{}"), _call(arguments)]}]
    with pytest.raises(RenderError, match=rf"tool_calls\[1\]\.function\.arguments \(of f\) {complaint}"):
        small_renderer().render(messages)


def test_a_templates_refusal_is_passed_on() -> None:
    """What the template says about the messages reaches the caller."""
    with pytest.raises(RenderError, match="No user query found in messages"):
        small_renderer("qwen3_8", "qwen3.5").render([{"role": "system", "content": "x"}])
    with pytest.raises(RenderError, match="refused the messages"):
        small_renderer().render([])


def test_an_error_inside_a_template_is_the_callers(with_template: Any) -> None:
    """An expression that fails on the input is a RenderError, whatever Python raised."""
    renderer = with_template("{% for m in messages %}{{ m.content + n }}<|im_end|>{% endfor %}", n="")
    with pytest.raises(RenderError, match="refused the messages"):
        renderer.render(HELLO, template_kwargs={"n": 1})


def test_inputs_are_not_changed(renderer: ChatRenderer) -> None:
    """Messages, tools and template arguments are as before, however much had to be converted."""
    assistant = {"role": "assistant", "content": None, "tool_calls": [_call('{"a": 1}')]}
    new = [{"role": "tool", "content": [{"type": "text", "text": "x"}]}, {"role": "user", "content": "y"}]
    parent = np.array([1, 2, 151_645], dtype=np.int32)
    inputs: tuple[Any, ...] = (parent, assistant, new, [{"type": "function"}], {"enable_thinking": False})
    before = copy.deepcopy(inputs)

    renderer.render([*HELLO, assistant, *new], tools=inputs[3], template_kwargs=inputs[4])
    renderer.extend(parent, assistant, new, tools=inputs[3], template_kwargs=inputs[4])

    np.testing.assert_array_equal(inputs[0], before[0])
    assert inputs[1:] == before[1:]


def test_no_tools_and_an_empty_list_are_the_same() -> None:
    """`tools: []` renders as if there were none, also in templates that tell them apart."""
    renderer = small_renderer("llama3_1", "llama3")

    np.testing.assert_array_equal(renderer.render(HELLO, tools=[]), renderer.render(HELLO))


def test_threads_share_a_renderer(renderer: ChatRenderer) -> None:
    """Prompts that are rendered in four threads at once are those that one thread renders."""
    dialogues = [[{"role": "user", "content": f"question {i} " * (i + 1)}] for i in range(40)]
    parent = np.array([151_645], dtype=np.int32)

    def both(messages: list[dict[str, Any]]) -> list[int]:
        suffix = renderer.extend(parent, {"role": "assistant"}, messages).suffix
        return [*renderer.render(messages).tolist(), *suffix.tolist()]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(both, dialogues)) == [both(messages) for messages in dialogues]


async def test_a_long_text_in_a_thread_does_not_stop_the_loop(renderer: ChatRenderer) -> None:
    """While 200k tokens are rendered in a thread the event loop keeps running."""
    text = "The quick brown fox, 42 times; jumps over é the lazy dog.\n" * 12_000
    work = asyncio.create_task(asyncio.to_thread(renderer.render, [{"role": "user", "content": text}]))
    started = last = time.perf_counter()
    longest = 0.0
    while not work.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now

    assert len(await work) > 200_000
    # An encoder that holds the interpreter lock would make one gap of nearly the whole time.
    assert longest < (last - started) / 2


def test_unknown_families_are_listed() -> None:
    """A wrong family name is answered with the right ones."""
    with pytest.raises(UnknownFamilyError, match=r"'qwen4'; there are: deepseek-v3, .*, qwen3, "):
        get_family("qwen4")
    assert get_family("qwen3") is FAMILIES["qwen3"]


def test_a_family_that_does_not_fit_is_refused() -> None:
    """A tokenizer without the family's boundary token, template or end of sequence is found at the start."""
    tokenizer = Tokenizer(small_hf("qwen3", "qwen3"))
    with pytest.raises(TokenizerError, match=r"turns of family llama3 end with <\|eot_id\|>"):
        ChatRenderer(tokenizer, get_family("llama3"))
    with pytest.raises(TokenizerError, match="no chat template"):
        ChatRenderer(Tokenizer(small_tokenizer()), get_family("qwen3"))
    nameless = small_tokenizer()
    nameless.chat_template, nameless.eos_token = "x", None
    with pytest.raises(TokenizerError, match="end-of-sequence"):
        ChatRenderer(Tokenizer(nameless), get_family("default"))


def test_an_invalid_template_is_refused(with_template: Any) -> None:
    """A syntax error in a template is found at the start, not by the first request."""
    with pytest.raises(TokenizerError, match="not valid"):
        with_template("{% for %}")


def test_the_fingerprint_covers_all_that_renders(qwen3: Tokenizer) -> None:
    """Another tokenizer, family or template argument is another fingerprint; the same ones are the same."""

    def fingerprint(tokenizer: Tokenizer, family: str, **kwargs: object) -> str:
        return ChatRenderer(tokenizer, get_family(family), kwargs).fingerprint

    small = Tokenizer(small_hf("qwen3", "qwen3"))
    prints = [
        fingerprint(qwen3, "qwen3"),
        fingerprint(qwen3, "qwen2.5"),
        fingerprint(qwen3, "qwen3", enable_thinking=False),
        fingerprint(small, "qwen3"),
    ]
    assert len(set(prints)) == 4
    assert fingerprint(qwen3, "qwen3") == prints[0]


@pytest.mark.parametrize(
    ("template", "family", "kwargs", "fingerprint"),
    [
        ("qwen3_training", "qwen3", {}, "3e94a3f73bd72ff5"),
        ("llama3_1", "llama3", {}, "f1d1b653bfce3e6f"),
        ("qwen3", "qwen3", {"enable_thinking": False}, "941cc9ca5c759277"),
    ],
)
def test_a_fingerprint_is_for_ever(
    template: str, family: str, kwargs: dict[str, object], fingerprint: str
) -> None:
    """What all versions could be told gives the fingerprint of all versions: sessions survive an upgrade."""
    assert small_renderer(template, family, **kwargs).fingerprint == fingerprint


def _call(arguments: object) -> dict[str, object]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
