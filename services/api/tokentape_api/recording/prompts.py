"""Builds a turn's prompt: the parent's stored tokens and the newly rendered suffix."""

from functools import partial

import numpy as np
import orjson

from tokentape_api.work import Sender, Workers
from tokentape_contracts import limits
from tokentape_contracts.errors import CannotExtend, InvalidRequest, PromptTooLong
from tokentape_contracts.events import Ids
from tokentape_core.domain.position import Position
from tokentape_core.text.render import ChatRenderer, NotAppendable, Prompt, RenderError, TextTooLong


async def build_prompt(
    renderer: ChatRenderer, workers: Workers, sender: Sender, at: Position, opened_at: float
) -> Prompt:
    """The prompt of a request at its position.

    Args:
        workers: render what would hold up the event loop, for this sender.
        opened_at: when the session was opened, Unix seconds: the date that a template writes.

    Raises:
        CannotExtend: the template cannot append these messages.
        InvalidRequest: the template refuses them.
        PromptTooLong: the new part, or the whole, is above its limit.
        Overloaded: no thread is free for it.
    """
    before = at.parent.tokens if at.parent else np.empty(0, np.int32)
    cost = len(orjson.dumps([at.new_messages, at.head.tools]))
    try:
        prompt = await workers.run(cost, sender, partial(_render, renderer, at, before, opened_at))
    except NotAppendable as error:
        raise CannotExtend(str(error)) from error
    except TextTooLong as error:
        raise PromptTooLong(str(error)) from error
    except RenderError as error:
        raise InvalidRequest(str(error)) from error
    if (length := prompt.keep + len(prompt.suffix)) > limits.PROMPT_TOKENS:
        raise PromptTooLong(f"the prompt has {length} tokens, more than {limits.PROMPT_TOKENS}")
    return prompt


def _render(renderer: ChatRenderer, at: Position, before: Ids, opened_at: float) -> Prompt:
    tools, template_kwargs = at.head.tools, at.head.template_kwargs
    if at.parent is None:
        suffix = renderer.render(
            at.new_messages, tools=tools, template_kwargs=template_kwargs, opened_at=opened_at
        )
        return Prompt(keep=0, suffix=suffix)
    return renderer.extend(
        before,
        at.parent.event.messages[-1],
        at.new_messages,
        tools=tools,
        template_kwargs=template_kwargs,
        opened_at=opened_at,
    )
