"""Shared foundations: flows for threads and asyncio, atomic files, records, locks and text."""
