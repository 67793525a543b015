"""Contracts of the page at `/` as it is sent: one document, which may run and fetch nothing but its own.
Never opens a browser; test_browser does."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import re
import tomllib
from pathlib import Path

import pytest

from serve_app.auth.keys import Keys
from serve_app.page.route import SCRIPTS
from serve_app.settings.auth import ApiKey
from tests.serve_app.harness import Exchange, ScriptedClient, app_for, get

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]
FILES = ROOT / "serve_app" / "page"


async def page() -> str:
    return b"".join((await get(ScriptedClient(), "/")).parts).decode()


def sha256(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


async def test_the_page_is_sent_to_anybody_with_headers_that_keep_it_to_itself() -> None:
    app = app_for(ScriptedClient(), keys=Keys([ApiKey(tenant="ann", sha256="0" * 64)]))
    answer = await Exchange(app, "GET", "/", headers=()).finish()
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy.pop("script-src").startswith("'sha256-")
    assert policy.pop("style-src").startswith("'sha256-")
    assert policy == {
        "default-src": "'none'",
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }


async def test_the_policy_allows_the_pages_own_script_and_style_and_no_other() -> None:
    answer = await get(ScriptedClient(), "/")
    html = b"".join(answer.parts).decode()
    (script,) = re.findall(r"<script[^>]*>(.*?)</script>", html, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    policy = answer.headers["content-security-policy"]
    assert f"script-src {sha256(script)};" in policy
    assert f"style-src {sha256(style)};" in policy
    assert not re.search(r"\son\w+=|\sstyle=|javascript:", html.replace(script, "")), "the policy would stop it"


async def test_the_page_needs_nothing_from_elsewhere() -> None:
    html = await page()
    assert set(re.findall(r"https?://[^\"' )]+", html)) == {"http://www.w3.org/2000/svg"}, "a name, not an address"
    assert not re.search(r"@import|url\(|<link(?! rel=\"icon\" href=\"data:)| src=", html)


async def test_nothing_that_a_server_sends_becomes_markup_or_code_and_nothing_is_stored() -> None:
    html = await page()
    never = "innerHTML|outerHTML|insertAdjacentHTML|document.write|eval(|new Function|DOMParser|localStorage|cookie"
    assert [word for word in never.split("|") if word in html] == []


async def test_every_file_of_the_page_is_in_it_and_is_installed() -> None:
    html = await page()
    found = {path.name for path in FILES.iterdir() if path.suffix not in (".py", "")}
    assert found == {"page.html", "page.css", *SCRIPTS}
    assert all((FILES / name).read_text() in html for name in found - {"page.html"})
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = data["serve_app.page"]
    assert [name for name in found if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)] == []


async def test_every_element_that_the_script_asks_for_is_there() -> None:
    html = await page()
    ids = re.findall(r'\sid="([\w-]+)"', html)
    assert len(set(ids)) == len(ids)
    asked = set(re.findall(r'\$\("([\w-]+)"\)', html)) | set(re.findall(r'(?:for|aria-\w+by)="([\w-]+)"', html))
    assert asked <= set(ids)
    fields = re.findall(r"<(?:input|textarea)[^>]*\sid=\"([\w-]+)\"", html)
    assert set(fields) <= set(re.findall(r'<label for="([\w-]+)"', html)), "each has a label"


async def test_head_is_answered_without_a_body_and_other_methods_are_refused_in_our_envelope() -> None:
    head = await get(ScriptedClient(), "/", "HEAD")
    assert (head.status, head.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for method in ("POST", "PUT", "DELETE"):
        answer = await get(ScriptedClient(), "/", method)
        assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
