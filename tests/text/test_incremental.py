"""Turn by turn, a renderer gives the ids that it gives for the whole conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.text.models import small_hf, small_renderer
from tokentape_core.text.errors import NotAppendable, RenderError
from tokentape_core.text.families import FAMILIES
from tokentape_core.text.messages import template_messages
from tokentape_core.text.render import ChatRenderer, Prompt

Ids = npt.NDArray[np.int32]
Message = dict[str, Any]

TOOLS = [{"type": "function", "function": {"name": "search", "description": "Finds.", "parameters": {}}}]


@dataclass(frozen=True)
class Proof:
    """A real template of a family, and the dialogues in which it only ever appends."""

    family: str
    template: str
    tools: bool = True
    parallel_calls: bool = True
    reasoning: bool = False
    user_turns: bool = True
    kwargs: tuple[tuple[str, object], ...] = ()

    @property
    def renderer(self) -> ChatRenderer:
        return small_renderer(self.template, self.family, **dict(self.kwargs))

    def __str__(self) -> str:
        return f"{self.family}-{self.template}"


PROOFS = (
    Proof("default", "qwen3_training", reasoning=True),
    Proof("qwen2.5", "qwen2_5"),
    Proof("qwen3", "qwen3_training"),
    Proof("qwen3", "qwen3_training", reasoning=True),
    Proof("qwen3", "qwen3_instruct_2507"),
    Proof("qwen3", "qwen3", reasoning=True, user_turns=False),
    Proof("qwen3.5", "qwen3_5_think", reasoning=True, user_turns=False),
    Proof("qwen3.5", "qwen3_6_training", reasoning=True),
    Proof("qwen3.5", "qwen3_8", reasoning=True),
    Proof("llama3", "llama3", tools=False),
    Proof("llama3", "llama3_1", parallel_calls=False),
    Proof("llama3", "llama3_2", parallel_calls=False),
    Proof("glm4", "glm4moe"),
    Proof("glm4", "glm4moe", reasoning=True, user_turns=False),
    Proof("glm4", "glm4moe_training"),
    Proof("qwen3-thinking", "qwen3_thinking", reasoning=True, user_turns=False),
    Proof("qwen3.5", "qwen3_6", reasoning=True, kwargs=(("preserve_thinking", True),)),
    Proof("deepseek-v3", "deepseekv3_plain", tools=False),
    Proof("nemotron3", "nemotron_3_nano", reasoning=True, user_turns=False),
    Proof("nemotron3", "nemotron_3_nano", reasoning=True, kwargs=(("truncate_history_thinking", False),)),
    Proof("nemotron3", "nemotron_3_super", kwargs=(("enable_thinking", False),)),
    Proof("nemotron3", "nemotron_3_ultra", reasoning=True, user_turns=False),
    Proof("nemotron3", "nemotron_3_5_lightning", reasoning=True, user_turns=False),
    Proof("gpt-oss", "gptoss", reasoning=True, parallel_calls=False, user_turns=False),
    Proof("gpt-oss", "gptoss", parallel_calls=False),
)
STAND_IN_PROOFS = (
    Proof("minimax-m2", "minimax_like", reasoning=True),
    Proof("kimi-k2", "kimi_like"),
    Proof("deepseek-v4", "deepseekv3_training_plain", tools=False),
)


def test_every_family_is_proven() -> None:
    """Every row has a real template, or says that it has none and stands a stand-in."""
    assert {proof.family for proof in PROOFS} == {name for name, row in FAMILIES.items() if row.proven}
    assert {proof.family for proof in STAND_IN_PROOFS} == {
        name for name, row in FAMILIES.items() if not row.proven
    }


@pytest.mark.parametrize("proof", [*PROOFS, *STAND_IN_PROOFS], ids=str)
def test_turn_by_turn_equals_the_whole(proof: Proof) -> None:
    """Each prompt that is built from its parent's tokens has the ids of rendering all messages at once."""
    renderer = proof.renderer
    dialogue = _dialogue(proof)
    tools = TOOLS if proof.tools else None
    turns = [i for i, message in enumerate(dialogue) if message["role"] == "assistant"]
    tokens = renderer.render(dialogue[: turns[0]], tools=tools)

    for turn, following in zip(turns, [*turns[1:], len(dialogue)], strict=True):
        tokens = np.concatenate([tokens, _sample(proof, dialogue[: turn + 1], tools)])
        prompt = renderer.extend(tokens, dialogue[turn], dialogue[turn + 1 : following], tools=tools)
        assert len(tokens) - prompt.keep <= renderer.max_trim_tokens
        tokens = _joined(tokens, prompt)
        np.testing.assert_array_equal(tokens, renderer.render(dialogue[:following], tools=tools))


