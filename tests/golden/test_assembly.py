"""Assembly against right values that an independent implementation computed (see README.md).

`GOLDEN_CASES=FILE pytest tests/golden` runs another file of the same form.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokentape_contracts.errors import PrefixBroken
from tokentape_contracts.events import OPENED_ID, SessionOpened, TurnRecorded
from tokentape_contracts.samples import Sample
from tokentape_core.domain.assemble import assemble
from tokentape_core.domain.state import SessionState, apply, turn_id

FILE = Path(os.environ.get("GOLDEN_CASES", Path(__file__).parent / "assembly.jsonl"))


def _covered(case: dict[str, Any]) -> bool:
    """Cases without routed experts."""
    return not any("routed_experts" in turn for turn in case["turns"])


CASES = [case for line in FILE.read_text().splitlines() if _covered(case := json.loads(line))]


def test_there_are_cases() -> None:
    """The file holds cases to run, so that an empty run cannot pass for a good one."""
    assert len(CASES) >= 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_case(case: dict[str, Any]) -> None:
    """The assembled samples equal the right values, field by field."""
    expect = case["expect"]
    state = _state(case)
    if expect["http_status"] == 422:
        with pytest.raises(PrefixBroken):
            assemble(state, _decode, max_seq_len=case["max_seq_len"])
        return
    assembly = assemble(state, _decode, max_seq_len=case["max_seq_len"], metadata=case["agent_metadata"])
    assert assembly.session_metadata.get("tree") == expect["tree"]
    assert assembly.empty_reason == expect["empty_reason"]
    assert [_plain(sample) for sample in assembly.samples] == expect["samples"]


def _state(case: dict[str, Any]) -> SessionState:
    opened = SessionOpened(
        id="0",
        mode=case["mode"],
        matcher="strict",
        family="default",
        max_trim_tokens=case["max_trim_tokens"],
        template="",
        labels={},
        pins={},
        opened_at=0.0,
    )
    state = apply(None, OPENED_ID, opened)
    for turn in case["turns"]:
        state = apply(state, turn_id(turn["seq"]), _event(state, turn))
    return state


def _event(state: SessionState, turn: dict[str, Any]) -> TurnRecorded:
    prompt = turn["prompt_ids"]
    parent = state.turns[turn["parent"] - 1].tokens.tolist() if turn["parent"] else []
    keep = next((i for i, (a, b) in enumerate(zip(parent, prompt, strict=False)) if a != b), None)
    keep = min(len(parent), len(prompt)) if keep is None else keep
    return TurnRecorded(
        id=str(turn["seq"]),
        parent=turn["parent"],
        keep=keep,
        suffix=np.array(prompt[keep:], np.int32),
        output=np.array([token for _, token in turn["output"]], np.int32),
        logprobs=np.array([logprob for logprob, _ in turn["output"]], np.float64),
        finish=turn["finish_reason"],
        response_id=turn["response_id"],
        messages=[],
        tools=None,
        request={},
        reply={},
        meta=turn["meta"],
        requested_at=turn["requested_at"],
        committed_at=turn["committed_at"],
    )


def _decode(ids: Any) -> str:
    return "".join(f"[{token}]" for token in ids)


def _plain(sample: Sample) -> dict[str, Any]:
    return {
        "tokens": sample.tokens.tolist(),
        "response": sample.response,
        "response_length": sample.response_length,
        "loss_mask": sample.loss_mask.tolist(),
        "rollout_log_probs": sample.rollout_log_probs.tolist(),
        "status": sample.status.value,
        "weight_versions": sample.weight_versions,
        "prefix_cache_info": sample.prefix_cache_info,
        "reward": sample.reward,
        "metadata": {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in sample.metadata.items()
        },
        "rollout_routed_experts": sample.rollout_routed_experts,
        "rollout_indexer_topk": sample.rollout_indexer_topk,
    }
