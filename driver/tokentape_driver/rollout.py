"""One episode: open a session, run the agent, collect its samples."""

import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from copy import deepcopy
from numbers import Real
from typing import Any, Final, Literal, get_args, overload

from tokentape_contracts import limits
from tokentape_contracts.errors import DeadlineExceeded
from tokentape_contracts.samples import Status
from tokentape_driver.client import AlteredAnswer, TokentapeClient
from tokentape_driver.errors import CollectTimeout, ContractMismatch, TransportError, ensure_choice
from tokentape_driver.left_out import OnLeftOut, left_out_rule
from tokentape_driver.sample import (
    S,
    check_input,
    has_status,
    own_status,
    require_field,
    require_reward,
    set_status,
)
from tokentape_driver.session import Collected, Session, samples_body
from tokentape_driver.siblings import shared_id

logger = logging.getLogger("tokentape.driver")

Agent = Callable[[str, S], Awaitable[Mapping[str, Any] | None]]
"""`await agent(openai_base_url, sample)` plays the episode and returns metadata for the sample, or None."""

Mode = Literal["linear", "tree"]
"""`linear`: one conversation, one sample. `tree`: a sample for each branch."""

OnAgentError = Literal["failed", "keep", "raise"]
"""If the agent raises: its samples are `failed`, or keep the server's status, or the exception propagates."""

AGENT_ERROR: Final = "agent_error"
"""Metadata key: the text of the exception that the agent raised."""
ABORT_REASON: Final = "abort_reason"
"""Metadata key: why there are no new tokens."""


@overload
async def rollout(
    agent: Agent[S],
    sample: S,
    *,
    client: TokentapeClient,
    mode: Literal["linear"] = "linear",
    max_seq_len: int | None = None,
    deadline_s: float = limits.DRIVER_COLLECT_S,
    labels: Mapping[str, Any] | None = None,
    pins: Mapping[str, Any] | None = None,
    matcher: str | None = None,
    altered_answer: AlteredAnswer | None = None,
    on_agent_error: OnAgentError = "failed",
    on_left_out: OnLeftOut = "warn",
    reasons: Collection[str] | None = None,
) -> S: ...


@overload
async def rollout(
    agent: Agent[S],
    sample: S,
    *,
    client: TokentapeClient,
    mode: Literal["tree"],
    max_seq_len: int | None = None,
    deadline_s: float = limits.DRIVER_COLLECT_S,
    labels: Mapping[str, Any] | None = None,
    pins: Mapping[str, Any] | None = None,
    matcher: str | None = None,
    altered_answer: AlteredAnswer | None = None,
    on_agent_error: OnAgentError = "failed",
    on_left_out: OnLeftOut = "warn",
    reasons: Collection[str] | None = None,
) -> list[S]: ...


@overload
async def rollout(
    agent: Agent[S],
    sample: S,
    *,
    client: TokentapeClient,
    mode: Mode,
    max_seq_len: int | None = None,
    deadline_s: float = limits.DRIVER_COLLECT_S,
    labels: Mapping[str, Any] | None = None,
    pins: Mapping[str, Any] | None = None,
    matcher: str | None = None,
    altered_answer: AlteredAnswer | None = None,
    on_agent_error: OnAgentError = "failed",
    on_left_out: OnLeftOut = "warn",
    reasons: Collection[str] | None = None,
) -> S | list[S]: ...


