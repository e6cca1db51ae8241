"""The catch-all against hostile requests, byte for byte through the real HTTP server."""

import http.client
import re
import socket
from urllib.parse import unquote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fuzz.conftest import FUZZ, Wire
from tokentape_api.routes.proxy import GENERATING
from tokentape_contracts import limits

SECRET = b"s3cr3t"


_piece = st.one_of(
    st.sampled_from(
        [
            *(
                b"..",
                b".",
                b"/",
                b"//",
                b"%2e%2e",
                b"%2E.",
                b"%2f",
                b"%5c",
                b"\\",
                b"%252e%252e",
                b"%25",
                b"%",
            ),
            *(
                b"%00",
                b"%0d%0a",
                b"%0aHost:%20evil.test",
                b"\r\n",
                b"\n",
                b" ",
                b"\t",
                b"%20",
                b"%7f",
                b"%ff",
            ),
            *(
                b"@evil.test",
                b":80",
                b"http://evil.test/",
                b"//evil.test/",
                b";",
                b"..;/",
                b"?",
                b"#",
                b"&a=b",
            ),
            *(b"v1/models", b"v1/chat/completions", b"v1/completions", b"generate", b"samples", b"\xc3\xa9"),
        ]
    ),
    st.binary(min_size=1, max_size=3),
    st.integers(0, 255).map(lambda byte: b"%%%02x" % byte),
    st.text("abcXYZ019-_~", min_size=1, max_size=5).map(str.encode),
)
_path = st.lists(_piece, max_size=8).map(b"".join)
_prefix = st.sampled_from(
    [b"/sessions/%s/", b"http://evil.test/sessions/%s/", b"//evil.test/sessions/%s/", b"/sessions/%s//"]
)
_value = st.one_of(
    st.sampled_from(
        [b"evil.test", b"x", b"", b"caf\xe9", b"a\r\nX-Other: 1", b"a\nb", b"[", b"x?y", b"\x00"]
    ),
    st.binary(max_size=6),
)
_header = st.one_of(
    st.tuples(
        st.sampled_from(
            [b"Authorization", b"Cookie", b"X-Api-Key", b"api-key", b"Proxy-Authorization", b"X-Hop", b"TE"]
        ),
        st.just(SECRET),
    ),
    st.tuples(
        st.sampled_from([b"Host", b"X-Forwarded-Host", b"X-SMG-Routing-Key", b"X-Other", b"Keep-Alive"]),
        _value,
    ),
    st.tuples(
        st.just(b"Connection"), st.sampled_from([b"x-hop", b"X-Hop, keep-alive", b"close", b"upgrade"])
    ),
    st.tuples(st.just(b"Upgrade"), st.sampled_from([b"websocket", b"h2c"])),
    st.tuples(st.binary(max_size=4), _value),
)
_method = st.sampled_from(
    [b"GET", b"POST", b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"HEAD", b"TRACE", b"get"]
)


VALUES = {
    b"caf\xe9": "café".encode(),
    b"\xff\xfe": "ÿþ".encode(),
    b"caf\xc3\xa9": "café".encode(),
}
"""Values of a header → what the engine gets."""


def ask(wire: Wire, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]]) -> int:
    """The status of the answer to one request; a server that does not answer fails the test."""
    lines = [b"%s %s HTTP/1.1" % (method, target), *(b"%s: %s" % header for header in headers)]
    raw = b"\r\n".join([*lines, b"Connection: x-hop", b"Content-Length: 0", b"", b""])
    with socket.create_connection(("127.0.0.1", wire.port), timeout=5) as connection:
        connection.sendall(raw)
        reply = http.client.HTTPResponse(connection, method=method.decode())
        reply.begin()
        reply.read()
        return reply.status


def fields_of(head: bytes) -> list[tuple[str, str]]:
    lines = head.decode("latin-1").split("\r\n")[1:-2]
    return [(name.lower(), value) for name, _, value in (line.partition(": ") for line in lines)]


