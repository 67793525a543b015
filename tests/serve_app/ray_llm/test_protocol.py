"""Our server class has what the installed Ray's protocol asks for, and its tables know the installed Ray's fields.
Never starts a server."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from serve_app.llm_config.convert import FIELDS
from serve_app.ray_llm import ChunkserveServer
from tests.support.ray_llm import import_ray_llm

LLMServerProtocol = import_ray_llm("ray.llm._internal.serve.core.protocol").LLMServerProtocol
METHODS = sorted(
    name
    for name, value in {**vars(LLMServerProtocol.__mro__[1]), **vars(LLMServerProtocol)}.items()
    if not name.startswith("_") and callable(getattr(value, "__func__", value))
)
OF_LLM_SERVER = ("collective_rpc", "embeddings", "record_routing_stats", "score", "sync_init", "transcriptions")
"""What Ray's ingresses and controller call besides the protocol."""


def test_the_protocol_is_one() -> None:
    assert {"chat", "completions", "check_health", "get_deployment_options", "llm_config", "start"} <= set(METHODS)


def parameters(method: Callable[..., Any]) -> list[inspect.Parameter]:
    return [one for one in inspect.signature(method).parameters.values() if one.name not in ("self", "cls")]


def takes(method: Callable[..., Any], asked: Callable[..., Any]) -> bool:
    """Whether `method` can be called in each way in which `asked` can."""
    theirs = parameters(asked)
    positional = [one for one in theirs if one.kind is one.POSITIONAL_OR_KEYWORD]
    required = [one for one in positional if one.default is one.empty]
    signature = inspect.signature(method)
    offset = [] if inspect.ismethod(method) else [None]
    try:
        signature.bind(*offset, *(None for _ in positional))
        signature.bind(*offset, **{one.name: None for one in positional})
        signature.bind(*offset, *(None for _ in required))
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("name", METHODS)
def test_each_method_of_rays_protocol_is_there_and_is_called_as_rays_is(name: str) -> None:
    ours, theirs = getattr(ChunkserveServer, name), getattr(LLMServerProtocol, name)
    assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(theirs)
    if name == "get_deployment_options":  # its protocol takes anything; Ray's builder gives the config alone
        assert [one.name for one in parameters(ours)] == ["llm_config"]
    else:
        assert takes(ours, theirs)


@pytest.mark.parametrize("name", OF_LLM_SERVER)
def test_each_further_method_of_rays_own_server_is_there(name: str) -> None:
    ours, theirs = getattr(ChunkserveServer, name), getattr(import_ray_llm().LLMServer, name)
    assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(theirs)
    assert name == "sync_init" or takes(ours, theirs)


def test_rays_server_has_no_public_method_that_ours_lacks() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}

    assert public(import_ray_llm().LLMServer) <= public(ChunkserveServer)


def test_the_fields_of_an_llm_config_are_those_of_the_installed_ray() -> None:
    assert sorted(import_ray_llm().LLMConfig.model_fields) == sorted(FIELDS)
