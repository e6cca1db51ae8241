"""What an engine's answer must hold, as rules of which each looks at one thing.

A turn is recorded from an answer that keeps all of them (`Answer.generated`); the probe tries each for
itself and reports every one. Shapes: `P` prompt tokens, `O` output tokens, `N` rows, `L` layers, `K` choices
per token and layer.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from reprlib import Repr
from typing import Any, ClassVar, Final

import numpy as np
import orjson

from tokentape_api.engine.body import NOT_JSON, Body
from tokentape_api.engine.payload import NewValues, Payload, PayloadInvalid
from tokentape_api.engine.port import Generated, Wanted
from tokentape_contracts import limits
from tokentape_contracts.errors import EngineReplyInvalid, GenerationAborted
from tokentape_contracts.events import Floats, Ids
from tokentape_contracts.tokens import first_bad_log_prob
from tokentape_core.domain.decide import Generation
from tokentape_core.domain.replay import KINDS, Rows


class Problem(Exception):
    """A rule that the answer breaks.

    Args:
        detail: which field, what came, and what to set on the engine.
        is_missing: the field is not there at all.
    """

    def __init__(self, detail: str, *, is_missing: bool = False) -> None:
        super().__init__(detail)
        self.detail = detail
        self.is_missing = is_missing


_REPR: Final = Repr()
_REPR.maxstring = limits.QUOTED_VALUE_CHARS


def quoted(value: Any) -> str:
    """A value of an answer for a message: in part if it is long or nests deeply, half characters escaped."""
    return _REPR.repr(value)


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """What an answer is an answer to: the prompt, int32[P], and the routing replay payloads asked for."""

    prompt: Ids
    replay: Mapping[str, Wanted]


class Answer(ABC):
    """A 200 answer.

    Attributes:
        body: the engine's JSON without the routing replay payloads.
        choice: its one choice.

    Raises:
        EngineReplyInvalid: there is nothing to look at: no JSON object, or not exactly one choice.
    """

    new_values: ClassVar[NewValues]
    """Makes what reads this engine's routing replay payloads."""
    not_kept: ClassVar[frozenset[str]]
    """Parts of a choice that the event holds elsewhere, or that follow from its tokens."""

    def __init__(self, body: Body, sent: Sent) -> None:
        parsed = body.parse()
        if not isinstance(parsed, dict):
            raise EngineReplyInvalid("the engine answered 200 with JSON that is not an object")
        choices = parsed.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise EngineReplyInvalid("the engine's answer must have exactly one choice")
        self.body: dict[str, Any] = parsed
        self.choice: dict[str, Any] = choices[0]
        self._sent = sent
        self._not_json = body.not_json
        self._output: Ids | None = None
        self._payloads = self._take_payloads(body)
        if body.unclaimed:
            raise EngineReplyInvalid(
                f"the engine's answer holds a long {body.unclaimed[0]} where none belongs: this version of "
                "Tokentape does not know the engine, or the router before it"
            )

    def generated(self) -> Generated:
        """The turn, if the answer keeps every rule.

        Raises:
            EngineReplyInvalid: the first rule that it breaks.
            GenerationAborted: the engine interrupted the generation, as it does for a weight update.
        """
        try:
            finish, message = self.finish(), self.message()
            _check_calls(message.get("tool_calls"))
            output, logprobs = self.output(), self.logprobs()
            self.check_prompt()
            replay = {kind: rows for kind in self._sent.replay if (rows := self.rows(kind)) is not None}
            rest = {name: value for name, value in self.choice.items() if name not in self.not_kept}
            reply, meta = {**self.kept(), "choices": [rest]}, self.meta()
            _check_json(message, reply, meta)
            written = self._written()
        except Problem as problem:
            raise EngineReplyInvalid(problem.detail) from problem
        generation = Generation(
            output=output,
            logprobs=logprobs,
            finish=finish,
            response_id=str(self.body.get("id", "")),
            message=message,
            reply=reply,
            meta=meta,
        )
        return Generated(generation, self.body, written, replay)

    def _written(self) -> bytes:
        """The answer for the client: nothing is recorded that it could not be told of."""
        if self._not_json is not None:
            raise Problem(f"{NOT_JSON}: {self._not_json}")
        try:
            return orjson.dumps(self.body)
        except TypeError as error:
            raise Problem(f"the engine's answer cannot be passed on: {error}") from error

    def finish(self) -> str:
        """The finish reason."""
        finish = self.choice.get("finish_reason")
        if not isinstance(finish, str):
            raise Problem(f"choices[0].finish_reason must be a string, not {quoted(finish)}")
        if finish == "abort":
            raise GenerationAborted(
                "the engine interrupted the generation; nothing was recorded, send it again"
            )
        return finish

    @abstractmethod
    def message(self) -> dict[str, Any]:
        """The assistant's message, as it is recorded."""

    @abstractmethod
    def check_prompt(self) -> None:
        """The engine read the tokens that were sent, and no others."""

    def output(self) -> Ids:
        """int32[O], the sampled tokens, as many as the engine says that it sampled."""
        if self._output is None:
            self._output = self.read_output()
        return self._output

    @abstractmethod
    def read_output(self) -> Ids:
        """Reads what `output` returns."""

    @abstractmethod
    def raw_logprobs(self) -> list[Any]:
        """What stands where the log-probs of the `O` sampled tokens belong, whatever it is."""

    @abstractmethod
    def meta(self) -> dict[str, Any]:
        """The engine's counters."""

    def kept(self) -> Mapping[str, Any]:
        """The JSON without what the event holds elsewhere."""
        return self.body

    def layers(self, kind: str, wanted: Wanted) -> int | None:  # noqa: ARG002
        """`L` of a payload without a header."""
        return wanted.layers

    @abstractmethod
    def places(self) -> Iterator[dict[str, Any]]:
        """The objects in which a routing replay payload may stand, the likeliest first."""

    def logprobs(self) -> Floats:
        """float64[O], the log-probs of the sampled tokens: finite, and none above `limits.LOGPROB_MAX`."""
        return log_probs(self.raw_logprobs())

    def rows(self, kind: str) -> Rows | None:
        """The rows of a wanted payload, one for each token that the engine read from the first wanted on.

        None if the engine did not send it.
        """
        if (payload := self._payloads.get(kind)) is None:
            return None
        wanted = self._sent.replay[kind]
        expected = len(self._sent.prompt) + len(self.output()) - 1 - wanted.start
        try:
            values, shape = payload.values()
        except PayloadInvalid as problem:
            raise Problem(f"{kind}: {expected} rows were expected, but it is {problem}") from problem
        if shape is None:
            shape = self._shape(kind, wanted, expected, len(values))
        _check_shape(kind, shape, expected, wanted, len(values))
        return Rows(wanted.start, values.reshape(shape))

    def _shape(self, kind: str, wanted: Wanted, expected: int, count: int) -> tuple[int, ...]:
        layers = self.layers(kind, wanted)
        if layers is None:
            raise Problem(
                f"{kind} came without its number of layers ({kind}_num_layers), and none is set: use an "
                "engine that sends it" + (", or set --replay-layers" if kind == "routed_experts" else "")
            )
        if expected <= 0:
            raise Problem(f"{kind} has {count} values although no row was expected")
        if count == 0 or count % (expected * layers):
            raise Problem(
                f"{kind} has {count} values, which is not {expected} rows of {layers} layers "
                f"({_rows_and_start(expected, wanted)}): {_HINTS[kind]}"
            )
        return expected, layers, count // (expected * layers)

    def _take_payloads(self, body: Body) -> dict[str, Payload]:
        """Takes the payloads out of the JSON, the unwanted ones too; null and "" count as not sent."""
        taken: dict[str, Payload] = {}
        for place in self.places():
            for kind in KINDS:
                text = place.pop(kind, None)
                if text is None or text == "":
                    continue
                payload = body.claim(kind, text if isinstance(text, str) else f"({type(text).__name__})")
                if kind in self._sent.replay:
                    taken.setdefault(kind, payload)
        return taken


