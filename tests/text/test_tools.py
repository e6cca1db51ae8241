"""Tools in the form in which SGLang's chat endpoint gives them to a template.

What is expected here is what its own classes `Tool` and `Function` of these versions write.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.text.models import small_hf
from tokentape_core.text.errors import RenderError
from tokentape_core.text.families import get_family
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.tokenizer import Tokenizer
from tokentape_core.text.tools import TOOLS_FORMS, tools_in_form

PARAMETERS = {"type": "object", "properties": {"q": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": PARAMETERS}


def _tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


@pytest.mark.parametrize(
    ("form", "sent", "given"),
    [
        ("as-sent", _tool(**FUNCTION, extra=1), _tool(**FUNCTION, extra=1)),
        (
            "sglang-0.5.16",
            _tool(**FUNCTION),
            _tool(description="d", name="f", parameters=PARAMETERS, strict=False) | {"defer_loading": None},
        ),
        ("sglang-0.5.23", _tool(**FUNCTION), _tool(**FUNCTION) | {"defer_loading": None}),
        (
            "sglang-0.5.16",
            {"function": {"strict": True, "name": "f", "extra": 1}, "extra": 1},
            _tool(description=None, name="f", parameters=None, strict=True) | {"defer_loading": None},
        ),
        (
            "sglang-0.5.23",
            {"function": {"strict": True, "name": "f", "extra": 1}, "extra": 1},
            _tool(strict=True, name="f", description=None, parameters=None) | {"defer_loading": None},
        ),
        (
            "sglang-0.5.23",
            _tool(strict=None, parameters={}, name="f", description=None),
            _tool(parameters={}, name="f", description=None) | {"defer_loading": None},
        ),
        (
            "sglang-0.5.16",
            {"defer_loading": True, **_tool(name="f")},
            _tool(description=None, name="f", parameters=None, strict=False, defer_loading=True)
            | {"defer_loading": True},
        ),
        (
            "sglang-0.5.23",
            _tool(defer_loading=False, name="f"),
            _tool(defer_loading=False, name="f", description=None, parameters=None) | {"defer_loading": None},
        ),
    ],
)
def test_a_tool_is_written_as_that_version_writes_it(form: str, sent: Any, given: Any) -> None:
    """Keys, nulls and their order are those of SGLang, and what the agent sent is not changed."""
    before = json.dumps(sent)

    found = tools_in_form(form, [sent])

    assert json.dumps(found) == json.dumps([given])
    assert json.dumps(sent) == before


@pytest.mark.parametrize("form", TOOLS_FORMS)
@pytest.mark.parametrize("none", [None, []])
def test_no_tools_are_none(form: str, none: Any) -> None:
    """An empty list is no tools, in every form."""
    assert tools_in_form(form, none) is None


@pytest.mark.parametrize("tool", [{}, {"function": None}, {"function": {}}, {"function": {"name": 7}}, "f"])
def test_a_tool_without_a_function_is_named(tool: Any) -> None:
    """SGLang refuses it, so its form cannot be written."""
    with pytest.raises(RenderError, match=r"tools\[1\] has no function with a name"):
        tools_in_form("sglang-0.5.16", [_tool(name="f"), tool])


def test_every_prompt_has_the_form() -> None:
    """A whole prompt, a suffix and what it is compared with hold the tools as SGLang writes them."""
    tokenizer = Tokenizer(small_hf("qwen3_training", "qwen3"))
    given = [_tool(**FUNCTION)]
    plain = ChatRenderer(tokenizer, get_family("qwen3"))
    renderer = ChatRenderer(tokenizer, get_family("qwen3"), tools_form="sglang-0.5.16")
    expected = tools_in_form("sglang-0.5.16", given)
    messages = [{"role": "user", "content": "x"}]

    np.testing.assert_array_equal(
        renderer.render(messages, tools=given), plain.render(messages, tools=expected)
    )
    assert renderer.segments(messages, tools=given) == plain.segments(messages, tools=expected)
    assert renderer.render_text(messages, tools=given) == plain.render_text(messages, tools=expected)
    assert "strict" in renderer.render_text(messages, tools=given)
