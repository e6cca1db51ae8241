"""A sample for a person: which tokens were sampled, and which the environment inserted."""

from collections.abc import Iterator, Mapping
from typing import Any

from tokentape_core.text.tokenizer import Tokenizer
from tokentape_driver import RolloutSample

_SAMPLED, _INSERTED, _BOLD, _RESET = "\033[32m", "\033[90m", "\033[1m", "\033[0m"
_HEAD_LINES, _TAIL_LINES = 2, 4


def legend(color: bool) -> str:
    """What the two colours, or the brackets in their place, mean."""
    sampled = _paint("sampled by the model", True, color)
    return f"{sampled}, {_paint('inserted by the environment', False, color)}"


def show(sample: RolloutSample, tokenizer: Tokenizer, title: str, *, color: bool) -> str:
    """The sample's turns in full text (a long prompt without its middle), then length, mask sum, status."""
    mask = sample.loss_mask or []
    first = len(sample.tokens) - len(mask)
    lines = [f"{_BOLD}{title}{_RESET}" if color else title]
    prompt = _elided(tokenizer.decode(sample.tokens[:first]))
    lines.append(_indent("prompt", _paint(prompt, False, color)))
    turn = 0
    for start, end, sampled in _spans(mask):
        turn += sampled
        text = tokenizer.decode(sample.tokens[first + start : first + end])
        lines.append(_indent(f"turn {turn}" if sampled else "", _paint(text, sampled, color)))
    status = sample.status.value if sample.status else "-"
    lines.append(f"  {len(sample.tokens)} tokens, {sum(mask)} sampled in {turn} turns, {status}")
    return "\n".join(lines)


def show_tree(samples: list[RolloutSample]) -> str:
    """The branches of one session: each turn, and the leaf in whose sample it is trained, or why in none."""
    nodes = samples[0].metadata["tree"]["nodes"]
    trained = _trained_in(samples)
    left_out = {entry["turn"] - 1: entry for entry in samples[0].metadata["accounting"]["left_out"]}
    lines: list[str] = []

    def draw(parent: int | None, indent: str) -> None:
        children = [node for node in nodes if node["parent"] == parent]
        for node in children:
            is_last = node is children[-1]
            start, end = node["completion_span"]
            is_leaf = not any(other["parent"] == node["id"] for other in nodes)
            if node["id"] in trained:
                fate = f"trained in leaf {trained[node['id']]}"
            else:
                fate = f"not trained: {_reason(left_out.get(node['id']))}"
            mark = ", a leaf" if is_leaf else ""
            branch = "└─" if is_last else "├─"
            lines.append(f"  {indent}{branch} turn {node['id']}: tokens {start} to {end}, {fate}{mark}")
            draw(node["id"], indent + ("   " if is_last else "│  "))

    draw(None, "")
    return "\n".join(lines)


def _reason(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "nothing was sampled"
    by = "" if entry["by"] is None else f" by turn {entry['by'] - 1}"
    return f"{entry['tokens']} tokens {entry['reason']}{by}"


def _trained_in(samples: list[RolloutSample]) -> dict[int, int]:
    """Node → the leaf in whose sample its tokens have loss."""
    trained: dict[int, int] = {}
    spans = {node["id"]: node["completion_span"] for node in samples[0].metadata["tree"]["nodes"]}
    for sample in samples:
        leaf = sample.metadata["leaf"]
        first = len(sample.tokens) - sample.response_length
        for node in leaf["path_node_ids"]:
            start, end = spans[node]
            if any((sample.loss_mask or [])[start - first : end - first]):
                trained[node] = leaf["node_id"]
    return trained


def _elided(prompt: str) -> str:
    """The prompt without its middle, which is the tools' description."""
    lines = prompt.split("\n")
    left_out = len(lines) - _HEAD_LINES - _TAIL_LINES
    if left_out <= 1:
        return prompt
    return "\n".join([*lines[:_HEAD_LINES], f"[… {left_out} lines …]", *lines[-_TAIL_LINES:]])


def _spans(mask: list[int]) -> Iterator[tuple[int, int, bool]]:
    start = 0
    for i in range(1, len(mask) + 1):
        if i == len(mask) or mask[i] != mask[start]:
            yield start, i, bool(mask[start])
            start = i


def _paint(text: str, sampled: bool, color: bool) -> str:
    if not color:
        return f"«{text}»" if sampled else text
    paint = _SAMPLED if sampled else _INSERTED
    # Painted line by line: a pager or a cut line would otherwise carry a colour on.
    return "\n".join(f"{paint}{line}{_RESET}" for line in text.split("\n"))


def _indent(label: str, text: str) -> str:
    first, *rest = text.split("\n")
    return "\n".join([f"  {label:>7} │ {first}", *(f"  {'':>7} │ {line}" for line in rest)])
