"""The chat page as its users meet it, in headless Chromium, on a real server with nano."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import servers
from asking import ANSWER, QUESTION, WEATHER

from deepinfer.server.keys import KeyRing, add_key
from deepinfer.server.page_routes import FOLDER, HEADERS, PAGE_PATHS
from deepinfer.server.quota import KeyLimits

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = '<img src=x onerror="window.broken=1"><script>window.broken=1</script>'
TOOL = {"name": "get_weather", "description": "Get the current weather of a city", "parameters": WEATHER}
SECONDS = 60  # of patience, for a machine that does much else

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


# -- the files --------------------------------------------------------------------------------------------------------


def test_the_page_comes_without_a_key_and_with_a_policy_that_lets_nothing_foreign_in(nano_server: str) -> None:
    for path in sorted(PAGE_PATHS):
        answer = httpx.get(nano_server + path)
        assert answer.status_code == 200, path
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
        assert "unsafe" not in answer.headers["content-security-policy"]
    assert httpx.head(nano_server + "/").status_code == 200


def test_a_page_that_is_known_is_not_sent_again(nano_server: str) -> None:
    first = httpx.get(nano_server + "/page/chat.js")
    assert first.headers["content-type"].startswith("text/javascript")
    again = httpx.get(nano_server + "/page/chat.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_no_file_of_the_page_names_another_host_or_makes_html_from_text() -> None:
    for file in FOLDER.iterdir():
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"(?:src|href|url|import|fetch)\W{1,3}(?:https?:)?//", text), file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b", text), (
            file.name
        )


# -- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def context(browser: Any) -> Iterator[Any]:
    """A browser without history; an error in the page's own code fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    context.set_default_timeout(SECONDS * 1000)
    problems: list[str] = []
    context.on("weberror", lambda error: problems.append(str(error.error)))
    context.on("console", lambda message: problems.append(message.text) if "Content Security" in message.text else None)
    yield context
    context.close()
    assert problems == []


@pytest.fixture
def page(context: Any, nano_server: str) -> Any:
    return opened(context, nano_server)


def opened(context: Any, base_url: str) -> Any:
    page = context.new_page()
    page.goto(base_url)
    page.wait_for_selector("#status[data-state=ready]")
    page.click("#show-settings")
    page.fill("#temperature", "0")
    return page


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def wait_for_end(page: Any) -> None:
    """Until the last thing in the conversation is an answer that is over."""
    until(page, "!!document.querySelector('#log > .turn.model[aria-busy=false]:last-child')")


def until(page: Any, condition: str) -> None:
    """Waits for an expression of JavaScript (playwright's own way to wait would need the policy to allow eval)."""
    end = time.monotonic() + SECONDS
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(30)


def choose_effort(page: Any, effort: str) -> None:
    page.check(f"input[name=effort][value={effort}]", force=True)  # the label's text lies over it


def metric(base_url: str, name: str) -> float:
    text = httpx.get(f"{base_url}/metrics", timeout=10).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))


@needs_browser
def test_an_answer_streams_in_with_its_thoughts_folded_behind_it(page: Any) -> None:
    page.evaluate("""() => {
      window.seen = [];
      const what = {subtree: true, childList: true, attributes: true, characterData: true};
      new MutationObserver(() => {
        const turn = document.querySelector('.turn.model');
        if (!turn) return;
        const text = turn.querySelector('.text').textContent, thoughts = turn.querySelector('.thoughts');
        window.seen.push([turn.querySelector('details').open, text, thoughts ? thoughts.textContent : '']);
      }).observe(document.getElementById('log'), what);
    }""")
    ask(page, QUESTION)
    wait_for_end(page)
    assert page.inner_text(".turn.user") == QUESTION
    assert page.inner_text(".turn.model .text") == ANSWER
    assert page.get_attribute(".turn.model .thinking", "open") is None
    assert page.inner_text(".thinking summary").startswith("Thought for ")
    assert page.text_content(".thoughts")
    seen = page.evaluate("window.seen")
    assert any(is_open and not text for is_open, text, _ in seen), "the thoughts were never open without an answer"
    assert all(ANSWER.startswith(text) for _, text, _ in seen)
    assert len({len(text) + len(thoughts) for _, text, thoughts in seen}) > 3, "it came in one piece"
    assert re.search(r"first token \d+ ms · \d+ tokens \(\d+ thinking\) .*prompt \d+", page.inner_text(".figures"))
    page.click(".thinking summary")
    assert page.is_visible(".thoughts")


