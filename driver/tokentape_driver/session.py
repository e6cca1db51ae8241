"""One recorded session: where the agent talks to, the collect that ends it, and its DELETE."""

import asyncio
import hashlib
import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic

import httpx
import orjson

from tokentape_contracts import limits
from tokentape_contracts.accounting import Accounting
from tokentape_contracts.errors import InvalidRequest, RequestTooLarge, SessionNotFound
from tokentape_contracts.http import (
    ACCEPT_CONTRACT_HEADER,
    CONTRACT_HEADER,
    DIGEST_HEADER,
    SamplesRequest,
)
from tokentape_contracts.samples import SUPPORTED_CONTRACTS, MalformedSamples, SamplesReply, decode_samples
from tokentape_driver.errors import (
    ContractMismatch,
    TransportError,
    collect_timeout,
    error_of_reply,
    transport_error,
    unexpected,
)
from tokentape_driver.jsonable import jsonable
from tokentape_driver.left_out import OnLeftOut, left_out_rule
from tokentape_driver.sample import S, check_input, overlay, require_reward
from tokentape_driver.siblings import shared_id

logger = logging.getLogger("tokentape.driver")

TREE_TABLE: Final = "tree"
"""The key of the session's metadata that only tree sessions have."""
ACCOUNTING: Final = "accounting"
"""The key of the session's metadata under which servers say what became of every sampled token."""


@dataclass(frozen=True, slots=True, eq=False)
class Collected(Generic[S]):
    """What a collect gave.

    Attributes:
        samples: copies of the input with the computed fields set; empty if `empty_reason` says why.
        session_metadata: about the whole session; always has `accumulated_token_ids` and `max_trim_tokens`.
        empty_reason: `no_records`, `all_truncated`, or None.
        accounting: what became of every token that was sampled in the session; None if the server does not
            say, as that of Miles.
    """

    samples: list[S]
    session_metadata: dict[str, Any]
    empty_reason: str | None
    accounting: Accounting | None = None


