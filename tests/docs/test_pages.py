"""What holds for every page: links lead somewhere, names exist, commands are ones that there are."""

import html
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from tests.docs.markdown import DOCS, PAGES, ROOT, anchors, blocks, links, name_of, rows
from tokentape_cli.demo.show import legend
from tokentape_cli.main import build_parser, joined
from tokentape_contracts.http import MODES

COMMANDS = [block for page in PAGES for block in blocks(page, "sh")]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """A relative link names a file or folder that is there, and a heading in it."""
    for link in links(page):
        if "://" in link:
            continue
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        assert not fragment or fragment in anchors(target), link


def test_every_page_is_in_the_index() -> None:
    """docs/README.md links to each page below it."""
    index = DOCS / "README.md"
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in links(index)}
    assert [name_of(page) for page in DOCS.rglob("*.md") if page not in linked | {index}] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tests_and_files_that_are_named_exist(page: Path) -> None:
    """A path in backticks is in the tree; `tests/…py::test_name` names a test."""
    for path, _, test in re.findall(
        r"`((?:contracts|services|driver|tests|docs|scripts|benchmarks)/[\w./-]+)(::(\w+))?`",
        page.read_text(),
    ):
        assert (ROOT / path).exists(), path
        assert not test or f"def {test}(" in (ROOT / path).read_text(), test


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_commands_are_right(block: object) -> None:
    """Every `tokentape …` line of a shell block is a command line that the command takes."""
    for line in block.code.splitlines():  # type: ignore[attr-defined]
        program, *arguments = (
            shlex.split(re.split(r"#| >", line)[0], posix=True) if "tokentape " in line else [""]
        )
        if program.rpartition("/")[2] == "tokentape":
            assert build_parser().parse_args(joined(arguments)).command == joined(arguments)[0]


def test_extras_are_installed_from_a_clone() -> None:
    """Pages and messages name extras that there are, as pip takes them in a clone: `.[torch]`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    code = [path for top in ("contracts", "driver", "services") for path in (ROOT / top).rglob("*.py")]
    named = 0
    for path in (*PAGES, *code):
        text = path.read_text()
        assert not re.search(r"tokentape\[", text), path
        for extras in re.findall(r"""['"]\.\[([\w,]*)\]['"]""", text):
            assert set(extras.split(",")) <= set(project["optional-dependencies"]), (path, extras)
            named += 1
    assert named > 5


def test_replay_is_one_thing() -> None:
    """`tokentape replay` does a replay; the engine's rows and payloads are those of routing replay."""
    code = [path for top in ("contracts", "driver", "services") for path in (ROOT / top).rglob("*.py")]
    alerts = ROOT / "deploy" / "kustomize" / "components" / "monitoring" / "alerts.yaml"
    other = re.compile(r"(?<!routing )\breplay\s+(of experts|rows?\b|payloads?\b)", re.IGNORECASE)
    assert [path for path in (*PAGES, *code, alerts) if other.search(path.read_text())] == []


def test_the_glossary_explains_the_words() -> None:
    """It is sorted, and has each word that a newcomer asked for, and those of modes, hooks and events."""
    words = rows((DOCS / "reference" / "glossary.md").read_text())[1:]
    assert words == sorted(words)
    asked = {"leaf", "pin", "family", "seal", "head", "altered answer", "left out", "turn", "trajectory"}
    assert {*asked, "sample", "routing replay", "replay", "matcher", *MODES} <= set(words)
    for page in (ROOT / "README.md", DOCS / "README.md"):
        assert any(link.endswith("reference/glossary.md") for link in links(page)), page


def test_the_readme_begins_with_the_demo() -> None:
    """First the demo with a picture of what it prints, then the reader's model, then the reader's trainer."""
    text = (ROOT / "README.md").read_text()
    found = [
        text.index(part) for part in ("make demo", "](docs/demo.svg)", "## Your model", "## Your trainer")
    ]
    assert found == sorted(found)


def test_the_picture_is_of_the_demo() -> None:
    """docs/demo.svg holds lines that the demo prints, and loads nothing from elsewhere."""
    svg = html.unescape((DOCS / "demo.svg").read_text()).replace("\xa0", " ")
    for line in (
        legend(False).partition(",")[0].strip("«»"),
        "starting the reference engine",
        "samples verified",
    ):
        assert line in svg
    assert not re.search(r"@import|@font-face|(href|src)=\"?http", svg)