@needs_browser
def test_the_next_question_comes_with_what_was_said_before(page: Any) -> None:
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    page.fill("#system", "Be brief.")
    choose_effort(page, "off")
    ask(page, QUESTION)
    wait_for_end(page)
    page.fill("#prompt", "And of Italy?")
    page.press("#prompt", "Shift+Enter")  # a new line, not the end
    page.type("#prompt", "Tell me.")
    page.press("#prompt", "Enter")
    wait_for_end(page)
    assert len(bodies) == 2
    assert bodies[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": page.inner_text(".turn.model .text")},
        {"role": "user", "content": "And of Italy?\nTell me."},
    ]
    assert bodies[1]["thinking"] == {"type": "disabled"} and bodies[1]["temperature"] == 0
    page.reload()  # the tab still has it, and a new conversation has nothing
    page.wait_for_selector(".turn.model:nth-child(4)")
    page.click("#clear")
    assert page.is_visible("#empty") and page.locator(".turn").count() == 0
    page.reload()
    page.wait_for_selector("#status[data-state=ready]")
    assert page.locator(".turn").count() == 0


@needs_browser
def test_stop_before_the_first_token_leaves_the_question(page: Any) -> None:
    page.route("**/v1/chat/completions", lambda route: None)  # a request that gets no answer
    page.fill("#prompt", QUESTION)
    page.press("#prompt", "Enter")
    page.wait_for_selector("#stop", state="visible")
    page.press("#prompt", "Escape")
    page.wait_for_selector(".error")
    assert "Stopped before" in page.inner_text(".error")
    page.unroute("**/v1/chat/completions")
    page.click("text=Try again")
    wait_for_end(page)
    assert page.inner_text(".turn.model .text") == ANSWER and page.locator(".turn").count() == 2


@needs_browser
@pytest.mark.parametrize("way", ["button", "key"])
def test_stop_ends_the_answer_here_and_on_the_server(page: Any, nano_server: str, way: str) -> None:
    page.fill("#temperature", "2")  # with this seed 3,000 tokens and more
    page.fill("#seed", "7")
    ask(page, "Tell me a very long story.")
    until(page, "document.querySelector('.turn.model').textContent.length > 60")
    page.click("#stop") if way == "button" else page.press("#prompt", "Escape")
    wait_for_end(page)
    assert "Stopped" in page.inner_text(".turn.model .foot")
    for _ in range(50):
        if not metric(nano_server, "dsv_requests_running"):
            break
        page.wait_for_timeout(100)
    assert metric(nano_server, "dsv_requests_running") == 0
    choose_effort(page, "off")  # what was stopped is no hindrance
    page.fill("#temperature", "0")
    ask(page, QUESTION)
    wait_for_end(page)
    assert page.locator(".turn.model").count() == 2 and page.locator(".error").count() == 0


@needs_browser
def test_a_question_that_was_refused_does_not_spoil_the_next_one(page: Any) -> None:
    choose_effort(page, "off")
    page.fill("#temperature", "0")
    ask(page, "x " * 6000)  # more than the context holds
    until(page, "!!document.querySelector('.error')")
    ask(page, "What is the capital of France?")
    wait_for_end(page)
    assert "Paris" in page.inner_text(".turn.model .text") and page.locator(".error").count() == 0
    assert page.locator(".turn.user.refused").count() == 1


