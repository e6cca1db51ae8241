"""`tokentape token create`: a new bearer token, and its entry for the tokens file."""

import argparse
import secrets
import sys

from tokentape_cli.options import UsageError
from tokentape_contracts import limits
from tokentape_contracts.http import SCOPES, TOKEN_PREFIX

_BYTES = 32


def create(arguments: argparse.Namespace) -> int:
    """Prints the entry on standard output, so that `>>` adds it to the file, and the token on the other."""
    from tokentape_api.http.access import is_name, token_digest

    for option in ("name", "tenant"):
        if not is_name(getattr(arguments, option)):
            raise UsageError(
                f"--{option} must be at most {limits.TENANT_CHARS} letters, digits, dots, hyphens and "
                "underscores, and begin with a letter or a digit"
            )
    token = TOKEN_PREFIX + secrets.token_urlsafe(_BYTES)
    scopes = ", ".join(f'"{scope}"' for scope in SCOPES if scope in arguments.scope)
    print("[[token]]")
    print(f'name = "{arguments.name}"')
    print(f'tenant = "{arguments.tenant}"')
    print(f"scopes = [{scopes}]")
    print(f'sha256 = "{token_digest(token)}"')
    sys.stdout.flush()
    print(f"The token, which is shown only now:\n{token}", file=sys.stderr)
    return 0
