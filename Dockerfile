# Images of cai: `docker build --target cpu .`, or `--target cuda` for NVIDIA GPUs.
# The wheels are built in a stage of their own, so that neither sources nor tools are in what runs.

FROM python:3.11-slim-bookworm AS wheels
WORKDIR /source
COPY packages packages
RUN pip install --no-cache-dir build hatchling \
    && for package in packages/*; do python -m build --wheel --no-isolation --outdir /wheels "$package"; done

FROM python:3.11-slim-bookworm AS base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY LICENSE /usr/share/doc/cai/LICENSE
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1
RUN useradd --create-home cai && mkdir /runs && chown cai /runs
WORKDIR /runs
ENTRYPOINT []
CMD ["cai", "doctor"]

FROM base AS cpu
RUN pip install "torch>=2.11" --index-url https://download.pytorch.org/whl/cpu
COPY --from=wheels /wheels /wheels
RUN pip install --find-links /wheels "cai-apps[data,lora,server,tensorboard]"
USER cai

# The wheels of torch bring CUDA's libraries; the host brings the driver, through NVIDIA's container toolkit.
FROM base AS cuda
RUN pip install "torch>=2.11"
COPY --from=wheels /wheels /wheels
RUN pip install --find-links /wheels "cai-apps[data,lora,server,tensorboard]" "cai-kernels[cudnn]"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER cai
