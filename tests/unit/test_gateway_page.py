"""The web page in a real browser: streaming, stop, numbers, errors, keys; and a screenshot that is not blank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser, assert_drawn
from kserve import FakeServer
from serving import gateway, wait_for

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)"
)
LAST = "[...document.querySelectorAll('.assistant')].at(-1)"
NOTE = "[...document.querySelectorAll('.note')].at(-1).textContent"


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def url(server: FakeServer) -> Iterator[str]:
    with gateway(server.address) as url:
        yield url


@pytest.fixture
def page(browser: Browser, server: FakeServer, url: str) -> Browser:
    server.asked.clear()
    server.cancelled.clear()
    browser.errors.clear()
    browser.go(url)
    browser.until("document.querySelector('#model').value === 'vllm'")
    return browser


def say(page: Browser, text: str) -> None:
    page.ask("document.querySelector('#text').focus()")
    page.type(text)
    page.press_enter()


def settled(page: Browser) -> None:
    page.until("!document.querySelector('#send').disabled")


def test_a_talk_with_numbers_and_history(page: Browser, server: FakeServer) -> None:
    say(page, "!slow 0.02 one two three 聪明")
    settled(page)
    assert page.ask(f"{LAST}.textContent") == "one two three 聪明"
    note = page.ask(NOTE)
    assert note.startswith("TTFT ") and " tok/s · 4 tokens" in note
    say(page, "and <b>again</b>")
    settled(page)
    assert page.ask(f"{LAST}.textContent") == "and <b>again</b>"
    sent = json.loads(server.asked[-1]["messages"])["messages"]
    assert [message["content"] for message in sent] == [
        "!slow 0.02 one two three 聪明",
        "one two three 聪明",
        "and <b>again</b>",
    ]
    assert page.errors == []


def test_text_appears_while_it_streams_and_stop_stops(page: Browser, server: FakeServer) -> None:
    say(page, "!long")
    page.until(f"{LAST}?.textContent.includes('tick tick tick')")
    assert page.ask("document.querySelector('#send').disabled")
    page.click("#stop")
    settled(page)
    wait_for(lambda: server.cancelled)
    assert "stopped" in page.ask(NOTE)
    assert page.ask("document.querySelector('#stop').disabled")
    say(page, "next")
    settled(page)
    assert page.ask(f"{LAST}.textContent") == "next"
    assert page.errors == []


def test_a_new_chat_while_an_answer_runs_knows_nothing_of_it(page: Browser, server: FakeServer) -> None:
    say(page, "!long")
    page.until(f"{LAST}?.textContent.includes('tick')")
    page.click("#reset")
    settled(page)
    wait_for(lambda: server.cancelled)
    say(page, "fresh")
    settled(page)
    assert [m["content"] for m in json.loads(server.asked[-1]["messages"])["messages"]] == ["fresh"]
    assert page.errors == []


def test_thinking_is_shown_apart(page: Browser) -> None:
    say(page, "!think")
    settled(page)
    assert page.ask("[...document.querySelectorAll('.thinking')].at(-1).textContent") == "Two and two. "
    assert page.ask(f"{LAST}.textContent") == "It is 4."


def test_settings_are_sent(page: Browser, server: FakeServer) -> None:
    page.click("#more")
    page.ask("document.querySelector('#system').value = 'be short'")
    page.ask("document.querySelector('#temperature').value = '0.3'")
    page.ask("document.querySelector('#max').value = '2'")
    say(page, "a b c d")
    settled(page)
    assert page.ask(f"{LAST}.textContent") == "a b "
    assert "cut at max tokens" in page.ask(NOTE)
    assert server.asked[-1].sampling == {"temperature": 0.3, "max_tokens": 2}
    assert json.loads(server.asked[-1]["messages"])["messages"][0] == {
        "role": "system",
        "content": "be short",
    }


def test_errors_are_shown_and_forgotten(page: Browser, server: FakeServer) -> None:
    say(page, "!error UNAVAILABLE full: 3 of 3")
    settled(page)
    assert page.ask("document.querySelector('.error').textContent") == "full: 3 of 3"
    say(page, "!cut 2")
    settled(page)
    assert "answer cut after 2 tokens" in page.ask(
        "[...document.querySelectorAll('.error')].at(-1).textContent"
    )
    say(page, "good")
    settled(page)
    # What failed without an answer is no part of the talk.
    sent = json.loads(server.asked[-1]["messages"])["messages"]
    assert [message["content"] for message in sent] == ["!cut 2", "tok tok ", "good"]


def test_a_gateway_that_is_gone_is_said(browser: Browser, server: FakeServer) -> None:
    with gateway(server.address) as url:
        browser.go(url)
        browser.until("document.querySelector('#model').value === 'vllm'")
    say(browser, "x")
    settled(browser)
    assert "no connection to the gateway" in browser.ask("document.querySelector('.error').textContent")


def test_key_is_asked_for(browser: Browser, server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret-key-0123456789\n")
    with gateway(server.address, api_keys_file=str(tmp_path / "keys")) as url:
        browser.go(url)
        browser.until("!document.querySelector('#settings').hidden")
        assert "a key is needed" in browser.ask(NOTE)
        browser.ask("document.querySelector('#key').focus()")
        browser.type("secret-key-0123456789")
        browser.ask("document.querySelector('#key').dispatchEvent(new Event('change'))")
        browser.until("document.querySelector('#model').value === 'vllm'")
        say(browser, "open")
        settled(browser)
        assert browser.ask(f"{LAST}.textContent") == "open"


def test_narrow_screen_has_no_sideways_scroll(page: Browser) -> None:
    page.send("Emulation.setDeviceMetricsOverride", width=360, height=640, deviceScaleFactor=1, mobile=True)
    say(page, "x" * 300)
    settled(page)
    assert page.ask("document.documentElement.scrollWidth <= 360")
    page.send("Emulation.clearDeviceMetricsOverride")


def test_screenshot(page: Browser, tmp_path: Path) -> None:
    say(page, "What is the capital of France?")
    settled(page)
    say(page, "!think")
    settled(page)
    page.screenshot(tmp_path / "page.png")
    assert_drawn(tmp_path / "page.png")
