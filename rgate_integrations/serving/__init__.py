"""Gates for many clients: the decision server, the gateway before an LLM, MCP, and Ray.

A request goes this way: `server` says who may ask, and how large and slow a request may be; `app` has the routes;
`service` decides for all clients with one gate. What has no other route goes to `gateway`, which finds the question
(`llm_requests`), decides, searches (`search_limits`), and lets the LLM's server answer (`upstream`). `wire` has the
formats. MCP (`agents`) is served behind the same `server`, and Ray Serve behind the same checks (`ray`).
"""
