"""The playground: what it shows is text, and in a real browser the threshold moves the route."""

import http.client
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rgate_integrations import Decision, Draft, load_gate
from rgate_integrations.answering.answer_first_gate import AnswerFirstGate
from rgate_integrations.answering.pipeline import Pipeline
from rgate_integrations.claims import plan_queries
from rgate_integrations.decision import Failure, PartialAnswerInfo
from rgate_integrations.index import Passage, PassageIndex
from rgate_integrations.index.retriever import Hit
from tests.scripted_proxy import ScriptedProxy

pytest.importorskip("gradio", reason="gradio comes with the dev extra")
from rgate_integrations.playground import (
    MAX_UPLOAD,
    Playground,
    SentToThisMachine,
    _read_upload,
    claims_html,
    draft_html,
    gauge,
    launch,
    passages_html,
    read_corpus,
    saved_html,
    times_html,
)
from tests.patience import PATIENCE

BUILD = Path(__file__).parent.parent / "build" / "playground"
SLY = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def test_what_models_write_is_shown_as_text():
    draft = Draft(text=SLY, tokens=(SLY, " b"), logprobs=(-0.1, -9.0))
    decision = Decision(question=SLY, retrieve=True, p_known=0.2, reason=SLY, draft=draft)
    (plan,) = plan_queries([decision])
    bare = decision.model_copy(update={"draft": Draft(text=SLY)})
    shown = [draft_html(decision), draft_html(bare), gauge(decision, 0.5), claims_html(plan)]
    failed = decision.model_copy(update={"error": Failure(type="X", message=SLY)})
    shown += [gauge(failed, 0.5), times_html({SLY: 1.0})]
    for html in shown:
        assert "<script>" not in html
        assert "<img" not in html
        assert "&lt;script&gt;" in html
    assert 'title="0.90"' in draft_html(decision)
    assert "Nothing to search" in claims_html(None)
    assert passages_html([]) == '<div class="rg"><small>None.</small></div>'
    assert "question alone" in draft_html(Decision(question="q", retrieve=True, p_known=0.2))


def begun(*, retrieve):
    """A decision on an answer of two tokens that was begun."""
    partial_answer = PartialAnswerInfo(tokens_held=2, tokens_dropped=2 if retrieve else 0, first_look=12.0)
    draft = Draft(text="Quim bo", tokens=("Quim", " bo"), logprobs=(-0.01, -3.0))
    return Decision(
        question="q",
        retrieve=retrieve,
        p_known=0.4,
        draft=draft,
        partial_answer=partial_answer,
        signals={"first_look": 0.7},
    )


def test_the_begun_answer_is_shown_with_a_legend_and_the_moment_of_the_decision():
    shown = draft_html(begun(retrieve=True))
    assert "First look, 12 ms: P(known) 0.70" in shown
    assert shown.index("Quim") < shown.index("judged after 2 tokens: stopped") < shown.index("probability of")
    likely, unlikely = (f"hsl({120 * p:.0f} " for p in (np.exp(-0.01), np.exp(-3.0)))
    assert likely in shown
    assert unlikely in shown
    assert 'title="0.25">25%</span>' in shown
    assert "the answer goes on" in draft_html(begun(retrieve=False))
    at_once = begun(retrieve=True).model_copy(update={"draft": None})
    assert "the question alone was clear" in draft_html(at_once)


def test_what_a_decision_saves_is_the_difference_of_both_ways():
    times = {"gate": 5.0, "search": 20.0, "answer without": 300.0, "answer with passages": 900.0}
    assert "alone took 620 ms less" in saved_html(begun(retrieve=False), times)
    assert "620 ms less than with passages; 2 begun tokens were dropped" in saved_html(
        begun(retrieve=True), times
    )
    assert "alone took 80 ms more" in saved_html(
        begun(retrieve=False), {**times, "answer with passages": 200.0}
    )
    assert saved_html(begun(retrieve=False), {"gate": 5.0, "answer without": 300.0}) == ""


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


