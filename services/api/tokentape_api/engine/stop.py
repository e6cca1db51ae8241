"""Whether an engine's ids hold the token that ended a generation.

The model sampled it, and learns from it when to end a turn. An engine that leaves it out of the ids, as most
do of the text, gives samples without an end. Greedy decoding shows it: a token of a first generation is made
a stop token of a second one, which must be the beginning of the first one, up to and with that token.
"""

import numpy as np

from tokentape_api.engine.answer import Answer, Problem
from tokentape_contracts.events import Ids


def beginning(first: Answer) -> Ids | None:
    """What a second generation must hold if its last token is made a stop token; None: nothing can be tried.

    It is shorter than the first one, so that an engine which ignores stop tokens gives something else.

    Raises:
        Problem: the first one has no tokens, yet something stopped it.
    """
    output = first.output()
    if not len(output) and first.finish() == "stop":
        raise Problem(
            "a generation stopped without a single id: not even the stop token's, which was sampled"
        )
    _, new = np.unique(output[:-1], return_index=True)
    return output[: new.max() + 1] if len(new) else None


def compare(second: Answer, expected: Ids) -> str:
    """What the second generation shows.

    Raises:
        Problem: it lacks its stop token.
    """
    output, token = second.output(), expected[-1]
    if second.finish() != "stop":
        return f"not seen: token {token} did not stop a generation; does the engine ignore stop_token_ids?"
    if np.array_equal(output, expected):
        return f"in the ids: {token} stopped a generation, and is its last id"
    if np.array_equal(output, expected[:-1]):
        raise Problem(
            f"token {token} stopped a generation, and is not in its ids: no sample would show how a turn "
            "ends. Use an engine, or a router, that leaves the ids whole"
        )
    return "not seen: the same prompt gave other tokens at temperature 0"