def _check_calls(calls: Any) -> None:
    """Tool calls are objects, if there are any: each goes into a stream with its index."""
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise Problem("choices[0].message.tool_calls must be a list of objects or null")


def _check_json(*recorded: Any) -> None:
    """What is recorded can be sent back in a request's messages, and has no integer beyond 64 bits.

    Of such an integer the parser makes a float: another number.
    """
    level: list[Any] = list(recorded)
    for _ in range(limits.JSON_DEPTH - _LEVELS_OF_A_MESSAGE):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner.extend(value.values())
            elif isinstance(value, list):
                inner.extend(value)
            elif isinstance(value, float) and not abs(value) < _INTEGERS_END:
                raise Problem(f"the engine's answer holds the number {value!r}, beyond 64 bits")
        level = inner
    if any(isinstance(value, dict | list) for value in level):
        raise Problem(
            "the engine's answer nests so deeply that no request could repeat it: the limit is "
            f"{limits.JSON_DEPTH} levels"
        )


_LEVELS_OF_A_MESSAGE: Final = 2
"""A request is an object with a list of messages."""
_INTEGERS_END: Final = 2.0**63
_HINTS: Final[Mapping[str, str]] = {
    "routed_experts": "--replay-layers must be the number of layers in the engine's payload (those without "
    "experts may count too), and with --replay incremental the engine must know routed_experts_start_len",
    "indexer_topk": "the engine's indexer_topk_num_layers does not fit its payload; update the engine",
}


