"""The real server on a loopback socket: its log-probs, its stops, its parsing and its errors."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tokentape_engine.dialogues import SYSTEM_PROMPT, TOOLS, call_tool, user_prompts
from tokentape_engine.model import TinyModel

MAX_LOGPROB_ERROR = 1e-4
END_OF_TURN = 4098


def _opening(question: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def _chat(client: httpx.Client, **body: Any) -> dict[str, Any]:
    body = {
        "messages": [],
        "tools": TOOLS,
        "max_tokens": 120,
        "logprobs": True,
        "return_meta_info": True,
        "return_token_ids": True,
    } | body
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def _play(client: httpx.Client, model: TinyModel, question: str, seed: int) -> list[dict[str, Any]]:
    """Play a conversation token-in, token-out, the way a recorder does; returns its choices."""
    choices = []
    ids = model.render(_opening(question), TOOLS)
    for turn in range(5):
        choice = _chat(client, input_ids=ids, seed=seed + turn, temperature=1.0)
        choices.append(choice)
        calls = choice["message"]["tool_calls"]
        if not calls or choice["finish_reason"] != "tool_calls":
            break
        function = calls[0]["function"]
        answer = call_tool(function["name"], json.loads(function["arguments"]))
        suffix = f"\n<|im_start|>user\n<tool_response>\n{answer}\n</tool_response><|im_end|>\n"
        suffix += "<|im_start|>assistant\n"
        ids = ids + choice["response_token_ids"] + model.tokenizer.encode(suffix)
    return choices


@torch.inference_mode()
def _largest_error(model: TinyModel, choice: dict[str, Any], temperature: float = 1.0) -> float:
    """Reported log-probs against one pass over prompt and output, by transformers alone."""
    prompt, output = choice["prompt_token_ids"], choice["response_token_ids"]
    logits = model.network(torch.tensor([prompt + output]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    expected = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0]
    triples = choice["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in triples] == output
    return float((torch.tensor([logprob for logprob, _, _ in triples]) - expected).abs().max())


def test_dialogue_logprobs_are_exact(client: httpx.Client, model: TinyModel) -> None:
    """Through dialogues of several turns every log-prob equals the teacher-forced one."""
    plays = [_play(client, model, question, seed=100 * n) for n, question in enumerate(user_prompts()[::9])]
    assert max(len(play) for play in plays) >= 2
    for choice in (choice for play in plays for choice in play):
        assert _largest_error(model, choice) < MAX_LOGPROB_ERROR


@pytest.mark.slow
def test_concurrent_logprobs_are_exact(client: httpx.Client, model: TinyModel) -> None:
    """More dialogues at once than there are slots, joining and leaving batches: still the same log-probs."""
    questions = user_prompts()[:24]
    with ThreadPoolExecutor(24) as pool:
        plays = list(pool.map(lambda n: _play(client, model, questions[n], seed=7 * n), range(24)))
    for choice in (choice for play in plays for choice in play):
        assert _largest_error(model, choice) < MAX_LOGPROB_ERROR


def test_cached_tokens_count_the_known_prefix(client: httpx.Client, model: TinyModel) -> None:
    """A continued dialogue computes only what is new; its first turn shares at least the system prompt."""
    _play(client, model, "What is 1 plus 2?", seed=0)
    prompt = model.render(_opening("What is 3 plus 4?"), TOOLS)
    first = _chat(client, input_ids=prompt, max_tokens=5, ignore_eos=True)
    assert 300 < first["meta_info"]["cached_tokens"] < len(prompt)
    second = _chat(client, input_ids=prompt + first["response_token_ids"] + [198], max_tokens=1)
    # The last sampled token was never an input, so it is the first to compute.
    assert second["meta_info"]["cached_tokens"] == len(prompt) + 4
    assert _largest_error(model, second) < MAX_LOGPROB_ERROR


@pytest.mark.parametrize(
    "parameters",
    [{"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.5, "top_k": 5}, {"temperature": 0.3}],
)
def test_logprobs_are_those_before_filtering(
    client: httpx.Client, model: TinyModel, parameters: dict[str, Any]
) -> None:
    """Log-probs are at the request's temperature, whatever top-p and top-k remove."""
    choice = _chat(client, messages=_opening("What is 3 plus 4?"), seed=1, **parameters)
    assert _largest_error(model, choice, parameters["temperature"]) < MAX_LOGPROB_ERROR


