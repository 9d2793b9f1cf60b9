# %% [markdown]
# # Served models, GPUs, Ray
#
# You ask a gate from many callers at once, give it a deadline, point it at a model server, and
# gate files on several workers. The notebook runs offline on a CPU: `rgate download multilingual-e5-small
# smollm2-135m-reader smollm2-135m-instruct`, and `pip install "rgate-integrations[ray,openai]"`.

# %%
import asyncio
import json
import logging
import tempfile
import time
from pathlib import Path

import ray
import torch

from rgate_integrations import load_gate
from rgate_integrations.models.remote import RemoteModel
from rgate_integrations.serving.ray import gate_dataset

logging.getLogger("ray").setLevel("ERROR")

# %% [markdown]
# ## Concurrent callers share batches

# %%
gate = load_gate()
questions = [f"What is the capital of country number {i}?" for i in range(32)]
gate.decide("Is this a question?")


async def at_once():
    return await asyncio.gather(*(gate.adecide(q) for q in questions))


start = time.perf_counter()
one_by_one = [gate.decide(q) for q in questions]
middle = time.perf_counter()
together = await at_once()
print(f"together in {(time.perf_counter() - middle) / (middle - start):.0%} of the time of one by one")
print(max(abs(a.p_known - b.p_known) for a, b in zip(one_by_one, together, strict=True)) < 1e-3)

# %% [markdown]
# ## A deadline

# %%
hurried = load_gate(timeout=0.2)
decisions = hurried.decide_batch([f"What is {i} times {i}?" for i in range(200)])
late = [d for d in decisions if d.error]
print(
    f"{len(late)} of {len(decisions)} had no decision in time, and retrieve: {late[0].error.message if late else ''}"
)

# %% [markdown]
# ## A model on a server
#
# The gate can ask a model on vLLM, SGLang or llama.cpp. No server runs here, so you see what happens then: the gate
# retrieves, and says why.

# %%
proxy = RemoteModel("http://127.0.0.1:9/v1", "Qwen/Qwen3-4B", retries=0)
decision = load_gate("ik", proxy=proxy).decide("Who wrote Hamlet?")
print(decision.retrieve, "-", decision.error.message)

# %% [markdown]
# With vLLM: `vllm serve Qwen/Qwen3-4B --enable-lora --lora-modules my-gate=FOLDER`, then
# `load_gate("ik", proxy=RemoteModel("http://localhost:8000/v1", "Qwen/Qwen3-4B"), adapter="my-gate")`.

# %% [markdown]
# ## A GPU
#
# There is nothing to set: with CUDA a local model is loaded in bfloat16. GPUs have not been measured.

# %%
print("CUDA" if torch.cuda.is_available() else "no CUDA here: float32 on the CPU")

# %% [markdown]
# ## Ray
#
# Ray Data reads and writes files of questions, and distributes the rows over workers. Each worker has its own gate.

# %%
folder = Path(tempfile.mkdtemp())
for n in range(3):
    rows = [json.dumps({"question": f"What is {n} plus {i}?"}) for i in range(4)]
    (folder / f"part-{n}.jsonl").write_text("\n".join(rows) + "\n")
# Each worker takes a CPU, and so does reading.
ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
questions = ray.data.read_json(sorted(map(str, folder.glob("part-*.jsonl"))))
gate_dataset(questions, "constant:always", concurrency=2).write_json(str(folder / "out"))
written = "".join(path.read_text() for path in (folder / "out").glob("*.json")).splitlines()
print(len(written), "decisions; the first retrieves:", json.loads(written[0])["retrieve"])
ray.shutdown()

# %% [markdown]
# **Next:** `docs/guides/scale.md` has the arithmetic for 10⁸ questions.
