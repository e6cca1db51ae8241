"""What GET shows of a session."""

from typing import Any

import orjson
import pytest

from tests.support.sessions import assistant, opened, sealed, state_of, turn, user
from tokentape_contracts.events import Blob, ReplaySpec
from tokentape_core.domain.assemble import expected_accounting
from tokentape_core.domain.state import SessionState
from tokentape_core.domain.view import compact, records, session_metadata


def _metadata(state: SessionState) -> dict[str, Any]:
    return session_metadata(state, expected_accounting(state))


PATH = "/v1/chat/completions"
CALL = [{"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}]
ONE = turn(
    messages=[user("q1"), assistant("a1")],
    tools=[{"type": "function"}],
    request={"model": "m", "temperature": 0.5},
    reply={"object": "chat.completion", "model": "m", "choices": [{"index": 0, "logprobs": {"content": []}}]},
    meta={"cached_tokens": 1, "weight_version": "5"},
    response_id="r1",
    logprobs=[-0.5, -0.25],
)
TWO = turn(
    parent=1,
    keep=3,
    suffix=[7, 8],
    output=[9],
    logprobs=[-1.0],
    messages=[user("q2"), assistant(None, tool_calls=CALL)],
    finish="tool_calls",
    response_id="r2",
    requested_at=103.0,
    committed_at=104.0,
)


def test_a_record_is_the_request_and_the_response() -> None:
    """The shape of one record, with the full messages and prompt ids, as existing tools read it."""
    [record] = records(state_of(ONE), PATH)
    record["request"]["input_ids"] = record["request"]["input_ids"].tolist()
    assert record == {
        "timestamp": 102.0,
        "request_timestamp": 101.0,
        "method": "POST",
        "path": "/v1/chat/completions",
        "status_code": 200,
        "request": {
            "model": "m",
            "temperature": 0.5,
            "messages": [user("q1")],
            "input_ids": [1, 2],
            "tools": [{"type": "function"}],
        },
        "response": {
            "id": "r1",
            "object": "chat.completion",
            "model": "m",
            "choices": [
                {
                    "index": 0,
                    "logprobs": {"content": []},
                    "message": assistant("a1"),
                    "finish_reason": "stop",
                    "meta_info": {
                        "cached_tokens": 1,
                        "weight_version": "5",
                        "output_token_logprobs": [[-0.5, 3, None], [-0.25, 4, None]],
                    },
                }
            ],
        },
    }


def test_a_later_record_repeats_its_path() -> None:
    """Messages and prompt ids are those that the engine received, tools those in force."""
    _, record = records(state_of(ONE, TWO), PATH)
    assert record["request"]["messages"] == [user("q1"), assistant("a1"), user("q2")]
    assert record["request"]["input_ids"].tolist() == [1, 2, 3, 7, 8]
    assert record["request"]["tools"] == [{"type": "function"}]
    [choice] = record["response"]["choices"]
    assert (choice["message"]["tool_calls"], choice["finish_reason"]) == (CALL, "tool_calls")
    assert record["response"]["id"] == "r2"
    assert (record["request_timestamp"], record["timestamp"]) == (103.0, 104.0)


def test_records_are_those_of_the_active_path() -> None:
    """A turn that was retried is not shown, and neither are tools where none are in force."""
    retry = turn(messages=[user("q1"), assistant("better")])
    [record] = records(state_of(ONE, retry), PATH)
    assert record["response"]["choices"][0]["message"] == assistant("better")
    assert "tools" not in record["request"]


def test_a_session_without_turns_has_no_records() -> None:
    """An opened session shows an empty list."""
    assert list(records(state_of(), PATH)) == []


def test_records_change_nothing_that_is_stored() -> None:
    """What is shown was put together anew: the events keep their own objects."""
    state = state_of(ONE)
    before = orjson.dumps(compact(state), option=orjson.OPT_SERIALIZE_NUMPY)
    [record] = records(state, PATH)
    record["response"]["choices"][0]["meta_info"].clear()
    record["request"]["messages"].clear()
    record["request"]["input_ids"][:] = 0
    assert orjson.dumps(compact(state), option=orjson.OPT_SERIALIZE_NUMPY) == before


@pytest.mark.parametrize("turns", [[], [ONE], [ONE, TWO]])
def test_views_can_be_written_as_json(turns: list) -> None:
    """Arrays and all: orjson with its numpy option takes every view as it is."""
    state = state_of(*turns)
    content = [list(records(state, PATH)), compact(state), _metadata(state)]
    assert orjson.loads(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY))


def test_the_compact_form_is_the_events() -> None:
    """One object for each event in order, with type, version and exactly the event's fields."""
    first, last = opened(labels={"run": 7}), sealed()
    view = compact(state_of(ONE, TWO, first=first, last=last))
    assert [(e["type"], e["v"], e.get("seq"), e["id"]) for e in view] == [
        ("session.opened", 3, None, first.id),
        ("turn.recorded", 3, 1, ONE.id),
        ("turn.recorded", 3, 2, TWO.id),
        ("session.sealed", 1, None, last.id),
    ]
    assert set(view[0]) == {
        *("type", "v", "id", "mode", "matcher", "family", "max_trim_tokens", "template", "labels", "pins"),
        *("altered_answer", "replay", "tenant", "opened_at"),
    }
    assert set(view[1]) == {
        *("type", "v", "seq", "id", "parent", "keep", "suffix", "output", "logprobs", "finish"),
        *("response_id", "messages", "tools", "altered", "request", "reply", "meta", "replay"),
        *("requested_at", "committed_at"),
    }
    assert (view[0]["labels"], view[0]["replay"], view[1]["replay"]) == ({"run": 7}, {}, {})
    assert (view[2]["keep"], view[2]["suffix"].tolist(), view[2]["output"].tolist()) == (3, [7, 8], [9])
    assert view[3] == {
        "type": "session.sealed",
        "v": 1,
        "id": last.id,
        "reason": "deleted",
        "sealed_at": 103.0,
    }


def test_the_compact_form_refers_to_replay_rows() -> None:
    """It shows how the session asks for them and what each turn was sent of them, not the rows."""
    spec = ReplaySpec(rows="full", layers=2, prefix="recorded")
    blob = Blob(start=0, rows=3, layers=2, topk=4, dtype="u1", stored=((0, 1), (2, 1)), parts=1)
    recorded = turn(replay={"routed_experts": blob})
    view = compact(state_of(recorded, first=opened(replay={"routed_experts": spec})))
    shown = orjson.loads(orjson.dumps(view, option=orjson.OPT_SERIALIZE_NUMPY))
    assert shown[0]["replay"] == {"routed_experts": {"rows": "full", "layers": 2, "prefix": "recorded"}}
    of_rows = {"start": 0, "rows": 3, "layers": 2, "topk": 4, "dtype": "u1"}
    assert shown[1]["replay"] == {
        "routed_experts": {**of_rows, "stored": [[0, 1], [2, 1]], "parts": 1},
    }


def test_session_metadata_names_the_head_path() -> None:
    """All tokens of the path to the newest turn, whatever was recorded beside it."""
    metadata = _metadata(state_of(ONE, TWO, first=opened(max_trim_tokens=5)))
    assert metadata["accumulated_token_ids"].tolist() == [1, 2, 3, 7, 8, 9]
    assert metadata["max_trim_tokens"] == 5
    assert _metadata(state_of(ONE, turn(suffix=[5], output=[])))["accumulated_token_ids"].tolist() == [5]


def test_session_metadata_counts_every_generation() -> None:
    """The counters are those of all turns, also of one that was retried and is not on the head's path."""
    meta = {"cached_tokens": 1, "prompt_tokens": 2, "spec_verify_ct": 3}
    state = state_of(turn(meta=meta), turn(meta=meta), turn(parent=2, keep=4, output=[5], meta=meta))
    assert [t.seq for t in state.turns[-1].path] == [2, 3]
    assert _metadata(state)["counters"] == {
        "generations": 3,
        "prefix_cache_info": {"cached_tokens": 3, "total_prompt_tokens": 6},
        "spec_info": {"spec_verify_ct": 9, "completion_tokens": 5},
    }


def test_session_metadata_of_an_empty_session() -> None:
    """Without a turn there are no tokens and nothing was counted, but the keys are there."""
    metadata = _metadata(state_of())
    assert metadata["accumulated_token_ids"].tolist() == []
    assert metadata["counters"] == {
        "generations": 0,
        "prefix_cache_info": {"cached_tokens": 0, "total_prompt_tokens": 0},
        "spec_info": {},
    }
