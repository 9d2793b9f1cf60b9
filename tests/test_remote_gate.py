"""A gate on a server is a gate as any other; while the server is down, slow or wrong it retrieves."""

import asyncio
import os
import re
import traceback
from contextlib import contextmanager
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from rgate_integrations import AnswerFirst, Cost, Decision, Draft, Override, Request, load_gate
from rgate_integrations.engine.loading import answer_first_gates
from rgate_integrations.errors import ConfigurationError, ModelLoadError, ServerError, UnknownNameError
from rgate_integrations.gates import remote
from rgate_integrations.gates.ability import Ability, save_measured
from rgate_integrations.gates.artifacts import SavedGate
from rgate_integrations.gates.folder import save_gate
from rgate_integrations.serving.app import make_app
from rgate_integrations.serving.service import DecisionService
from tests.commands import rgate
from tests.http_servers import free_port, listening, serving_gate
from tests.scripted_proxy import ScriptedProxy
from tests.tuning_parts import write


def test_it_decides_one_and_many_in_threads_and_on_a_loop(words, url):
    gate = load_gate(url)
    draft = Draft(text="It is", tokens=("It", " is"), logprobs=(-0.1, -0.2), source="llm", model="m")
    assert not gate.decide("known", draft=draft, history=["user: Hello"]).retrieve
    assert not load_gate(f"{url}/v1").decide("known").retrieve  # as of an LLM's server
    words.asked.pop()
    (request,) = words.asked[-1]
    assert (request.question, request.draft, request.history) == ("known", draft, ("user: Hello",))
    questions = ["known", "who?"] * 50
    found = asyncio.run(gate.adecide_batch(questions))
    assert [(each.question, each.retrieve) for each in found] == [("known", False), ("who?", True)] * 50


def test_the_servers_threshold_holds_unless_the_caller_gives_one():
    with serving_gate(load_gate("token_probability", proxy=ScriptedProxy(), threshold=0.999)) as url:
        gate = load_gate(url)
        own, given = gate.decide("Who wrote Hamlet?"), gate.decide("Who wrote Hamlet?", threshold=0.0)
        follow_up = gate.decide("Is it?", history=["user: Hello"], threshold=0.0)
        loaded = load_gate(url, threshold=0.0).decide("Who wrote Hamlet?")
        calibrated = load_gate("calibrated", inner=url, threshold=0.0).decide("Who wrote Hamlet?")
    assert (own.retrieve, own.threshold) == (True, 0.999)
    assert [(each.retrieve, each.threshold) for each in (given, loaded)] == [(False, 0.0)] * 2
    assert (calibrated.threshold, calibrated.p_known) == (0.0, own.p_known), (
        "that of the map, not of its gate"
    )
    assert follow_up.retrieve  # the server's gate reads no turns


@pytest.mark.model
@pytest.mark.parametrize(
    ("llm", "name_source"),
    [
        ("", ""),
        ("gpt-4o", ""),
        ("gpt-4o", "the chain"),
        # Regression: the server refused the first two, so that every question retrieved, and did not know the third.
        ("gpt-4o (ours)", ""),
        ("/models/" + "a/" * 120 + "llama-3-8b", ""),
        ("hub/models--meta-llama--Llama-3.1-8B-Instruct/snapshots/0e9e39f249a1", "the chain"),
    ],
)
def test_it_equals_the_gate_in_process_for_questions_answers_turns_and_llms(llm, name_source):
    here, questions = (
        load_gate(timeout=600.0),
        ["Who wrote Hamlet?", "What does our contract say?", "Is rain wet?"],
    )
    turns = ["user: I am in Paris.", "assistant: Lovely."]
    own_judge, _ = answer_first_gates(here)
    with serving_gate(here, timeout=600.0) as url:
        remote = load_gate(url, request_seconds=600.0)
        assert answer_first_gates(remote) == (remote, remote)
        asked = [*questions[:2], Request(questions[2], history=turns)]
        partial_answers = [Request(question, draft="It was him.") for question in questions]
        for gate, requests in ((here, asked), (own_judge, partial_answers)):
            expected = gate.for_llm(llm, name_source).decide_batch(requests)
            found = remote.for_llm(llm, name_source).decide_batch(requests)
            for there, own in zip(found, expected, strict=True):
                assert there.model_copy(update={"cost": own.cost, "gate": own.gate}) == own


def test_rules_are_applied_before_the_server_is_asked(words, url):
    gate = load_gate(url, always=[re.compile("contract")])
    before = len(words.asked)
    assert gate.decide("known contract").retrieve
    assert len(words.asked) == before


# --- failures -----------------------------------------------------------------------------------------------------


@contextmanager
def answering(status, body, seconds=0):
    """Answer everything in one way; gives the URL and the paths that were asked for."""
    paths = []

    async def answer(request):
        paths.append(request.url.path)
        await asyncio.sleep(seconds)
        return Response(body, status)

    with listening(Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])) as url:
        yield url, paths


NO_DECISION_SERVER = "does not answer like a decision server"


