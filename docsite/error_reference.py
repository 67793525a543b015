"""Owns the meaning of each error code for clients and the remedy: the table in docs/how-to/troubleshooting.md.
Never decides when an error occurs. A test compares the list with the codes in the source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    statuses: tuple[int, ...]
    meaning: str
    remedy: str


ENTRIES: dict[str, Entry] = {
    "aborted": Entry(
        (500, 503),
        "500: an administrator ended the request. 503: the server ended it while it was shutting down.",
        "500: ask the administrator. 503: send it again.",
    ),
    "adapter_unavailable": Entry(
        (503,),
        "The LoRA adapter cannot be read: its files changed or are gone, no engine has it, or `max_loras` are in use.",
        "Try again later. Load the adapter again if its files changed; raise `max_loras` if adapters take turns.",
    ),
    "adapter_withdrawn": Entry(
        (409,),
        "The LoRA adapter was unloaded, or its load was undone, while this request loaded it.",
        "Load it again if it is still wanted.",
    ),
    "admin_disabled": Entry(
        (403,), "An admin route, and the server has no admin key.", "Set `auth.admin_sha256`; see API keys."
    ),
    "admin_key_required": Entry((403,), "An admin route, and the key is a user's.", "Send the admin key."),
    "body_too_large": Entry(
        (413,),
        "The body has more than `max_body_bytes`, with what it refers to of kept responses.",
        "Send less, or raise the setting. Images count in base64.",
    ),
    "client_too_slow": Entry(
        (408,),
        "More than `max_unread_tokens` of the answer waited for the client to read them.",
        "Read the stream faster; raise the setting only for clients that pause on purpose.",
    ),
    "context_length_exceeded": Entry(
        (400,),
        "Prompt and answer do not fit: into `max_model_len`, or into the whole KV cache. `n_ctx` is the limit, "
        "`n_prompt_tokens` what the prompt has.",
        "Shorten the prompt or ask for a shorter answer. If the limit is the KV cache's, raise `kv_cache_memory_gib`.",
    ),
    "deadline_exceeded": Entry(
        (504,),
        "The answer was not complete within `timeout_ms` or `Request-Timeout-Ms`.",
        "Do not retry at once: it would be as late. Allow more time, ask for fewer tokens, or add engines.",
    ),
    "draining": Entry(
        (503,),
        "The server, or the replica that has the connection, is shutting down, or an administrator drains it.",
        "Send the request again: another replica or server takes it, or this one after `/admin/resume`.",
    ),
    "empty_prompt": Entry((400,), "The prompt has no tokens.", "Send some text."),
    "engine_dead": Entry(
        (503,),
        "No engine replica answers, or a new model is being deployed and this ingress replica still has the old one.",
        "Try again: Serve starts a new one. If it persists, the log of `serve run` has the engine's last messages.",
    ),
    "gateway_timeout": Entry(
        (504,),
        "HAProxy waited for a replica that did not answer.",
        "Try again. If it persists, look at the replica's log.",
    ),
    "grammar_limit_exceeded": Entry(
        (400,),
        "In the middle of the answer, the grammar, regex or schema needed more work than one token may cost.",
        "Simplify it: fewer optional parts in a row, fewer alternatives with the same beginning, left recursion.",
    ),
    "headers_too_large": Entry(
        (431,), "The headers are larger or more numerous than the server accepts.", "Send fewer; see HTTP limits."
    ),
    "internal_error": Entry(
        (500,), "The server failed unexpectedly: a bug.", "The log has the traceback. Please report it."
    ),
    "invalid_api_key": Entry(
        (401,),
        "There is no key, or it is not one of this server's.",
        "Send `Authorization: Bearer <key>`. A key whose entry was added to `keys_file` needs a restart.",
    ),
    "invalid_header": Entry((400,), "A header has a value that is not well formed.", "The message names the header."),
    "invalid_http": Entry((400,), "This is not HTTP/1.1.", "Check the URL's scheme: `http`, unless TLS is in front."),
    "invalid_json": Entry((400,), "The body is not JSON.", "The message says where."),
    "invalid_value": Entry(
        (400,),
        "A field has an invalid value.",
        "`param` names the field, the message the limit and the value.",
    ),
    "item_not_found": Entry(
        (400,),
        "An `item_reference` names an item that is neither in the request nor kept: its response was made with another "
        "key or with `store: false`, or is kept no longer.",
        "Send the item itself; with `store: false`, clients do. See Responses that are kept.",
    ),
    "lora_updates_disabled": Entry(
        (403,), "Adapters cannot be changed while this server runs.", "Set `allow_lora_updates`."
    ),
    "method_not_allowed": Entry((405,), "The route exists, but not for this method.", "See the routes."),
    "missing_required_parameter": Entry((400,), "A field is missing.", "`param` names it."),
    "model_asleep": Entry(
        (503,),
        "The model sleeps, and no engine of it was ready within its `wake_timeout_s`.",
        "Try again: the next request wakes it, too. If it persists, no other model can make room, or it takes longer "
        "to load; see Several models.",
    ),
    "model_not_found": Entry(
        (404,),
        "The server has no model or adapter of this name.",
        "`GET /v1/models` lists the names. `model_aliases` gives a model the name that a client insists on.",
    ),
    "not_found": Entry(
        (404,), "There is no such route.", "Check the base URL: Anthropic's clients need it without `/v1`."
    ),
    "preparation_failed": Entry(
        (500,), "The server failed to prepare the prompt.", "The log has the reason. Please report it."
    ),
    "queue_full": Entry(
        (429, 503),
        "The deployment's limit of requests or tokens is reached, or every engine has `max_num_seqs` + "
        "`max_queued_requests` requests; 429: too many wait in Ray Serve's proxy. "
        "[Limits](limits.md#which-check-refused-a-request) says which check it was.",
        "Wait for `Retry-After`. If it happens often, add engines or raise `admission`.",
    ),
    "rate_limit_exceeded": Entry(
        (429,),
        "The tenant's own limit is reached.",
        "Wait for `Retry-After`; send fewer requests at a time, or have the limit raised.",
    ),
    "replica_lost": Entry(
        (503,),
        "The ingress replica that held the connection went away.",
        "Send the request again. If it happens often, look at the node's memory.",
    ),
    "previous_response_not_found": Entry(
        (400,),
        "`previous_response_id`, or a response that it goes on from, is not kept: it was made with another key or with "
        "`store: false`, or is kept no longer.",
        "Send the whole conversation, or raise `responses_store.max_age_s` or `max_mib`.",
    ),
    "request_not_found": Entry(
        (404,), "There is no running request of this id.", "It may have ended. Use an answer's `id` or `X-Request-Id`."
    ),
    "request_timeout": Entry((408,), "Headers or body arrived too slowly.", "Send faster; see HTTP limits."),
    "response_not_found": Entry(
        (404,),
        "No response of this id is kept: it was made with another key or with `store: false`, or is kept no longer.",
        "Raise `responses_store.max_age_s` or `max_mib`.",
    ),
    "service_unavailable": Entry(
        (503,),
        "No ingress replica accepts requests at the moment.",
        "Try again after a second. During a start it is normal; otherwise look at `serve status`.",
    ),
    "step_failed": Entry(
        (500,),
        "The engine failed to compute a step, or ran out of device memory twice.",
        "Try again. The log has the reason; if it is memory, lower `max_num_batched_tokens`.",
    ),
    "too_many_values": Entry(
        (400,), "The body's JSON has too many items.", "Send fewer messages, parts or token ids at a time."
    ),
    "unknown_parameter": Entry(
        (400,),
        "The server does not know the field. It might change the answer, so it is not ignored.",
        "`param` names it. Leave it out, or check its spelling in the fields of requests.",
    ),
    "unsupported_media_type": Entry(
        (415,), "The body is not `application/json`, or is compressed.", "Set `Content-Type: application/json`."
    ),
    "unsupported_parameter": Entry(
        (400,),
        "The server knows the field but cannot do what it asks for, with this model or at all.",
        "The message says why. With `args.strict`, hints are refused in this way, too.",
    ),
    "url_too_long": Entry((414,), "The URL is longer than the server accepts.", "See HTTP limits."),
}


def render() -> str:
    """Render the codes as a Markdown table."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield "| code | status | what it means | what to do |"
    yield "|---|---|---|---|"
    for code, entry in sorted(ENTRIES.items()):
        statuses = ", ".join(map(str, entry.statuses))
        yield f"| `{code}` | {statuses} | {entry.meaning} | {entry.remedy} |"
