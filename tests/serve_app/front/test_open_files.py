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
    nbthread {threads}
    stats socket {directory}/admin
defaults
    mode http
    timeout client 1s
    timeout connect 1s
    timeout server 1s
{options}
frontend prometheus
    bind unix@{directory}/prometheus
frontend http_frontend
    bind unix@{directory}/front
listen stats
    bind unix@{directory}/stats
backend app
    option httpchk GET /
{replicas}
"""
"""What Ray's configuration has that counts. HAProxy starts again, and asks again, whenever a replica comes or goes."""
FEW = 200


def asked_for(maxconn: int, config: Path, threads: int = 1, replicas: int = 1) -> int:
    """Return how many files HAProxy says that it needs, with the options of Ray that matter for it."""
    options = re.findall(r"^ *option splice-\w+$", HAPROXY_CONFIG_TEMPLATE, re.MULTILINE)
    servers = [f"    server r{number} 127.0.0.1:9 check" for number in range(replicas)]
    several = {"options": "\n".join(options), "replicas": "\n".join(servers)}
    config.write_text(CONFIG.format(maxconn=maxconn, threads=threads, directory=config.parent, **several))
    shell = ["sh", "-c", f'ulimit -n {FEW}; exec "$@"', "sh", haproxy_binary({}), "-db", "-f", str(config)]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=60, check=False)
    (number,) = re.findall(r"Cannot raise FD limit to (\d+)", done.stderr)
    return int(number)


@pytest.mark.parametrize(("maxconn", "threads"), [(1000, 1), (4096, 1), (4096, 32), (8192, 4)])
def test_as_many_files_are_counted_as_haproxy_asks_for_with_some_dozens_of_replicas(
    maxconn: int, threads: int, tmp_path: Path
) -> None:
    """Regression: pipes were not counted, and HAProxy ended at once where the limit was between the two numbers. Then
    hundreds were added for its threads and replicas, and limits that suffice were refused."""
    fewest, most = (asked_for(maxconn, tmp_path / "haproxy.cfg", threads, replicas) for replicas in (30, 50))
    assert fewest <= open_files(maxconn, threads) <= most


@pytest.mark.parametrize(("threads", "needed"), [("1", 10307), ("4", 10316)])
def test_a_limit_below_that_is_no_place_for_haproxy(threads: str, needed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 9000))
    refusal = f"it needs {needed} open files, the limit is 9000"
    with pytest.raises(HAProxyUnusable, match=refusal), private_haproxy({"RAY_SERVE_HAPROXY_NBTHREAD": threads}):
        pass
