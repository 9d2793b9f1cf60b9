"""Shared foundations: flows for threads and asyncio, atomic files, records and locks."""