@pytest.mark.parametrize(
    "limit",
    [
        {"request_seconds": 0.2},
        # Regression: with a timeout below ``request_seconds``, each call waited for that long again.
        {"timeout": 0.5},
    ],
    ids=str,
)
def test_a_server_that_hangs_is_not_sent_questions_until_it_is_ready(limit):
    with answering(200, b"", seconds=3600) as (url, paths):
        gate = load_gate(url, **limit)
        assert all(gate.decide("known").error for _ in range(4))
    assert paths[0] == "/v1/decide"
    assert set(paths[1:]) == {"/ready"}


def test_a_server_that_hangs_is_not_asked_for_each_batch_whether_it_is_ready(monkeypatch):
    """Regression: each batch waited for that answer, one after the other."""
    times = iter([0.0, 1.0, 1.5, 2.0, 3.0, 3.5])  # before and after an answer, at a look, and the same again
    monkeypatch.setattr(remote, "monotonic", times.__next__)
    with answering(200, b"", seconds=3600) as (url, paths):
        gate = load_gate(url, request_seconds=0.2)
        assert all(gate.decide("known").error for _ in range(5))
    assert paths == ["/v1/decide", "/ready", "/ready"]


def test_a_server_that_is_up_again_is_asked_again(words):
    port = free_port()
    gate = load_gate(f"http://127.0.0.1:{port}")
    for _ in range(3):
        assert gate.decide("known").error.type == "ServerError"
    with listening(make_app(DecisionService(words)), port):
        assert not gate.decide("known").retrieve


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        # Regression: the log had the JSON of the answer, and the hint for a full queue was to check the URL.
        (
            529,
            b'{"error": {"message": "The \\"queue\\" is full."}}',
            r'answered 529: The "queue" is full\..*--queue',
        ),
        (529, b'{"error": "full"}', 'answered 529: {"error": "full"}.*--queue'),
        (401, b"[7]", r"answered 401: \[7\].*RGATE_TOKEN"),
        (500, b"<b>bad gateway</b>", "answered 500: <b>bad gateway</b>.*log"),
        (302, b"", "answered 302"),
        (200, b"{}", NO_DECISION_SERVER),
        (200, b"<html>", NO_DECISION_SERVER),
        (200, b'{"decisions": []}', NO_DECISION_SERVER),
        (200, b'{"decisions": [{"question": "known", "retrieve": false, "p_known": 7}]}', NO_DECISION_SERVER),
        (
            200,
            b'{"decisions": [{"question": "q", "retrieve": false, "p_known": 1, "signals": {"known": NaN}}]}',
            NO_DECISION_SERVER,
        ),
        (200, b"x" * (17 << 20), "is larger than 16 MiB"),
    ],
)
def test_whatever_else_it_answers_retrieves(status, body, said):
    with answering(status, body) as (url, _):
        decision = load_gate(url).decide("known")
        assert (decision.retrieve, decision.error.type) == (True, "ServerError")
        with pytest.raises(ServerError, match=said):
            load_gate(url, on_error="raise").decide("known")


@pytest.mark.parametrize(
    ("retrieve", "p_known", "expected"), [(True, 0.9, True), (True, 0.1, True), (False, 0.9, False)]
)
def test_the_servers_decision_holds_also_where_it_has_another_reason_than_its_threshold(
    retrieve, p_known, expected
):
    cost = Cost(model_calls=2, milliseconds=1e9)
    rule = None if retrieve else Override(retrieve=False, reason="A rule.")
    decision = Decision(
        question="known", retrieve=retrieve, p_known=p_known, reason="A rule.", override=rule, cost=cost
    )
    body = f'{{"decisions": [{decision.model_dump_json()}]}}'.encode()
    with answering(200, body) as (url, _):
        found = load_gate(url).decide("known")
    assert (found.retrieve, found.p_known) == (expected, p_known)
    assert found.reason.endswith("A rule.")
    assert found.reason.count("A rule.") == 1
    assert found.cost.model_calls == 2
    # Regression: the cost had the server's milliseconds beside those of the call, which include them.
    assert 0 < found.cost.milliseconds < 1e9


def test_a_login_in_the_url_is_in_no_repr_and_in_no_dump_of_a_chain():
    dumps = pytest.importorskip("langchain_core.load").dumps
    from rgate_integrations.langchain import RetrievalGate

    url = "http://ann:p4ss@127.0.0.1:9"
    gate = load_gate(url)
    assert "p4ss" not in f"{gate!r} {RetrievalGate(url)!r} {dumps(RetrievalGate(url))} {gate.decide('a')!r}"
    assert gate.gate.url == url


REMOTE = "http://ann:p4ss@127.0.0.1:9"


