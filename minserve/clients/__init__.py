"""Programs that speak to a running server over HTTP. They know nothing of how it is built."""
