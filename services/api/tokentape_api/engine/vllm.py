"""vLLM's OpenAI-style chat endpoint, token-in and token-out (facts of vLLM 0.32).

The request carries the prompt in `kv_transfer_params`: a top-level `prompt_token_ids` is ignored without a
word. The answer repeats it, so that this can be checked, and has the sampled ids, their log-probs and the
routed experts (base64 of an `.npy` file) in its choice.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tokentape_api.engine.answer import Answer, Problem, quoted, token_ids
from tokentape_api.engine.client import HttpEngine
from tokentape_api.engine.payload import Npy
from tokentape_api.engine.port import Wanted
from tokentape_contracts.events import Ids

_OWNED: Final[Mapping[str, Any]] = {"logprobs": True, "return_token_ids": True, "stream": False}
"""Set by us whatever the client sent: without them the tokens would be missing."""


class VLLMAnswer(Answer):
    """An answer of vLLM."""

    new_values = Npy
    not_kept = frozenset({"message", "logprobs", "finish_reason", "token_ids"})

    def message(self) -> dict[str, Any]:
        """vLLM's `content` is null beside tool calls and for an empty text: it is recorded as "" then."""
        message = self.choice.get("message")
        content = message.get("content") if isinstance(message, dict) else message
        if not isinstance(message, dict) or not isinstance(content, str | None):
            raise Problem(
                f"choices[0].message.content must be a string or null; the engine sent {quoted(content)}"
            )
        return {**message, "content": content or ""}

    def check_prompt(self) -> None:
        prompt = self.body.get("prompt_token_ids")
        if not isinstance(prompt, list):
            raise Problem(
                "prompt_token_ids is missing although return_token_ids was asked for: this is not vLLM, "
                "it is older than 0.32, or a router strips the field",
                is_missing=True,
            )
        if prompt != self._sent.prompt.tolist():
            raise Problem(
                f"prompt_token_ids holds {len(prompt)} tokens which are not the {len(self._sent.prompt)} "
                "that were sent: the engine or a router before it ignores kv_transfer_params.prompt_token_ids"
            )

    def read_output(self) -> Ids:
        ids = self.choice.get("token_ids")
        if not isinstance(ids, list):
            raise Problem(
                "choices[0].token_ids is missing although return_token_ids was asked for: a router may "
                "strip it",
                is_missing=True,
            )
        count = self._usage().get("completion_tokens", len(ids))
        if count != len(ids):
            raise Problem(
                f"choices[0].token_ids has {len(ids)} entries, usage.completion_tokens says {quoted(count)}"
            )
        return token_ids(ids, "choices[0].token_ids")

    def raw_logprobs(self) -> list[Any]:
        logprobs = self.choice.get("logprobs")
        content = logprobs.get("content") if isinstance(logprobs, dict) else None
        if not isinstance(content, list):
            raise Problem(
                "choices[0].logprobs.content is missing although logprobs=true was asked for: a router may "
                "strip it",
                is_missing=True,
            )
        ids = self.choice.get("token_ids")
        if isinstance(ids, list) and len(ids) != len(content):
            raise Problem(f"choices[0].logprobs.content has {len(content)} entries, token_ids {len(ids)}")
        try:
            return [entry["logprob"] for entry in content]
        except (TypeError, KeyError) as error:
            raise Problem(f"choices[0].logprobs.content must hold objects with a logprob: {error}") from error

    def meta(self) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "prompt_tokens": len(self._sent.prompt),
            "completion_tokens": len(self.output()),
        }
        details = self._usage().get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(cached := details.get("cached_tokens"), int):
            meta["cached_tokens"] = cached
        for name in ("weight_version", "weight_versions"):
            if (version := self.choice.get(name, self.body.get(name))) is not None:
                meta[name] = version
        return meta

    def kept(self) -> Mapping[str, Any]:
        return {name: value for name, value in self.body.items() if name != "prompt_token_ids"}

    def places(self) -> Iterator[dict[str, Any]]:
        return iter((self.choice, self.body))

    def _usage(self) -> dict[str, Any]:
        usage = self.body.get("usage")
        return usage if isinstance(usage, dict) else {}


class VLLMEngine(HttpEngine):
    """The engine port on a vLLM server.

    Nothing asks for routed experts: vLLM sends them if it was started so.
    """

    answer_class = VLLMAnswer
    dropped = HttpEngine.dropped | {"prompt_token_ids"}

    def fields(self, prompt: Ids, replay: Mapping[str, Wanted]) -> dict[str, Any]:  # noqa: ARG002
        return {**_OWNED, "kv_transfer_params": {"prompt_token_ids": prompt}}
