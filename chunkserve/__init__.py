"""Owns the library's public names: `Engine`, `AsyncEngine`, what they return, and what they raise.

    from chunkserve import Engine

    with Engine("smollm2-135m-instruct") as engine:
        print(engine.chat([{"role": "user", "content": "What is the capital of France?"}], temperature=0).text)

Never imports anything heavy: torch, tokenizers and the rest are loaded when an engine starts, and Ray never is.
"""

from chunkserve.answers import Alternative, Answer, Choice, Chunk, TokenLogprob, ToolCall, ToolCallDelta
from chunkserve.async_engine import AsyncEngine
from chunkserve.engine import Engine
from chunkserve.errors import ConfigError, ModelError, RequestError, RequestFailed, RequestRefused
from chunkserve.fields import ChatFields, CompletionFields, EmbeddingFields, GenerationFields, Message
from chunkserve.settings import EngineSettings
from engine.protocol import Usage

__all__ = [
    "Alternative",
    "Answer",
    "AsyncEngine",
    "ChatFields",
    "Choice",
    "Chunk",
    "CompletionFields",
    "ConfigError",
    "EmbeddingFields",
    "Engine",
    "EngineSettings",
    "GenerationFields",
    "Message",
    "ModelError",
    "RequestError",
    "RequestFailed",
    "RequestRefused",
    "TokenLogprob",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
]
