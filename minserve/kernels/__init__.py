"""The tool wall: the only place that imports vendor kernel libraries or defines Triton kernels."""
