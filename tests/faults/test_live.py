"""Many sessions at once, and no fault: no error either. `make test-live` does the same with 500 sessions."""

import random

from tests.faults.cluster import Cluster
from tests.faults.live import live

SESSIONS, TURNS = 40, 6


async def test_many_sessions_live_at_once(sound: Cluster, draw: random.Random) -> None:
    """Every request is answered, every turn is recorded as it was told, and every sample is right."""
    lived = await live(
        sound, draw.randrange(2**32), sessions=SESSIONS, turns=TURNS, think_s=0.5, limit_s=100.0
    )
    assert lived.failed == []
    assert lived.report.problems == []
    assert (lived.live, lived.report.acknowledged) == (SESSIONS, SESSIONS * TURNS)
    assert lived.report.recorded == lived.report.acknowledged
    assert lived.report.collects == SESSIONS + SESSIONS // 5
    assert sum(call.handed is not None for call in lived.history.of("collect")) == SESSIONS