def test_the_page_fills_up_as_the_pipeline_goes():
    class Nothing:
        def search(self, queries, k):
            return [[Hit(Passage("1", SLY, title="T"), 0.5, query)] for query in queries]

    class Streamer(ScriptedProxy):
        def stream(self, prompt, values, *, tokens):
            yield "a"
            yield "a b"

    playground = Playground(Pipeline(load_gate("constant:never"), Nothing(), Streamer(), k=1))
    shown = list(playground.ask(" who? ", 0.3))
    decision, route, *rest = shown[0]
    assert decision.question == "who?"
    assert "threshold 0.30" in route
    assert rest[1:5] == ["", "", "", ""]
    assert all(not isinstance(values[1], str) for values in shown[1:]), (
        "the gauge is the slider's from then on"
    )
    assert list(shown[-1][5:7]) == ["a b", "a b"]
    assert "&lt;script&gt;" in shown[-1][4]
    assert "answer with passages" in shown[-1][7]
    assert ["Answering alone took" in values[7] for values in shown].count(True) == 1, "said at the end"
    assert len(list(playground.ask("  ", 0.5))) == 1, "an empty question says so, and nothing is answered"


def test_the_command_opens_what_the_page_needs(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from rgate_integrations.cli.main import app

    seen = []
    monkeypatch.setattr(
        "rgate_integrations.playground.launch", lambda *a, **options: seen.append((a, options))
    )
    monkeypatch.setattr(
        "rgate_integrations.cli.playground.open_pipeline", lambda *a, **options: (a[0], options)
    )
    done = CliRunner().invoke(app, ["playground", "--gate", "ik", "--port", "7", "-k", "2", "--no-browser"])
    assert done.exit_code == 0, done.output
    ((opened, host, port), options) = seen[0]
    assert (opened[0], opened[1]["k"], host, port) == ("ik", 2, "127.0.0.1", 7)
    assert options == {"open_browser": False}


@pytest.mark.parametrize(
    ("listens", "sent_to", "served"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "::1", True),
        ("127.0.0.1", "evil.test", False),
        ("127.0.0.1", "192.168.1.5", False),
        ("127.0.0.1", "", False),
        ("192.168.1.5", "192.168.1.5", True),
        ("::", "192.168.1.5", True),
        ("::", "my-server", True),
        ("::", "fe80::1", True),
        ("::", "evil.test", False),
        ("::", "127.0.0.1.evil.test", False),
    ],
)
def test_the_page_is_served_under_the_machines_own_names(listens, sent_to, served):
    assert SentToThisMachine(None, listens).serves(sent_to) is served


def test_a_page_from_elsewhere_cannot_pretend_to_be_this_one():
    """DNS rebinding: its name is pointed at 127.0.0.1, and its requests still carry the name."""
    port, pipeline = free_port(), Pipeline(load_gate("constant:never"), None, ScriptedProxy())
    served = launch(pipeline, "127.0.0.1", port, open_browser=False, wait=False)
    try:
        for host, status in (
            (f"127.0.0.1:{port}", 200),
            (f"localhost:{port}", 200),
            (f"evil.test:{port}", 421),
            ("evil.test", 421),
            (f"127.0.0.1.evil.test:{port}", 421),
            ("[", 421),
        ):
            for path in ("/", "/config", "/gradio_api/info"):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
                connection.request("GET", path, headers={"Host": host})
                assert connection.getresponse().status == status, (host, path)
                connection.close()
    finally:
        served.close()


def uploaded(port, content, **headers):
    """Upload a file as a form does; returns the status and the body of the answer."""
    mark = "----mark"
    form = f'--{mark}\r\nContent-Disposition: form-data; name="files"; filename="a.jsonl"\r\n\r\n'.encode()
    form += content + f"\r\n--{mark}--\r\n".encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    headers = {"Content-Type": f"multipart/form-data; boundary={mark}"} | headers
    connection.request("POST", "/gradio_api/upload", body=form, headers=headers)
    response = connection.getresponse()
    try:
        return response.status, response.read()
    finally:
        connection.close()


