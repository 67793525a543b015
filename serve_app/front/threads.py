"""Owns the warning about engines whose threads would wait for each other, or for a container's CPU quota.
Never refuses: engines may be on other machines, and a few threads too many only cost time."""

from __future__ import annotations

from collections.abc import Sequence

from engine.host.cores import usable_threads
from serve_app.front.preflight import Application


def thread_warnings(applications: Sequence[Application]) -> list[str]:
    """Return a line if `num_threads` gives all engines together more threads than can compute here at a time. An engine
    on a GPU hardly uses its threads, and a fake one has none."""
    models = [model for application in applications for model in application.each_model()]
    on_cpu = [one for one in models if one.settings.engine.executor == "torch" and not one.settings.engine_num_gpus]
    asking = [model for model in on_cpu if model.settings.engine.num_threads is not None]
    usable, why = usable_threads()
    engines = sum(model.settings.most_engines for model in on_cpu)
    threads = sum(model.settings.most_engines * _threads_of(model, usable) for model in on_cpu)
    if not asking or threads <= usable:
        return []
    have = "1 engine has" if engines == 1 else f"{engines} engines on this machine have"
    text = f"{have} {threads} threads, of which {usable} can compute at a time ({why}); unset, they share what there is"
    return [str(asking[0].refused(f"engine.num_threads: {text}", "engine", "num_threads"))]


def _threads_of(model: Application, usable: int) -> int:
    """Return the threads of each engine, as `share_threads` has them."""
    asked = model.settings.engine.num_threads
    return max(1, usable // model.total_engines) if asked is None else asked
