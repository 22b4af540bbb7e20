"""The edge: HTTP on one side, token ids on the other. Knows nothing of torch, models or the runtime."""