async def rollout(
    agent: Agent[S],
    sample: S,
    *,
    client: TokentapeClient,
    mode: Mode = "linear",
    max_seq_len: int | None = None,
    deadline_s: float = limits.DRIVER_COLLECT_S,
    labels: Mapping[str, Any] | None = None,
    pins: Mapping[str, Any] | None = None,
    matcher: str | None = None,
    altered_answer: AlteredAnswer | None = None,
    on_agent_error: OnAgentError = "failed",
    on_left_out: OnLeftOut = "warn",
    reasons: Collection[str] | None = None,
) -> S | list[S]:
    """Plays one episode and returns its sample: a copy of the input with the computed fields set.

    In mode `tree` it returns a list always, one sample for each leaf that the server kept (sub-agents,
    retries, compacted conversations). These siblings share a `rollout_id`: the input's, else its `index`.

    If the agent raises, what was recorded by then is still collected, with the status `failed`; the exception
    is logged and becomes `metadata["agent_error"]`. The sample is `aborted`, with the input's tokens and a
    text in `metadata["abort_reason"]`, if there is nothing to train on (`no_records`, `all_truncated`), or if
    the collect timed out on either side or got no answer: such a failure costs one sample, not the run. In
    mode `tree` that is a list of one. Everything else is raised. The session is deleted in every case, also
    when this task is cancelled.

    Args:
        agent: gets the session's OpenAI base URL and the input sample itself. It may return metadata, which
            in mode `tree` must be JSON, as the server applies it. Its `reward` becomes the samples' reward.
            `agent_metrics.total_tool_time` in it, in seconds, becomes `non_generation_time`; every sibling
            has that of the whole episode.
        sample: not changed by this function.
        max_seq_len: longest sample in tokens, prompt included.
        deadline_s: of the collect; the agent's own time is not limited.
        labels, pins, matcher, altered_answer: as in `TokentapeClient.open_session`.
        on_agent_error: what an exception of the agent does to the samples, all siblings alike. `failed` sets
            that status, `keep` leaves the server's, which is `completed` if the last turn was; what is
            `aborted` stays so. `raise` deletes the session and lets the exception through.
        on_left_out, reasons: as in `Session.collect_samples`.

    Raises:
        LeftoverState, CannotOverlay, InvalidRequest: the arguments are wrong; found before a session opens.
        MissingRolloutId: mode `tree`, and both `rollout_id` and `index` are None; found as early.
        TypeError, ValueError: the agent returned something else than metadata, or a bad `total_tool_time`.
        CannotOverlay: the agent returned a reward, for which the sample's class has no field.
        InvalidRequest, RequestTooLarge: mode `tree`, and the agent's metadata cannot be sent.
        TokensLeftOut: sampled tokens are not trained, and `on_left_out` is `raise`; also of an episode whose
            agent raised, and of one that gives no sample.
        TokentapeError: opening failed, or the collect failed other than by a timeout or a lost connection.
    """
    ensure_choice("mode", mode, get_args(Mode))
    ensure_choice("on_agent_error", on_agent_error, get_args(OnAgentError))
    _check(sample, mode)
    if on_agent_error == "failed":
        own_status(sample, Status.FAILED)
    rule = left_out_rule(on_left_out, reasons)
    samples_body(max_seq_len, deadline_s)
    session = await client.open_session(
        mode, labels=labels, pins=pins, matcher=matcher, altered_answer=altered_answer
    )
    try:
        metadata, agent_error = await _run(agent, session, sample, on_agent_error)
        tool_time_s = _tool_time(metadata)
        if tool_time_s is not None:
            require_field(sample, "non_generation_time", tool_time_s)
        require_reward(sample, metadata)
        _check(sample, mode)  # again: the agent had it in its hands
        if mode == "tree":
            samples_body(max_seq_len, deadline_s, metadata)
    except BaseException:
        await session.discard()
        raise

    collecting = session.collect_samples(
        sample,
        max_seq_len=max_seq_len,
        metadata=metadata,
        deadline_s=deadline_s,
        on_left_out=on_left_out,
        reasons=rule.reasons,
    )
    results, abort_reason = await _collect(collecting, session, sample)
    for result in results:
        if tool_time_s is not None and abort_reason is None:
            setattr(result, "non_generation_time", tool_time_s)  # noqa: B010
        if agent_error is not None and on_agent_error == "failed" and not has_status(result, Status.ABORTED):
            set_status(result, Status.FAILED)
        said = metadata if abort_reason is None else None
        _note(result, {AGENT_ERROR: agent_error, ABORT_REASON: abort_reason}, said)
    if mode == "tree":
        return results
    if len(results) != 1:
        raise ContractMismatch(f"collect: a linear session gave {len(results)} samples instead of one")
    return results[0]


def _check(sample: object, mode: Mode) -> None:
    check_input(sample)
    if mode == "tree":
        shared_id(sample)


async def _run(
    agent: Agent[S], session: Session, sample: S, on_agent_error: OnAgentError
) -> tuple[Mapping[str, Any] | None, str | None]:
    """What the agent returned; or None, and the text of the exception that it raised."""
    try:
        return await agent(session.openai_base_url, sample), None
    except Exception as error:
        if on_agent_error == "raise":
            raise
        logger.exception("agent failed in session %s; collecting what it recorded", session.id)
        return None, f"{type(error).__qualname__}: {error}"[: limits.DRIVER_AGENT_ERROR_CHARS]


async def _collect(
    collecting: Awaitable[Collected[S]], session: Session, sample: S
) -> tuple[list[S], str | None]:
    """The samples; or one aborted sample, and why."""
    try:
        collected = await collecting
    except (TransportError, CollectTimeout, DeadlineExceeded) as error:
        reason = f"{type(error).__qualname__}: {error}"
    else:
        if collected.samples:
            return collected.samples, None
        reason = collected.empty_reason or "empty reply"
    logger.warning("session %s: the sample is aborted: %s", session.id, reason)
    aborted = deepcopy(sample)
    set_status(aborted, Status.ABORTED)
    if session.mode == "tree":
        setattr(aborted, "rollout_id", shared_id(sample))  # noqa: B010
    return [aborted], reason


def _tool_time(metadata: object) -> float | None:
    """`agent_metrics.total_tool_time` of what the agent returned, in seconds."""
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping):
        raise TypeError(f"the agent must return a dict or None, not {type(metadata).__qualname__}")
    metrics = metadata.get("agent_metrics")
    if metrics is None:
        return None
    if not isinstance(metrics, Mapping):
        raise TypeError(f"agent_metrics must be a dict, not {type(metrics).__qualname__}")
    seconds = metrics.get("total_tool_time")
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, Real):
        raise TypeError(f"agent_metrics.total_tool_time must be a number of seconds, not {seconds!r}")
    value = float(seconds)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"agent_metrics.total_tool_time must be at least 0 seconds, not {seconds!r}")
    return value


def _note(sample: Any, notes: Mapping[str, str | None], said: Mapping[str, Any] | None = None) -> None:
    """Sets our own metadata keys, and clears those of an earlier try: trainers send aborted samples again.

    What the agent `said` itself under these keys is kept.
    """
    stale = {AGENT_ERROR, ABORT_REASON} - (said or {}).keys()
    kept = {key: value for key, value in (sample.metadata or {}).items() if key not in stale}
    sample.metadata = {**kept, **{key: text for key, text in notes.items() if text is not None}}