@pytest.mark.parametrize(
    "family", sorted(name for name in FAMILIES if "system" in FAMILIES[name].append_roles)
)
def test_every_append_role_is_appended(family: str) -> None:
    """A message of each allowed role comes out as in a rendering of the whole."""
    proof = next(proof for proof in [*PROOFS, *STAND_IN_PROOFS] if proof.family == family)
    renderer = proof.renderer
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    for role in renderer.append_roles:
        tokens = _turn(renderer, "yes")
        new = [{"role": role, "content": "42", "tool_call_id": "c"}]
        prompt = renderer.extend(tokens, history[1], new)
        # Some templates write the turn before otherwise than it was sampled: only what follows it must agree.
        whole = renderer.render([*history, *new])
        assert prompt.keep == len(tokens)
        np.testing.assert_array_equal(prompt.suffix, whole[-len(prompt.suffix) :])


def test_an_exact_resend_adds_only_the_boundary(renderer: ChatRenderer) -> None:
    """Without new messages the suffix is the newline after the end token and the generation prompt."""
    parent = _turn(renderer, "Hello<|im_end|>")

    prompt = renderer.extend(parent, {"role": "assistant", "content": "Hello"}, [])

    assert prompt.keep == len(parent)
    assert _text(renderer, prompt.suffix) == "\n<|im_start|>assistant\n"


@pytest.mark.parametrize("ending", ["", "<|endoftext|>"], ids=["cut at its length", "another stop token"])
def test_a_turn_without_end_token_is_closed_by_the_suffix(renderer: ChatRenderer, ending: str) -> None:
    """All tokens of such a turn stay, and the suffix begins with the end token that the template writes."""
    parent = _turn(renderer, f"Hello{ending}")

    prompt = renderer.extend(parent, {"role": "assistant", "content": "Hello"}, [_user("go on")])

    assert prompt.keep == len(parent)
    assert _text(renderer, prompt.suffix) == (
        "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("ending", "trimmed"), [("<|user|>", 1), ("<|observation|>", 1), ("", 0), ("<|endoftext|>", 0)]
)
def test_glm_drops_the_sampled_opener(ending: str, trimmed: int) -> None:
    """The opener that GLM stops at is replaced by the one of the message that really follows."""
    renderer = small_renderer("glm4moe", "glm4")
    parent = _turn(renderer, f"\n<think></think>\nHello{ending}")

    prompt = renderer.extend(parent, {"role": "assistant", "content": "Hello"}, [_user("go on")])

    assert len(parent) - prompt.keep == trimmed <= renderer.max_trim_tokens
    assert _text(renderer, prompt.suffix) == "<|user|>\ngo on<|assistant|>"


def test_harmony_replaces_the_return_token() -> None:
    """The end of an answer becomes the end of a message; the end of a tool call stays."""
    renderer = small_renderer("gptoss", "gpt-oss")
    answered = _turn(renderer, "<|channel|>final<|message|>Hello<|return|>")
    called = _turn(renderer, " to=functions.f<|channel|>commentary json<|message|>{}<|call|>")
    caller = {"role": "assistant", "tool_calls": [_call(1)]}

    after_answer = renderer.extend(answered, {"role": "assistant", "content": "Hello"}, [_user("go on")])
    after_call = renderer.extend(called, caller, [{"role": "tool", "content": "42"}])

    assert len(answered) - after_answer.keep == 1 == renderer.max_trim_tokens
    assert _text(renderer, after_answer.suffix) == (
        "<|end|><|start|>user<|message|>go on<|end|><|start|>assistant"
    )
    assert after_call.keep == len(called)
    assert _text(renderer, after_call.suffix) == (
        '<|start|>functions.search to=assistant<|channel|>commentary<|message|>"42"<|end|><|start|>assistant'
    )


