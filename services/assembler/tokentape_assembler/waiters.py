"""The API processes that wait for a result."""

import time

from tokentape_contracts import keys
from tokentape_contracts.jobs import AssembleJob


def in_time(job: AssembleJob) -> tuple[str, str, str]:
    """The arguments of the ZRANGEBYSCORE that gives those whose deadline has not passed."""
    return keys.waiters(job.session_id, job.request), f"({time.time()}", "+inf"
