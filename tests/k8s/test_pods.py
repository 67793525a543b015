"""The hook's promise, tested in the namespaces that pods are made of:
a worker that is emptied while streams run breaks none of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from k8s.validate.manifests import ROOT

NEEDED = ("unshare", "nsenter", "ip", "curl")


def why_not() -> str:
    """Return why it cannot run: namespaces with a network need root, and some containers refuse them even to root."""
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        return f"{', '.join(missing)} is missing"
    done = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True)
    return "" if os.geteuid() == 0 and done.returncode == 0 else "namespaces need root"


@pytest.mark.chaos
def test_no_stream_breaks_that_passes_through_a_pod_which_the_hook_empties() -> None:
    if reason := why_not():
        pytest.skip(reason)
    outer = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    command = [*outer, sys.executable, "-m", "tests.k8s.pods"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "hook": 0,
        "said": ["drain: node ID drains", "drain: nothing of Serve is left here"],
        "ready_while_draining": False,
        "whole_when_the_hook_ended": [True] * 4,
        "whole": [True] * 6,
        "staying": 200,
    }
