"""Owns the proof that the page does what it shows: a real browser, over a real server. Long: one server for all.
Never asks the page about itself where the server can be asked. Waits for states, and measures no time."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from loadtest.server import Server
from tests.support.browser import PROGRAM, Page, browsing, until
from tests.support.serve_process import serve_run

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no chromium here: `apt-get install chromium` brings it"),
]

KEY, BAD_KEY = "sk-right", "sk-wrong"
REPLY = "Ships pass <b>at night</b> & <img src=x onerror=alert(1)>. " * 40  # markup that a model might write
STEP_MS = 10
IDLE = "document.querySelector('#stop').hidden && !document.querySelector('#key-dialog').open"
ASKED = "document.querySelector('#key-dialog').open && document.activeElement.id === 'key'"
PIXELS = """
(() => {
  const canvas = document.querySelector("canvas"), {width, height} = canvas;
  const data = canvas.getContext("2d").getImageData(0, 0, width, height).data, found = {};
  const style = getComputedStyle(canvas), ink = document.createElement("canvas").getContext("2d");
  for (const name of ["prefill", "decode", "time"]) {
    ink.fillStyle = style.getPropertyValue(`--${name}`);
    const [r, g, b] = ink.fillStyle.match(/\\w\\w/g).map((pair) => parseInt(pair, 16));
    found[name] = new Set();
    for (let i = 0; i < data.length; i += 4)
      if (data[i] === r && data[i + 1] === g && data[i + 2] === b) found[name].add((i / 4) % width);
  }
  return Object.fromEntries(Object.entries(found).map(([name, columns]) => [name, [...columns]]));
})()
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    keys = [{"tenant": "ann", "sha256": hashlib.sha256(KEY.encode()).hexdigest()}]
    engine = {"executor": "fake", "max_num_batched_tokens": 128, "fake": {"reply": REPLY, "step_delay_ms": STEP_MS}}
    names = {"served_model_name": ["scripted", "scripted-too"], "model_aliases": {"gpt": "scripted"}}
    with serve_run({"engine": engine, "auth": {"keys": keys}, **names}) as running:
        yield running


@pytest.fixture(scope="module")
def browser(server: Server) -> Iterator[Page]:
    with browsing() as page:
        page.resize(1280, 900)
        yield page


@pytest.fixture
def page(browser: Page, server: Server) -> Iterator[Page]:
    """Open the page anew, in a tab that has no key."""
    browser.open(server.url)
    browser.value("sessionStorage.clear()")
    browser.complaints.clear()
    browser.fetched.clear()
    browser.open(server.url)
    browser.until("document.querySelector('canvas')")
    yield browser
    unexpected = [
        told for told in browser.complaints if not re.search("status of 40[14]", told)
    ]  # which Chromium reports itself
    assert unexpected == []
    assert [url for url in browser.fetched if not url.startswith((server.url, "data:"))] == []
    assert [url for url in browser.fetched if KEY in url or BAD_KEY in url] == []


def say(page: Page, text: str) -> None:
    page.click("#prompt")
    page.write(text)
    page.press("Enter")


def causes(page: Page) -> list[str]:
    found: list[str] = page.value("[...document.querySelectorAll('#timing-shown li')].map((e) => e.dataset.cause)")
    return found


def let_in(page: Page) -> None:
    """Write a message, and give the key that the server asks for; Enter then sends both."""
    say(page, "hello")
    page.until(ASKED)
    page.write(KEY)


def pace(page: Page) -> str:
    return str(page.value("[...document.querySelectorAll('.pace')].at(-1).textContent"))


def prompt_size(page: Page) -> int:
    found = re.search(r"prompt of (\d+)", pace(page))
    assert found is not None
    return int(found[1])


def limit(page: Page, tokens: int) -> None:
    page.value(f"document.querySelector('#max-tokens').value = {tokens}")


def texts(page: Page, role: str) -> list[str]:
    found: list[str] = page.value(f"[...document.querySelectorAll('.message.{role} .text')].map((e) => e.textContent)")
    return found


def last_note(page: Page) -> str:
    return str(page.value("[...document.querySelectorAll('.note')].at(-1).textContent"))


def engine_of(server: Server) -> dict[str, Any]:
    (engine,) = httpx.get(f"{server.url}/activity", timeout=30).json()["engines"]
    return dict(engine)


