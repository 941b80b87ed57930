#!/usr/bin/env bash
# Run a command with a Docker engine that has Compose and buildx: the one that runs here, else one of its own.
#
#     deploy/ci/docker.sh COMMAND...
#
# An engine of its own is for a machine (Debian, as root) on which none runs, maybe without an image registry: Debian's
# docker.io is installed and its dockerd started by hand, with Compose and buildx from a newer Debian, unpacked beside
# it; the public base images are stood in for by local ones of the same name, made of Debian packages. Afterwards
# dockerd is stopped by its pid.
#
# Where there can be no engine, COMMAND runs with RELAXD_NO_DOCKER saying why.
#
# RELAXD_DOCKER_FOLDER keeps what was fetched and built, for the next time (default: relaxd-docker in the folder for
# temporary files).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${RELAXD_DOCKER_FOLDER:-${TMPDIR:-/tmp}/relaxd-docker}
base_image=python:3.11-slim
redis_image=redis:8-alpine
compose_suite=trixie
children=()
trap 'stop_children' EXIT

say() { echo "docker.sh: $*" >&2; }

run_without() {
    say "no Docker engine: $1"
    RELAXD_NO_DOCKER=$1 "${@:2}"
    exit
}

stop_children() {
    for pid in "${children[@]}"; do
        if kill "$pid" 2>/dev/null; then wait "$pid" 2>/dev/null || true; fi
    done
}

mirror() { apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -v security | head -n 1; }

install_engine() {
    command -v dockerd >/dev/null && command -v mmdebstrap >/dev/null && command -v iptables >/dev/null && return
    say "installing docker.io, iptables and mmdebstrap"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends docker.io iptables mmdebstrap >"$folder/apt.log" 2>&1
}

unpack_plugins() {
    local plugins=$DOCKER_CONFIG/cli-plugins apt=$folder/apt
    [ -x "$plugins/docker-compose" ] && [ -x "$plugins/docker-buildx" ] && return
    say "fetching Compose and buildx from Debian $compose_suite"
    mkdir -p "$plugins" "$apt"/{lists/partial,cache/archives/partial,sources,unpacked}
    printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: %s\n' \
        "$(mirror)" "$compose_suite" /usr/share/keyrings/debian-archive-keyring.gpg >"$apt/sources/newer.sources"
    local options=(-qq -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$apt/sources"
        -o Dir::State::lists="$apt/lists" -o Dir::Cache="$apt/cache" -o APT::Sandbox::User=root)
    apt-get "${options[@]}" update
    (cd "$apt" && rm -f ./*.deb && apt-get "${options[@]}" download docker-compose docker-buildx &&
        for package in ./*.deb; do dpkg-deb -x "$package" unpacked; done)
    cp "$apt"/unpacked/usr/libexec/docker/cli-plugins/docker-{compose,buildx} "$plugins/"
}

start_engine() {
    export DOCKER_HOST=unix://$folder/docker.sock
    dockerd --data-root "$folder/data" --exec-root "$folder/exec" --pidfile "$folder/docker.pid" --host "$DOCKER_HOST" \
        >"$folder/dockerd.log" 2>&1 &
    children+=($!)
    for _ in $(seq 300); do
        docker version >/dev/null 2>&1 && return
        kill -0 "${children[-1]}" 2>/dev/null || break
        sleep 0.1
    done
    tail -n 5 "$folder/dockerd.log" >&2
    return 1
}

make_images() {
    if ! docker image inspect "$base_image" >/dev/null 2>&1; then
        say "making a stand-in for $base_image"
        local root=$folder/base.tar certificates
        [ -f "$root" ] || mmdebstrap --quiet --variant=minbase --include=python3.11,python3.11-venv,ca-certificates \
            --aptopt='APT::Install-Recommends "false"' \
            --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
            --dpkgopt='path-exclude=/usr/share/locale/*' \
            --customize-hook='chroot "$1" python3.11 -m venv /usr/local' \
            --customize-hook='rm -rf "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/*' \
            bookworm "$root.part" "$(mirror)" --format=tar
        [ -f "$root" ] || mv "$root.part" "$root"
        # This machine's certificates: the package index may be reached through a proxy that signs with its own.
        certificates=$(mktemp -d)
        mkdir -p "$certificates/etc/ssl/certs"
        cp -L "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" "$certificates/etc/ssl/certs/ca-certificates.crt"
        cp "$root" "$certificates/base.tar"
        tar --delete --file "$certificates/base.tar" ./etc/ssl/certs/ca-certificates.crt
        tar --directory "$certificates" --owner 0 --group 0 --append --file "$certificates/base.tar" \
            ./etc/ssl/certs/ca-certificates.crt
        docker import --change 'ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8' \
            --change 'ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt' \
            --change 'ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore' --change 'CMD ["python3"]' \
            "$certificates/base.tar" "$base_image" >/dev/null
        rm -r "$certificates"
    fi
    if ! docker image inspect "$redis_image" >/dev/null 2>&1; then
        say "making a stand-in for $redis_image"
        docker build --quiet --file "$here/redis.Dockerfile" --tag "$redis_image" "$here" >/dev/null
    fi
}

# pip of this machine may know a folder with a CPU build of torch, which the builds are then given as an index.
serve_torch() {
    [ -n "${TORCH_INDEX_URL:-}" ] && return
    local links wheel port=47821  # always the same one: it is in the cache's key of the layer with torch
    for links in ${PIP_FIND_LINKS:-} $(python3 -m pip config get global.find-links 2>/dev/null || true); do
        for wheel in "$links"/torch-*.whl; do
            [ -f "$wheel" ] || continue
            mkdir -p "$folder/index/torch"
            ln -sf "$wheel" "$folder/index/torch/"
        done
    done
    [ -d "$folder/index" ] || return 0
    python3 -m http.server --bind 127.0.0.1 --directory "$folder/index" "$port" >"$folder/index.log" 2>&1 &
    children+=($!)
    export TORCH_INDEX_URL=http://127.0.0.1:$port/ BUILD_NETWORK=host
}

[ $# -gt 0 ] || { say "usage: deploy/ci/docker.sh COMMAND..."; exit 2; }
if docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1; then
    exec "$@"
fi
[ "$(id -u)" = 0 ] || run_without "none answers, and only root can start one" "$@"
command -v apt-get >/dev/null || run_without "none answers, and one is arranged on Debian only" "$@"
mkdir -p "$folder"
export DOCKER_CONFIG=$folder/config
if DOCKER_HOST=unix://$folder/docker.sock docker compose ls >/dev/null 2>&1; then
    say "another call's engine is up: using it"
    export DOCKER_HOST=unix://$folder/docker.sock
    serve_torch
    "$@"
    exit
fi
install_engine || run_without "none answers, and docker.io cannot be installed (see $folder/apt.log)" "$@"
unpack_plugins || run_without "Compose and buildx cannot be fetched" "$@"
start_engine || run_without "dockerd does not start (see $folder/dockerd.log)" "$@"
make_images
serve_torch
say "an engine of its own is up (pid ${children[0]}, $folder)"
"$@"
