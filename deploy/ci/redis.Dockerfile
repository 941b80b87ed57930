# Stands in for the public Redis image where there is no image registry: Debian's Redis, with the user and the folder
# that the public one has.
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE}
RUN apt-get update && apt-get install -y --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/* \
    && install -d -o redis -g redis /data
VOLUME /data
WORKDIR /data
EXPOSE 6379
CMD ["redis-server", "--protected-mode", "no"]