def until_running(server: Server, number: int) -> None:
    until(lambda: engine_of(server)["num_running"] == number, lambda: f"{engine_of(server)}, not {number} running")


def test_a_key_that_a_server_needs_is_asked_for_before_the_first_message_and_a_wrong_one_is_told(
    page: Page, server: Server
) -> None:
    assert not page.value("document.querySelector('#key-dialog').open"), "a look at the replicas needs none"
    say(page, "hello")
    page.until(ASKED)
    assert page.value("document.querySelector('#prompt').value") == "hello"
    assert texts(page, "user") == [], "nothing was sent"
    told = "document.querySelector('#key-told').textContent"
    assert page.value(told) == "This server needs an API key."
    page.write(BAD_KEY)
    page.press("Enter")
    page.until(f"{told} === 'The server does not accept this key.'")
    page.write("schlüssel")  # over the other, which is selected
    page.press("Enter")
    page.until(f"{told}.includes('ASCII')")
    page.write(KEY)
    limit(page, 5)
    page.press("Enter")
    page.until(f"{IDLE} && document.querySelectorAll('.message.assistant').length === 1")
    assert texts(page, "assistant") == [REPLY[:5]], "the message went on by itself"
    kept = page.value("JSON.stringify([Object.values(sessionStorage), localStorage.length, document.cookie])")
    assert kept == f'[["{KEY}"],0,""]', "for this tab alone"
    page.open(server.url)
    say(page, "again")
    page.until(f"{IDLE} && document.querySelectorAll('.message.assistant').length === 1")
    page.click("#key-button")
    page.until(ASKED)
    page.click("#key-forget")
    page.until("!document.querySelector('#key-dialog').open")
    assert page.value("sessionStorage.length") == 0
    say(page, "and again")
    page.until(ASKED)
    page.press("Escape")
    page.until("!document.querySelector('#key-dialog').open")
    assert len(texts(page, "user")) == 1, "without a key nothing is sent"
    assert page.value("document.querySelector('#prompt').value") == "and again"


def test_a_key_that_is_taken_back_is_asked_for_again_and_the_message_is_not_lost(page: Page) -> None:
    let_in(page)
    limit(page, 3)
    page.press("Enter")
    page.until(f"{IDLE} && document.querySelectorAll('.message.assistant').length === 1")
    page.value(
        """
        window.real = window.fetch;
        const refused = () => Response.json({error: {message: "This needs a valid API key."}}, {status: 401});
        window.fetch = async (url, options) => String(url).includes("/chat/") ? refused() : real(url, options);
        0
        """
    )
    say(page, "go on")
    page.until(ASKED)
    assert last_note(page) == "This needs a valid API key."
    assert page.value("sessionStorage.length") == 0
    page.write(KEY)
    page.press("Enter")
    page.until("!document.querySelector('#key-dialog').open")
    assert page.value("document.querySelector('#prompt').value") == "go on"
    page.value("window.fetch = real; 0")
    page.click("#send")
    page.until(f"{IDLE} && document.querySelectorAll('.message.assistant').length === 3")
    assert texts(page, "assistant")[2] == REPLY[:3]


def test_the_models_of_the_server_are_there_to_choose_once_a_key_lets_them_be_seen(page: Page, server: Server) -> None:
    names = "[...document.querySelector('#model').options].map((o) => o.value).join()"
    assert page.value(names) == "scripted", "which everybody may know"
    let_in(page)
    limit(page, 3)
    page.press("Enter")
    page.until(f"{IDLE} && document.querySelectorAll('.message.assistant').length === 1")
    assert page.value(names) == "scripted,scripted-too,gpt"
    page.value("document.querySelector('#model').value = 'gpt'")
    say(page, "and you?")
    page.until(f"{IDLE} && document.querySelectorAll('.message.assistant').length === 2")
    assert texts(page, "assistant") == [REPLY[:3]] * 2
    page.value(
        "document.querySelector('#model').add(new Option('gone')); document.querySelector('#model').value = 'gone'"
    )
    say(page, "and you?")
    page.until("document.querySelectorAll('.note.bad:not([hidden])').length === 1")
    assert "gone" in last_note(page)


