"""The page at `/` in a real headless Chromium: chat before a scripted engine, the dashboard of a server with two ranks."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from server_process import serving
from waiting import PATIENCE

from minserve.server.admin import PAGE_DIRECTORY
from tests.server.conftest import Edge, Vocabulary, says

Start = Callable[..., AbstractContextManager[Edge]]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt-get install chromium)")
_QUIET = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update"
MOST_BYTES = 200_000
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}}}]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    expect.set_options(timeout=1000 * PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_QUIET.split())
        yield browser
        browser.close()


@pytest.fixture(params=["light", "dark"])
def page(chromium: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A tab that fails its test for every complaint of the browser but that of an answer that is an error."""
    context = chromium.new_context(color_scheme=request.param, viewport={"width": 1280, "height": 800})
    context.set_default_timeout(1000 * PATIENCE)
    made = context.new_page()
    complaints: list[str] = []
    made.on("pageerror", lambda error: complaints.append(str(error)))
    made.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
    yield made
    context.close()
    assert [text for text in complaints if not text.startswith("Failed to load resource")] == []


@pytest.fixture(scope="module")
def scripted(start_edge: Start) -> Iterator[Edge]:
    with start_edge("hello", tool_call_parser="hermes", reasoning_parser="qwen3", max_model_len=4096) as edge:
        yield edge


@pytest.fixture
def chat(page: Page, scripted: Edge) -> Iterator[Page]:
    page.goto(f"http://127.0.0.1:{scripted.port}/")
    expect(page.locator("#status")).to_have_text("tiny")
    yield page
    scripted.engine.step_seconds = 0.0


def ask(page: Page, text: str) -> Locator:
    """Sends a message by keyboard; the answer that comes."""
    count = page.locator(".message.assistant").count()
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    return page.locator(".message.assistant").nth(count)


def is_accessible(page: Page) -> None:
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_the_page_is_small_and_asks_nobody_else() -> None:
    files = list(PAGE_DIRECTORY.iterdir())
    assert sum(file.stat().st_size for file in files) < MOST_BYTES
    named = {url for file in files for url in re.findall(r"https?://[^\s\"'`)]+", file.read_text())}
    assert named == {"http://www.w3.org/2000/svg"}, "a name of SVG, never asked for; anything else would be"


def test_the_policy_lets_a_browser_run_nothing_but_the_pages_own_files(scripted: Edge) -> None:
    answer = scripted.get("/")
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert scripted.get("/", {"If-None-Match": answer.headers["ETag"]}).status == 304
    assert scripted.get("/web/main.js").headers["Content-Type"] == "text/javascript; charset=utf-8"
    for path in ("/web/../admin.py", "/web/", "/web", "/web/nothing.js"):
        assert scripted.get(path).status == 404


def test_a_conversation(chat: Page, scripted: Edge, vocabulary: Vocabulary) -> None:
    scripted.engine.script = says(vocabulary, "**hi** <b>there</b>")
    answer = ask(chat, "hello")
    expect(answer.locator(".text")).to_have_text("**hi** <b>there</b>")
    expect(answer.locator(".meta")).to_contain_text("tokens · first after")
    expect(answer).not_to_have_attribute("aria-busy", "true")
    expect(chat.get_by_label("Message")).to_be_focused()
    assert scripted.metric("num_requests_running") == 0
    ask(chat, "and now")
    chat.locator(".message.assistant .meta").nth(1).wait_for()
    prompt = vocabulary.tokenizer.decode(scripted.engine.added[-1].prompt_token_ids, skip_special_tokens=True)
    assert prompt == "<user>hello<assistant>**hi** <b>there</b><user>and now<assistant>"
    is_accessible(chat)
    chat.get_by_role("button", name="Try again").press("Enter")
    expect(chat.get_by_role("log")).to_be_focused()
    expect(chat.locator(".message.assistant")).to_have_count(2)
    chat.locator(".message.assistant .meta").nth(1).wait_for()
    assert vocabulary.tokenizer.decode(scripted.engine.added[-1].prompt_token_ids) == prompt
    chat.get_by_role("button", name="New chat").click()
    expect(chat.locator(".message")).to_have_count(0)