@needs_browser
def test_a_call_is_shown_and_its_result_goes_back(page: Any) -> None:
    page.fill("#tools", json.dumps(TOOL))
    choose_effort(page, "off")
    ask(page, "What is the weather in Paris?")
    wait_for_end(page)
    assert page.inner_text(".call header b") == "get_weather"
    assert json.loads(page.inner_text(".call .arguments")) == {"city": "Paris"}
    assert "\n" in page.inner_text(".call .arguments")
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    page.fill(".call textarea", '{"temperature": 21, "condition": "sunny"}')
    page.click("text=Send result")
    wait_for_end(page)
    call, result = bodies[0]["messages"][1:]
    assert call["tool_calls"][0]["function"]["name"] == "get_weather"
    assert result == {
        "role": "tool",
        "tool_call_id": call["tool_calls"][0]["id"],
        "content": '{"temperature": 21, "condition": "sunny"}',
    }
    assert page.inner_text(".turn.model:nth-child(3) .text")
    assert page.locator(".call textarea").count() == 0 and "sunny" in page.inner_text(".call .result")


@needs_browser
def test_markup_from_the_model_is_shown_and_never_interpreted(page: Any) -> None:
    page.select_option("#format", "json_schema")
    page.fill("#schema", json.dumps({"const": HOSTILE}))
    choose_effort(page, "off")
    ask(page, HOSTILE)
    wait_for_end(page)
    assert json.loads(page.inner_text(".turn.model .text code")) == HOSTILE
    assert page.inner_text(".turn.user") == HOSTILE
    shown = page.evaluate(
        """async (texts) => {
          const {markdown, GrowingMarkdown} = await import('/page/markdown.js');
          const place = document.getElementById('log');
          place.replaceChildren(...texts.flatMap((text) => markdown(text)));
          for (const text of texts) new GrowingMarkdown(place).update(text);
          await new Promise((done) => setTimeout(done, 200));
          const nodes = [...place.querySelectorAll('*')];
          return {
            names: [...new Set(nodes.map((node) => node.tagName))],
            attributes: [...new Set(nodes.flatMap((node) => [...node.attributes].map((one) => one.name)))],
            links: [...place.querySelectorAll('a')].map((link) => link.href),
            broken: window.broken ?? null,
          };
        }""",
        [
            HOSTILE,
            f"# {HOSTILE}\n- {HOSTILE}\n\n> {HOSTILE}\n\n|a|b|\n|-|-|\n|{HOSTILE}|`{HOSTILE}`|\n\n**{HOSTILE}**",
            f"```{HOSTILE}\n{HOSTILE}\n```",
            f"[x](javascript:alert(1)) [{HOSTILE}](https://a.b/{HOSTILE}) [y](data:text/html,x) [z](https://good.example/)",
        ],
    )
    allowed = "A BLOCKQUOTE BR BUTTON CODE DIV EM H3 LI P PRE SPAN STRONG TABLE TBODY TD TH THEAD TR UL"
    assert set(shown["names"]) <= set(allowed.split())
    assert set(shown["attributes"]) <= {"class", "href", "target", "rel", "title", "type"}
    assert set(shown["links"]) == {"https://good.example/", "https://a.b/"}
    assert shown["broken"] is None


@needs_browser
def test_text_that_grows_looks_like_the_same_text_at_once(page: Any) -> None:
    text = (
        "# One\nA **bold** *word* and `code`.\n***both***\n- a\n  - b\n    c\n\n- d\n1. x\n\n2. y\n> q\n> - r\n\n"
        "|a|b|\n|:-|-:|\n|1|2|\n\n---\n~~~py\nx = 1\n\n# no title\n~~~\nend **open\n\n* * *\n```\nnever closed"
    )
    assert (
        page.evaluate(
            """async (text) => {
          const {markdown, GrowingMarkdown} = await import('/page/markdown.js');
          const whole = document.createElement('div'), grown = document.createElement('div');
          const growing = new GrowingMarkdown(grown);
          const wrong = [];
          for (let end = 1; end <= text.length; end++) {
            growing.update(text.slice(0, end));
            whole.replaceChildren(...markdown(text.slice(0, end)));
            if (grown.innerHTML !== whole.innerHTML) wrong.push([end, grown.innerHTML, whole.innerHTML]);
          }
          return wrong.slice(0, 2);
        }""",
            text,
        )
        == []
    )