def test_greedy_takes_the_likeliest(client: httpx.Client, model: TinyModel) -> None:
    """At temperature 0 each token is the argmax, and log-probs are those at temperature 1."""
    choice = _chat(client, messages=_opening("Add the degrees of Rome and Oslo."), temperature=0)
    prompt, output = choice["prompt_token_ids"], choice["response_token_ids"]
    with torch.inference_mode():
        logits = model.network(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == output
    assert _largest_error(model, choice) < MAX_LOGPROB_ERROR


def test_seed_repeats(client: httpx.Client) -> None:
    """The same seed draws the same tokens; another one draws others."""
    body = {"messages": _opening("What is the weather in Rome?"), "temperature": 2.0, "max_tokens": 20}
    first, again, other = (_chat(client, **body, seed=seed)["response_token_ids"] for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_tool_calls_are_mostly_well_formed(client: httpx.Client) -> None:
    """Sampled at temperature 1, most first turns are one closed call of a known tool."""
    names = {tool["function"]["name"] for tool in TOOLS}
    good = 0
    for seed, question in enumerate(user_prompts()[::4]):
        choice = _chat(client, messages=_opening(question), seed=seed)
        calls = choice["message"]["tool_calls"] or []
        good += choice["finish_reason"] == "tool_calls" and {c["function"]["name"] for c in calls} <= names
    assert good >= 0.6 * len(user_prompts()[::4])


def test_reply_shape(client: httpx.Client) -> None:
    """A chat reply has SGLang's fields, and its parts agree with each other."""
    body = {
        "messages": _opening("What is the capital of Peru?"),
        "tools": TOOLS,
        "temperature": 0,
        "logprobs": True,
        "return_meta_info": True,
    }
    reply = client.post("/v1/chat/completions", json=body).json()
    choice, meta = reply["choices"][0], reply["choices"][0]["meta_info"]
    assert (reply["object"], reply["id"]) == ("chat.completion", meta["id"])
    assert reply["usage"]["prompt_tokens"] == meta["prompt_tokens"]
    assert (
        reply["usage"]["completion_tokens"] == meta["completion_tokens"] == len(meta["output_token_logprobs"])
    )
    assert choice["matched_stop"] == END_OF_TURN
    assert meta["output_token_logprobs"][-1][1:] == [END_OF_TURN, None]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [
        logprob for logprob, _, _ in meta["output_token_logprobs"]
    ]
    assert meta["weight_version"] == "1"
    assert meta["e2e_latency"] > 0
    assert isinstance(choice["message"]["content"], str)
    assert "prompt_token_ids" not in choice


def test_extras_only_on_request(client: httpx.Client) -> None:
    """Without the flags there are no log-probs, no meta_info and no ids."""
    choice = _chat(
        client,
        messages=_opening("Hi"),
        logprobs=False,
        return_meta_info=False,
        return_token_ids=False,
        max_tokens=3,
    )
    assert choice["logprobs"] is None
    assert {"meta_info", "prompt_token_ids", "response_token_ids"}.isdisjoint(choice)


def test_input_ids_win_over_messages(client: httpx.Client) -> None:
    """`input_ids` are the prompt, as they are, whatever the messages say."""
    choice = _chat(client, messages=_opening("Hi"), input_ids=[1, 2, 3], max_tokens=2)
    assert choice["prompt_token_ids"] == [1, 2, 3]


def test_messages_are_rendered_by_the_template(client: httpx.Client, model: TinyModel) -> None:
    """Without `input_ids` the prompt is the template's rendering, with text parts joined."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "you"}]}
    ]
    choice = _chat(client, messages=messages, max_tokens=1, chat_template_kwargs={"enable_thinking": False})
    expected = model.render([{"role": "user", "content": "Hi you"}], TOOLS, enable_thinking=False)
    assert choice["prompt_token_ids"] == expected


def test_length_ends_at_the_limit(client: httpx.Client) -> None:
    """The token limit ends an output with `length` and no matched stop, even inside a call."""
    choice = _chat(client, messages=_opening("What is 3 plus 4?"), max_tokens=4, temperature=0)
    assert len(choice["response_token_ids"]) == 4
    assert (choice["finish_reason"], choice["matched_stop"]) == ("length", None)


def test_stop_token_is_in_the_ids_not_in_the_text(client: httpx.Client) -> None:
    """A stop token ends the output and is its last id; the text has it only with `no_stop_trim`."""
    body = {"messages": _opening("What is 3 plus 4?"), "temperature": 0, "tools": None}
    plain = _chat(client, **body)
    stop = plain["response_token_ids"][3]
    end = plain["response_token_ids"].index(stop) + 1
    choice = _chat(client, **body, stop_token_ids=[stop])
    assert choice["response_token_ids"] == plain["response_token_ids"][:end]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", stop)
    assert "<|im_end|>" not in plain["message"]["content"]
    untrimmed = _chat(client, **body, no_stop_trim=True, skip_special_tokens=False)
    assert untrimmed["message"]["content"] == plain["message"]["content"] + "<|im_end|>"


def test_stop_string_is_cut_from_the_text(client: httpx.Client, model: TinyModel) -> None:
    """A stop string ends the output where it is complete, and the text ends before it."""
    body = {"messages": _opening("What is 3 plus 4?"), "temperature": 0, "tools": None}
    plain = _chat(client, **body)
    choice = _chat(client, **body, stop=["never said", "tool_call>"])
    output = choice["response_token_ids"]
    assert output == plain["response_token_ids"][: len(output)]
    assert choice["matched_stop"] == "tool_call>"
    assert model.tokenizer.decode(output).endswith("<tool_call>")
    assert choice["message"]["content"] == "<"


def test_ignore_eos_runs_to_the_limit(client: httpx.Client) -> None:
    """With `ignore_eos` an end token is a token like others."""
    choice = _chat(client, messages=_opening("Hi"), ignore_eos=True, max_tokens=150, temperature=0)
    assert len(choice["response_token_ids"]) == 150


def test_generate(client: httpx.Client, model: TinyModel) -> None:
    """`/generate` continues ids and answers with text, ids, log-probs and a finish object."""
    prompt = model.render(_opening("What is the weather in Lima?"), TOOLS)
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 100},
        "return_logprob": True,
        "logprob_start_len": -1,
    }
    reply = client.post("/generate", json=body).json()
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": END_OF_TURN}
    assert reply["output_ids"] == [token for _, token, _ in reply["meta_info"]["output_token_logprobs"]]
    assert reply["text"] == model.tokenizer.decode(reply["output_ids"][:-1])
    body["sampling_params"] = {"max_new_tokens": 2}
    assert client.post("/generate", json=body).json()["meta_info"]["finish_reason"] == {
        "type": "length",
        "length": 2,
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"input_ids": []}, "input_ids must not be empty"),
        ({"input_ids": [4122]}, "vocabulary is 0 to 4121"),
        ({"input_ids": [-1]}, "vocabulary is 0 to 4121"),
        ({"input_ids": [1.0]}, "list of integers"),
        ({"input_ids": [True]}, "list of integers"),
        ({"input_ids": [1] * 4096}, "leave no room in the context of 4096"),
        ({"input_ids": [1] * 4000, "max_tokens": 97}, "exceed the context of 4096"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": "9"}, "must be an integer"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": None}, "messages must be a list"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "of type text"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}, "template refused"),
        ({"temperature": -1}, "temperature must be"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"top_p": 0}, "top_p must be"),
        ({"stop": [1]}, "stop must be a list of str"),
        ({"seed": -1}, "seed must be"),
        ({"logprobs": 1}, "logprobs must be true or false"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs must be an object"),
        ({"stream": True}, "stream=True is not supported"),
        ({"n": 2}, "n=2 is not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5 is not supported"),
        ({"return_routed_experts": True}, "return_routed_experts=True is not supported"),
    ],
)
def test_bad_requests(client: httpx.Client, change: dict[str, Any], reason: str) -> None:
    """What cannot be served is 400 in SGLang's error form and says why."""
    body = {"messages": _opening("Hi"), "max_tokens": 8} | change
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()
    assert (error["object"], error["type"], error["code"]) == ("error", "BadRequestError", 400)
    assert reason in error["message"]


@pytest.mark.parametrize(("raw", "reason"), [(b"{", "not JSON"), (b"[]", "must be a JSON object")])
def test_bad_json(client: httpx.Client, raw: bytes, reason: str) -> None:
    """A body that is no JSON object is 400 on both routes."""
    for path in ("/v1/chat/completions", "/generate"):
        answer = client.post(path, content=raw)
        assert answer.status_code == 400
        assert reason in answer.json()["message"]


def test_neutral_values_are_no_error(client: httpx.Client) -> None:
    """Fields that ask for nothing, and fields that nobody knows, are accepted."""
    _chat(
        client, messages=_opening("Hi"), max_tokens=1, n=1, stream=False, lora_path=None, min_p=0.0, novelty=1
    )


def test_other_routes(client: httpx.Client) -> None:
    """Health is 200, models lists the one model with its context, anything else is an error object."""
    assert client.get("/health").status_code == 200
    card = client.get("/v1/models").json()["data"][0]
    assert (card["object"], card["max_model_len"]) == ("model", 4096)
    for answer, status in ((client.get("/nothing"), 404), (client.get("/generate"), 405)):
        assert (answer.status_code, answer.json()["code"]) == (status, status)


def test_saved_model_loads_with_auto_classes(model: TinyModel, model_dir: Any) -> None:
    """The model directory is a plain transformers model: weights, tokenizer and template load offline."""
    network = AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(network(ids).logits, model.network(ids).logits)
    fresh = TinyModel.create().tokenizer
    text = "It's 12 degrees<|im_end|>\n<tool_call>"
    assert tokenizer.encode(text) == fresh.encode(text)
    assert tokenizer.chat_template == fresh.chat_template
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