def test_text_comes_as_it_is_made_and_stops_when_told(chat: Page, scripted: Edge, vocabulary: Vocabulary) -> None:
    scripted.engine.script = lambda _: vocabulary.ids("on ") * 1200
    scripted.engine.step_seconds = 0.05
    answer = ask(chat, "count")
    expect(answer).to_have_attribute("aria-busy", "true")
    expect(answer.locator(".text")).to_contain_text("on on on")
    first = answer.locator(".text").inner_text().count("on")
    expect(answer.locator(".text")).to_contain_text("on " * (first + 20))
    assert scripted.engine.num_live == 1
    gone = scripted.metric("aborts_total", cause="client_gone")
    chat.get_by_role("button", name="Stop").click()
    expect(answer.locator(".meta")).to_have_text("Stopped")
    scripted.wait_for(lambda: scripted.engine.num_live == 0)
    assert scripted.metric("aborts_total", cause="client_gone") == gone + 1
    answer = ask(chat, "once more")
    expect(answer.locator(".text")).to_contain_text("on on on")
    chat.keyboard.press("Escape")
    expect(answer.locator(".meta")).to_have_text("Stopped")
    scripted.wait_for(lambda: scripted.engine.num_live == 0)


def test_parameters_reach_the_engine(chat: Page, scripted: Edge, vocabulary: Vocabulary) -> None:
    scripted.engine.script = says(vocabulary, "hello")
    chat.get_by_label("System prompt").fill("Be brief.")
    for label, value in {
        "Temperature": "0.5",
        "Top p": "0.9",
        "Top k": "7",
        "Min p": "0.1",
        "Most tokens": "3",
        "Seed": "11",
    }.items():
        chat.get_by_label(label).fill(value)
    answer = ask(chat, "hello")
    expect(answer.locator(".text")).to_have_text("hel")
    expect(answer.locator(".meta")).to_contain_text("cut off at its most tokens")
    request = scripted.engine.added[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.max_tokens, sampling.seed) == (3, 11)
    assert vocabulary.tokenizer.decode(request.prompt_token_ids) == "<system>Be brief.<user>hello<assistant>"
    chat.get_by_role("button", name="Reset").click()
    chat.get_by_label("Stop strings").fill("lo\nll")
    expect(ask(chat, "hello").locator(".text")).to_have_text("he")


def test_reasoning_and_calls_are_folded_and_a_call_gets_its_result(chat: Page, scripted: Edge, vocabulary: Vocabulary) -> None:
    scripted.engine.script = says(vocabulary, f"<think>\nhm\n</think>\n\nI look.{CALL}")
    chat.get_by_label("Tools").fill("[{]")
    chat.get_by_label("Message").fill("weather?")
    chat.keyboard.press("Enter")
    expect(chat.locator("#tools-fault")).to_contain_text("Tools cannot be read")
    chat.get_by_label("Tools").fill(json.dumps(TOOLS))
    chat.get_by_role("button", name="Try again").click()
    answer = chat.locator(".message.assistant")
    expect(answer.locator("> .text")).to_have_text("I look.")
    reasoning, call = answer.locator("details.reasoning"), answer.locator("details.call")
    expect(reasoning.locator(".text")).to_be_hidden()
    reasoning.get_by_text("Reasoning").press("Enter")
    expect(reasoning.locator(".text")).to_have_text("hm")
    call.get_by_text("Call of get_weather").press("Enter")
    expect(call.locator("pre")).to_have_text('{"city": "Ulm"}')
    is_accessible(chat)
    chat.get_by_label("Result of get_weather").fill("rain")
    scripted.engine.script = says(vocabulary, "It rains.")
    chat.get_by_role("button", name="Send results").click()
    expect(chat.locator(".message.assistant").nth(1).locator(".text")).to_have_text("It rains.")
    prompt = vocabulary.tokenizer.decode(scripted.engine.added[-1].prompt_token_ids)
    assert prompt.startswith("[tools:get_weather;]<user>weather?<assistant>I look.[call get_weather ")
    assert prompt.endswith("<tool>rain<assistant>")
    scripted.engine.script = says(vocabulary, CALL)  # cut off: no call to go on with
    chat.get_by_label("Most tokens").fill(str(len(CALL) - 22))
    cut = ask(chat, "once more")
    expect(cut.locator(".meta")).to_contain_text("cut off at its most tokens")
    expect(cut.locator("details.call")).to_have_count(1)
    expect(chat.get_by_role("button", name="Send results")).to_have_count(0)


def test_errors_are_shown_in_the_servers_words(chat: Page, scripted: Edge) -> None:
    chat.get_by_label("Most tokens").fill("100000")
    chat.get_by_label("Temperature").fill("3")
    fault = ask(chat, "hello").locator(".fault")
    expect(fault).to_contain_text("temperature")
    chat.get_by_role("button", name="Reset").click()
    scripted.engine.fail_with = "out of luck"
    expect(ask(chat, "hello").locator(".fault")).to_contain_text("out of luck")
    scripted.engine.fail_with = None


