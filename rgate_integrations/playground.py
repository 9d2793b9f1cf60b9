"""``rgate playground``: a page that shows what a gate does with a question. Needs ``gradio``."""

from __future__ import annotations

import ipaddress
import math
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rgate_integrations.answering.answer_first_gate import FIRST_LOOK
from rgate_integrations.decision import Decision, PartialAnswerInfo
from rgate_integrations.errors import RGateError, missing_dependency
from rgate_integrations.index import PassageIndex, read_passages

try:
    import gradio
    from starlette.middleware import Middleware
    from starlette.responses import PlainTextResponse
except ImportError as error:
    raise missing_dependency("gradio", "playground") from error

if TYPE_CHECKING:
    from rgate_integrations.answering.pipeline import Pipeline
    from rgate_integrations.claims import QueryPlan
    from rgate_integrations.index.retriever import Hit

EXAMPLES = [
    "What is the capital of France?",
    "Who wrote Romeo and Juliet?",
    "Which river flows through the city of Yakutsk?",
    "Where was the composer Aarno Maliniemi born?",
]
MAX_PASSAGES = 2_000
MAX_UPLOAD = 8 << 20
"""Bytes of an uploaded corpus."""
_KEPT = 60  # seconds for which an upload is kept that nobody reads; what is read is removed at once
_LEGEND = (1.0, 0.75, 0.5, 0.25, 0.0)
CSS = """
.rg{font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
.rg .gauge{position:relative;height:26px;border-radius:6px;margin:26px 0 24px;
 background:linear-gradient(90deg,#f59e0b,#e5e7eb 50%,#10b981)}
.rg .mark{position:absolute;top:-6px;height:38px;width:4px;margin-left:-2px;border-radius:2px;background:#111827}
.rg .mark.t{width:0;border-left:2px dashed #4f46e5;background:none}
.rg .tip{position:absolute;transform:translateX(-50%);font-size:12px;white-space:nowrap}
.rg .route{display:inline-block;font-weight:600;padding:2px 10px;border-radius:99px;color:#111827}
.rg .retrieve{background:#fde68a}.rg .direct{background:#a7f3d0}
.rg .tok{border-radius:3px;color:#111827;white-space:pre-wrap}
.rg .judged{border-left:3px solid #4f46e5;margin-left:3px;padding-left:6px;font-size:13px}
.rg li.dropped{opacity:.65}.rg small{opacity:.75}
"""


