"""The probe and `tokentape engine check`: each line says what is there, and no problem hides another."""

import base64
import json
import math
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.scripted import ScriptedEngine, network
from tokentape_api.engine import Check, connect_engine
from tokentape_api.engine.probe import PROMPT, SESSION_ID
from tokentape_api.settings import ApiSettings
from tokentape_cli.main import main

ALL = {"replay": "incremental", "replay_layers": 3, "indexer_topk": "on"}
EVERY = [
    "reachable",
    "finish",
    "ids",
    "log-probs",
    "counts",
    "weight version",
    "stop token",
    "routed_experts",
    "indexer_topk",
    "routed_experts from row 4 on",
]


async def probe(engine: ScriptedEngine, **settings: Any) -> list[Check]:
    """The lines about this engine, in the way that `settings` would use it."""
    made = connect_engine(
        ApiSettings(engine_url="http://engine", tokenizer="-", redis_url="-", **{**ALL, **settings}),
        **network(engine.handle),
    )
    try:
        return list(await made.probe(10.0) or [])
    finally:
        await made.close()


def states(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.state for check in checks}


@pytest.fixture
def moe(engine: ScriptedEngine) -> ScriptedEngine:
    """An engine that has all."""
    engine.experts, engine.indexer = (3, 2), (4, 5)
    return engine


async def test_a_good_engine(moe: ScriptedEngine) -> None:
    """An engine that sends all passes every line, by three tiny generations of the same few ids."""
    checks = await probe(moe)
    assert states(checks) == dict.fromkeys(EVERY, "ok")
    first, stopped, later = moe.bodies
    for body in moe.bodies:
        assert (body["input_ids"], body["max_tokens"], body["temperature"]) == (PROMPT.tolist(), 4, 0)
        assert "model" not in body
    assert "return_routed_experts" not in stopped
    assert ("stop_token_ids" in first, "stop_token_ids" in later) == (False, False)
    assert (first.get("routed_experts_start_len"), later["routed_experts_start_len"]) == (None, 4)
    assert {request.headers["x-smg-routing-key"] for request in moe.requests} == {SESSION_ID}
    details = {check.name: check.detail for check in checks}
    assert details["ids"] == "8 tokens in, as sent; 3 sampled tokens out"
    assert details["routed_experts"] == "10 rows of 3 layers, 2 choices each, from position 0 on"
    assert details["routed_experts from row 4 on"].startswith("6 rows of 3 layers")


async def test_only_what_is_used_is_probed(engine: ScriptedEngine) -> None:
    """Without replay nothing asks for it, and no line speaks of it."""
    checks = await probe(engine, replay="off", replay_layers=None, indexer_topk="off")
    assert states(checks) == dict.fromkeys(EVERY[:7], "ok")
    assert len(engine.bodies) == 2
    for body in engine.bodies:
        assert {"return_routed_experts", "return_indexer_topk"}.isdisjoint(body)


def _says(**changes: Any) -> Callable[[ScriptedEngine], Callable[[dict[str, Any]], httpx.Response]]:
    return lambda engine: (
        lambda body: httpx.Response(200, content=json.dumps(engine.reply(body, "hi", **changes)))
    )


def _rows(count: int) -> str:
    return base64.b64encode(np.zeros(count * 6, np.int32).tobytes()).decode()


