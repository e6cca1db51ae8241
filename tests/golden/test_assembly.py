"""Assembly against right values that an independent implementation computed (see README.md).

`GOLDEN_CASES=FILE pytest tests/golden` runs another file of the same form.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokentape_contracts.errors import PrefixBroken, ReplayBroken
from tokentape_contracts.events import OPENED_ID, Blob, ReplaySpec, SessionOpened, TurnRecorded
from tokentape_contracts.samples import Sample
from tokentape_core.domain.assemble import assemble
from tokentape_core.domain.replay import Rows, deduplicate
from tokentape_core.domain.state import SessionState, apply, turn_id
from tokentape_core.domain.tree import DEFAULT_HOOKS, Hooks, superseded

FILE = Path(os.environ.get("GOLDEN_CASES", Path(__file__).parent / "assembly.jsonl"))


KIND = "routed_experts"
CASES = [json.loads(line) for line in FILE.read_text().splitlines()]


def test_there_are_cases() -> None:
    """The file holds cases to run, so that an empty run cannot pass for a good one."""
    assert len(CASES) >= 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_case(case: dict[str, Any]) -> None:
    """The assembled samples equal the right values, field by field."""
    expect = case["expect"]
    state, stored = _state(case)
    # The cases' turns carry no messages: nothing says which of them is a retry.
    hooks = Hooks(superseded, DEFAULT_HOOKS.finish)
    options = {
        "max_seq_len": case["max_seq_len"],
        "metadata": case["agent_metadata"],
        "stored": stored,
        "hooks": hooks,
    }
    if expect["http_status"] == 422:
        with pytest.raises((PrefixBroken, ReplayBroken)):
            assemble(state, _decode, **options)
        return
    assembly = assemble(state, _decode, **options)
    assert assembly.session_metadata.get("tree") == expect["tree"]
    assert assembly.empty_reason == expect["empty_reason"]
    assert [_plain(sample) for sample in assembly.samples] == expect["samples"]
    assert [sample.metadata["turns"] for sample in assembly.samples] == [
        _merged(case, sample["metadata"]) for sample in expect["samples"]
    ]
    masks = sum(sum(sample["loss_mask"]) for sample in expect["samples"])
    assert (assembly.accounting.trained_tokens, assembly.accounting.sampled_tokens) == (
        masks,
        sum(len(turn["output"]) for turn in case["turns"]),
    )


def _state(case: dict[str, Any]) -> tuple[SessionState, dict[tuple[str, str], bytes]]:
    rows = "incremental" if case["incremental_replay"] else "full"
    spec = ReplaySpec(rows=rows, layers=case["replay_layers"], prefix="latest")
    opened = SessionOpened(
        id="0",
        mode=case["mode"],
        matcher="strict",
        altered_answer="refuse",
        family="default",
        max_trim_tokens=case["max_trim_tokens"],
        template="",
        labels={},
        pins={},
        replay={KIND: spec},
        tenant="",
        opened_at=0.0,
    )
    state = apply(None, OPENED_ID, opened)
    stored: dict[tuple[str, str], bytes] = {}
    for turn in case["turns"]:
        blob = _store_rows(state, case, turn, stored)
        state = apply(state, turn_id(turn["seq"]), _event(state, turn, {KIND: blob} if blob else {}))
    return state, stored


def _store_rows(
    state: SessionState, case: dict[str, Any], turn: dict[str, Any], stored: dict[tuple[str, str], bytes]
) -> Blob | None:
    """Stores the turn's payload as a recorder does: without what its parent's repeats."""
    given = turn.get("routed_experts")
    if given is None:
        return None
    layers, topk = case["replay_layers"], case["replay_topk"]
    numbers = given["seed"] * 100_000 + np.arange((given["start_row"] + given["rows"]) * layers * topk)
    values = numbers.astype(np.int32).reshape(-1, layers, topk)[given["start_row"] :]
    parent = state.turns[turn["parent"] - 1] if turn["parent"] else None
    blob, data = deduplicate(Rows(given["start_row"], values), parent, KIND, stored, 64)
    stored[str(turn["seq"]), KIND] = data
    return blob


def _event(state: SessionState, turn: dict[str, Any], replay: dict[str, Blob]) -> TurnRecorded:
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
        altered=[],
        request={},
        reply={},
        meta=turn["meta"],
        replay=replay,
        requested_at=turn["requested_at"],
        committed_at=turn["committed_at"],
    )


def _merged(case: dict[str, Any], metadata: dict[str, Any]) -> list[int]:
    """The seqs of a sample's turns: as many of its path as it has a lifecycle of."""
    path = [turn["seq"] for turn in case["turns"]]
    if case["mode"] == "tree":
        path = [node + 1 for node in metadata["leaf"]["path_node_ids"]]
    lifecycle = metadata["lifecycle"]
    return path[: len(lifecycle) if isinstance(lifecycle, list) else 1]


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
            if name not in ("session_id", "turns")  # the cases do not know them
        },
        "rollout_routed_experts": _plain_rows(sample.rollout_routed_experts),
        "rollout_indexer_topk": _plain_rows(sample.rollout_indexer_topk),
    }


def _plain_rows(rows: Any) -> dict[str, Any] | None:
    if rows is None:
        return None
    assert rows.dtype == np.int32
    return {"shape": list(rows.shape), "data": rows.ravel().tolist()}
