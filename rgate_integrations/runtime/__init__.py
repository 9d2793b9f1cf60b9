"""What all rooms stand on: flows for threads and asyncio alike, files that are whole or absent, records, locks."""
