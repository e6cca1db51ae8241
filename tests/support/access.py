"""The ACL users of docs/guides/secure.md, with the rights that it names and no others."""

import re
from typing import Any, Final

from tests.docs.markdown import DOCS

USER: Final = "tokentape"
QUEUE_USER: Final = "tokentape-queue"


def make_users(admin: Any, password: str, *more: str) -> None:
    """Makes both users on a server.

    Args:
        more: rights that this way to run Redis needs as well.
    """
    page = (DOCS / "guides" / "secure.md").read_text()
    for name in (USER, QUEUE_USER):
        [rules] = re.findall(rf"ACL SETUSER {name} on '>[^']+' \\\n((?:.*\\\n)*.*)\n```", page)
        rights = rules.replace("\\\n", " ").replace("'", "").split()
        admin.execute_command("ACL", "SETUSER", name, "on", f">{password}", *rights, *more)


def more_rights(heading: str) -> list[list[str]]:
    """What the guide's table adds for one way to run Redis: the rights in each of its code spans."""
    page = (DOCS / "guides" / "secure.md").read_text()
    rows = [re.split(r"(?<!\\)\|", line) for line in page.splitlines() if line.startswith("|")]
    [cell] = [row[2] for row in rows if heading in row[1]]
    return [span.replace("\\|", "|").split() for span in re.findall(r"`([-+][^`]*)`", cell)]