def _check_shape(kind: str, shape: tuple[int, ...], expected: int, wanted: Wanted, count: int) -> None:
    """Whether the shape is that of the wanted rows."""
    if len(shape) != 3 or min(shape) < 0 or math.prod(shape) != count:
        raise Problem(f"{kind} says that its shape is {quoted(list(shape))}, and has {count} values")
    if shape[0] != expected or not count:
        raise Problem(
            f"{kind} has shape {list(shape)}, but {_rows_and_start(expected, wanted)}: the engine's "
            "version may be too old, or a router may cut it"
        )
    if wanted.layers is not None and shape[1] != wanted.layers:
        raise Problem(f"{kind} has {shape[1]} layers, but --replay-layers is {wanted.layers}")


def _rows_and_start(expected: int, wanted: Wanted) -> str:
    return f"{expected} rows were expected from position {wanted.start} on"


_INTEGERS: Final = frozenset({int})
_NUMBERS: Final = frozenset({int, float})
"""The types of JSON's numbers. numpy would also take true for 1, and the text of a number for the number."""


def token_ids(found: Sequence[Any], field: str) -> Ids:
    """int32[O] of a list of ids.

    Raises:
        Problem: it holds something else.
    """
    are_integers = _INTEGERS.issuperset(map(type, found))
    if not are_integers or (found and not 0 <= min(found) <= max(found) < 2**31):
        raise Problem(f"{field} holds something that is not a token id")
    return np.array(found, np.int32)


def log_probs(found: Sequence[Any]) -> Floats:
    """float64[O] of a list of log-probs.

    Raises:
        Problem: one of them is none; it says which, and what came.
    """
    if not _NUMBERS.issuperset(map(type, found)):
        wrong = next(i for i, value in enumerate(found) if type(value) not in _NUMBERS)
        raise _no_log_prob(wrong, found[wrong], "a log-prob is a number. Does a router change the answer?")
    try:
        values = np.array(found, np.float64)
    except OverflowError as error:
        raise Problem("a log-prob of an output token is an integer that no float64 can hold") from error
    if (bad := first_bad_log_prob(values)) is None:
        return values
    if np.isfinite(values[bad]):
        why = "no probability is above 1. Does the engine, or a router, send probabilities or scores?"
    else:
        why = "look at the model's dtype and quantisation"
    raise _no_log_prob(bad, found[bad], why)


def _no_log_prob(position: int, value: Any, why: str) -> Problem:
    return Problem(f"the log-prob of output token {position} is {quoted(value)}: {why}")
