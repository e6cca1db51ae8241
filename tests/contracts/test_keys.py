"""Names in Redis."""

import re

from tokentape_contracts import keys


def test_all_keys_of_a_session_share_one_slot() -> None:
    """What stands in the first braces, the hash tag, is the session id, for every key of a session."""
    names = [keys.events("s1"), keys.samples("s1", "digest"), keys.waiters("s1", "digest")]
    assert [re.search(r"\{(.*?)\}", name)[1] for name in names] == ["s1"] * 3  # type: ignore[index]


def test_no_two_things_share_a_key() -> None:
    """Every name is its own, and different sessions, requests and processes have different ones."""
    names = [keys.QUEUE, keys.WAKE, keys.replies("a"), keys.replies("b")]
    for session in ("s1", "s2"):
        names.append(keys.events(session))
        names += [f(session, request) for f in (keys.samples, keys.waiters) for request in ("r1", "r2")]
    assert len(set(names)) == len(names)


def test_our_keys_carry_our_prefix() -> None:
    """All but arq's own queue begin with `tt:`."""
    names = [keys.WAKE, keys.replies("a"), keys.events("s"), keys.samples("s", "r"), keys.waiters("s", "r")]
    assert all(name.startswith("tt:") for name in names)
