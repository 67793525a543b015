"""Owns what this process knows of its engines' versions, which differ while a changed config is rolled out: what each
engine replica is, and what this ingress replica needs.
Never asks an engine: the router writes what they report, and `replicas` what one has answered. It is a module of its
own for the same reason as engine_count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

from engine.config import ResolvedConfig
from engine.protocol import AdapterRef
from serve_app.engines import liveness
from serve_app.settings.engine_names import ENGINE

_MOST = 4096
"""How many replicas are remembered. Those that are gone are, too: their streams look for one with the same files."""


@dataclass(frozen=True, slots=True)
class EngineVersion:
    """Identifies an engine by three digests. Two engines of one config may still differ in their files."""

    model: str
    """That of the settings that say which model computes, and in which numbers. An ingress replica with the same one
    has the same tokenizer, and token ids mean the same."""
    settings: str
    """That of all settings that the engine is built from."""
    files: str = ""
    """That of the model's files; empty if the settings say what is in them."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine replica says of itself."""

    replica_id: str
    version: EngineVersion
    config: ResolvedConfig
    adapters: tuple[AdapterRef, ...] = ()


@dataclass(slots=True)
class _Known:
    """Read by any thread without a lock: items are only added or replaced."""

    wanted: EngineVersion | None = None
    told: dict[str, EngineVersion] = field(default_factory=dict)
    revision: int = 0
    is_replaced: bool = False


_deployments: dict[str, _Known] = {}
_listeners: list[Callable[[], None]] = []
_telling = Lock()


def _known(deployment: str) -> _Known:
    # `setdefault` is one step, whichever of the two threads comes first.
    return _deployments.get(deployment) or _deployments.setdefault(deployment, _Known())


def want(version: EngineVersion, deployment: str = ENGINE) -> None:
    """Say what this process's own settings ask of an engine; its `files` do not matter."""
    known = _known(deployment)
    known.wanted = version
    known.revision += 1


def wanted(deployment: str = ENGINE) -> EngineVersion | None:
    """Return what was said so; None in a process that takes any engine."""
    return _known(deployment).wanted


def tell(engine_id: str, version: EngineVersion, deployment: str = ENGINE) -> None:
    """Note what an engine is, which never changes."""
    known = _known(deployment)
    if engine_id in known.told:
        return
    with _telling:
        if len(known.told) >= _MOST:
            del known.told[next(iter(known.told))]
        known.told[engine_id] = version
        known.revision += 1


def version_of(engine_id: str, deployment: str = ENGINE) -> EngineVersion | None:
    """Return what an engine is; None before it has told."""
    return _known(deployment).told.get(engine_id)


def revision(deployment: str = ENGINE) -> int:
    """Return a number that changes whenever there is news."""
    return _known(deployment).revision


def is_foreign(engine_id: str, deployment: str = ENGINE) -> bool:
    """Whether an engine is known to have another model than this process. Such an engine is none of its engines."""
    known = _known(deployment)
    version = known.told.get(engine_id)
    return known.wanted is not None and version is not None and version.model != known.wanted.model


def is_own(engine_id: str, deployment: str = ENGINE) -> bool:
    """Whether an engine is known to be built from this process's own settings."""
    known = _known(deployment)
    version = known.told.get(engine_id)
    return known.wanted is not None and version is not None and version.settings == known.wanted.settings


def has_own(deployment: str = ENGINE) -> bool:
    """Whether there is such an engine now."""
    return any(is_own(engine_id, deployment) for engine_id in liveness.engines(deployment))


def is_replaced(deployment: str = ENGINE) -> bool:
    """Whether there are engines, and all of them have another model than this process."""
    return _known(deployment).is_replaced


def set_replaced(replaced: bool, deployment: str = ENGINE) -> None:
    """Set the same; called by the router."""
    _known(deployment).is_replaced = replaced


def may_continue(begun_at: str, engine_id: str, deployment: str = ENGINE) -> bool:
    """Whether an answer that one engine began may continue on the other: both have the same files."""
    begun, other = version_of(begun_at, deployment), version_of(engine_id, deployment)
    return begun is None or (other is not None and other.files == begun.files)


def has_files(files: str, deployment: str = ENGINE) -> bool:
    """Whether there is an engine now whose model has these files."""
    told = (version_of(engine_id, deployment) for engine_id in liveness.engines(deployment))
    return any(version is not None and version.files == files for version in told)


def on_news(listener: Callable[[], None]) -> None:
    """Call `listener` when the router has taken news, on its thread. It must not block."""
    _listeners.append(listener)


def announce() -> None:
    """Call the listeners; called by the router."""
    for listener in _listeners:
        listener()
