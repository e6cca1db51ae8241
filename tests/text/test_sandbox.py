"""The quicker sandbox judges as transformers' own does."""

from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from tokentape_core.text import sandbox
from tokentape_core.text.tokenizer import Tokenizer, TokenizerError
from tokentape_engine.tokenizer import chat_template, small_tokenizer

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "hello", "items": "mine", "_private": "a key", "__class__": "a key"},
    {"role": "assistant", "content": "world", "tool_calls": [{"function": {"arguments": {"keys": 1}}}]},
]
PLAIN = (
    "{{ messages[0].role }} {{ messages[0]['role'] }} {{ messages[0].content.upper() }}",
    "{{ messages[0].items }} {{ messages[0]['items'] }} {{ messages[0].items() | list }}",
    "{{ messages[0]._private }} {{ messages[0]['_private'] }}",
    "{{ messages[0].absent }} {{ messages[0].absent is defined }} {{ messages[0].get('absent') }}",
    "{{ messages[1].tool_calls[0].function.arguments.keys }} {{ messages.count(1) }}",
    "{% for message in messages %}{{ loop.index0 }}{{ loop.last }}{{ message.role }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for _ in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{{ '{0.upper}'.format(messages[0].content) }} {{ '{a}'.format_map({'a': 1}) }}",
    "{% generation %}{{ messages[1].content.split('o')[-1].strip() }}{% endgeneration %}",
)
FORBIDDEN = (
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages[0].__class__.__mro__ }}",
    "{{ messages[0].__init__.__globals__ }}",
    "{{ messages[0].content.__class__.mro() }}",
    "{{ ''['__class__'].__mro__ }}",
    "{{ (messages | attr('__class__')).__mro__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '{a.__class__.__mro__}'.format_map({'a': messages}) }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ raise_exception.__globals__.keys() }}",
    "{{ messages[0].absent.deeper }}",
    "{{ (messages | map(attribute='__class__') | first).mro() }}",
)


def _outcome(template: str, *, prepared: bool) -> tuple[str, str]:
    # A comment makes it another template: transformers keeps what it has compiled.
    text = template + ("{# quick #}" if prepared else "{# as ever #}")
    if prepared:
        assert sandbox.prepare(text)
    compiled = chat_template_utils._compile_jinja_template(text)
    expected = sandbox._Sandbox if prepared else ImmutableSandboxedEnvironment
    assert type(compiled.environment) is expected
    try:
        return "", compiled.render(messages=MESSAGES)
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("template", PLAIN)
def test_gives_the_same_text(template: str) -> None:
    outcome = _outcome(template, prepared=True)
    assert outcome[0] == ""
    assert outcome == _outcome(template, prepared=False)
    assert outcome == _outcome(template, prepared=True)  # by what it judged before


@pytest.mark.parametrize("template", FORBIDDEN)
def test_refuses_the_same(template: str) -> None:
    before = [dict(message) for message in MESSAGES]
    outcome = _outcome(template, prepared=True)
    assert outcome[0] in {"SecurityError", "UndefinedError"}
    assert outcome == _outcome(template, prepared=False)
    assert outcome == _outcome(template, prepared=True)
    assert before == MESSAGES


def test_keeps_no_more_judgements_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_judgements", {})
    monkeypatch.setattr(sandbox, "_MOST_JUDGEMENTS", 2)
    template = "{{ messages[0].content.upper() ~ messages[0].content.lower() ~ messages[0].content.strip() }}"
    assert _outcome(template, prepared=True) == ("", "HELLOhellohello")
    assert _outcome("{{ messages.append(1) }}", prepared=True)[0] == "SecurityError"
    assert len(sandbox._judgements) == 2


def test_another_version_of_transformers_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where compiled templates cannot be reached, those that write no date are rendered as ever."""
    monkeypatch.delattr(chat_template_utils, "_compile_jinja_template")

    assert not sandbox.prepare("{{ messages }}")
    loaded = small_tokenizer()
    loaded.chat_template = "{{ strftime_now('%Y') }}"
    with pytest.raises(TokenizerError, match="no date but today's"):
        Tokenizer(loaded).apply_template([{"role": "user", "content": "x"}], template_kwargs={})


def test_outside_of_a_session_the_clock_goes_on() -> None:
    """Who renders the same template without us gets today's date, also afterwards."""
    loaded = small_tokenizer()
    loaded.chat_template = "{{ strftime_now('%Y') }}"
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}]

    assert Tokenizer(loaded).apply_template(messages, template_kwargs={}, opened_at=0.0) == "1970"
    assert int(loaded.apply_chat_template(messages, tokenize=False)) >= 2026


def test_every_chat_template_is_rendered_in_it() -> None:
    """With the installed transformers: another version may compile elsewhere, and is then only slower."""
    loaded = small_tokenizer()
    loaded.chat_template = {"default": chat_template("qwen3_training"), "tool_use": "{{ tools | length }}"}
    tokenizer = Tokenizer(loaded)
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        tokenizer.apply_template([{"role": "user", "content": "hello"}], tools=tools, template_kwargs={})
    for template in loaded.chat_template.values():
        assert type(chat_template_utils._compile_jinja_template(template).environment) is sandbox._Sandbox
