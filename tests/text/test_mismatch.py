"""Recorded ids compared with the template's own rendering."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from tests.text.models import small_renderer
from tokentape_core.text.errors import RenderError
from tokentape_core.text.families import get_family
from tokentape_core.text.mismatch import MAX_MISMATCHES, MAX_TEXT_CHARS, find_mismatches
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.tokenizer import Tokenizer
from tokentape_engine.tokenizer import small_tokenizer

Message = dict[str, Any]

USER: Message = {"role": "user", "content": "Find it."}
CALL: Message = {
    "role": "assistant",
    "content": "Looking.",
    "reasoning_content": "Hm.",
    "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "search", "arguments": '{"q": "x", "n": 1}'}}
    ],
}
RESULT: Message = {"role": "tool", "tool_call_id": "c", "content": "1 hit"}
ANSWER: Message = {"role": "assistant", "content": "Found.", "reasoning_content": "So."}
PATH = [USER, CALL, RESULT, ANSWER]


class Recording:
    """A path as it is recorded turn by turn, what the model samples given as text or as a message."""

    def __init__(self, renderer: ChatRenderer, path: list[Message], **outputs: str) -> None:
        self.renderer = renderer
        self.path = path
        turns = [i for i, message in enumerate(path) if message["role"] == "assistant"]
        self.tokens = renderer.render(path[: turns[0]])
        self.sampled = np.zeros(len(self.tokens), dtype=bool)
        for n, turn in enumerate(turns):
            text = outputs.get(f"turn{n}")
            output = renderer.sample(path[:turn], path[turn])
            if text is not None:
                output = np.array(renderer.tokenizer.encode(text), dtype=np.int32)
            self._add(len(self.tokens), output, True)
            if turn != turns[-1]:
                prompt = renderer.extend(self.tokens, path[turn], path[turn + 1 : turns[n + 1]])
                self._add(prompt.keep, prompt.suffix, False)

    def _add(self, keep: int, tokens: Any, sampled: bool) -> None:
        self.tokens = np.concatenate([self.tokens[:keep], tokens])
        self.sampled = np.concatenate([self.sampled[:keep], np.full(len(tokens), sampled)])

    def mismatches(self, path: list[Message] | None = None) -> list[dict[str, Any]]:
        path = self.path if path is None else path
        return find_mismatches(self.renderer, self.tokens, path, sampled=self.sampled)


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("qwen3_training", "qwen3"),
        ("qwen3", "qwen3"),
        ("qwen3_8", "qwen3.5"),
        ("glm4moe", "glm4"),
        ("llama3_1", "llama3"),
        ("nemotron_3_nano", "nemotron3"),
        ("minimax_like", "minimax-m2"),
        ("kimi_like", "kimi-k2"),
    ],
)
def test_a_faithful_recording_has_none(template: str, family: str) -> None:
    """What a model samples in the template's own form is no mismatch, nor is the end of the last turn."""
    assert Recording(small_renderer(template, family), PATH).mismatches() == []


def test_harmony_drops_the_analysis_of_an_earlier_call() -> None:
    """The special tokens that a template leaves out of the history are found, as generated ones."""
    path = [USER, CALL | {"content": ""}, RESULT, ANSWER]
    final = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
    final += "<|channel|>final<|message|>Found.<|return|>"

    found = Recording(small_renderer("gptoss", "gpt-oss"), path, turn1=final).mismatches()

    assert [entry["type"] for entry in found] == ["assistant_text", "assistant_text", "special_token_count"]
    assert found[2]["expected_text"] == '{"q": "x", "n": 1}'
    assert found[2]["actual_text"].startswith("Hm.<|end|><|start|>assistant to=functions.search")
    assert [entry["generated"] for entry in found] == [True, True, True]


