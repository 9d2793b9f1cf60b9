# %% [markdown]
# # The gates of the papers, on recorded answers
#
# You ask seven gates about the same answers, see what each looks at and costs, and plot
# which of them tell right answers from wrong ones. The notebook runs offline: `rgate download
# multilingual-e5-small smollm2-135m-reader smollm2-135m-instruct`.

# %%
import matplotlib.pyplot as plt
import numpy as np

from rgate_integrations import Draft, Request, list_gates, load_gate
from rgate_integrations.models.local import shared_proxy
from rgate_integrations.prompts import ANSWER
from rgate_integrations.runtime.text import is_correct
from rgate_integrations.tuning.evaluation import auc

# %% [markdown]
# ## What there is

# %%
for info in list_gates():
    print(f"{info.name:20} {info.source:45} reads {info.evidence}")

# %% [markdown]
# ## Recorded answers
#
# The LLM is the small model itself. Its answers, with log-probabilities, are recorded once; every gate judges the
# same ones.

# %%
FACTS = """France Paris|Italy Rome|Japan Tokyo|Egypt Cairo|Spain Madrid|Germany Berlin|Greece Athens|Norway Oslo
Canada Ottawa|Kenya Nairobi|Peru Lima|Cuba Havana|Iraq Baghdad|China Beijing|Russia Moscow
Austria Vienna|Poland Warsaw|Ireland Dublin|Portugal Lisbon|Sweden Stockholm|Bhutan Thimphu
Burundi Gitega|Comoros Moroni|Eritrea Asmara|Nauru Yaren|Palau Ngerulmud|Samoa Apia|Suriname Paramaribo
Togo Lome|Tonga Nuku'alofa|Tuvalu Funafuti|Benin Porto-Novo|Belize Belmopan|Kiribati Tarawa|Oman Muscat
Qatar Doha|Gabon Libreville|Lesotho Maseru|Malawi Lilongwe|Laos Vientiane"""
pairs = [tuple(p.split(" ", 1)) for p in FACTS.replace("\n", "|").split("|")]
questions = [f"What is the capital of {country}?" for country, _ in pairs]
llm = shared_proxy("smollm2-135m-instruct")
drafts = llm.generate(ANSWER, [{"question": q} for q in questions], tokens=16)
drafts = [d.model_copy(update={"source": "recorded"}) for d in drafts]
known = np.array([is_correct(d.text, [city]) for d, (_, city) in zip(drafts, pairs, strict=True)])
print(f"{known.mean():.2f} of {len(known)} answers are right")

# %% [markdown]
# ## Seven gates, one batch each

# %%
names = (
    "ik",
    "slimplm",
    "adapt",
    "prompt",
    "self_eval",
    "token_probability",
    "default-answer",
)
gates = [load_gate(n, **({"source": "recorded"} if n in ("ik", "slimplm") else {})) for n in names]
requests = [Request(question, draft=draft) for question, draft in zip(questions, drafts, strict=True)]
decisions_by_gate = {name: gate.decide_batch(requests) for name, gate in zip(names, gates, strict=True)}
for name, decisions in decisions_by_gate.items():
    failed = [d.error.message for d in decisions if d.error]
    p, cost = np.array([d.p_known for d in decisions]), np.mean([d.cost.model_calls for d in decisions])
    print(f"{name:20} AUC {auc(p, known):.3f}  model calls {cost:.1f}  {failed[:1] or ''}")

# %%
figure, axes = plt.subplots(2, 4, figsize=(11, 4.5))
for axis, (name, decisions) in zip(axes.flat, decisions_by_gate.items(), strict=False):
    p = np.array([d.p_known for d in decisions])
    axis.hist([p[known], p[~known]], bins=10, range=(0, 1), stacked=True, label=["right", "wrong"])
    axis.set_title(f"{name}: {auc(p, known):.2f}", fontsize=10)
axes[0, 0].legend(fontsize=8)
axes[1, 3].axis("off")
figure.tight_layout()

# %% [markdown]
# Forty questions of one kind are few: the AUCs are uncertain by about ±0.18. `docs/benchmarks/gates.md` has the same
# for 1,200 questions of six sets, with an 8B LLM's answers. There the papers' gates without training are weak on this
# small proxy: the papers fine-tune models fifty times its size.
#
# A recorded answer can also come from somewhere else entirely:

# %%
gate = load_gate("token_probability")
draft = Draft(text="Paris.", tokens=("Paris", "."), logprobs=(-0.1, -0.02), source="recorded")
print(gate.decide(questions[0], draft=draft).reason)

# %% [markdown]
# **Next:** `05_tune` makes a gate for your LLM, `04_calibrate` sets its threshold.