def test_an_answer_is_streamed_and_read_out_as_it_was_written(page: Page) -> None:
    let_in(page)
    limit(page, 60)
    page.press("Enter")
    page.until("document.querySelector('.message.assistant .text')?.textContent.length > 3")
    assert len(texts(page, "assistant")[0]) < 60, "it is shown before it is whole"
    assert page.value("document.querySelector('.message.assistant').getAttribute('aria-busy')") == "true"
    page.until(IDLE)
    assert page.value("document.querySelector('.message.assistant').getAttribute('aria-busy')") == "false"
    assert texts(page, "assistant") == [REPLY[:60]]
    assert page.value("document.querySelectorAll('.log b, .log img').length") == 0
    assert "first token after" in pace(page)
    assert "tokens/s" in pace(page)
    assert " s in all" in pace(page)
    assert "60 tokens · prompt of " in pace(page)
    assert page.value("document.activeElement.id") == "prompt", "so that the next message can be written"


def test_a_conversation_carries_its_turns_and_a_new_one_does_not(page: Page, server: Server) -> None:
    let_in(page)
    limit(page, 4)
    page.press("Enter")
    page.until(f"{IDLE} && document.querySelectorAll('.message.assistant').length === 1")
    sizes = []
    for text in ("and then?", "and then?"):
        say(page, text)
        page.until(IDLE)
        sizes.append(prompt_size(page))
    assert sizes[1] > sizes[0] + len("and then?")
    page.click("#new-chat")
    assert texts(page, "user") == []
    say(page, "and then?")
    page.until(IDLE)
    assert prompt_size(page) < sizes[0]


def test_stop_ends_the_request_in_the_engine_and_keeps_what_was_said(page: Page, server: Server) -> None:
    let_in(page)
    limit(page, 2000)
    page.press("Enter")
    until_running(server, 1)
    page.until("document.querySelector('.message.assistant .text')?.textContent.length > 10")
    page.click("#stop")
    page.until(IDLE)
    assert last_note(page) == "Stopped."
    until_running(server, 0)
    (said,) = texts(page, "assistant")
    assert REPLY.startswith(said)
    assert 10 < len(said) < len(REPLY)
    limit(page, 3)
    say(page, "go on")
    page.until(IDLE)
    assert texts(page, "assistant")[1] == REPLY[:3]


def test_shift_enter_begins_a_new_line_and_sends_nothing(page: Page) -> None:
    page.click("#prompt")
    page.write("one")
    page.press("Enter", shift=True)
    page.write("two")
    assert page.value("document.querySelector('#prompt').value") == "one\ntwo"
    assert texts(page, "user") == []


def test_a_setting_out_of_its_range_is_sent_to_nobody(page: Page) -> None:
    page.value("document.querySelector('.settings').open = true")
    page.value("document.querySelector('#temperature').value = 3")
    say(page, "hello")
    assert texts(page, "user") == []
    page.value("document.querySelector('#temperature').value = 1")
    page.click("#prompt")
    page.press("Enter")
    page.until(ASKED)
    page.write(KEY)
    limit(page, 3)
    page.press("Enter")
    page.until("document.querySelectorAll('.message.user').length === 1")
    page.until(IDLE)


def test_the_chart_shows_chunks_and_rows_that_share_steps(page: Page, server: Server) -> None:
    page.click("#load")
    page.until(ASKED)
    page.write(KEY)
    page.press("Enter")
    page.until("document.querySelector('#load-status').textContent.includes('had its first token after')")
    told = page.value("document.querySelector('#load-status').textContent")
    assert told.startswith("A prompt of 1500 tokens")
    assert page.value("document.querySelector('#load').textContent") == "Load it"
    steps = engine_of(server)["steps"]
    assert len([step for step in steps if step["decodes"] == 4 and step["chunks"]]) >= 1500 / 128 - 1
    page.until("/of which [1-9]\\d+ moved streams on/.test(document.querySelector('.reading').textContent)")
    columns = {name: set(found) for name, found in page.value(PIXELS).items()}
    assert len(columns["prefill"] & columns["decode"] & columns["time"]) > 10, "both colours, one above the other"
    assert page.value("document.querySelector('canvas').getAttribute('aria-label')").startswith("Strip chart")
    page.until("document.querySelector('[data-is=running]').textContent.startsWith('0 of')")
    assert "–" not in page.value("document.querySelector('[data-is=gaps]').textContent")