def test_harmony_refuses_parallel_calls() -> None:
    """The template writes the first call only, so a turn with two cannot be continued."""
    renderer = small_renderer("gptoss", "gpt-oss")
    caller = {"role": "assistant", "tool_calls": [_call(1), _call(2)]}
    with pytest.raises(NotAppendable, match="exactly once"):
        renderer.extend(_turn(renderer, "x<|call|>"), caller, [{"role": "tool", "content": "42"}])


@pytest.mark.parametrize(
    ("template", "family"),
    [("counting", "qwen3"), ("deepseekv3", "deepseek-v3")],
    ids=["counter", "opened once"],
)
def test_text_that_depends_on_earlier_turns_is_never_guessed(template: str, family: str) -> None:
    """Where the template writes tool results by what came before, they are refused; users are not."""
    renderer = small_renderer(template, family)
    caller = {"role": "assistant", "tool_calls": [_call(1)]}

    with pytest.raises(NotAppendable, match=r"'tool' cannot follow .* depends on the turns before"):
        renderer.extend(_turn(renderer, "x"), caller, [{"role": "tool", "content": "42"}])

    assert "go on" in _text(renderer, renderer.extend(_turn(renderer, "x"), caller, [_user("go on")]).suffix)


def test_llama_accepts_the_end_of_a_built_in_call() -> None:
    """<|eom_id|> ends a turn as <|eot_id|> does, and stays."""
    renderer = small_renderer("llama3_1", "llama3")
    parent = _turn(renderer, "<|python_tag|>1+1<|eom_id|>")

    prompt = renderer.extend(
        parent, {"role": "assistant", "content": "1+1"}, [{"role": "ipython", "content": "2"}]
    )

    assert prompt.keep == len(parent)
    assert _text(renderer, prompt.suffix).startswith("<|start_header_id|>ipython")


def test_the_history_has_no_influence(renderer: ChatRenderer) -> None:
    """The suffix is the same after three tokens as after half a million."""
    short = np.array([1, 2, 151_645], dtype=np.int32)
    long = np.concatenate([np.zeros(500_000, dtype=np.int32), short])
    assistant = {"role": "assistant", "content": "anything"}

    after_short = renderer.extend(short, assistant, [_user("more")])
    after_long = renderer.extend(long, assistant, [_user("more")])

    np.testing.assert_array_equal(after_short.suffix, after_long.suffix)
    assert after_long.keep == len(long)


def test_broken_arguments_of_the_recorded_turn_do_not_matter(renderer: ChatRenderer) -> None:
    """A conversation goes on after the model sampled a call whose arguments are not JSON."""
    broken = {
        "role": "assistant",
        "content": None,
        "tool_calls": [_call(1) | {"function": _function('{"q": <|im_end|>')}],
    }
    result = {"role": "tool", "tool_call_id": "call_1", "content": "no such tool"}

    prompt = renderer.extend(_turn(renderer, "x<|im_end|>"), broken, [result])

    assert _text(renderer, prompt.suffix) == (
        "\n<|im_start|>user\n<tool_response>\nno such tool\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_role_that_cannot_be_appended_is_named(renderer: ChatRenderer) -> None:
    """The refusal tells the role and the roles that would do."""
    with pytest.raises(
        NotAppendable, match=r"'critic' cannot follow .* qwen3; allowed: assistant, system, tool, user"
    ):
        renderer.extend(_turn(renderer, "x"), {"role": "assistant"}, [{"role": "critic", "content": "I"}])
    with pytest.raises(
        NotAppendable, match=r"'system' cannot follow .* qwen3.5; allowed: assistant, tool, user"
    ):
        small_renderer("qwen3_8", "qwen3.5").extend(
            np.array([1]), {"role": "assistant"}, [{"role": "system", "content": "I"}]
        )


@pytest.mark.parametrize("role", [None, ["user"], 7])
def test_a_role_that_is_no_text_is_refused(renderer: ChatRenderer, role: object) -> None:
    """Any JSON value may stand where a role should; it is refused like an unknown one."""
    with pytest.raises(NotAppendable, match="cannot follow"):
        renderer.extend(np.array([1]), {"role": "assistant"}, [{"role": role, "content": "x"}])


def test_a_message_may_contain_the_sentinel(renderer: ChatRenderer) -> None:
    """The dummy text is chosen so that no message contains it; if all are taken the renderer says so."""
    text = "tokentape-sentinel-0 tokentape-sentinel-1"
    prompt = renderer.extend(_turn(renderer, "x<|im_end|>"), {"role": "assistant"}, [_user(text)])
    assert text in _text(renderer, prompt.suffix)

    every = " ".join(f"tokentape-sentinel-{i}" for i in range(8))
    with pytest.raises(NotAppendable, match="exactly once"):
        renderer.extend(_turn(renderer, "x<|im_end|>"), {"role": "assistant"}, [_user(every)])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "exactly once"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}<|im_end|>{% endfor %}", "exactly once"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            r"does not end an assistant's turn with <\|im_end\|>",
        ),
        ("{{ raise_exception('no system') }}", "no system"),
    ],
    ids=["assistant dropped", "assistant twice", "no end token", "refuses the dummies"],
)
def test_a_template_that_cannot_be_cut_is_never_guessed(
    with_template: Any, template: str, reason: str
) -> None:
    """A renderer over such a template starts, and every extension is refused with the reason."""
    with pytest.raises(NotAppendable, match=reason):
        with_template(template).extend(np.array([1]), {"role": "assistant"}, [_user("x")])


