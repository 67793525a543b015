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
from serve_app.page.route import SCRIPTS, VENDORED
from serve_app.settings.auth import ApiKey
from tests.serve_app.harness import Exchange, ScriptedClient, app_for, get

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]
FILES = ROOT / "serve_app" / "page"


VENDORED_TEXT = (FILES / VENDORED).read_text()


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
    assert re.fullmatch("'sha256-[^ ]+' 'sha256-[^ ]+'", policy.pop("script-src"))
    assert policy.pop("style-src").startswith("'sha256-")
    assert policy == {
        "default-src": "'none'",
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }


async def test_the_policy_allows_the_pages_own_script_and_style_and_no_other() -> None:
    answer = await get(ScriptedClient(), "/")
    html = b"".join(answer.parts).decode()
    vendored, script = re.findall(r"<script[^>]*>(.*?)</script>", html, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    policy = answer.headers["content-security-policy"]
    assert vendored == VENDORED_TEXT
    assert f"script-src {sha256(vendored)} {sha256(script)};" in policy
    assert f"style-src {sha256(style)};" in policy
    assert not re.search(r"\son\w+=|\sstyle=|javascript:", html.replace(script, "").replace(vendored, "")), (
        "the policy would stop it"
    )


async def test_the_page_needs_nothing_from_elsewhere() -> None:
    html = (await page()).replace(VENDORED_TEXT, "")
    assert set(re.findall(r"https?://[^\"' )]+", html)) == {"http://www.w3.org/2000/svg"}, "a name, not an address"
    assert not re.search(r"@import|url\(|<link(?! rel=\"icon\" href=\"data:)| src=", html)


async def test_nothing_that_a_server_sends_becomes_markup_or_code() -> None:
    """A browser that knows trusted types forbids it, too; the library only makes tokens."""
    never = "innerHTML|outerHTML|insertAdjacentHTML|document.write|eval(|new Function|DOMParser|setHTML|cookie"
    html = await page()
    assert [word for word in never.split("|") if word in html] == []
    assert set(re.findall(r"\bmarked\.\w+", html.replace(VENDORED_TEXT, ""))) == {"marked.Lexer", "marked.getDefaults"}


async def test_only_the_colours_are_kept_and_the_key_until_the_tab_is_closed() -> None:
    html = await page()
    assert re.findall(r"new Kept\(\"(\w+)\", ([^)]*)\)", html) == [
        ("localStorage", '"chunkserve-theme"'),
        ("sessionStorage", "`chunkserve-key:${base.pathname}`"),
    ]
    assert len(re.findall(r"\.(?:local|session)Storage|(?:local|session)Storage[.\[]", html)) == 0, "in no other way"


async def test_a_page_that_a_browser_has_is_not_sent_again() -> None:
    first = await get(ScriptedClient(), "/")
    tag = first.headers["etag"]
    again = await Exchange(app_for(ScriptedClient()), "GET", "/", headers=[("if-none-match", tag)]).finish()
    assert (again.status, b"".join(again.parts)) == (304, b"")
    assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
    other = await Exchange(app_for(ScriptedClient()), "GET", "/", headers=[("if-none-match", '"x"')]).finish()
    assert other.status == 200


def test_vendored_code_is_what_was_published_and_its_licence_is_beside_it() -> None:
    folder = FILES / "vendor"
    told = (folder / "THIRD_PARTY.txt").read_text()
    digests = re.findall(r"SHA-256: ([0-9a-f]{64})", told)
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.js"))}
    assert list(found.values()) == digests
    assert all(f"file: {name}," in told for name in found)
    assert "Permission is hereby granted" in told
    version = re.search(r"version: ([\d.]+)", told)
    assert version is not None
    assert f"marked v{version[1]} " in VENDORED_TEXT, "the file says so itself"
    licences = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license-files"]
    assert "serve_app/page/vendor/THIRD_PARTY.txt" in licences


COLOURS = re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\)", (FILES / "page.css").read_text())
SURFACES = ("back", "panel", "fill")


def luminance(colour: str) -> float:
    """WCAG 2's, of `#rgb` or `#rrggbb`."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_every_colour_of_text_stands_out_from_every_surface(scheme: int) -> None:
    css = (FILES / "page.css").read_text()
    values = {name: pair[scheme] for name, *pair in COLOURS}
    used = set(re.findall(r"(?<![\w-])color: var\(--([\w-]+)\)", css))
    assert used >= {"text", "soft", "link", "bad", "string", "number", "keyword"}
    assert not re.findall(r"(?<![\w-])color: (?!var|inherit|light-dark)[^;]+", css), "a colour without a pair"
    pairs = [(name, surface) for name in used - {"on-primary"} for surface in SURFACES] + [("on-primary", "primary")]
    low = {pair: round(contrast(values[pair[0]], values[pair[1]]), 2) for pair in pairs}
    assert {pair: ratio for pair, ratio in low.items() if ratio < 4.5} == {}


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_what_is_drawn_and_the_focus_stand_out_from_the_panel(scheme: int) -> None:
    """WCAG asks for 3 where it is no text."""
    values = {name: pair[scheme] for name, *pair in COLOURS}
    drawn = ("prefill", "decode", "time", "wait", "beside", "other", "focus")
    assert {
        name: contrast(values[name], values["panel"]) for name in drawn if contrast(values[name], values["panel"]) < 3
    } == {}


async def test_every_file_of_the_page_is_in_it_and_is_installed() -> None:
    html = await page()
    own = {path.name for path in FILES.iterdir() if path.suffix not in (".py", "")}
    assert own == {"page.html", "page.css", *SCRIPTS}
    found = own | {VENDORED}
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
    fields = re.findall(r"<(?:input|textarea|select)[^>]*\sid=\"([\w-]+)\"", html)
    assert set(fields) <= set(re.findall(r'<label for="([\w-]+)"', html)), "each has a label"


async def test_head_is_answered_without_a_body_and_other_methods_are_refused_in_our_envelope() -> None:
    head = await get(ScriptedClient(), "/", "HEAD")
    assert (head.status, head.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for method in ("POST", "PUT", "DELETE"):
        answer = await get(ScriptedClient(), "/", method)
        assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
