# vLLM on a CPU with this backend, for trying it out. PyTorch's CPU builds lie on an index of their own, which PyTorch's
# installation page names:   docker build -f docker/cpu.Dockerfile --build-arg PIP_EXTRA_INDEX_URL=INDEX -t numa-swizzle-cpu .
# docker run --ipc host -p 8000:8000 numa-swizzle-cpu /srv/smollm2-135m
ARG PYTHON_IMAGE=python:3.11-slim
FROM ${PYTHON_IMAGE}
ARG PIP_EXTRA_INDEX_URL

# Triton builds a small module when it is first imported; the others are for vLLM's CPU build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libnuma1 libgomp1 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/numa-swizzle
COPY . .
# its .venv; the step says what is missing where pip finds no CPU build of torch
RUN python tools/environment.py && .venv/bin/numa-swizzle checkpoint /srv/smollm2-135m

ENV PATH=/opt/numa-swizzle/.venv/bin:$PATH \
    VLLM_ATTENTION_BACKEND=NUMA_SWIZZLE \
    VLLM_CPU_KVCACHE_SPACE=1 \
    HF_HUB_OFFLINE=1
ENTRYPOINT ["vllm", "serve"]
