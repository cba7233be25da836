# vLLM for AMD Instinct with this backend:   docker build -f docker/rocm.Dockerfile -t numa-swizzle-rocm .
# docker run --device /dev/kfd --device /dev/dri --group-add video --ipc host -p 8000:8000 numa-swizzle-rocm MODEL
ARG VLLM_IMAGE=vllm/vllm-openai-rocm:v0.33.0
FROM ${VLLM_IMAGE}

COPY pyproject.toml README.md LICENSE /opt/numa-swizzle/
COPY vllm_numa_backend /opt/numa-swizzle/vllm_numa_backend
COPY kernels /opt/numa-swizzle/kernels
# the image has torch, its own Triton and everything else: nothing of it is to be moved
RUN pip install --no-cache-dir --no-deps /opt/numa-swizzle \
    && python3 -c "import typer, rich, numpy, torch, triton, numa_attention.schedule"

ENV VLLM_ATTENTION_BACKEND=NUMA_SWIZZLE
ENTRYPOINT ["vllm", "serve"]