BAD: dict[str, tuple[dict[str, Any], dict[str, tuple[str, str]]]] = {
    "ids ignored": ({"meta": {"prompt_tokens": 31}}, {"ids": ("wrong", "ignores input_ids")}),
    "no prompt count": (
        {"meta": {"prompt_tokens": None}},
        {"ids": ("missing", "nothing says"), "counts": ("missing", "prompt_tokens is missing")},
    ),
    "a router strips meta_info": (
        {"choice": {"meta_info": None}},
        {
            "ids": ("missing", "a router strips"),
            "log-probs": ("missing", "a router strips"),
            "counts": ("missing", "meta_info"),
            "weight version": ("missing", "meta_info"),
            "routed_experts": ("missing", "--enable-return-routed-experts"),
            "indexer_topk": ("missing", "router"),
        },
    ),
    "no log-probs": (
        {"meta": {"output_token_logprobs": None}},
        {
            "ids": ("missing", "output_token_logprobs"),
            "log-probs": ("missing", "output_token_logprobs is missing"),
            "routed_experts": ("missing", "output_token_logprobs"),
            "indexer_topk": ("missing", "output_token_logprobs"),
        },
    ),
    "NaN": (
        {"meta": {"output_token_logprobs": [[math.nan, 1, None], [-1, 2, None], [-1, 2, None]]}},
        {"log-probs": ("wrong", "token 0 is nan")},
    ),
    "counts differ": (
        {"meta": {"completion_tokens": 7}},
        {
            "ids": ("wrong", "completion_tokens says 7"),
            "log-probs": ("wrong", "completion_tokens says 7"),
            "routed_experts": ("wrong", "completion_tokens says 7"),
            "indexer_topk": ("wrong", "completion_tokens says 7"),
        },
    ),
    "no experts": (
        {"meta": {"routed_experts": None}},
        {"routed_experts": ("missing", "start the engine with --enable-return-routed-experts")},
    ),
    "wrong rows": (
        {"meta": {"routed_experts": _rows(9)}},
        {"routed_experts": ("wrong", "not 10 rows of 3 layers")},
    ),
    "start ignored": (
        {"meta": {"routed_experts": _rows(10)}},
        {"routed_experts from row 4 on": ("wrong", "routed_experts_start_len")},
    ),
    "aborted": ({"choice": {"finish_reason": "abort"}}, {"finish": ("wrong", "interrupted")}),
    "null content": ({"message": {"content": None}}, {}),
    "no weight version": ({"meta": {"weight_version": None}}, {}),
    "no cached tokens": ({"meta": {"cached_tokens": None}}, {}),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_engines(moe: ScriptedEngine, name: str) -> None:
    """Each fault shows in its own lines and says what to do; the other lines stay as they are."""
    changes, expected = BAD[name]
    moe.answer = _says(**changes)(moe)
    checks = await probe(moe)
    failed = {check.name: check for check in checks if check.state != "ok"}
    assert {check: found.state for check, found in failed.items()} == {
        check: state for check, (state, _) in expected.items()
    }
    for check, (_, mention) in expected.items():
        assert mention in failed[check].detail
    assert {*EVERY[:6], "routed_experts", "indexer_topk"} <= states(checks).keys()


async def test_notes(moe: ScriptedEngine) -> None:
    """What an engine need not have is noted when it is not there."""
    moe.answer = _says(meta={"weight_version": None, "cached_tokens": None})(moe)
    details = {check.name: check.detail for check in await probe(moe)}
    assert "will not say what weights" in details["weight version"]
    assert "cached_tokens does not come" in details["counts"]


async def test_refused_payloads_do_not_hide_the_rest(moe: ScriptedEngine) -> None:
    """If the engine refuses a request with replay, the other lines come from one without."""

    def answer(body: dict[str, Any]) -> httpx.Response:
        if "return_routed_experts" in body:
            return httpx.Response(400, json={"message": "start me with --enable-return-routed-experts"})
        return httpx.Response(200, json=moe.reply(body, "hi"))

    moe.answer = answer
    checks = await probe(moe)
    assert states(checks) == {
        **dict.fromkeys(EVERY[:7], "ok"),
        "routed_experts": "wrong",
        "indexer_topk": "wrong",
    }
    assert "400" in checks[-1].detail
    assert "start me with" in checks[-1].detail


@pytest.mark.parametrize(
    ("answer", "mention"),
    [
        (lambda _: httpx.Response(404, text="no such model"), "answered 404: no such model"),
        (lambda _: httpx.Response(200, text="<html>"), "not JSON"),
        (lambda _: httpx.Response(200, json={"choices": []}), "exactly one choice"),
    ],
)
async def test_nothing_to_look_at(
    engine: ScriptedEngine, answer: Callable[[Any], httpx.Response], mention: str
) -> None:
    """Without an answer that has a choice there is one line, which says why."""
    engine.answer = answer
    [check] = await probe(engine)
    assert (check.name, check.state) == ("reachable", "wrong")
    assert mention in check.detail


def test_command(moe: ScriptedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints aligned lines and a verdict; its exit code says whether all is there."""
    with moe.serve() as url:
        arguments = ["engine", "check", "--engine-url", url]
        wanted = ["--replay", "full", "--replay-layers", "3", "--indexer-topk", "on"]
        assert main([*arguments, *wanted]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split("  ")[0] for line in lines[:9]] == ["ok"] * 9
        assert len({line.index(line.split("  ")[-1].strip()) for line in lines[:9]}) == 1
        assert lines[-1] == "usable: the engine sends all that the recording needs."
        moe.experts = None
        assert main([*arguments, *wanted]) == 1
        out = capsys.readouterr().out
        assert "missing  routed_experts  routed_experts was asked for and did not come" in out
        assert out.splitlines()[-1] == "not usable as it is: routed_experts."
        assert main(arguments) == 0
    assert main(arguments) == 1
    assert "cannot be reached" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "mention"),
    [
        ([], "--engine-url is needed"),
        (["--engine-url", "http://e", "--engine", "tgi"], "--engine must be one of sglang, vllm"),
        (["--engine-url", "http://e", "--replay", "full"], "needs replay-layers"),
        (["--engine-url", "http://e", "--replay", "full", "--replay-layers", "0"], "at least 1"),
        (["--engine-url", "http://e", "--engine", "vllm", "--replay", "incremental"], "needs SGLang"),
        (["--engine-url", "http://e", "--engine", "vllm", "--indexer-topk", "on"], "needs SGLang"),
    ],
)
def test_command_usage(
    arguments: list[str], mention: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options that are missing or do not fit each other are wrong usage, said in one sentence."""
    monkeypatch.delenv("TOKENTAPE_ENGINE_URL", raising=False)
    assert main(["engine", "check", *arguments]) == 2
    assert mention in capsys.readouterr().err


def test_the_api_checks_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    """`api` and `up` refuse the same options, before anything is started."""
    needed = ["--engine-url", "http://e", "--tokenizer", "t", "--replay", "full"]
    assert main(["api", *needed, "--redis-url", "redis://r"]) == 2
    assert main(["up", *needed]) == 2
    assert capsys.readouterr().err.count("needs replay-layers") == 2


@pytest.mark.parametrize(
    ("settings", "mention"),
    [
        ({"engine": "tgi"}, "engine must be one of sglang, vllm"),
        ({"replay": "some"}, "replay must be one of"),
        ({"indexer_topk": "yes"}, "indexer_topk must be one of"),
        ({"replay_layers": 0}, "at least 1"),
        ({"replay": "incremental"}, "needs replay-layers"),
        ({"engine": "vllm", "replay": "incremental"}, "vLLM sends all rows"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], mention: str) -> None:
    """Settings that cannot work are refused when they are made."""
    with pytest.raises(ValueError, match=mention):
        ApiSettings(engine_url="http://e", tokenizer="t", redis_url="r", **settings)
