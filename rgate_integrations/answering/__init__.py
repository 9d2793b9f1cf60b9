"""Answering, independent of frameworks: answer first, look first, claims as queries, and the flow of every router."""
