"""Answers taken apart as they come in: payloads decode exactly, the JSON beside them stays untouched."""

import base64
import io
import json
from typing import Any

import numpy as np
import orjson
import pytest
from numpy.typing import NDArray

from tokentape_api.engine.body import SHORT, Body
from tokentape_api.engine.payload import BLOCK, Narrow, Npy, Payload, PayloadInvalid
from tokentape_contracts import limits
from tokentape_contracts.errors import EngineReplyInvalid

LONG = np.arange(39_999, dtype=np.int32)
"""Longer than SHORT as text."""


def encoded(values: NDArray[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def decoded(text: str, piece: int = 1 << 30) -> NDArray[Any]:
    payload = Payload("routed_experts", Narrow())
    for start in range(0, len(text), piece):
        payload.feed(text[start : start + piece].encode())
    payload.close()
    return payload.values()[0]


def read(content: bytes, piece: int = 1 << 30, wanted: tuple[str, ...] = ("routed_experts",)) -> Body:
    body = Body(wanted, Narrow)
    for start in range(0, len(content), piece):
        body.feed(content[start : start + piece])
    return body


@pytest.mark.parametrize(
    ("highest", "dtype"),
    [(0, "u1"), (255, "u1"), (256, "u2"), (65535, "u2"), (65536, "i4"), (2**31 - 1, "i4"), (-1, "i4")],
)
@pytest.mark.parametrize("at", [0, 150_000, 299_999])
def test_values_are_narrowed(highest: int, dtype: str, at: int) -> None:
    """Values come out as they were, in the smallest type that holds all, wherever the widest stands."""
    values = np.arange(300_000, dtype=np.int32) % 200
    values[at] = highest
    found = decoded(encoded(values))
    assert found.dtype == np.dtype(dtype)
    assert np.array_equal(found, values)


@pytest.mark.parametrize("piece", [1, 3, 4, 65_537, BLOCK, BLOCK + 1])
def test_pieces_make_no_difference(piece: int) -> None:
    """A payload is the same however its text was cut on the way."""
    values = np.arange(2_000 if piece < 5 else 500_000, dtype=np.int32)
    assert np.array_equal(decoded(encoded(values), piece), values)


@pytest.mark.parametrize(
    ("text", "mention"),
    [
        ("AAA", "not base64"),
        ("AAAA-_AA", "not base64"),
        ("AAAA AAAA", "not base64"),
        ("AAAA\\/AA", "not base64"),
        ("é" * 8, "not base64"),
        ("A" * BLOCK + "*" * 8, "not base64"),
        ("A" * (BLOCK - 2) + "==" + "AAAA", "not base64: text follows its padding"),
        ("AAAA", "whole number of 4-byte integers"),
    ],
)
def test_text_that_is_no_payload(text: str, mention: str) -> None:
    """Anything but base64 of whole integers is refused, wherever it begins to be wrong."""
    payload = Payload("routed_experts", Narrow())
    payload.feed(text.encode())
    payload.close()
    with pytest.raises(PayloadInvalid, match=mention):
        payload.values()


def test_too_large_a_payload_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload above its limit is refused by the length of its text; one at the limit is read."""
    monkeypatch.setattr(limits, "REPLAY_BYTES", 4 * len(LONG))
    assert np.array_equal(decoded(encoded(LONG)), LONG)
    with pytest.raises(EngineReplyInvalid, match=f"routed_experts .* above {4 * len(LONG)} bytes"):
        decoded(encoded(np.append(LONG, LONG[:3])))


def npy(values: NDArray[Any], **how: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values, **how)
    return file.getvalue()


@pytest.mark.parametrize("dtype", ["u1", "u2", "i4"])
def test_npy(dtype: str) -> None:
    """An .npy payload says its shape, and is narrowed too."""
    values = (np.arange(300_000) % 100).astype(dtype).reshape(1000, 100, 3)
    payload = Payload("routed_experts", Npy())
    text = base64.b64encode(npy(values))
    for start in range(0, len(text), 1000):
        payload.feed(text[start : start + 1000])
    payload.close()
    found, shape = payload.values()
    assert (found.dtype, shape) == (np.uint8, values.shape)
    assert np.array_equal(found.reshape(values.shape), values)


HEADERS = [
    *(
        "(" * 500,
        "-" * 3_000 + "1",
        "{[]: 1}",
        "{1: 2, 'a': 3}",
        "[]",
        "5",
        "'''",
        "1 if",
        "(\n  1\n 2",
        "\0",
    ),
    *(
        f"{{'descr': {descr}, 'fortran_order': False, 'shape': (1,)}}"
        for descr in (
            "()",
            "('<i4',)",
            "[('a',)]",
            "[[]]",
            "5",
            "None",
            "'<i4,<i4'",
            "'M8[99999999999999999ns]'",
        )
    ),
    "{'descr': '<i4', 'fortran_order': 0, 'shape': (1,)}",
    "{'descr': '<i4', 'fortran_order': False, 'shape': (1" + "0" * 5_000 + ",)}",
    "{'descr': '<i4', 'fortran_order': False, 'shape': (1.0,)}",
]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header[:40])
def test_headers_that_are_none(header: str, version: int) -> None:
    """numpy evaluates the header, and fails in many ways; it is one refusal."""
    length = len(header).to_bytes(2 * version, "little")
    payload = Payload("routed_experts", Npy())
    payload.feed(base64.b64encode(b"\x93NUMPY" + bytes([version, 0]) + length + header.encode() + bytes(8)))
    payload.close()
    with pytest.raises(PayloadInvalid, match=r"npy file"):
        payload.values()


@pytest.mark.parametrize(
    ("data", "mention"),
    [
        (b"", "empty"),
        (b"not a file at all", "not an .npy file"),
        (npy(np.zeros((2, 2, 2), np.uint8))[:40], "not an .npy file"),
        (npy(np.asfortranarray(np.ones((2, 3, 4), np.uint8))), "Fortran order"),
        (npy(np.zeros(3, np.float32)), "float32"),
        (npy(np.zeros(3, np.int64)), "int64"),
        (npy(np.zeros(3, ">i4")), ">i4"),
        (npy(np.array([{}], dtype=object), allow_pickle=True), "object"),
        (npy(np.zeros(3, np.uint16))[:-1], "whole number of 2-byte integers"),
    ],
)
def test_npy_that_is_none(data: bytes, mention: str) -> None:
    """Another layout than a plain array of small integers is refused, and nothing is unpickled."""
    payload = Payload("routed_experts", Npy())
    payload.feed(base64.b64encode(data))
    payload.close()
    with pytest.raises(PayloadInvalid, match=mention):
        payload.values()


CONTENTS = [
    'say "routed_experts": "AAAA"',
    '{"routed_experts": "AAAA"}',
    '"routed_experts"',
    "ends with a backslash \\",
    'ends with a quoted key "routed_experts"',
    '\\"routed_experts\\": \\"' + "x" * (2 * SHORT),
    '"routed_experts":"' + "A" * (2 * SHORT) + '"',
    "routed_experts",
    "\\" * 7 + '"routed_experts": "',
    'é\n\t"indexer_topk" : "' + "B" * (2 * SHORT),
]


@pytest.mark.parametrize("piece", [1 << 30, 65_536, 997])
@pytest.mark.parametrize("content", CONTENTS)
def test_text_about_payloads_is_text(content: str, piece: int) -> None:
    """What a model says is never taken for a payload; the real one is found beside it."""
    for answer in (
        {"message": {"content": content}, "routed_experts": encoded(LONG)},
        {"routed_experts": encoded(LONG), "message": {"content": content}},
    ):
        body = read(orjson.dumps(answer), piece)
        parsed = body.parse()
        assert parsed["message"] == {"content": content}
        assert np.array_equal(body.claim("routed_experts", parsed["routed_experts"]).values()[0], LONG)
        assert body.unclaimed == []


@pytest.mark.parametrize("key", ["routed_experts", "indexer_topk", 'x"routed_experts', "routed_experts\\"])
@pytest.mark.parametrize("value", ["routed_experts", "", "short", None, 5, ["x"], {"routed_experts": "y"}])
def test_a_payloads_name_as_another_key(key: str, value: Any) -> None:
    """An object inside a message may have a key of that name: it comes out as it was."""
    answer = {"tool": {key: value, "routed_experts": value}, "more": [key, value]}
    for content in (orjson.dumps(answer), json.dumps(answer, indent=2).encode()):
        assert read(content, 7).parse() == answer


def test_the_key_may_be_cut_anywhere() -> None:
    """A chunk's end in the middle of a payload's key or white space hides nothing."""
    content = b'{"a": [1, 2], "routed_experts" \n :\t  "%s", "z": 1}' % encoded(LONG).encode()
    for cut in range(10, 50):
        body = Body(("routed_experts",), Narrow)
        for part in (content[:cut], content[cut : cut + 9], content[cut + 9 :]):
            body.feed(part)
        parsed = body.parse()
        assert len(parsed["routed_experts"]) < 64
        assert parsed["z"] == 1
        assert np.array_equal(body.claim("routed_experts", parsed["routed_experts"]).values()[0], LONG)


@pytest.mark.parametrize("length", [SHORT - 1, SHORT, SHORT + 1])
def test_short_and_long_payloads_are_the_same(length: int) -> None:
    """Whether a payload stayed in the JSON or not makes no difference."""
    values = LONG[: length * 3 // 16]
    body = read(orjson.dumps({"routed_experts": encoded(values)}), 1000)
    found = body.claim("routed_experts", body.parse()["routed_experts"]).values()[0]
    assert np.array_equal(found, values)


def test_an_unwanted_payload_is_left_out() -> None:
    """A long payload that nobody asked for is not decoded, and can still be taken out of the JSON."""
    body = read(orjson.dumps({"indexer_topk": "*" * (2 * SHORT), "routed_experts": encoded(LONG)}), 5000)
    parsed = body.parse()
    assert sorted(body.unclaimed) == ["indexer_topk", "routed_experts"]
    body.claim("indexer_topk", parsed["indexer_topk"])
    assert body.unclaimed == ["routed_experts"]
