"""Local and remote models: proxies for gates, answering LLMs, and downloads."""
