# %% [markdown]
# # Train a gate for your own LLM
#
# At the end you have recorded which questions an LLM answers rightly by itself, trained a probe on it, and
# compared it with the shipped gate on questions that neither has seen. The LLM is SmolLM2-135M here, so that
# everything runs offline in three minutes: `rgate download smollm2-135m-instruct`.

# %%
import json
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from rgate_integrations import load_gate
from rgate_integrations.evaluation.collect import collect
from rgate_integrations.evaluation.metrics import auc
from rgate_integrations.proxy.local import shared_proxy
from rgate_integrations.saved.probe import save_probe
from rgate_integrations.training.examples import read_examples
from rgate_integrations.training.options import TrainingOptions
from rgate_integrations.training.probe import train_probe

folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## 1. Questions with answers
#
# Capitals and chemical symbols: some everybody knows, some hardly anybody.

# %%
CAPITALS = """France Paris|Italy Rome|Japan Tokyo|Egypt Cairo|Spain Madrid|Germany Berlin|Greece Athens|Norway Oslo
Canada Ottawa|Kenya Nairobi|Peru Lima|Cuba Havana|Iraq Baghdad|Iran Tehran|China Beijing|Russia Moscow
India New Delhi|Austria Vienna|Poland Warsaw|Ireland Dublin|Portugal Lisbon|Sweden Stockholm
Finland Helsinki|Denmark Copenhagen|Hungary Budapest|Turkey Ankara|Thailand Bangkok|Vietnam Hanoi
Chile Santiago|Argentina Buenos Aires|Bhutan Thimphu|Burundi Gitega|Chad N'Djamena|Comoros Moroni
Eritrea Asmara|Gabon Libreville|Lesotho Maseru|Malawi Lilongwe|Nauru Yaren|Palau Ngerulmud|Samoa Apia
Suriname Paramaribo|Togo Lome|Tonga Nuku'alofa|Tuvalu Funafuti|Vanuatu Port Vila|Mauritania Nouakchott
Benin Porto-Novo|Belize Belmopan|Kiribati Tarawa|Laos Vientiane|Oman Muscat|Qatar Doha"""
SYMBOLS = """hydrogen H|helium He|lithium Li|carbon C|nitrogen N|oxygen O|sodium Na|magnesium Mg|aluminium Al
silicon Si|sulfur S|chlorine Cl|potassium K|calcium Ca|titanium Ti|iron Fe|cobalt Co|nickel Ni|copper Cu
zinc Zn|silver Ag|tin Sn|gold Au|mercury Hg|lead Pb|uranium U|plutonium Pu|ytterbium Yb|praseodymium Pr
protactinium Pa|rutherfordium Rf|dysprosium Dy|gadolinium Gd|hafnium Hf|holmium Ho|indium In|lutetium Lu
niobium Nb|osmium Os|rhenium Re|rhodium Rh|ruthenium Ru|samarium Sm|scandium Sc|tellurium Te|terbium Tb
thallium Tl|thulium Tm|yttrium Y|zirconium Zr"""


def pairs(text):
    return [tuple(p.split(" ", 1)) for p in text.replace("\n", "|").split("|")]


asked = [(f"What is the capital of {a}?", b) for a, b in pairs(CAPITALS)]
asked += [(f"What is the chemical symbol of {a}?", f"symbol {b}") for a, b in pairs(SYMBOLS)]
asked += [(f"{b} is the capital of which country?", a) for a, b in pairs(CAPITALS)]
asked = [asked[i] for i in np.random.default_rng(0).permutation(len(asked))]
questions = [
    {
        "id": str(i),
        "question": q,
        "gold_answers": [a, a.replace("symbol ", "is ")],
        "dataset": "facts",
    }
    for i, (q, a) in enumerate(asked)
]
print(len(questions), "questions, such as", questions[0]["question"])

# %% [markdown]
# ## 2. What does the LLM know?
#
# It answers each question without passages. Stopped and started again, this goes on where it was: here it is
# stopped after half of the questions.

# %%
llm, file = shared_proxy("smollm2-135m-instruct"), folder / "facts.jsonl"
collect(questions[: len(questions) // 2], llm, file, tokens=16)
collect(questions, llm, file, tokens=16, report=lambda done: print(done, end=" "))
records = [json.loads(line) for line in file.read_text().splitlines()]
print(f"\nright: {np.mean([r['closed_book_correct'] for r in records]):.2f}")

# %% [markdown]
# ## 3. A probe
#
# One pass over each question, one logistic regression a layer. `rgate train --data facts.jsonl --draft none --out
# my-gate` is the same on the command line; `--gate ik` fine-tunes the proxy with LoRA instead.

# %%
train, test = records[:110], records[110:]
(folder / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in train))
options = TrainingOptions(draft="none", folds=5, llm="smollm2-135m-instruct")
artifact = train_probe(read_examples([folder / "train.jsonl"]), llm, options)
save_probe(artifact, folder / "my-gate")
print({k: round(v, 3) for k, v in artifact.provenance["metrics"].items() if k != "auc"})

# %% [markdown]
# ## 4. On questions that it has not seen

# %%
known = np.array([r["closed_book_correct"] for r in test])
scores = {}
for name in (str(folder / "my-gate"), "default-question"):
    decisions = load_gate(name).decide_batch([r["question"] for r in test])
    scores[Path(name).name] = np.array([d.p_known for d in decisions])
for name, p in scores.items():
    print(f"{name}: AUC {auc(p, known):.3f}")

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True)
for axis, (name, p) in zip(axes, scores.items(), strict=True):
    axis.hist([p[known], p[~known]], bins=10, range=(0, 1), stacked=True, label=["right", "wrong"])
    axis.set(title=name, xlabel="P(known)")
axes[0].legend()
figure.tight_layout()

# %% [markdown]
# The shipped gate was trained for an 8B LLM, which knows more than this one. A hundred questions of two kinds are
# a toy: with real ones take five hundred or more, of the kind that your users ask.
#
# **Next:** `04_calibrate` gives the trained gate a threshold with a promise.
