"""Models that gates read and LLMs that answer, local or on a server, and their downloads."""
