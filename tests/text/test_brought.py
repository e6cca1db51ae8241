"""Assistants' messages that a client brings after a recorded turn: prompt text, and never guessed.

A client writes one where it answers in the model's place: a canned reply, an example, a corrected answer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.text.models import small_renderer
from tests.text.test_incremental import PROOFS, STAND_IN_PROOFS, TOOLS, Message, Proof
from tokentape_core.text.check import Outcome, check_boundaries
from tokentape_core.text.errors import NotAppendable


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str, **more: object) -> Message:
    return {"role": "assistant", "content": content, **more}


def _calling(i: int) -> Message:
    function = {"name": "search", "arguments": {"q": f"x{i}"}}
    return _assistant("", tool_calls=[{"id": f"call_{i}", "type": "function", "function": function}])


def _result(i: int) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{i}", "content": f"{i} hit"}


OPENING = [{"role": "system", "content": "Help."}, _user("Find it.")]
HISTORIES = {
    "first turn": OPENING,
    "after a call": [*OPENING, _calling(1), _result(1)],
    "after much": [
        *OPENING,
        _calling(1),
        _result(1),
        _assistant("Found.", reasoning_content="So."),
        _user("More."),
        _assistant("Yes."),
        _user("Again."),
    ],
}
ANSWER, CALL = _assistant("Yes."), _calling(2)
MINE = _assistant("Mine.", reasoning_content="I thought.")
FOLLOWING: dict[str, tuple[Message, list[Message]]] = {
    "alone": (ANSWER, [_assistant("Mine.")]),
    "reasoned": (ANSWER, [MINE]),
    "before a user": (ANSWER, [MINE, _user("So?")]),
    "after a user": (ANSWER, [_user("Hm."), MINE]),
    "between users": (ANSWER, [_user("Hm."), MINE, _user("So?")]),
    "two": (ANSWER, [_assistant("Mine."), _assistant("Too."), _user("So?")]),
    "calling": (ANSWER, [_calling(3)]),
    "calling and told": (ANSWER, [_user("Hm."), _calling(3), _result(3)]),
    "example": (ANSWER, [_user("Hm."), _calling(3), _result(3), MINE, _user("So?")]),
    "after a result": (CALL, [_result(2), _assistant("Mine.")]),
    "after a result, before a user": (CALL, [_result(2), MINE, _user("So?")]),
    "calling after a result": (CALL, [_result(2), _calling(3), _result(3)]),
    "instead of a result": (CALL, [_assistant("Mine."), _user("So?")]),
}
REFUSED = {
    # Writes an assistant's first call of a conversation otherwise than the next ones.
    "deepseekv3_plain": {name for name in FOLLOWING if "call" in name or "result" in name} | {"example"},
    # Writes no calls: what follows one cannot be found.
    "llama3": {name for name in FOLLOWING if "result" in name},
}
REFUSED["deepseekv3_plain"] -= {"instead of a result"}
REFUSED["deepseekv3_training_plain"] = REFUSED["deepseekv3_plain"]


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("proof", [*PROOFS, *STAND_IN_PROOFS], ids=str)
def test_is_written_as_in_a_rendering_of_the_whole(proof: Proof, history: str) -> None:
    """The prompt goes on as the template writes the whole conversation, or the message is refused."""
    renderer = proof.renderer
    refused = set()
    for name, (turn, new) in FOLLOWING.items():
        whole = renderer.render([*HISTORIES[history], turn, *new], tools=TOOLS)
        try:
            prompt = renderer.extend(np.array([1]), turn, new, tools=TOOLS)
        except NotAppendable:
            refused.add(name)
            continue
        text = renderer.tokenizer.decode(prompt.suffix)
        np.testing.assert_array_equal(prompt.suffix, whole[-len(prompt.suffix) :], err_msg=f"{name}: {text}")
        assert all(message["content"] in text for message in new)

    assert refused == REFUSED.get(proof.template, set())


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "{% for m in messages %}{{ m.role + ' ' ~ (loop.index0 if m.role == 'assistant') ~ m.content }}"
            "<|im_end|>{% endfor %}",
            "'assistant' cannot follow a recorded turn: .* depends on the turns before",
        ),
        (
            "{% for m in messages %}{% if m.role == 'assistant' and loop.previtem.role == 'assistant' %}"
            "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}<|im_end|>{% endfor %}",
            "cannot be written here: .* roles must alternate",
        ),
    ],
    ids=["numbered", "alternating"],
)
def test_what_cannot_be_written_is_never_guessed(with_template: Any, source: str, reason: str) -> None:
    """A template that numbers its answers, or takes no second one in a row, refuses; users still follow."""
    renderer = with_template(source)

    with pytest.raises(NotAppendable, match=reason):
        renderer.extend(np.array([1]), ANSWER, [_assistant("Mine.")])

    assert "So?" in renderer.tokenizer.decode(renderer.extend(np.array([1]), ANSWER, [_user("So?")]).suffix)


def test_the_check_of_a_family_tells_of_it() -> None:
    """One of the boundaries is such a message; a template that refuses two in a row does not take it."""

    def outcome(template: str, family: str) -> Outcome:
        checks = check_boundaries(small_renderer(template, family))
        return next(check.outcome for check in checks if check.name == "answer of the client after a turn")

    assert outcome("qwen3_training", "qwen3") is Outcome.OK
    assert outcome("gemma", "qwen3") is Outcome.UNSUPPORTED
