"""What every layer asks of plain text."""


def common_start(a: str, b: str) -> int:
    """How many characters the two have in common at the start: where they first differ, if they do."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
