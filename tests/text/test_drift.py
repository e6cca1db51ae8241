"""Decoding and tokenising again changes sampled ids; a renderer never does that to recorded ones.

The ids are those of the published Qwen3 models.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.tokenizer import Tokenizer

END = 151_645
NEWLINE = 198
NEXT = [{"role": "user", "content": "Go on."}]


@pytest.mark.parametrize(
    ("sampled", "again"),
    [
        ([29981, 287], [3432]),
        ([151668, 198, 198, 9707], [151668, 271, 9707]),
        ([27, 14172, 13429, 29], [151657]),
        ([27, 91, 318, 6213, 91, 29], [151645]),
        ([562, 220, 9284, 104], [562, 29333]),
    ],
    ids=["two tokens for one word", "newlines", "spelled tool call", "forged end of turn", "cut UTF-8"],
)
def test_sampled_ids_survive(
    qwen3: Tokenizer, renderer: ChatRenderer, sampled: list[int], again: list[int]
) -> None:
    """Ids that a round trip through text changes stay as sampled, and the suffix starts after them."""
    round_trip = qwen3.encode(qwen3.decode(sampled))
    assert round_trip != sampled
    assert round_trip[: len(again)] == again
    parent = np.concatenate([renderer.render(NEXT), np.array([*sampled, END], dtype=np.int32)])

    prompt = renderer.extend(parent, {"role": "assistant", "content": qwen3.decode(sampled)}, NEXT)

    assert prompt.keep == len(parent)
    assert prompt.suffix[0] == NEWLINE
    assert qwen3.decode(prompt.suffix) == "\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"


def test_the_boundary_never_merges_with_the_turn(qwen3: Tokenizer, renderer: ChatRenderer) -> None:
    """Text on both sides of the cut would share a token, so the suffix is tokenised on its own."""
    sampled = qwen3.encode("done.")
    assert qwen3.encode("done.\n<|im_start|>") == [10438, 624, 151644]
    assert [*sampled, *qwen3.encode("\n<|im_start|>")] == [10438, 13, NEWLINE, 151644]
    parent = np.concatenate([renderer.render(NEXT), np.array(sampled, dtype=np.int32)])

    prompt = renderer.extend(parent, {"role": "assistant", "content": "done."}, NEXT)

    assert prompt.keep == len(parent)
    assert prompt.suffix[:3].tolist() == [END, NEWLINE, 151644]


def test_a_reserialised_tool_call_changes_nothing(qwen3: Tokenizer, renderer: ChatRenderer) -> None:
    """A client's spelling of the call (spaces, key order, numbers, escapes) reaches no prompt token."""
    compact = r'{"path":"a\/b","n":1e3}'
    output = f'<tool_call>\n{{"name": "f", "arguments": {compact}}}\n</tool_call>'
    history = renderer.render(NEXT)
    parent = np.concatenate([history, np.array([*qwen3.encode(output), END], dtype=np.int32)])
    result = {"role": "tool", "tool_call_id": "c", "content": "ok"}
    spellings = [compact, json.dumps(json.loads(compact)), '{"n": 1000.0, "path": "a/b"}']
    assistants = [_calling(arguments) for arguments in spellings]
    assert qwen3.decode(renderer.render([*NEXT, assistants[1]])).count(compact) == 0

    prompts = [renderer.extend(parent, assistant, [result]) for assistant in assistants]

    for prompt in prompts:
        assert prompt.keep == len(parent)
        np.testing.assert_array_equal(prompt.suffix, prompts[0].suffix)


def test_stripped_reasoning_stays_in_the_prompt(qwen3: Tokenizer, renderer: ChatRenderer) -> None:
    """Reasoning that a client leaves out when it sends the turn again is kept as it was sampled."""
    output = qwen3.encode("<think>\nTwo and two.\n</think>\n\nFour.<|im_end|>")
    parent = np.concatenate([renderer.render(NEXT), np.array(output, dtype=np.int32)])
    recorded = {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."}
    stripped = {"role": "assistant", "content": "Four."}
    assert "Two and two." not in qwen3.decode(renderer.render([*NEXT, stripped, *NEXT]))

    prompts = [renderer.extend(parent, assistant, NEXT) for assistant in (recorded, stripped)]

    assert [prompt.keep for prompt in prompts] == [len(parent), len(parent)]
    np.testing.assert_array_equal(prompts[0].suffix, prompts[1].suffix)


def _calling(arguments: str) -> dict[str, object]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}