def test_what_follows_the_last_turn_does_not_count() -> None:
    """The newline after the last end token and a generation prompt are no mismatch, on either side."""
    recording = Recording(small_renderer(), PATH)
    tail = np.array(recording.renderer.tokenizer.encode("\n<|im_start|>assistant\n"), dtype=np.int32)
    recording._add(len(recording.tokens), tail, False)

    assert recording.mismatches() == []


def test_a_cut_turn_has_none() -> None:
    """A last turn that was cut at its length lacks the end token that the template writes."""
    cut = "<think>\nSo.\n</think>\n\nFoun"
    path = [*PATH[:-1], ANSWER | {"content": "Foun"}]

    assert Recording(small_renderer(), path, turn1=cut).mismatches() == []


def test_other_tokens_for_the_same_text_have_none() -> None:
    """Ids that a tokenizer would not give are no mismatch as long as they spell the same."""
    recording = Recording(small_renderer(), [USER, {"role": "assistant", "content": "Found."}])
    spelled = [recording.renderer.tokenizer.encode(char)[0] for char in "Found."]
    recording.tokens = recording.tokens[~recording.sampled]
    prefix = recording.renderer.tokenizer.encode("<think>\n\n</think>\n\n")
    output = [*prefix, *spelled, *recording.renderer.tokenizer.encode("<|im_end|>")]
    recording.sampled = np.zeros(len(recording.tokens), dtype=bool)
    recording._add(len(recording.tokens), np.array(output, dtype=np.int32), True)

    assert recording.mismatches() == []


def test_reserialised_json_is_assistant_text() -> None:
    """A call that was sampled without spaces is expected drift, and both spellings are shown."""
    output = (
        '<think>\nHm.\n</think>\n\nLooking.\n<tool_call>\n{"name":"search","arguments":{"q":"x","n":1}}\n'
        "</tool_call><|im_end|>"
    )

    (found,) = Recording(small_renderer(), PATH, turn0=output).mismatches()

    start = "assistant\n<think>\nHm.\n</think>\n\nLooking.\n<tool_call>\n"
    assert (found["type"], found["generated"]) == ("assistant_text", True)
    assert found["expected_text"].startswith(
        f'{start}{{"name": "search", "arguments": {{"q": "x", "n": 1}}}}'
    )
    assert found["actual_text"].startswith(f'{start}{{"name":"search","arguments":{{"q":"x","n":1}}}}')


def test_text_that_is_missing_before_a_generated_token_is_assistant_text() -> None:
    """Nothing but a stop token was sampled where the template writes a think block: still the assistant's."""
    path = [USER, {"role": "assistant", "content": ""}, USER, ANSWER]

    (found,) = Recording(small_renderer(), path, turn0="<|im_end|>").mismatches()

    assert (found["type"], found["generated"]) == ("assistant_text", True)
    assert found["expected_text"] == "assistant\n<think>\n\n</think>\n\n"
    assert found["actual_text"] == "assistant\n"


def test_text_that_is_missing_after_a_generated_token_is_assistant_text() -> None:
    """So it is where the output ends with a special token that ends no turn."""
    path = [USER, ANSWER | {"content": "a<|box_start|>b"}, USER, ANSWER]

    (found,) = Recording(
        small_renderer(), path, turn0="<think>\nSo.\n</think>\n\na<|box_start|>"
    ).mismatches()

    assert (found["type"], found["generated"]) == ("assistant_text", True)
    assert (found["expected_text"], found["actual_text"]) == ("b", "")


def test_tags_are_text() -> None:
    """Qwen3's tokenizer does not call <think> and <tool_call> special: they cut nothing."""
    renderer = small_renderer()
    tokens = renderer.tokenizer.encode("<think>a</think><tool_call>b</tool_call><|im_end|>c")

    segments, positions = renderer.splitter.of_ids(np.array(tokens, dtype=np.int32))

    assert segments.specials == ["<|im_end|>"]
    assert segments.texts == ["<think>a</think><tool_call>b</tool_call>", "c"]
    assert len(positions) == 1


