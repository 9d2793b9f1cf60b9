"""Gates for many clients: the decision server, the gateway in front of an LLM, MCP, and Ray.

`server` checks clients and limits the size and duration of requests; `app` has the routes; `service` decides for all
clients with one gate. Requests to any other route go to `gateway`, which finds the question (`llm_requests`),
decides, searches (`search_limits`), and forwards the request to the LLM's server (`upstream`). `wire` has the
formats. MCP (`agents`) runs behind the same `server`; `ray` applies a gate to a Ray data set.
"""