def ensure_harmless(wire: Wire, head: bytes) -> None:
    """What reached the engine is one plain request for a path under its root."""
    match = re.fullmatch(rb"([A-Z]+) (/[\x21-\x7e]*) HTTP/1\.1", head.split(b"\r\n")[0])
    assert match, head
    path = match[2].partition(b"?")[0].decode()
    once = unquote(path)
    assert unquote(once) == once, "encoded twice"
    parts = re.split(r"[/\\]", once[1:])
    assert not {".", ".."} & set(parts), path
    assert "//" not in once
    assert once.isprintable()
    assert once.strip("/").lower() not in GENERATING | {"", "samples", "v1/chat/completions"}
    fields = fields_of(head)
    assert [value for name, value in fields if name == "host"] == [f"127.0.0.1:{wire.engine.port}"]
    assert [value for name, value in fields if name == "x-smg-routing-key"] == [wire.session_id]
    names = {name for name, _ in fields}
    assert not names & {"x-hop", "upgrade", "te", "keep-alive", "transfer-encoding"}
    assert SECRET not in head


@given(_method, _prefix, _path, st.lists(_header, max_size=5))
@settings(FUZZ, max_examples=400)
@example(b"GET", b"/sessions/%s/", b"%2e%2e/admin", [])
@example(b"GET", b"/sessions/%s/", b"..%5c..%5cadmin", [])
@example(b"GET", b"/sessions/%s/", b"%252e%252e/admin", [])
@example(b"GET", b"http://evil.test/sessions/%s/", b"v1/models", [(b"Host", b"evil.test")])
@example(b"GET", b"/sessions/%s//", b"evil.test/v1/models", [])
@example(b"GET", b"/sessions/%s/", b"@evil.test/v1/models", [])
@example(b"GET", b"/sessions/%s/", b"v1/models HTTP/1.1\r\nHost: evil.test\r\nX-Hop:", [])
@example(b"GET", b"/sessions/%s/", b"v1/models", [(b"X-Other", b"caf\xe9")])
@example(b"GET", b"/sessions/%s/", b"v1/models?a=%00%ff", [(b"Host", b"[")])
@example(b"GET", b"/sessions/%s/", b"v1/models", [(b"Connection", b"close"), (b"X-Hop", SECRET)])
@example(b"GET", b"/sessions/%s/", b"v1%2fchat%2fcompletions%2f", [])
def test_no_request_gets_past_the_engine(
    wire: Wire, method: bytes, prefix: bytes, path: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    """Whatever is asked: no 500, no other host, no path outside, no credential, no second request."""
    wire.took()
    status = ask(wire, method, prefix.replace(b"%s", wire.session_id.encode()) + path, headers)
    assert status < 500
    heads = wire.took()
    assert len(heads) <= 1
    for head in heads:
        ensure_harmless(wire, head)
    assert wire.network.hosts <= {("127.0.0.1", wire.engine.port)}


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"/sessions/%s/v1/models", 200),
        (b"http://evil.test/sessions/%s/v1/models", 200),
        (b"//evil.test/sessions/%s/v1/models", 404),
        (b"/sessions/%s//evil.test/v1/models", 400),
        (b"/sessions/%s/../../admin", 400),
        (b"/sessions/%s/%%2e%%2e/admin", 400),
        (b"/sessions/%s/..%%2fadmin", 400),
        (b"/sessions/%s/..%%5cadmin", 400),
        (b"/sessions/%s/%%252e%%252e/admin", 400),
        (b"/sessions/%s/v1/x%%00", 400),
        (b"/sessions/%s/v1/x%%0d%%0aHost:%%20evil.test", 404),
        (b"/sessions/%s/v1/x%%ff", 400),
        (b"/sessions/%s/v1/completions", 404),
        (b"/sessions/%s/v1%%2fcompletions", 404),
        (b"/sessions/%s/v1/models HTTP/1.1\r\nHost: evil.test\r\nX: ", 200),
    ],
)
def test_what_becomes_of_each_trick(wire: Wire, target: bytes, status: int) -> None:
    """The known tricks, and what each gives."""
    wire.took()
    target = target.replace(b"%s", wire.session_id.encode()).replace(b"%%", b"%")
    assert ask(wire, b"GET", target, [(b"Host", b"api")]) == status
    heads = wire.took()
    assert len(heads) == (status == 200)
    for head in heads:
        ensure_harmless(wire, head)


@pytest.mark.parametrize("value", VALUES)
def test_a_header_reaches_the_engine(wire: Wire, value: bytes) -> None:
    """As it came, if it is UTF-8; Latin-1 is forwarded as UTF-8."""
    wire.took()
    target = b"/sessions/%s/v1/models" % wire.session_id.encode()
    assert ask(wire, b"GET", target, [(b"Host", b"api"), (b"X-Name", value)]) == 200
    [head] = wire.took()
    assert b"x-name: %s\r\n" % VALUES[value] in head