def test_a_key_is_asked_for_and_kept_in_the_tab(page: Page, start_edge: Start) -> None:
    with start_edge("hello", api_key=("sesame",)) as edge:
        page.goto(f"http://127.0.0.1:{edge.port}/")
        dialog = page.get_by_role("dialog", name="This server asks for a key")
        dialog.wait_for()
        is_accessible(page)
        page.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-fault")).to_contain_text("missing or wrong")
        page.keyboard.press("Escape")
        expect(dialog).to_be_visible()
        page.get_by_label("API key").fill("sesame")
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#status")).to_have_text("tiny")
        expect(ask(page, "hello").locator(".text")).to_have_text("hello")
        page.reload()
        expect(page.locator("#status")).to_have_text("tiny")
        expect(dialog).to_be_hidden()


def test_it_tells_how_the_server_is(page: Page, start_edge: Start) -> None:
    with start_edge("hello", be_ready=False) as edge:
        page.goto(f"http://127.0.0.1:{edge.port}/")
        expect(page.locator("#status")).to_contain_text("still loading (load, 50%)")
        expect(page.get_by_role("button", name="Send")).to_be_disabled()
        edge.engine.become_ready()
        expect(page.locator("#status")).to_have_text("tiny")
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        page.get_by_role("link", name="Dashboard").click()
        expect(page.locator("#tile-running")).to_have_text("0")
    expect(page.locator("#stale")).to_contain_text("Nothing new")
    expect(page.locator("#status")).to_have_text("no answer from the server")


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log: Path = tmp_path_factory.mktemp("page") / "log"
    with serving("--ep-size", "2", log=log) as server:
        yield server.base_url


def number(page: Page, name: str) -> float:
    return float(page.locator(f"#tile-{name}").inner_text().replace(",", "").rstrip(" %"))


def test_the_dashboard_moves(page: Page, ranked: str) -> None:
    page.goto(f"{ranked}/")
    expect(page.locator("#status")).to_have_text("embedded")
    page.get_by_role("link", name="Dashboard").click()
    expect(page.locator("#tile-running")).to_have_text("0")
    expect(page.locator("#ranks tbody tr")).to_have_count(2)
    before = number(page, "done")
    tab = page.context.new_page()
    tab.goto(f"{ranked}/")
    tab.get_by_label("Temperature").fill("0")
    expect(ask(tab, "What is 23 + 58?").locator(".text")).to_have_text("81")
    tab.get_by_label("Temperature").fill("1")
    tab.get_by_label("Most tokens").fill("4000")
    page.bring_to_front()
    tab.get_by_label("Tools").fill("")
    ask(tab, "tell me a story of the sea")
    expect(page.locator("#tile-done")).not_to_have_text(f"{before:g}")
    expect(page.locator("#tile-ttft")).to_have_text(re.compile(r"\d"))
    expect(page.locator("#tile-tpot")).to_have_text(re.compile(r"\d"))
    expect(page.locator("#steps")).to_contain_text("Eager: cpu")
    expect(page.locator("#phases")).to_contain_text("load")
    expect(page.locator("#verdict")).to_have_text("no graphs on a CPU")
    expect(page.locator("#heat")).to_be_visible(timeout=15_000)
    assert page.locator("#heat").evaluate("(canvas) => [canvas.width, canvas.height]") == [16, 2]
    page.locator("#heat").hover(position={"x": 3, "y": 3})
    expect(page.locator("#heat-cell")).to_contain_text("Layer 1, expert 0: ")
    expect(page.locator("#load-table tbody tr")).to_have_count(2)
    is_accessible(page)
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
    is_accessible(page)


def test_all_of_it_is_reached_by_keyboard(page: Page, ranked: str) -> None:
    page.goto(f"{ranked}/")
    expect(page.locator("#status")).to_have_text("embedded")
    seen = []
    for _ in range(25):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate("() => document.activeElement.name || document.activeElement.id || document.activeElement.innerText")
        )
    for name in ("Skip to content", "Chat", "Dashboard", "log", "prompt", "send", "Parameters", "system", "temperature", "tools"):
        assert name in seen, seen
    page.get_by_role("link", name="Dashboard").press("Enter")
    expect(page.locator("#dashboard")).to_be_visible()
    expect(page.locator("#chat")).to_be_hidden()
    page.get_by_text("Skip to content").press("Enter")
    expect(page.locator("#dashboard")).to_be_visible()
