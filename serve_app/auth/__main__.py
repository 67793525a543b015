"""Makes an API key or an admin key: `python -m serve_app.auth`.
Never stores it: the key is printed once, with the digest that the config needs."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Callable, Sequence

_KEY_BYTES = 32


def main(
    arguments: Sequence[str],
    prog: str = "python -m serve_app.auth",
    kind: Callable[..., argparse.ArgumentParser] = argparse.ArgumentParser,
) -> int:
    """Print a new key, and the entry for the config. prog: the command's name in its help. kind: makes its parser."""
    parser = kind(
        prog=prog,
        description="Make a random key, and print it with the lines that make it an API key or the admin key in a "
        "config.",
    )
    parser.add_argument("tenant", nargs="?", default="default", help="tenant that the key belongs to (%(default)s)")
    tenant = parser.parse_args(arguments).tenant
    if not tenant:
        parser.error("tenant is empty: expected a name")
    from serve_app.auth.keys import digest  # here, because --help need not wait for it

    key = f"sk-{secrets.token_urlsafe(_KEY_BYTES)}"
    sha256 = digest(key.encode())
    print(f"key, shown only now:       {key}")
    print(f"entry of auth.keys:        - {json.dumps({'tenant': tenant, 'sha256': sha256})}")
    print(f"or, for the admin routes:  admin_sha256: {sha256}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