class Session:
    """An open session of a `TokentapeClient`, which makes it.

    Attributes:
        id: the session's id.
        url: `{base_url}/sessions/{id}`, for agents that append `/v1` themselves, as those of Miles do.
        openai_base_url: `{url}/v1`, the `base_url` of an OpenAI SDK.
        mode: as it was opened; None for the server's default, which is taken for `linear` until a reply's
            session metadata has a `tree`.
    """

    def __init__(self, http: httpx.AsyncClient, session_id: str, url: str, mode: str | None = None) -> None:
        self._http = http
        self.id = session_id
        self.url = url
        self.openai_base_url = f"{url}/v1"
        self.mode = mode
        self._address = httpx.URL(url).copy_with(userinfo=b"")
        """What is shown and requested; the client adds the credentials."""

    def __repr__(self) -> str:
        return f"Session({str(self._address)!r})"

    async def collect_samples(
        self,
        input_sample: S,
        *,
        max_seq_len: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        deadline_s: float = limits.DRIVER_COLLECT_S,
        on_left_out: OnLeftOut = "warn",
        reasons: Collection[str] | None = None,
    ) -> Collected[S]:
        """Ends the session and returns its samples: exactly one POST, never repeated, then one DELETE.

        Returns or raises within `deadline_s + limits.DRIVER_DELETE_S`. The server is given a little less
        than `deadline_s`, so that its own 504, which knows more, comes first. The reply is decoded in a
        thread: other agents on this event loop go on. The DELETE is sent whatever became of the POST, also
        when this task is cancelled; its failure is logged and never raised.

        Args:
            input_sample: what the samples are copies of; not changed.
            max_seq_len: longest sample in tokens, prompt included; at least 1.
            metadata: the agent's own. Unless the mode is `tree` these are any objects, and stay on this side:
                a sample's metadata is the input's, then this, then the server's, then the session's; the last
                one wins. In mode `tree` it is sent, as JSON, and the server applies it: see `_tree_samples`.
                Its `reward` becomes the samples' reward: here, unless the server gives one; in mode `tree`
                by the server's finish hook, which may do otherwise.
            deadline_s: seconds for everything but the DELETE.
            on_left_out: what to do if sampled tokens are not trained by the samples: `warn` logs one warning
                that says how many, of which turns and why, `raise` raises `TokensLeftOut`, `ignore` does
                nothing.
            reasons: values of `Reason` for which it is done; None for all but `trimmed`.

        Raises:
            LeftoverState, CannotOverlay, InvalidRequest: the arguments are wrong. Nothing was sent, the
                session is still open. In mode `tree` also MissingRolloutId, and RequestTooLarge for metadata.
            TransportError, CollectTimeout, UnexpectedReply, ContractMismatch: see `errors`.
            TokensLeftOut: sampled tokens are not trained, and `on_left_out` is `raise`.
            TokentapeError: any class of the server's table, for a reply that names it.
            CannotOverlay: also for a delivered field that the sample's class lacks.
        """
        check_input(input_sample)
        require_reward(input_sample, metadata)
        rule = left_out_rule(on_left_out, reasons)
        tree = self.mode == "tree"
        if tree:
            shared_id(input_sample)
        body = samples_body(max_seq_len, deadline_s, metadata if tree else None)
        try:
            reply, accounting = await self._post_samples(body, deadline_s)
        finally:
            await self.discard()
        rule.apply(self.id, accounting)
        agent = {} if tree or metadata is None else metadata
        is_tree = tree or (self.mode is None and TREE_TABLE in reply.session_metadata)
        samples = (_tree_samples if is_tree else _linear_samples)(reply, agent, input_sample)
        return Collected(samples, reply.session_metadata, reply.empty_reason, accounting)

    async def delete(self) -> None:
        """Seals the session. May be repeated; an unknown session is only a warning in the log.

        Raises:
            TransportError: no answer within `limits.DRIVER_DELETE_S`.
            TokentapeError: the server refused.
        """
        url = self._address
        try:
            async with asyncio.timeout(limits.DRIVER_DELETE_S):
                response = await self._http.delete(url)
        except httpx.RequestError as error:
            raise transport_error(error, "delete", url) from error
        except TimeoutError as error:
            host = url.netloc.decode("ascii")
            raise TransportError(
                f"delete: {host}: no answer within {limits.DRIVER_DELETE_S:g} s", stage="delete", host=host
            ) from error
        if response.is_success:
            return
        refusal = error_of_reply(response, "delete")
        if not isinstance(refusal, SessionNotFound):
            raise refusal
        logger.warning("DELETE %s: %s", self._address, refusal.detail)

    async def discard(self) -> None:
        """`delete` for a `finally`: a failure is logged and does not hide what happened before."""
        try:
            await self.delete()
        except Exception as error:
            logger.warning("DELETE %s failed; the session expires when idle: %r", self._address, error)

    async def _post_samples(self, body: bytes, deadline_s: float) -> tuple[SamplesReply, Accounting | None]:
        url = httpx.URL(f"{self._address}/samples")
        headers = {
            ACCEPT_CONTRACT_HEADER: ",".join(map(str, SUPPORTED_CONTRACTS)),
            "Content-Type": "application/json",
        }
        response: httpx.Response | None = None
        try:
            async with asyncio.timeout(deadline_s):
                # Streamed only so that a timeout can tell whether the headers had come, and what they said.
                async with self._http.stream("POST", url, content=body, headers=headers) as response:
                    await response.aread()
                if not response.is_success:
                    raise error_of_reply(response, "collect")
                return await asyncio.to_thread(read_reply, response)
        except httpx.RequestError as error:
            raise transport_error(error, "collect", url) from error
        except TimeoutError as error:
            came = (response.headers, response.num_bytes_downloaded) if response is not None else (None, 0)
            raise collect_timeout(deadline_s, url, *came) from error


def _linear_samples(reply: SamplesReply, agent: Mapping[str, Any], input_sample: S) -> list[S]:
    """The samples; metadata is the input's, then the `agent`'s, then the sample's, then the session's."""
    return [
        overlay(
            {
                **_rewarded(values, agent),
                "metadata": {**agent, **values["metadata"], **reply.session_metadata},
            },
            input_sample,
        )
        for values in reply.samples
    ]


