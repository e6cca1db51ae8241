"""Sampled tokens that no sample trains: they are told, and may be made an error."""

import logging
import pickle
from typing import Any

import httpx
import pytest

from tests.driver.fake import BASE_URL, TOKENS, FakeServer, payload, reply_of
from tokentape_contracts.accounting import Accounting, LeftOut, Reason
from tokentape_contracts.errors import InvalidRequest
from tokentape_driver import (
    Collected,
    DriverError,
    RolloutSample,
    SyncClient,
    TokensLeftOut,
    TokentapeClient,
    UnexpectedReply,
    rollout,
)
from tokentape_driver.left_out import describe

ONE_OF_EACH = ["POST /sessions", "POST /sessions/s1/samples", "DELETE /sessions/s1"]
LEFT_OUT = [
    LeftOut(1, 1, Reason.TRIMMED),
    LeftOut(2, 40, Reason.RETRIED, by=3),
    LeftOut(3, 1, Reason.TRIMMED),
    LeftOut(4, 2, Reason.OVER_MAX_SEQ_LEN),
    LeftOut(5, 20, Reason.OVER_MAX_SEQ_LEN),
]
SOME = Accounting(generations=5, sampled_tokens=91, trained_tokens=27, left_out=LEFT_OUT)
ALL_TRAINED = Accounting(generations=2, sampled_tokens=2, trained_tokens=2)
TRIMMED = Accounting(2, 3, 2, [LeftOut(1, 1, Reason.TRIMMED)])
TEXT = (
    "session s1: 62 of 91 sampled tokens are not trained: turn 2 (40, retried by turn 3), "
    'turns 4-5 (22, over_max_seq_len); see "Where did my tokens go?" in the docs'
)


def server_of(accounting: Accounting) -> FakeServer:
    return FakeServer(samples=reply_of(payload(accounting=accounting.to_json())))


async def idle(base_url: str, sample: Any) -> None:
    """An agent that does nothing."""


async def collect(server: FakeServer, **options: Any) -> Collected[RolloutSample]:
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        session = await client.open_session()
        return await session.collect_samples(RolloutSample(), **options)


async def play(server: FakeServer, **options: Any) -> Any:
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        return await rollout(idle, RolloutSample(index=1), client=client, **options)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "tokentape.driver" and record.levelno == logging.WARNING
    ]


async def test_the_accounting_is_delivered() -> None:
    """A collect gives the accounting as a value, and leaves it in the metadata as the server sent it."""
    collected = await collect(server_of(SOME))
    assert collected.accounting == SOME
    assert collected.session_metadata["accounting"] == SOME.to_json()
    assert collected.samples[0].metadata["accounting"] == SOME.to_json()


async def test_a_server_without_accounting(caplog: pytest.LogCaptureFixture) -> None:
    """Where the server counts nothing the accounting is None, whatever is wanted, and nothing is said."""
    for action in ("warn", "raise", "ignore"):
        assert (await collect(FakeServer(), on_left_out=action)).accounting is None
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    "accounting", [[], {}, {**SOME.to_json(), "trained_tokens": 28}, {**SOME.to_json(), "left_out": 1}]
)
async def test_a_malformed_accounting(accounting: Any) -> None:
    """An accounting that is none or does not add up is an unexpected reply, and the session is deleted."""
    server = FakeServer(samples=reply_of(payload(accounting=accounting)))
    with pytest.raises(UnexpectedReply, match="malformed accounting: "):
        await collect(server, on_left_out="ignore")
    assert server.calls == ONE_OF_EACH


async def test_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Unless told otherwise, one warning says how many tokens are not trained, of which turns, and why."""
    collected = await collect(server_of(SOME))
    assert warnings(caplog) == [TEXT]
    assert len(collected.samples) == 1
    caplog.clear()
    await play(server_of(SOME))
    assert warnings(caplog) == [TEXT]


@pytest.mark.parametrize(
    ("accounting", "options"),
    [
        (ALL_TRAINED, {}),
        (TRIMMED, {}),
        (SOME, {"on_left_out": "ignore"}),
        (SOME, {"reasons": ["revised", Reason.NOT_PICKED]}),
        (SOME, {"reasons": []}),
    ],
    ids=["all are trained", "trimmed", "ignore", "other reasons", "no reasons"],
)
@pytest.mark.parametrize("use", [collect, play], ids=["collect", "rollout"])
async def test_nothing_to_say(
    use: Any, accounting: Accounting, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither what was trimmed, nor what nobody asks about, is worth a warning."""
    await use(server_of(accounting), **options)
    assert warnings(caplog) == []


@pytest.mark.parametrize("use", [collect, play], ids=["collect", "rollout"])
async def test_an_error_on_demand(use: Any, caplog: pytest.LogCaptureFixture) -> None:
    """With `raise` it is an error with the whole accounting; the session is deleted, nothing is logged."""
    server = server_of(SOME)
    with pytest.raises(TokensLeftOut) as caught:
        await use(server, on_left_out="raise")
    assert str(caught.value) == caught.value.detail == TEXT
    assert (caught.value.accounting, caught.value.session_id) == (SOME, "s1")
    assert isinstance(caught.value, DriverError)
    assert server.calls == ONE_OF_EACH
    assert warnings(caplog) == []


@pytest.mark.parametrize("use", [collect, play], ids=["collect", "rollout"])
async def test_no_error_without_a_reason(use: Any) -> None:
    """With `raise` a session of which nothing else than stop tokens was trimmed is delivered."""
    for accounting in (ALL_TRAINED, TRIMMED):
        await use(server_of(accounting), on_left_out="raise")