class Playground:
    """The page's behaviour, without the page.

    Args:
        pipeline: Gate, index and LLM.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    def ask(
        self, question: str, threshold: float, index: PassageIndex | None = None
    ) -> Iterator[tuple[Any, ...]]:
        """Decide, search and answer both ways; yields what the page shows, each time there is more of it.

        Args:
            question: The question.
            threshold: Where the slider stands.
            index: Searched in place of the pipeline's own.

        Yields:
            (decision, gauge, draft, claims, passages, answer without, answer with passages, times).
        """
        pipeline = self.pipeline if index is None else replace(self.pipeline, index=index)
        shown: tuple[Any, ...] = ()
        for arms in pipeline.stream_arms(question.strip()):
            shown = (
                arms.decision,
                # The gauge is drawn once: from then on it is the slider's, which may move while answers come in.
                gradio.skip() if shown else gauge(arms.decision, threshold),
                draft_html(arms.decision),
                "" if arms.plan is None else claims_html(arms.plan),
                "" if arms.plan is None else passages_html(arms.hits),
                "" if arms.closed_book is None else arms.closed_book.text,
                "" if arms.with_passages is None else arms.with_passages.text,
                times_html(arms.timings),
            )
            yield shown
        if saved := saved_html(arms.decision, arms.timings):  # known when both answers are there
            yield (*shown[:-1], shown[-1] + saved)


def gauge(decision: Decision | None, threshold: float) -> str:
    """Show P(known) against a threshold, and the route that follows."""
    if decision is None:
        return '<div class="rg">Ask a question.</div>'
    reason = escape(decision.reason)
    if decision.error is not None:
        return f'<div class="rg"><span class="route retrieve">retrieve</span> {reason}</div>'
    p_known = decision.p_known
    if p_known < threshold:
        route, words = "retrieve", "retrieve: it is probably unknown"
    else:
        route, words = "direct", "answer directly: it is probably known"
    return (
        f'<div class="rg"><span id="rg-route" class="route {route}">{words}</span>'
        f'<div class="gauge" role="img" aria-label="P(known) {p_known:.2f}, threshold {threshold:.2f}">'
        f'<span class="mark" style="left:{100 * p_known:.1f}%"></span>'
        f'<span class="tip" style="left:{_inside(p_known)}%;top:-27px">P(known) {p_known:.2f}</span>'
        f'<span class="mark t" style="left:{100 * min(threshold, 1):.1f}%"></span>'
        f'<span class="tip" style="left:{_inside(threshold)}%;top:33px">threshold {threshold:.2f}</span></div>'
        f"<small>{reason}</small></div>"
    )


def _inside(p: float) -> str:
    """A position in per cent at which a label stays inside the gauge."""
    return f"{100 * min(max(p, 0.12), 0.88):.1f}"


def draft_html(decision: Decision) -> str:
    """Show a draft, its tokens coloured by their probability, and where it was judged; all of it is text."""
    draft, partial_answer = decision.draft, decision.partial_answer
    look = _first_look(decision)
    if draft is None:
        why = "the question alone was judged" if partial_answer is None else "the question alone was clear"
        return f'<div class="rg">{look}<small>No draft: {why}.</small></div>'
    judged = "" if partial_answer is None else f' <span class="judged">{_fate(partial_answer)}</span>'
    if draft.logprobs is None:
        return f'<div class="rg">{look}{escape(draft.text)}{judged}</div>'
    spans = []
    for token, logprob in zip(draft.tokens, draft.logprobs, strict=False):
        spans.append(_token(token, math.exp(logprob)))
    legend = " ".join(_token(f"{p:.0%}", p) for p in _LEGEND)
    return f'<div class="rg">{look}{"".join(spans)}{judged}<br><small>probability of a token: {legend}</small></div>'


def _token(text: str, p: float) -> str:
    colour = f"hsl({120 * p:.0f} 75% {88 - 10 * (1 - p):.0f}%)"
    return f'<span class="tok" style="background:{colour}" title="{p:.2f}">{escape(text)}</span>'


def _first_look(decision: Decision) -> str:
    """Say what the question alone looked like, before an answer was begun."""
    p, partial_answer = decision.signals.get(FIRST_LOOK), decision.partial_answer
    if p is None or partial_answer is None:
        return ""
    took = f"{partial_answer.first_look:.0f} ms"
    return f"<small>First look, {took}: P(known) {p:.2f} by the question alone.</small><br>"


def _fate(partial_answer: PartialAnswerInfo) -> str:
    """Say what became of a begun answer."""
    if partial_answer.tokens_dropped:
        return f"judged after {partial_answer.tokens_held} tokens: stopped, and they are dropped"
    return f"judged after {partial_answer.tokens_held} tokens: the answer goes on"


def saved_html(decision: Decision, times: Mapping[str, float]) -> str:
    """Say what the decision saves against the other way; both ways were timed here."""
    if "answer with passages" not in times:
        return ""
    with_passages = sum(times.get(stage, 0.0) for stage in ("claims", "search", "answer with passages"))
    difference = with_passages - times["answer without"]
    compared = f"{abs(difference):.0f} ms {'less' if difference >= 0 else 'more'} than with passages"
    if not decision.retrieve:
        said = f"Answering alone took {compared}, and read none."
    else:
        dropped = 0 if decision.partial_answer is None else decision.partial_answer.tokens_dropped
        said = f"Nothing is saved: passages are needed. Answering alone took {compared}"
        said += f"; {dropped} begun tokens were dropped." if dropped else "."
    return f'<div class="rg">{said}</div>'


def claims_html(plan: QueryPlan | None) -> str:
    """Show the queries of a plan, and each claim with what became of it."""
    if plan is None or not plan.queries:
        return '<div class="rg"><small>Nothing to search.</small></div>'
    parts = ["<b>Queries</b><ol>"]
    for query in plan.queries:
        parts.append(f"<li>{escape(query.text)}</li>")
    parts.append("</ol>")
    if plan.claims:
        parts.append("<b>Claims</b><ul>")
        for judged in plan.claims:
            style, fate = ("kept", "searched") if judged.kept else ("dropped", "dropped")
            reason = f"<small>{fate}: {escape(judged.reason)}</small>"
            parts.append(f'<li class="{style}">{escape(judged.claim.text)} {reason}</li>')
        parts.append("</ul>")
    return f'<div class="rg">{"".join(parts)}</div>'


def passages_html(hits: Sequence[Hit]) -> str:
    """Show passages with their scores."""
    if not hits:
        return '<div class="rg"><small>None.</small></div>'
    shown = []
    for hit in hits:
        title, text = escape(hit.passage.title), escape(hit.passage.text[:400])
        shown.append(f"<li><b>{title}</b> <small>{hit.score:.2f}</small><br>{text}</li>")
    return f'<div class="rg"><ol>{"".join(shown)}</ol></div>'


def times_html(times: Mapping[str, float]) -> str:
    """Show how long each stage took."""
    stages = [f"{escape(stage)} {milliseconds:.0f} ms" for stage, milliseconds in times.items()]
    return f'<div class="rg">{" · ".join(stages)}</div>'


def read_corpus(path: str | None) -> tuple[PassageIndex | None, str]:
    """Index an uploaded JSONL corpus; returns the index, and a line that says what happened."""
    if path is None:
        return None, "Searching the corpus of the demo."
    try:
        passages = list(islice(read_passages(Path(path)), MAX_PASSAGES))
        return PassageIndex.build(passages), f"Searching {len(passages):,} passages of yours."
    except RGateError as error:
        return None, f"{error.message} {error.hint}"


def _read_upload(path: str | None) -> tuple[PassageIndex | None, str]:
    """Read an uploaded corpus, and remove it."""
    try:
        return read_corpus(path)
    finally:
        if path is not None:
            Path(path).unlink(missing_ok=True)


class SentToThisMachine:
    """Refuses requests that were sent to a name that is not this machine's, or by a page from elsewhere.

    A page from elsewhere can point its own name at this machine (DNS rebinding); to the browser the two are one then.
    What it cannot do is to send its requests under another name than its own. It can also send a form or a file to
    this machine's own address: the browser then says where the page is from.

    Args:
        app: The page.
        host: Address that it listens on. If that is every address, whatever is no name of the internet is served:
            addresses, and names without a dot.
    """

    def __init__(self, app: Any, host: str) -> None:
        self._app = app
        self._names = {"localhost", "127.0.0.1", "::1", host.lower(), socket.gethostname().lower()}
        self._on_every_address = host in ("", "0.0.0.0", "::")  # noqa: S104  compared, not listened on

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request, or refuse it."""
        if scope["type"] not in ("http", "websocket") or self._accepts(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            text = "This page is served under the address that `rgate playground` printed only.\n"
            await PlainTextResponse(text, status_code=421)(scope, receive, send)

    def _accepts(self, scope: Any) -> bool:
        named = _header(scope, b"host")
        origin = _header(scope, b"origin")
        is_own = not origin or origin.partition("://")[2] == named
        return is_own and self.serves(_host_of(named))

    def serves(self, host: str) -> bool:
        """Return whether requests to this host are served; without port."""
        if host in self._names:
            return True
        return self._on_every_address and ("." not in host or _is_address(host))


def _header(scope: Any, name: bytes) -> str:
    value: bytes = dict(scope["headers"]).get(name, b"")
    return value.decode("latin-1")


def _host_of(named: str) -> str:
    """Return the host of a ``Host`` header, without its port; empty if it is not said or nonsense."""
    try:
        return urlsplit(f"//{named}").hostname or ""
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def build(pipeline: Pipeline) -> Any:
    """Make the page."""
    playground = Playground(pipeline)
    with gradio.Blocks(
        title="rgate playground", analytics_enabled=False, delete_cache=(_KEPT, _KEPT)
    ) as page:
        gradio.Markdown(
            "# Does the LLM know?\nA gate decides whether passages are needed. Move the threshold."
        )
        decision, index = gradio.State(), gradio.State()
        with gradio.Row():
            question = gradio.Textbox(label="Question", elem_id="rg-question", scale=4, autofocus=True)
            button = gradio.Button("Ask", variant="primary", elem_id="rg-ask", scale=1)
        gradio.Examples(EXAMPLES, question)
        threshold = gradio.Slider(
            minimum=0,
            maximum=1,
            value=getattr(pipeline.gate, "threshold", 0.5),  # a gate of the user's own may have none
            step=0.01,
            label="Threshold: retrieve below it",
            elem_id="rg-threshold",
        )
        route = gradio.HTML(gauge(None, 0.5), elem_id="rg-gauge")
        with gradio.Row():
            without = gradio.Textbox(label="Answer without passages", lines=3, elem_id="rg-without")
            with_passages = gradio.Textbox(label="Answer with passages", lines=3, elem_id="rg-with")
        times = gradio.HTML(elem_id="rg-times")
        with gradio.Accordion("What was begun, and where it was judged", open=True):
            draft = gradio.HTML(elem_id="rg-draft")
        with gradio.Row():
            with gradio.Accordion("Claims and queries", open=True):
                claims = gradio.HTML(elem_id="rg-claims")
            with gradio.Accordion("Passages", open=True):
                passages = gradio.HTML(elem_id="rg-passages")
        with gradio.Accordion(
            f"Your own passages (JSONL with text, title; at most {MAX_PASSAGES:,} and {MAX_UPLOAD >> 20} MiB)",
            open=False,
        ):
            upload = gradio.File(file_types=[".jsonl"], type="filepath", label="Corpus")
            note = gradio.Markdown()
        shown = [decision, route, draft, claims, passages, without, with_passages, times]
        for event in (button.click, question.submit):
            event(playground.ask, [question, threshold, index], shown, show_progress="minimal")
        threshold.change(gauge, [decision, threshold], route, show_progress="hidden")
        upload.change(_read_upload, upload, [index, note])
    return page


def launch(pipeline: Pipeline, host: str, port: int, *, open_browser: bool, wait: bool = True) -> Any:
    """Serve the page, under this machine's own names. No telemetry, no share link, nothing fetched from elsewhere.

    Args:
        pipeline: Gate, index and LLM.
        host: Address to listen on.
        port: Port.
        open_browser: Whether to open the page.
        wait: Whether to wait for Ctrl-C.

    Returns:
        The page; its ``close()`` ends the server.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    page = build(pipeline)
    page.queue().launch(
        server_name=host,
        server_port=port,
        share=False,
        max_file_size=MAX_UPLOAD,
        inbrowser=open_browser,
        css=CSS,
        theme=gradio.themes.Default(**fonts),
        footer_links=[],
        app_kwargs={"middleware": [Middleware(SentToThisMachine, host=host)]},
        quiet=True,
        prevent_thread_lock=not wait,
    )
    return page