def _tree_samples(reply: SamplesReply, agent: Mapping[str, Any], input_sample: S) -> list[S]:
    """The siblings, with one `rollout_id`.

    Metadata is the input's, then the session's, then the `agent`'s that the server does not know, then the
    sample's; the last one wins. The session's `accumulated_token_ids` are those of the newest path and are
    left out: a sample has its own. Values of the session's are the same objects in all siblings.
    """
    session = {key: v for key, v in reply.session_metadata.items() if key != "accumulated_token_ids"}
    siblings = [
        overlay(
            {**_rewarded(values, agent), "metadata": {**session, **agent, **values["metadata"]}}, input_sample
        )
        for values in reply.samples
    ]
    for sample in siblings:
        setattr(sample, "rollout_id", shared_id(input_sample))  # noqa: B010
    return siblings


def _rewarded(values: Mapping[str, Any], agent: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a sample with the `agent`'s reward, where the server gives none."""
    return values if values.get("reward") is not None else {**values, "reward": agent.get("reward")}


def samples_body(
    max_seq_len: int | None, deadline_s: float, metadata: Mapping[str, Any] | None = None
) -> bytes:
    """The body of `POST …/samples`, refused here if the server would refuse it.

    Args:
        metadata: what the server is to apply.

    Raises:
        InvalidRequest: names the argument. It costs nothing yet; after the episode it would cost the episode.
        RequestTooLarge: the metadata is above the server's limit.
    """
    if not (math.isfinite(deadline_s) and deadline_s > 0):
        raise InvalidRequest(f"deadline_s must be a number of seconds above 0, not {deadline_s!r}")
    for_server = deadline_s - min(limits.DRIVER_HEAD_START * deadline_s, limits.DRIVER_HEAD_START_MAX_S)
    fields: dict[str, Any] = {"max_seq_len": max_seq_len, "deadline_s": for_server}
    if metadata is not None:
        fields["metadata"] = jsonable(metadata, "metadata")
    try:
        body = orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError as error:  # an integer above 64 bits, half a surrogate pair
        raise InvalidRequest(f"max_seq_len or metadata: {error}") from error
    if len(body) > limits.SMALL_BODY_BYTES:
        raise RequestTooLarge(
            f"metadata: the body has {len(body):,} bytes, the limit is {limits.SMALL_BODY_BYTES:,}"
        )
    SamplesRequest.parse(body)
    return body


def read_reply(response: httpx.Response) -> tuple[SamplesReply, Accounting | None]:
    """Checks a 2xx reply against its headers and decodes it. Pure CPU: megabytes take milliseconds.

    Returns:
        The reply, and the accounting in its session metadata, if there is one.

    Raises:
        ContractMismatch: a header is missing, names a version that was not asked for, or does not fit the
            body.
        UnexpectedReply: the payload breaks the contract, or the accounting is none.
    """
    version, digest = response.headers.get(CONTRACT_HEADER), response.headers.get(DIGEST_HEADER)
    if version not in map(str, SUPPORTED_CONTRACTS):
        raise ContractMismatch(
            f"collect: asked for contract {' or '.join(map(str, SUPPORTED_CONTRACTS))}, "
            f"the reply's {CONTRACT_HEADER} is {version!r}"
        )
    actual = f"sha-256={hashlib.sha256(response.content).hexdigest()}"
    if digest != actual:
        raise ContractMismatch(
            f"collect: {DIGEST_HEADER} is {digest!r}, the body of {len(response.content)} bytes has {actual}"
        )
    try:
        reply = decode_samples(response.content, contract=int(version))
        about = reply.session_metadata
        said = about.get(ACCOUNTING)
        return reply, None if said is None else Accounting.from_json(said)
    except MalformedSamples as error:
        raise unexpected(response, "collect", f"malformed samples: {error}", quote=False) from error
    except ValueError as error:
        raise unexpected(response, "collect", f"malformed accounting: {error}", quote=False) from error
