"""An engine whose routed kernel disposes its input while it is recorded; MINSERVE_TEST_FLAG=off also keeps the capture flag
that forbids it from the kernel. Started by a real `minserve launch` in place of `minserve.runtime`."""

from __future__ import annotations

import os

from gpu.disposing import disposing, without_dispose_flag

from minserve.kernels import stacks
from minserve.runtime import cuda_graph, engine

if __name__ == "__main__":
    build = stacks.build
    stacks.build = lambda *arguments, **options: disposing(build(*arguments, **options))
    if os.environ["MINSERVE_TEST_FLAG"] == "off":
        cuda_graph.capture_mode = without_dispose_flag  # type: ignore[attr-defined]
    engine.leave(engine.main())
