# A CPU server. Build: docker build -t minserve .    Run: docker run --rm -p 8000:8000 minserve
# A checkpoint of yours: docker run --rm -p 8000:8000 -v /path/to/checkpoint:/model:ro minserve launch /model
ARG PYTHON_IMAGE=python:3.12-slim
FROM ${PYTHON_IMAGE}

ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" "${TORCH}"

WORKDIR /opt/minserve
COPY pyproject.toml README.md LICENSE ./
COPY minserve minserve
RUN pip install --no-cache-dir . && rm -rf /opt/minserve/*
COPY configs configs

RUN useradd --create-home --uid 1000 minserve
USER minserve
ENV MINSERVE_HOST=0.0.0.0 PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=3s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen('http://127.0.0.1:' + os.environ.get('MINSERVE_PORT', '8000') + '/ready', timeout=2)"]
ENTRYPOINT ["minserve"]
CMD ["launch"]
