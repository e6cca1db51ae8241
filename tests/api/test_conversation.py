"""What ordinary programs send, turn after turn: what of it reaches the prompt, the engine and the record."""

from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.api.conftest import OpenSession
from tests.support.application import SETTINGS
from tests.support.scripted import ScriptedEngine
from tokentape_api.settings import ApiSettings
from tokentape_core.text.render import ChatRenderer

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hello"}
AGAIN = {"role": "user", "content": "And now?"}
TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object", "properties": {}}}}
OTHER = {"type": "function", "function": {"name": "cat", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def settings(request: pytest.FixtureRequest) -> ApiSettings:
    """The parameter, if there is one, has what differs from the usual ones."""
    return replace(SETTINGS, **getattr(request, "param", {}))


async def opened(api: httpx.AsyncClient, **fields: Any) -> OpenSession:
    reply = await api.post("/sessions", json=fields)
    assert reply.status_code == 200, reply.text
    return OpenSession(api, f"/sessions/{reply.json()['session_id']}")


async def answer(session: OpenSession, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    reply = await session.chat(*messages, **fields)
    assert reply.status_code == 200, reply.text
    message: dict[str, Any] = reply.json()["choices"][0]["message"]
    return message


async def turns(session: OpenSession) -> list[dict[str, Any]]:
    events = (await session.api.get(session.url, params={"view": "events"})).json()["events"]
    return list(events[1:])


def refused(reply: httpx.Response) -> tuple[int, str, str | None]:
    return reply.status_code, reply.json()["error"]["code"], reply.headers.get("x-should-retry")


async def test_an_altered_answer_is_refused(session: OpenSession, engine: ScriptedEngine) -> None:
    """400 names message, key and both values; the engine is not asked, and the session goes on as before."""
    first = await answer(session, USER)
    reply = await session.chat(USER, {**first, "content": "something else"}, AGAIN)
    assert refused(reply) == (400, "answer_altered", "false")
    message = reply.json()["error"]["message"]
    assert 'message 1 is not what turn 1 answered: content was "fine" and is "something else"' in message
    assert len(engine.bodies) == 1
    await answer(session, USER, first, AGAIN)
    assert [turn["parent"] for turn in await turns(session)] == [0, 1]


@pytest.mark.parametrize(
    "settings", [{}, {"altered_answer": "keep"}], indirect=True, ids=["asked", "default"]
)
async def test_an_altered_answer_is_kept_as_recorded(
    api: httpx.AsyncClient, engine: ScriptedEngine, settings: ApiSettings
) -> None:
    """Per session, or as the server's default: the prompt holds what was sampled, and the turn says so."""
    session = await opened(api, **({} if settings.altered_answer == "keep" else {"altered_answer": "keep"}))
    first = await answer(session, USER)
    await answer(session, USER, {**first, "content": "something else"}, AGAIN)
    recorded = await turns(session)
    whole = [*recorded[0]["suffix"], *recorded[0]["output"]]
    assert engine.bodies[1]["input_ids"][: len(whole)] == whole
    assert [(turn["parent"], turn["altered"]) for turn in recorded] == [(0, []), (1, [1])]


@pytest.mark.parametrize("settings", [{}, {"mode": "tree"}], indirect=True, ids=["asked", "default"])
async def test_a_tree_keeps_no_altered_answer(api: httpx.AsyncClient, settings: ApiSettings) -> None:
    """It begins a new root with one: who asks for both is told."""
    reply = await api.post("/sessions", json={"mode": "tree", "altered_answer": "keep"})
    assert refused(reply) == (400, "invalid_request", "false")
    if settings.mode == "tree":
        assert (await api.post("/sessions", json={"altered_answer": "keep"})).status_code == 400
        assert (await api.post("/sessions", json={"mode": "linear", "altered_answer": "keep"})).is_success


async def test_tools_are_kept(session: OpenSession, engine: ScriptedEngine) -> None:
    """Left out, emptied or in another order they stay in prompt and request; emptied, none may be called."""
    first = await answer(session, USER, tools=[TOOL, OTHER])
    said = [USER, first, AGAIN]
    for fields in ({}, {"tools": []}, {"tools": [OTHER, TOOL]}):
        await answer(session, *said, **fields)
    assert [body["tools"] for body in engine.bodies] == [[TOOL, OTHER]] * 4
    assert [body.get("tool_choice") for body in engine.bodies] == [None, None, "none", None]
    assert [turn["tools"] for turn in await turns(session)] == [[TOOL, OTHER], None, None, None]
    assert len({str(body["input_ids"]) for body in engine.bodies[1:]}) == 1


async def test_another_head_is_refused(session: OpenSession, engine: ScriptedEngine) -> None:
    """Another tool, or another template argument, is 400 and named; the engine is not asked."""
    first = await answer(session, USER, tools=[TOOL], chat_template_kwargs={"enable_thinking": True})
    for fields, named in (
        ({"tools": [TOOL, OTHER]}, "tool 'cat' is new"),
        ({"tools": [TOOL], "enable_thinking": False}, "'enable_thinking' was true and is false"),
        ({"reasoning_effort": "low"}, "'reasoning_effort' is new: \"low\""),
    ):
        reply = await session.chat(USER, first, AGAIN, **fields)
        assert refused(reply) == (400, "head_changed", "false")
        assert named in reply.json()["error"]["message"]
    assert len(engine.bodies) == 1


async def test_template_arguments_are_kept(session: OpenSession, engine: ScriptedEngine) -> None:
    """A request that leaves them out goes on with those that its conversation began with."""
    first = await answer(session, USER, chat_template_kwargs={"enable_thinking": False})
    await answer(session, USER, first, AGAIN)
    assert [body["chat_template_kwargs"] for body in engine.bodies] == [{"enable_thinking": False}] * 2


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        (
            {"reasoning_effort": "none"},
            {"reasoning_effort": "none", "enable_thinking": False, "thinking": False},
        ),
        (
            {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
        ),
        ({"reasoning_effort": None, "enable_thinking": None}, None),
    ],
)
async def test_what_the_engine_is_told_of_reasoning_reaches_the_template(
    session: OpenSession,
    engine: ScriptedEngine,
    renderer: ChatRenderer,
    fields: dict[str, Any],
    arguments: dict[str, Any] | None,
) -> None:
    """Top-level fields are template arguments too, so that the prompt and the engine's parser agree."""
    await answer(session, USER, **fields)
    assert engine.bodies[0].get("chat_template_kwargs") == arguments
    assert engine.bodies[0]["input_ids"] == renderer.render([USER], template_kwargs=arguments).tolist()
    forwarded = {name: value for name, value in fields.items() if value is not None}
    assert (
        engine.bodies[0].items()
        >= {**forwarded, **({"chat_template_kwargs": arguments} if arguments else {})}.items()
    )


async def test_null_fields_are_not_forwarded(session: OpenSession, engine: ScriptedEngine) -> None:
    """To an engine null may mean something else than nothing: `top_logprobs: null` switches log-probs off."""
    await answer(session, USER, top_logprobs=None, stop=None, temperature=0.5, user=None, n=None)
    assert {"top_logprobs", "stop", "user", "n"} & engine.bodies[0].keys() == set()
    assert engine.bodies[0]["temperature"] == 0.5


async def test_continue_final_message_is_refused(session: OpenSession, engine: ScriptedEngine) -> None:
    """The tokens of such an answer would be half the client's; false is what everybody means."""
    reply = await session.chat(USER, continue_final_message=True)
    assert refused(reply) == (400, "invalid_request", "false")
    assert "continue_final_message" in reply.json()["error"]["message"]
    assert engine.bodies == []
    await answer(session, USER, continue_final_message=False)
    assert "continue_final_message" not in engine.bodies[0]


async def test_other_names_of_roles(
    session: OpenSession, engine: ScriptedEngine, renderer: ChatRenderer
) -> None:
    """`developer` is a system message and `function` a tool's, also where they come again."""
    developer = {"role": "developer", "content": "Be brief."}
    first = await answer(session, developer, USER)
    assert engine.bodies[0]["input_ids"] == renderer.render([SYSTEM, USER]).tolist()
    await answer(session, SYSTEM, USER, first, {"role": "function", "name": "ls", "content": "a b"})
    prompt = renderer.tokenizer.decode(engine.bodies[1]["input_ids"])
    assert prompt.endswith(
        "<|im_start|>user\n<tool_response>\na b\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert [turn["parent"] for turn in await turns(session)] == [0, 1]


async def test_what_the_client_says_for_the_assistant_is_prompt(
    session: OpenSession, engine: ScriptedEngine, renderer: ChatRenderer
) -> None:
    """An assistant message behind a recorded turn is appended as text that nothing is trained on."""
    first = await answer(session, USER)
    said = [AGAIN, {"role": "assistant", "content": "No response requested."}, USER]
    await answer(session, USER, first, *said)
    recorded = await turns(session)
    whole = [*recorded[0]["suffix"], *recorded[0]["output"]]
    assert engine.bodies[1]["input_ids"][: len(whole)] == whole
    assert "No response requested." in renderer.tokenizer.decode(recorded[1]["suffix"])
    accounting = (await session.api.get(session.url)).json()["metadata"]["accounting"]
    assert accounting["left_out"] == []


@pytest.mark.parametrize("settings", [{"pins": {"temperature": 0.7, "max_tokens": 9}}], indirect=True)
async def test_server_wide_pins(api: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    """They win over the agent, and a session's own over them, also under the other name of a length."""
    await answer(await opened(api), USER, temperature=1.0, max_completion_tokens=50, top_p=0.5)
    await answer(await opened(api, pins={"temperature": 0.1, "max_completion_tokens": 5}), USER)
    sent = [
        {name: body.get(name) for name in ("temperature", "max_tokens", "max_completion_tokens", "top_p")}
        for body in engine.bodies
    ]
    assert sent == [
        {"temperature": 0.7, "max_tokens": 9, "max_completion_tokens": None, "top_p": 0.5},
        {"temperature": 0.1, "max_tokens": None, "max_completion_tokens": 5, "top_p": None},
    ]


async def test_get_accounts_for_every_sampled_token(session: OpenSession) -> None:
    """A retried turn is named, with the turn that repeated its input."""
    await answer(session, USER)
    again = await answer(session, USER)
    await answer(session, USER, again, AGAIN)
    lengths = [len(turn["output"]) for turn in await turns(session)]
    assert (await session.api.get(session.url)).json()["metadata"]["accounting"] == {
        "generations": 3,
        "sampled_tokens": sum(lengths),
        "trained_tokens": sum(lengths[1:]),
        "left_out": [{"turn": 1, "tokens": lengths[0], "reason": "retried", "by": 2}],
    }


async def test_a_token_outside_of_the_vocabulary_is_refused(
    session: OpenSession, engine: ScriptedEngine, renderer: ChatRenderer
) -> None:
    """An engine that serves another model than the tokenizer's is 502, and nothing is recorded."""
    strange = renderer.tokenizer.size
    triples = [[-0.5, strange, None]]
    meta = {"completion_tokens": 1, "output_token_logprobs": triples}
    engine.answer = lambda body: httpx.Response(200, json=engine.reply(body, "fine", meta=meta))
    reply = await session.chat(USER)
    assert refused(reply) == (502, "engine_reply_invalid", "false")
    assert f"token {strange}" in reply.json()["error"]["message"]
    assert await turns(session) == []
