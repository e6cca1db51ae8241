"""The sandbox in which transformers runs chat templates: equally strict, in less time, by our clock.

Jinja's sandbox judges every attribute that a template reads by some dozen `isinstance`, which takes much of
the time of a long conversation. It judges by the object's type and the attribute's name only, so it is asked
once for each pair.
"""

from __future__ import annotations

from typing import Any, Final

from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokentape_core.text import clock

__all__ = ["prepare"]

_MOST_JUDGEMENTS: Final = 4096
"""Templates name some dozens. A template that makes up names has the rest judged as ever."""
_OF_DICTS: Final = frozenset(dir(dict))

_judgements: dict[tuple[type, str], bool] = {}


class _Sandbox(ImmutableSandboxedEnvironment):
    """Judges as its base does."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        key = type(obj), attr
        is_safe = _judgements.get(key)
        if is_safe is None:
            is_safe = super().is_safe_attribute(obj, attr, value)
            if len(_judgements) < _MOST_JUDGEMENTS:
                _judgements[key] = is_safe
        return is_safe

    def getattr(self, obj: Any, attribute: str) -> Any:
        # `message.role`: the base would look among the methods of the dict first.
        if type(obj) is dict and attribute in obj and attribute not in _OF_DICTS:
            return obj[attribute]
        return super().getattr(obj, attribute)


def prepare(template: str) -> bool:
    """Makes transformers render this chat template in such a sandbox, by the clock of `clock`.

    False for a version of transformers that keeps its compiled templates elsewhere, and renders them as ever.
    Raises what Jinja raises if the template is not valid.
    """
    from transformers.utils import chat_template_utils  # with the tokenizer, as it takes seconds

    try:
        environment = chat_template_utils._compile_jinja_template(template).environment
    except (AttributeError, TypeError):
        return False
    if type(environment) is ImmutableSandboxedEnvironment:
        environment.globals[clock.NAME] = clock.strftime_now
        environment.__class__ = _Sandbox
    return type(environment) is _Sandbox
