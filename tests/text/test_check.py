"""What is told about a template before anything is recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.text.models import small_hf, small_renderer
from tokentape_cli.main import main
from tokentape_core.text.check import BoundaryCheck, Outcome, check_boundaries, is_append_only
from tokentape_core.text.render import ChatRenderer

NOT_OK = ("differs", "refused", "unsupported")


def _found(template: str, family: str, **template_kwargs: object) -> dict[str, BoundaryCheck]:
    checks = check_boundaries(small_renderer(template, family, **template_kwargs))
    return {check.name: check for check in checks}


@pytest.mark.parametrize(
    ("template", "family", "template_kwargs"),
    [
        ("qwen2_5", "qwen2.5", {}),
        ("qwen3_training", "qwen3", {}),
        ("qwen3_instruct_2507", "qwen3", {}),
        ("qwen3_8", "qwen3.5", {}),
        ("qwen3_6", "qwen3.5", {"preserve_thinking": True}),
        ("llama3_1", "llama3", {}),
    ],
)
def test_append_only_templates(template: str, family: str, template_kwargs: dict[str, Any]) -> None:
    """A template is append-only if no boundary that it takes at all differs or is refused."""
    assert is_append_only(check_boundaries(small_renderer(template, family, **template_kwargs)))


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("qwen3", "qwen3"),
        ("qwen3_5_think", "qwen3.5"),
        ("qwen3_thinking", "qwen3-thinking"),
        ("glm4moe", "glm4"),
        ("nemotron_3_nano", "nemotron3"),
        ("gptoss", "gpt-oss"),
    ],
)
def test_templates_that_append_only_across_tool_turns(template: str, family: str) -> None:
    """Reasoning is kept after a tool turn and dropped at a new user message."""
    found = _found(template, family)

    assert found["tool result, after reasoning"].outcome is Outcome.OK
    assert found["second tool result"].outcome is Outcome.OK
    dropped = found["new user message, after reasoning"]
    assert dropped.outcome is Outcome.DIFFERS
    assert dropped.position is not None
    assert dropped.template != dropped.recorded
    assert not is_append_only(list(found.values()))


def test_the_first_difference_is_shown() -> None:
    """A boundary that differs tells where, and both texts from there on."""
    check = _found("qwen3", "qwen3")["new user message, after reasoning"]

    assert check.position == 18
    assert check.template.startswith("There are two.<|im_end|>")
    assert check.recorded.startswith("<think>\nLet me see.")


def test_the_first_difference_is_one_of_text(with_template: Callable[..., ChatRenderer]) -> None:
    """Other tokens for the same text come first, and are not what is shown."""
    renderer = with_template(
        # The sampled newline is a token of its own here, and one with the prompt's in the whole.
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'Answer:\n\n' }}{% endif %}{{ m.content }}"
        "{% if m.role == 'assistant' and not loop.last %}{{ ' Changed.' }}{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Answer:\n' }}{% endif %}"
    )

    check = check_boundaries(renderer)[0]

    assert check.outcome is Outcome.DIFFERS
    assert check.template.startswith(" Changed.<|im_end|>And dogs?")
    assert check.recorded.startswith("<|im_end|>And dogs?")


def test_what_cannot_be_appended_is_told_apart_from_what_cannot_be_rendered() -> None:
    """gpt-oss writes one of two calls, which is refused; Llama 3.1 does not take two calls at all."""
    name = "results of parallel tool calls"

    assert _found("gptoss", "gpt-oss")[name].outcome is Outcome.REFUSED
    assert _found("llama3_1", "llama3")[name].outcome is Outcome.UNSUPPORTED
    assert "single tool-calls" in _found("llama3_1", "llama3")[name].reason


@pytest.mark.parametrize("template", ["deepseekv3", "deepseekv3_plain"])
def test_deepseek_tool_outputs_are_refused(template: str) -> None:
    """DeepSeek-V3 opens its block of tool outputs once per conversation, so no tool result is appended."""
    found = _found(template, "deepseek-v3")

    refused = [name for name, check in found.items() if check.outcome is Outcome.REFUSED]
    assert refused == [name for name in found if "tool" in name and "declared" not in name]
    assert "depends on the turns before" in found["second tool result"].reason
    user = found["new user message, after reasoning"].outcome
    assert user is (Outcome.OK if template == "deepseekv3_plain" else Outcome.DIFFERS)


def test_a_role_that_the_family_does_not_append_is_no_fault() -> None:
    """System messages that are not appended do not keep a template from being append-only."""
    found = _found("qwen3_8", "qwen3.5")

    assert found["system message after a turn"].outcome is Outcome.UNSUPPORTED
    assert is_append_only(list(found.values()))


def test_a_template_without_tools_is_not_append_only() -> None:
    """Llama 3 writes no tool calls: every boundary that follows one is refused."""
    found = _found("llama3", "llama3")

    refused = {name for name, check in found.items() if check.outcome is Outcome.REFUSED}
    assert refused == {name for name in found if "tool" in name and "declared" not in name}
    assert not is_append_only(list(found.values()))


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Makes the arguments for a saved tokenizer and one of the templates; torch stays importable."""
    monkeypatch.setattr("tokentape_core.text.without_torch.without_torch", lambda: None)

    def make(template: str) -> list[str]:
        small_hf("qwen3_training", "qwen3").save_pretrained(str(tmp_path))
        file = tmp_path / "given.jinja"
        file.write_text(small_hf(template, "qwen3").chat_template)
        return ["family", "check", "--tokenizer", str(tmp_path), "--chat-template", str(file)]

    return make


@pytest.mark.parametrize(
    ("template", "code", "verdict", "first"),
    [
        ("qwen3_training", 0, "append-only: every turn is recorded exactly", "ok"),
        ("qwen3", 1, "not append-only, but usable", "differs"),
        ("lfm2", 1, "not append-only, but usable", "ok"),
        ("gemma", 1, "not append-only: no turn can be continued", "refused"),
    ],
)
def test_the_command_prints_a_line_for_each_boundary(
    directory: Callable[[str], list[str]],
    capsys: pytest.CaptureFixture[str],
    template: str,
    code: int,
    verdict: str,
    first: str,
) -> None:
    """The exit code is 0 for an append-only template and 1 for another, and the verdict says which."""
    assert main([*directory(template), "--family", "qwen3"]) == code

    heading, lines, last = capsys.readouterr().out.split("\n\n")
    assert heading.startswith("family qwen3: ")
    assert len(lines.splitlines()) == len(check_boundaries(small_renderer()))
    assert lines.split()[0] == first
    assert last.startswith(verdict)
    for outcome in NOT_OK:
        assert (f"\n  {outcome}: " in last) == (f"\n{outcome}" in f"\n{lines}" and code == 1)


def test_wrong_usage_of_the_command(
    directory: Callable[[str], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing option, an unknown family and a tokenizer that does not fit give 2 and one sentence."""
    arguments = directory("qwen3")
    for wrong in (["family", "check"], [*arguments, "--family", "x"], [*arguments, "--family", "glm4"]):
        assert main(wrong) == 2
        assert capsys.readouterr().err.startswith("tokentape family check: ")
