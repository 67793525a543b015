"""Owns the proof of how the page looks and is used: colours, examples, models, narrow screens, keys. A real browser.
Never compares pictures: it reads what the browser has computed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.browser import PROGRAM, Page, browsing
from tests.support.page_stage import MODELS, answer, script, stage

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no chromium here: `apt-get install chromium` brings it"),
]

# Of every text that is seen: the colours of the text and of what lies behind it.
CONTRASTS = """
(() => {
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => rgba(colour).slice(0, 3).map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((total, part, i) => total + part * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (rgba(colour)[3] === 255) return colour;
    }
    throw new Error("nothing lies behind it");
  };
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim(), element = walker.currentNode.parentElement;
    if (!text || !element.checkVisibility() || element.closest("script, style, template, noscript")) continue;
    const [a, b] = [light(getComputedStyle(element).color), light(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found.push([ratio, element.localName, element.className, text.slice(0, 30)]);
  }
  return found;
})()
"""
ANSWER = (
    "# A *head*\n\n> quoted\n\n- `code` and [a link](https://example.org)\n\n"
    "```python\n# c\nx = 'a' if 1 else 2\n```\n\n"
    + ("|" + " a wide column |" * 12 + "\n" + "|-" * 12 + "|\n" + "|" + " a cell |" * 12 + "\n\n" + "x" * 300)
)
TIMING = {
    **{"id": "chatcmpl-1", "request_id": "r", "status": "complete", "wall_ms": 1000.0, "first_token_ms": 700.0},
    "own": [{"cause": "decode", "ms": 250.0, "share": 0.25, "without_ms": 750.0, "about": "Its answer was computed."}],
    "slowed_by": [{"cause": "queue", "ms": 750.0, "share": 0.75, "without_ms": 250.0, "about": "It waited."}],
    "ahead": {"requests": 2, "prompt_tokens": 80},
    "migrations": 0,
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with stage() as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with browsing() as page:
        yield page


@pytest.fixture
def page(browser: Page, url: str) -> Iterator[Page]:
    """Open the page anew, in light colours and with nothing kept."""
    browser.resize(1280, 900)
    browser.prefer("light")
    browser.complaints.clear()
    browser.open(url)
    browser.value("localStorage.clear(); sessionStorage.clear()")
    browser.open(url)
    browser.until("document.querySelector('#model').length > 1 && document.querySelector('canvas')")
    script(browser)
    yield browser
    assert browser.complaints == []


def back(page: Page) -> str:
    return str(page.value("getComputedStyle(document.body).backgroundColor"))


def refuse_timing(page: Page, status: int, message: str) -> None:
    timing_is(page, f"Response.json({json.dumps({'error': {'message': message}})}, {{status: {status}}})")


def timing_is(page: Page, response: str) -> None:
    page.value(
        f"""(() => {{
          const real = window.fetch;
          window.asked = 0;
          window.fetch = (url, options) => {{
            if (!String(url).endsWith("/timing")) return real(url, options);
            asked += 1;
            return Promise.resolve({response});
          }};
        }})()"""
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_what_lies_behind_it(page: Page, scheme: str) -> None:
    page.prefer(scheme)
    timing_is(page, f"Response.json({json.dumps(TIMING)})")
    answer(page, [ANSWER])
    page.value("document.querySelector('.settings').open = document.querySelector('.why').open = true")
    page.until("document.querySelector('.why .parts li')")
    texts = page.value(CONTRASTS)
    assert len(texts) > 60
    assert {"keyword", "comment", "string", "number"} <= {name for _, _, name, _ in texts}
    assert [one for one in texts if one[0] < 4.5] == []
    page.value("document.querySelector('#key-dialog').showModal()")
    assert [one for one in page.value(CONTRASTS) if one[0] < 4.5] == []
    page.value("document.querySelector('#key-dialog').close()")


def test_the_colours_follow_the_system_until_somebody_chooses_and_the_choice_is_kept(page: Page, url: str) -> None:
    light = back(page)
    page.prefer("dark")
    dark = back(page)
    assert light != dark
    shown = "document.querySelector('#theme').textContent"
    assert page.value(shown) == "Colours: auto"
    page.click("#theme")
    assert (page.value(shown), back(page)) == ("Colours: light", light)
    page.click("#theme")
    page.prefer("light")
    assert (page.value(shown), back(page)) == ("Colours: dark", dark)
    page.open(url)
    assert (page.value(shown), back(page)) == ("Colours: dark", dark), "kept"
    page.click("#theme")
    assert (page.value(shown), back(page)) == ("Colours: auto", light)
    kept = page.value("JSON.stringify([Object.keys(localStorage), Object.keys(sessionStorage), document.cookie])")
    assert kept == '[["chunkserve-theme"],[],""]'


def test_the_chart_is_drawn_in_the_colours_that_were_chosen(page: Page) -> None:
    ink = "getComputedStyle(document.querySelector('canvas')).getPropertyValue('--prefill')"
    drawn = """
    (() => {
      const canvas = document.querySelector("canvas"), pen = canvas.getContext("2d");
      const data = pen.getImageData(0, 0, canvas.width, canvas.height).data, found = new Set();
      for (let i = 0; i < data.length; i += 4)
        if (data[i + 3] === 255) found.add(`rgb(${data.slice(i, i + 3).join(", ")})`);
      return [...found];
    })()
    """
    light = page.value(ink)
    assert light in page.value(drawn)
    page.click("#theme")
    page.click("#theme")
    dark = page.value(ink)
    assert dark != light
    assert dark in page.value(drawn)
    assert light not in page.value(drawn)


def test_an_engines_tiers_say_how_full_they_are_and_what_was_loaded_from_them(page: Page) -> None:
    page.until("document.querySelector('[data-is=disk]')")
    told = page.value("[...document.querySelectorAll('.tier')].map((e) => e.innerText.replace(/\\s+/g, ' '))")
    assert told == [
        "KV in host memory 38 % of 4 GiB, 12,340 tokens loaded",
        "KV on disk 0 % of 100 MiB, 0 tokens loaded",
    ]


def test_nothing_moves_for_somebody_who_wants_no_motion(page: Page) -> None:
    answer(page, ["still writing"], stays_open=True)
    moving = "document.getAnimations().length"
    assert page.value(moving) > 0
    page.prefer("light", motion="reduce")
    page.until(f"{moving} === 0")


def test_an_empty_playground_offers_prompts_until_something_is_said(page: Page) -> None:
    seen = "document.querySelector('#examples').checkVisibility()"
    assert page.value(seen)
    titles = page.value("[...document.querySelectorAll('#examples strong')].map((e) => e.textContent)")
    assert titles == ["Explain", "Write code", "JSON by a schema", "Read a long prompt"]
    page.value("pieces = [JSON.stringify({name: '_Ann_', age: 3, languages: ['*x*']})]")
    page.click("#examples button:nth-of-type(3)")
    page.until("document.querySelector('#stop').hidden && bodies.length === 1")
    assert not page.value(seen)
    assert page.value("document.querySelector('.message.user .note').textContent").startswith("With response_format")
    shown = page.value("document.querySelector('.message.assistant pre').textContent")
    assert json.loads(shown) == {"name": "_Ann_", "age": 3, "languages": ["*x*"]}, "JSON is no Markdown"
    body = page.value("bodies[0]")
    assert body["response_format"]["json_schema"]["schema"]["required"] == ["name", "age", "languages"]
    answer(page, ["and?"])
    assert "response_format" not in page.value("bodies[1]"), "it was of that message"
    page.click("#new-chat")
    assert page.value(seen)
    page.click("#examples button:nth-of-type(4)")
    page.until("document.querySelector('#stop').hidden && bodies.length === 3")
    (message,) = page.value("bodies[2]")["messages"]
    assert 1000 < len(message["content"]) < 4096 / 3 * 6, "long, and yet it fits into the smallest model"
    assert message["content"].endswith("and when?")


def test_every_model_adapter_and_alias_can_be_chosen_and_is_what_is_asked(page: Page) -> None:
    options: list[Any] = page.value(
        "[...document.querySelector('#model').options].map((o) => [o.value, o.textContent])"
    )
    assert [value for value, _ in options] == [one["id"] for one in MODELS]
    assert [label for _, label in options] == ["small", "large", "large:poet (adapter of large)", "best (large)"]
    page.value("document.querySelector('#model').value = 'large:poet'")
    answer(page, ["a"])
    page.value("document.querySelector('#model').value = 'best'")
    answer(page, ["b"])
    assert page.value("bodies.map((body) => body.model)") == ["large:poet", "best"]
    names = page.value("[...document.querySelectorAll('.message.assistant h3')].map((e) => e.textContent)")
    assert names == ["large:poet", "best"], "each answer says whose it is"


def test_models_that_come_and_go_leave_the_choice_where_it_can_be_left(page: Page) -> None:
    listed = json.dumps([MODELS[0], MODELS[3]])
    page.value(
        f"""(() => {{
          window.listed = {listed};
          const real = window.fetch;
          const answer = () => Promise.resolve(Response.json({{ data: listed }}));
          window.fetch = (url, options) => String(url).endsWith("/v1/models") ? answer() : real(url, options);
          document.querySelector("#model").value = "best";
          document.dispatchEvent(new Event("visibilitychange"));
        }})()"""
    )
    page.until("document.querySelector('#model').length === 2")
    assert page.value("document.querySelector('#model').value") == "best"
    page.value("listed.pop(); document.dispatchEvent(new Event('visibilitychange'))")
    page.until("document.querySelector('#model').length === 1")
    assert page.value("document.querySelector('#model').value") == "small"


def test_the_first_token_is_the_first_that_says_something_and_thoughts_stand_before_the_answer(page: Page) -> None:
    """The first chunk of a stream only has a role, and may come seconds before a long prompt is read."""
    opening = {"role": "assistant", "content": ""}
    answer(page, [opening])
    assert page.value("document.querySelector('.pace').textContent") == ""
    answer(page, [opening, {"reasoning": "Let me *see* "}, {"reasoning": "<b>."}, "Done."])
    last = "[...document.querySelectorAll('.message.assistant')].at(-1)"
    assert page.value(f"{last}.querySelector('.pace').textContent").startswith("first token after ")
    assert page.value(f"{last}.querySelector('.thought').innerHTML") == "Let me *see* &lt;b&gt;."
    assert page.value(f"{last}.querySelector('.text').textContent") == "Done."


def test_the_time_of_an_answer_is_a_bar_with_words_that_is_asked_for_when_it_is_opened(page: Page) -> None:
    timing_is(page, f"Response.json({json.dumps(TIMING)})")
    answer(page, ["one", " two"])
    assert page.value("asked") == 0
    page.click(".why summary")
    page.until("document.querySelectorAll('.why .parts li').length === 2")
    assert page.value("asked") == 1
    told = page.value("document.querySelector('.why .told').textContent")
    assert told == "1000 ms · first token after 700 ms · 2 requests ahead, 80 tokens"
    bar = page.value("document.querySelector('.why .stack').getAttribute('aria-label')")
    assert bar == "Shares of the time: decode 25 %, queue 75 %"
    widths = page.value(
        "[...document.querySelectorAll('.why .stack span')].map((e) => e.getBoundingClientRect().width)"
    )
    assert widths[1] == pytest.approx(3 * widths[0], rel=0.02)
    rows = page.value(
        "[...document.querySelectorAll('.why .parts li')].map((e) => e.innerText.split(/\\s+/).join(' ').trim())"
    )
    assert rows == ["250 ms 25 % Its answer was computed.", "750 ms 75 % It waited."]


@pytest.mark.parametrize(
    ("status", "message"),
    [(404, "No request of that id and key has ended lately."), (403, "Timing is off."), (405, "Method not allowed.")],
)
def test_a_time_that_is_not_to_be_had_is_said_in_a_line(page: Page, status: int, message: str) -> None:
    refuse_timing(page, status, message)
    answer(page, ["one"])
    page.click(".why summary")
    page.until(f"document.querySelector('.why .told').textContent === {json.dumps(message)}")
    assert page.value("document.querySelector('.why .stack').checkVisibility()") is False
    assert page.value("document.querySelectorAll('.why .parts li').length") == 0


def test_a_narrow_screen_shows_everything_without_scrolling_sideways(page: Page) -> None:
    page.resize(360, 740)
    page.until("innerWidth === 360")
    assert page.value("document.documentElement.scrollWidth") == 360
    timing_is(page, f"Response.json({json.dumps(TIMING)})")
    answer(page, [ANSWER])
    page.value("document.querySelector('.settings').open = document.querySelector('.why').open = true")
    page.until("document.querySelector('.why .parts li')")
    assert page.value("document.documentElement.scrollWidth") == 360
    page.value("document.querySelector('#key-dialog').showModal()")
    box = page.value(
        "(({left, right}) => [left, right])(document.querySelector('#key-dialog').getBoundingClientRect())"
    )
    assert 0 <= box[0] < box[1] <= 360


def test_everything_can_be_reached_by_keys_and_has_a_name(page: Page) -> None:
    answer(page, ["```\ncode\n```"])
    page.value("document.querySelector('#model').focus()")
    seen = []
    for _ in range(40):
        seen.append(
            page.value(
                "(({id, className, localName, textContent}) => id || className || localName)(document.activeElement)"
            )
        )
        page.press("Tab")
    wanted = {"model", "theme", "new-chat", "log", "quiet copy", "prompt", "send", "load", "timing-id"}
    assert wanted <= set(seen), wanted - set(seen)
    tree = page("Accessibility.getFullAXTree")["nodes"]
    controls = {"button", "textbox", "combobox", "link", "spinbutton", "DisclosureTriangle", "image", "log"}
    unnamed = [
        node["role"]["value"]
        for node in tree
        if not node["ignored"] and node["role"]["value"] in controls and not node.get("name", {}).get("value")
    ]
    assert unnamed == []
