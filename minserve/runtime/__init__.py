"""When to run what: one engine process per rank."""
