"""Owns a head and two workers in network and process namespaces of their own, which is what pods are. `python -m` this
under `unshare --net --mount` empties one worker by the hook, while streams run, and prints what became of them.
Never touches the machine's own network; everything ends with this process."""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from k8s.validate.builds import rendered
from k8s.validate.manifests import ROOT, groups, of_kind
from k8s.validate.pods import DRAIN
from tests.k8s.image import hook_files

T = TypeVar("T")
HEAD, LEAVING, STAYING = "10.99.0.2", "10.99.0.3", "10.99.0.4"
TOKEN = "0123456789abcdef" * 4
READY_S = 90
NUM_STREAMS, NUM_TOKENS = 6, 200
DEADLINE_S = 120


class Pod:
    """A network, a process table and a /tmp of its own; `end` ends it with all its processes."""

    def __init__(self, name: str, ip: str, temp: Path) -> None:
        self.ip = ip
        namespaces = ["--net", "--pid", "--fork", "--mount", "--mount-proc", "--kill-child"]
        self._holder = subprocess.Popen(["unshare", *namespaces, "sleep", "infinity"])
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        self._pid = until(lambda: children.read_text().split(), 10)[0]
        run("ip", "link", "add", f"v-{name}", "type", "veth", "peer", "name", "eth0", "netns", self._pid)
        run("ip", "link", "set", f"v-{name}", "master", "pods", "up")
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "addr", "add", f"{ip}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")
        self.run("ip", "route", "add", "default", "via", "10.99.0.1")
        own = temp / name
        own.mkdir()
        if ROOT.is_relative_to("/tmp"):  # a checkout there would be hidden with the rest
            kept = own / ROOT.relative_to("/tmp")
            kept.mkdir(parents=True)
            self.run("mount", "--bind", ROOT, kept)
        # As in the image: the package is not installed, and a process in a pod does not start in the checkout.
        self._pythonpath = f"/tmp/{hook_files(own).relative_to(own)}"
        self.run("mount", "--rbind", own, "/tmp")
        self.run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")

    def command(self, *words: str | Path) -> list[str]:
        return ["nsenter", "--target", self._pid, "--net", "--pid", "--mount", "--", *map(str, words)]

    def run(self, *words: str | Path) -> None:
        run(*self.command(*words))

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        env = environment() | {"RAY_ADDRESS": f"{HEAD}:6379", "POD_IP": self.ip, "PYTHONPATH": self._pythonpath}
        return subprocess.Popen(self.command(*words), env=env, text=True, **options)

    def end(self) -> None:
        self._holder.kill()
        self._holder.wait()