async def test_chosen_reasons(caplog: pytest.LogCaptureFixture) -> None:
    """Only the chosen reasons count, and what was trimmed if it is chosen."""
    await collect(server_of(SOME), reasons={"trimmed"})
    assert warnings(caplog)[0].startswith(
        "session s1: 2 of 91 sampled tokens are not trained: turn 1 (1, trimmed), turn 3 (1, trimmed); "
    )
    with pytest.raises(TokensLeftOut, match=r"40 of 91 .*: turn 2 \(40, retried by turn 3\);"):
        await collect(server_of(SOME), on_left_out="raise", reasons=(Reason.RETRIED,))


async def test_reasons_are_read_once() -> None:
    """`rollout` looks at the reasons before the episode, and still has them after it."""
    with pytest.raises(TokensLeftOut):
        await play(server_of(SOME), on_left_out="raise", reasons=(name for name in ["retried"]))


async def test_an_empty_reply_is_accounted_for() -> None:
    """Tokens of a session that gives no sample at all are left out as well."""
    nothing = Accounting(1, 7, 0, [LeftOut(1, 7, Reason.OVER_MAX_SEQ_LEN)])
    server = FakeServer(samples=reply_of(payload(empty_reason="all_truncated", accounting=nothing.to_json())))
    with pytest.raises(TokensLeftOut, match="7 of 7"):
        await play(server, on_left_out="raise")
    assert (await play(server)).metadata["abort_reason"] == "all_truncated"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"on_left_out": "log"}, "on_left_out must be one of warn, raise, ignore, not 'log'"),
        ({"on_left_out": None}, "on_left_out must be one of"),
        ({"on_left_out": ["warn"]}, "on_left_out must be one of"),
        ({"reasons": ["lost"]}, r"reasons must be a collection of retried, .*, trimmed, not \['lost'\]"),
        ({"reasons": ["trained"]}, "reasons must be a collection of"),
        ({"reasons": "retried"}, "reasons must be a collection of"),
        ({"reasons": 1}, "reasons must be a collection of"),
        ({"reasons": [None]}, "reasons must be a collection of"),
    ],
)
async def test_wrong_arguments_cost_nothing(options: dict[str, Any], match: str) -> None:
    """An unknown choice or reason is refused before a collect is sent, and before an episode is opened."""
    server = server_of(SOME)
    with pytest.raises(InvalidRequest, match=match):
        await collect(server, **options)
    assert server.calls == ["POST /sessions"]
    server = server_of(SOME)
    with pytest.raises(InvalidRequest, match=match):
        await play(server, **options)
    assert server.calls == []


async def test_a_failure_of_the_collect_stays_what_it_is() -> None:
    """Where there is no reply there is nothing to account for: the sample is aborted as ever."""
    sample = await play(FakeServer(samples=httpx.ReadError("cut")), on_left_out="raise")
    assert sample.metadata["abort_reason"].startswith("TransportError")


def test_without_an_event_loop(caplog: pytest.LogCaptureFixture) -> None:
    """The sync client passes both on, in a collect and in an episode."""
    with SyncClient(BASE_URL, transport=server_of(SOME).transport) as client:
        found = client.collect_samples(client.open_session(), RolloutSample(), on_left_out="ignore")
        assert (found.accounting, found.samples[0].tokens) == (SOME, TOKENS)
        assert warnings(caplog) == []
        with pytest.raises(TokensLeftOut):
            client.collect_samples(
                client.open_session(), RolloutSample(), on_left_out="raise", reasons=["retried"]
            )
        with pytest.raises(TokensLeftOut):
            client.rollout(idle, RolloutSample(), on_left_out="raise")


def test_the_text_is_bounded() -> None:
    """Of a session with a thousand retries the text names the first ones, and sums up the rest."""
    retries = [LeftOut(2 * n, 1_000, Reason.RETRIED, by=2 * n + 1) for n in range(1, 513)]
    text = describe("s", 1_000_000, retries)
    assert text.startswith("session s: 512,000 of 1,000,000 sampled tokens are not trained: turn 2 (1,000, ")
    assert "turn 16 (1,000, retried by turn 17), and 504,000 of turns 18 to 1024; see" in text
    assert len(text) < 500


def test_turns_that_are_neighbours() -> None:
    """Turns are put together if they follow each other and have the same reason and the same successor."""
    left_out = [
        LeftOut(1, 1, Reason.REVISED, by=4),
        LeftOut(2, 1, Reason.REVISED, by=4),
        LeftOut(3, 1, Reason.REVISED, by=5),
        LeftOut(5, 1, Reason.AFTER_CUT),
        LeftOut(6, 1, Reason.AFTER_CUT),
        LeftOut(8, 1, Reason.AFTER_CUT),
        LeftOut(8, 2, Reason.TRIMMED),
    ]
    assert describe("s", 9, left_out).split(": ")[2].split(";")[0] == (
        "turns 1-2 (2, revised by turn 4), turn 3 (1, revised by turn 5), turns 5-6 (2, after_cut), "
        "turn 8 (1, after_cut), turn 8 (2, trimmed)"
    )


def test_the_error_can_be_pickled() -> None:
    """It crosses process borders whole, attributes included."""
    error = TokensLeftOut("d", accounting=SOME, session_id="s")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (type(copy), str(copy), vars(copy)) == (TokensLeftOut, "d", vars(error))
    assert copy.accounting == SOME


async def test_a_newer_servers_reason_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody asked to ignore a reason that this version does not know, whatever reasons were named."""
    server = server_of(Accounting(1, 3, 1, [LeftOut(1, 2, "evaporated")]))
    await collect(server, reasons=[])
    assert "turn 1 (2, evaporated)" in caplog.text