def test_uploads_are_small_from_this_page_and_removed():
    port, pipeline = free_port(), Pipeline(load_gate("constant:never"), None, ScriptedProxy())
    line = b'{"text": "Bread is baked."}\n'
    served = launch(pipeline, "127.0.0.1", port, open_browser=False, wait=False)
    try:
        for origin in (
            "http://evil.test",
            "null",
            "http://127.0.0.1:1",
            f"http://127.0.0.1.evil.test:{port}",
        ):
            assert uploaded(port, line, Origin=origin)[0] == 421, origin
        assert uploaded(port, line, Origin=f"http://127.0.0.1:{port}")[0] == 200
        status, body = uploaded(port, line)
        assert status == 200
        (path,) = json.loads(body)
        assert uploaded(port, b" " * (MAX_UPLOAD + 1))[0] == 413
        assert Path(path).read_bytes() == line
    finally:
        served.close()
    for _ in range(PATIENCE * 10):  # the server's own thread ends when it ends
        if not Path(path).exists():
            break
        time.sleep(0.1)
    assert not Path(path).exists()


def test_an_upload_is_removed_when_it_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("{}")
    assert "line 1" in _read_upload(str(path))[1]
    assert not path.exists()
    assert _read_upload(None)[0] is None


@pytest.mark.model
def test_an_uploaded_corpus_is_searched(tmp_path, smollm2, minilm):
    lines = [{"text": "The capital of Zorblat is Quimbo.", "title": "Zorblat"}, {"text": "Bread is baked."}]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    index, note = read_corpus(str(tmp_path / "mine.jsonl"))
    assert note == "Searching 2 passages of yours."
    pipeline = Pipeline(load_gate(), None, smollm2, k=1, tokens=8)
    shown = list(Playground(pipeline).ask("What is the capital of Zorblat?", 0.5, index))
    assert len(shown) > 3
    assert isinstance(shown[0][0], Decision)
    assert "Quimbo" in shown[-1][4]
    assert shown[-1][5]
    assert shown[-1][6]


@pytest.fixture(params=["in this process", pytest.param("by the command", marks=pytest.mark.slow)])
def page(request, tmp_path, smollm2, minilm):
    """The address of a page on a small index, served in this process or by `rgate playground` in its own."""
    passages = [
        Passage("1", "The capital of Zorblat is Quimbo.", title="Zorblat"),
        Passage("2", "Bread is baked."),
    ]
    index = PassageIndex.build(passages)
    port = free_port()
    if request.param == "in this process":
        pipeline = Pipeline(AnswerFirstGate(smollm2), index, smollm2, tokens=16)
        served = launch(pipeline, "127.0.0.1", port, open_browser=False, wait=False)
        yield f"http://127.0.0.1:{port}"
        served.close()
        return
    folder = index.save(tmp_path / "index")
    command = [sys.executable, "-c", "from rgate_integrations.cli.main import main; main()", "playground"]
    command += ["--index", folder, "--llm", smollm2.name, "--port", str(port), "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not is_listening(port):
            assert process.poll() is None, "the playground ended"
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def is_listening(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


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
    wait.until(lambda b: value("rg-without"))
    assert "<b>Zorblat</b>" in text("rg-claims"), "the question is shown as text"
    assert "Quimbo" in text("rg-passages")
    begun = text("rg-draft")
    assert "First look" in begun
    assert "judged after" in begun or "the question alone was clear" in begun
    route = text("rg-gauge").splitlines()[0]

    # While answers come in, the threshold is moved; the keyboard is enough.
    slider = browser.find_element(By.CSS_SELECTOR, "#rg-threshold input[type=range]")
    slider.send_keys(Keys.HOME if route.startswith("retrieve") else Keys.END)
    wait.until(lambda b: text("rg-gauge").splitlines()[0] != route)
    wait.until(lambda b: "answer with passages" in text("rg-times") and value("rg-with"))
    assert text("rg-gauge").splitlines()[0] != route, "answers that come in later leave the threshold alone"

    BUILD.mkdir(parents=True, exist_ok=True)
    browser.save_screenshot(str(BUILD / "1280.png"))
    browser.set_window_size(375, 1400)
    fits = "return document.documentElement.scrollWidth <= window.innerWidth + 1"
    wait.until(lambda b: b.execute_script(fits))
    browser.save_screenshot(str(BUILD / "375.png"))
    assert requested_hosts(browser) == {page.removeprefix("http://")}, "nothing is fetched from elsewhere"


def requested_hosts(browser):
    hosts = set()
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] != "Network.requestWillBeSent":
            continue
        url = message["params"]["request"]["url"]
        if url.startswith("http"):
            hosts.add(url.split("/")[2])
    return hosts
