"""Gates to be saved, for a proxy of four numbers a layer; and changes to what their folders hold."""

import json
from dataclasses import replace

import numpy as np

from rgate_integrations.gates.artifacts import ProbeArtifact, SavedGate, TunedArtifact
from rgate_integrations.gates.folder import save_adapter
from rgate_integrations.gates.heads_artifact import (
    AttentionHead,
    Detector,
    FactHeads,
    HeadsArtifact,
    Kind,
    KindHead,
)
from rgate_integrations.gates.papers.verdicts import IK_QUESTION
from rgate_integrations.runtime.segments import LAYOUT

LAYERS = ((1, "question", "mean"), (2, "question", "mean"))
WEIGHT = np.full((2, 4), 0.5, np.float32)
PROBE = ProbeArtifact(
    weight=WEIGHT,
    bias=-1.0,
    layers=LAYERS,
    base_model="scripted",
    llm="a test",
    threshold=0.4,
    provenance={"data": [], "metrics": {"auc": {"x": 0.7}, "auc_mean": 0.7, "auc_pooled": 0.7}},
)
TUNED = TunedArtifact(
    slope=0.8,
    bias=-1.0,
    weight=WEIGHT,
    head=np.zeros(0, np.float32),
    layers=LAYERS,
    base_model="scripted",
    llm="a test",
)
KINDS = (
    Kind("task", "always", "needs nothing"),
    Kind("fact", "if_known", "asks about a fact"),
    Kind("news", "never", "asks about something that changes with time"),
)
NUMBERS = np.eye(4, dtype=np.float32)
# Four numbers: the logits of three kinds, and that of knowing. A number is its positive part less its negative one.
SEGMENTS = KindHead(
    layers=LAYERS[:1],
    kinds=KINDS,
    hidden=np.pad(np.concatenate([NUMBERS, -NUMBERS]), [(0, 0), (0, LAYOUT)]),
    hidden_bias=np.zeros(8, np.float32),
    output=np.concatenate([NUMBERS[:3], -NUMBERS[:3]], axis=1),
)
# Each segment attends to all segments alike, and is judged as their mean.
TOGETHER = AttentionHead(
    **vars(SEGMENTS),
    attention=np.pad(np.eye(8, dtype=np.float32), [(16, 0), (0, 0)]),
    attention_bias=np.zeros(24, np.float32),
    distances=np.zeros((2, 3), np.float32),
    joint=np.eye(8, 16, k=8, dtype=np.float32),
    joint_bias=np.zeros(8, np.float32),
)
FACTS = FactHeads(
    base_model="scripted",
    layers=LAYERS[:1],
    known_weight=NUMBERS[3:],
    known_bias=0.0,
    ability_slope=0.5,
    default_ability=(0.0, 0.0),
    news=Detector(np.zeros((1, 4), np.float32), -1.0),
)
HEADS = HeadsArtifact(
    base_model="scripted",
    segments=SEGMENTS,
    in_context=SEGMENTS,
    together=replace(TOGETHER, distances=np.float32([[-99, 0, -99]] * 2)),  # each attends to itself alone
    first_facts=FACTS,
    facts=FACTS,
    reader_kinds=SEGMENTS,
    english=Detector(np.zeros((1, 4), np.float32), 1.0),
    romanised=Detector(np.zeros((1, 4), np.float32), -1.0),
    self_contained=Detector(np.zeros((1, 4), np.float32), 1.0),
    self_contained_turns=Detector(np.zeros((1, 4), np.float32), -1.0),
    own_matters=KindHead(
        layers=LAYERS[:1],
        kinds=(
            Kind("other", "if_known", "is another"),
            Kind("own_source", "never", "names a source"),
            Kind("news", "never", "corrects the head for segments"),
        ),
        hidden=np.zeros((1, 4 + LAYOUT), np.float32),
        hidden_bias=np.zeros(1, np.float32),
        output=np.zeros((3, 1), np.float32),
    ),
    about_quotation=Detector(np.zeros((1, 4), np.float32), -1.0),
    works_on_text=KindHead(
        layers=LAYERS[:1],
        kinds=(
            Kind("asks", "if_known", "wants an answer"),
            Kind("works", "always", "works on it", bias=-9.0),
        ),
        hidden=np.zeros((1, 4 + LAYOUT), np.float32),
        hidden_bias=np.zeros(1, np.float32),
        output=np.zeros((2, 1), np.float32),
    ),
    drafts=Detector(np.zeros((1, 4), np.float32), -1.0),
    between_pleasantries=Detector(np.zeros((1, 4), np.float32), -1.0),
)
ADAPTER = SavedGate(
    method="ik",
    base_model="scripted",
    prompts={IK_QUESTION.name: IK_QUESTION.hash},
    parameters={"tokens": 0},
)


def save_ik(folder):
    """Save an IK gate with an adapter whose weights file is invalid."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return save_adapter(ADAPTER, folder)


def change(folder, **changes):
    """Change what gate.json says; None takes a part out."""
    file = folder / "gate.json"
    content = json.loads(file.read_text()) | changes
    gone = [name for name, value in changes.items() if value is None]
    file.write_text(json.dumps({name: value for name, value in content.items() if name not in gone}))
