"""Answering, independent of frameworks: answer first, look first, query plans, and every router's flow."""
