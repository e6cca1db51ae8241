"""The page about families says what the table has."""

from __future__ import annotations

import re

from tests.docs.markdown import DOCS
from tokentape_core.text.families import FAMILIES, Family

PAGE = DOCS / "reference" / "families.md"


def test_every_family_has_its_row() -> None:
    """One row for each family, in order, with its tokens, roles, arguments and whether it is proven."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    table = {row.split("`")[1]: row for row in rows}
    assert [name for name in table if name in FAMILIES] == list(FAMILIES)
    for name, family in FAMILIES.items():
        assert table[name] == _row(family)


def test_every_family_has_its_notes() -> None:
    """The notes of the table stand on the page, in order."""
    page = re.sub(r"\s+", " ", PAGE.read_text(encoding="utf-8").replace("`", ""))
    places = [page.find(f"- **{name}**: {family.notes}") for name, family in FAMILIES.items()]
    assert -1 not in places
    assert places == sorted(places)


def _row(family: Family) -> str:
    ends = _codes(family.end_tokens) or "the tokenizer's end-of-sequence token"
    cells = [
        f"`{family.name}`",
        "the opener of the next message" if family.openers else ends,
        _codes(family.openers or family.replaced) or "–",
        ", ".join(sorted(family.append_roles)),
        family.arguments,
        "yes" if family.proven else "no",
    ]
    return f"| {' | '.join(cells)} |"


def _codes(spellings: tuple[str, ...]) -> str:
    return " ".join("`" + spelling.replace("|", r"\|") + "`" for spelling in spellings)
