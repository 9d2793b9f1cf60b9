# %% [markdown]
# # A gate for your own LLM
#
# You ask an LLM the questions of a log, without and with retrieval, and one command makes two
# gates from its answers. The LLM is SmolLM2-135M on a llama.cpp server, so that everything runs offline in a minute:
# `pip install xllamacpp` and `rgate download smollm2-135m-reader smollm2-135m-instruct multilingual-e5-small`.

# %%
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from IPython.display import HTML
from llama_server import gguf, serving

from rgate_integrations import Draft, load_gate

os.chdir(tempfile.mkdtemp())

# %% [markdown]
# ## 1. A log, and what can be searched
#
# Capitals, well-known and obscure ones. A line of a log is a question and, if you know them, its
# right answers. The passages come from your own search; here each is one sentence.

# %%
CAPITALS = """France Paris|Italy Rome|Japan Tokyo|Egypt Cairo|Spain Madrid|Germany Berlin|Greece Athens|Norway Oslo
Canada Ottawa|Kenya Nairobi|Peru Lima|Cuba Havana|China Beijing|Russia Moscow|Austria Vienna|Poland Warsaw
Ireland Dublin|Portugal Lisbon|Sweden Stockholm|Finland Helsinki|Bhutan Thimphu|Burundi Gitega|Chad N'Djamena
Comoros Moroni|Eritrea Asmara|Gabon Libreville|Lesotho Maseru|Malawi Lilongwe|Nauru Yaren|Palau Ngerulmud
Samoa Apia|Suriname Paramaribo|Togo Lome|Tonga Nuku'alofa|Tuvalu Funafuti|Vanuatu Port Vila
Mauritania Nouakchott|Benin Porto-Novo|Belize Belmopan|Kiribati Tarawa"""
capitals = [pair.split(" ", 1) for pair in CAPITALS.replace("\n", "|").split("|")]


def write(name, lines):
    Path(name).write_text("".join(json.dumps(line) + "\n" for line in lines))


write("log.jsonl", [{"question": f"What is the capital of {a}?", "gold_answers": [b]} for a, b in capitals])
write("corpus.jsonl", [{"id": a, "text": f"{b} is the capital of {a}."} for a, b in capitals])
print(len(capitals), "questions")


def rgate(*arguments):
    """Run the command and print its output."""
    command = [sys.executable, "-c", "from rgate_integrations.cli import main; main()", *map(str, arguments)]
    plain = {**os.environ, "TERM": "dumb"}
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=plain)
    print(process.stdout or process.stderr)


rgate("index", "build", "--corpus", "corpus.jsonl", "--out", "index")

# %% [markdown]
# ## 2. One command
#
# `rgate tune` asks the LLM each question twice and keeps every answer, so an interrupted run resumes. With
# `--yes` it does not ask for confirmation. Here the guarantee is a retrieval rate; one on accuracy
# (`--max-loss 0.02`, the default) takes a few hundred questions.

# %%
with serving(gguf("smollm2-135m-instruct"), slots=2, threads=1) as url:
    rgate(
        *("tune", "--questions", "log.jsonl", "--llm", f"{url}/v1", "--model", "smollm2"),
        *("--index", "index", "-k", 2, "--answer-tokens", 24, "--concurrency", 2),
        *("--budget", 0.75),
        *("--out", "my-gate", "--yes"),
    )

# %% [markdown]
# Forty questions are too few, and the command says so. Trust the held-out AUC, not the
# retrieval rate alone. A passage is one sentence here, so the LLM reads it at almost no cost, and a partial answer
# that is dropped may cost more than skipped passages save. With passages of hundreds of tokens, skipping saves more.

# %% [markdown]
# ## 3. Use it
#
# One gate reads the question alone. The other also reads how sure the LLM is of the first tokens of its answer;
# `09_answer_first` shows the chain around it.

# %%
gate = load_gate("my-gate")
for decision in gate.decide_batch(["What is the capital of Hungary?", "What is the capital of Kyrgyzstan?"]):
    print(f"{decision.question} retrieve: {decision.retrieve}. {decision.reason}")

# %%
first = load_gate("my-gate/answer-first")
question = "What is the capital of Hungary?"
sure = Draft(text="Budapest", tokens=("Bud", "apest"), logprobs=(-0.05, -0.01))
unsure = Draft(text="Debrecen", tokens=("Deb", "recen"), logprobs=(-2.5, -1.2))
for draft in (sure, unsure):
    decision = first.decide(question, draft=draft)
    print(f"{draft.text}: P(known) {decision.p_known:.2f}, retrieve: {decision.retrieve}")

# %% [markdown]
# ## 4. The report
#
# `my-gate/report.html` needs no network: accuracy against retrieval rate, the guarantee, and the worst decisions.

# %%
report = Path("my-gate/report.html").read_text()
print(f"{len(report):,} characters, and nothing is fetched from elsewhere:", "https:" not in report)
HTML(f"<pre>{Path('my-gate/README.md').read_text()}</pre>")

# %% [markdown]
# **Next:** take five hundred questions or more, of the kind that your users ask. `rgate tune --update` adds those of
# another log; `04_calibrate` gives any gate another threshold with a guarantee.