def test_the_end_of_a_turn_cuts_whatever_the_tokenizer_calls_it() -> None:
    """A token that ends turns is cut at, special or not."""
    tokenizer = small_tokenizer()
    tokenizer.add_tokens([AddedToken("<end>", special=False)])
    tokenizer.eos_token = None
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
    family = replace(get_family("qwen3"), end_tokens=("<end>",))

    renderer = ChatRenderer(Tokenizer(tokenizer), family)

    assert renderer.segments([USER, ANSWER]).specials == ["<end>", "<end>"]


@pytest.mark.parametrize("changed", [0, 2], ids=["user", "tool"])
def test_a_changed_prompt_is_non_assistant_text(changed: int) -> None:
    """A message from outside that differs from what was recorded is a bug, and is called one."""
    path = list(PATH)
    path[changed] = path[changed] | {"content": "something else"}

    (found,) = Recording(small_renderer(), PATH).mismatches(path)

    assert (found["type"], found["generated"]) == ("non_assistant_text", False)
    assert "something else" in found["expected_text"]
    assert "something else" not in found["actual_text"]


def test_a_lost_newline_is_non_assistant_text() -> None:
    """The newline after an end token belongs to the prompt: losing it is a bug."""
    recording = Recording(small_renderer(), PATH)
    newline = int(np.flatnonzero(recording.sampled[:-1] & ~recording.sampled[1:])[0]) + 1
    recording.tokens = np.delete(recording.tokens, newline)
    recording.sampled = np.delete(recording.sampled, newline)

    (found,) = recording.mismatches()

    assert (found["type"], found["expected_text"], found["actual_text"]) == ("non_assistant_text", "\n", "")


def test_dropped_reasoning_is_the_models_and_the_rest_still_compared() -> None:
    """What the template drops of an answer was generated; a later bug is still found, and was not."""
    recording = Recording(small_renderer("qwen3"), [*PATH, USER, ANSWER])
    later = [*PATH, USER | {"content": "Other."}, ANSWER]

    found = recording.mismatches(later)

    assert [(entry["type"], entry["generated"]) for entry in found] == [
        ("assistant_text", True),
        ("assistant_text", True),
        ("non_assistant_text", False),
    ]
    assert "Hm." in found[0]["actual_text"]
    assert "Hm." not in found[0]["expected_text"]


def test_special_tokens_that_nobody_sampled_are_told_apart() -> None:
    """Those that only a message from outside has were not generated."""
    path = [USER | {"content": "Find<|box_start|>it."}, ANSWER]

    (found,) = Recording(small_renderer(), [USER, ANSWER]).mismatches(path)

    assert (found["type"], found["generated"]) == ("special_token_count", False)


def test_a_special_token_spelled_in_plain_tokens_is_counted() -> None:
    """A forged end of turn is text in the recording and a special token in the template's rendering."""
    recording = Recording(small_renderer(), [USER, ANSWER | {"content": "a<|im_end|>b"}])
    tokenizer = recording.renderer.tokenizer
    prompt = recording.tokens[~recording.sampled]
    forged = [*tokenizer.encode("<think>\nSo.\n</think>\n\na<|im_e"), *tokenizer.encode("nd|>b<|im_end|>")]
    recording.tokens, recording.sampled = prompt, np.zeros(len(prompt), dtype=bool)
    recording._add(len(prompt), np.array(forged, dtype=np.int32), True)

    (found,) = recording.mismatches()

    assert (found["type"], found["generated"]) == ("special_token_count", True)


def test_another_special_token_is_a_type() -> None:
    """As many special tokens, but another one."""
    output = "<think>\nHm.\n</think>\n\nFound.<|endoftext|>"
    path = [USER, ANSWER | {"reasoning_content": "Hm."}]
    recording = Recording(small_renderer(), path, turn0=output)
    recording.tokens[-1] = recording.renderer.tokenizer.token_id("<|box_end|>")
    path[1] = path[1] | {"content": "Found.<|box_start|>"}

    (found,) = recording.mismatches(path)

    assert (found["type"], found["generated"]) == ("special_token_type", True)
    assert found["expected_text"].endswith("\n\nFound.<|box_start|>")
    assert found["actual_text"].endswith("\n\nFound.<|box_end|>")