@needs_browser
def test_errors_of_the_server_are_told_in_words_and_the_message_can_be_edited(page: Any) -> None:
    page.fill("#max-tokens", "100000")
    page.fill("#prompt", QUESTION)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".error")
    assert "this adds 100000" in page.inner_text(".error")
    page.click("text=Edit the message")
    assert page.input_value("#prompt") == QUESTION and page.locator(".turn, .error").count() == 0
    page.fill("#max-tokens", "3")
    ask(page, QUESTION)
    wait_for_end(page)
    assert "max tokens reached" in page.inner_text(".turn.model .foot")


@needs_browser
@pytest.mark.parametrize("said", ["", "reasoning_content", "content"])
def test_an_answer_that_breaks_off_is_told_and_can_be_asked_for_again(page: Any, said: str) -> None:
    delta = {said: "Half a"} if said else {}
    chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    broken = f"data: {json.dumps(chunk)}\n\n" + (
        'data: {"error": {"message": "the engine was lost"}}\n\n' if said else ""
    )
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=broken, content_type="text/event-stream"))
    page.fill("#prompt", QUESTION)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".error")
    assert ("the engine was lost" if said else "broke off") in page.inner_text(".error")
    page.unroute("**/v1/chat/completions")
    if said != "content":  # nothing was answered, so the question may still be another one
        page.click("text=Edit the message")
        assert page.locator(".turn, .error").count() == 0
        page.press("#prompt", "Enter")
    else:
        assert "Broke off" in page.inner_text(".turn.model .foot")
        page.click("text=Try again")
    wait_for_end(page)
    assert page.locator(".turn").count() == 2 and page.locator(".error").count() == 0
    assert page.inner_text(".turn.model .text") == ANSWER


@needs_browser
def test_what_cannot_be_sent_is_said_beside_its_field(page: Any) -> None:
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
    page.fill("#prompt", QUESTION)
    for fill, field, words in (
        (lambda: page.fill("#tools", "[{"), "tools", "no JSON"),
        (lambda: page.fill("#tools", '[{"name": "two words"}]'), "tools", "needs a name"),
        (lambda: page.fill("#tools", '[{"name": "a"}, {"name": "a"}]'), "tools", "two tools called a"),
        (lambda: page.fill("#temperature", "3"), "numbers", "from 0 to 2"),
        (lambda: page.select_option("#format", "json_schema"), "schema", "nothing here yet"),
        (lambda: page.fill("#schema", "[]"), "schema", "is an object"),
    ):
        page.fill("#tools", "")
        page.fill("#temperature", "0")
        fill()
        page.press("#prompt", "Enter")
        assert words in page.inner_text(f"#{field}-error")
    page.click("#schema-example")
    assert page.inner_text("#schema-error") == "" and sent == []


@needs_browser
def test_the_panel_shows_what_the_engine_does(page: Any) -> None:
    until(page, "document.getElementById('live-running').textContent === '0'")
    ask(page, QUESTION)
    wait_for_end(page)
    until(page, "parseInt(document.getElementById('live-rate').textContent) > 0")
    for name, form in (
        ("ttft", r"[\d.]+ m?s"),
        ("tbt", r"[\d.]+ m?s"),
        ("cache", r"[\d.]+ %"),
        ("drafts", r"\d\.\d"),
    ):
        until(page, f"document.getElementById('live-{name}').textContent !== '–'")
        assert re.fullmatch(form, page.inner_text(f"#live-{name}"))
    painted = "(canvas) => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(Boolean)"
    assert page.locator("canvas").first.evaluate(painted)
    page.click("#show-live")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "metrics" in request.url else None)
    page.wait_for_timeout(1500)
    assert asked == [], "a panel that nobody sees asks for figures"


