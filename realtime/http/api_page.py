"""Writes the page `/docs/api`: the OpenAPI document and the schema of all events as HTML without scripts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

Json = dict[str, Any]
STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre, .method { font-family: ui-monospace, monospace; font-size: 0.9em; }
.method { display: inline-block; min-width: 4.5em; font-weight: bold; }
summary { cursor: pointer; padding: 0.25rem 0; }
details > :not(summary) { margin-left: 1.5rem; }
table { border-collapse: collapse; margin: 0.5rem 0 0.5rem 1.5rem; }
td { vertical-align: top; padding: 0.15rem 1rem 0.15rem 0; }
pre { overflow-x: auto; }
"""


def write_page(document: Json, events: Json) -> bytes:
    """The whole page in UTF-8."""
    info = document["info"]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width"><title>Tickertape: the HTTP interface</title>',
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}: the HTTP interface</h1>",
        f"<p>{escape(info['description'])}</p>",
        '<p><a href="/openapi.json">openapi.json</a> · <a href="/events.schema.json">events.schema.json</a></p>',
    ]
    for tag in document["tags"]:
        parts.append(f"<h2>{escape(tag['name'])}</h2>")
        parts += _operations(document, tag["name"])
    parts.append("<h2>Schemas</h2>")
    parts += (_schema(name, schema) for name, schema in sorted(document["components"]["schemas"].items()))
    parts.append("<h2>Events</h2>")
    parts += (_schema(name, schema) for name, schema in sorted(events["$defs"].items()))
    parts.append("</body></html>\n")
    return "\n".join(parts).encode()


def _operations(document: Json, tag: str) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if tag in operation["tags"]:
                yield from _operation_html(method, path, operation)


def _operation_html(method: str, path: str, operation: Json) -> Iterator[str]:
    yield f'<details id="{escape(operation["operationId"])}"><summary><span class="method">{method.upper()}</span> '
    yield f"<code>{escape(path)}</code> {escape(operation['summary'])}</summary>"
    if "description" in operation:
        yield f"<p>{escape(operation['description'])}</p>"
    if "security" in operation:
        yield "<p>Needs a key.</p>"
    yield from _table(
        "Parameters",
        (
            (f"{one['name']} ({one['in']})", _type(one["schema"]), one.get("description", ""))
            for one in operation.get("parameters", ())
        ),
    )
    body = operation.get("requestBody", {}).get("content", {})
    yield from _table("Body", ((media, _type(content["schema"]), "") for media, content in body.items()))
    yield from _table(
        "Responses",
        (
            (status, answer["description"], ", ".join(map(_media, answer.get("content", {}).items())))
            for status, answer in operation["responses"].items()
        ),
    )
    yield "</details>"


def _media(content: tuple[str, Json]) -> str:
    return f"{content[0]}: {_type(content[1]['schema'])}"


def _table(title: str, rows: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    shown = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    if shown:
        yield f"<p>{title}</p><table>{shown}</table>"


def _type(schema: Json) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(json.dumps(value) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _schema(name: str, schema: Json) -> str:
    text = escape(json.dumps(schema, indent=1))
    return f"<details><summary><code>{escape(name)}</code></summary><pre>{text}</pre></details>"
