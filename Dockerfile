# All parts of Trunkline in one image, for any user id. A container runs one part: that of TRUNKLINE_PART.
#
#   docker build -t trunkline .
#   docker compose up -d          all parts on one machine, see compose.yaml
ARG BASE=debian:trixie-slim

# The packages of the system: Python, Java, Mosquitto, tmux.
FROM $BASE AS system
COPY trunkline /opt/trunkline/
COPY connectors/programs/local_stack/java_programs.py /opt/trunkline/connectors/programs/local_stack/
COPY connectors/agent_sdk/trunkline_agent/__init__.py connectors/agent_sdk/trunkline_agent/errors.py \
    /opt/trunkline/connectors/agent_sdk/trunkline_agent/
RUN /opt/trunkline/trunkline set-up --system && rm -rf /var/lib/apt/lists/*

# The Python packages and the jars, by the lock files.
FROM system AS build
COPY . /opt/trunkline/
RUN /opt/trunkline/trunkline set-up && /opt/trunkline/.venv/bin/python -m compileall -q \
    /opt/trunkline/connectors /opt/trunkline/jobs /opt/trunkline/schemas

FROM system
COPY --from=build /opt/trunkline /opt/trunkline
# Whoever runs a container makes its folder below, which only that user may read.
RUN mkdir -m 1777 /data
VOLUME /data
ENV TRUNKLINE__DATA_DIR=/data/trunkline TRUNKLINE_PART=gateway
USER 10001:10001
EXPOSE 3000 3100 3200
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=10s --start-period=180s CMD ["/opt/trunkline/trunkline", "run", "--health"]
ENTRYPOINT ["/opt/trunkline/trunkline"]
CMD ["run"]
