"""The building blocks that the architectures share."""