def test_a_date_is_that_of_the_session() -> None:
    """A recording is compared with the prompt of its own day, whenever that is done."""
    renderer = small_renderer("llama3_2", "llama3")
    tokens = renderer.render([USER], opened_at=86_400.0)
    sampled = np.zeros(len(tokens) + 2, dtype=bool)
    sampled[-2:] = True
    output = renderer.sample([USER], {"role": "assistant", "content": "a"})
    tokens = np.concatenate([tokens, output])
    path = [USER, {"role": "assistant", "content": "a"}]

    same = find_mismatches(renderer, tokens, path, sampled=sampled, opened_at=86_400.0)
    (found,) = find_mismatches(renderer, tokens, path, sampled=sampled, opened_at=0.0)

    assert same == []
    assert found["type"] == "non_assistant_text"
    assert "02 Jan 1970" in found["actual_text"]


def test_messages_that_cannot_be_rendered() -> None:
    """A generated call that is not JSON cannot be compared, and is refused with the reason."""
    broken = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}
    path = [USER, CALL | {"tool_calls": [broken]}]

    with pytest.raises(RenderError, match="not valid JSON"):
        Recording(small_renderer(), PATH).mismatches(path)


def test_entries_are_bounded() -> None:
    """Long texts are cut around their first difference, many entries to a number that is told."""
    long = [{"role": "user", "content": f"{'x' * 5_000}{side}{'y' * 5_000}"} for side in "ab"]
    (found,) = Recording(small_renderer(), [long[0], ANSWER]).mismatches([long[1], ANSWER])
    assert "xb" in found["expected_text"]
    assert "xa" in found["actual_text"]
    assert max(map(len, (found["expected_text"], found["actual_text"]))) == MAX_TEXT_CHARS

    turns = [USER, ANSWER] * (MAX_MISMATCHES + 5)
    changed = [m | {"content": "Other."} if m["role"] == "user" else m for m in turns]
    many = Recording(small_renderer(), turns).mismatches(changed)
    assert len(many) == MAX_MISMATCHES
    assert many[-1]["detail"] == "there are more mismatches"
    assert {frozenset(entry) for entry in many} == {
        frozenset(
            ("type", "segment_index", "expected_text", "actual_text", "generated", "detail"),
        )
    }


def test_a_mask_of_another_length_is_an_error() -> None:
    """The mask must tell of each token whether it was generated."""
    recording = Recording(small_renderer(), PATH)
    with pytest.raises(ValueError, match="the mask has 1 entries"):
        find_mismatches(recording.renderer, recording.tokens, PATH, sampled=recording.sampled[:1])


@pytest.mark.parametrize("family", ["qwen3", "llama3", "gpt-oss"])
def test_text_is_cut_where_the_tokenizer_would_cut_it(family: str) -> None:
    """Splitting a text and splitting its ids give the same segments, also beside look-alikes."""
    template = {"llama3": "llama3_1", "gpt-oss": "gptoss"}.get(family, "qwen3_training")
    renderer = small_renderer(template, family)
    tokenizer, splitter = renderer.tokenizer, renderer.splitter
    spellings = [
        piece
        for token in tokenizer.special_tokens()
        for piece in (token, token[:-1], f"<{token}>", "é<think>")
    ]
    text = "<".join(spellings)

    segments, positions = splitter.of_ids(np.array(tokenizer.encode(text), dtype=np.int32))

    assert segments == splitter.of_text(text)
    assert len(positions) == len(segments.specials)
    assert segments.join(0, len(segments.specials)) == text