def test_a_path_and_a_query_reach_the_engine_as_they_are(wire: Wire) -> None:
    """No character is encoded anew or decoded on the way."""
    wire.took()
    target = b"v1/models/a%%20b%%C3%%A9+c:d@e!?x=%%2F%%41&y='z'%%3b;[1]|2"
    asked = b"/sessions/%s/" % wire.session_id.encode() + target % ()
    assert ask(wire, b"GET", asked, [(b"Host", b"api")]) == 200
    [head] = wire.took()
    path, _, query = head.split(b" ")[1].partition(b"?")
    assert unquote(path.decode()) == "/v1/models/a bé+c:d@e!"
    assert query == target.partition(b"?")[2] % ()


@given(st.integers(1, 6), st.sampled_from([b"a", b"%20", b"@", b"%c3%a9"]))
@settings(FUZZ, max_examples=20)
def test_long_targets(wire: Wire, size: int, piece: bytes) -> None:
    """However long a path is, the answer is 200 or 400: no URL becomes too long for the client behind us."""
    target = b"/sessions/%s/v1/%s" % (wire.session_id.encode(), piece * (4**size * 8))
    assert ask(wire, b"GET", target, [(b"Host", b"api")]) in (200, 400)
    wire.took()


@pytest.mark.parametrize("value", VALUES)
def test_a_header_of_a_chat_reaches_the_engine(wire: Wire, value: bytes) -> None:
    """By the same rule; no credential does."""
    wire.took()
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    head = (
        b"POST /sessions/%s/v1/chat/completions HTTP/1.1\r\nHost: api\r\nX-Name: %s\r\nAuthorization: %s\r\n"
    )
    with socket.create_connection(("127.0.0.1", wire.port), timeout=5) as connection:
        raw = head % (wire.session_id.encode(), value, b"Bearer " + SECRET)
        connection.sendall(raw + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        reply = http.client.HTTPResponse(connection)
        reply.begin()
        assert (reply.status, b"engine_reply_invalid" in reply.read()) == (502, True)
    [got] = wire.took()
    sent = dict(line.lower().split(b": ", 1) for line in got.split(b"\r\n")[1:-2])
    assert sent[b"x-name"] == VALUES[value].lower()
    assert SECRET not in got


def exchange(wire: Wire, *pieces: bytes) -> bytes:
    """What comes back until the server hangs up, for bytes that are sent one piece after the other."""
    got = b""
    with socket.create_connection(("127.0.0.1", wire.port), timeout=5) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            while more := connection.recv(1 << 16):
                got += more
        except ConnectionError:
            pass
    return got


GET = b"GET /health HTTP/1.1\r\nHost: api\r\n"
END = b"Connection: close\r\n\r\n"


@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_heads(wire: Wire, cut: int) -> None:
    """A head of exactly the limit is read, in one header or in many; one byte more is 400."""
    others = len(b"/healthHost: api\r\nConnection: close\r\n")
    room = limits.HEAD_BYTES - others - cut * len(b"X-00000: \r\n")
    values = [room // cut + (number < room % cut) for number in range(cut)]
    headers = [b"X-%05d: %s\r\n" % (number, b"v" * size) for number, size in enumerate(values)]
    assert b"200 OK" in exchange(wire, GET + b"".join(headers) + END)
    over = [headers[0].replace(b": ", b": v"), *headers[1:]]
    assert b"400 Bad Request" in exchange(wire, GET + b"".join(over) + END)


def test_a_head_without_an_end(wire: Wire) -> None:
    """A URL, a name or a value that never ends is cut off, long before it fills the memory."""
    endless = [b"v" * limits.MiB] * 64
    for begin in (b"GET /", GET + b"X-", GET + b"X-Long: "):
        assert b"200" not in exchange(wire, begin, *endless)[:20]


def test_a_long_body_and_the_next_request(wire: Wire) -> None:
    """What belongs to a body does not count, also if the next request comes with its end."""
    body = b" " * limits.SMALL_BODY_BYTES
    post = b"POST /sessions HTTP/1.1\r\nHost: api\r\nContent-Length: %d\r\n\r\n" % len(body)
    got = exchange(wire, post + body + post, body + GET + END)
    assert got.count(b"HTTP/1.1 200 OK") == 3
