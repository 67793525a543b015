"""Renders the page that shows the OpenAPI document, as HTML with its own style.
Never refers to anything outside itself, runs no script, and escapes the document's texts."""

from __future__ import annotations

import json
import re
from typing import Any

from jinja2 import Environment, StrictUndefined

_MACROS = """\
{% macro links(part) %}
{% for name in part | schema_names %} <a href="#schema-{{ name }}">{{ name }}</a>{% endfor %}
{% endmacro %}
{% macro prose(text) %}
{% for part in text.split("`") %}
{% if loop.index0 % 2 %}<code>{{ part }}</code>{% else %}{{ part }}{% endif %}
{% endfor %}
{% endmacro %}
"""
_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ info.title }} {{ info.version }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font-family: ui-monospace, monospace; font-size: 0.85rem; }
pre { overflow-x: auto; background: #8881; padding: 0.5rem; }
table { border-collapse: collapse; }
td, th { border: 1px solid #8886; padding: 0.2rem 0.5rem; text-align: left; vertical-align: top; }
section { border-top: 1px solid #8886; }
</style>
</head>
<body>
<h1>{{ info.title }} {{ info.version }}</h1>
<p>The same as <a href="openapi.json">openapi.json</a>.</p>
{% for path, methods in paths.items() %}{% for method, operation in methods.items() %}
<section id="{{ operation.operationId }}">
<h2><code>{{ method | upper }} {{ path }}</code></h2>
<p>{{ prose(operation.summary) }}{% if operation.security is defined %} Needs a key.{% endif %}</p>
<table>
<tr><th>parameter</th><th>in</th><th>meaning</th><th>schema</th></tr>
{% for parameter in operation.parameters %}
<tr><td><code>{{ parameter.name }}</code></td><td>{{ parameter.in }}</td><td>{{ prose(parameter.description) }}</td>
<td><code>{{ parameter.schema | compact }}</code></td></tr>
{% endfor %}
</table>
{% if operation.requestBody is defined %}
<p>Body:
{% for kind, content in operation.requestBody.content.items() %}<code>{{ kind }}</code>{{ links(content) }}
{% endfor %}</p>
{% endif %}
<table>
<tr><th>status</th><th>meaning</th><th>body</th></tr>
{% for status, response in operation.responses.items() %}
<tr><td>{{ status }}</td><td>{{ prose(response.description) }}</td><td>
{% for kind, content in (response.content | default({})).items() %}
<code>{{ kind }}</code>{{ links(content) }}<br>
{% endfor %}</td></tr>
{% endfor %}
</table>
</section>
{% endfor %}{% endfor %}
<h1>Schemas</h1>
{% for name, schema in components.schemas.items() %}
<section id="schema-{{ name }}">
<h2><code>{{ name }}</code></h2>
{% if schema.description is defined %}<p>{{ prose(schema.description) }}</p>{% endif %}
{% if schema.properties is defined %}
<table>
<tr><th>field</th><th>required</th><th>meaning and schema</th></tr>
{% for field, rule in schema.properties.items() %}
<tr><td><code>{{ field }}</code></td><td>{{ "yes" if field in schema.required | default([]) }}</td>
<td>{% for text in rule | texts %}{{ prose(text) }}<br>{% endfor %}
<code>{{ rule | without_texts | compact }}</code>{{ links(rule) }}</td></tr>
{% endfor %}
</table>
{% else %}
<pre>{{ schema | without_texts | compact }}</pre>{{ links(schema) }}
{% endif %}
</section>
{% endfor %}
</body>
</html>
"""

_REFERENCE = re.compile("#/components/schemas/([A-Za-z0-9_.-]+)")


def _schema_names(part: Any) -> list[str]:
    """List the schemas that a part of the document refers to, each once."""
    return list(dict.fromkeys(_REFERENCE.findall(json.dumps(part))))


def _texts(part: Any) -> list[str]:
    """List the descriptions within a part of a schema, each once, the outermost first."""
    if isinstance(part, dict):
        own = [part["description"]] if isinstance(part.get("description"), str) else []
        return list(dict.fromkeys([*own, *(text for value in part.values() for text in _texts(value))]))
    return [text for value in part for text in _texts(value)] if isinstance(part, list) else []


def _without_texts(part: Any) -> Any:
    """Leave out the descriptions, which are shown as prose. A field may have the name, too: its value is no string."""
    if isinstance(part, dict):
        kept = {name: value for name, value in part.items() if not (name == "description" and isinstance(value, str))}
        return {name: _without_texts(value) for name, value in kept.items()}
    return [_without_texts(value) for value in part] if isinstance(part, list) else part


def render(document: dict[str, Any]) -> str:
    env = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters |= {
        "compact": json.dumps,
        "schema_names": _schema_names,
        "texts": _texts,
        "without_texts": _without_texts,
    }
    return env.from_string(_MACROS + _PAGE).render(document)