def test_a_recorded_call_without_function_is_an_error(renderer: ChatRenderer) -> None:
    """A tool call that is not one is not skipped."""
    with pytest.raises(RenderError, match="has no function"):
        renderer.extend(np.array([1]), {"role": "assistant", "tool_calls": [{"id": "x"}]}, [])


def _dialogue(proof: Proof) -> list[Message]:
    calls = (1, 2) if proof.parallel_calls else (1,)
    text = "" if proof.family == "gpt-oss" else "Looking."
    steps = [_step(proof, calls, text), _step(proof, calls, "")] if proof.tools else []
    opening = [{"role": "system", "content": "Help."}, _user("Find  it.\n")]
    closing = [
        _answer(proof, "Found."),
        _user("More\n\n"),
        _answer(proof, "That is all."),
        _user("So"),
        _user("end"),
    ]
    return [
        *opening,
        *(message for step in steps for message in step),
        *(closing if proof.user_turns else []),
    ]


def _step(proof: Proof, calls: Sequence[int], content: str) -> list[Message]:
    assistant = _answer(proof, content) | {"tool_calls": [_call(i) for i in calls]}
    return [
        assistant,
        *({"role": "tool", "tool_call_id": f"call_{i}", "content": f"{i} hit\n"} for i in calls),
    ]


def _answer(proof: Proof, content: str) -> Message:
    message = {"role": "assistant", "content": content}
    return message | {"reasoning_content": "Let me see."} if proof.reasoning else message


def _call(i: int) -> Message:
    return {"id": f"call_{i}", "type": "function", "function": _function({"q": f"x{i}", "n": i})}


def _function(arguments: object) -> Message:
    return {"name": "search", "arguments": arguments}


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _sample(proof: Proof, messages: list[Message], tools: Any) -> Ids:
    """What a model that follows the template would sample as the last message, its stop token included."""
    hf = small_hf(proof.template, proof.family)
    kwargs = dict(proof.kwargs)
    # The template's own form, as the renderer passes it on: an object, or text for one family.
    messages = template_messages(messages, arguments=FAMILIES[proof.family].arguments)
    before = hf.apply_chat_template(
        messages[:-1], tools=tools, tokenize=False, add_generation_prompt=True, **kwargs
    )
    after = hf.apply_chat_template(messages, tools=tools, tokenize=False, **kwargs)
    assert after.startswith(before)
    text = after[len(before) :]
    if proof.family == "glm4":
        stop = "<|observation|>" if messages[-1].get("tool_calls") else "<|user|>"
        return np.array(hf.encode(text.split(stop)[0] + stop, add_special_tokens=False), dtype=np.int32)
    ends = FAMILIES[proof.family].end_tokens or ("<|im_end|>",)
    end = max(text.rfind(token) + len(token) for token in ends if token in text)
    return np.array(hf.encode(text[:end], add_special_tokens=False), dtype=np.int32)


def _turn(renderer: ChatRenderer, output: str) -> Ids:
    prompt = renderer.render([_user("hi")])
    return np.concatenate([prompt, np.array(renderer.tokenizer.encode(output), dtype=np.int32)])


def _joined(parent: Ids, prompt: Prompt) -> Ids:
    return np.concatenate([parent[: prompt.keep], prompt.suffix])


def _text(renderer: ChatRenderer, ids: Ids) -> str:
    return renderer.tokenizer.decode(ids)
