"""Gates at scale: over Ray Data and shards of files."""
