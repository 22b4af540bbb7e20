# The server as an image. With GPUs (driver 580 or newer):
#   docker build -t minserve .
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 -p 8000:8000 -v models:/models minserve launch /models/NAME
# On a CPU, with the embedded model:
#   docker build --build-arg VARIANT=cpu -t minserve:cpu . && docker run --rm -p 8000:8000 minserve:cpu
#
# PINS=proven is the set of kernel libraries that was run together; PINS=newest was read, but not proven on a GPU yet.
# PIP_OPTIONS goes to every pip, for an index of your own. Any base with CPython 3.12 and apt will do (DeepEP's wheels ask for 3.12).
ARG BASE_IMAGE=python:3.12-slim-bookworm

FROM ${BASE_IMAGE} AS build
ARG VARIANT=gpu
ARG PINS=proven
ARG CPU_TORCH=torch==2.13.0
ARG PIP_OPTIONS=
# Architectures whose FlashInfer modules are compiled here, ahead of every start: minutes each.
ARG FLASHINFER_ARCHS=9.0a
ENV PATH=/opt/minserve/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 FLASHINFER_WORKSPACE_BASE=/tmp/flashinfer
RUN if [ "$VARIANT" = gpu ]; then apt-get update && apt-get install -y --no-install-recommends g++; fi \
    && python3 -m venv /opt/minserve
# The compiler for kernels comes as wheels, a tenth of a CUDA devel image. They lack names that linkers look for, and the driver's
# library, which comes with the GPU: an empty one of its name is enough to link against.
RUN case "$VARIANT-$PINS" in \
        cpu-*) pip install ${PIP_OPTIONS} "${CPU_TORCH}" ;; \
        gpu-proven) pip install ${PIP_OPTIONS} torch==2.11.0 ninja \
            'nvidia-cuda-nvcc==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-cccl==13.0.*' ;; \
        gpu-newest) pip install ${PIP_OPTIONS} torch==2.14.1 ninja sgl-deep-ep==0.1.2.post1 sgl-deep-gemm==0.2.5 flashinfer-python==0.7.4 \
            'nvidia-cuda-nvcc==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-cccl==13.0.*' ;; \
        *) echo "VARIANT is gpu or cpu, PINS is proven or newest" >&2; exit 2 ;; \
    esac \
    && if [ "$VARIANT" = gpu ]; then \
        toolkit=$(python3 -c 'import nvidia.cu13; print(list(nvidia.cu13.__path__)[0])') \
        && ln -s "$toolkit" /opt/minserve/cuda && ln -s lib "$toolkit/lib64" && ln -s libcudart.so.13 "$toolkit/lib/libcudart.so" \
        && mkdir "$toolkit/lib/stubs" && gcc -shared -o "$toolkit/lib/stubs/libcuda.so" -Wl,-soname,libcuda.so.1 -x c /dev/null; \
    fi
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY minserve minserve
RUN case "$VARIANT-$PINS" in gpu-proven) extras='[hopper,deepep,hub,plot]' ;; *) extras='[hub,plot]' ;; esac \
    && pip install ${PIP_OPTIONS} ".${extras}"
ENV CUDA_HOME=/opt/minserve/cuda
RUN if [ "$VARIANT" = gpu ]; then minserve prebuild --arch "${FLASHINFER_ARCHS}"; fi

FROM ${BASE_IMAGE}
ARG VARIANT=gpu
# Triton compiles its launchers with a C compiler, FlashInfer and DeepGEMM what the cache lacks with nvcc: the host's half of both.
RUN if [ "$VARIANT" = gpu ]; then \
        apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*; \
    fi \
    && useradd --create-home --uid 1000 minserve && mkdir -p /models /var/cache/minserve && chown minserve /models /var/cache/minserve
COPY --from=build /opt/minserve /opt/minserve
# Kernels that `minserve prebuild MODEL` compiled on a GPU machine; the folder kernel-cache may be missing.
COPY --chown=1000 LICENSE kernel-cach[e] /var/cache/minserve/
COPY configs /opt/minserve/configs
ENV PATH=/opt/minserve/bin:$PATH CUDA_HOME=/opt/minserve/cuda PYTHONUNBUFFERED=1 \
    MINSERVE_HOST=0.0.0.0 MINSERVE_KERNEL_CACHE=/var/cache/minserve HF_HOME=/models/huggingface
# A toolchain that cannot compile would be found out by the first shape that is not in the cache: find out now.
RUN if [ "$VARIANT" = gpu ]; then \
        printf '#include <cuda_bf16.h>\n#include <cuda/std/type_traits>\n__global__ void k(__nv_bfloat16 *x) { *x = __float2bfloat16(1.f); }\n' > /tmp/probe.cu \
        && "$CUDA_HOME/bin/nvcc" -arch=sm_90a -std=c++17 -shared -Xcompiler -fPIC -o /tmp/probe.so /tmp/probe.cu \
            -L"$CUDA_HOME/lib64" -L"$CUDA_HOME/lib64/stubs" -lcudart -lcuda \
        && rm /tmp/probe.*; \
    fi
USER 1000
WORKDIR /home/minserve
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=3s --start-period=600s --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:' + os.environ.get('MINSERVE_PORT', '8000') + '/ready', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["minserve"]
CMD ["launch"]