@pytest.mark.parametrize(
    "make",
    [
        # Regression: pydantic quotes its input, so tracebacks of these errors had the token and the login.
        lambda: load_gate(REMOTE, token="s3cret"),  # noqa: S106
        lambda: load_gate("http://127.0.0.1:9", token="s3cret€"),  # noqa: S106
        lambda: load_gate("http://127.0.0.1:9", token=["s3cret"]),
        lambda: remote.RemoteGate(url=f"{REMOTE}/?a=b"),
        lambda: langchain_part("GatedRetriever", retriever=str.split, gate=f"{REMOTE}/?a=b"),
        lambda: AnswerFirst(question_gate=REMOTE),
    ],
)
def test_no_traceback_and_no_repr_has_a_token_or_login(make):
    try:
        shown = repr(make())
    except Exception as error:
        shown = "".join(traceback.format_exception(error))
    source = {line.strip() for line in Path(__file__).read_text().splitlines()}
    lines = [line for line in shown.splitlines() if line.strip() not in source]
    assert not re.search("p4ss|s3cret", "\n".join(lines))


def langchain_part(name, **options):
    langchain = pytest.importorskip("rgate_integrations.langchain")
    return getattr(langchain, name)(**options)


def test_the_token_is_sent_without_white_space_around_it_and_never_shown(words, monkeypatch):
    """A file that it is read from may end in a line feed, on either side."""
    with serving_gate(words, token=" s3cret\r\n") as url:  # noqa: S106
        refused = load_gate(url, token="wr0ng")  # noqa: S106
        decision = refused.decide("known")
        assert decision.error.type == "ServerError"
        monkeypatch.setenv("RGATE_TOKEN", "s3cret\n")
        assert not load_gate(url.replace("http", "HTTP")).decide("known").retrieve
    assert "wr0ng" not in f"{refused!r} {refused.gate.config()} {decision.model_dump_json()}"


@pytest.mark.parametrize(
    ("name", "options", "error", "said"),
    [
        # Regression: a port of more than 16 bits was an `ExceptionGroup` of every decision.
        ("http://127.0.0.1:65536", {}, ConfigurationError, "URL is invalid.*port may be at most 65535"),
        ("http://127.0.0.1:8377/?a=b", {}, ConfigurationError, "URL is invalid"),
        ("remote", {"url": "http://127.0.0.1:65536"}, ConfigurationError, "URL is invalid"),
        # Regression: with a token that no header can have each decision failed, and so retrieved.
        ("http://127.0.0.1:8377", {"token": "s€cret"}, ConfigurationError, "printable ASCII"),
        (
            "http://ann:p4ss@127.0.0.1:8377",
            {"token": "s3cret"},
            ConfigurationError,
            "Both an API key and a login",
        ),
        # Regression: the hint of ``"localhost:8377"`` listed the names of gates.
        ("localhost:8377", {}, ConfigurationError, "Hint: .*http://localhost"),
        ("127.0.0.1:8377/rgate", {}, ConfigurationError, "Hint: .*http://localhost"),
        ("ftp://localhost", {}, ConfigurationError, "Hint: .*http://localhost"),
        # Regression: the error said that the server's URL is invalid.
        ("popularty:500", {}, UnknownNameError, "'popularty'.*Did you mean popularity"),
    ],
)
def test_what_cannot_be_the_address_of_a_server_is_refused_where_it_is_given(name, options, error, said):
    with pytest.raises(error, match=said):
        load_gate(name, **options)


def test_an_ability_that_was_measured_here_is_not_taken_for_a_name_there(tmp_path, monkeypatch):
    """Regression: the server judged an unknown LLM, and skipped what the measured one does not know."""
    monkeypatch.chdir(save_measured(Ability("mine", -3.0, 0.1, "a test"), tmp_path / "measured"))
    for gate in (load_gate("http://127.0.0.1:9"), load_gate("http://127.0.0.1:9", llm_name="gpt-4o")):
        with pytest.raises(ConfigurationError, match=r"cannot read the measured ability in '\.\./measured'"):
            gate.for_llm("../measured")
    assert gate.for_llm("../measured", "the chain") is gate


def test_a_gate_on_a_server_is_not_calibrated(words, url, tmp_path):
    """Regression: the gate that came out could be saved, but not loaded."""
    data = write(
        tmp_path / "d.jsonl", *[{"question": "a?", "closed_book_correct": True, "rag_correct": True}] * 60
    )
    before = len(words.asked)
    error = rgate("calibrate", "--data", data, "--gate", url, "--out", tmp_path / "gate").exception
    assert (type(error), "asks a decision server" in error.message) == (ConfigurationError, True)
    assert (len(words.asked), os.listdir(tmp_path)) == (before, ["d.jsonl"])


def test_a_saved_gate_may_not_send_questions_to_a_server(tmp_path):
    inner = {"inner": {"gate": "remote", "url": "http://127.0.0.1:9"}}
    save_gate(SavedGate(method="calibrated", prompts={}, parameters=inner), tmp_path / "gate")
    with pytest.raises(ModelLoadError, match="would send questions to a server"):
        load_gate(str(tmp_path / "gate"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_connections_of_its_own(url):
    gate = load_gate(url)
    assert not gate.decide("known").retrieve
    child = os.fork()
    if child == 0:
        os._exit(gate.decide("known").retrieve)
    assert os.waitpid(child, 0)[1] == 0
    assert not gate.decide("known").retrieve
