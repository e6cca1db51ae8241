"""What the tests read out of Markdown pages."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(DOCS.rglob("*.md")),
]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of code, and the line of its page on which the code begins."""

    page: Path
    language: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    """The page's path as a reader of the repository knows it."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[Block]:
    """The page's blocks in one language."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, match[1], text.count("\n", 0, match.start(2)) + 1, match[2])
        for match in _FENCE.finditer(text)
        if match[1] == language
    ]


def headings(page: Path) -> list[str]:
    """The texts of the page's headings, Markdown included."""
    return [match[2] for match in _HEADING.finditer(_prose(page))]


def sections(page: Path) -> dict[str, str]:
    """Heading → all that stands below it, up to the next heading of any level, code included."""
    parts = re.split(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def anchors(page: Path) -> set[str]:
    """The fragments that GitHub gives the page's headings."""
    return {_slug(heading) for heading in headings(page)}


def links(page: Path) -> Iterator[str]:
    """The targets of the page's links."""
    return (match[1] for match in _LINK.finditer(_prose(page)))


def rows(text: str) -> list[str]:
    """The first cell of each row of the tables in `text`, without backticks."""
    return [match[1].strip("` ") for match in re.finditer(r"^\| ([^|]+) \|", text, re.MULTILINE)]


def _prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def _slug(heading: str) -> str:
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
