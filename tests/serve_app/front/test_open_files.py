"""HAProxy is put in front only where it may open the files that it asks for at its start, as it says itself.
Never starts one: with so few files it ends at once."""

from __future__ import annotations

import re
import resource
import subprocess
from pathlib import Path

import pytest
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

from serve_app.edge.launcher import haproxy_binary
from serve_app.front.haproxy import HAProxyUnusable, open_files, private_haproxy

CONFIG = """global
    maxconn {maxconn}
defaults
    mode http
    timeout client 1s
    timeout connect 1s
    timeout server 1s
{options}
frontend http_frontend
    bind unix@{socket}
"""
FEW = 200


def asked_for(maxconn: int, config: Path) -> int:
    """Return how many files HAProxy says that it needs, with the options of Ray that matter for it."""
    options = re.findall(r"^ *option splice-\w+$", HAPROXY_CONFIG_TEMPLATE, re.MULTILINE)
    config.write_text(CONFIG.format(maxconn=maxconn, options="\n".join(options), socket=config.parent / "front"))
    shell = ["sh", "-c", f'ulimit -n {FEW}; exec "$@"', "sh", haproxy_binary({}), "-db", "-f", str(config)]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=60, check=False)
    (number,) = re.findall(r"Cannot raise FD limit to (\d+)", done.stderr)
    return int(number)


@pytest.mark.parametrize("maxconn", [1000, 4096, 8192])
def test_as_many_files_are_counted_as_haproxy_asks_for(maxconn: int, tmp_path: Path) -> None:
    """Regression: pipes were not counted, and HAProxy ended at once where the limit was between the two numbers."""
    assert asked_for(maxconn, tmp_path / "haproxy.cfg") <= open_files(maxconn)


def test_a_limit_below_that_is_no_place_for_haproxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 9000))
    with pytest.raises(HAProxyUnusable, match=r"it needs 10496 open files, the limit is 9000"), private_haproxy({}):
        pass
