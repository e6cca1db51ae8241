"""Random sessions: the sample equals what the full prompts say."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.property.sessions import Attempt, Session, sessions
from tokentape_contracts.samples import decode_samples, encode_samples
from tokentape_core.domain.assemble import assemble
from tokentape_core.domain.state import fold

STATUS = {"stop": "completed", "tool_calls": "completed", "length": "truncated", "abort": "aborted"}
FINISHES = ("stop", "tool_calls", "stop", "tool_calls", "length", "abort", "content_filter")


def _decode(ids: Any) -> str:
    return "".join(f"[{token}]" for token in ids)


def _kept(session: Session) -> list[int]:
    """How many output tokens of each attempt on the path the next full prompt repeats in place."""
    path = session.path_attempts
    sizes = []
    for attempt, following in zip(path, [*(a.prompt for a in path[1:]), None], strict=True):
        place = attempt.output if following is None else following[len(attempt.prompt) :]
        same = [a == b for a, b in zip(attempt.output, place, strict=False)]
        sizes.append(same.index(False) if False in same else len(same))
    return sizes


def _naive(session: Session, max_seq_len: int | None) -> tuple[Attempt, list[int], list[float], str] | None:
    """The sample from full prompts and outputs alone: last attempt, mask, log-probs, status."""
    merged: list[tuple[Attempt, int]] = []
    status = "completed"
    for attempt, size in zip(session.path_attempts, _kept(session), strict=True):
        if status != "completed":
            break
        excess = 0 if max_seq_len is None else max(0, len(attempt.prompt) + size - max_seq_len)
        if excess and excess >= size:
            break
        merged.append((attempt, size - excess))
        status = "truncated" if excess else STATUS.get(attempt.finish, "failed")
    if not merged:
        return None
    whole = zip(session.path_attempts, _kept(session), strict=True)
    if max_seq_len is not None and any(len(attempt.prompt) + size > max_seq_len for attempt, size in whole):
        status = "truncated" if status == "completed" else status
    last, size = merged[-1]
    first, end = len(merged[0][0].prompt), len(last.prompt) + size
    mask, logprobs = [0] * (end - first), [0.0] * (end - first)
    for attempt, size in merged:
        for index in range(size):
            position = len(attempt.prompt) + index - first
            assert mask[position] == 0, "a token was sampled twice"
            mask[position], logprobs[position] = 1, attempt.logprobs[index]
    tokens = [*last.prompt, *last.output][:end]
    return Attempt(0, tokens, [], [], ""), mask, logprobs, status


@given(sessions())
def test_a_turns_tokens_are_the_engines(session: Session) -> None:
    """For every turn, retried ones too: what the engine received and sampled, token for token (INV-2)."""
    for turn, attempt in zip(session.state.turns, session.attempts, strict=True):
        assert turn.tokens.tolist() == attempt.prompt + attempt.output
        assert turn.prompt_length == len(attempt.prompt)


@given(sessions())
def test_every_sampled_token_that_a_later_prompt_kept_is_trained_once(session: Session) -> None:
    """The sample's tokens are the head's; the mask counts each kept token of each merged turn once."""
    [sample] = assemble(session.state, _decode).samples
    head = session.path_attempts[-1]
    assert sample.tokens.tolist() == head.prompt + head.output
    assert int(sample.loss_mask.sum()) == sum(_kept(session))
    assert sample.status == "completed"


@given(sessions(finishes=FINISHES), st.none() | st.integers(1, 40))
def test_a_sample_equals_its_naive_recomputation(session: Session, max_seq_len: int | None) -> None:
    """Tokens, mask, log-probs, text and status are those that the full prompts and outputs give."""
    assembly = assemble(session.state, _decode, max_seq_len=max_seq_len)
    expected = _naive(session, max_seq_len)
    if expected is None:
        assert (assembly.samples, assembly.empty_reason) == ([], "all_truncated")
        return
    [sample] = assembly.samples
    whole, mask, logprobs, status = expected
    assert sample.tokens.tolist() == whole.prompt
    assert sample.loss_mask.tolist() == mask
    assert sample.rollout_log_probs.tolist() == logprobs
    assert sample.response == _decode(whole.prompt[len(whole.prompt) - len(mask) :])
    assert sample.response_length == len(mask)
    assert sample.status == status
    assert max_seq_len is None or len(sample.tokens) <= max_seq_len


@given(sessions(finishes=FINISHES), st.none() | st.integers(1, 40), st.sampled_from([1, 2]))
def test_replay_equals_delivery(session: Session, max_seq_len: int | None, contract: int) -> None:
    """Folding and assembling again gives the same bytes, and these decode to the sample (INV-9)."""
    payloads = []
    for _ in range(2):
        assembly = assemble(session.state, _decode, max_seq_len=max_seq_len)
        payloads.append(
            encode_samples(
                assembly.samples, assembly.session_metadata, assembly.empty_reason, contract=contract
            )
        )
    assert payloads[0] == payloads[1]
    reply = decode_samples(payloads[0], contract=contract)
    assert [values["tokens"] for values in reply.samples] == [s.tokens.tolist() for s in assembly.samples]
    head = session.path_attempts[-1]
    assert reply.session_metadata["accumulated_token_ids"] == head.prompt + head.output


@given(sessions(max_turns=4))
def test_folding_in_parts_is_folding_at_once(session: Session) -> None:
    """fold(prefix), then fold(rest), is fold(all), at every cut."""
    whole = session.state
    for cut in range(len(session.stream) + 1):
        state = fold(session.stream[cut:], fold(session.stream[:cut]))
        assert state is not None
        assert state.last_id == whole.last_id
        assert [t.tokens.tolist() for t in state.turns] == [t.tokens.tolist() for t in whole.turns]
        assert [t.seq for t in state.turns[-1].path] == session.path
