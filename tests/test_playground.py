"""The playground: what it shows is text, and in a real browser the threshold moves the route."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rgate_integrations import Decision, Draft
from rgate_integrations.claims import plan_queries
from rgate_integrations.decision import Failure

pytest.importorskip("gradio", reason="gradio comes with the dev extra")
from rgate_integrations.playground import (
    claims_html,
    draft_html,
    gauge,
    passages_html,
    read_corpus,
    times_html,
)

BUILD = Path(__file__).parent.parent / "build" / "playground"
SLY = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def test_what_models_write_is_shown_as_text():
    draft = Draft(text=SLY, tokens=(SLY, " b"), logprobs=(-0.1, -9.0))
    decision = Decision(question=SLY, retrieve=True, p_known=0.2, reason=SLY, draft=draft)
    (plan,) = plan_queries([decision])
    shown = [draft_html(draft), draft_html(Draft(text=SLY)), gauge(decision, 0.5), claims_html(plan)]
    failed = decision.model_copy(update={"error": Failure(type="X", message=SLY)})
    shown += [gauge(failed, 0.5), times_html({SLY: 1.0})]
    for html in shown:
        assert "<script>" not in html
        assert "<img" not in html
        assert "&lt;script&gt;" in html
    assert 'title="0.90"' in draft_html(draft)
    assert "Nothing to search" in claims_html(None)
    assert passages_html([]) == '<div class="rg"><small>None.</small></div>'
    assert "question alone" in draft_html(None)


def test_the_route_follows_the_threshold():
    decision = Decision(question="q", retrieve=True, p_known=0.4)
    assert "retrieve: it is" in gauge(decision, 0.5)
    assert "answer directly" in gauge(decision, 0.3)
    assert "left:40.0%" in gauge(decision, 0.3)
    assert "Ask a question" in gauge(None, 0.5)


def test_a_corpus_that_cannot_be_read_is_said(tmp_path):
    assert read_corpus(None)[0] is None
    (tmp_path / "bad.jsonl").write_text("{}\n")
    index, note = read_corpus(str(tmp_path / "bad.jsonl"))
    assert index is None
    assert "line 1" in note


@pytest.mark.model
def test_an_uploaded_corpus_is_searched(tmp_path, smollm2, minilm):
    from rgate_integrations import load_gate
    from rgate_integrations.cli.ask import Pipeline
    from rgate_integrations.playground import Playground

    lines = [{"text": "The capital of Zorblat is Quimbo.", "title": "Zorblat"}, {"text": "Bread is baked."}]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    index, note = read_corpus(str(tmp_path / "mine.jsonl"))
    assert note == "Searching 2 passages of yours."
    playground = Playground(Pipeline(load_gate(), index, smollm2, k=1))
    shown = list(playground.ask("What is the capital of Zorblat?", 0.5, index))
    assert len(shown) > 3
    assert isinstance(shown[0][0], Decision)
    assert "Quimbo" in shown[-1][4]
    assert shown[-1][5]
    assert shown[-1][6]
    assert len(list(playground.ask("  ", 0.5))) == 1, "an empty question says so, and nothing is answered"


@pytest.fixture
def page(tmp_path, smollm2, minilm):
    """Start the command in a process of its own, on a small index; yields its address."""
    from rgate_integrations.index import Passage, PassageIndex

    passages = [
        Passage("1", "The capital of Zorblat is Quimbo.", title="Zorblat"),
        Passage("2", "Bread is baked."),
    ]
    PassageIndex.build(passages).save(tmp_path / "index")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from rgate_integrations.cli.main import main; main()", "playground"]
    command += [
        "--index",
        str(tmp_path / "index"),
        "--llm",
        smollm2.name,
        "--port",
        str(port),
        "--no-browser",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        assert process.poll() is None, "the playground ended"
        time.sleep(0.5)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(20)


@pytest.mark.model
def test_in_a_browser(page, browser):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    wait = WebDriverWait(browser, 120)

    def text(name):
        return browser.find_element(By.ID, name).text

    def value(name):
        return browser.find_element(By.CSS_SELECTOR, f"#{name} textarea").get_property("value")

    browser.set_window_size(1280, 1400)
    browser.get(page)
    box = wait.until(lambda b: b.find_element(By.CSS_SELECTOR, "#rg-question textarea, #rg-question input"))
    box.send_keys("What is the capital of <b>Zorblat</b>?", Keys.ENTER)
    wait.until(lambda b: "P(known)" in text("rg-gauge"))
    wait.until(lambda b: "answer with passages" in text("rg-times") and "Quimbo" in text("rg-passages"))
    wait.until(lambda b: value("rg-with"))
    assert value("rg-without")
    assert "<b>Zorblat</b>" in text("rg-claims"), "the question is shown as text"
    route = text("rg-gauge").splitlines()[0]

    slider = browser.find_element(By.CSS_SELECTOR, "#rg-threshold input[type=range]")
    slider.send_keys(Keys.HOME if route.startswith("retrieve") else Keys.END)  # the keyboard is enough
    wait.until(lambda b: text("rg-gauge").splitlines()[0] != route)
    BUILD.mkdir(parents=True, exist_ok=True)
    browser.save_screenshot(str(BUILD / "1280.png"))
    browser.set_window_size(375, 1400)
    time.sleep(3)
    assert text("rg-gauge").splitlines()[0] != route, "answers that come in later leave the threshold alone"
    browser.save_screenshot(str(BUILD / "375.png"))
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth + 1")
    urls = {
        json.loads(e["message"])["message"]["params"]["request"]["url"].split("/")[2]
        for e in browser.get_log("performance")
        if json.loads(e["message"])["message"]["method"] == "Network.requestWillBeSent"
        and json.loads(e["message"])["message"]["params"]["request"]["url"].startswith("http")
    }
    assert urls == {page.removeprefix("http://")}, "nothing is fetched from elsewhere"