def environment() -> dict[str, str]:
    """Return the environment of a Ray container: the base's own variables, and the token as the operator gives it."""
    (service,) = of_kind(rendered("gpu"), "RayService")
    serve = {name: value for name, value in groups(service)[0].env().items() if name.startswith("RAY_SERVE_")}
    serve["RAY_SERVE_HAPROXY_MAXCONN"] = "1024"  # what the base has needs more open files than some machines allow
    serve["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(Path(sys.executable).with_name("chunkserve-haproxy"))
    return {**os.environ, **serve, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}


def run(*words: str | Path) -> None:
    subprocess.run(list(map(str, words)), check=True, capture_output=True, timeout=30)


def until(look: Callable[[], T], seconds: float) -> T:
    """Return the first truthy value that `look` returns."""
    end_s = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > end_s:
            raise TimeoutError(look)
        time.sleep(0.2)
    return found


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def is_ok(url: str) -> bool:
    return status(url) == 200


def deploy() -> None:
    """Deploy as the operator does: send the config to the head's dashboard."""
    engine = {"executor": "fake", "fake": {"step_delay_ms": 100}}
    args = {"engine_replicas": 2, "ingress_replicas": 2, "drain_timeout_s": 90, "engine": engine}
    application = {"name": "chunkserve", "route_prefix": "/", "import_path": "serve_app.app:build", "args": args}
    http = {"host": "0.0.0.0", "port": 8000}
    config = {"proxy_location": "EveryNode", "http_options": http, "applications": [application]}
    request = urllib.request.Request(
        f"http://{HEAD}:8265/api/serve/applications/",
        data=json.dumps(config).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"},
        method="PUT",
    )
    urllib.request.urlopen(request, timeout=60).close()


def is_deployed() -> bool:
    try:
        deploy()
    except OSError:
        return False
    return True


def stream(i: int, ip: str, path: Path) -> subprocess.Popen[bytes]:
    body = {"model": "smollm2-135m-instruct", "prompt": f"Story {i}", "max_tokens": NUM_TOKENS, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True}
    url, kind = f"http://{ip}:8000/v1/completions", "Content-Type: application/json"
    command = ["curl", "--silent", "--no-buffer", url, "--header", kind, "--data", json.dumps(body)]
    with path.open("wb") as file:
        return subprocess.Popen(command, stdout=file)


def is_whole(path: Path) -> bool:
    """Return whether a stream has all its tokens, which are a letter each.
    On a busy machine one frame may bring several."""
    *frames, end = [line.removeprefix("data: ") for line in path.read_text().splitlines() if line.startswith("data: ")]
    texts = [json.loads(frame).get("choices", [{}])[0].get("text", "") for frame in frames]
    return end == "[DONE]" and len("".join(texts)) == NUM_TOKENS


def empty_one(head: Pod, leaving: Pod, staying: Pod, temp: Path) -> dict[str, Any]:
    """Run streams through both workers' proxies, two thirds of them through the one that the hook then empties."""
    ray = str(Path(sys.executable).with_name("ray"))
    memory = ["--object-store-memory", "100000000", "--block"]
    head_words = ["--head", "--node-ip-address", head.ip, "--num-cpus", "0", "--dashboard-host", "0.0.0.0"]
    with (temp / "ray.log").open("wb") as log:
        head.start(ray, "start", *head_words, *memory, stdout=log, stderr=log)
        until(lambda: is_ok(f"http://{HEAD}:52365/api/healthz"), READY_S)
        for pod in (leaving, staying):
            words = ["--address", f"{HEAD}:6379", "--node-ip-address", pod.ip, "--num-cpus", "2"]
            pod.start(ray, "start", *words, *memory, stdout=log, stderr=log)
        for pod in (leaving, staying):  # both workers are there before anything is placed, so that each gets its part
            until(functools.partial(is_ok, f"http://{pod.ip}:52365/api/healthz"), READY_S)
        until(is_deployed, READY_S)  # the dashboard's Serve module comes up after the rest
        probe = f"http://{leaving.ip}:8000/-/healthz"
        until(lambda: {status(probe), status(f"http://{staying.ip}:8000/-/healthz")} == {200}, READY_S)
        paths = [temp / f"stream{i}" for i in range(NUM_STREAMS)]
        ips = [staying.ip if i % 3 == 2 else leaving.ip for i in range(NUM_STREAMS)]
        streams = [stream(i, ip, path) for i, (ip, path) in enumerate(zip(ips, paths, strict=True))]
        until(lambda: all(path.read_text().count("data: {") > 10 for path in paths), READY_S)
        # The command that the manifests are checked to have.
        hook = leaving.start(sys.executable, *DRAIN[1:], str(DEADLINE_S), stderr=subprocess.PIPE)
        refused_while_held = until(lambda: status(probe) == 503 or hook.poll() is not None, DEADLINE_S)
        was_held = hook.poll() is None
        _, said = hook.communicate(timeout=DEADLINE_S + 30)
        for_others = status(f"http://{staying.ip}:8000/health")
        whole_at_its_end = [is_whole(path) for path, ip in zip(paths, ips, strict=True) if ip == leaving.ip]
        for one in streams:
            one.wait(DEADLINE_S)
    return {
        "hook": hook.returncode,
        "said": re.sub(r"[0-9a-f]{56}", "ID", said).splitlines()[-2:],
        "ready_while_draining": not (refused_while_held and was_held),
        "whole_when_the_hook_ended": whole_at_its_end,
        "whole": [is_whole(path) for path in paths],
        "staying": for_others,
    }


def main() -> None:
    temp = Path(tempfile.mkdtemp(prefix="cs", dir="/tmp"))
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "pods", "type", "bridge")
    run("ip", "addr", "add", "10.99.0.1/24", "dev", "pods")
    run("ip", "link", "set", "pods", "up")
    pods: list[Pod] = []
    try:
        for name, ip in (("head", HEAD), ("leaving", LEAVING), ("staying", STAYING)):
            pods.append(Pod(name, ip, temp))
        head, leaving, staying = pods
        print(json.dumps(empty_one(head, leaving, staying, temp)), flush=True)
    finally:
        if sys.exc_info()[0] is not None and (temp / "ray.log").is_file():
            print((temp / "ray.log").read_text(errors="replace")[-4000:], file=sys.stderr)
        for pod in pods:
            pod.end()
        shutil.rmtree(temp, ignore_errors=True)


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m tests.k8s.pods",
        description="Empty a worker by the preStop hook while it streams, in namespaces that stand for pods. Run it "
        "under unshare --net --mount.",
    ).parse_args()
    main()
