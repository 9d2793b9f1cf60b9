"""Local and remote models: the proxies of gates, the LLMs that answer, and their downloads."""
