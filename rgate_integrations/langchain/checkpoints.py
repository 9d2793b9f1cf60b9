"""What LangGraph is told so that a checkpoint brings a `Decision` back as one.

A checkpoint names the class of each value, and LangGraph makes only those that it has been told of. Of any other it
makes none in its strict mode, and warns otherwise::

    serde = JsonPlusSerializer(allowed_msgpack_modules=CHECKPOINT_TYPES)
    graph.compile(checkpointer=InMemorySaver(serde=serde))
"""

from rgate_integrations.claims.format import Claim
from rgate_integrations.claims.plan import JudgedClaim, Query, QueryPlan
from rgate_integrations.decision import Cost, Decision, Draft, Failure, PartialAnswerInfo

CHECKPOINT_TYPES = tuple(
    (kind.__module__, kind.__name__)
    for kind in (Decision, Draft, Cost, Failure, PartialAnswerInfo, QueryPlan, Query, JudgedClaim, Claim)
)
"""Module and name of each class whose values a graph's state may hold, for ``allowed_msgpack_modules``."""
