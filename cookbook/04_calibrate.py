# %% [markdown]
# # Calibrate a gate on your own data
#
# You end up with a gate whose threshold has a guarantee on your own questions, and plots that show what it does.
# The LLM is SmolLM2-135M here, so that everything runs offline in a minute:
# `rgate download smollm2-135m-reader smollm2-135m-instruct multilingual-e5-small`.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from rgate_integrations import load_gate
from rgate_integrations.index import Passage, PassageIndex
from rgate_integrations.models.local import shared_proxy
from rgate_integrations.tuning import Budget, MaxLoss, calibrate, collect, evaluate, read_paired

folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## 1. Questions with gold answers, and passages
#
# Capitals: the LLM knows some of them. The passages contain all.

# %%
CAPITALS = """France Paris|Italy Rome|Japan Tokyo|Egypt Cairo|Spain Madrid|Germany Berlin|Greece Athens|Norway Oslo
Canada Ottawa|Kenya Nairobi|Peru Lima|Cuba Havana|Iraq Baghdad|Iran Tehran|China Beijing|Russia Moscow|India New Delhi
Austria Vienna|Poland Warsaw|Ireland Dublin|Portugal Lisbon|Sweden Stockholm|Finland Helsinki|Denmark Copenhagen
Hungary Budapest|Turkey Ankara|Thailand Bangkok|Vietnam Hanoi|Chile Santiago|Argentina Buenos Aires|Bhutan Thimphu
Brunei Bandar Seri Begawan|Burundi Gitega|Chad N'Djamena|Comoros Moroni|Eritrea Asmara|Gabon Libreville
Lesotho Maseru|Malawi Lilongwe|Nauru Yaren|Palau Ngerulmud|Samoa Apia|Suriname Paramaribo|Togo Lome|Tonga Nuku'alofa
Tuvalu Funafuti|Vanuatu Port Vila|Djibouti Djibouti|Mauritania Nouakchott|Benin Porto-Novo|Belize Belmopan
Kiribati Tarawa"""
pairs = [tuple(p.split(" ", 1)) for p in CAPITALS.replace("\n", "|").split("|")]
questions = [
    {
        "id": str(i),
        "question": f"What is the capital of {country}?",
        "gold_answers": [city],
        "dataset": "capitals",
    }
    for i, (country, city) in enumerate(pairs)
]
index = PassageIndex.build(
    [Passage(str(i), f"The capital of {country} is {city}.") for i, (country, city) in enumerate(pairs)]
)
print(len(questions), "questions,", len(index), "passages")

# %% [markdown]
# ## 2. Both arms
#
# Like `rgate collect`, `collect` asks the LLM each question without and with retrieval. After an interruption it
# resumes.

# %%
llm = shared_proxy("smollm2-135m-instruct")
file = collect(questions, llm, folder / "paired.jsonl", index=index, k=1, tokens=16)
files = read_paired([file])
examples = files[0].examples
print("right without retrieval", round(float(np.mean([e.known for e in examples])), 3))
print("right with retrieval", round(float(np.mean([e.rag_correct for e in examples])), 3))

# %% [markdown]
# ## 3. A gate for this LLM
#
# This gate reads the token probabilities of the LLM's own draft, and needs no training. How good is it before
# calibration?

# %%
gate = load_gate("token_probability", tokens=12, statistic="mean")
result, judged = evaluate(gate, examples, name="token_probability")
for name in ("auc", "ece", "retrieval_rate", "containment_accuracy", "never", "always", "oracle"):
    print(f"{name:20} {result['pooled'][name]:.3f}")

# %% [markdown]
# ## 4. A threshold with a guarantee

# %%
budget = calibrate(gate, files, Budget(0.8, confidence=0.9))
loss = calibrate(gate, files, MaxLoss(0.05))
for calibration in (budget, loss):
    print(f"{calibration.choice.guarantee} Threshold {calibration.choice.threshold:.2f}.")

# %% [markdown]
# "No threshold can guarantee that" is a proper answer: with few questions little can be guaranteed.

# %%
after, judged_after = evaluate(budget.gate, examples, name="calibrated")
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
curve = np.array(after["pooled"]["curve"])
left.plot(curve[:, 0], curve[:, 1], label="gate")
left.plot([0, 1], [after["pooled"]["never"], after["pooled"]["always"]], "--", label="random")
left.scatter(
    after["pooled"]["retrieval_rate"], after["pooled"]["containment_accuracy"], zorder=3, label="threshold"
)
left.set(xlabel="retrieval rate", ylabel="accuracy")
left.legend()
known = judged_after.closed_book
right.hist([judged_after.p[known], judged_after.p[~known]], bins=12, stacked=True, label=["known", "unknown"])
right.set(xlabel="P(known), calibrated")
right.legend()
figure.tight_layout()

# %% [markdown]
# The same on the command line:
#
# ```
# rgate collect   --questions questions.jsonl --llm MODEL --index DIR --out paired.jsonl
# rgate calibrate --gate token_probability --data paired.jsonl --budget 0.8 --out my-gate
# rgate evaluate  --gate my-gate --data paired.jsonl --out result.json
# rgate report    result.json --html report.html
# ```
#
# **Next:** `rgate train` fits a probe to the same file: a gate that reads the proxy's hidden states.

# %%
for name in ("retrieval_rate", "containment_accuracy", "always"):
    print(f"{name:20} {after['pooled'][name]:.3f}")
