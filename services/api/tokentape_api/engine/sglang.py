"""SGLang's OpenAI-style chat endpoint, token-in and token-out (facts of SGLang 0.5.23).

The request carries `input_ids` beside `messages`; the answer's `choices[0].meta_info` carries the sampled ids
with their log-probs, and the routing replay payloads: base64 of int32 without a header.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tokentape_api.engine.answer import Answer, Problem, quoted, token_ids
from tokentape_api.engine.client import HttpEngine
from tokentape_api.engine.payload import Narrow
from tokentape_api.engine.port import Wanted
from tokentape_contracts.events import Ids

_OWNED: Final[Mapping[str, Any]] = {
    "logprobs": True,
    "return_meta_info": True,
    "no_stop_trim": False,
    "stream": False,
}
"""Set by us whatever the client sent: without them the tokens would be missing or the text untrimmed."""
_TRIPLES: Final = "meta_info.output_token_logprobs"


class SGLangAnswer(Answer):
    """An answer of SGLang."""

    new_values = Narrow
    not_kept = frozenset(
        {"message", "meta_info", "logprobs", "finish_reason", "prompt_token_ids", "response_token_ids"}
    )

    def message(self) -> dict[str, Any]:
        message = self.choice.get("message")
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            sent = message.get("content") if isinstance(message, dict) else message
            raise Problem(
                "choices[0].message.content must be a string, also beside tool calls; the engine sent "
                f"{quoted(sent)}. Check the engine's "
                "version and its --tool-call-parser"
            )
        return message

    def check_prompt(self) -> None:
        count, sent = self._meta_info().get("prompt_tokens"), len(self._sent.prompt)
        if count is None:
            raise Problem(
                "meta_info.prompt_tokens is missing, so nothing says that the engine used the input_ids: a "
                "router may strip it",
                is_missing=True,
            )
        if count != sent:
            raise Problem(
                f"meta_info.prompt_tokens is {quoted(count)}, but {sent} input_ids were sent: the engine or "
                "a router before it ignores input_ids"
            )

    def read_output(self) -> Ids:
        try:
            ids = [triple[1] for triple in self._triples()]
        except (TypeError, IndexError, KeyError) as error:
            raise _not_triples(error) from error
        return token_ids(ids, _TRIPLES)

    def raw_logprobs(self) -> list[Any]:
        try:
            return [triple[0] for triple in self._triples()]
        except (TypeError, IndexError, KeyError) as error:
            raise _not_triples(error) from error

    def meta(self) -> dict[str, Any]:
        return {name: value for name, value in self._meta_info().items() if name != "output_token_logprobs"}

    def layers(self, kind: str, wanted: Wanted) -> int | None:
        said = self._meta_info().get(f"{kind}_num_layers", wanted.layers)
        return said if isinstance(said, int) and said > 0 else None

    def places(self) -> Iterator[dict[str, Any]]:
        found = (
            self.choice.get("meta_info"),
            self.choice,
            self.choice.get("sglext"),
            self.body,
            self.body.get("sglext"),
        )
        return (place for place in found if isinstance(place, dict))

    def _meta_info(self) -> dict[str, Any]:
        meta = self.choice.get("meta_info")
        if not isinstance(meta, dict):
            raise Problem(
                "choices[0].meta_info is missing although return_meta_info was asked for: this is not "
                "SGLang, it is older than 0.5.6, or a router strips the field",
                is_missing=True,
            )
        return meta

    def _triples(self) -> list[Any]:
        meta = self._meta_info()
        triples = meta.get("output_token_logprobs")
        if not isinstance(triples, list):
            raise Problem(
                f"{_TRIPLES} is missing although logprobs=true was asked for: a router may strip it",
                is_missing=True,
            )
        if (count := meta.get("completion_tokens")) != len(triples):
            raise Problem(f"{_TRIPLES} has {len(triples)} entries, completion_tokens says {quoted(count)}")
        return triples


class SGLangEngine(HttpEngine):
    """The engine port on an SGLang server or router."""

    answer_class = SGLangAnswer

    def fields(self, prompt: Ids, replay: Mapping[str, Wanted]) -> dict[str, Any]:
        fields: dict[str, Any] = {**_OWNED, "input_ids": prompt}
        for kind, wanted in replay.items():
            fields[f"return_{kind}"] = True
            if wanted.start:
                fields[f"{kind}_start_len"] = wanted.start
        return fields


def _not_triples(error: Exception) -> Problem:
    return Problem(f"{_TRIPLES} must hold [log-prob, id, text]: {error}")
