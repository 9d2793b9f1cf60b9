"""Gates at scale: a server for decisions and a gateway for chat completions (``rgate serve``), and Ray Data."""