def test_the_load_is_stopped_by_the_button_that_began_it(page: Page, server: Server) -> None:
    page.click("#load")
    page.until(ASKED)
    page.write(KEY)
    page.press("Enter")
    until_running(server, 4)
    page.click("#load")
    page.until("document.querySelector('#load-status').textContent === 'Stopped.'")
    until_running(server, 0)


SAYS = '{"choices": [{"index": 0, "delta": {"content": "%s"}}]}'
ANSWERS = {  # what the network brings, piece by piece -> the text that is shown, and the complaint
    "whole": ([f"data: {SAYS % 'on'}\n\ndata: {SAYS % 'ce'}\n\ndata: [DONE]\n\n"], "once", ""),
    "torn": ([f"data: {SAYS % 'é'}"[:44], f"data: {SAYS % 'é'}"[44:] + "\n", "\ndata:", " [DONE]\n\n"], "é", ""),
    "crlf": (
        [f"data: {SAYS % 'a'}\r\n\r", f"\n: keep-alive\r\n\r\ndata: {SAYS % 'b'}\r\n\r\ndata: [DONE]\r\n\r\n"],
        "ab",
        "",
    ),
    "comments": ([": keep-alive\n\n", f"data: {SAYS % 'a'}\n\n: keep-alive\n\n", "data: [DONE]\n\n"], "a", ""),
    "several lines": ([f"data: {SAYS % 'a'}".replace("[{", "\ndata: [{") + "\n\ndata: [DONE]\n\n"], "a", ""),
    "an error": (
        [f"data: {SAYS % 'a'}\n\n", 'data: {"error": {"message": "It broke."}}\n\ndata: [DONE]\n\n'],
        "a",
        "It broke.",
    ),
    "cut": ([f"data: {SAYS % 'a'}\n\n", f"data: {SAYS % 'b'}"], "a", "The connection ended before the answer did."),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_stream_is_read_as_it_is_framed_however_the_network_cuts_it(page: Page, name: str) -> None:
    pieces, text, complaint = ANSWERS[name]
    encoded = [list(piece.encode()) for piece in pieces]
    if name == "torn":  # within a character
        encoded = [[byte] for piece in encoded for byte in piece]
    page.value(
        f"""
        window.taken = 0;
        const body = () => {{
          const pieces = {encoded};
          return new ReadableStream({{
            pull(to) {{ pieces.length ? to.enqueue(new Uint8Array(pieces.shift())) : to.close(); }},
            cancel() {{ window.cancelled = true; }},
          }}, {{highWaterMark: 0}});
        }};
        const real = window.fetch;
        window.fetch = (url, options) => {{
          if (!String(url).includes("/chat/")) return real(url, options);
          window.taken += 1;
          return Promise.resolve(new Response(body()));
        }};
        """
    )
    let_in(page)
    page.press("Enter")
    page.until(f"taken && {IDLE}")
    assert texts(page, "assistant") == [text]
    assert page.value("document.querySelector('.message.assistant .note').textContent") == complaint
    assert page.value("document.querySelector('#prompt').value") == ("hello" if complaint else "")


def test_replicas_come_and_go_on_the_page_and_one_that_does_not_answer_is_shown(page: Page) -> None:
    page.value(
        """
        window.names = ["left", "right"]; window.missing = 0; window.asked = [];
        const engine = (name) => ({
          engine: name, num_running: 3, num_waiting: 1, num_blocks: 200, num_held_blocks: 50, max_num_seqs: 8,
          max_num_batched_tokens: 64, window_s: 10, prompt_tokens_per_s: 1234.5, generated_tokens_per_s: 5.25,
          gap_p50_ms: 20.25, gap_p99_ms: null,
          steps: [{id: 7, decodes: 2, chunks: [30, 4], waiting: 1, ms: 12.5, age_ms: 0}],
        });
        window.fetch = (url) => {
          asked.push(String(url));
          const told = {model: "m", engines: names.map(engine), num_missing: missing};
          return Promise.resolve(Response.json({...told, ingresses: [{ingress: "i", num_live: 4, num_waiting: 2}]}));
        };
        """
    )
    heads = "[...document.querySelectorAll('.engine h3')].map((e) => e.textContent).join()"
    page.until(f"{heads} === 'engine left,engine right'")
    told = page.value("document.querySelector('.numbers').innerText.replaceAll('\\n', ' ')")
    for number in ("3 of 8", "25 % 50 of 200", "1,235", "5.3", "20 / – ms"):
        assert number in told
    assert "2 requests wait at the ingress" in page.value("document.querySelector('#fleet').textContent")
    page.until("asked.at(-1).endsWith('after=left%3A7&after=right%3A7')")
    assert page.value("document.querySelector('.reading').textContent").startswith("1 step: 1 with prefill"), (
        "told again"
    )
    page.value("names = ['right']; missing = 1")
    page.until(f"{heads} === 'engine right'")
    page.until("document.querySelector('#fleet.bad')?.textContent.includes('1 replica does not answer')")


def test_of_several_models_each_engine_names_its_own(page: Page) -> None:
    page.value("""
        window.real = window.fetch;
        window.fetch = async (path, options) => {
          if (!String(path).includes("activity")) return real(path, options);
          const told = await (await real(path, options)).json();
          const engines = told.engines.map((one) => ({ ...one, engine: `${one.engine}-two` }));
          const models = [{ model: "one", engines: [] }, { model: "two", engines: engines.map((one) => one.engine) }];
          return Response.json({ ...told, engines, model: "one", models });
        };
    """)
    page.until(
        "[...document.querySelectorAll('#engines h3')].map((one) => one.textContent.endsWith('-two of two')).at(0)"
    )
    page.value("window.fetch = real")
    page.until(
        "document.querySelectorAll('#engines h3').length === 1 && !document.body.textContent.includes('-two of two')"
    )


def test_an_answers_time_is_explained_and_that_of_any_request_of_the_same_key(page: Page, server: Server) -> None:
    let_in(page)
    limit(page, 20)
    page.press("Enter")
    page.until(f"{IDLE} && document.querySelector('.why')")
    page.click(".why summary")
    page.until("document.querySelector('.why li[data-cause=decode]')")
    assert "first token after" in page.value("document.querySelector('.why .told').textContent")
    assert "decode " in page.value("document.querySelector('.why .stack').getAttribute('aria-label')")
    named = {"authorization": f"Bearer {KEY}", "x-request-id": "asked-elsewhere"}
    body = {"model": "scripted", "prompt": "a", "max_tokens": 1}
    httpx.post(f"{server.url}/v1/completions", json=body, headers=named, timeout=30).raise_for_status()
    page.click("#timing-id")
    page.write("asked-elsewhere")
    page.press("Enter")
    page.until("document.querySelector('#timing-shown li')")
    assert "prefill" in causes(page)
    page.value("document.querySelector('#timing-id').value = 'never'")
    page.click("#timing button")
    page.until("document.querySelector('#timing-shown .told').textContent.startsWith('No request of that id')")
    assert causes(page) == []


def test_the_page_says_that_a_server_is_gone_and_sees_it_again_when_it_is_back(page: Page) -> None:
    page.value("window.real = window.fetch; window.fetch = () => Promise.reject(new TypeError('gone'))")
    page.until("document.querySelector('#fleet.bad')?.textContent === 'The server cannot be reached.'")
    page.value("window.fetch = real")
    page.until("document.querySelector('#fleet:not(.bad)')?.textContent.startsWith('1 engine')")


def test_a_page_that_nobody_sees_asks_for_nothing(page: Page) -> None:
    page.value(
        """
        window.asked = 0;
        const real = window.fetch;
        window.fetch = (...all) => { window.asked += 1; return real(...all); };
        window.hide = (is) => {
          Object.defineProperty(document, "hidden", { value: is, configurable: true });
          document.dispatchEvent(new Event("visibilitychange"));
        };
        """
    )
    page.until("asked >= 2")
    page.value("hide(true); asked = 0")
    page.value("new Promise((resolve) => setTimeout(resolve, 2500))")
    assert page.value("asked") == 0
    page.value("hide(false)")
    page.until("asked >= 2")


def test_a_page_is_as_wide_as_a_phone(page: Page) -> None:
    page.resize(360, 740)
    try:
        page.until("innerWidth === 360")
        assert page.value("document.documentElement.scrollWidth") == 360
        page.click("#prompt")
        assert page.value("document.activeElement.id") == "prompt", "nothing lies over it"
    finally:
        page.resize(1280, 900)
