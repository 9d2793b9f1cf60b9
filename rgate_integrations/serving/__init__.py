"""Gates for many clients: the decision server, the gateway in front of an LLM, MCP, and Ray.

`server` checks clients, and limits how large requests are and how long they may take to arrive; `app` has the
routes; `wire` has their formats; `service` decides for all clients with one gate. Requests to other routes go
to `gateway`, if there is one: it finds the question (`llm_requests`), decides, searches, and forwards the
request to the LLM's server (`upstream`). MCP (`agents`) runs behind the same `server`, or on standard input and
output; `ray` applies a gate to a Ray data set.
"""

import logging

logger = logging.getLogger("rgate_integrations.serving")
