"""Owns the promises about the ports that servers under test get. Never starts a server."""

import socket
from pathlib import Path

from loadtest.server import PORTS, free_port

RAYS_AGENT = 52365


def test_no_port_is_one_that_linux_or_ray_may_hand_to_another_process_before_the_server_binds_it() -> None:
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert free_port() in PORTS
    assert PORTS.stop <= lowest or PORTS.start > highest
    assert RAYS_AGENT not in PORTS


def test_ports_asked_for_one_after_the_other_differ_and_one_in_use_is_passed_over() -> None:
    with socket.socket() as sock:
        taken = free_port()
        sock.bind(("127.0.0.1", taken))
        given = [free_port() for _ in PORTS]  # once around: every port but the taken one, which is left out
    assert taken not in given
    assert len(set(given)) >= len(PORTS) - 100
