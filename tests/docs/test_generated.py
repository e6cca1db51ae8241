"""The pages that follow from the code are current."""

import subprocess
import sys

from benchmarks import report
from tests.docs.markdown import DOCS, ROOT
from tokentape_contracts import limits
from tokentape_contracts.errors import TABLE

SCRIPT = ROOT / "scripts" / "generate-docs"


def test_generated_pages_are_current() -> None:
    """`scripts/generate-docs --check` finds nothing to write."""
    result = subprocess.run(
        [sys.executable, SCRIPT, "--check"], capture_output=True, text=True, timeout=110, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr


def test_the_page_of_results_is_current() -> None:
    """It says what the result files hold."""
    assert report.PAGE.read_text() == report.page(report.read())


def test_every_error_code_is_documented() -> None:
    """errors.md has a row for each code, with its status."""
    page = (DOCS / "reference" / "errors.md").read_text()
    missing = [
        error.code for error, rule in TABLE.items() if f"| `{error.code}` | {rule.status} |" not in page
    ]
    assert not missing


def test_every_limit_is_documented() -> None:
    """limits.md has a row for each limit."""
    page = (DOCS / "reference" / "limits.md").read_text()
    names = [name for name in vars(limits) if name.isupper()]
    assert len(names) > 20
    assert [name for name in names if f"| `{name}` |" not in page] == []
