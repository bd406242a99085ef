# syntax=docker/dockerfile:1
# Two images: `docker build --target api .` serves and holds no compiler and no torch;
# `docker build --target builder .` compiles. Neither has a secret in it, both run as user 10001.

ARG PYTHON=3.11.14-slim-bookworm

# The wheel, and the lists of what each image installs beside it.
FROM python:${PYTHON} AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY scripts/requirements.py scripts/
COPY aotcache aotcache
COPY api api
COPY migrations migrations
# In a checkout these two are links to folders beside the package; setuptools maps them itself.
RUN rm -f aotcache/api aotcache/migrations \
    && pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
    && python scripts/requirements.py api > /wheels/api.txt \
    && python scripts/requirements.py builder > /wheels/builder.txt \
    && cp constraints.txt /wheels/

FROM python:${PYTHON} AS base
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    AOTCACHE_HOME=/var/lib/aotcache \
    AOTCACHE_CONFIG_HOME=/etc/aotcache
RUN useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin aotcache \
    && install -d -o aotcache -g aotcache -m 0700 /var/lib/aotcache /etc/aotcache
WORKDIR /var/lib/aotcache

FROM base AS api
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    pip install -c /wheels/constraints.txt -r /wheels/api.txt \
    && pip install --no-deps /wheels/*.whl
USER aotcache
EXPOSE 8400
ENTRYPOINT ["aotcache"]
CMD ["serve", "--host", "0.0.0.0", "--no-builder"]

FROM base AS builder
# AOTInductor calls g++ on what it generates.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=from=wheel,source=/wheels,target=/wheels \
    pip install -c /wheels/constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu \
        -r /wheels/builder.txt \
    && pip install --no-deps /wheels/*.whl
USER aotcache
ENTRYPOINT ["aotcache"]
CMD ["builder", "--help"]
