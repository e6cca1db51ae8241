"""Request bodies and headers: what is read, and what is refused with the field's name."""

import json
import math
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentape_contracts import http, limits
from tokentape_contracts.errors import ContractUnsupported, InvalidRequest
from tokentape_contracts.http import (
    PIN_FIELDS,
    OpenRequest,
    SamplesRequest,
    choose_contract,
    parse_object,
    values_in,
)

MATCHERS = ("strict", "loose_tool_call")


def _nested(levels: int) -> bytes:
    """A body of so many objects and arrays inside each other."""
    return b'{"metadata":{"a":' + b"[" * (levels - 2) + b"]" * (levels - 2) + b"}}"


NOT_AN_OBJECT: dict[str, bytes] = {
    "cut": b'{"a": 1',
    "a list": b"[]",
    "a string": b'"x"',
    "a number": b"1",
    "null": b"null",
    "NaN": b'{"a": NaN}',
    "infinity": b'{"a": 1e999}',
    "two values": b"{} {}",
    "not UTF-8": b'{"a": "\xff"}',
    "a lone surrogate": rb'{"a": "\ud800"}',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "single quotes": b"{'a': 1}",
    "a nesting bomb": _nested(100_000),
    "one level too deep": _nested(limits.JSON_DEPTH + 1),
    "many objects, one of them too deep": b'{"b":[' + b"{}," * 500 + _nested(limits.JSON_DEPTH - 1) + b"]}",
}


@pytest.mark.parametrize("case", NOT_AN_OBJECT)
@pytest.mark.parametrize(
    "parse",
    [parse_object, SamplesRequest.parse, lambda body: OpenRequest.parse(body, matchers=MATCHERS)],
    ids=["chat", "samples", "open"],
)
def test_a_body_that_is_no_object_is_refused(parse: Any, case: str) -> None:
    """Every parser answers bad JSON and a wrong top-level type with `invalid_request`."""
    with pytest.raises(InvalidRequest, match="body"):
        parse(NOT_AN_OBJECT[case])


