"""minserve: a minimal server for Mixture-of-Experts language models that proves itself before it serves."""

__version__ = "0.1.0"