@needs_browser
def test_percentiles_of_the_panel_are_those_of_the_last_seconds(page: Any) -> None:
    got = page.evaluate("""async () => {
      const {parse, quantile, Window} = await import('/page/metrics.js');
      const text = (few, many, tokens) => `# HELP dsv_x y
dsv_wait_seconds_bucket{le="0.1",model="a"} ${few}
dsv_wait_seconds_bucket{le="0.2",model="a"} ${many}
dsv_wait_seconds_bucket{le="+Inf",model="a"} ${many}
dsv_generation_tokens_total{model="a"} ${tokens}
dsv_generation_tokens_total{model="b"} 1.5e1
other_metric 7`;
      const scrape = (...numbers) => parse(text(...numbers), ['wait_seconds']);
      const seen = new Window(30);
      const median = () => seen.quantile('wait_seconds', 0.5);
      const growth = () => seen.growth('generation_tokens_total');
      seen.push(0, scrape(100, 100, 10));
      seen.push(40, scrape(100, 104, 50));
      const first = [median(), growth(), seen.value('generation_tokens_total')];
      seen.push(41, scrape(0, 0, 0)); // another engine: counts begin anew
      const restarted = [median(), growth()];
      seen.push(42, scrape(2, 4, 8));
      const last = [seen.quantile('wait_seconds', 0.75), seen.rate('generation_tokens_total', 3)];
      const above = quantile(undefined, new Map([[0.5, 0], [Infinity, 9]]), 0.5);
      return {first, restarted, last, above, nothing: quantile(undefined, new Map(), 0.5)};
    }""")
    assert got["first"] == [pytest.approx(0.15), 40, 65]
    assert got["restarted"] == [None, None]
    assert got["last"] == [pytest.approx(0.15), 8]
    assert (got["above"], got["nothing"]) == (0.5, None)


@needs_browser
def test_a_narrow_screen_needs_no_scrolling_sideways_and_every_control_has_a_name(page: Any) -> None:
    names = page.evaluate("""() => [...document.querySelectorAll('input, select, textarea, button')]
      .map((one) => one.getAttribute('aria-label') || one.labels?.[0]?.textContent.trim() || one.textContent.trim())""")
    assert len(names) > 20 and all(names), names
    page.set_viewport_size({"width": 360, "height": 640})
    for control in ("#show-settings", "#show-live"):  # both are open
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        page.click(control)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.is_visible("#prompt") and not page.is_visible("#live")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 18, 24)"
    page.click("#theme")  # light always
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(246, 247, 249)"


@needs_browser
def test_a_server_with_keys_is_used_with_the_key_that_was_typed(
    context: Any, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "keys.json"
    key, _ = add_key(file, "team", KeyLimits())
    with servers.thread_server(tiny_checkpoint, KeyRing.load(file)) as server:
        page = context.new_page()
        page.goto(server.base_url)
        until(page, "document.getElementById('status').textContent === 'needs an API key'")
        page.wait_for_selector("#key:focus")
        until(page, "document.getElementById('live-note').textContent === 'needs the API key'")
        page.fill("#key", key)
        page.wait_for_selector("#status[data-state=ready]")
        until(page, "document.getElementById('live-running').textContent === '0'")
        page.fill("#max-tokens", "4")
        ask(page, "Hello")
        wait_for_end(page)
        assert page.locator(".turn.model").count() == 1 and page.locator(".error").count() == 0
        stored = "() => [Object.values(localStorage).join(), document.cookie, location.href].join()"
        assert key not in page.evaluate(stored)
        assert key in page.evaluate("() => Object.values(sessionStorage).join()")