@pytest.mark.parametrize(
    ("item", "values"),
    [(b"1", 1), (b"[]", 2), (b"{}", 2), (b'{"a":[1,2]}', 4), (b'"[,{"', 1), (rb'"\",[{"', 1), (rb'"\\"', 1)],
)
def test_values_of_a_body(item: bytes, values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body holds as many values as the limit, and not one more; commas in its texts are none."""
    monkeypatch.setattr(limits, "JSON_VALUES", 2 + 50_000 * values)
    at = b'{"metadata":{"x":[%s]}}' % b",".join([item] * 50_000)
    # The two objects and the list come on top, and the comma that the last item lacks is off.
    assert values_in(at) == 2 + 50_000 * values
    assert SamplesRequest.parse(at).metadata
    with pytest.raises(InvalidRequest, match="more than"):
        SamplesRequest.parse(at.replace(b"{", b'{"y":[],', 1))


@given(
    st.recursive(
        st.none() | st.integers(-9, 9) | st.text(), lambda of: st.lists(of) | st.dictionaries(st.text(), of)
    )
)
def test_values_are_counted_as_the_parser_finds_them(value: Any) -> None:
    """Whatever the texts hold, and wherever a block of the search ends."""
    marks = 0
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict | list):
            marks += 1 + max(0, len(item) - 1)
            pending += item.values() if isinstance(item, dict) else item
    for body in (orjson.dumps(value), json.dumps(value, separators=(",", ":")).encode()):
        assert values_in(body) == marks
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(http, "_BLOCK", 1)
            assert values_in(body) == marks


def test_a_body_may_nest_up_to_the_limit() -> None:
    """At the limit a body is read, and what it holds can be written again."""
    request = SamplesRequest.parse(_nested(limits.JSON_DEPTH))
    assert len(request.digest("1-0", 1)) == 32
    assert orjson.dumps({"samples": [{"metadata": [request.metadata]}]})


def test_depth_is_not_the_number_of_containers() -> None:
    """A wide body is not a deep one, and brackets in strings do not count."""
    body = {"a": [{"b": []}] * 1000, "text": "[{" * 1000}
    assert parse_object(orjson.dumps(body)) == body


@pytest.mark.parametrize("body", [b"", b" \n"])
def test_an_empty_body_means_the_defaults(body: bytes) -> None:
    """Opening and collecting need no body; a chat does."""
    assert OpenRequest.parse(body, matchers=MATCHERS) == OpenRequest()
    assert SamplesRequest.parse(body) == SamplesRequest(None, None, limits.COLLECT_DEADLINE_S)
    with pytest.raises(InvalidRequest, match="empty"):
        parse_object(body)


def test_an_open_body_is_read() -> None:
    """Every field of `POST /sessions` arrives; a pin of null is no pin."""
    body = {
        "mode": "linear",
        "matcher": "strict",
        "altered_answer": "keep",
        "labels": {"run": [1, {"a": None}]},
        "pins": {"temperature": 0.5, "top_p": None},
    }
    assert OpenRequest.parse(orjson.dumps(body), matchers=MATCHERS) == OpenRequest(
        "linear", "strict", "keep", {"run": [1, {"a": None}]}, {"temperature": 0.5}
    )


def test_an_open_body_of_an_existing_driver_is_read() -> None:
    """A sampling parameter at the top level is a pin, `evaluation` becomes a label."""
    request = OpenRequest.parse(b'{"evaluation": false, "temperature": 1.0}', matchers=MATCHERS)
    assert request == OpenRequest(None, None, None, {"evaluation": False}, {"temperature": 1.0})


@pytest.mark.parametrize("name", sorted(PIN_FIELDS))
def test_every_pin_may_stand_at_the_top_or_in_pins(name: str) -> None:
    """Both spellings pin the same field; the top level wins."""
    both = OpenRequest.parse(orjson.dumps({name: 1, "pins": {name: 2}}), matchers=MATCHERS)
    assert both.pins == {name: 1}
    assert OpenRequest.parse(orjson.dumps({"pins": {name: 2}}), matchers=MATCHERS).pins == {name: 2}


@pytest.mark.parametrize(
    "name", ["mode", "matcher", "altered_answer", "labels", "pins", "evaluation", "temperature"]
)
def test_null_is_the_default_of_an_open_field(name: str) -> None:
    """A field that is null counts as absent."""
    assert OpenRequest.parse(orjson.dumps({name: None}), matchers=MATCHERS) == OpenRequest()


OPEN_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mode unknown": ({"mode": "circular"}, "mode must be"),
    "mode a list": ({"mode": ["linear"]}, "mode must be"),
    "mode a number": ({"mode": 1}, "mode must be"),
    "matcher unknown": ({"matcher": "fuzzy"}, "matcher must be one of strict, loose_tool_call"),
    "altered_answer unknown": ({"altered_answer": "drop"}, "altered_answer must be one of refuse, keep"),
    "altered_answer a bool": ({"altered_answer": True}, "altered_answer must be"),
    "matcher an object": ({"matcher": {}}, "matcher must be"),
    "labels a list": ({"labels": []}, "labels must be an object"),
    "labels a string": ({"labels": "a"}, "labels must be an object"),
    "pins a list": ({"pins": ["temperature"]}, "pins must be an object"),
    "pins of an unknown field": ({"pins": {"model": "x"}}, "'model' cannot be pinned"),
    "pins of a server's field": ({"pins": {"logprobs": False}}, "'logprobs' cannot be pinned"),
    "evaluation a number": ({"evaluation": 0}, "evaluation must be true or false"),
    "evaluation a string": ({"evaluation": "true"}, "evaluation must be true or false"),
    "an unknown field": ({"temprature": 1}, "unknown field 'temprature'"),
}


@pytest.mark.parametrize("case", OPEN_REFUSED)
def test_an_open_body_is_refused(case: str) -> None:
    """A wrong type and an unknown field are `invalid_request` with the field's name."""
    body, message = OPEN_REFUSED[case]
    with pytest.raises(InvalidRequest, match=message):
        OpenRequest.parse(orjson.dumps(body), matchers=MATCHERS)


def test_a_samples_body_is_read() -> None:
    """Every field of `POST …/samples` arrives; seconds become a float."""
    body = b'{"max_seq_len": 1, "metadata": {"reward": 0.5}, "deadline_s": 3}'
    assert SamplesRequest.parse(body) == SamplesRequest(1, {"reward": 0.5}, 3.0)
    assert type(SamplesRequest.parse(body).deadline_s) is float


@pytest.mark.parametrize("name", ["max_seq_len", "metadata", "deadline_s"])
def test_null_is_the_default_of_a_samples_field(name: str) -> None:
    """A field that is null counts as absent."""
    assert SamplesRequest.parse(orjson.dumps({name: None})) == SamplesRequest()


SAMPLES_REFUSED: dict[str, tuple[bytes, str]] = {
    **{
        f"max_seq_len {value.decode()}": (b'{"max_seq_len": %b}' % value, "max_seq_len must be")
        for value in (b"-1", b"0", b"true", b"false", b"1.0", b'"8"', b"[1]", b"{}", b"1e30", b"9" * 40)
    },
    **{
        f"metadata {value.decode()}": (b'{"metadata": %b}' % value, "metadata must be an object")
        for value in (b"[]", b'"a"', b"1", b"true", b"false", b"0")
    },
    **{
        f"deadline_s {value.decode()}": (b'{"deadline_s": %b}' % value, "deadline_s must be")
        for value in (b"-1", b"0", b"0.0", b"-0.0", b"true", b'"5"', b"[5]", b"{}", b"3600.1", b"1e300")
    },
    "deadline_s NaN": (b'{"deadline_s": NaN}', "not JSON"),
    "deadline_s infinite": (b'{"deadline_s": 1e999}', "not JSON"),
    "a misspelt field": (b'{"max_seqlen": 5}', "unknown field 'max_seqlen'"),
}


@pytest.mark.parametrize("case", SAMPLES_REFUSED)
def test_a_samples_body_is_refused(case: str) -> None:
    """A wrong type or value and an unknown field are `invalid_request` with the field's name."""
    body, message = SAMPLES_REFUSED[case]
    with pytest.raises(InvalidRequest, match=message):
        SamplesRequest.parse(body)


def test_an_error_does_not_repeat_a_long_value() -> None:
    """The detail quotes the beginning of a wrong value, not a whole body."""
    with pytest.raises(InvalidRequest) as caught:
        SamplesRequest.parse(orjson.dumps({"max_seq_len": "x" * 100_000}))
    assert len(caught.value.detail) < 200


def test_the_longest_deadline() -> None:
    """A deadline of exactly the limit is read; the next number above it is refused."""
    longest_s = limits.COLLECT_DEADLINE_MAX_S
    assert SamplesRequest.parse(orjson.dumps({"deadline_s": longest_s})).deadline_s == longest_s
    for beyond in (math.nextafter(longest_s, math.inf), int(longest_s) + 1):
        with pytest.raises(InvalidRequest, match="at most 3600"):
            SamplesRequest.parse(orjson.dumps({"deadline_s": beyond}))


def test_equal_outcomes_have_equal_digests() -> None:
    """Key order, spacing and the deadline change no byte of the reply, hence not its name."""
    one = SamplesRequest.parse(b'{"metadata": {"a": 1, "b": {"c": 2, "d": 3}}, "deadline_s": 5}')
    two = SamplesRequest.parse(b'{"deadline_s":9,"max_seq_len":null,"metadata":{"b":{"d":3,"c":2},"a":1}}')
    assert one.digest("7-0", 1) == two.digest("7-0", 1)
    assert SamplesRequest().digest("7-0", 1) == SamplesRequest.parse(b"{}").digest("7-0", 1)


def test_different_outcomes_have_different_digests() -> None:
    """The tail, the contract and every parameter that changes the reply change its name."""
    metadata = [None, {}, {"a": 1}, {"a": 1.0}, {"a": True}, {"a": "1"}, {"a": None}]
    digests = [SamplesRequest(metadata=m).digest("7-0", 1) for m in metadata]
    digests += [SamplesRequest(max_seq_len=n).digest("7-0", 1) for n in (1, 11)]
    digests += [SamplesRequest().digest(tail, contract) for tail, contract in (("7-1", 1), ("7-0", 2))]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    ("accept", "version"),
    [(None, 1), ("1", 1), ("2", 2), ("1,2", 2), (" 2 , 1 ", 2), ("1,7", 1), ("x, 2", 2), ("2,2", 2)],
)
def test_the_highest_common_version_is_chosen(accept: str | None, version: int) -> None:
    """Without the header it is 1, else the highest version that both sides know."""
    assert choose_contract(accept, (1, 2)) == version


@pytest.mark.parametrize("accept", ["", " ", ",", "0", "3", "01", "1.0", "-1", "one", "*", "1 2", "²"])
def test_no_common_version_is_an_error(accept: str) -> None:
    """A header that names no version of this server is `contract_unsupported`, and says what there is."""
    with pytest.raises(ContractUnsupported, match="this server writes 1, 2"):
        choose_contract(accept, (1, 2))
